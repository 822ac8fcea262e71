"""Options of a command are made of a settings class, whose ranges the class checks."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
import torch
import typer
from annotated_types import Ge
from typer.testing import CliRunner

from infoflow_lens.commands.common import options_of, report_errors
from infoflow_lens.foundation.settings import Count, Ranks, Remedy, Repeated, Share, settings


@settings
class Example:
    name: Annotated[str, "Name help."]
    n: Annotated[Count | None, "Number help."] = None
    size: Annotated[int, Ge(4), Remedy("in fours"), "Size help."] = 8
    share: Annotated[Share, "Share help."] = 0.5
    ranks: Annotated[Ranks, "Ranks help."] = (1, 2)
    mode: Annotated[Literal["fit", "use"], "Mode help."] = "fit"
    part: Annotated[tuple[str, ...], Repeated(), "Part help."] = ()


app = typer.Typer()


@app.command()
@options_of(Example, arguments=["name"])
def command(config: Callable[[], Any]) -> None:
    with report_errors():
        typer.echo(repr(config()))


def answer(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def test_options_are_typed_as_the_fields_are():
    assert answer("a").output.strip() == repr(Example("a"))
    given = ["--n", "3", "--size", "4", "--share", "1", "--ranks", "1,3", "--mode", "use"]
    given += ["--part", "a,b", "--part", "c"]
    expected = Example("a", 3, 4, 1.0, (1, 3), "use", ("a,b", "c"))
    assert answer("a", *given).output.strip() == repr(expected)


def test_ranges_beside_a_help_text_are_the_class_s():
    for words, told in (("--n 0", "n is 0"), ("--size 3", "in fours"), ("--share 2", "share is 2")):
        result = answer("a", *words.split())
        assert (result.exit_code, told in result.stderr) == (2, True)
    assert answer("a", "--n", "many").exit_code == 2


def test_the_help_is_the_text_alone():
    shown = answer("--help").output
    assert all(
        f"{word} help." in shown for word in ("Name", "Number", "Size", "Share", "Mode", "Part")
    )
    assert "Ge(" not in shown
    assert "in fours" not in shown


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
def test_memory_that_runs_out_anywhere_is_one_line_with_what_to_do(error, capsys):
    with pytest.raises(typer.Exit) as left, report_errors():
        raise error
    assert left.value.exit_code == 2
    assert "smaller batches" in capsys.readouterr().err


def test_other_errors_are_not_taken_for_a_lack_of_memory():
    with pytest.raises(RuntimeError, match="a bug"), report_errors():
        raise RuntimeError("a bug")
