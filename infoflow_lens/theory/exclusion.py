"""Why an architecture cannot learn a target: witnesses, searched for on sampled inputs.

A witness is a document that :func:`infoflow_lens.foundation.exclusions.verify_exclusion` checks
with the target alone; it says there what each kind proves. Nothing is called proved without one.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from infoflow_lens.foundation.exclusions import verify_exclusion
from infoflow_lens.theory.comparison import (
    Component,
    all_different,
    growth_sizes,
    tuple_indices,
)
from infoflow_lens.theory.schedule import Samples, resize
from infoflow_lens.theory.shapes import ModelShape

Document = dict[str, Any]

_FORMAT = "infoflow-lens exclusion 1"
_MOST_PLACES = 9  # of a model with positions, for which all options are tried
_MOST_TRIES = 12
_MOST_WAYS = 32
_MOST_SUITED = 16  # inputs whose tokens are put into one another
_INPUTS = 120
_LONGEST = 4096
_MOST_SCORES = 3 * 10**7
_STEP = 1e-2
_MOST_COPIED = 16
_CHECKED = 50  # sequences, about, whose values the check of a witness asks for
_MOST_CHECKED = 2 * 10**8
_MOST_SURE = 10**7  # of those that need no check
_MOST_TIED = 20_000  # tuples of the tokens of tied ones
_TIED_TRIES = 3
_TIED_STEPS = 150
_TIED_RATE = 0.1  # of a token's norm
_TILT = 0.05
_POOL = 2000
_FILLERS = 64


def excluding(
    task: Any, shape: ModelShape, seed: int, fixed: bool = False, thorough: bool = True
) -> Document | None:
    """Find a checked witness that the architecture cannot learn the target; None if none was found.

    Heads are those of max-position retrieval, each of which retrieves one position.

    Args:
        task: the target, at the T that is asked.
        shape: the architecture.
        seed: of the inputs that are tried.
        fixed: whether the target tells positions apart.
        thorough: whether tuples that tie are sought, which takes most of the time.
    """
    if task.n_tokens > _LONGEST:
        return None
    own = Samples(task, _INPUTS, seed)
    # iterators, cheap ones first: a kind is sought only where those before it gave no witness
    candidates = [_out_of_reach(shape, own)]
    if fixed:
        candidates.append(_orders(shape, own))
    elif not any(shape.windows):
        # what would take too long at T is sought among fewer tokens, and made longer
        shorter = (resize(task, n) for n in (64, 16) if 4 * n <= task.n_tokens)
        samples = [Samples(case, _INPUTS, seed) for case in (task, *shorter) if case is not None]
        quick = [each for each in samples if _INPUTS * each.n_scores <= _MOST_SCORES]
        for each in quick if thorough else quick[:1]:
            if shape.n_layers == 1:
                candidates.append(_pigeonholes(shape, each))
            candidates.append(_growths(shape, each))
            if thorough:
                candidates.append(_ties(shape, each))
    for document in itertools.chain(*candidates):
        if is_witness(document, resize(task, document["n_tokens"])):
            same = document["n_tokens"] == task.n_tokens
            return document if same else carry_over([document], task, shape)
    return None


def carry_over(documents: Sequence[Document], task: Any, shape: ModelShape) -> Document | None:
    """Find a witness of more heads or fewer tokens that serves here; None if none does.

    Copies of a token make it longer. Where a target is a function of best tuples of any positions,
    they change no value, and a witness needs no other check.
    """
    components = getattr(task, "components", ())
    sure = hasattr(task, "outer_function") and not any(
        c.rank > 1 or c.distinct or c.tuples or c.positions for c in components
    )
    most = _MOST_SURE if sure else _MOST_CHECKED
    dear = _CHECKED * Samples(task, 1, 0).n_scores > most
    if task.n_tokens > _LONGEST or (dear and not sure):
        return None
    for document in documents:
        # what excludes more heads excludes fewer, and a shorter witness can be made longer
        fewer = all(a >= b for a, b in zip(document["n_heads"], shape.n_heads, strict=True))
        if fewer and document["n_tokens"] <= task.n_tokens:
            longer = _longer(document, task.n_tokens, shape)
            served = longer if dear else (d for d in longer if is_witness(d, task))
            if (found := next(served, None)) is not None:
                return found
    return None


def _longer(document: Document, n_tokens: int, shape: ModelShape) -> Iterator[Document]:
    """Lengthen a witness's sequences by copies of one token that it does not move."""
    n, sequences = document["n_tokens"], ("input", "contexts")
    used = {*document.get("places", ()), *document.get("active", ())}
    used |= {place for row in document.get("tuples", ()) for place in row}
    for free in [place for place in range(n) if place not in used][:_MOST_COPIED]:

        def grown(part: Any) -> Any:
            if isinstance(part[0][0], list):
                return [grown(each) for each in part]
            return [*part, *[part[free]] * (n_tokens - n)]  # noqa: B023

        other = {name: grown(document[name]) for name in sequences if name in document}
        # fewer heads hold less, and the witness must state what these can hold
        if "held" in document:
            other["held"] = growth_sizes(shape.n_heads, 2**62)[-1][1]
        yield document | other | {"n_tokens": n_tokens, "n_heads": list(shape.n_heads)}


