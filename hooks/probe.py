"""What a probe is: settings, what it reads of a pass, what it keeps, what comes of it."""

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any, ClassVar, Generic, Literal, cast

import torch
from annotated_types import Ge
from jaxtyping import Bool, Int
from torch import Tensor, nn
from typing_extensions import TypeVar, dataclass_transform

from infoflow_lens.foundation.errors import InfoFlowError, NothingMeasuredError, refuse_names
from infoflow_lens.foundation.record import RunRecord, code_digest, fingerprint, is_own
from infoflow_lens.foundation.saving import convert, state_from_bytes, state_to_bytes
from infoflow_lens.foundation.settings import Count, Index, Remedy, check, check_fields, plain
from infoflow_lens.hooks.model.call import NamedHook
from infoflow_lens.hooks.model.capabilities import note_other_mixing
from infoflow_lens.hooks.model.points import hook_name
from infoflow_lens.hooks.passes.plain import hooks_of
from infoflow_lens.hooks.passes.view import Needs, Pass
from infoflow_lens.hooks.result import LabelledResult, Result, label_arrays
from infoflow_lens.hooks.sharded import ShardedResult
from infoflow_lens.hooks.states import State, copy_values, states_of

ResultT = TypeVar("ResultT", bound=Result, default=LabelledResult)
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
        fitted = Annotated[int, Ge(2), Remedy("so that some sequences are fitted")]
        self.every = check(self.every, fitted, "eval_every")
        self.first = check(self.first, Index, "first_index")
        self.step = check(self.step, Count, "index_step")
        check_fields(self)

    def indices(self, n_before: int, n: int) -> Int[Tensor, " n"]:
        """Return the numbers, among all sequences, of the next `n`."""
        return self.first + self.step * torch.arange(n_before, n_before + n)

    def held_out(self, indices: Int[Tensor, " n"]) -> Bool[Tensor, " n"]:
        """Say whether these sequences are held out."""
        if self.mode == "by_index":
            return indices % self.every == self.every - 1
        return torch.full(indices.shape, self.mode == "evaluate")

    def n_held_out(self, n: int) -> int:
        """Count those of the first `n` sequences that are held out."""
        if self.mode == "by_index" and self.step == 1:
            # the count of i with i % every == every - 1 between first and first + n
            return (self.first + n) // self.every - self.first // self.every
        return int(self.held_out(self.indices(0, n)).sum())

    def turns(self, indices: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """Return numbers by which held-out sequences are dealt to blocks in turn."""
        return indices // self.every if self.mode == "by_index" else indices


@refuse_names(filled="make_result")
@dataclass_transform(eq_default=False, field_specifiers=(field,))
class Probe(ABC, Generic[ResultT]):
    """Measures something of every sequence that passes through a model.

    A subclass declares what it is, and writes `update` and `compute`; it is a dataclass by itself::

        class PreviousToken(Probe):
            reads = ("pattern",)  # of a pass
            dims = ("layer", "head")  # of what compute returns
            weight, n_queries = summed(), summed()  # what is kept, and how two become one

            def update(self, seen):  # what one pass adds
                rows = [seen.pattern(i).diagonal(-1, 2, 3) for i in range(seen.n_layers)]
                sums = [seen.sum_over_queries(row, first=1).sum(dim=0) for row in rows]
                return {"weight": sums, "n_queries": seen.count_queries(rows[0], first=1).sum()}

            def compute(self):
                return [weight / self.n_queries for weight in self.weight]

    Settings are annotated fields, such as ``ranks: Ranks = (1,)``, and are checked when it is made.
    Merging, snapshots, processes, shards, files and tables follow from the declarations.
    :func:`~infoflow_lens.hooks.check_probe` tries out whether it is right for texts of different
    length, and when it is merged.

    Use it with :func:`~infoflow_lens.hooks.attach` or :func:`~infoflow_lens.hooks.run_probes`,
    which give it whole calls of the model, so that a pass that fails leaves nothing behind; or as
    plain hooks, ``model.run_with_hooks(x, fwd_hooks=probe.fwd_hooks(model))``, where a pass counts
    as complete when the last activation has arrived. It never changes an activation.

    Attributes:
        reads: what it needs of a pass: "scores", "pattern", "tokens", states ("post_attention",
            "resid_post", "resid_pre", "head") and hook points; for ranks it writes `needs`.
        dims: the names of the axes of what `compute` returns, or by the names of these arrays.
            Arrays with a tensor for each layer have "layer" as the first.
        sharded: the kind of result that keeps parts on disk, for what grows with every sequence.
        by_index: whether the place of a sequence among all decides something, as which ones are
            held out; another order may then give other numbers.
        follows_attention: whether what it gives is followed as if attention alone moved information
            between positions; notes then name the layers in which more than that does.
        n_sequences: how many it has measured.
        pending: takes in what plain hooks have collected so far.
        kept: what the declared states hold, by name.
    """

    reads: ClassVar[str | Sequence[str]] = ()
    dims: ClassVar[Sequence[str] | Mapping[str, Sequence[str]]] = ()
    sharded: ClassVar[type[ShardedResult[Any]] | None] = None
    by_index: ClassVar[bool] = False
    follows_attention: ClassVar[bool] = False
    _states: ClassVar[dict[str, State]] = {}

    n_sequences: int
    pending: Callable[[], None] | None
    is_attached: bool
    kept: dict[str, Any]
    _points: tuple[str, ...]
    _record: RunRecord | None
    _refused: str
    _n_partial: int
    _missing: tuple[str, ...]
    _mixing: str
    _is_reduced: bool

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        states = (name for name, value in vars(cls).items() if isinstance(value, State))
        own = {*inspect.get_annotations(cls), *states}
        # methods and attributes of Probe, which a field would hide
        taken = sorted(name for name in own if callable(getattr(Probe, name, None)))
        if taken or own & {"n_sequences", "pending", "is_attached", "kept"}:
            raise InfoFlowError(
                f"{cls.__name__} declares {', '.join(taken or own)}, which every probe has: "
                "expected another name"
            )
        # settings must be known, as probes merge and go on only with the same
        if "__init__" in vars(cls) and "config" not in vars(cls):
            raise InfoFlowError(
                f"{cls.__name__} defines __init__, which hides its settings: expected settings as "
                "annotated fields, such as share: float = 0.1, and __post_init__ for what follows "
                "from them"
            )
        dataclass(eq=False, repr=False)(cls)
        cls._states = states_of(cls)

    def __new__(cls: type[ProbeT], *args: Any, **kwargs: Any) -> ProbeT:
        """Return a probe that has measured nothing.

        Raises:
            InfoFlowError: for a class that lacks a method.
        """
        lacking = sorted(getattr(cls, "__abstractmethods__", ()))
        if lacking:
            raise InfoFlowError(
                f"{cls.__name__} has no {' and no '.join(lacking)}: expected update(seen), which "
                "returns what a pass adds to each of its states, and compute(), which makes the "
                "result of them"
            )
        probe = super().__new__(cls)
        probe.n_sequences, probe.pending, probe.kept = 0, None, {}
        probe.is_attached = False
        probe._points, probe._record, probe._refused = (), None, ""
        probe._n_partial, probe._missing, probe._mixing, probe._is_reduced = 0, (), "", False
        return probe

    def __post_init__(self) -> None:
        check_fields(self)

    # What a probe writes

    @abstractmethod
    def update(self, seen: Pass) -> Mapping[str, Any]:
        """Return what one complete forward pass adds to each of the declared states, by name."""

    @abstractmethod
    def compute(self) -> Any:
        """Compute a result, or arrays of one, from the states of at least one pass.

        An array is a tensor, or a list of tensors, one for each layer; several are a dict.
        """

    def needs(self, model: nn.Module) -> Needs:
        """Name what it reads of every pass; raises InfoFlowError where the model cannot give it."""
        reads = (self.reads,) if isinstance(self.reads, str) else tuple(self.reads)
        points = [name for name in reads if "hook_" in name]
        unknown = [name for name in reads if name not in (*_PARTS, *_STATES, *points)]
        if unknown or not reads:
            raise InfoFlowError(
                f"{type(self).__name__} reads {', '.join(unknown) or 'nothing'} of a pass: "
                f"expected some of {', '.join((*_PARTS, *_STATES))} and hook points, as in "
                'reads = ("pattern",); or write needs(model)'
            )
        return Needs.of(
            model,
            scores="scores" in reads,
            pattern="pattern" in reads,
            tokens="tokens" in reads,
            states=[name for name in _STATES if name in reads],
            points=points,
        )

    def config(self) -> Mapping[str, Any]:
        """Return the settings, as JSON-compatible values; without those that change no result.

        Fields are left out that are declared by ``field(compare=False)``.
        """
        return {
            item.name: describe_setting(getattr(self, item.name))
            for item in fields(self)  # type: ignore[arg-type]
            if item.init and item.compare
        }

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
        self._check_declarations()
        needs = self.needs(model)
        if not isinstance(needs, Needs):
            raise InfoFlowError(
                f"{type(self).__name__}.needs gave {type(needs).__name__}: expected Needs"
            )
        # refused before the pass, if the model has no such point
        for point in needs.points:
            hook_name(model, point)
        record = RunRecord.from_model(model, self._settings(), fingerprint_of_model=fingerprint)
        self._same_model(record)
        self._finish_pending()
        # hooks of an earlier call measure nothing any more
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
            part = self.update(
                seen.renumber(indices, split.held_out(indices), split.turns(indices))
            )
            # in a loop of the user's, whose calls may have more than a batch holds, no passes run
            if self.follows_attention and not self.is_attached and seen.batch is not None:
                self._mixing = self._mixing or note_other_mixing(seen.model, seen.batch)
            self.add(part, len(seen))

    def add(self, part: Mapping[str, Any], n: int) -> None:
        """Add what `update` gave of `n` sequences."""
        self._check_part(part)
        self.kept = {
            name: state.add(self.kept.get(name), part[name]) for name, state in self._states.items()
        }
        self.n_sequences += n

    def fwd_hooks(self, model: nn.Module, split: Split | None = None) -> list[NamedHook]:
        """Return the probe's hooks, for ``run_with_hooks(fwd_hooks=...)`` or ``model.hooks(...)``.

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
                f"{type(self).__name__} cannot be merged into itself, where sequences would count "
                "twice: expected another probe"
            )
        if type(other) is not type(self) or other.config() != self.config():
            raise InfoFlowError(
                f"cannot merge {type(other).__name__}({dict(other.config())}) into "
                f"{type(self).__name__}({dict(self.config())}): expected the same settings"
            )
        # what has failed once, or saw other weights, is refused here, too
        for probe in (self, other):
            probe._check_good()
        # sums of all processes and of one would be counted as if they were alike
        if self._is_reduced != other._is_reduced and self.n_sequences and other.n_sequences:
            raise InfoFlowError(
                f"one {type(self).__name__} holds what all processes have measured, the other what "
                "this process has: expected the same of both; call all_reduce_() on the other "
                "probe first"
            )
        self._is_reduced = self._is_reduced or other._is_reduced
        if other._record is not None:
            self._same_model(other._record)
            self._record = other._record
        self.kept = {
            name: state.merge(self.kept.get(name), other.kept.get(name))
            for name, state in self._states.items()
        }
        self.n_sequences += other.n_sequences
        self._n_partial += other._n_partial
        self._missing = self._missing or other._missing
        self._mixing = self._mixing or other._mixing
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
            states = _gather_states(self.state_dict())
        except RuntimeError as error:  # of the backend
            raise InfoFlowError(
                f"another process of torch.distributed is gone or does not answer ({error}): "
                "expected each to call all_reduce_() on the same probes; what this process has "
                "measured is still in this probe, whose state_dict() can be kept"
            ) from error
        # in the order of ranks, whatever the order in which they answer
        of_ranks = [copy.copy(self) for _ in states]
        for probe, state in zip(of_ranks, states, strict=True):
            probe.load_state_dict(state)
        for probe in of_ranks[1:]:
            of_ranks[0].merge(probe)
        self.load_state_dict(of_ranks[0].state_dict())
        self._is_reduced = True
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return all that was measured so far, for a probe with the same settings to go on from.

        A copy, which later passes leave alone: tensors and plain values in dicts and lists.
        """
        self._check_good()
        return {
            "settings": self._settings(),
            "n_sequences": self.n_sequences,
            "n_partial": self._n_partial,
            "missing": list(self._missing),
            "mixing": self._mixing,
            "record": None if self._record is None else self._record.to_dict(),
            "is_reduced": self._is_reduced,
            "measured": copy_values(self.kept),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what another probe had measured.

        Raises:
            InfoFlowError: if that had other settings.
        """
        settings = state.get("settings") if isinstance(state, Mapping) else type(state).__name__
        own = self._settings()
        if settings != own:
            # of another run of one probe only what differs is named
            if isinstance(settings, Mapping) and settings.get("probe") == own["probe"]:
                names = [
                    name for name in {**own, **settings} if settings.get(name) != own.get(name)
                ]
                settings, own = (
                    {name: given.get(name) for name in names} for given in (settings, own)
                )
            raise InfoFlowError(
                f"cannot go on from a state of {settings} with {own}: expected the same settings"
            )
        try:
            record = convert(state["record"], RunRecord | None, "record")
            counts = int(state["n_sequences"]), int(state["n_partial"])
            seen = tuple(state["missing"]), str(state.get("mixing", "")), bool(state["is_reduced"])
            # copied: the state belongs to the caller, who may load it again
            measured = copy_values(state["measured"])
            if (measured or counts[0]) and measured.keys() != self._states.keys():
                raise ValueError(f"it holds {', '.join(measured) or 'nothing'}")
            kept = {
                name: None if part is None else self._states[name].rebuild(part)
                for name, part in measured.items()
            }
        except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
            raise InfoFlowError(
                f"the state of {type(self).__name__} cannot be read ({type(error).__name__}: "
                f"{error}): expected what state_dict() of this version gave; measure anew"
            ) from error
        # set at the end, so that a state which cannot be read changes nothing
        self._record, self.kept = record, kept
        self.n_sequences, self._n_partial = counts
        self._missing, self._mixing, self._is_reduced = seen

    def result(self) -> ResultT:
        """Return what was measured so far; the probe may go on afterwards.

        Raises:
            NothingMeasuredError: if no forward pass was complete.
            InfoFlowError: if the weights were changed in between.
        """
        self._check_good()
        name = type(self).__name__
        if self._n_partial and not self.n_sequences:
            raise NothingMeasuredError(
                f"{name} saw {self._n_partial} forward passes, but {', '.join(self._missing)} "
                "never fired: expected full forward passes, from token ids where the embedding is "
                "read; run the model without stop_at_layer, start_at_layer and inputs_embeds"
            )
        if not self.n_sequences:
            raise NothingMeasuredError(
                f"{name} has measured nothing: run the model on at least one batch while the probe "
                "is attached, by calls of the very object that it is attached to; the generate of "
                "an opened model calls the model inside, so attach to that"
            )
        # plain arrays get names on their axes
        found = self.compute()
        if not isinstance(found, Result):
            found = label_arrays(name, found, self.dims, self.run_record(), self.notes())
        return cast(ResultT, found)

    def check_model(self, fingerprint: str) -> None:
        """Refuse what was measured on another model.

        Args:
            fingerprint: of the model.

        Raises:
            InfoFlowError: if it is not the one that was measured.
        """
        if self._record is not None:
            what = f"{type(self).__name__} has measured"
            self._record.check_model(fingerprint, what, "use a new probe for each model")

    def growing_bytes(self) -> int:
        """Give bytes of what grows with the sequences; sums and what waits to be settled do not."""
        return sum(s.bytes_of(self.kept.get(name)) for name, s in self._states.items())

    def settle(self) -> None:
        """Take in what waits for more of its kind, so that the state is small and cheap to merge.

        A result does so by itself.
        """

    def refuse(self, reason: str) -> None:
        """Make result() raise this error."""
        self._refused = reason

    # Helpers for probes

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what binds the probe to a model: what plain hooks collected, and a block."""
        return {**self.__dict__, "pending": None, "is_attached": False}

    def make_result(self, kind: type[ResultT], **more: Any) -> ResultT:
        """Make a result whose fields are the states and settings of the same names.

        Args:
            kind: of result.
            more: other fields, and those in the place of these.
        """
        known = {*self._states, *(item.name for item in fields(self))}  # type: ignore[arg-type]
        values = {f.name: getattr(self, f.name) for f in fields(kind) if f.name in known}
        return kind(**{"record": self.run_record(), "notes": self.notes(), **values, **more})

    def run_record(self) -> RunRecord:
        """Return the record of the run, for the result."""
        assert self._record is not None
        return self._record

    def notes(self) -> tuple[str, ...]:
        """Return what a reader of the result must know."""
        mixing = (self._mixing,) if self._mixing else ()
        if not self._n_partial:
            return mixing
        return (
            f"{self._n_partial} incomplete forward pass(es) left out "
            f"({', '.join(self._missing)} had not fired)",
            *mixing,
        )

    def _check_declarations(self) -> None:
        """Refuse, before any pass, what could not be measured.

        Raises:
            InfoFlowError: for a probe without states, or whose `update` takes something else.
        """
        name = type(self).__name__
        if not self._states:
            raise InfoFlowError(
                f"{name} declares nothing that it keeps: expected states in its class, as in "
                "total = summed()"
            )
        for method, n_arguments in (("update", 1), ("compute", 0)):
            # bound to nothing, to see whether it takes as many arguments
            try:
                inspect.signature(getattr(self, method)).bind(*[None] * n_arguments)
            except TypeError as error:
                raise InfoFlowError(
                    f"{name}.{method} cannot be called ({error}): expected update(self, seen) and "
                    "compute(self)"
                ) from error

    def _check_part(self, part: Any) -> None:
        if not isinstance(part, Mapping) or part.keys() != self._states.keys():
            given = list(part) if isinstance(part, Mapping) else type(part).__name__
            raise InfoFlowError(
                f"{type(self).__name__}.update returned {given}: expected a dict with what the "
                f"pass adds to each of its states, {', '.join(self._states)}"
            )

    def _settings(self) -> dict[str, Any]:
        kind = type(self)
        return {"probe": kind.__name__, **self.config()} | (
            {"code": code_digest(kind)} if is_own(kind) else {}
        )

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


_PARTS = ("scores", "pattern", "tokens")  # of a pass, in every layer
_STATES = ("post_attention", "resid_post", "resid_pre", "head")


def describe_setting(value: Any) -> Any:
    """Return a setting as JSON-compatible values.

    Tensors and results become a digest, functions their name, dataclasses their fields; the user's
    own code is described by a digest of what it does.
    """
    if isinstance(value, Tensor):
        return {"table": fingerprint({"table": value})}
    if isinstance(value, (tuple, list)):
        return [describe_setting(part) for part in value]
    if isinstance(value, Mapping):
        return {str(key): describe_setting(part) for key, part in value.items()}
    if callable(value):
        name = getattr(value, "__qualname__", type(value).__name__)
        by_name = {"function": f"{getattr(value, '__module__', '')}.{name}"}
        # code of the user's own may change under the same name; ours goes by the version
        is_object = not hasattr(value, "__qualname__")  # it may hold tensors
        return by_name | ({"code": code_digest(value)} if is_object or is_own(value) else {})
    if isinstance(value, Result):
        return {"result": type(value).__name__, "digest": fingerprint(value.to_parts()[1])}
    if is_dataclass(value) and not isinstance(value, type):
        parts = {part.name: describe_setting(getattr(value, part.name)) for part in fields(value)}
        return {"kind": type(value).__name__, **parts}
    value = plain(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise InfoFlowError(
        f"a setting is {value!r}: expected numbers, texts, tensors, functions, or tuples and dicts "
        "of these, which stand in the record of a run"
    )


def _gather_states(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Gather the states of all processes, sent as tensors and JSON: nothing received is called."""
    distributed = torch.distributed
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    sent = torch.frombuffer(bytearray(state_to_bytes(state)), dtype=torch.uint8).to(device)
    # processes send as many bytes as the longest has, as all_gather takes equal sizes
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
