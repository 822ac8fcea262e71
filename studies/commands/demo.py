"""`infoflow-lens demo`: first light."""

from pathlib import Path
from typing import Annotated

import typer

from infoflow_lens.commands.common import Device, Quiet, console, folder, report_errors


def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for the report and the numbers.", parser=folder)
    ],
    seed: Annotated[int, typer.Option(help="Seed of the target, the weights and the data.")] = 0,
    device: Device = "cpu",
    quiet: Quiet = False,
) -> None:
    """Train a small model, probe it, predict it, and show where the two agree (about a minute)."""
    from rich.table import Table

    with report_errors():
        from infoflow_lens.studies.demo import DemoConfig, run_demo, verdict

        result = run_demo(out, DemoConfig(seed=seed), device=device, progress=not quiet)

    table = Table(title=f"validation NMSE {result.summary['nmse']:.2e}", title_justify="left")
    table.add_column("")
    table.add_column("initial", justify="right")
    table.add_column("trained", justify="right")
    for label, (initial, trained) in verdict(result.summary).items():
        table.add_row(label, f"{initial:.3f}", f"{trained:.3f}")
    out_ = console()
    out_.print(table)
    out_.print(f"report: {result.out / 'report.html'}", soft_wrap=True, markup=False)
    out_.print(f"numbers: {result.out / 'summary.json'}", soft_wrap=True, markup=False)
