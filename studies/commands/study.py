"""`infoflow-lens study`: run one, list them, or write the pages of what was run."""

from pathlib import Path
from typing import Annotated

import typer

from infoflow_lens.commands.common import (
    Device,
    Jobs,
    Overwrite,
    Quiet,
    folder,
    repeat_command,
    report_errors,
    say,
)

StudyName = Annotated[str | None, typer.Argument(help="The study; --list shows all.")]
ListAll = Annotated[bool, typer.Option("--list", help="List the studies and their rules.")]
Preset = Annotated[
    str, typer.Option(help="Size of the runs: smoke, quick, full, or another one of --list.")
]
Seeds = Annotated[int | None, typer.Option(help="Number of seeds; default, the preset's.")]
StudyFolder = Annotated[
    Path | None,
    typer.Option(help="Folder for results; default results/NAME-PRESET.", parser=folder),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on: run only what the folder lacks.")]


def study(
    context: typer.Context,
    name: StudyName = None,
    list_all: ListAll = False,
    summary: Annotated[
        bool,
        typer.Option(
            "--summary",
            help="Write table.md of each run in --out, and the table of all into its README.md.",
        ),
    ] = False,
    overwrite: Overwrite = False,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Of studies of language models: a folder (with checkpoints/step-... where it has "
            "some), a name, or owner/name@revision,revision of the hub; may be repeated."
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Of the same: a file of held-out text, or rows with a column of texts; default, "
            "the part of this Python's standard library that stdlib-2l has not seen."
        ),
    ] = None,
    preset: Preset = "quick",
    seeds: Seeds = None,
    jobs: Jobs = 1,
    threads: Annotated[
        int, typer.Option(help="Threads of each run; another number rounds differently.")
    ] = 1,
    device: Device = "cpu",
    out: StudyFolder = None,
    scheduler: Annotated[
        str | None, typer.Option(help="Address of a dask scheduler whose workers run the study.")
    ] = None,
    together: Annotated[
        bool, typer.Option("--together", help="Train the seeds of a configuration as one batch.")
    ] = False,
    resume: Resume = False,
    quiet: Quiet = False,
) -> None:
    """Train or load models, measure, compare with the prediction, and judge by the stated rule."""
    with report_errors():
        from infoflow_lens.foundation.errors import InfoFlowError
        from infoflow_lens.studies.registry import STUDY_KINDS, find_study

        if list_all:
            for kind in STUDY_KINDS.values():
                say(f"{kind.name}: {kind.title}\n  {kind.source}\n  {kind().rule()}")
                say(f"  presets: {', '.join(kind.presets)}")
            return
        if summary:
            from infoflow_lens.studies.summary import summarise

            results = out or Path("docs/results")
            summarise(results, overwrite=overwrite)
            say(f"summary: {results / 'README.md'}")
            return
        if name is None:
            raise InfoFlowError(f"no study is named: expected one of {', '.join(STUDY_KINDS)}")
        from infoflow_lens.studies.sweep import run_study

        result = run_study(
            find_study(name, model or (), data),
            out or Path("results") / f"{name}-{preset}",
            preset=preset,
            seeds=seeds,
            jobs=jobs,
            n_threads=threads,
            device=device,
            resume=resume,
            scheduler=scheduler,
            together=together,
            progress=not quiet,
            again=repeat_command(context, "--resume"),
        )
        table = (result.out / "table.md").read_text(encoding="utf-8")
        say(table.rpartition("<!-- ")[0])  # without its signature
        say(f"numbers: {result.out}")
