"""Scores of sources beside information sets: both compared with influence, at equal set sizes."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from annotated_types import Interval, MinLen
from jaxtyping import Bool, Float, Int
from torch import Tensor

from infoflow_lens.agreement import (
    Predicted,
    States,
    auroc,
    check_kind,
    check_norms,
    influence_inside,
    measure_in_parts,
    select_layers,
    sets_of,
)
from infoflow_lens.foundation.display import count, panel, plain_label
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.lazy import mpl, pd
from infoflow_lens.foundation.saving import Savable
from infoflow_lens.foundation.settings import BothEnds, Distinct, Index, checked
from infoflow_lens.hooks.scores import StateScores, spearman
from infoflow_lens.theory.information_sets import GradedSets, InformationSets

__all__ = ["RankingAgreement", "compare_rankings"]


SET_METRICS = (
    "auroc",
    "average_precision",
    "precision",
    "precision_at_size",
    "influence_inside",
    "share_inside",
)
WHOLE_METRICS = ("auroc_measured", "spearman")
METRICS = (*SET_METRICS, *WHOLE_METRICS)
CONTROLS = ("random", "recency", "measured")
Starts = Annotated[tuple[Index, ...], MinLen(1), Distinct()]  # of ranges of positions
Confidence = Annotated[float, Interval(gt=0, lt=1)]


@dataclass(frozen=True, eq=False)
class RankingAgreement(Savable):
    """How well sets and scores tell which sources a state depends on, state by state.

    Each set fixes a size at each state, and every score is cut there: its set are its sources of
    the largest scores, as many as the set has. So a size and a method have numbers together; see
    :func:`compare_rankings`.

    Attributes:
        sets: the names of the sets, which give the sizes.
        scores: the names of the scores.
        n_candidates: float [layer, batch, pos], the sources among which each state chooses; NaN
            for states that are not there or were not measured.
        sizes: for each set float [layer, batch, pos], how many of them it holds; NaN as above.
            States whose set holds none or all take no part in metrics at its size, since all
            methods are the same there.
        values: by (set that gives the size, method), then by metric, float [layer, batch, pos];
            NaN for states that take no part. Metrics of whole rankings need no set, and are given
            wherever two candidates or more are there.
        numbers: the number of each layer in the model; empty for all from 0 on.
    """

    sets: tuple[str, ...]
    scores: tuple[str, ...]
    n_candidates: Float[Tensor, "layer batch pos"]
    sizes: Mapping[str, Float[Tensor, "layer batch pos"]]
    values: Mapping[tuple[str, str], Mapping[str, Float[Tensor, "layer batch pos"]]]
    numbers: tuple[int, ...] = ()

    def kind(self, method: str) -> str:
        """ "set", "score" or "control"."""
        if method in self.sets:
            return "set"
        return "score" if method in self.scores else "control"

    @checked
    def to_frame(self, starts: Starts = (0,), *, confidence: Confidence = 0.95) -> "pd.DataFrame":
        """Return one row for each size, layer, range of positions and method.

        ``n_states`` take part; at ``n_empty`` others the set that gives the size is empty, at
        ``n_whole`` it holds every candidate; ``n_ranked`` have metrics of whole rankings
        (``spearman``, ``auroc_measured``), which need no set. ``mean_size`` and
        ``mean_candidates`` are of states that take part.

        Means are over the states of a sequence, then over sequences; ``_low`` and ``_high`` are
        Student's t interval over sequences, NaN for a single one.

        Args:
            starts: where ranges of positions begin; each ends where the next begins.
            confidence: of the intervals.

        Raises:
            InfoFlowError: for starts that do not rise from 0 on, or a confidence outside (0, 1).
        """
        return self._frame(starts, confidence, ahead=False)

    @checked
    def ahead(self, starts: Starts = (0,), *, confidence: Confidence = 0.95) -> "pd.DataFrame":
        """Return by how much a set is ahead of each score at its own sizes, in the same sequences.

        The rows are those of :meth:`to_frame` without the sets; each metric is the set's minus the
        method's, so below 0 the set loses.

        Args:
            starts, confidence: as for :meth:`to_frame`.

        Raises:
            InfoFlowError: as :meth:`to_frame`.
        """
        return self._frame(starts, confidence, ahead=True)

    def _frame(self, starts: Starts, confidence: Confidence, ahead: bool) -> "pd.DataFrame":
        n_layers, _, n_pos = self.n_candidates.shape
        rows: list[dict[str, Any]] = []
        numbers, ranges = self.numbers or range(n_layers), [*_ranges(starts, n_pos)]
        for (size, method), metrics in self.values.items():
            # a set is not ahead of itself
            if ahead and method == size:
                continue
            own = self.values[size, size]
            found = {name: own[name] - v if ahead else v for name, v in metrics.items()}
            # metrics of all layers at once: a row has many, and there are many rows
            every = torch.stack([*found.values()])
            intervals = [_interval(every[..., slice(*place)], confidence) for place in ranges]
            names = [name + end for name in found for end in ("", "_low", "_high")]
            for layer in range(n_layers):
                for (first, end), interval in zip(ranges, intervals, strict=True):
                    part = (layer, slice(None), slice(first, end))
                    sizes, candidates = self.sizes[size][part], self.n_candidates[part]
                    # states whose set is empty or everything rank nothing
                    there = candidates > 0
                    takes_part = there & (sizes > 0) & (sizes < candidates)
                    of_states = torch.stack([sizes, candidates]).where(takes_part, math.nan)
                    mean_size, mean_candidates = _average(of_states).nanmean(dim=1).tolist()
                    rows.append(
                        {
                            "size_of": size,
                            "method": method,
                            "kind": self.kind(method),
                            "layer": numbers[layer],
                            "positions": f"{first}-{end - 1}",
                            "n_sequences": int(takes_part.any(dim=1).sum()),
                            "n_states": int(takes_part.sum()),
                            "n_empty": int((there & (sizes == 0)).sum()),
                            "n_whole": int((there & (sizes == candidates)).sum()),
                            "n_ranked": int(found["spearman"][part].isfinite().sum()),
                            "mean_size": mean_size,
                            "mean_candidates": mean_candidates,
                        }
                        | dict(zip(names, interval[:, layer].flatten().tolist(), strict=True))
                    )
        return pd.DataFrame(rows)

    def plot(self, size_of: str | None = None, metric: str = "auroc") -> "mpl.Figure":
        """Return a metric of every method by layer, with intervals, at the sizes of one set.

        Args:
            size_of: the set; default, the first.
            metric: of METRICS.

        Raises:
            InfoFlowError: for an unknown set or metric.
        """
        chosen = self.sets[0] if size_of is None else size_of
        if chosen not in self.sets or metric not in METRICS:
            raise InfoFlowError(
                f"size_of is {chosen!r} and metric {metric!r}: expected one of "
                f"{', '.join(self.sets)} and one of {', '.join(METRICS)}"
            )
        frame = self.to_frame()
        frame = frame[frame["size_of"] == chosen]
        layers = frame["layer"].unique()
        figure = mpl.Figure(figsize=(2 + 2.5 * len(layers), 3.5), layout="constrained")
        figure.suptitle(f"What states depend on, at the sizes of {plain_label(chosen)}")
        grid = figure.subplots(1, len(layers), sharey=True, squeeze=False)[0]
        for axes, layer in zip(grid, layers, strict=True):
            for kind, rows in frame[frame["layer"] == layer].groupby("kind", sort=False):
                value, low, high = rows[[metric, f"{metric}_low", f"{metric}_high"]].to_numpy().T
                error = np.stack([value - low, high - value])
                methods = [*map(plain_label, rows["method"])]
                axes.errorbar(value, methods, xerr=error, fmt="o", label=plain_label(kind))
            axes.set(xlabel=metric, title=f"layer {layer}")
        grid[-1].legend()
        return figure

    def __repr__(self) -> str:
        n_layers, n_batch, n_pos = self.n_candidates.shape
        states = (
            f"{count(n_layers, 'layer')}, {count(n_batch, 'sequence')} of up to {n_pos} positions"
        )
        line = f"sets {', '.join(self.sets)}; scores {', '.join(self.scores)}; {states}"
        return f"RankingAgreement({line[:400]})"

    def _repr_html_(self) -> str:
        last = max(self.numbers or range(len(self.n_candidates)))
        columns = ["size_of", "method", "n_states", "mean_size", *METRICS]
        frame = self.to_frame()
        return panel(
            "RankingAgreement",
            {"layer": last},
            head=frame.loc[frame["layer"] == last, columns],
            more="more: .to_frame(), .ahead(), .plot()",
        )


def _ranges(starts: tuple[int, ...], n_pos: int) -> Iterator[tuple[int, int]]:
    if tuple(sorted(starts)) != starts or starts[-1] >= n_pos:
        raise InfoFlowError(
            f"starts are {starts}: expected rising positions from 0 to {n_pos - 1}, where ranges "
            "of positions begin"
        )
    yield from zip(starts, [*starts[1:], n_pos], strict=True)


def _average(values: Float[Tensor, "*rows batch pos"]) -> Float[Tensor, "*rows batch"]:
    """Average over the states of each sequence; NaN is left out."""
    return values.double().nanmean(dim=-1)


def _interval(
    values: Float[Tensor, "*rows batch pos"], confidence: float
) -> Float[Tensor, "*rows 3"]:
    """Return the mean over sequences of their means over states, and Student's t interval."""
    from scipy.special import stdtrit

    by_sequence = _average(values)
    n = by_sequence.isfinite().sum(dim=-1).double()
    mean = by_sequence.nanmean(dim=-1)
    # a single sequence has no spread: 0 over 0
    squares = (by_sequence - mean[..., None]).square().nansum(dim=-1)
    deviation = (squares / (n - 1)).sqrt()
    quantile = torch.as_tensor(stdtrit((n - 1).numpy(), (1 + confidence) / 2))
    half = quantile * deviation / n.sqrt()
    return torch.stack([mean, mean - half, mean + half], dim=-1)


