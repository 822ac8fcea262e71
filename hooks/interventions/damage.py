"""What the output loses: by position, at least 0 at each; and the loss of the next token."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, get_args

import torch
from annotated_types import MinLen
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import Count, Distinct, Remedy, check_fields
from infoflow_lens.hooks.interventions.edits import find_later_keys
from infoflow_lens.hooks.model.call import chooses_position, gives_logits, run_few_tokens
from infoflow_lens.hooks.model.inputs import Batch
from infoflow_lens.hooks.model.points import reads_vectors
from infoflow_lens.hooks.readouts import explain_no_chances

Metric = Literal["nmse", "kl", "loss"]
METRICS: tuple[Metric, ...] = get_args(Metric)
Read = Annotated[  # positions of the logits that count
    tuple[int, ...], MinLen(1), Distinct(), Remedy("such as (-1,), or None for all positions")
]
_CLOSED = -1e9  # a logit without weight, also of half precision in float32
_LARGE = 20.0  # a rise of logits beyond which exp(x) - 1 is no better than exp(x)


class Damage:
    """One metric: what is read of outputs, how much of it is lost, and what that is compared with.

    Rows are what is read of a sequence: its next-token logits at real or chosen positions, or its
    one vector.

    Args:
        name: "nmse", the squared change over the output's variance; "kl", the divergence
            KL(old || new) of distributions, in nats; "loss", the rise of the next-token loss,
            where it rises.
        read: the positions whose logits count; None for all.
        chooses: whether the output is a number for each position: a choice among these by "kl", a
            vector of one number at each by "nmse".
    """

    def __init__(self, name: Metric, read: Sequence[int] | None, chooses: bool = False) -> None:
        self.name = name
        self._chooses = chooses and name != "nmse"
        self._is_by_position = chooses and name == "nmse"
        self.read = None if read is None else list(read)
        self.n_rows = 0
        # of a sequence, such as a class or an embedding; None until an output is seen
        self._is_one_row: bool | None = None
        self._sum: Tensor | float = 0.0
        self._squares = 0.0

    def state(self) -> dict[str, Any]:
        """Return what was seen so far."""
        seen = ("n_rows", "_is_one_row", "_sum", "_squares")
        return {name: getattr(self, name) for name in seen}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of another object, as `state_dict` gave it."""
        self.__dict__.update(state)

    def rows(
        self, output: Float[Tensor, "batch *pos feature"], batch: Batch
    ) -> Float[Tensor, "batch row feature"]:
        """Take the output where it may count."""
        output = output if output.dtype in (torch.float32, torch.float64) else output.float()
        if self._is_by_position:
            output = output[..., None]
        if self._chooses:  # not among padding
            output = output.masked_fill(~batch.mask().to(output.device), _CLOSED)
        if output.ndim == 2:
            return output[:, None]
        if self.name == "loss":
            return output[:, :-1]
        if self.read is None:
            return output
        return output[torch.arange(len(output))[:, None], places_of(self.read, batch)]

    def mark_rows(self, batch: Batch) -> Bool[Tensor, "batch row"]:
        """Mark the rows that count: those of real positions, for "loss" with a real next one."""
        # before any output is seen: models over vectors give one row
        is_one = batch.tokens.ndim == 3 if self._is_one_row is None else self._is_one_row
        if is_one or self.read is not None:
            n_rows = 1 if self.read is None or is_one else len(self.read)
            return torch.ones(len(batch), n_rows, dtype=torch.bool)
        return batch.mask()[:, int(self.name == "loss") :]

    def states(self, batch: Batch) -> Bool[Tensor, "batch pos"]:
        """Mark the positions whose logits count."""
        real = batch.mask()
        if self.read is None:
            return real
        return torch.zeros_like(real).scatter_(1, places_of(self.read, batch), True)

    def see(self, output: Tensor, batch: Batch) -> None:
        """Take in the unchanged output of a batch."""
        self._is_one_row = output.ndim == 2 and not self._is_by_position
        counted = self.mark_rows(batch)
        self.n_rows += int(counted.sum())
        if self.name == "nmse":
            rows = self.rows(output, batch)[counted.to(output.device)].double()
            sums = torch.cat([rows.sum(dim=0), rows.square().sum()[None]]).cpu()  # the one wait
            self._sum, self._squares = self._sum + sums[:-1], self._squares + float(sums[-1])

    def per_row(self) -> float:
        """Compute what the loss of a row is divided by, before the mean over rows.

        Raises:
            InfoFlowError: if the output has no variance to compare with.
        """
        if self.name != "nmse":
            return 1.0
        variance = self._squares - float(torch.as_tensor(self._sum).square().sum()) / self.n_rows
        # a difference of two sums so near one another is rounding alone
        if variance <= 1e-12 * max(self._squares, 1e-300):
            raise InfoFlowError(
                "the output is the same for all inputs, so no share of its variance can be lost: "
                "expected inputs with different outputs; give more of them"
            )
        return variance / self.n_rows

    def reference(self, output: Float[Tensor, "batch *pos feature"], batch: Batch) -> "Reference":
        """Keep what the outputs of a batch are compared with."""
        rows = self.rows(output, batch)
        p = None if self.name == "nmse" else rows.softmax(dim=-1)
        following = batch.tokens[:, 1:, None].to(rows.device) if self.name == "loss" else None
        return Reference(rows, p, following, self.mark_rows(batch).to(rows.device))

    def lost(
        self, before: "Reference", after: Float[Tensor, "_copy *pos feature"], batch: Batch
    ) -> Float[Tensor, "copies batch"]:
        """Sum what the rows of each sequence lose, for several changed copies of a batch.

        Args:
            before: of the output.
            after: the outputs of the copies, one behind the other.
            batch: the sequences.
        """
        copies = after.split(len(batch))  # one copy of the logits at a time
        if before.p is None:
            changes = (self.rows(copy, batch) - before.rows for copy in copies)
            lost = torch.stack([change.square().sum(dim=-1) for change in changes])
        else:
            each = (_divergence(self.rows(copy, batch), before) for copy in copies)
            found, far = zip(*each, strict=True)
            lost = torch.stack(found)
            # rows that move far are few, and measured once more by logarithms, one copy at a time
            for index in torch.stack(far).flatten(1).any(dim=1).nonzero().flatten().tolist():
                change, risen = _change(self.rows(copies[index], batch), before)
                here = far[index]
                log_p = before.rows[here].log_softmax(dim=-1)
                exact = (log_p + change[here]).logsumexp(dim=-1) - risen[here]
                lost[index][here] = exact.to(lost[index])
        # no position makes up for another; rounding, too, may give less than 0
        return (lost.double().clamp(min=0) * before.counted).sum(dim=-1).cpu()


