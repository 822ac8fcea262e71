"""Probe any model on any data: measure, predict, compare; finished parts stay on disk."""

import functools
import inspect
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infoflow_lens.agreement import compare_by_position
from infoflow_lens.foundation.display import brief, count, panel
from infoflow_lens.foundation.documents import PROBE_PAGE
from infoflow_lens.foundation.errors import InfoFlowError, refuse_names
from infoflow_lens.foundation.files import make_temporary_folder, write_signed, write_text
from infoflow_lens.foundation.lazy import pd
from infoflow_lens.foundation.memory import check_memory
from infoflow_lens.foundation.modules import outside_user_modes
from infoflow_lens.foundation.naming import find_model, is_path, nearest
from infoflow_lens.foundation.packages import versions_identity
from infoflow_lens.foundation.processes import threads
from infoflow_lens.foundation.progress import hide_library_bars
from infoflow_lens.foundation.record import (
    RunRecord,
    configuration_fingerprint,
    tokenizer_fingerprint,
)
from infoflow_lens.foundation.settings import Count, check
from infoflow_lens.hooks import Probe, inspect_model
from infoflow_lens.hooks.model.inputs import COLUMNS, Batches, Inputs, read_inputs
from infoflow_lens.hooks.model.semantics import model_identity
from infoflow_lens.hooks.model.texts import readable_tokens
from infoflow_lens.hooks.sharded import ShardedResult
from infoflow_lens.models.loading import DTYPES, LoadedModel, load_any
from infoflow_lens.probing.config import FEWEST, ProbingConfig, SurveyConfig, register_parts
from infoflow_lens.probing.data import check_data, data_identity, stream_data
from infoflow_lens.probing.findings import Findings
from infoflow_lens.probing.measuring import (
    check_own_settings,
    choose_parts_with_data,
    choose_possible_parts,
    code_of_own,
    measure_parts,
)
from infoflow_lens.probing.page import build_report, per_head
from infoflow_lens.probing.part import Part, ProbePart, RunContext, Say
from infoflow_lens.probing.store import find_sequences, store_sequences, windows
from infoflow_lens.report.pages import render_probing
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
        model: what its numbers depend on (:func:`~infoflow_lens.hooks.model.semantics`).
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
    """Return what tokenised sequences depend on, which says when to reuse them; None if unknown.

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
    """Write a csv for every result."""
    tables = {name: part.table(result.found[name]) for name, part in result.parts.items()}
    tables["capabilities"] = result.capabilities.to_frame()
    # tables that compare what is predicted and what is measured
    if result.influence is not None and result.predicted:
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
        seen = f", {count(n, 'sequence')}" if n else ""
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
    if config.setting:
        check_own_settings(config)
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
            parts = choose_possible_parts(capabilities, config, say, if_possible)
            if stored is None:
                stored = store_sequences(chain([begin], coming), folder.scratch, config.data)
        say(f"{loaded.description}; {count(stored.extent.n_sequences, 'sequence')}")
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
        parts = choose_parts_with_data(parts, context, say, if_possible)
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
        result = ProbingResult(
            out=out,
            config=config,
            capabilities=capabilities,
            parts=parts,
            found=found,
            texts=readable_tokens(model, batches.first(config.n_shown).rows),
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


_SETTINGS = {item.name: item for item in fields(ProbingConfig)}


def _accept_probes(function: Callable[..., ProbingResult]) -> Callable[..., ProbingResult]:
    """Wrap a function so that its argument `probes` may hold probes as well as names of probes."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> ProbingResult:
        given = kwargs.get("probes")
        parts: dict[str, Part] = {}
        # probes become parts of this call alone, under their names
        if isinstance(given, (list, tuple)):
            names = []
            for each in given:
                part = ProbePart(each) if isinstance(each, Probe) else None
                if part is not None:
                    parts[part.name] = part
                names.append(each if part is None else part.name)
            kwargs["probes"] = tuple(names)
        with register_parts(parts):
            return function(*args, **kwargs)

    return call


