"""From a model and a text to its flow."""

import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, MinLen
from jaxtyping import Bool
from torch import Tensor, nn

from infoflow_lens.flows.next_tokens import next_tokens, predict_replacements
from infoflow_lens.flows.result import Flow, RuleName
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import outside_user_modes
from infoflow_lens.foundation.progress import hide_library_bars, progress_bar
from infoflow_lens.foundation.record import model_fingerprint
from infoflow_lens.foundation.settings import (
    BothEnds,
    Count,
    Distinct,
    Remedy,
    Seed,
    check,
    checked,
)
from infoflow_lens.hooks import (
    AttendedProbe,
    HeadLabels,
    InfluenceResult,
    JacobianInfluence,
    PatternsProbe,
    PositionsProbe,
    PositionsResult,
    PowerRollout,
    PowerRolloutResult,
    ResampleInfluence,
    label_heads,
    run_probes,
)
from infoflow_lens.hooks.influence.base import StateInfluence, Threshold
from infoflow_lens.hooks.influence.probes import donors_from
from infoflow_lens.hooks.model.inputs import Batches, Inputs, read_inputs
from infoflow_lens.hooks.model.points import config_value, key_count, layer_count, reads_vectors
from infoflow_lens.hooks.model.texts import readable_tokens
from infoflow_lens.hooks.routes.graded import Question
from infoflow_lens.hooks.scores import Asked
from infoflow_lens.hooks.why import WhyAll, measure_why_all
from infoflow_lens.models.loading import LoadedModel, load_any

InfluenceKind = Literal["auto", "exact", "estimate", "resample"]
FEWEST = 8  # sequences from which a head's mean pattern says something [chosen]


Several = Annotated[tuple[int, ...], MinLen(1), Distinct()]
Place = Annotated[
    int | Several | Literal["auto", "all"],
    Remedy("counted from 0, or from -1 backwards; 'all' for all"),
]
Layers = Annotated[
    int | Several | None, Remedy("counted from 0, or from -1 backwards; None for all")
]
Directions = Annotated[int, Ge(2), Remedy("whose spread tells the error")]


def load_and_read(
    model: Any, text: Any, max_length: int | None, progress: bool, **options: Any
) -> tuple[LoadedModel, Batches]:
    """Return the model and what it reads.

    Args:
        model, options: as for `load_any`.
        text: a text or several, token ids, or vectors.
        max_length: longer texts are cut to so many tokens.
        progress: whether libraries show bars while they load a model.

    Raises:
        InfoFlowError: for no text, before the model is loaded; and as for `load_any` and
            `run_probes`.
    """
    check_text(text)
    with nullcontext() if progress else hide_library_bars():
        loaded = load_any(model, **options)
    given = as_list(loaded.model, text)
    return loaded, read_inputs(loaded.model, given, max_length=max_length, name="text")


def check_text(text: Any) -> None:
    """Refuse texts that are empty, before a model is loaded.

    Raises:
        InfoFlowError: for an empty text, or no text.
    """
    empty = isinstance(text, str) and not text
    if empty or (isinstance(text, (list, tuple)) and not len(text)):
        raise InfoFlowError(f"text is {text!r}: expected at least one text that is not empty")
    if text is None or isinstance(text, (bytes, int, float)):
        raise InfoFlowError(
            f"text is a {type(text).__name__}: expected a text, several, token ids or vectors"
        )


def as_list(model: nn.Module, text: Any) -> Any:
    """Wrap a single sequence of ids or vectors in a list; return several sequences unchanged."""
    vectors = reads_vectors(model)
    # a sequence of vectors has as many axes as a batch of ids
    if hasattr(text, "ndim") and text.ndim == (2 if vectors else 1):
        return text[None]
    if isinstance(text, (list, tuple)) and text and isinstance(text[0], int):
        return [text]
    return text


def layers_of(asked: Layers, n_layers: int) -> tuple[int, ...]:
    """Return the asked layers, counted from 0, in order.

    Raises:
        InfoFlowError: for layers that the model does not have.
    """
    if asked is None:
        return tuple(range(n_layers))
    asked = (asked,) if isinstance(asked, int) else asked
    if not all(-n_layers <= layer < n_layers for layer in asked):
        raise InfoFlowError(
            f"layer is {_one(asked)}: expected 0 to {n_layers - 1}, or -1 to -{n_layers} from the "
            "last backwards"
        )
    return tuple(sorted({layer % n_layers for layer in asked}))


