"""Information-flow routes: how near each part of a state comes to the whole."""

from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import eval_mode
from infoflow_lens.hooks.influence.base import tolerance
from infoflow_lens.hooks.model.call import call, without_user_hooks
from infoflow_lens.hooks.model.inputs import example_input
from infoflow_lens.hooks.model.points import found_once, layer_count, reads_vectors
from infoflow_lens.hooks.model.semantics import hook_semantics
from infoflow_lens.hooks.passes.view import Needs, Pass
from infoflow_lens.hooks.routes.base import RoutesProbe
from infoflow_lens.hooks.routes.paths import Edges, Places, Scores
from infoflow_lens.theory.propagation import Semiring, propagate_edges

Combine = Literal["widest", "rollout"]
_GAP = (
    "what the heads bring does not add up to what attention adds: a norm stands on it, or a hook "
    "of yours changes it"
)
_ROOM = 2**22  # numbers in the largest tensor: queries are taken a few at a time


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
    stream, times one constant at most. A norm on what attention adds (Gemma 2, OLMo 2) is refused.

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

    _factors: tuple[float, ...] = field(default=(), init=False)

    def needs(self, model: nn.Module) -> Needs:
        """Patterns, values, what enters attention's sum, and what attention adds to it.

        Raises:
            InfoFlowError: if the model does not show them, or they do not add up.
        """
        needs = super().needs(model) | needs_of_parts(model)
        self._factors = factors_of(model)
        return needs

    def edges(self, seen: Pass, layer: int) -> Float[Tensor, "batch query key"]:
        """Importances."""
        parts = Parts.of(seen, layer, self._factors[layer])
        edges = parts.importances(self.heads_apart)
        # the reason is given once edges are read: nothing here waits for the device
        return edges.where(parts.add_up(seen, layer), torch.nan)

    def refusal(self, layer: int) -> str:
        """What is wrong with edges of parts that do not add up."""
        return gap_in(layer)

    def follow(self, edges: Edges, place: Places) -> Scores:
        """The widest path, or the sum over all paths."""
        semiring: Semiring = "sum-product" if self.combine == "rollout" else "max-min"
        return propagate_edges(edges, semiring, queries=place)


def gap_in(layer: int) -> str:
    """What is wrong with a layer whose parts do not add up."""
    return (
        f"in layer {layer} {_GAP}. Expected weighted values that add up; take hooks off that "
        "edit heads or attention"
    )


@found_once
def factors_of(model: nn.Module) -> tuple[float, ...]:
    """The constants by which the layers multiply what attention adds, found out by running them.

    They are 1 in nearly all models; Granite has another. They are not weights, so they are found
    out once.

    Raises:
        InfoFlowError: if the states of the model cannot be decomposed, saying why.
    """
    points, n_layers = needs_of_parts(model).points, layer_count(model)
    for layer in range(n_layers):
        if not isinstance(_output_matrix(model, layer), Tensor):
            raise _cannot(model, f"attention layer {layer} has no W_O")
    tokens = example_input(model, n_sequences=2).to(next(model.parameters()).device)
    if not reads_vectors(model):
        tokens = tokens[:, :8]
    with eval_mode(model), without_user_hooks(model):
        caught = call(model, tokens, points, output=True).activations
        seen = Pass(model, caught, tokens=tokens)
    missing = seen.lacks(points)
    if missing:
        raise _cannot(model, f"{', '.join(missing[:3])} do not fire")
    factors = []
    for layer in range(n_layers):
        try:
            factors.append(_factor(seen, layer))
            reason = "" if Parts.of(seen, layer, factors[-1]).add_up(seen, layer) else _GAP
        except RuntimeError as error:  # shapes of another attention
            reason = f"values, patterns and W_O do not fit together ({str(error).splitlines()[0]})"
        if reason:
            raise _cannot(model, f"in layer {layer} {reason}")
    return tuple(factors)


def _cannot(model: nn.Module, reason: str) -> InfoFlowError:
    return InfoFlowError(
        f"{type(model).__name__} cannot be decomposed: {reason}. Expected values that heads weigh "
        "and output matrices that add them up; use AttentionRollout, which reads patterns alone"
    )


