"""What can reach the states of a few inputs, beside what does; and two of these side by side."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from infoflow_lens.agreement import Agreement, Explained, compare, explained
from infoflow_lens.foundation.display import begin_sentence, count, cut, strip_word
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.lazy import mpl, pd
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.foundation.saving import NOT_SAVED, Savable, convert
from infoflow_lens.foundation.settings import Count, Share, checked
from infoflow_lens.hooks import (
    AttendedResult,
    HeadLabels,
    InfluenceResult,
    PatternsResult,
    PositionsResult,
    PowerRolloutResult,
)
from infoflow_lens.hooks.passes.ranking import mark_places, mark_sources
from infoflow_lens.hooks.routes.contributions import within_one
from infoflow_lens.hooks.scores import describe_orders, spearman
from infoflow_lens.hooks.why import WhyAll
from infoflow_lens.report.flow_view import (
    RULES,
    FlowView,
    NextTokens,
    Replaced,
    ViewedInput,
    ViewedMechanism,
    ViewedReasons,
    view_mechanisms,
)
from infoflow_lens.report.pages import Pictured, render_flow
from infoflow_lens.theory.information_sets import GradedSets, InformationSets, propagate
from infoflow_lens.theory.rules import Rule

RuleName = Literal["max_position", "top_k", "mechanisms"]
_NAMED, _LEAST = 5, 0.005  # tokens that a sentence names, and the least share, which is written 1%


@dataclass(frozen=True, eq=False, repr=False)
class Flow(Pictured, Savable):
    """What can reach the states of a few inputs, by theory, beside what does, measured.

    Layers and positions count from 0. In a notebook it shows itself as the interactive picture.

    Attributes:
        tokens: of every input, as one reads them.
        rule: what heads pass on: "max_position", the key of their largest score; "top_k", the
            keys of their k largest; "mechanisms", what each head's mechanism does.
        k: of "top_k".
        sets: predicted information sets of all layers and positions, bool [layer, input, pos,
            source], by this rule.
        influence: measured influence on the asked states; None if it was not measured.
        elsewhere: the same on all positions, for the picture, where none were asked for and it
            takes seconds; it may be an estimate. Else None.
        reasons: why heads prefer their first keys, for the picture; None for a model that cannot
            be asked, and for long inputs.
        next_tokens: of every input and position the most probable next tokens, as pairs of token
            and probability; None for a model that gives none.
        replaced: the same with each token replaced in turn; None where it takes more than some
            seconds, and for models that read later tokens.
        agreement: of these sets with it; None without influence.
        positions: the ranked keys of every head.
        attention: the patterns and scores of every head.
        attended: all keys that heads draw from, for the rule of mechanisms; else None.
        mechanisms: the labels of heads, for this rule; else None.
        notes: what a reader must know, a sentence each.
        record: config, seed, versions, fingerprint of the model.
        title: of the picture.
        rules: the rules by mechanisms, for `propagate`; else None.
        contributions: the share of each asked state that comes from each token, if contributions
            are passed on in a power (:class:`PowerRollout`), set for small changes where Jacobians
            are measured, else for replaced tokens; None for models whose states cannot be
            decomposed.
    """

    schema: ClassVar[str] = "infoflow-lens flow 2"

    tokens: tuple[tuple[str, ...], ...]
    rule: RuleName
    k: Count
    sets: InformationSets = field(metadata=NOT_SAVED)
    influence: InfluenceResult | None
    elsewhere: InfluenceResult | None
    reasons: WhyAll | None
    next_tokens: tuple[NextTokens, ...] | None
    replaced: tuple[Replaced, ...] | None
    agreement: Agreement | None = field(metadata=NOT_SAVED)
    positions: PositionsResult
    attention: PatternsResult
    attended: AttendedResult | None
    mechanisms: HeadLabels | None
    notes: tuple[str, ...]
    record: RunRecord
    title: str
    rules: Sequence[Sequence[Rule]] | None = field(default=None, metadata=NOT_SAVED)
    contributions: PowerRolloutResult | None = None

    @cached_property
    def graded(self) -> GradedSets:
        """The strength with which each state may hold each token, from 0 to 1.

        It is the product of the attention weights on the best path through all heads. Positions
        that were left out (`without`) are passed on by no head.
        """
        weights = [within_one(pattern) for pattern in self.attention.patterns]
        n_pos = weights[0].shape[-1]
        left_out = mark_places(self.record.config["without"], self.attention.lengths, n_pos)
        strength = [layer.masked_fill(left_out[:, None, None], 0) for layer in weights]
        graded = propagate(strength=strength, n_sources=self.sets.n_sources)
        n_cls = graded.strengths.shape[2] - graded.n_sources
        return replace(graded, lengths=self.attention.lengths - n_cls)

    @property
    def asked(self) -> tuple[tuple[int, ...], ...]:
        """The positions of every input whose influence was measured."""
        if self.influence is None:
            return tuple(() for _ in self.tokens)
        return tuple(tuple(p for p in row.tolist() if p >= 0) for row in self.influence.positions)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers whose states were asked for."""
        n_layers = self.sets.n_layers
        return tuple(range(n_layers)) if self.influence is None else self.influence.layers

    def summary(self) -> str:
        """Say in a sentence how far the sets explain what the asked states depend on.

        It is about the last of the layers that were asked for.
        """
        found = self.explained
        if found is None:
            return "influence was not measured"
        several = sum(map(len, self.asked)) > 1
        states = "the asked states" if several else f"position {self.asked[0][0]}"
        # the plain cases first, in which a share of the influence says nothing
        if found.no_other == found.n_states:
            return "no other token has any influence on the asked states"
        if found.empty + found.no_other == found.n_states:
            return f"by this rule no other token can reach {states} in layer {found.layer}"
        if found.everything + found.no_other == found.n_states:
            return (
                f"the predicted sets of {states} in layer {found.layer} hold every other token "
                f"that they can see ({found.others:.3g}), so that they exclude nothing"
                + (f"; {self.describe_order()}" if self.describe_order() else "")
            )
        if found.reason():
            return f"the predicted sets say nothing of {states}: {found.reason()}"
        return found.describe(f" on {states} in layer {found.layer}")

    @cached_property
    def explained(self) -> Explained | None:
        """The share of the influence on the asked states that lies inside their sets.

        It is about the last of the layers that were asked for, and about the tokens that the
        model's mask lets these states hold. None if influence was not measured.
        """
        if self.influence is None:
            return None
        sets = self.sets.part(self.layers)
        without = self.record.config["without"]
        return explained(
            sets, self.influence, candidates=self._visible[self.layers[-1]], without=tuple(without)
        )

    def _find_non_candidates(self) -> Bool[Tensor, "input source"]:
        """Mark the tokens that are no candidates, as no head passes them on."""
        _, _, n_pos, n_source = self.sets.members.shape
        lengths = torch.tensor([len(tokens) for tokens in self.tokens])
        return mark_sources(self.record.config["without"], lengths, n_pos, n_source)

    @cached_property
    def orders(self) -> dict[str, float]:
        """The correlations (Spearman) of predicted orders of tokens with the measured one.

        They are means over the asked states of the last layer that was asked for. Candidates are
        the tokens that a state can see, except its own and those that were left out. Empty if
        nothing was measured, or if no state sees three candidates.
        """
        if self.influence is None:
            return {}
        layer, n_source = self.layers[-1], self.sets.n_sources
        influence = self.influence.full()[-1]
        n_pos = influence.shape[1]
        own = torch.eye(n_pos, n_source, dtype=torch.bool)
        candidate = self._visible[layer] & ~own & ~self._find_non_candidates()[:, None]
        # an order of two tokens is right or wrong by chance
        asked = self.influence.has_scores & (candidate.sum(dim=-1) > 2)
        if not asked.any():
            return {}
        scores = {"best paths": self.graded.strengths[layer]}
        if self.contributions is not None:
            name = f"contributions ({self.contributions.question})"
            scores = {name: self.contributions.full()[layer], **scores}
        # the control: nearer tokens move a state more in most models
        near = -(torch.arange(n_pos)[:, None] - torch.arange(n_source)).abs()
        scores["last tokens first"] = near.float().expand_as(influence)
        measured, those = influence[asked].double(), candidate[asked]
        return {
            name: float(spearman(score[asked].double(), measured, those).mean())
            for name, score in scores.items()
        }

    def describe_order(self) -> str:
        """Say which predicted order of tokens came nearest to the measured one, and chance."""
        if not self.orders:
            return ""
        text = f"of the predicted orders of tokens, {describe_orders(self.orders, '0 by chance')}"
        if self.contributions is not None and not self.contributions.claim:
            text += ", and attention is nearly even, where contributions claim nothing"
        return text

    def describe_sources(self, input: int = 0) -> str:
        """Say on which other tokens a state depends most, as was measured, and how much they have.

        It is the last of the asked states of an input, in the last of the layers.

        Args:
            input: which input.

        Returns:
            A sentence without its end; empty where no influence of other tokens was measured.

        Raises:
            InfoFlowError: for an input that there is not.
        """
        asked = self._find_positions(input)
        if not asked:
            return ""
        index = input % len(self.tokens)
        state = {"input": index, "position": max(asked), "layer": self.layers[-1]}
        table = self.to_frame()
        table = table[(table[[*state]] == [*state.values()]).all(axis=1)]
        most = table[table["share"] >= _LEAST].nlargest(_NAMED, "share")
        if most.empty:
            return ""
        named = ", ".join(
            f"{strip_word(token)}@{source} ({share:.0%})"
            for source, token, share in most[["source", "source_token", "share"]].to_numpy()
        )
        of = f"{strip_word(most['token'].iloc[0])}@{state['position']}"
        return (
            f"in layer {state['layer']} {of} depends most on {named}: together "
            f"{most['share'].sum():.0%} of the influence of other tokens"
        )

    def _find_positions(self, input: int) -> tuple[int, ...]:
        n_inputs = len(self.tokens)
        if not -n_inputs <= input < n_inputs:
            raise InfoFlowError(f"input is {input}: expected 0 to {n_inputs - 1}")
        return self.asked[input]

    @cached_property
    def _visible(self) -> tuple[Bool[Tensor, "input pos source"], ...]:
        """Mark what each state could hold, by the model's mask, for each layer."""
        n_states, n_source = self.sets.members.shape[2:]
        reached = torch.eye(n_states, n_source, dtype=torch.float32).expand(
            len(self.tokens), -1, -1
        )
        found = []
        for scores in self.attention.scores:
            allowed = (scores > -math.inf).any(dim=1).float()
            # [input, pos, source]: what keys hold that some head may read, and what the state held
            reached = ((allowed @ reached + reached) > 0).float()
            found.append(reached > 0)
        return tuple(found)

    def to_frame(self) -> "pd.DataFrame":
        """Return one row for each input, asked state and source.

        It says whether the predicted set holds the source, its influence, and its share of the
        influence of other tokens on that state: NaN for the state's own token and for tokens that
        were left out. The shares of predicted tokens add up to the share inside the set.

        If influence was not measured, there are rows for all states, without its columns.
        """
        measured = None if self.influence is None else self.influence.full()
        left_out, frames = self._find_non_candidates(), []
        for index, tokens in enumerate(self.tokens):
            n_source = len(tokens)
            n_states = n_source + self.sets.members.shape[2] - self.sets.n_sources
            positions = self.asked[index] if measured is not None else range(n_states)
            for row, layer in enumerate(self.layers):
                for position in positions:
                    columns: dict[str, Any] = {
                        "input": index,
                        "layer": layer,
                        "position": position,
                        "token": tokens[position] if position < n_source else "CLS",
                        "source": range(n_source),
                        "source_token": tokens,
                        "predicted": self.sets.members[layer, index, position, :n_source].numpy(),
                    }
                    if measured is not None:
                        found = measured[row, index, position, :n_source]
                        columns["influence"] = found.numpy()
                        others = found.double()
                        # of a state's own token, and of those that nobody passes on, there is no
                        # share
                        if position < n_source:
                            others[position] = math.nan
                        others[left_out[index, :n_source]] = math.nan
                        columns["share"] = (others / others.nansum()).numpy()
                    frames.append(pd.DataFrame(columns))
        return pd.concat(frames, ignore_index=True)

    @checked
    def plot(
        self, input: int = 0, position: int | None = None, layer: int | None = None
    ) -> "mpl.Figure":
        """Draw the paths to one state, and every source's influence on it, as a matplotlib figure.

        Args:
            input: which input.
            position, layer: of the state; default, the last that was asked for, in the last layer.

        Raises:
            InfoFlowError: for an input or a state that there is not.
        """
        from infoflow_lens.report.flow_plot import draw_flow

        asked = self._find_positions(input)
        viewed = self.view.inputs[input]
        if position is None:
            position = max(asked) if asked else viewed.n_queries - 1
        position = position + viewed.n_queries if position < 0 else position
        layer = self.layers[-1] if layer is None else layer
        layer = layer + self.sets.n_layers if layer < 0 else layer
        return draw_flow(viewed, self.rule, self.k, layer, position)

    @classmethod
    def _build(cls, values: Mapping[str, Any]) -> "Flow":
        """Build the flow of what was measured, or read; predictions follow from it.

        Raises:
            InfoFlowError: for results that are missing, or of other inputs.
        """
        tokens, positions, config = values["tokens"], values["positions"], values["record"].config
        if len(tokens) != len(positions.lengths):
            raise InfoFlowError(
                f"tokens are of {len(tokens)} texts: expected {len(positions.lengths)} as positions"
            )
        if values["rule"] == "mechanisms" and None in (values["attended"], values["mechanisms"]):
            raise InfoFlowError(
                "rule is 'mechanisms', but mechanisms or attended is None: expected the mechanisms "
                "and the attended keys"
            )
        threshold = convert(config.get("threshold"), Share, "threshold")
        without = convert(config.get("without"), tuple[int, ...], "without")
        rules: Sequence[Sequence[Rule]] | None = None
        if values["rule"] == "mechanisms":
            rules = values["mechanisms"].rules(values["attended"], positions)
        by_rank = [layer[..., : values["k"]] for layer in positions.positions]
        sets = propagate(by_rank if rules is None else rules, max(map(len, tokens)))
        agreement = None
        if values["influence"] is not None:
            agreement = compare(sets, values["influence"], threshold=threshold, without=without)
        return cls(**values, sets=sets, rules=rules, agreement=agreement)

    def _check_fields(self) -> None:
        super()._check_fields()
        render_flow(self.view)

    @cached_property
    def view(self) -> FlowView:
        """The numbers that the interactive picture shows."""
        return view_of(self)

    def __repr__(self) -> str:
        n, longest = len(self.tokens), max(map(len, self.tokens))
        inputs = count(longest, "token") if n == 1 else f"{n} inputs of up to {longest} tokens"
        layers = count(self.sets.n_layers, "layer")
        return f"Flow({inputs}, {layers}, rule {self.rule!r}: {self.summary()})"


