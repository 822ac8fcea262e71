"""A picture of an answer: states by layer and word, with the paths that decide drawn on them."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

from markupsafe import Markup, escape

from infoflow_lens.foundation.display import strip_word
from infoflow_lens.hooks.answer.result import KINDS, AnswerNumbers, describe_kind

_LEFT, _TOP, _ROW, _NARROW, _LETTER = 74, 26, 24, 30, 7.2
_FOOT = 64  # for the numbers beneath the words
_WIDEST = 6.0  # of a line
_SCREEN, _THIN = 1230, 7  # the picture's width from which words that matter little are thin
_LITTLE = 0.05  # share of the difference
_DRAWN = 12  # lines, those with the largest effects
_APART = 17  # between the middles of two numbers
_MEANINGS = {
    "query": "sets what heads at the word where the line ends look for (query)",
    "key": "makes heads look at the word where the line ends (key)",
    "value": "is what heads take from the word where the line ends when they look at it (value)",
    "answer": "goes to the score, without another head",
}
_PLACES = (0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8, 0.1, 0.9)  # of a number, along its line
_BESIDE = (0, 20, -20, 40, -40)  # the line, where those are taken


def draw_strips(answer: AnswerNumbers) -> Markup:
    """Draw the strips that were measured, the bundles of paths on them, and numbers of units.

    A line runs from where its writer stands, in layers and words, to its reader; its number is that
    of its row among the bundles, its width the effect when it is cut. Of a long text the words that
    carry little and on which no line ends are thin columns. A column is a unit of tokens.
    """
    strips = answer.shares.tolist()
    layers = answer.strip_layers
    lines = answer.bundles() if strips else []
    sizes = [_size(answer, group) for _, group in lines]
    drawn = choose_lines(answer) if strips else []
    asides = _asides(answer, [lines[number][1] for number in drawn])
    beside = 20 + max(asides, default=0.0)
    width = _widths(answer, _SCREEN - _LEFT - beside)
    left = [_LEFT + sum(width[:i]) for i in range(len(width) + 1)]
    middle = [left[i] + width[i] / 2 for i in range(len(width))]
    at = [middle[answer.find_unit(position)] for position in range(len(answer.tokens))]
    changed = {answer.find_unit(position) for position in answer.changed}
    foot = _TOP + _ROW * len(layers)

    def height(layer: float) -> float:
        """Find where what enters a layer stands, between the rows that were measured."""
        for row, (above, below) in enumerate(pairwise(layers)):
            if layer <= below:
                return _TOP + _ROW * (row + 0.5 + (layer - above) / max(1, below - above))
        return foot - _ROW / 2

    # words on top; thin columns of small words have none
    parts, names = [], []
    for unit, word in enumerate(answer.unit_names):
        if width[unit] == _THIN:
            continue
        bold = ' font-weight="700"' if unit in changed else ""
        parts.append(
            f'<text class="tick"{bold} x="{middle[unit]:.1f}" y="16" text-anchor="middle">'
            f"{escape(strip_word(word))}</text>"
        )
    # a row for each layer, a cell for each word
    for row, (layer, shares) in enumerate(zip(layers, strips, strict=True)):
        name = "the end" if row == len(layers) - 1 else f"layer {layer}"
        y = _TOP + _ROW * row
        names.append(
            f'<text class="tick" x="{_LEFT - 8}" y="{y + 16}" text-anchor="end">{name}</text>'
        )
        for unit, share in enumerate(shares):
            words, place = answer.span_words[unit], int(answer.spans[unit, 0])
            said = f"{words} ({place}), {name}: {share:.0%} of the difference"
            parts.append(
                f'<rect class="cell" x="{left[unit] + 1:.1f}" y="{y + 1}" '
                f'width="{max(width[unit] - 2, 6):.1f}" height="{_ROW - 2}" '
                f'fill-opacity="{min(1.0, max(0.0, share)):.3f}">'
                f"<title>{escape(said)}</title></rect>"
            )
    # lines lie over the cells, their width the size of their effect
    marks: list[str] = []  # lie over all lines
    taken: list[tuple[float, float]] = []
    for number, aside in zip(drawn, asides, strict=True):
        width_of_line = 1 + (_WIDEST - 1) * sizes[number] / max(max(sizes), 1e-12)
        line, mark = _line(
            answer, number, *lines[number], width_of_line, aside, at, height, foot,
            (left[-1] + beside, taken),
        )  # fmt: skip
        parts.append(line)
        marks.append(mark)
    parts += marks
    # below: by other words in the place of each, and by that of the other text
    for below, column, name in (
        (16, answer.token_mean, "others"),
        (34, answer.token_other, "decides"),
    ):
        if not all(math.isnan(v) for v in column.tolist()):
            names.append(
                f'<text class="tick" x="{_LEFT - 8}" y="{foot + below}" text-anchor="end">'
                f"{name}</text>"
            )
            parts += [
                f'<text class="tick" x="{middle[unit]:.1f}" '
                f'y="{foot + below}" text-anchor="middle">{value:+.{answer.decimals - 1}f}</text>'
                for unit, value in enumerate(column.tolist())
                if not math.isnan(value) and (value or name == "others") and width[unit] > _THIN
            ]
    right = left[-1] + beside
    size = f'width="{right - _LEFT:.0f}" height="{foot + _FOOT}"'
    box = f'viewBox="{_LEFT} 0 {right - _LEFT:.0f} {foot + _FOOT}"'
    label = "Share of the difference by layer and word, and the paths that decide"
    picture = f'<svg {size} {box} role="img" aria-label="{label}">{"".join(parts)}</svg>'
    # names of rows stay where the picture scrolls
    size = f'width="{_LEFT}" height="{foot + _FOOT}"'
    picture = f'<svg class="names" {size}>{"".join(names)}</svg>{picture}'
    kinds = sorted({answer.places[lines[number][1][0]].tolist()[6] for number in drawn})
    # a legend of the inputs by which paths enter heads
    keys = "".join(
        f'<span class="item"><svg class="swatch" width="14" height="4"><g class="s{kind}">'
        f'<circle cx="7" cy="2" r="7"/></g></svg>'
        f"{describe_kind(KINDS[kind], answer.goal)}: {_MEANINGS[KINDS[kind]]}</span>"
        for kind in kinds
    )
    keys = f'<p class="keys">{keys}</p>' if keys else ""
    frame = f'class="scroll strips" tabindex="0" role="region" aria-label="{label}"'
    return Markup(f"<div {frame}><div>{picture}</div></div>{keys}")  # words are escaped above


def choose_lines(answer: AnswerNumbers) -> list[int]:
    """Choose the lines that are drawn, those with the largest effects, in their order."""
    lines = answer.bundles()
    order = sorted(range(len(lines)), key=lambda number: -_size(answer, lines[number][1]))
    return sorted(order[:_DRAWN])


def _size(answer: AnswerNumbers, group: Sequence[int]) -> float:
    return abs(float(answer.path_effect[group].sum()))


def _widths(answer: AnswerNumbers, room: float) -> list[float]:
    """Make columns as wide as words; in a picture that is too wide, those that say little thin."""
    width = [max(_NARROW, _LETTER * len(word) + 10) for word in answer.unit_names]
    if sum(width) <= room:
        return width
    matter = {*answer.changed, answer.read_at}
    matter |= {place for row in answer.places.tolist() for place in (row[2], row[5]) if place >= 0}
    matter = {answer.find_unit(place) for place in matter}
    matter |= {*(answer.shares.abs().amax(dim=0) >= _LITTLE).nonzero().flatten().tolist()}
    return [size if place in matter else _THIN for place, size in enumerate(width)]


def _asides(answer: AnswerNumbers, groups: Sequence[Sequence[int]]) -> list[float]:
    """Find how far each line goes aside: those that stay on one unit, by their number there."""
    seen: Counter[int] = Counter()
    found = []
    for group in groups:
        _, _, writes, reader, _, reads, _ = answer.places[group[0]].tolist()
        word = answer.find_unit(writes)
        stays = reader < 0 or word == answer.find_unit(reads)
        found.append(30.0 + 14 * min(seen[word], 12) if stays else 0.0)
        seen[word] += stays
    return found


def _line(
    answer: AnswerNumbers,
    number: int,
    sentence: str,
    group: Sequence[int],
    width: float,
    bend: float,
    middle: Sequence[float],
    height: Callable[[float], float],
    foot: float,
    room: tuple[float, list[tuple[float, float]]],
) -> tuple[str, str]:
    """Draw a bundle from the mean place of its writers to that of its readers, and its number."""
    places = [answer.places[path].tolist() for path in group]
    writer = sum(max(0, place[0] + 1) for place in places) / len(places)
    x, y = middle[places[0][2]], height(writer)
    if places[0][3] < 0:
        x2, y2 = middle[places[0][2]], foot
    else:
        x2 = middle[places[0][5]]
        y2 = height(sum(place[3] for place in places) / len(places))
    kind = places[0][6]
    effect = float(answer.path_effect[group].sum())
    title = f"{number + 1}. {sentence}: cut, {answer.write(effect)}"
    curve = f"M{x:.1f} {y:.1f} C{x + bend:.1f} {y:.1f} {x2 + bend:.1f} {y2:.1f} {x2:.1f} {y2:.1f}"
    right, taken = room
    (near, at) = _place_number((x, y), (x2, y2), bend, (middle[0] - 12, right - 10, foot), taken)
    taken.append(at)
    opening, said = f'<a href="#line-{number + 1}"><g class="s{kind}">', escape(title)
    line = (
        f'{opening}<path d="{curve}" fill="none" stroke-width="{width:.1f}" '
        f'stroke-opacity=".75"><title>{said}</title></path></g></a>'
    )
    leader = f'<path d="M{near[0]:.1f} {near[1]:.1f}L{at[0]:.1f} {at[1]:.1f}" stroke-width="1"/>'
    mark = (
        f"{opening}{leader if near != at else ''}"
        f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="8"><title>{said}</title></circle>'
        f'<text class="number" x="{at[0]:.1f}" y="{at[1] + 4:.1f}" text-anchor="middle">'
        f"{number + 1}</text></g></a>"
    )
    return line, mark


def _place_number(
    start: tuple[float, float],
    end: tuple[float, float],
    bend: float,
    room: tuple[float, float, float],
    taken: Sequence[tuple[float, float]],
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Find where on a line, or else beside it, its number hides no other.

    Returns:
        The point of the line, and the middle of the number.
    """
    across, down = end[0] - start[0], end[1] - start[1]
    length = math.hypot(across, down)
    aside = (down / length, -across / length) if length else (1.0, 0.0)
    best, most = (start, start), -math.inf
    for beside in _BESIDE:
        for t in _PLACES:
            # a cubic whose inner points lie beside its ends
            ends = (1 - t) ** 2 * (1 + 2 * t), t**2 * (3 - 2 * t)
            near = (
                ends[0] * start[0] + ends[1] * end[0] + 3 * t * (1 - t) * bend,
                ends[0] * start[1] + ends[1] * end[1],
            )
            at = near[0] + beside * aside[0], near[1] + beside * aside[1]
            free = min((math.dist(at, other) for other in taken), default=math.inf)
            if not (room[0] <= at[0] <= room[1] and _TOP + 8 <= at[1] <= room[2] - 8):
                continue
            if free >= _APART:
                return near, at
            if free > most:
                best, most = (near, at), free
    return best