def positions_of(asked: Place, rows: Sequence[Tensor], n_more: int) -> tuple[int, ...] | None:
    """Return the asked positions, as they were given; None for all, (-1,) for "auto".

    Raises:
        InfoFlowError: naming the input that is too short.
    """
    if isinstance(asked, str):
        return None if asked == "all" else (-1,)
    asked = (asked,) if isinstance(asked, int) else asked
    for index, row in enumerate(rows):
        n_states = len(row) + n_more  # CLS
        if not all(-n_states <= place < n_states for place in asked):
            which = f"text[{index}] has" if len(rows) > 1 else "the text has"
            raise InfoFlowError(
                f"position is {_one(asked)}, but {which} {n_states} positions: expected 0 to "
                f"{n_states - 1}, or -1 to -{n_states} from the last backwards"
            )
    return asked


def check_places(without: Sequence[int], longest: int) -> None:
    """Refuse positions to leave out that no text has.

    Raises:
        InfoFlowError: naming the first of them.
    """
    for place in without:
        if not -longest <= place < longest:
            raise InfoFlowError(
                f"without has position {place}, but the longest text has {longest} tokens: "
                f"expected 0 to {longest - 1}, or -1 to -{longest} from the last backwards"
            )


def _one(values: tuple[int, ...]) -> str:
    return str(values[0]) if len(values) == 1 else str(list(values))


def check_enough(reference: Batches | None, rows: Sequence[Tensor]) -> None:
    """Refuse reference inputs on which mechanisms cannot be measured.

    Raises:
        InfoFlowError: for too few sequences, or shorter ones.
    """
    n = len(rows) if reference is None else len(reference.rows)
    if n < FEWEST:
        what = "given" if reference is None else "reference inputs"
        raise InfoFlowError(
            f"rule is 'mechanisms' with {n} {what}: expected at least {FEWEST} inputs, as over one "
            "input a head's mean pattern is the pattern itself, which hides its mechanism; give "
            "reference=[...], or rule=label_heads(...)"
        )
    # at positions that no reference input has, a head has no mean pattern
    longest = max(map(len, rows))
    if reference is not None and (reference.longest or 0) < longest:
        raise InfoFlowError(
            f"reference inputs have at most {reference.longest} tokens, the text {longest}: "
            "expected some that are as long, so that mechanisms show at every position; give "
            "longer ones, or cut the text with max_length"
        )


_FEW_SECONDS = 2e11  # multiplications of all passes, up to which influence is exact [chosen]
_TWO_SECONDS = 6e10  # the same for positions that were not asked for [chosen]
_DIRECTIONS_ELSEWHERE = 16  # of an estimate on positions that were not asked for [chosen]
_MOST_DONORS = 8


def influence_probe(
    model: nn.Module,
    influence: InfluenceKind | None,
    layers: tuple[int, ...],
    positions: tuple[int, ...] | None,
    rows: Sequence[Tensor],
    reference: Batches | None,
    n_directions: int,
    seed: int,
) -> StateInfluence | None:
    """Make the probe for the influence that is asked for; with "auto" one that takes seconds.

    Args:
        model: the model.
        influence: the kind; None for no probe.
        layers, positions: of the states; positions None for all.
        rows: the inputs, each token ids [pos] or vectors [pos, d_token].
        reference: inputs whose tokens replace others with "resample"; None for the inputs' own.
        n_directions: random directions of an estimate, for each state.
        seed: of the random directions.

    Raises:
        InfoFlowError: if "resample" has no other token for some position.
    """
    if influence is None:
        return None
    if influence == "resample":
        donors = _donors(rows, reference)
        return ResampleInfluence(
            donors, "median", state="resid_post", layers=layers, positions=positions
        )
    exact = JacobianInfluence("resid_post", layers=layers, positions=positions)
    if influence == "exact":
        return exact
    estimate = JacobianInfluence(
        "resid_post", layers=layers, positions=positions, estimate=n_directions, seed=seed
    )
    # exact where that takes seconds, and where the user asks for it
    return (
        exact if influence == "auto" and _is_cheap(model, exact, rows, _FEW_SECONDS) else estimate
    )


