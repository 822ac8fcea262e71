"""Putting probes on a model: in the user's own loop, or over given inputs."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError, InfoFlowWarning
from infoflow_lens.foundation.modules import eval_mode
from infoflow_lens.foundation.progress import progress_bar
from infoflow_lens.foundation.record import model_fingerprint
from infoflow_lens.hooks.model.inputs import Batch, Batches, Inputs, call_inputs, read_inputs
from infoflow_lens.hooks.model.points import (
    check_one_device,
    key_count,
    layer_count,
    starts_at_layers,
)
from infoflow_lens.hooks.passes.own import AllSeenError, inside_own_pass
from infoflow_lens.hooks.probe import NamedHook, Probe, Split
from infoflow_lens.hooks.result import Result


class AttachedProbes(Sequence[Probe[Any]]):
    """The probes on a model, in the order in which they were given."""

    def __init__(self, probes: tuple[Probe[Any], ...], split: Split) -> None:
        self._probes = probes
        self._split = split
        self._done: list[Probe[Any]] = []  # probes that took the last pass in
        self._only: Sequence[Probe[Any]] = probes  # probes that take passes in
        self._stops_early = False  # as soon as every probe has seen all that it reads

    def __getitem__(self, index: Any) -> Any:
        return self._probes[index]

    def __len__(self) -> int:
        return len(self._probes)

    def results(self) -> tuple[Result, ...]:
        """Every probe's result."""
        return tuple(probe.result() for probe in self._probes)

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """Sequences of this block are for fitting only."""
        with self._mode("fit"):
            yield

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Sequences of this block are held out: for evaluation only."""
        with self._mode("evaluate"):
            yield

    def _seen(self) -> None:
        """Called when a probe has seen all that it reads in a pass."""
        if self._stops_early and all(probe._has_seen_all() for probe in self._probes):
            raise AllSeenError

    @contextmanager
    def _mode(self, mode: Any) -> Iterator[None]:
        before = self._split.mode
        self._split.mode = mode
        try:
            yield
        finally:
            self._split.mode = before


_attached: set[int] = set()  # probes that are on a model now, by id


@contextmanager
def attach(model: nn.Module, *probes: Probe[Any], eval_every: int = 5) -> Iterator[AttachedProbes]:
    """Probes on `model` for the length of a block; your own loop runs the model.

    Whole calls of the model are measured, when they have returned: a call that raises, or stops
    before the layers that a probe needs, is left out. Hooks of your own stay where they are, and
    ours are gone after the block, whatever happens in it. Probes that fit something keep every
    `eval_every`-th sequence for evaluation, unless ``fitting()`` and ``evaluating()`` say what is
    what.

    Example::

        with attach(model, PositionsProbe(ranks=(1, 2)), RecoveryProbe()) as probes:
            for batch in loader:
                model(batch)
        positions, recovery = probes.results()

    Raises:
        InfoFlowError: if there is no probe, one is attached already, `eval_every` is below 2, or
            the model lacks a hook point or lies on several devices, before anything is attached;
            and from the model's call for an attention mask that the model ignores, or what a probe
            refuses.
    """
    if not probes:
        raise InfoFlowError("no probes to attach: expected at least one, as in attach(model, p)")
    ids = [id(probe) for probe in probes]
    if len(set(ids)) < len(ids) or _attached & set(ids):
        raise InfoFlowError(
            "a probe is attached twice, so every sequence would count twice: expected different "
            "probes; make a new one"
        )
    _check_every(eval_every)
    check_one_device(model)
    split = Split(every=eval_every)
    attached = AttachedProbes(probes, split)
    known = model_fingerprint(model)  # once, as it reads all weights
    hooks: list[NamedHook] = [
        pair for probe in probes for pair in probe._listen(model, attached._seen, known)
    ]
    forward, outer = model.forward, model.__dict__.get("forward")

    def measured_forward(*args: Any, **kwargs: Any) -> Any:
        if inside_own_pass():
            return forward(*args, **kwargs)
        tokens, mask = call_inputs(model, args, kwargs)
        attached._done.clear()
        for probe in probes:
            probe._collected.clear()
        try:
            output = None
            with suppress(AllSeenError):
                output = forward(*args, **kwargs)
            for probe in attached._only:
                probe._take_in(model, split, tokens, mask)
                attached._done.append(probe)
        finally:
            for probe in probes:
                probe._collected.clear()
        return output

    # run_with_hooks calls model.forward itself, so module hooks would not see every call
    model.forward = measured_forward
    _attached.update(ids)
    try:
        with model.hooks(fwd_hooks=hooks):  # type: ignore[operator]
            yield attached
    finally:
        _attached.difference_update(ids)
        if outer is None:
            del model.forward  # the instance's; the class has its own
        else:
            model.forward = outer


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
    _check_every(eval_every)
    if not getattr(cache, "has_batch_dim", True):
        raise InfoFlowError(
            "the cache has no batch axis: expected one; keep it (remove_batch_dim=False)"
        )
    _check_fits_cache(cache, tokens, "tokens")
    _check_fits_cache(cache, attention_mask, "attention_mask")
    known = model_fingerprint(model)
    mask = None if attention_mask is None else attention_mask.bool()
    split = Split(every=eval_every)
    for probe in probes:
        names = [name for name, _ in probe._listen(model, probe._collected.clear, known)]
        missing = [name for name in probe._expected if name not in cache]
        if missing:
            raise InfoFlowError(
                f"the cache lacks {', '.join(missing)}, which {type(probe).__name__} reads: "
                "expected a cache of all activations, or a names_filter with these"
            )
        probe._collected.update({name: cache[name].detach() for name in names if name in cache})
        probe._take_in(model, split, tokens, None if mask is None or mask.all() else mask)
    return tuple(probe.result() for probe in probes)


def _check_fits_cache(cache: Mapping[str, Tensor], given: Tensor | None, what: str) -> None:
    names = ("hook_tokens", "hook_embed", "blocks.0.hook_resid_pre")
    shown = next((cache[name] for name in names if name in cache), None)
    if given is not None and shown is not None and given.shape[:2] != shown.shape[:2]:
        raise InfoFlowError(
            f"{what} has shape {tuple(given.shape)}, the cache is of {tuple(shown.shape[:2])} "
            "sequences and positions: expected those of the same pass"
        )


def _check_every(eval_every: int) -> None:
    if eval_every < 2:
        raise InfoFlowError(
            f"eval_every is {eval_every}: expected at least 2, so that some sequences are fitted"
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
    skip: int = 0,
    after_batch: Callable[[int], None] | None = None,
    progress: bool = True,
) -> tuple[Any, ...]:
    """Run `model` over `inputs` with `probes` on it, and return their results.

    The model runs in eval mode and without gradients, only as far as probes and hooks of yours look
    where it can be stopped, and is left as it was found: its mode, hooks, gradients and the random
    state. If you stop it (Ctrl-C), or something fails, the probes keep every finished batch: call
    their ``result()``. If memory runs out, the batch is halved once, with a warning.

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
    _check_every(eval_every)
    if batch_size < 1:
        raise InfoFlowError(f"batch_size is {batch_size}: expected at least 1")
    if skip < 0:
        raise InfoFlowError(f"skip is {skip}: expected the number of sequences that are done")
    if isinstance(probes, Probe) or not all(isinstance(probe, Probe) for probe in probes):
        raise InfoFlowError(f"probes is {probes!r}: expected a list of probes, as in [p] or [p, q]")
    read = read_inputs(
        model, inputs, attention_mask=attention_mask, column=column, max_length=max_length
    )
    parts: list[tuple[str, Batches]] = [("by_index" if eval_inputs is None else "fit", read)]
    n_evaluate = None if read.n_sequences is None else read.n_sequences // eval_every
    n_fit = None if read.n_sequences is None else read.n_sequences - (n_evaluate or 0)
    if eval_inputs is not None:
        held_out = read_inputs(
            model, eval_inputs, column=column, max_length=max_length, name="eval_inputs"
        )
        parts.append(("evaluate", held_out))
        n_fit, n_evaluate = read.n_sequences, held_out.n_sequences
    longest = [part.longest for _, part in parts if part.longest is not None]
    if longest:
        for probe in probes:
            probe.check(n_fit, n_evaluate, key_count(model, max(longest)))
    counts = [part.n_sequences for _, part in parts]
    total = None if None in counts else sum(count or 0 for count in counts)
    # hooks of the user's may stand where no probe looks
    has_other_hooks = any(point.fwd_hooks for point in model.hook_dict.values())  # type: ignore[operator]
    with (
        eval_mode(model),
        attach(model, *probes, eval_every=eval_every) as attached,
        progress_bar("probing", total, progress, done=skip) as advance,
    ):
        attached._stops_early = starts_at_layers(model) and not has_other_hooks
        halved = False
        for mode, part in parts:
            with attached._mode(mode):
                for batch in part.batches(batch_size, skip if part is read else 0):
                    for piece in batch.halves() if halved and len(batch) > 1 else (batch,):
                        halved = _run(model, piece, attached, halved) or halved
                    advance(len(batch))
                    if after_batch is not None:
                        after_batch(len(batch))
    return attached.results()


def _run(model: nn.Module, batch: Batch, attached: AttachedProbes, halved: bool) -> bool:
    """Run a batch; where memory runs out, in two halves. Whether it had to be halved."""
    try:
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
    attached._only = [probe for probe in attached if probe not in attached._done]
    try:
        for half in batch.halves():
            _run(model, half, attached, halved=True)
    finally:
        attached._only = attached._probes
    return True


def _is_out_of_memory(error: BaseException) -> bool:
    return (
        isinstance(error, (torch.OutOfMemoryError, MemoryError))
        or "not enough memory" in str(error)
        or "can't allocate memory" in str(error)
    )
