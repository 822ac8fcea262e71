"""What an intervention is: a probe that says edits, of which each is measured by what it does."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, ClassVar, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.display import plain_label
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.lazy import mpl, pd
from infoflow_lens.foundation.settings import Count
from infoflow_lens.hooks.influence.base import start_point, tolerance
from infoflow_lens.hooks.interventions.damage import (
    Damage,
    Metric,
    NextTokenLoss,
    Read,
    gives_token_logits,
    metric_of,
)
from infoflow_lens.hooks.interventions.edits import (
    Edit,
    check_edits_reach,
    count_sequences_at_once,
    find_later_keys,
    find_starts,
    make_example,
    name_entry,
    run_from,
    stack_edits,
)
from infoflow_lens.hooks.model.call import (
    Caught,
    call,
    chooses_position,
    restore_module_tensors,
    without_user_hooks,
)
from infoflow_lens.hooks.model.inputs import Batch, check_accepts_padding, read_inputs
from infoflow_lens.hooks.model.points import (
    check_finite,
    hook_name,
    pattern_hook,
    reads_vectors,
)
from infoflow_lens.hooks.passes.run import run
from infoflow_lens.hooks.passes.view import Needs, Pass
from infoflow_lens.hooks.probe import Probe
from infoflow_lens.hooks.readouts import Readout, make_readout_error
from infoflow_lens.hooks.result import Result
from infoflow_lens.hooks.states import combined, either, summed


@dataclass
class Table:
    """What sequences lose by edits; NaN where that is not measured.

    Attributes:
        sequences: int [sequence], which sequences of all these are.
        edits: the names of the edits.
        lost: float64 [sequence, edit], summed over the rows of the output that count.
        rise: float64 [sequence, edit], of the summed next-token loss; NaN without one.
        bare: float64 [sequence], the readout or the summed next-token loss without edits; NaN
            without either.
        n_rows, n_tokens: int [sequence], the rows and the next tokens that count.
    """

    sequences: Int[Tensor, " sequence"]
    edits: list[str]
    lost: Float[Tensor, "sequence edit"]
    rise: Float[Tensor, "sequence edit"]
    bare: Float[Tensor, " sequence"]
    n_rows: Int[Tensor, " sequence"]
    n_tokens: Int[Tensor, " sequence"]


def fill_table(mine: Table, others: Table) -> Table:
    """Make one table of two: of the sequences of both, and the edits of both.

    Raises:
        InfoFlowError: for what both have measured.
    """
    sequences = torch.cat([mine.sequences, others.sequences]).unique()
    edits = list(dict.fromkeys([*mine.edits, *others.edits]))
    shape = (len(sequences), len(edits))
    lost, rise = (torch.full(shape, torch.nan, dtype=torch.float64) for _ in range(2))
    n_rows, n_tokens = (torch.zeros(len(sequences), dtype=torch.int64) for _ in range(2))
    bare = torch.full(shape[:1], torch.nan, dtype=torch.float64)
    for part in (mine, others):
        # `unique` has sorted the sequences, so each is found by halving
        rows = torch.searchsorted(sequences, part.sequences)
        columns = torch.tensor([edits.index(name) for name in part.edits])
        for target, values in ((lost, part.lost), (rise, part.rise)):
            known = ~values.isnan()
            place = rows[:, None].expand(values.shape)[known], columns.expand(values.shape)[known]
            if not target[place].isnan().all():
                raise InfoFlowError(
                    "two interventions have measured the same edits on sequences with the same "
                    "numbers, so they cannot be joined: expected different sequences, numbered "
                    "from first_index= on, or different edits"
                )
            target[place] = values[known]
        bare[rows], n_rows[rows], n_tokens[rows] = part.bare, part.n_rows, part.n_tokens
    return Table(sequences, edits, lost, rise, bare, n_rows, n_tokens)


@dataclass(frozen=True, eq=False, kw_only=True)
class InterventionResult(Result):
    """What the output loses by each edit.

    Attributes:
        metric: "nmse", the squared change of the output over its variance; "kl", the divergence
            KL(old || new) of the next-token distributions, in nats; "loss", the rise of the
            next-token loss where it rises; or a readout in words, whose change it is.
        edits: the names of the edits.
        sequences: which sequences of all were measured.
        lost: float [sequence, edit], summed over the rows of each sequence's output; NaN where it
            was not measured.
        rise: float [sequence, edit], of the summed next-token loss in nats, which may be negative;
            NaN where the model predicts no next token.
        bare: float [sequence], without edits: the readout, or the summed next-token loss; NaN
            without either.
        n_rows, n_tokens: int [sequence], rows of the output, and next tokens, that count.
        per_row: what the loss of a row is divided by: for "nmse" the variance of the output.
        forwards: the work, in passes over all sequences; one that starts at a layer counts by the
            share of the layers that ran.
    """

    makes_small_table: ClassVar[bool] = True

    metric: str
    edits: tuple[str, ...]
    sequences: Int[Tensor, " sequence"]
    lost: Float[Tensor, "sequence edit"]
    rise: Float[Tensor, "sequence edit"]
    bare: Float[Tensor, " sequence"]
    n_rows: Int[Tensor, " sequence"]
    n_tokens: Int[Tensor, " sequence"]
    per_row: float
    forwards: float

    def damage(self) -> Float[Tensor, " edit"]:
        """Compute what a row of the output loses by each edit, the mean over measured sequences."""
        return _ratio(self.lost, self.n_rows * self.per_row)

    def errors(self) -> Float[Tensor, " edit"]:
        """Estimate a standard error of :meth:`damage` by leaving each sequence out; NaN for one."""
        return jackknife(self.lost, (self.n_rows * self.per_row)[:, None])

    def risen(self) -> Float[Tensor, " edit"]:
        """Compute the rise of the next-token loss, in nats a token; NaN without one."""
        return _ratio(self.rise, self.n_tokens)

    def values(self) -> dict[str, Float[Tensor, " sequence"]]:
        """Add what edits change to what is there without: the readout, or the next-token loss.

        By the name of the edit; NaN where it was not measured.
        """
        changed = self.lost if self.rise.isnan().all() else self.rise
        return dict(zip(self.edits, self.bare + changed.T, strict=True))

    def to_frame(self) -> "pd.DataFrame":
        """Make a row for each edit: damage, its error, the rise of the loss, and on how many."""
        measured = (~self.lost.isnan()).sum(dim=0)
        columns = {
            "edit": self.edits,
            "damage": self.damage().tolist(),
            "error": self.errors().tolist(),
            "rise": self.risen().tolist(),
            "n_sequences": measured.tolist(),
        }
        return pd.DataFrame(columns)

    def plot(self) -> "mpl.Figure":
        """Draw the damage of the edits that do most, with one standard error."""
        frame = self.to_frame().sort_values("damage", ascending=False).head(_MOST_SHOWN)[::-1]
        figure = mpl.Figure(figsize=(6, 1 + 0.22 * len(frame)), layout="constrained")
        axes = figure.subplots()
        axes.barh(
            frame["edit"].map(plain_label),
            frame["damage"],
            xerr=frame["error"].fillna(0),
            color="#56b4e9",
        )
        axes.set(
            xlabel=plain_label(f"damage ({self.metric})"),
            title="What the output loses by each edit",
        )
        return figure


_MOST_SHOWN = 40  # edits in a picture


class Intervention(Probe[InterventionResult]):
    """Measures what edits of a pass do to its output; a subclass says which.

    An edit of one's own::

        class LooksAtFirst(Intervention):
            def edits(self, plain):
                for layer, head in heads_of(plain):
                    yield edit_head(plain, layer, head, to_first)

        def to_first(pattern):  # [batch, query, key]
            first = torch.zeros_like(pattern)
            first[..., 0] = pattern.sum(dim=-1)
            return first

    It is a probe, so it runs by :func:`~infoflow_lens.hooks.run_probes`, in shards, in several
    processes, and goes on after it was stopped. Its passes are its own: the plain one, and one for
    each edit, of which several share a pass and each begins at the first layer that it edits, where
    the model can. They run without your hooks. Small batches are as fast as large ones, since edits
    fill the pass, and keep more where a run is stopped.

    What is kept is a table of sequences and edits, filled as they are measured.

    Args:
        metric: "nmse", "kl" or "loss"; default "kl" for logits of one distribution, else "nmse".
        read: the positions of the logits that count, such as (-1,); None for all.
        readout: a number in the place of the metric, whose change counts, with its sign; or a
            :class:`~infoflow_lens.hooks.NextTokenLoss`.
        rows: sequences in a pass, copies of edits among them; default, by the size of the model.
        through_hooks: let hooks of yours take part; then passes run whole.

    Attributes:
        reads: what `edits` reads of the plain pass, as for every probe.

    Raises:
        InfoFlowError: for edits of hook points that the model does not have, or of one name; a
            model in which edited patterns do not reach the output; a metric that does not fit.
    """

    reads: ClassVar[str | Sequence[str]] = ("scores", "pattern")
    by_index = True  # a sequence's place among all is its row of the table

    _: KW_ONLY
    metric: Metric | None = None
    read: Read | None = None
    readout: Readout | NextTokenLoss | None = None
    rows: Count | None = field(default=None, compare=False)
    through_hooks: bool = False

    table = combined(fill_table, of=Table)
    scale, work = summed(), summed()
    judged_by = combined(either)  # the metric, or the readout in words

    _starts: frozenset[int] | None = field(default=None, init=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.readout, (Readout, NextTokenLoss, type(None))):
            raise make_readout_error(self.readout, "; or NextTokenLoss(), or None for a divergence")
        if self.readout is not None and (self.metric, self.read) != (None, None):
            raise InfoFlowError(
                f"metric {self.metric!r} and read {self.read!r} are given with a readout, which "
                "replaces both: expected either a readout, or metric and read"
            )

    @abstractmethod
    def edits(self, plain: Pass) -> Iterable[Edit]:
        """Say the edits of a batch.

        Args:
            plain: the pass as it is, with what `reads` names, and its `output`.
        """

    def needs(self, model: nn.Module) -> Needs:
        """Name what enters the model: the passes are its own, and read what `reads` names."""
        self._plain_needs(model)
        with suppress(InfoFlowError):  # without it the tokens have to be known
            return Needs.of(model, points=[start_point(model, None)])
        return Needs((pattern_hook(model, 0),))

    def prepare(self, model: nn.Module, fingerprint: str | None = None) -> Needs:
        """Get ready; where passes may start is found anew."""
        self._starts = None
        return super().prepare(model, fingerprint)

    def _plain_needs(self, model: nn.Module) -> Needs:
        return super().needs(model)

    def update(self, seen: Pass) -> Mapping[str, Any]:
        """Measure the losses of each sequence of a pass, by each edit."""
        hidden = nullcontext() if self.through_hooks else without_user_hooks(seen.model)
        with restore_module_tensors(seen.model), hidden:
            return self.measure(self.begin(seen))

    def begin_batch(
        self,
        model: nn.Module,
        batch: Batch,
        first: int = 0,
        run: Callable[[Needs], Pass] | None = None,
    ) -> "PlainRun":
        """Make the plain pass of a batch, whose first sequence has that index, as :meth:`begin`."""
        mask = None if batch.lengths is None else batch.mask()
        seen = Pass(model, {}, tokens=batch.tokens, mask=mask, columns=batch.columns)
        indices = torch.arange(first, first + len(batch))
        return self.begin(seen.renumber(indices, seen.held_out, indices), run)

    def begin(self, seen: Pass, run: Callable[[Needs], Pass] | None = None) -> "PlainRun":
        """Make the plain pass, on which edits are measured.

        Args:
            seen: what is known of the sequences.
            run: runs them, with what is needed and the output; default, a pass of its own.

        Raises:
            InfoFlowError: for padding that the model does not take into account, a model in which
                edited patterns do not reach the output, and a metric that does not fit.
        """
        model = seen.model
        check_accepts_padding(model, seen.lengths)
        source = _Source.find(seen)
        if self._starts is None:
            check_edits_reach(model, source.batch.take(slice(0, 1)))
        starts = sorted(self._layers_to_start(seen))
        needs = self._plain_needs(model) | Needs(tuple(map(name_entry, starts)))
        plain = (run or source.run)(needs)
        check_finite(plain.output, "the output", seen.first)
        _check_again(seen, plain)
        plain = plain.renumber(seen.indices, seen.held_out, seen.turns)
        states = {layer: plain.activation(name_entry(layer)) for layer in starts}
        return PlainRun(source, plain, _judge_of(self, plain, source), states)

    def measure(self, plain_run: "PlainRun") -> Mapping[str, Any]:
        """Measure the edits on a plain pass that is there: what `update` returns.

        Raises:
            InfoFlowError: for edits that cannot be made.
        """
        source, plain, judge = plain_run.source, plain_run.plain, plain_run.judge
        states, first = plain_run.states, plain_run.first
        n, model = len(plain), source.model
        edits = self._check_edits(self.edits(plain), model)
        if first is not None:
            edits = [edit.above(first) for edit in edits]
        work = 0.0 if plain_run.is_counted else float(n)
        plain_run.is_counted = True
        lost: list[Tensor] = []
        rise: list[Tensor] = []
        n_heads = int(getattr(getattr(model, "cfg", None), "n_heads", None) or 8)
        rows = self.rows or count_sequences_at_once(model, source.batch.tokens.shape[1], n_heads)
        # copies of the batch in one pass, each with an edit of its own
        together = max(1, rows // n)
        # edits are sorted by layer, so that those whose passes start at one stand together
        for layer, group in groupby(edits, lambda edit: _start_of(edit, states, first)):
            every = list(group)
            # what enters the layer where the pass starts, and those before it, is known already
            catches = [i for i in plain_run.catches if layer is None or i > layer]
            for start in range(0, len(every), together):
                some = every[start : start + together]
                state = None if layer is None else states[layer]
                want = list(map(name_entry, catches))
                caught = source.run_copies(stack_edits(some, n), len(some), layer, state, want)
                plain_run.caught = {i: caught.activations[name_entry(i)] for i in catches}
                found = judge.measure(caught.output)
                lost.append(_check_numbers(found[0], some))
                rise.append(found[1])
                work += len(some) * n * (1 - (layer or 0) / plain.n_layers)
        table = Table(
            plain.indices.clone(),
            [edit.name for edit in edits],
            torch.cat(lost).T.contiguous(),
            torch.cat(rise).T.contiguous(),
            judge.bare,
            judge.n_rows,
            judge.n_tokens,
        )
        return {"table": table, "scale": judge.scale, "work": work, "judged_by": judge.name}

    def compute(self) -> InterventionResult:
        """Make the result of the table of all sequences and edits."""
        table: Table = self.table
        per_row = 1.0
        if self.readout is None:
            damage = Damage(self.judged_by, self.read)
            damage.load_state(self.scale)
            per_row = damage.per_row()
        return InterventionResult(
            **{**vars(table), "edits": tuple(table.edits)},
            metric=self.judged_by,
            per_row=per_row,
            forwards=float(self.work) / len(table.sequences),
            record=self.run_record(),
            notes=self.notes(),
        )

    def _check_edits(self, given: Any, model: nn.Module) -> list[Edit]:
        """Check edits before a pass, and order them by the layer where their passes start.

        Raises:
            InfoFlowError: for what is no edit, none, two of one name, and unknown hook points.
        """
        edits: list[Edit] = list(given) if isinstance(given, Iterable) else [given]
        if not edits:
            raise InfoFlowError(
                f"{type(self).__name__}.edits gives no edit: expected at least one for every pass"
            )
        for edit in edits:
            # an edit that was given alone, in no list, is refused, too
            if not isinstance(edit, Edit) or edits == [given]:
                raise InfoFlowError(
                    f"{type(self).__name__}.edits gives a {type(edit).__name__}: expected Edit "
                    "objects in a list, or yielded, as edit_head(...) makes them"
                )
            for point in edit.at:
                hook_name(model, point)
        names = [edit.name for edit in edits]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InfoFlowError(
                f"{type(self).__name__}.edits gives {twice!r} twice: expected a name for each edit"
            )
        return sorted(edits, key=lambda edit: edit.first_layer)

    def _layers_to_start(self, seen: Pass) -> frozenset[int]:
        """Find the layers at which passes over this batch may start."""
        tokens = seen.tokens
        if self._starts is None:
            self._starts = frozenset()
            # passes with vectors in the place of ids run whole
            if tokens is not None and (reads_vectors(seen.model) or not tokens.is_floating_point()):
                lengths = seen.lengths_of(tokens.shape[1]).tolist()
                rows = [row[:n] for row, n in zip(tokens, lengths, strict=True)][:2]
                self._starts = find_starts(seen.model, read_inputs(seen.model, rows))
        # where passes may start is known of the model; this batch may still have to run whole
        if tokens is None or seen.columns:
            return frozenset()
        if seen.lengths is not None and find_later_keys(seen.model) is not None:
            return frozenset()
        return self._starts


class EditsOfPass(Intervention):
    """What edits do that a function makes of the plain pass.

    Args:
        make: from the plain pass, with scores and patterns, to the edits.
    """

    make: Callable[[Pass], Iterable[Edit]]

    def edits(self, plain: Pass) -> Iterable[Edit]:
        """Make them."""
        return self.make(plain)


@dataclass
class PlainRun:
    """The plain pass of a batch, on which edits are measured.

    Attributes:
        source: what passes begin with.
        plain: the plain pass.
        judge: what is lost of outputs.
        states: by the layer where a pass may start, what enters there.
        is_counted: whether the plain pass is in the work already.
        first: the layer where every pass starts, if `states` are of a pass in which all that is
            edited below was edited already; None where each starts at its first edit.
        catches: the layers of which passes of one edit leave what enters in `caught`.
        caught: that, by layer, of the last pass.
        is_stale: whether `states` are to be made anew.
    """

    source: "_Source"
    plain: Pass
    judge: "_Judge"
    states: Mapping[int, Tensor]
    is_counted: bool = False
    first: int | None = None
    catches: Sequence[int] = ()
    caught: Mapping[int, Tensor] | None = None
    is_stale: bool = False


def _check_again(seen: Pass, plain: Pass) -> None:
    """Refuse calls that gave something else than our own pass, which has no hooks of the user's.

    Raises:
        InfoFlowError: naming the remedy.
    """
    first, again = seen.output, plain.output
    if not isinstance(first, Tensor):
        return
    # a call may ask for the logits of the last positions alone
    if first.ndim == again.ndim == 3 and seen.lengths is None:
        again = again[:, -first.shape[1] :]
    fits = first.shape == again.shape
    if fits:
        real = seen.is_real(first.shape[1]).to(first.device) if first.ndim == 3 else slice(None)
        first, again = first.detach()[real], again[real]
        fits = bool((first - again).abs().max() <= tolerance(first) * first.abs().max())
    if not fits:
        raise InfoFlowError(
            "repeating the forward pass changes the output: expected the same. A hook of yours "
            "that changes activations can take part with through_hooks=True; dropout, a key-value "
            "cache, and what else a call gives beside ids, mask, types and positions cannot: run "
            "in eval mode, whole sequences, and give position_ids where padding is on the left"
        )


def _check_numbers(
    lost: Float[Tensor, "copy sequence"], edits: Sequence[Edit]
) -> Float[Tensor, "copy sequence"]:
    """Refuse edits that make NaN or infinity, which would stand for "not measured".

    Raises:
        InfoFlowError: naming the edit.
    """
    for edit, values in zip(edits, lost, strict=True):
        if not values.isfinite().all():
            raise InfoFlowError(
                f"the edit {edit.name!r} makes the output NaN or infinite: expected numbers; look "
                "for what overflows, or run in float32"
            )
    return lost


def _start_of(edit: Edit, starts: Mapping[int, Tensor], first: int | None) -> int | None:
    """Find the layer where the pass of an edit starts; None for a whole pass."""
    if first is not None:
        return first
    return edit.first_layer if edit.first_layer in starts else None


@dataclass(frozen=True)
class _Source:
    """What the passes of a batch begin with.

    Attributes:
        model: the model.
        batch: what it read; zeros where hooks alone saw the pass.
        start: then where that entered, and what.
    """

    model: nn.Module
    batch: Batch
    start: tuple[str, Tensor] | None = None

    @property
    def is_known(self) -> bool:
        """Say whether the model read `batch`."""
        return self.start is None

    @classmethod
    def find(cls, seen: Pass) -> "_Source":
        """Read it off a pass."""
        if seen.batch is not None:
            return cls(seen.model, seen.batch)
        point = start_point(seen.model, None)
        entering = seen.activation(point)
        unknown = Batch(torch.zeros(entering.shape[:2], dtype=torch.long))
        return cls(seen.model, unknown, (point, entering))

    def run(self, needs: Needs) -> Pass:
        """Run the plain pass."""
        return run(self.model, self.batch, needs, start=self.start, output=True)

    def run_copies(
        self, hooks: Any, n: int, layer: int | None, state: Tensor | None, want: Sequence[str]
    ) -> Caught:
        """Run copies of the batch with hooks, from a layer on if one is given."""
        if layer is not None and state is not None:
            entering, tokens = torch.cat([state] * n), make_example(self.batch)
            if hasattr(self.model, "anatomy"):  # its classifier may find a text's end by its ids
                tokens = self.batch.tokens.repeat(n, 1)
            return run_from(self.model, layer, entering, tokens, hooks, want)
        copies = self.batch.take(torch.arange(len(self.batch)).repeat(n))
        start = self.start and (self.start[0], torch.cat([self.start[1]] * n))
        return call(self.model, copies, want, edit=hooks, start=start, output=True)


Losses: TypeAlias = Float[Tensor, "copy sequence"]


@dataclass
class _Judge:
    """What is lost of the outputs of a batch.

    Attributes:
        name: of the metric, or the readout in words.
        lost: what each sequence loses, of the outputs of copies of the batch.
        bare: float64 [sequence], of the plain pass: the readout, or the next-token loss; NaN
            without either.
        n_rows, n_tokens: int [sequence], rows of the output, and next tokens, that count.
        rise: the rise of the next-token loss, in the same way; None where there is none.
        scale: what the scale of a row is made of, summed over batches.
    """

    name: str
    lost: Callable[[Tensor], Losses]
    bare: Float[Tensor, " sequence"]
    n_rows: Int[Tensor, " sequence"]
    n_tokens: Int[Tensor, " sequence"]
    rise: Callable[[Tensor], Losses] | None = None
    scale: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_values(
        cls, name: str, read: Callable[[Tensor], Float[Tensor, " sequence"]], plain: Pass
    ) -> "_Judge":
        """Judge by the change of a number of each sequence."""
        bare = read(plain.output)

        def lost(output: Tensor) -> Losses:
            return torch.stack([read(copy) for copy in output.split(len(bare))]) - bare

        n_rows = torch.ones(len(bare), dtype=torch.int64)
        return cls(name, lost, bare, n_rows, torch.zeros_like(n_rows))

    @classmethod
    def from_loss(cls, loss: NextTokenLoss, plain: Pass, batch: Batch) -> "_Judge":
        """Judge by the rise of the next-token loss."""
        found = cls.from_values(str(loss), lambda output: loss.lost(output, batch), plain)
        n_tokens = loss.states(batch).sum(dim=1)
        return replace(found, n_rows=n_tokens, n_tokens=n_tokens, rise=found.lost)

    def measure(self, output: Tensor) -> tuple[Losses, Losses]:
        """Measure what each sequence loses in each copy, and the rise; NaN where there is none."""
        lost = self.lost(output)
        # both are one function where the loss itself is the readout
        if self.rise == self.lost:
            return lost, lost
        return lost, self.rise(output) if self.rise else torch.full_like(lost, torch.nan)


def _judge_of(asked: Intervention, plain: Pass, source: _Source) -> _Judge:
    """Make what an intervention asks to be judged by.

    Raises:
        InfoFlowError: for what the outputs do not have.
    """
    batch, readout = source.batch, asked.readout
    shortest = int(plain.lengths_of(batch.tokens.shape[1]).min())
    needs_tokens = isinstance(readout, NextTokenLoss) or asked.metric == "loss"
    in_place_of_ids = batch.tokens.is_floating_point() and not reads_vectors(plain.model)
    if needs_tokens and (in_place_of_ids or not source.is_known):
        raise InfoFlowError(
            "the loss of the next token needs the token ids, which hooks alone do not see, and "
            "inputs_embeds do not say: expected ids in run_probes or attach"
        )
    if isinstance(readout, NextTokenLoss):
        readout.check(plain.model, shortest)
        return _Judge.from_loss(readout, plain, batch)
    if isinstance(readout, Readout):
        by_position = plain.output.ndim > 2 or chooses_position(plain.model)
        read = partial(_read_each, readout.bind(plain.model), batch, by_position)
        return _Judge.from_values(str(readout), read, plain)
    damage = metric_of(plain.model, asked.metric, asked.read, shortest)
    damage.see(plain.output, batch)
    reference, n_rows = damage.reference(plain.output, batch), damage.mark_rows(batch).sum(dim=1)
    found = _Judge(
        damage.name,
        lambda output: damage.lost(reference, output, batch),
        torch.full((len(batch),), torch.nan, dtype=torch.float64),
        n_rows,
        torch.zeros_like(n_rows),
        scale=damage.state(),
    )
    # the rise of the next-token loss is reported beside every metric, where there is such a loss
    if source.is_known and asked.read is None and _predicts(plain):
        beside = _Judge.from_loss(NextTokenLoss(), plain, batch)
        found.rise, found.bare, found.n_tokens = beside.lost, beside.bare, beside.n_tokens
    return found


def _read_each(
    readout: Readout, batch: Batch, by_position: bool, output: Tensor
) -> Float[Tensor, " sequence"]:
    """Read a readout off each sequence, without its padding."""
    if batch.lengths is None or not by_position:
        return readout.read(output).double().cpu()
    rows = [row[None, :n] for row, n in zip(output, batch.lengths.tolist(), strict=True)]
    return torch.cat([readout.read(row) for row in rows]).double().cpu()


def _predicts(plain: Pass) -> bool:
    """Say whether outputs are logits of the next token, which no query has seen."""
    if plain.tokens is None or plain.tokens.is_floating_point():
        return False
    if not gives_token_logits(plain.model, plain.output):
        return False
    return find_later_keys(plain.model) is None


def jackknife(
    sums: Float[Tensor, "sequence edit"], weights: Float[Tensor, "sequence _edit"]
) -> Float[Tensor, " edit"]:
    """Estimate one standard error of sum(sums) / sum(weights) by leaving each sequence out.

    Sequences that are NaN are not counted; it is NaN for one alone.
    """
    known = ~sums.isnan()
    sums, weights = sums.nan_to_num(), torch.where(known, weights, 0).double()
    n = known.sum(dim=0)
    total, weight = sums.sum(dim=0), weights.sum(dim=0)
    # the ratio without each sequence, [sequence, edit]
    left = (total - sums) / (weight - weights)
    mean = torch.where(known, left, 0).sum(dim=0) / n
    squares = torch.where(known, (left - mean).square(), 0).sum(dim=0)
    # without one of n a mean moves by 1 / (n - 1) of that sequence's distance from it
    return (squares * (n - 1) / n).sqrt().masked_fill(n < 2, torch.nan)


def _ratio(sums: Float[Tensor, "sequence edit"], weights: Tensor) -> Float[Tensor, " edit"]:
    known = ~sums.isnan()
    weight = weights.double()[:, None] * known
    total = sums.nan_to_num().sum(dim=0) / weight.sum(dim=0)
    return total.masked_fill(~known.any(dim=0), torch.nan)
