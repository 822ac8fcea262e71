"""Why this answer and not that one? Of a model by name or in memory, and a text."""

import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
from annotated_types import MinLen
from jaxtyping import Int
from torch import Tensor, nn

from infoflow_lens.flows.run import as_list, check_text
from infoflow_lens.foundation.display import panel
from infoflow_lens.foundation.documents import ANSWER_PAGE
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import user_path
from infoflow_lens.foundation.modules import eval_mode, outside_user_modes
from infoflow_lens.foundation.progress import hide_library_bars
from infoflow_lens.foundation.settings import Count, Remedy, Seed, check, checked, plain
from infoflow_lens.hooks.answer.measure import measure_answer, measure_cut
from infoflow_lens.hooks.answer.result import AnswerNumbers
from infoflow_lens.hooks.model.call import call, gives_logits
from infoflow_lens.hooks.model.inputs import Batch, Batches, read_inputs, read_one
from infoflow_lens.hooks.model.points import is_causal
from infoflow_lens.hooks.model.texts import readable_tokens
from infoflow_lens.hooks.readouts import (
    LogitDifference,
    Readout,
    bind_readout,
    check_logits,
    logits_of,
    tokens_of_answer,
)
from infoflow_lens.models.loading import LoadedModel, load_any
from infoflow_lens.models.named import NamedModel
from infoflow_lens.runs.checkpoint import Checkpoint
from infoflow_lens.runs.folder import MANIFEST, RunFolder

_ROWS = 12  # in a notebook


