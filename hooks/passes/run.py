"""run(): one forward pass of a model as probes see it; and probes over many of them."""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from infoflow_lens.foundation.display import count
from infoflow_lens.foundation.errors import InfoFlowError, InfoFlowWarning, is_out_of_memory
from infoflow_lens.foundation.modules import eval_mode
from infoflow_lens.foundation.progress import progress_bar
from infoflow_lens.foundation.record import WeightState, model_fingerprint
from infoflow_lens.foundation.settings import Count, Index, checked
from infoflow_lens.hooks.model.call import Edits, call
from infoflow_lens.hooks.model.inputs import (
    Batch,
    Batches,
    Extent,
    Inputs,
    check_mask,
    read_inputs,
)
from infoflow_lens.hooks.model.points import check_one_device, key_count, takes_model
from infoflow_lens.hooks.passes.view import Needs, Pass, check_no_padding
from infoflow_lens.hooks.probe import Probe, Split
from infoflow_lens.hooks.scores import StateScoresProbe


@takes_model
def run(
    model: nn.Module,
    batch: Batch | Tensor,
    want: Needs | Collection[str] = (),
    edit: Edits = (),
    start: tuple[str, Tensor] | None = None,
    *,
    output: bool = False,
) -> Pass:
    """Run one forward pass, which ends as soon as all that is wanted has been seen.

    Where hooks of yours are on the model it runs whole, as they may stand further on.

    Args:
        model: any Transformer, in the mode that you want.
        batch: sequences: token ids [batch, pos], vector tokens [batch, pos, d_token], or a
            :class:`Batch` with their lengths.
        want: what you will read from the pass, as :class:`Needs` or hook points.
        edit: hooks that replace activations, by hook point.
        start: a hook point where the pass starts, and what enters there.
        output: whether the model's output is wanted; then the pass does not end early.

    Returns:
        The pass, with what was wanted.

    Raises:
        InfoFlowError: for NaN or infinity, and for padding that is not masked.
    """
    needs = want if isinstance(want, Needs) else Needs(tuple(want))
    given = batch if isinstance(batch, Batch) else Batch(batch)
    caught = call(model, given, needs.points, edit=edit, start=start, output=output)
    mask = None if given.lengths is None else given.mask()
    return Pass(
        model,
        caught.activations,
        tokens=given.tokens,
        mask=mask,
        columns=given.columns,
        needs=needs,
        output=caught.output,
    )


def check_probes(probes: Any) -> None:
    """Refuse what is no list of different probes.

    Raises:
        InfoFlowError: for other objects, and for a probe that is given twice or is attached.
    """
    if isinstance(probes, Probe) or not all(isinstance(probe, Probe) for probe in probes):
        raise InfoFlowError(f"probes is {probes!r}: expected a list of probes, as in [p] or [p, q]")
    ids = [id(probe) for probe in probes]
    if len(set(ids)) < len(ids) or any(probe.is_attached for probe in probes):
        raise InfoFlowError(
            "a probe is attached twice, so every sequence would count twice: expected different "
            "probes; make a new one"
        )


def prepare(model: nn.Module, probes: Sequence[Probe[Any]], weights: WeightState) -> Needs:
    """Prepare probes for passes of `model`, and return what they need together.

    Raises:
        InfoFlowError: if the model lies on several devices, or lacks what a probe needs.
    """
    check_probes(probes)
    check_one_device(model)
    fingerprint = model_fingerprint(model, weights)
    needs = Needs(())
    for probe in probes:
        needs |= probe.prepare(model, fingerprint)
    return needs


@takes_model
@checked
def probe_cache(
    model: nn.Module,
    cache: Mapping[str, Tensor],
    probes: Sequence[Probe[Any]],
    *,
    tokens: Tensor | None = None,
    attention_mask: Tensor | None = None,
    eval_every: int = 5,
) -> tuple[Any, ...]:
    """Measure a forward pass that you have already made, from its ActivationCache.

    Call it for every cache to go on with the same probes.

    Args:
        model: the model that made the cache, with the same weights.
        cache: activations by hook point, with a batch axis.
        probes: what to measure.
        tokens: what the model was run on; some probes need the token ids.
        attention_mask: which positions are real [batch, pos], if the pass was padded.
        eval_every: every so many sequences one is held out.

    Returns:
        The results so far, in the order of `probes`.

    Raises:
        InfoFlowError: if the cache lacks what a probe needs or has no batch axis, or shows padding
            without an `attention_mask`.
    """
    split = Split(eval_every)
    if not getattr(cache, "has_batch_dim", True):
        raise InfoFlowError(
            "the cache has no batch axis: expected one; keep it (remove_batch_dim=False)"
        )
    # a mask or tokens of another batch would say of other sequences what is read of these
    _check_fits_cache(cache, tokens, "tokens")
    _check_fits_cache(cache, attention_mask, "attention_mask")
    mask = None if attention_mask is None else check_mask(attention_mask, "attention_mask")
    needs = prepare(model, probes, WeightState(model))
    missing = [name for name in needs.points if name not in cache]
    if missing:
        names = ", ".join(type(probe).__name__ for probe in probes)
        raise InfoFlowError(
            f"the cache lacks {', '.join(missing)}, which {names} read: expected a cache of all "
            "activations, or a names_filter with these"
        )
    # without a mask, padding shows in attention alone
    if mask is None:
        check_no_padding(model, cache)
    activations = {name: cache[name].detach() for name in needs.points}
    real = None if mask is None or mask.all() else mask
    seen = Pass(model, activations, tokens=tokens, mask=real, needs=needs)
    for probe in probes:
        probe.take(seen, split)
    return tuple(probe.result() for probe in probes)


