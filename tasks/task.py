"""What every task offers: samples, datasets, and what theory needs to know of its target."""

import inspect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, overload

import torch
from annotated_types import Interval, MinLen
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from infoflow_lens.foundation.display import panel
from infoflow_lens.foundation.lazy import datasets
from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.foundation.sequences import check_vectors
from infoflow_lens.foundation.settings import (
    Count,
    Distinct,
    Remedy,
    Seed,
    check,
    check_fields,
    checked,
)
from infoflow_lens.tasks.splits import Split
from infoflow_lens.theory.comparison import ComparisonProfile, Component

TokenDistribution = Literal["normal", "uniform", "unit", "sphere"]
_DATASET_FORMAT = 1  # raise it when the same arguments begin to give other data
_CPU = torch.device("cpu")  # where samples are drawn, whatever device is the default
_STREAM_BLOCK = 1024  # sequences drawn at once
_STREAM_SHARDS = 64  # as many workers can share a stream


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A target over sequences of tokens, and the distribution that the sequences come from.

    A task is its parameters: two tasks with equal parameters are the same task. Their types and
    ranges are those of the annotations. Sampling uses generators of its own and never the global
    random state.

    Attributes:
        seed: draws what the target fixes at random (its directions, say); not the samples.

    Raises:
        InfoFlowError: for a parameter that its annotation does not allow.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    input_kind: ClassVar[str]

    seed: Seed = 0

    def __post_init__(self) -> None:
        check_fields(self)

    @abstractmethod
    def target(self, x: Tensor) -> Tensor:
        """Return the target of every sequence [batch, ...]."""

    @abstractmethod
    def active_index_set(self, x: Tensor) -> Bool[Tensor, "batch pos"]:
        """Return I_F(X): the positions that the target depends on (Sec. 5.1, eq 4)."""

    @abstractmethod
    def check_input(self, x: Tensor) -> None:
        """Refuse what is no batch of this task's sequences.

        Raises:
            InfoFlowError: with what was expected.
        """

    @abstractmethod
    def draw(self, n: int, generator: torch.Generator, split: Split | None = None) -> Tensor:
        """Draw `n` sequences; with a split, those that belong to it."""

    @abstractmethod
    def features(self) -> "datasets.Features":
        """Name the types and shapes of the columns ``x`` and ``y`` of a dataset."""

    @property
    def comparison(self) -> ComparisonProfile | None:
        """The number of comparisons; None if the target compares nothing or that is not known."""
        return None

    @property
    def components(self) -> tuple[Component, ...]:
        """The components that the target retrieves, for the theory's model; empty if no tuples."""
        return ()

    @property
    def reads(self) -> Sequence[int]:
        """Positions that the target depends on whatever they hold; empty if none."""
        return ()

    def parameters(self) -> dict[str, Any]:
        """Return the parameters that make this task."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def _repr_html_(self) -> str:
        about = inspect.cleandoc(self.__doc__ or "").split("\n\n")[0]
        facts = {**self.parameters(), "source": self.source}
        return panel(self.name, facts, (about,), "more: .sample(n, seed), .target(x), .dataset()")

    @checked
    def sample(
        self, n: Count, seed: Seed
    ) -> tuple[Shaped[Tensor, " batch pos *token"], Shaped[Tensor, " batch *target"]]:
        """Draw `n` sequences and their targets; the same `seed` gives the same sample.

        Raises:
            InfoFlowError: if `n` is below 1.
        """
        x = self.inputs(n, seed)
        with _CPU:
            return x, self.target(x)

    def inputs(self, n: int, seed: int) -> Shaped[Tensor, " batch pos *token"]:
        """Return the sequences of :meth:`sample` alone."""
        with _CPU:
            return self.draw(n, torch.Generator().manual_seed(derive_seed("sample", seed)))

    @overload
    def dataset(self, split: str, n: int, seed: int = 0) -> "datasets.Dataset": ...

    @overload
    def dataset(self, split: str, n: None, seed: int = 0) -> "datasets.IterableDataset": ...

    @checked
    def dataset(
        self, split: str, n: Count | None, seed: Seed = 0
    ) -> "datasets.Dataset | datasets.IterableDataset":
        """Return sequences and targets with columns ``x`` and ``y``.

        With a number, an Arrow-backed dataset of `n` sequences; with None, an endless
        ``IterableDataset`` that is drawn as it is read and that workers can share. Splits draw from
        seeds of their own. Equal arguments give equal data and fingerprints, in every process; a
        ``with_format("torch")`` on top gives tensors.

        Raises:
            InfoFlowError: for an unknown split, `n` below 1, or a split that has no sequences.
        """
        part: Split = check(split, Split, "split")
        if n is None:
            return self._stream(part, seed)
        # the split enters the seed, which alone tells the splits of vector tasks apart
        generator = torch.Generator().manual_seed(
            derive_seed("sample", derive_seed(self.name, split, seed))
        )
        columns, info = self._columns(n, generator, part), self._info()
        # a fingerprint of the arguments, so that caches of datasets know the same data again
        identity: tuple[Any, ...] = (
            self.name, self.parameters(), split, n, seed, _DATASET_FORMAT
        )  # fmt: skip
        default = torch.get_default_dtype()
        if columns["x"].dtype.kind == "f" and default.itemsize < 4:  # rounded: other data
            identity += (str(default),)
        data = datasets.Dataset.from_dict(columns, features=info.features, info=info)
        # from_dict takes no fingerprint, so its table is wrapped once more
        return datasets.Dataset(
            data.data,
            info=info,
            split=datasets.NamedSplit(split),
            fingerprint=datasets.fingerprint.Hasher.hash(identity),
        )

    def _columns(self, n: int, generator: torch.Generator, split: Split) -> dict[str, Any]:
        """Draw the columns of a dataset, floats as float32, which its features are."""
        with _CPU:
            x = self.draw(n, generator, split)
            x = x.float() if x.is_floating_point() else x
            y = self.target(x)
        return {"x": x.numpy(), "y": (y.float() if y.is_floating_point() else y).numpy()}

    def _info(self) -> "datasets.DatasetInfo":
        return datasets.DatasetInfo(
            description=f"{self.name}: {self.source}", features=self.features()
        )

    def _stream(self, split: Split, seed: int) -> "datasets.IterableDataset":
        # a split without sequences is refused here, not when training has begun
        self._columns(1, torch.Generator().manual_seed(0), split)

        shards = list(range(_STREAM_SHARDS))
        with _CPU:  # the library counts in tensors of its own
            return datasets.IterableDataset.from_generator(
                _rows,
                features=self.features(),
                gen_kwargs={"task": self, "part": split, "seed": seed, "shards": shards},
                split=datasets.NamedSplit(split),
            )


def _rows(task: Task, part: Split, seed: int, shards: list[int]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a stream; a function of the module, so that workers can be sent it."""
    # a worker gets some of the shards and takes them in turn, without an end
    for block in itertools.count():
        for shard in shards:
            # each block has a seed of its own, so that its rows do not depend on who draws them
            generator = torch.Generator().manual_seed(
                derive_seed(task.name, part, seed, "stream", shard, block)
            )
            columns = task._columns(_STREAM_BLOCK, generator, part)
            for sequence, target in zip(columns["x"], columns["y"], strict=True):
                yield {"x": sequence, "y": target}


