"""Ratios of the hosted model against HookedTransformer's own blocks, in one run.

Run: python -m benchmarks.hosting   (a minute; with TransformerLens 3 alone, which has
HookedTransformer; medians of paired rounds)

The same weights in both; the numbers are equal, bit by bit (tests/models/test_hooked.py).
"""

from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.timing import paired
from infoflow_lens.models.hooked import HAS_HOOKED_TRANSFORMER
from infoflow_lens.models.host import build_model, build_token_model
from infoflow_lens.studies.demo import DemoConfig

ROUNDS, REPEATS = 9, 20


def forward(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """Passes without gradients."""

    def run() -> None:
        with torch.no_grad():
            for _ in range(REPEATS):
                model(x)

    return run


def cached(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """Passes of which all activations are kept."""

    def run() -> None:
        with torch.no_grad():
            for _ in range(REPEATS):
                model.run_with_cache(x)

    return run


def steps(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """Training steps by the fast read-out, as `train` makes them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)

    def run() -> None:
        for _ in range(REPEATS):
            loss = model.forward_readout(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return run


def main() -> None:
    """Measure and print."""
    if not HAS_HOOKED_TRANSFORMER:
        raise SystemExit("HookedTransformer is of TransformerLens 3: make bench TL=3 measures this")
    from tests.reference.hooked_transformer import twin_of

    demo = DemoConfig()
    vectors, _ = demo.task().sample(256, seed=0)
    token_model = build_token_model(
        n_layers=2, n_heads=2, d_head=64, d_model=64, n_tokens=16, d_vocab=32, d_output=8
    )
    ids = torch.randint(32, (256, 16), generator=torch.Generator().manual_seed(0))
    models = [
        ("the demo's model, over vectors", build_model(demo.architecture(), seed=0), vectors),
        ("attention-only, over token ids", token_model, ids),
    ]
    title = f"batches of 256; {torch.get_num_threads()} threads; HookedTransformer takes 1"
    table = Table("model", "what", "time ratio", title=title)
    for name, model, x in models:
        twin = twin_of(model)
        assert model(x).equal(twin(x))
        for what in (forward, cached, steps):
            ratio = paired(what(model, x), what(twin, x), rounds=ROUNDS)
            table.add_row(name, what.__name__, f"{ratio:.3g}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