def _is_cheap(model: nn.Module, probe: StateInfluence, rows: Sequence[Tensor], most: float) -> bool:
    """Say whether the influence takes at most so many multiplications."""
    anatomy = getattr(model, "anatomy", None)
    blocks: Any = model.blocks if anatomy is None else [block.module for block in anatomy.blocks]
    weights = sum(parameter.numel() for block in blocks for parameter in block.parameters())
    # a token of a pass takes about one multiplication with each weight
    work = weights * sum(_passes(model, probe, len(row)) * len(row) for row in rows)
    # 0 stands for sizes that are not known, whose work may be anything
    return 0 < work <= most


def probe_elsewhere(
    model: nn.Module, probe: StateInfluence | None, rows: Sequence[Tensor], seed: int
) -> StateInfluence | None:
    """Make a probe of that influence on all positions, or of an estimate; None if both are slow."""
    if probe is None:
        return None
    if isinstance(probe, ResampleInfluence):
        choices: list[StateInfluence] = [
            ResampleInfluence(probe.donors, "median", state="resid_post", layers=probe.layers)
        ]
    else:
        assert isinstance(probe, JacobianInfluence)
        asked = (None, _DIRECTIONS_ELSEWHERE) if probe.estimate is None else (probe.estimate,)
        choices = [
            JacobianInfluence("resid_post", layers=probe.layers, estimate=n, seed=seed)
            for n in asked
        ]
    # the most exact of the choices that takes seconds
    return next((each for each in choices if _is_cheap(model, each, rows, _TWO_SECONDS)), None)


def _passes(model: nn.Module, probe: StateInfluence, n_source: int) -> float:
    """Estimate how many forward passes of a sequence the influence on its asked states costs."""
    if isinstance(probe, ResampleInfluence):
        return n_source * len(probe.donors)
    assert isinstance(probe, JacobianInfluence)
    layers, width = probe.layers or (), int(config_value(model, "d_model") or 0)
    n_asked = n_source if probe.positions is None else len(probe.positions)
    directions = width if probe.estimate is None else min(probe.estimate, width)
    # backwards from each asked layer, through it and the layers below
    reverse = directions * n_asked * sum(layer + 1 for layer in layers) / layer_count(model)
    if probe.estimate is not None:
        return reverse
    architecture: Any = getattr(model, "architecture", None)
    d_source = architecture.d_token if reads_vectors(model) else width
    # or forwards from each number of each source, for all states at once
    return min(reverse, 2.0 * n_source * d_source)


def _donors(rows: Sequence[Tensor], reference: Batches | None) -> Tensor:
    """Return tokens that replace the tokens of the inputs, [donor, pos] or [donor, pos, d_token].

    They are those of the reference, or other tokens of the inputs.

    Raises:
        InfoFlowError: if some position has no other token.
    """
    longest = max(map(len, rows))
    if reference is None:
        return _others_of(rows, longest)
    donors = donors_from(reference, 0, longest)
    if all(_stays(donors, row).all() for row in rows):
        raise InfoFlowError(
            "influence is 'resample' and the reference inputs have the same tokens as the text "
            "everywhere: expected other tokens to put in their place; give another reference"
        )
    return donors


def _others_of(rows: Sequence[Tensor], longest: int) -> Tensor:
    """Find for each position other, different tokens of the inputs, the nearest before it first.

    A token that an input has in that place is none: put there again, it would move nothing.
    """
    # tokens of all inputs in one row, so that those of the text itself come first
    pool = [token for row in rows for token in row]
    keys = [tuple(token.flatten().tolist()) for token in pool]
    found = []
    for position in range(longest):
        here = {tuple(row[position].flatten().tolist()) for row in rows if len(row) > position}
        others: dict[tuple[float, ...], Tensor] = {}
        for step in range(1, len(pool)):
            if len(others) == _MOST_DONORS:
                break
            # nearest before first; below 0 the index goes on from the end of all inputs
            if keys[position - step] not in here:
                others.setdefault(keys[position - step], pool[position - step])
        if len(others) < 2:
            raise InfoFlowError(
                f"influence is 'resample' and for position {position} the text has {len(others)} "
                "other tokens, that is, other than what stands there: expected at least 2 to put "
                "in its place; give reference=[...], or choose influence 'estimate'"
            )
        found.append(list(others.values()))
    # as many donors at every position, as they make sequences
    n_donors = min(map(len, found))
    return torch.stack([torch.stack(others[:n_donors]) for others in found], dim=1)


