"""What is asked of a model: a logit difference, a log-probability, a class, any function of it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from infoflow_lens.foundation.display import brief
from infoflow_lens.foundation.errors import InfoFlowError, refuse_names
from infoflow_lens.foundation.settings import check
from infoflow_lens.hooks.model.call import (
    chooses_position,
    count_choices_of_texts,
    gives_logits,
    run_few_tokens,
)
from infoflow_lens.hooks.model.points import is_causal

Answer: TypeAlias = str | int | Sequence[str | int]
Pooling = Literal["mean", "max", "first", "last"]
_POOLED: Mapping[Pooling, Callable[[Tensor], Tensor]] = {
    "mean": lambda states: states.mean(dim=1),
    "max": lambda states: states.amax(dim=1),
    "first": lambda states: states[:, 0],
    "last": lambda states: states[:, -1],
}


def logits_of(output: Any) -> Float[Tensor, "batch *pos choice"]:
    """Find the logits in what a model gives, [batch, pos, token]; of a classifier [batch, class].

    Raises:
        InfoFlowError: for an output without a tensor.
    """
    found = getattr(output, "logits", output)
    if not isinstance(found, Tensor):
        found = next((part for part in output if isinstance(part, Tensor)), None)
    if found is None:
        raise InfoFlowError(
            f"the model gives a {type(output).__name__} without logits: expected a tensor, or an "
            "output with logits; ask with FunctionOfOutput"
        )
    return found


class Readout(ABC):
    """A number that is asked of each sequence.

    Attributes:
        is_linear: whether it is linear in the logits, so that shares add up to it.
    """

    is_linear: bool = True

    @abstractmethod
    def read(self, output: Any) -> Float[Tensor, " batch"]:
        """Read the number off what the model gives, for each sequence."""

    def bind(self, model: nn.Module) -> "Readout":
        """Make it ready for a model: words become ids of its tokenizer.

        Raises:
            InfoFlowError: for words that are no single tokens.
        """
        return self


def bind_readout(readout: Any, model: nn.Module) -> Readout:
    """Make a readout ready for a model.

    Raises:
        InfoFlowError: for what is none, and as its `bind` says.
    """
    if not isinstance(readout, Readout):
        raise make_readout_error(readout)
    return readout.bind(model)


def make_readout_error(given: Any, other: str = "") -> InfoFlowError:
    """Make the error for what is no readout.

    Args:
        given: what it is.
        other: what else is taken in its place.
    """
    return InfoFlowError(
        f"readout is {brief(given)}: expected a Readout such as LogitDifference(' Mary', ' John'), "
        f"or FunctionOfOutput(f) for a function f of the logits{other}"
    )


@refuse_names(spelled="spell_ids")
@dataclass(frozen=True)
class LogitDifference(Readout):
    """The logit of an answer minus that of another; of several on a side, their mean.

    Args:
        answer: a token or a class, as a word of the tokenizer or an id; or several.
        against: the same; None for the mean of all logits: how far the answer stands out.
        position: of the logits, from 0 or from -1 backwards; of no use for a classifier.
        words: what it is called, if not by ids.
    """

    answer: Answer
    against: Answer | None = None
    position: int = -1
    words: str = field(default="", compare=False, repr=False)

    def bind(self, model: nn.Module) -> "LogitDifference":
        """Make ids of words.

        Raises:
            InfoFlowError: for words that are no single tokens, a model that gives states, and one
                that gives one number, which is its own mean.
        """
        check_logits(model, str(self))
        if self.against is None and gives_one_number(model):
            raise InfoFlowError(
                f"{self} is asked of a model whose output is one number, which minus the mean over "
                "all outputs is always 0: expected FunctionOfOutput(lambda logits: logits[:, 0])"
            )
        against = None if self.against is None else ids_of_answer(model, self.against)
        return replace(self, answer=ids_of_answer(model, self.answer), against=against)

    def spell_ids(self, model: nn.Module) -> "LogitDifference":
        """Show ids as the words or classes of a model."""

        return replace(self, words=" against ".join(self.name_sides(model)))

    def name_sides(self, model: nn.Module) -> tuple[str, str]:
        """Name the two sides by the words or classes of a model; where it has none, by ids."""
        is_word = _labels_of(model) is None and getattr(model, "tokenizer", None) is not None

        def name(answer: Answer | None) -> str:
            if answer is None:
                return "the mean"
            names = [name_choice(model, one) for one in _as_ids(answer)]
            return " or ".join(map(repr, names) if is_word else names)

        one, other = name(self.answer), name(self.against)
        # parts of a character, and numbers that the tokenizer does not know, are written alike
        if one == other and self.against is not None:
            ids = (" or ".join(map(str, _as_ids(side))) for side in (self.answer, self.against))
            kind = "token" if is_word else "class"
            one, other = (f"{one} ({kind} {number})" for number in ids)
        return one, other

    def read(self, output: Any) -> Float[Tensor, " batch"]:
        """Read the difference, in float32 or more."""
        logits = _widen(_take_position(logits_of(output), self.position))
        against = logits if self.against is None else take_ids(logits, self.against)
        return take_ids(logits, self.answer).mean(-1) - against.mean(-1)

    def __str__(self) -> str:
        if self.words:
            return self.words
        other = "the mean" if self.against is None else repr(self.against)
        return f"logit of {self.answer!r} minus that of {other}"


@dataclass(frozen=True)
class LogProbability(Readout):
    """The logarithm of an answer's probability; of several, of their sum.

    It is no linear function of the logits: shares are those of its linear part, and say so.

    Args:
        answer, position: as of :class:`LogitDifference`.
    """

    answer: Answer
    position: int = -1
    is_linear = False

    def bind(self, model: nn.Module) -> "LogProbability":
        """Make ids of words.

        Raises:
            InfoFlowError: for words that are no single tokens, a model that gives states, and one
                whose logits are of no distribution.
        """
        check_logits(model, str(self))
        if why := explain_no_chances(model):
            raise InfoFlowError(
                f"{self} is asked of a model whose {why}: expected one of its logits, "
                "FunctionOfOutput(lambda logits: logits[:, number]); or its probability, "
                "FunctionOfOutput(lambda logits: logits[:, number].sigmoid())"
            )
        return LogProbability(ids_of_answer(model, self.answer), self.position)

    def read(self, output: Any) -> Float[Tensor, " batch"]:
        """Read the logarithm, in float32 or more."""
        logits = _widen(_take_position(logits_of(output), self.position))
        return take_ids(logits.log_softmax(-1), self.answer).logsumexp(-1)

    def __str__(self) -> str:
        return f"log-probability of {self.answer!r}"


@dataclass(frozen=True)
class EmbeddingCosine(Readout):
    """The cosine of a sentence's embedding with another vector.

    Args:
        to: the other vector [d_model], such as the embedding of another sentence.
        name: what it is called.
        pooling: what the embedding is of the last states: their "mean", their largest values
            ("max"), the "first" or the "last" one; default, what the model's folder says, else the
            mean.

    Raises:
        InfoFlowError: for another vector that is none.
    """

    to: Float[Tensor, " d_model"]
    name: str = "cosine of the two embeddings"
    pooling: Pooling | None = None
    is_linear = False

    def __post_init__(self) -> None:
        check(self.pooling, Pooling | None, "pooling")
        if not isinstance(self.to, Tensor) or self.to.ndim != 1:
            what = list(self.to.shape) if isinstance(self.to, Tensor) else type(self.to).__name__
            raise InfoFlowError(
                f"the other embedding is {what}: expected a tensor [d_model], one vector, such as "
                "a row of what the model's encoder gives"
            )

    def bind(self, model: nn.Module) -> "EmbeddingCosine":
        """Take the pooling of a model."""
        return replace(self, pooling=self.pooling or getattr(model, "pooling", None))

    def read(self, output: Any) -> Float[Tensor, " batch"]:
        """Read the cosine off last states [batch, pos, d_model], in float32 or more.

        Raises:
            InfoFlowError: if the other vector has another width.
        """
        states = _widen(logits_of(getattr(output, "last_hidden_state", output)))
        embedding = _POOLED[self.pooling or "mean"](states)
        if embedding.shape[-1] != len(self.to):
            raise InfoFlowError(
                f"the other embedding has {len(self.to)} numbers, this model's have "
                f"{embedding.shape[-1]}: expected as many; make it with this model"
            )
        return torch.cosine_similarity(embedding, self.to.to(embedding), dim=-1)

    def __str__(self) -> str:
        return f"{self.name} ({self.pooling or 'mean'} of the last states)"


@dataclass(frozen=True)
class FunctionOfOutput(Readout):
    """Any function of the logits that the model gives; without logits, of its first tensor.

    That is the last states of an encoder, and the start logits where questions are answered.

    Args:
        function: from that tensor to a number for each sequence, [batch].
        is_linear: whether it is linear in the output.
        name: what it is called.
    """

    function: Callable[[Any], Float[Tensor, " batch"]]
    is_linear: bool = False
    name: str = "a function of the output"

    def read(self, output: Any) -> Float[Tensor, " batch"]:
        """Call the function.

        Raises:
            InfoFlowError: if it gives no number for each sequence, or asks for other outputs.
        """
        try:
            found = self.function(output)
        except AttributeError as error:
            raise InfoFlowError(
                f"{self.name} fails ({error}): expected a function of one tensor, the logits "
                "themselves; without logits, of the first tensor that the model gives"
            ) from error
        if not isinstance(found, Tensor) or found.ndim != 1:
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise InfoFlowError(
                f"{self.name} gives {shape}: expected a tensor with a number for each sequence"
            )
        return found

    def __str__(self) -> str:
        return self.name


def name_choice(model: nn.Module, number: int) -> str:
    """Name one of the logits: a token as a word, a class by its label; else by its number."""
    labels = _labels_of(model)
    if labels is not None:
        # the labels of a model that answers questions name its two outputs
        return (
            f"place {number}" if chooses_position(model) else labels.get(number, f"class {number}")
        )
    tokenizer: Any = getattr(model, "tokenizer", None)
    return str(number) if tokenizer is None else str(tokenizer.decode([number]))


def says_next_token(model: nn.Module) -> bool:
    """Say whether a model's logits are of the token behind each: of no classes, and no masks."""
    return gives_logits(model) and is_causal(model) and _labels_of(model) is None


