"""One propagation: what states hold of inputs, over all paths through layers of edges.

An edge leads from a key to a query of the next layer and has a strength, 0 where there is none; the
residual connection is the edge from a position to itself. A semiring says how strong a path is, by
its edges, and what several paths come to:

- "boolean": is there a path? These are the information sets of Yu et al. (2026, Sec. 5.1).
- "max-product": the best path, as strong as the product of its edges.
- "max-min": the widest path, as strong as its weakest edge.
- "sum-product": the sum of the products over all paths. Of attention weights it is rollout.
- "power": the same of edges to the power p in rows that sum to 1. At p = 1 of attention it is
  rollout, at p = infinity hard attention; at each finite p it is above 0 where "boolean" is true.

Information sets of rules that move few keys are found on bits (`PackedSets`), as that is faster:
uniting two sets is one instruction for 64 sources, and 30 layers of 9 heads and 200 positions take
half the time of products of matrices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError

Path: TypeAlias = Literal["product", "weakest"]
Semiring: TypeAlias = Literal["boolean", "max-product", "max-min", "sum-product", "power"]
BEST: dict[Path, Semiring] = {"product": "max-product", "weakest": "max-min"}
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
        moved = held if strength is None else join_strengths(held, strength.to(held), self.path)
        torch.maximum(self.after, moved, out=self.after)


def join_strengths(
    above: Float[Tensor, "*one"], below: Float[Tensor, "*other"], path: Path
) -> Float[Tensor, "*both"]:
    """Return the strengths of paths from those of their two parts.

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
    """Return the best of the paths through all middle positions.

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
            # only queries that read this position, and sources that it holds, can gain a path
            top, bottom = max(first, start), min(end, start + rows)
            if top >= bottom or left >= right:
                continue
            paths = room[: (bottom - top) * (right - left)].view(bottom - top, right - left)
            # [query, source]: every path through this one middle position
            join(by_middle[middle, top:bottom, None], below[middle, None, left:right], out=paths)
            best = found[top:bottom, left:right]
            torch.maximum(best, paths, out=best)


def _ranges(there: Tensor) -> list[tuple[int, int]]:
    """Find for each row where its first entry is and behind its last; equal numbers for none."""
    n = there.shape[1]
    first = there.int().argmax(dim=1)
    end = n - there.flip(1).int().argmax(dim=1)
    # a row without entries has argmax 0 both ways, which would be the whole row
    end = torch.where(there.any(dim=1), end, first)
    return list(zip(first.tolist(), end.tolist(), strict=True))


def _may_vanish(above: Tensor, below: Tensor) -> bool:
    """Say whether a product of two positive strengths may be too small for the dtype."""
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


# All paths, by any semiring


def rows_at(
    values: Float[Tensor, "*layer batch query key"], place: Int[Tensor, "batch asked"]
) -> Float[Tensor, "*layer batch asked key"]:
    """Take the rows of these queries; anything where they are negative."""
    index = place.clamp(min=0)[..., None].to(values.device)
    return values.take_along_dim(index.expand(*values.shape[:-2], -1, -1), dim=-2)


def rows_to_power(
    edges: Float[Tensor, "*batch query key"], p: float
) -> Float[Tensor, "*batch query key"]:
    """Raise edges to a power and divide each row by its sum; a row without edges keeps to itself.

    Args:
        edges: at least 0.
        p: above 0. Infinity leaves each row its largest edges, equal ones with equal shares.
    """
    top = edges.amax(dim=-1, keepdim=True)
    least = torch.finfo(edges.dtype).tiny
    scaled = edges / top.clamp(min=least)  # so that no large power makes all of a row 0
    raised = (scaled == 1).to(edges) if p == float("inf") else scaled**p
    if p != float("inf"):  # an edge that is there stays there
        raised = torch.where(edges > 0, raised.clamp(min=least), 0)
    own = torch.eye(edges.shape[-1], dtype=edges.dtype, device=edges.device)
    return torch.where(top > 0, raised / raised.sum(dim=-1, keepdim=True).clamp(min=least), own)


def step(
    above: Float[Tensor, "batch query middle"],
    below: Float[Tensor, "batch middle source"],
    semiring: Semiring,
) -> Float[Tensor, "batch query source"]:
    """Join the paths above with those below, through all positions between them.

    "boolean" takes and gives 0 and 1; "power" takes rows that have been raised.
    """
    if semiring == "max-product":
        return best_through(above, below, "product")
    if semiring == "max-min":
        return best_through(above, below, "weakest")
    found = above @ below
    return (found > 0).to(found) if semiring == "boolean" else found


def _edges_of(edges: Tensor, semiring: Semiring, p: float) -> Tensor:
    """Return the edges as `step` takes them, checked."""
    if edges.ndim != 4 or edges.shape[2] != edges.shape[3] or not edges.is_floating_point():
        raise InfoFlowError(
            f"edges are {edges.dtype} of shape {tuple(edges.shape)}: expected floats "
            "[layer, batch, query, key]"
        )
    if not (edges >= 0).all():
        raise InfoFlowError("edges are negative or NaN somewhere: expected at least 0")
    if semiring not in get_args(Semiring):
        names = ", ".join(get_args(Semiring))
        raise InfoFlowError(f"semiring is {semiring!r}: expected one of {names}")
    if not p > 0:
        raise InfoFlowError(f"p is {p}: expected a power above 0")
    if semiring == "boolean":
        return (edges > 0).to(edges)
    return rows_to_power(edges, p) if semiring == "power" else edges


def propagate_edges(
    edges: Float[Tensor, "layer batch query key"],
    semiring: Semiring,
    p: float = 1.0,
    *,
    queries: Int[Tensor, "batch asked"] | None = None,
) -> Float[Tensor, "layer batch asked source"]:
    """Return how strongly states behind every layer hold the sources, over all paths.

    Args:
        edges: strengths at least 0, the lowest layer first; the residual connection stands on the
            diagonal.
        semiring: how edges make a path, and paths a whole; see the module.
        p: the power of "power".
        queries: the positions that are asked for in each sequence, anything where negative; default
            all.

    Raises:
        InfoFlowError: for edges of another shape, negative ones, an unknown semiring, or a power
            that is not above 0.
    """
    held, rows = None, []
    for weights in _edges_of(edges, semiring, p):
        # each position holds itself alone at first, so the first layer's edges are the paths
        held = weights if held is None else step(weights, held, semiring)
        rows.append(held if queries is None else rows_at(held, queries))
    return torch.stack(rows) if rows else edges.new_empty(edges.shape)


def propagate_back(
    edges: Float[Tensor, "layer batch query key"],
    semiring: Semiring,
    p: float = 1.0,
    *,
    queries: Int[Tensor, "batch asked"],
    layer: int = -1,
) -> Float[Tensor, "layer batch asked pos"]:
    """Return how strongly the asked states of one layer hold each state below, over all paths.

    One state costs n^2 a layer, where :func:`propagate_edges` takes n^3 for all.

    Args:
        edges, semiring, p: as of :func:`propagate_edges`; at most 1 for "max-min".
        queries: the positions of the asked states in each sequence; -1 for none.
        layer: of the asked states.

    Returns:
        Entry [l, b, a, q] belongs to the state of position q behind layer l of sequence b. Layers
        above the asked one have 0, and so have states that a sequence does not have.
    """
    weights = _edges_of(edges, semiring, p)
    found = edges.new_zeros(len(edges), *queries.shape, edges.shape[2])
    top = range(len(edges))[layer]
    exists = (queries >= 0)[..., None].to(edges)
    # an asked state holds itself alone; what lies above it stays 0
    found[top] = found[top].scatter(2, queries.clamp(min=0)[..., None], exists)
    for below in range(top - 1, -1, -1):
        found[below] = step(found[below + 1], weights[below + 1], semiring)
    return found


def add_own(edges: Float[Tensor, "*batch query key"]) -> Float[Tensor, "*batch query key"]:
    """Let the residual connection be an edge of strength 1, which weakens no path."""
    kept = edges.clone()
    kept.diagonal(dim1=-2, dim2=-1).fill_(1)
    return kept
