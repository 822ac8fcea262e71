"""The other text, where none is given: a word of the text is replaced by one that is like it."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from infoflow_lens.hooks.answer.question import Question
from infoflow_lens.hooks.answer.steps import guess_tokens
from infoflow_lens.hooks.model.points import is_causal
from infoflow_lens.hooks.readouts import LogitDifference

_PLACES, _GUESSES = 4, 6  # places whose tokens move the readout most, and guesses at each
_LIKENESS = 10.0  # nats that a token with the same embedding is worth, beside one at right angles
_BLANKS = "\u0120\u2581"  # what stands for a blank in the names of tokens
_MARGIN = 1.0  # how far below 0 the readout is to fall
_SHORT = 3.0  # nats that each logit less costs


def choose_likely_text(
    question: Question, effect: Float[Tensor, " pos"]
) -> Int[Tensor, " pos"] | None:
    """Choose a text that reads like the one that is asked about, and of which `against` is said.

    At the places that move the readout most the model's guesses are ordered by their probability
    and by how near their embeddings come to that of the token in their place. A word with a blank
    before it is not replaced by one without, which would join the word before. The first ones are
    run. The best is the most probable text with the nearest token under which the model prefers
    `against`.

    Args:
        question: of which only the text is known.
        effect: of each token, by which the places are chosen.

    Returns:
        Token ids, or None of models that predict no next token, or have no table of embeddings.
    """
    embeddings = _embeddings(question)
    if embeddings is None:
        return None
    clean, guesses = question.clean.tokens[0], guess_tokens(question).log()
    sizes = embeddings.norm(dim=1).float()
    products = (embeddings[clean] @ embeddings.T).float()
    likeness = (products / (sizes[clean, None] * sizes).clamp(min=1e-12)).cpu()  # cosines
    worth = guesses + _LIKENESS * likeness
    worth = worth.masked_fill(_find_unlike(question, len(embeddings)), -torch.inf)[1:]
    # the first token is not predicted
    places = effect[1:].abs().nan_to_num(0).topk(min(_PLACES, len(worth))).indices
    texts, like = [], []
    for place in places.tolist():
        best = worth[place].topk(min(_GUESSES, len(embeddings)))
        for token in best.indices[best.values.isfinite()].tolist():
            text = clean.clone()
            text[place + 1] = token
            texts.append(text)
            like.append(float(likeness[place + 1, token]))
    if not texts:
        return None
    rows = torch.stack(texts)
    change, gain = question.score_texts(rows)
    short = (max(question.clean.value, 0.0) + change + _MARGIN).clamp(min=0)
    score = gain + _LIKENESS * torch.tensor(like, dtype=torch.float64) - _SHORT * short
    return rows[int(score.argmax())]


def _find_unlike(question: Question, n_tokens: int) -> Bool[Tensor, "pos token"]:
    """Find the tokens that cannot stand in a place: special ones, and parts of words for words."""
    tokenizer: Any = getattr(question.model, "tokenizer", None)
    clean = question.clean.tokens[0].cpu()
    config = getattr(getattr(question.model, "original_model", None), "config", None)
    special = [getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "unk")]
    has_blank, joins, is_special = torch.zeros(3, n_tokens, dtype=torch.bool)
    if tokenizer is not None:
        special += list(tokenizer.all_special_ids)
        known = range(min(n_tokens, len(tokenizer)))
        for token, name in enumerate(map(str, tokenizer.convert_ids_to_tokens(list(known)))):
            has_blank[token] = name[:1] in tuple(_BLANKS)
            joins[token] = name[:1].isalnum() and not has_blank[token]
    for number in special:
        if isinstance(number, int) and 0 <= number < n_tokens:
            is_special[number] = True
    return has_blank[clean, None] & joins | is_special


def _embeddings(question: Question) -> Float[Tensor, "token d_model"] | None:
    """Find the table of embeddings of a model that predicts the next token."""
    original: Any = getattr(question.model, "original_model", question.model)
    logits, n_pos = question.clean.logits, question.n_pos
    if not (isinstance(question.readout, LogitDifference) and is_causal(question.model)):
        return None
    if logits.ndim != 2 or len(logits) != n_pos or question.end != n_pos - 1:
        return None
    try:
        table = original.get_input_embeddings().weight.detach()
    except (AttributeError, NotImplementedError):
        return None
    return table if table.shape[0] == logits.shape[1] else None