def compare_rankings(
    sets: Mapping[str, Predicted],
    scores: Mapping[str, StateScores | GradedSets | Float[Tensor, "layer batch pos source"]],
    measured: StateScores | InformationSets | Float[Tensor, "layer batch pos source"],
    *,
    threshold: float = 0.1,
    lengths: Int[Tensor, " batch"] | None = None,
    with_self: bool = False,
    without: BothEnds = (),
) -> RankingAgreement:
    """Compare predicted sets, and scores cut at their sizes, with measured influence.

    For each state and each of the sets S, a score's set are the |S| candidates that it ranks
    highest, where S is counted among the candidates. Candidates are, as in :func:`compare`, the
    sources that can reach the position: with influence, in a set, or with a score above 0 in any
    sequence and layer; without the position itself, which the residual stream holds in any case.
    Where equal scores stand at the cut, each of them is in the set with the same probability, and
    every number is the expectation over which are taken, computed exactly. So a score that is the
    same for all sources is a random order, without noise.

    Metrics, for every state:

    - ``auroc``, ``average_precision``, ``precision``, ``influence_inside``: as in
      :class:`SetAgreement`, of the set; the first two rank the candidates by influence.
    - ``share_inside``: share of the influence itself inside the set, as in :class:`Explained`.
    - ``precision_at_size``: share of the set among the |S| candidates of most influence.
    - ``auroc_measured``: probability that a measured source has a higher score than one that is
      not (ties count half), for the whole ranking; a set has two scores, 1 and 0. The size matters
      to sets alone.
    - ``spearman``: rank correlation of the whole ranking with influence, ties by their mean rank;
      0 where all are equal.

    Beside the scores stand three controls: "random", "recency" (the nearest sources, by distance,
    from the end of the sequence for CLS), and "measured", the influence itself, which is the most
    that can be had.

    Args:
        sets: predicted sets by name, or what :func:`compare` takes in their place.
        scores: by name, such as results of :class:`AttentionRollout`, or graded sets; at least 0.
        measured: influence, as of :class:`JacobianInfluence`; or measured sets, which count as 0
            and 1. Only states that it and all scores
            hold take part.
        threshold: a source is measured if its influence is at least this share of the largest on
            that state, over all sources, its own position included.
        lengths: the tokens of each sequence, where they differ and `measured` is a tensor.
        with_self: whether each position is a candidate of itself.
        without: positions that are no candidates, such as (0,) for a token that attention rests on,
            or (-1,) for the last of each sequence: not in sets, scores, influence, or chance.

    Raises:
        InfoFlowError: for no sets, two methods of one name, shapes that differ, scores that are
            negative or not finite, or a threshold that is not in (0, 1].
    """
    for what, given in (("sets", sets), ("scores", scores)):
        if not isinstance(given, Mapping):
            raise InfoFlowError(
                f"{what} is a {type(given).__name__}: expected a mapping from names, as in "
                f"{{'mine': {what}}}"
            )
    names = [*sets, *scores, *CONTROLS]
    if not sets or len(set(names)) < len(names):
        raise InfoFlowError(
            f"sets are {', '.join(sets) or 'none'}, scores {', '.join(scores) or 'none'}: expected "
            f"at least one set, and names of their own, other than {', '.join(CONTROLS)}"
        )
    check_kind(measured, StateScores)
    ranked: dict[str, Tensor] = {}
    held = []
    for name, score in scores.items():
        ranked[name], has_scores = _full(score, repr(name), measured)
        held += [has_scores]
        check_norms(ranked[name], f"scores of {name!r} are")
    chosen_sets = {name: sets_of(given, measured) for name, given in sets.items()}
    pair = States(
        measured, {f"sets {name!r}": one for name, one in chosen_sets.items()}, threshold, lengths,
        without, {f"scores {name!r}": one for name, one in ranked.items()},
    )  # fmt: skip
    influence, candidate = pair.influence, pair.candidates(with_self)
    n_pos, n_source = influence.shape[2:]
    # influence and scores may be of some positions: those of all count
    exists = pair.exists & pair.asked
    for has_scores in held:
        exists = exists & has_scores
    # controls: by chance, by nearness (CLS stands behind the last), and the best that is possible
    distance = torch.arange(n_pos)[:, None] - torch.arange(n_source)
    everything = {
        **ranked,
        "random": torch.zeros_like(influence),
        "recency": -distance.abs().to(influence).expand_as(influence),
        "measured": influence,
    }
    above = pair.measured
    states = _States(influence.double(), above, candidate.expand_as(above), exists)
    n_candidates = states.count(states.candidate)
    can_rank = exists & (candidate.sum(dim=-1) > 1) & ((influence > 0) & candidate).any(dim=-1)

    def rank(score: Tensor) -> dict[str, Tensor]:
        return states.measure(_rank, WHOLE_METRICS, can_rank, score)

    # ranks of whole scores do not depend on a set's size
    whole = {name: rank(score) for name, score in everything.items()}
    values: dict[tuple[str, str], dict[str, Tensor]] = {}
    sizes = {}
    for size_of, predicted in chosen_sets.items():
        size = sizes[size_of] = states.count(predicted.members)
        # of a set that holds no candidate, or all, nothing can be said
        chosen = ((size > 0) & (size < n_candidates)).to(influence.device)
        size = size.to(influence.device)[chosen]
        own = predicted.members.float()
        for method, score in {size_of: own, **everything}.items():
            at_size = states.measure(_cut, SET_METRICS, chosen, score, size)
            values[size_of, method] = at_size | (whole[method] if method in whole else rank(own))
    return RankingAgreement(
        sets=tuple(sets),
        scores=tuple(scores),
        n_candidates=n_candidates,
        sizes=sizes,
        values=values,
        numbers=getattr(measured, "layers", ()),
    )


