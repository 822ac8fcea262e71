"""The description on a package page; all else stands in pyproject.toml.

A package page shows README.md alone, so its links to files of this repository must be whole.
"""

import re
from pathlib import Path

from setuptools import setup

FOLDER = Path(__file__).parent
HOME = re.search(r'^Homepage = "(.+)"$', (FOLDER / "pyproject.toml").read_text("utf-8"), re.M)[1]


def whole(link: re.Match) -> str:
    """A link in Markdown to a file of the repository, or a picture of it, as a whole address."""
    kind = "raw" if link["picture"] else "blob"
    return f"{link['picture']}[{link['text']}]({HOME}/{kind}/main/{link['path']})"


README = re.sub(
    r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?!https?://|#)(?P<path>[^)\s]+)\)",
    whole,
    (FOLDER / "README.md").read_text("utf-8"),
)
setup(long_description=README, long_description_content_type="text/markdown")
