"""What every task offers: samples, splits, datasets; targets made of components."""

import inspect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, get_args, overload

import numpy as np
import torch
from annotated_types import Interval, MinLen
from jaxtyping import Bool, Float, Int, Shaped
from numpy.typing import NDArray
from torch import Tensor

from infoflow_lens.foundation.display import panel
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.lazy import datasets
from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.foundation.sequences import check_vectors
from infoflow_lens.foundation.settings import (
    Count,
    Distinct,
    Positions,
    Remedy,
    Seed,
    check,
    check_fields,
    checked,
)
from infoflow_lens.theory.comparison import (
    ComparisonProfile,
    Component,
    best_tuples,
    components_profile,
)

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
SHARES: dict[Split, float] = {"train": 0.8, "validation": 0.1, "test": 0.1}


def split_sizes(n: int, least: int, what: str) -> dict[Split, int]:
    """Count the things of each split, of `n` in all: its share, but at least `least`.

    Raises:
        InfoFlowError: if there are too few.
    """
    # what rounding down leaves over goes to training
    held_out = {split: max(least, int(SHARES[split] * n)) for split in SPLITS[1:]}
    train = n - sum(held_out.values())
    if train < least:
        raise InfoFlowError(
            f"{n} {what} cannot be split: each of train, validation and test needs {least}, so "
            f"expected at least {3 * least}; raise the sizes, or draw with sample()"
        )
    return {"train": train, **held_out}


@lru_cache(maxsize=64)
def dealt_out(n: int, least: int, what: str, seed: int) -> dict[Split, Int[Tensor, " part"]]:
    """Return the numbers below `n`, dealt out to the splits at random, at least `least` to each.

    Raises:
        InfoFlowError: if there are too few.
    """
    sizes = split_sizes(n, least, what)
    generator = torch.Generator().manual_seed(derive_seed("holdout", what, seed))
    parts = torch.randperm(n, generator=generator).split([sizes[split] for split in SPLITS])
    return {split: part.sort().values for split, part in zip(SPLITS, parts, strict=True)}


def hash_sequences(x: Int[Tensor, "batch pos"], seed: int) -> NDArray[np.uint64]:
    """Hash every sequence to 0 to 2^64 - 1: equal ones alike, others as if at random."""
    keys = np.full(len(x), derive_seed("split", seed), dtype=np.uint64)
    for column in x.numpy().astype(np.uint64).T:
        # splitmix64 (Steele, Lea, Flood 2014), one round a token
        keys = (keys ^ column) + np.uint64(0x9E3779B97F4A7C15)
        keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        keys ^= keys >> np.uint64(31)
    return keys


def key_range(split: Split, cuts: list[int]) -> tuple[np.uint64, np.uint64]:
    """Return the lowest and the highest key of the sequences of a split."""
    first = SPLITS.index(split)
    # both ends belong to the split, for 2^64 itself is no uint64
    return np.uint64(cuts[first]), np.uint64(cuts[first + 1] - 1)


def cuts_by_share() -> list[int]:
    """Return the cuts of all keys, in the shares of the splits."""
    ends = np.cumsum(list(SHARES.values()))
    return [0, *(int(end * 2**60) << 4 for end in ends[:-1]), 2**64]


def cuts_by_count(keys: NDArray[np.uint64], what: str) -> list[int]:
    """Return the cuts between the sorted keys of a small space, so that no split is empty.

    Raises:
        InfoFlowError: if there are too few sequences.
    """
    sizes = split_sizes(len(keys), 1, what)
    ends = np.cumsum([sizes[split] for split in SPLITS])
    return [0, *(int(np.sort(keys)[end]) for end in ends[:-1]), 2**64]


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


Outer = Callable[[Tensor], Tensor]
TokenSampler = Callable[[tuple[int, int, int], torch.Generator], Tensor]

OuterName = Literal["sum", "product", "square_sum", "identity"]
OUTER: Mapping[OuterName, Outer] = {
    "sum": lambda z: z.sum(dim=-1, keepdim=True),
    "product": lambda z: z.prod(dim=-1, keepdim=True),
    "square_sum": lambda z: z.square().sum(dim=-1, keepdim=True),
    "identity": lambda z: z,
}


