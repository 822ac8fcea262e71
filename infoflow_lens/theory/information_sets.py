"""Information sets and their propagation by rule (1), max-position retrieval.

The information set of a state is the set of input positions whose information it can still give
back (Yu, Jiang, Bao, Li 2026, Sec. 5.1). Predicted and measured sets are the same type, so that
comparing them is one function (`infoflow_lens.agreement.compare`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError

_BOOLS_PER_WORD = 8


@dataclass(frozen=True, eq=False)
class InformationSets:
    """Sets of input positions, one for every layer, sequence and position.

    Attributes:
        members: bool [layer, batch, pos, source]. Entry [l, b, t, s] says that input token s lies
            in the set of position t after attention layer l of sequence b. Layers count from 0 as
            in TransformerLens, so the paper's I_t^(l) is ``members[l - 1, :, t - 1]``. Positions
            beyond the sources (the CLS token, which reads but is no token) come last.

    Raises:
        InfoFlowError: if `members` is no bool tensor of four axes, or has more sources than
            positions.
    """

    members: Bool[Tensor, "layer batch pos source"]

    def __post_init__(self) -> None:
        members = self.members
        if members.ndim != 4 or members.dtype != torch.bool:
            raise InfoFlowError(
                f"information sets are {members.dtype} of shape {tuple(members.shape)}: "
                "expected bool [layer, batch, pos, source]; threshold scores before you build them"
            )
        if members.shape[3] > members.shape[2]:
            raise InfoFlowError(
                f"information sets have {members.shape[3]} sources but {members.shape[2]} "
                "positions: every source is a position; pass one row for each"
            )

    @property
    def n_layers(self) -> int:
        """The number of attention layers."""
        return self.members.shape[0]

    @property
    def n_sources(self) -> int:
        """The number of input tokens, T in the paper."""
        return self.members.shape[3]

    def of(self, layer: int, sequence: int, position: int) -> set[int]:
        """One information set as a Python set of source positions."""
        return set(self.members[layer, sequence, position].nonzero().flatten().tolist())

    def sizes(self) -> Int[Tensor, "layer batch pos"]:
        """The sizes |I_t^(l)|, on which the paper's parameter cost depends (Sec. 5.2)."""
        return self.members.sum(dim=-1)


def _check_positions(
    positions: Sequence[Int[Tensor, "batch _head pos *_rank"]], n_sources: int | None
) -> tuple[int, int, int]:
    """Refuse what is no list of attended positions; return batch, n_pos and n_sources."""
    if not positions:
        raise InfoFlowError("no layer to propagate through: expected one position tensor a layer")
    batch, _, n_pos = positions[0].shape[:3]
    n_sources = n_pos if n_sources is None else n_sources
    if not 1 <= n_sources <= n_pos:
        raise InfoFlowError(
            f"n_sources is {n_sources}: expected 1 to {n_pos}, the number of query positions"
        )
    for layer, chosen in enumerate(positions):
        if chosen.ndim not in (3, 4) or chosen.is_floating_point() or chosen.dtype == torch.bool:
            raise InfoFlowError(
                f"positions of layer {layer} are {chosen.dtype} of shape {tuple(chosen.shape)}: "
                "expected integers [batch, head, pos] or [batch, head, pos, rank]"
            )
        if (chosen.shape[0], chosen.shape[2]) != (batch, n_pos):
            raise InfoFlowError(
                f"positions of layer {layer} have batch and pos "
                f"{(chosen.shape[0], chosen.shape[2])}, layer 0 has {(batch, n_pos)}: "
                "pass the same sequences through every layer"
            )
        if chosen.numel() and (chosen.min() < -1 or chosen.max() >= n_pos):
            raise InfoFlowError(
                f"positions of layer {layer} lie in [{chosen.min()}, {chosen.max()}]: "
                f"expected key positions 0 to {n_pos - 1}, or -1 for none"
            )
    return batch, n_pos, n_sources


def propagate(
    positions: Sequence[Int[Tensor, "batch _head pos *_rank"]], n_sources: int | None = None
) -> InformationSets:
    """Information sets after every layer, from the key positions that each head retrieves.

    Rule (1) of Sec. 5.1, max-position retrieval: starting from I_t = {t} for tokens and the empty
    set for positions beyond the sources (CLS), every layer unites a position's own set (the
    residual stream) with the sets, one layer earlier, of the positions that its heads chose:
    ``I_t^(l) = I_t^(l-1) U U_i I_{s_i(t)}^(l-1)``. (The rule survives in the paper's prose; its
    formula is restored from there.)

    Args:
        positions: for every layer, integers [batch, head, pos] or [batch, head, pos, rank]: the
            key positions that each head passes on to each query position. Several ranks are united.
            -1 passes nothing. The number of heads may differ between layers.
        n_sources: T, the number of input tokens; default, the number of positions. Positions from
            n_sources on are CLS-like and start empty.

    Returns:
        Sets of shape [layer, batch, pos, source].

    Raises:
        InfoFlowError: for an empty list, shapes that differ between layers, or positions out of
            range.

    Example (App. E of the paper, T = 4 and CLS, counted from 0):
        >>> layer_1 = torch.tensor([[[2, 2, 1, 1, -1]]])  # CLS is not followed in layer 1
        >>> layer_2 = torch.tensor([[[-1, -1, -1, -1, 1]]])
        >>> sets = propagate([layer_1, layer_2], n_sources=4)
        >>> [sets.of(0, 0, t) for t in range(4)]
        [{0, 2}, {1, 2}, {1, 2}, {1, 3}]
        >>> sets.of(1, 0, 4)  # CLS holds the active index set of the target
        {1, 2}
    """
    batch, n_pos, n_sources = _check_positions(positions, n_sources)
    device = positions[0].device

    # A set is a row of bytes 0 or 1. Rows padded to whole words are united eight sources at a
    # time, and one row of zeros at the end stands for "no position".
    width = -(-n_sources // _BOOLS_PER_WORD) * _BOOLS_PER_WORD
    current = torch.zeros(batch * n_pos + 1, width, dtype=torch.bool, device=device)
    tokens = torch.arange(n_sources, device=device)
    current[:-1].view(batch, n_pos, width)[:, tokens, tokens] = True
    nothing = batch * n_pos
    first_row = torch.arange(batch, device=device)[:, None] * n_pos

    layers = []
    for chosen in positions:
        previous = current.view(torch.int64)
        united = previous.clone()
        heads = chosen.unsqueeze(-1) if chosen.ndim == 3 else chosen
        for choice in heads.permute(1, 3, 0, 2).flatten(0, 1):  # [head * rank, batch, pos]
            choice = choice.to(torch.int64)
            rows = torch.where(choice < 0, nothing, choice + first_row)
            united[:-1] |= previous.index_select(0, rows.flatten())
        current = united.view(torch.bool)
        layers.append(current[:-1].view(batch, n_pos, width)[..., :n_sources])
    return InformationSets(torch.stack(layers))
