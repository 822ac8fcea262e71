"""Probe any model on any data: measure, predict, compare; finished parts stay on disk."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from infoflow_lens.agreement import (
    Agreement,
    CoverageCurve,
    compare,
    compare_by_position,
    coverage_curve,
)
from infoflow_lens.foundation.errors import InfoFlowError, NothingMeasuredError
from infoflow_lens.foundation.files import atomic_path, writable_folder, write_json, write_text
from infoflow_lens.foundation.record import RunRecord, fingerprint, model_fingerprint
from infoflow_lens.hooks import (
    AttendedResult,
    InfluenceResult,
    MechanismsResult,
    ModelCapabilities,
    PositionsResult,
    Probe,
    RecoveryResult,
    Result,
    inspect_model,
    run_probes,
)
from infoflow_lens.hooks.model.inputs import Batches
from infoflow_lens.models.loading import LoadedModel, load_any
from infoflow_lens.probing.checkpoint import Checkpoint
from infoflow_lens.probing.config import ProbingConfig
from infoflow_lens.probing.data import read_data
from infoflow_lens.probing.part import Part, Say, Setting
from infoflow_lens.probing.registry import load_part, part_names
from infoflow_lens.report.probing import ProbingReport, Section, ShownSequence, render_probing
from infoflow_lens.theory import InformationSets, propagate

_RULES = {
    "argmax": "if every head passes the token of its largest score",
    "mechanisms": "with every head passing on what its mechanism does",
}


@dataclass(frozen=True)
class ProbingResult:
    """What a probe run found.

    Attributes:
        out: the folder with all of it.
        config: the settings.
        capabilities: what the model is.
        parts: the parts that were measured, by name.
        found: results by name; those of the parts, and what predictions are made from.
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
    parts: Mapping[str, Part]
    found: Mapping[str, Result]
    agreement: Mapping[str, Agreement]
    curve: CoverageCurve | None
    texts: tuple[tuple[str, ...], ...]
    predicted: Mapping[str, InformationSets]
    record: RunRecord

    @property
    def positions(self) -> PositionsResult | None:
        """Where heads look; None if it was not asked for, as for the next three."""
        return self._of("positions", PositionsResult)

    @property
    def recovery(self) -> RecoveryResult | None:
        """What states give back."""
        return self._of("recovery", RecoveryResult)

    @property
    def influence(self) -> InfluenceResult | None:
        """What states depend on."""
        return self._of("influence", InfluenceResult)

    @property
    def mechanisms(self) -> MechanismsResult | None:
        """What heads need."""
        return self._of("mechanisms", MechanismsResult)

    def _of(self, name: str, kind: type[Any]) -> Any:
        result = self.found.get(name)
        return result if isinstance(result, kind) else None

    def sentences(self) -> list[str]:
        """What the parts found, in words."""
        return [
            sentence
            for name, part in self.parts.items()
            for sentence in part.sentences(self.found[name])
        ]


