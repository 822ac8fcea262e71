"""Ratios of propagation and training against what one would write otherwise, in one run.

Run: python -m benchmarks.theory_and_training   (medians of paired rounds; the alternative takes 1)
"""

from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.timing import paired
from infoflow_lens import Architecture, build_model, propagate
from tests.reference import sets as reference


def sets_by_python(positions: list[torch.Tensor], n_sources: int) -> None:
    """Rule (1) with Python sets, by the reference of the tests."""
    for sequence in range(len(positions[0])):
        reference.propagate([p[sequence].unsqueeze(-1).tolist() for p in positions], n_sources)


def main() -> None:
    """Measure and print."""
    generator = torch.Generator().manual_seed(0)
    rows: list[tuple[str, str, float]] = []

    positions = [torch.randint(129, (256, 8, 129), generator=generator) for _ in range(4)]
    ratio = paired(
        lambda: propagate(positions, 128), lambda: sets_by_python(positions, 128), rounds=3
    )
    rows.append(("propagate, batch 256, T 128, 4 layers of 8 heads", "Python sets", ratio))

    small = build_model(Architecture(n_heads=(4, 1), d_model=32, d_token=4, n_tokens=16), seed=0)

    def train_step(predict: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], None]:
        data = torch.randn(256, 16, 4, generator=generator)

        def step() -> None:
            for _ in range(10):
                predict(data).square().mean().backward()
            small.zero_grad()

        return step

    ratio = paired(train_step(small.forward_readout), train_step(small))
    rows.append(("a training step, last block for CLS only", "the full model", ratio))

    table = Table("what", "against", "time ratio", title=f"{torch.get_num_threads()} threads")
    for what, against, ratio in rows:
        table.add_row(what, against, f"{ratio:.3g}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
