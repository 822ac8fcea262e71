"""The best paths through layers of edges that have strengths.

An edge leads from a key to a query of the next layer and has a strength from 0, no edge, to 1. A
path is as strong as the product of its edges, or as its weakest edge. Layers are joined by a
product of matrices in which the best of all middle positions takes the place of the sum.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError

Path: TypeAlias = Literal["product", "weakest"]
_ROOM = 2**18  # numbers in a block of paths, so that it stays in the cache


@dataclass(frozen=True)
class GradedLayer:
    """How strongly each position holds each source, before and after a layer.

    Attributes:
        before: float [batch, pos, source], what the layer reads.
        after: the same, which rules raise by what they move.
        path: how strong a path of several edges is.
    """

    before: Float[Tensor, "batch pos source"]
    after: Float[Tensor, "batch pos source"]
    path: Path

    def bring(self, held: Float[Tensor, "batch pos source"], strength: Tensor | None) -> None:
        """Raise what the positions hold to what is brought to them by edges; of 1 without any."""
        moved = held if strength is None else joined(held, strength.to(held), self.path)
        torch.maximum(self.after, moved, out=self.after)


def joined(
    above: Float[Tensor, "*one"], below: Float[Tensor, "*other"], path: Path
) -> Float[Tensor, "*both"]:
    """The strengths of paths from those of their two parts.

    A product of positive strengths that is too small for the dtype is the smallest normal number,
    so that a path that is there stays there.
    """
    if path == "weakest":
        return torch.minimum(above, below)
    found = above * below
    there = (above > 0) & (below > 0)
    return torch.where(there, found.clamp(min=torch.finfo(found.dtype).tiny), 0)


def best_through(
    above: Float[Tensor, "batch query middle"],
    below: Float[Tensor, "batch middle source"],
    path: Path,
) -> Float[Tensor, "batch query source"]:
    """The best of the paths through all middle positions.

    What no query reads of a middle position, and what it does not hold, costs nothing: with causal
    attention a sixth of all triples is looked at.

    Args:
        above: strengths of the upper part, float32 or float64, at least 0.
        below: strengths of the lower part.
        path: how the two parts make a whole.

    Returns:
        The strengths of the best paths; 0 where there is none.
    """
    found = above.new_zeros(above.shape[0], above.shape[1], below.shape[2])
    for best, upper, lower in zip(found, above, below, strict=True):
        _through(best, upper, lower, torch.mul if path == "product" else torch.minimum)
    if path == "product" and _may_vanish(above, below):
        there = ((above > 0).to(above) @ (below > 0).to(above)) > 0
        found = torch.where(there, found.clamp(min=torch.finfo(found.dtype).tiny), 0)
    return found


def _through(
    found: Float[Tensor, "query source"],
    above: Float[Tensor, "query middle"],
    below: Float[Tensor, "middle source"],
    join: Callable[..., Tensor],
) -> None:
    """Raise `found` to the best paths of one sequence, a middle position at a time."""
    by_middle = above.t().contiguous()
    queries, sources = _ranges(by_middle > 0), _ranges(below > 0)
    rows = max(1, _ROOM // max(1, found.shape[1]))
    room = found.new_empty(rows * found.shape[1])
    for start in range(0, found.shape[0], rows):
        for middle, ((first, end), (left, right)) in enumerate(zip(queries, sources, strict=True)):
            top, bottom = max(first, start), min(end, start + rows)
            if top >= bottom or left >= right:
                continue
            paths = room[: (bottom - top) * (right - left)].view(bottom - top, right - left)
            join(by_middle[middle, top:bottom, None], below[middle, None, left:right], out=paths)
            best = found[top:bottom, left:right]
            torch.maximum(best, paths, out=best)


def _ranges(there: Tensor) -> list[tuple[int, int]]:
    """For each row where its first entry is and behind its last; equal numbers if it has none."""
    n = there.shape[1]
    first = there.int().argmax(dim=1)
    end = n - there.flip(1).int().argmax(dim=1)
    end = torch.where(there.any(dim=1), end, first)
    return list(zip(first.tolist(), end.tolist(), strict=True))


def _may_vanish(above: Tensor, below: Tensor) -> bool:
    """Whether a product of two positive strengths may be too small for the dtype."""
    least = [float(part.masked_fill(part <= 0, 1).min()) if part.numel() else 1.0
             for part in (above, below)]  # fmt: skip
    return least[0] * least[1] < torch.finfo(above.dtype).tiny


def check_strengths(strengths: Any, name: str) -> None:
    """Refuse what are no strengths.

    Raises:
        InfoFlowError: for what is no float tensor of numbers from 0 to 1.
    """
    if not isinstance(strengths, Tensor) or not strengths.is_floating_point():
        kind = strengths.dtype if isinstance(strengths, Tensor) else type(strengths).__name__
        raise InfoFlowError(f"{name} are {kind}: expected a tensor of floats from 0 to 1")
    if not ((strengths >= 0) & (strengths <= 1)).all():
        raise InfoFlowError(
            f"{name} lie in [{float(strengths.min()):.3g}, {float(strengths.max()):.3g}]: expected "
            "numbers from 0, no edge, to 1, an edge that weakens nothing; divide by the largest"
        )
