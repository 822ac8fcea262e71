"""The settings of a training run; the options of `infoflow-lens train-language-model`."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from infoflow_lens.foundation.checks import check_choice, check_integer, check_seed
from infoflow_lens.foundation.errors import InfoFlowError


@dataclass(frozen=True)
class LanguageModelConfig:
    """Settings of a training run; what each is stands beside its type.

    Raises:
        InfoFlowError: for values that make no sense, naming them.
    """

    n_layers: Annotated[int, "Blocks."] = 2
    d_model: Annotated[int, "Width of the residual stream."] = 128
    n_heads: Annotated[int, "Attention heads of a block; they divide the width."] = 8
    attention_only: Annotated[bool, "Whether the blocks have no MLP."] = True
    n_context: Annotated[int, "Tokens of a sequence, with the first, <|endoftext|>."] = 128
    vocabulary: Annotated[int, "Entries of the tokenizer."] = 1024
    n_steps: Annotated[int, "Steps of AdamW."] = 8000
    batch_size: Annotated[int, "Sequences of a step."] = 32
    lr: Annotated[float, "Peak learning rate."] = 2e-3
    warmup_steps: Annotated[int, "Steps in which the learning rate rises linearly from 0."] = 200
    decay: Annotated[float, "Share of the steps, the last ones, in which it falls to 0."] = 0.3
    weight_decay: Annotated[float, "AdamW's."] = 0.01
    grad_clip: Annotated[float, "Largest norm of the gradient."] = 1.0
    repeated: Annotated[float, "Share of sequences that repeat a stretch of tokens."] = 0.3
    shortest_repeat: Annotated[int, "Tokens of the shortest stretch."] = 8
    longest_repeat: Annotated[int, "Tokens of the longest stretch."] = 50
    evaluate_every: Annotated[int, "Steps between two rows of the history."] = 100
    save_every: Annotated[int, "Steps between two states from which the run can go on."] = 500
    seed: Annotated[int, "Seed of the weights and of the batches."] = 0
    threads: Annotated[int, "Threads of PyTorch; other numbers round differently."] = 2

    def __post_init__(self) -> None:
        least = {
            "n_layers": 1, "d_model": 1, "n_heads": 1, "n_context": 8, "vocabulary": 257,
            "n_steps": 1, "batch_size": 1, "warmup_steps": 0, "shortest_repeat": 1,
            "longest_repeat": 1, "evaluate_every": 1, "save_every": 1, "threads": 1,
        }  # fmt: skip
        for name, minimum in least.items():
            object.__setattr__(self, name, check_integer(getattr(self, name), name, minimum))
        check_seed(self.seed)
        if self.d_model % self.n_heads:
            raise InfoFlowError(
                f"n_heads is {self.n_heads} with d_model {self.d_model}: expected a divisor of it"
            )
        if self.vocabulary > 2**15:
            raise InfoFlowError(f"vocabulary is {self.vocabulary}: expected at most {2**15}")
        if not self.shortest_repeat <= self.longest_repeat < self.n_context:
            raise InfoFlowError(
                f"repeats have {self.shortest_repeat} to {self.longest_repeat} tokens: expected "
                f"shortest_repeat <= longest_repeat < n_context, which is {self.n_context}"
            )
        for name in ("decay", "repeated"):
            if not 0 <= getattr(self, name) <= 1:
                raise InfoFlowError(f"{name} is {getattr(self, name)!r}: expected a share, 0 to 1")
        for name, positive in {"lr": True, "grad_clip": True, "weight_decay": False}.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and (value > 0 or (value == 0 and not positive))):
                expected = "a positive number" if positive else "a number of at least 0"
                raise InfoFlowError(f"{name} is {value!r}: expected {expected}")

    def learning_rate(self, step: int) -> float:
        """The learning rate at `step` (from 0): a ramp, a plateau, half a cosine down to 0.

        The plateau lets the phase change of induction heads come at the full rate.
        """
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        start = round(self.n_steps * (1 - self.decay))
        done = (step - start) / max(1, self.n_steps - start)
        return self.lr * 0.5 * (1 + math.cos(math.pi * max(0.0, done)))

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON-compatible values."""
        return asdict(self)


# Each made in minutes on two cores. Those with MLPs take fewer steps for it, and more repeats, so
# that induction has a chance in them.
PRESETS: Mapping[str, LanguageModelConfig] = {
    "stdlib-2l": LanguageModelConfig(),
    "stdlib-2l-mlp": LanguageModelConfig(
        attention_only=False, n_steps=4000, repeated=0.5, threads=1
    ),
    "stdlib-4l-mlp": LanguageModelConfig(
        n_layers=4, attention_only=False, n_steps=3000, repeated=0.5, threads=1
    ),
}


def preset(name: str) -> LanguageModelConfig:
    """The settings of a model by its name.

    Raises:
        InfoFlowError: for an unknown name.
    """
    return PRESETS[check_choice(name, "preset", PRESETS)]
