"""What a model can be asked, found out by running it."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from infoflow_lens.foundation.display import panel
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.lazy import pd
from infoflow_lens.foundation.modules import SeededRandom, eval_mode, on_user_device
from infoflow_lens.foundation.record import weight_processing
from infoflow_lens.hooks.model.anatomy import Anatomy
from infoflow_lens.hooks.model.call import (
    Caught,
    block_starts,
    call,
    ignore_edit_warnings,
    mark_own_call,
    without_user_hooks,
)
from infoflow_lens.hooks.model.inputs import Batch, Inputs, pad_id, read_inputs
from infoflow_lens.hooks.model.inputs import example_input as inputs_of_examples
from infoflow_lens.hooks.model.log import first_tensor, tensors_in
from infoflow_lens.hooks.model.parts import Block
from infoflow_lens.hooks.model.points import (
    INSTEAD_OF_A_BRIDGE,
    FoundT,
    check_inputs,
    devices_of,
    hook_points,
    kind_of,
    layer_count,
    layers_with_attention,
    list_trials,
    reads_vectors,
    starts_at_layers,
    takes_model,
)
from infoflow_lens.hooks.model.semantics import hook_semantics, visible_keys
from infoflow_lens.hooks.model.sites import SiteRun

_MIXES_ELSEWHERE = (
    "more than attention moves information between positions, such as a state space or a "
    "convolution beside it: sets and scores that follow heads leave that out, so sets are too small"
)
_MIXED_BEFORE = (
    "what enters layer 0 holds more than a position's own token, as the embeddings mix neighbours: "
    "a source is all that enters there"
)
_MOVED = 1e-2  # of the change at the position that is changed; rounding is less [chosen]
_SCORES, _PATTERN = "attn.hook_attn_scores", "attn.hook_pattern"
_ATTENTION = (_SCORES, _PATTERN, "attn.hook_z")
_STREAM = ("hook_attn_out", "hook_resid_mid", "hook_mlp_out", "hook_resid_post")
_POINTS = ("hook_resid_pre", *_ATTENTION, *_STREAM)
_EDITED = tuple(point for point in _POINTS if point != "hook_mlp_out")
_CONSEQUENCES = ("hook_resid_mid", "hook_mlp_out", "hook_resid_post")


@dataclass(frozen=True)
class LayerCapabilities:
    """One layer.

    Attributes:
        n_heads: heads, from the pattern; None where there is no pattern.
        n_key_value_heads: heads of keys and values; fewer with grouped queries.
        attends: "causal", "local(w)" (causal within w positions), "bidirectional", or
            "bidirectional, last position is no key", for this input.
        pattern: what the pattern is of the scores: "softmax", "softmax with sinks" (rows sum to
            less than 1), "relu", "hardmax", or "unknown".
        scores: whether ``hook_attn_scores`` carries "scores" before the softmax, the "pattern" in
            their place, or is "missing".
        parallel: whether the MLP stands beside attention, that is, does not read what attention
            adds; None where there is no MLP, or one that reads nothing.
        fires: the hook points that fire, of those that probes use.
        edits_reach: the hook points whose edits change the output; ``hook_resid_mid`` only where an
            edit also stays in the residual stream (on bridges it is what the MLP reads, a copy).
        mixer: what runs in the place of attention, such as a state space; None with attention.
        mixes_elsewhere: whether more than attention moves information between positions.
    """

    n_heads: int | None
    n_key_value_heads: int | None
    attends: str
    pattern: str
    scores: str
    parallel: bool | None
    fires: tuple[str, ...]
    edits_reach: tuple[str, ...]
    mixer: str | None = None
    mixes_elsewhere: bool = False

    @property
    def missing(self) -> tuple[str, ...]:
        """The hook points that do not fire, of those that probes use."""
        return tuple(point for point in _POINTS if point not in self.fires)

    @property
    def edits_lost(self) -> tuple[str, ...]:
        """The hook points that fire, and whose edits have no effect."""
        return tuple(p for p in _EDITED if p in self.fires and p not in self.edits_reach)


@dataclass(frozen=True)
class ModelCapabilities:
    """What a model is and what can be measured on it.

    Attributes:
        kind: the class, such as "LlamaForCausalLM" or "HookedTransformer".
        layers: its attention layers.
        reads_vectors: whether it reads vector tokens in place of ids.
        starts_at_layers: whether a pass can start at a layer; where not, every pass that measures
            influence runs through all layers, and takes longer.
        dtype, device: of its weights; several devices are joined by commas.
        training: whether it was in training mode.
        dropout: whether it has dropout that training would switch on.
        normalization: what the config calls it, and whether it is folded.
    """

    kind: str
    layers: tuple[LayerCapabilities, ...]
    reads_vectors: bool
    starts_at_layers: bool
    dtype: str
    device: str
    training: bool
    dropout: bool
    normalization: Mapping[str, Any]

    def problems(self) -> tuple[str, ...]:
        """Return the things that cannot be measured on this model, why, and what to do."""
        by_text: dict[str, list[int]] = {}
        for index, layer in enumerate(self.layers):
            for text in _list_problems(layer):
                by_text.setdefault(text, []).append(index)
        found = [f"{name_layers(indices)}: {text}" for text, indices in by_text.items()]
        if "," in self.device:
            found.append(f"its weights lie on several devices ({self.device}); move it to one")
        return tuple(found)

    def kinds(self) -> dict[str, LayerCapabilities]:
        """Group layers that are alike, such as {"0-11": ...} or {"0, 2": ..., "1, 3": ...}."""
        alike: dict[LayerCapabilities, list[int]] = {}
        for index, layer in enumerate(self.layers):
            alike.setdefault(layer, []).append(index)
        return {_write_numbers(indices): layer for layer, indices in alike.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-compatible values, problems included."""
        return {**asdict(self), "problems": list(self.problems())}

    def to_frame(self) -> "pd.DataFrame":
        """Return a table with one row for each layer."""
        columns = {
            "heads": "n_heads",
            "kv_heads": "n_key_value_heads",
            **{name: name for name in ("attends", "pattern", "scores", "parallel")},
            "missing": "missing",
            "edits_lost": "edits_lost",
        }
        rows = []
        for index, layer in enumerate(self.layers):
            values = {name: getattr(layer, field) for name, field in columns.items()}
            joined = {n: ", ".join(v) if isinstance(v, tuple) else v for n, v in values.items()}
            rows.append({"layer": index, **joined})
        return pd.DataFrame(rows)

    def __repr__(self) -> str:
        problems = self.problems()
        said = f"{len(problems)} problems: {problems[0]}" if problems else "no problems"
        line = f"{self.kind}, {len(self.layers)} layers, {self.dtype}, {self.device}; {said}"
        return f"ModelCapabilities({line[:400]})"

    def _repr_html_(self) -> str:
        facts = {"dtype": self.dtype, "device": self.device}
        return panel(self.kind, facts, self.problems(), head=self.to_frame())


