"""Texts as a model's tokenizer reads them: ids as the model itself would give, many at a time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from infoflow_lens.foundation.display import quote
from infoflow_lens.foundation.errors import InfoFlowError, first_line, panics_as_errors
from infoflow_lens.hooks.model.points import config_value

_LONG_TEXT = 2**16  # characters; shorter ones are tokenised whole
_TRIED = 256  # characters, by which the model's own rules are tried
_TOGETHER = 2**20  # characters that are tokenised together; each takes hundreds of bytes

Part = TypeVar("Part")


class SingleName(str):
    """What errors call a sequence that stands alone, and so has no number."""


def name_row(name: str, index: int) -> str:
    """Name one of the sequences in an error: by its number, unless it stands alone."""
    return name if isinstance(name, SingleName) else f"{name}[{index}]"


def tokenize(
    model: nn.Module, texts: Sequence[Any], name: str, max_length: int | None = None, first: int = 0
) -> list[Int[Tensor, " pos"]]:
    """Return the ids of texts, each as the model itself tokenises it, by default with its BOS.

    A text that begins with BOS, as chat templates write it, gets no second one.

    Of a long text no more is read than its first tokens need: tokenizers take hundreds of bytes for
    each character. What is read ends at a blank, and has twice the tokens that are kept, so that
    the end does not change them.

    Args:
        model: with its tokenizer.
        texts: to be tokenised.
        name: what errors call them.
        max_length: longer ones are cut to so many tokens, of which the last are those that the
            tokenizer puts behind every text, such as [SEP]; default, a long text has one more than
            the model takes.
        first: the number of the first.

    Raises:
        InfoFlowError: for an empty text, or a model without a tokenizer.
    """
    _tokenizer_of(model, name, first)
    for index, text in enumerate(texts, first):
        if not isinstance(text, str) or not text:
            raise InfoFlowError(
                f"{name_row(name, index)} is {text!r}: expected a text that is not empty"
            )
        _check_is_unicode(text, name, index)
    # one token more than the model takes, so that a text that is too long is refused
    kept = max_length or int(config_value(model, "n_ctx") or 2**20) + 1
    length = max(_LONG_TEXT, 16 * kept)
    rows: list[Tensor] = []
    for some in group_by_size(texts):
        long = len(some) == 1 and len(some[0]) > length
        rows += [_beginning(model, some[0], length, kept)] if long else ids_of_texts(model, some)
    # a template writes BOS as text, and the tokenizer puts another before it
    bos, token = (getattr(model.tokenizer, f"bos_token{end}", None) for end in ("_id", ""))
    rows = [
        row[1:] if token and text.startswith(token) and row[:2].tolist() == [bos, bos] else row
        for text, row in zip(texts, rows, strict=True)
    ]
    if max_length is None or all(len(row) <= max_length for row in rows):
        return rows
    end = _find_end(model)
    n_own = max_length - len(end) if len(end) < max_length else max_length
    return [
        torch.cat([row[:n_own], end])[:max_length] if len(row) > max_length else row for row in rows
    ]


def tokenize_pairs(
    model: nn.Module, pairs: Sequence[tuple[str, str]], name: str, max_length: int | None = None
) -> dict[str, list[list[int]]]:
    """Return what the tokenizer makes of pairs of texts: ids, and what goes with them, by name.

    Of pairs of more than `max_length` tokens the longer text is cut, as tokenizers do.

    Raises:
        InfoFlowError: for a model without a tokenizer, or one that puts nothing between two texts,
            and for a length that leaves nothing of them.
    """
    tokenizer = _tokenizer_of(model, name)
    for index, pair in enumerate(pairs):
        if not any(pair):
            raise InfoFlowError(
                f"{name_row(name, index)} is {pair!r}: expected texts that are not empty"
            )
        _check_is_unicode("".join(pair), name, index)
    count = tokenizer.num_special_tokens_to_add
    if count(pair=True) <= count(pair=False):
        raise InfoFlowError(
            f"{name} holds pairs of texts, between which the tokenizer puts nothing: expected a "
            "tokenizer with a separator; join each pair to one text"
        )
    n_added = count(pair=True)
    if max_length is not None and max_length < n_added + 2:
        raise InfoFlowError(
            f"max_length is {max_length}, and the tokenizer puts {n_added} tokens around a pair of "
            f"texts: expected {n_added + 2} or more"
        )
    sides = (list(side) for side in zip(*pairs))
    cut = {} if max_length is None else {"truncation": True, "max_length": max_length}
    return dict(tokenizer(*sides, return_attention_mask=False, **cut))


def tokenize_chats(
    model: nn.Module, chats: Sequence[Sequence[dict[str, Any]]], name: str
) -> list[list[int]]:
    """Return the ids of conversations, by the model's own template, up to where its answer begins.

    Args:
        model: with its tokenizer.
        chats: of messages with "role" and "content".
        name: what errors call them.

    Raises:
        InfoFlowError: for a model without a tokenizer, or one that has no template, and for
            messages that its template does not take.
    """
    tokenizer = _tokenizer_of(model, name)
    for index, chat in enumerate(chats):
        _check_is_unicode("".join(str(message.get("content")) for message in chat), name, index)
    if not getattr(tokenizer, "chat_template", None):
        raise InfoFlowError(
            f"{name} holds chat messages, and the tokenizer has no chat template: expected texts "
            "for this model; write each conversation as one text"
        )
    rows = []
    for index, chat in enumerate(chats):
        more = {"add_generation_prompt": chat[-1]["role"] != "assistant", "return_dict": False}
        try:
            rows.append(tokenizer.apply_chat_template(list(chat), **more))
        except Exception as error:  # a template is a program, and raises what it likes
            raise InfoFlowError(
                f"{name_row(name, index)} does not fit the chat template of the tokenizer "
                f"({type(error).__name__}: {first_line(error)}): expected the roles that it knows, "
                "each message with a text as its content; for others, such as calls of tools, give "
                "the text that tokenizer.apply_chat_template(..., tokenize=False) makes"
            ) from error
    return rows


def _find_end(model: nn.Module) -> Int[Tensor, " pos"]:
    """Find what the tokenizer puts behind every text, where the model reads it."""
    made = model.tokenizer("a", return_special_tokens_mask=True)  # type: ignore[operator]
    own = np.flatnonzero(np.equal(made["special_tokens_mask"], 0))
    n_end = len(made["input_ids"]) - 1 - int(np.max(own))
    (row,) = ids_of_texts(model, ["a"])
    # TransformerLens takes EOS off, so what the tokenizer puts there may not be read
    is_read = n_end and row[-n_end:].tolist() == made["input_ids"][-n_end:]
    return row[-n_end:] if is_read else row[:0]


def _tokenizer_of(model: nn.Module, name: str, index: int = 0) -> Any:
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise InfoFlowError(
            f"{name_row(name, index)} is a text, but the model has no tokenizer: expected token "
            "ids; tokenise first, or load the model with its tokenizer"
        )
    return tokenizer


def _check_is_unicode(text: str, name: str, index: int) -> None:
    if any("\ud800" <= mark <= "\udfff" for mark in text):
        raise InfoFlowError(
            f"{name_row(name, index)} holds half a character (a surrogate, U+D800 to U+DFFF): "
            "expected Unicode text; read the file as UTF-8, or take text.encode('utf-8', 'replace')"
        )


def _beginning(model: nn.Module, text: str, length: int, kept: int) -> Tensor:
    """Return more than the first `kept` ids of a long text, from some `length` characters."""
    while True:
        part = text[: max(text.rfind(" ", length // 2, length), 0) or length]
        part = text if length >= len(text) else part
        (tokens,) = ids_of_texts(model, [part])
        if part is text:
            return tokens
        if len(tokens) >= 2 * kept + 16:
            return tokens[: kept + 2]  # more say that it was cut, also where BOS stands twice
        length *= 4


def group_by_size(
    texts: Iterable[Part], size: Callable[[Part], int] = len  # type: ignore[assignment]
) -> Iterator[list[Part]]:  # fmt: skip
    """Yield groups of texts that are tokenised together; a long one is alone."""
    group: list[Part] = []
    total = 0
    for text in texts:
        n = size(text)
        if group and (total + n > _TOGETHER or n > _LONG_TEXT):
            yield group
            group, total = [], 0
        group.append(text)
        # a long text fills its group, so that no other joins it
        total += _TOGETHER if n > _LONG_TEXT else n
    if group:
        yield group


def ids_of_texts(
    model: nn.Module, texts: Sequence[str], *, bare: bool = False
) -> list[Int[Tensor, " pos"]]:
    """Return what ``model.to_tokens(text, truncate=False)`` gives of each text alone, in one call.

    The tokenizer's own call on many texts uses all cores. What the model does beside it (BOS before
    the text, EOS off its end) is done here, and tried on a few words; where the model does anything
    else, it is asked for each text.

    Args:
        model: with its tokenizer.
        texts: to be tokenised.
        bare: without what the tokenizer puts before a text.
    """
    settings = {"prepend_bos": False} if bare else {}

    def alone(text: str) -> Tensor:
        ids: Tensor = model.to_tokens(text, truncate=False, **settings)  # type: ignore[operator]
        return ids[0].cpu()

    few = [texts[0][:_TRIED], texts[-1][-_TRIED:]]
    if _together(model, few, bare) != [alone(text).tolist() for text in few]:
        return [alone(text) for text in texts]
    rows = _together(model, texts, bare)
    flat = torch.from_numpy(np.fromiter(chain.from_iterable(rows), np.int64))
    return list(flat.split([len(row) for row in rows]))


def _together(model: nn.Module, texts: Sequence[str], bare: bool) -> list[list[int]]:
    """Tokenize texts in one call of the tokenizer, by TransformerLens's rules of BOS and EOS."""
    tokenizer: Any = model.tokenizer
    cfg: Any = model.cfg
    wanted = not bare and getattr(cfg, "default_prepend_bos", True)
    has_bos = getattr(cfg, "tokenizer_prepends_bos", True)
    # TransformerLens puts BOS before the text where the tokenizer does not
    if wanted and not has_bos:
        bos = tokenizer.bos_token or ""
        is_one = len(tokenizer(bos, add_special_tokens=False)["input_ids"]) == 1
        texts = [bos + text for text in texts] if is_one else texts
    # a text that is longer than the context is cut or refused later, and needs no warning here
    options = {"return_attention_mask": False, "verbose": False}
    with panics_as_errors("the tokenizer"):
        rows: list[list[int]] = tokenizer(list(texts), **options)["input_ids"]
    # TransformerLens takes EOS off the end
    if getattr(cfg, "tokenizer_appends_eos", False):
        for row in rows:
            while len(row) > 1 and row[-1] == tokenizer.eos_token_id:
                del row[-1]
    return [row[1:] for row in rows] if has_bos and not wanted else rows


