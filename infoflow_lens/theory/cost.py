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
    Remedy,
    check_by_layer,
    checked,
    settings,
)
from infoflow_lens.theory.information_sets import InformationSets

Mode = Literal["law", "effective", "certified"]
MODES: tuple[Mode, ...] = ("law", "effective", "certified")
Precision = Annotated[float, Gt(0), Lt(1), Remedy("a precision such as 0.01")]


@checked
def exponent(size: Index, d_token: Count, d_model: Count, mode: Mode = "law") -> float:
    """k in a cost of eps^-k parameters for a state of width E that holds |I| tokens of dimension d.

    - "law": ``|I| d / E``, the law of Sec. 5.2 [derived from its prose].
    - "effective": 0 where everything fits, ``|I| d <= E`` (the identity codes it), else the law
      [derived, Thm 6].
    - "certified": ``max(0, |I| d / E - 1)``, the lower bound of Thm 6 [derived].

    Raises:
        InfoFlowError: for sizes below 0 or dimensions below 1, or an unknown mode.
    """
    law = size * d_token / d_model
    effective = law if size * d_token > d_model else 0.0
    return {"law": law, "effective": effective, "certified": max(0.0, law - 1)}[mode]


@checked
def exponents(
    sets: InformationSets, d_token: int, d_model: int | Sequence[int], mode: Mode = "law"
) -> Float[Tensor, "layer batch pos"]:
    """:func:`exponent` of every state, from the sets after its layer.

    The updated set counts, in all three rules [derived: one cost per I_t^(l), "regarding the size
    of I_t^(l)"]. States of the last layer other than the last position cost nothing, since nothing
    reads them (eq 2): their exponent is NaN. `d_model` is E, or E_l for every layer: the law has
    ``|I_t^(l)| d / E_l``.
    """
    widths = torch.tensor(check_by_layer(d_model, "d_model", sets.n_layers), dtype=torch.float64)
    law = sets.sizes().double() * d_token / widths[:, None, None].to(sets.members.device)
    values = {
        "law": law,
        "effective": torch.where(law <= 1, 0.0, law),
        "certified": (law - 1).clamp(min=0),
    }
    result = values[mode].clone()
    result[-1, :, :-1] = math.nan
    return result


@checked
def total_cost(
    sets: InformationSets,
    d_token: int,
    d_model: int | Sequence[int],
    eps: Precision,
    mode: Mode = "law",
) -> Float[Tensor, " batch"]:
    """The cost law summed over all (layer, position), in parameters up to constants (Sec. 5.2).

    `d_model` is E, or E_l for every layer.

    Raises:
        InfoFlowError: unless ``0 < eps < 1``.
    """
    costs = eps ** -exponents(sets, d_token, d_model, mode)
    return costs.nansum(dim=(0, 2))


