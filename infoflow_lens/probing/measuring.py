"""Measuring the parts of a run, each read from disk where it is finished."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infoflow_lens.foundation.errors import InfoFlowError, NothingMeasuredError
from infoflow_lens.foundation.files import let_own
from infoflow_lens.foundation.processes import defer_interrupts
from infoflow_lens.foundation.record import code_digest, is_own
from infoflow_lens.hooks import ModelCapabilities, NextTokenLoss, Probe, Result, inspect_model
from infoflow_lens.hooks.model.inputs import Batches
from infoflow_lens.hooks.passes.run import check_extent
from infoflow_lens.probing.config import (
    PARTS,
    ProbingConfig,
    apply_settings,
    check_names,
    part_names,
)
from infoflow_lens.probing.part import Part, RunContext, Say, load_part, where_lacking
from infoflow_lens.probing.shard import load_in_worker
from infoflow_lens.probing.shards import run_in_shards, warn_if_long
from infoflow_lens.probing.store import StoredSequences
from infoflow_lens.runs.checkpoint import Checkpoint
from infoflow_lens.runs.executor import Unit
from infoflow_lens.runs.folder import RunFolder


def choose_possible_parts(
    capabilities: ModelCapabilities, config: ProbingConfig, say: Say, if_possible: bool = False
) -> dict[str, Part]:
    """Choose the parts that are asked for, or all that the model can give, in the report's order.

    Args:
        capabilities: of the model.
        config: of the run.
        say: called with a line for every part that is left out.
        if_possible: leave out what is asked for and the model cannot give.

    Raises:
        InfoFlowError: for one that is asked for and that the model cannot give, with the reason;
            and where it can give none.
    """
    asked = _load_parts(config)
    return _choose(
        asked, lambda name, part: _why_not(name, part, capabilities), config, say, if_possible
    )


def _load_parts(config: ProbingConfig) -> dict[str, Part]:
    """Load the parts that are asked for, in the report's order."""
    asked = {
        name: load_part(name)
        for name in part_names()
        if config.probes is None or name in config.probes
    }
    if config.probes is None:
        asked = {name: part for name, part in asked.items() if part.by_default}
    return asked


def check_own_settings(config: ProbingConfig) -> None:
    """Refuse settings of single probes so far as that needs no model, before it is loaded.

    Raises:
        InfoFlowError: for what no part that is asked for has, and for values that cannot be.
    """
    parts, given = _load_parts(config), config.single_settings()
    for part in parts.values():
        part.check_settings(given)
    # parts of other packages need not say which probes they have
    if all(part.kinds or name in PARTS for name, part in parts.items()):
        check_names(given, [name for part in parts.values() for name in part.kinds])


def choose_parts_with_data(
    parts: Mapping[str, Part], context: RunContext, say: Say, if_possible: bool = False
) -> dict[str, Part]:
    """Choose the parts that the sequences are enough for, with settings that these parts accept.

    Those that read the loss of the next token are left out, too, where the model has none.

    Args:
        parts: by name, those that the model can give.
        context: of the run.
        say: called with a line for every part that is left out.
        if_possible: leave out what is asked for and the sequences are too few for.

    Raises:
        InfoFlowError: for a part that is asked for and that the sequences are too few for; for
            settings that a part refuses.
    """
    enough = _choose(
        parts, lambda name, part: _lacking(name, part, context), context.config, say, if_possible
    )
    for part in enough.values():
        part.check(context)
        extent = (context.batches if part.sequences == "all" else context.detail).extent
        if extent is not None:
            check_extent(context.model, list(_probes_of(part, context).values()), extent)
    named = [name for part in enough.values() for name in _probes_of(part, context)]
    check_names(context.config.single_settings(), named)
    return enough


def _lacking(name: str, part: Part, context: RunContext) -> str:
    """Say why the sequences are not enough for a part, or have no next-token loss that it reads."""
    if part.next_token:
        reason = NextTokenLoss().explain_lack(context.model, context.detail.shortest)
        if reason:
            return f"{name} reads the loss of the next token, and {reason}"
    return part.lacking_of_data(context)


def _probes_of(part: Part, context: RunContext) -> dict[str, Probe[Any]]:
    """Return the probes of a part, with the settings that the run has for them."""
    return apply_settings(part.probes(context), context.config.single_settings(), part.fixed)


def code_of_own(parts: Mapping[str, Part], context: RunContext) -> dict[str, str]:
    """Return the digests of the code of parts and probes that are the user's own, by name."""
    kinds: dict[str, type] = {name: type(part) for name, part in parts.items()}
    for part in parts.values():
        kinds |= {name: type(each) for name, each in _probes_of(part, context).items()}
    return {name: code_digest(kind) for name, kind in kinds.items() if is_own(kind)}


