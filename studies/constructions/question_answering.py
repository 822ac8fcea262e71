"""In-context question answering: Theorem 3 of Chen & Zou 2024, its softmax forms, and one layer."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from infoflow_lens.foundation.settings import Positive
from infoflow_lens.studies.constructions.attention_only import AttentionOnly, Head, Rows
from infoflow_lens.studies.constructions.parameters import Beta
from infoflow_lens.studies.constructions.registry import construction
from infoflow_lens.tasks.questions import InContextQA

SoftmaxForm = Literal["scaled", "separate"]


def _question_rows(task: InContextQA) -> range:
    return range(task.n_questions)


def _answer_rows(task: InContextQA) -> range:
    return range(task.n_questions + 1, task.d_vocab)


def _copy_within_pairs(task: InContextQA) -> Float[Tensor, "source destination"]:
    """Let every position of a pair, or of the query, copy the others of it."""
    blocks = [1 - torch.eye(3)] * task.n_pairs + [1 - torch.eye(2)]
    return torch.block_diag(*blocks)


def _copy_then_match(task: InContextQA, beta: float) -> tuple[Rows, tuple[tuple[Head, ...], ...]]:
    """Make the two layers of Theorem 3, with scores multiplied by beta."""
    rows = Rows(task.d_vocab, task.n_tokens)
    everything = rows.units(range(rows.d_model))
    key, query = rows.score_positions(beta * _copy_within_pairs(task))
    asked = rows.units(_question_rows(task))
    first = Head(key, query, everything, everything)
    second = Head(asked, beta * asked, everything, everything)
    return rows, ((first,), (second,))


@construction("Chen & Zou 2024, Theorem 3")
def in_context_qa(task: InContextQA) -> AttentionOnly:
    """Two ReLU layers of one head that answer every question (Theorem 3), d' = d + n.

    Layer 1 copies within each pair (W_QK = blockdiag(1 - I_3, .., 1 - I_2) on position rows, V =
    I); layer 2 matches the question rows (W_QK = I there, V = I), and W_O reads the answer rows.
    The right logit is 3, all others are 0.

    Corrected: W_O is d_2 x d', and the final "a_1" of the proof is a_0.
    """
    rows, layers = _copy_then_match(task, beta=1.0)
    return AttentionOnly(rows, layers, rows.units(_answer_rows(task)).T)


@construction("Chen & Zou 2024, Sec. 16")
def in_context_qa_softmax(
    task: InContextQA, *, form: SoftmaxForm = "separate", beta: Beta = 20.0
) -> AttentionOnly:
    """Two softmax layers of one head that answer every question (the paper's Sec. 16) [derived].

    - "scaled": the weights of Theorem 3 with both W_QK multiplied by beta; margin -> 1/6.
    - "separate", d' = d + n + n_q: layer 1 copies each pair's question to its answer, and the query
      to the sign, into rows R of their own (other positions look at response signs); layer 2
      matches rows R, avoids the sign itself, and copies answers and questions; margin -> 1.

    Args:
        task: the task.
        form: "scaled" or "separate".
        beta: factor on the scores; every one from 0.5 to 20 was tried.

    Raises:
        InfoFlowError: for an unknown form, or beta <= 0.
    """
    if form == "scaled":
        rows, layers = _copy_then_match(task, beta)
        return AttentionOnly(rows, layers, rows.units(_answer_rows(task)).T, "softmax")
    rows = Rows(task.d_vocab, task.n_tokens, padding=task.n_questions)
    query_at, sign_at = task.n_tokens - 2, task.n_tokens - 1
    alpha = torch.zeros(task.n_tokens, task.n_tokens)
    for start in range(0, query_at, 3):
        question, sign, answer = start, start + 1, start + 2
        # an answer copies its question; questions and signs look where nothing is to be copied
        alpha[question, answer] = alpha[sign, question] = alpha[sign, sign] = 1
    alpha[query_at, sign_at] = alpha[sign_at, query_at] = 1
    key, query = rows.score_positions(beta * alpha)
    copied = rows.units(rows.rest)
    itself = rows.units([rows.last_position])
    # equal copied questions score beta, and the sign, which holds one as well, 0 at itself
    second = Head(
        key=torch.cat([copied, itself], dim=1),
        query=beta * torch.cat([copied, -itself], dim=1),
        read=torch.cat([rows.units(_answer_rows(task)), copied], dim=1),
        write=torch.cat([rows.units(_answer_rows(task)), copied], dim=1),
    )
    first = Head(key, query, rows.units(_question_rows(task)), copied)
    classifier = rows.units(_answer_rows(task)).T
    return AttentionOnly(rows, ((first,), (second,)), classifier, "softmax")


@construction("derived, beyond Chen & Zou 2024, Theorem 2")
def in_context_qa_one_layer(task: InContextQA, *, sharpness: Positive = 20.0) -> AttentionOnly:
    """A softmax layer of k n_q heads that answers every question [derived; beyond the paper].

    [flag] Theorem 2, that one layer fails, is proved for ReLU attention and for a single softmax
    head. It does not extend to many softmax heads. Head (b, q) looks, from the last position, at
    the b-th question and at the query, unless both are q: then its largest score is that of the
    b-th answer. Scores with L = sharpness: -3L for token q, 2L for positions 3b and 3k, L for
    position 3b + 2, -3L for the others; V = m I on answer rows, m the number of heads. Errors are
    of the order of m e^-L.

    Args:
        task: the task.
        sharpness: L.

    Raises:
        InfoFlowError: for L <= 0.
    """
    rows = Rows(task.d_vocab, task.n_tokens)
    asked, last = task.n_tokens - 2, rows.units([rows.last_position])
    answers = rows.units(_answer_rows(task))
    n_heads = task.n_pairs * task.n_questions
    heads = []
    for start in range(0, asked, 3):
        of_position = torch.full((task.n_tokens,), -3.0)
        of_position[[start, asked]] = 2.0
        of_position[start + 2] = 1.0
        for question in range(task.n_questions):
            score = rows.vector(
                [question, *rows.positions], [-3 * sharpness, *(sharpness * of_position).tolist()]
            )
            heads.append(Head(key=score, query=last, read=answers, write=n_heads * answers))
    return AttentionOnly(rows, (tuple(heads),), answers.T, "softmax")
