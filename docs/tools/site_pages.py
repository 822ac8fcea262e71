"""What the site has beside the pages in docs/: README.md and its like, examples, notebooks, API.

MkDocs calls these functions (``hooks`` in mkdocs.yml). Nothing is written into docs/: pages are
made in memory, from files that stand elsewhere and from the public names.
"""

import ast
import importlib
import json
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import notebooks  # noqa: E402  (beside this file)

# files of the repository that are pages of the site
PAPERS = {
    "README.md": "index.md",
    "CHANGELOG.md": "development/changelog.md",
    "CONTRIBUTING.md": "development/contributing.md",
    "SECURITY.md": "development/security.md",
    "benchmarks/README.md": "development/benchmarks.md",
}

# pictures of a page in whose place the site has the page itself: the first of this notebook
STILL = r"docs/figures/flow(_page)?\.\w+"

# of a study's run, each preset; runs by earlier code are reached by links alone
RUN_TABLE = r"results/\w+(/(?!earlier/)\w+)?/table\.md"
# pages of results with an entry; what language_model/ has of each study is prose above its table
RESULTS = rf"(?!results/language_model/\w+/){RUN_TABLE}|results/\w+/(?!statement)\w+\.md"

# public names by the module that defines them; the first that fits
AREAS = {
    "Flow of one model": ("infoflow_lens.flow", "infoflow_lens.probing"),
    "Probes": ("infoflow_lens.hooks",),
    "Theory": ("infoflow_lens.theory",),
    "Agreement": ("infoflow_lens.agreement",),
    "Models": ("infoflow_lens.models", "infoflow_lens.training", "infoflow_lens.objectives"),
    "Tasks": ("infoflow_lens.tasks",),
    "Studies": ("infoflow_lens.studies",),
    "All else": ("infoflow_lens",),
}
_MODULES = "hooks theory tasks agreement ranking training models.named models.host named studies"
ROOMS = ("infoflow_lens", *(f"infoflow_lens.{module}" for module in _MODULES.split()))


def public_names() -> dict[str, str]:
    """Where each public name is defined: ``{"module.name": "the room that exports it"}``."""
    found: dict[str, str] = {}
    for room in ROOMS:
        module = importlib.import_module(room)
        for name in module.__all__:
            value = getattr(module, name)
            # aliases of types are of `typing`, and have no entry
            if callable(value) and value.__module__.startswith("infoflow_lens"):
                found.setdefault(f"{value.__module__}.{value.__qualname__}", room)
    return found


def reference() -> Iterator[tuple[str, str, str]]:
    """Title, path and text of each page of the API reference."""
    left = public_names()
    for title, prefixes in AREAS.items():
        own = {
            path: room
            for path, room in left.items()
            if any(path == prefix or path.startswith(f"{prefix}.") for prefix in prefixes)
        }
        left = {path: room for path, room in left.items() if path not in own}
        if not own:
            continue
        text = [f"# {title}"]
        for room in ROOMS:
            names = sorted(path for path in own if own[path] == room)
            if names:
                text += [f"## In `{room}`", *(f"::: {path}" for path in names)]
        yield title, f"reference/{title.lower().replace(' ', '-')}.md", "\n\n".join(text) + "\n"


def _example(path: Path) -> tuple[str, str]:
    """Title and page of an example: its own text, then its code."""
    source = path.read_text("utf-8")
    said = ast.get_docstring(ast.parse(source)) or ""
    title, _, more = said.partition("\n")
    title = title.rstrip(".")
    code = source[source.index('"""', source.index('"""') + 3) + 3 :].strip()
    run = f"```console\npython examples/{path.name}\n```"
    return title, f"# {title}\n\n{more.strip()}\n\n{run}\n\n```python\n{code}\n```\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and put them where the navigation has their names."""
    origins: dict[str, str] = {}
    places: dict[str, list[Any]] = {"examples": [], "notebooks": [], "reference": []}

    def add(uri: str, text: str, origin: str = "") -> None:
        files.append(File.generated(config, uri, content=text))
        if origin:
            origins[uri] = origin

    for origin, uri in PAPERS.items():
        if (ROOT / origin).exists():
            add(uri, (ROOT / origin).read_text("utf-8"), origin)
    for path in sorted((ROOT / "examples").glob("*.py")):
        title, text = _example(path)
        add(f"examples/{path.stem}.md", text, f"examples/{path.name}")
        places["examples"].append({path.stem.replace("_", " "): f"examples/{path.stem}.md"})
    for path in sorted((ROOT / "examples" / "notebooks").glob("*.ipynb")):
        title, text, pieces = notebooks.as_page(path, notebooks.live(path))
        pages = [name for name in pieces if name.endswith(".html")]
        if path.stem == notebooks.FIRST and pages:
            config.extra["live"] = f"notebooks/{pages[0]}"
        add(f"notebooks/{path.stem}.md", text, f"examples/notebooks/{path.name}")
        for name, content in pieces.items():
            add(f"notebooks/{name}", content)
        places["notebooks"].append({title: f"notebooks/{path.stem}.md"})
    for title, uri, text in reference():
        add(uri, text)
        places["reference"].append({title: uri})
    config.extra["origins"] = origins
    config.nav = list(filled(config.nav or [], places, files))
    return files


