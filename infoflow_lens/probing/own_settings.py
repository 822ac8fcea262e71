"""Settings of single probes of a run, written NAME.FIELD=VALUE, with the name of the result."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.naming import nearest
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


def apply_settings(
    probes: "Mapping[str, Probe[Any]]",
    settings: Sequence[OwnSetting],
    fixed: Mapping[str, Sequence[str]],
) -> "dict[str, Probe[Any]]":
    """Return probes by name, those that settings name made anew with them.

    Args:
        probes: as the run makes them.
        settings: some may name probes that are not among these.
        fixed: by the name of a probe, the fields that the rest of the run builds on.

    Raises:
        InfoFlowError: for a field that a probe does not have or that is fixed, and for values that
            the fields do not allow.
    """
    made = dict(probes)
    for name in dict.fromkeys(setting.name for setting in settings if setting.name in probes):
        probe: Any = probes[name]  # a dataclass, as every probe is
        own = {each.field: each.value for each in settings if each.name == name}
        # fields that are computed cannot be set
        known = [item.name for item in dataclasses.fields(probe) if item.init]
        for field in own:
            if field not in known:
                raise InfoFlowError(f"{name} has no setting {field!r}{nearest(field, known)}")
            if field in fixed.get(name, ()):
                raise InfoFlowError(
                    f"setting {name}.{field} is one that the comparison and the page of a run "
                    "build on: expected another; use the option of the whole run if there is one, "
                    f"or run_probes with a {type(probe).__name__}"
                )
        try:
            # all fields at once, as one alone may not fit the others of before
            made[name] = dataclasses.replace(probe, **own)
        except InfoFlowError as error:
            raise InfoFlowError(f"{name}: {error}") from error
    return made


def check_names(settings: Sequence[OwnSetting], measured: Iterable[str]) -> None:
    """Refuse settings of probes that the run does not measure.

    Raises:
        InfoFlowError: with the names of those that it measures.
    """
    names = list(measured)
    for name, field, _ in settings:
        if name not in names:
            raise InfoFlowError(
                f"setting {name}.{field} is of no probe of this run"
                f"{nearest(name, names) if names else ': its parts have no probes to set'}"
            )


def check_different(settings: Sequence[OwnSetting]) -> None:
    """Refuse two values of one field.

    Raises:
        InfoFlowError: with both.
    """
    known: dict[tuple[str, str], Any] = {}
    for name, field, value in settings:
        if (name, field) in known:
            raise InfoFlowError(
                f"setting {name}.{field} is given twice ({known[name, field]!r} and {value!r}): "
                "expected one value"
            )
        known[name, field] = value
