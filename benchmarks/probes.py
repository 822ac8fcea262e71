"""What probes cost, as ratios in one run: to a bare forward pass, to a cache with scikit-learn.

Run: python -m benchmarks.probes [--only NAME ...] [--device cuda] [--dtype bfloat16]
[--memory [TOKENS]]

Times are medians of paired rounds. What is solved for when a result is asked for is no part of the
cost per batch, except against scikit-learn, where both sides fit. Memory is the peak of a process
of its own. `--memory` runs a GPT-2-small-sized model over 100,000 tokens, which takes long.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from sklearn.linear_model import LinearRegression, Ridge
from torch import Tensor

from benchmarks.models import causal
from benchmarks.timing import paired
from infoflow_lens import (
    Architecture,
    PositionsProbe,
    RecoveryProbe,
    build_model,
    run_probes,
)
from infoflow_lens.foundation.memory import bytes_in
from infoflow_lens.foundation.modules import eval_mode
from infoflow_lens.foundation.record import WeightState
from infoflow_lens.hooks import Split, run
from infoflow_lens.hooks.passes.run import prepare

RANKS = (1, 2, 3, 4)


class Row(NamedTuple):
    """One comparison."""

    what: str
    against: str
    ratio: float
    target: float | None


def gpt2_sized(n_ctx: int = 128) -> Any:
    """Random weights in the sizes of GPT-2 small."""
    return causal(12, 768, 12, n_ctx, d_vocab=50257, act_fn="gelu_new")


def forward(model: Any, batches: tuple[Tensor, ...]) -> Callable[[], None]:
    """The bare model, logits and all."""

    def bare() -> None:
        with torch.no_grad():
            for batch in batches:
                model(batch)
            finished(model)

    return bare


def ratio_of(
    model: Any, batches: tuple[Tensor, ...], make: Callable[[], list[Any]], rounds: int
) -> float:
    """Time of the probes over the batches, over that of the bare model.

    The probes get ready once: what is found of a model once is no cost of a batch. Rows that wait
    at the end of a round are added in the next one, and no maps are solved for.
    """
    probes, split = make(), Split()
    needs = prepare(model, probes, WeightState(model))

    def probed() -> None:
        with eval_mode(model):
            for batch in batches:
                seen = run(model, batch, needs)
                for probe in probes:
                    probe.take(seen, split)
            finished(model)

    return paired(probed, forward(model, batches), rounds)


def finished(model: Any) -> None:
    """Wait until the device has done all that was asked of it."""
    if next(model.parameters()).is_cuda:
        torch.cuda.synchronize()


def positions_and_recovery(**settings: Any) -> list[Any]:
    """Both probes, for ranks 1 to 4."""
    return [PositionsProbe(RANKS), RecoveryProbe(RANKS, **settings)]


def gpt2_rows(device: str = "cpu", dtype: torch.dtype = torch.float32) -> Iterator[Row]:
    """A GPT-2-small-sized model: four batches of a size for the device, and one call on a CPU."""
    if device == "cpu":
        sizes, goals = [(4, 128)], (0.70, 0.85, 1.1)
    else:
        sizes = [(32, 256), (8, 1024)]
        goals = (1.1, 1.4, 3.0) if dtype == torch.float32 else (1.2, 1.6, 4.0)
    for n, length in sizes:
        model = gpt2_sized(length).to(device=device, dtype=dtype)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(50257, (4 * n, length), generator=generator).to(device)
        where = (
            f"GPT-2-small-sized, {device}, {str(dtype).removeprefix('torch.')}, {n} x {length}: "
        )
        for label, make, goal in (
            ("positions, ranks 1-4", lambda: [PositionsProbe(RANKS)], goals[0]),
            ("and recovery, sketched to 64", lambda: positions_and_recovery(sketch=64), goals[1]),
            ("and recovery, exact", positions_and_recovery, goals[2]),
        ):
            ratio = ratio_of(model, ids.split(n), make, rounds=3)
            yield Row(where + label, "bare forward", ratio, goal)
    if device == "cpu":
        one = ids[:1, :16]
        call = partial(run_probes, model, one, [PositionsProbe()], progress=False)
        ratio = paired(call, forward(model, (one,)), 15)
        yield Row("run_probes of 16 tokens, whole", "bare forward", ratio, 1.5)


def toy() -> tuple[Any, tuple[Tensor, ...]]:
    """Two layers of eight heads over 64 vector tokens, and sixteen batches of 64 sequences."""
    model = build_model(
        Architecture(n_heads=(8, 8), d_model=128, d_token=16, n_tokens=64, d_mlp=512), seed=0
    )
    x = torch.randn(1024, 64, 16, generator=torch.Generator().manual_seed(0))
    return model, x.split(64)


def toy_rows() -> Iterator[Row]:
    """The toy model."""
    model, batches = toy()
    for label, make, target in (
        ("positions, ranks 1-4", lambda: [PositionsProbe(RANKS)], 1.2),
        ("and recovery, exact", positions_and_recovery, 1.8),
    ):
        ratio = ratio_of(model, batches, make, rounds=5)
        yield Row("toy, 16 x 64 x 64 tokens: " + label, "bare forward", ratio, target)


def small(n: int) -> tuple[Any, Tensor]:
    """One layer of eight heads and d_model 128 over 16 vector tokens, and n sequences."""
    model = build_model(
        Architecture(n_heads=(8,), d_model=128, d_token=8, n_tokens=16, d_mlp=512), seed=0
    )
    return model, torch.randn(n, 16, 8, generator=torch.Generator().manual_seed(0))


def by_probe(model: Any, x: Tensor) -> Tensor:
    """Errors of all heads and ranks, streaming; [head, rank]."""
    probe = RecoveryProbe(RANKS)
    return run_probes(model, x, [probe], batch_size=256, progress=False)[0].fvu[0]


def by_scikit_learn(model: Any, x: Tensor, make: Callable[[], Any] = LinearRegression) -> Tensor:
    """The same from a cache of all activations, a regression for each head and rank."""
    state_name, scores_name = "blocks.0.hook_resid_mid", "blocks.0.attn.hook_attn_scores"
    caches = []
    with torch.no_grad():
        for batch in x.split(256):
            _, cache = model.run_with_cache(batch, names_filter=[state_name, scores_name])
            caches.append((cache[state_name], cache[scores_name]))
    state = torch.cat([state for state, _ in caches])[:, :16].double()
    keys = torch.cat([scores for _, scores in caches])[:, :, :16].topk(4, dim=-1).indices
    held_out = torch.arange(len(x)) % 5 == 4
    fit_x, test_x = (state[rows].flatten(0, 1).numpy() for rows in (~held_out, held_out))
    errors = torch.zeros(8, 4, dtype=torch.float64)
    for head in range(8):
        for rank in range(4):
            chosen = keys[:, head, :, rank, None].expand(-1, -1, x.shape[-1])
            target = torch.gather(x, 1, chosen).double()
            wanted = target[held_out].flatten(0, 1).numpy()
            fitted = make().fit(fit_x, target[~held_out].flatten(0, 1).numpy())
            error = ((fitted.predict(test_x) - wanted) ** 2).sum()
            errors[head, rank] = error / ((wanted - wanted.mean(0)) ** 2).sum()
    return errors


def scikit_learn_rows() -> Iterator[Row]:
    """Time and peak memory, a layer of eight heads and four ranks."""
    for n, rounds in ((4000, 3), (64000, 1)):
        model, x = small(n)
        torch.testing.assert_close(by_probe(model, x), by_scikit_learn(model, x), rtol=1e-4, atol=0)
        label = f"recovery of 8 heads x 4 ranks, {n} sequences of 16: "
        for make in (LinearRegression, lambda: Ridge(1e-9)):
            ratio = paired(
                partial(by_probe, model, x), partial(by_scikit_learn, model, x, make), rounds
            )
            kind = type(make()).__name__
            yield Row(label + "time", f"cache + scikit-learn {kind}", ratio, 1 / 6)
        ours, theirs = (in_own_process("small", who, n)["peak"] for who in ("probe", "sklearn"))
        yield Row(label + "memory", "cache + scikit-learn", ours / theirs, 1 / 50)


# Memory, each measurement in a process of its own


def in_own_process(*what: Any) -> dict[str, float]:
    """What :func:`measure` finds, in MiB."""
    command = [sys.executable, "-m", "benchmarks.probes", "--measure", *map(str, what)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    return found


def resident(which: str = "VmRSS") -> float:
    """Resident memory of this process in MiB, now or (VmHWM) at its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(which):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no /proc/self/status: memory is measured on Linux only")