_UNMEASURED = (
    "It was measured where it was asked for, and elsewhere only where all positions take a few "
    "seconds. flow(model, text, position='all') measures all of them, and so does "
    "infoflow-lens flow MODEL TEXT --position all; a bar says how long that takes."
)
_MOST_PATTERNS = 2_000_000  # weights that the picture takes along


def view_of(flow: Flow) -> FlowView:
    """Make what the interactive picture shows from a flow."""
    # patterns of long texts would make the page too large
    n_patterns = sum(layer[0].numel() for layer in flow.attention.patterns)
    with_patterns = n_patterns * len(flow.tokens) <= _MOST_PATTERNS
    possible = ["max_position", *(["top_k"] if len(flow.positions.ranks) > 1 else [])]
    possible += ["mechanisms"] if flow.rules is not None else []
    # the rule that the flow was made by is shown first
    order = [flow.rule, *(rule for rule in possible if rule != flow.rule)]
    asked = flow.asked[0]
    return FlowView(
        title=flow.title,
        inputs=[_view_input(flow, i, with_patterns) for i in range(len(flow.tokens))],
        rules={rule: RULES[rule] for rule in order},
        record=flow.record.to_dict(),
        notes=tuple(f"{begin_sentence(o)}." for o in (*flow.notes, flow.describe_order()) if o),
        influence_name=_how(flow.influence),
        unmeasured=_UNMEASURED if flow.influence is not None else "",
        k=flow.k if flow.rule == "top_k" else 2,
        selected=(flow.layers[-1], max(asked)) if asked else None,
    )


