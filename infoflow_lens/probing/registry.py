"""The names of the parts of a probe run: those of this package, and those that others add."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from infoflow_lens.foundation import packages

GROUP = "infoflow_lens.probes"  # of entry points

# in the order of the report; imported when they are asked for
PARTS = {
    "labels": "heads.LabelsPart",
    "influence": "tokens.InfluencePart",
    "positions": "tokens.PositionsPart",
    "recovery": "tokens.RecoveryPart",
    "routes": "tokens.RoutesPart",
    "top_k": "heads.TopKPart",
}


GONE = {"mechanisms": "labels", "sufficiency": "labels"}  # with 0.4, and what has their place

registered: ContextVar[Mapping[str, Any]] = ContextVar("registered")  # for one run


@contextmanager
def register_parts(parts: Mapping[str, Any]) -> Iterator[None]:
    """Add parts by name, beside those of packages, for the length of a block."""
    token = registered.set(parts)
    try:
        yield
    finally:
        registered.reset(token)


def part_names() -> tuple[str, ...]:
    """Return the names of all parts.

    Raises:
        InfoFlowError: if two packages add the same name.
    """
    return (*PARTS, *packages.find_entry_points(GROUP, PARTS), *registered.get({}))


def paths_of_code(names: Collection[str] | None) -> dict[str, Path]:
    """Find the paths of the code of other packages' parts, by name, without importing it.

    Args:
        names: of parts; None for all.
    """
    points = packages.find_entry_points(GROUP, PARTS)
    return {
        name: packages.path_of_code(point)
        for name, point in points.items()
        if names is None or name in names
    }
