"""measure_answer(): the steps of an answer, one after the other."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import eval_mode
from infoflow_lens.foundation.progress import progress_bar
from infoflow_lens.foundation.record import RunRecord, code_digest
from infoflow_lens.hooks.answer.other_text import choose_likely_text
from infoflow_lens.hooks.answer.paths import Circuit, Node, Path, cut_together, find_circuit
from infoflow_lens.hooks.answer.predicted import predict_tokens
from infoflow_lens.hooks.answer.question import Question, Span
from infoflow_lens.hooks.answer.result import KINDS, ORDERS, AnswerNumbers
from infoflow_lens.hooks.answer.steps import (
    N_HEADS,
    TOLERANCE,
    TokenEffects,
    UnitEffects,
    guess_tokens,
    mean_and_error,
    measure_states,
    measure_tokens,
    measure_units,
)
from infoflow_lens.hooks.answer.streams import Streams
from infoflow_lens.hooks.interventions.kept import KeptNumbers, identify
from infoflow_lens.hooks.model.inputs import Batches
from infoflow_lens.hooks.model.points import check_one_device, is_causal
from infoflow_lens.hooks.model.texts import readable_spans, readable_tokens
from infoflow_lens.hooks.readouts import (
    LogitDifference,
    Readout,
    find_chances,
    has_several_labels,
    name_choice,
    take_ids,
)
from infoflow_lens.hooks.shares.measure import measure_shares

LEAST_GAP = 1.0  # between the readouts of two texts, below which no paths are drawn
_QUICK = 10  # heads that are measured in a quick answer
_LAST = (
    "the word that was replaced is the last one, behind which the answer is said: the comparison "
    "shows what this word does to the next one, and not how those before it are used, and maybe "
    "neither answer fits behind the other word; give a text that differs earlier to ask about those"
)
_LOOKED = 8  # heads of which it is said where they look
_SAME_PLACES = 0.1  # of a head's weight: what may move where both texts look at the same places


def measure_answer(
    model: nn.Module,
    text: Int[Tensor, " pos"],
    instead: Int[Tensor, " pos"] | None,
    readout: Readout,
    *,
    quick: bool = False,
    exact: bool = False,
    seed: int = 0,
    batch_size: int = 16,
    progress: bool = True,
    spans: Sequence[Span] | None = None,
    columns: Mapping[str, Int[Tensor, " pos"]] | None = None,
    resume: Mapping[str, Any] | None = None,
    after: Callable[[Mapping[str, Any]], None] | None = None,
) -> AnswerNumbers:
    """Answer a question of one text; :func:`infoflow_lens.ask` with everything at hand.

    Args:
        model: what ``open_model`` gives.
        text: token ids.
        instead: the other text, as long; None for one that reads like the text and speaks most for
            the other answer (:func:`choose_likely_text`), or, where none does so by 1, the model's
            own guess at the place where that moves the readout most.
        readout: bound to the model.
        quick: no tokens, no strips, ten heads, no pruning of paths.
        exact: all heads are measured.
        seed: of the draws of tokens and random paths.
        batch_size: rows in a pass.
        progress: whether to show a bar.
        spans: of all tokens, in their order, that are replaced at once; default, each by itself.
        columns: what stands beside the ids of both texts, by name, such as ``token_type_ids``.
        resume: what `after` was last given, of the same text, model and readout.
        after: called after each pass of exchanges with all that was measured so far.

    Raises:
        InfoFlowError: for texts that differ in length or nowhere, models that do not show what is
            needed, and `resume` of another run.
    """
    check_one_device(model)
    notes: list[str] = []
    columns, kept = columns or {}, None
    if resume is not None or after is not None:
        # with its code, as a function of the user's may change under the same name
        asked = {"readout": str(readout), "code of the readout": code_digest(readout)}
        beside = {name: [column] for name, column in columns.items()}
        whole = Batches(model, text[None], name="text", columns=beside)
        identity = identify(model, asked, inputs=whole)
        kept = KeptNumbers(identity, resume, after)
    with eval_mode(model), progress_bar("asking", None, progress) as advance:
        question = Question(model, text, instead, readout, batch_size, kept, columns)
        tokens, guessed = None, instead is None
        # the other text is chosen by what tokens do, so a quick answer without one needs them, too
        if instead is None or not quick:
            tokens = measure_tokens(question, seed, advance, spans)
        if instead is None:
            assert tokens is not None
            other, note = _choose_text(question, tokens, text, spans or question.single_tokens())
            question.compare_with(other)
            notes.append(note)
            each = spans or question.single_tokens()
            last = next(range(*span) for span in each if question.end in range(*span))
            says_next = is_causal(model) and question.clean.logits.ndim == 2
            if says_next and {*question.changed} <= {*last}:
                notes.append(_LAST)
        replaced = question.replace_tokens(spans, advance)
        # a gap near 0 would ask for a strip at every layer
        bar = LEAST_GAP if isinstance(readout, LogitDifference) else 0.0
        tolerance = TOLERANCE * max(abs(question.gap), bar)
        strips = {} if quick else measure_states(question, tolerance, advance, spans)
        most = 10**9 if exact else _QUICK if quick else N_HEADS
        units = measure_units(question, most, advance=advance)
        circuit = Circuit([], {}, 0.0, 0.0, is_whole=False)
        if reason := _no_paths(question):
            notes.append(f"no paths are drawn: {reason}")
        else:
            try:
                circuit = find_circuit(question, units, prune=not quick, seed=seed, advance=advance)
                if not circuit.is_whole:
                    remedy = "; another text may compare better (instead)" if guessed else ""
                    notes.append(
                        "the effect is spread too widely: these paths are the largest part of "
                        f"it{remedy}"
                    )
            except InfoFlowError as error:
                notes.append(f"no paths are drawn: {error}")
        looked, looks, writes = _measure_looks(question, units, circuit, quick)
        if len(question.ends) != 1:
            notes.append(
                f"{readout} reads {len(question.ends)} positions: it is not said where heads look, "
                "which is another place from each"
            )
        predicted = torch.full((len(ORDERS), question.n_pos), torch.nan, dtype=torch.float64)
        # the predicted orders are of single tokens, for the state of one position
        is_one = hasattr(readout, "position") and len(question.ends) == 1
        if tokens is not None and spans is None and is_one:
            asked_of = question.sequences(question.clean.tokens)
            predicted, more = predict_tokens(model, asked_of, question.end)
            question.forwards += 2
            notes += more
    nothing = torch.full_like(replaced, torch.nan)
    clean, others = (run.tokens[0].cpu() for run in (question.clean, question.other))
    words, other_words = readable_tokens(model, [clean, others])
    answers, answer_chances = _answer_chances(question)
    replacements, replacement_effects = _list_replacements(question, spans)
    by_others = (nothing, nothing) if tokens is None else mean_and_error(replacement_effects)
    (guess, chance), (other_guess, other_chance) = (
        _guess(question, run.logits) for run in (question.clean, question.other)
    )
    config = {
        "probe": "ask", "readout": str(readout), "quick": quick, "exact": exact, "seed": seed,
        **({} if spans is None else {"spans": [*map(list, spans)]}),
        **({"asked": _list_arguments(readout)} if isinstance(readout, LogitDifference) else {}),
        "text": clean.tolist(), "instead": others.tolist(),
        **({"columns": {name: c.tolist() for name, c in columns.items()}} if columns else {}),
    }  # fmt: skip
    found = AnswerNumbers(
        readout=str(readout),
        value=question.clean.value,
        other_value=question.other.value,
        tokens=words,
        other_tokens=other_words,
        guess=guess,
        chance=chance,
        other_guess=other_guess,
        other_chance=other_chance,
        answers=answers,
        answer_chances=answer_chances,
        spans=torch.tensor(spans or question.single_tokens()),
        span_words=readable_spans(model, clean, spans) if spans else words,
        other_span_words=readable_spans(model, others, spans) if spans else other_words,
        token_mean=by_others[0],
        token_error=by_others[1],
        token_other=replaced,
        replacements=replacements,
        replacement_effects=replacement_effects,
        token_predicted=predicted,
        read_at=question.end,
        strip_layers=tuple(strips),
        strips=torch.stack([*strips.values()])
        if strips
        else torch.zeros(0, len(replaced)).double(),
        units=torch.tensor(units.units),
        unit_estimate=units.estimate,
        unit_effect=units.effect,
        **_columns(circuit),
        looked=looked,
        looks=looks,
        writes=writes,
        kept=circuit.kept,
        lost=circuit.lost,
        random=tuple(circuit.random),
        n_pruned=len(circuit.pruned),
        forwards=round(question.forwards, 1),
        record=RunRecord.from_model(model, config),
        notes=tuple(notes),
    )
    if len(found.looks) and found.looks_elsewhere < _SAME_PLACES:
        said = "both texts look at the same places: what differs is what is carried"
        return replace(found, notes=(*found.notes, said))
    return found


def measure_cut(
    model: nn.Module, found: AnswerNumbers, paths: Sequence[int], readout: Readout
) -> float:
    """Measure what cutting some paths of an answer at once does to its readout.

    Raises:
        InfoFlowError: where the model does not give the answer's readout, and for paths that the
            answer does not have.
    """
    text, instead = (torch.tensor(found.record.config[name]) for name in ("text", "instead"))
    if not paths or not all(0 <= path < len(found.places) for path in paths):
        raise InfoFlowError(
            f"paths are {list(paths)}: expected some of 0 to {len(found.places) - 1}, the paths of "
            "the answer"
        )
    rows = found.places[list(paths)].tolist()
    asked = [
        Path(Node(*row[:3]), None if row[3] < 0 else Node(*row[3:6]), KINDS[row[6]]) for row in rows
    ]
    with eval_mode(model):
        device = next(model.parameters()).device
        recorded = found.record.config.get("columns", {})
        columns = {name: torch.tensor(column) for name, column in recorded.items()}
        question = Question(model, text.to(device), instead.to(device), readout, columns=columns)
        if abs(question.clean.value - found.value) > 1e-3 * max(1.0, abs(found.value)):
            raise InfoFlowError(
                f"the readout is {question.clean.value:.4g}, and {found.value:.4g} in the answer: "
                "expected the model and the readout of the answer"
            )
        return cut_together(Streams(question), asked)


def _measure_looks(
    question: Question, units: UnitEffects, circuit: Circuit, quick: bool
) -> tuple[Int[Tensor, "head two"], Float[Tensor, "head text pos"], Float[Tensor, "head text pos"]]:
    """Find where heads look, in both texts, and what they write: of paths, and of large effects.

    What they write directly towards the readout, by key, is asked where the readout is linear.
    """
    patterns = {layer: f"blocks.{layer}.attn.hook_pattern" for layer in range(question.n_layers)}
    order = units.effect.abs().nan_to_num(-1).argsort(descending=True).tolist()
    measured = [units.units[i] for i in order if units.effect[i].isfinite()]
    # heads of paths first, where these write at the position that is read
    on_paths = {path.writer[:2] for path in circuit.paths if path.writer[2] == question.end}
    measured.sort(key=lambda unit: unit not in on_paths)
    heads = [
        (layer, head)
        for layer, head in measured
        if head >= 0 and patterns[layer] in question.clean.shown
    ][:_LOOKED]
    if len(question.ends) != 1:  # each of the positions that are read looks somewhere else
        heads = []
    shape = (len(heads), 2, question.n_pos)
    looks, writes = (torch.full(shape, torch.nan, dtype=torch.float64) for _ in range(2))
    for text, run in enumerate((question.clean, question.other)):
        for row, (layer, head) in enumerate(heads):
            looks[row, text] = run.shown[patterns[layer]][0, head, question.end].double().cpu()
        if not quick and question.readout.is_linear and heads:
            sequence = question.sequences(run.tokens)
            shares = measure_shares(question.model, sequence, question.readout)
            question.forwards += 4
            places = {name: place for place, name in enumerate(shares.heads)}
            for row, (layer, head) in enumerate(heads):
                writes[row, text] = shares.by_key[places[f"head {layer}.{head}"]]
    return torch.tensor(heads, dtype=torch.int64).reshape(-1, 2), looks, writes


def _choose_text(
    question: Question, tokens: TokenEffects, text: Int[Tensor, " pos"], spans: Sequence[Span]
) -> tuple[Int[Tensor, " pos"], str]:
    """Choose the other text; else put the guess that moves the readout most into the text.

    Returns:
        Token ids, and a note of how they were chosen.
    """
    effect = torch.full((question.n_pos,), torch.nan, dtype=torch.float64)
    for (start, stop), mean in zip(spans, tokens.mean.tolist(), strict=True):
        effect[start:stop] = mean
    likely = choose_likely_text(question, effect)
    if likely is not None and float(question.measure_texts(likely[None])[0]) <= -LEAST_GAP:
        said = "the other text was chosen, with one token replaced: see that it reads well"
        return likely, f"{said}, else give one of your own"
    sizes = tokens.changes.abs().nan_to_num(-1)
    fixed = _find_special_places(question)
    is_free = torch.tensor([fixed.isdisjoint(range(*span)) for span in spans])
    if bool(is_free.any()):  # else any is better than none
        sizes[~is_free] = -1
    number, draw = divmod(int(sizes.argmax()), sizes.shape[1])
    place, other = slice(*spans[number]), text.clone()
    other[place] = tokens.donors[place, draw].to(other)
    note = "the other text is the model's own guess at the place where that moves the readout most"
    return other, note


def _find_special_places(question: Question) -> set[int]:
    """Find the positions that another text keeps: special tokens, and where an encoder is asked.

    What stands there, such as a mask, is what is asked about: an encoder says it again.
    """
    special = {*getattr(getattr(question.model, "tokenizer", None), "all_special_ids", [])}
    tokens = question.clean.tokens[0].tolist()
    fixed = {at for at, token in enumerate(tokens) if token in special}
    is_asked = question.clean.logits.ndim == 2 and not is_causal(question.model)
    return fixed | ({*question.ends} if is_asked else set())


def _no_paths(question: Question) -> str:
    """Say why paths would explain little; nothing if they may be drawn."""
    if not isinstance(question.readout, LogitDifference):
        return ""
    if abs(question.gap) < LEAST_GAP:
        return f"the two texts differ by {question.gap:.2f} in this, which is below {LEAST_GAP:g}"
    if question.clean.value < 0:
        return "the model does not prefer the answer in this text"
    return ""


def _guess(question: Question, logits: Float[Tensor, "..."]) -> tuple[str, float]:
    """Find what the model says of a text where the readout reads, and how probable it finds that.

    Nothing, where it gives no logits of tokens or classes at one position.
    """
    if not hasattr(question.readout, "position"):
        return "", torch.nan
    row = logits[question.readout.position] if logits.ndim == 2 else logits
    chance, token = find_chances(question.model, row).max(dim=-1)
    return name_choice(question.model, int(token)), float(chance)


def _answer_chances(
    question: Question,
) -> tuple[tuple[str, ...], Float[Tensor, "text answer"]]:
    """Name the answer and the other one, and find how probable they are in both texts."""
    readout = question.readout
    if not isinstance(readout, LogitDifference) or readout.against is None:
        return (), torch.zeros(2, 0, dtype=torch.float64)
    rows, sides = [], (readout.answer, readout.against)
    # how probable one of several labels is cannot be said where they do not exclude one another
    several = any(not isinstance(side, str | int) and len(side) > 1 for side in sides)
    if several and has_several_labels(question.model):
        return (), torch.zeros(2, 0, dtype=torch.float64)
    for run in (question.clean, question.other):
        row = run.logits[readout.position] if run.logits.ndim == 2 else run.logits
        chances = find_chances(question.model, row)[None]
        rows.append([float(take_ids(chances, ids).sum()) for ids in sides])
    return readout.name_sides(question.model), torch.tensor(rows, dtype=torch.float64)


def _list_replacements(
    question: Question, spans: Sequence[Span] | None
) -> tuple[tuple[tuple[str, ...], ...], Float[Tensor, "span replacement"]]:
    """List what was put in the place of each span, the likeliest first, and what that changed."""
    spans = question.single_tokens() if spans is None else spans
    known = question.list_replacements(spans)
    several = any(len(found) > 1 for found in known)
    guesses = guess_tokens(question).log() if several else None
    words, effects = [], []
    for (start, stop), found in zip(spans, known, strict=True):
        order, here = list(found), [(0, stop - start)]
        if guesses is not None:
            row = guesses[start:stop]
            chance = {ids: float(row[range(len(ids)), list(ids)].sum()) for ids in order}
            order.sort(key=chance.__getitem__, reverse=True)
        words.append(
            tuple(readable_spans(question.model, torch.tensor(ids), here)[0] for ids in order)
        )
        effects.append(torch.tensor([found[ids] for ids in order], dtype=torch.float64))
    return tuple(words), nn.utils.rnn.pad_sequence(
        effects, batch_first=True, padding_value=torch.nan
    )


def _list_arguments(readout: LogitDifference) -> list[Any]:
    """List the arguments of a readout that is bound to a model."""
    sides = [
        side if side is None or isinstance(side, int) else list(side)
        for side in (readout.answer, readout.against)
    ]
    return [*sides, readout.position]


def _columns(circuit: Circuit) -> dict[str, Tensor]:
    rows = [
        [*path.writer, *(path.reader or (-1, -1, -1)), KINDS.index(path.kind)]
        for path in circuit.paths
    ]

    def column(values: dict[Any, float]) -> Tensor:
        found = [values.get(path, torch.nan) for path in circuit.paths]
        return torch.tensor(found, dtype=torch.float64)

    return {
        "places": torch.tensor(rows, dtype=torch.int64).reshape(-1, 7),
        "path_worth": column(circuit.worth),
        "path_cost": column(circuit.cost),
        "path_effect": column(circuit.effect),
    }
