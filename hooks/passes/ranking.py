"""Keys in the order of their scores: ties, margins, and ranks that no key has."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError


class Ranked(NamedTuple):
    """Keys ranked by score, for each query; undefined entries are -1 (positions) or NaN (margins).

    Attributes:
        positions: key positions.
        margins: score of the rank minus the score of the next rank; infinite where there is no
            next key.
        ties: how many other keys have exactly the score of this rank.
    """

    positions: Int[Tensor, "*query rank"]
    margins: Float[Tensor, "*query rank"]
    ties: Int[Tensor, "*query rank"]


def rank_keys(scores: Float[Tensor, "*query key"], ranks: Sequence[int]) -> Ranked:
    """The keys of the k-th largest scores, for each k in `ranks` (1 is the argmax).

    Scores are compared in float32; ties go to the lowest position. Masked keys (-inf, or the
    lowest finite value that some models use instead) are never chosen: a rank beyond the allowed
    keys is undefined. A mask of another value, -1e9 say, cannot be told from a score.
    """
    ranks, scores = tuple(ranks), scores.detach()
    lowest = torch.finfo(scores.dtype).min
    scores = scores.float()
    n_keys, deepest = scores.shape[-1], max(ranks)
    dtype = torch.int16 if n_keys < 2**15 else torch.int32
    values, places = scores.topk(min(deepest + 1, n_keys), dim=-1)  # one more, for the last margin
    if values.shape[-1] <= deepest:
        missing = (0, deepest + 1 - values.shape[-1])
        values = torch.nn.functional.pad(values, missing, value=-torch.inf)
        places = torch.nn.functional.pad(places, missing)
    masked = values[..., :-1] <= lowest
    positions = places[..., :-1].to(dtype).masked_fill_(masked, -1)
    margins = values[..., :-1] - values[..., 1:].masked_fill(values[..., 1:] <= lowest, -torch.inf)
    margins.masked_fill_(masked, torch.nan)
    ties = torch.zeros_like(positions)
    equal = margins == 0
    if equal.any():  # topk breaks ties as it likes
        tied = equal.any(dim=-1)
        positions[tied], ties[tied] = _rank_tied(scores[tied], values[tied][:, :-1], lowest, dtype)
    if ranks != tuple(range(1, deepest + 1)):
        columns = [rank - 1 for rank in ranks]
        return Ranked(*(part[..., columns] for part in (positions, margins, ties)))
    return Ranked(positions, margins, ties)


def _rank_tied(
    scores: Float[Tensor, "row key"],
    values: Float[Tensor, "row rank"],
    lowest: float,
    dtype: torch.dtype,
) -> tuple[Int[Tensor, "row rank"], Int[Tensor, "row rank"]]:
    """Positions in the order of their largest values, the lowest first among equals; and ties."""
    masked = values <= lowest
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, : values.shape[1]]
    missing = (0, values.shape[1] - order.shape[1])
    positions = torch.nn.functional.pad(order, missing).masked_fill(masked, -1)
    equal = [(scores == value[:, None]).sum(dim=-1) - 1 for value in values.unbind(dim=1)]
    return positions.to(dtype), torch.stack(equal, dim=1).masked_fill(masked, 0).to(dtype)


def check_rank_support(ranks: Sequence[int], without: Sequence[int], n_keys: int) -> None:
    """Refuse ranks that no query can have.

    Raises:
        InfoFlowError: if a rank exceeds the number of keys that are not left out.
    """
    left = n_keys - len([position for position in without if position < n_keys])
    if max(ranks) > left:
        raise InfoFlowError(
            f"rank {max(ranks)} is beyond the number of keys: the longest row of attention has "
            f"{left} keys; ask for ranks up to {left}"
        )


def leaving_out(
    scores: Float[Tensor, "*query key"], positions: Sequence[int]
) -> Float[Tensor, "*query key"]:
    """The scores with some keys masked, which are then never ranked."""
    chosen = [position for position in positions if position < scores.shape[-1]]
    if not chosen:
        return scores
    keys = torch.tensor(chosen, device=scores.device)
    return scores.index_fill(-1, keys, -torch.inf)
