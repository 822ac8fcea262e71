"""Routes: edges read off a pass and followed; how near each part of a state comes to the whole.

Edges are float [layer, batch, query, key], float32 on the CPU, at least 0 and 0 where there is
nothing to follow: patterns, or what is made of them. Asked places are int [batch, asked], -1 where
a sequence has none. Scores are [layer, batch, asked, position].
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import bind_to_thread, eval_mode
from infoflow_lens.hooks.influence.base import start_point, tolerance
from infoflow_lens.hooks.model.call import call, without_user_hooks
from infoflow_lens.hooks.model.inputs import example_input
from infoflow_lens.hooks.model.parts import Norm, NormNumbers, is_norm
from infoflow_lens.hooks.model.points import cache_by_mode, layer_count, reads_vectors
from infoflow_lens.hooks.model.semantics import hook_semantics
from infoflow_lens.hooks.passes.view import Needs, Pass
from infoflow_lens.hooks.scores import StateScores, StateScoresProbe, mark_existing
from infoflow_lens.theory.propagation import Semiring, propagate_edges

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


Combine = Literal["widest", "rollout"]
_GAP = (
    "what the heads bring does not add up to what attention adds: something else than a constant "
    "or a norm stands between them, or a hook of yours changes it"
)
ROOM = 2**22  # numbers in the largest tensor: queries are taken a few at a time


class Addition(NamedTuple):
    """What a layer makes of what its heads bring, before it adds it to the stream.

    Attributes:
        factor: the constant by which it multiplies it; 1 in nearly all models, Granite has another.
        norm: the norm that reads it (Gemma 2, OLMo 2); None where there is none.
    """

    factor: float = 1.0
    norm: Norm | None = None


class ContributionRoutes(RoutesProbe):
    """Scores [layer, batch, pos, source]: information-flow routes (Ferrando & Voita 2024, Sec. 2).

    The post-attention state of position t is a sum of parts: what stood there before, x_t, and what
    each head h brings from each key j, its weight times the value times the output matrix,

        x'_t = x_t + sum_h sum_j alpha^h_tj v^h_j W^h_O + b_O.

    The importance of a part z for the whole y is its proximity max(0, |y|_1 - |z - y|_1), divided
    by the sum of the proximities of all parts. The edge from j to t is the sum of the importances
    of its heads; the edge from t to itself has the importance of x_t, too. So the edges into a
    state sum to 1, and where no part comes near, the state keeps to itself. The paper's routes are
    all edges above a threshold that a search from a state downwards reaches. A source's score is
    the highest threshold at which it is still reached: of the paths to it, the widest, by its
    narrowest edge ("widest"). With "rollout" it is the sum over paths of the products of edges, as
    Ferrando, Gállego & Costa-jussà (2022, ALTI) put layers together; rows then sum to 1.

    What is left out: norms before attention are part of the values, as they are in this pass, and
    are not followed to what they normalise. Value biases count with the values; b_O belongs to the
    whole and to no part. MLPs work position by position, as an edge of weight 1; in the paper the
    MLP and the residual connection beside it share that edge, and the larger of them has at least
    one half, so "widest" scores up to one half are the same. Sources are what enters the first
    block. Where norms come after the sums, as in BERT, the whole is the sum that the norm reads.

    It needs the values and output matrices, and attention that adds what they give to the residual
    stream, times one constant, or behind a norm (Gemma 2, OLMo 2), whose scale is held.

    Args:
        combine: "widest" or "rollout".
        heads_apart: whether each head is a part of its own, as in Ferrando & Voita, or what all
            heads bring from a key is one part, as in ALTI.
        positions: whose states; default all. Negative ones count from the end of each sequence.

    Raises:
        InfoFlowError: for unknown settings, positions that no sequence has, or a model that does
            not show what it needs, saying what.
    """

    combine: Combine = "widest"
    _: KW_ONLY
    heads_apart: bool = True

    def needs(self, model: nn.Module) -> Needs:
        """Name the sources, and what parts are read from; see :func:`needs_of_parts`."""
        return super().needs(model) | needs_of_parts(model)

    def edges(self, seen: Pass, layer: int) -> Float[Tensor, "batch query key"]:
        """Weigh edges by importances."""
        parts = Parts.read(seen, layer)
        edges = parts.importances(self.heads_apart)
        # the reason is given once edges are read: nothing here waits for the device
        return edges.where(parts.add_up(seen, layer), torch.nan)

    def refusal(self, layer: int) -> str:
        """Say what is wrong with edges of parts that do not add up."""
        return gap_in(layer)

    def follow(self, edges: Edges, place: Places) -> Scores:
        """Return the widest path, or the sum over all paths."""
        semiring: Semiring = "sum-product" if self.combine == "rollout" else "max-min"
        return propagate_edges(edges, semiring, queries=place)


def gap_in(layer: int) -> str:
    """Say what is wrong with a layer whose parts do not add up."""
    return (
        f"in layer {layer} {_GAP}. Expected weighted values that add up; take hooks off that "
        "edit heads or attention"
    )


@cache_by_mode
def find_additions(model: nn.Module) -> tuple[Addition, ...]:
    """Find, by running the model, how each layer adds what its heads bring.

    Raises:
        InfoFlowError: if the states of the model cannot be decomposed, saying why.
    """
    points, n_layers = _needs(model).points, layer_count(model)
    for layer in range(n_layers):
        if not isinstance(_output_matrix(model, layer), Tensor):
            raise _cannot(model, f"attention layer {layer} has no W_O")
    seen, reads = run_example(model, points)
    missing = seen.lacks(points)
    if missing:
        raise _cannot(model, f"{', '.join(missing[:3])} do not fire")
    # tried on a short pass: parts that do not add up would name the wrong tokens
    found = []
    for layer in range(n_layers):
        try:
            found.append(_find_addition(seen, layer, reads))
            reason = "" if Parts.read(seen, layer, found[-1]).add_up(seen, layer) else _GAP
        except RuntimeError as error:  # shapes of another attention
            reason = f"values, patterns and W_O do not fit together ({str(error).splitlines()[0]})"
        if reason:
            raise _cannot(model, f"in layer {layer} {reason}")
    return tuple(found)


def _find_addition(seen: Pass, layer: int, reads: Sequence[Read]) -> Addition:
    """Find what stands between the heads and the stream: a constant, or else a norm."""
    parts = Parts.read(seen, layer, Addition())
    if not reads_sums(seen):
        return Addition()
    addition = Addition(_find_factor(parts, seen, layer))
    if Parts.read(seen, layer, addition).add_up(seen, layer):
        return addition
    added = parts.total()
    bar = 10 * tolerance(seen.activation(f"blocks.{layer}.hook_attn_out"))
    path = find_norm(seen.model, added, reads, bar)
    return addition if path is None else Addition(norm=Norm(path, added.shape[-1]))


def _cannot(model: nn.Module, reason: str) -> InfoFlowError:
    return InfoFlowError(
        f"{type(model).__name__} cannot be decomposed: {reason}. Expected values that heads weigh "
        "and output matrices that add them up; use AttentionRollout, which reads patterns alone"
    )


def needs_of_parts(model: nn.Module) -> Needs:
    """Name patterns, values, what enters attention's sum, and what attention adds to it.

    Raises:
        InfoFlowError: if the model does not show them, or they do not add up, saying why.
    """
    find_additions(model)
    return _needs(model)


def _needs(model: nn.Module) -> Needs:
    names = []
    for layer in range(layer_count(model)):
        block = f"blocks.{layer}"
        names += [f"{block}.attn.hook_v", f"{block}.hook_resid_pre", f"{block}.hook_attn_out"]
    return Needs.of(model, pattern=True, points=names)


def _output_matrix(model: nn.Module, layer: int) -> Any:
    blocks: Any = model.blocks
    return getattr(getattr(blocks[layer], "attn", None), "W_O", None)


@dataclass(frozen=True)
class Parts:
    """The parts of a layer's post-attention states, float32.

    Attributes:
        pattern: float [batch, head, query, key].
        brought: float [batch, head, key, d_model], what each key would bring with weight 1.
        before: float [batch, pos, d_model], what stood there before.
        bias: b_O, or 0.
    """

    pattern: Float[Tensor, "batch head query key"]
    brought: Float[Tensor, "batch head key d_model"]
    before: Float[Tensor, "batch pos d_model"]
    bias: Tensor | float

    @classmethod
    def read(cls, seen: Pass, layer: int, addition: Addition | None = None) -> "Parts":
        """Read the parts of a pass; grouped values are those of each of their heads.

        Args:
            seen: the pass.
            layer: whose attention.
            addition: how the layer adds what its heads bring; default, as :func:`find_additions`
                has found. A norm is held at its scale, so that what it gives is a sum, too: weights
                are divided by it, query by query.
        """
        addition = addition or find_additions(seen.model)[layer]
        blocks: Any = seen.model.blocks
        matrix = _output_matrix(seen.model, layer).detach().float()
        n_heads, d_head, _ = matrix.shape
        values = seen.activation(f"blocks.{layer}.attn.hook_v").float()
        # grouped values serve several heads: one for each head
        values = values.reshape(*values.shape[:2], -1, d_head)
        values = values.repeat_interleave(n_heads // values.shape[2], dim=2)
        bias = getattr(blocks[layer].attn, "b_O", None)
        parts = cls(
            seen.pattern(layer).float(),
            addition.factor * torch.einsum("bkhd,hdm->bhkm", values, matrix.to(values.device)),
            seen.state(layer, "resid_pre").float(),
            0.0 if bias is None else addition.factor * bias.detach().float().to(values.device),
        )
        # what the heads bring is normed once it is summed: the norm is held at its scale
        if addition.norm is None:
            return parts
        with without_user_hooks(seen.model):  # a norm may have hook points
            numbers = addition.norm.numbers(seen.model)
        return parts.apply_norm(numbers, seen.activation(f"blocks.{layer}.hook_attn_out").float())

    def apply_norm(
        self, numbers: NormNumbers, shows: Float[Tensor, "batch query d_model"]
    ) -> "Parts":
        """Make the parts of what a norm gives of their sum, with its scale held."""
        weight, bias = (one.detach().float().to(shows.device) for one in numbers[:2])
        norm = NormNumbers(weight, bias, numbers.centers)
        scale = norm.scale(self.total(), shows)
        # heads bring nothing to padding, from which no scale can be read
        scale = torch.where(scale.isfinite(), scale, 1)
        # b_O is in the sum that is normed; the norm's own bias comes behind it
        own = norm.apply(self.bias + torch.zeros_like(bias), scale)
        return Parts(
            self.pattern / scale[:, None], norm.apply(self.brought, 1), self.before, own + bias
        )

    def strengths(self) -> Float[Tensor, "batch head query key"]:
        """Return the length of what each head brings from each key, over that of what stood there.

        1 where it is as long, or longer.
        """
        lengths = self.pattern * self.brought.norm(dim=-1)[:, :, None]
        stood = self.before.norm(dim=-1)[:, None, :, None]
        return (lengths / stood.clamp(min=torch.finfo(lengths.dtype).tiny)).clamp(max=1)

    def total(self) -> Float[Tensor, "batch query d_model"]:
        """Sum what attention adds."""
        return torch.einsum("bhqk,bhkm->bqm", self.pattern, self.brought) + self.bias

    def add_up(self, seen: Pass, layer: int) -> Bool[Tensor, ""]:
        """Say whether these are the parts of the model's own states."""
        shows = seen.activation(f"blocks.{layer}.hook_attn_out").float()
        if not reads_sums(seen):  # it is behind the norm, and another state
            return torch.ones((), dtype=torch.bool, device=shows.device)
        gap, size = (shows - self.total()).norm(dim=-1), shows.norm(dim=-1)
        real = seen.is_real(gap.shape[1]).to(gap.device)
        # a state to which little is added is rounded like the others
        mean = (size * real).sum() / real.sum()
        rounding = tolerance(seen.activation(f"blocks.{layer}.hook_attn_out"))
        return ((gap <= rounding * (size + mean)) | ~real).all()

    def proximities(
        self, heads_apart: bool
    ) -> tuple[Float[Tensor, "batch part query key"], Float[Tensor, "batch query"]]:
        """Return the proximities of what heads (or all together) bring, and of what was before."""
        whole = self.before + self.total()
        each = zip(self.pattern, self.brought, whole, strict=True)
        near = [_find_proximities(p, b, w, heads_apart) for p, b, w in each]
        return torch.stack(near), _proximity(self.before, whole)

    def shares(
        self,
    ) -> tuple[Float[Tensor, "batch head query key"], Float[Tensor, "batch query"]]:
        """Return the importance of every head's keys, and of the state before; they sum to 1."""
        near, itself = self.proximities(heads_apart=True)
        total = near.sum(dim=(1, 3)) + itself
        scale = torch.where(total > 0, total, 1)
        return near / scale[:, None, :, None], torch.where(total > 0, itself / scale, 1)

    def importances(self, heads_apart: bool) -> Float[Tensor, "batch query key"]:
        """Return the edges: importances summed over heads, the residual's on the diagonal."""
        near, itself = self.proximities(heads_apart)
        edges = near.sum(dim=1)
        edges.diagonal(dim1=1, dim2=2).add_(itself)
        total = edges.sum(dim=-1, keepdim=True)
        alone = torch.eye(edges.shape[-1], device=edges.device).expand_as(edges)
        return torch.where(total > 0, edges / total.clamp(min=torch.finfo(edges.dtype).tiny), alone)


