"""Flows on disk: their measured parts and what they were asked for; the rest is worked out again."""

import os
from typing import Any

from torch import Tensor

from infoflow_lens.flows.next_tokens import NextTokens, Replaced
from infoflow_lens.flows.predicting import predict
from infoflow_lens.flows.result import Flow
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.hooks.result import Result, read_parts, write_parts

_SCHEMA = "infoflow-lens flow 1"
_MEASURED = (
    "influence", "elsewhere", "reasons", "positions", "attention", "attended", "mechanisms",
)  # fmt: skip


def save_flow(flow: Flow, path: str | os.PathLike[str]) -> None:
    """Write ``<path>.safetensors`` and ``<path>.json``, each whole or not at all."""
    tensors: dict[str, Tensor] = {}
    measured: dict[str, Any] = {}
    for name in _MEASURED:
        found: Result | None = getattr(flow, name)
        if found is not None:
            measured[name], parts = found.stored()
            tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    replaced = flow.replaced and [[each.by, each.next_tokens] for each in flow.replaced]
    plain = {
        "measured": measured, "record": flow.record.to_dict(), "replaced": replaced,
        **{name: getattr(flow, name) for name in ("tokens", "rule", "k", "next_tokens", "notes", "title")},
    }  # fmt: skip
    write_parts(path, _SCHEMA, plain, tensors)


def load_flow(path: str | os.PathLike[str]) -> Flow:
    """The flow that :func:`save_flow` wrote."""
    with read_parts(path, _SCHEMA, "flow") as (plain, tensors):
        found: dict[str, Any] = dict.fromkeys(_MEASURED)
        for name, values in plain["measured"].items():
            inside = {
                key.removeprefix(f"{name}."): tensor.clone()
                for key, tensor in tensors.items()
                if key.startswith(f"{name}.")
            }
            found[name] = Result.of_stored(values, inside)
        record = RunRecord.from_dict(plain["record"])
        predicted = predict(
            plain["rule"], plain["k"], found["positions"], found["attended"], found["mechanisms"],
            max(map(len, plain["tokens"])), found["influence"], record.config["threshold"],
        )  # fmt: skip
        replaced = plain["replaced"] and tuple(
            Replaced(tuple(by), tuple(map(_pairs, said))) for by, said in plain["replaced"]
        )
        return Flow(
            tokens=tuple(map(tuple, plain["tokens"])),
            rule=plain["rule"],
            k=plain["k"],
            next_tokens=plain["next_tokens"] and tuple(map(_pairs, plain["next_tokens"])),
            replaced=replaced,
            notes=tuple(plain["notes"]),
            record=record,
            title=plain["title"],
            **found,
            **predicted,
        )


def _pairs(said: Any) -> NextTokens:
    return tuple(tuple((str(token), float(chance)) for token, chance in row) for row in said)
