"""The hooks of one probe for ``run_with_hooks``, which do not see the call."""

import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.record import WeightState, model_fingerprint
from infoflow_lens.hooks.model.call import HookFunction, NamedHook, is_own_call
from infoflow_lens.hooks.model.points import hook_points, layers_with_attention, token_hook
from infoflow_lens.hooks.model.semantics import attention_hooks
from infoflow_lens.hooks.passes.view import Needs, Pass, check_no_padding


@runtime_checkable
class TakesPasses(Protocol):
    """What hooks need of a probe."""

    pending: Callable[[], None] | None
    is_attached: bool

    def prepare(self, model: nn.Module, fingerprint: str | None = None) -> Needs:
        """Get ready for passes of `model`."""

    def take(self, seen: Pass, split: Any) -> None:
        """Measure a pass."""


def hooks_of(probe: TakesPasses, model: nn.Module, split: Any) -> list[NamedHook]:
    """Return hooks that give a probe every pass whose activations have all fired.

    They do not see the call: a pass begins where the tokens enter.

    Raises:
        InfoFlowError: if the model lacks a hook point.
    """
    weights = WeightState(model)
    needs = probe.prepare(model, model_fingerprint(model, weights))
    needs |= Needs(tuple(attention_hooks(model, layers_with_attention(model)[:1])))  # shows padding
    model_of = weakref.ref(model)  # the probe holds these hooks for as long as it lives
    begins = token_hook(model)  # fires first in every pass that is whole
    names = tuple(dict.fromkeys((begins, *needs.points)))
    points = {name: weakref.ref(hook_points(model)[name]) for name in names}
    caught: dict[str, Tensor] = {}
    own_thread = threading.get_ident()

    # called when a pass has ended, or when the next one begins
    def finish() -> None:
        activations, model = dict(caught), model_of()
        caught.clear()
        if activations and model is not None:
            weights.check()
            check_no_padding(model, activations)
            probe.take(Pass(model, activations, needs=needs), split)

    def listen(name: str) -> HookFunction:
        def hook_fn(activation: Tensor, hook: Any) -> None:
            if is_own_call() or probe.pending is not finish or probe.is_attached:
                return  # newer hooks of this probe, or attach(), measure the pass
            if isinstance(hook, nn.Module) and points[name]() is not hook:
                raise InfoFlowError(
                    f"hooks of a {type(probe).__name__} for one model stand on another, at {name}: "
                    "expected fwd_hooks(model) of the model that is run; make new ones"
                )
            if threading.get_ident() != own_thread:
                caught.clear()
                raise InfoFlowError(
                    "a second thread runs a model with a probe's hooks on it, and hooks cannot "
                    "tell passes of two threads apart: expected one thread; make the hooks in the "
                    "thread that runs the model"
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
