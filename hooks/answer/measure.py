"""measure_answer(): the steps of an answer, one after the other.

If no other text is given, it is made here: a word of the text is replaced by one like it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import eval_mode
from infoflow_lens.foundation.progress import progress_bar
from infoflow_lens.foundation.record import RunRecord, code_digest
from infoflow_lens.hooks.answer.paths import Circuit, Node, Path, cut_together, find_circuit
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
    predicts_tokens,
)
from infoflow_lens.hooks.answer.streams import Streams
from infoflow_lens.hooks.interventions.kept import KeptNumbers, identify
from infoflow_lens.hooks.model.inputs import Batches
from infoflow_lens.hooks.model.points import check_one_device, is_causal
from infoflow_lens.hooks.model.texts import readable_spans, readable_tokens
from infoflow_lens.hooks.passes.run import run_probes
from infoflow_lens.hooks.readouts import (
    LogitDifference,
    Readout,
    find_chances,
    has_several_labels,
    name_choice,
    take_ids,
)
from infoflow_lens.hooks.routes.graded import GradedSetsProbe, PowerRollout
from infoflow_lens.hooks.shares import measure_shares


def predict_tokens(
    model: nn.Module, text: Batches, position: int
) -> tuple[Float[Tensor, "order pos"], list[str]]:
    """Predict how strongly the last state of a position holds each token, by :data:`ORDERS`.

    NaN where it cannot be said: of tokens that the state does not see, and of models whose states
    cannot be decomposed.

    Args:
        model: what ``open_model`` gives.
        text: of which each token is scored.
        position: that is read.

    Returns:
        The scores, and what a reader must know.
    """
    n_pos = text.longest or 0
    last = position % n_pos
    scores = torch.full((len(ORDERS), n_pos), torch.nan, dtype=torch.float64)
    notes: list[str] = []
    missing: dict[str, list[str]] = {}  # orders that are not predicted, by the reason
    probes = PowerRollout(positions=(last,)), GradedSetsProbe(positions=(last,))
    for row, probe in enumerate(probes):
        try:
            (found,) = run_probes(model, text, [probe], progress=False)
        except InfoFlowError as error:
            missing.setdefault(_reason(error), []).append(ORDERS[row])
            continue
        scores[row] = found.values[-1, 0, 0].double().cpu()
        notes += [note for note in found.notes if note not in notes]
    for reason, orders in missing.items():
        notes.append(f"the order of tokens by {' or by '.join(orders)} is not predicted: {reason}")
    scores[2] = -(last - torch.arange(n_pos)).abs()
    # nearness alone says nothing of what a state sees, so the two others decide
    sees = scores[:2].nan_to_num(0).amax(dim=0) > 0
    return scores.masked_fill(~sees, torch.nan), notes


def _reason(error: InfoFlowError) -> str:
    """Take the reason from an error: what it expects is nothing that a reader can give here."""
    return str(error).partition(": expected")[0]


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


LEAST_GAP = 1.0  # between the readouts of two texts, below which no paths are drawn
_QUICK = 10  # heads that are measured in a quick answer
_LAST = (
    "the word that was replaced is the last one before the answer: the comparison shows what this "
    "word does to the answer, not how the words before it are used, and neither answer may fit "
    "after the new word; to ask about earlier words, give a text that differs there"
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
        question = Question(
            model, text, instead, readout, batch_size, kept, columns, spans, advance
        )
        tokens, guessed = None, instead is None
        # the other text is chosen by what tokens do, so a quick answer without one needs them, too
        if instead is None or not quick:
            tokens = measure_tokens(question, seed)
        if instead is None:
            assert tokens is not None
            other, note = _choose_text(question, tokens)
            question.compare_with(other)
            notes.append(note)
            last = next(range(*span) for span in question.spans if question.end in range(*span))
            says_next = is_causal(model) and question.clean.logits.ndim == 2
            if says_next and {*question.changed} <= {*last}:
                notes.append(_LAST)
        replaced = question.replace_tokens()
        # a gap near 0 would ask for a strip at every layer
        bar = LEAST_GAP if isinstance(readout, LogitDifference) else 0.0
        tolerance = TOLERANCE * max(abs(question.gap), bar)
        strips = {} if quick else measure_states(question, tolerance)
        most = 10**9 if exact else _QUICK if quick else N_HEADS
        units = measure_units(question, most)
        circuit = Circuit([], {}, 0.0, 0.0, is_whole=False)
        if reason := _no_paths(question):
            notes.append(f"no paths are drawn: {reason}")
        else:
            try:
                circuit = find_circuit(question, units, prune=not quick, seed=seed)
                if not circuit.is_whole:
                    remedy = "; another text may compare better (instead)" if guessed else ""
                    notes.append(
                        "the effect is spread over too many paths: those shown are the largest "
                        f"part of it{remedy}"
                    )
            except InfoFlowError as error:
                notes.append(f"no paths are drawn: {_reason(error)}")
        looked, looks, writes = _measure_looks(question, units, circuit, quick)
        if len(question.ends) != 1:
            notes.append(
                f"{readout} reads {len(question.ends)} positions: where heads look is not shown, "
                "as it differs from position to position"
            )
        predicted = torch.full((len(ORDERS), question.n_pos), torch.nan, dtype=torch.float64)
        # the predicted orders are of single tokens, for the state of one position
        is_one = hasattr(readout, "position") and len(question.ends) == 1
        if tokens is not None and spans is None and is_one:
            asked_of = question.sequences(question.clean.tokens)
            predicted, more = predict_tokens(model, asked_of, question.end)
            question.forwards += 2  # one for each order
            notes += more
    nothing = torch.full_like(replaced, torch.nan)
    clean, others = (run.tokens[0].cpu() for run in (question.clean, question.other))
    words, other_words = readable_tokens(model, [clean, others])
    answers, answer_chances = _answer_chances(question)
    replacements, replacement_effects = _list_replacements(question)
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
        spans=torch.tensor(question.spans),
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
            question.forwards += 4  # two passes, and a derivative, which counts as two
            places = {name: place for place, name in enumerate(shares.heads)}
            for row, (layer, head) in enumerate(heads):
                # heads beside another mixer have no share of their own
                if (place := places.get(f"head {layer}.{head}")) is not None:
                    writes[row, text] = shares.by_key[place]
    return torch.tensor(heads, dtype=torch.int64).reshape(-1, 2), looks, writes


_WHERE = "where such a {} moves the readout most"


def _choose_text(question: Question, tokens: TokenEffects) -> tuple[Int[Tensor, " pos"], str]:
    """Choose the other text; else put the guess that moves the readout most into the text.

    Returns:
        Token ids, and a note of how they were chosen.
    """
    spans, effect = question.spans, torch.full((question.n_pos,), torch.nan, dtype=torch.float64)
    for (start, stop), mean in zip(spans, mean_and_error(tokens.changes)[0].tolist(), strict=True):
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
    place, other = slice(*spans[number]), question.clean.tokens[0].clone()
    other[place] = tokens.donors[place, draw].to(other)
    if predicts_tokens(question):
        return other, f"the other text has the model's own guess {_WHERE.format('guess')}"
    return other, f"the other text has a token drawn at random {_WHERE.format('token')}"


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
        gap = abs(question.gap)
        return f"the readout differs by {gap:.2f} between the texts, less than {LEAST_GAP:g}"
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
    question: Question,
) -> tuple[tuple[tuple[str, ...], ...], Float[Tensor, "span replacement"]]:
    """List what was put in the place of each span, the likeliest first, and what that changed."""
    known = question.list_replacements()
    several = any(len(found) > 1 for found in known)
    guesses = guess_tokens(question).log() if several else None
    words, effects = [], []
    for (start, stop), found in zip(question.spans, known, strict=True):
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
