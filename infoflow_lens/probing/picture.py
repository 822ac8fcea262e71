"""The interactive picture of a run's first sequences."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Bool
from torch import Tensor

from infoflow_lens.hooks import AttendedResult, PositionsResult
from infoflow_lens.hooks.passes.ranking import mark_sources
from infoflow_lens.probing.findings import Findings
from infoflow_lens.report.flow_view import FlowView, ViewedInput, view_mechanisms

_HOW = {
    "JacobianInfluence": "norm of the Jacobian of the state by the token",
    "ResampleInfluence": "how far the state moves when the token is another sequence's",
}


def build_flow_view(result: Findings) -> FlowView | None:
    """Return the picture of the first sequences of a run; None if influence was not measured."""
    positions, influence = result.found.get("influence_positions"), result.influence
    if influence is None or not isinstance(positions, PositionsResult):
        return None
    n = min(len(result.texts), len(influence.lengths))
    measured = _spread_influence(result)
    attended, labels = result.found.get("influence_attended"), result.labels
    rules = None
    if labels is not None and isinstance(attended, AttendedResult):
        rules = labels.rules(attended, positions)
    # weights of a softmax can be shown as shares; others and bare scores cannot
    softmax = [x.pattern == "softmax" and x.scores == "scores" for x in result.capabilities.layers]
    reached, measured_at = find_reached(result), influence.has_scores.any(dim=0)
    causal = not any(x.attends == "bidirectional" for x in result.capabilities.layers)
    # where nothing was measured, all that the order of positions lets a state hold
    order = torch.ones_like(reached).tril(-1) if causal else torch.ones_like(reached)
    reached = reached.where(measured_at[:, None], order)
    inputs = []
    for index in range(n):
        tokens = result.texts[index]
        n_source = len(tokens)
        n_pos = n_source + influence.n_positions - influence.influence.shape[-1]
        left_out = mark_sources(result.config.without, torch.tensor([n_source]), n_pos, n_source)
        other = ~torch.eye(n_pos, n_source, dtype=torch.bool) & ~left_out
        possible = (reached[:n_pos, :n_source] & other).sum(dim=-1)
        mechanisms = None
        if labels is not None and rules is not None:
            mechanisms = view_mechanisms(labels.mechanisms, rules, index, n_pos)
        inputs.append(
            ViewedInput(
                tokens=tokens,
                n_queries=n_pos,
                ranked=[p[index, :, :n_pos] for p in positions.positions],
                weights=_weights(positions, index, n_pos, softmax),
                mechanisms=mechanisms,
                influence=measured[:, index, :n_pos, :n_source],
                left_out=left_out[0].nonzero().flatten().tolist(),
                possible=possible.expand(len(measured), -1),
                causal=causal,
            )
        )
    kind = str(influence.record.config.get("probe", "influence"))
    how = _HOW.get(kind, kind)
    if influence.relative_error is not None:
        how += f", an estimate (relative error up to {max(influence.relative_error):.0%})"
    # opens at the text in which influence comes from farthest
    first = max(range(n), key=lambda i: _from_afar(inputs[i]), default=0)
    return FlowView(title="", inputs=inputs, influence_name=how, first=first)


def find_reached(result: Findings) -> Bool[Tensor, "pos source"]:
    """Mark the candidates of tables: what reaches a position in some sequence and layer.

    Some layers see a window of keys alone, and what lies behind it is no candidate.
    """
    assert result.influence is not None
    reached = (result.influence.full() > 0).flatten(0, 1).any(dim=0)
    for sets in result.predicted.values():
        reached = reached | sets.members.flatten(0, 1).any(dim=0)
    return reached


def _from_afar(viewed: ViewedInput) -> float:
    """Return the largest influence on the last state from beyond its neighbour, over the total."""
    assert viewed.influence is not None
    last = viewed.n_queries - 1
    found = viewed.influence[-1, last].nan_to_num(0)
    if last < len(found):
        found[last] = 0  # its own token
    far = found[: max(0, last - 1)]
    return float(far.max() / found.sum()) if len(far) and float(found.sum()) > 0 else 0.0


def _spread_influence(result: Findings) -> Tensor:
    """Return influence on every state [layer, sequence, pos, source]; NaN where not measured."""
    influence = result.influence
    assert influence is not None
    _, n_batch, _, n_source = influence.influence.shape
    asked = torch.zeros(n_batch, influence.n_positions, dtype=torch.bool)
    sequence, row = (influence.positions >= 0).nonzero(as_tuple=True)
    asked[sequence, influence.positions[sequence, row]] = True
    full = influence.full().float().masked_fill(~asked[None, :, :, None], torch.nan)
    size = (len(result.capabilities.layers), n_batch, influence.n_positions, n_source)
    whole = torch.full(size, torch.nan, dtype=torch.float32)
    whole[list(influence.layers)] = full
    return whole


def _weights(
    positions: PositionsResult, index: int, n_pos: int, softmax: Sequence[bool]
) -> list[Tensor] | None:
    """The weights of the ranked keys, where those of the first were measured; NaN for others.

    The scores of keys that follow each other differ by the margin, and so do, with a softmax, the
    logarithms of their weights.
    """
    if not positions.concentration:
        return None
    layers = []
    columns = [positions.ranks.index(1)]
    # ranks in a row from 1 on
    while (rank := len(columns) + 1) in positions.ranks:
        columns.append(positions.ranks.index(rank))
    for layer, (ranked, largest) in enumerate(
        zip(positions.positions, positions.concentration, strict=True)
    ):
        weights = torch.full(ranked[index, :, :n_pos].shape, torch.nan, dtype=torch.float32)
        weights[..., columns[0]] = largest[index, :, :n_pos].float()
        margins = positions.margins[layer][index, :, :n_pos].float()
        # of a softmax, the margin of two scores is the logarithm of the ratio of their weights
        for above, below in pairwise(columns if softmax[layer] else []):
            weights[..., below] = weights[..., above] * torch.exp(-margins[..., above])
        layers.append(weights)
    return layers
