"""The command line. Commands import what they need when they run, so that --help is quick."""

import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from infoflow_lens.commands.common import (
    AsJson,
    Backend,
    Device,
    Dtype,
    Jobs,
    Quiet,
    folder,
    options_of,
    print_lines,
    repeat_command,
    say,
    say_json,
)
from infoflow_lens.commands.common import console as make_console
from infoflow_lens.commands.common import report_errors as _report_errors
from infoflow_lens.commands.texts import ask, flow, serve, why
from infoflow_lens.commands.theory import design, estimate
from infoflow_lens.foundation.display import printable
from infoflow_lens.foundation.errors import InfoFlowWarning
from infoflow_lens.foundation.streams import open_streams
from infoflow_lens.probing.config import Model, ProbingConfig, SurveyConfig

app = typer.Typer(
    name="infoflow-lens",
    help="Which input tokens can a hidden state depend on, which does it depend on, and is that "
    "what theory allows?",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


ReportFolder = Annotated[
    Path, typer.Option(help="Folder for results and the report.", parser=folder)
]
ProbeScheduler = Annotated[
    str | None, typer.Option(help="Address of a dask scheduler whose workers measure instead.")
]
ProbeThreads = Annotated[
    int | None,
    typer.Option(help="Threads of each process; default, one if there are several processes."),
]


def _show_version(value: bool) -> None:
    if value:
        from infoflow_lens import __version__

        say(f"infoflow-lens {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


@app.command("inspect", short_help="Show what a model is, and what can be measured on it.")
def inspect_command(
    model: Annotated[str, typer.Argument(help=get_args(Model)[1])],
    device: Device = "cpu",
    dtype: Dtype = None,
    backend: Backend = "auto",
    as_json: AsJson = False,
) -> None:
    """Find out by running a model what it is and what can be measured on it."""
    with _report_errors():
        from infoflow_lens.hooks.model.capabilities import inspect_model
        from infoflow_lens.hooks.model.inputs import example_input, local_window
        from infoflow_lens.models.loading import load_any

        loaded = load_any(model, device=device, dtype=dtype, backend=backend)
        example = example_input(loaded.model)
        found = inspect_model(loaded.model, example)
    # for programs all of it, in a stable order of names
    if as_json:
        about = {"source": loaded.source, "description": loaded.description}
        say_json({**about, **found.to_dict()})
        return
    notes = []
    if loaded.tokenizer is None and not found.reads_vectors:
        notes.append("it has no tokenizer: give token ids, not text")
    # a window longer than the example closes no key there
    if local_window(loaded.model) > example.shape[1]:
        notes.append(
            f"its window of {local_window(loaded.model)} positions is longer than the "
            f"{example.shape[1]} tokens that it was run on, and does not show"
        )
    if not found.starts_at_layers:
        notes.append("a pass cannot start at a layer: influence runs all layers, and takes longer")
    _print_inspection(loaded.description, found, notes)


def _print_inspection(description: str, found: Any, notes: list[str]) -> None:
    from rich.table import Table

    console = make_console()
    console.print(description, markup=False, soft_wrap=True)
    # layers alike share a column
    kinds = found.kinds()
    table = Table()
    table.add_column("layers", no_wrap=True)
    for label in kinds:
        table.add_column(label)
    mlp = {True: "parallel to attention", False: "after attention", None: "-"}
    rows = {
        "heads": [layer.n_heads for layer in kinds.values()],
        "heads of keys and values": [layer.n_key_value_heads for layer in kinds.values()],
        "attention": [layer.attends for layer in kinds.values()],
        "pattern": [layer.pattern for layer in kinds.values()],
        "hook_attn_scores carries": [
            "nothing" if layer.scores == "missing" else f"the {layer.scores}"
            for layer in kinds.values()
        ],
        "MLP": [mlp[layer.parallel] for layer in kinds.values()],
        "hooks that do not fire": ["\n".join(layer.missing) for layer in kinds.values()],
        "edits lost, wholly or in part": ["\n".join(layer.edits_lost) for layer in kinds.values()],
    }
    for label, values in rows.items():
        table.add_row(label, *("-" if value in (None, "") else str(value) for value in values))
    console.print(table)
    print_lines("Problems", found.problems())
    print_lines("Notes", notes)
    if not found.problems():
        console.print("No problems found: nothing above keeps a probe from measuring.")


def _add_probing(
    name: str, kind: type[Any], runner: str, text: str, short: str, *writes: str
) -> None:
    """Add a command that makes a probe run, with an option for each of its settings.

    Args:
        name: of the command.
        kind: of its settings.
        runner: the function of `infoflow_lens.probing.run` that runs.
        text, short: the help of the command, and in the list of commands.
        writes: files of its folder beside those of every probe run.
    """

    @app.command(name, help=text, short_help=short)
    @options_of(kind, arguments=("model",))
    def command(
        config: Callable[[], Any],
        context: typer.Context,
        out: ReportFolder,
        jobs: Jobs = 1,
        scheduler: ProbeScheduler = None,
        threads: ProbeThreads = None,
        quiet: Quiet = False,
    ) -> None:
        with _report_errors():
            from infoflow_lens.runs.folder import read_output

            settings = config()
            probing = settings.probing() if isinstance(settings, SurveyConfig) else settings
            # what a finished run has said is said again without loading its model
            said = read_output(out, probing.output_settings(), probing.sources(), writes)
            if said is None:
                run = getattr(import_module("infoflow_lens.probing.run"), runner)
                result = run(
                    out,
                    settings,
                    progress=not quiet,
                    say=lambda line: say(line, err=True),
                    jobs=jobs,
                    scheduler=scheduler,
                    n_threads=threads,
                    again=repeat_command(context),
                )
                said = result.to_output()
            else:
                say("finished before, on the same model and data", err=True)
        _print_probing(out, said)
        for file in writes:
            say(f"{Path(file).stem}: {out / file}")


_add_probing(
    "probe", ProbingConfig, "run_probing",
    "Measure what a model's states depend on, predict it, and compare; run again to go on.",
    "Probe any model on any data: measure, predict, compare.",
)  # fmt: skip
_add_probing(
    "survey", SurveyConfig, "run_survey",
    "Measure which mechanisms the heads of a language model need, whether they are enough, and "
    "whether InfoFlow's sets are what its states depend on. A preset of probe; run again to go on.",
    "Run every measurement on a language model.", "heads.csv",
)  # fmt: skip


def _print_probing(out: Path, said: dict[str, Any]) -> None:
    from rich.table import Table

    console = make_console(markup=False)
    for sentence in said["sentences"]:
        console.print(sentence)
    if said["rows"]:
        columns = ("sets predicted by", "influence inside", "by chance", "AUROC")
        table = Table(*columns, "tokens in the set", title=said["title"])
        for row in said["rows"]:
            table.add_row(*row)
        console.print(table)
    console.print(f"report: {out / 'report.html'}", soft_wrap=True)
    console.print(f"numbers: {out}", soft_wrap=True)


@app.command(short_help="List the tasks, or print the dataset card of one.")
def tasks(
    name: Annotated[str | None, typer.Argument(help="The task whose card is printed.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the tasks, or print the dataset card of one."""
    with _report_errors():
        from infoflow_lens.tasks import dataset_card, list_tasks, load_task

        known = [load_task(each) for each in (list_tasks() if name is None else [name])]
        if name is not None and not as_json:
            say(str(dataset_card(known[0])))
            return
    rows: list[dict[str, Any]] = [
        {
            "name": task.name,
            "input": task.input_kind,
            "source": task.source,
            "parameters": task.parameters(),
            "dimension": task.comparison.dimension if task.comparison else None,
            "order": task.comparison.order if task.comparison else None,
        }
        for task in known
    ]
    if as_json:
        say_json(rows)
        return
    from rich.table import Table

    table = Table(show_lines=True)
    table.add_column("task and source", min_width=28)
    table.add_column("input", no_wrap=True)
    table.add_column("parameters", no_wrap=True)
    table.add_column("dim, order", justify="center")
    for row in rows:
        parameters = "\n".join(f"{key}={value!r}" for key, value in row["parameters"].items())
        compared = f"{row['dimension']}, {row['order']}" if row["order"] is not None else "-"
        table.add_row(
            f"[bold]{row['name']}[/bold]\n{row['source']}", row["input"], parameters, compared
        )
    make_console().print(table)


app.command(short_help="Draw what can reach a state of a text, and what does.")(flow)
app.command(short_help="Why this answer and not that one: words, states, heads, paths.")(ask)
app.command(short_help="Answer as ask does, in a browser, and ask again there.")(serve)
app.command(short_help="Split the reason why a head prefers one key to another.")(why)
app.command(short_help="Estimate what a task costs an architecture, before training.")(estimate)
app.command(short_help="Find the smallest architectures that the theory allows.")(design)


# The studies bring commands of their own, where they are installed; nothing else knows of them.
if find_spec("infoflow_lens.studies"):
    import_module("infoflow_lens.studies.commands").add_commands(app)


_as_python = warnings.formatwarning


def main() -> None:
    """Run ``infoflow-lens``, as its entry point."""
    open_streams()
    warnings.formatwarning = _as_sentence
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except OSError as error:  # what is printed has no room, as in a file on a full disk
        with suppress(OSError):
            say(f"error: the output cannot be written ({error.strerror}): expected room", err=True)
        os._exit(2)  # else Python flushes the output once more, and fails again


def _as_sentence(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: Any = None
) -> str:
    """Return a warning of ours without the place in the code; others as Python shows them."""
    if issubclass(category, InfoFlowWarning):
        return f"Note: {printable(str(message))}\n"
    return _as_python(message, category, filename, lineno, line)


if __name__ == "__main__":
    main()
