"""``infoflow-lens why``: why a head prefers one key to another."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from infoflow_lens.commands.common import (
    AsJson,
    Backend,
    Device,
    Dtype,
    Model,
    SecondText,
    Text,
    console,
    pair_of,
    print_lines,
    report_errors,
    say_json,
)
from infoflow_lens.commands.options import options_of


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
            table.add_row(part, f"{value:+.3f}", f"{share:.0%}")
        others = parts.iloc[rows:][["value", "share"]].sum()
        if len(parts) > rows:
            table.add_row(
                f"the other {len(parts) - rows}", f"{others.value:+.3f}", f"{others.share:.0%}"
            )
        out.print(table)
    print_lines("Notes", found.notes)
