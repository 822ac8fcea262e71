"""Heads whose first choice stands in a relation to the query, over many texts."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.lazy import pd
from infoflow_lens.foundation.modules import eval_mode
from infoflow_lens.foundation.progress import progress_bar
from infoflow_lens.foundation.settings import checked
from infoflow_lens.hooks.model.inputs import Inputs, read_inputs
from infoflow_lens.hooks.model.points import (
    check_one_device,
    layer_count,
    layers_with_attention,
    takes_model,
)
from infoflow_lens.hooks.passes.run import run
from infoflow_lens.hooks.passes.view import Needs

Ids: TypeAlias = Int[Tensor, " pos"]
Relation: TypeAlias = str | int | Callable[[Ids], Bool[Tensor, "query key"]]
Places: TypeAlias = Callable[[Ids], Bool[Tensor, " pos"]]


def _shift(by: int) -> Callable[[Ids], Bool[Tensor, "query key"]]:
    """Relate a query to the key that stands so many places behind it."""

    def relate(ids: Ids) -> Bool[Tensor, "query key"]:
        place = torch.arange(len(ids))
        return place[None, :] == place[:, None] + by

    return relate


def _same_token(ids: Ids) -> Bool[Tensor, "query key"]:
    """Relate a query to its own token, elsewhere."""
    same = ids[:, None] == ids[None, :]
    return same & ~torch.eye(len(ids), dtype=torch.bool)


def _after_same_token(ids: Ids) -> Bool[Tensor, "query key"]:
    """Relate a query to the key behind another place of its token: induction."""
    # the roll brings the last key to place 0, which stands behind none
    return _same_token(ids).roll(1, dims=1) & (torch.arange(len(ids)) > 0)


RELATIONS: dict[str, Callable[[Ids], Bool[Tensor, "query key"]]] = {
    "self": _shift(0),
    "previous": _shift(-1),
    "next": _shift(1),
    "same token": _same_token,
    "after same token": _after_same_token,
}


@takes_model
@checked
def find_heads(
    model: nn.Module,
    inputs: Inputs,
    relation: Relation,
    *,
    queries: Places | None = None,
    keys: Places | None = None,
    progress: bool = True,
) -> "pd.DataFrame":
    """Find heads whose first choice stands in a relation to the query, beside chance.

    Args:
        model: any Transformer; of layers without attention nothing is asked.
        inputs: texts, pairs of texts, or token ids.
        relation: "self", "previous", "next", "same token" (elsewhere), "after same token"
            (induction); a number for the key at that place, negative from the end; or a function
            of token ids [pos] that says which keys are meant, bool [query, key].
        queries: a function of token ids [pos] that says which queries count; default, all. A query
            that sees no key that is meant, or nothing else, never counts.
        keys: the same for the keys among which the first choice is taken.
        progress: whether to show a bar.

    Returns:
        A row for each head, the one that stands out most first: layer, head, the share of queries
        whose first choice is meant (of several keys with the largest score, the share of these that
        are), the share by chance (a key at random among those that the query sees), and how many
        queries count.

    Raises:
        InfoFlowError: for an unknown relation, functions that give something else, and texts in
            which no query counts.

    Example:
        >>> model = load_any("build/models/smollm2").model
        >>> find_heads(model, texts, "after same token").head()
    """
    asked = _relation(relation)
    layers = layers_with_attention(model)
    check_one_device(model)
    texts = read_inputs(model, inputs)
    hits: list[Any] = [0] * layer_count(model)
    chance, counted = torch.zeros(len(hits)).double(), torch.zeros(len(hits)).long()
    with (
        eval_mode(model),
        torch.no_grad(),
        progress_bar("texts", len(texts.rows), progress) as step,
    ):
        # each text runs alone, so that nothing of it is padding
        for text in texts.batches(1):
            own = text.tokens[0].cpu()
            meant = _check_answer(asked(own), (len(own), len(own)), "relation")
            asking, offered = (
                torch.ones(len(own), dtype=torch.bool)
                if places is None
                else _check_answer(places(own), (len(own),), name)
                for places, name in ((queries, "queries"), (keys, "keys"))
            )
            seen = run(model, text, Needs.of(model, scores=True, layers=layers))
            for layer in layers:
                open_ = seen.visible(layer)[0].cpu() & offered
                good, n_open = (meant & open_).sum(-1), open_.sum(-1)
                # a query counts where there is a choice: a key that is meant, and one that is not
                counts = asking & (good > 0) & (good < n_open)
                # by scores, as of keys whose weights are 0 all but one would be left out
                scores = seen.scores(layer)[0].float().cpu()
                scores = scores.masked_fill(~open_, -torch.inf)
                # of equal scores each is the first choice as often as the others
                first = scores == scores.amax(dim=-1, keepdim=True)
                hit = (first & meant).sum(-1).double() / first.sum(-1)
                hits[layer] = hits[layer] + (hit * counts).sum(-1)
                # chance: the share of the open keys that are meant
                chance[layer] += float((good[counts] / n_open[counts]).sum())
                counted[layer] += int(counts.sum())
            step(1)
    if not int(counted.max()):
        raise InfoFlowError(
            f"no query sees both a key that relation {relation!r} means and one that it does not: "
            "expected texts in which some query sees both"
        )
    rows = [
        {
            "layer": layer,
            "head": head,
            "share": n / int(counted[layer]),
            "chance": float(chance[layer] / counted[layer]),
            "queries": int(counted[layer]),
        }
        for layer in layers
        if counted[layer]
        for head, n in enumerate(hits[layer].tolist())
    ]
    # the largest distance from chance first, as chance differs between layers
    frame = pd.DataFrame(rows)
    order = (frame["share"] - frame["chance"]).sort_values(ascending=False, kind="stable").index
    return frame.loc[order].reset_index(drop=True)


def _relation(relation: Relation) -> Callable[[Ids], Bool[Tensor, "query key"]]:
    if isinstance(relation, bool) or not isinstance(relation, str | int):
        return relation  # type: ignore[return-value]
    if isinstance(relation, int):
        # a place that a text does not have is no key of it
        return lambda ids: (
            torch.arange(len(ids)) == (relation + len(ids) if relation < 0 else relation)
        ).expand(len(ids), -1)
    if relation not in RELATIONS:
        raise InfoFlowError(
            f"relation is {relation!r}: expected one of {', '.join(RELATIONS)}, a place, or a "
            "function of token ids"
        )
    return RELATIONS[relation]


def _check_answer(found: object, shape: tuple[int, ...], name: str) -> Tensor:
    """Refuse what a function of the user's says of a text, if no booleans of the shape needed."""
    if not isinstance(found, Tensor) or found.dtype != torch.bool or found.shape != shape:
        said = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found)
        raise InfoFlowError(f"{name} gives {said} for a text: expected booleans of shape {shape}")
    return found.cpu()
