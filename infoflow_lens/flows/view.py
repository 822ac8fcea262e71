"""A flow as what the interactive picture shows."""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

from infoflow_lens.flows.next_tokens import Replaced
from infoflow_lens.hooks import InfluenceResult
from infoflow_lens.report.flow_view import (
    RULES,
    FlowView,
    ViewedInput,
    ViewedMechanism,
    ViewedReasons,
    ViewedReplaced,
)
from infoflow_lens.theory.rules import Rule

if TYPE_CHECKING:
    from infoflow_lens.flows.result import Flow

_UNMEASURED = (
    "It was measured where it was asked for, and elsewhere only where all positions take some "
    "seconds. flow(model, text, position='all') measures all of them, and so does "
    "infoflow-lens flow MODEL TEXT --position all; a bar says how long that takes."
)
_MOST_PATTERNS = 2_000_000  # weights that the picture takes along


def view_of(flow: "Flow") -> FlowView:
    """Make what the interactive picture shows from a flow."""
    n_patterns = sum(layer[0].numel() for layer in flow.attention.patterns)
    with_patterns = n_patterns * len(flow.tokens) <= _MOST_PATTERNS
    possible = ["max_position", *(["top_k"] if len(flow.positions.ranks) > 1 else [])]
    possible += ["mechanisms"] if flow.rules is not None else []
    order = [flow.rule, *(rule for rule in possible if rule != flow.rule)]
    asked = flow.asked[0]
    return FlowView(
        title=flow.title,
        inputs=[_viewed(flow, i, with_patterns) for i in range(len(flow.tokens))],
        rules={rule: RULES[rule] for rule in order},
        record=flow.record.to_dict(),
        notes=flow.notes,
        influence_name=_how(flow.influence),
        unmeasured=_UNMEASURED if flow.influence is not None else "",
        k=flow.k if flow.rule == "top_k" else 2,
        selected=(flow.layers[-1], max(asked)) if asked else None,
    )


def _viewed(flow: "Flow", index: int, with_patterns: bool) -> ViewedInput:
    n_source = len(flow.tokens[index])
    members = flow.sets.members
    n_states = n_source + members.shape[2] - members.shape[3]
    ranked, weights, scores, patterns = [], [], [], []
    for layer, positions in enumerate(flow.positions.positions):
        keys = positions[index, :, :n_states].long()
        at, none = keys.clamp(min=0), keys < 0
        pattern = flow.attention.patterns[layer][index, :, :n_states]
        score = flow.attention.scores[layer][index, :, :n_states]
        ranked.append(keys)
        weights.append(pattern.gather(2, at).masked_fill(none, 0))
        scores.append(score.gather(2, at).masked_fill(none, 0))
        patterns.append(pattern[:, :, :n_states])
    influence = None
    if flow.influence is not None:
        influence = torch.full(
            (members.shape[0], n_states, n_source), torch.nan, dtype=torch.float32
        )
        for found in (flow.elsewhere, flow.influence):  # the asked positions may be exact
            if found is None:
                continue
            asked = [p for p in found.positions[index].tolist() if p >= 0]
            measured = found.full()[:, index, :, :n_source].float()
            for row, layer in enumerate(found.layers):
                influence[layer, asked] = measured[row, asked]
    return ViewedInput(
        tokens=flow.tokens[index],
        n_queries=n_states,
        ranked=ranked,
        weights=weights,
        scores=scores,
        patterns=patterns if with_patterns else None,
        mechanisms=_mechanisms(flow, index, n_states),
        influence=influence,
        reasons=_reasons(flow, index, n_states),
        next_tokens=None if flow.next_tokens is None else flow.next_tokens[index],
        replaced=None if flow.replaced is None else _replaced(flow.replaced[index]),
        causal=flow.attention.is_causal,
    )


def _replaced(found: Replaced) -> ViewedReplaced:
    return ViewedReplaced(found.by, found.next_tokens)


def _reasons(flow: "Flow", index: int, n_states: int) -> ViewedReasons | None:
    if flow.reasons is None:
        return None
    found, of_input = flow.reasons, (index, slice(None), slice(n_states))
    return ViewedReasons(
        keys=[layer[of_input] for layer in found.keys],
        margins=[layer[of_input] for layer in found.margins],
        parts=[layer[of_input] for layer in found.parts],
        values=[layer[of_input] for layer in found.values],
        rest=[layer[of_input] for layer in found.rest],
        part_names=found.part_names,
    )


def _mechanisms(flow: "Flow", index: int, n_states: int) -> list[list[ViewedMechanism]] | None:
    if flow.rules is None or flow.mechanisms is None:
        return None
    layers = []
    for rules, names in zip(flow.rules, flow.mechanisms.mechanisms(), strict=True):
        others = iter(rules[1:])  # the first says how many positions there are
        layers.append(
            [
                ViewedMechanism(name)
                if name == "own_position"
                else ViewedMechanism(name, _keys_of(next(others), index, n_states))
                for name in names
            ]
        )
    return layers


def _keys_of(rule: Rule, index: int, n_states: int) -> Int[Tensor, "pos k"]:
    """The keys that a rule moves in one input; -1 for none."""
    keys = rule.describe(index)[:n_states]
    keys = torch.where(keys < n_states, keys, -1)
    return keys[:, (keys >= 0).any(dim=0)]


def _how(influence: InfluenceResult | None) -> str:
    if influence is None:
        return "not measured"
    config = influence.record.config
    if config["probe"] == "ResampleInfluence":
        return "how far the state moves when another token takes the place (median)"
    if config["estimate"]:
        return f"norm of the Jacobian, estimated by {config['estimate']} random directions"
    return "norm of the Jacobian"
