"""Steps a second of our trainer, in one run: against the loop that one writes, and seeds together.

Run: python -m benchmarks.training   (under two minutes; medians of paired rounds)

Eight seeds of the demo's model. Our side does all that `train` does: clipping, the validation of
every epoch in the demo's proportion, the best weights kept, the record. The loop does none of it.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.timing import paired
from infoflow_lens.experiments.demo import DemoConfig
from infoflow_lens.foundation.seeds import derived_seed
from infoflow_lens.models.host import VectorTransformer, build_model
from infoflow_lens.training import TrainingConfig, nmse, train

SEEDS = range(8)
STEPS = 20
DEMO = DemoConfig()
CONFIG = replace(DEMO.training(), epochs=1)
N_TRAIN = STEPS * CONFIG.batch_size
N_VALIDATION = N_TRAIN * DEMO.n_validation // DEMO.n_train
TASK = DEMO.task()
TRAIN_DATA, VALIDATION_DATA = TASK.sample(N_TRAIN, seed=0), TASK.sample(N_VALIDATION, seed=1)


def new_model(seed: int) -> VectorTransformer:
    """The demo's model before training."""
    return build_model(DEMO.architecture(), seed=seed)


def order(seed: int) -> tuple[Tensor, ...]:
    """The rows of every step, as `train` takes them."""
    generator = torch.Generator().manual_seed(derived_seed("epoch", seed, 0))
    return torch.randperm(N_TRAIN, generator=generator).split(CONFIG.batch_size)


def by_hand(models: list[VectorTransformer]) -> None:
    """The loop that one writes over a HookedTransformer, seed after seed."""
    x, y = TRAIN_DATA
    for seed, model in zip(SEEDS, models, strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=CONFIG.lr)
        for rows in order(seed):
            loss = nn.functional.mse_loss(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def seed_after_seed(models: list[VectorTransformer]) -> list[float]:
    """Our trainer; the validation error of each model."""
    return [
        train(model, TRAIN_DATA, VALIDATION_DATA, replace(CONFIG, seed=seed), progress=False).nmse
        for seed, model in zip(SEEDS, models, strict=True)
    ]


class Readout(nn.Module):
    """A model whose forward pass is the fast read-out, for `functional_call`."""

    def __init__(self, model: VectorTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """The output at CLS."""
        return self.model.forward_readout(x)


def together(models: list[VectorTransformer]) -> list[float]:
    """All seeds in one step by torch.func, with the numbers of `seed_after_seed`."""
    config: TrainingConfig = CONFIG
    readouts = [Readout(model) for model in models]
    weights, buffers = torch.func.stack_module_state(readouts)
    base = readouts[0]

    def output(weights: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(base, (weights, buffers), (x,))

    def loss(
        weights: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor
    ) -> Tensor:
        return nn.functional.mse_loss(output(weights, buffers, x), y)

    gradients: Callable[..., dict[str, Tensor]] = torch.func.vmap(torch.func.grad(loss))
    optimizer = torch.optim.AdamW(
        list(weights.values()), lr=config.lr, weight_decay=config.weight_decay
    )
    x, y = TRAIN_DATA
    for step, rows in enumerate(zip(*map(order, SEEDS), strict=True)):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate(step, STEPS)
        chosen = torch.stack(rows)
        found = gradients(weights, buffers, x[chosen], y[chosen])
        # the norm of each seed is clipped by itself
        squares = [part.flatten(1).square().sum(dim=1) for part in found.values()]
        norm = torch.stack(squares).sum(dim=0).sqrt()
        factor = ((config.grad_clip or math.inf) / (norm + 1e-6)).clamp(max=1)
        for name, part in found.items():
            weights[name].grad = part * factor.view(-1, *[1] * (part.ndim - 1))
        optimizer.step()
    x, y = VALIDATION_DATA
    with torch.no_grad():
        outputs = torch.func.vmap(output, in_dims=(0, 0, None))(weights, buffers, x)
    return [nmse(part, y) for part in outputs]


def main() -> None:
    """Measure and print."""
    models = [new_model(seed) for seed in SEEDS]
    start = [{k: v.clone() for k, v in model.state_dict().items()} for model in models]

    def fresh(function: Callable[[list[VectorTransformer]], object]) -> Callable[[], object]:
        def run() -> object:
            for model, state in zip(models, start, strict=True):
                model.load_state_dict(state)
            return function(models)

        return run

    # the same work: both reach the same errors
    torch.testing.assert_close(fresh(together)(), fresh(seed_after_seed)(), rtol=2e-2, atol=0)
    rows = [
        ("train(), seed after seed", "the loop by hand, full model", seed_after_seed, by_hand),
        ("8 seeds together by torch.func.vmap", "train(), seed after seed", together,
         seed_after_seed),
    ]  # fmt: skip
    title = f"8 seeds, {STEPS} steps of {CONFIG.batch_size}; {torch.get_num_threads()} threads"
    table = Table("what", "against", "time ratio", "steps a second, times", title=title)
    for what, against, ours, theirs in rows:
        ratio = paired(fresh(ours), fresh(theirs), rounds=3)
        table.add_row(what, against, f"{ratio:.3g}", f"{1 / ratio:.3g}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