@_accept_probes
@outside_user_modes()
def probe(
    model: str | os.PathLike[str] | nn.Module | LoadedModel,
    data: str | os.PathLike[str] | Inputs,
    out: str | os.PathLike[str] | None = None,
    *,
    tokenizer: Any | None = None,
    progress: bool = True,
    say: Say = lambda line: None,
    jobs: int = 1,
    scheduler: str | None = None,
    n_threads: int | None = None,
    **settings: Any,
) -> ProbingResult:
    """Probe a model on data: measure, predict, compare. The same as `infoflow-lens probe`.

    Args:
        model: a name or a folder, or a model in memory; see `load_any`.
        data: what the command takes: a file, a saved dataset, "repeated", a task, or a name on the
            hub; or data in memory: a list of texts, token ids, vectors, a ``datasets.Dataset``.
        out: a folder for results, from which an interrupted run goes on; None keeps nothing but
            what is returned.
        tokenizer: of a model of transformers in memory.
        progress: show bars.
        say: called with a line for every part that begins.
        jobs, scheduler, n_threads: who measures; see
            :func:`~infoflow_lens.probing.run.run_probing`. Workers load the model by its name.
        settings: those of :class:`ProbingConfig`, the command's options: probes, n, max_length,
            ranks, influence, batch_size, seed, ... Among `probes` may be probes of your own, as in
            ``probes=["positions", MyProbe()]``; the name of the result is that of the class.

    Returns:
        The results; ``.report("report.html")`` writes the page.

    Raises:
        InfoFlowError: for bad settings, models or data, before work starts; for a folder with
            results of other settings; for what probes refuse; without a folder, for results that
            do not fit in memory.
        KeyboardInterrupt: when it is stopped, with what to do to go on.

    Example:
        >>> import infoflow_lens as il
        >>> found = il.probe("gpt2", ["The cat sat on the mat.", "The dog ate the cat."] * 40)
        >>> found.report("report.html")
    """
    unknown = [name for name in settings if name not in _SETTINGS]
    if unknown:
        known = [name for name in _SETTINGS if name not in ("model", "data")]
        raise InfoFlowError(f"there is no setting {unknown[0]!r}{nearest(unknown[0], known)}")
    _refuse_text(data)
    if out is not None and not os.fspath(out).strip():
        raise InfoFlowError(
            f"out is {out!r}: expected a folder for results; give '.' for this one, or None"
        )
    config = ProbingConfig(
        model=os.fspath(model) if isinstance(model, (str, os.PathLike)) else _name_of(model),
        data=os.fspath(data) if isinstance(data, (str, os.PathLike)) else _describe_data(data),
        **_name_devices(settings),
    )
    loaded = None
    # other processes load the model by its name or from its folder
    if not isinstance(model, (str, os.PathLike)):
        if jobs != 1 or scheduler is not None:
            raise InfoFlowError(
                f"the model is in memory, and jobs is {jobs}, scheduler {scheduler!r}: expected a "
                "name or a folder, from which workers load it; save it first"
            )
        loaded = load_any(
            model,
            tokenizer=tokenizer,
            device=settings.get("device"),
            dtype=config.dtype,
            backend=config.backend,
        )
        config = replace(config, device=str(next(loaded.model.parameters()).device))
    elif tokenizer is not None:
        load_any(model, tokenizer=tokenizer)  # refuses it
    # data in memory is read once, here
    batches = None
    if not isinstance(data, (str, os.PathLike)):
        if loaded is None:
            loaded = load_any(
                config.model, device=config.device, dtype=config.dtype, backend=config.backend
            )
        batches = _read(loaded.model, data, config)
    workers: dict[str, Any] = {"jobs": jobs, "scheduler": scheduler, "n_threads": n_threads}
    if out is not None:
        return run_probing(out, config, progress, say, loaded, batches, **workers)
    # without a folder of the user's, results pass through one that goes
    folder = make_temporary_folder("infoflow-probe-")
    try:
        result = run_probing(folder, config, progress, say, loaded, batches, **workers)
        in_memory = {
            name: part.whole() if isinstance(part, ShardedResult) else part
            for name, part in result.found.items()
        }
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"what is finished is kept; run the same with out={str(folder)!r} to go on"
        ) from None
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    return replace(result, out=None, found=in_memory)