def _full(values: Any, name: str, measured: Any) -> tuple[Tensor, Tensor]:
    """Return scores or sets of all positions, and which states have some.

    Args:
        values: scores or sets.
        name: what errors call them.
        measured: a result in whose layers, and in whose order of them, scores are given back.

    Raises:
        InfoFlowError: for what has no value for every state and source, or none of a layer,
            and for other sequences.
    """
    own, known = (getattr(each, "lengths", None) for each in (values, measured))
    if own is not None and known is not None and own.tolist() != known.tolist():
        raise InfoFlowError(
            f"{name} has sequences of lengths {own.tolist()}, those that were measured "
            f"{known.tolist()}: expected the same; probe the same inputs"
        )
    if isinstance(values, StateScores):
        wanted = getattr(measured, "layers", values.layers)
        if not set(wanted) <= set(values.layers):
            raise InfoFlowError(
                f"{name} has scores of layers {values.layers}, and layers {tuple(wanted)} were "
                "measured: expected scores of these; probe the same layers"
            )
        return values.full()[[values.layers.index(layer) for layer in wanted]], values.has_scores
    if isinstance(values, InformationSets):
        values = select_layers(values, measured).members.float()
    elif isinstance(values, GradedSets):
        values = select_layers(values, measured).strengths
    if not isinstance(values, Tensor) or values.ndim != 4:
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise InfoFlowError(
            f"{name} is {shape}: expected what a probe of scores or influence gives, or a tensor "
            "[layer, batch, pos, source]"
        )
    return values, torch.ones(values.shape[1:3], dtype=torch.bool, device=values.device)