def _stays(donors: Tensor, row: Tensor) -> Bool[Tensor, " pos"]:
    """Return the positions at which every donor has the same token as the input."""
    same = donors[:, : len(row)] == row.to(donors.device)
    return same.flatten(2).all(dim=2).all(dim=0) if same.ndim > 2 else same.all(dim=0)


def run_with_bar(
    model: nn.Module, inputs: Batches, probes: Sequence[Any], progress: bool
) -> tuple[Any, ...]:
    """Run probes input by input, with a bar over the passes that influence takes.

    Args:
        model: the model.
        inputs: its inputs.
        probes: the bar is for the last one, if that measures influence.
        progress: whether to show the bar.

    Returns:
        The results, in the order of the probes.
    """
    measure = probes[-1]
    if not isinstance(measure, StateInfluence):
        return run_probes(model, inputs, probes, batch_size=1, progress=False)
    # passes differ in length from text to text, so the bar counts work
    costs = [_passes(model, measure, len(row)) for row in inputs.rows]
    total, seen, advanced = max(1, round(sum(costs))), 0.0, 0
    with progress_bar("passes for influence", total, progress) as advance:

        def show(done: float) -> None:
            nonlocal advanced
            steps = min(total, round(done)) - advanced
            if steps > 0:
                advanced += steps
                advance(steps)

        def watch(share: float) -> None:
            show(seen + share * costs[measure.n_sequences])

        def after(n: int) -> None:
            nonlocal seen
            seen = sum(costs[: measure.n_sequences])
            show(seen)

        measure.watch = watch
        return run_probes(model, inputs, probes, batch_size=1, after_batch=after, progress=False)


def measure_contributions(
    model: nn.Module, inputs: Batches, measure: StateInfluence | None, positions: Asked | None
) -> PowerRolloutResult | None:
    """Measure contributions to a power, set for the kind of influence that is measured.

    None for models whose states cannot be decomposed, or not while hooks of the user's edit them.
    """
    is_small = isinstance(measure, JacobianInfluence)
    question: Question = "small changes" if is_small else "replacing a token"
    probe = PowerRollout(question, positions=positions)
    try:
        (found,) = run_probes(model, inputs, [probe], batch_size=1, progress=False)
    except InfoFlowError:
        return None
    return found


_MOST_REASONS = 20_000  # heads times positions: half a megabyte of a page [chosen]
_MOST_RANKS = 8  # that the picture's switch offers


