"""Steps a second of our trainer, in one run: against the loop that one writes, and seeds together.

Run: python -m benchmarks.training [--compile] [--device cuda]   (some minutes; medians of paired
rounds)

Eight seeds of the demo's model. Our side does all that `train` does: clipping, the validation of
every epoch in the demo's proportion, the best weights kept, the record. The loop does none of it.

Seeds together: `train_together`, whose forward pass is written for stacked weights. `--compile`
adds torch.compile, which takes a minute before the first step.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.timing import paired
from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.models.host import VectorTransformer, build_model
from infoflow_lens.studies.demo import DemoConfig
from infoflow_lens.studies.together import train_together
from infoflow_lens.training import train

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


def order(x: Tensor, seed: int) -> tuple[Tensor, ...]:
    """The rows of every step of the epoch, as `train` takes them."""
    generator = torch.Generator().manual_seed(derive_seed("epoch", seed, 0))
    return torch.randperm(len(x), generator=generator).to(x.device).split(CONFIG.batch_size)


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
    torch.testing.assert_close(fresh(together)(), alone, rtol=2e-2, atol=0)
    rows = [
        ("train(), seed after seed", "the loop by hand, full model", seed_after_seed, by_hand),
        ("train_together()", "train(), seed after seed", together, seed_after_seed),
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
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
