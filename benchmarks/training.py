"""Steps a second of our trainer, in one run: against the loop that one writes, and seeds together.

Run: python -m benchmarks.training [--compile] [--device cuda]   (some minutes; medians of paired
rounds)

Eight seeds of the demo's model. Our side does all that `train` does: clipping, the validation of
every epoch in the demo's proportion, the best weights kept, the record. The loop does none of it.

Seeds together: `train_together`, whose forward pass is written for stacked weights, and beside it
torch.func.vmap over the hosted modules, which needs no forward pass of its own.

The second table is of the loop over one seed, done in other ways: what an epoch takes beside the
plain loop, and the validation error that the same epochs reach. What is faster and reaches less is
no gain. `--compile` adds torch.compile, which takes a minute before the first step.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import infoflow_lens.studies.together
from benchmarks.timing import paired
from infoflow_lens.foundation.seeds import derive_seed
from infoflow_lens.models.host import VectorTransformer, build_model
from infoflow_lens.studies.demo import DemoConfig
from infoflow_lens.studies.together import train_together
from infoflow_lens.training import TrainingConfig, nmse, set_rate, train

SEEDS = range(8)
STEPS = 20
DEMO = DemoConfig()
CONFIG = replace(DEMO.training(), epochs=1)
N_TRAIN = STEPS * CONFIG.batch_size
N_VALIDATION = N_TRAIN * DEMO.n_validation // DEMO.n_train
TASK = DEMO.task()


@cache
def data(n: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Sequences and targets of the demo's task."""
    x, y = TASK.sample(n, seed=seed)
    return x.to(device), y.to(device)


def training_data(model: nn.Module) -> tuple[Tensor, Tensor]:
    """What every model is trained on, where its weights are."""
    return data(N_TRAIN, 0, next(model.parameters()).device)


def validation_data(model: nn.Module) -> tuple[Tensor, Tensor]:
    """What the errors are of."""
    return data(N_VALIDATION, 1, next(model.parameters()).device)


def new_model(seed: int, device: str) -> VectorTransformer:
    """The demo's model before training."""
    return build_model(DEMO.architecture(), seed=seed, device=device)


def order(
    x: Tensor, seed: int, epoch: int = 0, batch_size: int = CONFIG.batch_size
) -> tuple[Tensor, ...]:
    """The rows of every step of an epoch, as `train` takes them."""
    generator = torch.Generator().manual_seed(derive_seed("epoch", seed, epoch))
    return torch.randperm(len(x), generator=generator).to(x.device).split(batch_size)


