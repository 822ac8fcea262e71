"""What training minimises: squared error on vectors, cross-entropy on labels."""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, ForwardRef, NamedTuple, TypeAlias, Union

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.lazy import datasets
from infoflow_lens.foundation.modules import eval_mode
from infoflow_lens.foundation.sequences import check_id_range, check_token_ids
from infoflow_lens.foundation.settings import Count, checked

if TYPE_CHECKING:
    from datasets import Dataset
else:  # a name that is read later loads no library; Python 3.10 does not join it by |
    Dataset = ForwardRef("datasets.Dataset", module=__name__)
Data: TypeAlias = Union[Dataset, tuple[Tensor, Tensor]]  # noqa: UP007
Predict: TypeAlias = Callable[[Tensor], Tensor]
Pair: TypeAlias = tuple[Tensor, Tensor]  # sequences and targets


def nmse(
    prediction: Float[Tensor, "batch d_output"], target: Float[Tensor, "batch d_output"]
) -> float:
    """Return the squared error over the target's variance; 1 for the best constant (App. C)."""
    error = (prediction - target).double().square().mean()
    spread = (target - target.mean(dim=0)).double().square().mean()
    return float(error / spread)


class LabelScores(NamedTuple):
    """How well labels are predicted.

    Attributes:
        loss: mean cross-entropy, in nats.
        accuracy: share of sequences whose label has the largest logit.
    """

    loss: float
    accuracy: float