class _Cut(NamedTuple):
    """The sources of the largest scores; at the cut, equal ones by the same probability.

    Attributes:
        member: float [state, source], the probability to be in the set.
        tied: bool [state, source], those that share what is left.
        left, among: [state], how many places are left for how many.
    """

    member: Float[Tensor, "state source"]
    tied: Bool[Tensor, "state source"]
    left: Float[Tensor, " state"]
    among: Float[Tensor, " state"]

    @classmethod
    def choose(
        cls,
        scores: Float[Tensor, "state source"],
        candidate: Bool[Tensor, "state source"],
        size: Float[Tensor, " state"],
    ) -> "_Cut":
        """Choose the `size` candidates of the largest scores."""
        ranked = scores.double().masked_fill(~candidate, -torch.inf)
        # the score of the last source that a set of this size still takes
        last = ranked.sort(dim=1, descending=True).values.gather(1, size.long()[:, None] - 1)
        sure, tied = ranked > last, (ranked == last) & candidate
        # equal scores at the cut share the places that are left
        left, among = size - sure.sum(dim=1), tied.sum(dim=1).double()
        return cls(sure + tied * (left / among)[:, None], tied, left, among)

    def both(self) -> Float[Tensor, "state source source"]:
        """Return the probability that two sources are in the set together."""
        # [state, source, source]: exact unless both are tied, as one of the two is certain then
        pairs = self.member[:, :, None] * self.member[:, None]
        # two of the tied ones, drawn without replacement
        alike = self.left * (self.left - 1) / (self.among * (self.among - 1)).clamp(min=1)
        tied = self.tied[:, :, None] & self.tied[:, None]
        pairs = torch.where(tied, alike[:, None, None], pairs)
        # a source is in the set with itself as often as it is in the set
        return pairs.diagonal_scatter(self.member, dim1=1, dim2=2)


