"""Probe any model on any data: measure, predict, compare; finished parts stay on disk."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn

from infoflow_lens.agreement import compare_by_position
from infoflow_lens.foundation.display import panel
from infoflow_lens.foundation.documents import PROBE_PAGE
from infoflow_lens.foundation.errors import refuse_names
from infoflow_lens.foundation.files import write_signed, write_text
from infoflow_lens.foundation.lazy import pd
from infoflow_lens.foundation.packages import versions_identity
from infoflow_lens.foundation.processes import threads
from infoflow_lens.foundation.progress import hide_library_bars
from infoflow_lens.foundation.record import (
    RunRecord,
    configuration_fingerprint,
    tokenizer_fingerprint,
)
from infoflow_lens.foundation.settings import Count, check
from infoflow_lens.hooks import inspect_model
from infoflow_lens.hooks.model.identity import model_identity
from infoflow_lens.hooks.model.inputs import Batches
from infoflow_lens.hooks.model.texts import readable_tokens
from infoflow_lens.models.loading import LoadedModel, load_any
from infoflow_lens.probing.config import ProbingConfig
from infoflow_lens.probing.data import check_data, data_identity, stream_data
from infoflow_lens.probing.findings import Findings, compare_with_influence
from infoflow_lens.probing.measuring import (
    code_of_own,
    measure_parts,
    parts_with_enough_data,
    possible_parts,
)
from infoflow_lens.probing.page import build_report
from infoflow_lens.probing.part import RunContext, Say
from infoflow_lens.probing.store import find_sequences, store_sequences
from infoflow_lens.report.probing import render_probing
from infoflow_lens.runs.executor import Executor
from infoflow_lens.runs.folder import RunFolder, write_output

# Settings on which no number depends: the names of model and data, whose contents have digests,
# the device, and what the page shows. The digests of weights and configuration tell the precision
# and the host that were used, however they were asked for: "float32" is what None gives.
_OF_SEQUENCES = ("column", "n", "max_length", "window")
_OF_MODEL = ("dtype", "backend")
_IGNORED_SETTINGS = ("model", "data", *_OF_SEQUENCES, *_OF_MODEL, "device", "n_shown")

_WORDS_OF_MODEL = {
    "model": "the model's weights",
    "configuration": "the model's configuration and code",
    "hooks": "your own hooks on the model",
}


def settings_identity(config: ProbingConfig) -> dict[str, Any]:
    """Return the settings on which numbers depend, by what errors call them."""
    settings = asdict(config).items()
    return {f"settings ({name})": v for name, v in settings if name not in _IGNORED_SETTINGS}


def run_identity(
    config: ProbingConfig,
    model: Mapping[str, Any],
    inputs: str,
    tokenizer: str | None,
    code: Mapping[str, str],
) -> dict[str, Any]:
    """Return what the numbers of a run depend on, named as in errors: contents, never paths.

    Args:
        config: the settings.
        model: what its numbers depend on (:func:`~infoflow_lens.hooks.model.identity`).
        inputs, tokenizer: digests of the data, and of the tokenizer's words and rules.
        code: digests of parts and probes of the user's own, by name.
    """
    return {
        **{words: model[name] for name, words in _WORDS_OF_MODEL.items()},
        "the tokenizer's words and rules": tokenizer,
        "the data": inputs,
        "the code of your own probes": dict(code),
        **settings_identity(config),
        **versions_identity(),
        "what the model gives": model["outputs"],  # last: it follows from all others
    }


def sequences_identity(
    config: ProbingConfig, configuration: str, tokenizer: str | None
) -> dict[str, Any] | None:
    """Return what tokenised sequences depend on, to know whether they can be reused; None if
    unknown.

    Args:
        config: the settings.
        configuration, tokenizer: digests of the model's configuration and code, and of the
            tokenizer's words and rules.
    """
    data = data_identity(config.data)
    if data is None:
        return None
    settings = {name: getattr(config, name) for name in _OF_SEQUENCES}
    model = {"configuration": configuration, "tokenizer": tokenizer}
    return {"data": data, **settings, **model, **versions_identity()}


def write_tables(out: Path, result: Findings) -> None:
    """A csv for every result."""
    tables = {name: part.table(result.found[name]) for name, part in result.parts.items()}
    tables["capabilities"] = result.capabilities.to_frame()
    # tables that compare what is predicted and what is measured
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
        tables["explained"] = pd.DataFrame(
            {"rule": rule, **found.to_dict()} for (_, rule), found in result.explained.items()
        )
    if result.curve is not None:
        tables["coverage_curve"] = result.curve.to_frame()
    for name, table in tables.items():
        write_text(out / f"{name}.csv", table.to_csv(index=False))


@refuse_names(push_to_hub="out=, and upload_folder of huggingface_hub")
@dataclass(frozen=True, repr=False)
class ProbingResult(Findings):
    """What a probe run found; in a notebook, its main findings."""

    def report(
        self, path: str | os.PathLike[str] = "report.html", *, overwrite: bool = False
    ) -> Path:
        """Write the report, a page that needs no network.

        Args:
            path: of the page.
            overwrite: whether a file that is no such page may be replaced, too.

        Returns:
            The file.

        Raises:
            InfoFlowError: if the file cannot be written, or another one stands in its place.
        """
        PROBE_PAGE.check(path, overwrite=overwrite)  # before the page is made
        return PROBE_PAGE.write(path, render_probing(build_report(self)), overwrite=overwrite)

    def __repr__(self) -> str:
        n = 0 if self.positions is None else self.positions.n_sequences
        seen = f", {n} sequences" if n else ""
        what = f"{self.config.model[:100]!r} on {self.config.data[:100]!r}{seen}"
        return f"ProbingResult({what}: {', '.join(self.found)[:200]})"

    def _repr_html_(self) -> str:
        facts = {name: type(result).__name__ for name, result in self.found.items()}
        title = f"{self.config.model} on {self.config.data}"
        return panel(
            title, facts, self.findings(), "more: .report(path), .positions, .influence, ..."
        )


_AT_ONCE = 1000  # sequences


def run_probing(
    out: str | os.PathLike[str],
    config: ProbingConfig,
    progress: bool = True,
    say: Say = lambda line: None,
    loaded: LoadedModel | None = None,
    batches: Batches | None = None,
    *,
    if_possible: bool = False,
    ready: Callable[[RunContext], None] = lambda context: None,
    jobs: int = 1,
    scheduler: str | None = None,
    n_threads: int | None = None,
    again: str = "",
    last: Callable[[ProbingResult], None] = lambda result: None,
) -> ProbingResult:
    """Load the model, measure, predict, compare, and write all of it to a folder.

    Run again with the same settings to go on after an interruption: finished parts are read, and
    unfinished ones go on after their last finished batch (after a kill, from the last state on
    disk, which is at most half a minute old).

    Args:
        out: folder for results (safetensors, json, csv) and ``report.html``.
        config: the settings.
        progress: show bars.
        say: called with a line for every part that begins.
        loaded: the model, where it is in memory already.
        batches: the data, where they are in memory already.
        if_possible: leave out what is asked for and cannot be measured, in place of an error.
        ready: called before any part checks its settings; what it raises ends the run.
        jobs: processes that measure at a time. What is measured of all sequences is spread over
            them by shards where there are several; each of the other parts is measured by one.
        scheduler: address of a dask scheduler, whose workers measure shards in place of own
            processes; they must find the model under the same name. Other parts run in this one.
        n_threads: of each process; default, one where there are several, else what PyTorch takes.
            The last digits of numbers depend on it, and on nothing else here.
        again: the command that continues the run, for messages; default, the same call.
        last: called with the result before the run counts as finished; it may write more files.

    Raises:
        InfoFlowError: for bad settings, models or data, before work starts; for a folder that
            another run writes to, with results of a run on other weights, configuration,
            tokenizer, data, settings or versions, or with spoiled files; for what probes refuse,
            for a full disk, and for workers or a scheduler that are gone. Finished parts stay on
            disk.
        KeyboardInterrupt: when it is stopped, with what to do to go on.
    """
    if batches is None:
        check_data(config.data, config.column)
    n_threads = check(n_threads, Count | None, "n_threads")
    executor = Executor(jobs, scheduler, n_threads or 1, again or "the same call")
    executor.check("a probe run")
    # several processes take one thread each, as they would share the cores
    if n_threads is None and not executor.is_one_process:
        n_threads = 1
    with (
        RunFolder.open(out, "infoflow-lens probe", ("record.json", "report.html")) as folder,
        nullcontext() if n_threads is None else threads(n_threads),
    ):
        out, in_memory = folder.path, loaded is not None or batches is not None
        # other settings are refused before the model is loaded, which takes long
        folder.check(settings_identity(config))
        with nullcontext() if progress else hide_library_bars():
            if loaded is None:
                loaded = load_any(
                    config.model, device=config.device, dtype=config.dtype, backend=config.backend
                )
            model = loaded.model
            tokenizer = tokenizer_fingerprint(loaded.tokenizer)
            made_from = None
            if batches is None:
                made_from = sequences_identity(config, configuration_fingerprint(model), tokenizer)
            stored = find_sequences(folder, made_from)
            coming = _parts(model, config, folder.scratch, batches) if stored is None else iter(())
            # the first part shows what the model can give, before all data are read
            begin = next(coming) if stored is None else Batches(model, stored.sequences)
            capabilities = inspect_model(model, begin.rows[0][None])
            parts = possible_parts(capabilities, config, say, if_possible)
            if stored is None:
                stored = store_sequences(chain([begin], coming), folder.scratch, config.data)
        say(f"{loaded.description}; {stored.extent.n_sequences} sequences")
        # refused before the folder is claimed, so that other settings may be tried in it
        batches = Batches(model, stored.sequences, name=config.data)
        identity = model_identity(model, batches)
        weights = identity["model"]
        record = RunRecord(
            config={**asdict(config), "inputs": stored.digest, "tokenizer": tokenizer},
            seed=config.seed,
            model_fingerprint=weights,
            configuration_fingerprint=identity["configuration"],
            weight_processing=capabilities.normalization,
        )
        context = RunContext(config, model, capabilities, weights, batches, progress, executor)
        ready(context)
        parts = parts_with_enough_data(parts, context, say, if_possible)
        code = code_of_own(parts, context)
        folder.claim(run_identity(config, identity, stored.digest, tokenizer, code))
        if not folder.holds("record.json"):
            write_signed(out / "record.json", "infoflow-lens probe 2", record.to_dict())
        stored = stored.settle(folder, made_from)
        batches = Batches(model, stored.sequences, name=config.data)
        context = replace(context, batches=batches)
        try:
            found = measure_parts(folder, parts, context, say)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"what is finished is kept in {str(out)!r}; go on with {executor.again}"
            ) from None
        agreement, predicted, curve = compare_with_influence(found, config.without)
        result = ProbingResult(
            out=out,
            config=config,
            capabilities=capabilities,
            parts=parts,
            found=found,
            agreement=agreement,
            curve=curve,
            texts=readable_tokens(model, batches.first(config.n_shown).rows),
            predicted=predicted,
            record=record,
        )
        write_tables(out, result)
        result.report(out / "report.html")
        last(result)
        # data or models in memory have no files by which a second start could know them
        if not in_memory:
            write_output(folder, config.output_settings(), config.sources(), result.to_output())
        return result


def _parts(
    model: nn.Module, config: ProbingConfig, scratch: Path, batches: Batches | None
) -> Iterator[Batches]:
    """Yield the sequences in memory, or those that the settings name, some at a time."""
    if batches is None:
        names = ("column", "n", "max_length", "window", "seed")
        settings = {name: getattr(config, name) for name in names}
        yield from stream_data(model, config.data, **settings, scratch=scratch)
        return
    for start in range(0, len(batches.rows), _AT_ONCE):
        yield batches.part(start, start + _AT_ONCE)
