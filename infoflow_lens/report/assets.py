"""Scripts and styles that pages contain, and the policy that forbids all others."""

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

import jinja2

from infoflow_lens.foundation.display import begin_sentence

# in the order in which they need each other; https://d3js.org, see assets/d3/LICENSE
_PICTURE = ("path", "shape", "format", "selection")

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@cache
def asset(name: str) -> str:
    """Return the text of a script or style of this package, safe inside a script element."""
    path = files("infoflow_lens.report") / "assets" / name
    return path.read_text(encoding="utf-8").replace("</", "<\\/")


@cache
def script(*names: str) -> str:
    """Return our scripts with the parts of d3 that they need, in a scope of their own.

    So they do not touch another d3 or a module loader that a notebook may have. The function
    around them is left open for more code: ``mounting_script`` closes it.

    Args:
        names: of our files, in the order in which they need each other.
    """
    modules = [asset(f"d3/d3-{part}.min.js") for part in _PICTURE]
    own = [asset(name) for name in names]
    return "\n".join(
        [
            '(function () { "use strict"; const d3 = {};',
            "(function (exports, module, require, define) {",
            *modules,
            "})(d3, {}, () => d3, undefined);",
            *own,
        ]
    )


def add_policy(page: str, form_action: str = "'none'") -> str:
    """Add a content security policy to a page, after its first ``<meta charset>``.

    The policy allows the scripts and styles that the page contains, and no request to a network.

    Args:
        page: HTML.
        form_action: where its forms may send what is typed.
    """
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    scripts, styles = (" ".join(found) or "'none'" for found in hashes.values())
    policy = (
        f"default-src 'none'; script-src {scripts}; "
        f"style-src {styles}; img-src data:; "
        f"base-uri 'none'; form-action {form_action}"
    )
    charset = '<meta charset="utf-8">'
    meta = f'{charset}\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    return page.replace(charset, meta, 1)


@cache
def templates() -> jinja2.Environment:
    """Return the pages' templates, in which text is escaped and nothing may be missing."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("infoflow_lens.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["begin_sentence"] = begin_sentence
    return environment
