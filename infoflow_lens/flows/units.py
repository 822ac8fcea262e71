"""Units of tokens: words, sentences, or spans of the user's, that are replaced at once."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from jaxtyping import Int
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.hooks.model.texts import readable_tokens
from infoflow_lens.models.named import NamedModel

_STOPS, _WIDE = tuple(".!?\u2026"), tuple("\u3002\uff01\uff1f")  # the last need no blank behind
_CLOSERS = "\"')]}\u2019\u201d\u00bb\u300d\u300f\uff09"  # quotes and brackets

Spans: TypeAlias = Sequence[tuple[int, int]]
Units: TypeAlias = str | Spans | Callable[[tuple[str, ...]], Spans]


def find_units(
    model: NamedModel, ids: Int[Tensor, " pos"], units: Units | None
) -> list[tuple[int, int]] | None:
    """Find the spans of all tokens of a text, in their order; None where each stands alone.

    Raises:
        InfoFlowError: for words without a tokenizer, and spans that are none, or share a token.
    """
    if units is None or (isinstance(units, (list, tuple)) and not units):
        return None
    if isinstance(units, str):
        kinds = {"words": _begin_words, "sentences": _begin_sentences}
        if units not in kinds or model.tokenizer is None:
            raise InfoFlowError(
                f"units are {units!r}: expected spans (start, stop), or 'words' or 'sentences' "
                "where there is a tokenizer"
            )
        starts = kinds[units](model.tokenizer, ids.tolist())
        given: Spans = list(zip(starts, [*starts[1:], len(ids)], strict=True))
    else:
        given = units(*readable_tokens(model, [ids])) if callable(units) else units
    found: list[tuple[int, int]] = []
    behind = 0
    try:
        spans = sorted((operator.index(start), operator.index(stop)) for start, stop in given)
    except (TypeError, ValueError):
        raise InfoFlowError(f"units are {given!r}: expected spans (start, stop)") from None
    for start, stop in spans:
        if not behind <= start < stop <= len(ids):
            raise InfoFlowError(
                f"{(start, stop)} is no unit of {len(ids)} tokens: expected spans (start, stop) of "
                "positions, of at least one token, of which no two share one"
            )
        # tokens between two spans are units of their own
        found += [(place, place + 1) for place in range(behind, start)]
        found.append((start, stop))
        behind = stop
    return found + [(place, place + 1) for place in range(behind, len(ids))]


def _begin_words(tokenizer: Any, row: list[int]) -> list[int]:
    """Find where words begin: behind blanks that the tokenizer writes, and at special tokens."""
    special = {*tokenizer.all_special_ids}
    starts = [0]
    # some tokenizers write a blank only where two tokens meet, so both are decoded together
    for place in range(1, len(row)):
        one, both = (
            tokenizer.decode(row[place - 1 : stop], clean_up_tokenization_spaces=False)
            for stop in (place, place + 1)
        )
        is_blank = one[-1:].isspace() or both[len(one) :][:1].isspace()
        if is_blank or not special.isdisjoint(row[place - 1 : place + 1]):
            starts.append(place)
    return starts


def _begin_sentences(tokenizer: Any, row: list[int]) -> list[int]:
    """Find where sentences begin: behind stops and line breaks, and at special tokens.

    A stop within a word, or before a small letter, ends none.
    """
    special, words = {*tokenizer.all_special_ids}, {*_begin_words(tokenizer, row)}
    starts = [0]
    for place in range(1, len(row)):
        before, behind = (
            tokenizer.decode(part, clean_up_tokenization_spaces=False)
            for part in (row[starts[-1] : place], row[place : place + 1])
        )
        said, after = before.rstrip(), behind.strip()
        bare = said.rstrip(_CLOSERS)
        is_end = place in words and bare.endswith(_STOPS) and not after[:1].islower()
        # a line break, or a stop of full width, needs no blank behind it
        is_end |= "\n" in before[len(said) :] or bare.endswith(_WIDE)
        # quotes and brackets that close belong to the sentence before them
        is_end &= bool(said and after.strip(_CLOSERS))
        if is_end or not special.isdisjoint(row[place - 1 : place + 1]):
            starts.append(place)
    return starts
