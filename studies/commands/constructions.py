"""`infoflow-lens constructions`: the models whose weights are set by hand."""

from infoflow_lens.commands.common import console, report_errors


def constructions() -> None:
    """List the models whose weights are set by hand, for build_construction."""
    from rich.table import Table

    with report_errors():
        from infoflow_lens.studies.constructions import CONSTRUCTIONS

    table = Table(show_lines=True)
    table.add_column("construction", no_wrap=True)
    table.add_column("task and parameters of its own")
    table.add_column("what it is, and source")
    for name, construction in CONSTRUCTIONS.items():
        own = [f"{key}={value!r}" for key, value in construction.parameters.items()]
        table.add_row(
            name,
            "\n".join([f"task {construction.task}", *own]),
            f"{construction.summary}\n{construction.source}",
        )
    console(markup=False).print(table)
