"""Lemma 1 of InfoFlow 2026: steps replaced by tanh of finite steepness."""

import torch

from infoflow_lens.foundation.settings import Positive, settings
from infoflow_lens.theory.cost import DigitCode


@settings
class TanhCode(DigitCode):
    """Theorem 3's code with tanh units, which come near steps as they become steep."""

    steepness: Positive = 1.0

    def _steps(self, z, bits):
        thresholds = torch.arange(1, 2**bits, dtype=z.dtype) / 2**bits
        return 0.5 * (1 + torch.tanh(self.steepness * (z.unsqueeze(-1) - thresholds)))
