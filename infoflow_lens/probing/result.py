"""The result of a probe run."""

import os
from dataclasses import dataclass
from pathlib import Path

from infoflow_lens.foundation.display import panel
from infoflow_lens.foundation.documents import PROBE_PAGE
from infoflow_lens.foundation.errors import refuse_names
from infoflow_lens.probing.findings import Findings
from infoflow_lens.probing.page import build_report
from infoflow_lens.report.probing import render_probing


@refuse_names(push_to_hub="out=, and upload_folder of huggingface_hub")
@dataclass(frozen=True, repr=False)
class ProbingResult(Findings):
    """What a probe run found; in a notebook, its main findings."""

    def report(
        self, path: str | os.PathLike[str] = "report.html", *, overwrite: bool = False
    ) -> Path:
        """Write the report, a page that needs no network.

        Args:
            path: of the page.
            overwrite: whether a file that is no such page may be replaced, too.

        Returns:
            The file.

        Raises:
            InfoFlowError: if the file cannot be written, or another one stands in its place.
        """
        PROBE_PAGE.check(path, overwrite=overwrite)  # before the page is made
        return PROBE_PAGE.write(path, render_probing(build_report(self)), overwrite=overwrite)

    def __repr__(self) -> str:
        n = 0 if self.positions is None else self.positions.n_sequences
        seen = f", {n} sequences" if n else ""
        what = f"{self.config.model[:100]!r} on {self.config.data[:100]!r}{seen}"
        return f"ProbingResult({what}: {', '.join(self.found)[:200]})"

    def _repr_html_(self) -> str:
        facts = {name: type(result).__name__ for name, result in self.found.items()}
        title = f"{self.config.model} on {self.config.data}"
        return panel(
            title, facts, self.findings(), "more: .report(path), .positions, .influence, ..."
        )
