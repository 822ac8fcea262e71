"""One collector a model: it owns the wrapper of the model's forward, and all probes that listen."""

import copyreg
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.interrupts import insist
from infoflow_lens.foundation.modules import turn
from infoflow_lens.foundation.record import fingerprint, state_fingerprint
from infoflow_lens.hooks.model.inputs import call_inputs
from infoflow_lens.hooks.model.points import token_hook
from infoflow_lens.hooks.model.shown import attention_hook
from infoflow_lens.hooks.passes.own import AllSeenError, inside_own_pass
from infoflow_lens.hooks.passes.view import Needs, Pass, check_no_padding

if TYPE_CHECKING:
    from infoflow_lens.hooks.probe import Probe, Split


@runtime_checkable
class HookFunction(Protocol):
    """A TransformerLens forward hook."""

    def __call__(self, activation: Tensor, hook: Any) -> Tensor | None:
        """Look at an activation; return another to replace it."""
        ...


NamedHook = tuple[str, HookFunction]


class Weights:
    """The parameters and buffers of a model at one time, to notice when they are written.

    PyTorch counts writes, so that looking is cheap; what is written past its counters (to
    ``parameter.data``) shows in the fingerprint alone, which reads all weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.fingerprint, self._unsaved = self._digests()
        self._marks = self._look()

    def check(self) -> None:
        """Refuse weights that are not those of the beginning.

        Raises:
            InfoFlowError: if they changed.
        """
        if self._untouched():
            return
        if self._differs():
            raise InfoFlowError(
                "the model's weights changed between two passes of one result (by an optimizer "
                "step, load_state_dict or another dtype, say): expected one model for each result; "
                "attach a new probe after each change"
            )
        self._marks = self._look()  # the tensors moved, or were written with the same numbers

    def changed_unseen(self) -> bool:
        """Whether weights were written past PyTorch's counters."""
        return self._untouched() and self._differs()

    def _differs(self) -> bool:
        return self._digests() != (self.fingerprint, self._unsaved)

    def _digests(self) -> tuple[str, str]:
        """Of the state_dict, and of buffers that it leaves out, such as rotary frequencies."""
        state = self._model.state_dict()
        unsaved = {k: v for k, v in self._model.named_buffers() if k not in state}
        return state_fingerprint(state), fingerprint(unsaved)

    def _look(self) -> list[tuple[Any, str, Tensor, tuple[Any, ...]]]:
        return [
            (owner, name, tensor, _mark(tensor))
            for module in self._model.modules()
            for owner in (module._parameters, module._buffers)
            for name, tensor in owner.items()
            if tensor is not None
        ]

    def _untouched(self) -> bool:
        return all(
            owner.get(name) is tensor and _mark(tensor) == mark
            for owner, name, tensor, mark in self._marks
        )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _mark(tensor: Tensor) -> tuple[Any, ...]:
    return _version(tensor), tensor.data_ptr(), tensor.dtype


@dataclass(eq=False)
class Session:
    """Some probes on a model, from the beginning of a block to its end.

    Attributes:
        probes: which.
        split: which of their sequences are held out.
        needs: of all of them together.
        weights: of the model whose passes they measure.
        stops_early: whether a pass may end once every probe has what it reads.
        done: the probes that have taken in the pass of the last call.
        only: the probes that take passes in; None for all.
        thread: whose calls are measured; None for those of every thread.
    """

    probes: tuple["Probe[Any]", ...]
    split: "Split"
    needs: Needs
    weights: Weights
    stops_early: bool = False
    done: list["Probe[Any]"] = field(default_factory=list)
    only: Sequence["Probe[Any]"] | None = None
    thread: int | None = None

    def take(self, seen: Pass) -> None:
        """Give a pass to the probes; each takes it in whole or not at all."""
        for probe in self.probes if self.only is None else self.only:
            probe.take(seen, self.split)
            self.done.append(probe)