class SquaredError:
    """Mean squared error on target vectors [batch, d_output].

    Attributes:
        score: the entry of a history row that the best epoch has least of.
    """

    score: ClassVar[str] = "validation_nmse"

    def predict(self, model: nn.Module) -> Predict:
        """Return `forward_readout` of hosted models, which is faster than the forward pass."""
        predict: Predict = getattr(model, "forward_readout", model)
        return predict

    def measures(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        return {"train_loss": nn.functional.mse_loss(output, y)}

    def validation(self, output: Tensor, y: Tensor) -> dict[str, float]:
        """Return the NMSE."""
        return {"validation_nmse": nmse(output, y)}

    def check_fit(self, model: nn.Module, x: Tensor, y: Tensor, name: str) -> None:
        """Check shape and dtype on one sequence, where a wrong one shows.

        Raises:
            InfoFlowError: where output and targets differ in width; and what the model refuses.
        """
        output = outputs_of(model, self.predict(model), x[:1])
        if output.shape[1:] != y.shape[1:]:
            raise InfoFlowError(
                f"the model's output has shape {tuple(output.shape[1:])} a sequence, the {name} "
                f"targets {tuple(y.shape[1:])}: build the model with d_output {y.shape[1]}"
            )

    def check_variance(self, y: Tensor, name: str) -> None:
        """Refuse targets without variance, for which NMSE is undefined.

        Raises:
            InfoFlowError: if they do not vary.
        """
        if len(y) < 2 or float(y.double().var(dim=0).sum()) == 0:
            raise InfoFlowError(
                f"the {name} targets ({len(y)} sequences) do not vary, so NMSE is undefined: "
                "expected at least two different targets"
            )

    def status(self, row: Mapping[str, float | int], best: float) -> str:
        """Return the loss and NMSE."""
        error = row["validation_nmse"]
        return f"loss {row['train_loss']:.2e}  NMSE {error:.2e}  best {best:.2e}"


class CrossEntropy:
    """Cross-entropy on labels [batch], read at the last position."""

    score: ClassVar[str] = "validation_loss"

    def predict(self, model: nn.Module) -> Predict:
        """Return a function that gives logits [batch, label] at the last position.

        It is the model's `forward_readout`, where the model has one.
        """
        fast: Predict | None = getattr(model, "forward_readout", None)
        if fast is not None:
            return fast

        def read_last(x: Tensor) -> Tensor:
            logits: Tensor = model(x)
            return logits[:, -1] if logits.ndim == 3 else logits

        return read_last

    def measures(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the loss and the accuracy."""
        accuracy = (output.detach().argmax(dim=1) == y).to(output.dtype).mean()
        return {"train_loss": nn.functional.cross_entropy(output, y), "train_accuracy": accuracy}

    def validation(self, output: Tensor, y: Tensor) -> dict[str, float]:
        """Return the loss and accuracy."""
        scores = label_scores(output, y)
        return {"validation_loss": scores.loss, "validation_accuracy": scores.accuracy}

    def check_fit(self, model: nn.Module, x: Tensor, y: Tensor, name: str) -> None:
        """Compare token ids, lengths and labels with what the model has.

        Raises:
            InfoFlowError: naming the first that does not fit.
        """
        cfg: Any = getattr(model, "cfg", None)
        if cfg is not None and not getattr(model, "reads_vectors", False):
            check_token_ids(x, f"the model in {name}", longest=int(cfg.n_ctx))
            check_id_range(x, [(0, int(cfg.d_vocab))], f"the model in {name}")
        output = outputs_of(model, self.predict(model), x[:1])
        if output.ndim != 2:
            raise InfoFlowError(
                f"the model's output has shape {tuple(output.shape)} for one sequence: expected "
                "logits [batch, label] or [batch, pos, label]"
            )
        low, high, n_labels = int(y.min()), int(y.max()), output.shape[1]
        if low < 0 or high >= n_labels:
            raise InfoFlowError(
                f"the {name} targets are labels from {low} to {high}, but the model has "
                f"{n_labels} outputs: expected labels from 0 to {n_labels - 1}; build the model "
                "with d_output, the number of labels"
            )

    def check_variance(self, y: Tensor, name: str) -> None:
        """Accept any labels, since all have a cross-entropy."""

    def status(self, row: Mapping[str, float | int], best: float) -> str:
        """Return losses and accuracy."""
        return (
            f"loss {row['train_loss']:.2e}  validation {row['validation_loss']:.2e}  "
            f"best {best:.2e}  accuracy {row['validation_accuracy']:.1%}"
        )


# A loss, what is reported of it, and what it asks of data and model
Objective: TypeAlias = SquaredError | CrossEntropy


def label_scores(
    logits: Float[Tensor, "batch label"], labels: Int[Tensor, " batch"]
) -> LabelScores:
    """Compute cross-entropy and accuracy of logits; equal largest logits count for the first."""
    loss = float(nn.functional.cross_entropy(logits.double(), labels))
    return LabelScores(loss, float((logits.argmax(dim=1) == labels).double().mean()))


def objective_for(y: Tensor) -> Objective:
    """Return the objective that targets of this kind are for."""
    return CrossEntropy() if _are_labels(y) else SquaredError()


def _are_labels(y: Tensor) -> bool:
    return y.ndim == 1 and not (y.is_floating_point() or y.is_complex() or y.dtype == torch.bool)


def check_module(model: Any) -> None:
    """Refuse what is no module with weights.

    Raises:
        InfoFlowError: with what to do.
    """
    if not isinstance(model, nn.Module):
        raise InfoFlowError(
            f"model is a {type(model).__name__}: expected a module; make one with build_model, or "
            "load it with load_any(name).model"
        )
    if next(model.parameters(), None) is None:
        raise InfoFlowError(
            f"the {type(model).__name__} has no parameters: expected a module that can be trained"
        )


def outputs_of(
    model: nn.Module, predict: Predict, x: Tensor, batch_size: int = 2048
) -> Float[Tensor, "batch output"]:
    """Return what `predict` makes of `x`, on the CPU; the model keeps its mode and gradients."""
    device = next(model.parameters()).device
    with eval_mode(model):
        return torch.cat([predict(part.to(device)).cpu() for part in x.split(batch_size)])


def tensors_of(data: Any, name: str) -> tuple[Tensor, Tensor]:
    """Return the x and y of a dataset or pair, checked; labels as int64.

    Raises:
        InfoFlowError: for what is neither, is empty, or has values that cannot be learned from.
    """
    # a pair first, as a look for a dataset loads its library
    if isinstance(data, tuple | list) and [isinstance(d, Tensor) for d in data] == [True, True]:
        x, y = data
    elif isinstance(data, datasets.Dataset):
        if missing := {"x", "y"} - set(data.column_names):
            raise InfoFlowError(
                f"the {name} dataset has columns {data.column_names}, without "
                f"{' and '.join(sorted(missing))}: rename its columns to x and y"
            )
        if len(data) == 0:
            raise InfoFlowError(f"the {name} data are empty: expected at least one sequence")
        rows = data.with_format("torch")[:]
        x, y = rows["x"], rows["y"]
    else:
        of = f" of {len(data)}" if isinstance(data, tuple | list) else ""
        raise InfoFlowError(
            f"the {name} data are {type(data).__name__}{of}: expected a datasets.Dataset with "
            "columns x and y, or a pair of tensors (x, y)"
        )
    if len(x) == 0:
        raise InfoFlowError(f"the {name} data are empty: expected at least one sequence")
    if len(x) != len(y):
        raise InfoFlowError(
            f"the {name} data have {len(x)} inputs but {len(y)} targets: expected equally many"
        )
    # integers are labels; other targets are vectors
    if _are_labels(y):
        # cross-entropy takes labels of this type alone
        y = y.long()
    elif y.ndim != 2:
        raise InfoFlowError(
            f"the {name} targets have shape {tuple(y.shape)}: expected [batch, d_output]; for "
            "scalars add an axis with y[:, None]; labels are integers [batch]"
        )
    elif not y.is_floating_point():
        raise InfoFlowError(
            f"the {name} targets are {y.dtype}: convert them with y.float(), or, if they are "
            "labels, leave out the second axis"
        )
    for part, values in (("inputs", x), ("targets", y)):
        if values.is_floating_point() and not values.isfinite().all():
            raise InfoFlowError(
                f"the {name} {part} have NaN or infinite values: clean the data first"
            )
    return x, y


def _outputs_and_targets(
    model: nn.Module, data: Data, batch_size: int, wanted: type[Any], other: str
) -> tuple[Tensor, Tensor]:
    check_module(model)
    x, y = tensors_of(data, "evaluation")
    objective = objective_for(y)
    if not isinstance(objective, wanted):
        raise InfoFlowError(f"the evaluation targets are {y.dtype} {tuple(y.shape)}: use {other}")
    objective.check_fit(model, x, y, "evaluation")
    objective.check_variance(y, "evaluation")
    # on the CPU, where they are compared
    return outputs_of(model, objective.predict(model), x, batch_size), y.cpu()


@checked
def evaluate(model: nn.Module, data: Data, batch_size: Count = 2048) -> float:
    """Compute the NMSE of the model on `data`, without touching its mode or gradients.

    Raises:
        InfoFlowError: for empty data, labels, or targets that are constant (NMSE is undefined).
    """
    other = "evaluate_labels for labels"
    return nmse(*_outputs_and_targets(model, data, batch_size, SquaredError, other))


@checked
def evaluate_labels(model: nn.Module, data: Data, batch_size: Count = 2048) -> LabelScores:
    """Compute the cross-entropy and accuracy of the model on labels, read at the last position.

    Raises:
        InfoFlowError: for empty data, targets that are no labels, or data that are not the model's.
    """
    other = "evaluate for target vectors"
    return label_scores(*_outputs_and_targets(model, data, batch_size, CrossEntropy, other))


def is_finite(row: Mapping[str, float | int]) -> bool:
    """Say whether every number of a history row is finite."""
    return all(math.isfinite(value) for value in row.values())


def standardise(train: Pair, validation: Pair) -> tuple[Pair, Pair]:
    """Take the targets' mean and deviation in training out of both; NMSE stays what it is.

    Sequences [sample, ...] and targets [sample, d_output], which must not be constant.
    """
    mean, deviation = train[1].mean(), train[1].std()
    return (train[0], (train[1] - mean) / deviation), (
        validation[0],
        (validation[1] - mean) / deviation,
    )
