"""From a model and a text to its flow."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from infoflow_lens.flows.measuring import (
    influence_probe,
    measure_contributions,
    note_same_tokens,
    probe_elsewhere,
    run_with_bar,
)
from infoflow_lens.flows.next_tokens import next_tokens, predict_replacements
from infoflow_lens.flows.result import Flow
from infoflow_lens.flows.settings import (
    Directions,
    InfluenceKind,
    Layers,
    Place,
    RuleName,
    as_list,
    check_enough,
    check_places,
    layers_of,
    load_and_read,
    positions_of,
)
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import outside_inference_mode
from infoflow_lens.foundation.record import model_fingerprint
from infoflow_lens.foundation.settings import BothEnds, Count, Seed, check, checked
from infoflow_lens.hooks import (
    AttendedProbe,
    HeadLabels,
    InfluenceResult,
    PatternsProbe,
    PositionsProbe,
    PositionsResult,
    label_heads,
)
from infoflow_lens.hooks.influence.base import Threshold
from infoflow_lens.hooks.model.inputs import Batches, Inputs, read_inputs
from infoflow_lens.hooks.model.points import key_count, layer_count, reads_vectors
from infoflow_lens.hooks.model.texts import readable_tokens
from infoflow_lens.hooks.why.measure import measure_why_all
from infoflow_lens.hooks.why.result import WhyAll
from infoflow_lens.models.loading import LoadedModel

_MOST_REASONS = 20_000  # heads times positions: half a megabyte of a page [chosen]
_MOST_RANKS = 8  # that the picture's switch offers


@outside_inference_mode()
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
    if mechanisms is not None and mechanisms.record.model_fingerprint != model_fingerprint(host):
        raise InfoFlowError(
            "rule holds the labels of a model with other weights: expected those of this model; "
            "measure them with label_heads(model, texts)"
        )
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
    notes = [*unknown, *_notes(made, loaded, without), *note_same_tokens(measure, rows)]
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
    """Why heads prefer their first keys, and why that is not known."""
    n_heads = sum(layer.shape[1] for layer in chosen.positions)
    if n_heads * int(chosen.lengths.sum()) > _MOST_REASONS:
        return None, ["the picture does not say why heads look there, as there are too many: why()"]
    try:
        return measure_why_all(host, inputs), []
    except InfoFlowError as error:
        return None, [f"the picture does not say why heads look there: {error}"]


def _elsewhere(found: InfluenceResult | None) -> Iterator[str]:
    """Say what a reader must know of positions that were not asked for."""
    if found is None:
        yield (
            "influence was measured on the last position alone, as all take more than some "
            "seconds: position='all' measures them"
        )
    elif found.relative_error is not None:
        yield (
            "influence on other positions is an estimate, with a relative error below "
            f"{max(found.relative_error):.0%}: position='all' with influence='exact' is none"
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
        notes.append(f"no head passes on position {places}, which is no candidate, as was asked")
    if loaded.tokenizer is None and not reads_vectors(loaded.model):
        notes.append("the model has no tokenizer, so that tokens are shown as ids")
    return tuple(dict.fromkeys(notes))
