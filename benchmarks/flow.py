"""What flow() costs, as a multiple of bare forward passes of the same text.

Run: python -m benchmarks.flow [--rounds N]

A model in the sizes of GPT-2 small with random weights, 64 tokens, the influence on the last
position in all layers; everything that a call does is counted, and the bare forward goes to logits.
"""

import argparse

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.models import causal
from benchmarks.timing import paired
from infoflow_lens import flow

_TARGET = 60


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    model = causal(12, 768, 12, 128, d_vocab=50257, act_fn="gelu_new")
    ids = torch.randint(50257, (1, 64), generator=torch.Generator().manual_seed(0))

    def bare() -> None:
        with torch.no_grad():
            model(ids)

    table = Table(
        "flow() of", "bare forwards", "target", title=f"{torch.get_num_threads()} threads"
    )
    for what, settings, target in (
        ("one position, all layers", {"position": -1}, str(_TARGET)),
        ("one position, without influence", {"position": -1, "influence": None}, ""),
    ):
        ratio = paired(lambda: flow(model, ids, progress=False, **settings), bare, rounds)  # noqa: B023
        table.add_row(what, f"{ratio:.1f}", target)
    found = flow(model, ids, position=-1, progress=False)
    Console(width=110).print(table, found.notes)


if __name__ == "__main__":
    main()
