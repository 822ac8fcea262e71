"""The settings of a flow, the model and the texts that it begins with, and checks that they fit."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Annotated, Any, Literal

from annotated_types import Ge, MinLen
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.progress import hide_library_bars
from infoflow_lens.foundation.settings import Distinct, Remedy
from infoflow_lens.hooks.model.inputs import Batches, read_inputs
from infoflow_lens.hooks.model.points import reads_vectors
from infoflow_lens.models.loading import LoadedModel, load_any

RuleName = Literal["max_position", "top_k", "mechanisms"]
InfluenceKind = Literal["auto", "exact", "estimate", "resample"]
FEWEST = 8  # sequences from which a head's mean pattern says something [chosen]


Several = Annotated[tuple[int, ...], MinLen(1), Distinct()]
Place = Annotated[
    int | Several | Literal["auto", "all"],
    Remedy("counted from 0, or from -1 backwards; 'all' for all"),
]
Layers = Annotated[
    int | Several | None, Remedy("counted from 0, or from -1 backwards; None for all")
]
Directions = Annotated[int, Ge(2), Remedy("whose spread tells the error")]


def load_and_read(
    model: Any, text: Any, max_length: int | None, progress: bool, **options: Any
) -> tuple[LoadedModel, Batches]:
    """Return the model and what it reads.

    Args:
        model, options: as for `load_any`.
        text: a text or several, token ids, or vectors.
        max_length: longer texts are cut to so many tokens.
        progress: whether libraries show bars while they load a model.

    Raises:
        InfoFlowError: for no text, before the model is loaded; and as for `load_any` and
            `run_probes`.
    """
    check_text(text)
    with nullcontext() if progress else hide_library_bars():
        loaded = load_any(model, **options)
    given = as_list(loaded.model, text)
    return loaded, read_inputs(loaded.model, given, max_length=max_length, name="text")


def check_text(text: Any) -> None:
    """Refuse texts that are empty, before a model is loaded.

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


def as_list(model: nn.Module, text: Any) -> Any:
    """Wrap a single sequence of ids or vectors in a list; return several sequences unchanged."""
    vectors = reads_vectors(model)
    # a sequence of vectors has as many axes as a batch of ids
    if hasattr(text, "ndim") and text.ndim == (2 if vectors else 1):
        return text[None]
    if isinstance(text, (list, tuple)) and text and isinstance(text[0], int):
        return [text]
    return text


def layers_of(asked: Layers, n_layers: int) -> tuple[int, ...]:
    """Return the asked layers, counted from 0, in order.

    Raises:
        InfoFlowError: for layers that the model does not have.
    """
    if asked is None:
        return tuple(range(n_layers))
    asked = (asked,) if isinstance(asked, int) else asked
    if not all(-n_layers <= layer < n_layers for layer in asked):
        raise InfoFlowError(
            f"layer is {_one(asked)}: expected 0 to {n_layers - 1}, or -1 to -{n_layers} from the "
            "last backwards"
        )
    return tuple(sorted({layer % n_layers for layer in asked}))


def positions_of(asked: Place, rows: Sequence[Tensor], n_more: int) -> tuple[int, ...] | None:
    """Return the asked positions, as they were given; None for all, (-1,) for "auto".

    Raises:
        InfoFlowError: naming the input that is too short.
    """
    if isinstance(asked, str):
        return None if asked == "all" else (-1,)
    asked = (asked,) if isinstance(asked, int) else asked
    for index, row in enumerate(rows):
        n_states = len(row) + n_more  # CLS
        if not all(-n_states <= place < n_states for place in asked):
            which = f"text[{index}] has" if len(rows) > 1 else "the text has"
            raise InfoFlowError(
                f"position is {_one(asked)}, but {which} {n_states} positions: expected 0 to "
                f"{n_states - 1}, or -1 to -{n_states} from the last backwards"
            )
    return asked


def check_places(without: Sequence[int], longest: int) -> None:
    """Refuse positions to leave out that no text has.

    Raises:
        InfoFlowError: naming the first of them.
    """
    for place in without:
        if not -longest <= place < longest:
            raise InfoFlowError(
                f"without has position {place}, but the longest text has {longest} tokens: "
                f"expected 0 to {longest - 1}, or -1 to -{longest} from the last backwards"
            )


def _one(values: tuple[int, ...]) -> str:
    return str(values[0]) if len(values) == 1 else str(list(values))


def check_enough(reference: Batches | None, rows: Sequence[Tensor]) -> None:
    """Refuse reference inputs on which mechanisms cannot be measured.

    Raises:
        InfoFlowError: for too few sequences, or shorter ones.
    """
    n = len(rows) if reference is None else len(reference.rows)
    if n < FEWEST:
        what = "given" if reference is None else "reference inputs"
        raise InfoFlowError(
            f"rule is 'mechanisms' with {n} {what}: a head's mechanism shows over several inputs, "
            f"as over one its mean pattern is its pattern; expected at least {FEWEST}; give "
            "reference=[...], or rule=label_heads(...)"
        )
    # at positions that no reference input has, a head has no mean pattern
    longest = max(map(len, rows))
    if reference is not None and (reference.longest or 0) < longest:
        raise InfoFlowError(
            f"reference inputs have at most {reference.longest} tokens, the text {longest}: "
            "expected some that are as long, so that mechanisms show at every position; give "
            "longer ones, or cut the text with max_length"
        )
