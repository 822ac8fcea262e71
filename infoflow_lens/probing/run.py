"""Probe any model on any data: measure, predict, compare; finished parts stay on disk."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from infoflow_lens.foundation.files import atomic_path, locked, write_text
from infoflow_lens.foundation.record import (
    RunRecord,
    configuration_fingerprint,
    fingerprint,
    model_fingerprint,
    tokenizer_fingerprint,
)
from infoflow_lens.hooks import inspect_model
from infoflow_lens.hooks.model.inputs import Batches
from infoflow_lens.models.loading import LoadedModel, load_any
from infoflow_lens.probing.compared import compared
from infoflow_lens.probing.config import ProbingConfig
from infoflow_lens.probing.data import read_data
from infoflow_lens.probing.folder import check_folder, claim_folder, write_tables
from infoflow_lens.probing.measuring import measured, possible_parts
from infoflow_lens.probing.page import report_of
from infoflow_lens.probing.part import Say, Setting
from infoflow_lens.probing.result import ProbingResult
from infoflow_lens.report.probing import render_probing


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
        InfoFlowError: for bad settings, models or data, before work starts; for a folder that
            another run writes to, with results of a run on other weights, configuration,
            tokenizer, data, settings or versions, or with spoiled files; for what probes refuse,
            and for a full disk. Finished parts stay on disk.
        KeyboardInterrupt: when it is stopped, with what to do to go on.
    """
    with locked(out, "infoflow-lens probe"):
        return _run(out, config, progress, say)


def _run(out: Path, config: ProbingConfig, progress: bool, say: Say) -> ProbingResult:
    check_folder(out, config)
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
    parts = possible_parts(capabilities, config, say)
    say(f"{loaded.description}; {batches.n_sequences} sequences")
    record = RunRecord(
        config={
            **asdict(config),
            "inputs": fingerprint(contents),
            "tokenizer": tokenizer_fingerprint(loaded.tokenizer),
        },
        seed=config.seed,
        model_fingerprint=model_fingerprint(model),
        configuration_fingerprint=configuration_fingerprint(model),
        weight_processing=capabilities.normalization,
    )
    of_run = claim_folder(out, record)
    with atomic_path(out / "inputs.safetensors") as temporary:
        save_file(contents, temporary)
    setting = Setting(config, model, capabilities, batches, progress)
    for part in parts.values():
        part.check(setting)
    try:
        found = measured(out, parts, setting, of_run, say)
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
        texts=_texts(loaded, batches, config.n_shown),
        predicted=predicted,
        record=record,
    )
    write_tables(result)
    write_text(out / "report.html", render_probing(report_of(result)))
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


def _contents(batches: Batches) -> dict[str, Tensor]:
    whole = batches.whole()
    return {"tokens": whole.tokens.contiguous(), "lengths": whole.mask().sum(dim=1)}


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
