"""One look for every progress bar."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


@runtime_checkable
class Advance(Protocol):
    """Moves a bar by `steps` and shows `status` at its end."""

    def __call__(self, steps: int = 1, status: str = "") -> None:
        """Move on."""
        ...


@contextmanager
def progress_bar(
    description: str, total: int | None, show: bool = True, done: int = 0
) -> Iterator[Advance]:
    """A bar on standard error of `total` steps, `done` of which lie behind; none if not `show`.

    A total of None is one that nobody knows.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not show) as bar:
        task = bar.add_task(description, total=total, completed=done, status="")

        def advance(steps: int = 1, status: str = "") -> None:
            bar.update(task, advance=steps, status=status)

        yield advance
