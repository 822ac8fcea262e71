"""What other packages add, through entry points."""

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from infoflow_lens.foundation.errors import InfoFlowError


def find_entry_points(group: str, taken: Iterable[str] = ()) -> dict[str, EntryPoint]:
    """Find the entry points of a group, by name, without importing what they name.

    Args:
        group: such as "infoflow_lens.probes".
        taken: the names that this package gives.

    Raises:
        InfoFlowError: if two packages add the same name, or one that is taken.
    """
    points: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        if point.name in taken or (point.name in points and points[point.name] != point):
            raise InfoFlowError(
                f"the entry point {point.name!r} of {group} ({point.value}) has a name that is "
                "taken: expected another name; rename it in the package that adds it"
            )
        points[point.name] = point
    return points


def path_of_code(point: EntryPoint) -> Path:
    """The file or folder of the package that an entry point names; one that is missing, if none."""
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