def _name_devices(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with PyTorch's devices and number types by name, as records keep them."""
    named = dict(settings)
    if isinstance(named.get("device"), torch.device):
        named["device"] = str(named["device"])
    if isinstance(named.get("dtype"), torch.dtype):
        named["dtype"] = str(named["dtype"]).removeprefix("torch.")
    if "device" in named and named["device"] is None:  # the default, as in `load_any`
        del named["device"]
    return named


def _complete_signature() -> inspect.Signature:
    """Return the signature with every setting, for completion and help."""
    own = inspect.signature(probe)
    kept = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    more = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=item.default, annotation=item.type
        )
        for name, item in _SETTINGS.items()
        if name not in ("model", "data")
    ]
    return own.replace(parameters=[*kept, *more])


probe.__signature__ = _complete_signature()  # type: ignore[attr-defined]


def _name_of(model: Any) -> str:
    """Name a model in memory, for records and errors."""
    if isinstance(model, LoadedModel):
        return model.description.split(":")[0]
    name = getattr(model, "name_or_path", "") or type(model).__name__
    return f"{name} in memory"


def _refuse_text(data: Any) -> None:
    """Refuse a text where the name of data is expected.

    Raises:
        InfoFlowError: for a text, and for no data.
    """
    if isinstance(data, str) and len(data.split()) > 1 and not is_path(data):
        raise InfoFlowError(
            f"data is the text {brief(data)}: expected a list of texts, as in [text], or the name "
            "of a file, a task or a dataset"
        )
    if data is None or (isinstance(data, (list, tuple)) and not len(data)):
        raise InfoFlowError(f"data is {data!r}: expected at least one text or sequence")


def _describe_data(data: Any) -> str:
    if isinstance(data, Batches):
        return f"{data.n_sequences} sequences in memory"
    n = f"{len(data)} " if isinstance(data, Sized) else ""
    first = data[0] if isinstance(data, (list, tuple)) and data else None
    return f"{n}{'texts' if isinstance(first, str) else 'sequences'} in memory"


def _read(model: nn.Module, data: Any, config: ProbingConfig) -> Batches:
    """Read data in memory as sequences, at most `config.n` of them; texts in windows if it says so.

    Raises:
        InfoFlowError: for what is no data, or a loader, which may be read once only.
    """
    longest = config.max_length
    if config.window is not None:
        longest = min(config.window, longest or config.window)
        texts = _texts(data, config.column)
        if texts is not None:
            data = torch.cat(list(windows(model, texts, longest, config.n, "data")))
    # a table is cut before its texts are tokenised, other data afterwards
    if config.n is not None and hasattr(data, "column_names") and hasattr(data, "select"):
        data = data.select(range(min(config.n, len(data))))
    batches = read_inputs(model, data, column=config.column, max_length=longest, name="data")
    _ = batches.rows  # asked for its error: loaders are refused before the run begins
    return batches if config.n is None else batches.first(config.n)


def _texts(data: Any, column: str | None) -> list[str] | None:
    """Return the texts among data in memory; None for ids and vectors."""
    names = getattr(data, "column_names", None)
    if names is not None or isinstance(data, Mapping):
        names = list(names or data)
        chosen = column or next((name for name in COLUMNS if name in names), "")
        data = list(data[chosen]) if chosen in names else []
    if not isinstance(data, (list, tuple)) or not all(isinstance(text, str) for text in data):
        return None
    return [text for text in data if text.strip()] or None


_PASS_ROOM = 2**25  # numbers in the largest tensor of a pass of the labels
_TENSORS = 6  # of that size at a time: pattern, ideals, logits and their gradient


