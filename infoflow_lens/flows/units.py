"""Units of tokens: words, or spans of the user's, that are replaced at once."""

import operator
from collections.abc import Callable, Sequence
from typing import TypeAlias

from jaxtyping import Int
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.hooks.model.texts import readable_tokens
from infoflow_lens.models.named import NamedModel

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
        given: Spans = _words(model, ids, units)
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


def _words(model: NamedModel, ids: Int[Tensor, " pos"], units: str) -> list[tuple[int, int]]:
    """Join tokens between which the tokenizer writes no blank; special ones stand alone."""
    tokenizer = model.tokenizer
    if units != "words" or tokenizer is None:
        raise InfoFlowError(
            f"units are {units!r}: expected spans (start, stop), or 'words' where there is a "
            "tokenizer"
        )
    row = ids.tolist()
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
    return list(zip(starts, [*starts[1:], len(row)], strict=True))