def is_witness(document: Document, task: Any) -> bool:
    """Say whether the document holds, by the verifier outside of theory."""
    return not verify_exclusion(document, lambda rows: values_of(task, rows))


def values_of(task: Any, sequences: list[Any]) -> list[Any]:
    """Return the target's values of sequences, both as lists.

    Raises:
        InfoFlowError: if they are no sequences of the target.
    """
    whole = bool(sequences) and isinstance(sequences[0][0], int)
    x = torch.tensor(sequences, dtype=torch.int64 if whole else torch.float64)
    try:
        values: list[Any] = task.target(x).tolist()
    except RuntimeError:  # a score with numbers of 32 bits of its own
        values = task.target(x.float()).tolist()
    return values


def describe(document: Document) -> str:
    """Say in a sentence what a witness shows."""
    kind = document["kind"]
    if kind == "pigeonhole":
        return (
            f"whatever their scores, {_heads(document['n_heads'][0])} out one of "
            f"{len(document['places'])} places; the witness has a pair of inputs for each of them, "
            "with different values and the same answer"
        )
    if kind == "growth":
        held = document["held"]
        return (
            f"CLS can hold {held} {'token' if held == 1 else 'tokens'} by max-position retrieval, "
            "whatever the scores, and the value of the witness's input moves with "
            f"{len(document['active'])}"
        )
    if kind == "ties":
        n, m = len(document["tuples"][0]), len(document["tuples"])
        return (
            f"no choice of a head sees two of {m} tuples of {n} tokens that tie in the witness's "
            f"input, each the best close to it, and CLS can hold {document['held']} of their "
            f"{n * m} tokens"
        )
    if kind == "order":
        return (
            "the target tells positions apart, and a model without positional encoding gives the "
            "same answer for every order of the tokens; the witness is such a pair of inputs"
        )
    return (
        f"only the last {document['reach']} of {document['n_tokens']} tokens can reach the "
        "read-out through the windows of local attention; the witness is a pair that differs "
        "before them"
    )


def _document(kind: str, shape: ModelShape, samples: Samples, **parts: Any) -> Document:
    return {
        "format": _FORMAT,
        "kind": kind,
        "target": str(getattr(samples.task, "name", type(samples.task).__name__)),
        "n_heads": list(shape.n_heads),
        "n_tokens": samples.task.n_tokens,
        "positional": shape.positional,
        "causal": shape.causal,
    } | {name: v.tolist() if isinstance(v, Tensor) else v for name, v in parts.items()}


def _out_of_reach(shape: ModelShape, samples: Samples) -> Iterator[Document]:
    """Yield pairs that differ before what windows let through."""
    n = samples.task.n_tokens
    reach = shape.reach(n)
    if reach >= n:
        return
    x = samples.sequences(20)
    for first, other in zip(x, x.roll(1, 0), strict=True):
        second = torch.cat([other[: n - reach], first[n - reach :]])
        yield _document(
            "reach", shape, samples, first=first, second=second, reach=reach,
            windows=list(shape.windows),
        )  # fmt: skip


def _orders(shape: ModelShape, samples: Samples) -> Iterator[Document]:
    """Yield pairs of the same tokens in two orders."""
    if shape.positional or shape.causal:
        return
    pair = samples.find_swap()
    if pair is not None:
        yield _document("order", shape, samples, first=pair[0], second=pair[1])