@dataclass(frozen=True, kw_only=True)
class RetrievalTask(VectorTask):
    """F(X) = F0(v_1, .., v_D), v_i the score of the tuple of tokens that component i retrieves.

    Samples, active index set, number of comparisons and trees follow from the components.
    """

    @property
    @abstractmethod
    def components(self) -> tuple[Component, ...]:
        """The components, each of which retrieves a tuple of tokens."""

    @property
    def outer_function(self) -> Outer:
        """F0 as a function from [batch, D] to [batch, d_output]; the sum, unless `outer` says."""
        outer: OuterName | Outer = getattr(self, "outer", "sum")
        return outer if callable(outer) else OUTER[outer]

    @property
    def d_output(self) -> int:
        """Dimension of F0's values."""
        return int(self.outer_function(torch.zeros(1, len(self.components))).shape[-1])

    @property
    def comparison(self) -> ComparisonProfile | None:
        """Dimension, order and number of comparisons, derived from the components."""
        return components_profile(self.name, self.components)

    def target(self, x: Float[Tensor, "batch pos d_token"]) -> Float[Tensor, "batch d_output"]:
        """Return F(X), differentiable in `x` through the tokens that are retrieved."""
        self.check_input(x)
        rows = torch.arange(len(x), device=x.device)[:, None]
        where = self.retrieve(x.detach())
        # rows [batch, 1] beside at [batch, arity] reads tokens [batch, arity, d_token]
        values = [c.score(x[rows, at]) for c, at in zip(self.components, where, strict=True)]
        return self.outer_function(torch.stack(values, dim=1))

    def retrieve(self, x: Float[Tensor, "batch pos d_token"]) -> list[Int[Tensor, "batch arity"]]:
        """Find the tuple of positions that each component retrieves."""
        return [best_tuples(x, component)[0] for component in self.components]

    def active_index_set(self, x: Float[Tensor, "batch pos d_token"]) -> Bool[Tensor, "batch pos"]:
        """Return the positions of retrieved tuples on whose tokens the target depends (eq 4).

        Two components may share a position, and F0 or a score may not depend on one of its inputs;
        both are seen by differentiating. Ties go to the first tuple; they have probability zero.
        """
        self.check_input(x)
        where = self.retrieve(x.detach())
        active = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        # also where the caller has switched gradients off
        with torch.enable_grad():
            # one leaf for all: what components that share a token do to one another may cancel
            leaf = x.detach().requires_grad_(True)
            tokens = [leaf.gather(1, at[..., None].expand(-1, -1, x.shape[2])) for at in where]
            values = [c.score(t) for c, t in zip(self.components, tokens, strict=True)]
            output = self.outer_function(torch.stack(values, dim=1))
            # F0 or a score may ignore one of its inputs there, so gradients decide what counts
            for column in range(output.shape[1]):
                # summed over the batch, as no output depends on the tokens of another sequence
                (gradient,) = torch.autograd.grad(
                    output[:, column].sum(), leaf, retain_graph=True, allow_unused=True
                )
                if gradient is not None:
                    active |= (gradient != 0).any(dim=-1)
        return active


