"""The settings of a probe run; the options of `infoflow-lens probe` are made from them."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, cast

from annotated_types import Ge, MinLen

from infoflow_lens.foundation import packages
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.naming import find_model, find_named, nearest
from infoflow_lens.foundation.settings import (
    BothEnds,
    Count,
    Distinct,
    Index,
    Ranks,
    Remedy,
    Repeated,
    Seed,
    check_field,
    plain,
    settings,
)
from infoflow_lens.models.shipped import find_package_folder

if TYPE_CHECKING:
    from infoflow_lens.hooks import Probe


GROUP = "infoflow_lens.probes"  # of entry points

# in the order of the report; imported when they are asked for
PARTS = {
    "labels": "LabelsPart",
    "influence": "InfluencePart",
    "positions": "PositionsPart",
    "recovery": "RecoveryPart",
    "routes": "RoutesPart",
    "top_k": "TopKPart",
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


class OwnSetting(NamedTuple):
    """A setting of one probe: the name of its result, the field, and the value."""

    name: str
    field: str
    value: Any

    @classmethod
    def read(cls, text: str) -> "OwnSetting":
        """Read a text such as ``recovery.ridge=gcv``; values are JSON, else plain text.

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
        for field in own:
            _find_able(name, field, (type(probe),), fixed)
        try:
            # all fields at once, as one alone may not fit the others of before
            made[name] = dataclasses.replace(probe, **own)
        except InfoFlowError as error:
            raise InfoFlowError(f"{name}: {error}") from error
    return made


def check_settings(
    settings: Sequence[OwnSetting],
    kinds: "Mapping[str, Sequence[type[Probe[Any]]]]",
    fixed: Mapping[str, Sequence[str]],
) -> None:
    """Refuse what can be known of settings before probes are made.

    Args:
        settings: some may name other probes than these.
        kinds: the classes of which each probe may be, by its name.
        fixed: as for :func:`apply_settings`.

    Raises:
        InfoFlowError: as from :func:`apply_settings`.
    """
    for name, field, value in settings:
        if name not in kinds:
            continue
        able = _find_able(name, field, kinds[name], fixed)
        refused = []
        for kind in able:
            try:
                check_field(kind, field, value)
            except InfoFlowError as error:
                refused.append(error)
        if len(refused) == len(able):
            raise InfoFlowError(f"{name}: {refused[0]}") from refused[0]


def _find_able(
    name: str,
    field: str,
    kinds: "Sequence[type[Probe[Any]]]",
    fixed: Mapping[str, Sequence[str]],
) -> "list[type[Probe[Any]]]":
    """Find the classes that have a setting which may be changed.

    Raises:
        InfoFlowError: where no class has it, and for one that is fixed.
    """
    # fields that are computed cannot be set
    having = {
        kind: [item.name for item in dataclasses.fields(cast(Any, kind)) if item.init]
        for kind in kinds
    }
    able = [kind for kind, known in having.items() if field in known]
    if not able:
        known = [each for fields in having.values() for each in fields]
        raise InfoFlowError(f"{name} has no setting {field!r}{nearest(field, known)}")
    if field in fixed.get(name, ()):
        raise InfoFlowError(
            f"setting {name}.{field} cannot be changed for one probe, as the comparison and the "
            "page of a run rely on it: use the option of the whole run if there is one, or "
            f"run_probes with a {able[0].__name__}"
        )
    return able


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


InfluenceKind = Literal["auto", "exact", "estimate", "resample"]
Metric = Literal["nmse", "kl", "loss"]

# Options that other settings share
Model = Annotated[
    str,
    "A name: stdlib-2l, which comes with the package, gpt2 or its like, or owner/name[@revision] "
    "of the Hugging Face hub; a folder of a model or of a LoRA; a GGUF file; or a checkpoint of "
    "this package.",
]
DrawingSeed = Annotated[Seed, "Seed of all random draws."]
Device = Annotated[str, "Device of the model: cpu, cuda:0, ..."]
Dtype = Annotated[str | None, "Number format: float32 (default), bfloat16, float16 or float64."]
Backend = Annotated[
    Literal["auto", "hooked", "opened"],
    "How to load it: auto (as transformers does), hooked (TransformerLens 3) or opened.",
]