def _labels_of(model: nn.Module) -> Mapping[int, str] | None:
    """Find the names of a classifier's classes in its config; None for a model of tokens."""
    original: Any = getattr(model, "original_model", None)
    labels = getattr(getattr(original, "config", None), "id2label", None)
    # every config has labels; classifiers count them, or give a number for each of them by text, as
    # where a model says whether a sentence follows another
    if not labels or not (
        hasattr(original, "num_labels") or count_choices_of_texts(model) == len(labels)
    ):
        return None
    return {
        int(number): f"class {number}" if name == f"LABEL_{number}" else str(name)
        for number, name in labels.items()
    }


def has_several_labels(model: nn.Module) -> bool:
    """Say whether a model's classes are each true or not, by its config."""
    config = getattr(getattr(model, "original_model", None), "config", None)
    return getattr(config, "problem_type", None) == "multi_label_classification"


def explain_no_chances(model: nn.Module) -> str:
    """Say why the softmax of what a model gives is no distribution; empty where it is one."""
    if has_several_labels(model):
        return "classes are each true or not, whatever others are"
    # of which it is always 1
    return "output is one number" if gives_one_number(model) else ""


def gives_one_number(model: nn.Module) -> bool:
    """Say whether a model gives one number, as of a regression or a ranking."""
    return run_few_tokens(model).output.shape[-1] == 1


