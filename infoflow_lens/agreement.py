"""Predicted against measured information sets, state by state, for the same inputs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias, TypeVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from infoflow_lens.foundation.display import panel
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.lazy import pd
from infoflow_lens.foundation.saving import Savable
from infoflow_lens.foundation.settings import BothEnds
from infoflow_lens.hooks.influence.base import InfluenceResult, influence_sets
from infoflow_lens.hooks.passes.ranking import mark_sources
from infoflow_lens.hooks.positions import PositionsResult, ShardedPositions
from infoflow_lens.hooks.scores import StateScores
from infoflow_lens.theory.information_sets import (
    GradedSets,
    InformationSets,
    MovesKeys,
    check_lengths,
    propagate,
)

__all__ = [
    "Agreement",
    "CoverageCurve",
    "Explained",
    "SetAgreement",
    "compare",
    "compare_by_position",
    "coverage_curve",
    "explained",
]

Predicted: TypeAlias = InformationSets | Bool[Tensor, "layer batch pos source"] | MovesKeys
Measured: TypeAlias = Float[Tensor, "layer batch pos source"] | InfluenceResult
_ROOM = 2**20  # numbers in a table of pairs
SetsT = TypeVar("SetsT", InformationSets, GradedSets)


@dataclass(frozen=True)
class SetAgreement(Savable):
    """How well predicted sets match measured ones, averaged over states.

    A state is one (sequence, position) of a layer; its candidates are the input positions that
    can reach it: those that are predicted or have influence there for any sequence and layer (in a
    causal model, the past). Each metric is the mean over the states where it is defined, and NaN
    where it is for none.

    Attributes:
        n_states: the number of states.
        auroc: probability that a predicted source has more influence than another one (ties count
            half); needs both kinds. Free of thresholds.
        average_precision: mean precision over the predicted sources, ranked by influence. Free of
            thresholds.
        precision: share of the predicted set that is measured.
        recall: share of the measured set that is predicted.
        jaccard: size of the intersection over size of the union; 1 for two empty sets.
        exact_match: share of states whose two sets are equal.
        influence_inside: share of the squared influence that lies inside the predicted set, over
            all states; :func:`explained` counts influence, beside chance.
        predicted_size: mean size of the predicted set.
        measured_size: mean size of the measured set.
    """

    n_states: int
    auroc: float
    average_precision: float
    precision: float
    recall: float
    jaccard: float
    exact_match: float
    influence_inside: float
    predicted_size: float
    measured_size: float


@dataclass(frozen=True)
class Agreement(Savable):
    """Agreement layer by layer, of the tokens and of the read-out position.

    Attributes:
        threshold: a source is measured if its influence is at least this share of the largest on
            that state.
        layers: for every layer, over token positions and without each position itself, which the
            residual stream holds in any case.
        layers_with_self: the same with each position itself.
        cls: the last position of the last layer. Where it is itself a source (no CLS), it is
            left out as in `layers`.
        coverage: mean share of the target's active index set inside the predicted set of that
            position; None if no active index set was given.
        numbers: the number of each of these layers in the model; empty for all from 0 on.
    """

    threshold: float
    layers: tuple[SetAgreement, ...]
    layers_with_self: tuple[SetAgreement, ...]
    cls: SetAgreement
    coverage: float | None = None
    numbers: tuple[int, ...] = ()

    def to_frame(self) -> "pd.DataFrame":
        """Return a row for each layer with and without self, and one for the read-out position."""
        rows: list[Mapping[str, Any]] = []
        numbers = self.numbers or range(len(self.layers))
        for kind, with_self, layers in (
            ("tokens", False, self.layers),
            ("tokens", True, self.layers_with_self),
        ):
            for layer, values in zip(numbers, layers, strict=True):
                rows.append(
                    {"layer": layer, "states": kind, "with_self": with_self, **asdict(values)}
                )
        rows.append(
            {"layer": max(numbers), "states": "cls", "with_self": False, **asdict(self.cls)}
        )
        return pd.DataFrame(rows)

    def __repr__(self) -> str:
        shares = ", ".join(f"{layer.influence_inside:.3f}" for layer in self.layers[:12])
        return (
            f"Agreement({len(self.layers)} layers, squared influence inside: {shares}, read-out "
            f"{self.cls.influence_inside:.3f})"
        )

    def _repr_html_(self) -> str:
        return panel("Agreement", {"threshold": self.threshold}, head=self.to_frame())


@dataclass(frozen=True)
class Explained(Savable):
    """How much of the influence on states of a layer lies inside their predicted sets.

    This is the one number that tables, curves, pictures and sentences show. A state whose set is
    empty or holds every candidate, and one that no candidate has influence on, proves nothing: it
    is counted and left out of the means.

    Attributes:
        layer: of the states.
        place: their positions, in words, such as "last position" or "positions 3-7".
        n_sequences: the sequences that they are of.
        with_self: whether each position itself is a candidate; the residual stream holds it in
            any case.
        squared: whether the squares of influence are counted, in the place of influence, which is
            what pictures shade.
        n_states: how many were measured.
        no_other: of these, how many have no candidate, or no influence from one.
        empty: how many have an empty predicted set.
        everything: how many have a set that holds every candidate.
        inside: the mean share of influence inside the set over the rest; NaN where none is left.
        chance: what a random set of the same size would hold on average.
        auroc: over the rest.
        size, others: the mean size of the set, and of the candidates, over all.
    """

    layer: int
    place: str
    n_sequences: int
    with_self: bool
    squared: bool
    n_states: int
    no_other: int
    empty: int
    everything: int
    inside: float
    chance: float
    auroc: float
    size: float
    others: float

    @property
    def states(self) -> str:
        """Position and layer, in words."""
        return f"{self.place}, layer {self.layer}"

    @property
    def n_informative(self) -> int:
        """States of which the prediction could be wrong."""
        return self.n_states - self.no_other - self.empty - self.everything

    def reason(self) -> str:
        """Say why nothing can be said; empty if something can."""
        if self.n_informative:
            return ""
        if not self.n_states:
            return "not measured"
        counts = {
            "no other tokens": self.no_other,
            "empty set": self.empty,
            "set holds everything": self.everything,
        }
        found = {words: n for words, n in counts.items() if n}
        if len(found) == 1:
            return next(iter(found))
        return ", ".join(f"{words} ({n})" for words, n in found.items())

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as JSON-compatible values."""
        return {**asdict(self), "n_informative": self.n_informative, "reason": self.reason()}

    def __str__(self) -> str:
        """Say it in a sentence without a full stop."""
        if self.reason():
            return f"{self.states}: the predicted sets say nothing of influence ({self.reason()})"
        return f"{self.states}: {self.describe()}"

    def describe(self, whose: str = "") -> str:
        """Say how much lies inside, beside chance, of states of which something can be said.

        Args:
            whose: the states, in words such as " on position 3", where the sentence names them.
        """
        what = "squared influence" if self.squared else "influence"
        tokens = "tokens" if self.with_self else "other tokens"
        inside = (
            f"{self.inside:.0%} of the {what} of {tokens}{whose} lies inside the predicted sets"
        )
        sizes = f"hold {self.size:.3g} of {self.others:.3g} {tokens}"
        chance = f"would hold {self.chance:.0%}"
        if self.n_informative == self.n_states:
            return f"{inside}, which {sizes}; random sets of that size {chance}"
        # sizes are of all states, and would contradict shares of some
        return (
            f"{inside} of the {self.n_informative} of {self.n_states} states where these could be "
            f"wrong; random sets of their sizes {chance}, and all sets {sizes} on average"
        )


