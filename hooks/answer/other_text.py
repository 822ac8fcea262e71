"""The other text, where none is given: a word of the text is replaced by one that is like it."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from infoflow_lens.hooks.answer.question import Question
from infoflow_lens.hooks.answer.steps import guess_tokens
from infoflow_lens.hooks.model.points import is_causal
from infoflow_lens.hooks.readouts import LogitDifference

_PLACES, _FIRST = 4, 3  # places whose tokens move the readout most, and guesses at each
_BEST, _MORE = 2, 6  # of these places, those with the best texts, and more guesses at each
_POOL = 15  # guesses at a place that are thought of, by each kind of nearness
_NEARNESS = 20.0  # nats that a guess with the same embedding is worth, beside one at right angles
_LIKENESS = 10.0  # the same of a text that was run
_BLANKS = "\u0120\u2581"  # what stands for a blank in the names of tokens
_MARGIN = 1.0  # how far below 0 the readout is to fall
_SHORT = 5.0  # nats that each logit less costs
_COMMON = 0.5  # of the nats by which the commoner one of the two tokens is rare


def choose_likely_text(
    question: Question, effect: Float[Tensor, " pos"]
) -> Int[Tensor, " pos"] | None:
    """Choose a text that reads like the one that is asked about, and of which `against` is said.

    At the places that move the readout most the model's guesses are ordered by their probability
    and by how near their embeddings come to that of the token in their place, as they are and
    without their mean. A word with a blank before it is not replaced by one without, which would
    join the word before. The first ones are run, then more at the places with the best texts, whose
    probability there counts half: nothing but the first words stands before an early place. The
    best is the most probable text with `against` behind it, with the nearest token, under which the
    model prefers `against`. A token that the model finds probable at many places of the text is a
    common one, such as "the", and is neither replaced nor put anywhere where rarer ones serve.

    Args:
        question: of which only the text is known.
        effect: of each token, by which places are chosen; those of a unit have that of the unit.

    Returns:
        Token ids, or None of models that predict no next token, or have no table of embeddings.
    """
    embeddings = _embeddings(question)
    if embeddings is None:
        return None
    clean, guesses = question.clean.tokens[0], guess_tokens(question).log()
    likeness = _find_cosines(embeddings, clean)
    guesses = guesses.masked_fill(_find_unlike(question, len(embeddings)), -torch.inf)
    # parts of rare words lie near one another, and all on one side of the mean
    apart = _find_cosines(embeddings - embeddings.mean(dim=0), clean)
    is_near = torch.zeros_like(guesses, dtype=torch.bool)
    for worth in (guesses + _LIKENESS * likeness, guesses + _NEARNESS * apart):
        is_near.scatter_(1, worth.topk(min(_POOL, len(embeddings)), dim=1).indices, True)
    guesses = guesses.masked_fill(~is_near, -torch.inf)
    common = question.clean.logits.float().cpu().log_softmax(-1).median(dim=0).values.double()
    tried: dict[tuple[int, int], float] = {}

    def try_guesses(places: list[int], weight: float, n: int) -> None:
        pairs = []
        for place in places:
            worth = weight * guesses[place] + _NEARNESS * likeness[place]
            # what was run already is not run again
            worth[[token for at, token in tried if at == place]] = -torch.inf
            best = worth.topk(min(n, len(worth)))
            pairs += [(place, token) for token in best.indices[best.values.isfinite()].tolist()]
        if not pairs:
            return
        at, tokens = torch.tensor(pairs).T
        texts = clean.repeat(len(pairs), 1)
        texts[range(len(pairs)), at.to(clean.device)] = tokens.to(clean)
        change, gain, chance = question.score_texts(texts)
        # a readout that is below 0 already has to fall by the margin all the same
        short = (max(question.clean.value, 0.0) + change + _MARGIN).clamp(min=0)
        commoner = torch.maximum(common[clean.cpu()[at]], common[tokens])
        scores = gain + chance + _LIKENESS * likeness[at, tokens].double() - _SHORT * short
        tried.update(zip(pairs, (scores - _COMMON * commoner).tolist(), strict=True))

    # the first token is not predicted; of those of a unit the rarer ones come first
    rare = 1 + common[clean.cpu()[1:]].argsort(stable=True)
    sizes, order = effect[rare].abs().nan_to_num(-1).sort(descending=True, stable=True)
    places = rare[order[sizes >= 0][:_PLACES]]
    try_guesses(places.tolist(), 1.0, _FIRST)
    best = sorted(tried, key=tried.__getitem__, reverse=True)
    try_guesses(list(dict.fromkeys(place for place, _ in best))[:_BEST], 0.5, _MORE)
    if not tried:
        return None
    place, token = max(tried, key=tried.__getitem__)
    chosen = clean.clone()
    chosen[place] = token
    return chosen


def _find_cosines(
    table: Float[Tensor, "token d_model"], tokens: Int[Tensor, " pos"]
) -> Float[Tensor, "pos token"]:
    """Find the cosines of some embeddings with all."""
    sizes = table.norm(dim=1).float().clamp(min=1e-6)
    return ((table[tokens] @ table.T).float() / (sizes[tokens, None] * sizes)).cpu()


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