@settings
class DigitCode:
    """Theorem 3's encoder and decoder: r tokens of dimension d in E numbers, by binary digits.

    Each of the r d coordinates in [0, 1) is cut to B bits; the bits are dealt to E latents in equal
    shares; each latent is the number that its bits spell. Encoder and decoder are two-layer
    networks of threshold units, read as sums of steps: r d 2^B of them encode, E 2^b decode with
    ``b = ceil(r d B / E)``. So decoding costs eps^(-rd/E) units, the law of Sec. 5.2 [derived from
    the proof in App. A.3]. With steps replaced by tanh of finite steepness (Lemma 1) the code fails
    near the thresholds only.

    Attributes:
        n_coordinates: r d.
        n_latents: E.
        n_bits: B.

    Raises:
        InfoFlowError: for values below 1, or more than 24 bits in a latent (float64 and memory).
    """

    n_coordinates: Count
    n_latents: Count
    n_bits: Count

    def __post_init__(self) -> None:
        if self.bits_per_latent > 24:
            raise InfoFlowError(
                f"{self.n_coordinates} coordinates of {self.n_bits} bits in {self.n_latents} "
                f"latents need {self.bits_per_latent} bits a latent: "
                "expected at most 24; lower n_bits or raise n_latents"
            )

    @classmethod
    @checked
    def for_precision(
        cls, n_tokens: Count, d_token: Count, n_latents: Count, eps: Precision
    ) -> "DigitCode":
        """The code of L2 error at most eps: ``B = ceil(log2(sqrt(r d) / eps))`` bits [derived]."""
        n = n_tokens * d_token
        return cls(n, n_latents, max(1, math.ceil(math.log2(math.sqrt(n) / eps))))

    @property
    def bits_per_latent(self) -> int:
        """b, the bits that each latent spells."""
        return -(-self.n_coordinates * self.n_bits // self.n_latents)

    @property
    def encoder_units(self) -> int:
        """Hidden units of the encoder: one for each threshold of each coordinate."""
        return self.n_coordinates * 2**self.n_bits

    @property
    def decoder_units(self) -> int:
        """Hidden units of the decoder: one for each threshold of each latent."""
        return self.n_latents * 2**self.bits_per_latent

    @property
    def decoder_exponent(self) -> float:
        """log of a latent's decoder units over log of 1 / 2^-B: r d / E, up to the ceiling."""
        return self.bits_per_latent / self.n_bits

    def _steps(
        self, z: Float[Tensor, "*batch n"], bits: int, steepness: float | None
    ) -> Float[Tensor, "*batch n unit"]:
        """The hidden layer: unit k of an input is 1 from k / 2^bits on."""
        thresholds = torch.arange(1, 2**bits, dtype=z.dtype, device=z.device) / 2**bits
        gap = z.unsqueeze(-1) - thresholds
        if steepness is None:
            return (gap >= 0).to(z.dtype)
        return 0.5 * (1 + torch.tanh(steepness * gap))

    @staticmethod
    def _bit_weights(bits: int, like: Tensor) -> Float[Tensor, "unit bit"]:
        """Output weights that turn steps into bits: by how much a bit changes at each threshold."""
        numbers = torch.arange(2**bits, device=like.device)
        places = torch.arange(bits - 1, -1, -1, device=like.device)
        table = (numbers[:, None] >> places) & 1
        return (table[1:] - table[:-1]).to(like.dtype)

    def encode(
        self, x: Float[Tensor, "*batch coordinate"], steepness: float | None = None
    ) -> Float[Tensor, "*batch latent"]:
        """The E latents of inputs in [0, 1).

        Args:
            x: coordinates.
            steepness: of the tanh units; None for exact steps.

        Raises:
            InfoFlowError: for another number of coordinates, or values outside [0, 1).
        """
        if x.shape[-1] != self.n_coordinates or not ((x >= 0) & (x < 1)).all():
            raise InfoFlowError(
                f"inputs have {x.shape[-1]} coordinates in [{float(x.min()):.3g}, "
                f"{float(x.max()):.3g}]: expected {self.n_coordinates} in [0, 1); scale them"
            )
        steps = self._steps(x, self.n_bits, steepness)
        bits = steps @ self._bit_weights(self.n_bits, x)  # [..., coordinate, bit]
        padding = self.n_latents * self.bits_per_latent - self.n_coordinates * self.n_bits
        dealt = torch.nn.functional.pad(bits.flatten(-2), (0, padding))
        dealt = dealt.unflatten(-1, (self.n_latents, self.bits_per_latent))
        # half a step on top keeps every latent away from the decoder's thresholds
        places = 0.5 ** torch.arange(1, self.bits_per_latent + 1, dtype=x.dtype, device=x.device)
        return dealt @ places + places[-1] / 2

    def decode(
        self, latents: Float[Tensor, "*batch latent"], steepness: float | None = None
    ) -> Float[Tensor, "*batch coordinate"]:
        """The coordinates, each at the middle of its cell of width 2^-B."""
        steps = self._steps(latents, self.bits_per_latent, steepness)
        bits = (steps @ self._bit_weights(self.bits_per_latent, latents)).flatten(-2)
        bits = bits[..., : self.n_coordinates * self.n_bits]
        bits = bits.unflatten(-1, (self.n_coordinates, self.n_bits))
        places = 0.5 ** torch.arange(1, self.n_bits + 1, dtype=latents.dtype, device=latents.device)
        return bits @ places + places[-1] / 2
