"""Putting probes on a model: in the user's own loop, or over given inputs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from infoflow_lens.hooks.capabilities import check_inputs, key_count, layer_count
from infoflow_lens.hooks.probe import NamedHook, Probe, Split, inside_own_pass
from infoflow_lens.hooks.result import Result
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import eval_mode
from infoflow_lens.foundation.progress import progress_bar


class AttachedProbes(Sequence[Probe[Any]]):
    """The probes on a model, in the order in which they were given."""

    def __init__(self, probes: tuple[Probe[Any], ...], split: Split) -> None:
        self._probes = probes
        self._split = split

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
            the model lacks a hook point, before anything is attached; and from the model's call for
            an attention mask that masks (padding is not supported) or what a probe refuses.
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
    split = Split(every=eval_every)
    hooks: list[NamedHook] = [
        pair for probe in probes for pair in probe._listen(model, lambda: None)
    ]
    forward, outer = model.forward, model.__dict__.get("forward")

    def measured_forward(*args: Any, **kwargs: Any) -> Any:
        if inside_own_pass():
            return forward(*args, **kwargs)
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and not mask.bool().all():
            raise InfoFlowError(
                f"the attention_mask masks {int((~mask.bool()).sum())} positions: probes do not "
                "support padding yet; run sequences of one length, or single ones, without a mask"
            )
        for probe in probes:
            probe._collected.clear()
        try:
            output = forward(*args, **kwargs)
        except BaseException:
            for probe in probes:
                probe._collected.clear()
            raise
        for probe in probes:
            probe._take_in(model, split)
        return output

    # run_with_hooks calls model.forward itself, so module hooks would not see every call
    model.forward = measured_forward
    _attached.update(ids)
    try:
        with model.hooks(fwd_hooks=hooks):  # type: ignore[operator]
            yield AttachedProbes(probes, split)
    finally:
        _attached.difference_update(ids)
        if outer is None:
            del model.forward  # the instance's; the class has its own
        else:
            model.forward = outer


def _check_every(eval_every: int) -> None:
    if eval_every < 2:
        raise InfoFlowError(
            f"eval_every is {eval_every}: expected at least 2, so that some sequences are fitted"
        )


def run_probes(
    model: nn.Module,
    inputs: Tensor,
    probes: Sequence[Probe[Any]],
    eval_inputs: Tensor | None = None,
    *,
    batch_size: int = 256,
    eval_every: int = 5,
    progress: bool = True,
) -> tuple[Any, ...]:
    """Run `model` over `inputs` with `probes` on it, and return their results.

    The model runs in eval mode and without gradients, and is left as it was found: its mode,
    hooks, gradients and the random state. If you stop it (Ctrl-C), the probes keep every finished
    batch: call their ``result()``.

    Args:
        model: a TransformerLens model.
        inputs: vector tokens [n, pos, d_token] or token ids [n, pos].
        probes: what to measure.
        eval_inputs: sequences held out for evaluation; without them, every `eval_every`-th of
            `inputs` is (sequences eval_every - 1, 2 eval_every - 1, ...).
        batch_size: sequences in a forward pass.
        eval_every: see `eval_inputs`.
        progress: show a bar.

    Returns:
        The results, in the order of `probes`.

    Raises:
        InfoFlowError: for bad inputs or a model that lacks what a probe needs, before the first
            pass; and for NaN in activations.
    """
    layer_count(model)  # is it a model at all?
    _check_every(eval_every)
    if batch_size < 1:
        raise InfoFlowError(f"batch_size is {batch_size}: expected at least 1")
    if isinstance(probes, Probe) or not all(isinstance(probe, Probe) for probe in probes):
        raise InfoFlowError(f"probes is {probes!r}: expected a list of probes, as in [p] or [p, q]")
    check_inputs(model, inputs, "inputs")
    parts = [("by_index" if eval_inputs is None else "fit", inputs)]
    if eval_inputs is not None:
        check_inputs(model, eval_inputs, "eval_inputs")
        if eval_inputs.shape[1:] != inputs.shape[1:]:
            raise InfoFlowError(
                f"eval_inputs have shape {tuple(eval_inputs.shape[1:])} a sequence, inputs "
                f"{tuple(inputs.shape[1:])}: expected the same"
            )
        parts.append(("evaluate", eval_inputs))
    n_evaluate = len(inputs) // eval_every if eval_inputs is None else len(eval_inputs)
    n_fit = len(inputs) - n_evaluate if eval_inputs is None else len(inputs)
    for probe in probes:
        probe.check(n_fit, n_evaluate, key_count(model, inputs.shape[1]))
    total = sum(len(part) for _, part in parts)
    device = next(model.parameters()).device
    with (
        eval_mode(model),
        attach(model, *probes, eval_every=eval_every) as attached,
        progress_bar("probing", total, progress) as advance,
    ):
        for mode, part in parts:
            with attached._mode(mode):
                for batch in part.split(batch_size):
                    model(batch.to(device))
                    advance(len(batch))
    return attached.results()
