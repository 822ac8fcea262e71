"""``infoflow-lens why``: why a head prefers one key to another."""

from typing import Annotated, Any

import typer

from infoflow_lens.commands.common import (
    AsJson,
    Backend,
    Device,
    Dtype,
    console,
    integers,
    print_lines,
    report_errors,
    say_json,
)


def why(
    model: Annotated[
        str, typer.Argument(help="A name such as stdlib-2l or gpt2, owner/name, or a folder.")
    ],
    text: Annotated[str, typer.Argument(help="The text that the model reads.")],
    layer: Annotated[int, typer.Option(help="Layer of the head, from 0, or from -1 backwards.")],
    head: Annotated[int, typer.Option(help="The head, from 0, or from -1 backwards.")],
    query: Annotated[
        int, typer.Option(help="Position of the query, from 0, or from -1 backwards.")
    ] = -1,
    keys: Annotated[
        str | None,
        typer.Option(help="Positions of the two keys, such as 4,2; default, the two best."),
    ] = None,
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
        asked: Any = None if keys is None else integers(keys, "--keys")
        found = ask(
            model, text, layer, head, query, asked, device=device, dtype=dtype, backend=backend
        )
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
