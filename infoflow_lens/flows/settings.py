"""What was asked of a flow: checked, and counted from 0."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor, nn

from infoflow_lens.flows.result import RuleName
from infoflow_lens.foundation.checks import (
    check_choice,
    check_integer,
    check_integers,
    check_seed,
)
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import check
from infoflow_lens.hooks import MechanismsResult
from infoflow_lens.hooks.influence.base import Threshold
from infoflow_lens.hooks.model.inputs import Batches
from infoflow_lens.hooks.model.points import reads_vectors

InfluenceKind = Literal["auto", "exact", "estimate", "resample"]
FEWEST = 8  # sequences from which a head's mean pattern says something [chosen]


@dataclass(frozen=True)
class Settings:
    """What was asked for, checked as far as it goes without a model."""

    positions: tuple[int, ...] | None
    layers: tuple[int, ...] | None
    rule: RuleName


def checked(
    position: Any,
    layer: Any,
    influence: Any,
    rule: Any,
    k: Any,
    n_directions: Any,
    threshold: Any,
    seed: Any,
) -> Settings:
    """The settings.

    Raises:
        InfoFlowError: naming the one that makes no sense.
    """
    hint = ", counted from 0, or from -1 backwards"
    positions = None
    if position != "all" if isinstance(position, str) else True:
        given = position if _is_many(position) else [position]
        positions = check_integers(given, "position", None, f"{hint}, or 'all'")
    layers = None
    if layer is not None:
        layers = check_integers(layer if _is_many(layer) else [layer], "layer", None, hint)
    if influence is not None:
        check_choice(influence, "influence", get_args(InfluenceKind))
    if not isinstance(rule, MechanismsResult):
        check_choice(rule, "rule", get_args(RuleName))
    check_integer(k, "k", 1)
    check_integer(n_directions, "n_directions", 2, ", whose spread tells the error")
    check(threshold, Threshold, "threshold")
    check_seed(seed)
    name: RuleName = "mechanisms" if isinstance(rule, MechanismsResult) else rule
    return Settings(positions, layers, name)


def _is_many(value: Any) -> bool:
    if isinstance(value, Tensor) or hasattr(value, "ndim"):
        return bool(value.ndim)
    return isinstance(value, Iterable) and not isinstance(value, str)


def check_given(text: Any) -> None:
    """Refuse, before a model is loaded, what holds nothing.

    Raises:
        InfoFlowError: for an empty text, or no text.
    """
    empty = isinstance(text, str) and not text
    if empty or (isinstance(text, (list, tuple)) and not len(text)):
        raise InfoFlowError(f"text is {text!r}: expected at least one text that is not empty")
    if text is None or isinstance(text, (bytes, int, float)):
        raise InfoFlowError(
            f"text is a {type(text).__name__}: expected a text, several, token ids or vectors"
        )


def several(model: nn.Module, text: Any) -> Any:
    """One sequence of ids or vectors as a list of one."""
    vectors = reads_vectors(model)
    if hasattr(text, "ndim") and text.ndim == (2 if vectors else 1):
        return text[None]
    if isinstance(text, (list, tuple)) and text and isinstance(text[0], int):
        return [text]
    return text


def layers_of(asked: tuple[int, ...] | None, n_layers: int) -> tuple[int, ...]:
    """The layers from 0.

    Raises:
        InfoFlowError: for layers that the model does not have.
    """
    if asked is None:
        return tuple(range(n_layers))
    if not all(-n_layers <= layer < n_layers for layer in asked):
        raise InfoFlowError(
            f"layer is {_one(asked)}: expected 0 to {n_layers - 1}, or -1 to -{n_layers} from the "
            "last backwards"
        )
    return tuple(sorted({layer % n_layers for layer in asked}))


def positions_of(
    asked: tuple[int, ...] | None, rows: Sequence[Tensor], n_more: int
) -> tuple[int, ...] | None:
    """The positions, each of which every input has.

    Raises:
        InfoFlowError: naming the input that is too short.
    """
    if asked is None:
        return None
    for index, row in enumerate(rows):
        n_states = len(row) + n_more  # CLS
        if not all(-n_states <= place < n_states for place in asked):
            which = f"text[{index}] has" if len(rows) > 1 else "the text has"
            raise InfoFlowError(
                f"position is {_one(asked)}, but {which} {n_states} positions: expected 0 to "
                f"{n_states - 1}, or -1 to -{n_states} from the last backwards"
            )
    return asked


def _one(values: tuple[int, ...]) -> str:
    return str(values[0]) if len(values) == 1 else str(list(values))


def check_enough(reference: Batches | None, rows: Sequence[Tensor]) -> None:
    """Refuse to measure mechanisms where they would say nothing.

    Raises:
        InfoFlowError: for too few sequences, or shorter ones.
    """
    n = len(rows) if reference is None else len(list(reference.sequences()))
    if n < FEWEST:
        what = "given" if reference is None else "reference inputs"
        raise InfoFlowError(
            f"rule is 'mechanisms' with {n} {what}: a head's mechanism shows over several inputs, "
            f"as over one its mean pattern is its pattern; expected at least {FEWEST}; give "
            "reference=[...], or rule=measure_mechanisms(...)"
        )
    longest = max(map(len, rows))
    if reference is not None and (reference.longest or 0) < longest:
        raise InfoFlowError(
            f"reference inputs have at most {reference.longest} tokens, the text {longest}: "
            "expected some that are as long, so that mechanisms show at every position; give "
            "longer ones, or cut the text with max_length"
        )
