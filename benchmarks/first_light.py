"""Ratios of the project's fast paths against what one would write otherwise, in one run.

Run: make bench   (about two minutes; medians of paired rounds, times of the alternative are 1)
"""

import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from sklearn.linear_model import LinearRegression

from infoflow_lens import (
    Architecture,
    JacobianInfluence,
    PositionsProbe,
    RecoveryProbe,
    build_model,
    propagate,
    run_probes,
)
from tests.reference import sets as reference

ROUNDS = 5


def paired(ours: Callable[[], object], theirs: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Median over rounds of the ratio of the two times, after one round of warming up."""
    ratios = []
    for _ in range(rounds + 1):
        times = []
        for function in (ours, theirs):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        ratios.append(times[0] / times[1])
    return statistics.median(ratios[1:])


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

    toy = build_model(
        Architecture(n_heads=(8, 8), d_model=128, d_token=16, n_tokens=64, d_mlp=512), seed=0
    )
    x = torch.randn(256, 64, 16, generator=generator)

    def forward() -> None:
        with torch.no_grad():
            for batch in x.split(64):
                toy(batch)

    def cached() -> None:
        with torch.no_grad():
            for batch in x.split(64):
                toy.run_with_cache(batch)

    rows.append(("the model with run_with_cache", "bare forward", paired(cached, forward)))
    for label, make in (
        ("positions, rank 1", lambda: PositionsProbe((1,))),
        ("positions, ranks 1-4", lambda: PositionsProbe((1, 2, 3, 4))),
        ("recovery, all heads, ranks 1-4", lambda: RecoveryProbe((1, 2, 3, 4))),
    ):
        ratio = paired(
            lambda make=make: run_probes(toy, x, [make()], batch_size=64, progress=False), forward
        )
        rows.append((label, "bare forward", ratio))

    def by_scikit_learn() -> None:
        _, cache = toy.run_with_cache(x)
        for layer in range(2):
            state = cache[f"blocks.{layer}.hook_resid_mid"][:, :64].flatten(0, 1).double().numpy()
            scores = cache[f"blocks.{layer}.attn.hook_attn_scores"][:, :, :64]
            keys = scores.topk(4, dim=-1).indices
            for head in range(8):
                for rank in range(4):
                    chosen = keys[:, head, :, rank].unsqueeze(-1).expand(-1, -1, 16)
                    target = torch.gather(x, 1, chosen).flatten(0, 1).double().numpy()
                    LinearRegression().fit(state, target)

    ratio = paired(
        lambda: run_probes(toy, x, [RecoveryProbe((1, 2, 3, 4))], batch_size=64, progress=False),
        by_scikit_learn,
        rounds=2,
    )
    rows.append(("recovery, all heads, ranks 1-4", "cache + scikit-learn", ratio))

    small = build_model(Architecture(n_heads=(4, 1), d_model=32, d_token=4, n_tokens=16), seed=0)
    few = torch.randn(64, 16, 4, generator=generator)

    def influence() -> None:
        run_probes(small, few, [JacobianInfluence()], progress=False)

    def states(sequence: torch.Tensor) -> tuple[torch.Tensor, ...]:
        caught = []
        names = [f"blocks.{layer}.hook_resid_mid" for layer in (0, 1)]
        small.run_with_hooks(
            sequence[None],
            fwd_hooks=[
                (name, lambda activation, hook: caught.append(activation)) for name in names
            ],
        )
        return tuple(state[0] for state in caught)

    def by_jacfwd() -> None:
        with torch.no_grad():
            torch.func.vmap(torch.func.jacfwd(states))(few)

    rows.append(
        ("influence of all tokens on all states", "vmap(jacfwd)", paired(influence, by_jacfwd))
    )

    def by_autograd() -> None:
        for sequence in few[:4]:
            torch.autograd.functional.jacobian(states, sequence)

    ratio = paired(influence, by_autograd, rounds=2) * 4 / len(few)
    rows.append(("influence of all tokens on all states", "autograd, sample by sample", ratio))

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
