"""The settings of a training run; the options of `infoflow-lens train-language-model`."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal

from annotated_types import Ge, Interval

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import (
    Count,
    Index,
    NonNegative,
    Positive,
    Seed,
    Share,
    check,
    settings,
)


@settings
class LanguageModelConfig:
    """Settings of a training run; what each is stands beside its type.

    Raises:
        InfoFlowError: for values that make no sense, naming them.
    """

    n_layers: Annotated[Count, "Number of blocks."] = 2
    d_model: Annotated[Count, "Width of the residual stream."] = 128
    n_heads: Annotated[Count, "Attention heads of a block; they divide the width."] = 8
    attention_only: Annotated[bool, "Leave out the MLPs."] = True
    n_context: Annotated[int, Ge(8), "Tokens of a sequence, <|endoftext|> included."] = 128
    vocabulary: Annotated[int, Interval(ge=257, le=2**15), "Entries of the tokenizer."] = 1024
    n_steps: Annotated[Count, "Number of training steps."] = 8000
    batch_size: Annotated[Count, "Sequences of a step."] = 32
    lr: Annotated[Positive, "Peak learning rate."] = 2e-3
    warmup_steps: Annotated[Index, "Steps in which the learning rate rises linearly from 0."] = 200
    decay: Annotated[Share, "Last share of the steps, in which the learning rate falls to 0."] = 0.3
    weight_decay: Annotated[NonNegative, "Weight decay of AdamW."] = 0.01
    grad_clip: Annotated[Positive, "Largest norm of the gradient."] = 1.0
    repeated: Annotated[Share, "Share of sequences that repeat a stretch of tokens."] = 0.3
    shortest_repeat: Annotated[Count, "Tokens of the shortest stretch."] = 8
    longest_repeat: Annotated[Count, "Tokens of the longest stretch."] = 50
    evaluate_every: Annotated[Count, "Steps between two rows of the history."] = 100
    save_every: Annotated[Count, "Steps between two checkpoints."] = 500
    seed: Annotated[Seed, "Seed of the weights and of the batches."] = 0
    threads: Annotated[Count, "Threads of PyTorch; another number rounds differently."] = 2

    def __post_init__(self) -> None:
        if self.d_model % self.n_heads:
            raise InfoFlowError(
                f"n_heads is {self.n_heads} with d_model {self.d_model}: expected a divisor of it"
            )
        if not self.shortest_repeat <= self.longest_repeat < self.n_context:
            raise InfoFlowError(
                f"repeats have {self.shortest_repeat} to {self.longest_repeat} tokens: expected "
                f"shortest_repeat <= longest_repeat < n_context, which is {self.n_context}"
            )

    def learning_rate(self, step: int) -> float:
        """Return the learning rate at `step` (from 0): a ramp, a plateau, half a cosine down to 0.

        The plateau lets the phase change of induction heads come at the full rate.
        """
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        start = round(self.n_steps * (1 - self.decay))
        # below 0 on the plateau, which counts as 0
        done = (step - start) / max(1, self.n_steps - start)
        return self.lr * 0.5 * (1 + math.cos(math.pi * max(0.0, done)))

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON-compatible values."""
        return asdict(self)


# Each made in minutes on two cores. Those with MLPs take fewer steps for it, and more repeats, so
# that induction has a chance in them.
PRESETS: Mapping[str, LanguageModelConfig] = {
    "stdlib-2l": LanguageModelConfig(),
    "stdlib-2l-mlp": LanguageModelConfig(
        attention_only=False, n_steps=4000, repeated=0.5, threads=1
    ),
    "stdlib-4l-mlp": LanguageModelConfig(
        n_layers=4, attention_only=False, n_steps=2000, decay=0.25, repeated=0.5, threads=1
    ),
}


def preset(name: str) -> LanguageModelConfig:
    """Return the settings of a model by its name.

    Raises:
        InfoFlowError: for an unknown name.
    """
    return PRESETS[check(name, Literal[tuple(PRESETS)], "preset")]
