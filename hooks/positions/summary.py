"""How position-like and how content-like the choices of heads are, counted over sequences."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.lazy import pd
from infoflow_lens.hooks.states import add_with_padding

_COUNTS_AT_ONCE = 2**26  # numbers; more layers than these hold are counted in several rounds


@runtime_checkable
class RankedKeys(Protocol):
    """Attended positions by layer, as :class:`PositionsResult` holds them."""

    @property
    def ranks(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def positions(self) -> Sequence[Tensor]: ...  # noqa: D102
    @property
    def ties(self) -> Sequence[Tensor]: ...  # noqa: D102
    @property
    def entropy(self) -> Sequence[Tensor]: ...  # noqa: D102
    @property
    def concentration(self) -> Sequence[Tensor]: ...  # noqa: D102


def column_of_first(part: RankedKeys) -> int:
    """Return the place of rank 1."""
    if 1 not in part.ranks:
        raise InfoFlowError(f"ranks are {part.ranks}, without 1: probe with ranks=(1, ...)")
    return part.ranks.index(1)


def summary_of(parts: Callable[[], Iterable[RankedKeys]], skip: int = 0) -> "pd.DataFrame":
    """:meth:`PositionsResult.summary` of the sequences of several parts, one in memory at a time.

    Args:
        parts: gives them, at least one; called again for every few layers where there are very many
            keys.
        skip: as there.

    Raises:
        InfoFlowError: as there.
    """
    # sizes first: counts [head, query, key] of all layers may not fit into memory
    n_query = n_layers = n_heads = 0
    for part in parts():
        n_layers = len(part.positions)
        n_query = max(n_query, part.positions[0].shape[2])
        n_heads = max(n_heads, *(layer.shape[1] for layer in part.positions))
    if not 0 <= skip < n_query:
        raise InfoFlowError(f"skip is {skip}: expected 0 to {n_query - 1}, so that some stay")
    column = column_of_first(part)
    at_once = max(1, _COUNTS_AT_ONCE // (n_heads * n_query * n_query))
    rows: list[dict[str, Any]] = []
    for start in range(0, n_layers, at_once):
        layers = range(start, min(start + at_once, n_layers))
        counts = {layer: _Choices(skip) for layer in layers}
        for part in parts():
            for layer, choices in counts.items():
                choices.add(part, layer, column)
        for layer, choices in counts.items():
            rows += [{"layer": layer, "head": head, **row} for head, row in choices.rows()]
    return pd.DataFrame(rows)


class _Choices:
    """How often each query of a layer's heads chooses each key, and how spread their rows are."""

    def __init__(self, skip: int) -> None:
        self._skip = skip
        self._counts: Int[Tensor, "_head query key"] = torch.zeros(0, 0, 0, dtype=torch.long)
        self._allowed: Int[Tensor, " _head"] = torch.zeros(0, dtype=torch.long)
        self._tied: Int[Tensor, " _head"] = torch.zeros(0, dtype=torch.long)
        self._spread: Float[Tensor, "measure _head"] = torch.zeros(0, 0, dtype=torch.float64)
        self._n_spread: Int[Tensor, "measure _head"] = torch.zeros(0, 0, dtype=torch.long)

    def add(self, part: RankedKeys, layer: int, column: int) -> None:
        """Count the sequences of a part; `column` is that of rank 1."""
        keys = part.positions[layer][:, :, self._skip :, column].long()
        n_head, n_query = keys.shape[1:]
        n_key = max(n_query + self._skip, int(keys.max()) + 1 if keys.numel() else 0)
        tied = (part.ties[layer][:, :, self._skip :, column] > 0) & (keys >= 0)
        places = (keys >= 0) & ~tied
        head = torch.arange(n_head)[:, None].expand_as(keys)
        query = torch.arange(n_query).expand_as(keys)
        # one number for each (head, query, key), to be counted at once
        flat = ((head * n_query + query) * n_key + keys)[places]
        counts = torch.bincount(flat, minlength=n_head * n_query * n_key)
        self._counts = add_with_padding(self._counts, counts.view(n_head, n_query, n_key))
        self._allowed = add_with_padding(self._allowed, (keys >= 0).sum(dim=(0, 2)))
        self._tied = add_with_padding(self._tied, tied.sum(dim=(0, 2)))
        if part.entropy:
            both = torch.stack([part.entropy[layer], part.concentration[layer]])
            both = both[:, :, :, self._skip :].double()
            self._spread = add_with_padding(self._spread, both.nansum(dim=(1, 3)))
            self._n_spread = add_with_padding(self._n_spread, (~both.isnan()).sum(dim=(1, 3)))

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the columns of the summary for each head."""
        spread = self._spread / self._n_spread
        for head, counts in enumerate(self._counts):
            row: dict[str, Any] = _explain_choices(counts, self._skip)
            row["tied"] = float(self._tied[head] / self._allowed[head])
            if len(spread):
                row["entropy"], row["concentration"] = spread[:, head].tolist()
            yield head, row


def _explain_choices(counts: Int[Tensor, "query key"], skip: int) -> dict[str, float]:
    """Return the shares of choices that one offset, one key, or one key for each query explain."""
    # a head without choices, or whose choices are all tied
    total = int(counts.sum())
    if total == 0:
        return dict.fromkeys(
            ("by_offset", "offset", "by_index", "index", "by_position", "by_content"), math.nan
        )
    n_query, n_key = counts.shape
    # key minus query, so that one offset is one diagonal
    offset = torch.arange(n_key) - (skip + torch.arange(n_query))[:, None]
    first = int(offset.min())
    by_offset = torch.bincount((offset - first).flatten(), counts.flatten().double())
    by_index = counts.sum(dim=0)
    by_position = float(counts.amax(dim=1).sum()) / total
    return {
        "by_offset": float(by_offset.max()) / total,
        "offset": float(by_offset.argmax() + first),
        "by_index": int(by_index.max()) / total,
        "index": float(by_index.argmax()),
        "by_position": by_position,
        "by_content": 1 - by_position,
    }
