"""``infoflow-lens flow``: the picture of what can reach a state, and what does, as one page."""

from pathlib import Path
from typing import Annotated, Any

import typer

from infoflow_lens.commands.common import (
    Backend,
    Device,
    Dtype,
    Overwrite,
    Quiet,
    integers,
    report_errors,
    say,
)
from infoflow_lens.foundation.errors import InfoFlowError


def flow(
    model: Annotated[
        str, typer.Argument(help="A name such as stdlib-2l or gpt2, owner/name, or a folder.")
    ],
    texts: Annotated[
        list[str],
        typer.Argument(help="The text that the model reads; several are shown one by one."),
    ],
    with_text: Annotated[
        str | None, typer.Option("--with", help="Another text, to stand beside the one given.")
    ] = None,
    with_model: Annotated[
        str | None, typer.Option(help="Another model, to stand beside the one given.")
    ] = None,
    out: Annotated[Path, typer.Option(help="File of the page.")] = Path("flow.html"),
    position: Annotated[
        str,
        typer.Option(
            help="Positions whose influence is measured, such as -1 or 4,7; all; auto: all "
            "where that takes seconds, else the last."
        ),
    ] = "auto",
    influence: Annotated[
        str, typer.Option(help="How to measure influence: auto, exact, estimate, resample or none.")
    ] = "auto",
    rule: Annotated[
        str, typer.Option(help="Rule by which heads pass on: max_position, top_k or mechanisms.")
    ] = "max_position",
    k: Annotated[int, typer.Option(help="Positions that a head passes on by the rule top_k.")] = 3,
    without: Annotated[
        str | None,
        typer.Option(help="Key positions that no head passes on, such as 0 for BOS, -1 for EOS."),
    ] = None,
    max_length: Annotated[int | None, typer.Option(help="Cut texts to so many tokens.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of all random draws.")] = 0,
    device: Device = "cpu",
    dtype: Dtype = None,
    backend: Backend = "auto",
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Draw what can reach the states of a text, beside what does: one page, to click through."""
    with report_errors():
        from infoflow_lens.foundation.documents import FLOW_PAGE

        FLOW_PAGE.check(out, overwrite=overwrite)
        from infoflow_lens.flows.comparing import compare_flows
        from infoflow_lens.flows.run import flow as make

        # a second text, a second model, or both stand beside the first
        is_comparison = with_text is not None or with_model is not None
        if is_comparison and len(texts) > 1:
            raise InfoFlowError(
                f"--with and --with-model stand beside one text: expected one, not {len(texts)}; "
                "put texts with spaces into quotes"
            )
        positions: Any = (
            position if position in ("auto", "all") else integers(position, "--position")
        )
        kind: Any = None if influence == "none" else influence
        rule_name: Any = rule
        inputs = [(model, texts)]
        if is_comparison:
            other = texts if with_text is None else [with_text]
            inputs.append((model if with_model is None else with_model, other))
        flows = [
            make(
                each,
                read,
                positions,
                None,
                kind,
                rule_name,
                k=k,
                without=() if without is None else integers(without, "--without"),
                max_length=max_length,
                seed=seed,
                device=device,
                dtype=dtype,
                backend=backend,
                progress=not quiet,
            )
            for each, read in inputs
        ]
        compared = compare_flows(flows[0], flows[1]) if is_comparison else None
        (compared or flows[0]).to_html(out, overwrite=overwrite)
    names = ("",) if compared is None else tuple(f"{name}: " for name in compared.names)
    for name, found in zip(names, flows, strict=True):
        say(name + found.summary())
    if compared is not None:
        say(compared.summary())
    # notes that both sides have are said once
    for note in dict.fromkeys(
        name + note for name, found in zip(names, flows, strict=True) for note in found.notes
    ):
        say(note, err=True)
    say(f"page: {out}")
