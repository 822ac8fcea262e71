"""The settings of a probe run; the options of `infoflow-lens probe` are made from them."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from infoflow_lens.foundation.checks import (
    check_choice,
    check_integer,
    check_integers,
    check_seed,
)
from infoflow_lens.foundation.display import brief
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.names import nearest
from infoflow_lens.probing.registry import part_names

InfluenceKind = Literal["auto", "exact", "estimate", "resample"]
Metric = Literal["nmse", "kl", "loss"]

# Options that other settings share
Seed = Annotated[int, "Seed of all that is drawn."]
Device = Annotated[str, "Where to run it: cpu, cuda:0, ..."]
Dtype = Annotated[str | None, "float32 (default), bfloat16, float16 or float64."]
Backend = Annotated[
    Literal["auto", "hooked", "bridge"], "HookedTransformer, TransformerBridge, or what fits."
]


@dataclass(frozen=True)
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
        "'repeated' (random tokens twice), a task, or name[:config]:split on the hub.",
    ]
    probes: Annotated[
        tuple[str, ...] | None,
        "Names with commas, such as positions,recovery; default, all that the model can give.",
    ] = None
    column: Annotated[str | None, "Column of texts or ids; default, the one that is known."] = None
    n: Annotated[int | None, "At most so many sequences."] = None
    max_length: Annotated[int | None, "Cut sequences to so many tokens."] = None
    window: Annotated[
        int | None, "Join all texts, and cut them into sequences of so many tokens; cut ids to it."
    ] = None
    ranks: Annotated[tuple[int, ...], "Ranks of attended keys."] = (1, 2, 3, 4)
    without: Annotated[tuple[int, ...], "Positions left out as keys, such as 0 for BOS."] = ()
    influence: Annotated[
        InfluenceKind,
        "Exact Jacobians, an estimate of them, or resample ablation; auto: exact where affordable.",
    ] = "auto"
    n_detail: Annotated[int, "Sequences for influence and mechanisms, the first ones."] = 32
    sketch: Annotated[
        int | None, "Random directions of recovery's targets; 0 for exact; default by width."
    ] = None
    metric: Annotated[Metric | None, "Of the mechanisms' damage; default by the output."] = None
    threshold: Annotated[float, "Damage up to which an ideal is enough."] = 0.05
    batch_size: Annotated[int, "Sequences in a pass."] = 8
    shard: Annotated[
        int,
        "Sequences that are measured together and kept as one; numbers are put together by shards.",
    ] = 512
    n_shown: Annotated[int, "Sequences that the report shows."] = 6
    seed: Seed = 0
    device: Device = "cpu"
    dtype: Dtype = None
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        ranks = check_integers(self.ranks, "ranks", 1)
        found: dict[str, Any] = {"seed": check_seed(self.seed), "ranks": ranks}
        if ranks != tuple(range(1, len(ranks) + 1)):
            raise InfoFlowError(
                f"ranks are {self.ranks}: expected 1 to some K, such as (1, 2, 3), from which "
                "predictions and the coverage curve are made; for others use PositionsProbe"
            )
        found["without"] = check_integers(self.without, "without", 0, empty=True)
        known = part_names()
        listed = isinstance(self.probes, (list, tuple))
        if self.probes is not None and not (
            listed and all(isinstance(name, str) for name in self.probes)
        ):
            raise InfoFlowError(
                f"probes is {brief(self.probes)}: expected names, as in ({known[0]!r},)"
            )
        for name in self.probes or ():
            if name not in known:
                raise InfoFlowError(f"there is no probe {name!r}{nearest(name, known)}")
        if self.probes is not None and not 0 < len(set(self.probes)) == len(self.probes):
            raise InfoFlowError(
                f"probes are {self.probes!r}: expected different ones of {', '.join(known)}"
            )
        check_choice(self.influence, "influence", get_args(InfluenceKind))
        if self.metric is not None:
            check_choice(self.metric, "metric", get_args(Metric))
        check_choice(self.backend, "backend", ("auto", "hooked", "bridge"))
        number = isinstance(self.threshold, (int, float)) or hasattr(self.threshold, "__float__")
        if isinstance(self.threshold, bool) or not number or not float(self.threshold) >= 0:
            raise InfoFlowError(f"threshold is {self.threshold!r}: expected a damage of at least 0")
        found["threshold"] = float(self.threshold)
        if self.sketch is not None and check_integer(self.sketch, "sketch") == 1:
            raise InfoFlowError(
                "sketch is 1: expected 0, which is exact, or at least 2 directions, whose spread "
                "tells the error"
            )
        for name in ("batch_size", "n_detail", "shard", "n_shown"):
            found[name] = check_integer(getattr(self, name), name, 1)
        for name in ("n", "max_length", "window"):
            if getattr(self, name) is not None:
                found[name] = check_integer(getattr(self, name), name, 1)
        for name, value in found.items():  # plain numbers, also where numpy's were given
            object.__setattr__(self, name, value)