def find_chances(model: nn.Module, logits: Float[Tensor, " choice"]) -> Float[Tensor, " choice"]:
    """Find how probable a model finds each token or class; classes need not exclude others."""
    wide = logits.double()
    return wide.sigmoid() if has_several_labels(model) else wide.softmax(-1)


def ids_of_answer(model: nn.Module, answer: Answer) -> tuple[int, ...]:
    """Make token ids of answers: words of the model's tokenizer, or ids.

    Raises:
        InfoFlowError: for words without a tokenizer, and words that are several tokens.
    """
    given = [answer] if isinstance(answer, str | int) else list(answer)
    if not given:
        raise InfoFlowError("the answer is empty: expected a word or an id, or several")
    found = []
    for one in given:
        ids = tokens_of_answer(model, one)
        if len(ids) != 1:
            tokenizer: Any = model.tokenizer
            pieces = [tokenizer.decode([i]) for i in ids]
            hint = (
                ""
                if str(one).startswith(" ")
                else "; a word within a text often begins with a blank"
            )
            raise InfoFlowError(
                f"the answer {one!r} is {len(ids)} tokens ({', '.join(map(repr, pieces))}): "
                f"expected one, such as the first in which two answers differ{hint}"
            )
        found += ids
    return tuple(found)


def tokens_of_answer(model: nn.Module, answer: str | int) -> list[int]:
    """Make token ids of a word, which may be several; of a class's label; an id is its own.

    Raises:
        InfoFlowError: for a word without a tokenizer, a negative id, and no class of a classifier.
    """
    if not isinstance(answer, str):
        if answer < 0:
            raise InfoFlowError(f"the answer is {answer}: expected an id from 0 on, or a word")
        return [int(answer)]
    labels = _labels_of(model)
    if labels is not None:
        found = [number for number, label in labels.items() if label == answer]
        if chooses_position(model):
            raise InfoFlowError(
                f"the answer is {answer!r}, but the answers of this model are positions of the "
                "text: expected the number of a position"
            )
        if not found:
            raise InfoFlowError(
                f"the answer is {answer!r}, but the answers of this model are classes: expected "
                f"one of {', '.join(map(repr, list(labels.values())[:20]))}, or a class's number"
            )
        return found[:1]
    tokenizer: Any = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise InfoFlowError(
            f"the answer {answer!r} is a word, but the model has no tokenizer: expected an id; or "
            "open the model with its tokenizer"
        )
    return [int(i) for i in tokenizer(answer, add_special_tokens=False)["input_ids"]]


