"""What pages carry in themselves: scripts, styles, and the policy that nothing else runs."""

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

# in the order in which they need each other; https://d3js.org, see assets/d3/LICENSE
_PICTURE = ("path", "shape", "format", "selection")
_CHARTS = (
    *("array", "color", "interpolate", "format", "time", "time-format", "scale"),
    *("path", "shape", "selection", "axis"),
)

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@cache
def asset(name: str) -> str:
    """The text of a file that pages carry."""
    path = files("infoflow_lens.report").joinpath("assets", name)
    return path.read_text(encoding="utf-8").replace("</", "<\\/")


@cache
def script(*names: str, charts: bool = False) -> str:
    """Our scripts with the parts of d3 that they need, in a scope of their own.

    A notebook may have another d3, or a module loader that would catch it: neither is touched.
    """
    modules = [asset(f"d3/d3-{part}.min.js") for part in (_CHARTS if charts else _PICTURE)]
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


def with_policy(page: str) -> str:
    """The page, in which nothing runs but the scripts and styles that it holds, and nothing is
    fetched; its first ``<meta charset>`` is followed by the policy."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    scripts, styles = (" ".join(found) or "'none'" for found in hashes.values())
    policy = (
        f"default-src 'none'; script-src {scripts}; "
        f"style-src {styles}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    charset = '<meta charset="utf-8">'
    meta = f'{charset}\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    return page.replace(charset, meta, 1)
