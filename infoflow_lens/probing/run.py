"""Probe any model on any data: measure, predict, compare; finished parts stay on disk."""

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from infoflow_lens.foundation.files import atomic_path, writable_folder
from infoflow_lens.foundation.progress import no_bars_of_libraries
from infoflow_lens.foundation.record import RunRecord, fingerprint, model_fingerprint
from infoflow_lens.hooks import inspect_model
from infoflow_lens.hooks.model.inputs import Batches, readable_tokens
from infoflow_lens.models.loading import LoadedModel, load_any
from infoflow_lens.probing.compared import compared
from infoflow_lens.probing.config import ProbingConfig
from infoflow_lens.probing.data import read_data
from infoflow_lens.probing.folder import check_folder, claim_folder, write_tables
from infoflow_lens.probing.measuring import measured, possible_parts
from infoflow_lens.probing.part import Say, Setting
from infoflow_lens.probing.result import ProbingResult


def run_probing(
    out: Path,
    config: ProbingConfig,
    progress: bool = True,
    say: Say = lambda line: None,
    loaded: LoadedModel | None = None,
    batches: Batches | None = None,
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
        loaded: the model, where it is in memory already.
        batches: the data, where they are in memory already.

    Raises:
        InfoFlowError: for bad settings, models or data, before work starts; for a folder with
            results of other settings; for what probes refuse. Finished parts stay on disk.
        KeyboardInterrupt: when it is stopped, with what to do to go on.
    """
    writable_folder(out)
    check_folder(out, config)
    with nullcontext() if progress else no_bars_of_libraries():
        if loaded is None:
            loaded = load_any(
                config.model, device=config.device, dtype=config.dtype, backend=config.backend
            )
        model = loaded.model
        if batches is None:
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
    parts = possible_parts(capabilities, config, say)
    say(f"{loaded.description}; {batches.n_sequences} sequences")
    record = RunRecord(
        config={**asdict(config), "inputs": fingerprint(contents)},
        seed=config.seed,
        model_fingerprint=model_fingerprint(model),
        weight_processing=capabilities.normalization,
    )
    claim_folder(out, record)
    with atomic_path(out / "inputs.safetensors") as temporary:
        save_file(contents, temporary)
    setting = Setting(config, model, capabilities, batches, progress)
    for part in parts.values():
        part.check(setting)
    try:
        found = measured(out, parts, setting, say)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"finished batches are kept in {str(out)!r}; run the same again to go on"
        ) from None
    agreement, predicted, curve = compared(found)
    result = ProbingResult(
        out=out,
        config=config,
        capabilities=capabilities,
        parts=parts,
        found=found,
        agreement=agreement,
        curve=curve,
        texts=readable_tokens(model, batches.first(config.n_shown).sequences()),
        predicted=predicted,
        record=record,
    )
    write_tables(out, result)
    result.report(out / "report.html")
    return result


def _contents(batches: Batches) -> dict[str, Tensor]:
    whole = batches.whole()
    return {"tokens": whole.tokens.contiguous(), "lengths": whole.mask().sum(dim=1)}
