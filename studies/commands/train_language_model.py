"""`infoflow-lens train-language-model`: a small model of the standard library, made anew."""

from collections.abc import Callable
from dataclasses import field, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from infoflow_lens.commands.common import (
    Quiet,
    console,
    folder,
    help_texts,
    options_of,
    report_errors,
)
from infoflow_lens.studies.language_model.config import PRESETS, LanguageModelConfig, preset

# The same settings, each of which may be left to the preset.
Changes = make_dataclass(
    "Changes",
    [
        (name, Annotated[kind | None, help_texts(LanguageModelConfig)[name]], field(default=None))
        for name, kind in get_type_hints(LanguageModelConfig).items()
    ],
    frozen=True,
)


@options_of(Changes)
def train_language_model(
    config: Callable[[], Any],
    name: Annotated[str, typer.Argument(help=f"A preset: {', '.join(PRESETS)}.")],
    out: Annotated[
        Path,
        typer.Option(help="Folder for the model, checkpoints and numbers.", parser=folder),
    ],
    device: Annotated[str, typer.Option(help="Device of the training: cpu, cuda:0, ...")] = "cpu",
    quiet: Quiet = False,
) -> None:
    """Train a small language model on Python's standard library; run again to go on.

    Options that are not given are the preset's. With the same versions, text and threads the same
    command gives the same bytes on a CPU, also if it was stopped in between.
    """
    with report_errors():
        settings = preset(name)
        changes = {key: value for key, value in vars(config()).items() if value is not None}
        settings = replace(settings, **changes)
        from infoflow_lens.studies.language_model.training import (
            train_language_model as train,
        )

        trained = train(out, settings, name=name, device=device, progress=not quiet)
    say = console().print
    measured = trained.measured
    order, baseline = min(measured["ngram"]["test"].items(), key=lambda item: item[1])
    best = max(max(layer) for layer in measured["prefix_matching"])
    say(f"test loss {measured['loss']['test']:.3f} nats a token; {order}-gram {baseline:.3f}")
    say(f"repeated random tokens {measured['repeated_loss']:.2f} nats; prefix matching {best:.2f}")
    say(f"model and card: {trained.folder}", soft_wrap=True, markup=False)
