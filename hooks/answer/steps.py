"""The steps of an answer: tokens, strips of states, heads and MLPs.

The procedure and its numbers (candidates, draws, bars) were frozen on eleven texts and judged on
ten others: rankings by the gradient at the clean text and half way to the other are taken in turn,
as averaging them cancels.
"""

from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from infoflow_lens.hooks.answer.question import MLP, Question
from infoflow_lens.hooks.model.points import is_causal

POINTS = (0.0, 0.5)  # between the two texts, at which gradients rank
N_HEADS, N_MLPS = 30, 8  # candidates that are measured
N_DRAWS = 4  # replacements of each token, and as many more where ranks are open
TOLERANCE = 0.1  # of the gap, by which two strips may differ without one between them


@dataclass(frozen=True)
class TokenEffects:
    """What the readout loses when a token, or a span of them at once, is replaced.

    Attributes:
        donors: int [pos, draw], what was put there, no token twice; -1 for none.
        changes: [span, draw], what each did; NaN for none.
    """

    donors: Int[Tensor, "pos draw"]
    changes: Float[Tensor, "span draw"]


def measure_tokens(question: Question, seed: int = 0) -> TokenEffects:
    """Replace all tokens of each span by the model's own guesses at their places.

    Effects of single tokens do not add up, so those of a span are exchanged at once. Four draws of
    each, without repeats; four more for those that may be the one that matters most.
    """
    clean, spans = question.clean.tokens[0], question.spans
    draw = torch.Generator().manual_seed(seed)
    guesses = guess_tokens(question)
    # of a small vocabulary fewer; a guess without any chance comes behind all others
    n_ids = guesses.shape[1]
    tokens = clean.cpu()[:, None]
    weights = guesses.clamp(min=1e-30).scatter(1, tokens, 0.0)
    drawn = torch.multinomial(weights, min(2 * N_DRAWS, n_ids - 1), False, generator=draw)
    donors = torch.full((question.n_pos, 2 * N_DRAWS), -1)
    changes = torch.full((len(spans), 2 * N_DRAWS), torch.nan, dtype=torch.float64)

    def draw_guesses(numbers: list[int], first: int) -> None:
        these = slice(first, min(first + N_DRAWS, drawn.shape[1]))
        n = max(0, these.stop - first)
        # [span, draw, pos]
        rows = clean.repeat(len(numbers), n, 1)
        for row, number in enumerate(numbers):
            place = slice(*spans[number])
            donors[place, these] = drawn[place, these]
            rows[row, :, place] = drawn[place, these].T.to(rows)
        if n:
            changes[numbers, these] = question.measure_texts(rows.flatten(0, 1)).view(-1, n)

    draw_guesses(list(range(len(spans))), 0)
    mean, error = mean_and_error(changes)
    largest = int(mean.abs().argmax())
    # those whose mean, one error up, reaches the largest, one error down
    open_ = mean.abs() + error >= mean.abs()[largest] - error[largest]
    if int(open_.sum()) > 1:
        draw_guesses(open_.nonzero().flatten().tolist(), N_DRAWS)
    return TokenEffects(donors, changes)


def mean_and_error(
    changes: Float[Tensor, "span draw"],
) -> tuple[Float[Tensor, " span"], Float[Tensor, " span"]]:
    """Take the mean of each row, and its standard error, without NaN."""
    n = changes.isfinite().sum(dim=1)
    mean = changes.nanmean(dim=1)
    spread = (changes - mean[:, None]).square().nansum(dim=1) / (n - 1)
    return mean, (spread / n).sqrt()


def predicts_tokens(question: Question) -> bool:
    """Say whether the model gives chances of tokens at each place, as language models do."""
    return tuple(question.clean.logits.shape) == (question.n_pos, _count_ids(question))


def _count_ids(question: Question) -> int:
    return int(question.model.cfg.d_vocab)  # type: ignore[union-attr, arg-type]


def guess_tokens(question: Question) -> Float[Tensor, "pos token"]:
    """Find the model's own distribution over what may stand at each place, but for what does.

    Of a decoder it is the prediction at the place before, at the first place the mean of all; of a
    masked language model that of the place itself. Without predictions all tokens are alike.
    """
    logits, tokens = question.clean.logits, question.clean.tokens[0].to("cpu")
    if predicts_tokens(question):
        chances = logits.float().cpu().softmax(-1)
        if is_causal(question.model):
            chances = torch.cat([chances.mean(dim=0, keepdim=True), chances[:-1]])
    else:
        chances = torch.ones(len(tokens), _count_ids(question))
    chances[torch.arange(len(tokens)), tokens] = 0
    return chances