@dataclass(frozen=True)
class _States:
    """Influence on states, of which some exist, with the sources that are above the threshold."""

    influence: Float[Tensor, "layer batch pos source"]
    above: Bool[Tensor, "layer batch pos source"]
    candidate: Bool[Tensor, "layer batch pos source"]
    exists: Bool[Tensor, "batch pos"]

    def count(
        self, members: Bool[Tensor, "layer batch pos source"]
    ) -> Float[Tensor, "layer batch pos"]:
        """Count the candidates in a set; NaN for states that are not measured."""
        counts = (members & self.candidate).sum(dim=-1).double()
        return counts.masked_fill(~self.exists, math.nan).cpu()

    def measure(
        self,
        function: Callable[..., Float[Tensor, "state metric"]],
        metrics: Sequence[str],
        chosen: Bool[Tensor, "layer batch pos"],
        scores: Float[Tensor, "layer batch pos source"],
        *more: Float[Tensor, " state"],
    ) -> dict[str, Float[Tensor, "layer batch pos"]]:
        """Compute metrics of the chosen states, NaN elsewhere."""
        rows = self.influence, self.above, self.candidate, scores
        found = measure_in_parts(function, *(each[chosen] for each in rows), *more)
        full = torch.full((len(metrics), *chosen.shape), math.nan, dtype=torch.float64)
        full[:, chosen.cpu()] = found.double().T.cpu()
        return dict(zip(metrics, full, strict=True))


def _rank(
    influence: Tensor, above: Tensor, candidate: Tensor, scores: Tensor
) -> Float[Tensor, "state metric"]:
    """Compute the metrics of whole rankings."""
    ranks = spearman(scores.double(), influence, candidate)
    return torch.stack([auroc(scores, above, candidate), ranks], dim=1)


def _cut(
    influence: Float[Tensor, "state source"],
    above: Bool[Tensor, "state source"],
    candidate: Bool[Tensor, "state source"],
    scores: Float[Tensor, "state source"],
    size: Float[Tensor, " state"],
) -> Float[Tensor, "state metric"]:
    """Compute the metrics of scores at a size, in expectation over the order of equal ones."""
    cut = _Cut.choose(scores, candidate, size)
    both = cut.both() * (candidate[:, :, None] & candidate[:, None])
    more = influence[:, :, None] - influence[:, None]  # of the first over the second
    # the probability that the first is in the set and the second is not
    inside_only = (cut.member[:, :, None] - both) * candidate[:, None]
    wins = (more > 0).double() + 0.5 * (more == 0)
    n_out = candidate.sum(dim=1) - size
    at_least = more <= 0  # the second has at least the influence of the first
    n_above = (at_least & candidate[:, None]).sum(dim=2)
    # for each source of the set, what share of those with at least its influence is in it, too
    found = (both * at_least).sum(dim=2) / n_above.clamp(min=1)
    top = _Cut.choose(influence, candidate, size)
    metrics = {
        "auroc": (inside_only * wins).sum(dim=(1, 2)) / (size * n_out),
        "average_precision": found.sum(dim=1) / size,
        "precision": (cut.member * above).sum(dim=1) / size,
        "precision_at_size": (cut.member * top.member).sum(dim=1) / size,
        "influence_inside": influence_inside(influence, cut.member, candidate),
        "share_inside": influence_inside(influence, cut.member, candidate, squared=False),
    }
    return torch.stack([metrics[name] for name in SET_METRICS], dim=1)