def _growths(shape: ModelShape, samples: Samples) -> Iterator[Document]:
    """Yield inputs with more active tokens than CLS can hold."""
    task = samples.task
    held = growth_sizes(shape.n_heads, 2**62)[-1][1]
    # tokens that are whole numbers cannot be moved a little, as this witness needs
    if held >= task.n_tokens or samples.sequences(1).ndim == 2:
        return
    x = samples.sequences(_INPUTS)
    active = task.active_index_set(x)
    generator = torch.Generator().manual_seed(samples.seed)
    for row in active.sum(dim=1).argsort(descending=True)[:_MOST_TRIES].tolist():
        places = active[row].nonzero()[:, 0]
        if len(places) > held:
            tokens = x[row].double()
            apart = torch.cdist(tokens[places], tokens)
            apart[torch.arange(len(places)), places] = torch.inf
            # less than a quarter of the way to any other token, which the verifier asks for
            step = min(_STEP, 0.2 * float(apart.min()))
            noise = torch.randn(tokens[places].shape, generator=generator, dtype=torch.float32)
            yield _document(
                "growth", shape, samples, input=tokens, held=held, active=places,
                moved=tokens[places] + step * torch.nn.functional.normalize(noise, dim=-1),
            )  # fmt: skip


def _ties(shape: ModelShape, samples: Samples) -> Iterator[Document]:
    """Yield inputs at which more disjoint tuples tie than CLS can hold, and no choice sees two.

    High tuples of random tokens are moved so that the least of them is as far as possible above all
    others of the same tokens; then the others are lowered to it. All other tokens are copies of the
    one that makes the worst tuples with them.
    """
    sizes = [(1, 0), *growth_sizes(shape.n_heads, 2**62)]
    # what a token and CLS hold before the last layer, and what CLS holds after it
    (token, before), (_, held) = sizes[-2:]
    for component in getattr(samples.task, "components", ()):
        # the least number of disjoint tuples that CLS cannot hold together
        a, m, plain = component.arity, held // component.arity + 1, component.tuples is None
        n = a * m
        # where a choice may see all of two tuples, ties exclude nothing
        if before + 2 * token >= 2 * a or not plain or component.positions is not None:
            continue
        if m < 2 or n > samples.task.n_tokens or n**a > _MOST_TIED:
            continue
        for seed in range(_TIED_TRIES):
            x = _draw_ties(component, samples.tokens(_POOL), m, samples.seed + seed)
            if x is None:
                continue
            rest = samples.task.n_tokens - n
            tokens = torch.cat([x, _worst(component, x, samples).expand(rest, -1)])
            gradient = _along(component, x.view(m, a, -1))
            slopes = gradient.norm(dim=-1, keepdim=True)
            # a token that the score does not see there, as of the larger of two under a minimum,
            # cannot be moved so
            if not slopes.all():
                continue
            # the distance of a token to itself must not count
            near = torch.cdist(x, tokens) + torch.eye(n, len(tokens)).mul(1e9)
            # every token moves so far that the preference grows by the same step
            step = min(_STEP, 0.2 * float(near.min())) * float(slopes.min())
            yield _document(
                "ties", shape, samples, input=tokens, held=held,
                tuples=torch.arange(n).view(m, a),
                moved=x.view(m, a, -1) + step * gradient / slopes.square(),
            )  # fmt: skip


def _along(
    component: Component, x: Float[Tensor, "tuple arity d"]
) -> Float[Tensor, "tuple arity d"]:
    """Return the growth of preferences with each token, along the sphere that it lies on."""
    with torch.enable_grad():
        x = x.detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad(component.preference(x).sum(), x)
    outwards = torch.nn.functional.normalize(x.detach(), dim=-1)
    if x.shape[-1] == 1:
        return gradient
    return gradient - (gradient * outwards).sum(dim=-1, keepdim=True) * outwards


