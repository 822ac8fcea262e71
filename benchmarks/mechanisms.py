"""What mechanisms cost, in bare forward passes of the same sequences, and how right they are.

Run: python -m benchmarks.mechanisms [--only NAME ...] [--small]

The cost of the estimate and of decided labels is measured on a random model in the sizes of GPT-2
small; `--small` takes half of its layers and heads. To measure such a model exactly takes some 500
forward passes, so the estimate's rank correlation with exact damages, and the labels, are compared
on smaller models: random ones, built ones and a trained one.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr
from torch import Tensor

from benchmarks.models import causal
from benchmarks.timing import paired
from infoflow_lens.hooks import measure_mechanisms
from infoflow_lens.hooks.interventions.patterns import IDEALS
from infoflow_lens.hooks.mechanisms.result import MechanismsResult
from infoflow_lens.studies.constructions import build_construction


class Row(NamedTuple):
    """One number and its goal."""

    what: str
    number: float
    goal: str


def random_model(
    n_layers: int, n_heads: int, d_model: int, n_ctx: int, d_vocab: int, sharp: float = 1.0
) -> Any:
    """Random weights; `sharp` scales queries, keys, values and outputs."""
    model = causal(n_layers, d_model, n_heads, n_ctx, d_vocab, act_fn="gelu_new")
    with torch.no_grad():
        for block in model.blocks:
            for name in ("W_Q", "W_K", "W_V", "W_O"):
                getattr(block.attn, name).mul_(sharp)
    return model


def tokens(n: int, length: int, d_vocab: int, seed: int = 0) -> Tensor:
    """Random ids."""
    return torch.randint(d_vocab, (n, length), generator=torch.Generator().manual_seed(seed))


def chains(n: int, length: int, seed: int, d_vocab: int = 32) -> Tensor:
    """Sequences of a sparse Markov chain, whose last third repeats an earlier segment."""
    generator = torch.Generator().manual_seed(seed)
    following = torch.randint(d_vocab, (d_vocab, 3), generator=torch.Generator().manual_seed(99))
    columns = [torch.randint(d_vocab, (n,), generator=generator)]
    choices = torch.randint(3, (n, length), generator=generator)
    jumps = torch.rand(n, length, generator=generator) < 0.3
    anywhere = torch.randint(d_vocab, (n, length), generator=generator)
    for t in range(1, length):
        by_chain = following[columns[-1], choices[:, t]]
        columns.append(torch.where(jumps[:, t], anywhere[:, t], by_chain))
    x = torch.stack(columns, dim=1)
    part = length // 3
    starts = torch.randint(part, (n,), generator=generator)
    x[:, -part:] = x.gather(1, starts[:, None] + torch.arange(part))
    return x


def trained_model(steps: int = 1500) -> tuple[Any, Tensor]:
    """Three layers of eight heads that predict the next token of :func:`chains`; and test data."""
    model = random_model(3, 8, 64, 36, 32)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, step / 50, (steps - step) / (steps / 3))
        loss = model(chains(64, 36, seed=step + 1), return_type="loss")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    return model, chains(8, 36, seed=0)


def estimate(model: Any, x: Tensor, batch_size: int) -> None:
    """The estimate alone: the mean patterns and all backward passes."""

    def stop(reached: Mapping[str, Any]) -> None:
        if reached["n_estimated"] == len(x):
            raise StopIteration

    try:
        measure_mechanisms(model, x, batch_size=batch_size, after=stop, progress=False)
    except StopIteration:
        return


def bare(model: Any, x: Tensor, batch_size: int) -> Callable[[], None]:
    """The model alone."""

    def run() -> None:
        with torch.no_grad():
            for batch in x.split(batch_size):
                model(batch)

    return run


def estimates_of(model: Any, x: Tensor, **settings: Any) -> Tensor:
    """Estimated damages, without any exact one: [head, ideal]."""
    kept: list[Mapping[str, Any]] = []
    measure_mechanisms(model, x, after=kept.append, progress=False, **settings)
    # scaled alike, which changes no rank
    estimates: Tensor = next(at for at in kept if at["n_estimated"] == len(x))["estimates"]
    return estimates.view(-1, len(IDEALS))


def compared(
    name: str,
    model: Any,
    x: Tensor,
    thresholds: tuple[float, ...] = (0.05,),
    correlation: bool = True,
    **settings: Any,
) -> Iterator[Row]:
    """Decided labels against exact ones, and what deciding costs."""
    exact = measure_mechanisms(model, x, exact=True, progress=False, **settings)
    if correlation:
        estimated = estimates_of(model, x, **settings).flatten()
        damage = torch.cat(exact.damage).flatten()
        ranks = float(spearmanr(estimated.numpy(), damage.numpy()).statistic)
        yield Row(f"{name}: rank correlation of estimated with exact damage", ranks, ">= .95")
    for threshold in thresholds:
        chosen = {"threshold": threshold, **settings}
        found = measure_mechanisms(model, x, progress=False, **chosen)
        labels = [
            (a, b)
            for one, other in zip(exact.mechanisms(threshold), found.mechanisms(), strict=True)
            for a, b in zip(one, other, strict=True)
        ]
        kinds = [a for a, _ in labels]
        kinds = ", ".join(f"{kinds.count(a)} {a}" for a in dict.fromkeys(kinds))
        right = sum(a == b for a, b in labels) / len(labels)
        label = f"{name}, {threshold}: labels as exact, of {len(labels)} heads ({kinds})"
        yield Row(label, right, ">= .95")

        def decide(chosen: dict[str, Any] = chosen) -> None:
            measure_mechanisms(model, x, progress=False, **chosen)

        ratio = paired(decide, bare(model, x, settings.get("batch_size", 64)), 1)
        label = f"{name}, {threshold}: decided labels, bare forwards"
        yield Row(label, ratio, "<= 80")


def _replaced(result: MechanismsResult) -> float:
    return float(torch.cat(result.replaced).sum())


def big(small: bool) -> Iterator[Row]:
    """Cost on a random model in the sizes of GPT-2 small, 8 sequences of 64 tokens."""
    layers, heads, d_model = (6, 6, 384) if small else (12, 12, 768)
    model = random_model(layers, heads, d_model, 64, 50257)
    x = tokens(8, 64, 50257)
    size = f"{layers} x {heads} heads, d_model {d_model}, random"
    ratio = paired(lambda: estimate(model, x, 8), bare(model, x, 8), 3)
    yield Row(f"{size}: estimate alone, bare forwards", ratio, "<= 15")
    found: list[MechanismsResult] = []

    def decide() -> None:
        found.append(measure_mechanisms(model, x, batch_size=8, progress=False))

    ratio = paired(decide, bare(model, x, 8), 2)
    yield Row(f"{size}: decided labels, bare forwards", ratio, "<= 80")
    names = [name for layer in found[0].mechanisms() for name in layer]
    kinds = ", ".join(f"{names.count(n)} {n}" for n in dict.fromkeys(names))
    yield Row(f"{size}: replaced sequences a head ({kinds})", _replaced(found[0]) / len(names), "")


def built(small: bool) -> Iterator[Row]:
    """Constructions, whose heads have known mechanisms."""
    answer = {"metric": "nmse", "read": (-1,)}
    sizes = {"n_questions": 6, "n_answers": 6, "n_pairs": 3}
    for name, parameters, settings in (
        ("in_context_qa_softmax", sizes, answer),
        ("d_retrieval", {}, {}),
        ("kth_largest", {"n_tokens": 8, "k": 3}, {}),
        ("position_sum", {}, {}),
        ("global_mean", {}, {}),
    ):
        model, task = build_construction(name, **parameters)
        x = task.sample(256, seed=0)[0]
        yield from compared(f"built, {name}", model, x, correlation=False, **settings)


def induction(small: bool) -> Iterator[Row]:
    """The induction circuit, built by hand, read where a token is repeated."""
    from tests.reference.induction import induction_model, repeated_segments

    x = repeated_segments(11, 256)[0]
    model = induction_model(11, 9)
    yield from compared("built, induction", model, x, correlation=False, read=(6, 7))


def trained(small: bool) -> Iterator[Row]:
    """A model trained on chains with repetitions."""
    model, x = trained_model(500 if small else 1500)
    for metric in ("kl", "loss", "nmse"):
        yield from compared(f"trained, {metric}", model, x, (0.005, 0.05), metric=metric)
    yield from compared("trained, 64 sequences", model, chains(64, 36, seed=7))


def random_(small: bool) -> Iterator[Row]:
    """Random models, with nearly uniform and with sharp attention."""
    for sharp in (1.0, 4.0, 8.0):
        model = random_model(4 if small else 6, 8, 128, 64, 512, sharp)
        x = tokens(8, 64, 512)
        yield from compared(f"random, weights x {sharp:g}", model, x, (0.0005, 0.005, 0.05, 0.5))


PARTS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "built": built,
    "induction": induction,
    "trained": trained,
    "random": random_,
    "big": big,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--small", action="store_true")
    chosen = parser.parse_args()
    console = Console(width=120)
    table = Table("what", "number", "goal", title=f"{torch.get_num_threads()} threads")
    for name in chosen.only:
        for row in PARTS[name](chosen.small):
            table.add_row(row.what, f"{row.number:.3g}", row.goal)
            console.log(f"{row.what}: {row.number:.3g}")
    console.print(table)


if __name__ == "__main__":
    main()