def run_probing(
    out: Path, config: ProbingConfig, progress: bool = True, say: Say = lambda line: None
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
    capabilities = inspect_model(model, next(batches.batches(1)).tokens)
    parts = _possible(capabilities, config, say)
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
    setting = Setting(config, model, capabilities, batches, progress)
    for part in parts.values():
        part.check(setting)
    found: dict[str, Any] = {}
    try:
        for which in ("all", "detail"):  # probes of several parts share their passes
            wanted: dict[str, Probe[Any]] = {}
            for part in parts.values():
                mine = part.probes(setting) if part.sequences == which else {}
                twice = ", ".join(wanted.keys() & mine.keys())
                if twice:
                    raise InfoFlowError(
                        f"{type(part).__name__} names a probe {twice!r}, as another part does: "
                        "expected a name of its own; rename it in the package that adds it"
                    )
                wanted |= mine
            found |= _probed(out, which, wanted, setting, say)
        for name, part in parts.items():
            if name not in found:
                found[name] = _measured(out, name, part, setting, say)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"finished batches are kept in {str(out)!r}; run the same again to go on"
        ) from None
    agreement, predicted, curve = _compared(found)
    result = ProbingResult(
        out=out,
        config=config,
        capabilities=capabilities,
        parts=parts,
        found=found,
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


# Measuring


def _probed(
    out: Path, which: str, wanted: Mapping[str, Probe[Any]], setting: Setting, say: Say
) -> dict[str, Any]:
    """The results of probes that share their passes, read from disk if they are there."""
    finished = {name: _finished(out, name) for name in wanted}
    if all(result is not None for result in finished.values()):
        return finished
    checkpoint = Checkpoint(out / f".{which}.pt")
    state = checkpoint.load()
    if state is not None:
        if not isinstance(state, dict) or state.keys() != wanted.keys():
            raise InfoFlowError(
                f"the unfinished run in {str(out)!r} is of other probes than {', '.join(wanted)}: "
                f"expected the same; delete {checkpoint.path.name} to begin again"
            )
        for name, probe in wanted.items():
            probe.load_state(state[name])
    probes = list(wanted.values())
    seen = probes[0].n_sequences
    say(f"{', '.join(wanted)}" + (f": going on behind {seen} sequences" if seen else ""))

    def now() -> dict[str, Any]:
        return {name: probe.state() for name, probe in wanted.items()}

    try:
        run_probes(
            setting.model,
            setting.batches if which == "all" else setting.detail,
            probes,
            batch_size=setting.config.batch_size,
            skip=seen,
            after_batch=lambda n: checkpoint.keep(now),
            progress=setting.progress,
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
        found[name].save(out / name)
    if failed:
        checkpoint.save(now())
        raise InfoFlowError("; ".join(failed))
    checkpoint.remove()
    return found


def _measured(out: Path, name: str, part: Part, setting: Setting, say: Say) -> Result:
    """The result of a part that measures by itself, read from disk if it is there."""
    finished = _finished(out, name)
    if finished is not None:
        return finished
    say(name)
    checkpoint = Checkpoint(out / f".{name}.pt")
    result = part.measure(setting, checkpoint)
    if result is None:
        raise InfoFlowError(
            f"{type(part).__name__} gave neither a probe called {name!r} nor a result of its own: "
            "expected probes(setting) with that name, or measure(setting, checkpoint)"
        )
    result.save(out / name)
    checkpoint.remove()
    return result


def _finished(out: Path, name: str) -> Result | None:
    return Result.load(out / name) if (out / f"{name}.json").is_file() else None


# Predicted against measured


def _compared(
    found: Mapping[str, Any],
) -> tuple[dict[str, Agreement], dict[str, InformationSets], CoverageCurve | None]:
    """Agreement and predicted sets by rule, and the coverage curve, of the same sequences."""
    if "influence" not in found:
        return {}, {}, None
    influence: InfluenceResult = found["influence"]
    attended: AttendedResult = found["influence_attended"]
    chosen: PositionsResult = found["influence_positions"]
    rules: dict[str, Any] = {"argmax": chosen.argmax}
    if "mechanisms" in found:
        rules["mechanisms"] = found["mechanisms"].rules(attended.positions, chosen.argmax)
    n_source = influence.influence.shape[-1]
    predicted = {name: propagate(rule, n_source) for name, rule in rules.items()}
    agreement = {name: compare(sets, influence) for name, sets in predicted.items()}
    return agreement, predicted, coverage_curve(chosen.positions, influence)


def _report_of(result: ProbingResult) -> ProbingReport:
    config, found = result.config, result.capabilities
    facts = [("layers", str(len(found.layers))), ("weights", f"{found.dtype} on {found.device}")]
    for name, part in result.parts.items():
        facts += part.facts(result.found[name])
    headline = f"{found.kind}, probed on {config.data}."
    rule = "mechanisms" if "mechanisms" in result.agreement else "argmax"
    shown: list[ShownSequence] = []
    if result.influence is not None:
        headline += _headline(result.agreement[rule], result.influence)
        shown = _shown(result, rule)
    return ProbingReport(
        title=f"What the states of {config.model} can depend on, and do",
        headline=headline,
        facts=facts,
        problems=found.problems(),
        capabilities=found.to_frame().to_html(index=False, border=0),
        sections=[
            Section(part.title or name, part.text, part.figures(result.found[name]))
            for name, part in result.parts.items()
        ],
        agreement=result.agreement,
        rule=_RULES[rule],
        curve=result.curve,
        shown=shown,
        record=result.record,
    )


def _headline(agreement: Agreement, influence: InfluenceResult) -> str:
    last, others = agreement.cls, float((influence.lengths.double() - 1).mean())
    text = (
        f" {last.influence_inside:.0%} of the influence of other tokens on the last state lies "
        f"inside the set that theory allows it ({last.predicted_size:.1f} of {others:.1f})."
    )
    if last.predicted_size > 0.95 * others:
        text += " That set holds nearly every token, so the prediction excludes nothing."
    return text


def _shown(result: ProbingResult, rule: str) -> list[ShownSequence]:
    """The first sequences, with what their last states depend on."""
    assert result.influence is not None
    members, full = result.predicted[rule].members[-1], result.influence.full()
    shown = []
    for index, texts in enumerate(result.texts[: len(result.influence.lengths)]):
        n = len(texts)
        last = n - 1 + members.shape[1] - members.shape[2]
        shown.append(ShownSequence(texts, full[-1, index, last, :n], members[index, last, :n]))
    return shown


# Before work starts


def _possible(capabilities: ModelCapabilities, config: ProbingConfig, say: Say) -> dict[str, Part]:
    """The parts that are asked for, or all that the model can give, in the order of the report.

    Raises:
        InfoFlowError: for one that is asked for and that the model cannot give, with the reason.
    """
    possible = {}
    for name in part_names():
        if config.probes is not None and name not in config.probes:
            continue
        part = load_part(name)
        reasons = {str(i): part.lacking(layer) for i, layer in enumerate(capabilities.layers)}
        lacking = [layer for layer, reason in reasons.items() if reason]
        if not lacking:
            possible[name] = part
            continue
        why = (
            f"{name} cannot be measured in layers {', '.join(lacking)} of this "
            f"{capabilities.kind}: {reasons[lacking[0]]}"
        )
        if config.probes is not None:
            rest = ",".join(other for other in config.probes if other != name) or "other probes"
            raise InfoFlowError(f"{why}. Ask for {rest}")
        say(f"left out: {why}")
    return possible


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

    tables = {name: part.table(result.found[name]) for name, part in result.parts.items()}
    tables["capabilities"] = result.capabilities.to_frame()
    if result.influence is not None:
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
            ],
            ignore_index=True,
        )
    if result.curve is not None:
        tables["coverage_curve"] = result.curve.to_frame()
    for name, table in tables.items():
        write_text(result.out / f"{name}.csv", table.to_csv(index=False))


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
