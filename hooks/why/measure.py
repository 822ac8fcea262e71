"""Splitting the margin between two keys of a query over what wrote the query's and keys' states."""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import eval_mode
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.foundation.settings import Count, checked
from infoflow_lens.hooks.model.inputs import Inputs, read_inputs
from infoflow_lens.hooks.model.points import check_one_device, layer_count, takes_model
from infoflow_lens.hooks.model.semantics import hook_semantics
from infoflow_lens.hooks.model.texts import readable_tokens
from infoflow_lens.hooks.passes.run import run
from infoflow_lens.hooks.passes.view import Needs, Pass, padded_together
from infoflow_lens.hooks.why.reading import Layer, readings, refusal
from infoflow_lens.hooks.why.result import STRONGEST, Why, WhyAll
from infoflow_lens.hooks.why.written import names_of_parts, points_of_parts, written

_TOLERANCE = 1e-5  # of the margin, relative to the size of the pieces of both scores, in float32
_WEIGHTS = 1e-5  # further, where scores are logarithms of float32 weights


@takes_model
@checked
def measure_why(
    model: nn.Module,
    inputs: Inputs,
    layer: int,
    head: int,
    query: int = -1,
    keys: tuple[int, int] | None = None,
) -> Why:
    """Why a head prefers one key to another: :func:`infoflow_lens.why` on a model in memory.

    Args:
        model: a TransformerLens model.
        inputs: one sequence: a text, token ids [1, pos] or vectors [1, pos, d_token].
        layer: of the head, from 0, or from -1 backwards.
        head: from 0.
        query: its position, from 0, or from -1 backwards.
        keys: two positions; default, those of the largest and the second largest score.

    Raises:
        InfoFlowError: for several sequences, places that are not there, keys that the query does
            not see, and models whose scores the pieces do not add up to.
    """
    check_one_device(model)
    layer = place(layer, layer_count(model), "layer", "layers")
    rows = list(read_inputs(model, inputs).sequences())
    if len(rows) != 1:
        raise InfoFlowError(f"inputs are {len(rows)} sequences: expected one; ask for each alone")
    readings(model)  # a model that cannot be asked is refused before the pass
    seen = _pass(model, rows[0][None], layer)
    found = Layer(seen, layer, readings(model)[layer])
    n_heads, n_pos = found.scores.shape[:2]
    head, query = place(head, n_heads, "head", "heads"), place(query, n_pos, "query", "positions")
    chosen = _chosen(seen, found, head, query, keys)
    names = (*readable_tokens(model, rows)[0], "CLS")
    at = torch.tensor((query, *chosen), device=found.stream.device)
    *_, (parts, states) = written(seen, layer, at)
    states = found.normed(states, at)
    query_parts, q = _projected(found, parts, states[:, :1], head, "Q", at[:1])
    key_parts, k = _projected(found, parts, states[:, 1:], head, "K", at[1:])
    each = found.reading.factor * torch.einsum("ad,bkd->kab", q[:, 0], k)
    pieces = each[0] - each[1]
    margin = found.scores[head, query, chosen[0]] - found.scores[head, query, chosen[1]]
    _check(found, pieces.sum(), margin, each.abs().sum())
    config = {"probe": "why", "layer": layer, "head": head, "query": query, "keys": list(chosen)}
    return Why(
        pieces=pieces.cpu(),
        query_parts=tuple(query_parts),
        key_parts=tuple(key_parts),
        margin=float(margin),
        layer=layer,
        head=head,
        query=query,
        keys=chosen,
        tokens=(names[query], names[chosen[0]], names[chosen[1]]),
        record=RunRecord.of_model(model, config),
    )


@takes_model
@checked
def measure_why_all(model: nn.Module, inputs: Inputs, strongest: Count = STRONGEST) -> WhyAll:
    """For every head and query, why the first key: :func:`infoflow_lens.why_all` in memory.

    Args:
        model: a TransformerLens model.
        inputs: sequences, as for :func:`run_probes`; each is run alone.
        strongest: how many parts of the keys each line has by name.

    Raises:
        InfoFlowError: for models whose scores the pieces do not add up to.
    """
    check_one_device(model)
    found, names = [], []
    for row in read_inputs(model, inputs).sequences():
        readings(model)
        last = layer_count(model) - 1
        seen = _pass(model, row[None], last)
        names = [*names_of_parts(model, seen), "norm bias", "b_K"]
        found.append(list(_lines(seen, last, names, strongest)))
    by_field: dict[str, Any] = {
        field: tuple(
            padded_together([lines[layer][field][None].cpu() for lines in found], axes, fill)
            for layer in range(layer_count(model))
        )
        for field, axes, fill in (
            ("keys", (2,), -1),
            ("margins", (2,), torch.nan),
            ("parts", (2,), -1),
            ("values", (2,), 0.0),
            ("rest", (2,), torch.nan),
        )
    }
    record = RunRecord.of_model(model, {"probe": "why_all", "strongest": strongest})
    return WhyAll(**by_field, part_names=tuple(names), record=record)


def place(asked: int, n: int, name: str, what: str) -> int:
    """A place from 0.

    Raises:
        InfoFlowError: for one that is not there.
    """
    if not -n <= asked < n:
        raise InfoFlowError(
            f"{name} is {asked}, but there are {n} {what}: expected 0 to {n - 1}, or -1 to -{n} "
            "from the last backwards"
        )
    return asked % n