def _draw_ties(
    component: Component, pool: Float[Tensor, "sample d"], m: int, seed: int
) -> Float[Tensor, "token d"] | None:
    """Draw tokens of m tuples that tie above all others of these tokens; None if not found."""
    a, generator = component.arity, torch.Generator().manual_seed(seed)
    drawn = pool[torch.randint(len(pool), (_POOL * m, a), generator=generator)]
    best = component.preference(drawn).topk(m).indices
    x = drawn[best].flatten(0, 1)
    norms = x.norm(dim=-1, keepdim=True)
    tuples = tuple_indices(len(x), a, False)
    own = torch.arange(len(x)).view(m, a)
    alike = (tuples.sort(dim=1).values[:, None] == own).all(dim=2)  # a tuple in another order
    others = tuples[~alike.any(dim=1)]
    if component.distinct:
        others = others[all_different(others)]

    def margin(x: Tensor) -> Tensor:
        return component.preference(x[own]).amin() - component.preference(x[others]).amax()

    # raise the tuples of `own` above all others, by gradient ascent at fixed norms
    for step in range(_TIED_STEPS):
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            (gradient,) = torch.autograd.grad(margin(x), x)
        rate = _TIED_RATE * (1 - step / _TIED_STEPS)
        x = x.detach() + rate * norms.mean() * torch.nn.functional.normalize(gradient, dim=-1)
        x *= norms / x.norm(dim=-1, keepdim=True)
    # a tilt keeps the derivatives at the tuples off 0; then all are lowered to the least
    x = x + _TILT * norms * torch.randn(x.shape, generator=generator, dtype=x.dtype)
    x *= norms / x.norm(dim=-1, keepdim=True)
    for _ in range(_TIED_STEPS):
        # Newton's steps of the first token of each tuple, until all are as low as the lowest
        values = component.preference(x[own])
        gradient = _along(component, x[own])[:, 0]
        # where the preference is flat, Newton's step would be endless; hence both bounds
        by = (values - values.amin()) / gradient.square().sum(dim=-1).clamp(min=1e-9)
        x[own[:, 0]] -= by[:, None].clamp(max=1) * gradient
        x *= norms / x.norm(dim=-1, keepdim=True)
    return x if float(margin(x)) > 0 else None


def _worst(component: Component, x: Float[Tensor, "token d"], samples: Samples) -> Tensor:
    """Find the token with which tuples of x and itself are the worst."""
    tuples = tuple_indices(len(x) + 1, component.arity, False)
    with_it = tuples[(tuples == len(x)).any(dim=1)]
    found = [
        (float(component.preference(torch.cat([x, token[None]])[with_it]).amax()), number)
        for number, token in enumerate(samples.tokens(_FILLERS))
    ]
    return samples.tokens(_FILLERS)[min(found)[1]]


