"""`infoflow-lens survey`: every measurement on a language model, in one resumable run."""

import os
from pathlib import Path
from typing import Any

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import write_text
from infoflow_lens.foundation.memory import check_memory
from infoflow_lens.foundation.naming import find_model
from infoflow_lens.models.loading import DTYPES
from infoflow_lens.probing.config import FEWEST, SurveyConfig
from infoflow_lens.probing.measuring import possible_parts
from infoflow_lens.probing.page import per_head
from infoflow_lens.probing.part import RunContext, Say
from infoflow_lens.probing.run import ProbingResult, run_probing

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
    parts = possible_parts(context.capabilities, context.config, lambda line: None, True)
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
