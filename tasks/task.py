"""What every task over vector tokens offers."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import datasets
import torch
from datasets.fingerprint import Hasher
from jaxtyping import Bool, Float
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.seeds import check_seed, derived_seed
from infoflow_lens.theory.comparison import ComparisonProfile, Component

SPLITS = ("train", "validation", "test")
_DATASET_FORMAT = 1  # raise it when the same arguments begin to give other data


@dataclass(frozen=True, kw_only=True)
class VectorTask(ABC):
    """A target over sequences of vector tokens, and the distribution that they come from.

    A task is its parameters: two tasks with equal parameters are the same task. Sampling uses
    generators of its own and never the global random state.

    Attributes:
        n_tokens: number of tokens in a sequence, T.
        d_token: dimension of a token, d.
        seed: draws what the target fixes at random (its directions, say); not the samples.
        tokens: distribution of the i.i.d. tokens: "normal", N(0, I_d); "uniform", U[-1, 1]^d;
            "sphere", uniform on the unit sphere of R^d.

    Raises:
        InfoFlowError: for sizes below 1 or an unknown token distribution.
    """

    name: ClassVar[str]
    source: ClassVar[str]

    n_tokens: int = 16
    d_token: int = 4
    seed: int = 0
    tokens: Literal["normal", "uniform", "sphere"] = "normal"

    def __post_init__(self) -> None:
        for name in ("n_tokens", "d_token"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InfoFlowError(f"{name} is {value!r}: expected an integer of at least 1")
        check_seed(self.seed)
        if self.tokens not in ("normal", "uniform", "sphere"):
            raise InfoFlowError(
                f"tokens is {self.tokens!r}: expected 'normal', 'uniform' or 'sphere'"
            )

    @property
    def d_output(self) -> int:
        """Dimension of the target."""
        return 1

    @abstractmethod
    def target(self, x: Float[Tensor, "batch pos d_token"]) -> Float[Tensor, "batch d_output"]:
        """The target F(X) of every sequence, differentiable in `x`."""

    @abstractmethod
    def active_index_set(self, x: Float[Tensor, "batch pos d_token"]) -> Bool[Tensor, "batch pos"]:
        """I_F(X): the positions whose token moves the target, dF/dx(t) != 0 (Sec. 5.1, eq 4)."""

    @property
    def components(self) -> tuple[Component, ...]:
        """What the target retrieves, for the theory's own model; empty if no tuples."""
        return ()

    @property
    def comparison(self) -> ComparisonProfile | None:
        """How much the target compares; None if that is not known."""
        return None

    def parameters(self) -> dict[str, Any]:
        """The parameters that make this task."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def check_input(self, x: Tensor) -> None:
        """Refuse what is no batch of this task's sequences.

        Raises:
            InfoFlowError: for a wrong shape, or values that are no finite floats.
        """
        if x.ndim != 3 or x.shape[1:] != (self.n_tokens, self.d_token):
            raise InfoFlowError(
                f"input has shape {tuple(x.shape)}: task {self.name!r} expects "
                f"[batch, {self.n_tokens}, {self.d_token}]; load the task with your n_tokens and "
                "d_token, or reshape"
            )
        if not x.is_floating_point():
            raise InfoFlowError(f"input is {x.dtype}: expected floats; convert with x.float()")
        if not x.isfinite().all():
            raise InfoFlowError(
                f"input has {int((~x.isfinite()).sum())} values that are NaN or infinite: "
                "expected finite tokens; clean the data first"
            )

    def draw_tokens(self, n: int, generator: torch.Generator) -> Float[Tensor, "batch pos d_token"]:
        """`n` sequences of i.i.d. tokens."""
        shape = (n, self.n_tokens, self.d_token)
        if self.tokens == "uniform":
            return torch.rand(shape, generator=generator) * 2 - 1
        x = torch.randn(shape, generator=generator)
        return x / x.norm(dim=-1, keepdim=True) if self.tokens == "sphere" else x

    def sample(
        self, n: int, seed: int
    ) -> tuple[Float[Tensor, "batch pos d_token"], Float[Tensor, "batch d_output"]]:
        """`n` sequences and their targets; the same `seed` gives the same sample.

        Raises:
            InfoFlowError: if `n` is below 1.
        """
        if not isinstance(n, int) or n < 1:
            raise InfoFlowError(f"n is {n!r}: expected an integer, at least one sequence")
        generator = torch.Generator().manual_seed(derived_seed("sample", check_seed(seed)))
        x = self.draw_tokens(n, generator)
        return x, self.target(x)

    def dataset(self, split: str, n: int, seed: int = 0) -> datasets.Dataset:
        """`n` sequences and targets as an Arrow-backed dataset with columns ``x`` and ``y``.

        Splits draw from seeds of their own. Equal arguments give equal data and fingerprints, in
        every process; a ``with_format("torch")`` on top gives tensors.

        Raises:
            InfoFlowError: for an unknown split, or `n` below 1.
        """
        if split not in SPLITS:
            raise InfoFlowError(f"split is {split!r}: expected one of {', '.join(SPLITS)}")
        identity = (self.name, self.parameters(), split, n, seed, _DATASET_FORMAT)
        x, y = self.sample(n, seed=derived_seed(self.name, split, check_seed(seed)))
        features = datasets.Features(
            {
                "x": datasets.Array2D(shape=(self.n_tokens, self.d_token), dtype="float32"),
                "y": datasets.Sequence(datasets.Value("float32"), length=self.d_output),
            }
        )
        description = f"{self.name}: {self.source}"
        info = datasets.DatasetInfo(description=description, features=features)
        data = datasets.Dataset.from_dict(
            {"x": x.numpy(), "y": y.numpy()}, features=features, info=info
        )
        return datasets.Dataset(
            data.data,
            info=info,
            split=datasets.NamedSplit(split),
            fingerprint=Hasher.hash(identity),
        )
