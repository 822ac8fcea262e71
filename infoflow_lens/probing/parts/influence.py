"""What states depend on."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.hooks import (
    AttendedProbe,
    JacobianInfluence,
    LayerCapabilities,
    PositionsProbe,
    Probe,
    ResampleInfluence,
)
from infoflow_lens.hooks.model.inputs import Batches
from infoflow_lens.probing.part import Part, Setting

if TYPE_CHECKING:
    from infoflow_lens.report.charts import Chart

_DIRECTIONS = 16  # of an estimate
_DONORS = 8
_EXACT_UP_TO = 2048  # input directions (tokens times width) that are differentiated one by one


class InfluencePart(Part):
    """Influence on states, and the attention on the same sequences, which predicts it."""

    title = "What states depend on"
    sequences = "detail"

    def lacking(self, layer: LayerCapabilities) -> str:
        """Passes are repeated from what enters the first block."""
        if "hook_resid_pre" not in layer.edits_reach:
            return "edits of hook_resid_pre do not reach its output"
        return super().lacking(layer)

    def probes(self, setting: Setting) -> Mapping[str, Probe[Any]]:
        """Influence, and what predictions for the same sequences need."""
        return {
            "influence_attended": AttendedProbe(),
            "influence_positions": PositionsProbe(setting.config.ranks, spread=True),
            "influence": _probe(setting),
        }

    def figures(self, result: Any) -> Sequence["Chart"]:
        """None: the report shows influence beside what was predicted."""
        return ()


def _probe(setting: Setting) -> Probe[Any]:
    """The kind of influence that the settings ask for, or that is affordable."""
    config, longest = setting.config, setting.detail.longest or 1
    if config.influence == "resample":
        return ResampleInfluence(
            _donors(setting.batches, config.n_detail, longest), "median", "resid_post"
        )
    affordable = longest * setting.width <= _EXACT_UP_TO
    if config.influence == "exact" or (config.influence == "auto" and affordable):
        return JacobianInfluence("resid_post")
    return JacobianInfluence("resid_post", positions=(-1,), estimate=_DIRECTIONS, seed=config.seed)


def _donors(batches: Batches, n_measured: int, length: int) -> Tensor:
    """Tokens that take the place of others: of sequences that are not measured, if possible.

    Where sequences differ in length, a donor's later tokens come from other sequences than its
    first: what enters at a position is its token alone.

    Raises:
        InfoFlowError: if some position has no other sequence's token.
    """
    rows = list(batches.sequences())
    donors = []
    for position in range(length):
        found = _last_at(position, rows[n_measured:])
        if len(found) < 2:
            found = _last_at(position, rows)
        if len(found) < 2:
            raise InfoFlowError(
                "influence 'resample' replaces tokens by those of other sequences, and only one "
                f"has a token {position}: expected at least 2; give more sequences, cut them with "
                "max_length, or choose influence 'estimate'"
            )
        donors.append(torch.stack([found[i % len(found)] for i in range(_DONORS)]))
    return torch.stack(donors, dim=1)


def _last_at(position: int, rows: Sequence[Tensor]) -> list[Tensor]:
    """The tokens at a position of the last sequences that have it."""
    long = (row[position] for row in reversed(rows) if len(row) > position)
    return list(islice(long, _DONORS))[::-1]
