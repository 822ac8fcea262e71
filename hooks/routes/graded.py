"""Graded sets, by the best path from a token to a state; and powers of contributions, by all."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import NonNegative, check
from infoflow_lens.hooks.influence.base import tolerance
from infoflow_lens.hooks.interventions.heads import HeadLabels
from infoflow_lens.hooks.mechanisms.result import MechanismsResult
from infoflow_lens.hooks.model.call import without_user_hooks
from infoflow_lens.hooks.model.parts import Norm, NormNumbers
from infoflow_lens.hooks.model.points import cache_by_mode, layer_count
from infoflow_lens.hooks.passes.view import Needs, Pass
from infoflow_lens.hooks.routes.contributions import (
    ROOM,
    Edges,
    Parts,
    Places,
    RoutesProbe,
    RoutesResult,
    Scores,
    find_norm,
    gap_in,
    needs_of_parts,
    run_example,
    within_one,
)
from infoflow_lens.hooks.scores import StateScores
from infoflow_lens.hooks.states import summed
from infoflow_lens.theory.information_sets import GradedSets
from infoflow_lens.theory.propagation import BEST, Path, add_own, propagate_edges

Strength: TypeAlias = Literal["weight", "norm", "damage"]
ByHead: TypeAlias = tuple[tuple[NonNegative, ...], ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class GradedSetsResult(RoutesResult):
    """How strongly every state may hold every source: the strength of the best path to it.

    Attributes:
        scores: float [layer, batch, pos, source], from 0 to 1; the rest as in
            :class:`RoutesResult`.
    """

    def graded(self) -> GradedSets:
        """Return the same as graded sets, of all positions; 0 for one that was not asked for."""
        return GradedSets(self.full(), self.lengths, self.notes)


class GradedSetsProbe(RoutesProbe):
    """Scores [layer, batch, pos, source]: graded information sets.

    The information set of a state holds the tokens from which a path of attention edges leads to it
    (Yu, Jiang, Bao, Li 2026, Sec. 5.1), and in a deep model that is every token. Here each edge has
    a strength from 0 to 1, of several heads that of the strongest, and the residual connection 1.
    A token's score is the strength of its best path. It is not in the paper.

    The strengths of an edge from key j to query t:

    - "weight": the attention weight. Rows that sum to more than 1, as with ReLU attention, are
      divided by their sum.
    - "norm": the length of what the head brings from the key, the weight times the value times the
      output matrix (Kobayashi et al. 2020), over the length of what stood at t before, whose edge
      has 1; 1 where it is longer.
    - "damage": the weight times what the output loses without the head, over the largest such loss.
      A head that the output does not need moves nothing.

    Args:
        strength: of an edge.
        path: a path is as strong as the "product" of its edges, or as the "weakest" of them.
        damage: for "damage": the labels of heads (:func:`~infoflow_lens.hooks.label_heads`), or for
            every layer what the output loses without each head.
        positions: whose states; default all. Negative ones count from the end of each sequence.

    Raises:
        InfoFlowError: for unknown settings, a damage that is lacking, superfluous or of another
            number of heads, positions that no sequence has, or a model that does not show what it
            needs, saying what.
    """

    kind: ClassVar[type[StateScores]] = GradedSetsResult

    strength: Strength = "weight"
    path: Path = "product"
    _: KW_ONLY
    damage: HeadLabels | MechanismsResult | Sequence[Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given: Any = self.damage
        if (given is not None) != (self.strength == "damage"):
            raise InfoFlowError(
                f"strength is {self.strength!r} and damage is "
                f'{"None" if given is None else "given"}: expected damage for "damage" alone, '
                "such as damage=label_heads(model, texts)"
            )
        if isinstance(given, (HeadLabels, MechanismsResult)):
            given = given.lost()
        self.damage = None if given is None else check(given, ByHead, "damage")

    def needs(self, model: nn.Module) -> Needs:
        """Name patterns, and for norms what contributions need.

        Raises:
            InfoFlowError: if the model does not show them, or has other layers than the damage.
        """
        needs = super().needs(model)
        n_layers = layer_count(model)
        if self.damage is not None and len(self._damages()) != n_layers:
            raise InfoFlowError(
                f"damage is of {len(self._damages())} layers: expected {n_layers}, as many as the "
                "model has"
            )
        return needs | needs_of_parts(model) if self.strength == "norm" else needs

    def _damages(self) -> ByHead:
        return cast(ByHead, self.damage)

    def edges(self, seen: Pass, layer: int) -> Float[Tensor, "batch query key"]:
        """Return the strengths of the strongest heads."""
        if self.strength == "norm":
            parts = Parts.read(seen, layer)
            return parts.strengths().amax(dim=1).where(parts.add_up(seen, layer), torch.nan)
        pattern = within_one(seen.pattern(layer).float())
        if self.strength == "damage":
            lost = self._damages()[layer]
            if len(lost) != pattern.shape[1]:
                raise InfoFlowError(
                    f"damage of layer {layer} is of {len(lost)} heads: expected "
                    f"{pattern.shape[1]}, as many as the layer has"
                )
            most = max((one for heads in self._damages() for one in heads), default=0.0)
            # where no head is needed all strengths are 0
            share = torch.tensor(lost, device=pattern.device) / (most or 1.0)
            pattern = pattern * share[:, None, None]
        return pattern.amax(dim=1)

    def refusal(self, layer: int) -> str:
        """Say what is wrong with strengths that are negative or NaN."""
        if self.strength != "norm":
            return super().refusal(layer)
        return gap_in(layer)

    def follow(self, edges: Edges, place: Places) -> Scores:
        """Return the best path."""
        return propagate_edges(add_own(edges), BEST[self.path], queries=place)


Question = Literal["replacing a token", "small changes"]
Size = Literal["L1", "L2"]
PEAKED = 0.06  # of trained models more, of untrained ones less: `claim` below [measured]


class _Setting(NamedTuple):
    """How contributions are passed on.

    Attributes:
        p: the power.
        own: by what a state's own part is multiplied, once it has been raised.
    """

    p: float
    own: float


# chosen on validation texts of SmolLM2 and judged on held-out texts of five models [measured]
SETTINGS: dict[Question, _Setting] = {
    "replacing a token": _Setting(2.0, 1.0),
    "small changes": _Setting(1.1, 4.0),
}


@dataclass(frozen=True, eq=False, kw_only=True)
class PowerRolloutResult(RoutesResult):
    """The share of each state that comes from each source, if contributions are passed on so.

    Attributes:
        scores: float [layer, batch, pos, source], from 0 to 1; the rest as in
            :class:`RoutesResult`.
        peakedness: how far attention is from even, from 0, all visible keys alike, to 1, one key:
            the mean over heads and queries of 1 - entropy / log(number of visible keys).
    """

    peakedness: float

    @property
    def question(self) -> Question:
        """The question that the order of the scores answers."""
        return cast(Question, self.record.config["question"])

    @property
    def claim(self) -> bool:
        """Say whether the order of scores may be read as that of influence.

        It holds in trained models, and not in networks with random weights, whose attention is
        nearly even; see docs/results/real_models.
        """
        return self.peakedness >= PEAKED


class PowerRollout(RoutesProbe):
    """Scores [layer, batch, pos, source]: contributions to a power, over all paths.

    What query t takes from key j, all heads together and as the next norm reads it, has a size,

        s_tj = | g * (sum_h alpha^h_tj v^h_j W^h_O + [t = j] x_t) |,

    where g is the weight of the norm that reads the sum x_t + attention, which takes the mean off
    first if it does so, and whose scale is the same for all keys. Sizes to the power p, in rows
    that sum to 1, are edges, and a score is the sum over all paths of the products of edges: the
    share of a state that comes from a token if contributions are passed on in that power. At p = 1
    it is a rollout of contributions (Ferrando et al. 2022, with sizes in the place of proximities);
    as p grows, InfoFlow's sets of hard attention (Yu, Jiang, Bao, Li 2026). It takes no derivative.

    There are two questions with a setting each, and never one number:

    - "replacing a token": p = 2, as of contributions that add up as if at right angles.
    - "small changes": p = 1.1, and a state's own part counts four times.

    Both are of trained models. Attention that is nearly even, as in untrained ones, is noted, and
    then scores claim nothing (``result.claim``).

    Biases belong to no key. MLPs work position by position and only rescale rows, which drops out.
    Where no norm reads the sum, as in blocks whose MLP stands beside attention, it is the norm that
    reads what leaves the block; if there is none, g is 1. It needs what
    :class:`ContributionRoutes` needs.

    Args:
        question: "replacing a token" or "small changes".
        size: by the "L1" norm, of which the settings were chosen, or by "L2", from products of
            heads, which takes no memory for each pair and direction, and orders replaced tokens as
            well.
        positions: whose states; default all. Negative ones count from the end of each sequence, so
            (-1,) is the last token, or CLS.

    Raises:
        InfoFlowError: for unknown settings, positions that no sequence has, or a model that does
            not show what it needs, saying what.
    """

    kind: ClassVar[type[StateScores]] = PowerRolloutResult

    question: Question = "replacing a token"
    size: Size = "L1"

    peaks = summed()  # [2], the sum of peakedness over heads and queries, and their number

    def needs(self, model: nn.Module) -> Needs:
        """Name patterns, what :class:`ContributionRoutes` needs, and which keys are seen.

        Raises:
            InfoFlowError: if the model does not show them, or they do not add up.
        """
        find_readers(model)  # known, or refused, before the first pass
        return super().needs(model) | needs_of_parts(model) | Needs.of(model, scores=True)

    def edges(self, seen: Pass, layer: int) -> Float[Tensor, "batch query key"]:
        """Return the sizes of what is taken."""
        parts = Parts.read(seen, layer)
        path, reader = find_readers(seen.model)[layer], None
        if path is not None:
            with without_user_hooks(seen.model):  # a norm may have hook points
                reader = Norm(path, parts.before.shape[-1]).numbers(seen.model)
        return sizes(parts, reader, self.size).where(parts.add_up(seen, layer), torch.nan)

    def refusal(self, layer: int) -> str:
        """Say what is wrong with edges of parts that do not add up."""
        return gap_in(layer)

    def follow(self, edges: Edges, place: Places) -> Scores:
        """Return the sum over all paths of the products of powers."""
        p, own = SETTINGS[self.question]
        kept = edges.clone()
        # edges are raised to p below, which makes the factor of the own part `own`
        kept.diagonal(dim1=2, dim2=3).mul_(own ** (1 / p))
        return propagate_edges(kept, "power", p, queries=place)

    def update(self, seen: Pass) -> Mapping[str, Any]:
        """Return the scores of a pass, and how peaked its attention is."""
        found = [peakedness(seen, layer) for layer in range(seen.n_layers)]
        return {**super().update(seen), "peaks": torch.stack(found).sum(dim=0)}

    def notes(self) -> tuple[str, ...]:
        """Return what a reader of the result must know."""
        notes = super().notes()
        if self.peaks is None or self._peakedness() >= PEAKED:
            return notes
        return (
            *notes,
            f"attention is nearly even (peakedness {self._peakedness():.2f}, below {PEAKED}), as "
            "in untrained networks, where contributions to a power do not order tokens by "
            "influence",
        )

    def _peakedness(self) -> float:
        total, count = self.peaks.tolist()
        return total / count if count else 0.0

    def more_fields(self) -> Mapping[str, Any]:
        """Return how peaked attention is."""
        return {"peakedness": self._peakedness()}


def sizes(parts: Parts, reader: NormNumbers | None, size: Size) -> Float[Tensor, "batch query key"]:
    """Return the size of what each query takes from each key, heads together, its own state on top.

    Args:
        parts: of a layer's sums.
        reader: the norm that reads them; None for the sums as they are.
        size: the norm by which it is measured.
    """
    brought, own = parts.brought, parts.before
    if reader is not None:
        weight = reader.weight.detach().float().to(own.device)
        if reader.centers:
            brought = brought - brought.mean(dim=-1, keepdim=True)
            own = own - own.mean(dim=-1, keepdim=True)
        brought, own = brought * weight, own * weight
    measure = _measure_l1 if size == "L1" else _measure_products
    rows = [measure(p, b, o) for p, b, o in zip(parts.pattern, brought, own, strict=True)]
    return torch.stack(rows)


def _measure_l1(
    pattern: Float[Tensor, "head query key"],
    brought: Float[Tensor, "head key d_model"],
    own: Float[Tensor, "query d_model"],
) -> Float[Tensor, "query key"]:
    """Return L1 norms of one sequence, a few queries at a time."""
    n_query, n_key = pattern.shape[1:]
    by_key = brought.transpose(0, 1)
    rows = []
    for queries in torch.arange(n_query, device=own.device).split(
        max(1, ROOM // (n_key * own.shape[-1]))
    ):
        taken = torch.bmm(pattern[:, queries].permute(2, 1, 0), by_key)  # [key, query, d_model]
        # what stood at the query is on the diagonal; CLS may be no key, and has none there
        here = queries[queries < n_key]
        taken[here, here - queries[0]] += own[here]
        rows.append(taken.abs().sum(dim=-1).T)
    return torch.cat(rows)


def _measure_products(
    pattern: Float[Tensor, "head query key"],
    brought: Float[Tensor, "head key d_model"],
    own: Float[Tensor, "query d_model"],
) -> Float[Tensor, "query key"]:
    """Return L2 norms of one sequence, from the products of what the heads bring from a key."""
    products = torch.einsum("hkd,gkd->khg", brought, brought)
    weights = pattern.permute(2, 1, 0)  # [key, query, head]
    # |sum_h w_h b_h|^2 = sum_hg w_h w_g (b_h . b_g), without a vector for each pair of tokens
    found = ((weights @ products) * weights).sum(dim=-1).clamp(min=0).sqrt().T
    here = torch.arange(min(found.shape), device=own.device)
    # on the diagonal the state's own part is in the sum, which the products do not have
    itself = torch.einsum("hk,hkd->kd", pattern[:, here, here], brought[:, here]) + own[here]
    return found.diagonal_scatter(itself.norm(dim=-1)) if len(here) else found


def peakedness(seen: Pass, layer: int) -> Float[Tensor, "2"]:
    """Return the sum of 1 - entropy / log(visible keys) over heads and queries, and their number.

    Queries that see one key have no choice and are left out, and so are those that look nowhere.
    """
    pattern = seen.pattern(layer).double()
    total = pattern.sum(dim=-1, keepdim=True)
    shares = pattern / total.clamp(min=torch.finfo(pattern.dtype).tiny)
    entropy = -(shares * shares.clamp(min=torch.finfo(pattern.dtype).tiny).log()).sum(dim=-1)
    visible = seen.visible(layer).to(pattern.device)
    n_keys = visible.sum(dim=-1)[:, None].double()
    counted = (n_keys > 1) & (total[..., 0] > 0)
    found = torch.where(counted, 1 - entropy / n_keys.clamp(min=2).log(), 0)
    return torch.stack([found.sum(), counted.sum().double()]).cpu()


@cache_by_mode
def find_readers(model: nn.Module) -> tuple[str | None, ...]:
    """Find the paths of the norms that read the sums of the layers, by running the model.

    Of blocks whose sums no norm reads, those of the norms that read what leaves them; None where
    there is none.

    Raises:
        InfoFlowError: if the states of the model cannot be decomposed, saying why.
    """
    behind = [f"blocks.{layer}.hook_resid_post" for layer in range(layer_count(model))]
    seen, reads = run_example(model, [*needs_of_parts(model).points, *behind])
    found = []
    for layer in range(layer_count(model)):
        parts = Parts.read(seen, layer)
        bar = 10 * tolerance(seen.activation(f"blocks.{layer}.hook_attn_out"))
        states = [parts.before + parts.total()]
        if not seen.lacks(behind[layer : layer + 1]):
            states.append(seen.activation(behind[layer]).float())
        paths = (find_norm(model, state, reads, bar) for state in states)
        found.append(next(filter(None, paths), None))
    return tuple(found)
