"""Ratios of the baselines of influence against bare forward passes, in one run.

Run: python -m benchmarks.routes   (about two minutes; medians of paired rounds; the time of the
bare model, logits and all, is 1)
"""

from collections.abc import Iterator

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.models import causal
from benchmarks.timing import paired
from infoflow_lens import JacobianInfluence, baselines, run_probes


def rows(n_layers: int, n_pos: int) -> Iterator[tuple[str, str, float]]:
    """Every baseline by itself, of every state, and exact influence beside them."""
    model = causal(n_layers, 128, 8, n_pos)
    ids = torch.randint(1000, (8, n_pos), generator=torch.Generator().manual_seed(0))

    def bare() -> None:
        with torch.no_grad():
            model(ids)

    what = f"{n_layers} layers, width 128, 8 x {n_pos} tokens"
    for name in (*baselines(model), "exact Jacobian"):
        positions = (-1,) if name == "attention flow" and n_layers > 2 else None

        def measured(name: str = name, positions: tuple[int, ...] | None = positions) -> None:
            probe = (
                JacobianInfluence("resid_post")
                if name == "exact Jacobian"
                else baselines(model, positions=positions)[name]
            )
            run_probes(model, ids, [probe], progress=False)

        label = f"{name}, last position" if positions else name
        rounds = 1 if name == "exact Jacobian" else 3
        yield what, label, paired(measured, bare, rounds)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    table = Table("model", "measure", "bare forwards")
    for n_layers, n_pos in ((2, 32), (4, 32)):
        for what, label, ratio in rows(n_layers, n_pos):
            table.add_row(what, label, f"{ratio:.3g}")
    Console().print(table)


if __name__ == "__main__":
    main()
