"""Ratios of the baselines of influence against bare forward passes, in one run.

Run: python -m benchmarks.routes   (a minute; medians of paired rounds; the time of the bare model,
logits and all, is 1; width 128; for exact influence see benchmarks.influence). A second table has
best paths, of all states of a deep model over a long sequence, against rollout's products; a last
line has propagation of sets against Python's sets.
"""

from collections.abc import Iterator
from functools import partial
from typing import get_args

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.models import causal
from benchmarks.timing import paired
from infoflow_lens import baselines, propagate, run_probes
from infoflow_lens.hooks.routes.contributions import add_residual
from infoflow_lens.theory.propagation import BEST, Path, add_own, propagate_back, propagate_edges
from tests.reference import sets as reference


def rows(n_layers: int, n_pos: int) -> Iterator[tuple[str, str, float]]:
    """Every baseline by itself, of every state; attention flow of few where it is slow."""
    model = causal(n_layers, 128, 8, n_pos)
    ids = torch.randint(1000, (16, n_pos), generator=torch.Generator().manual_seed(0))

    def bare() -> None:
        with torch.no_grad():
            model(ids)

    what = f"{n_layers} layers, 16 x {n_pos} tokens"
    for name in baselines(model):
        positions = (-1,) if name == "attention flow" and n_layers > 2 else None

        def measured(name: str = name, positions: tuple[int, ...] | None = positions) -> None:
            probe = baselines(model, positions=positions)[name]
            run_probes(model, ids, [probe], batch_size=16, progress=False)

        label = f"{name}, last position" if positions else name
        yield what, label, paired(measured, bare, 3)


def best_path_rows(n_layers: int, n_pos: int) -> Iterator[tuple[str, float]]:
    """Best paths of one sequence, forward for all states and backward for eight."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(n_layers, 1, n_pos, n_pos, generator=generator) * 2
    future = torch.ones(n_pos, n_pos, dtype=torch.bool).triu(1)
    edges = scores.masked_fill_(future, -torch.inf).softmax(dim=-1)
    states, with_half = torch.arange(n_pos)[None], add_residual(edges)

    def rollout() -> None:
        propagate_edges(with_half, "sum-product", queries=states)

    for path in get_args(Path):
        best = partial(propagate_edges, add_own(edges), BEST[path], queries=states)
        yield f"best paths, {path}", paired(best, rollout, 1)
    eight = states[:, -8:]
    onwards = partial(propagate_back, add_own(edges), "max-product", queries=eight)
    yield "best paths onwards to eight states", paired(onwards, rollout, 1)


def sets_by_python(positions: list[torch.Tensor], n_sources: int) -> None:
    """Rule (1) with Python sets, by the reference of the tests."""
    for sequence in range(len(positions[0])):
        reference.propagate([p[sequence].unsqueeze(-1).tolist() for p in positions], n_sources)


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    table = Table("model", "measure", "bare forwards")
    for n_layers, n_pos in ((2, 64), (4, 64)):
        for what, label, ratio in rows(n_layers, n_pos):
            table.add_row(what, label, f"{ratio:.3g}")
    deep = Table("48 layers, 1,024 tokens, one sequence", "rollouts")
    for label, ratio in best_path_rows(48, 1024):
        deep.add_row(label, f"{ratio:.3g}")
    generator = torch.Generator().manual_seed(0)
    positions = [torch.randint(129, (256, 8, 129), generator=generator) for _ in range(4)]
    sets = paired(partial(propagate, positions, 128), partial(sets_by_python, positions, 128), 3)
    said = f"propagate, batch 256, T 128, 4 layers of 8 heads: {sets:.3g} of Python sets' time"
    Console().print(table, deep, said)


if __name__ == "__main__":
    main()