def _pigeonholes(shape: ModelShape, samples: Samples) -> Iterator[Document]:
    """Yield candidates: n_heads + 1 positions, each of which changes the answer in some sequence.

    One layer has a largest score a head, so one of these positions is not retrieved. Each
    candidate is verified later; those that fail cost time alone.
    """
    task, n_places = samples.task, shape.n_heads[0] + 1
    n = task.n_tokens
    # tokens that are ids have no second option close by
    if n_places > n or samples.sequences(1).ndim == 2:
        return
    if shape.positional and n_places > _MOST_PLACES:
        return
    x = samples.sequences(_INPUTS)
    active = task.active_index_set(x)
    # places inside one input, all of which matter
    for row in active.sum(dim=1).argsort(descending=True)[:_MOST_TRIES].tolist():
        places = active[row].nonzero()[:n_places, 0].tolist()
        others = [p for p in range(n) if p not in places]
        if len(places) == n_places and (others or shape.positional):
            # what a place may hold instead: with positions, what another input has there; without,
            # a token of another place of this input
            second = x[(row + 1) % len(x), places] if shape.positional else x[row, others[:1]]
            options = torch.stack([x[row, places], second.expand(n_places, -1)], dim=1)
            yield _document(
                "pigeonhole", shape, samples, places=places, options=options,
                contexts=x[row].expand(n_places, -1, -1),
            )  # fmt: skip
    # places inside one input, each of which matters where it gets a copy of an active token
    for row in () if shape.positional else range(min(len(x), _MOST_TRIES)):
        source = int(active[row].int().argmax())
        places = [p for p in range(n) if p != source][:n_places]
        if len(places) == n_places:
            copies = x[row, source].expand(n_places, -1)
            yield _document(
                "pigeonhole", shape, samples, places=places,
                options=torch.stack([x[row, places], copies], dim=1),
                contexts=x[row].expand(n_places, -1, -1),
            )  # fmt: skip
    # an active token of each of several inputs, in a context in which it is active
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(samples.seed))
    drawn = order[: len(order) // n_places * n_places].view(-1, n_places)[:_MOST_TRIES].tolist()
    for rows in itertools.chain(drawn, _choose_inputs(x, active, task, n_places, order.tolist())):
        for around in (_active_alone, _all_but_some):
            document = _assemble(rows, x, active, shape, samples, around)
            if document is not None:
                yield document


def _choose_inputs(
    x: Float[Tensor, "sequence pos d_token"],
    active: Bool[Tensor, "sequence pos"],
    task: Any,
    n_places: int,
    order: Sequence[int],
) -> Iterator[list[int]]:
    """Yield inputs whose first active tokens change nothing in one another.

    Of a minimum of maxima they are such as decide by different maxima.
    """
    rows = [row for row in order if 0 < int(active[row].sum()) < active.shape[1]][:_MOST_SUITED]
    if len(rows) < n_places:
        return
    first = x[rows, active[rows].int().argmax(dim=1)]
    free = active[rows].int().argmin(dim=1)  # a place that does not matter
    # [input, other]: each input with the token of another one
    changed = x[rows][:, None].repeat(1, len(rows), 1, 1)
    changed[torch.arange(len(rows)), :, free] = first
    kept = active[rows][:, None] == task.active_index_set(changed.flatten(0, 1)).view(
        len(rows), len(rows), -1
    )
    suits = kept.all(dim=2)
    suits = suits & suits.T
    for start in range(len(rows)):
        group = [start]
        for other in range(len(rows)):
            if other not in group and bool(suits[group, other].all()):
                group.append(other)
        if len(group) >= n_places:
            yield [rows[number] for number in group[:n_places]]


Around = Callable[[Tensor, Tensor, int, torch.Generator], Tensor | None]


def _active_alone(
    x: Tensor, active: Tensor, room: int, generator: torch.Generator
) -> Tensor | None:
    """Keep what is active beside the first active token of an input, the last of it repeated."""
    rest = x[active][1:]
    if not 0 < len(rest) <= room:
        return None
    return torch.cat([rest, rest[-1:].expand(room - len(rest), -1)])[None]


def _all_but_some(
    x: Tensor, active: Tensor, room: int, generator: torch.Generator
) -> Tensor | None:
    """Keep as many of the other tokens as there is room for, chosen in several ways."""
    own = int(active.int().argmax())
    others = torch.cat([x[:own], x[own + 1 :]])
    ways = [torch.randperm(len(others), generator=generator)[:room] for _ in range(_MOST_WAYS)]
    return others[torch.stack(ways)] if room <= len(others) else None


def _assemble(
    rows: Sequence[int],
    x: Tensor,
    active: Tensor,
    shape: ModelShape,
    samples: Samples,
    around: Around,
) -> Document | None:
    """Put a token of each of several inputs first, then what stands around it in its own input."""
    task, n_places = samples.task, len(rows)
    room = task.n_tokens - n_places
    generator = torch.Generator().manual_seed(samples.seed)
    # [place, d_token]: the first active token of each input begins every sequence
    base = torch.stack([x[row, int(active[row].int().argmax())] for row in rows])
    contexts, options = [], []
    for place, row in enumerate(rows):
        found = around(x[row], active[row], room, generator) if room > 0 else None
        if found is None:
            return None
        first = torch.cat([base.expand(len(found), -1, -1), found], dim=1)
        second = first.clone()
        # a token that the sequence has elsewhere, too, so that no score tells more from it
        second[:, place] = first[:, -1]
        gap = (task.target(first) - task.target(second)).double().abs().amax(dim=1)
        best = int(gap.argmax())
        if not float(gap[best]) > 0:
            return None
        contexts.append(first[best])
        options.append(torch.stack([base[place], first[best, -1]]))
    return _document(
        "pigeonhole", shape, samples, places=list(range(n_places)),
        options=torch.stack(options), contexts=torch.stack(contexts),
    )  # fmt: skip


def _heads(n: int) -> str:
    return f"{n} heads of one layer leave" if n > 1 else "one head of one layer leaves"
