"""Checking why an architecture cannot learn a target, in plain Python, from the document alone.

Nothing of the theory is used here, so that a check does not depend on how the document was found. A
document is an object of JSON with ``kind``, ``n_heads`` and ``n_tokens``, and what its kind needs.
It is of models whose heads retrieve one position each, the one of largest score (ties between
different tokens have probability zero), whatever the scores, values and feed-forward networks are.

* ``pigeonhole``: one layer of h heads. More than h ``places``, each with two ``options`` of a
  token, and for every place a ``contexts`` entry, the sequence around. Whatever the h scores are,
  they retrieve from at most h places; at one place no head looks at either option, so both
  sequences that differ there alone get the same answer. With ``positional`` false the second option
  is a token that the sequence has elsewhere, and the other places hold their first option: no score
  can then tell more. With ``positional`` true every choice of options at the other places must show
  the difference, since a score may know where a token stands.
* ``growth``: CLS holds at most m tokens after all layers, and the value has derivatives other than
  0 by each of more than m ``active`` tokens at ``input`` and near it. Near almost every input the
  choices of heads stay, so that the answer is a function of m tokens there. The derivatives are
  along ``moved`` tokens, no farther than a quarter of the distance to any other token: differences
  at this step, a half, a quarter and an 8th of it agree with one another, forwards and backwards,
  and with what the move changes beside all other moves. From values alone this is evidence down to
  an 8th of the step. `estimate` draws the input, so that ties have probability zero, and finds the
  derivatives of the best tuples themselves, which is the proof.
* ``ties``: disjoint ``tuples`` of a tokens tie at ``input``, above all others, and hold more tokens
  than CLS can. The last choice of CLS looks at what it holds and at two tokens' states, which are
  fewer than 2 a tokens, and earlier choices look at less; so a choice sees all of one tuple at
  most, and where the tuples tie no choice depends on which is ahead (for scores that are analytic,
  at least in pieces). Near such an input choices stay, and yet each tuple is the best somewhere,
  with derivatives by all its tokens. Shown are, for every tuple, that all others can be lowered
  (their first tokens moved back) while the value stays, and that it is then a smooth function of
  this tuple's tokens, by differences along ``moved`` as for ``growth``, and of no other one's.
* ``order``: ``second`` has the tokens of ``first`` in another order; a model that sees everything,
  without a positional encoding, answers both alike.
* ``reach``: ``first`` and ``second`` differ only at positions beyond what ``windows`` let through.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Values = Callable[[list[Any]], list[Any]]

_LEAST_GAP = 1e-5  # relative to the values: far above the rounding of 32-bit numbers
_MOST_CASES = 20_000
_HALVINGS = 4
_SLACK = 0.2  # of a difference, by which others may miss it


def verify_exclusion(document: Any, values: Values) -> list[str]:
    """Check a document that claims to prove an exclusion.

    Args:
        document: as `estimate` makes it.
        values: the target, from a list of sequences to a list of values (numbers or lists of them).

    Returns:
        What is wrong with the document, in words; an empty list if it proves the exclusion.
    """
    kinds = {
        "pigeonhole": _pigeonhole, "growth": _growth, "ties": _ties, "order": _order,
        "reach": _reach,
    }  # fmt: skip
    if document.get("kind") not in kinds:
        return [f"kind {document.get('kind')!r}: expected one of {', '.join(kinds)}"]
    # each kind has conditions of its own, and pairs of sequences whose values must differ
    wrong, pairs = kinds[document["kind"]](document)
    for first, second in pairs:
        if len(first) != document["n_tokens"] or len(second) != document["n_tokens"]:
            wrong.append(f"sequences of {len(first)} and {len(second)} tokens: expected T")
    if wrong:
        return wrong
    answers = values([sequence for pair in pairs for sequence in pair])
    for number, (one, other) in enumerate(zip(answers[::2], answers[1::2])):
        if not _differ(one, other):
            wrong.append(f"pair {number} has values {one} and {other}: expected two that differ")
    # these two kinds rest on how the value moves, too
    if wrong or document["kind"] not in ("growth", "ties"):
        return wrong
    if document["kind"] == "growth":
        return _check_smoothness(document["input"], document["active"], document["moved"], values)
    return _check_ties(document, values)


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return any(_differ(a, b) for a, b in zip(one, other))
    return bool(abs(one - other) > _LEAST_GAP * (1e-2 + abs(one) + abs(other)))


# faults of a document, in words, and the pairs of sequences whose values must differ
Findings = tuple[list[str], list[tuple[list[Any], list[Any]]]]


def _pigeonhole(document: Any) -> Findings:
    """Count heads and places; make a pair for every choice of options at the other places."""
    wrong, heads = [], document["n_heads"]
    places, options = document["places"], document["options"]
    if len(heads) != 1:
        wrong.append(f"{len(heads)} layers: expected one")
    if len(set(places)) != len(places) or len(places) <= heads[0]:
        wrong.append(f"{len(set(places))} places for {heads[0]} heads: expected more")
    if not len(places) == len(options) == len(document["contexts"]):
        wrong.append("expected two options and a context for every place")
    if document["positional"] and len(places) * 2 ** len(places) > _MOST_CASES:
        wrong.append(f"{len(places)} places: too many to try all options")
    if wrong:
        return wrong, []
    pairs = []
    for left_out, context in enumerate(document["contexts"]):
        for chosen in _choices(len(places), left_out, document["positional"]):
            both = []
            # two sequences that differ at one place alone, at which no head looks
            for own in (0, 1):
                sequence = list(context)
                for place, (index, which) in zip(places, enumerate(chosen)):
                    sequence[place] = options[index][own if index == left_out else which]
                both.append(sequence)
            if not document["positional"] and both[1][places[left_out]] not in both[0]:
                wrong.append(f"the second option at place {left_out} is no token of its sequence")
            pairs.append((both[0], both[1]))
    return wrong, pairs


def _choices(n: int, left_out: int, positional: bool) -> Iterator[Sequence[int]]:
    """Yield the options at n places, of which the one that no head looks at has its first."""
    if not positional:
        return iter([(0,) * n])
    return itertools.product(*[(0,) if i == left_out else (0, 1) for i in range(n)])


def _most_tokens(n_heads: Sequence[int]) -> tuple[int, int]:
    """Count the tokens that a token and CLS can hold at most after layers of so many heads."""
    token, cls = 1, 0
    for heads in n_heads:
        # each head brings all that one other token holds
        token, cls = (1 + heads) * token, cls + heads * token
    return token, cls


def _growth(document: Any) -> Findings:
    """Count active tokens and what CLS holds; make a pair for every token, moved or not."""
    wrong, (_, cls) = [], _most_tokens(document["n_heads"])
    active, base = document["active"], document["input"]
    if len(set(active)) <= cls:
        wrong.append(f"{len(set(active))} active tokens, and CLS can hold {cls}: expected more")
    if len(document["moved"]) != len(active):
        wrong.append("expected a moved token for every active one")
    wrong += _check_steps(base, active, document["moved"])
    moves = zip(active, document["moved"])
    return wrong, [(list(base), _move_tokens(base, [(place, to)], 1)) for place, to in moves]


def _ties(document: Any) -> Findings:
    """Count tuples and what a choice and CLS hold; lower all but one, and move its tokens."""
    tuples, base, wrong = document["tuples"], document["input"], list[str]()
    arity, places = len(tuples[0]), [place for row in tuples for place in row]
    (token, before), (_, held) = (
        _most_tokens(document["n_heads"][:-1]),
        _most_tokens(document["n_heads"]),
    )
    # so few that no choice of a head sees all of two tuples
    if before + 2 * token >= 2 * arity:
        wrong.append(f"a choice sees {before + 2 * token} tokens: expected less than {2 * arity}")
    if len(places) <= held:
        wrong.append(f"{len(tuples)} tuples hold {len(places)} tokens, CLS {held}: expected more")
    if len(set(places)) != len(tuples) * arity or any(len(row) != arity for row in tuples):
        wrong.append(f"tuples {tuples}: expected {arity} tokens each, and none in two of them")
    if [len(row) for row in document["moved"]] != [arity] * len(tuples):
        wrong.append("expected a moved token for every token of a tuple")
    if wrong:
        return wrong, []
    wrong, pairs = [], []
    for row, moved in zip(tuples, document["moved"]):
        lowered = _lower_others(document, row)
        wrong += _check_steps(base, row, moved)
        pairs += [(lowered, _move_tokens(lowered, [(p, to)], 1)) for p, to in zip(row, moved)]
    return wrong, pairs


def _lower_others(document: Any, kept: Sequence[int]) -> list[Any]:
    """Return the input with the first token of every tuple but one moved back."""
    rows = zip(document["tuples"], document["moved"])
    return _move_tokens(document["input"], [(row[0], to[0]) for row, to in rows if row != kept], -1)


def _check_ties(document: Any, values: Values) -> list[str]:
    """List tuples that do not tie, or of which alone the value is no smooth function."""
    wrong = []
    for row, moved in zip(document["tuples"], document["moved"]):
        # all others lowered, this tuple alone is the best, and the value is a smooth function of it
        lowered = _lower_others(document, row)
        wrong += _check_smoothness(lowered, row, moved, values)
        rows = zip(document["tuples"], document["moved"])
        every = [(place, to) for each, ends in rows for place, to in zip(each, ends)]
        found = [_numbers(v) for v in values(
            [list(document["input"]), lowered, *[_move_tokens(lowered, [e], 0.125) for e in every]]
        )]  # fmt: skip
        start, base, *after = found
        moves = [max(abs(a - b) for a, b in zip(value, base)) for value in after]
        own = [move for move, (place, _) in zip(moves, every) if place in row]
        others = [move for move, (place, _) in zip(moves, every) if place not in row]
        # lowering the others changes nothing, as this one ties with them
        if max(abs(a - b) for a, b in zip(start, base)) > _SLACK * min(own):
            wrong.append(f"the value changes when all tuples but {row} are lowered: no tie")
        if max(others, default=0) > _SLACK * min(own):
            wrong.append(f"the value moves with other tuples' tokens when {row} is the best")
    return wrong


def _check_steps(base: Sequence[Any], places: Sequence[int], moved: Sequence[Any]) -> list[str]:
    """List the tokens that move by more than a quarter of the distance to another one."""

    def square(one: Sequence[float], other: Sequence[float]) -> float:
        return sum((a - b) ** 2 for a, b in zip(one, other))

    return [
        f"token {place} moves by more than a quarter of the way to another one"
        for place, to in zip(places, moved)
        for others in [[*base[:place], *base[place + 1 :]]]
        if any(16 * square(to, base[place]) > square(token, base[place]) for token in others)
    ]


def _move_tokens(base: Sequence[Any], moves: Sequence[tuple[int, Any]], share: float) -> list[Any]:
    """Return a sequence in which tokens have gone a share of the way to others."""
    sequence = list(base)
    for place, to in moves:
        sequence[place] = [old + share * (new - old) for old, new in zip(base[place], to)]
    return sequence


def _numbers(value: Any) -> list[float]:
    return value if isinstance(value, list) else [value]


def _check_smoothness(
    base: Sequence[Any], places: Sequence[int], moved: Sequence[Any], values: Values
) -> list[str]:
    """List where differences are no derivatives, or the value is not smooth around an input."""
    shares = [sign / 2**k for k in range(_HALVINGS) for sign in (1, -1)]
    moves = list(zip(places, moved))
    rows = [_move_tokens(base, [move], share) for move in moves for share in shares]
    # all tokens moved at once, and all but each of them
    together = [moves, *[[other for other in moves if other != move] for move in moves]]
    rows += [_move_tokens(base, some, shares[-2]) for some in together]
    start, *others = map(_numbers, values([list(base), *rows]))
    changes = [[a - b for a, b in zip(value, start)] for value in others[: -len(together)]]
    end, *without = others[-len(together) :]
    wrong = []
    for number, (place, rest) in enumerate(zip(places, without)):
        own = changes[number * len(shares) : (number + 1) * len(shares)]
        # the output that moves most with this token
        column = max(range(len(start)), key=lambda c: abs(own[0][c]))
        # of a whole step, a half, and so on: forwards at even places, backwards at odd ones
        steps, backwards = ([change[column] for change in own[side::2]] for side in (0, 1))
        # half the step must make half the difference
        if any(abs(2 * b - a) > _SLACK * abs(a) for a, b in itertools.pairwise(steps)):
            wrong.append(f"differences by token {place} are no derivative: {steps}")
        if abs(steps[-1] + backwards[-1]) > _SLACK * abs(steps[-1]):
            wrong.append(f"differences by token {place} are not alike forwards and backwards")
        # a token must change the value as much beside all other moves as it does alone
        if abs(end[column] - rest[column] - steps[-1]) > _SLACK * abs(steps[-1]):
            wrong.append(f"beside the other moves token {place} does not change what it does alone")
    return wrong


def _order(document: Any) -> Findings:
    """Compare what the two sequences hold, and whether the model can tell positions apart."""
    first, second = list(document["first"]), list(document["second"])
    wrong = []
    if sorted(map(repr, first)) != sorted(map(repr, second)):
        wrong.append("the second sequence holds other tokens than the first")
    if document["positional"] or document["causal"]:
        wrong.append("the model can tell positions apart")
    return wrong, [(first, second)]


def _reach(document: Any) -> Findings:
    """Compare the two sequences so far back as the windows of all layers let the end see."""
    first, second = list(document["first"]), list(document["second"])
    wrong, windows = [], document["windows"]
    if not windows or None in windows:
        wrong.append("a layer without a window sees everything")
        return wrong, []
    # each layer carries a token on by its window, less the query itself
    seen = sum(window - 1 for window in windows)
    if len(first) > seen and first[len(first) - seen :] != second[len(second) - seen :]:
        wrong.append(f"the sequences differ among the last {seen} tokens, which can be seen")
    return wrong, [(first, second)]
