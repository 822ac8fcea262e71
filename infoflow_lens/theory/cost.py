"""What information costs: the parameter-cost law and Theorem 3's codes (Sec. 5.2, App. A.3)."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from annotated_types import Gt, Lt
from jaxtyping import Float
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import (
    Count,
    Index,
    Positive,
    Remedy,
    check_by_layer,
    checked,
    settings,
)
from infoflow_lens.theory.information_sets import InformationSets

Mode = Annotated[
    Literal["law", "decoder", "total"],
    Remedy("'effective' is 'total' now, and 'certified' 'decoder'"),
]
Precision = Annotated[float, Gt(0), Lt(1), Remedy("a precision such as 0.01")]
MODES: tuple[Mode, ...] = ("law", "decoder", "total")
_ROOM = 0.999  # of a step, for an analog coordinate; the rest keeps it off the next threshold


@checked
def exponent(size: Index, d_token: Count, d_model: Count, mode: Mode = "total") -> float:
    """Return k of eps^-k, the cost of a state of width E that holds |I| tokens of dimension d.

    - "law": ``|I| d / E``, the law of Sec. 5.2 as printed, which is not tight.
    - "decoder": ``max(0, |I| d / E - 1)``. :class:`DigitCode` with analog coordinates needs no more
      [proved: it is built], and no code does with less while weights are at most 1 [stated, Thm 6].
      The built one has large weights, as the paper's; between the two regimes it stays open.
    - "total": of encoder and decoder, 0 where all fits, ``|I| d <= E`` (the identity codes it),
      else ``max(1, |I| d / E - 1)``: reached by that code, whose encoder has a step for each of
      1/eps cells. That an encoder needs so many is open.

    Raises:
        InfoFlowError: for sizes below 0 or dimensions below 1, or an unknown mode.
    """
    return float(_apply_mode(torch.tensor(size * d_token / d_model, dtype=torch.float64), mode))


def _apply_mode(law: Float[Tensor, "*state"], mode: Mode) -> Float[Tensor, "*state"]:
    decoder = (law - 1).clamp(min=0)
    total = torch.where(law <= 1, 0.0, decoder.clamp(min=1))
    return {"law": law, "decoder": decoder, "total": total}[mode]


@checked
def exponents(
    sets: InformationSets, d_token: int, d_model: int | Sequence[int], mode: Mode = "total"
) -> Float[Tensor, "layer batch pos"]:
    """Return :func:`exponent` of every state, from the sets after its layer.

    The updated set counts, in all three rules [derived: one cost per I_t^(l), "regarding the size
    of I_t^(l)"]. States of the last layer other than the last position cost nothing, since nothing
    reads them (eq 2): their exponent is NaN. `d_model` is E, or E_l for every layer.
    """
    widths = torch.tensor(check_by_layer(d_model, "d_model", sets.n_layers), dtype=torch.float64)
    law = sets.sizes().double() * d_token / widths[:, None, None].to(sets.members.device)
    result = _apply_mode(law, mode).clone()
    result[-1, :, :-1] = math.nan
    return result


@settings
class DigitCode:
    """Theorem 3's encoder and decoder: r tokens of dimension d in E numbers, by binary digits.

    Each of the r d coordinates in [0, 1) is cut to B bits; the bits are dealt to E latents in equal
    shares; each latent is the number that its bits spell. Encoder and decoder are two-layer
    networks of threshold units, read as sums of steps: r d 2^B of them encode, E 2^b decode with
    ``b = ceil(r d B / E)``. So decoding costs eps^(-rd/E) units, the law of Sec. 5.2 [derived from
    the proof in App. A.3]. With steps replaced by tanh of finite steepness (Lemma 1) the code fails
    near the thresholds only.

    With `analog` each latent carries one coordinate as it is, below the digits that it spells:
    ``(q + .999 x) / 2^b``. Only r d - E coordinates are cut, so ``b = ceil((r d - E) B / E)``, and
    a decoder of E 2^b units, one linear for each latent, has the exponent rd/E - 1 [derived; beyond
    the paper]. It is that of the lower half of Theorem 3 (6), which is for weights of at most 1.

    Attributes:
        n_coordinates: r d.
        n_latents: E.
        n_bits: B.
        analog: whether the first E coordinates are carried as they are.

    Raises:
        InfoFlowError: for values below 1, more than 24 bits in a latent (float64 and memory), or
            `analog` where all coordinates fit.
    """

    n_coordinates: Count
    n_latents: Count
    n_bits: Count
    analog: bool = False

    def __post_init__(self) -> None:
        if self.analog and self.n_coordinates <= self.n_latents:
            raise InfoFlowError(
                f"{self.n_coordinates} coordinates fit in {self.n_latents} latents as they are: "
                "expected more coordinates than latents; leave analog out"
            )
        if self.bits_per_latent > 24:
            raise InfoFlowError(
                f"{self.n_coordinates} coordinates of {self.n_bits} bits in {self.n_latents} "
                f"latents need {self.bits_per_latent} bits a latent: "
                "expected at most 24; lower n_bits or raise n_latents"
            )

    @property
    def bits_per_latent(self) -> int:
        """b, the bits that each latent spells."""
        return -(-self.n_cut * self.n_bits // self.n_latents)

    @property
    def n_cut(self) -> int:
        """Coordinates that are cut to digits: all, or all but one for each latent."""
        return self.n_coordinates - self.analog * self.n_latents

    @property
    def decoder_units(self) -> int:
        """Hidden units of the decoder: one for each threshold of each latent."""
        return self.n_latents * 2**self.bits_per_latent

    def _steps(self, z: Float[Tensor, "*batch n"], bits: int) -> Float[Tensor, "*batch n unit"]:
        """Return the hidden layer: unit k of an input is 1 from k / 2^bits on."""
        thresholds = torch.arange(1, 2**bits, dtype=z.dtype, device=z.device) / 2**bits
        return self._activate(z.unsqueeze(-1) - thresholds)

    def _activate(self, gap: Float[Tensor, "*batch unit"]) -> Float[Tensor, "*batch unit"]:
        """Return what units give by how far inputs lie above their thresholds."""
        return (gap >= 0).to(gap.dtype)

    @staticmethod
    def _bit_weights(bits: int, like: Tensor) -> Float[Tensor, "unit bit"]:
        """Return output weights that turn steps into bits: each bit's change at every threshold."""
        numbers = torch.arange(2**bits, device=like.device)
        places = torch.arange(bits - 1, -1, -1, device=like.device)
        table = (numbers[:, None] >> places) & 1
        return (table[1:] - table[:-1]).to(like.dtype)

    def encode(self, x: Float[Tensor, "*batch coordinate"]) -> Float[Tensor, "*batch latent"]:
        """Return the E latents of inputs in [0, 1).

        Args:
            x: coordinates.

        Raises:
            InfoFlowError: for another number of coordinates, or values outside [0, 1).
        """
        if x.shape[-1] != self.n_coordinates or not ((x >= 0) & (x < 1)).all():
            raise InfoFlowError(
                f"inputs have {x.shape[-1]} coordinates in [{float(x.min()):.3g}, "
                f"{float(x.max()):.3g}]: expected {self.n_coordinates} in [0, 1); scale them"
            )
        carried, cut = x.split([self.n_coordinates - self.n_cut, self.n_cut], dim=-1)
        steps = self._steps(cut, self.n_bits)
        bits = steps @ self._bit_weights(self.n_bits, x)  # [..., coordinate, bit]
        # b is rounded up, so the last latents may spell bits that no coordinate has
        padding = self.n_latents * self.bits_per_latent - self.n_cut * self.n_bits
        digits = torch.nn.functional.pad(bits.flatten(-2), (0, padding))
        digits = digits.unflatten(-1, (self.n_latents, self.bits_per_latent))
        places = 0.5 ** torch.arange(1, self.bits_per_latent + 1, dtype=x.dtype, device=x.device)
        # half a step on top keeps every latent away from the decoder's thresholds
        return digits @ places + places[-1] * (_ROOM * carried if self.analog else 0.5)

    def decode(self, latents: Float[Tensor, "*batch latent"]) -> Float[Tensor, "*batch coordinate"]:
        """Return the coordinates, each that is cut at the middle of its cell of width 2^-B."""
        steps = self._steps(latents, self.bits_per_latent)
        bits = steps @ self._bit_weights(self.bits_per_latent, latents)  # [..., latent, bit]
        places = 0.5 ** torch.arange(
            1, max(self.n_bits, self.bits_per_latent) + 1, dtype=latents.dtype,
            device=latents.device,
        )  # fmt: skip
        own = places[: self.bits_per_latent]
        # what a latent has below its last digit is the coordinate that it carries as it is
        carried = (latents - bits @ own) / (own[-1] * _ROOM)
        bits = bits.flatten(-2)[..., : self.n_cut * self.n_bits]
        places = places[: self.n_bits]
        cut = bits.unflatten(-1, (self.n_cut, self.n_bits)) @ places + places[-1] / 2
        return torch.cat([carried, cut], dim=-1) if self.analog else cut


@settings
class TanhCode(DigitCode):
    """Theorem 3's code with tanh units in the place of steps (Lemma 1).

    Attributes:
        steepness: of the units; they come near steps as it grows.
    """

    steepness: Positive = 1.0

    def _activate(self, gap: Float[Tensor, "*batch unit"]) -> Float[Tensor, "*batch unit"]:
        return 0.5 * (1 + torch.tanh(self.steepness * gap))
