"""What every task offers: samples, datasets, and what theory needs to know of its target."""

import inspect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, overload

import datasets
import torch
from datasets.fingerprint import Hasher
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from infoflow_lens.foundation.display import panel
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.seeds import check_seed, derived_seed
from infoflow_lens.theory.comparison import ComparisonProfile, Component

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
_DATASET_FORMAT = 1  # raise it when the same arguments begin to give other data
_STREAM_BLOCK = 1024  # sequences drawn at once
_STREAM_SHARDS = 64  # as many workers can share a stream


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A target over sequences of tokens, and the distribution that the sequences come from.

    A task is its parameters: two tasks with equal parameters are the same task. Sampling uses
    generators of its own and never the global random state.

    Attributes:
        seed: draws what the target fixes at random (its directions, say); not the samples.

    Raises:
        InfoFlowError: for a seed that is no integer from 0 to 2^63 - 1.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    input_kind: ClassVar[str]

    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)

    @abstractmethod
    def target(self, x: Tensor) -> Tensor:
        """The target of every sequence [batch, ...]."""

    @abstractmethod
    def active_index_set(self, x: Tensor) -> Bool[Tensor, "batch pos"]:
        """I_F(X): the positions that the target depends on (Sec. 5.1, eq 4)."""

    @abstractmethod
    def check_input(self, x: Tensor) -> None:
        """Refuse what is no batch of this task's sequences.

        Raises:
            InfoFlowError: with what was expected.
        """

    @abstractmethod
    def draw(self, n: int, generator: torch.Generator, split: Split | None = None) -> Tensor:
        """`n` sequences; with a split, those that belong to it."""

    @abstractmethod
    def features(self) -> datasets.Features:
        """What the columns ``x`` and ``y`` of a dataset hold."""

    @property
    def comparison(self) -> ComparisonProfile | None:
        """How much the target compares; None if it compares nothing or that is not known."""
        return None

    @property
    def components(self) -> tuple[Component, ...]:
        """What the target retrieves, for the theory's own model; empty if no tuples."""
        return ()

    @property
    def reads(self) -> Sequence[int]:
        """Positions that the target depends on whatever they hold; empty if none."""
        return ()

    def parameters(self) -> dict[str, Any]:
        """The parameters that make this task."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def _repr_html_(self) -> str:
        about = inspect.cleandoc(self.__doc__ or "").split("\n\n")[0]
        facts = {**self.parameters(), "source": self.source}
        return panel(self.name, facts, (about,), "more: .sample(n, seed), .target(x), .dataset()")

    def sample(
        self, n: int, seed: int
    ) -> tuple[Shaped[Tensor, " batch pos *token"], Shaped[Tensor, " batch *target"]]:
        """`n` sequences and their targets; the same `seed` gives the same sample.

        Raises:
            InfoFlowError: if `n` is below 1.
        """
        check_count(n)
        generator = torch.Generator().manual_seed(derived_seed("sample", check_seed(seed)))
        x = self.draw(n, generator)
        return x, self.target(x)

    @overload
    def dataset(self, split: str, n: int, seed: int = 0) -> datasets.Dataset: ...

    @overload
    def dataset(self, split: str, n: None, seed: int = 0) -> datasets.IterableDataset: ...

    def dataset(
        self, split: str, n: int | None, seed: int = 0
    ) -> datasets.Dataset | datasets.IterableDataset:
        """Sequences and targets with columns ``x`` and ``y``.

        With a number, an Arrow-backed dataset of `n` sequences; with None, an endless
        ``IterableDataset`` that is drawn as it is read and that workers can share. Splits draw from
        seeds of their own. Equal arguments give equal data and fingerprints, in every process; a
        ``with_format("torch")`` on top gives tensors.

        Raises:
            InfoFlowError: for an unknown split, `n` below 1, or a split that has no sequences.
        """
        checked = check_split(split)
        check_seed(seed)
        if n is None:
            return self._stream(checked, seed)
        check_count(n)
        generator = torch.Generator().manual_seed(
            derived_seed("sample", derived_seed(self.name, split, seed))
        )
        x = self.draw(n, generator, checked)
        identity = (self.name, self.parameters(), split, n, seed, _DATASET_FORMAT)
        info = self._info()
        data = datasets.Dataset.from_dict(
            {"x": x.numpy(), "y": self.target(x).numpy()}, features=info.features, info=info
        )
        return datasets.Dataset(
            data.data,
            info=info,
            split=datasets.NamedSplit(split),
            fingerprint=Hasher.hash(identity),
        )

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(
            description=f"{self.name}: {self.source}", features=self.features()
        )

    def _stream(self, split: Split, seed: int) -> datasets.IterableDataset:
        # a split without sequences is refused here, not when training has begun
        self.draw(1, torch.Generator().manual_seed(0), split)

        shards = list(range(_STREAM_SHARDS))
        return datasets.IterableDataset.from_generator(
            _rows,
            features=self.features(),
            gen_kwargs={"task": self, "part": split, "seed": seed, "shards": shards},
            split=datasets.NamedSplit(split),
        )


def _rows(task: Task, part: Split, seed: int, shards: list[int]) -> Iterator[dict[str, Any]]:
    """The rows of a stream; a function of the module, so that workers can be sent it."""
    for block in itertools.count():
        for shard in shards:
            generator = torch.Generator().manual_seed(
                derived_seed(task.name, part, seed, "stream", shard, block)
            )
            x = task.draw(_STREAM_BLOCK, generator, part)
            for sequence, target in zip(x.numpy(), task.target(x).numpy(), strict=True):
                yield {"x": sequence, "y": target}


def check_count(n: Any, name: str = "n") -> int:
    """`n`, if it is an integer of at least 1.

    Raises:
        InfoFlowError: if it is not.
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise InfoFlowError(f"{name} is {n!r}: expected an integer of at least 1")
    return n