def _view_input(flow: Flow, index: int, with_patterns: bool) -> ViewedInput:
    n_source = len(flow.tokens[index])
    members = flow.sets.members
    n_states = n_source + members.shape[2] - members.shape[3]
    ranked, weights, scores, patterns = [], [], [], []
    for layer, positions in enumerate(flow.positions.positions):
        keys = positions[index, :, :n_states].long()
        at, none = keys.clamp(min=0), keys < 0
        pattern = flow.attention.patterns[layer][index, :, :n_states]
        score = flow.attention.scores[layer][index, :, :n_states]
        ranked.append(keys)
        weights.append(pattern.gather(2, at).masked_fill(none, 0))
        scores.append(score.gather(2, at).masked_fill(none, 0))
        patterns.append(pattern[:, :, :n_states])
    # influence on the asked states goes over the estimate on the others
    influence = None
    if flow.influence is not None:
        influence = torch.full(
            (members.shape[0], n_states, n_source), torch.nan, dtype=torch.float32
        )
        for found in (flow.elsewhere, flow.influence):  # the asked positions may be exact
            if found is None:
                continue
            asked = [p for p in found.positions[index].tolist() if p >= 0]
            measured = found.full()[:, index, :, :n_source].float()
            for row, layer in enumerate(found.layers):
                influence[layer, asked] = measured[row, asked]
    visible = torch.stack([layer[index, :n_states, :n_source] for layer in flow._visible])
    left_out = flow._find_non_candidates()[index, :n_source]
    other = ~torch.eye(n_states, n_source, dtype=torch.bool) & ~left_out
    return ViewedInput(
        tokens=flow.tokens[index],
        n_queries=n_states,
        ranked=ranked,
        weights=weights,
        scores=scores,
        patterns=patterns if with_patterns else None,
        mechanisms=_mechanisms(flow, index, n_states),
        influence=influence,
        left_out=left_out.nonzero().flatten().tolist(),
        possible=(visible & other).sum(dim=-1),
        reasons=_reasons(flow, index, n_states),
        next_tokens=None if flow.next_tokens is None else flow.next_tokens[index],
        replaced=None if flow.replaced is None else flow.replaced[index],
        causal=flow.attention.is_causal,
    )


