"""What a probe is: settings, what it reads of a pass, what it keeps, what comes of it."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from infoflow_lens.foundation.checks import check_choice, check_integer
from infoflow_lens.foundation.errors import InfoFlowError, NothingMeasuredError
from infoflow_lens.foundation.memory import bytes_in
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.foundation.state import state_from_bytes, state_to_bytes
from infoflow_lens.hooks.model.call import NamedHook
from infoflow_lens.hooks.model.points import hook_name
from infoflow_lens.hooks.passes.plain import hooks_of
from infoflow_lens.hooks.passes.view import Needs, Pass
from infoflow_lens.hooks.result import Result

if TYPE_CHECKING:
    from infoflow_lens.hooks.sharded import ShardedResult

ResultT = TypeVar("ResultT", bound=Result)
ProbeT = TypeVar("ProbeT", bound="Probe[Any]")


Mode = Literal["by_index", "fit", "evaluate"]


@dataclass
class Split:
    """Which sequences are held out for evaluation, and how sequences are counted.

    Attributes:
        every: with mode "by_index", each `every`-th sequence is held out, so that the split does
            not depend on the batch size.
        mode: "by_index", or "fit" / "evaluate" for all sequences until it changes.
        first, step: sequence n of a probe is sequence ``first + step * n`` of all, where several
            processes share them, so that the split does not depend on how they do.

    Raises:
        InfoFlowError: for `every` below 2, a negative `first`, or `step` below 1.
    """

    every: int = 5
    mode: Mode = "by_index"
    first: int = 0
    step: int = 1

    def __post_init__(self) -> None:
        hint = ", so that some sequences are fitted"
        self.every = check_integer(self.every, "eval_every", 2, hint)
        check_choice(self.mode, "mode", ("by_index", "fit", "evaluate"))
        self.first = check_integer(self.first, "first_index")
        self.step = check_integer(self.step, "index_step", 1)

    def indices(self, n_before: int, n: int) -> Int[Tensor, " n"]:
        """Which sequences of all the next `n` are."""
        return self.first + self.step * torch.arange(n_before, n_before + n)

    def held_out(self, indices: Int[Tensor, " n"]) -> Bool[Tensor, " n"]:
        """Whether these sequences are held out."""
        if self.mode == "by_index":
            return indices % self.every == self.every - 1
        return torch.full(indices.shape, self.mode == "evaluate")

    def n_held_out(self, n: int) -> int:
        """How many of the first `n` sequences are held out."""
        if self.mode == "by_index" and self.step == 1:
            return (self.first + n) // self.every - self.first // self.every
        return int(self.held_out(self.indices(0, n)).sum())

    def turns(self, indices: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """Numbers by which held-out sequences are dealt to blocks in turn."""
        return indices // self.every if self.mode == "by_index" else indices


class Probe(ABC, Generic[ResultT]):
    """Measures something of every sequence that passes through a model.

    A probe says which settings it has, what it needs of a pass, and what it does with one. Use it
    with :func:`~infoflow_lens.hooks.attach` or :func:`~infoflow_lens.hooks.run_probes`, which give
    it whole calls of the model, so that a pass that fails leaves nothing behind; or as plain hooks,
    ``model.run_with_hooks(x, fwd_hooks=probe.fwd_hooks(model))``, where a pass counts as complete
    when the last activation has arrived. It never changes an activation.

    A probe of one's own writes `config`, `needs`, `update`, `add`, `snapshot`, `restore` and
    `compute`.

    Attributes:
        sharded: the kind of result that keeps parts on disk, for what grows with every sequence.
        n_sequences: how many it has measured.
        pending: takes in what plain hooks have collected so far.
    """

    sharded: ClassVar[type["ShardedResult[Any]"] | None] = None

    def __init__(self) -> None:
        self.n_sequences = 0
        self.pending: Callable[[], None] | None = None
        self.is_attached = False
        self._points: tuple[str, ...] = ()
        self._record: RunRecord | None = None
        self._n_partial = 0
        self._missing: tuple[str, ...] = ()
        self._is_reduced = False
        self._refused = ""

    # What a probe writes

    @abstractmethod
    def config(self) -> Mapping[str, Any]:
        """The settings, as JSON-compatible values."""

    @abstractmethod
    def needs(self, model: nn.Module) -> Needs:
        """What it reads of every pass; raises InfoFlowError where the model cannot give it."""

    @abstractmethod
    def update(self, seen: Pass) -> None:
        """Take in one complete forward pass, whole or (if it raises) not at all."""

    @abstractmethod
    def add(self, other: Any) -> None:
        """Take in what `other`, a probe with the same settings, has measured."""

    @abstractmethod
    def snapshot(self) -> dict[str, Any]:
        """What it has measured, or nothing yet: tensors and plain values in dicts and lists."""

    @abstractmethod
    def restore(self, measured: Mapping[str, Any]) -> None:
        """Take over what :meth:`snapshot` gave, in the place of all that was measured."""

    @abstractmethod
    def compute(self) -> ResultT:
        """The result of at least one forward pass."""

    def check(self, n_fit: int | None, n_evaluate: int | None, n_keys: int) -> None:
        """Refuse data that this probe cannot work on, before any forward pass.

        Args:
            n_fit: sequences to fit on; None if unknown.
            n_evaluate: sequences held out; None if unknown.
            n_keys: keys that a query has at most.

        Raises:
            InfoFlowError: if they are too few.
        """

    # How it is used

    def prepare(self, model: nn.Module, fingerprint: str | None = None) -> Needs:
        """Get ready for passes of `model`.

        Args:
            model: a TransformerLens model.
            fingerprint: of its weights, if it is known.

        Returns:
            What the probe needs of every pass.

        Raises:
            InfoFlowError: if the model cannot give it, or the probe has measured another model.
        """
        needs = self.needs(model)
        if not isinstance(needs, Needs):
            raise InfoFlowError(
                f"{type(self).__name__}.needs gave {type(needs).__name__}: expected Needs"
            )
        for point in needs.points:
            hook_name(model, point)
        record = RunRecord.of_model(model, self._settings(), fingerprint_of_model=fingerprint)
        self._same_model(record)
        self._finish_pending()
        self.pending = None
        self._record, self._points = record, needs.points
        return needs

    def take(self, seen: Pass, split: Split) -> None:
        """Measure a pass, or count it as incomplete if something that is needed did not fire.

        Raises:
            InfoFlowError: for what the probe refuses; then it has taken in nothing of the pass.
        """
        missing = seen.lacks(self._points)
        if missing:
            self._n_partial, self._missing = self._n_partial + 1, missing
            return
        if not len(seen):
            return
        if self._is_reduced:
            raise InfoFlowError(
                f"this {type(self).__name__} holds what all processes have measured, so another "
                "pass would count beside theirs: expected all_reduce_() after the last pass; go on "
                "with a new probe, reduce it, too, and merge them"
            )
        indices = split.indices(self.n_sequences, len(seen))
        # a user's inference mode would make tensors that cannot be added to later
        with torch.inference_mode(False), torch.no_grad():
            self.update(seen.counted(indices, split.held_out(indices), split.turns(indices)))
        self.n_sequences += len(seen)

    def fwd_hooks(self, model: nn.Module, split: Split | None = None) -> list[NamedHook]:
        """The hooks of this probe, for ``run_with_hooks(fwd_hooks=...)`` or ``model.hooks(...)``.

        Hooks do not see the arguments of a call, so padded sequences are refused: for these use
        :func:`~infoflow_lens.hooks.attach`.

        Args:
            model: the model that they will be put on.
            split: which sequences are held out for evaluation; default, every fifth.

        Raises:
            InfoFlowError: if the model lacks a hook point, or the probe has measured another
                model before; and from the model's call for padding, for weights that change
                between two passes, and for calls from two threads at once.
        """
        return hooks_of(self, model, split or Split())

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
        for probe in (self, other):
            probe._check_good()
        if self._is_reduced != other._is_reduced and self.n_sequences and other.n_sequences:
            raise InfoFlowError(
                f"one {type(self).__name__} holds what all processes have measured, the other what "
                "this one has: expected both or neither; call all_reduce_() on the other first"
            )
        self._is_reduced = self._is_reduced or other._is_reduced
        if other._record is not None:
            self._same_model(other._record)
            self._record = other._record
        if other.n_sequences:
            self.add(other)
        self.n_sequences += other.n_sequences
        self._n_partial += other._n_partial
        self._missing = self._missing or other._missing
        return self

    def all_reduce_(self: ProbeT) -> ProbeT:
        """Merge the probes of all processes of ``torch.distributed``, in the order of ranks.

        Every process ends with the same probe, which takes no further passes; calling it again
        changes nothing. Without an initialised process group nothing happens.

        Raises:
            InfoFlowError: if another process is gone or does not answer; what this one has measured
                stays in its probe.
        """
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()) or self._is_reduced:
            return self
        try:
            states = _gathered(self.state())
        except RuntimeError as error:  # of the backend
            raise InfoFlowError(
                f"another process of torch.distributed is gone or does not answer ({error}): "
                "expected each to call all_reduce_() on the same probes; what this process has "
                "measured is still in this probe, whose state() can be kept"
            ) from error
        of_ranks = [copy.copy(self) for _ in states]
        for probe, state in zip(of_ranks, states, strict=True):
            probe.load_state(state)
        for probe in of_ranks[1:]:
            of_ranks[0].merge(probe)
        self.load_state(of_ranks[0].state())
        self._is_reduced = True
        return self

    def state(self) -> dict[str, Any]:
        """Everything measured so far, for :meth:`load_state` of a probe with the same settings.

        A copy, which later passes leave alone: tensors and plain values in dicts and lists.
        """
        self._check_good()
        return {
            "settings": self._settings(),
            "n_sequences": self.n_sequences,
            "n_partial": self._n_partial,
            "missing": list(self._missing),
            "record": None if self._record is None else self._record.to_dict(),
            "is_reduced": self._is_reduced,
            "measured": copied(self.snapshot()),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what another probe had measured.

        Raises:
            InfoFlowError: if that had other settings.
        """
        settings = state.get("settings") if isinstance(state, Mapping) else type(state).__name__
        if settings != self._settings():
            raise InfoFlowError(
                f"cannot go on from a state of {settings} with {self._settings()}: "
                "expected the same settings"
            )
        try:
            record = None if state["record"] is None else RunRecord.from_dict(state["record"])
            counts = int(state["n_sequences"]), int(state["n_partial"])
            seen = tuple(state["missing"]), bool(state["is_reduced"])
            self.restore(copied(state["measured"]))
        except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
            raise InfoFlowError(
                f"the state of {type(self).__name__} cannot be read ({type(error).__name__}: "
                f"{error}): expected what state() of this version gave; begin again"
            ) from error
        self._record = record
        self.n_sequences, self._n_partial = counts
        self._missing, self._is_reduced = seen

    def result(self) -> ResultT:
        """What was measured so far; the probe may go on afterwards.

        Raises:
            NothingMeasuredError: if no forward pass was complete.
            InfoFlowError: if the weights were changed in between.
        """
        self._check_good()
        name = type(self).__name__
        if self._n_partial and not self.n_sequences:
            raise NothingMeasuredError(
                f"{name} saw {self._n_partial} forward passes, but {', '.join(self._missing)} "
                "never fired: expected full forward passes; run the model without stop_at_layer"
            )
        if not self.n_sequences:
            raise NothingMeasuredError(
                f"{name} has measured nothing: run the model on at least one batch while the probe "
                "is attached"
            )
        return self.compute()

    def check_model(self, fingerprint: str) -> None:
        """Refuse what was measured on another model.

        Args:
            fingerprint: of the model.

        Raises:
            InfoFlowError: if it is not the one that was measured.
        """
        if self._record is not None and self._record.model_fingerprint != fingerprint:
            raise InfoFlowError(
                f"{type(self).__name__} has measured model {self._record.model_fingerprint}, this "
                f"is {fingerprint} (other weights): use a new probe for each model"
            )

    def growing_bytes(self) -> int:
        """Bytes of what grows with the sequences; sums and what waits to be settled do not."""
        return bytes_in(self.snapshot())

    def settle(self) -> None:
        """Take in what waits for more of its kind, so that the state is small and cheap to merge.

        A result does so by itself.
        """

    def refuse(self, reason: str) -> None:
        """From now on there is no result, for this reason."""
        self._refused = reason

    # Helpers for probes

    def __getstate__(self) -> dict[str, Any]:
        """Without what binds the probe to a model: what plain hooks have collected, and a block."""
        return {**self.__dict__, "pending": None, "is_attached": False}

    def run_record(self) -> RunRecord:
        """The record of the run, for the result."""
        assert self._record is not None
        return self._record

    def notes(self) -> tuple[str, ...]:
        """What a reader of the result must know."""
        if not self._n_partial:
            return ()
        return (
            f"{self._n_partial} incomplete forward pass(es) left out "
            f"({', '.join(self._missing)} had not fired)",
        )

    def _settings(self) -> dict[str, Any]:
        return {"probe": type(self).__name__, **self.config()}

    def _finish_pending(self) -> None:
        if self.pending is not None:
            self.pending()

    def _check_good(self) -> None:
        self._finish_pending()
        if self._refused:
            raise InfoFlowError(self._refused)

    def _same_model(self, record: RunRecord) -> None:
        if record.model_fingerprint is not None:
            self.check_model(record.model_fingerprint)


def _gathered(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The states of all processes, sent as tensors and JSON: nothing that is received is called."""
    distributed = torch.distributed
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    sent = torch.frombuffer(bytearray(state_to_bytes(state)), dtype=torch.uint8).to(device)
    length = torch.tensor([len(sent)], device=device)
    lengths = [torch.zeros_like(length) for _ in range(distributed.get_world_size())]
    distributed.all_gather(lengths, length)
    longest = max(int(length) for length in lengths)
    padded = torch.nn.functional.pad(sent, (0, longest - len(sent)))
    received = [torch.empty_like(padded) for _ in lengths]
    distributed.all_gather(received, padded)
    return [
        state_from_bytes(part[: int(length)].cpu().numpy().tobytes())
        for part, length in zip(received, lengths, strict=True)
    ]


def copied(value: Any) -> Any:
    """Nested tensors and plain values, copied."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: copied(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [copied(part) for part in value]
    return value
