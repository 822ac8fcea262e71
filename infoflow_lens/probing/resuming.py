"""Probes over sequences, behind those that were seen before the run was stopped."""

from collections.abc import Mapping
from typing import Any

from infoflow_lens.foundation.errors import InfoFlowError, NothingMeasuredError
from infoflow_lens.foundation.interrupts import between_steps
from infoflow_lens.hooks import Probe, run_probes
from infoflow_lens.hooks.model.inputs import Batches
from infoflow_lens.probing.checkpoint import Checkpoint
from infoflow_lens.probing.part import Say, Setting


def run_on(
    setting: Setting,
    batches: Batches,
    probes: Mapping[str, Probe[Any]],
    checkpoint: Checkpoint,
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """The results of probes, run together behind the last sequence that the checkpoint holds.

    Args:
        setting: model, batch size and bar.
        batches: all sequences, those seen before too.
        probes: by name; they hold what was seen.
        checkpoint: where it stands; it is not removed.
        say: called with the probes' names and from where they go on.

    Raises:
        InfoFlowError: for a checkpoint of other probes, and for what probes refuse.
        NothingMeasuredError: if a probe saw nothing that it could measure.
        KeyboardInterrupt: behind the batch in which it was asked for; the state is on disk.
    """
    state = checkpoint.load()
    if state is not None:
        if not isinstance(state, dict) or state.keys() != probes.keys():
            raise InfoFlowError(
                f"the unfinished run in {str(checkpoint.path.parent)!r} is of other probes than "
                f"{', '.join(probes)}: expected the same; delete {checkpoint.path.name} to begin "
                "again"
            )
        for name, probe in probes.items():
            probe.load_state(state[name])
    all_probes = list(probes.values())
    seen = all_probes[0].n_sequences
    say(f"{', '.join(probes)}" + (f": going on behind {seen} sequences" if seen else ""))

    def now() -> dict[str, Any]:
        return {name: probe.state() for name, probe in probes.items()}

    try:
        with between_steps() as stop_if_asked:

            def after_batch(n: int) -> None:
                stop_if_asked()
                checkpoint.keep(now)

            results = run_probes(
                setting.model,
                batches,
                all_probes,
                batch_size=setting.config.batch_size,
                skip=seen,
                after_batch=after_batch,
                progress=setting.progress,
            )
    except NothingMeasuredError:
        raise
    except BaseException:
        counts = {probe.n_sequences for probe in all_probes}
        if len(counts) == 1 and counts != {0}:
            checkpoint.save(now())
        raise
    return dict(zip(probes, results, strict=True))