def reads_sums(seen: Pass) -> bool:
    """Say whether what attention adds is shown as it is added, and no state behind a norm."""
    return bool(hook_semantics(seen.model).adds)


def _find_factor(parts: Parts, seen: Pass, layer: int) -> float:
    """Find what the model adds, over what the heads bring."""
    shows = seen.activation(f"blocks.{layer}.hook_attn_out")
    real = seen.is_real(shows.shape[1]).to(shows.device)
    parts_add, model_adds = parts.total()[real].double(), shows[real].double()
    # by least squares over all real positions; near 1 it is 1, so that parts stay as they are
    factor = float((parts_add * model_adds).sum() / parts_add.square().sum().clamp(min=1e-300))
    return 1.0 if abs(factor - 1) <= tolerance(shows) else factor


def _proximity(
    part: Float[Tensor, "*shape d"], whole: Float[Tensor, "*shape d"]
) -> Float[Tensor, "*shape"]:
    """Return by how much a part shortens the whole, in the L1 norm; 0 where it does not."""
    return (whole.abs().sum(dim=-1) - (part - whole).abs().sum(dim=-1)).clamp(min=0)


def _find_proximities(
    pattern: Float[Tensor, "head query key"],
    brought: Float[Tensor, "head key d_model"],
    whole: Float[Tensor, "query d_model"],
    heads_apart: bool,
) -> Float[Tensor, "part query key"]:
    """Return the proximities of what a sequence's keys bring, by head or for all heads."""
    n_heads, n_query, n_key = pattern.shape
    found = []
    # some queries at a time: vectors of all pairs of tokens would not fit
    for queries in torch.arange(n_query).split(max(1, ROOM // (n_key * whole.shape[-1]))):
        weights, target = pattern[:, queries], whole[queries, None]
        if heads_apart:
            each = (
                _proximity(weights[head, :, :, None] * brought[head], target)
                for head in range(n_heads)
            )
            found.append(torch.stack(tuple(each)))
        else:
            together = torch.einsum("hqk,hkm->qkm", weights, brought)
            found.append(_proximity(together, target)[None])
    return torch.cat(found, dim=1)
