"""One look for every progress bar, in terminals, notebooks and pipes."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, runtime_checkable

_PAUSE = 0.5  # seconds that work lasts before a bar is worth showing
_PAUSE_OF_PIPES = 30.0  # seconds between two lines of a log


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
    """Show a bar on standard error of `total` steps, `done` of which lie behind, if `show`.

    In a notebook it is a widget where there are widgets, else a line of text; in a pipe or a file
    it is a line now and then. Work of a moment shows none. A total of None is one that nobody
    knows. Where standard error is closed, or cannot be written, the work goes on without a bar.
    """
    # a pipe is a file for somebody to read later: few lines
    seen = _is_seen()
    settings: dict[str, Any] = {} if seen else {"mininterval": _PAUSE_OF_PIPES}
    bar = quiet_tqdm()(
        desc=description,
        total=total,
        initial=done,
        disable=not show or sys.stderr is None,
        delay=_PAUSE,
        dynamic_ncols=True,
        file=sys.stderr,
        **settings,
    )

    def advance(steps: int = 1, status: str = "") -> None:
        # a reader of standard error that has gone away is no reason to stop
        with suppress(OSError):
            bar.set_postfix_str(status, refresh=False)
            bar.update(steps)
            if not steps and seen:
                bar.refresh()

    try:
        yield advance
    finally:
        with suppress(OSError):
            bar.close()


@contextmanager
def hide_library_bars() -> Iterator[None]:
    """Hide the progress bars of datasets and transformers for the length of a block."""
    import datasets
    from transformers.utils import logging

    before = datasets.are_progress_bars_disabled(), logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if not before[0]:
            datasets.enable_progress_bars()
        if before[1]:
            logging.enable_progress_bar()


def quiet_tqdm() -> Any:
    """Choose this place's bar: tqdm warns where a notebook has no widgets, and falls back to text.

    It does so once, when it is first imported.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tqdm.auto import tqdm
    return tqdm


def _is_seen() -> bool:
    """Say whether somebody looks at the bar while it moves: a terminal, or a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    return is_terminal or "IPKernelApp" in getattr(shell, "config", {})
