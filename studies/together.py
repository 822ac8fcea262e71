"""Training of many seeds together: one batched model, with the numbers of `train` for each seed."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.progress import progress_bar
from infoflow_lens.foundation.settings import Seed, checked
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.models.host import VectorTransformer, build_model
from infoflow_lens.studies.stacked import Weights, check_stackable, compute_readouts
from infoflow_lens.training import (
    Data,
    Draw,
    Ledger,
    State,
    TrainingConfig,
    TrainingData,
    TrainingDivergedError,
    TrainingResult,
    optimizer_of,
    set_rate,
)

__all__ = ["Trained", "train_together"]

_EVALUATED_AT_ONCE = 2048  # sequences, of all seeds
_EAGER_STEPS = 3  # with a size of batch, before a GPU captures such a step as a graph
Readout: TypeAlias = Callable[[Weights, Tensor], Tensor]
Measures: TypeAlias = dict[str, Float[Tensor, " seed"]]
Step: TypeAlias = Callable[[Tensor, Tensor], Measures]
DataOfSeed: TypeAlias = Callable[[int], tuple[Data | Draw, Data]]


@dataclass(frozen=True)
class Trained:
    """One of the models that were trained together.

    Attributes:
        model: with its best weights.
        result: what `train` returns; ``stopped`` is "diverged" where `train` raises.
        lr: the learning rate of the last step of a seed that diverged; else NaN.
    """

    model: VectorTransformer
    result: TrainingResult
    lr: float = math.nan


@checked
def train_together(
    architecture: Architecture | Sequence[VectorTransformer],
    data: DataOfSeed | tuple[Data | Draw, Data],
    seeds: Sequence[Seed],
    config: TrainingConfig | None = None,
    *,
    device: str = "cpu",
    compiled: bool = False,
    progress: bool = True,
) -> tuple[Trained, ...]:
    """Train a model for each seed, all in one batched step, with the numbers of `train`.

    Each seed has what ``train(build_model(architecture, seed), *data(seed), replace(config,
    seed=seed))`` has, to the rounding of floats: initial weights, order of the sequences, clipping
    of its own gradient, learning rates, patience and best weights. A seed that has ended takes no
    more part. Many seeds fill a GPU, which replays a step as one CUDA graph; on a CPU they save the
    overhead of small operations.

    Args:
        architecture: of all models; or the models at their initial weights, one for each seed,
            which are trained where they are.
        data: a function from a seed to training and validation data, each as `train` takes them
            (a dataset, a pair of tensors, or, for training, a function from the number of an
            epoch); or such a pair of data for all seeds. All seeds have equally many sequences.
        seeds: different ones; of the initial weights, unless models are given, and of the order of
            the sequences.
        config: settings; `seed` is not read. Default, ``TrainingConfig()``.
        device: where to put models that are built here.
        compiled: whether to compile the step (`torch.compile`), which takes a minute; it pays on a
            GPU, over many steps.
        progress: show a bar.

    Returns:
        For each seed, the model and the result.

    Raises:
        InfoFlowError: for bad data, as `train` does; for seeds that are not different, data of
            different sizes, and what is computed by `train` alone: models that are not
            `build_model`'s, of several architectures, with hooks or with fixed parameters.
    """
    config = config or TrainingConfig()
    if not seeds or len(set(seeds)) < len(seeds):
        raise InfoFlowError(f"seeds is {list(seeds)!r}: expected different seeds, at least one")
    # fresh models, or those of the caller, one for each seed
    if isinstance(architecture, Architecture):
        models = [build_model(architecture, seed=seed, device=device) for seed in seeds]
    else:
        models = list(architecture)
        if len(models) != len(seeds):
            raise InfoFlowError(
                f"{len(models)} models are given for {len(seeds)} seeds: expected one for each"
            )
        if len({id(model) for model in models}) < len(models):
            raise InfoFlowError(
                "a model is given for two seeds, which would be trained over each other: expected "
                "different ones; copy.deepcopy makes another"
            )
    # models that differ in shape cannot be one tensor
    check_stackable(models)
    runs = []
    for seed, model in zip(seeds, models, strict=True):
        of_seed = TrainingData.check(model, *(data(seed) if callable(data) else data))
        own = replace(config, seed=seed)
        ledger = Ledger(model, own, of_seed.objective, of_seed.describe_run(model, own))
        runs.append(_Seed(ledger, of_seed))
    _check_equal([type(run.data.objective).__name__ for run in runs], "targets for", seeds)
    _check_equal([len(run.data.x) for run in runs], "training sequences", seeds)
    _check_equal([len(run.data.validation_x) for run in runs], "validation sequences", seeds)
    stack = _Stack(runs, config, compiled)
    # seeds that have stopped leave the stack
    with progress_bar("training", config.epochs, progress) as advance:
        while stack.runs:
            stack.epoch()
            stack.validate()
            stack.keep([index for index, run in enumerate(stack.runs) if not run.is_over()])
            advance(status=f"{len(stack.runs)} of {len(runs)} seeds")
    return tuple(run.finish() for run in runs)


def _check_equal(found: Sequence[object], what: str, seeds: Sequence[int]) -> None:
    if len(set(found)) > 1:
        listed = ", ".join(f"seed {s}: {n}" for s, n in zip(seeds, found, strict=True))
        raise InfoFlowError(
            f"the seeds differ in {what} ({listed}): expected the same for all; train them one by "
            "one, with train"
        )


class _Seed:
    """One seed: its data, and what is known of it."""

    def __init__(self, ledger: Ledger, data: TrainingData) -> None:
        self.ledger = ledger
        self.data = data
        self.diverged: TrainingDivergedError | None = None

    def is_over(self) -> bool:
        return self.diverged is not None or self.ledger.is_over()

    def finish(self) -> Trained:
        model = self.ledger.model
        assert isinstance(model, VectorTransformer)
        if self.diverged is not None:
            return Trained(model, self.diverged.result, self.diverged.lr)
        return Trained(model, self.ledger.finish())


class _Stack:
    """The weights of all seeds that have not ended, and their optimiser."""

    def __init__(self, runs: Sequence[_Seed], config: TrainingConfig, compiled: bool) -> None:
        self.runs = list(runs)
        self.config = config
        # one of the models stands for the shapes of all; its weights are not read in a step
        model = runs[0].ledger.model
        assert isinstance(model, VectorTransformer)
        self.device = model.unembed.W_U.device
        self.objective = runs[0].data.objective
        self.weights = {
            name: nn.Parameter(torch.stack([_parameter(run, name) for run in runs]))
            for name, _ in model.named_parameters()
        }
        self._prepare()
        readout = partial(compute_readouts, model)
        self.readout: Readout = torch.compile(readout) if compiled else readout
        self.data: tuple[Tensor, Tensor] | None = None

    def _prepare(self) -> None:
        """Make the optimiser of the weights as they are, and its step."""
        on_gpu = self.device.type == "cuda"
        self.optimizer = optimizer_of(
            list(self.weights.values()), self.config, fused=True, in_graph=on_gpu
        )
        self.step: Step = _Graphs(self._step, self.device) if on_gpu else self._step

    def epoch(self) -> None:
        """Pass over the data of every seed once."""
        x, y = self._data()
        n, first, lr = x.shape[1], self.runs[0].ledger, self.config.lr
        # [seed, n]: each seed goes through its sequences in an order of its own
        order = torch.stack([run.ledger.order(n) for run in self.runs]).to(self.device)
        seeds = torch.arange(len(self.runs), device=self.device)[:, None]
        totals: dict[str, Tensor] = {}
        batches = order.split(self.config.batch_size, dim=1)
        for step, rows in enumerate(batches):
            # all seeds are in the same epoch, so that one rate holds for all
            lr = first.rate(step, len(batches))
            set_rate(self.optimizer, lr)
            # seeds [seed, 1] beside rows [seed, batch]: each seed reads its own sequences
            for name, means in self.step(x[seeds, rows], y[seeds, rows]).items():
                # weighed by the sequences, as the last batch may be smaller;
                # a new tensor, as the next replay of a graph overwrites the means
                part = means * rows.shape[1]
                totals[name] = totals[name] + part if name in totals else part
        of_seeds = {name: (total / n).tolist() for name, total in totals.items()}
        for index, run in enumerate(self.runs):
            own = {name: values[index] for name, values in of_seeds.items()}
            _note(run, partial(run.ledger.note_training, own, lr))

    def _step(self, x: Float[Tensor, "seed batch ..."], y: Tensor) -> Measures:
        """Return a step of all seeds; what it measures before the update."""
        measures = torch.func.vmap(self.objective.measures)(self.readout(self.weights, x), y)
        self.optimizer.zero_grad(set_to_none=True)
        # seeds share no weight, so that the sum gives each the gradient of its own loss
        measures["train_loss"].sum().backward()
        self._clip()
        self.optimizer.step()
        return {name: means.detach() for name, means in measures.items()}

    def _data(self) -> tuple[Float[Tensor, "seed batch ..."], Tensor]:
        """Return what the seeds are trained on in the next epoch."""
        if self.data is None or any(run.data.draw is not None for run in self.runs):
            epoch = len(self.runs[0].ledger.history) + 1
            pairs = [run.data.draw_epoch(epoch, self.device) for run in self.runs]
            self.data = _stack(pairs)
        return self.data

    def _clip(self) -> None:
        """Shorten each seed's gradient to the largest norm, as `clip_grad_norm_` does for one."""
        gradients = [p.grad for p in self.weights.values() if p.grad is not None]
        if self.config.grad_clip is not None:
            norms = torch.stack([part.flatten(1).norm(dim=1) for part in gradients]).norm(dim=0)
            # as `clip_grad_norm_` has it: a factor for each seed, which only shortens
            factors = (self.config.grad_clip / (norms + 1e-6)).clamp(max=1)
            for part in gradients:
                part.mul_(factors.view(-1, *[1] * (part.ndim - 1)))

    @torch.no_grad()
    def validate(self) -> None:
        """Measure the validation error of each seed; where it is the best, keep its weights."""
        batch = max(1, _EVALUATED_AT_ONCE // len(self.runs))
        pairs = [(run.data.validation_x, run.data.validation_y) for run in self.runs]
        x, y = _stack(pairs)
        parts = x.split(batch, dim=1)
        outputs = [self.readout(self.weights, part.to(self.device)).cpu() for part in parts]
        for index, (run, output) in enumerate(zip(self.runs, torch.cat(outputs, 1), strict=True)):
            # a seed that diverged in this epoch has no row for validation errors
            if run.diverged is None:
                _note(run, partial(self._note_validation, index, output, y[index]))

    def _note_validation(self, index: int, output: Tensor, y: Tensor) -> None:
        ledger = self.runs[index].ledger
        if ledger.note_validation(output, y):
            buffers = ledger.initial_state  # which holds what is no weight, too
            own = {name: weight[index].detach().clone() for name, weight in self.weights.items()}
            ledger.best_state = State({**buffers, **own})

    def keep(self, indices: Sequence[int]) -> None:
        """Keep these seeds alone, and go on with them."""
        if len(indices) == len(self.runs):
            return
        self.runs = [self.runs[index] for index in indices]
        if not self.runs:
            return
        chosen: Int[Tensor, " seed"] = torch.tensor(indices, device=self.device)
        states = [self.optimizer.state[weight] for weight in self.weights.values()]
        self.weights = {
            name: nn.Parameter(weight.detach()[chosen]) for name, weight in self.weights.items()
        }
        # optimiser and graphs hold tensors of the seeds before, so both are made anew
        self._prepare()
        # the new optimiser takes over the moments of the seeds that go on
        for weight, state in zip(self.weights.values(), states, strict=True):
            self.optimizer.state[weight] = {
                # the count of steps is one number for all seeds
                name: value[chosen] if isinstance(value, Tensor) and value.ndim else value
                for name, value in state.items()
            }
        if self.data is not None:
            self.data = (self.data[0][chosen], self.data[1][chosen])


class _Graphs:
    """A step that a GPU replays as one graph, for each size of batch.

    A step of small models is hundreds of operations that each take longer to start than to run. The
    first steps of a size are run one operation after the other, which prepares libraries and the
    optimiser for the graph.
    """

    def __init__(self, step: Step, device: torch.device) -> None:
        self.step = step
        self.stream = torch.cuda.Stream(device)
        self.n_eager: Counter[torch.Size] = Counter()
        self.graphs: dict[torch.Size, tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Measures]] = {}

    def __call__(self, x: Float[Tensor, "seed batch ..."], y: Tensor) -> Measures:
        size = x.shape
        if size not in self.graphs:
            if self.n_eager[size] < _EAGER_STEPS:
                self.n_eager[size] += 1
                return self._eager(x, y)
            # copies, which stay the graph's inputs
            self.graphs[size] = self._capture(x.clone(), y.clone())
        graph, x_read, y_read, measures = self.graphs[size]
        # a graph reads and writes the memory that it was captured with
        x_read.copy_(x)
        y_read.copy_(y)
        graph.replay()
        return measures

    def _eager(self, x: Tensor, y: Tensor) -> Measures:
        """Give a step that is run at once, on the stream on which the graphs are captured later."""
        others = torch.cuda.current_stream(self.stream.device)
        # either stream waits for what the other one has begun
        self.stream.wait_stream(others)
        with torch.cuda.stream(self.stream):
            measures = self.step(x, y)
        others.wait_stream(self.stream)
        return measures

    def _capture(
        self, x: Tensor, y: Tensor
    ) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Measures]:
        """Capture the graph of a step, with what it reads and writes; nothing is run."""
        graph = torch.cuda.CUDAGraph()
        # other threads may go on using the GPU
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            measures = self.step(x, y)
        return graph, x, y, measures


def _parameter(run: _Seed, name: str) -> Tensor:
    return run.ledger.model.get_parameter(name).detach()


def _stack(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Stack inputs and targets of all seeds, without copies where they are the same for all."""
    if all(x is pairs[0][0] and y is pairs[0][1] for x, y in pairs):
        x, y = pairs[0]
        return x.expand(len(pairs), *x.shape), y.expand(len(pairs), *y.shape)
    return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])


def _note(run: _Seed, note: Callable[[], object]) -> None:
    """Note an epoch, or that the seed has diverged."""
    try:
        note()
    except TrainingDivergedError as error:
        run.diverged = error