def needs_of_parts(model: nn.Module) -> Needs:
    """Patterns, values, what enters attention's sum, and what attention adds to it."""
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
    def of(cls, seen: Pass, layer: int, factor: float = 1.0) -> "Parts":
        """From a pass; grouped values are those of each of their heads.

        Args:
            seen: the pass.
            layer: whose attention.
            factor: by which the model multiplies what attention adds.
        """
        blocks: Any = seen.model.blocks
        matrix = _output_matrix(seen.model, layer).detach().float()
        pattern = seen.pattern(layer).float()
        n_heads, d_head, _ = matrix.shape
        values = seen.activation(f"blocks.{layer}.attn.hook_v").float()
        values = values.reshape(*values.shape[:2], -1, d_head)
        values = values.repeat_interleave(n_heads // values.shape[2], dim=2)
        bias = getattr(blocks[layer].attn, "b_O", None)
        return cls(
            pattern,
            factor * torch.einsum("bkhd,hdm->bhkm", values, matrix.to(values.device)),
            seen.state(layer, "resid_pre").float(),
            0.0 if bias is None else factor * bias.detach().float().to(values.device),
        )

    def strengths(self) -> Float[Tensor, "batch head query key"]:
        """The length of what each head brings from each key, over that of what stood there.

        1 where it is as long, or longer.
        """
        lengths = self.pattern * self.brought.norm(dim=-1)[:, :, None]
        stood = self.before.norm(dim=-1)[:, None, :, None]
        return (lengths / stood.clamp(min=torch.finfo(lengths.dtype).tiny)).clamp(max=1)

    def added(self) -> Float[Tensor, "batch query d_model"]:
        """What attention adds."""
        return torch.einsum("bhqk,bhkm->bqm", self.pattern, self.brought) + self.bias

    def add_up(self, seen: Pass, layer: int) -> Bool[Tensor, ""]:
        """Whether these are the parts of the model's own states."""
        shows = seen.activation(f"blocks.{layer}.hook_attn_out").float()
        if not hook_semantics(seen.model).adds:  # it is behind the norm, and another state
            return torch.ones((), dtype=torch.bool, device=shows.device)
        gap, size = (shows - self.added()).norm(dim=-1), shows.norm(dim=-1)
        real = seen.is_real(gap.shape[1]).to(gap.device)
        # a state to which little is added is rounded like the others
        mean = (size * real).sum() / real.sum()
        rounding = tolerance(seen.activation(f"blocks.{layer}.hook_attn_out"))
        return ((gap <= rounding * (size + mean)) | ~real).all()

    def proximities(
        self, heads_apart: bool
    ) -> tuple[Float[Tensor, "batch part query key"], Float[Tensor, "batch query"]]:
        """Those of what every head (or all of them together) brings, and of what stood before."""
        whole = self.before + self.added()
        near = torch.stack(
            [
                _near(p, b, w, heads_apart)
                for p, b, w in zip(self.pattern, self.brought, whole, strict=True)
            ]
        )
        return near, _proximity(self.before, whole)

    def shares(
        self,
    ) -> tuple[Float[Tensor, "batch head query key"], Float[Tensor, "batch query"]]:
        """Importances of every head's keys, and of what stood there before; they sum to 1."""
        near, itself = self.proximities(heads_apart=True)
        total = near.sum(dim=(1, 3)) + itself
        scale = torch.where(total > 0, total, 1)
        return near / scale[:, None, :, None], torch.where(total > 0, itself / scale, 1)

    def importances(self, heads_apart: bool) -> Float[Tensor, "batch query key"]:
        """The edges: importances summed over heads, the residual's on the diagonal."""
        near, itself = self.proximities(heads_apart)
        edges = near.sum(dim=1)
        edges.diagonal(dim1=1, dim2=2).add_(itself)
        total = edges.sum(dim=-1, keepdim=True)
        alone = torch.eye(edges.shape[-1], device=edges.device).expand_as(edges)
        return torch.where(total > 0, edges / total.clamp(min=torch.finfo(edges.dtype).tiny), alone)


def _factor(seen: Pass, layer: int) -> float:
    """What the model adds, over what the heads bring."""
    added = Parts.of(seen, layer).added()
    if not hook_semantics(seen.model).adds:
        return 1.0
    shows = seen.activation(f"blocks.{layer}.hook_attn_out")
    real = seen.is_real(added.shape[1]).to(added.device)
    ours, theirs = added[real].double(), shows[real].double()
    factor = float((ours * theirs).sum() / ours.square().sum().clamp(min=1e-300))
    return 1.0 if abs(factor - 1) <= tolerance(shows) else factor


def _proximity(
    part: Float[Tensor, "*shape d"], whole: Float[Tensor, "*shape d"]
) -> Float[Tensor, "*shape"]:
    """By how much a part shortens the whole, in the L1 norm; 0 where it does not."""
    return (whole.abs().sum(dim=-1) - (part - whole).abs().sum(dim=-1)).clamp(min=0)


def _near(
    pattern: Float[Tensor, "head query key"],
    brought: Float[Tensor, "head key d_model"],
    whole: Float[Tensor, "query d_model"],
    heads_apart: bool,
) -> Float[Tensor, "part query key"]:
    """The proximities of what one sequence's keys bring, by head or with all heads together."""
    n_heads, n_query, n_key = pattern.shape
    found = []
    for queries in torch.arange(n_query).split(max(1, _ROOM // (n_key * whole.shape[-1]))):
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