def places_of(read: Sequence[int], batch: Batch) -> Int[Tensor, "batch row"]:
    """Find these positions in each sequence; negative ones count from its end."""
    asked = torch.tensor(read)
    return torch.where(asked < 0, batch.mask().sum(dim=1)[:, None] + asked, asked)


class Reference(NamedTuple):
    """The unchanged rows of a batch.

    Attributes:
        rows: the outputs.
        p: the distributions that they are logits of; None for vectors.
        following: the next tokens, where their loss is asked for.
        counted: which rows count.
    """

    rows: Float[Tensor, "batch row feature"]
    p: Float[Tensor, "batch row feature"] | None
    following: Int[Tensor, "batch row 1"] | None
    counted: Bool[Tensor, "batch row"]


def _divergence(
    after: Float[Tensor, "batch row feature"], before: Reference
) -> tuple[Float[Tensor, "batch row"], Bool[Tensor, "batch row"]]:
    """Find the divergence of the new distribution, or the rise of the loss, from logits.

    Both are log E exp(x) for the change x less its mean, the loss less that of the next token: so
    small ones keep their digits. One logits tensor is made, and written in place.

    Returns:
        What is lost, and where a logit rises so far that exp(x) overflows or loses the others.
    """
    change, risen = _change(after, before)
    far = change.amax(dim=-1) > _LARGE
    return torch.linalg.vecdot(before.p, change.expm1_()).log1p() - risen, far


def _change(
    after: Float[Tensor, "batch row feature"], before: Reference
) -> tuple[Float[Tensor, "batch row feature"], Float[Tensor, "batch row"]]:
    """Subtract its mean from the change of logits; and find that of the next token's, if asked."""
    assert before.p is not None
    change = after - before.rows
    change -= torch.linalg.vecdot(before.p, change)[..., None]
    if before.following is None:
        return change, torch.zeros_like(change[..., 0])
    return change, change.gather(-1, before.following)[..., 0]