def readable_tokens(model: nn.Module, sequences: Iterable[Tensor]) -> tuple[tuple[str, ...], ...]:
    """Return the tokens of every sequence as one reads them.

    These are the words of the model's tokenizer, with blanks and line breaks made visible; token
    ids for a model without a tokenizer; and positions where tokens are vectors.
    """
    tokenizer = getattr(model, "tokenizer", None)
    return tuple(
        tuple(str(place) for place in range(len(row)))
        if row.ndim > 1
        else tuple(
            str(i) if tokenizer is None else _readable(tokenizer.decode([i])) for i in row.tolist()
        )
        for row in sequences
    )


def readable_spans(
    model: nn.Module, tokens: Int[Tensor, " pos"], spans: Iterable[tuple[int, int]]
) -> tuple[str, ...]:
    """Return the tokens of each span as one word, written as :func:`readable_tokens` writes one."""
    tokenizer, ids = getattr(model, "tokenizer", None), tokens.tolist()
    if tokenizer is None:
        return tuple(" ".join(map(str, ids[start:stop])) for start, stop in spans)
    return tuple(_readable(tokenizer.decode(ids[start:stop])) for start, stop in spans)


def _readable(token: str) -> str:
    if token.isprintable() and token.strip():
        return token
    return quote(token)[1:-1].replace(" ", "\u00b7")