def filled(nav: Any, places: dict[str, list[Any]], files: Files) -> Iterator[Any]:
    """The navigation, with what stands for generated pages (``"<examples>"``) in its place."""
    for entry in nav:
        if isinstance(entry, str) and entry.strip("<>") in places:
            yield from places[entry.strip("<>")]
        elif isinstance(entry, str) and entry == "<results>":
            paths = (file.src_uri for file in files.documentation_pages())
            # README.md, index.md and table.md are named by their folder
            named = (
                (re.sub(r"(/(README|index|table))?\.md$", "", path), path)
                for path in paths
                if re.fullmatch(RESULTS, path)
            )
            for name, path in sorted(named):
                _, *names = name.split("/")
                yield {", ".join(names).replace("_", " "): path}
        elif isinstance(entry, dict):
            ((title, below),) = entry.items()
            if isinstance(below, list):
                inside = list(filled(below, places, files))
                if inside:
                    yield {title: inside}
            elif files.get_file_from_path(below) is not None:
                yield entry
        else:
            yield entry


def _in_site(path: str) -> str | None:
    """Where the site shows a file of the repository; None if it does not."""
    if path in PAPERS:
        return PAPERS[path]
    if (ROOT / path).is_dir():  # what stands in it is shown by its page, if it has one
        path = f"{path}/table.md"
    if path.startswith("docs/") and (ROOT / path).exists():
        return path.removeprefix("docs/")
    if match := re.fullmatch(r"examples/(\w+)\.py", path):
        return f"examples/{match[1]}.md"
    if match := re.fullmatch(r"examples/notebooks/([\w-]+)\.ipynb", path):
        return f"notebooks/{match[1]}.md"
    return None


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links between files of the repository become links between pages of the site.

    Of links to files that the site does not show, the text stays.
    """
    uri = page.file.src_uri
    origin = config.extra["origins"].get(uri, f"docs/{uri}")

    def moved(match: re.Match[str]) -> str:
        path, _, anchor = match["target"].partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        if not (ROOT / target).exists() or uri.startswith("reference/"):
            return match[0]
        if re.fullmatch(STILL, target) and "live" in config.extra:
            live = posixpath.relpath(config.extra["live"], posixpath.dirname(uri) or ".")
            return notebooks.frame(live)
        place = _in_site(target)
        if place is None:
            return match["text"]
        place = posixpath.relpath(place, posixpath.dirname(uri) or ".")
        anchor = f"#{anchor}" if anchor else ""
        return f"{match['picture']}[{match['text']}]({place}{anchor})"

    text = re.sub(
        r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>(?!https?://|#|mailto:)[^)\s]+)\)",
        moved,
        markdown,
    )
    if re.fullmatch(RUN_TABLE, uri):
        folder = ROOT / "docs" / posixpath.dirname(uri)
        if (folder / "figure.png").exists():
            text += "\n\n![The same as a figure](figure.png)\n"
        data = [name for name in ("results.csv", "results.csv.gz") if (folder / name).exists()]
        held = [f"[{name}]({name})" for name in (*data, "record.json")]
        text += f"\nAll numbers and how they were made: {', '.join(held)}.\n"
    return text


# what makes a browser ask for something when it opens a page; links ask for nothing until followed
ASKS = re.compile(
    r"<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=[\"']?((?:https?:)?//[^\"'\s>]+)"
    r"|<link\b(?=[^>]*\brel=[\"']?(?:stylesheet|icon|preload|preconnect|manifest))"
    r"[^>]*\bhref=[\"']?((?:https?:)?//[^\"'\s>]+)"
    r"|@import\s+[^;]*((?:https?:)?//[^\"')\s]+)"
    r"|url\([\"']?((?:https?:)?//[^\"')\s]+)"
)


def problems(site: Path) -> list[str]:
    """What a strict build does not see: requests to others, public names without an entry."""
    found = []
    ids: set[str] = set()
    for page in sorted([*site.rglob("*.html"), *site.rglob("*.css")]):
        text = page.read_text("utf-8")
        if page.parent.name == "reference":
            ids.update(re.findall(r'\bid="(infoflow_lens\.[\w.]+)"', text))
        for match in ASKS.finditer(text):
            asked = next(group for group in match.groups() if group)
            found.append(f"{page.relative_to(site)} asks for {asked}")
    missing = sorted(set(public_names()) - ids)
    return found + [f"the API reference lacks {name}" for name in missing]


# Browsers start no worker from a file, but one from memory: so search works on pages from disk.
SEARCH_WORKER = """if (location.protocol === "file:") {
  const source = URL.createObjectURL(new Blob([%s], {type: "text/javascript"}));
  window.Worker = class extends Worker { constructor() { super(source); } };
}
"""


def write_search_worker(site: Path) -> None:
    """Write what `extra.polyfills` of mkdocs.yml names: the theme's search, for pages from disk."""
    (worker,) = (site / "assets" / "javascripts" / "workers").glob("search.*.min.js")
    text = SEARCH_WORKER % json.dumps(worker.read_text("utf-8"))
    (site / "search" / "instead-of-iframe-worker.js").write_text(text, "utf-8")


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site that asks for a network, or leaves a public name out."""
    write_search_worker(Path(config.site_dir))
    found = problems(Path(config.site_dir))
    if found:
        raise PluginError("; ".join(found[:10]))
