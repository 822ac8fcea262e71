"""Probe any model on any data: measure, predict, compare; finished parts stay on disk."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from infoflow_lens.agreement import (
    Agreement,
    CoverageCurve,
    compare,
    compare_by_position,
    coverage_curve,
)
from infoflow_lens.foundation.errors import InfoFlowError, NothingMeasuredError
from infoflow_lens.foundation.files import atomic_path, writable_folder, write_json, write_text
from infoflow_lens.foundation.names import nearest
from infoflow_lens.foundation.record import RunRecord, fingerprint, model_fingerprint
from infoflow_lens.foundation.seeds import check_seed
from infoflow_lens.hooks import (
    AttendedProbe,
    AttendedResult,
    InfluenceResult,
    JacobianInfluence,
    LayerCapabilities,
    MechanismsResult,
    ModelCapabilities,
    PositionsProbe,
    PositionsResult,
    Probe,
    RecoveryProbe,
    RecoveryResult,
    ResampleInfluence,
    Result,
    inspect_model,
    measure_mechanisms,
    run_probes,
)
from infoflow_lens.hooks.mechanisms import METRICS, check_damage
from infoflow_lens.hooks.model.inputs import Batches
from infoflow_lens.hooks.passes.ranking import check_positions, check_ranks
from infoflow_lens.models.loading import LoadedModel, load_any
from infoflow_lens.probing.checkpoint import Checkpoint
from infoflow_lens.probing.data import read_data
from infoflow_lens.report.probing import ProbingReport, ShownSequence, render_probing
from infoflow_lens.theory import InformationSets, propagate

PROBES = ("positions", "recovery", "influence", "mechanisms")
InfluenceKind = Literal["auto", "exact", "estimate", "resample"]
INFLUENCE_KINDS: tuple[InfluenceKind, ...] = ("auto", "exact", "estimate", "resample")
_WIDE, _SKETCH = 256, 64
_DIRECTIONS = 16  # of an estimate
_DONORS = 8
_EXACT_UP_TO = 2048  # input directions (tokens times width) that are differentiated one by one


@dataclass(frozen=True)
class ProbingConfig:
    """Settings of a probe run.

    Attributes:
        model: an official name, a local folder in the Hugging Face format, or a checkpoint of ours.
        data: see :func:`infoflow_lens.probing.data.read_data`.
        probes: of "positions", "recovery", "influence", "mechanisms"; None for all that the model
            can give.
        ranks: of positions and recovery.
        without: positions left out as keys, such as (0,) for BOS.
        column, n, max_length: see :func:`~infoflow_lens.probing.data.read_data`.
        batch_size: sequences in a pass.
        sketch: random directions in which recovery's targets are looked at; 0 for all of their
            space; None for 64 where the model is wider than 256, else all.
        influence: "exact" Jacobians; an "estimate" of them by random projections; "resample"
            ablation; "auto": exact where that is affordable, else the estimate.
        n_detail: sequences for influence and mechanisms, the first ones.
        metric, threshold: see `measure_mechanisms`.
        n_shown: sequences that the report shows.
        seed: of all that is drawn.
        device, dtype, backend: see :func:`infoflow_lens.models.loading.load_any`.
    """

    model: str
    data: str
    probes: tuple[str, ...] | None = None
    ranks: tuple[int, ...] = (1, 2, 3, 4)
    without: tuple[int, ...] = ()
    column: str | None = None
    n: int | None = None
    max_length: int | None = None
    batch_size: int = 8
    sketch: int | None = None
    influence: InfluenceKind = "auto"
    n_detail: int = 32
    metric: Literal["nmse", "kl", "loss"] | None = None
    threshold: float = 0.05
    n_shown: int = 6
    seed: int = 0
    device: str = "cpu"
    dtype: str | None = None
    backend: str = "auto"

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if check_ranks(self.ranks) != tuple(range(1, len(self.ranks) + 1)):
            raise InfoFlowError(
                f"ranks are {self.ranks}: expected 1 to some K, such as (1, 2, 3), from which "
                "predictions and the coverage curve are made; for others use PositionsProbe"
            )
        check_positions(self.without)
        for name in self.probes or ():
            if name not in PROBES:
                raise InfoFlowError(f"there is no probe {name!r}{nearest(name, PROBES)}")
        if self.probes is not None and not 0 < len(set(self.probes)) == len(self.probes):
            raise InfoFlowError(
                f"probes are {self.probes!r}: expected different ones of {', '.join(PROBES)}"
            )
        if self.influence not in INFLUENCE_KINDS:
            raise InfoFlowError(
                f"influence is {self.influence!r}{nearest(self.influence, INFLUENCE_KINDS)}"
            )
        if self.metric is not None and self.metric not in METRICS:
            raise InfoFlowError(f"metric is {self.metric!r}{nearest(self.metric, METRICS)}")
        check_damage(self.threshold)
        if self.sketch is not None and (self.sketch < 0 or self.sketch == 1):
            raise InfoFlowError(
                f"sketch is {self.sketch}: expected 0, which is exact, or at least 2 directions"
            )
        for name in ("batch_size", "n_detail", "n_shown"):
            if getattr(self, name) < 1:
                raise InfoFlowError(f"{name} is {getattr(self, name)}: expected at least 1")


@dataclass(frozen=True)
class ProbingResult:
    """What a probe run found; None for what was not asked.

    Attributes:
        out: the folder with all of it.
        capabilities: what the model is.
        agreement: predicted against measured sets, by the rule that made the prediction: "argmax",
            every head passes the key of its largest score, and "mechanisms", every head by its own.
        curve: influence inside the sets when heads pass their k largest positions.
        texts: the tokens of the shown sequences, as strings.
        predicted: sets by the same rules, for the sequences whose influence was measured.
        record: of the run.
    """

    out: Path
    config: ProbingConfig
    capabilities: ModelCapabilities
    positions: PositionsResult | None
    recovery: RecoveryResult | None
    influence: InfluenceResult | None
    mechanisms: MechanismsResult | None
    agreement: Mapping[str, Agreement]
    curve: CoverageCurve | None
    texts: tuple[tuple[str, ...], ...]
    predicted: Mapping[str, InformationSets]
    record: RunRecord


def run_probing(
    out: Path,
    config: ProbingConfig,
    progress: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> ProbingResult:
    """Load the model, measure, predict, compare, and write all of it to a folder.

    Run again with the same settings to go on after an interruption: finished parts are read, and
    unfinished ones go on behind their last finished batch (after a kill, behind the last state on
    disk, half a minute old at most).

    Args:
        out: folder for results (safetensors, json, csv) and ``report.html``.
        config: the settings.
        progress: show bars.
        say: called with a line for every part that begins.

    Raises:
        InfoFlowError: for bad settings, models or data, before work starts; for a folder with
            results of other settings; for what probes refuse. Finished parts stay on disk.
        KeyboardInterrupt: when it is stopped, with what to do to go on.
    """
    writable_folder(out)
    _check_folder(out, config)
    with nullcontext() if progress else _no_bars_of_libraries():
        loaded = load_any(
            config.model, device=config.device, dtype=config.dtype, backend=config.backend
        )
        model = loaded.model
        batches = read_data(
            model,
            config.data,
            column=config.column,
            n=config.n,
            max_length=config.max_length,
            seed=config.seed,
        )
    contents = _contents(batches)
    first = next(batches.batches(1)).tokens
    capabilities = inspect_model(model, first)
    probes = _possible(capabilities, config, say)
    say(f"{loaded.description}; {batches.n_sequences} sequences")
    record = RunRecord(
        config={**asdict(config), "inputs": fingerprint(contents)},
        seed=config.seed,
        model_fingerprint=model_fingerprint(model),
        weight_processing=capabilities.normalization,
    )
    _claim_folder(out, record)
    with atomic_path(out / "inputs.safetensors") as temporary:
        save_file(contents, temporary)
    run = _Run(out, config, probes, model, batches, progress, say)
    run.check()
    try:
        positions, recovery = run.states()
        attended, chosen, influence = run.influences()
        mechanisms = run.mechanisms()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"finished batches are kept in {str(out)!r}; run the same again to go on"
        ) from None
    agreement, predicted, curve = _compared(attended, chosen, influence, mechanisms)
    result = ProbingResult(
        out=out,
        config=config,
        capabilities=capabilities,
        positions=positions,
        recovery=recovery,
        influence=influence,
        mechanisms=mechanisms,
        agreement=agreement,
        curve=curve,
        texts=_texts(loaded, batches, config.n_shown),
        predicted=predicted,
        record=record,
    )
    _write_tables(result)
    write_text(out / "report.html", render_probing(_report_of(result)))
    return result


@contextmanager
def _no_bars_of_libraries() -> Iterator[None]:
    import datasets
    from transformers.utils import logging

    shown = datasets.are_progress_bars_disabled(), logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if not shown[0]:
            datasets.enable_progress_bars()
        if shown[1]:
            logging.enable_progress_bar()


class _Run:
    """The parts of a run, each read from disk if it is there."""

    def __init__(
        self,
        out: Path,
        config: ProbingConfig,
        probes: tuple[str, ...],
        model: nn.Module,
        batches: Batches,
        progress: bool,
        say: Callable[[str], None],
    ) -> None:
        self.out, self.config, self.probes, self.model = out, config, probes, model
        self.batches, self.progress, self.say = batches, progress, say

    def check(self) -> None:
        """Refuse what a later part could not do, before the first begins."""
        if "influence" in self.probes:
            self._influence_probe(self.batches.first(self.config.n_detail))

    def states(self) -> tuple[PositionsResult | None, RecoveryResult | None]:
        """Positions and recovery share their passes over all sequences."""
        config = self.config
        wanted: dict[str, Probe[Any]] = {}
        if "positions" in self.probes:
            wanted["positions"] = PositionsProbe(config.ranks, without=config.without, spread=True)
        if "recovery" in self.probes:
            wide = self._width() > _WIDE
            sketch = (_SKETCH if wide else None) if config.sketch is None else config.sketch or None
            wanted["recovery"] = RecoveryProbe(
                config.ranks,
                without=config.without,
                sketch=sketch,
                maps=not wide,  # of a wide model they would take gigabytes
                seed=config.seed,
            )
        found = self._probed("states", wanted, self.batches)
        return found.get("positions"), found.get("recovery")

    def influences(
        self,
    ) -> tuple[AttendedResult | None, PositionsResult | None, InfluenceResult | None]:
        """Influence, and what predictions for the same sequences need."""
        if "influence" not in self.probes:
            return None, None, None
        some = self.batches.first(self.config.n_detail)
        wanted: dict[str, Probe[Any]] = {
            "influence_attended": AttendedProbe(),
            "influence_positions": PositionsProbe(self.config.ranks),
            "influence": self._influence_probe(some),
        }
        found = self._probed("influence", wanted, some)
        return (
            found["influence_attended"],
            found["influence_positions"],
            found["influence"],
        )

    def mechanisms(self) -> MechanismsResult | None:
        """The mechanism of every head."""
        if "mechanisms" not in self.probes:
            return None
        finished = self._finished("mechanisms")
        if isinstance(finished, MechanismsResult):
            return finished
        config = self.config
        checkpoint = Checkpoint(self.out / ".mechanisms.pt")
        state = checkpoint.load()
        self.say("mechanisms: each head's pattern replaced by ideal ones")
        reached = state

        def keep(progress: Any) -> None:
            nonlocal reached
            reached = progress
            checkpoint.keep(lambda: reached)

        try:
            result = measure_mechanisms(
                self.model,
                self.batches.first(config.n_detail),
                metric=config.metric,
                threshold=config.threshold,
                batch_size=config.batch_size,
                resume=state,
                after_batch=keep,
                progress=self.progress,
            )
        except BaseException:
            if reached is not None:
                checkpoint.save(reached)
            raise
        result.save(self.out / "mechanisms")
        checkpoint.remove()
        return result

    def _influence_probe(self, some: Batches) -> Probe[Any]:
        config, longest = self.config, some.longest or 1
        kind = config.influence
        if kind == "resample":
            return ResampleInfluence(self._donors(longest), "median", "resid_post")
        if kind == "exact" or (kind == "auto" and longest * self._width() <= _EXACT_UP_TO):
            return JacobianInfluence("resid_post")
        return JacobianInfluence(
            "resid_post", positions=(-1,), estimate=_DIRECTIONS, seed=config.seed
        )

    def _width(self) -> int:
        return int(getattr(getattr(self.model, "cfg", None), "d_model", 0))

    def _donors(self, length: int) -> Tensor:
        """Tokens that take the place of others: of sequences that are not measured, if possible.

        Where sequences differ in length, a donor's later tokens come from other sequences than its
        first: what enters at a position is its token alone.

        Raises:
            InfoFlowError: if some position has no other sequence's token.
        """
        rows = list(self.batches.sequences())
        donors = []
        for position in range(length):
            found = _last_at(position, rows[self.config.n_detail :])
            if len(found) < 2:
                found = _last_at(position, rows)
            if len(found) < 2:
                raise InfoFlowError(
                    "influence 'resample' replaces tokens by those of other sequences, and only "
                    f"one has a token {position}: expected at least 2; give more sequences, cut "
                    "them with max_length, or choose influence 'estimate'"
                )
            donors.append(torch.stack([found[i % len(found)] for i in range(_DONORS)]))
        return torch.stack(donors, dim=1)

    def _probed(
        self, part: str, wanted: Mapping[str, Probe[Any]], batches: Batches
    ) -> dict[str, Any]:
        """The results of probes that share their passes."""
        if not wanted:
            return {}
        finished = {name: self._finished(name) for name in wanted}
        if all(result is not None for result in finished.values()):
            return finished
        checkpoint = Checkpoint(self.out / f".{part}.pt")
        state = checkpoint.load()
        if state is not None:
            for name, probe in wanted.items():
                probe.load_state(state[name])
        probes = list(wanted.values())
        seen = probes[0].n_sequences
        self.say(f"{', '.join(wanted)}" + (f": going on behind {seen} sequences" if seen else ""))

        def now() -> dict[str, Any]:
            return {name: probe.state() for name, probe in wanted.items()}

        try:
            run_probes(
                self.model,
                batches,
                probes,
                batch_size=self.config.batch_size,
                skip=seen,
                after_batch=lambda n: checkpoint.keep(now),
                progress=self.progress,
            )
        except NothingMeasuredError:
            pass  # of one probe, as its own result says below; the others have theirs
        except BaseException:
            counts = {probe.n_sequences for probe in probes}
            if len(counts) == 1 and counts != {0}:
                checkpoint.save(now())
            raise
        found, failed = {}, []
        for name, probe in wanted.items():
            try:
                found[name] = probe.result()
            except NothingMeasuredError as error:
                failed.append(f"{name}: {error}")
                continue
            found[name].save(self.out / name)
        if failed:
            checkpoint.save(now())
            raise InfoFlowError("; ".join(failed))
        checkpoint.remove()
        return found

    def _finished(self, name: str) -> Any:
        if not (self.out / f"{name}.json").is_file():
            return None
        return Result.load(self.out / name)


def _last_at(position: int, rows: Sequence[Tensor]) -> list[Tensor]:
    """The tokens at a position of the last sequences that have it."""
    long = (row[position] for row in reversed(rows) if len(row) > position)
    return list(islice(long, _DONORS))[::-1]


# Predicted against measured


def _compared(
    attended: AttendedResult | None,
    chosen: PositionsResult | None,
    influence: InfluenceResult | None,
    mechanisms: MechanismsResult | None,
) -> tuple[dict[str, Agreement], dict[str, InformationSets], CoverageCurve | None]:
    """Agreement and predicted sets by rule, and the coverage curve, of the same sequences."""
    if attended is None or chosen is None or influence is None:
        return {}, {}, None
    n_source = influence.influence.shape[-1]
    rules: dict[str, Any] = {"argmax": chosen.argmax}
    if mechanisms is not None:
        rules["mechanisms"] = mechanisms.rules(attended.positions, chosen.argmax)
    predicted = {name: propagate(rule, n_source) for name, rule in rules.items()}
    agreement = {name: compare(sets, influence) for name, sets in predicted.items()}
    curve = coverage_curve(chosen.positions, influence)
    return agreement, predicted, curve


def _report_of(result: ProbingResult) -> ProbingReport:
    config, found = result.config, result.capabilities
    facts = [("layers", str(len(found.layers))), ("weights", f"{found.dtype} on {found.device}")]
    if result.positions is not None:
        facts.append(("sequences", str(len(result.positions.lengths))))
    headline = f"{found.kind}, probed on {config.data}."
    if result.mechanisms is not None:
        names = [name for layer in result.mechanisms.mechanisms() for name in layer]
        counts = {name: names.count(name) for name in dict.fromkeys(names)}
        facts += [(name.replace("_", " "), f"{n} of {len(names)}") for name, n in counts.items()]
    rule = "mechanisms" if "mechanisms" in result.agreement else "argmax"
    if result.agreement:
        last = result.agreement[rule].cls
        others = float((result.influence.lengths.double() - 1).mean()) if result.influence else 0.0
        headline += (
            f" {last.influence_inside:.0%} of the influence of other tokens on the last state lies "
            f"inside the set that theory allows it ({last.predicted_size:.1f} of {others:.1f})."
        )
        if last.predicted_size > 0.95 * others:
            headline += " That set holds nearly every token, so the prediction excludes nothing."
    shown = []
    if result.influence is not None:
        members, full = result.predicted[rule].members[-1], result.influence.full()
        for index, texts in enumerate(result.texts[: len(result.influence.lengths)]):
            n = len(texts)
            last_state = n - 1 + members.shape[1] - members.shape[2]
            shown.append(
                ShownSequence(
                    texts,
                    full[-1, index, last_state, :n],
                    members[index, last_state, :n],
                )
            )
    words = {
        "argmax": "if every head passes the token of its largest score",
        "mechanisms": "with every head passing on what its mechanism does",
    }
    return ProbingReport(
        title=f"What the states of {config.model} can depend on, and do",
        headline=headline,
        facts=facts,
        problems=found.problems(),
        capabilities=found.to_frame().to_html(index=False, border=0),
        positions=None if result.positions is None else result.positions.summary(),
        recovery=result.recovery,
        mechanisms=result.mechanisms,
        agreement=result.agreement,
        rule=words[rule],
        curve=result.curve,
        shown=shown,
        record=result.record,
    )


# Before work starts


def _possible(
    capabilities: ModelCapabilities, config: ProbingConfig, say: Callable[[str], None]
) -> tuple[str, ...]:
    """The probes that are asked for, or all that the model can give.

    Raises:
        InfoFlowError: for one that is asked for and that the model cannot give, with the reason.
    """
    shows = "it shows neither scores nor pattern; load it with eager attention"
    needs: dict[str, tuple[Callable[[LayerCapabilities], bool], str]] = {
        "positions": (lambda layer: layer.n_heads is not None, shows),
        "recovery": (lambda layer: layer.n_heads is not None, shows),
        "influence": (
            lambda layer: "hook_resid_pre" in layer.edits_reach,
            "edits of hook_resid_pre do not reach its output",
        ),
        "mechanisms": (
            lambda layer: "attn.hook_pattern" in layer.edits_reach,
            "edits of hook_pattern do not reach its output; an official name can be loaded as a "
            "HookedTransformer (backend 'hooked')",
        ),
    }
    possible = []
    for probe in config.probes or PROBES:
        can, reason = needs[probe]
        lacking = [str(i) for i, layer in enumerate(capabilities.layers) if not can(layer)]
        if not lacking:
            possible.append(probe)
            continue
        why = (
            f"{probe} cannot be measured in layers {', '.join(lacking)} of this "
            f"{capabilities.kind}: {reason}"
        )
        if config.probes is not None:
            rest = ",".join(name for name in config.probes if name != probe) or "other probes"
            raise InfoFlowError(f"{why}. Ask for {rest}")
        say(f"left out: {why}")
    return tuple(possible)


# The folder


def _check_folder(out: Path, config: ProbingConfig) -> None:
    """Refuse a folder with results of other settings.

    Raises:
        InfoFlowError: naming the settings that differ.
    """
    path = out / "record.json"
    if not path.is_file():
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))["config"]
    except (json.JSONDecodeError, KeyError) as error:
        raise InfoFlowError(f"{str(path)!r} is no record of a run ({error})") from error
    now = json.loads(json.dumps(asdict(config)))
    differing = [name for name in now if before.get(name) != now[name]]
    if differing:
        changes = ", ".join(f"{name} {before.get(name)!r} -> {now[name]!r}" for name in differing)
        raise InfoFlowError(
            f"{str(out)!r} holds results of other settings ({changes}): expected the same, to go "
            "on, or another folder"
        )


def _claim_folder(out: Path, record: RunRecord) -> None:
    """Write the record, or refuse if the model or the data have changed since.

    Raises:
        InfoFlowError: naming what changed.
    """
    path = out / "record.json"
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        for what, was, now in (
            ("the model's weights", before["model_fingerprint"], record.model_fingerprint),
            ("the data", before["config"]["inputs"], record.config["inputs"]),
        ):
            if was != now:
                raise InfoFlowError(
                    f"{what} have changed since {str(out)!r} was written ({was} -> {now}): "
                    "expected the same, to go on; choose another folder"
                )
    write_json(path, record.to_dict())


def _contents(batches: Batches) -> dict[str, Tensor]:
    whole = batches.whole()
    return {"tokens": whole.tokens.contiguous(), "lengths": whole.mask().sum(dim=1)}


def _write_tables(result: ProbingResult) -> None:
    """A csv for every result."""
    import pandas as pd

    tables: dict[str, pd.DataFrame] = {}
    if result.positions is not None:
        tables["positions"] = result.positions.summary()
    if result.recovery is not None:
        tables["recovery"] = result.recovery.to_frame()
    if result.mechanisms is not None:
        tables["mechanisms"] = result.mechanisms.to_frame()
    if result.influence is not None:
        tables["influence"] = result.influence.to_frame()
    if result.agreement:
        tables["agreement"] = pd.concat(
            [
                agreement.to_frame().assign(rule=name)
                for name, agreement in result.agreement.items()
            ],
            ignore_index=True,
        )
        tables["agreement_by_position"] = pd.concat(
            [
                compare_by_position(sets, result.influence).assign(rule=name)
                for name, sets in result.predicted.items()
                if result.influence is not None
            ],
            ignore_index=True,
        )
    if result.curve is not None:
        tables["coverage_curve"] = result.curve.to_frame()
    for name, table in tables.items():
        write_text(result.out / f"{name}.csv", table.to_csv(index=False))
    write_text(result.out / "capabilities.csv", result.capabilities.to_frame().to_csv(index=False))


def _texts(loaded: LoadedModel, batches: Batches, n: int) -> tuple[tuple[str, ...], ...]:
    """The tokens of the first sequences, as one reads them."""
    texts = []
    for batch in batches.first(n).batches(1):
        row = batch.tokens[0]
        if row.ndim > 1:
            texts.append(tuple(str(index) for index in range(len(row))))
        elif loaded.tokenizer is not None:
            texts.append(tuple(_readable(loaded.tokenizer.decode([i])) for i in row.tolist()))
        else:
            texts.append(tuple(str(i) for i in row.tolist()))
    return tuple(texts)


def _readable(token: str) -> str:
    """A token whose blanks and line breaks can be seen."""
    if token.isprintable() and token.strip():
        return token
    return repr(token)[1:-1].replace(" ", "\u00b7")
