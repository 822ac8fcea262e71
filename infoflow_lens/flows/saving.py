"""Flows on disk: settings and measured results; predictions are computed again."""

import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from infoflow_lens.flows.next_tokens import NextTokens, Replaced
from infoflow_lens.flows.predicting import predict
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.foundation.saving import read_parts, write_parts
from infoflow_lens.hooks.result import Result

_SCHEMA = "infoflow-lens flow 1"
_MEASURED = (
    "influence", "elsewhere", "reasons", "positions", "attention", "attended", "mechanisms",
)  # fmt: skip
_ASKED = ("tokens", "rule", "k", "next_tokens", "notes", "title")


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
            measured[name], parts = found.stored()
            tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    plain = {name: flow[name] for name in _ASKED}
    plain["replaced"] = flow["replaced"] and [[r.by, r.next_tokens] for r in flow["replaced"]]
    plain |= {"measured": measured, "record": flow["record"].to_dict()}
    write_parts(path, _SCHEMA, plain, tensors, overwrite=overwrite)


def load_fields(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The fields of the flow that :func:`save_fields` wrote.

    Raises:
        InfoFlowError: for files that are missing, spoiled, or of another kind or version.
    """
    with read_parts(path, _SCHEMA, "flow") as (plain, tensors):
        found: dict[str, Any] = dict.fromkeys(_MEASURED)
        for name, values in plain["measured"].items():
            inside = {
                key.removeprefix(f"{name}."): tensor
                for key, tensor in tensors.items()
                if key.startswith(f"{name}.")
            }
            found[name] = Result.of_stored(values, inside)
        record = RunRecord.from_dict(plain["record"])
        predicted = predict(
            plain["rule"], plain["k"], found["positions"], found["attended"], found["mechanisms"],
            max(map(len, plain["tokens"])), found["influence"], record.config["threshold"],
        )  # fmt: skip
        said, replaced = plain["next_tokens"], plain["replaced"]
        return {
            **{name: plain[name] for name in _ASKED},
            "tokens": tuple(map(tuple, plain["tokens"])),
            "next_tokens": said and tuple(map(_pairs, said)),
            "replaced": replaced
            and tuple(Replaced(tuple(by), tuple(map(_pairs, after))) for by, after in replaced),
            "notes": tuple(plain["notes"]),
            "record": record,
            **found,
            **predicted,
        }


def _pairs(said: Any) -> NextTokens:
    return tuple(tuple((str(token), float(chance)) for token, chance in row) for row in said)