@settings
class ProbingConfig:
    """Settings of a probe run; what each is stands beside its type.

    Raises:
        InfoFlowError: for values that make no sense, naming them.
    """

    model: Model
    data: Annotated[
        str,
        "A file (txt, json, jsonl, csv, parquet, pt, npy, safetensors), a saved dataset, "
        "'repeated' (random tokens, repeated once), a task, or name[:config]:split on the hub.",
    ]
    probes: Annotated[
        Annotated[tuple[str, ...], MinLen(1), Distinct()] | None,
        Remedy("names such as ('positions',)"),
        "Names with commas, such as positions,recovery; default, all that the model can give.",
    ] = None
    column: Annotated[
        str | None,
        "Column of texts or ids, or two of pairs, as premise,answer; default, found by its name.",
    ] = None
    n: Annotated[Count | None, "Largest number of sequences."] = None
    max_length: Annotated[Count | None, "Cut sequences to this many tokens."] = None
    window: Annotated[
        Count | None,
        "Join all texts and cut them into sequences of this many tokens; cut ids to that length.",
    ] = None
    ranks: Annotated[Ranks, "Ranks of attended keys."] = (1, 2, 3, 4)
    without: Annotated[
        BothEnds,
        "Positions that are no keys and no candidates, such as 0 for BOS, or -1 for the last.",
    ] = ()
    influence: Annotated[
        InfluenceKind,
        "Exact Jacobians, an estimate of them, or resample ablation; auto: exact where cheap.",
    ] = "auto"
    n_detail: Annotated[
        Count, "How many sequences, from the first, to measure influence and label heads on."
    ] = 32
    sketch: Annotated[
        Index | None,
        "Random directions in which recovery sees its targets; 0: exact; default by width.",
    ] = None
    metric: Annotated[
        Metric | None, "How labels measure damage; default, kl for logits, nmse for vectors."
    ] = None
    batch_size: Annotated[Count, "Sequences in a pass."] = 8
    shard: Annotated[
        Count,
        "Sequences that are measured and kept together; results are sums over such shards.",
    ] = 512
    n_shown: Annotated[Count, "Sequences that the report shows."] = 6
    seed: DrawingSeed = 0
    device: Device = "cpu"
    dtype: Dtype = None
    backend: Backend = "auto"
    setting: Annotated[
        tuple[str, ...],
        Repeated(),
        "A setting of one probe by the name of its result, such as recovery.ridge=gcv; may be "
        "repeated.",
    ] = ()

    def __post_init__(self) -> None:
        for before, own in pairwise(sorted(self.single_settings(), key=lambda own: own[:2])):
            if before[:2] == own[:2]:
                raise InfoFlowError(
                    f"setting {own.name}.{own.field} is given twice ({before.value!r} and "
                    f"{own.value!r}): expected one value"
                )
        object.__setattr__(self, "setting", tuple(sorted(self.setting)))  # in whatever order given
        if self.ranks != tuple(range(1, len(self.ranks) + 1)):
            raise InfoFlowError(
                f"ranks are {self.ranks}: expected 1 to some K, such as (1, 2, 3), from which "
                "predictions and the coverage curve are made; for others use PositionsProbe"
            )
        known = part_names()
        for name in self.probes or ():
            if name in GONE:
                raise InfoFlowError(
                    f"probes are {self.probes!r}, but {name!r} was removed in 0.4: expected "
                    f"{GONE[name]!r} in its place"
                )
            if name not in known:
                raise InfoFlowError(
                    f"probes are {self.probes!r}, but there is no probe {name!r}"
                    f"{nearest(name, known)}"
                )
        if self.sketch == 1:
            raise InfoFlowError(
                "sketch is 1: expected 0, which is exact, or at least 2 directions, whose spread "
                "tells the error"
            )

    def single_settings(self) -> tuple[OwnSetting, ...]:
        """Return the settings of single probes.

        Raises:
            InfoFlowError: for a text that is not NAME.FIELD=VALUE.
        """
        return tuple(map(OwnSetting.read, self.setting))

    def output_settings(self) -> dict[str, Any]:
        """Return the settings on which the output depends, without the device, for JSON."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        del values["device"]
        return values

    def sources(self) -> dict[str, Path]:
        """Return the paths of "model", "data" and the code of probes that other packages add.

        A name that is no path gives a path that is missing.
        """
        model = find_package_folder(self.model) or find_model(self.model).path
        drawn = self.data == "repeated"
        # found without importing it
        code = {
            f"probe {name}": packages.path_of_code(point)
            for name, point in packages.find_entry_points(GROUP, PARTS).items()
            if self.probes is None or name in self.probes
        }
        return {"model": model, **code} | ({} if drawn else {"data": find_named(self.data).path})


FEWEST = 5  # windows, of which recovery holds one out
_MOST_RANKS = 4  # of attended keys


@settings
class SurveyConfig:
    """Settings of a survey; what each is stands beside its type.

    Raises:
        InfoFlowError: for values that make no sense, naming them.
    """

    model: Model
    data: Annotated[
        str,
        "A text file, or rows with a column of texts (json, jsonl, csv, parquet, a saved dataset, "
        "name[:config]:split on the hub); texts are joined and cut into windows.",
    ]
    column: Annotated[str | None, "Column of texts; default, found by its name."] = None
    n: Annotated[
        int,
        Ge(FEWEST),
        Remedy("of which half are for labels"),
        "Number of windows, spread evenly over the text; half of them are for labels of heads.",
    ] = 64
    window: Annotated[int, Ge(3), "Tokens of a window."] = 64
    batch_size: Annotated[Count, "Windows in a pass."] = 8
    n_shown: Annotated[Count, "Windows that the report shows."] = 6
    seed: DrawingSeed = 0
    device: Device = "cpu"
    dtype: Dtype = None
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        self.probing()

    def probing(self) -> ProbingConfig:
        """Return the probe run that the survey is."""
        return ProbingConfig(
            **asdict(self),
            probes=part_names(),
            ranks=tuple(range(1, min(_MOST_RANKS, self.window) + 1)),
            n_detail=self.n // 2,
        )