def run_survey(
    out: str | os.PathLike[str],
    config: SurveyConfig,
    progress: bool = True,
    say: Say = lambda line: None,
    **spread: Any,
) -> ProbingResult:
    """Measure labels, top k, influence, positions and recovery of a model.

    A preset of a probe run (:func:`~infoflow_lens.probing.run.run_probing`): all parts, with
    settings for a laptop: influence is estimated at the last position where exact Jacobians are
    slow, damages are estimated to second order, recovery is sketched where the model is wide. What
    a model cannot give is left out, and `say` names it. Besides the files of a probe run it writes
    ``heads.csv``, a row for each head. Run again with the same settings to go on.

    Args:
        out: folder for results and ``report.html``.
        config: the settings.
        progress: show bars.
        say: called with a line for every part that begins.
        spread: `jobs`, `scheduler`, `n_threads` and `again`, as that function takes them.

    Raises:
        InfoFlowError: for bad settings, model or data, too little memory, or a folder with results
            of other settings.
        KeyboardInterrupt: when it is stopped, with what to do to go on.
    """
    check_memory(_bytes_of_files(find_model(config.model).path, config.dtype), config.device)
    return run_probing(
        out,
        config.probing(),
        progress,
        say,
        if_possible=True,
        ready=lambda context: _check(context, config),
        last=_write_heads,
        **spread,
    )


def _write_heads(result: ProbingResult) -> None:
    assert result.out is not None
    write_text(result.out / "heads.csv", per_head(result).to_csv(index=False))


def _check(context: RunContext, config: SurveyConfig) -> None:
    """Refuse too little memory, and too few windows for all that is measured.

    Raises:
        InfoFlowError: with what to do.
    """
    windows = context.batches.n_sequences or 0
    parts = choose_possible_parts(context.capabilities, context.config, lambda line: None, True)
    # each worker has a model of its own, and no more work at a time than parts or shards
    jobs = min(context.executor.jobs, max(len(parts), -(-windows // context.config.shard)))
    weights = sum(p.numel() * p.element_size() for p in context.model.parameters())
    # in one process the model is loaded by now and takes no more
    check_memory(survey_bytes(context) + (weights if jobs > 1 else 0), config.device, jobs)
    if windows < FEWEST:
        raise InfoFlowError(
            f"the data hold {windows} windows of up to {config.window} tokens: expected at least "
            f"{FEWEST}; give more text, or a smaller window"
        )


def survey_bytes(context: RunContext) -> int:
    """Return an upper estimate, in bytes, of the memory of a survey without the model's weights."""
    cfg = getattr(context.model, "cfg", None)
    size = next(context.model.parameters()).element_size()
    n_pos, width = context.batches.longest or 1, context.width
    layers = context.capabilities.layers
    n_heads = max((layer.n_heads or 0) for layer in layers)
    batch = min(context.config.batch_size, context.batches.n_sequences or 1)
    logits = batch * n_pos * int(getattr(cfg, "d_vocab", None) or 1)
    # states and patterns of a pass with its gradient: about 16 states a layer, and a pattern and
    # its five ideals
    kept = len(layers) * batch * n_pos * (16 * width + 12 * n_heads * n_pos)
    passes = _TENSORS * min(_PASS_ROOM, 64 * max(logits, 1)) + 4 * logits + kept
    sums = len(layers) * width * (width + 4 * n_heads * min(width, 64))  # of recovery, float64
    return size * passes + 2 * 8 * sums


def _bytes_of_files(folder: Path, dtype: str | None) -> int:
    """Return the bytes that the weights of a local folder take in memory; 0 for a name."""
    if not folder.is_dir():
        return 0
    files = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
    on_disk = sum(path.stat().st_size for path in files)
    wanted = DTYPES.get(dtype or "float32", DTYPES["float32"])
    return on_disk * max(1, wanted.itemsize // 2)  # files may be of half precision