def _check_fits_cache(cache: Mapping[str, Tensor], given: Tensor | None, what: str) -> None:
    names = ("hook_tokens", "hook_embed", "blocks.0.hook_resid_pre")
    activation = next((cache[name] for name in names if name in cache), None)
    if given is not None and activation is not None and given.shape[:2] != activation.shape[:2]:
        raise InfoFlowError(
            f"{what} has shape {tuple(given.shape)}, the cache is of {tuple(activation.shape[:2])} "
            "sequences and positions: expected those of the same pass"
        )


@takes_model
@checked
def run_probes(
    model: nn.Module,
    inputs: Inputs,
    probes: Sequence[Probe[Any]],
    eval_inputs: Inputs | None = None,
    *,
    attention_mask: Tensor | None = None,
    column: str | None = None,
    max_length: Count | None = None,
    batch_size: Count = 256,
    eval_every: int = 5,
    first_index: int = 0,
    index_step: int = 1,
    skip: Index = 0,
    after_batch: Callable[[int], None] | None = None,
    progress: bool = True,
) -> tuple[Any, ...]:
    """Run `model` over `inputs` with `probes`, and return their results.

    The model runs in eval mode and without gradients, only as far as the probes look unless hooks
    of yours stand on it, and is left as it was found: its mode, hooks, gradients and the random
    state. Between passes (in a loader or `after_batch`) it has its own mode. If you stop it
    (Ctrl-C), or something fails, the probes keep every finished batch: call their ``result()``. If
    memory runs out, the batch is halved once, with a warning.

    Args:
        model: any Transformer, or what `load_any` gave; one without hook points is opened.
        inputs: vector tokens [n, pos, d_token] or token ids [n, pos]; a text or a list of texts;
            a list of sequences of ids; a ``datasets.Dataset``; a DataLoader or another iterable of
            batches of these. Sequences of different lengths are padded on the right, and padding
            takes part in nothing; where what the model gives depends on the length of its batch,
            those of one length run together.
        probes: what to measure.
        eval_inputs: sequences held out for evaluation; without them, every `eval_every`-th of
            `inputs` is (sequences eval_every - 1, 2 eval_every - 1, ...).
        attention_mask: which positions of `inputs` are real [n, pos]; padding may stand on either
            side.
        column: of a dataset; default, the first of input_ids, tokens, text, x; two with a comma
            between them hold pairs of texts.
        max_length: cut longer sequences of ids to so many tokens.
        batch_size: sequences in a forward pass.
        eval_every: see `eval_inputs`.
        first_index, index_step: as for :func:`attach`.
        skip: sequences of `inputs` that the probes have seen already, to resume.
        after_batch: called after every batch with the number of its sequences.
        progress: show a bar.

    Returns:
        The results, in the order of `probes`.

    Raises:
        InfoFlowError: for bad inputs or a model that lacks what a probe needs, before the first
            pass; for NaN in activations, and for too little memory even for half a batch.
    """
    check_probes(probes)
    split = Split(eval_every, first=first_index, step=index_step)
    read = read_inputs(
        model, inputs, attention_mask=attention_mask, column=column, max_length=max_length
    )
    # held out by index, or a part of its own
    parts: list[tuple[str, Batches]] = [("by_index" if eval_inputs is None else "fit", read)]
    n_fit = n_evaluate = None
    if read.n_sequences is not None:
        n_evaluate = split.n_held_out(read.n_sequences)
        n_fit = read.n_sequences - n_evaluate
    if eval_inputs is not None:
        held_out = read_inputs(
            model, eval_inputs, column=column, max_length=max_length, name="eval_inputs"
        )
        parts.append(("evaluate", held_out))
        n_fit, n_evaluate = read.n_sequences, held_out.n_sequences
    longest = [part.longest for _, part in parts if part.longest is not None]
    # refused before the first pass, as far as lengths are known
    _check_data(model, probes, n_fit, n_evaluate, longest)
    _measure_parts(
        model,
        parts,
        probes,
        split,
        batch_size,
        skip=skip,
        after_batch=after_batch,
        progress=progress,
    )
    return tuple(probe.result() for probe in probes)