def _reasons(flow: Flow, index: int, n_states: int) -> ViewedReasons | None:
    if flow.reasons is None:
        return None
    found, of_input = flow.reasons, (index, slice(None), slice(n_states))
    layers = {
        name: [layer[of_input] for layer in getattr(found, name)]
        for name in ("keys", "margins", "parts", "values", "rest")
    }
    return ViewedReasons(**layers, part_names=found.part_names)


def _mechanisms(flow: Flow, index: int, n_states: int) -> list[list[ViewedMechanism]] | None:
    if flow.rules is None or flow.mechanisms is None:
        return None
    return view_mechanisms(flow.mechanisms.mechanisms, flow.rules, index, n_states)


_MOVES = "how far the state moves by a small change of the token (norm of the Jacobian)"


def _how(influence: InfluenceResult | None) -> str:
    if influence is None:
        return "not measured"
    config = influence.record.config
    if config["probe"] == "ResampleInfluence":
        return "how far the state moves when another token takes the place (median)"
    if config["estimate"]:
        return f"{_MOVES}, estimated by {config['estimate']} random directions"
    return _MOVES


_NAME = 40  # characters of a text that names its side [chosen]


@checked
def compare_flows(
    first: Flow, second: Flow, names: tuple[str, str] | None = None
) -> "FlowComparison":
    """Return two flows side by side, with the positions that stand for each other.

    Positions stand for each other where the tokens of both are the same in the same order, or where
    as many tokens of one take the place of as many of the other; inserted tokens have no
    counterpart (Ratcliff and Metzener 1988, "Pattern matching: the Gestalt approach", by difflib).

    Args:
        first, second: flows of one input each, by the same rule.
        names: of the two sides; default, their texts, or their models where the texts are the same.

    Raises:
        InfoFlowError: for flows of several inputs, or of different rules.

    Example:
        >>> import infoflow_lens as il
        >>> one = il.flow("stdlib-2l", "for name in names:")
        >>> other = il.flow("stdlib-2l", "for item in names:")
        >>> il.compare_flows(one, other).to_html("compared.html")
    """
    for which, each in (("first", first), ("second", second)):
        if not isinstance(each, Flow):
            raise InfoFlowError(
                f"{which} is a {type(each).__name__}: expected a Flow, as flow() returns it"
            )
        if len(each.tokens) != 1:
            raise InfoFlowError(
                f"{which} is a flow of {len(each.tokens)} inputs: expected one; call flow() for "
                "each text"
            )
    if (first.rule, first.k) != (second.rule, second.k):
        raise InfoFlowError(
            f"the rules are {first.rule!r} with k={first.k} and {second.rule!r} with k={second.k}: "
            "expected the same of both, as sets by different rules differ even for equal texts; "
            "call flow() with one rule and one k"
        )
    names = names or _names(first, second)
    if names[0] == names[1]:  # records and columns are told apart by them
        names = (f"1: {names[0]}", f"2: {names[1]}")
    return FlowComparison(first, second, names, align(first, second))