def by_hand(models: list[VectorTransformer]) -> None:
    """The loop that one writes over a HookedTransformer, seed after seed."""
    x, y = training_data(models[0])
    for seed, model in zip(SEEDS, models, strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=CONFIG.lr)
        for rows in order(x, seed):
            loss = nn.functional.mse_loss(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def seed_after_seed(models: list[VectorTransformer]) -> list[float]:
    """Our trainer; the validation error of each model."""
    return [
        train(
            model,
            training_data(model),
            validation_data(model),
            replace(CONFIG, seed=seed),
            progress=False,
        ).nmse
        for seed, model in zip(SEEDS, models, strict=True)
    ]


def together(models: list[VectorTransformer], compiled: bool = False) -> list[float]:
    """All seeds in one step, with the numbers of `seed_after_seed`."""
    data = training_data(models[0]), validation_data(models[0])
    trained = train_together(models, data, tuple(SEEDS), CONFIG, compiled=compiled, progress=False)
    return [one.result.nmse for one in trained]


class Readout(nn.Module):
    """A model whose forward pass is the fast read-out, for `functional_call`."""

    def __init__(self, model: VectorTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """The output at CLS."""
        return self.model.forward_readout(x)


@contextmanager
def by_vmap(models: list[VectorTransformer]) -> Iterator[None]:
    """Let `train_together` run the hosted modules under torch.func.vmap."""
    base = Readout(models[0])
    buffers = {f"model.{name}": value for name, value in models[0].named_buffers()}

    def output(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(base, {**weights, **buffers}, (x,))

    def readout(_: VectorTransformer, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        named = {f"model.{name}": value for name, value in weights.items()}
        return torch.func.vmap(output)(named, x)

    with mock.patch.object(infoflow_lens.studies.together, "compute_readouts", readout):
        yield


def together_by_vmap(models: list[VectorTransformer]) -> list[float]:
    """The same by torch.func."""
    with by_vmap(models):
        return together(models)


@dataclass(frozen=True)
class Way:
    """A way to run the loop.

    Attributes:
        name: in the table.
        batches: times as many sequences in a step.
        rate: times the learning rate.
        fused: whether the optimiser is.
        lower: whether matrices are multiplied in bfloat16.
        compiled: whether the model is.
    """

    name: str
    batches: float = 1.0
    rate: float = 1.0
    fused: bool = False
    lower: bool = False
    compiled: bool = False


WAYS = (
    Way("the plain loop"),
    Way("fused AdamW", fused=True),
    Way("bfloat16 by autocast", lower=True),
    Way("batches 4 times, rate 2 times", batches=4, rate=2.0),
    Way("batches 4 times, rate 4 times", batches=4, rate=4.0),
    Way("batches 1/2, rate .7", batches=0.5, rate=0.7),
)
COMPILED = Way("torch.compile", compiled=True)
EPOCHS = 12


def loop(way: Way, epochs: int, device: str) -> float:
    """Train one seed for so many epochs, and give the validation error."""
    model = new_model(0, device)
    step = torch.compile(model.forward_readout) if way.compiled else model.forward_readout
    size = int(CONFIG.batch_size * way.batches)
    config: TrainingConfig = replace(CONFIG, lr=CONFIG.lr * way.rate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, fused=way.fused)
    x, y = training_data(model)
    steps = [rows for epoch in range(epochs) for rows in order(x, 0, epoch, size)]
    for done, rows in enumerate(steps):
        set_rate(optimizer, config.learning_rate(done, len(steps)))
        with torch.autocast(device, torch.bfloat16, enabled=way.lower):
            output = step(x[rows])
        loss = nn.functional.mse_loss(output.float(), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x, y = validation_data(model)
    with torch.no_grad():
        return nmse(step(x).float(), y)


def other_ways(compiled: bool, device: str) -> Table:
    """The second table."""
    plain = WAYS[0]
    table = Table(
        "the loop", "time ratio", "validation NMSE", title=f"one seed, {EPOCHS} epochs of {N_TRAIN}"
    )
    for way in (*WAYS, *([COMPILED] if compiled else [])):
        error = loop(way, EPOCHS, device)
        ratio = paired(partial(loop, way, 1, device), partial(loop, plain, 1, device), rounds=3)
        table.add_row(way.name, f"{ratio:.3g}", f"{error:.3g}")
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    chosen = parser.parse_args()
    models = [new_model(seed, chosen.device) for seed in SEEDS]
    start = [{k: v.clone() for k, v in model.state_dict().items()} for model in models]

    def fresh(function: Callable[[list[VectorTransformer]], object]) -> Callable[[], object]:
        def run() -> object:
            for model, state in zip(models, start, strict=True):
                model.load_state_dict(state)
            found = function(models)
            if chosen.device == "cuda":
                torch.cuda.synchronize()
            return found

        return run

    # the same work: both reach the same errors
    alone = fresh(seed_after_seed)()
    for way in (together, together_by_vmap):
        torch.testing.assert_close(fresh(way)(), alone, rtol=2e-2, atol=0)
    rows = [
        ("train(), seed after seed", "the loop by hand, full model", seed_after_seed, by_hand),
        ("train_together()", "train(), seed after seed", together, seed_after_seed),
        ("the same by torch.func.vmap", "train_together()", together_by_vmap, together),
    ]
    if chosen.compile:
        compiled = partial(together, compiled=True)
        rows.append(("train_together(compiled=True)", "train_together()", compiled, together))
    place = f"{torch.get_num_threads()} threads" if chosen.device == "cpu" else chosen.device
    title = f"8 seeds, {STEPS} steps of {CONFIG.batch_size}; {place}"
    table = Table("what", "against", "time ratio", "steps a second, times", title=title)
    for what, against, ours, theirs in rows:
        ratio = paired(fresh(ours), fresh(theirs), rounds=3)
        table.add_row(what, against, f"{ratio:.3g}", f"{1 / ratio:.3g}")
    console = Console(width=110)
    console.print(table)
    console.print(other_ways(chosen.compile, chosen.device))


if __name__ == "__main__":
    main()