@dataclass(frozen=True, eq=False, kw_only=True)
class Answer(AnswerNumbers):
    """Why a model gives this answer and not that one, in one text; see :func:`ask`.

    ``to_frame`` has the numbers ("tokens", "replacements", "states", "heads", "paths", "looks"),
    ``summary()``, ``bundles()`` and ``nearest_order()`` say them.
    """

    def to_html(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the answer as a page, which needs no network.

        Args:
            path: of the page.
            overwrite: whether a file that is no such page, or one that was edited, may be replaced.

        Returns:
            The file.

        Raises:
            InfoFlowError: if the file cannot be written, or another one stands in its place.
        """
        from infoflow_lens.report.answer import render_answer

        ANSWER_PAGE.check(path, overwrite=overwrite)  # before the page is made
        return ANSWER_PAGE.write(path, render_answer(self), overwrite=overwrite)

    def _repr_html_(self) -> str:
        facts = {"": self.summary(), "passes": f"{self.forwards:.0f}"}
        tables = '"tokens", "replacements", "states", "heads", "paths", "looks"'
        more = f"more: .to_frame(one of {tables}), .to_html(path), .save(path)"
        lines = self.to_frame("paths").head(_ROWS) if len(self.places) else None
        return panel(type(self).__name__, facts, self.notes, more, lines)


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


_KEPT = "measured.safetensors"
Text = str | tuple[str, str] | Tensor | Sequence[int] | Mapping[str, Any]


@outside_user_modes()
@checked
def ask(
    model: str | os.PathLike[str] | nn.Module | LoadedModel,
    text: Text,
    answer: str | int | None = None,
    against: str | int | None = None,
    instead: Text | None = None,
    *,
    at: int | None = None,
    readout: Readout | None = None,
    quick: bool = False,
    exact: bool = False,
    units: Units | None = None,
    seed: Seed = 0,
    batch_size: Count = 16,
    resume: str | os.PathLike[str] | None = None,
    tokenizer: Any | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    progress: bool = True,
) -> Answer:
    """Say why this answer and not that one: which tokens, states, heads and paths decide.

    Everything is an effect on one number, by default the logit of the answer minus that of another:
    what changes when a part takes the value that it has in the other text. Tokens are replaced by
    the model's own guesses; states are exchanged at the layers where that comes to mean something
    else; heads and MLPs are ranked by gradients at two points, taken in turn, and the first ones
    measured; paths between heads, through MLPs, are grown until they keep 70% of the difference by
    themselves and 70% is lost without them, pruned, and each is cut by itself.

    15 tokens of a model of 30 layers take some 80 passes, and many more where paths are many;
    ``quick`` takes 20 to 30 with another text that is given, and some 80 where one is chosen.

    Args:
        model: a name, a folder, any Transformer in memory, or what `load_any` gave.
        text: what the model reads; or token ids [pos]; or, for a model of two texts, the pair of
            them, or what the tokenizer makes of it: its ``token_type_ids`` go along.
        answer: a token, as a word or an id; default, what the model says. A word within a text
            often begins with a blank. Of words of several tokens the first counts in which they
            differ, behind what they share, which stands before a mask.
        against: another; default, what the model finds second most probable.
        instead: the other text, of as many tokens, in both parts of a pair; default, one that
            differs in one token, reads like the text, and speaks most for the other answer; where
            none does so by 1, the model's own guess at the place where that moves the readout most.
        at: a place in the text, from -1 backwards or from 1 on: why the token that stands there,
            and not the one that the model finds most probable beside it? What stands from there on
            is not read.
        readout: what is asked in the place of a logit difference.
        quick: no tokens, no strips, ten heads, no pruning of paths.
        exact: all heads are measured, one by one.
        units: tokens that are exchanged at once, as their effects do not add up: "words", which
            blanks separate; "sentences"; spans (start, stop) of positions, or a function that makes
            them of the tokens as one reads them. Tokens outside of spans stand alone; default, each
            does. Paths between two units are one line; paths and heads stay with single tokens.
        seed: of the draws.
        batch_size: texts in a pass.
        resume: a folder that keeps what was measured, so that the same question goes on where it
            was stopped; the runs of the two texts and what gradients estimate are made again.
        tokenizer, device, dtype: as for `load_any`.
        progress: whether to show a bar.

    Raises:
        InfoFlowError: for texts of different length, spans that are none of the text, answers that
            are no tokens, a readout beside an answer, models that do not show their states and
            heads, and a folder that keeps another question's.
        KeyboardInterrupt: when it is stopped, with what to do to go on where `resume` is given.

    Example:
        >>> import infoflow_lens as il
        >>> text = "When Mary and John went to the store, John gave a drink to"
        >>> found = il.ask("build/models/smollm2", text, " Mary", " John")
        >>> found.to_frame("paths")
    """
    check_text(text)
    if readout is not None and (answer is not None or against is not None):
        raise InfoFlowError(
            "a readout is given beside answers: expected one of them; LogitDifference(answer, "
            "against) is the readout of two answers"
        )
    opened = _open(model, tokenizer, device, dtype, progress)
    if at is not None:
        text, instead, said = _cut_at(opened, text, instead, at)
        if readout is None and answer is None:
            answer = said
    read = _read(opened, text, "text")
    other_read = None if instead is None else _read(opened, instead, "instead")
    columns = _find_columns(read, other_read)
    ids, other_ids = read.rows[0].cpu(), None if other_read is None else other_read.rows[0].cpu()
    # tokens that both answers begin with are read as a part of the text, before the place
    prefix: list[int] = []
    start = len(ids)
    if readout is None:
        check_logits(opened, "an answer")
        alone = Batch(ids[None], None, {name: column[None] for name, column in columns.items()})
        one, other, prefix = _answers(opened, alone, answer, against)
        read_at = _place(opened, alone)
        if read_at >= 0:
            _check_same_place(ids, other_ids, read_at)
            start, read_at = read_at, read_at + len(prefix)
        readout = LogitDifference(one, other, read_at)
    shared = torch.tensor(prefix, dtype=ids.dtype)
    whole, second = (
        None if each is None else torch.cat([each[:start], shared, each[start:]])
        for each in (ids, other_ids)
    )
    assert whole is not None
    if prefix and columns:
        raise InfoFlowError(
            f"{answer!r} and {against!r} begin with the same token, and the text has "
            f"{' and '.join(columns)} beside its ids, which that token would lack: expected "
            "answers that differ in their first token, such as their ids"
        )
    if prefix:
        read_inputs(opened, whole[None], name="text, with what the answers share,")
    spans = find_units(opened, whole, units)
    # a folder keeps what was measured, so that the same question goes on
    with _keep_in(resume) as kept:
        numbers = measure_answer(
            opened,
            whole,
            second,
            _bind(readout, opened),
            quick=quick,
            exact=exact,
            seed=seed,
            batch_size=batch_size,
            progress=progress,
            spans=spans,
            columns=columns,
            **kept,
        )
    return Answer(**{item.name: getattr(numbers, item.name) for item in fields(numbers)})


def cut_lines(
    model: str | os.PathLike[str] | nn.Module | LoadedModel,
    found: Answer,
    lines: Iterable[int],
    *,
    readout: Readout | None = None,
) -> float:
    """Cut some lines of an answer at once, and measure what that does to its readout.

    From the first layer to the last, what the lines bring takes the value of the other text, and
    all behind goes free.

    Args:
        model: that was asked, as for :func:`ask`.
        found: its answer.
        lines: numbers from 1 on, as the page has them: of :meth:`~Answer.bundles`; an array or
            any other iterable of integers.
        readout: the one that was asked, where it was no logit difference.

    Returns:
        The change of the readout.

    Raises:
        InfoFlowError: for lines that the answer does not have, a readout that it does not say, and
            another model.
    """
    bundles, given = found.bundles(), plain(lines)
    if isinstance(given, Iterable) and not isinstance(given, (tuple, str, bytes, Mapping)):
        given = tuple(given)  # such as of a set or a generator
    remedy = Remedy(f"of 1 to {len(bundles)}, the lines of this answer")
    chosen: tuple[int, ...] = check(given, Annotated[tuple[int, ...], MinLen(1), remedy], "lines")
    if not all(1 <= line <= len(bundles) for line in chosen):
        raise InfoFlowError(f"lines are {list(chosen)}: expected some {remedy.text}")
    # a question of two answers says them in its record; a readout of the user's cannot be said
    if readout is None:
        if "asked" not in found.record.config:
            raise InfoFlowError(f"readout is missing: expected readout= as asked, {found.readout}")
        readout = LogitDifference(*found.record.config["asked"])
    opened = _open(model, None, None, None, False)
    paths = sorted({path for line in chosen for path in bundles[line - 1][1]})
    return measure_cut(opened, found, paths, _bind(readout, opened))


def _open(model: Any, tokenizer: Any, device: Any, dtype: Any, progress: bool) -> NamedModel:
    """Return the model as it is; a bridge in memory by what it computes."""
    with nullcontext() if progress else hide_library_bars():
        found = load_any(model, tokenizer=tokenizer, device=device, dtype=dtype, backend="opened")
    assert isinstance(found.model, NamedModel)
    return found.model


@contextmanager
def _keep_in(folder: str | os.PathLike[str] | None) -> Iterator[dict[str, Any]]:
    """Give what a folder keeps as `resume`, and as `after` what keeps more there."""
    if folder is None:
        yield {}
        return
    if (user_path(folder) / "config.json").exists() and not (user_path(folder) / MANIFEST).exists():
        raise InfoFlowError(
            f"resume is {os.fspath(folder)!r}, which holds a model, and nothing that was measured: "
            "expected a folder for the measured numbers; name a new one"
        )
    with RunFolder.open(folder, "ask()", (_KEPT,)) as run:
        if run.identity is not None:  # questions say nothing of a run as a whole
            raise InfoFlowError(
                f"resume is {os.fspath(folder)!r}, which holds a run of something else: expected a "
                "folder for the measured numbers of answers; name a new one"
            )
        checkpoint = Checkpoint(run, _KEPT)
        try:
            # written some seconds apart; what is newer waits, and is written at the end
            yield {"resume": checkpoint.load(), "after": checkpoint.take}
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                "what was measured is kept; ask the same with "
                f"resume={os.fspath(folder)!r} (--resume in the command) to go on"
            ) from None
        finally:
            checkpoint.flush()


def _read(model: NamedModel, text: Any, name: str, any_length: bool = False) -> Batches:
    """Read one text, or a pair of two, with what the model takes beside its ids."""
    return read_one(model, as_list(model, text), name, any_length=any_length)


def _find_columns(text: Batches, instead: Batches | None) -> dict[str, Tensor]:
    """Find what stands beside the ids of a text, by name, [pos].

    Raises:
        InfoFlowError: for another text that has something else there.
    """
    columns = {name: column[0].cpu() for name, column in text.columns.items()}
    if instead is None or len(instead.rows[0]) != len(text.rows[0]):  # which is refused later
        return columns
    others = {name: column[0].cpu() for name, column in instead.columns.items()}
    for name in [*columns, *(others.keys() - columns.keys())]:
        if name in columns and name in others and columns[name].equal(others[name]):
            continue
        raise InfoFlowError(
            f"text and instead differ in {name}: expected the same of both, so that the two texts "
            "differ in their tokens alone; change words into words of as many tokens, in each part "
            "of a pair"
        )
    return columns


def _cut_at(
    model: NamedModel, text: Any, instead: Any, at: int
) -> tuple[dict[str, Tensor], dict[str, Tensor] | None, int]:
    """Cut a text and the other one before a place, and return the token that stands there, too.

    Raises:
        InfoFlowError: for a place that cannot be asked about, and another text of another length.
    """
    whole, other = _whole(model, text, "text"), None
    n = len(whole["input_ids"])
    place = _check_place(model, n, at)
    if instead is not None:
        other = _whole(model, instead, "instead")
        if (n_other := len(other["input_ids"])) not in (n, place):
            raise InfoFlowError(
                f"text has {n} tokens and instead has {n_other}: expected as many, or the "
                f"{place} that are read; change words into words of as many tokens"
            )
        other = {name: row[:place] for name, row in other.items()}
    read = {name: row[:place] for name, row in whole.items()}
    return read, other, int(whole["input_ids"][place])


def _whole(model: NamedModel, text: Any, name: str) -> dict[str, Tensor]:
    """Read a text of any length, of which the model may read the beginning alone."""
    found = _read(model, text, name, any_length=True)
    beside = {name: column[0].cpu() for name, column in found.columns.items()}
    return {"input_ids": found.rows[0].cpu(), **beside}


def _check_place(model: NamedModel, n: int, at: int) -> int:
    """Count a place of a text from its beginning.

    Raises:
        InfoFlowError: for a place before which nothing stands, or that the text does not have, and
            for a model that sees what stands behind.
    """
    if not (1 <= at < n or 1 - n <= at <= -1):
        raise InfoFlowError(
            f"at is {at}, and the text has {n} tokens: expected 1 to {n - 1}, or -1 to {1 - n} "
            "from the last backwards, as a token is said from those before it"
        )
    if not is_causal(model):
        raise InfoFlowError(
            f"at is {at}, and the model sees the tokens behind it, too: expected a causal model; "
            "put the mask in the place of that token"
        )
    return at % n


def _place(model: NamedModel, text: Batch) -> int:
    """Find where the answer is read: at a mask, where the text has one, else at the end.

    Raises:
        InfoFlowError: for a text without a mask, and a model that predicts no next token.
    """
    mask = getattr(model.tokenizer, "mask_token_id", None)
    places = [] if mask is None else (text.tokens[0] == mask).nonzero().flatten().tolist()
    if places:
        return int(places[-1])
    # a classifier gives logits of the whole text, so it needs no mask
    if not is_causal(model) and gives_logits(model) and _logits(model, text).ndim == 2:
        masked = "a mask" if model.tokenizer is None else repr(model.tokenizer.mask_token)
        raise InfoFlowError(
            f"the text has no mask, and the {type(model.original_model).__name__} sees all of its "
            f"tokens and says no next one: expected {masked} in the place that is asked about; or "
            "name a place by readout=LogitDifference(answer, against, position)"
        )
    return -1


def _check_same_place(ids: Tensor, other_ids: Tensor | None, place: int) -> None:
    """Refuse another text that has something else where the text has its mask.

    Raises:
        InfoFlowError: naming the place.
    """
    # texts of other lengths are refused later, with what differs
    if other_ids is None or len(other_ids) != len(ids) or other_ids[place] == ids[place]:
        return
    raise InfoFlowError(
        f"text has its mask at position {place}, where the answer is read, and instead has another "
        "token there: expected the mask in the same place of both"
    )


def _logits(model: NamedModel, text: Batch) -> Tensor:
    """Run a text alone, without dropout."""
    with torch.no_grad(), eval_mode(model):
        return logits_of(call(model, text, output=True).output)[0]


def _answers(
    model: NamedModel, text: Batch, answer: Any, against: Any
) -> tuple[int, int, list[int]]:
    """Return two token ids, and the ids that stand before both where answers are several tokens.

    Raises:
        InfoFlowError: for words without a tokenizer, and answers of which one begins the other.
    """
    rows = [None if one is None else tokens_of_answer(model, one) for one in (answer, against)]
    for given, row in zip((answer, against), rows, strict=True):
        if row == []:
            raise InfoFlowError(f"an answer is {given!r}: expected a word")
    prefix: list[int] = []
    if rows[0] is not None and rows[1] is not None:
        pairs = list(zip(rows[0], rows[1]))
        # one answer that begins the other has no token of its own
        differ = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
        if differ is None:
            raise InfoFlowError(
                f"the answers {answer!r} and {against!r} do not differ in any token: expected two "
                "answers of which neither is the beginning of the other"
            )
        prefix = rows[0][:differ]
        return rows[0][differ], rows[1][differ], prefix
    # without answers, what the model finds most probable, beside the one that is given
    logits = _logits(model, text)
    here = logits[_place(model, text)] if logits.ndim == 2 else logits
    if len(here) < 2:
        raise InfoFlowError(
            "the model gives one number: expected two answers to choose from; ask for the number "
            "by readout=FunctionOfOutput(lambda output: output[:, 0])"
        )
    likely = here.topk(2).indices.tolist()
    chosen = [likely if ids is None else ids[:1] for ids in rows]
    one = next(token for token in chosen[0] if [token] != chosen[1])
    return one, next(token for token in chosen[1] if token != one), prefix


def _bind(readout: Readout, model: NamedModel) -> Readout:
    """Bind a readout to a model; ids of a logit difference are shown as words."""
    bound = bind_readout(readout, model)
    return bound.spell_ids(model) if isinstance(bound, LogitDifference) else bound