def forget_peak() -> float:
    """Start the peak anew; resident memory now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident()


def measure(what: str, who: str, n: int, sketch: int = 0) -> dict[str, float]:
    """Peak memory: above what the model and the inputs take ("small"), or all of it ("gpt2")."""
    if what == "small":
        model, x = small(n)
        run = by_probe if who == "probe" else by_scikit_learn
        run(model, x[:300])  # loads what is loaded on first use
        before = forget_peak()
        run(model, x)
        return {"peak": resident("VmHWM") - before}
    model = gpt2_sized()
    x = torch.randint(50257, (n // 128, 128), generator=torch.Generator().manual_seed(0))
    if who == "bare":
        forward(model, x.split(4))()
        return {"peak": resident("VmHWM")}
    probes = positions_and_recovery(sketch=sketch or None, maps=False)
    results = run_probes(model, x, probes, batch_size=4, progress=False)
    own = bytes_in([probe.state_dict() for probe in probes]) + bytes_in(vars(results[0]))
    return {"peak": resident("VmHWM"), "own": own / 2**20}


def memory_rows(n_tokens: int) -> Iterator[Row]:
    """Positions and recovery on a GPT-2-small-sized model."""
    bare = in_own_process("gpt2", "bare", min(n_tokens, 5120))["peak"]
    for sketch in (64, 0):
        probed = in_own_process("gpt2", "probe", n_tokens, sketch)
        label = f"sketched to {sketch}" if sketch else "exact"
        yield Row(
            f"GPT-2-small-sized, {n_tokens} tokens, {label}: peak of {probed['peak']:.0f} MiB",
            f"bare {bare:.0f} + statistics and positions {probed['own']:.0f} MiB",
            probed["peak"] / (bare + probed["own"]),
            1.3,
        )


PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "toy": toy_rows,
    "scikit-learn": scikit_learn_rows,
    "gpt2": gpt2_rows,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--device", default="cpu", help="cuda, to measure on a GPU")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--memory", nargs="?", type=int, const=100_000, metavar="TOKENS")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.measure:
        what, who, *numbers = chosen.measure
        sys.stdout.write(json.dumps(measure(what, who, *map(int, numbers))) + "\n")
        return
    parts = [PARTS[name] for name in chosen.only]
    if chosen.device != "cpu":
        parts = [partial(gpt2_rows, chosen.device, getattr(torch, chosen.dtype))]
    if chosen.memory:
        parts = [partial(memory_rows, chosen.memory)]
    console = Console(width=120)
    table = Table("what", "against", "ratio", "at most", title=f"{torch.get_num_threads()} threads")
    for part in parts:
        for row in part():
            target = "" if row.target is None else f"{row.target:.2g}"
            table.add_row(row.what, row.against, f"{row.ratio:.3g}", target)
            console.log(f"{row.what}: {row.ratio:.3g}")  # some rows take minutes
    console.print(table)


if __name__ == "__main__":
    main()