def check_positions(positions: Any, n_tokens: int, name: str = "positions") -> tuple[int, ...]:
    """Check for different positions of a sequence, at least one, in order.

    Raises:
        InfoFlowError: if they are not.
    """
    position = Annotated[int, Interval(ge=0, le=n_tokens - 1)]
    places = Annotated[tuple[position, ...], MinLen(1), Distinct(), Remedy("at least one")]
    return tuple(sorted(check(positions, places, name)))


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
        InfoFlowError: for a parameter that its annotation does not allow.
    """

    input_kind: ClassVar[str] = "vectors"

    n_tokens: Count = 16
    d_token: Count = 4
    tokens: TokenDistribution = "normal"

    @property
    def d_output(self) -> int:
        """Dimension of the target."""
        return 1

    @abstractmethod
    def target(self, x: Float[Tensor, "batch pos d_token"]) -> Float[Tensor, "batch d_output"]:
        """Return the target F(X) of every sequence, differentiable in `x`."""

    def active_index_set(self, x: Float[Tensor, "batch pos d_token"]) -> Bool[Tensor, "batch pos"]:
        """Return I_F(X): positions whose token moves the target, dF/dx(t) != 0 (Sec. 5.1, eq 4).

        Here they are those that the target reads, whatever tokens they hold.
        """
        self.check_input(x)
        active = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        active[:, list(self.reads)] = True
        return active

    def check_input(self, x: Tensor) -> None:
        """Refuse what is no batch of this task's sequences.

        Raises:
            InfoFlowError: for a wrong shape, or values that are no finite floats.
        """
        check_vectors(x, self.n_tokens, self.d_token, f"task {self.name!r}")

    def draw(
        self, n: int, generator: torch.Generator, split: Split | None = None
    ) -> Float[Tensor, "batch pos d_token"]:
        """Draw `n` sequences of i.i.d. tokens; splits differ by their seeds alone.

        They have PyTorch's default dtype, and the same numbers in each.
        """
        shape, default = (n, self.n_tokens, self.d_token), torch.get_default_dtype()
        if self.tokens in ("uniform", "unit"):
            unit = torch.rand(shape, generator=generator, dtype=torch.float32).to(default)
            return unit if self.tokens == "unit" else unit * 2 - 1
        x = torch.randn(shape, generator=generator, dtype=torch.float32).to(default)
        # normal vectors over their norms are uniform on the sphere
        return x / x.norm(dim=-1, keepdim=True) if self.tokens == "sphere" else x

    def features(self) -> "datasets.Features":
        """Return ``x``, the tokens of a sequence, and ``y``, the target."""
        return datasets.Features(
            {
                "x": datasets.Array2D(shape=(self.n_tokens, self.d_token), dtype="float32"),
                "y": datasets.Sequence(datasets.Value("float32"), length=self.d_output),
            }
        )