def check_positions(positions: Any, n_tokens: int, name: str = "positions") -> tuple[int, ...]:
    """Different positions of a sequence, at least one, in order.

    Raises:
        InfoFlowError: if they are not.
    """
    chosen = tuple(positions) if isinstance(positions, Iterable) else ()
    whole = all(isinstance(p, int) and not isinstance(p, bool) for p in chosen)
    if (
        not chosen
        or not whole
        or not all(0 <= p < n_tokens for p in chosen)
        or len(set(chosen)) < len(chosen)
    ):
        raise InfoFlowError(
            f"{name} is {positions!r}: expected different positions from 0 to {n_tokens - 1}, at "
            "least one"
        )
    return tuple(sorted(chosen))


def check_split(split: str) -> Split:
    """`split`, if there is one of that name.

    Raises:
        InfoFlowError: with the known ones.
    """
    for known in SPLITS:
        if split == known:
            return known
    raise InfoFlowError(f"split is {split!r}: expected one of {', '.join(SPLITS)}")


@dataclass(frozen=True, kw_only=True)
class VectorTask(Task):
    """A target over sequences of i.i.d. vector tokens.

    Attributes:
        n_tokens: number of tokens in a sequence, T.
        d_token: dimension of a token, d.
        seed: draws what the target fixes at random (its directions, say); not the samples.
        tokens: distribution of the i.i.d. tokens: "normal", N(0, I_d); "uniform", U[-1, 1]^d;
            "unit", U[0, 1]^d; "sphere", uniform on the unit sphere of R^d.

    Raises:
        InfoFlowError: for sizes below 1 or an unknown token distribution.
    """

    input_kind: ClassVar[str] = "vectors"

    n_tokens: int = 16
    d_token: int = 4
    tokens: Literal["normal", "uniform", "unit", "sphere"] = "normal"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self.n_tokens, "n_tokens")
        check_count(self.d_token, "d_token")
        self._check_tokens()

    def _check_tokens(self) -> None:
        if self.tokens not in ("normal", "uniform", "unit", "sphere"):
            raise InfoFlowError(
                f"tokens is {self.tokens!r}: expected 'normal', 'uniform', 'unit' or 'sphere'"
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

    def draw(
        self, n: int, generator: torch.Generator, split: Split | None = None
    ) -> Float[Tensor, "batch pos d_token"]:
        """`n` sequences of i.i.d. tokens; splits differ by their seeds alone."""
        shape = (n, self.n_tokens, self.d_token)
        if self.tokens in ("uniform", "unit"):
            unit = torch.rand(shape, generator=generator)
            return unit if self.tokens == "unit" else unit * 2 - 1
        x = torch.randn(shape, generator=generator)
        return x / x.norm(dim=-1, keepdim=True) if self.tokens == "sphere" else x

    def features(self) -> datasets.Features:
        """``x``, the tokens of a sequence, and ``y``, the target."""
        return datasets.Features(
            {
                "x": datasets.Array2D(shape=(self.n_tokens, self.d_token), dtype="float32"),
                "y": datasets.Sequence(datasets.Value("float32"), length=self.d_output),
            }
        )
