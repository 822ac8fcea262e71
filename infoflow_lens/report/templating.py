"""The pages' templates."""

import jinja2

from infoflow_lens.foundation.display import begin_sentence


def templates() -> jinja2.Environment:
    """Return the pages' templates, in which text is escaped and nothing may be missing."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("infoflow_lens.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["begin_sentence"] = begin_sentence
    return environment