@outside_user_modes()
@checked
def flow(
    model: str | os.PathLike[str] | nn.Module | LoadedModel,
    text: Inputs,
    position: Place = "auto",
    layer: Layers = None,
    influence: InfluenceKind | None = "auto",
    rule: RuleName | HeadLabels = "max_position",
    *,
    k: Count = 3,
    without: BothEnds = (),
    n_directions: Directions = 8,
    reference: Inputs | None = None,
    threshold: Threshold = 0.1,
    max_length: Count | None = None,
    seed: Seed = 0,
    tokenizer: Any | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    backend: str = "auto",
    progress: bool = True,
) -> Flow:
    """Predict from attention what can reach a state, and measure what does.

    Predicted are the information sets of all states, as heads pass keys on from layer to layer
    (Yu, Jiang, Bao, Li 2026, Sec. 5.1; `propagate`). Measured is the influence of every token on
    the states at the asked positions, in all layers (`JacobianInfluence`, `ResampleInfluence`).

    Influence at one position of all layers costs about 45 forward passes of the text where it is
    estimated, whatever the model. More positions cost as much each; a bar shows how much that is
    before the first of them.

    Args:
        model: a name, a folder, a model of TransformerLens, of this package or of transformers, or
            what `load_any` gave.
        text: a text or several, token ids, or vectors for models over vectors.
        position: of the states whose influence is measured, from 0, or from -1 backwards; several,
            or "all". "auto" is the last; the picture has the others, too, where they take seconds,
            exact or as an estimate.
        layer: of these states, from 0, or from -1 backwards; several; None for all.
        influence: "exact" Jacobian norms, an "estimate" of them by random directions, or
            "resample", by other tokens in their place; "auto" is exact where that takes a few
            seconds, else an estimate. None measures nothing.
        rule: what heads pass on: "max_position", the key of their largest score; "top_k", the keys
            of the k largest; "mechanisms", of each head by its label on `reference`; or labels
            (:func:`~infoflow_lens.hooks.label_heads`).
        k: of "top_k".
        without: key positions that no head passes on, such as (0,) for a BOS token that attention
            rests on, or (-1,) for the last one of each text. They are no candidates either: shares
            of influence, counts and chance are of the other tokens.
        n_directions: of an estimate, for each state.
        reference: other inputs: mechanisms are measured on them, and tokens of theirs take the
            place of others with "resample"; default, the inputs themselves, and other tokens of
            theirs.
        threshold: the share of the largest influence on a state from which `agreement` counts a
            source as measured.
        max_length: longer texts are cut to so many tokens.
        seed: of the random directions.
        tokenizer, device, dtype, backend: as for `load_any`.
        progress: show a bar, where it takes longer than a moment.

    Raises:
        InfoFlowError: for a model, texts, positions, layers or a rule that do not fit, before work
            starts.

    Example:
        >>> import infoflow_lens as il
        >>> f = il.flow("gpt2", "The cat sat on the mat because it was tired")
        >>> f.to_html("flow.html")
    """
    # rule: a name, or labels that were measured before
    mechanisms = rule if isinstance(rule, HeadLabels) else None
    rule_name: RuleName = "mechanisms" if mechanisms is not None else check(rule, RuleName, "rule")
    loaded, inputs = load_and_read(
        model, text, max_length, progress,
        tokenizer=tokenizer, device=device, dtype=dtype, backend=backend,
    )  # fmt: skip
    host = loaded.model
    if mechanisms is not None:
        remedy = "expected those of this model; measure them with label_heads(model, texts)"
        mechanisms.record.check_model(model_fingerprint(host), "rule holds the labels of", remedy)
    rows = list(inputs.rows)
    others = None
    if reference is not None:
        others = read_inputs(
            host, as_list(host, reference), max_length=max_length, name="reference"
        )
    # refused before anything is measured
    layers = layers_of(layer, layer_count(host))
    positions = positions_of(position, rows, int(reads_vectors(host)))
    longest = max(map(len, rows))
    check_places(without, longest)
    # places that are left out are no keys that a head could pass on
    n_keys = key_count(host, longest) - sum(-longest <= place < longest for place in without)
    if rule_name == "top_k" and k > n_keys:
        raise InfoFlowError(f"k is {k}: expected 1 to {n_keys}, the keys that a query has")
    # the picture lets one switch to more keys than the rule takes
    ranks = range(1, max(k if rule_name == "top_k" else 1, min(_MOST_RANKS, n_keys)) + 1)
    if rule_name == "mechanisms" and mechanisms is None:
        check_enough(others, rows)
    # all probes of the texts share one run
    ranking, patterns = PositionsProbe(tuple(ranks), without=without), PatternsProbe()
    measure = influence_probe(host, influence, layers, positions, rows, others, n_directions, seed)
    wanted: dict[str, Any] = {"positions": ranking, "attention": patterns}
    if rule_name == "mechanisms":
        wanted["attended"] = AttendedProbe()
    if measure is not None:
        wanted["influence"] = measure
    results = run_with_bar(host, inputs, list(wanted.values()), progress)
    found: dict[str, Any] = dict(zip(wanted, results, strict=True))
    chosen: PositionsResult = found["positions"]
    if rule_name == "mechanisms" and mechanisms is None:
        mechanisms = label_heads(host, others or inputs, progress=progress)
    result: InfluenceResult | None = found.get("influence")
    # other states get an estimate where that takes little
    everywhere = probe_elsewhere(host, measure, rows, seed) if position == "auto" else None
    elsewhere = None
    if everywhere is not None:
        (elsewhere,) = run_with_bar(host, inputs, [everywhere], progress)
    reasons, unknown = _reasons(host, inputs, chosen)
    is_plain = found["attention"].is_causal and not inputs.columns  # next tokens go by ids alone
    said = next_tokens(host, rows) if is_plain else None
    # all that decides the numbers, by which a saved flow is known
    config = {
        "flow": loaded.description.split(":")[0],
        "rule": rule_name,
        "k": k if rule_name == "top_k" else 1,
        "position": list(positions) if positions is not None else "all",
        "layer": list(layers),
        "without": list(without),
        "threshold": threshold,
        "influence": None if result is None else dict(result.record.config),
    }
    made = Flow._build(
        {
            "tokens": readable_tokens(host, rows),
            "rule": rule_name,
            "k": k if rule_name == "top_k" else 1,
            "influence": result,
            "elsewhere": elsewhere,
            "reasons": reasons,
            "next_tokens": said,
            "replaced": None if said is None else predict_replacements(host, rows),
            "positions": chosen,
            "attention": found["attention"],
            "attended": found.get("attended"),
            "mechanisms": mechanisms,
            "contributions": measure_contributions(host, inputs, measure, positions),
            "notes": (),
            "record": replace(chosen.record, config=config, seed=seed),
            "title": f"Information flow in {_name(loaded)}",
        }
    )
    notes = [*unknown, *_notes(made, loaded, without)]
    if measure is not None and position == "auto":
        notes += _elsewhere(elsewhere)
    return replace(made, notes=tuple(notes))


