"""Count the edges of attention that one state of a model of thirty layers needs, by choice.

Run: nice python -m benchmarks.edges [--windows N]

Needs `make models`; half an hour of one core. It writes `edges.csv` beside its statement,
docs/results/real_models/edges.md, which was written before the run; `table` makes the page's.
"""

import argparse
import csv
import inspect
import random
import tempfile
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor

from benchmarks import depth
from infoflow_lens.hooks.mechanisms.budgets import measure_edge_budget
from infoflow_lens.models.named import open_model
from tests.reference.real_models import load

ROWS = depth.FOLDER / "edges.csv"
GRADED, CHANCE, WINDOWS, LENGTH = "product x norm", "chance", 16, 32
BUDGETS = tuple(2.0**-i for i in range(13, 1, -1))
COLUMNS = (
    "method", "needed", "low", "high", "times", "times_low", "times_high", "of", "at_an_eighth",
)  # fmt: skip


def windows(tokenizer: Any, count: int) -> Tensor:
    """Windows of prose and code in turn, each of one text, with the token that begins a text."""
    texts = [
        [text for _, text in sorted(topics.topics.items())],
        [inspect.getsource(module) for module in (argparse, csv, random, tempfile, inspect)],
    ]
    draw = random.Random(0)
    found = []
    for number in range(count):
        ids = tokenizer(draw.choice(texts[number % 2]))["input_ids"]
        start = draw.randrange(len(ids) - LENGTH)
        found.append([1, *ids[start : start + LENGTH - 1]])
    return torch.tensor(found)


def table() -> str:
    """Return the page's table, from the rows."""
    with ROWS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    lines = []
    for row in rows:
        needed, low, high, n, times, least, most, kept = (
            float(row[name])
            for name in (
                "needed",
                "low",
                "high",
                "of",
                "times",
                "times_low",
                "times_high",
                COLUMNS[-1],
            )
        )
        said = "ahead" if most < 1 else "behind" if least > 1 else ""
        cells = [f"{needed:,.0f} [{low:,.0f}, {high:,.0f}]", f"{needed / n:.0%}"]
        against = "" if row["method"] == GRADED else f"{times:.2f} [{least:.2f}, {most:.2f}] {said}"
        lines.append([row["method"], *cells, against.strip(), f"{kept:.0%}"])
    head = ["chosen by", "edges needed", "of all", "times the graded choice's", "kept by an eighth"]
    return depth.markdown(head, lines)


def main() -> None:
    """Measure, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=WINDOWS)
    asked = parser.parse_args()
    plain, tokenizer = load("smollm2")
    judged, others = windows(tokenizer, 2 * asked.windows).split(asked.windows)
    found = measure_edge_budget(
        open_model(plain, tokenizer), judged, others, budgets=BUDGETS, metric="kl", read=(-1,),
        batch_size=8,
    )  # fmt: skip
    share, eighth = found.regained(), BUDGETS.index(2.0**-3)
    with ROWS.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for method, needed in found.edges_needed().items():
            at = [i for i, name in enumerate(found.methods) if name.startswith(method)]
            if method != CHANCE:
                at = [found.methods.index(method)]
            times = found.times_needed(method, GRADED)
            kept = float(share[at, eighth].mean())
            values = (*needed, *times, float(found.n_edges.double().mean()), kept)
            table.writerow((method, *(f"{value:.4g}" for value in values)))


if __name__ == "__main__":
    main()
