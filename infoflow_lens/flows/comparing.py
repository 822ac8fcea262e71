"""Two flows side by side: two texts in one model, or one text in two models, and what changed."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cached_property

from infoflow_lens.flows.result import Flow
from infoflow_lens.foundation.display import cut
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.lazy import pd
from infoflow_lens.foundation.settings import checked
from infoflow_lens.report.flow_view import FlowView, ViewedInput
from infoflow_lens.report.pages import Pictured

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
