"""What measures of routes share: edges between positions are read off a pass and followed.

Edges are float [layer, batch, query, key], float32 on the CPU, at least 0 and 0 where there is
nothing to follow: patterns, or what is made of them. Asked places are int [batch, asked], -1 where
a sequence has none. Scores are [layer, batch, asked, position].
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import bind_to_thread, eval_mode
from infoflow_lens.hooks.influence.base import start_point
from infoflow_lens.hooks.model.call import call, without_user_hooks
from infoflow_lens.hooks.model.inputs import example_input
from infoflow_lens.hooks.model.parts import Norm, is_norm
from infoflow_lens.hooks.model.points import reads_vectors
from infoflow_lens.hooks.passes.view import Needs, Pass
from infoflow_lens.hooks.scores import StateScores, StateScoresProbe, mark_existing

Edges: TypeAlias = Float[Tensor, "layer batch query key"]
Places: TypeAlias = Int[Tensor, "batch asked"]
Scores: TypeAlias = Float[Tensor, "layer batch asked position"]


def add_residual(pattern: Float[Tensor, "*batch query key"]) -> Float[Tensor, "*batch query key"]:
    """Add the residual connection, W + I with rows that sum to 1: it weighs as much as a row.

    For rows that sum to 1 this is 0.5 W + 0.5 I (Abnar & Zuidema 2020, Sec. 3). Rows that sum to
    something else (ReLU, sinks, a query without keys) keep that proportion to the residual.
    """
    weights = pattern + torch.eye(pattern.shape[-1], device=pattern.device)
    return weights / weights.sum(dim=-1, keepdim=True)


def within_one(pattern: Float[Tensor, "*batch query key"]) -> Float[Tensor, "*batch query key"]:
    """Make strengths of weights: rows that sum to more than 1 (ReLU) are divided by their sum."""
    return pattern / pattern.sum(dim=-1, keepdim=True).clamp(min=1)


@dataclass(frozen=True, eq=False, kw_only=True)
class RoutesResult(StateScores):
    """How much of every source each state holds, by a measure of routes.

    Attributes:
        scores: float [layer, batch, pos, source], at least 0; which measure it is stands in
            ``record.config["probe"]``. With chosen positions the axis `pos` holds these only. 0
            where a sequence has no such state or source.
    """

    column: ClassVar[str] = "scores"

    scores: Float[Tensor, "layer batch pos source"]


class RoutesProbe(StateScoresProbe[RoutesResult]):
    """The base of measures that follow edges between positions from layer to layer.

    Edges come from one pass of the model, which is shared with other probes; none is run again.
    Between attention layers every position keeps to itself, as MLPs and norms do, so the scores are
    the same for the post-attention state of a layer and for what leaves it. Sources are the tokens,
    with their positions.

    Args:
        positions: whose states; default all. Negative ones count from the end of each sequence, so
            (-1,) is the last token, or CLS.
    """

    kind: ClassVar[type[StateScores]] = RoutesResult
    follows_attention: ClassVar[bool] = True

    def needs(self, model: nn.Module) -> Needs:
        """Name patterns, and the sources, which are counted.

        Raises:
            InfoFlowError: if the model does not show its patterns.
        """
        self.check_positions(model)
        return Needs.of(model, pattern=True, points=[start_point(model, None)])

    @abstractmethod
    def edges(self, seen: Pass, layer: int) -> Float[Tensor, "batch query key"]:
        """Weigh the edges into a layer's states, at least 0, of all positions."""

    @abstractmethod
    def follow(self, edges: Edges, place: Places) -> Scores:
        """Score all positions for the asked states of every layer."""

    def refusal(self, layer: int) -> str:
        """Say what is wrong with edges that are negative or NaN."""
        return (
            f"the pattern of layer {layer} has negative weights: expected none, as of softmax, "
            f"ReLU or a hard maximum; {type(self).__name__} cannot follow them"
        )

    def update(self, seen: Pass) -> Mapping[str, Any]:
        """Return the routes of a pass."""
        layers = range(seen.n_layers)
        n_source = seen.activation(start_point(seen.model, None)).shape[1]
        edges = torch.stack([self.edges(seen, layer) for layer in layers]).float().cpu()
        # NaN as well, for which no comparison holds, and which says that parts do not add up
        for layer in (~(edges >= 0)).flatten(1).any(dim=1).nonzero().flatten().tolist():
            raise InfoFlowError(self.refusal(layer))
        n_pos = edges.shape[2]
        lengths = seen.lengths_of(n_source)
        place = self.place(lengths, n_source, n_pos)
        scores = self.follow(edges, place)[..., :n_source]
        scores = torch.where(mark_existing(place, lengths, n_source), scores, 0)
        return self.parts(scores, place, lengths, layers, n_pos)


class Read(NamedTuple):
    """What a module has read.

    Attributes:
        path: of the module.
        module: itself.
        given: what it was given, of the shape of what it gave.
    """

    path: str
    module: nn.Module
    given: Tensor


def run_example(model: nn.Module, points: Sequence[str]) -> tuple[Pass, list[Read]]:
    """Run two short sequences, and note what each module reads that keeps a shape.

    Args:
        model: the model.
        points: hook points to catch; those that do not fire are missing in the pass.

    Returns:
        the pass, and what modules have read, in its order.
    """
    tokens = example_input(model, n_sequences=2).to(next(model.parameters()).device)
    if not reads_vectors(model):
        tokens = tokens[:, :8]
    reads: list[Read] = []

    def note(path: str, module: nn.Module) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            given = [one for one in args if isinstance(one, Tensor)]
            # a norm reads one tensor and gives one of the same shape
            if len(given) == 1 and isinstance(output, Tensor) and given[0].shape == output.shape:
                reads.append(Read(path, module, given[0].detach().float()))

        return module.register_forward_hook(bind_to_thread(hook))

    handles = [note(path, module) for path, module in model.named_modules() if path]
    try:
        with eval_mode(model), without_user_hooks(model):
            caught = call(model, tokens, points, output=True).activations
            return Pass(model, caught, tokens=tokens), reads
    finally:
        for handle in handles:
            handle.remove()


def find_norm(
    model: nn.Module, state: Float[Tensor, "batch pos d_model"], reads: Sequence[Read], bar: float
) -> str | None:
    """Find the norm that reads a state: of those that read nearly the same, the nearest.

    Args:
        model: the model.
        state: what is read.
        reads: what modules have read.
        bar: the largest distance for rounding, relative to the length of the state.

    Raises:
        InfoFlowError: if it is no norm with a scale for each position.
    """
    length = state.norm(dim=-1)
    nearest: tuple[float, Read | None] = bar, None
    for read in reads:
        if read.given.shape != state.shape:
            continue
        # each position by itself: one of them may be a thousand times as long as the others
        far = float(((read.given - state).norm(dim=-1) / length).max())
        if far < nearest[0]:
            like = read.given / read.given.norm(dim=-1, keepdim=True).clamp(min=1e-30)
            dtype = next(iter(read.module.parameters()), read.given).dtype
            with torch.no_grad():
                if is_norm(read.module, like.to(dtype)):
                    nearest = far, read
    if nearest[1] is None:
        return None
    path = nearest[1].path
    with without_user_hooks(model):
        Norm(path, state.shape[-1]).numbers(model)  # one that cannot be read is no other, and named
    return path
