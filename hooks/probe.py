"""What all probes share: collecting activations over a forward pass, splitting, merging."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError, NothingMeasuredError
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.hooks.passes.own import inside_own_pass
from infoflow_lens.hooks.passes.view import Pass, check_mask_took_effect, unpadded
from infoflow_lens.hooks.result import Result

ResultT = TypeVar("ResultT", bound=Result)
ProbeT = TypeVar("ProbeT", bound="Probe[Any]")


@runtime_checkable
class HookFunction(Protocol):
    """A TransformerLens forward hook."""

    def __call__(self, activation: Tensor, hook: Any) -> Tensor | None:
        """Look at an activation; return another to replace it."""
        ...


NamedHook = tuple[str, HookFunction]


@dataclass
class Split:
    """Which sequences are held out for evaluation.

    Attributes:
        every: with mode "by_index", each `every`-th sequence a probe sees is held out, so that the
            split does not depend on the batch size.
        mode: "by_index", or "fit" / "evaluate" for all sequences until it changes.
    """

    every: int = 5
    mode: Literal["by_index", "fit", "evaluate"] = "by_index"

    def held_out(self, first: int, n: int) -> Bool[Tensor, " n"]:
        """Whether sequences `first` .. `first + n - 1` are held out."""
        if self.mode == "by_index":
            return torch.arange(first, first + n) % self.every == self.every - 1
        return torch.full((n,), self.mode == "evaluate")


class Probe(ABC, Generic[ResultT]):
    """Measures something of every sequence that passes through a model.

    A probe collects the activations that it needs during a forward pass and takes them in when
    the pass is complete. Use it with :func:`~infoflow_lens.hooks.passes.attach` or
    :func:`~infoflow_lens.hooks.run_probes`, which tie it to whole calls of the model, so that a
    pass that fails leaves nothing behind; or as plain hooks,
    ``model.run_with_hooks(x, fwd_hooks=probe.fwd_hooks(model))``, where a pass counts as complete
    when the last activation has arrived. It never changes an activation, and it sees activations
    as hooks registered before it have left them.
    """

    def __init__(self) -> None:
        self.n_sequences = 0
        self._n_partial = 0
        self._missing: tuple[str, ...] = ()
        self._expected: tuple[str, ...] = ()
        self._names: tuple[str, ...] = ()
        self._collected: dict[str, Tensor] = {}
        self._record: RunRecord | None = None
        self._finish: Callable[[], None] = self._collected.clear

    # What a probe is

    @abstractmethod
    def config(self) -> Mapping[str, Any]:
        """The settings, as JSON-compatible values."""

    @abstractmethod
    def _hook_points(self, model: nn.Module) -> tuple[str, ...]:
        """The hook points to listen to; raises InfoFlowError where the model lacks one."""

    def _optional_points(self, model: nn.Module) -> tuple[str, ...]:
        """Hook points that may never fire, without which a pass is complete all the same."""
        return ()

    @abstractmethod
    def _update(self, model: nn.Module, seen: Pass) -> None:
        """Take in one complete forward pass, whole or (if it raises) not at all."""

    @abstractmethod
    def _merge(self, other: Any) -> None:
        """Take in what `other` measured."""

    @abstractmethod
    def _result(self) -> ResultT:
        """The result of at least one forward pass."""

    def check(self, n_fit: int | None, n_evaluate: int | None, n_keys: int) -> None:
        """Refuse data that this probe cannot work on, before any forward pass.

        Args:
            n_fit: sequences to fit on; None where nobody knows.
            n_evaluate: sequences held out; None where nobody knows.
            n_keys: keys that a query has at most.

        Raises:
            InfoFlowError: if they are too few.
        """

    # How it is used

    def fwd_hooks(self, model: nn.Module, split: Split | None = None) -> list[NamedHook]:
        """The hooks of this probe, for ``run_with_hooks(fwd_hooks=...)`` or ``model.hooks(...)``.

        Args:
            model: the model that they will be put on.
            split: which sequences are held out for evaluation; default, every fifth.

        Raises:
            InfoFlowError: if the model lacks a hook point, or the probe has measured another
                model before.
        """
        split = split or Split()
        return self._listen(model, lambda: self._take_in(model, split))

    def _listen(
        self,
        model: nn.Module,
        when_complete: Callable[[], None],
        model_fingerprint: str | None = None,
    ) -> list[NamedHook]:
        """Hooks that collect the activations of a pass."""
        required = tuple(dict.fromkeys(self._hook_points(model)))
        names = tuple(dict.fromkeys((*required, *self._optional_points(model))))
        record = RunRecord.of_model(
            model,
            self._settings(),
            fingerprint_of_model=model_fingerprint,
        )
        self._same_model(record)
        self._record = record
        if self._collected:
            self._finish()
        self._expected, self._names = required, names
        self._finish = when_complete

        def listen(name: str) -> HookFunction:
            def hook_fn(activation: Tensor, hook: Any) -> None:
                if inside_own_pass():
                    return
                if name in self._collected:  # the pass before has ended
                    self._finish()
                self._collected[name] = activation.detach()
                if len(self._collected) == len(names):
                    self._finish()

            return hook_fn

        return [(name, listen(name)) for name in names]

    def _has_seen_all(self) -> bool:
        return len(self._collected) == len(self._names)

    def _take_in(
        self,
        model: nn.Module,
        split: Split,
        tokens: Tensor | None = None,
        mask: Bool[Tensor, "batch pos"] | None = None,
    ) -> None:
        """Measure the collected pass, or leave it out if something is missing."""
        if not self._collected or any(name not in self._collected for name in self._expected):
            self._leave_out_partial_pass()
            return
        activations: Mapping[str, Tensor] = dict(self._collected)
        self._collected.clear()
        n = next(iter(activations.values())).shape[0]
        if not n:
            return
        lengths = None
        # a user's inference mode would make tensors that cannot be added to later
        with torch.inference_mode(False), torch.no_grad():
            if mask is not None:
                check_mask_took_effect(activations, mask)
                if tokens is not None:
                    activations = {**activations, "": tokens}
                moved, lengths = unpadded(activations, mask)
                tokens = moved.pop("", None)
                activations = moved
            held_out = split.held_out(self.n_sequences, n)
            self._update(model, Pass(activations, held_out, lengths, tokens, self.n_sequences))
        self.n_sequences += n

    def merge(self: ProbeT, other: ProbeT) -> ProbeT:
        """Add what `other`, a probe with the same settings on the same model, has measured.

        Raises:
            InfoFlowError: if settings or model differ.
        """
        if other is self:
            raise InfoFlowError(
                f"cannot merge a {type(self).__name__} into itself: its sequences would count twice"
            )
        if type(other) is not type(self) or other.config() != self.config():
            raise InfoFlowError(
                f"cannot merge {type(other).__name__}({dict(other.config())}) into "
                f"{type(self).__name__}({dict(self.config())}): expected the same settings"
            )
        if other._record is not None:
            self._same_model(other._record)
            self._record = other._record
        if other.n_sequences:
            self._merge(other)
        self.n_sequences += other.n_sequences
        self._n_partial += other._n_partial
        self._missing = self._missing or other._missing
        return self

    def all_reduce_(self: ProbeT) -> ProbeT:
        """Merge the probes of all processes of ``torch.distributed``, in the order of ranks.

        Every process ends with the same probe. Without an initialised process group nothing
        happens.
        """
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            return self
        states: list[dict[str, Any]] = [{}] * distributed.get_world_size()
        distributed.all_gather_object(states, self.state())
        probes = []
        for state in states:
            probe = object.__new__(type(self))
            Probe.__init__(probe)
            probe._restore(state)
            probes.append(probe)
        first, *rest = probes
        for probe in rest:
            first.merge(probe)
        self.__dict__.update(first.__dict__)
        return self

    def state(self) -> dict[str, Any]:
        """Everything measured so far, for :meth:`load_state` of a probe with the same settings.

        It may be pickled; `torch.load` needs ``weights_only=False`` for its records.
        """
        if self._collected:
            self._finish()
        kept = {k: v for k, v in self.__dict__.items() if k not in ("_finish", "_collected")}
        return {**kept, "settings": self._settings()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what another probe had measured.

        Raises:
            InfoFlowError: if that had other settings.
        """
        if state.get("settings") != self._settings():
            raise InfoFlowError(
                f"cannot go on from a state of {state.get('settings')} with {self._settings()}: "
                "expected the same settings"
            )
        self._restore(state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update({k: v for k, v in state.items() if k != "settings"})

    def _settings(self) -> dict[str, Any]:
        return {"probe": type(self).__name__, **self.config()}

    def result(self) -> ResultT:
        """What was measured so far; the probe may go on afterwards.

        Raises:
            NothingMeasuredError: if no forward pass was complete.
        """
        if self._collected:
            self._finish()
        if self._n_partial and not self.n_sequences:
            raise NothingMeasuredError(
                f"{type(self).__name__} saw {self._n_partial} forward passes, but "
                f"{', '.join(self._missing)} never fired: expected full forward passes; run the "
                "model without stop_at_layer"
            )
        if not self.n_sequences:
            raise NothingMeasuredError(
                f"{type(self).__name__} has measured nothing: run the model on at least one batch "
                "while the probe is attached"
            )
        return self._result()

    # Helpers for probes

    def _leave_out_partial_pass(self) -> None:
        self._n_partial += 1
        wanted = self._expected or self._names
        self._missing = tuple(name for name in wanted if name not in self._collected)
        self._collected.clear()

    def _same_model(self, record: RunRecord) -> None:
        if self._record and self._record.model_fingerprint != record.model_fingerprint:
            raise InfoFlowError(
                f"{type(self).__name__} has measured model {self._record.model_fingerprint}, this "
                f"is {record.model_fingerprint} (other weights): use a new probe for each model"
            )

    def _run_record(self) -> RunRecord:
        assert self._record is not None
        return self._record

    def _notes(self) -> tuple[str, ...]:
        if not self._n_partial:
            return ()
        return (
            f"{self._n_partial} incomplete forward pass(es) left out "
            f"({', '.join(self._missing)} had not fired)",
        )
