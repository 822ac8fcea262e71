"""Targets made of components: what is retrieved, and how its values are joined."""

import itertools
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import Positions
from infoflow_lens.tasks.splits import Split
from infoflow_lens.tasks.task import TokenDistribution, VectorTask, check_positions
from infoflow_lens.theory.comparison import (
    ComparisonProfile,
    Component,
    best_tuples,
    components_profile,
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