@dataclass(frozen=True, kw_only=True)
class Target(RetrievalTask):
    """A target of one's own: components, an outer function, and how tokens are drawn.

    What takes a task of ours takes it: ``estimate``, ``train``, probes, studies, and the command
    line as ``module:name``.

    Example:
        >>> closest = Component(2, lambda x: x.diff(dim=-2).norm(dim=(-2, -1)), symmetric=True,
        ...                     extremum="min", distinct=True)
        >>> target = Target(components=(closest,), n_tokens=3, d_token=2)
        >>> target.comparison.dimension, target.comparison.number(3, "paper")
        (2, 5)

    Attributes:
        components: what is retrieved; arities may be mixed.
        outer: F0, "sum", "product", "square_sum", "identity" (a vector of D outputs), or a
            differentiable function from [batch, D] to [batch, d_output].
        subsets: for every component the positions that it looks at, or None for all; None for all
            of all.
        tokens: as for any vector task; or a function of the shape [n, T, d] and a generator.
        name: how it is called in reports; part of what its samples are drawn from.

    Raises:
        InfoFlowError: for no components; scores that do not give one finite number a tuple, from
            that tuple alone, with a derivative, or are not symmetric where they say so; tuples
            longer than the sequence; subsets that do not fit; an outer function without a
            derivative; or tokens that are not drawn from the generator.
    """

    components: tuple[Component, ...] = ()
    outer: OuterName | Outer = "sum"
    subsets: tuple[Positions | None, ...] | None = None
    tokens: TokenDistribution | TokenSampler = "normal"  # type: ignore[assignment]
    name: str = "target"  # type: ignore[misc]

    source = "a target of one's own"

    def __post_init__(self) -> None:
        if not isinstance(self.components, (tuple, list)) or not self.components:
            raise InfoFlowError(
                f"components is {self.components!r}: expected at least one Component(arity, score)"
            )
        for component in self.components:
            if not isinstance(component, Component):
                raise InfoFlowError(
                    f"components holds {component!r}: expected Component(arity, score)"
                )
        object.__setattr__(self, "components", tuple(self.components))
        super().__post_init__()
        if self.subsets is not None:
            object.__setattr__(self, "components", self._restrict(self.subsets))
            object.__setattr__(self, "subsets", None)
        first, second = (self.draw(2, torch.Generator().manual_seed(0)) for _ in range(2))
        if not torch.equal(first, second):
            raise InfoFlowError(
                "tokens gives other numbers for the same generator: expected all to be drawn from "
                "it, as in torch.randn(shape, generator=generator)"
            )
        for number, component in enumerate(self.components, start=1):
            self._check_component(number, component)
        self._check_outer_function()

    def _restrict(self, subsets: tuple[tuple[int, ...] | None, ...]) -> tuple[Component, ...]:
        if len(subsets) != len(self.components):
            raise InfoFlowError(
                f"subsets is {subsets!r}: expected the positions of every component, or None for "
                f"all, {len(self.components)} entries"
            )
        return tuple(
            component if subset is None else replace(component, positions=subset)
            for component, subset in zip(self.components, subsets, strict=True)
        )

    def _check_component(self, number: int, component: Component) -> None:
        longest = max(component.arity, component.rank)
        if longest > self.n_tokens:
            raise InfoFlowError(
                f"component {number} asks for {longest} tokens of {self.n_tokens}: raise n_tokens"
            )
        if component.positions is not None:
            check_positions(component.positions, self.n_tokens, f"positions of component {number}")
        listed = [p for row in component.tuples or () for p in row]
        if listed and not 0 <= min(listed) <= max(listed) < self.n_tokens:
            raise InfoFlowError(
                f"tuples of component {number} hold positions {min(listed)} to {max(listed)}: "
                f"expected 0 to {self.n_tokens - 1}"
            )
        x = self.draw(n := 16, torch.Generator().manual_seed(0))[:, : component.arity]
        try:
            scores = component.score(x)
            # scores are called with more leading axes, too, such as [batch, tuple]
            nested = component.score(x[:, None])
        except Exception as error:  # whatever a function of the user's raises
            raise InfoFlowError(
                f"the score of component {number} fails on tokens [..., {component.arity}, "
                f"{self.d_token}] ({type(error).__name__}: {error}): expected a function to "
                "scores [...] for any number of leading axes"
            ) from error
        if not isinstance(scores, Tensor) or scores.shape != (n,) or nested.shape != (n, 1):
            shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise InfoFlowError(
                f"the score of component {number} gives {shape} for tokens "
                f"[{n}, {component.arity}, {self.d_token}]: expected one number a tuple, [{n}]; "
                "reduce over the last two axes"
            )
        self._check_values(number, component, x, scores)
        if component.symmetric:
            # the first order is the given one; of long tuples six others stand for all
            for order in itertools.islice(itertools.permutations(range(component.arity)), 1, 7):
                if not torch.allclose(component.score(x[:, list(order)]), scores, atol=1e-4):
                    raise InfoFlowError(
                        f"component {number} says symmetric=True, but its score changes when "
                        "tokens change places: leave symmetric out"
                    )

    def _check_values(self, number: int, component: Component, x: Tensor, scores: Tensor) -> None:
        """Check that scores are finite, a tuple's own, and move with its tokens."""
        alone = torch.cat([component.score(x[[row]]) for row in range(len(x))])
        if not scores.isfinite().all():
            raise InfoFlowError(
                f"the score of component {number} is {float(scores[~scores.isfinite()][0])} for "
                "tokens as they are drawn: expected finite numbers"
            )
        if not torch.allclose(alone, scores, atol=1e-4):
            raise InfoFlowError(
                f"the score of component {number} gives a tuple {float(alone[0]):.4g} alone and "
                f"{float(scores[0]):.4g} among {len(x)}: expected a function of this tuple's "
                "tokens; take no means over other axes than the last two, and draw nothing"
            )
        if not _has_gradient(component.score, x):
            raise InfoFlowError(
                f"the score of component {number} has no derivative by its tokens, from which "
                "active tokens are found: expected a differentiable function; leave out round(), "
                "detach(), comparisons and the like"
            )

    def _check_outer_function(self) -> None:
        generator = torch.Generator().manual_seed(0)
        if not _has_gradient(
            self.outer_function,
            torch.randn(16, len(self.components), generator=generator, dtype=torch.float32),
        ):
            raise InfoFlowError(
                "outer has no derivative by the retrieved values, and active tokens are found by "
                "differentiating it: expected a differentiable function"
            )
        values = self.outer_function(torch.zeros(2, len(self.components)))
        if values.ndim != 2 or len(values) != 2:
            raise InfoFlowError(
                f"outer gives {tuple(values.shape)} for values [2, {len(self.components)}]: "
                "expected [2, d_output]; return [2, 1] for one number each"
            )

    def draw(
        self, n: int, generator: torch.Generator, split: Split | None = None
    ) -> Float[Tensor, "batch pos d_token"]:
        """Draw `n` sequences, by the named distribution or by the function of one's own.

        Raises:
            InfoFlowError: if that function gives another shape.
        """
        if not callable(self.tokens):
            return super().draw(n, generator, split)
        shape = (n, self.n_tokens, self.d_token)
        x = self.tokens(shape, generator)
        if not isinstance(x, Tensor) or x.shape != shape:
            raise InfoFlowError(
                f"tokens gives {getattr(x, 'shape', type(x).__name__)} for the shape {shape}: "
                "expected a tensor of that shape"
            )
        return x


def _has_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Say whether a derivative of the function by `x` differs from 0 anywhere."""
    with torch.enable_grad():
        x = x.detach().requires_grad_(True)
        values = function(x).sum()
        # a function that detaches leaves no graph, for which autograd would raise
        if not values.requires_grad:
            return False
        (gradient,) = torch.autograd.grad(values, x, allow_unused=True)
    return gradient is not None and bool((gradient != 0).any())
