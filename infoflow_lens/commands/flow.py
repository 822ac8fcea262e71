"""``infoflow-lens flow``: the picture of what can reach a state, and what does, as one page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from infoflow_lens.commands.common import (
    AsJson,
    Backend,
    Device,
    DrawingSeed,
    Dtype,
    Overwrite,
    Quiet,
    SecondText,
    Text,
    console,
    pair_of,
    print_lines,
    report_errors,
    say,
    say_json,
)
from infoflow_lens.commands.options import options_of, read_integers
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import Repeated, settings
from infoflow_lens.probing.config import InfluenceKind, Model


@settings
class FlowOptions:
    """What `flow` draws, with the names of the function's arguments."""

    model: Model
    text: Annotated[
        tuple[str, ...], Repeated(), "The text that the model reads; several are shown one by one."
    ]
    position: Annotated[
        str,
        "Positions whose influence is measured, such as -1 or 4,7; all; auto: all where that takes "
        "seconds, else the last.",
    ] = "auto"
    influence: Annotated[
        Literal[InfluenceKind, "none"],
        "Exact Jacobians, an estimate of them, resample ablation or none; auto: exact where cheap.",
    ] = "auto"
    rule: Annotated[
        Literal["max_position", "top_k", "mechanisms"],
        "What a head passes on: the token of its largest score, those of its k largest, or what "
        "its label says.",
    ] = "max_position"
    k: Annotated[int, "Tokens that a head passes on by the rule top_k."] = 3
    without: Annotated[
        tuple[int, ...], "Key positions that no head passes on, such as 0 for BOS, -1 for EOS."
    ] = ()
    max_length: Annotated[int | None, "Cut texts to this many tokens."] = None
    seed: DrawingSeed = 0
    second: SecondText = None


@options_of(FlowOptions, arguments=("model", "text"))
def flow(
    config: Callable[[], FlowOptions],
    with_text: Annotated[
        str | None, typer.Option("--with", help="Another text, to stand beside the one given.")
    ] = None,
    with_model: Annotated[
        str | None, typer.Option(help="Another model, to stand beside the one given.")
    ] = None,
    out: Annotated[Path, typer.Option(help="File of the page.")] = Path("flow.html"),
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

        asked: dict[str, Any] = dict(vars(config()))
        texts, position, second = list(asked["text"]), asked["position"], asked.pop("second")
        # a second text, a second model, or both stand beside the first
        is_comparison = with_text is not None or with_model is not None
        if is_comparison and len(texts) > 1:
            raise InfoFlowError(
                f"--with and --with-model stand beside one text: expected one, not {len(texts)}; "
                "put texts with spaces into quotes"
            )
        if second is not None and len(texts) > 1:
            raise InfoFlowError(
                f"--second is the second text of a pair: expected one text before it, not "
                f"{len(texts)}; put texts with spaces into quotes"
            )
        if position not in ("auto", "all"):
            asked |= {"position": read_integers(position.split(","), "--position")}
        if asked["influence"] == "none":
            asked |= {"influence": None}
        run = {"device": device, "dtype": dtype, "backend": backend, "progress": not quiet}
        inputs: list[dict[str, Any]] = [{"text": [pair_of(text, second) for text in texts]}]
        if is_comparison:
            beside = texts if with_text is None else [with_text]
            inputs.append({"text": [pair_of(text, second) for text in beside]})
            inputs[1] |= {} if with_model is None else {"model": with_model}
        flows = [make(**asked | one | run) for one in inputs]
        compared = compare_flows(flows[0], flows[1]) if is_comparison else None
        try:
            (compared or flows[0]).to_html(out, overwrite=overwrite)
        finally:  # also where the page cannot be written, on a full disk
            _say_found(flows, compared)
    say(f"page: {out}")


def _say_found(flows: Sequence[Any], compared: Any) -> None:
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


@dataclass(frozen=True)
class WhyOptions:
    """What `why` asks, with the names of the function's arguments."""

    model: Model
    text: Text
    layer: Annotated[int, "Layer of the head, from 0, or from -1 backwards."]
    head: Annotated[int, "The head, from 0, or from -1 backwards."]
    query: Annotated[int, "Position of the query, from 0, or from -1 backwards."] = -1
    keys: Annotated[
        tuple[int, ...] | None, "Positions of the two keys, such as 4,2; default, the two best."
    ] = None
    second: SecondText = None


@options_of(WhyOptions, arguments=("model", "text"))
def why(
    config: Callable[[], WhyOptions],
    rows: Annotated[
        int, typer.Option(help="Number of parts that are shown, the strongest first.")
    ] = 8,
    device: Device = "cpu",
    dtype: Dtype = None,
    backend: Backend = "auto",
    as_json: AsJson = False,
) -> None:
    """Split the difference of two attention scores over what wrote the query's and keys' states."""
    with report_errors():
        from infoflow_lens.flows.why import why as ask
        from infoflow_lens.foundation.settings import Count, check

        check(rows, Count, "--rows")
        asked: dict[str, Any] = dict(vars(config()))
        asked["text"] = pair_of(asked["text"], asked.pop("second"))
        found = ask(**asked, device=device, dtype=dtype, backend=backend)
    if as_json:
        tables = {f"by_{by}": found.table(by).to_dict("records") for by in ("key", "query")}
        place = {name: getattr(found, name) for name in ("layer", "head", "query", "keys")}
        about = {**place, "tokens": found.tokens, "margin": found.margin}
        say_json({**about, **tables})
        return
    _print(found, rows)


def _write(value: float) -> str:
    """Write what a part adds; of a small margin no part of 0.000 has 332% of it."""
    return f"{value:+.1e}" if 0 < abs(value) < 5e-4 else f"{value:+.3f}"


def _print(found: Any, rows: int) -> None:
    from rich.table import Table

    out = console()
    out.print(found.summary(), markup=False, soft_wrap=True)
    for by, title in (("key", "why this key"), ("query", "what the head looks for")):
        table = Table(title=title, title_justify="left")
        table.add_column(f"part of the {'keys' if by == 'key' else 'query'}")
        table.add_column("adds", justify="right")
        table.add_column("share", justify="right")
        parts = found.table(by)
        for part, value, share in parts.head(rows).itertuples(index=False):
            table.add_row(part, _write(value), f"{share:.0%}")
        others = parts.iloc[rows:][["value", "share"]].sum()
        if len(parts) > rows:
            table.add_row(
                f"the other {len(parts) - rows}", _write(others.value), f"{others.share:.0%}"
            )
        out.print(table)
    print_lines("Notes", found.notes)
