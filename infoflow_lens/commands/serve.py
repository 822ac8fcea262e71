"""``infoflow-lens serve``: answers in a browser, where one asks again."""

from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Annotated

import typer

from infoflow_lens.commands.ask import Question
from infoflow_lens.commands.common import Device, Dtype, Quiet, report_errors, say
from infoflow_lens.commands.options import options_of


@options_of(Question, arguments=("model", "text"))
def serve(
    config: Callable[[], Question],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of this machine; default, a free one.")
    ] = 0,
    idle: Annotated[
        float | None,
        typer.Option(min=0, max=1e6, help="End after so many minutes without a question."),
    ] = None,
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

        question = config()

        def measure(form: Form) -> Answer:
            asked = replace(
                question, text=form.text, answer=form.answer or None, against=form.against or None,
                instead=form.instead or None, at=place_of(form.at), second=form.second or None,
                instead_second=form.instead_second or None,
            )  # fmt: skip
            return ask(**asked.arguments() | {"model": loaded}, progress=not quiet)

        def cut(found: Answer, lines: tuple[int, ...]) -> float:
            return cut_lines(loaded, found, lines)

        # the port is taken before the model loads, which takes longer
        with closing(AnswerServer(measure, port, cut)) as server:
            with hide_library_bars() if quiet else nullcontext():
                loaded = load_any(question.model, device=device, dtype=dtype, backend="opened")
            place = "" if question.at is None else str(question.at)
            words = (question.answer or "", question.against or "", question.instead or "")
            pair = (question.second or "", question.instead_second or "")
            first = Form(question.text, *words, place, *pair)
            seconds = None if idle is None else 60 * idle
            server.run(first, lambda: say(f"open {server.address} (Ctrl-C ends it)"), seconds)
