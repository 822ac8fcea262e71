"""Answer: why this and not that, as a result that shows itself."""

import os
from dataclasses import dataclass
from pathlib import Path

from infoflow_lens.foundation.display import panel
from infoflow_lens.foundation.documents import ANSWER_PAGE
from infoflow_lens.hooks.answer.result import AnswerNumbers

_ROWS = 12  # in a notebook


@dataclass(frozen=True, eq=False, kw_only=True)
class Answer(AnswerNumbers):
    """Why a model gives this answer and not that one, in one text; see :func:`ask`.

    ``to_frame`` has the numbers ("tokens", "replacements", "states", "heads", "paths", "looks"),
    ``summary()``, ``bundles()`` and ``nearest_order()`` say them.
    """

    def to_html(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the answer as a page, which needs no network.

        Args:
            path: of the page.
            overwrite: whether a file that is no such page, or one that was edited, may be replaced.

        Returns:
            The file.

        Raises:
            InfoFlowError: if the file cannot be written, or another one stands in its place.
        """
        from infoflow_lens.report.answer import render_answer

        ANSWER_PAGE.check(path, overwrite=overwrite)  # before the page is made
        return ANSWER_PAGE.write(path, render_answer(self), overwrite=overwrite)

    def _repr_html_(self) -> str:
        facts = {"": self.summary(), "passes": f"{self.forwards:.0f}"}
        tables = '"tokens", "replacements", "states", "heads", "paths", "looks"'
        more = f"more: .to_frame(one of {tables}), .to_html(path), .save(path)"
        lines = self.to_frame("paths").head(_ROWS) if len(self.places) else None
        return panel(type(self).__name__, facts, self.notes, more, lines)