@dataclass(frozen=True, eq=False, repr=False)
class FlowComparison(Pictured):
    """What changed from one flow to another. In a notebook it shows both, linked.

    Attributes:
        first, second: the flows.
        names: of both.
        aligned: positions of the first with those of the second that stand for them.
    """

    first: Flow
    second: Flow
    names: tuple[str, str]
    aligned: tuple[tuple[int, int], ...]

    def to_frame(self) -> "pd.DataFrame":
        """Return one row for each asked layer, position and source of either side.

        A row has `predicted`, `influence` and `share` of both sides, NaN where a side lacks the
        source. States that stand for each other are in the same rows; positions are those of the
        first side, `position_second` and `source_second` those of the second, -1 for none.
        """
        keys = ["layer", "position", "source"]
        one, other = (each.to_frame().drop(columns="input") for each in (self.first, self.second))
        for name in ("influence", "share"):  # which a flow without influence lacks
            for each in (one, other):
                each[name] = each.get(name, math.nan)
        counterpart = {second: first for first, second in self.aligned}
        other["position_second"], other["source_second"] = other["position"], other["source"]
        # a position without a counterpart gets a negative number of its own, which matches no other
        for name in ("position", "source"):
            other[name] = [counterpart.get(place, -1 - place) for place in other[name]]
        texts = ["token", "source_token"]
        other = other.rename(columns={name: f"{name}_second" for name in texts})
        merged = one.merge(other, on=keys, how="outer", suffixes=("_first", "_second"))
        for name in ("position", "source"):
            merged[name] = merged[name].clip(lower=-1)
            merged[f"{name}_second"] = merged[f"{name}_second"].fillna(-1).astype(int)
        return merged

    def choices(self) -> "pd.DataFrame":
        """List the heads that choose different first keys on the two sides.

        There is one row for each head and position whose key does not stand for the other side's,
        with both keys, -1 for none. Only layers with equally many heads on both sides are compared.
        """
        counterpart = dict(self.aligned)
        rows = [
            (layer, head, position, second, *pair)
            for layer, position, second, pairs in self._first_keys()
            for head, pair in enumerate(pairs)
            # a key that stands for none of the other side is not no key at all
            if counterpart.get(pair[0], -1 if pair[0] < 0 else None) != pair[1]
        ]
        columns = ["layer", "head", "position", "position_second", "key", "key_second"]
        return pd.DataFrame(rows, columns=columns)

    def summary(self) -> str:
        """Say in a sentence how many sets and first choices changed."""
        counterpart, n_pairs = dict(self.aligned), len(self.aligned)
        n_layers = min(self.first.sets.n_layers, self.second.sets.n_layers)
        changed = [
            {counterpart.get(source, -1) for source in self.first.sets.of(layer, 0, one)}
            != self.second.sets.of(layer, 0, other)
            for layer in range(n_layers)
            for one, other in self.aligned
        ]
        asked = sum(len(pairs) for *_, pairs in self._first_keys())
        where = f"at {n_pairs} pair{'s' * (n_pairs != 1)} of positions that stand for each other"
        if self.first.sets.n_layers != self.second.sets.n_layers:
            where += f", in layers 0 to {n_layers - 1}, which both have"
        return (
            f"{sum(changed)} of {len(changed)} predicted sets differ, and {len(self.choices())} of "
            f"{asked} first choices of heads, {where}"
        )

    def _first_keys(self) -> Iterator[tuple[int, int, int, list[tuple[int, int]]]]:
        """Yield the layer, both positions and each head's keys, of layers with as many heads."""
        sides = (self.first.positions.argmax, self.second.positions.argmax)
        for layer, (one, other) in enumerate(zip(*sides, strict=False)):
            if one.shape[1] != other.shape[1]:
                continue
            for position, second in self.aligned:
                keys = one[0, :, position].tolist(), other[0, :, second].tolist()
                yield layer, position, second, list(zip(*keys, strict=True))

    @cached_property
    def view(self) -> FlowView:
        """The numbers that the page shows."""
        one, other = self.first.view, self.second.view
        title = one.title if one.title == other.title else "Information flow in two models"
        notes = [f"{self.summary()}.", *one.notes, *(n for n in other.notes if n not in one.notes)]
        # only rules that both sides have can be switched to
        rules = {name: words for name, words in one.rules.items() if name in other.rules}
        return replace(
            one,
            title=title,
            inputs=[self._mark_tokens(side) for side in (0, 1)],
            marked_name="not the same token on the other side",
            rules=rules,
            notes=notes,
            record={
                name: dict(view.record) for name, view in zip(self.names, (one, other), strict=True)
            },
            groups=[(name, 1) for name in self.names],
            aligned=self.aligned,
        )

    def _mark_tokens(self, side: int) -> ViewedInput:
        """Mark the tokens of a side's input that differ on the other side."""
        own = (self.first, self.second)[side]
        tokens, others = own.tokens[0], (self.second, self.first)[side].tokens[0]
        counterpart = {pair[side]: pair[1 - side] for pair in self.aligned}
        marked = [
            place
            for place, token in enumerate(tokens)
            if place not in counterpart or others[counterpart[place]] != token
        ]
        (viewed,) = own.view.inputs
        return replace(viewed, marked=marked)

    def __repr__(self) -> str:
        return f"FlowComparison({self.names[0]!r}, {self.names[1]!r}: {self.summary()})"


