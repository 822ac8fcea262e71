"""The settings of a probe run; the options of `infoflow-lens probe` are made from them."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import MinLen

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
    settings,
)
from infoflow_lens.models.shipped import find_package_folder
from infoflow_lens.probing.own_settings import OwnSetting, check_different
from infoflow_lens.probing.registry import GONE, part_names, paths_of_code

InfluenceKind = Literal["auto", "exact", "estimate", "resample"]
Metric = Literal["nmse", "kl", "loss"]

# Options that other settings share
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

    model: Annotated[
        str,
        "stdlib-2l, which comes with the package; an official name; a Hugging Face folder; or a "
        "checkpoint.",
    ]
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
    max_length: Annotated[Count | None, "Cut sequences to so many tokens."] = None
    window: Annotated[
        Count | None,
        "Join all texts and cut them into sequences of so many tokens; cut ids to that length.",
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
        "Random directions that stand for recovery's targets; 0: exact; default by width.",
    ] = None
    metric: Annotated[Metric | None, "Unit of the damage of labels; default by the output."] = None
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
        check_different(self.single_settings())
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
                    f"probes are {self.probes!r}, but {name!r} went with 0.4: expected "
                    f"{GONE[name]!r}, which has its place"
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
        """The settings on which the output depends (all but the device), as values for JSON."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        del values["device"]
        return values

    def sources(self) -> dict[str, Path]:
        """Return the paths of "model", "data" and the code of probes that other packages add.

        A name that is no path gives a path that is missing.
        """
        model = find_package_folder(self.model) or find_model(self.model).path
        drawn = self.data == "repeated"
        code = {f"probe {name}": path for name, path in paths_of_code(self.probes).items()}
        return {"model": model, **code} | ({} if drawn else {"data": find_named(self.data).path})