def _pass(model: nn.Module, tokens: Tensor, last: int) -> Pass:
    points = [name for layer in range(last + 1) for name in Layer.points(model, layer)]
    needs = Needs(tuple(dict.fromkeys((*points, *points_of_parts(model, last)))))
    with eval_mode(model):
        return run(model, tokens, needs)


def _chosen(
    seen: Pass, layer: Layer, head: int, query: int, keys: tuple[int, int] | None
) -> tuple[int, int]:
    """The two keys.

    Raises:
        InfoFlowError: if the query does not see two keys, or not these.
    """
    row = layer.scores[head, query]
    open_ = (row > -torch.inf).nonzero().flatten().tolist()
    if len(open_) < 2:
        raise InfoFlowError(
            f"the query at position {query} has {len(open_)} keys in layer {layer.layer}: expected "
            "at least two to choose from; ask for a later query"
        )
    if keys is None:
        ranked = seen.ranked(layer.layer, (1, 2)).positions[0, head, query].tolist()
        return int(ranked[0]), int(ranked[1])
    one, other = (place(key, len(row), "keys", "positions") for key in keys)
    unseen = [key for key in (one, other) if key not in open_]
    if unseen or one == other:
        why = f"it does not see {unseen[0]}" if unseen else "they are one"
        raise InfoFlowError(
            f"keys are {one} and {other} for the query at position {query}, and {why}: expected "
            f"two of {', '.join(map(str, open_[:20]))}{', ...' if len(open_) > 20 else ''}"
        )
    return one, other


def _projected(
    layer: Layer,
    names: list[str],
    normed: Float[Tensor, "part pos d_model"],
    head: int,
    kind: str,
    at: Int[Tensor, " pos"],
) -> tuple[list[str], Float[Tensor, "part pos d_head"]]:
    """Normed parts of states, and biases, as parts of a head's queries or keys, rotated."""
    weight = (layer.W_Q if kind == "Q" else layer.W_K)[head]
    parts, names = normed @ weight, list(names)
    norm_bias, bias = layer.norm_bias, layer.bias(f"b_{kind}")
    more = []
    if norm_bias is not None and norm_bias.any():
        more.append(("norm bias", norm_bias @ weight))
    if bias is not None and bias.any():
        more.append((f"b_{kind}", bias[head]))
    for name, part in more:
        names.append(name)
        parts = torch.cat([parts, part.expand(1, len(at), -1)])
    return names, layer.rotated(parts, at)


def _check(layer: Layer, found: Tensor, margin: Tensor, size: Tensor) -> None:
    """Refuse pieces that do not add up to the margin.

    Raises:
        InfoFlowError: with the layer and how far they are apart.
    """
    model = layer.seen.model
    eps = torch.finfo(next(model.parameters()).dtype).eps
    weights = hook_semantics(model).scores[layer.layer] != "scores"
    allowed = max(_TOLERANCE, 8 * eps) * size + (_WEIGHTS if weights else 0)
    gap = (found - margin).abs()
    if not (gap <= allowed).all():
        worst = float((gap - allowed).max())
        reason = f"the pieces miss the difference of the scores by {worst:.1g} more than rounding"
        raise refusal(model, layer.layer, reason)


def _lines(seen: Pass, last: int, names: list[str], strongest: int) -> Iterator[dict[str, Any]]:
    """Layer by layer, the lines of all heads and queries."""
    numbers = {name: number for number, name in enumerate(names)}
    for number, (parts, states) in enumerate(written(seen, last)):
        layer = Layer(seen, number, readings(seen.model)[number])
        n_heads, n_pos, _ = layer.scores.shape
        every = torch.arange(n_pos, device=layer.stream.device)
        ranks = (1, 2) if layer.scores.shape[-1] > 1 else (1,)
        chosen = torch.full((n_heads, n_pos, 2), -1, device=every.device)
        chosen[..., : len(ranks)] = seen.ranked(number, ranks).positions[0].to(every)
        known = (chosen >= 0).all(dim=-1)
        at = chosen.clamp(min=0)
        queries = layer.rotated(layer.queries.transpose(0, 1), every)
        normed, of_keys = layer.normed(states), []
        for head in range(n_heads):
            used, keys = _projected(layer, parts, normed, head, "K", every)
            pairs = keys[:, at[head]]  # [part, query, rank, d_head]
            of_keys.append(torch.einsum("pqrd,qd->qpr", pairs, queries[head]))
        each = layer.reading.factor * torch.stack(of_keys)
        by_part = each[..., 0] - each[..., 1]
        scores = layer.scores.gather(-1, at)
        margins = scores[..., 0] - scores[..., 1]
        if known.any():
            _check(layer, by_part.sum(-1)[known], margins[known], each.abs().sum((-1, -2))[known])
        n_shown = min(strongest, len(used))
        order = by_part.abs().argsort(dim=-1, descending=True, stable=True)[..., :n_shown]
        values = by_part.gather(-1, order)
        numbered = torch.tensor([numbers[name] for name in used], device=order.device)[order]
        missing = (0, min(strongest, len(names)) - n_shown)
        none = ~known
        yield {
            "keys": chosen.masked_fill(none[..., None], -1),
            "margins": margins.masked_fill(none, torch.nan),
            "parts": pad(numbered, missing, value=-1).masked_fill(none[..., None], -1),
            "values": pad(values, missing).masked_fill(none[..., None], 0),
            "rest": (by_part.sum(-1) - values.sum(-1)).masked_fill(none, torch.nan),
        }
