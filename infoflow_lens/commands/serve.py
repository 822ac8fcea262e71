"""``infoflow-lens serve``: answers in a browser, where one asks again."""

from contextlib import closing, nullcontext
from typing import Annotated

import typer

from infoflow_lens.commands.ask import (
    Against,
    AnswerWord,
    At,
    Exact,
    Instead,
    Model,
    Quick,
    Seed,
    Text,
)
from infoflow_lens.commands.common import Device, Dtype, Quiet, report_errors, say


def serve(
    model: Model,
    text: Text,
    answer: AnswerWord = None,
    against: Against = None,
    instead: Instead = None,
    at: At = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of this machine; default, a free one.")
    ] = 0,
    idle: Annotated[
        float | None,
        typer.Option(min=0, max=1e6, help="End after so many minutes without a question."),
    ] = None,
    quick: Quick = False,
    exact: Exact = False,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: Dtype = None,
    quiet: Quiet = False,
) -> None:
    """Answer as ask does, on a page with a form for other texts and answers, until Ctrl-C.

    Nobody but a browser on this machine that has the printed address can open the page.
    """
    with report_errors():
        from infoflow_lens.flows.answer import Answer
        from infoflow_lens.flows.ask import ask, cut_lines
        from infoflow_lens.flows.serve import AnswerServer, place_of
        from infoflow_lens.foundation.progress import hide_library_bars
        from infoflow_lens.models.loading import load_any
        from infoflow_lens.report.answer import Form

        def measure(form: Form) -> Answer:
            return ask(
                loaded, form.text, form.answer or None, form.against or None, form.instead or None,
                at=place_of(form.at), quick=quick, exact=exact, seed=seed, progress=not quiet,
            )  # fmt: skip

        def cut(found: Answer, lines: tuple[int, ...]) -> float:
            return cut_lines(loaded, found, lines)

        # the port is taken before the model loads, which takes longer
        with closing(AnswerServer(measure, port, cut)) as server:
            with hide_library_bars() if quiet else nullcontext():
                loaded = load_any(model, device=device, dtype=dtype, backend="opened")
            place = "" if at is None else str(at)
            first = Form(text, answer or "", against or "", instead or "", place)
            seconds = None if idle is None else 60 * idle
            server.run(first, lambda: say(f"open {server.address} (Ctrl-C ends it)"), seconds)
