"""The parts of a probe run by name: those of this package, and those that others add."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import TYPE_CHECKING

from infoflow_lens.foundation import plugins
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.names import nearest

if TYPE_CHECKING:
    from infoflow_lens.probing.part import Part

GROUP = "infoflow_lens.probes"  # of entry points

# in the order of the report; imported when they are asked for
_OURS = {
    "mechanisms": "MechanismsPart",
    "sufficiency": "SufficiencyPart",
    "influence": "InfluencePart",
    "positions": "PositionsPart",
    "recovery": "RecoveryPart",
    "routes": "RoutesPart",
    "top_k": "TopKPart",
}


_registered: ContextVar[Mapping[str, "Part"]] = ContextVar("given")  # from Python, for one run


@contextmanager
def register_parts(parts: Mapping[str, "Part"]) -> Iterator[None]:
    """Add parts by name, beside those of packages, for the length of a block."""
    token = _registered.set(parts)
    try:
        yield
    finally:
        _registered.reset(token)


def part_names() -> tuple[str, ...]:
    """The names of all parts.

    Raises:
        InfoFlowError: if two packages add the same name.
    """
    return (*_OURS, *plugins.find_entry_points(GROUP, _OURS), *_registered.get({}))


def load_part(name: str) -> "Part":
    """The part of that name.

    Raises:
        InfoFlowError: for an unknown name, or an entry point that is no part.
    """
    from infoflow_lens.hooks.probe import Probe
    from infoflow_lens.probing.part import Part, ProbePart

    if name in _registered.get({}):
        return _registered.get({})[name]
    if name in _OURS:
        module = import_module(f"infoflow_lens.probing.parts.{name}")
        made: Part = getattr(module, _OURS[name])()
        return made
    others = plugins.find_entry_points(GROUP, _OURS)
    if name not in others:
        raise InfoFlowError(f"there is no probe {name!r}{nearest(name, part_names())}")
    kind = plugins.load_class(others[name], Part, Probe)
    try:
        part: Part = kind() if issubclass(kind, Part) else ProbePart(kind(), name)
    except Exception as error:
        raise InfoFlowError(
            f"{kind.__name__} of the entry point {name!r} cannot be made ({type(error).__name__}: "
            f"{error}): expected one without arguments; repair the package that adds it"
        ) from error
    return part