def _name(loaded: LoadedModel) -> str:
    """Name the model in a title."""
    name = loaded.description.split(":")[0]
    return "a model in memory" if name == "in memory" else name


def _reasons(
    host: nn.Module, inputs: Batches, chosen: PositionsResult
) -> tuple[WhyAll | None, list[str]]:
    """Find why heads prefer their first keys; or say why that is not known."""
    n_heads = sum(layer.shape[1] for layer in chosen.positions)
    if n_heads * int(chosen.lengths.sum()) > _MOST_REASONS:
        said = "the picture does not say why heads look where they look, as there are too many"
        return None, [f"{said}: why() answers for one head and query"]
    try:
        return measure_why_all(host, inputs), []
    except InfoFlowError as error:
        return None, [f"the picture does not say why heads look where they look: {error}"]


def _elsewhere(found: InfluenceResult | None) -> Iterator[str]:
    """Say what a reader must know of positions that were not asked for."""
    if found is None:
        yield (
            "influence was measured on the last position alone, as all positions would take more "
            "than a few seconds: position='all' (--position all) measures them"
        )
    elif found.relative_error is not None:
        yield (
            "influence on other positions is an estimate, with a relative error below "
            f"{max(found.relative_error):.0%}: position='all' with influence='exact' "
            "(--position all --influence exact) measures it exactly"
        )


def _notes(made: Flow, loaded: LoadedModel, without: Sequence[int]) -> tuple[str, ...]:
    """Return what a reader must know."""
    results = (made.positions, made.attention, made.influence, made.mechanisms)
    notes = [note for result in results if result is not None for note in result.notes]
    found = made.explained
    if found is not None and not found.reason() and found.size > 0.95 * found.others > 0:
        notes.append(
            "the predicted sets hold nearly every other token, so that they exclude nothing"
        )
    if found is not None and found.size == 0 and found.others > 0:
        notes.append(
            "the predicted sets hold no other token: the heads that matter here pass on their "
            "own position alone"
        )
    if without:
        places = ", ".join(map(str, without))
        notes.append(
            f"position {places} is left out, as was asked: no head passes it on, and it is no "
            "candidate"
        )
    if loaded.tokenizer is None and not reads_vectors(loaded.model):
        notes.append("the model has no tokenizer, so that tokens are shown as ids")
    return tuple(dict.fromkeys(notes))
