"""An answer to "why this and not that": tokens, strips of states, heads, paths."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from infoflow_lens.foundation.display import quote_readable, strip_word
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.lazy import pd
from infoflow_lens.hooks.answer.paths import TARGET
from infoflow_lens.hooks.answer.question import MIXER, MLP
from infoflow_lens.hooks.result import Result
from infoflow_lens.hooks.scores import describe_orders, spearman

_OPPOSED = 3  # heads and MLPs that are named as working against the answer
_AGREE = 0.8  # of the words in a place, from which on it is said what the place speaks for
_NO_BLANK = re.compile(r"['\"]\w")  # how the name of a word begins, and not that of a class
_UNLIKELY = 0.05  # an answer's chance, below which the other text calls for something else
_ROUNDED = 0.05  # of a difference of logits: what half precision may round away
_NAMED = 5  # writers or readers of a line that are named
# how tokens are ordered without replacing any; the last is no measure of the model
ORDERS = ("contributions in squares", "best paths", "last tokens first")
_LONGEST = 32  # letters of a unit that is named
_WORDS = {
    "query": "tells {readers} where to look",
    "key": "is found by {readers}",
    "value": "is carried by {readers}",
    "answer": "writes {goal}",
}
KINDS = tuple(_WORDS)
_OTHERS = {MLP: "MLP", MIXER: "mixer"}  # in the place of a head


@dataclass(frozen=True, eq=False, kw_only=True)
class AnswerNumbers(Result):
    """Why a model gives this answer and not that one, in one text: the numbers.

    Every `effect` is measured: the change of the readout when a part takes its value from the other
    text. Estimates are by gradients; they find, and are no sizes.

    Attributes:
        readout: what is asked, in words.
        value, other_value: the readout of the text, and of the other one.
        tokens, other_tokens: of the two texts, as one reads them.
        guess, chance: what the model says, and how probable that is; "" and NaN where it gives no
            logits at one position.
        other_guess, other_chance: the same of the other text.
        answers: the answer and the other one, in words; none of other readouts.
        answer_chances: [text, answer], how probable the model finds each, in the text and in the
            other one.
        spans: int [span, 2], where each unit of tokens begins, and the place behind it; by default
            each token is one.
        span_words, other_span_words: of the two texts, as one reads them.
        token_mean, token_error: [span], mean change by the replacements of a unit, each counted
            once, and its standard error; NaN where no guesses were put there.
        token_other: [span], when they are replaced by the other text's tokens.
        replacements: what was put in the place of each unit alone, the likeliest first.
        replacement_effects: [span, replacement], what each changed; NaN behind the last.
        token_predicted: [order, pos], how strongly the state that is read holds each token, as
            predicted without replacing any: by contributions in squares (:class:`PowerRollout`), by
            the best path of attention, and by how near it stands; NaN where it is not seen, and
            for units of several tokens.
        read_at: the position that is read.
        strip_layers: the layers at which states were exchanged; the last is what leaves the last
            layer, as the others are what enters theirs.
        strips: [strip, span], the effect of the states of each unit.
        units: int [unit, 2], layers and heads; head -1 is the MLP, -2 what runs in the place of
            attention, such as a state space.
        unit_estimate, unit_effect: [unit]; NaN where it was not measured.
        places: int [path, 7]: layer, head and position of the writer (layer and head -1: the
            embedding), of the reader (-1: the answer), and the kind: query, key, value, answer.
        path_worth: [path], estimated, positive for what makes the two texts differ as they do.
        path_cost: [path], the share of the difference that the circuit loses without it; NaN where
            it was not measured.
        path_effect: [path], when it alone is cut in the text.
        looked: int [head, 2], the heads of which it is said where they look: those of paths that
            begin at the position that is read, then those with the largest effects.
        looks: [head, 2, pos], the weight of each key for the position that is read, in the text and
            in the other one.
        writes: [head, 2, pos], what the head writes towards the readout from each key, directly;
            NaN where it is not asked, or the readout is not linear.
        kept, lost: the share of the difference that the paths keep when all else has the other
            text's values, and that is lost when they alone have them.
        random: shares that as many random paths keep.
        n_pruned: paths that were found and that the others make up for.
        forwards: passes over one text that it took; a derivative counts as two.
    """

    small: ClassVar[bool] = True

    readout: str
    value: float
    other_value: float
    tokens: tuple[str, ...]
    other_tokens: tuple[str, ...]
    guess: str
    chance: float
    other_guess: str
    other_chance: float
    answers: tuple[str, ...]
    answer_chances: Float[Tensor, "text answer"]
    spans: Int[Tensor, "span two"]
    span_words: tuple[str, ...]
    other_span_words: tuple[str, ...]
    token_mean: Float[Tensor, " span"]
    token_error: Float[Tensor, " span"]
    token_other: Float[Tensor, " span"]
    replacements: tuple[tuple[str, ...], ...]
    replacement_effects: Float[Tensor, "span replacement"]
    token_predicted: Float[Tensor, "order pos"]
    read_at: int
    strip_layers: tuple[int, ...]
    strips: Float[Tensor, "strip span"]
    units: Int[Tensor, "unit two"]
    unit_estimate: Float[Tensor, " unit"]
    unit_effect: Float[Tensor, " unit"]
    places: Int[Tensor, "path seven"]
    path_worth: Float[Tensor, " path"]
    path_cost: Float[Tensor, " path"]
    path_effect: Float[Tensor, " path"]
    looked: Int[Tensor, "head two"]
    looks: Float[Tensor, "head text pos"]
    writes: Float[Tensor, "head text pos"]
    kept: float
    lost: float
    random: tuple[float, ...]
    n_pruned: int
    forwards: float

    @property
    def gap(self) -> float:
        """Subtract the readout of the other text from that of the text."""
        return self.value - self.other_value

    @property
    def side(self) -> str:
        """Name what speaks for the score: the answer, or where nothing is answered, its size."""
        return "the answer" if self.answers else "a high score"

    @property
    def goal(self) -> str:
        """Name where paths end: the answer, or the score where nothing is answered."""
        return "the answer" if self.answers else "the score"

    @property
    def changed(self) -> tuple[int, ...]:
        """The positions at which the texts differ."""
        # by ids: parts of a character are shown alike
        pairs = zip(*(self.record.config[name] for name in ("text", "instead")), strict=True)
        return tuple(i for i, (one, other) in enumerate(pairs) if one != other)

    @property
    def shares(self) -> Float[Tensor, "strip span"]:
        """The share of the difference that moves with the states of each unit."""
        return -self.strips / self.gap

    @property
    def has_units(self) -> bool:
        """Say whether some tokens were replaced together."""
        return len(self.spans) < len(self.tokens)

    @property
    def unit_names(self) -> tuple[str, ...]:
        """Name each unit by its words; of long ones the middle is left out."""
        return tuple(map(_shorten, self.span_words))

    def find_unit(self, position: int) -> int:
        """Find the unit that a position is in."""
        # units stand in their order: those that end at or before the position come before its own
        return int((self.spans[:, 1] <= position).sum())

    @property
    def n_replacements(self) -> tuple[int, ...]:
        """Count what was put in the place of each unit."""
        return tuple(map(len, self.replacements))

    def find_direction(self, number: int) -> int:
        """Find how others in the place of a unit move the score: down (-1), up (1), or open (0).

        It is clear if their mean is two standard errors from 0, and four in five have its sign.
        """
        mean, effects = self.token_mean[number], self.replacement_effects[number]
        sign = int(mean.nan_to_num(0).sign())
        agree = int((effects.sign() == sign).sum()) >= _AGREE * self.n_replacements[number]
        return sign if agree and bool(mean.abs() > 2 * self.token_error[number]) else 0

    def orders(self) -> dict[str, float]:
        """Compare each predicted order of tokens with the measured one: Spearman.

        Candidates are the tokens that the position that is read sees, but its own; measured is how
        far the readout moves when the model's own guesses replace them. Empty where fewer than
        three can be compared, or nothing was measured.
        """
        measured = self.token_mean.abs()
        found: dict[str, float] = {}
        if self.has_units:
            return found
        for name, scores in zip(ORDERS, self.token_predicted, strict=True):
            both = scores.isfinite() & measured.isfinite()
            both[self.read_at] = False
            if int(both.sum()) >= 3:
                one, other = (values.nan_to_num(0)[None] for values in (scores, measured))
                found[name] = float(spearman(one, other, both[None]))
        return found

    def nearest_order(self) -> str:
        """Say in a sentence which predicted order came nearest to the measured one, and chance."""
        found = self.orders()
        if not found:
            return ""
        both = self.token_predicted.isfinite().any(dim=0) & self.token_mean.isfinite()
        both[self.read_at] = False
        n = int(both.sum())
        # the rank correlation of two random orders has the standard deviation 1 / sqrt(n - 1)
        band = 1.96 / (n - 1) ** 0.5
        if band > 1:  # also that of the measured order itself lies within
            return f"{n} tokens are too few to tell a predicted order from a random one."
        chance = f"95 of 100 random orders lie within {band:.2f} of 0"
        said = describe_orders(found, chance, least=band)
        return f"Of the orders of {n} tokens predicted without replacing any, {said}."

    def to_frame(self, what: str = "paths") -> "pd.DataFrame":
        """Return a table of "tokens", "replacements", "states", "heads", "paths" or "looks".

        Heads and paths have the largest effect first. "replacements" says what was put in the place
        of each token, the likeliest first, and what the readout became. "looks" says where heads
        look from the position that is read, in both texts, and what they write towards the readout
        from there.

        Raises:
            InfoFlowError: for anything else.
        """
        tables: dict[str, Callable[[], Any]] = {
            "tokens": self._tokens,
            "replacements": self._replacements,
            "states": self._states,
            "heads": self._heads,
            "paths": self._paths,
            "looks": self._looks,
        }
        if what not in tables:
            raise InfoFlowError(f"{what!r} is no table: expected one of {', '.join(tables)}")
        frame = pd.DataFrame(tables[what]())
        if what in ("heads", "paths") and len(frame):
            # what was not measured comes last
            order = frame["effect"].abs().fillna(-1).argsort(kind="stable")[::-1]
            frame = frame.iloc[order].reset_index(drop=True)
        return frame

    def _tokens(self) -> dict[str, Any]:
        starts, stops = self.spans.T
        predicted = self.token_predicted[:2, starts].tolist()
        return {
            "position": starts.tolist(),
            "token": self.span_words,
            "effect": self.token_mean.tolist(),
            "error": self.token_error.tolist(),
            "replacements": self.n_replacements,
            "effect of the other token": self.token_other.tolist(),
            "other token": self.other_span_words,
            **dict(zip(ORDERS[:2], predicted, strict=True)),
            **({"tokens": (stops - starts).tolist()} if self.has_units else {}),
        }

    def _replacements(self) -> Iterator[dict[str, Any]]:
        rows = zip(
            self.spans.tolist(), self.span_words, self.replacements,
            self.replacement_effects.tolist(), strict=True,
        )  # fmt: skip
        for (position, _), word, others, effects in rows:
            for other, effect in zip(others, effects):  # NaN behind the last
                yield {
                    "position": position,
                    "token": word,
                    "replacement": other,
                    "effect": effect,
                    "readout": self.value + effect,
                }

    def _states(self) -> Iterator[dict[str, Any]]:
        rows = zip(self.strip_layers, self.strips.tolist(), self.shares.tolist(), strict=True)
        for layer, strip, shares in rows:
            for unit, effect in enumerate(strip):
                yield {
                    "layer": layer,
                    "position": int(self.spans[unit, 0]),
                    "token": self.span_words[unit],
                    "effect": effect,
                    "share": shares[unit],
                }

    def _heads(self) -> dict[str, Any]:
        units = self.units.tolist()
        return {
            "layer": [layer for layer, _ in units],
            "head": [head for _, head in units],
            "name": [
                f"{_OTHERS[head]} {at}" if head in _OTHERS else f"{at}.{head}" for at, head in units
            ],
            "effect": self.unit_effect.tolist(),
            "estimate": self.unit_estimate.tolist(),
        }

    def _paths(self) -> dict[str, Any]:
        places = self.places.tolist()
        # a change of the readout, as the effect: it falls to that of the other text, or rises to it
        estimate = -self.path_worth * math.copysign(1, self.gap)
        return {
            "writer": [_name(place[:3]) for place in places],
            "from": [self._word(place[2]) for place in places],
            "reader": [self.goal if place[3] < 0 else _name(place[3:6]) for place in places],
            "to": ["" if place[3] < 0 else self._word(place[5]) for place in places],
            "input": [KINDS[place[6]] for place in places],
            "effect": self.path_effect.tolist(),
            "estimate": estimate.tolist(),
            "cost in the circuit": self.path_cost.tolist(),
        }

    def _looks(self) -> Iterator[dict[str, Any]]:
        both = zip(self.looked.tolist(), self.looks.tolist(), self.writes.tolist(), strict=True)
        for (layer, head), looks, writes in both:
            for text in range(2):
                words = (self.tokens, self.other_tokens)[text]
                for position, word in enumerate(words):
                    yield {
                        "head": f"{layer}.{head}",
                        "text": ("asked", "other")[text],
                        "position": position,
                        "token": word,
                        "weight": looks[text][position],
                        "writes": writes[text][position],
                    }

    @property
    def looks_elsewhere(self) -> float:
        """The largest part of its weight that a looked at head moves between the texts, 0 to 1."""
        if not len(self.looks):
            return 0.0
        return float((self.looks[:, 0] - self.looks[:, 1]).abs().sum(-1).max()) / 2

    def first_look(self, number: int, text: int) -> tuple[str, float]:
        """Find the key with the largest weight of a head of :attr:`looked`, and what it writes.

        Args:
            number: of the head.
            text: 0 for the text, 1 for the other one.

        Returns:
            The key and its weight, in words, and what the head writes from there.
        """
        at = int(self.looks[number, text].argmax())
        weight = float(self.looks[number, text, at])
        return f"{self._word(at, text == 1)} ({weight:.2f})", float(self.writes[number, text, at])

    def order_looks(self) -> list[int]:
        """Order the heads of :attr:`looked`: of paths first, then by what they write from there.

        There is where they look most. Those whose effect lies at other positions write next to
        nothing here, and come last. Where writes are not asked, by the size of their effects.
        """
        first = self.looks.argmax(-1, keepdim=True)
        written = self.writes.nan_to_num(0).gather(-1, first).abs().sum((1, 2))
        order = written.argsort(descending=True, stable=True).tolist()
        on_paths = {tuple(place[:2]) for place in self.places.tolist() if place[2] == self.read_at}
        return sorted(order, key=lambda number: tuple(self.looked[number].tolist()) not in on_paths)

    def look(self, number: int) -> str:
        """Say where a head of :attr:`looked` looks, and what it writes from there."""
        layer, head = self.looked[number].tolist()
        said = []
        for text, where in enumerate(("looks at", "in the other text at")):
            key, writes = self.first_look(number, text)
            wrote = "" if writes != writes else f", writes {self.write(writes)} from there"  # NaN
            said.append(f"{where} {key}{wrote}")
        return f"{layer}.{head} {'; '.join(said)}"

    def name_span(self, number: int) -> str:
        """Name a unit of tokens by its words and the position at which it begins."""
        word = self.unit_names[number]
        return f"{strip_word(word)}@{int(self.spans[number, 0])}"

    def _unit(self, position: int) -> str:
        """Name what a position is in: a unit of several tokens, or its token."""
        return self.name_span(self.find_unit(position)) if self.has_units else self._word(position)

    def effects(self) -> dict[tuple[int, int], float]:
        """Return the effect of each unit by its layer and head; NaN where it was not measured."""
        return dict(zip(map(tuple, self.units.tolist()), self.unit_effect.tolist(), strict=True))

    @property
    def decimals(self) -> int:
        """Return the decimals that scores are written with: of small ones, as cosines, one more."""
        return 3 if max(abs(self.value), abs(self.gap)) < 1 else 2

    def write(self, score: float | Tensor, sign: str = "+") -> str:
        """Write a score, or a change of it, with its sign, or without one for ``sign=""``."""
        return f"{float(score):{sign}.{self.decimals}f}"

    @property
    def read_word(self) -> str:
        """The position that is read, named by its word."""
        return self._word(self.read_at)

    def _word(self, position: int, other: bool = False) -> str:
        word = (self.other_tokens if other else self.tokens)[position]
        return f"{word.strip() or quote_readable(word)}@{position}"

    def bundles(self) -> list[tuple[str, list[int]]]:
        """Join paths that do one thing, such as nine heads that carry one word.

        Each bundle is a sentence and the numbers of its paths.

        They begin in one unit of tokens, in the embedding or in heads, and end in one kind of input
        in one unit.
        """
        groups: dict[tuple[Any, ...], list[int]] = {}
        for number, place in enumerate(self.places.tolist()):
            ends = self.find_unit(place[2]), place[3] >= 0 and self.find_unit(place[5])
            key = (place[1] < 0, ends[0], place[3] < 0, ends[1], place[6])
            groups.setdefault(key, []).append(number)
        sign = 1 if self.gap >= 0 else -1  # cut, paths that speak for the answer lower the readout
        effects = self.path_effect.nan_to_num(0)
        order = sorted(
            groups.values(),
            key=lambda g: (sign * float(effects[g].sum()), -float(self.path_worth[g].sum())),
        )
        return [(self._sentence(group), group) for group in order]

    def _sentence(self, group: list[int]) -> str:
        places = [self.places[number].tolist() for number in group]
        first = places[0]
        source, writers = self._unit(first[2]), ""
        if first[1] >= 0:
            writers = self._name_most([tuple(p[:3]) for p in places], group)
            source = f"{writers} at {source}"
        several = "," in writers
        if first[3] < 0:
            return f"{source} {describe_kind(KINDS[first[6]], self.goal, several=several)}"
        names = self._name_most([tuple(p[3:6]) for p in places], group)
        readers = f"{names} at {self._unit(first[5])}"
        return f"{source} {describe_kind(KINDS[first[6]], self.goal, readers, several=several)}"

    def _name_most(self, ends: list[tuple[int, ...]], group: list[int]) -> str:
        """Name the ends of paths by layer; of many those that lose most when they are cut."""
        sizes: dict[tuple[int, ...], float] = {}
        for end, size in zip(
            ends, self.path_effect[group].abs().nan_to_num(0).tolist(), strict=True
        ):
            sizes[end] = sizes.get(end, 0.0) + size
        if len(sizes) <= _NAMED:
            return ", ".join(map(_name, sorted(sizes)))
        most = sorted(sizes, key=lambda end: -sizes[end])[: _NAMED - 1]
        return f"{', '.join(map(_name, most))} and {len(sizes) - len(most)} more"

    def describe_readout(self) -> str:
        """Say what the number is that all effects change."""
        if len(self.answers) < 2:
            return f"The score is: {self.readout}."
        one, other = self.answers
        if " or " in f"{one}, {other}":  # a mean of logits is no logarithm of odds
            return (
                f"The score is the mean logit of {one} minus that of {other}: above 0 the first "
                "have larger logits on average, below 0 the second."
            )
        # of classes that exclude one another it is the logarithm of the ratio of their chances
        pair = self.answer_chances[0].clamp(min=1e-300)
        apart = abs(float((pair[0] / pair[1]).log()) - self.value)
        excludes = apart <= _ROUNDED * max(1.0, abs(self.value))
        # bounded, as exp overflows beyond some 700
        times = math.exp(min(abs(self.value), 99.0))
        said = (
            f"{times:.3g}" if times < 1000 else f"{times:,.0f}" if times < 1e6 else "over a million"
        )
        first, second = (other, one) if self.value < 0 else (one, other)
        times_more = f"how many times more probable the model finds {one}"
        likelier = f"{first} {said} times as probable as {second}"
        if not excludes:
            times_more = (
                f"how many times larger its odds of {one} are, as either may be true or not"
            )
            likelier = f"the odds of {first} {said} times those of {second}"
        return (
            f"The score is the logit of {one} minus that of {other}: the natural logarithm of "
            f"{times_more}. {self.write(self.value)} makes {likelier}, "
            f"0 both alike, and below 0 {other} is ahead."
        )

    def describe_tokens(self) -> str:
        """Say which words matter most, and what becomes of the score by others in their place."""
        other, changed = (self.value + self.token_other).tolist(), set(self.changed)
        swapped = [
            f"to {self.write(other[i])} with {strip_word(word)} in the place of "
            f"{self.name_span(i)} alone"
            for i, word in enumerate(self.other_span_words)
            if not changed.isdisjoint(range(*self.spans[i].tolist()))
        ]
        said = (
            f"By the words of the other text the score goes from {self.write(self.value)} "
            f"{', '.join(swapped[:_OPPOSED])}."
        )
        if not bool(self.token_mean.isfinite().any()):
            return said
        order = self.token_mean.abs().nan_to_num(-1).argsort(descending=True).tolist()
        # first what speaks for or against the answer beyond doubt
        first, *more = sorted(order, key=lambda number: not self.find_direction(number))
        scores = (self.value + self.token_mean).tolist()
        sides = {-1: "for", 1: "against", 0: "open"}
        then = ", ".join(
            f"{self.name_span(i)} ({self.write(scores[i])}, {sides[self.find_direction(i)]})"
            for i in more[: _OPPOSED - 1]
        )
        lower = int((self.replacement_effects[order[0]] < 0).sum())
        is_open = (
            f"whether it speaks for {self.side} is open "
            f"({lower} of {self.n_replacements[order[0]]} words lower the score)"
        )
        speaks = {
            -1: f"and speaks for {self.side}",
            1: f"and speaks against {self.side}",
            0: f"but {is_open}",
        }[self.find_direction(first)]
        larger = ""
        if first != order[0]:
            score = self.write(scores[order[0]])
            larger = f" {self.name_span(order[0])} changes it more, to {score}, but {is_open}."
        return (
            f"{said} By other words in its place {self.name_span(first)} matters most, {speaks}: "
            f"to {self.write(scores[first])} on average{f', then {then}' if then else ''}.{larger}"
        )

    def describe_looks(self) -> str:
        """Say at which words the heads of :attr:`looked` look most, and which work against.

        And which of them look elsewhere in the other text.
        """
        keys: dict[int, list[str]] = {}
        effects, moved = self.effects(), []
        for number in self.order_looks():
            (layer, head), looks = self.looked[number].tolist(), self.looks[number, 0]
            against = " against" if effects[layer, head] > 0 else ""
            keys.setdefault(int(looks.argmax()), []).append(f"{layer}.{head}{against}")
            there = int(self.looks[number, 1].argmax())
            if there != int(looks.argmax()):
                moved.append(f"{layer}.{head} at {self._word(there, other=True)}")
        said = [
            f"{'itself' if at == self.read_at else self._word(at)} ({', '.join(heads)})"
            for at, heads in keys.items()
        ]
        elsewhere = f"; elsewhere in the other text: {', '.join(moved)}" if moved else ""
        return "; ".join(said) + elsewhere

    def describe_certainty(self) -> list[str]:
        """Say how sure the answer is: the paths, the order of words, and what was not measured."""
        said = []
        if self.answers:
            chances = zip(self.answers, map(_percent, self.answer_chances[0].tolist()))
            given = ", ".join(f"{name} {chance}" for name, chance in chances)
            said.append(f"How sure is the model? It gives {given}.")
        if len(self.places):
            n = f"{len(self.places)} path{'s' * (len(self.places) > 1)}"
            kept, lost = (
                f"{_share(share)}: {'yes' if share >= TARGET else 'not by our bar'}"
                for share in (self.kept, self.lost)
            )
            said.append(
                f"Is what was found ({n}) enough? With all else as in the other text it keeps "
                f"{kept}. Our bar is {TARGET:.0%} of the difference, kept and lost: paths were "
                "added until it was reached or none were left, so being just above it is no "
                "evidence of its own."
            )
            said.append(
                f"Is it needed? When it is cut, the share of the difference lost is {lost}."
            )
            if self.random:
                middle, best = sorted(self.random)[len(self.random) // 2], max(self.random)
                said.append(
                    f"Would any paths do? Of {len(self.random)} draws of {n} at random the "
                    f"median one keeps {_share(middle)} of the difference, the best {_share(best)}."
                )
        else:
            said.append("No paths were found, or none were looked for: how the words act is open.")
        sizes, errors = self.token_mean.abs(), self.token_error
        if int(sizes.isfinite().sum()) > 1:
            first, second = sizes.nan_to_num(-1).argsort(descending=True).tolist()[:2]
            bar = 2 * math.hypot(float(errors[first]), float(errors[second]))
            clear = self.find_direction(first) and float(sizes[first] - sizes[second]) > bar
            one, other = (
                f"{self.name_span(i)} ({self.write(self.token_mean[i])} ± "
                f"{self.write(errors[i], '')} by {self.n_replacements[i]} words)"
                for i in (first, second)
            )
            said.append(
                "Which word matters most? By other words in its place, with the standard error of "
                f"their mean, {one}, then {other}. "
                f"{'That order is clear.' if clear else 'With other words that order may turn.'}"
            )
        elif not bool(sizes.isfinite().any()):
            said.append("Words were not replaced by guesses: how much each is needed is open.")
        n_open = int(self.unit_effect.isnan().sum())
        said.append(
            f"What was not measured? {n_open} of {len(self.units)} heads and MLPs, of which "
            "gradients promise less, or MLP 0, as a part of the embedding; other texts to compare "
            "with, which may show other paths; and other sentences. "
            f"It took {self.forwards:.0f} passes."
        )
        return said

    def describe_opposition(self) -> str:
        """Name the heads and MLPs that were found to work against the answer, the largest first."""
        if not len(self.units):
            return ""
        found = self.to_frame("heads").dropna(subset="effect")
        most = found[found["effect"] > 0]
        return _name_first(
            f"{name} {self.write(effect)}"
            for name, effect in zip(most["name"], most["effect"], strict=True)
        )

    def describe_opposed_words(self) -> str:
        """Name the words of which it is clear that the score rises by others in their place."""
        found = [i for i in range(len(self.spans)) if self.find_direction(i) > 0]
        found.sort(key=lambda number: -float(self.token_mean[number]))
        return _name_first(f"{self.name_span(i)} {self.write(self.token_mean[i])}" for i in found)

    def warning(self) -> str:
        """Warn of answers that lack a blank, or of an other text in which one is unlikely."""
        if not self.answers:
            return ""
        # words in quotation marks, where tokens of the text have blanks before them
        lacks = any(token.startswith(" ") for token in self.tokens[1:])
        lacks = lacks and all(_NO_BLANK.match(name) for name in self.answers)
        if lacks and float(self.answer_chances[0].max()) < _UNLIKELY:
            chances = map(_percent, self.answer_chances[0].tolist())
            said = ", ".join(map(" ".join, zip(self.answers, chances)))
            return (
                f"neither answer is likely in the text ({said}): a word within a text often "
                "begins with a blank, as ' Mary' does"
            )
        if not float(self.answer_chances[1, 1]) < _UNLIKELY:
            return ""
        one, other = (
            quote_readable("".join(words[at] for at in self.changed).strip())
            for words in (self.tokens, self.other_tokens)
        )
        neither = float(self.answer_chances[1, 0]) < _UNLIKELY
        unlikely = "neither answer is likely" if neither else f"{self.answers[1]} is unlikely"
        return (
            f"in the other text {unlikely}: what follows compares {one} with {other}, and not "
            f"with a word that calls for {self.answers[1]}; give your own other text (instead)"
        )

    def describe_units(self) -> str:
        """Name the heads and MLPs with the largest effects, and what these heads look at."""
        if not len(self.units):
            return ""
        found = self.to_frame("heads").dropna(subset="effect")
        by_kind = found.groupby(found["head"] == MLP)
        rows = {is_mlp: list(group.itertuples()) for is_mlp, group in by_kind}
        places = {tuple(place): number for number, place in enumerate(self.looked.tolist())}
        kinds = []
        for kind, is_mlp, most in (("heads", False, _OPPOSED), ("MLPs", True, _OPPOSED - 1)):
            said = []
            # those that have at least half of the largest effect of their kind
            for row in rows.get(is_mlp, [])[:most]:
                if abs(row.effect) < abs(rows[is_mlp][0].effect) / 2:
                    continue
                number = places.get((row.layer, row.head))
                does = "" if number is None else f": {self._do(number)}"
                name = row.name if row.head in _OTHERS else f"head {row.name}"
                said.append(f"{name} ({self.write(row.effect)}{does})")
            if said:
                kinds.append(f"of {kind}, {', '.join(said)}")
        if not kinds:
            return ""
        return (
            f"The largest effects: {'; '.join(kinds)}. Each number is the change of the score when "
            "that part gives what it gives in the other text."
        )

    def _do(self, number: int) -> str:
        """Say where a head of :attr:`looked` looks in the text, and what it writes from there."""
        key, writes = self.first_look(number, 0)
        wrote = "" if writes != writes else f" and writes {self.write(writes)} from there"  # NaN
        return f"from {self.read_word} it looks at {key}{wrote}"

    def _say(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """Say in a few sentences what the model says, what decides, and how sure that is."""
        said = []
        if self.guess:
            said.append(
                f"The model says {quote_readable(self.guess)} ({_percent(self.chance)}), and in "
                f"the other text {quote_readable(self.other_guess)} "
                f"({_percent(self.other_chance)})."
            )
        if self.answers:
            here, there = self.answer_chances[:2].tolist()
            chances = (
                f"{name} has {_percent(a)} in the text and {_percent(b)} in the other one"
                for name, a, b in zip(self.answers, here, there)
            )
            said.append(f"{'; '.join(chances)}.")
        said.append(
            f"The score, {self.readout}, is {self.write(self.value)}; in the other text it is "
            f"{self.write(self.other_value)}."
        )
        if len(self.places):
            middle = sorted(self.random)[len(self.random) // 2] if self.random else 0.0
            shares = (self.kept, middle, max(self.random, default=0.0), self.lost)
            kept, chance, most, lost = map(_share, shares)
            falls = "falls below" if self.gap > 0 else "rises above"
            many = len(self.places) > 1
            does = f"decide{'' if many else 's'} between the two"
            if min(self.kept, self.lost) < TARGET:  # a few per cent decide nothing
                does = f"{'carry' if many else 'carries'} a part of what decides"
            beyond = f": the score {falls} that of the other text" if self.lost >= 1.005 else ""
            said.append(
                f"{len(self.places)} path{'s' if many else ''} {does}: "
                f"alone, {'they keep' if many else 'it keeps'} {kept} "
                f"of the difference, as many random ones {chance} (at most {most}); "
                f"cut, {'they lose' if many else 'it loses'} {lost}{beyond}."
            )
            if self.random and self.kept <= max(self.random):
                said.append("They explain no more than random paths do.")
        return " ".join(said)


def _name_first(said: Iterator[str]) -> str:
    """Name the first ones, and how many more there are."""
    names = list(said)
    more = [f"and {len(names) - _OPPOSED} more"] if len(names) > _OPPOSED else []
    return ", ".join(names[:_OPPOSED] + more)


def describe_kind(kind: str, goal: str, readers: str = "", *, several: bool = False) -> str:
    """Say what paths of one of :data:`KINDS` do, where all end, with the names of readers or none.

    With several writers the verb is a plural.
    """
    verb, rest = _WORDS[kind].format(goal=goal, readers=readers).split(maxsplit=1)
    if several:
        verb = {"is": "are"}.get(verb, verb.removesuffix("s"))
    return " ".join([verb, *rest.split()])


def _share(share: float) -> str:
    """Write a share of the difference; no -0%, and not the bar for what stays below it."""
    if TARGET - 0.005 <= share < TARGET:
        return f"{math.floor(1000 * share) / 1000:.1%}"
    return f"{0.0 if abs(share) < 0.005 else share:.0%}"


def _percent(chance: float) -> str:
    """Write a probability, with two digits where it is small."""
    if chance < 1e-4:
        return "below 0.01%"
    if chance >= 0.995:
        return f"{100 * chance:.1f}%" if chance < 0.9995 else "above 99.9%"
    return f"{chance:.0%}" if chance >= 0.0995 else f"{100 * chance:.2g}%"


def _shorten(words: str) -> str:
    """Leave out the middle of words that are too long for a name, such as a sentence."""
    half = _LONGEST // 2
    return words if len(words) <= _LONGEST else f"{words[: half - 1]} … {words[1 - half :]}"


def _name(place: Any) -> str:
    """Name a writer or a reader by layer and head."""
    layer, head, _ = place
    return "the word" if head < 0 else f"{layer}.{head}"
