"""Template matching, alone and in context: Theorems 5 and 6 of Chen & Zou 2024, and one layer."""

import itertools
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from jaxtyping import Float
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import Positive
from infoflow_lens.studies.constructions.attention_only import (
    AttentionOnly,
    Head,
    Rows,
    nearest_code_classifier,
)
from infoflow_lens.studies.constructions.position_attention import match_head
from infoflow_lens.studies.constructions.registry import construction
from infoflow_lens.tasks.templates import InContextTemplateMatching, TemplateMatching

TemplateForm = Literal["binary", "ternary", "printed"]
ContextForm = Literal["corrected", "printed"]


def _same_class(task: TemplateMatching) -> Float[Tensor, "template pos pos"]:
    """Return 1 where two positions of a template have the same wildcard."""
    patterns = torch.tensor(task.patterns)
    return (patterns[:, :, None] == patterns[:, None]).double()


@construction("Chen & Zou 2024, Theorem 5")
def template_matching(task: TemplateMatching, *, form: TemplateForm = "binary") -> AttentionOnly:
    """Two ReLU layers of one head that name the template of every sequence (Theorem 5).

    Layer 1 attends to equal words and writes down where they stand, layer 2 adds that up over
    positions with different weights into a code of the template, and the classifier finds the
    nearest code. With k words:

    - "binary" (5A, recommended) [derived]: d' = d + n + k. Layer 1 writes the positions of equal
      words into rows R; layer 2 weights position i by 2^(k-1-i). Row j of the code has as binary
      digits the positions of the same word as j. Margin >= 2.5.
    - "ternary" (5B) [derived]: the paper's d' = d + n. As printed, with I_n of W_V at the position
      columns and no classifier weights on token rows. Then u_j = w_j + (2 + |C|) sum_{i in C} w_i
      with C the class of j and w_i = 3^(k-1-i), distinct for all templates up to k = 8.
    - "printed": the weights of the proof, kept to show that they fail.

    Corrected in the printed text: W_V of layer 1 places I_n on the columns 0 .. n-1 in place of the
    position columns; -I does not erase words that occur more than once; after layer 1 the position
    rows are no longer one-hot, so layer 2's attention is not the printed one, nor is the code.

    Logits are compared exactly up to |u|^2 = 2^52, so that "binary" takes templates of up to 23
    words, "ternary" of up to 13 (fewer where long classes of equal words occur).

    Raises:
        InfoFlowError: for an unknown form, or templates too long for an exact comparison.
    """
    k, d, n = task.length, task.d_vocab, task.n_tokens
    words, same = range(task.n_words), _same_class(task)
    base = 2.0 if form == "binary" else 3.0
    # words that are equal give equal digits, so a template is a number
    weights = base ** torch.arange(k - 1, -1, -1).double()
    if form == "binary":
        rows = Rows(d, n, padding=k)
        content = rows.units(words)
        first = Head(content, content, rows.units(rows.positions[:k]), rows.units(rows.rest))
        parsed = rows.units(rows.rest)
        codes, at = same @ weights, rows.rest
    else:
        rows = Rows(d, n)
        content, tokens = rows.units(words), rows.units(rows.tokens)
        source = range(n) if form == "printed" else rows.positions
        first = Head(
            key=content,
            query=content,
            read=torch.cat([tokens, rows.units(source)], dim=1),
            write=torch.cat([-tokens, rows.units(rows.positions)], dim=1),
        )
        parsed = rows.units(range(rows.d_model))
        summed = same @ weights
        times = 2 + same.sum(dim=2) if form == "ternary" else 1
        codes = weights + times * summed
        at = rows.positions[:k]
    second = Head(
        key=rows.vector(rows.positions[:k], weights.tolist()),
        query=rows.units([rows.last_position]),
        read=parsed,
        write=parsed,
    )
    classifier = nearest_code_classifier(rows, codes, at)
    return AttentionOnly(rows, ((first,), (second,)), classifier)


@construction("derived, beyond Chen & Zou 2024, Theorem 4")
def template_matching_one_layer(
    task: TemplateMatching, *, sharpness: Positive = 20.0
) -> AttentionOnly:
    """A softmax layer of v C(k, 2) heads that names every template [derived; beyond the paper].

    [flag] Theorem 4, that one layer fails, is proved for ReLU attention and for a single softmax
    head. Head (i, j, w) looks, from the sign, at positions i and j, unless both hold the word w:
    then at the sign, whose value is a 1 in row (i, j). These rows are the code of the template.
    Scores with L = sharpness: -3L for word w, 2L for positions i and j, L for the sign, -3L for the
    others.

    Args:
        task: the task, with templates of two words or more.
        sharpness: L; errors are of the order of v C(k, 2) e^-L.

    Raises:
        InfoFlowError: for L <= 0, or templates of a single word.
    """
    if task.length < 2:
        raise InfoFlowError(f"length is {task.length}: expected templates of at least 2 words")
    pairs = list(itertools.combinations(range(task.length), 2))
    rows = Rows(task.d_vocab, task.n_tokens, padding=len(pairs))
    last, sign = rows.units([rows.last_position]), rows.units([task.n_words])
    n_heads = task.n_words * len(pairs)
    heads = []
    for row, pair in zip(rows.rest, pairs, strict=True):
        of_position = torch.full((task.n_tokens,), -3.0)
        of_position[list(pair)] = 2.0
        of_position[-1] = 1.0
        for word in range(task.n_words):
            score = rows.vector(
                [word, *rows.positions], [-3 * sharpness, *(sharpness * of_position).tolist()]
            )
            heads.append(Head(score, last, read=sign, write=n_heads * rows.units([row])))
    same = _same_class(task)
    codes = torch.stack([same[:, i, j] for i, j in pairs], dim=1)
    classifier = nearest_code_classifier(rows, codes, rows.rest)
    return AttentionOnly(rows, (tuple(heads),), classifier, "softmax")