def _as_ids(answer: Answer) -> Sequence[int]:
    given = [answer] if isinstance(answer, str | int) else answer
    if any(isinstance(one, str) for one in given):
        raise InfoFlowError(
            f"the answer {answer!r} has words: expected ids here; bind the readout to a model"
        )
    return [int(one) for one in given]


def check_logits(model: nn.Module, asked: str) -> None:
    """Refuse a model whose output is states, in which an id would take any number.

    Raises:
        InfoFlowError: with the readouts of states.
    """
    if hasattr(model, "anatomy") and not gives_logits(model):
        raise InfoFlowError(
            f"{asked} is asked of a model without a head, whose output is states and no logits: "
            "expected readout=EmbeddingCosine(...) or FunctionOfOutput(...), from Python; or the "
            "model with its head"
        )


def take_ids(logits: Float[Tensor, "batch choice"], answer: Answer) -> Float[Tensor, "batch id"]:
    """Read the numbers of some ids.

    Raises:
        InfoFlowError: for ids that the model does not have.
    """
    ids = list(_as_ids(answer))
    if not all(0 <= one < logits.shape[-1] for one in ids):
        raise InfoFlowError(
            f"the answer is {answer!r}: expected ids from 0 to {logits.shape[-1] - 1}, which the "
            "model gives logits of"
        )
    return logits[:, ids]


def _widen(values: Tensor) -> Tensor:
    """Give float32 or more: sums in half precision round away what an exchange changes."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _take_position(
    logits: Float[Tensor, "batch *pos choice"], position: int
) -> Float[Tensor, "batch choice"]:
    if logits.ndim == 2:
        return logits
    n_pos = logits.shape[1]
    if not -n_pos <= position < n_pos:
        raise InfoFlowError(
            f"position is {position}, and there are {n_pos}: expected 0 to {n_pos - 1}, or -1 to "
            f"-{n_pos} from the last backwards"
        )
    return logits[:, position]
