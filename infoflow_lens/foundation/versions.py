"""Versions of packages on which numbers depend, read without importing the packages."""

import platform
import re
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_RECORDED_PACKAGES = (
    "infoflow-lens",
    "transformer-lens",
    "transformers",
    "torch",
    "datasets",
    "numpy",
)


def find_version() -> str:
    """Find the version of this package; of a clone that is not installed, by pyproject.toml."""
    try:
        return version("infoflow-lens")
    except PackageNotFoundError:
        project = Path(__file__).parents[2] / "pyproject.toml"
        text = project.read_text(encoding="utf-8") if project.is_file() else ""
        found = re.search(r'^version = "(.+)"$', text, re.MULTILINE)
        return found[1] if found else "unknown"


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that numbers depend on."""
    return {"python": platform.python_version()} | {
        package: _look_up(package) for package in _RECORDED_PACKAGES
    }


def versions_identity() -> dict[str, str]:
    """Return the versions on which numbers depend, by their names in error messages."""
    return {
        f"versions ({name})": version
        for name, version in package_versions().items()
        if name not in ("python", "datasets")
    }


@lru_cache
def _look_up(package: str) -> str:
    """Find the version of a package, once: what has been imported does not change."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