def _list_problems(layer: LayerCapabilities) -> list[str]:
    lack = "does not fire" if layer.scores == "missing" else "carries the pattern"
    lost = "edits of {} do not reach the output, so {}; " + INSTEAD_OF_A_BRIDGE
    if layer.mixer:
        return [
            f"it has no attention and runs {layer.mixer}, so mechanisms and flows cannot "
            "be measured"
        ]
    found = [
        (
            _PATTERN not in layer.fires,
            "hook_pattern does not fire, so there is no attention to measure; load the model with "
            "eager attention (attn_implementation='eager')",
        ),
        (
            _PATTERN in layer.fires and layer.scores != "scores",
            f"hook_attn_scores {lack}, so ranks and margins come from the pattern: keys whose "
            "weight underflows to 0 cannot be told from masked ones; where that matters, "
            f"{INSTEAD_OF_A_BRIDGE}",
        ),
        (
            _PATTERN in layer.edits_lost,
            lost.format(
                "hook_pattern",
                "patterns cannot be substituted and heads have no measurable mechanism",
            ),
        ),
        (
            "hook_resid_pre" not in layer.edits_reach,
            lost.format("hook_resid_pre", "influence cannot be measured"),
        ),
        (layer.mixes_elsewhere, _MIXES_ELSEWHERE),
    ]
    return [text for holds, text in found if holds]


