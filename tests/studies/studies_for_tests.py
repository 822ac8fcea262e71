"""Studies that train nothing, for the tests of the sweep; importable in worker processes."""

import os
import random
import time
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import torch
from matplotlib.figure import Figure

from infoflow_lens.studies.claims import Claim
from infoflow_lens.studies.study import Study
from infoflow_lens.training import TrainingDivergedError


class Squares(Study):
    """Squares of a number, plus noise of the seed; what a run does is written in its settings."""

    name = "squares"
    title = "Do squares grow?"
    source = "the tests"
    presets = {"smoke": 1, "quick": 2}  # noqa: RUF012

    def __init__(self, folder=None, diverging=(), pause=0.0):
        self.folder, self.diverging, self.pause = folder, tuple(diverging), pause

    def cases(self, preset):
        return [{"number": n, "heads": [n, 1]} for n in ((2, 3) if preset == "smoke" else range(5))]

    def measure(self, settings, seed, device):
        number = settings["number"]
        if self.folder is not None:
            name = f"{number}-{seed}-{os.getpid()}-{time.monotonic_ns()}"
            (Path(self.folder) / name).write_text(str(torch.get_num_threads()))
        time.sleep(self.pause * random.random())
        if number in self.diverging:
            raise TrainingDivergedError(SimpleNamespace(epochs_run=3), 0.1)
        noise = torch.randn(1, generator=torch.Generator().manual_seed(seed)).item()
        return [
            {"square": number**2 + noise * 1e-3, "part": part, "device": device}
            for part in ("first", "second")
        ]

    def table(self, results):
        return "| number | square |\n|---|---|\n" + "\n".join(
            f"| {row.number} | {row.square:.3f} |" for row in results.itertuples()
        )

    def figure(self, results):
        figure = Figure(figsize=(2, 2))
        figure.subplots().plot(results["number"], results["square"])
        return figure

    def claims(self):
        return [Claim("the square of 3 is {bound} times that of 2", growth, ">", 1)]


def growth(results):
    means = results.groupby("number")["square"].mean()
    return {"": means[3] / means[2]}


def smoke_rows(study, **changes):
    """The rows of a study's one smoke configuration, with some settings changed."""
    (settings,) = study.cases("smoke")
    settings = {**settings, **changes}
    rows = study.measure(settings, 0, "cpu")
    return pd.DataFrame([{**settings, "seed": 0, **row} for row in rows])


def broken(study, results):
    """The places of a study's claims that these results break; the verdict says the same."""
    places = [i for i, claim in enumerate(study.claims()) if not claim.judge(results).passed]
    assert study.verdict(results).passed is not bool(places)
    return places


def token_rows(runs, epochs=(1, 2), **shared):
    """Rows of runs over token ids: a dict each, in whose epochs nothing moves."""
    rows = []
    for run, about in enumerate(runs):
        accuracy = about["test_accuracy"]
        losses = ("train_loss", "validation_loss", "best_validation_loss")
        scores = {"train_accuracy": accuracy, "validation_accuracy": accuracy}
        scores |= dict.fromkeys(losses, 2 - accuracy)
        rows += [{"run": run, "epoch": epoch, **scores, **shared, **about} for epoch in epochs]
    return pd.DataFrame(rows)
