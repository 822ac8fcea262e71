"""The pages' templates."""

import jinja2


def templates() -> jinja2.Environment:
    """Return the pages' templates, in which text is escaped and nothing may be missing."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("infoflow_lens.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