def _write_numbers(indices: list[int]) -> str:
    """Write numbers such as "3", "0-11" or "0, 2-4"."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def name_layers(layers: list[int]) -> str:
    """Name layers, such as "layer 3" or "layers 0, 2-4"."""
    return f"layer{'s' if len(layers) > 1 else ''} {_write_numbers(layers)}"


@takes_model
def inspect_model(model: nn.Module, example_input: Inputs | None = None) -> ModelCapabilities:
    """Run a model to find out what it is and what can be measured on it.

    It is run once to see which hook points fire and what they carry. A model of TransformerLens is
    run once more for each hook point and layer, with an edit there, to see whether the edit reaches
    the output; of an opened model its anatomy says that. The model is left as it was found.

    Args:
        model: any Transformer.
        example_input: a few sequences, vector tokens [batch, pos, d_token] or ids [batch, pos], or
            a text; the longer, the more a local window shows; default, random ones.

    Raises:
        InfoFlowError: if it is no TransformerLens model, or the input is none for it.
    """
    if example_input is None:
        example_input = inputs_of_examples(model)
    elif not isinstance(example_input, Tensor):
        # of what holds sequences, such as texts, one is enough to see what fires
        read = read_inputs(model, example_input, name="example_input")
        example_input = next(read.batches(1)).tokens
    check_inputs(model, example_input, "example_input")
    devices, training = devices_of(model), model.training
    first = next(model.parameters())
    # dropout would make two passes differ, which edits are found by
    with eval_mode(model):
        layers = _inspect_layers(model, example_input)
    return ModelCapabilities(
        kind=kind_of(model),
        layers=layers,
        reads_vectors=reads_vectors(model),
        starts_at_layers=starts_at_layers(model) or _leaves_out_blocks(model),
        dtype=str(first.dtype).removeprefix("torch."),
        device=", ".join(devices),
        training=training,
        dropout=any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules()),
        normalization=weight_processing(model),
    )


def _leaves_out_blocks(model: nn.Module) -> bool:
    """Say whether a pass of an opened model can leave out all blocks but the last."""
    if not hasattr(model, "anatomy"):
        return False
    starts = block_starts(model)
    return bool(starts.blocks) and starts.can_start(len(starts.blocks) - 1)


def _inspect_layers(model: nn.Module, inputs: Tensor) -> tuple[LayerCapabilities, ...]:
    points = (*_POINTS, "attn.hook_k")
    plain = _run_pass(model, inputs, range(layer_count(model)), points)
    if not plain.output.isfinite().all():
        raise InfoFlowError(
            "the output holds NaN or infinity on the example input: expected numbers; look for "
            "bad weights, or run in float32"
        )
    layers, mixing = [], layers_that_mix_elsewhere(model, Batch(inputs[:1])) or []
    for layer, carries in enumerate(hook_semantics(model).scores):
        found = _select_layer(plain, layer)
        anatomy: Any = getattr(model, "anatomy", None)
        mixer: str | None = None
        # what was opened says itself where edits go; others are edited, and the output compared
        if anatomy is not None:
            block = anatomy.blocks[layer]
            mixer = block.mixer
            reached, parallel = _find_reach_by_anatomy(block, found)
            kv_heads = next((attention.n_kv_heads for attention in block.attentions), None)
        else:
            reached, parallel = _find_reach_by_edits(model, inputs, layer, plain)
            kv_heads = _count_key_value_heads(found)
        pattern, scores = found.get(_PATTERN), found.get(_SCORES)
        attends = kind = "unknown"
        if pattern is not None:
            kind = _name_kind(pattern, scores if carries == "scores" else None)
            # without scores that can be trusted, keys of weight 0 count as closed
            seen = pattern > 0
            if scores is not None and carries == "scores":
                seen = visible_keys(model, layer, scores)
            attends = _attends(seen.flatten(0, 1).any(dim=0))
        layers.append(
            LayerCapabilities(
                n_heads=None if pattern is None else pattern.shape[1],
                n_key_value_heads=kv_heads,
                attends=attends,
                pattern=kind,
                scores=carries,
                parallel=parallel,
                fires=tuple(point for point in _POINTS if point in found),
                edits_reach=tuple(reached),
                mixer=mixer,
                mixes_elsewhere=layer in mixing,
            )
        )
    return tuple(layers)


def note_other_mixing(model: nn.Module, batch: Batch) -> str:
    """Say where more than attention mixes positions, also before layer 0; empty if nowhere."""
    layers = try_once(model, batch, layers_that_mix_elsewhere) or []
    inside = [f"{name_layers(layers)}: {_MIXES_ELSEWHERE}"] if layers else []
    return "; ".join([*filter(None, [note_neighbours(model, batch)]), *inside])


def note_neighbours(model: nn.Module, batch: Batch) -> str:
    """Say whether what enters layer 0 at a position holds other tokens; empty if it does not."""
    return _MIXED_BEFORE if try_once(model, batch, _mixes_before) else ""


def try_once(
    model: nn.Module, batch: Batch, trial: Callable[[nn.Module, Batch], FoundT | None]
) -> FoundT | None:
    """Try a model by the longest sequence of the first batch that can tell; None before that."""
    known: dict[Any, FoundT] = list_trials(model)
    if trial not in known:
        found = trial(model, _find_longest(batch))
        if found is None:
            return None
        known[trial] = found
    return known[trial]


def _mixes_before(model: nn.Module, batch: Batch) -> bool | None:
    """Say whether what enters layer 0 mixes tokens; None for sequences that cannot tell.

    A model over token ids that was opened is tried, with two tokens that differ: one takes the
    place of the other.
    """
    point, ids = "blocks.0.hook_resid_pre", batch.tokens
    if not hasattr(model, "anatomy") or ids.is_floating_point() or ids.ndim != 2:
        return None
    place = int((ids[0] != ids[0, 0]).int().argmax())
    if not place or point not in hook_points(model):
        return None
    changed = ids.clone()
    changed[0, 0] = ids[0, place]
    with eval_mode(model), without_user_hooks(model):
        pair = [replace(batch, tokens=each) for each in (ids, changed)]
        before, after = (call(model, each, [point]).activations[point] for each in pair)
    moved = (after - before).float().norm(dim=-1)[0]
    return bool(moved[1:].max() > _MOVED * moved[0])


def _find_longest(batch: Batch) -> Batch:
    """Return the longest sequence of a batch, which has no padding."""
    row = 0 if batch.lengths is None else int(batch.lengths.argmax())
    return replace(batch.take(slice(row, row + 1)), lengths=None)


def layers_that_mix_elsewhere(model: nn.Module, batch: Batch) -> list[int] | None:
    """List the layers with attention in which more than that moves information between positions.

    Two passes tell, in which heads write nothing: what enters each layer is the same in both, but
    at one position. Where others leave the layer changed, a state space or a convolution stands
    beside attention, and no rule of the theory says what it moves.

    Args:
        model: any Transformer; of one that was not opened nothing is found.
        batch: a sequence; a single position cannot tell, and gives None.
    """
    known = hook_points(model)
    layers = [
        layer
        for layer in (layers_with_attention(model) if hasattr(model, "anatomy") else ())
        if {f"blocks.{layer}.hook_resid_{state}" for state in ("pre", "post")} <= known.keys()
    ]
    if not layers:
        return []
    silent = [(n, lambda z, hook: torch.zeros_like(z)) for n in known if n.endswith(".hook_z")]
    enter, leave = ([f"blocks.{n}.hook_resid_{s}" for n in layers] for s in ("pre", "post"))

    def leaving(given: Mapping[str, Tensor]) -> list[Tensor]:
        pinned = [(name, lambda _, hook, state=state: state) for name, state in given.items()]
        found = call(model, batch, leave, edit=[*silent, *pinned]).activations
        return [found[name].float() for name in leave]

    def change(state: Tensor, place: int, others: Bool[Tensor, " pos"]) -> Tensor:
        # as large as before: what some models write at the first position, say, is so large that
        # all else would seem to be rounding
        mean = torch.nn.functional.normalize(state[:, others].float(), dim=-1).mean(dim=1)
        size = state[:, place].float().norm(dim=-1, keepdim=True)
        changed = state.clone()
        changed[:, place] = (torch.nn.functional.normalize(mean, dim=-1) * size).to(state.dtype)
        return changed

    with eval_mode(model), without_user_hooks(model):
        given = call(model, batch, enter).activations
        n_pos = next(iter(given.values())).shape[1]  # of patches and frames fewer than were given
        if n_pos < 2:
            return None
        place = (n_pos - 1) // 2
        others = torch.arange(n_pos) != place
        changed = {name: change(state, place, others) for name, state in given.items()}
        pairs = zip(layers, leaving(given), leaving(changed), strict=True)
        moved = {layer: (two - one).norm(dim=-1)[0] for layer, one, two in pairs}
    return [n for n, gap in moved.items() if gap[others].max() > _MOVED * gap[place]]


def _find_reach_by_anatomy(
    block: Block, found: Mapping[str, Tensor]
) -> tuple[list[str], bool | None]:
    """Find edits that reach the output of an opened model, and whether its MLP is parallel.

    What is edited there is what the model goes on with.
    """
    added = found.get("hook_mlp_out")
    # where more than a sum leaves the block, as a norm of it, an edit does not leave as it was made
    stays = block.adds or added is None
    reached = [p for p in _EDITED if p in found and (stays or p != "hook_resid_mid")]
    return reached, None if added is None or not added.any() else block.is_parallel


def _find_reach_by_edits(
    model: nn.Module, inputs: Tensor, layer: int, plain: Caught
) -> tuple[list[str], bool | None]:
    """Find the same of another model, by an edit of each activation."""
    found = _select_layer(plain, layer)
    edited = {
        point: _run_pass(model, inputs, [layer], _CONSEQUENCES, edit=point)
        for point in _EDITED
        if point in found
    }
    reached = [p for p, other in edited.items() if not _same(other.output, plain.output)]
    behind = {point: _select_layer(other, layer) for point, other in edited.items()}
    if "hook_resid_mid" in reached and not _keeps_edit(found, behind["hook_resid_mid"]):
        reached.remove("hook_resid_mid")
    return reached, _is_parallel(found, behind)


def _run_pass(
    model: nn.Module,
    inputs: Tensor,
    layers: Iterable[int],
    points: Iterable[str],
    edit: str | None = None,
) -> Caught:
    """Run the model once and catch its activations and its output.

    With an edit, random numbers as large as that activation of the first layer are added to it.
    """
    known = hook_points(model)
    layers = list(layers)
    names = [f"blocks.{layer}.{point}" for layer in layers for point in points]
    generator = torch.Generator().manual_seed(0)

    def add_noise(activation: Tensor, hook: Any) -> Tensor:
        noise = torch.randn(activation.shape, generator=generator, dtype=torch.float32).to(
            activation
        )
        # masked scores stay so: they are far below all others
        moved = activation > 0.5 * activation.clamp(min=torch.finfo(activation.dtype).min).min()
        moved |= activation > -1e3
        return activation + noise * (activation[moved].abs().max() + 1) * moved

    edits = {} if edit is None else {f"blocks.{layers[0]}.{edit}": add_noise}
    with ignore_edit_warnings():
        return call(model, inputs, [n for n in names if n in known], edit=edits, output=True)


def _select_layer(made: Caught, layer: int) -> dict[str, Tensor]:
    """Select the activations of a layer, by hook point."""
    block = f"blocks.{layer}."
    found = made.activations.items()
    return {name.removeprefix(block): value for name, value in found if name.startswith(block)}


def _same(one: Tensor, other: Tensor) -> bool:
    return bool(torch.allclose(one.float(), other.float(), rtol=1e-6, atol=0))


def _count_key_value_heads(found: Mapping[str, Tensor]) -> int | None:
    """Count the heads of keys [batch, pos, head, d_head]; of flat keys, by the width of z."""
    keys, z, pattern = (found.get(point) for point in ("attn.hook_k", "attn.hook_z", _PATTERN))
    if keys is None or keys.ndim == 4:
        return None if keys is None else keys.shape[2]
    if z is None or (z.ndim == 3 and pattern is None):
        return None
    n_heads = z.shape[2] if pattern is None else pattern.shape[1]
    # flat keys [batch, pos, kv_head * d_head] have this share of the numbers of z
    return keys.numel() * n_heads // z.numel()


def _is_parallel(
    found: Mapping[str, Tensor], behind: Mapping[str, Mapping[str, Tensor]]
) -> bool | None:
    """Say whether the MLP reads the residual stream, but not what attention adds to it."""
    # an MLP that reads the stream moves with what enters; behind attention it moves with that, too
    answer = "hook_mlp_out"
    moved = [
        not _same(behind[point][answer], found[answer])
        for point in ("hook_resid_pre", "hook_attn_out")
        if point in behind and answer in found
    ]
    return None if len(moved) < 2 or not moved[0] else not moved[1]


def _keeps_edit(found: Mapping[str, Tensor], behind: Mapping[str, Tensor]) -> bool:
    """Say whether an edit of hook_resid_mid stays in the residual stream, besides changing the MLP.

    Bridges call by that name what their MLP reads: an edit moves the MLP's answer alone.
    """
    if not all(point in behind and point in found for point in _CONSEQUENCES):
        return True
    # an edit that stays changes what leaves by itself, and by what the MLP answers to it
    edit, answer, leaving = (behind[p].float() - found[p].float() for p in _CONSEQUENCES)
    return bool((leaving - answer - edit).norm() <= 0.1 * edit.norm())


def _attends(allowed: Bool[Tensor, "query key"]) -> str:
    query, key = allowed.nonzero(as_tuple=True)
    distance = query - key
    if len(distance) and int(distance.min()) >= 0:
        window = int(distance.max()) + 1
        return "causal" if window == len(allowed) else f"local({window})"
    no_key = not allowed[:, -1].any() and bool(allowed[:, :-1].all())
    return "bidirectional, last position is no key" if no_key else "bidirectional"


def _name_kind(
    pattern: Float[Tensor, "batch head query key"],
    scores: Float[Tensor, "batch head query key"] | None,
) -> str:
    total = pattern.float().sum(dim=-1)
    # half precision rounds each weight of a row
    tolerance = 1e-4 if pattern.dtype in (torch.float32, torch.float64) else 2e-2
    if scores is not None:
        # what the pattern would be for each kind that TransformerLens knows
        expected = {
            "softmax": scores.float().softmax(dim=-1).nan_to_num(),
            "relu": scores.float().relu(),
        }
        for kind, made in expected.items():
            if torch.allclose(pattern.float(), made, atol=tolerance):
                return kind
        if bool(((pattern == 0) | (pattern == 1)).all()) and bool((total <= 1).all()):
            return "hardmax"
    # less than 1 goes somewhere else: to a sink
    if bool((total < 1 - tolerance).any()) and bool((total <= 1 + tolerance).all()):
        return "softmax with sinks"
    return "softmax" if bool(((total - 1).abs() <= tolerance).all()) else "unknown"


_IN_FULL = (torch.float32, torch.float64)


def takes_padding(model: nn.Module, anatomy: Anatomy, example: Mapping[str, Any]) -> bool:
    """Run a few tokens alone, and padded on the right beside longer ones with a mask.

    They show something else where attention mixes neighbours, or averages over positions, before it
    masks them, where a model sees later positions and takes no mask, and where what it gives of a
    text is read off the padding, or a mean with it.

    Args:
        model: the model.
        anatomy: of it.
        example: what its ``forward`` takes, as for ``find_anatomy``.

    Returns:
        Whether the last state is the same, and so is an output of one vector for each sequence.
        True where that cannot be tried, for want of token ids.
    """
    ids = example.get("input_ids")
    # other examples cannot be cut and padded
    if len(example) > 1 or not isinstance(ids, Tensor) or ids.ndim != 2 or len(ids) < 2:
        return True
    n = ids.shape[1] // 2
    mask = torch.ones_like(ids)
    mask[1, n:] = 0
    parameters = inspect.signature(model.forward).parameters.values()
    has_mask = any(p.name == "attention_mask" or p.kind is p.VAR_KEYWORD for p in parameters)
    masked = {"attention_mask": mask} if has_mask else {}
    given = ids.where(mask == 1, pad_id(model))
    with mark_own_call(), SeededRandom(0), eval_mode(model):
        alone, vectors = _find_last_state(model, anatomy, {"input_ids": ids[1:, :n]})
        padded, others = _find_last_state(model, anatomy, {"input_ids": given, **masked})
    # a model of another layout: nothing that padding could be compared by
    if alone.ndim < 3 or alone.shape[1] != n or padded.shape[1] != ids.shape[1]:
        return True
    pairs = [(alone, padded[1:, :n])]
    pairs += [(one, two[1:]) for one, two in zip(vectors, others) if one.shape == two[1:].shape]
    return all(
        bool((two - one).float().abs().max() <= allowed * one.float().abs().max())
        for one, two in pairs
        for allowed in [1e-3 if one.dtype in _IN_FULL else 0.1]
    )


def _find_last_state(
    model: nn.Module, anatomy: Anatomy, given: Mapping[str, Any]
) -> tuple[Tensor, list[Tensor]]:
    """Run the model, and return what leaves the last block, or the output where that is hidden.

    Beside it stand the outputs of one vector for each sequence.
    """
    seen: list[Tensor] = []

    def keep(name: str, tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    has_stream = anatomy.blocks[-1].axes is not None
    names = [f"blocks.{len(anatomy.blocks) - 1}.hook_resid_post"] if has_stream else []
    with SiteRun(model, anatomy, names, keep).watch(), on_user_device():
        output = model(**given)
    found = first_tensor(seen or output)
    assert found is not None  # a model gives something
    vectors = [one for one in tensors_in(output) if one.ndim == 2 and one.is_floating_point()]
    return found, vectors
