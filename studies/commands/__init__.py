"""The commands of studies, which the command line finds where studies are installed."""

import typer

from infoflow_lens.studies.commands.certify import certify
from infoflow_lens.studies.commands.constructions import constructions
from infoflow_lens.studies.commands.demo import demo
from infoflow_lens.studies.commands.study import study
from infoflow_lens.studies.commands.train_language_model import train_language_model


def add_commands(app: typer.Typer) -> None:
    """Add the commands of studies to a command line."""
    app.command(short_help="Train a small model, probe it, predict it, compare.")(demo)
    app.command(short_help="List the models whose weights are set by hand.")(constructions)
    app.command(short_help="Decide whether one layer can fit labelled sequences, with proof.")(
        certify
    )
    app.command(short_help="Reproduce the papers, or put their open questions to language models.")(
        study
    )
    app.command(short_help="Train a small language model on Python's standard library.")(
        train_language_model
    )