def measure_states(question: Question, tolerance: float) -> dict[int, Float[Tensor, " span"]]:
    """Exchange the states of all tokens of a span at once.

    That is done at the layers where it comes to mean something else.

    The ends first, what enters the first layer and what leaves the last; then the layer between two
    strips that differ by more than the tolerance, in the readout's unit. States before the first
    change are the same.

    Returns:
        By layer, the change of the readout; the states are those that enter it, and the last are
        those that leave the last layer.
    """
    first = question.changed[0] if is_causal(question.model) else 0
    places = [slice(*span) for span in question.spans]

    def strip(layer: int) -> Float[Tensor, " span"]:
        point = question.state(layer)
        clean, other = (run.shown[point][0] for run in (question.clean, question.other))
        # exchanging states that are the same in both texts would change nothing
        differ = [
            number
            for number, at in enumerate(places)
            if at.stop > first and not clean[at].equal(other[at])
        ]
        row = torch.zeros(len(places), dtype=torch.float64)
        exchanges = [[question.exchange(point, places[number])] for number in differ]
        row[differ] = question.measure(exchanges)
        return row

    found = {0: strip(0), question.n_layers: strip(question.n_layers)}
    open_ = [(0, question.n_layers)]
    while open_:
        low, high = open_.pop()
        apart = float((found[low] - found[high]).abs().max())
        if high - low > 1 and apart > tolerance:
            middle = (low + high) // 2
            found[middle] = strip(middle)
            open_ += [(low, middle), (middle, high)]
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class UnitEffects:
    """What heads and MLPs do, all of their positions together.

    Attributes:
        units: (layer, head) of each; head -1 is the MLP, -2 what runs in the place of attention.
        estimate: by the mean of the gradients.
        effect: measured: the change of the readout with what the unit writes in the other text; NaN
            where it was not measured.
        by_place: by layer, [pos, head], the estimates of heads at each position.
    """

    units: list[tuple[int, int]]
    estimate: Float[Tensor, " unit"]
    effect: Float[Tensor, " unit"]
    by_place: list[Float[Tensor, "pos head"]]


def measure_units(question: Question, n_heads: int = N_HEADS) -> UnitEffects:
    """Rank heads and MLPs by gradients at two points, taken in turn, and measure the first ones.

    MLP 0 is left out: it is the second half of the embedding, and worth the whole gap in any text.
    """
    units: list[tuple[int, int]] = []
    by_point: list[Tensor] = []
    places: list[list[Tensor]] = []
    for at in POINTS:
        gradients = question.differentiate(at)
        units, estimates, place = [], [], []
        for layer in range(question.n_layers):
            of_heads = _products(question, gradients, question.z(layer), question.n_heads[layer])
            place.append(of_heads)
            units += [(layer, head) for head in question.list_heads(layer)]
            estimates.append(of_heads.sum(dim=0))
            if question.has_mlp(layer):
                units.append((layer, MLP))
                estimates.append(_products(question, gradients, question.mlp(layer), 1).sum(dim=0))
        by_point.append(torch.cat(estimates))
        places.append(place)
    estimate = torch.stack(by_point).mean(dim=0)
    chosen = []
    for is_mlp, most in ((False, n_heads), (True, N_MLPS)):
        kind = [
            i
            for i, (layer, head) in enumerate(units)
            if (head == MLP) == is_mlp and (layer or not is_mlp)
        ]
        orders = [e.abs().argsort(descending=True, stable=True).tolist() for e in by_point]
        rankings = [[i for i in order if i in kind] for order in orders]
        chosen += list(dict.fromkeys(chain.from_iterable(zip(*rankings, strict=True))))[:most]
    effect = torch.full_like(estimate, torch.nan)
    rows = []
    for i in chosen:
        layer, head = units[i]
        point = question.mlp(layer) if head == MLP else question.z(layer)
        place_of: Any = slice(None) if head < 0 else question.find_head(layer, head)
        rows.append([question.exchange(point, place_of)])
    effect[chosen] = question.measure(rows)
    by_place = [sum(each) / len(POINTS) for each in zip(*places, strict=True)]
    return UnitEffects(units, estimate, effect, by_place)


def _products(
    question: Question, gradients: dict[str, Tensor], point: str, n: int
) -> Float[Tensor, "pos part"]:
    """Return the difference of the two texts times gradient, summed over the width of each part."""
    difference = question.other.shown[point] - question.clean.shown[point]
    found = (difference * gradients[point])[0].double().cpu()
    return found.reshape(len(found), n, -1).sum(dim=-1)
