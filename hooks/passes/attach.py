"""Putting probes on a model: in the user's own loop, or over given inputs."""

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from infoflow_lens.foundation.checks import check_choice, check_integer
from infoflow_lens.foundation.errors import InfoFlowError, InfoFlowWarning
from infoflow_lens.foundation.modules import eval_mode
from infoflow_lens.foundation.progress import progress_bar
from infoflow_lens.foundation.record import model_fingerprint
from infoflow_lens.hooks.model.inputs import (
    Batch,
    Batches,
    Extent,
    Inputs,
    check_mask,
    read_inputs,
)
from infoflow_lens.hooks.model.points import (
    check_one_device,
    key_count,
    layer_count,
    starts_at_layers,
)
from infoflow_lens.hooks.passes.collector import Session, Weights, check_apart, join, leave
from infoflow_lens.hooks.passes.view import Needs, Pass
from infoflow_lens.hooks.probe import Probe, Split
from infoflow_lens.hooks.result import Result


class AttachedProbes(Sequence[Probe[Any]]):
    """The probes on a model, in the order in which they were given."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def __getitem__(self, index: Any) -> Any:
        return self.session.probes[index]

    def __len__(self) -> int:
        return len(self.session.probes)

    def results(self) -> tuple[Result, ...]:
        """Every probe's result."""
        return tuple(probe.result() for probe in self)

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """Sequences of this block are for fitting only."""
        with self.mode("fit"):
            yield

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Sequences of this block are held out: for evaluation only."""
        with self.mode("evaluate"):
            yield

    @contextmanager
    def mode(self, mode: Any) -> Iterator[None]:
        """Sequences of this block are split in this mode; see :class:`Split`."""
        split = self.session.split
        check_choice(mode, "mode", ("by_index", "fit", "evaluate"))
        before, split.mode = split.mode, mode
        try:
            yield
        finally:
            split.mode = before


@contextmanager
def attach(
    model: nn.Module,
    *probes: Probe[Any],
    eval_every: int = 5,
    first_index: int = 0,
    index_step: int = 1,
) -> Iterator[AttachedProbes]:
    """Probes on `model` for the length of a block; your own loop runs the model.

    Whole calls of the model are measured, when they have returned: a call that raises, or stops
    before the layers that a probe needs, is left out. Between calls nothing stands on the model,
    so it may be copied, pickled and saved; blocks may end in any order; threads take turns. Probes
    that fit something keep every `eval_every`-th sequence for evaluation, unless ``fitting()`` and
    ``evaluating()`` say what is what.

    Example::

        with attach(model, PositionsProbe(ranks=(1, 2)), RecoveryProbe()) as probes:
            for batch in loader:
                model(batch)
        positions, recovery = probes.results()

    Args:
        model: a TransformerLens model.
        probes: what to measure.
        eval_every: every so many sequences one is held out.
        first_index, index_step: where several processes share the sequences, sequence n of this one
            is sequence ``first_index + index_step * n`` of all: which are held out, and what is
            drawn for each, goes by that.

    Raises:
        InfoFlowError: if there is no probe, one is attached already, `eval_every` is below 2, or
            the model lacks a hook point or lies on several devices, before anything is attached;
            and from the model's call for an attention mask that the model ignores, weights that
            have changed since the pass before, or what a probe refuses.
    """
    if not probes:
        raise InfoFlowError("no probes to attach: expected at least one, as in attach(model, p)")
    with _attached(model, probes, Split(eval_every, first=first_index, step=index_step)) as found:
        yield found


@contextmanager
def _attached(
    model: nn.Module,
    probes: Sequence[Probe[Any]],
    split: Split,
    weights: Weights | None = None,
    *,
    stops_early: bool = False,
    thread: int | None = None,
) -> Iterator[AttachedProbes]:
    _check_probes(probes)
    check_apart(probes)
    _check_not_compiled(model)
    layer_count(model)
    check_one_device(model)
    weights = Weights(model) if weights is None else weights
    needs = _prepared(model, probes, weights.fingerprint)
    session = Session(tuple(probes), split, needs, weights, stops_early=stops_early, thread=thread)
    join(model, session)
    try:
        yield AttachedProbes(session)
    finally:
        leave(model, session)


def _check_not_compiled(model: nn.Module) -> None:
    """Refuse compiled models, whose hooks do not fire as those of the model itself."""
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        raise InfoFlowError(
            f"the {type(model).__name__} is compiled, and compiled code leaves hooks out: expected "
            "the model itself; attach to what was given to torch.compile, and run that"
        )


def _check_probes(probes: Any) -> None:
    if isinstance(probes, Probe) or not all(isinstance(probe, Probe) for probe in probes):
        raise InfoFlowError(f"probes is {probes!r}: expected a list of probes, as in [p] or [p, q]")


def _prepared(model: nn.Module, probes: Sequence[Probe[Any]], fingerprint: str) -> Needs:
    """What probes need together, all of them ready."""
    needs = Needs(())
    for probe in probes:
        needs |= probe.prepare(model, fingerprint)
    return needs


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
        InfoFlowError: if the cache lacks what a probe needs, or has no batch axis.
    """
    layer_count(model)
    _check_probes(probes)
    check_apart(probes)
    split = Split(eval_every)
    if not getattr(cache, "has_batch_dim", True):
        raise InfoFlowError(
            "the cache has no batch axis: expected one; keep it (remove_batch_dim=False)"
        )
    _check_fits_cache(cache, tokens, "tokens")
    _check_fits_cache(cache, attention_mask, "attention_mask")
    mask = None if attention_mask is None else check_mask(attention_mask, "attention_mask")
    needs = _prepared(model, probes, model_fingerprint(model))
    missing = [name for name in needs.points if name not in cache]
    if missing:
        names = ", ".join(type(probe).__name__ for probe in probes)
        raise InfoFlowError(
            f"the cache lacks {', '.join(missing)}, which {names} read: expected a cache of all "
            "activations, or a names_filter with these"
        )
    activations = {name: cache[name].detach() for name in needs.points}
    real = None if mask is None or mask.all() else mask
    seen = Pass(model, activations, tokens=tokens, mask=real, needs=needs)
    for probe in probes:
        probe.take(seen, split)
    return tuple(probe.result() for probe in probes)


