"""Measuring the parts of a run, each read from disk where it is finished."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from infoflow_lens.foundation.errors import InfoFlowError, NothingMeasuredError
from infoflow_lens.hooks import ModelCapabilities, Probe, Result
from infoflow_lens.hooks.passes.run import check_extent
from infoflow_lens.probing.checkpoint import Checkpoint
from infoflow_lens.probing.config import ProbingConfig
from infoflow_lens.probing.own_settings import check_named, with_own_settings
from infoflow_lens.probing.part import Part, Say, Setting
from infoflow_lens.probing.patience import word_if_long
from infoflow_lens.probing.registry import load_part, part_names
from infoflow_lens.probing.shards import run_in_shards
from infoflow_lens.runs.folder import RunFolder


def possible_parts(
    capabilities: ModelCapabilities, config: ProbingConfig, say: Say, if_possible: bool = False
) -> dict[str, Part]:
    """The parts that are asked for, or all that the model can give, in the order of the report.

    Args:
        capabilities: of the model.
        config: of the run.
        say: told what is left out.
        if_possible: leave out what is asked for and the model cannot give.

    Raises:
        InfoFlowError: for one that is asked for and that the model cannot give, with the reason.
    """
    possible: dict[str, Part] = {}
    for name in part_names():
        if config.probes is not None and name not in config.probes:
            continue
        part = load_part(name)
        if config.probes is None and not part.by_default:
            continue
        why = _why_not(name, part, capabilities, possible)
        if why:
            _leave_out(name, why, config, say, if_possible)
        else:
            possible[name] = part
    return possible


def parts_with_enough_data(
    parts: Mapping[str, Part], setting: Setting, say: Say, if_possible: bool = False
) -> dict[str, Part]:
    """The parts that the sequences are enough for, with settings that these parts accept.

    Args:
        parts: by name, those that the model can give.
        setting: what they are to be measured on.
        say: told what is left out.
        if_possible: leave out what is asked for and the sequences are too few for.

    Raises:
        InfoFlowError: for a part that is asked for and that the sequences are too few for; for
            settings that a part refuses.
    """
    enough: dict[str, Part] = {}
    for name, part in parts.items():
        why = part.lacking_of_data(setting) or _missing(name, part, enough)
        if why:
            _leave_out(name, why, setting.config, say, if_possible)
            continue
        part.check(setting)
        extent = (setting.batches if part.sequences == "all" else setting.detail).extent
        if extent is not None:
            check_extent(setting.model, list(_probes_of(part, setting).values()), extent)
        enough[name] = part
    named = [name for part in enough.values() for name in _probes_of(part, setting)]
    check_named(setting.config.own_settings(), named)
    return enough


def _probes_of(part: Part, setting: Setting) -> dict[str, Probe[Any]]:
    """The probes of a part, with the settings that the run has for them."""
    config = setting.config
    options = [item.name for item in fields(config)]
    return with_own_settings(part.probes(setting), config.own_settings(), options)


def _leave_out(name: str, why: str, config: ProbingConfig, say: Say, if_possible: bool) -> None:
    """Say that a part is left out, or refuse it where it was asked for."""
    if config.probes is not None and not if_possible:
        rest = ",".join(other for other in config.probes if other != name) or "other probes"
        raise InfoFlowError(f"{why}. Ask for {rest}")
    say(f"left out: {why}")


def _why_not(
    name: str, part: Part, capabilities: ModelCapabilities, possible: Mapping[str, Part]
) -> str:
    reason = part.lacking_of_model(capabilities)
    if reason:
        return f"{name} cannot be measured on this {capabilities.kind}: {reason}"
    reasons = {str(i): part.lacking(layer) for i, layer in enumerate(capabilities.layers)}
    lacking = [layer for layer, reason in reasons.items() if reason]
    if lacking:
        return (
            f"{name} cannot be measured in layers {', '.join(lacking)} of this "
            f"{capabilities.kind}: {reasons[lacking[0]]}"
        )
    return _missing(name, part, possible)


def _missing(name: str, part: Part, possible: Mapping[str, Part]) -> str:
    missing = [other for other in part.after if other not in possible]
    return f"{name} needs {', '.join(missing)}, which is not measured" if missing else ""


def measured(
    folder: RunFolder, parts: Mapping[str, Part], setting: Setting, say: Say
) -> dict[str, Any]:
    """The results of all parts, and of the probes that predictions are made from.

    Args:
        folder: of the run.
        parts: by name.
        setting: what they are measured on.
        say: called with a line for every part that begins.

    Raises:
        InfoFlowError: for parts on disk that are spoiled or of another run, and for what probes
            refuse.
        KeyboardInterrupt: behind the batch in which it was asked for; what was measured is kept.
    """
    found: dict[str, Any] = {}
    for which in ("all", "detail"):  # probes of several parts share their passes
        wanted: dict[str, Probe[Any]] = {}
        for part in parts.values():
            mine = _probes_of(part, setting) if part.sequences == which else {}
            twice = ", ".join(wanted.keys() & mine.keys())
            if twice:
                raise InfoFlowError(
                    f"{type(part).__name__} names a probe {twice!r}, as another part does: "
                    "expected a name of its own; rename it in the package that adds it"
                )
            wanted |= mine
        found |= _probed(folder, which, wanted, setting, say)
    for name, part in parts.items():
        if name not in found:
            now = replace(setting, found=dict(found))
            found[name] = _measured(folder, name, part, now, say)
    return found


def _probed(
    folder: RunFolder,
    which: str,
    wanted: Mapping[str, Probe[Any]],
    setting: Setting,
    say: Say,
) -> dict[str, Any]:
    """The results of probes that share their passes, read from disk if they are there."""
    finished = {name: _finished(folder, name) for name in wanted}
    if all(result is not None for result in finished.values()):
        return finished
    checkpoint = Checkpoint(folder, f".{which}.safetensors")
    batches = setting.batches if which == "all" else setting.detail
    # the comparison reads what is measured of the first sequences, and so it stays whole
    gathered = run_in_shards(setting, batches, wanted, checkpoint, say, to_disk=which == "all")
    found, failed = {}, []
    for name in wanted:
        try:
            found[name] = gathered.result(name)
        except NothingMeasuredError as error:
            failed.append(f"{name}: {error}")
            continue
        found[name].save(folder.path / name)
    if failed:
        gathered.keep(now=True)
        raise InfoFlowError("; ".join(failed))
    checkpoint.remove()
    return found


def _measured(folder: RunFolder, name: str, part: Part, setting: Setting, say: Say) -> Result:
    """The result of a part that measures by itself, read from disk if it is there."""
    finished = _finished(folder, name)
    if finished is not None:
        return finished
    say(name)
    checkpoint = Checkpoint(folder, f".{name}.safetensors")
    extent = setting.batches.extent
    n, longest = (extent.n_sequences, extent.longest) if extent else (0, 0)
    with word_if_long(say, name, min(n, setting.config.n_detail), longest):
        result = part.measure(setting, checkpoint)
    if result is None:
        raise InfoFlowError(
            f"{type(part).__name__} gave neither a probe called {name!r} nor a result of its own: "
            "expected probes(setting) with that name, or measure(setting, checkpoint)"
        )
    result.save(folder.path / name)
    checkpoint.remove()
    return result


def _finished(folder: RunFolder, name: str) -> Result | None:
    """The result of a part that is finished.

    Raises:
        InfoFlowError: if it is spoiled, or of another run.
    """
    if not folder.holds(f"{name}.json", f"{name}.safetensors"):
        return None
    return Result.load(folder.path / name)