class Collector:
    """Collects the activations of whole calls of a model, for all sessions on it.

    Between calls nothing is on the model but the class that sends its calls here: hooks stand only
    while a call runs. So copies and pickles are plain models, and hooks of the user's that were
    registered after the probes count, too. Threads take turns.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.sessions: list[Session] = []
        self._frames: list[_Frame] = []

    def call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a call of the model, and give what it showed to the probes.

        Raises:
            InfoFlowError: if the weights are not those of the passes before, or for what probes or
                the view of a pass refuse.
        """
        if inside_own_pass():
            return forward(*args, **kwargs)
        with turn(self.model):
            here = (None, threading.get_ident())
            sessions = tuple(one for one in self.sessions if one.thread in here)
            if not sessions:
                return forward(*args, **kwargs)
            needs = Needs(())
            for session in sessions:
                session.weights.check()
                session.done.clear()
                needs |= session.needs
            tokens, mask = call_inputs(self.model, args, kwargs)
            stops = bool(sessions) and all(session.stops_early for session in sessions)
            output = None
            with self._collecting(needs.points, stops) as frame, suppress(AllSeenError):
                output = forward(*args, **kwargs)
            frame.check_unwritten()
            if not frame.delegated or frame.caught:
                seen = Pass(self.model, frame.caught, tokens=tokens, mask=mask, needs=needs)
                for session in sessions:
                    session.take(seen)
            return output

    @contextmanager
    def _collecting(self, names: tuple[str, ...], stops: bool) -> Iterator["_Frame"]:
        """Activations by hook point, while the block runs; a call inside it has its own."""
        frame = _Frame(self._frames, len(names) if stops else -1)
        points: Mapping[str, Any] = self.model.hook_dict  # type: ignore[assignment]
        mine: list[Any] = []
        entered: list[Any] = []

        def take_off() -> None:
            for handle in entered:
                handle.remove()
            for point, handle in mine:
                handle.hook.remove()
                with suppress(ValueError):  # a hook of the user may have reset them
                    point.fwd_hooks.remove(handle)
            with suppress(ValueError):
                self._frames.remove(frame)

        try:
            if self._frames:  # a wrapper that the user put around forward calls the model again
                self._frames[-1].delegated = True
            self._frames.append(frame)
            for name in names:
                point = points[name]
                point.add_hook(frame.hook(name, point))
                mine.append((point, point.fwd_hooks[-1]))
                entered.append(point.register_forward_pre_hook(frame.noting()))
            yield frame
        finally:
            insist(take_off)


class _Frame:
    """What one call has shown so far."""

    def __init__(self, frames: list["_Frame"], n_wanted: int) -> None:
        self.caught: dict[str, Tensor] = {}
        self.delegated = False
        self._frames, self._versions = frames, dict[str, int]()
        self._entered: nn.Module | None = None  # the hook point that runs, not that of a copy
        self._n_wanted = n_wanted  # ends the call when so many have fired; -1 never
        self._thread = threading.get_ident()

    def noting(self) -> Callable[..., None]:
        """A hook that notes which module runs in this thread; copies of a model share it.

        A call of another thread may still be under way that began before probes were on the model.
        """

        def hook_fn(module: nn.Module, inputs: Any) -> None:
            if threading.get_ident() == self._thread:
                self._entered = module

        return hook_fn

    def hook(self, name: str, point: nn.Module) -> HookFunction:
        """A hook that keeps an activation of this call: of this very model and thread."""

        def hook_fn(activation: Tensor, hook: Any) -> None:
            if threading.get_ident() != self._thread or inside_own_pass():
                return
            if self._entered is not point or self._frames[-1:] != [self]:
                return
            self.caught[name] = activation.detach()
            self._versions[name] = _version(self.caught[name])
            if len(self.caught) == self._n_wanted:
                raise AllSeenError

        hook_fn.only_looks = True  # type: ignore[attr-defined]
        return hook_fn

    def check_unwritten(self) -> None:
        """Refuse activations that were written after they were seen.

        Raises:
            InfoFlowError: naming the hook point.
        """
        for name, activation in self.caught.items():
            if _version(activation) != self._versions[name]:
                raise InfoFlowError(
                    f"{name} was written in place after its hooks had run, so what was seen there "
                    "is no longer what the model had: expected hooks that return a new tensor "
                    "(activation + v in the place of activation += v)"
                )


# How calls of a model come to its collector

_collectors: WeakKeyDictionary[nn.Module, Collector] = WeakKeyDictionary()
_joining = threading.RLock()
_attached: set[int] = set()  # probes that are on a model now, by id


def check_apart(probes: Sequence["Probe[Any]"]) -> None:
    """Refuse probes that would see a sequence twice.

    Raises:
        InfoFlowError: if one is given twice, or is on a model already.
    """
    ids = [id(probe) for probe in probes]
    if len(set(ids)) < len(ids) or _attached & set(ids):
        raise InfoFlowError(
            "a probe is attached twice, so every sequence would count twice: expected different "
            "probes; make a new one"
        )


def join(model: nn.Module, session: Session) -> None:
    """Put a session on a model."""
    with _joining:
        check_apart(session.probes)
        if model not in _collectors:
            plain: Any = type(model)
            object.__setattr__(model, "__class__", _measured(plain))
            _collectors[model] = Collector(model)
        _collectors[model].sessions.append(session)
        _attached.update(id(probe) for probe in session.probes)


