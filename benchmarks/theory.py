"""The ratio of propagation against what one would write otherwise, in one run.

Run: python -m benchmarks.theory   (median of paired rounds; the alternative takes 1)
"""

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.timing import paired
from infoflow_lens import propagate
from tests.reference import sets as reference


def sets_by_python(positions: list[torch.Tensor], n_sources: int) -> None:
    """Rule (1) with Python sets, by the reference of the tests."""
    for sequence in range(len(positions[0])):
        reference.propagate([p[sequence].unsqueeze(-1).tolist() for p in positions], n_sources)


def main() -> None:
    """Measure and print."""
    generator = torch.Generator().manual_seed(0)
    positions = [torch.randint(129, (256, 8, 129), generator=generator) for _ in range(4)]
    ratio = paired(
        lambda: propagate(positions, 128), lambda: sets_by_python(positions, 128), rounds=3
    )
    table = Table("what", "against", "time ratio", title=f"{torch.get_num_threads()} threads")
    table.add_row("propagate, batch 256, T 128, 4 layers of 8 heads", "Python sets", f"{ratio:.3g}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
