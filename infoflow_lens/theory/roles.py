"""Roles of a routed head: the scores that it chooses from, and which the query's token takes."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.theory.comparison import Component

Role = tuple[int, bool]  # component, and whether the query's token comes second

_MOST_SCORES_AT_ONCE = 2**16  # fits in the processor's cache, which halves the time


def roles_of(components: Sequence[Component], indices: Sequence[int]) -> list[Role]:
    """The roles that a routed head has: both sides of each component, one if order is nothing.

    Raises:
        InfoFlowError: for components that are not pairs.
    """
    roles: list[Role] = []
    for index in indices:
        if components[index].arity != 2:
            raise InfoFlowError(
                f"component {index} has arity {components[index].arity}: expected 2, since a role "
                "is the score of the query's token with another"
            )
        roles += (
            [(index, False)] if components[index].symmetric else [(index, False), (index, True)]
        )
    return roles


def attainable(
    component: Component,
    reverse: bool,
    x: Float[Tensor, "*batch d_token"],
    reference: Float[Tensor, "sample d_token"],
    n_keys: int,
) -> Float[Tensor, "*batch"]:
    """Return the score that a query can hope for: what the best of `n_keys` random tokens gives it.

    The upper 1/n_keys quantile of its scores with the reference tokens.
    """
    queries = x.flatten(0, -2)
    # the last of the best 1 / n_keys of the reference tokens
    rank = min(len(reference), max(1, round(len(reference) / n_keys)))
    parts = []
    for part in queries.split(max(1, _MOST_SCORES_AT_ONCE // len(reference))):
        first = part[:, None].expand(-1, len(reference), -1)
        second = reference[None].expand(len(part), -1, -1)
        pair = [second, first] if reverse else [first, second]
        scores = component.preference(torch.stack(pair, dim=-2))
        parts.append(scores.topk(rank, dim=1).values[:, -1])
    return torch.cat(parts).view(x.shape[:-1])


def choose_roles(
    components: Sequence[Component],
    roles: Sequence[Role],
    x: Float[Tensor, "batch pos d_token"],
    reference: Float[Tensor, "sample d_token"],
) -> Int[Tensor, "batch pos choice"]:
    """Order the roles for every token from best to worst, as indices, by the token alone.

    A role is good for a token if few reference tokens could reach a higher score in it; beyond all
    of them, the distance to the best of them in standard deviations decides.
    """
    ranks = []
    for component, reverse in roles:
        given = components[component]
        pool = attainable(given, reverse, reference, reference, x.shape[1])
        own = attainable(given, reverse, x, reference, x.shape[1])
        ordered = pool.sort().values
        higher = 1 - torch.searchsorted(ordered, own.contiguous()).to(x.dtype) / len(pool)
        # ranks tie above the whole pool; there the distance to it decides
        beyond = (own - ordered[-1]) / pool.std().clamp(min=1e-12)
        ranks.append(higher - torch.where(higher <= 0, beyond, torch.zeros_like(beyond)) / 1e6)
    return torch.stack(ranks, dim=-1).argsort(dim=-1, stable=True)
