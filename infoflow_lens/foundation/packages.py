"""Other packages: their versions, those behind extras, and what they add through entry points."""

import os
import platform
import re
import sys
from collections.abc import Iterable
from functools import lru_cache
from importlib import import_module
from importlib.metadata import (
    EntryPoint,
    EntryPoints,
    PackageNotFoundError,
    entry_points,
    version,
)
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from infoflow_lens.foundation.errors import InfoFlowError

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
    """Return the versions of Python and of the packages that numbers depend on."""
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


def import_optional(module: str, extra: str, purpose: str) -> Any:
    """Import a module of a package that is not in every installation.

    Args:
        module: its import name.
        extra: the extra in ``pyproject.toml`` that installs it.
        purpose: what needs it, as the subject of the message.

    Raises:
        InfoFlowError: if it cannot be imported, with the command that installs it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise InfoFlowError(
            f"{purpose} needs the package {module!r}, which cannot be imported ({error}): "
            f'install it with: pip install "infoflow-lens[{extra}]"'
        ) from error


def find_entry_points(group: str, taken: Iterable[str] = ()) -> dict[str, EntryPoint]:
    """Find the entry points of a group, by name, without importing what they name.

    Args:
        group: such as "infoflow_lens.probes".
        taken: the names that this package gives.

    Raises:
        InfoFlowError: if two packages add the same name, or one that is taken.
    """
    points: dict[str, EntryPoint] = {}
    # kept for as long as no package was installed, which may be at any time
    for point in _look_for_entry_points(group, tuple(map(_state_of, sys.path))):
        if point.name in taken or (point.name in points and points[point.name] != point):
            raise InfoFlowError(
                f"the entry point {point.name!r} of {group} ({point.value}) has a name that is "
                "taken: expected another name; rename it in the package that adds it"
            )
        points[point.name] = point
    return points


@lru_cache(maxsize=16)
def _look_for_entry_points(group: str, folders: tuple[tuple[str, int], ...]) -> EntryPoints:
    """Read what all installed packages add; folders: where they lie, and when that changed."""
    return entry_points(group=group)


def _state_of(folder: str) -> tuple[str, int]:
    try:
        return os.path.abspath(folder), os.stat(folder or ".").st_mtime_ns
    except OSError:
        return folder, -1


def path_of_code(point: EntryPoint) -> Path:
    """Find the file or folder of an entry point's package; a missing path if there is none."""
    spec = find_spec(point.module.partition(".")[0])
    folders = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(folders or ()), None) or (spec.origin if spec else None) or point.module)


def load_class(point: EntryPoint, *kinds: type) -> Any:
    """Import the class that an entry point names.

    Args:
        point: the entry point.
        kinds: the class must be a subclass of one of these.

    Raises:
        InfoFlowError: if the class cannot be imported, or the entry point names something else.
    """
    try:
        value = point.load()
    except Exception as error:
        raise InfoFlowError(
            f"the entry point {point.name!r} of {point.group} cannot be imported ({point.value}: "
            f"{type(error).__name__}: {error}): repair or uninstall the package that adds it"
        ) from error
    if not (isinstance(value, type) and issubclass(value, kinds)):
        raise InfoFlowError(
            f"the entry point {point.name!r} of {point.group} is {value!r}: expected a subclass of "
            f"{' or '.join(f'{kind.__module__}.{kind.__name__}' for kind in kinds)}"
        )
    return value