def _check_fits_cache(cache: Mapping[str, Tensor], given: Tensor | None, what: str) -> None:
    names = ("hook_tokens", "hook_embed", "blocks.0.hook_resid_pre")
    shown = next((cache[name] for name in names if name in cache), None)
    if given is not None and shown is not None and given.shape[:2] != shown.shape[:2]:
        raise InfoFlowError(
            f"{what} has shape {tuple(given.shape)}, the cache is of {tuple(shown.shape[:2])} "
            "sequences and positions: expected those of the same pass"
        )


def run_probes(
    model: nn.Module,
    inputs: Inputs,
    probes: Sequence[Probe[Any]],
    eval_inputs: Inputs | None = None,
    *,
    attention_mask: Tensor | None = None,
    column: str | None = None,
    max_length: int | None = None,
    batch_size: int = 256,
    eval_every: int = 5,
    first_index: int = 0,
    index_step: int = 1,
    skip: int = 0,
    after_batch: Callable[[int], None] | None = None,
    progress: bool = True,
) -> tuple[Any, ...]:
    """Run `model` over `inputs` with `probes` on it, and return their results.

    The model runs in eval mode and without gradients, only as far as probes and hooks of yours look
    where it can be stopped, and is left as it was found: its mode, hooks, gradients and the random
    state. Between passes (in a loader or `after_batch`) it has its own mode. If you stop it
    (Ctrl-C), or something fails, the probes keep every finished batch: call their ``result()``. If
    memory runs out, the batch is halved once, with a warning.

    Args:
        model: a TransformerLens model.
        inputs: vector tokens [n, pos, d_token] or token ids [n, pos]; a text or a list of texts;
            a list of sequences of ids; a ``datasets.Dataset``; a DataLoader or another iterable of
            batches of these. Sequences of different lengths are padded on the right, and padding
            takes part in nothing.
        probes: what to measure.
        eval_inputs: sequences held out for evaluation; without them, every `eval_every`-th of
            `inputs` is (sequences eval_every - 1, 2 eval_every - 1, ...).
        attention_mask: which positions of `inputs` are real [n, pos]; padding may stand on either
            side.
        column: of a dataset; default, the first of input_ids, tokens, text, x.
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
    layer_count(model)  # is it a model at all?
    _check_probes(probes)
    split = Split(eval_every, first=first_index, step=index_step)
    batch_size = check_integer(batch_size, "batch_size", 1)
    skip = check_integer(skip, "skip", 0, ", the number of sequences that are done")
    read = read_inputs(
        model, inputs, attention_mask=attention_mask, column=column, max_length=max_length
    )
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
    _check_data(model, probes, n_fit, n_evaluate, longest)
    _pass_through(
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
    weights: Weights,
    skip: int = 0,
    after_batch: Callable[[int], None] | None = None,
) -> None:
    """:func:`run_probes` over some sequences of many, without results and without a bar.

    At the end the probes are settled, so that what merges shards has little to do.

    Args:
        model: a TransformerLens model.
        shard: sequences in a row.
        probes: what to measure.
        extent: of all sequences, by which probes check what they get.
        first_index: the number of the shard's first sequence among all.
        batch_size: sequences in a forward pass.
        weights: of the model; looked at once for all shards, as that reads all of them.
        skip, after_batch: as for :func:`run_probes`.

    Raises:
        InfoFlowError: as for :func:`run_probes`.
    """
    split = Split(first=first_index)
    n_evaluate = Split().n_held_out(extent.n_sequences)
    _check_data(model, probes, extent.n_sequences - n_evaluate, n_evaluate, [extent.longest])
    _pass_through(
        model,
        [("by_index", shard)],
        probes,
        split,
        batch_size,
        skip=skip,
        after_batch=after_batch,
        progress=False,
        weights=weights,
    )
    for probe in probes:
        probe.settle()


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


def _pass_through(
    model: nn.Module,
    parts: Sequence[tuple[str, Batches]],
    probes: Sequence[Probe[Any]],
    split: Split,
    batch_size: int,
    *,
    skip: int,
    after_batch: Callable[[int], None] | None,
    progress: bool,
    weights: Weights | None = None,
) -> None:
    """Run the model over parts, each in its mode of the split; `skip` is of the first."""
    counts = [part.n_sequences for _, part in parts]
    total = None if None in counts else sum(count or 0 for count in counts)
    # hooks of the user may stand behind the last hook point that probes read
    has_other_hooks = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    stops_early = starts_at_layers(model) and not has_other_hooks
    thread = threading.get_ident()  # others may run the model, too
    with (
        _attached(
            model, probes, split, weights, stops_early=stops_early, thread=thread
        ) as attached,
        progress_bar("probing", total, progress, done=skip) as advance,
    ):
        halved = False
        for index, (mode, part) in enumerate(parts):
            with attached.mode(mode):
                for batch in part.batches(batch_size, 0 if index else skip):
                    for piece in batch.halves() if halved and len(batch) > 1 else (batch,):
                        halved = _run(model, piece, attached.session, halved) or halved
                    advance(len(batch))
                    if after_batch is not None:
                        after_batch(len(batch))


def _run(model: nn.Module, batch: Batch, session: Session, halved: bool) -> bool:
    """Run a batch; where memory runs out, in two halves. Whether it had to be halved."""
    try:
        with eval_mode(model):
            batch.run(model)
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        if halved or len(batch) == 1:
            raise InfoFlowError(
                f"memory ran out on a batch of {len(batch)} sequences: expected it to fit; use a "
                "smaller batch_size or shorter sequences. The probes keep the batches before"
            ) from error
    else:
        return False
    warnings.warn(
        f"memory ran out on a batch of {len(batch)} sequences: going on with half as many at a "
        "time",
        InfoFlowWarning,
        stacklevel=3,
    )
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    # a probe that took the batch in before memory ran out must not see it twice
    session.only = [probe for probe in session.probes if probe not in session.done]
    try:
        for half in batch.halves():
            _run(model, half, session, halved=True)
    finally:
        session.only = None
    return True


def _is_out_of_memory(error: BaseException) -> bool:
    return (
        isinstance(error, (torch.OutOfMemoryError, MemoryError))
        or "not enough memory" in str(error)
        or "can't allocate memory" in str(error)
    )