def leave(model: nn.Module, session: Session) -> None:
    """Take a session off, in whatever order; the model is as before when the last one has left."""

    def take_off() -> None:
        collector = _collectors.get(model)
        if collector is not None:
            collector.sessions[:] = [one for one in collector.sessions if one is not session]
        _attached.difference_update(id(probe) for probe in session.probes)
        if collector is None or not collector.sessions:
            plain = vars(type(model)).get("_plain")
            if plain is not None:  # else somebody has put another class over ours, which is inert
                object.__setattr__(model, "__class__", plain)
            _collectors.pop(model, None)

    with turn(model), _joining:
        insist(take_off)
    if session.weights.changed_unseen():
        for probe in session.probes:
            probe.refuse(
                "the model's weights were written through parameter.data while the probe was "
                "attached, so its passes may be of different models: expected one model for "
                "each result; attach a new probe after each change"
            )


class _Forward:
    """``forward`` of a measured model; as a data descriptor it stands before the instance's own."""

    def __init__(self, plain: type[nn.Module]) -> None:
        self._plain = plain

    def __get__(self, model: Any, owner: type | None = None) -> Any:
        if model is None:
            return self._plain.forward
        forward = model.__dict__.get("forward") or self._plain.forward.__get__(model)
        collector = _collectors.get(model)
        if collector is None:  # a replica that was made from the instance's __dict__
            return forward
        return lambda *args, **kwargs: collector.call(forward, args, kwargs)

    def __set__(self, model: Any, forward: Any) -> None:
        model.__dict__["forward"] = forward

    def __delete__(self, model: Any) -> None:
        if "forward" not in model.__dict__:
            raise AttributeError("forward")
        del model.__dict__["forward"]


@cache
def _measured(plain: type[nn.Module]) -> type[nn.Module]:
    """A class like `plain` whose calls are measured; copies and pickles of its models are plain."""

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        made = plain.__reduce_ex__(self, protocol)
        if not isinstance(made, tuple):
            return made
        arguments = tuple(plain if part is type(self) else part for part in made[1])
        # pickle insists that copyreg.__newobj__ gets the class of the object
        new = plain if made[0] is type(self) else made[0]
        new = plain.__new__ if new is copyreg.__newobj__ else new  # type: ignore[attr-defined]
        return (new, arguments, *made[2:])

    body: dict[str, Any] = {
        "forward": _Forward(plain),
        "__reduce_ex__": reduce_ex,
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "_plain": plain,
    }
    return type(plain.__name__, (plain,), body)


# Plain hooks, for run_with_hooks


def hooks_of(probe: "Probe[Any]", model: nn.Module, split: "Split") -> list[NamedHook]:
    """Hooks that give a probe every pass whose activations have all fired.

    They do not see the call: a pass begins where the tokens enter.

    Raises:
        InfoFlowError: if the model lacks a hook point.
    """
    check_apart([probe])
    weights = Weights(model)
    needs = probe.prepare(model, weights.fingerprint)
    needs |= Needs((attention_hook(model, 0),))  # shows padding
    points: Mapping[str, Any] = model.hook_dict  # type: ignore[assignment]
    begins = token_hook(model)  # fires first in every pass that is whole
    names = tuple(dict.fromkeys((begins, *needs.points)))
    caught: dict[str, Tensor] = {}
    threads: set[int] = set()

    def finish() -> None:
        activations = dict(caught)
        caught.clear()
        threads.clear()
        if activations:
            weights.check()
            check_no_padding(model, activations)
            probe.take(Pass(model, activations, needs=needs), split)

    def listen(name: str) -> HookFunction:
        def hook_fn(activation: Tensor, hook: Any) -> None:
            if inside_own_pass() or probe.pending is not finish or id(probe) in _attached:
                return  # newer hooks of this probe, or attach(), measure the pass
            if isinstance(hook, nn.Module) and points.get(name) is not hook:
                raise InfoFlowError(
                    f"hooks of a {type(probe).__name__} for one model stand on another, at {name}: "
                    "expected fwd_hooks(model) of the model that is run; make new ones"
                )
            threads.add(threading.get_ident())
            if len(threads) > 1:
                caught.clear()
                threads.clear()
                raise InfoFlowError(
                    "two threads run the model at once, and hooks alone cannot tell their passes "
                    "apart: expected one after the other; use attach(), which lets threads take "
                    "turns"
                )
            if name == begins or name in caught:  # the pass before has ended
                finish()
            caught[name] = activation.detach()
            if len(caught) == len(names):
                finish()

        hook_fn.only_looks = True  # type: ignore[attr-defined]
        return hook_fn

    probe.pending = finish
    return [(name, listen(name)) for name in names]
