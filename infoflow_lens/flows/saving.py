"""Flows on disk: settings and measured results; predictions are computed again."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from infoflow_lens.flows.next_tokens import NextTokens, Replaced
from infoflow_lens.flows.predicting import predict
from infoflow_lens.flows.settings import RuleName
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.foundation.saving import convert, read_parts, write_parts
from infoflow_lens.foundation.settings import Count, Share
from infoflow_lens.hooks import (
    AttendedResult,
    InfluenceResult,
    MechanismsResult,
    PatternsResult,
    PositionsResult,
    PowerRolloutResult,
    Result,
    WhyAll,
)

_SCHEMA = "infoflow-lens flow 1"
_MEASURED: Mapping[str, type[Result]] = {
    "influence": InfluenceResult,
    "elsewhere": InfluenceResult,
    "reasons": WhyAll,
    "positions": PositionsResult,
    "attention": PatternsResult,
    "attended": AttendedResult,
    "mechanisms": MechanismsResult,
    "contributions": PowerRolloutResult,
}
_NEEDED = ("positions", "attention")  # the others may be None
_ASKED: Mapping[str, Any] = {
    "tokens": tuple[tuple[str, ...], ...],
    "rule": RuleName,
    "k": Count,
    "next_tokens": tuple[NextTokens, ...] | None,
    "notes": tuple[str, ...],
    "title": str,
}
_REPLACED: Any = tuple[tuple[tuple[str, ...], tuple[NextTokens, ...]], ...] | None


def save_fields(
    flow: Mapping[str, Any], path: str | os.PathLike[str], *, overwrite: bool = False
) -> None:
    """Write ``<path>.safetensors`` and ``<path>.json``, each whole or not at all.

    Args:
        flow: the fields of a flow.
        path: of both files, without the ends of their names.
        overwrite: whether files that are no saved result may be replaced, too.
    """
    tensors: dict[str, Tensor] = {}
    measured: dict[str, Any] = {}
    for name in _MEASURED:
        found: Result | None = flow[name]
        if found is not None:
            measured[name], parts = found.to_parts()
            tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    plain = {name: flow[name] for name in _ASKED}
    plain["replaced"] = flow["replaced"] and [[r.by, r.next_tokens] for r in flow["replaced"]]
    plain |= {"measured": measured, "record": flow["record"].to_dict()}
    write_parts(path, _SCHEMA, plain, tensors, overwrite=overwrite)


@contextmanager
def read_fields(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Read the fields of the flow that :func:`save_fields` wrote, for use in the block.

    Raises:
        InfoFlowError: for files that are missing, spoiled, or of another kind or version.
    """
    with read_parts(path, _SCHEMA, "flow") as (plain, tensors):
        found: dict[str, Any] = dict.fromkeys(_MEASURED)
        # each result is kept whole, its tensors under its name
        for name, kind in _MEASURED.items():
            if name not in plain["measured"]:
                continue
            inside = {
                key.removeprefix(f"{name}."): tensor
                for key, tensor in tensors.items()
                if key.startswith(f"{name}.")
            }
            found[name] = kind.from_parts(plain["measured"][name], inside)
        missing = [name for name in _NEEDED if found[name] is None]
        if missing or plain["measured"].keys() - found.keys():
            raise InfoFlowError(
                f"measured are {', '.join(plain['measured'])}: expected {', '.join(_NEEDED)}, and "
                f"no others than {', '.join(_MEASURED)}"
            )
        record = RunRecord.from_dict(plain["record"])
        threshold = convert(record.config.get("threshold"), Share, "threshold")
        without = convert(record.config.get("without"), tuple[int, ...], "without")
        asked = {name: convert(plain[name], kind, name) for name, kind in _ASKED.items()}
        n_texts, n_measured = len(asked["tokens"]), len(found["positions"].lengths)
        if n_texts != n_measured:
            raise InfoFlowError(f"tokens are of {n_texts} texts, positions of {n_measured}")
        if asked["rule"] == "mechanisms" and None in (found["attended"], found["mechanisms"]):
            raise InfoFlowError(
                "rule is 'mechanisms', and no mechanisms are there: expected them, and the "
                "attended keys"
            )
        # predictions follow from what was measured, so they are made again and not kept
        predicted = predict(
            asked["rule"], asked["k"], found["positions"], found["attended"], found["mechanisms"],
            max(map(len, asked["tokens"])), found["influence"], threshold, without,
        )  # fmt: skip
        replaced = convert(plain["replaced"], _REPLACED, "replaced")
        yield {
            **asked,
            "replaced": replaced and tuple(Replaced(by, after) for by, after in replaced),
            "record": record,
            **found,
            **predicted,
        }
