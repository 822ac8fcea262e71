"""Ratios of the influence probes against what one would write otherwise, in one run.

Run: python -m benchmarks.influence   (about two minutes; medians of paired rounds; times of the
alternative are 1)
"""

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.models import causal
from benchmarks.timing import paired
from infoflow_lens import Architecture, JacobianInfluence, build_model, run_probes
from infoflow_lens.hooks import ResampleInfluence


def toy_rows(generator: torch.Generator) -> list[tuple[str, str, float]]:
    """Exact influence of every token on every state of a small model."""
    small = build_model(Architecture(n_heads=(4, 1), d_model=32, d_token=4, n_tokens=16), seed=0)
    few = torch.randn(64, 16, 4, generator=generator)
    donors = torch.randn(8, 16, 4, generator=generator)

    def exact() -> None:
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

    def by_autograd() -> None:
        for sequence in few[:4]:
            torch.autograd.functional.jacobian(states, sequence)

    def resampled() -> None:
        run_probes(small, few, [ResampleInfluence(donors)], progress=False)

    what = "toy, exact, all states"
    return [
        (what, "vmap(jacfwd)", paired(exact, by_jacfwd)),
        (what, "autograd, sample by sample", paired(exact, by_autograd, 3) * 4 / len(few)),
        ("toy, resample, 8 donors, all states", "vmap(jacfwd)", paired(resampled, by_jacfwd)),
    ]


def token_rows(generator: torch.Generator) -> list[tuple[str, str, float]]:
    """Models over token ids: the estimate, and one position."""
    model = causal(4, 128, 4, 64)
    ids = torch.randint(1000, (4, 64), generator=generator)
    torch.randint(1000, (8, 64), generator=generator)

    def measured(**arguments: object) -> torch.Tensor:
        (result,) = run_probes(model, ids, [JacobianInfluence(**arguments)], progress=False)  # type: ignore[arg-type]
        return result.influence

    last = {"positions": (-1,), "layers": (3,)}
    return [
        (
            "T 64, d 128, last token: estimate, m=8",
            "exact, last token",
            paired(lambda: measured(**last, estimate=8), lambda: measured(**last), 3),
        ),
        (
            "T 64, d 128, last token: exact",
            "exact, all states",
            paired(lambda: measured(**last), measured, 1),
        ),
    ]


def main() -> None:
    """Measure and print."""
    generator = torch.Generator().manual_seed(0)
    rows = toy_rows(generator) + token_rows(generator)
    table = Table("what", "against", "time ratio", title=f"{torch.get_num_threads()} threads")
    for what, against, ratio in rows:
        table.add_row(what, against, f"{ratio:.3g}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