def run_shard(
    model: nn.Module,
    shard: Batches,
    probes: Sequence[Probe[Any]],
    *,
    extent: Extent,
    first_index: int,
    batch_size: int,
    skip: int = 0,
    after_batch: Callable[[int], None] | None = None,
) -> None:
    """Run probes over some sequences of many, as :func:`run_probes`, without results or a bar.

    At the end the probes are settled, so that what merges shards has little to do.

    Args:
        model: a TransformerLens model.
        shard: sequences in a row.
        probes: what to measure.
        extent: of all sequences, by which probes check what they get.
        first_index: the number of the shard's first sequence among all.
        batch_size: sequences in a forward pass.
        skip, after_batch: as for :func:`run_probes`.

    Raises:
        InfoFlowError: as for :func:`run_probes`.
    """
    split = Split(first=first_index)
    check_extent(model, probes, extent)
    _measure_parts(
        model,
        [("by_index", shard)],
        probes,
        split,
        batch_size,
        skip=skip,
        after_batch=after_batch,
        progress=False,
    )
    for probe in probes:
        probe.settle()


def check_extent(model: nn.Module, probes: Sequence[Probe[Any]], extent: Extent) -> None:
    """Refuse sequences that a probe cannot work on, before any forward pass.

    Raises:
        InfoFlowError: as the probes say.
    """
    n_evaluate = Split().n_held_out(extent.n_sequences)
    _check_data(model, probes, extent.n_sequences - n_evaluate, n_evaluate, [extent.longest])


def _check_data(
    model: nn.Module,
    probes: Sequence[Probe[Any]],
    n_fit: int | None,
    n_evaluate: int | None,
    longest: Sequence[int],
) -> None:
    """Refuse data that a probe cannot work on, where their lengths are known."""
    if longest:
        for probe in probes:
            probe.check(n_fit, n_evaluate, key_count(model, max(longest)))
            if isinstance(probe, StateScoresProbe):
                probe.check_positions(model, max(longest))


def _measure_parts(
    model: nn.Module,
    parts: Sequence[tuple[Any, Batches]],
    probes: Sequence[Probe[Any]],
    split: Split,
    batch_size: int,
    *,
    skip: int,
    after_batch: Callable[[int], None] | None,
    progress: bool,
) -> None:
    """Run the model over parts, each in its mode of the split; `skip` is of the first."""
    counts = [part.n_sequences for _, part in parts]
    total = None if None in counts else sum(n or 0 for n in counts)
    weights = WeightState(model)
    needs = prepare(model, probes, weights)
    halved = False
    with progress_bar("probing", total, progress, done=skip) as advance:
        # batches of evaluation follow those of the fit
        for index, (mode, part) in enumerate(parts):
            split.mode = mode
            for batch in part.batches(batch_size, 0 if index else skip):
                weights.check()
                # halved once, halved from then on
                for piece in batch.halves() if halved and len(batch) > 1 else (batch,):
                    halved = _measure(model, piece, probes, split, needs, halved)
                advance(len(batch))
                if after_batch is not None:
                    after_batch(len(batch))


def _measure(
    model: nn.Module,
    batch: Batch,
    probes: Sequence[Probe[Any]],
    split: Split,
    needs: Needs,
    halved: bool,
) -> bool:
    """Measure a batch; where memory runs out, in two halves. Whether halves are in use."""
    left = list(probes)
    try:
        with eval_mode(model):
            seen = run(model, batch, needs)
            # so a batch whose memory ran out goes on with the probes that did not take it
            while left:  # each takes the pass in whole or not at all
                left[0].take(seen, split)
                left.pop(0)
        return halved
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        if halved or len(batch) == 1:
            raise InfoFlowError(
                f"memory ran out on a batch of {count(len(batch), 'sequence')}: expected it to "
                "fit; use a smaller batch_size or shorter sequences. The probes keep the batches "
                "before"
            ) from error
    warnings.warn(
        f"memory ran out on a batch of {len(batch)} sequences: going on with half as many at a "
        "time",
        InfoFlowWarning,
        stacklevel=4,
    )
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    # not halved again: what does not fit then will not fit later
    for half in batch.halves():
        _measure(model, half, left, split, needs, halved=True)
    return True
