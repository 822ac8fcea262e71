"""attach(): probes on a model in the user's own loop, for the length of a block."""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import one_thread, outside_user_device
from infoflow_lens.foundation.record import WeightState
from infoflow_lens.foundation.settings import check
from infoflow_lens.hooks.model.call import catch, is_own_call
from infoflow_lens.hooks.model.inputs import call_columns, call_inputs
from infoflow_lens.hooks.model.log import find_output
from infoflow_lens.hooks.model.points import ensure_hook_points
from infoflow_lens.hooks.passes.run import prepare
from infoflow_lens.hooks.passes.view import Needs, Pass
from infoflow_lens.hooks.probe import Mode, Probe, Split
from infoflow_lens.hooks.result import Result


@dataclass(eq=False)
class Session:
    """Some probes on a model, from the beginning of a block to its end."""

    probes: tuple[Probe[Any], ...]
    split: Split
    needs: Needs
    weights: WeightState


class AttachedProbes(Sequence[Probe[Any]]):
    """The probes on a model, in the order in which they were given."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __getitem__(self, index: Any) -> Any:
        return self._session.probes[index]

    def __len__(self) -> int:
        return len(self._session.probes)

    def results(self) -> tuple[Result, ...]:
        """Return every probe's result."""
        return tuple(probe.result() for probe in self)

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """Use the sequences of this block for fitting only."""
        with self.mode("fit"):
            yield

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Hold the sequences of this block out: use them for evaluation only."""
        with self.mode("evaluate"):
            yield

    @contextmanager
    def mode(self, mode: Any) -> Iterator[None]:
        """Split the sequences of this block in this mode; see :class:`Split`."""
        split = self._session.split
        before, split.mode = split.mode, check(mode, Mode, "mode")
        try:
            yield
        finally:
            split.mode = before


@contextmanager
def attach(
    model: Any,
    *probes: Probe[Any],
    eval_every: int = 5,
    first_index: int = 0,
    index_step: int = 1,
) -> Iterator[AttachedProbes]:
    """Put probes on `model` for the length of a block; your own loop runs the model.

    Whole calls of the model in the block's thread are measured when they have returned: a call
    that raises, or stops before the layers that a probe needs, is left out. Calls from a second
    thread, and copying or pickling the model inside the block, are refused by name; a
    ``torch.compile`` wrapper of the model runs it uncompiled there.

    Probes that fit something keep every `eval_every`-th sequence for evaluation, unless
    ``fitting()`` and ``evaluating()`` say which is which. Blocks on one model may end in any order.

    Example::

        with attach(model, PositionsProbe(ranks=(1, 2)), RecoveryProbe()) as probes:
            for batch in loader:
                model(batch)
        positions, recovery = probes.results()

    Args:
        model: any Transformer; your loop calls this object itself.
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
    split = Split(eval_every, first=first_index, step=index_step)
    with outside_user_device():
        named = ensure_hook_points(model)  # what hook points are on
        weights = WeightState(named)
        session = Session(probes, split, prepare(named, probes, weights), weights)
    with one_thread(named):
        # the forward is wrapped once for all blocks, whose sessions come and go
        measured = _wrap_forward(model if isinstance(model, nn.Module) else named, named)
        measured.sessions.append(session)
        for probe in probes:
            probe.is_attached = True
        try:
            yield AttachedProbes(session)
        finally:
            measured.remove(session)
    # a write through .data leaves no trace but in the numbers themselves
    if not weights.has_same_sample() and weights.has_same_counters():
        for probe in probes:
            probe.refuse(
                "the model's weights were written through parameter.data while the probe was "
                "attached, so its passes may be of different models: expected one model for "
                "each result; attach a new probe after each change"
            )


def _wrap_forward(model: nn.Module, named: nn.Module) -> "_MeasuredForward":
    """Put what measures in the place of the model's forward, where it is not there yet.

    Args:
        model: whose calls are measured.
        named: the same, or what was opened to have hook points.
    """
    found = vars(model).get("forward")
    if isinstance(found, _MeasuredForward):
        return found
    measured = _MeasuredForward(model, named, found)
    object.__setattr__(model, "forward", measured)
    return measured


class _MeasuredForward:
    """The forward of a model on which probes are: it runs the model's own, and gives it to them."""

    def __init__(self, model: nn.Module, named: nn.Module, own: Callable[..., Any] | None) -> None:
        self.sessions: list[Session] = []
        self._model, self._named, self.stands_for = model, named, own
        self._forward = own or type(model).forward.__get__(model)
        self._thread, self._running = threading.get_ident(), False
        # so that inspect.signature finds the arguments of the model's own forward
        functools.update_wrapper(self, self._forward)

    def remove(self, session: Session) -> None:
        """Take a session off; with the last one, give the model back its own forward."""
        self.sessions.remove(session)
        for probe in session.probes:
            probe.is_attached = False
        # a wrapper that the user has put around this meanwhile stays, and finds no sessions here
        if not self.sessions and vars(self._model).get("forward") is self:
            if self.stands_for is None:
                object.__delattr__(self._model, "forward")
            else:
                object.__setattr__(self._model, "forward", self.stands_for)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled wrapper of the model runs it as it is, and is measured
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call of the model, and give what it showed to the probes."""
        # a call inside a call is part of it, as where the user's forward calls the model again
        # a probe's own call, or one from within a call that is measured
        if is_own_call() or self._running or not self.sessions:
            return self._forward(*args, **kwargs)
        if threading.get_ident() != self._thread:
            raise InfoFlowError(
                "a second thread runs a model while probes are attached to it: expected calls from "
                "the thread of the block only; attach in the thread that runs the model"
            )
        # all sessions are served by one pass
        needs = Needs(())
        for session in self.sessions:
            session.weights.check()
            needs |= session.needs
        with outside_user_device():
            tokens, mask = call_inputs(self._model, args, kwargs)
            columns = call_columns(self._model, tokens, args, kwargs)
        self._running = True
        try:
            with catch(self._named, needs.points) as caught, self._watch():
                output = self._forward(*args, **kwargs)
        finally:
            self._running = False
        with outside_user_device():
            seen = Pass(
                self._named,
                caught.activations,
                tokens=tokens,
                mask=mask,
                columns=columns,
                needs=needs,
                output=find_output(output),
            )
            for session in tuple(self.sessions):
                for probe in session.probes:
                    probe.take(seen, session.split)
        return output

    def _watch(self) -> AbstractContextManager[None]:
        """Let hook points fire in a call of the model that they were made for."""
        if self._named is self._model:
            return nullcontext()
        watching: AbstractContextManager[None] = self._named.watch()  # type: ignore[operator]
        return watching

    def __deepcopy__(self, memo: Any) -> Any:
        raise self._refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._refuse_copy()

    def _refuse_copy(self) -> InfoFlowError:
        return InfoFlowError(
            f"the {type(self._model).__name__} is copied or pickled while probes are attached to "
            "it: expected that before the block or after it; its state_dict() can be saved inside"
        )
