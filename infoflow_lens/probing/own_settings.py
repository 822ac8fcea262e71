"""Settings of single probes of a run, written NAME.FIELD=VALUE, with the name of the result."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.names import nearest
from infoflow_lens.foundation.settings import plain

if TYPE_CHECKING:
    from infoflow_lens.hooks import Probe


class OwnSetting(NamedTuple):
    """A setting of one probe: the name of its result, the field, and the value."""

    name: str
    field: str
    value: Any

    @classmethod
    def read(cls, text: str) -> "OwnSetting":
        """That of a text such as ``recovery.ridge=gcv``; values are JSON, else plain text.

        Raises:
            InfoFlowError: for a text of another form.
        """
        place, equals, value = text.partition("=")
        name, dot, field = place.partition(".")
        if not (equals and dot and name and field):
            raise InfoFlowError(
                f"setting is {text!r}: expected NAME.FIELD=VALUE, such as recovery.ridge=gcv"
            )
        try:
            return cls(name, field, plain(json.loads(value)))
        except ValueError:
            return cls(name, field, value)


def with_own_settings(
    probes: "Mapping[str, Probe[Any]]", settings: Sequence[OwnSetting], options: Iterable[str]
) -> "dict[str, Probe[Any]]":
    """Probes by name, those that settings name made anew with them.

    Args:
        probes: as the run makes them.
        settings: some may name probes that are not among these.
        options: what all probes of the run share; no setting of a single one.

    Raises:
        InfoFlowError: for a field that a probe does not have or that is an option of the run, and
            for a value that the field does not allow.
    """
    made = dict(probes)
    for name, field, value in settings:
        if name not in made:
            continue
        probe: Any = made[name]  # a dataclass, as every probe is
        known = [item.name for item in dataclasses.fields(probe) if item.init]
        own = [each for each in known if each not in options]
        if field not in own:
            if field in known:
                option = "--" + field.replace("_", "-")
                raise InfoFlowError(
                    f"setting {name}.{field} is one of the whole run: expected {option}, which "
                    "holds for all probes and for what is predicted from them"
                )
            raise InfoFlowError(f"{name} has no setting {field!r}{nearest(field, own)}")
        try:
            made[name] = dataclasses.replace(probe, **{field: value})
        except InfoFlowError as error:
            raise InfoFlowError(f"{name}: {error}") from error
    return made


def check_named(settings: Sequence[OwnSetting], measured: Iterable[str]) -> None:
    """Refuse settings of probes that the run does not measure.

    Raises:
        InfoFlowError: with the names of those that it measures.
    """
    names = list(measured)
    for name, field, _ in settings:
        if name not in names:
            raise InfoFlowError(
                f"setting {name}.{field} is of a probe that is not measured{nearest(name, names)}"
            )
