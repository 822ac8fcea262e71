"""The description on a package page; all else stands in pyproject.toml.

A package page shows README.md without the files beside it: of links to them the text stays, and
their pictures are left out.
"""

import re
from pathlib import Path

from setuptools import setup

README = re.sub(
    r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?!https?://|#)[^)\s]+\)",
    lambda link: "" if link["picture"] else link["text"],
    (Path(__file__).parent / "README.md").read_text("utf-8"),
)
setup(long_description=README, long_description_content_type="text/markdown")