def metric_of(
    model: nn.Module, metric: Metric | None, read: Sequence[int] | None, shortest: int
) -> Damage:
    """Choose the metric that is asked for, or the one that fits the model.

    Args:
        model: whose outputs are compared.
        metric: None for "nmse" of vectors and "kl" of logits.
        read: the positions of the logits that count; None for all.
        shortest: positions of the shortest sequence.

    Raises:
        InfoFlowError: for a metric or positions that these outputs do not have.
    """
    other = explain_no_chances(model) if gives_logits(model) else "output is a vector"
    chosen = metric or ("nmse" if other else "kl")
    if chosen != "nmse" and other:
        raise InfoFlowError(
            f"metric is {chosen!r}, which compares distributions, and the model's {other}: "
            "expected 'nmse'"
        )
    if chosen == "loss" and (read is not None or shortest < 2):
        raise InfoFlowError(
            "metric 'loss' is over all next tokens: expected sequences of at least 2 tokens, and "
            "no positions to read; use 'kl' for single positions"
        )
    if chosen == "loss":
        NextTokenLoss().check(model, shortest)
    for position in read or ():
        if not -shortest <= position < shortest:
            raise InfoFlowError(
                f"read has position {position}: expected {-shortest} to {shortest - 1}"
            )
    return Damage(chosen, read, chooses_position(model))


def gives_token_logits(model: nn.Module, output: Tensor) -> bool:
    """Say whether a model's output is logits of tokens at each position."""
    n_vocab = getattr(getattr(model, "cfg", None), "d_vocab", None)
    is_wide = output.ndim == 3 and not (n_vocab and output.shape[-1] < n_vocab)
    return is_wide and gives_logits(model)


@dataclass(frozen=True)
class NextTokenLoss:
    """The loss of the next token, in nats, summed over each sequence.

    Args:
        last: how many predictions of each sequence count, the last ones; None for all.
        read: the positions whose predictions count, in place of the last ones; None for all.
    """

    last: Count | None = None
    read: Read | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def check(self, model: nn.Module, shortest: int) -> None:
        """Refuse models and sequences that have no such loss.

        Args:
            model: whose loss it is.
            shortest: tokens of the shortest sequence.

        Raises:
            InfoFlowError: for a model over vectors, one that gives no logits of tokens or sees the
                tokens behind a query, for sequences without a next token, or positions that have
                none.
        """
        found = next(self._find_lacks(model, shortest), None)
        if found:
            raise InfoFlowError("{}: expected {}".format(*found))

    def explain_lack(self, model: nn.Module, shortest: int) -> str:
        """Say why :meth:`check` refuses a model or its sequences; empty if it does not."""
        return next((lack for lack, _ in self._find_lacks(model, shortest)), "")

    def _find_lacks(self, model: nn.Module, shortest: int) -> Iterator[tuple[str, str]]:
        """Yield what is lacking, and what is expected in its place."""
        if reads_vectors(model):
            yield (
                "the model's output is a vector, which predicts no next token",
                "a language model; for others use measure_mechanisms",
            )
        if not gives_token_logits(model, run_few_tokens(model).output):
            yield (
                "the model gives states, classes or places, and no logits of a next token",
                "a language model with its head; for others use metric 'kl' or 'nmse'",
            )
        if shortest < 2:
            yield (
                f"a sequence has {shortest} token",
                "at least 2, one to read and one to predict; give longer ones",
            )
        for position in self.read or ():
            if not (-shortest <= position < -1 or 0 <= position < shortest - 1):
                yield (
                    f"read has position {position}",
                    f"one with a next token in every sequence, {-shortest} to -2 or 0 to "
                    f"{shortest - 2}; use metric 'kl' for the last",
                )
        layer = find_later_keys(model)
        if layer is not None:
            yield (
                f"queries of layer {layer} attend to later keys, so that the model sees the next "
                "token before it predicts it",
                "a causal language model; for others use measure_mechanisms, with metric 'kl' or "
                "'nmse'",
            )

    def states(self, batch: Batch) -> Bool[Tensor, "batch pos"]:
        """Mark the positions whose predictions count."""
        real = batch.mask()
        # a position predicts where a real token stands behind it: the last of a sequence does not
        following = torch.cat([real[:, 1:], torch.zeros_like(real[:, :1])], dim=1)
        if self.read is not None:
            return torch.zeros_like(real).scatter_(1, places_of(self.read, batch), True)
        if self.last is None:
            return following
        left = following.flip(1).cumsum(dim=1).flip(1)  # predictions from here to the end
        return following & (left <= self.last)

    def lost(
        self, logits: Float[Tensor, "batch pos d_vocab"], batch: Batch
    ) -> Float[Tensor, " batch"]:
        """Sum the losses of each sequence of a batch, from its logits; float64."""
        following = batch.tokens[:, 1:].to(logits.device)
        lost = torch.stack(
            [  # one sequence at a time: a float32 copy of all logits may be large
                torch.nn.functional.cross_entropy(row[:-1].float(), token, reduction="none")
                for row, token in zip(logits, following, strict=True)
            ]
        )
        return (lost.double().cpu() * self.states(batch)[:, :-1]).sum(dim=1)