def auroc(
    scores: Float[Tensor, "state source"],
    positive: Bool[Tensor, "state source"],
    candidate: Bool[Tensor, "state source"],
) -> Float[Tensor, " state"]:
    """Compute the area under each row's ROC curve over its candidates; NaN without both classes.

    The Mann-Whitney statistic with ties counted half, as scikit-learn's ``roc_auc_score``.
    """

    def measure(scores: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        pairs = positive.unsqueeze(2) & negative.unsqueeze(1)
        wins = (scores.unsqueeze(2) > scores.unsqueeze(1)).double()
        wins += 0.5 * (scores.unsqueeze(2) == scores.unsqueeze(1))
        return (wins * pairs).sum((1, 2)) / pairs.sum((1, 2))

    return measure_in_parts(measure, scores, positive & candidate, candidate & ~positive)


def average_precision(
    scores: Float[Tensor, "state source"],
    positive: Bool[Tensor, "state source"],
    candidate: Bool[Tensor, "state source"],
) -> Float[Tensor, " state"]:
    """Average precision of each row over its candidates; NaN without positives.

    Sources of equal score enter together, as in scikit-learn's ``average_precision_score``.
    """

    def measure(scores: Tensor, positive: Tensor, candidate: Tensor) -> Tensor:
        at_least = scores.unsqueeze(1) >= scores.unsqueeze(2)  # [state, threshold, source]
        found = (at_least & positive.unsqueeze(1)).sum(2).double()
        n_above = (at_least & candidate.unsqueeze(1)).sum(2)
        # a source left out shows nothing: 0 / 0
        return torch.where(positive, found / n_above, 0).sum(1) / positive.sum(1)

    return measure_in_parts(measure, scores, positive & candidate, candidate)


def measure_in_parts(function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """Call a function with some states at a time, as it makes tables of pairs of their sources."""
    size = max(1, _ROOM // max(1, rows[0].shape[1]) ** 2)
    return torch.cat([function(*part) for part in zip(*(each.split(size) for each in rows))])


def influence_inside(
    influence: Float[Tensor, "state source"],
    members: Shaped[Tensor, "state source"],
    candidate: Bool[Tensor, "state source"],
    squared: bool = True,
) -> Float[Tensor, " state"]:
    """Return the share of (squared) influence inside sets, or probable members; NaN without any."""
    amount = influence.double() * candidate
    amount = amount.square() if squared else amount
    return (amount * members).sum(1) / amount.sum(1)


def _mean(values: Tensor) -> float:
    defined = values[~values.isnan()]
    return float(defined.double().mean()) if len(defined) else math.nan


def coverage(
    predicted: Bool[Tensor, "batch source"], active: Bool[Tensor, "batch source"]
) -> float:
    """Average the share of the active index set inside the predicted set (Sec. 5.1, eq 4)."""
    return _mean((predicted & active).sum(1) / active.sum(1))


def check_norms(values: Tensor, name: str) -> None:
    """Refuse what are no norms.

    Raises:
        InfoFlowError: for negative numbers, infinity or NaN.
    """
    if not values.isfinite().all() or (values < 0).any():
        raise InfoFlowError(f"{name} negative, infinite or NaN somewhere: expected numbers >= 0")


def compare(
    predicted: Predicted,
    measured: Measured | InformationSets,
    *,
    threshold: float = 0.1,
    active: Bool[Tensor, "batch source"] | None = None,
    lengths: Int[Tensor, " batch"] | None = None,
    without: BothEnds = (),
) -> Agreement:
    """Compare predicted information sets with what was measured on the same inputs.

    Args:
        predicted: sets from theory, as `propagate` gives them, of graded ones those at a level,
            ``graded.at(0.1)``; or the result of a probe that it takes, which is propagated.
        measured: an `InfluenceResult`, whose states alone take part where it holds only some
            positions; influence scores; or measured sets, which count as scores 0 and 1.
        threshold: a source is in the measured set if its influence is at least this share of the
            largest on that state. It touches precision, recall, jaccard, exact match and sizes.
        active: the target's active index set, for `coverage`.
        lengths: the tokens of each sequence, where they differ: no other state or source takes
            part, and the last position is each sequence's own. An `InfluenceResult` knows them, and
            so do sets that were propagated from the result of a probe, or measured.
        without: positions of sources that are no candidates, such as (0,) for a token that
            attention rests on, or (-1,) for the last of each sequence. They leave the measured
            sets, too.

    Raises:
        InfoFlowError: if shapes or lengths differ, scores are negative or NaN, the threshold is not
            in (0, 1], or lengths are not known and some state has no influence from any token, so
            that it cannot be real.
    """
    states = _pair(predicted, measured, threshold, lengths, without)
    n_layers, n_batch, _, n_source = states.influence.shape
    if active is not None and (active.shape != (n_batch, n_source) or active.dtype != torch.bool):
        raise InfoFlowError(
            f"active index sets are {active.dtype} of shape {tuple(active.shape)}: expected bool "
            f"{(n_batch, n_source)}, one row for each sequence"
        )
    tokens, last = states.is_token & states.asked, states.is_last & states.asked
    # [batch, source], since each sequence has one last position
    read = states.predicted[states.last_layer][states.is_last]
    return Agreement(
        threshold=threshold,
        layers=tuple(states.agreement(layer, tokens, False) for layer in range(n_layers)),
        layers_with_self=tuple(states.agreement(layer, tokens, True) for layer in range(n_layers)),
        cls=states.agreement(states.last_layer, last, False),
        coverage=None if active is None else coverage(read, active.to(read.device)),
        numbers=states.layers,
    )


def compare_by_position(
    predicted: Predicted,
    measured: Measured | InformationSets,
    *,
    threshold: float = 0.1,
    lengths: Int[Tensor, " batch"] | None = None,
) -> "pd.DataFrame":
    """Return the agreement of every layer and position, a row each, without each position itself.

    Args:
        predicted, measured, threshold, lengths: as for :func:`compare`. Positions at which nothing
            was measured have no row.

    Raises:
        InfoFlowError: as :func:`compare`.
    """
    states = _pair(predicted, measured, threshold, lengths)
    n_layers, _, n_pos, _ = states.influence.shape
    places = torch.arange(n_pos, device=states.influence.device)
    rows = []
    for layer in range(n_layers):
        for position in range(n_pos):
            chosen = states.exists & states.asked & (places == position)
            if chosen.any():
                values = asdict(states.agreement(layer, chosen, False))
                rows.append({"layer": states.layers[layer], "position": position, **values})
    return pd.DataFrame(rows)


def explained(
    predicted: Predicted,
    measured: Measured | InformationSets,
    layer: int = -1,
    *,
    last: bool = False,
    with_self: bool = False,
    squared: bool = False,
    lengths: Int[Tensor, " batch"] | None = None,
    candidates: Bool[Tensor, "batch pos source"] | None = None,
    without: BothEnds = (),
) -> Explained:
    """Measure how much of the influence lies inside the predicted sets, of one layer.

    Args:
        predicted, measured, lengths: as for :func:`compare`. Of an `InfluenceResult` the measured
            positions count.
        layer: index of the layers that were measured.
        last: of the last position of each sequence alone.
        with_self: count each position itself, too.
        squared: count squares of influence.
        candidates: what each state could hold, such as the mask of the model allows; default, what
            is predicted or has influence at this position, in any sequence and layer.
        without: as for :func:`compare`.

    Raises:
        InfoFlowError: as :func:`compare`.
    """
    states = _pair(predicted, measured, 1.0, lengths, without)
    chosen = states.asked & (states.is_last if last else states.exists)
    return states.explain(layer, chosen, with_self, squared, candidates)


def explain_positions(
    predicted: Predicted, measured: Measured | InformationSets, without: BothEnds = ()
) -> list[list[Explained]]:
    """Measure the same by layer and position; where nothing was measured it says so.

    Args:
        predicted, measured, without: as for :func:`explained`.

    Raises:
        InfoFlowError: as :func:`compare`.
    """
    states = _pair(predicted, measured, 1.0, None, without)
    n_layers, _, n_pos, _ = states.influence.shape
    places = torch.arange(n_pos, device=states.influence.device)
    return [
        [
            states.explain(layer, states.asked & states.exists & (places == position))
            for position in range(n_pos)
        ]
        for layer in range(n_layers)
    ]


def _pair(
    predicted: Predicted,
    measured: Measured | InformationSets,
    threshold: float,
    lengths: Int[Tensor, " batch"] | None,
    without: Sequence[int] = (),
) -> "States":
    """Check predicted sets and measured influence of the same states.

    Raises:
        InfoFlowError: as :func:`compare`.
    """
    check_kind(measured, InfluenceResult)
    sets = sets_of(predicted, measured)
    return States(measured, {"predicted sets": sets}, threshold, lengths, without)


def check_kind(measured: Any, kind: type[StateScores]) -> None:
    """Refuse what no probe of influence gave.

    Raises:
        InfoFlowError: naming its type.
    """
    if not isinstance(measured, (Tensor, kind, InformationSets)):
        raise InfoFlowError(
            f"what was measured is a {type(measured).__name__}: expected an {kind.__name__}, or "
            "influence [layer, batch, pos, source]"
        )


def sets_of(predicted: Any, measured: Any) -> InformationSets:
    """Return the predicted sets, propagated where they are not sets yet.

    Raises:
        InfoFlowError: for what is no prediction.
    """
    if isinstance(predicted, InformationSets):
        return select_layers(predicted, measured)
    if isinstance(predicted, Tensor):
        return select_layers(InformationSets(predicted), measured)
    if isinstance(predicted, MovesKeys):
        if isinstance(measured, InformationSets):
            return propagate(predicted, measured.n_sources)
        scores = measured.values if isinstance(measured, StateScores) else measured
        return select_layers(propagate(predicted, scores.shape[-1]), measured)
    hint = "; what was measured comes second" if isinstance(predicted, InfluenceResult) else ""
    if isinstance(predicted, GradedSets):
        hint = "; give the sets at a level, predicted.at(0.1), or rank all with compare_rankings"
    raise InfoFlowError(
        f"predicted is a {type(predicted).__name__}: expected InformationSets, as propagate gives "
        f"them, or a result of PositionsProbe or AttendedProbe{hint}"
    )


def select_layers(predicted: SetsT, measured: Any) -> SetsT:
    """Select the sets of the layers that a result holds, in its order, of all predicted ones.

    Sets of all layers are in the model's order. Others are taken to be those of the result's
    layers, in its order; so are all sets where sources enter above the input, which sets of the
    whole model do not describe.
    """
    if not isinstance(measured, StateScores):
        return predicted
    layers, above = measured.layers, measured.record.config.get("source_layer")
    covered = max(layers) < predicted.n_layers
    # as many sets as measured layers are of the whole model only if those count from 0 on
    some = len(layers) < predicted.n_layers or sorted(layers) == list(range(len(layers)))
    return predicted.part(layers) if covered and some and not above else predicted


class States:
    """Measured influence of states, checked, beside sets and scores of the same states.

    Args:
        measured: as for :func:`compare`; of other scores than influence, too.
        sets, scores: by what errors call them; their shapes, and lengths of sets, must be those of
            the influence.
        threshold, lengths, without: as for :func:`compare`.

    Attributes:
        influence: float [layer, batch, pos, source], 0 from positions that are left out.
        predicted: bool, the members of the first of the sets.
        measured: bool, which sources reach the threshold.
        layers: the number of each layer in the model.
        last_layer: which of them is the last of the model.
        exists, asked: bool [batch, pos], which states there are, and which were measured.
        is_token, is_last: bool [batch, pos], states of tokens, and the last of each sequence.

    Raises:
        InfoFlowError: as :func:`compare`.
    """

    def __init__(
        self,
        measured: Any,
        sets: Mapping[str, InformationSets],
        threshold: float,
        lengths: Int[Tensor, " batch"] | None,
        without: Sequence[int] = (),
        scores: Mapping[str, Float[Tensor, "layer batch pos source"]] | None = None,
    ) -> None:
        self.predicted, *_ = (one.members for one in sets.values())
        of_sets = [one.lengths for one in sets.values()]
        influence, lengths, self.asked = _read_influence(measured, lengths, *of_sets)
        beside = {name: one.members for name, one in sets.items()} | dict(scores or {})
        for name, one in beside.items():
            if one.shape != influence.shape:
                raise InfoFlowError(
                    f"{name} have shape {tuple(one.shape)}, the measured influence "
                    f"{tuple(influence.shape)}: expected the same [layer, batch, pos, source]; "
                    "probe and predict the same inputs"
                )
        check_norms(influence, "measured influence is")
        layers = range(len(influence))
        self.layers = measured.layers if isinstance(measured, StateScores) else tuple(layers)
        self.last_layer = self.layers.index(max(self.layers))
        _, n_batch, n_pos, n_source = influence.shape
        self.exists, sources, self.is_last = real_states(
            lengths, n_batch, n_pos, n_source, influence.device
        )
        # positions behind the sources, such as CLS, are no tokens
        self.is_token = torch.nn.functional.pad(sources, (0, n_pos - n_source))
        left_out = mark_sources(without, sources.sum(dim=1), n_pos, n_source).to(influence.device)
        self._sources = sources & ~left_out
        # what no head passes on is not to be found
        self.influence = influence.masked_fill(left_out[:, None], 0)
        self.measured = influence_sets(self.influence, threshold).members
        # what no sequence reaches in any layer (the future, in a causal model) is no candidate: a
        # ranking that puts it last proves nothing
        self._reachable = torch.zeros(n_pos, n_source, dtype=torch.bool, device=influence.device)
        for one in (influence, *beside.values()):
            self._reachable |= (one > 0).flatten(0, 1).any(dim=0).to(influence.device)

    def candidates(
        self, with_self: bool, reachable: Bool[Tensor, "*batch pos source"] | None = None
    ) -> Bool[Tensor, "batch pos source"]:
        """Mark what each state could hold; by default what is reached in some sequence or layer."""
        reachable = self._reachable if reachable is None else reachable.to(self.influence.device)
        n_pos, n_source = reachable.shape[-2:]
        is_self = torch.eye(n_pos, n_source, dtype=torch.bool, device=reachable.device)
        return (reachable & (with_self | ~is_self)) & self._sources[:, None]

    def agreement(
        self, layer: int, chosen: Bool[Tensor, "batch pos"], with_self: bool
    ) -> SetAgreement:
        """Compare the sets of some states of a layer."""
        candidate, influence = self.candidates(with_self)[chosen], self.influence[layer][chosen]
        predicted = self.predicted[layer][chosen] & candidate
        measured = self.measured[layer][chosen] & candidate
        both, either = (predicted & measured).sum(1), (predicted | measured).sum(1)
        return SetAgreement(
            n_states=len(predicted),
            auroc=_mean(auroc(influence, predicted, candidate)),
            average_precision=_mean(average_precision(influence, predicted, candidate)),
            # of an empty set 0 / 0 is NaN, which the mean leaves out
            precision=_mean(both / predicted.sum(1)),
            recall=_mean(both / measured.sum(1)),
            jaccard=_mean(torch.where(either > 0, both / either, 1.0)),
            exact_match=_mean((predicted == measured).all(dim=1).double()),
            influence_inside=_mean(influence_inside(influence, predicted, candidate)),
            predicted_size=_mean(predicted.sum(1).double()),
            measured_size=_mean(measured.sum(1).double()),
        )

    def explain(
        self,
        layer: int,
        chosen: Bool[Tensor, "batch pos"],
        with_self: bool = False,
        squared: bool = False,
        candidates: Bool[Tensor, "batch pos source"] | None = None,
    ) -> Explained:
        """Measure some states of a layer, as far as the prediction could be wrong there."""
        # [state, source], of the chosen states alone
        candidate = self.candidates(with_self, candidates)[chosen]
        members = self.predicted[layer][chosen] & candidate
        scores = self.influence[layer][chosen] * candidate
        others, size = candidate.sum(1), members.sum(1)
        # states of which no prediction could be wrong are counted by their reason, and left out
        silent = (others == 0) | (scores.sum(1) == 0)
        empty, full = ~silent & (size == 0), ~silent & (size == others) & (size > 0)
        rest = ~(silent | empty | full)
        kept = scores[rest], members[rest], candidate[rest]
        return Explained(
            layer=self.layers[layer],
            place=self._place(chosen),
            n_sequences=int(chosen.any(dim=1).sum()),
            with_self=with_self,
            squared=squared,
            n_states=len(size),
            no_other=int(silent.sum()),
            empty=int(empty.sum()),
            everything=int(full.sum()),
            inside=_mean(influence_inside(*kept, squared)),
            chance=_mean(size[rest] / others[rest]),
            auroc=_mean(auroc(*kept)),
            size=_mean(size.double()),
            others=_mean(others.double()),
        )

    def _place(self, chosen: Bool[Tensor, "batch pos"]) -> str:
        """Say in words which positions these are."""
        places = chosen.any(dim=0).nonzero().flatten().tolist()
        if not places:
            return "no position"
        if not bool((chosen & ~self.is_last).any()):
            return "last position"
        if chosen.equal(self.exists):
            return "all positions"
        if len(places) == 1:
            return f"position {places[0]}"
        whole = len(places) == places[-1] - places[0] + 1
        count = "" if whole else f"{len(places)} "
        return f"{count}positions {places[0]}-{places[-1]}"


def real_states(
    lengths: Int[Tensor, " batch"] | None,
    n_batch: int,
    n_pos: int,
    n_source: int,
    device: torch.device,
) -> tuple[Bool[Tensor, "batch pos"], Bool[Tensor, "batch source"], Bool[Tensor, "batch pos"]]:
    """Mark the states and sources that exist, and the last state of each sequence.

    Raises:
        InfoFlowError: for lengths that do not fit.
    """
    if lengths is None:
        lengths = torch.full((n_batch,), n_source)
    lengths = check_lengths(lengths, n_batch, n_source).to(device)
    places = torch.arange(n_pos, device=device)
    n_states = (lengths + n_pos - n_source)[:, None]  # CLS has no source
    return (
        places < n_states,
        torch.arange(n_source, device=device) < lengths[:, None],
        places == n_states - 1,
    )


def _read_influence(
    measured: StateScores | InformationSets | Tensor, *lengths: Int[Tensor, " batch"] | None
) -> tuple[Tensor, Tensor | None, Bool[Tensor, "batch pos"]]:
    """Read influence on all positions, the lengths of sequences, and which states were measured.

    Raises:
        InfoFlowError: for lengths that contradict each other, and for states without any influence
            where lengths are not known.
    """
    own = None if isinstance(measured, Tensor) else measured.lengths
    # lengths come from the caller, from the sets and from what was measured
    known = [torch.as_tensor(one).cpu() for one in (*lengths, own) if one is not None]
    if any(not one.equal(known[0]) for one in known):
        different = {str(one.tolist()): None for one in known}
        raise InfoFlowError(
            f"sequences have lengths {' and '.join(different)}: expected the same; probe and "
            "predict the same inputs"
        )
    if isinstance(measured, StateScores):
        return measured.full(), known[0], measured.has_scores
    scores = measured if isinstance(measured, Tensor) else measured.members.float()
    # with lengths, states behind the end are left out; without, one would pass as a real state
    if isinstance(measured, Tensor) and not known:
        _check_real(scores)
    asked = torch.ones(scores.shape[1:3], dtype=torch.bool, device=scores.device)
    return scores, known[0] if known else None, asked


def _check_real(scores: Tensor) -> None:
    """Refuse influence [layer, batch, pos, source] of states that cannot be real.

    Raises:
        InfoFlowError: for a position without influence from any token in any layer.
    """
    # [batch, pos]: in no layer anything from any source
    empty = (scores == 0).all(dim=3).all(dim=0) if scores.ndim == 4 else torch.zeros(1, 1)
    if empty.any():
        sequence, position = empty.nonzero()[0].tolist()
        raise InfoFlowError(
            f"position {position} of sequence {sequence} has no influence from any token, not from "
            "its own, so it cannot be real, as behind the end of a shorter sequence: expected "
            "influence of real states, or the lengths; give the InfluenceResult in the place of "
            "its .influence, or lengths="
        )


@dataclass(frozen=True)
class CoverageCurve(Savable):
    """How much of the influence lies inside the predicted sets, as heads pass more positions.

    The paper's claim, max-position retrieval, is the point k = 1. All is of other tokens than each
    position itself, as in :class:`Explained`.

    Attributes:
        layers: for every k the share of the influence inside the predicted set, layer by layer,
            over all measured positions; NaN where no set could be wrong.
        last: the same at the last position of the last layer (CLS, or the last token).
        size: the mean size of the predicted set there.
        chance: what a random set of the same size would hold there.
        numbers: of these layers in the model; default, 0, 1, ..
    """

    layers: tuple[tuple[float, ...], ...]
    last: tuple[float, ...]
    size: tuple[float, ...]
    chance: tuple[float, ...]
    numbers: tuple[int, ...] = ()

    def take_k(self, k: int) -> dict[int, float]:
        """Return the shares inside where heads pass k positions, by the number of the layer."""
        shares = self.layers[k - 1]
        return dict(zip(self.numbers or range(len(shares)), shares, strict=True))

    def to_frame(self) -> "pd.DataFrame":
        """Return one row for each k."""
        rows = [
            {"k": k, "last": last, "chance": chance, "size": size}
            | {f"layer_{layer}": share for layer, share in sorted(self.take_k(k).items())}
            for k, (last, chance, size) in enumerate(
                zip(self.last, self.chance, self.size, strict=True), start=1
            )
        ]
        return pd.DataFrame(rows)

    def __repr__(self) -> str:
        shares = ", ".join(f"{share:.3f}" for share in self.last[:12])
        return (
            f"CoverageCurve({len(self.last)} ranks, influence inside at the last state: {shares})"
        )

    def _repr_html_(self) -> str:
        return panel("CoverageCurve", {}, head=self.to_frame())


def coverage_curve(
    positions: Sequence[Int[Tensor, "batch _head pos rank"]] | PositionsResult | ShardedPositions,
    influence: Measured,
    lengths: Int[Tensor, " batch"] | None = None,
    without: BothEnds = (),
) -> CoverageCurve:
    """Return the share of influence inside the sets when every head passes its k largest positions.

    Args:
        positions: for every layer the positions of ranks 1, 2, .., in this order, as
            ``PositionsProbe(range(1, K + 1))`` gives them; or its result.
        influence: measured on the same inputs: an `InfluenceResult`, or its scores.
        lengths, without: as for :func:`compare`.

    Raises:
        InfoFlowError: if shapes do not fit, or influence is negative or not finite.
    """
    positions = positions.whole() if isinstance(positions, ShardedPositions) else positions
    counted = positions.lengths if isinstance(positions, PositionsResult) else None
    positions = _split_ranks(positions)
    check_kind(influence, InfluenceResult)
    shape = _read_influence(influence, lengths)[0].shape
    n_layers, batch, n_pos, n_source = shape
    if counted is not None:
        counted = counted - (n_pos - n_source)  # a result counts CLS
    expected = (batch, n_pos)
    # positions may be of more layers than were measured
    if len(positions) < n_layers or any(
        layer.ndim != 4 or (layer.shape[0], layer.shape[2]) != expected for layer in positions
    ):
        raise InfoFlowError(
            f"positions have shapes {[tuple(layer.shape) for layer in positions]} for influence "
            f"{tuple(shape)}: expected [batch, head, pos, rank] for each of its "
            f"{n_layers} layers, with batch {batch} and {n_pos} positions"
        )
    # of k keys in every head, sets grow with k, and so does the share inside by chance
    curve = []
    for k in range(1, min(layer.shape[-1] for layer in positions) + 1):
        sets = propagate([layer[..., :k] for layer in positions], n_source)
        sets = replace(sets, lengths=counted)
        states = _pair(sets, influence, 1.0, lengths, without)
        chosen = states.exists & states.asked
        layers = tuple(states.explain(i, chosen).inside for i in range(n_layers))
        last = states.explain(states.last_layer, states.is_last & states.asked)
        curve.append((layers, last))
    return CoverageCurve(
        layers=tuple(shares for shares, _ in curve),
        last=tuple(found.inside for _, found in curve),
        size=tuple(found.size for _, found in curve),
        chance=tuple(found.chance for _, found in curve),
        numbers=states.layers,
    )


def _split_ranks(positions: Any) -> Sequence[Tensor]:
    """Return the positions of ranks 1, 2, .. of every layer.

    Raises:
        InfoFlowError: for a result of other ranks, or what has no ranks.
    """
    if isinstance(positions, PositionsResult):
        if positions.ranks != tuple(range(1, len(positions.ranks) + 1)):
            raise InfoFlowError(
                f"positions are of ranks {positions.ranks}: expected 1 to some K, in this order; "
                "probe with PositionsProbe((1, 2, 3))"
            )
        return positions.positions
    if not isinstance(positions, (Sequence, Tensor)):
        raise InfoFlowError(
            f"positions is a {type(positions).__name__}: expected what PositionsProbe((1, 2, 3)) "
            "gives, or its positions"
        )
    return positions  # type: ignore[return-value]