def _choose(
    parts: Mapping[str, Part],
    lacking: Callable[[str, Part], str],
    config: ProbingConfig,
    say: Say,
    if_possible: bool,
) -> dict[str, Part]:
    """Choose the parts that lack nothing; say which are left out, or refuse those asked for."""
    chosen: dict[str, Part] = {}
    for name, part in parts.items():
        why = lacking(name, part)
        # a part is left out with what it builds on
        missing = [other for other in part.after if other not in chosen]
        if not why and missing:
            why = f"{name} needs {', '.join(missing)}, which is not measured"
        if not why:
            chosen[name] = part
        elif config.probes is None or if_possible:
            say(f"left out: {why}")
        else:
            rest = ",".join(other for other in config.probes if other != name) or "other probes"
            raise InfoFlowError(f"{why}. Ask for {rest}")
    if parts and not chosen:
        reasons = [lacking(name, part) for name, part in parts.items()]
        raise InfoFlowError(
            f"nothing can be measured: {next(filter(None, reasons))}; expected a model and data "
            "for which at least one probe can run"
        )
    return chosen


def _why_not(name: str, part: Part, capabilities: ModelCapabilities) -> str:
    """Say why a part cannot be measured on a model; empty if it can."""
    where = where_lacking(capabilities, part.lacking)
    return f"{name} cannot be measured {where}" if where else ""


def measure_parts(
    folder: RunFolder, parts: Mapping[str, Part], context: RunContext, say: Say
) -> dict[str, Any]:
    """Measure all parts, and the probes from which predictions are made; read finished ones.

    Args:
        folder: of the run.
        parts: by name.
        context: of the run.
        say: called with a line for every part that begins.

    Raises:
        InfoFlowError: for parts on disk that are spoiled or of another run, and for what probes
            refuse.
        KeyboardInterrupt: after the batch in which Ctrl-C came; finished batches are kept.
    """
    found: dict[str, Any] = {}
    # one set of processes for the shards of probes, and for parts
    with context.executor.keep_processes() as executor:
        context = replace(context, executor=executor)
        for which in ("all", "detail"):  # probes of several parts share their passes
            # what has several shards is spread by these, and comes first; workers leave the
            # results of other parts in the folder
            if context.executor.jobs > 1 and (which == "detail" or not _has_shards(context)):
                _measure_in_workers(folder, parts, context, say)
            wanted: dict[str, Probe[Any]] = {}
            for part in parts.values():
                of_part = _probes_of(part, context) if part.sequences == which else {}
                twice = ", ".join(wanted.keys() & of_part.keys())
                if twice:
                    raise InfoFlowError(
                        f"{type(part).__name__} names a probe {twice!r}, as another part does: "
                        "expected a name of its own; rename it in the package that adds it"
                    )
                wanted |= of_part
            found |= _run_together(folder, which, wanted, context, say)
    for name, part in parts.items():
        if name not in found:
            # parts without probes may read what the probes have found
            now = replace(context, found=dict(found))
            found[name] = _measure_part(folder, name, part, now, say)
    return found


@dataclass(frozen=True)
class _PartsTask:
    """All that a worker needs to measure some parts, behind others that are finished."""

    out: Path
    parts: Mapping[str, Part]
    rows: StoredSequences
    config: ProbingConfig
    fingerprint: str
    n_processes: int


def _measure_in_workers(
    folder: RunFolder, parts: Mapping[str, Part], context: RunContext, say: Say
) -> None:
    """Let workers measure parts at the same time, each as soon as those are that it reads.

    What is spread by shards is left out.
    """
    rows = context.batches.rows
    if not isinstance(rows, StoredSequences):
        return
    groups = list(_divide(parts, context))

    def needs(some: Mapping[str, Part]) -> set[str]:
        read = {name for part in some.values() for name in (*part.after, *part.reads)}
        return read.intersection(parts) - some.keys()

    needed = {name for some in groups for name in needs(some)}
    # those that others wait for go first
    waiting = sorted(groups, key=lambda some: not needed & some.keys())
    # parts of no group are spread by shards, and were measured before these
    finished = {n: part for n, part in parts.items() if not any(n in some for some in groups)}
    n_with_probes = sum(any(_probes_of(p, context) for p in some.values()) for some in groups)
    # processes that hold what probes gather at the same time share the memory
    n_processes = max(1, min(context.executor.jobs, n_with_probes))

    def units() -> Iterator[Unit | None]:
        while waiting:
            some = next((some for some in waiting if needs(some) <= finished.keys()), None)
            if some is None:
                yield None  # until what it reads is measured
                continue
            waiting.remove(some)
            if all(folder.holds(f"{name}.json") for name in some):
                finished.update(some)
                continue
            say(", ".join(some))
            # the worker reads finished parts from disk, as these need results of theirs
            every = {**finished, **some} if needs(some) else some
            about = context.config, context.fingerprint, n_processes
            yield Unit(", ".join(some), _PartsTask(folder.path, every, rows, *about))

    with (
        defer_interrupts() as stop_if_asked,
        context.executor.start_workers("finished parts are kept") as run,
    ):
        for measured in run(_measure_in_worker, units(), stop_if_asked):
            finished |= measured


