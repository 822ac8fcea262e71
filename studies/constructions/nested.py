"""Chains of questions: the copy-matching of Chen & Zou 2024, Sec. 7, and two shallower forms."""

from typing import Literal

import torch

from infoflow_lens.studies.constructions.attention_only import AttentionOnly, Head, Rows
from infoflow_lens.studies.constructions.registry import construction
from infoflow_lens.tasks.questions import NestedQA

NestedForm = Literal["copy_match", "copy_once", "doubling"]


@construction("Chen & Zou 2024, Sec. 7")
def nested_qa(task: NestedQA, *, form: NestedForm = "copy_match") -> AttentionOnly:
    """ReLU layers that follow every chain of questions to its end (Sec. 7) [derived].

    The paper proposes copy-matching, two layers a hop, and gives no weights. Layer 1 copies, by
    positions (Lemma 1), the first entity of each fact to the second one's position, and the query
    to the sign, into padding rows H. Matching looks from the sign at the facts whose first entity
    is the one that it holds, and reads their second.

    - "copy_match", 2h layers of one head, d' = d + n + 2E for E entities: after each match the sign
      copies what it found, in rows A, over what it held, in H, and erases A. As proposed.
    - "copy_once", h + 1 layers of one head, d' = d + n + (h + 1) E: every match writes rows of its
      own, which the next asks by, so that nothing is copied again.
    - "doubling", 1 + k layers of at most two heads, k the number of binary digits of h: facts match
      facts, too, and hold 1, 2, 4, .. hops, of which the sign takes some in every layer. As few
      layers as update rule (1) allows (:func:`doubling_hops`).

    All numbers that the sign holds are 0 and 1, and what other positions hold beside are integers
    of at most h, so float32 is exact for every size; the right logit is 1, all others are 0. No
    entity may start two facts, and chains may not be circles, as in the task.

    Args:
        task: the task.
        form: which of the three.

    Raises:
        InfoFlowError: for an unknown form.
    """
    return {"copy_match": _copy_match, "copy_once": _copy_once, "doubling": _doubling}[form](task)


def doubling_hops(hops: int) -> tuple[int, ...]:
    """Return how many hops the sign takes in each layer after the first; their sum is `hops`.

    Before layer 2 + j a fact spans 1, 2, .. or 2^j hops. As many powers of two as `hops` has binary
    digits, the j-th at most 2^j: the last is the largest that leaves a number with a digit less.
    """
    hops_of_layers: list[int] = []
    for digits in range(hops.bit_length(), 1, -1):
        half, whole = 2 ** (digits - 2), 2 ** (digits - 1)
        hops_of_layers.append(half if hops - half < whole else whole)
        hops -= hops_of_layers[-1]
    return tuple(reversed([*hops_of_layers, 1]))


def _layout(task: NestedQA, blocks: int) -> tuple[Rows, list[torch.Tensor]]:
    """Lay out columns, padded, in blocks of E rows; unit vectors of entities, then of blocks."""
    n = task.n_entities
    rows = Rows(task.d_vocab, task.n_tokens, padding=blocks * n)
    starts = [0, *(rows.rest[i * n] for i in range(blocks))]
    return rows, [rows.units(range(start, start + n)) for start in starts]


def _copy(task: NestedQA, rows: Rows, entity: torch.Tensor, held: torch.Tensor) -> Head:
    """Copy first entities to the second ones' positions, and the query to the sign."""
    alpha = torch.zeros(task.n_tokens, task.n_tokens)
    for first in range(0, 3 * task.n_facts, 3):
        alpha[first, first + 2] = 1
    alpha[task.n_tokens - 2, task.n_tokens - 1] = 1
    key, query = rows.score_positions(alpha)
    return Head(key, query, entity, held)


def _match(
    rows: Rows, held: torch.Tensor, asked: torch.Tensor, read: torch.Tensor, write: torch.Tensor
) -> Head:
    """Read where rows `held` of a fact equal rows `asked` of the query; the sign is no key."""
    sign, anywhere = rows.units([rows.last_position]), rows.units(rows.positions).sum(1, True)
    return Head(torch.cat([held, sign], 1), torch.cat([asked, -anywhere], 1), read, write)


def _copy_match(task: NestedQA) -> AttentionOnly:
    rows, (entity, held, found) = _layout(task, 2)
    sign = rows.units([rows.last_position])
    match = _match(rows, held, held, entity, found)
    # from the sign to itself: H becomes A, and A nothing
    again = Head(
        sign, sign, torch.cat([found, held, found], 1), torch.cat([held, -held, -found], 1)
    )
    first = [_copy(task, rows, entity, held), match]
    layers = first + [again, match] * (task.hops - 1)
    return AttentionOnly(rows, tuple((head,) for head in layers), found.T)


def _copy_once(task: NestedQA) -> AttentionOnly:
    rows, (entity, held, *found) = _layout(task, task.hops + 1)
    layers = [_copy(task, rows, entity, held)]
    # a match asks by what the one before has found, the first by the copied query
    for asked, answer in zip([held, *found], found, strict=False):
        layers.append(_match(rows, held, asked, entity, answer))
    return AttentionOnly(rows, tuple((head,) for head in layers), found[-1].T)


def _doubling(task: NestedQA) -> AttentionOnly:
    taken = doubling_hops(task.hops)
    rows, (entity, held, *rest) = _layout(task, 2 * len(taken))
    spans = [entity, *rest[: len(taken) - 1]]  # where facts lead in 1, 2, 4, .. hops
    found = rest[len(taken) - 1 :]
    layers: list[tuple[Head, ...]] = [(_copy(task, rows, entity, held),)]
    for step, hops in enumerate(taken):
        asked = held if step == 0 else found[step - 1]
        # hops is a power of two, of which this takes the logarithm
        reach = spans[hops.bit_length() - 1]
        if step == len(taken) - 1:
            layers.append((_match(rows, held, asked, reach, found[step]),))
            continue
        # twice the values, for a layer averages over its heads
        at_sign = _match(rows, held, asked, reach, 2 * found[step])
        at_facts = _match(rows, held, spans[step], spans[step], 2 * spans[step + 1])
        layers.append((at_sign, at_facts))
    return AttentionOnly(rows, tuple(layers), found[-1].T)
