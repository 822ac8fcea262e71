"""What the first layer of a model over vector tokens keeps of the tokens that its heads choose."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from infoflow_lens.hooks.model.call import call
from infoflow_lens.models.host import VectorTransformer
from infoflow_lens.objectives import nmse
from infoflow_lens.studies.study import Row
from infoflow_lens.studies.tempering import MapErrors, map_errors, mean_entropy, temper

TOKENS, CLS = "tokens", "CLS"
QUERIES = (TOKENS, CLS)
_ATTENTION = "blocks.0.attn"
IDLE = 0.01  # a head without which the NMSE rises by less does nothing
_EVERY = 4  # of these sequences one is held out of the fit


@dataclass(frozen=True)
class FirstLayer:
    """One layer's attention on some sequences, and the states behind it.

    Attributes:
        x: the sequences.
        scores: of all queries, CLS last; -inf where a key may not be attended to.
        pattern: attention.
        state: the post-attention state of all queries.
    """

    x: Float[Tensor, "n pos d_token"]
    scores: Float[Tensor, "n head query key"]
    pattern: Float[Tensor, "n head query key"]
    state: Float[Tensor, "n query d_model"]

    def rows(self, queries: str) -> slice:
        """Return the queries of a kind."""
        last = self.x.shape[1]
        return slice(0, last) if queries == TOKENS else slice(last, last + 1)

    def chosen(self, rank: int) -> Int[Tensor, "n head query"]:
        """Return the key of each query's rank-th largest score, among tokens."""
        # CLS holds no token that a map could give back
        keys = self.scores[..., : self.x.shape[1]]
        return keys.topk(rank, dim=-1).indices[..., rank - 1]

    def entropy(self, head: int, queries: str) -> float:
        """Return the mean entropy of a head's attention, in nats."""
        pattern = self.pattern[:, head, self.rows(queries)]
        return mean_entropy(pattern, self._mask(queries))

    def largest(self, head: int, queries: str) -> float:
        """Return the mean of a head's largest share of attention."""
        return float(self.pattern[:, head, self.rows(queries)].amax(dim=-1).mean())

    def errors(self, head: int, queries: str, rank: int) -> MapErrors:
        """Measure how badly a linear map gives back a head's rank-th choice (eq 56)."""
        rows = self.rows(queries)
        chosen = self.chosen(rank)[:, head, rows]
        n = len(self.x)
        target = self.x[torch.arange(n)[:, None], chosen]
        held_out = torch.arange(n) % _EVERY == _EVERY - 1
        return map_errors(self.state[:, rows], target, held_out)

    def temper(self, entropies: Mapping[str, list[float]]) -> Float[Tensor, "n head query key"]:
        """Return the patterns of these scores with other entropies, by kind of query and head."""
        pattern = self.pattern.clone()
        for queries, of_heads in entropies.items():
            rows = self.rows(queries)
            for head, entropy in enumerate(of_heads):
                pattern[:, head, rows] = temper(
                    self.scores[:, head, rows], self._mask(queries), entropy
                )
        return pattern

    def _mask(self, queries: str) -> Tensor:
        return self.scores[0, 0, self.rows(queries)] > -torch.inf


def first_layer(
    model: VectorTransformer,
    x: Float[Tensor, "n pos d_token"],
    pattern: Float[Tensor, "n head query key"] | None = None,
) -> FirstLayer:
    """Run the first layer on sequences, and keep what it does.

    Args:
        model: the model.
        x: the sequences.
        pattern: attention to put in the place of its own.
    """
    points = {
        "scores": f"{_ATTENTION}.hook_attn_scores",
        "pattern": f"{_ATTENTION}.hook_pattern",
        "state": "blocks.0.hook_resid_mid",
    }
    hooks: Any = [] if pattern is None else [(points["pattern"], _replace(pattern))]
    with torch.no_grad():
        caught = call(model, x, tuple(points.values()), edit=hooks).activations
    return FirstLayer(x.cpu(), *(caught[point].cpu() for point in points.values()))


def lost_without(
    model: VectorTransformer,
    x: Float[Tensor, "n pos d_token"],
    y: Float[Tensor, "n d_output"],
    head: int,
    queries: str,
) -> float:
    """Measure the rise of the NMSE when a first-layer head tells nothing at some queries.

    Its output there becomes its mean over sequences, and over the tokens for token queries.
    """
    last = x.shape[1]
    rows = slice(0, last) if queries == TOKENS else slice(last, last + 1)

    def average(z: Tensor, hook: Any) -> Tensor:
        edited = z.clone()
        edited[:, rows, head] = z[:, rows, head].mean(dim=(0, 1))
        return edited

    with torch.no_grad():
        whole = nmse(model(x), y)
        with model.hooks(fwd_hooks=[(f"{_ATTENTION}.hook_z", average)]):
            without = nmse(model(x), y)
    return float(without) - float(whole)


def _replace(pattern: Tensor) -> Callable[..., Tensor]:
    def hook_fn(own: Tensor, hook: Any) -> Tensor:
        return pattern.to(own)

    return hook_fn


def recovery_rows(
    initial: VectorTransformer,
    trained: VectorTransformer,
    x: Float[Tensor, "n pos d_token"],
    y: Float[Tensor, "n d_output"],
    ranks: Sequence[int] = (1, 2),
) -> list[Row]:
    """Measure what is recovered of each first-layer head's choices, before and after training.

    A row for each head, kind of queries and rank, with errors (`_second_moment`, `_fvu`) of the
    initial model, of the trained one, and of the initial one with its scores scaled so that the
    attention of each head has the trained one's entropy.

    Args:
        initial: the model before training.
        trained: after it.
        x: sequences on which neither was trained.
        y: their targets.
        ranks: which choices.
    """
    before, after = first_layer(initial, x), first_layer(trained, x)
    n_heads = after.scores.shape[1]
    entropies = {
        queries: [after.entropy(head, queries) for head in range(n_heads)] for queries in QUERIES
    }
    # the control: the model before training with attention as peaked as after it
    peaked = first_layer(initial, x, before.temper(entropies))
    rows: list[Row] = []
    for head in range(n_heads):
        for queries in QUERIES:
            about: Row = {
                "head": head,
                "queries": queries,
                "lost_without": lost_without(trained, x, y, head, queries),
                "entropy_initial": before.entropy(head, queries),
                "entropy": entropies[queries][head],
                "largest": after.largest(head, queries),
            }
            for rank in ranks:
                row: Row = {**about, "rank": rank}
                for stage, seen in (("initial", before), ("trained", after), ("tempered", peaked)):
                    errors = seen.errors(head, queries, rank)
                    row[f"{stage}_second_moment"] = errors.second_moment
                    row[f"{stage}_fvu"] = errors.fvu
                initial_error = float(row["initial_second_moment"] or 0)
                row["ratio"] = float(row["trained_second_moment"] or 0) / initial_error
                row["tempered_ratio"] = float(row["tempered_second_moment"] or 0) / initial_error
                rows.append(row)
    return rows
