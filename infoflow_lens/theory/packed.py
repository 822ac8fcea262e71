"""Sets of sources as bits, 64 of them a word, so that uniting two is one instruction a word."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

_BITS_PER_WORD = 64


@dataclass(frozen=True)
class PackedSets:
    """The sets of a layer as bits, 64 sources a word: uniting two sets is one instruction a word.

    Attributes:
        before: [batch * pos + 1, word], the sets that the layer reads; the last row is the empty
            set of "no position".
        after: the same rows, which rules unite with what they move.
        batch: number of sequences.
        n_sources: T.
    """

    before: Int[Tensor, "row word"]
    after: Int[Tensor, "row word"]
    batch: int
    n_sources: int

    @property
    def n_pos(self) -> int:
        """Positions of a sequence."""
        return (len(self.before) - 1) // self.batch

    def view_by_position(self, words: Int[Tensor, "row word"]) -> Int[Tensor, "batch pos word"]:
        """View `before` or `after` by sequence and position, without the empty set."""
        return words[:-1].view(self.batch, self.n_pos, -1)


def pack(sets: Bool[Tensor, "row source"]) -> Int[Tensor, "row word"]:
    """Sets as bits, 64 sources a word: uniting two sets is then one instruction a word."""
    padding = -sets.shape[1] % _BITS_PER_WORD
    bits = torch.nn.functional.pad(sets.to(torch.uint8), (0, padding)).unflatten(1, (-1, 8))
    places = torch.arange(8, dtype=torch.uint8, device=sets.device)
    # eight bools make a byte, and eight bytes a word
    return (bits << places).sum(dim=-1, dtype=torch.uint8).view(torch.int64)


def unpack(words: Int[Tensor, "row word"], n_sources: int) -> Bool[Tensor, "row source"]:
    """Return the inverse of :func:`pack`."""
    # every byte of bits becomes eight bools, which are eight bytes: a look-up of words
    byte = torch.arange(256, dtype=torch.uint8, device=words.device)
    places = torch.arange(8, dtype=torch.uint8, device=words.device)
    table = (byte[:, None] >> places & 1).view(torch.int64).flatten()
    bits = words.contiguous().view(torch.uint8)
    bools = table.index_select(0, bits.flatten().to(torch.int32)).view(torch.bool)
    return bools.view(len(words), -1)[:, :n_sources]
