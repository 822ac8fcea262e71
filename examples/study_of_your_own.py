"""A study of a target of your own: configurations, seeds, a table, a figure and a verdict.

Run: python examples/study_of_your_own.py   (ten seconds)
"""

import tempfile
from pathlib import Path
from typing import ClassVar

import pandas as pd
from matplotlib.figure import Figure

from infoflow_lens import Architecture, TrainingConfig, build_model, load_task, train
from infoflow_lens.experiments.claims import Claim
from infoflow_lens.experiments.study import Statement, VectorStudy
from infoflow_lens.experiments.sweep import run_study
from infoflow_lens.experiments.tables import markdown_table, spread

STATEMENT = """# Does the span of T numbers need two heads?

**In short.** the span of numbers needs two heads

**Prediction.** One head cannot hold both ends: the error with two is far smaller.

**Rule.** Seen if the mean error of two heads is below .2 of that of one.

**Controls.** The rule must fail with the numbers of each in the place of its own.

- one head: its errors in the place of those of two

**What would refute it.** One head within a factor of five of two.
"""  # written before the numbers; the folder keeps it beside them


def ratio(results):
    """What is claimed of: numbers, by what each is of."""
    means = results.groupby("heads")["nmse"].mean()
    return {"": means[2] / means[1]}


class Span(VectorStudy):
    """The largest number minus the smallest: two tokens are retrieved, so two heads should do."""

    name = "span"
    title = "Does the span of T numbers need two heads?"
    source = "our own"
    statement = Statement(STATEMENT)
    presets: ClassVar = {"quick": 2}  # how many seeds

    def cases(self, preset):
        """What to run, without seeds."""
        return [{"heads": heads, "n_tokens": 8, "n_train": 4000, "epochs": 12} for heads in (1, 2)]

    def architecture(self, settings):
        """The model: what it takes of memory follows."""
        return Architecture(
            n_heads=(settings["heads"],),
            d_model=16,
            d_token=1,
            n_tokens=settings["n_tokens"],
            d_mlp=16,
        )

    def measure(self, settings, seed, device):
        """One run: its rows of results.csv."""
        task = load_task(
            "d_retrieval",
            n_tokens=settings["n_tokens"],
            d_token=1,
            n_components=2,
            extremum=("max", "min"),
        )
        training = train(
            build_model(self.architecture(settings), seed=seed, device=device),
            self.drawn(task, "train", settings["n_train"], seed),
            self.drawn(task, "validation", 1000, seed),
            TrainingConfig(epochs=settings["epochs"], batch_size=128, lr=8e-3, seed=seed),
            progress=False,
        )
        return [{"nmse": training.nmse}]

    def table(self, results):
        """What table.md shows."""
        rows = [(n, spread(group.nmse)) for n, group in results.groupby("heads")]
        return markdown_table(["heads", "NMSE"], rows)

    def figure(self, results):
        """What figure.png shows."""
        figure = Figure(figsize=(4, 3), layout="constrained")
        figure.subplots().semilogy(results["heads"], results["nmse"], "o")
        return figure

    def claims(self):
        """The rule: each claim judges the rows, and says with which numbers."""
        return [Claim("the mean error of two heads is {bound} of that of one", ratio, "<", 0.2)]

    def controlled(self, results):
        """A rule that passes with one head's numbers for two proves nothing."""
        one = results[results["heads"] == 1]
        return {"one head": pd.concat([one, one.assign(heads=2)])}


with tempfile.TemporaryDirectory() as folder:
    # jobs=2 runs them in two processes; resume=True goes on with what a folder holds
    found = run_study(Span(), Path(folder) / "span", progress=False)
    print((found.out / "table.md").read_text())