def _divide(parts: Mapping[str, Part], context: RunContext) -> Iterator[dict[str, Part]]:
    """Divide parts by who shares passes, without those that are spread by shards."""
    shared = {name: bool(_probes_of(part, context)) for name, part in parts.items()}
    yield from ({name: part} for name, part in parts.items() if not shared[name])
    for which in ("detail", "all"):
        some = {n: part for n, part in parts.items() if shared[n] and part.sequences == which}
        if some and not (which == "all" and _has_shards(context)):
            yield some


def _has_shards(context: RunContext) -> bool:
    return (context.batches.n_sequences or 0) > context.config.shard


def _measure_in_worker(task: _PartsTask) -> Mapping[str, Part]:
    """Measure parts in a process of this machine, and write their results to the run's folder.

    Returns:
        The parts that are finished.

    Raises:
        InfoFlowError: for a model whose weights have changed since the run began, and as parts do.
    """
    config, fingerprint = task.config, task.fingerprint
    model = load_in_worker(config, fingerprint).model
    folder = RunFolder(task.out)
    with let_own(folder):
        batches = Batches(model, task.rows, name=config.data)
        found = inspect_model(model, task.rows[0][None])
        n = task.n_processes
        context = RunContext(config, model, found, fingerprint, batches, False, n_processes=n)
        measure_parts(folder, task.parts, context, lambda line: None)
    return task.parts


def _run_together(
    folder: RunFolder,
    which: str,
    wanted: Mapping[str, Probe[Any]],
    context: RunContext,
    say: Say,
) -> dict[str, Any]:
    """Run probes that share forward passes, or read their results from disk if they are there."""
    finished = {name: _load_result(folder, name) for name in wanted}
    if all(result is not None for result in finished.values()):
        return finished
    checkpoint = Checkpoint(folder, f".{which}.safetensors")
    batches = context.batches if which == "all" else context.detail
    # the comparison reads what is measured of the first sequences, and so it stays whole
    gathered = run_in_shards(context, batches, wanted, checkpoint, say, to_disk=which == "all")
    found, failed = {}, []
    for name in wanted:
        try:
            found[name] = gathered.result(name)
        except NothingMeasuredError as error:
            # the error waits until other results are saved, which then need not be measured again
            failed.append(f"{name}: {error}")
            continue
        found[name].save(folder.path / name)
    if failed:
        gathered.keep(now=True)
        raise InfoFlowError("; ".join(failed))
    checkpoint.remove()
    return found


def _measure_part(
    folder: RunFolder, name: str, part: Part, context: RunContext, say: Say
) -> Result:
    """Measure a part that has no probes, or read its result from disk if it is there."""
    finished = _load_result(folder, name)
    if finished is not None:
        return finished
    say(name)
    checkpoint = Checkpoint(folder, f".{name}.safetensors")
    extent = context.batches.extent
    n, longest = (extent.n_sequences, extent.longest) if extent else (0, 0)
    try:
        with warn_if_long(say, name, min(n, context.config.n_detail), longest):
            result = part.measure(context, checkpoint)
    except BaseException:  # also after Ctrl-C: what was reached may not be in the file yet
        checkpoint.flush()
        raise
    if result is None:
        raise InfoFlowError(
            f"{type(part).__name__} gave neither a probe called {name!r} nor a result of its own: "
            "expected probes(context) with that name, or measure(context, checkpoint)"
        )
    result.save(folder.path / name)
    checkpoint.remove()
    return result


def _load_result(folder: RunFolder, name: str) -> Result | None:
    """Load the result of a part that is finished.

    Raises:
        InfoFlowError: if it is spoiled, or of another run.
    """
    if not folder.holds(f"{name}.json", f"{name}.safetensors"):
        return None
    return Result.load(folder.path / name)