def align(first: Flow, second: Flow) -> tuple[tuple[int, int], ...]:
    """Return positions of one input of each that stand for each other, in order."""
    (one,), (other,) = first.tokens, second.tokens
    pairs = align_tokens(one, other)
    states = [each.sets.members.shape[2] for each in (first, second)]
    more = zip(range(len(one), states[0]), range(len(other), states[1]), strict=False)  # CLS
    return (*pairs, *more)


def align_tokens(first: Sequence[str], second: Sequence[str]) -> list[tuple[int, int]]:
    """Pair the indices of tokens that stand for each other: see :func:`compare_flows`."""
    pairs: list[tuple[int, int]] = []
    steps = SequenceMatcher(None, first, second, autojunk=False).get_opcodes()
    for kind, start, end, other_start, other_end in steps:
        if kind == "equal" or (kind == "replace" and end - start == other_end - other_start):
            pairs += zip(range(start, end), range(other_start, other_end), strict=True)
    return pairs


def _names(first: Flow, second: Flow) -> tuple[str, str]:
    """Name the two sides by what tells them apart.

    These are their texts from shortly before the first difference; for equal texts their models;
    for equal models "first" and "second".
    """
    if first.tokens != second.tokens:
        (one,), (other,) = first.tokens, second.tokens
        both = zip(one, other, strict=False)
        shorter = min(len(one), len(other))
        n_same = next((i for i, (a, b) in enumerate(both) if a != b), shorter)
        start = max(0, n_same - 3)
        return _short(one, start), _short(other, start)
    models = str(first.record.config["flow"]), str(second.record.config["flow"])
    return models if models[0] != models[1] else ("first", "second")


def _short(tokens: Sequence[str], start: int) -> str:
    """Return the text from a token on, with a sign where something is left out."""
    return cut("…" * (start > 0) + "".join(tokens[start:]).strip(), _NAME)