@construction("Chen & Zou 2024, Theorem 6")
def in_context_template_matching(
    task: InContextTemplateMatching,
    *,
    form: ContextForm = "corrected",
    gain: Annotated[float, Ge(1)] = 1.0,
    read_all: bool = False,
) -> AttentionOnly:
    """Three ReLU layers of 1, 1 and 2 l heads that answer by template (Theorem 6).

    d' = d + n + l + 2. Block b starts at o = b (l + 2), the query's at k (l + 2). Layer 1 parses:
    within each block, equal words write their places into rows R. Layer 2 copies each answer over
    its block and to the sign, and subtracts the query's rows R from those of every block. Layer 3
    subtracts, from the answers at the sign, those of blocks whose rows R are not zero: heads i and
    l + i look for a positive and a negative entry i. The right logit is 1; others are at most 1 -
    gain / l.

    So the last position reads the blocks that do not match and rules their answers out; it does not
    look at the matching one. With `read_all` layer 3 has a small score for every word of the
    context on top, which lowers all logits of the context alike: the right logit is 3/4, others
    lower by nearly gain / l or 0 [derived].

    Corrected in the printed text: the lower-left block of W_QK of layer 1 must be 0; -1 in place of
    -infinity; the template stands in the first l of the l + 2 rows R, so layer 3 must read those,
    and against the sign's position row instead of its own rows R; layer 2 must send answers to the
    last column, and its A_(l+1) block, by which the query would add itself there, is dropped.

    Args:
        task: the task.
        form: "corrected", or "printed", the weights of the text, kept to show that they fail.
        gain: g, factor on layer 3; 1 gives margin 1/l, l gives margin 1.
        read_all: whether the last position reads the matching block, too.

    Raises:
        InfoFlowError: for an unknown form, or a gain below 1.
    """
    # pairs of question and answer in blocks of one length
    k, length, n = task.n_pairs, task.length, task.n_tokens
    step = length + 2
    rows = Rows(task.d_vocab, n, padding=step)
    answers = rows.units(range(task.n_words + 1, task.d_vocab))
    block = torch.arange(n) // step
    place = torch.arange(n) % step
    first = match_head(
        rows,
        range(task.n_words),
        block[:, None] == block[None],
        read=rows.units(rows.positions),
        write=rows.units([rows.rest[i] for i in place.tolist()]),
    )
    alpha = _copy_and_compare(task)
    last = rows.units([rows.last_position])
    # ReLU passes positive scores alone, so an entry of either sign has its own head
    signs = [(i, sign) for sign in (1.0, -1.0) for i in range(length)]
    subtract = -gain * rows.units(range(rows.d_model))
    if form == "printed":
        first = _add_lower_left(first, rows, task.n_words)
        for answer in task.places("a").tolist():
            alpha[answer, n - 1] = 0
        alpha[k * step : n, n - 1] = 1
        compared = [(rows.units([rows.rest[2 + i]]), sign) for i, sign in signs]
        third = [(row, sign * row) for row, sign in compared]
    else:
        third = [(rows.units([rows.rest[i]]), sign * last) for i, sign in signs]
    if read_all:
        context = rows.units([rows.positions[p] for p in task.word_places()[:-1].flatten()])
        everywhere = context.sum(dim=1, keepdim=True) / (4 * gain * length)
        third = [
            (torch.cat([key, everywhere], dim=1), torch.cat([query, last], dim=1))
            for key, query in third
        ]
    key, query = rows.score_positions(alpha)
    tokens = rows.units(rows.tokens)
    others = rows.units(range(task.d_vocab, rows.d_model))
    # token rows are copied, all others subtracted: one head does both jobs of layer 2
    second = Head(
        key=key,
        query=query,
        read=torch.cat([tokens, others], dim=1),
        write=torch.cat([tokens, -others], dim=1),
    )
    heads = tuple(
        Head(key, query, rows.units(range(rows.d_model)), subtract) for key, query in third
    )
    return AttentionOnly(rows, ((first,), (second,), heads), answers.T)


def _copy_and_compare(task: InContextTemplateMatching) -> Float[Tensor, "source destination"]:
    """Make layer 2: answers to their block and to the sign, the query's words to every block's."""
    step, n = task.length + 2, task.n_tokens
    query = task.n_pairs * step
    alpha = torch.zeros(n, n)
    for start in range(0, query, step):
        answer = start + step - 1
        alpha[answer, start : start + step] = 1
        alpha[answer, n - 1] = 1
        for i in range(task.length + 1):
            alpha[query + i, start + i] = 1
    return alpha


def _add_lower_left(head: Head, rows: Rows, n_words: int) -> Head:
    """Return the printed W_QK of layer 1, with an identity below the block of the words."""
    below = range(n_words, min(2 * n_words, rows.d_model))
    return Head(
        key=torch.cat([head.key, rows.units(below)], dim=1),
        query=torch.cat([head.query, rows.units(range(len(below)))], dim=1),
        read=head.read,
        write=head.write,
    )
