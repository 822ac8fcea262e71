"""What users have, as batches that a model reads: strings, ids, masks, datasets, loaders."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from infoflow_lens.foundation.checks import check_integer
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.hooks.model.points import (
    check_inputs,
    is_bridge,
    layer_count,
    reads_vectors,
    starts_at_layers,
)

COLUMNS = ("input_ids", "tokens", "text", "x")  # of datasets, in this order
_LONG_TEXT = 2**16  # characters; shorter ones are tokenised whole
_LONGEST_EXAMPLE = 256  # a longer window does not show in it
_MASKS = ("attention_mask", "one_zero_attention_mask")  # HookedEncoder has the second


@dataclass(frozen=True)
class Batch:
    """Some sequences, padded on the right.

    Attributes:
        tokens: vector tokens [batch, pos, d_token] or token ids [batch, pos].
        lengths: int [batch], the real tokens of each; None if nothing is padded.
    """

    tokens: Tensor
    lengths: Int[Tensor, " batch"] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def halves(self) -> tuple["Batch", "Batch"]:
        """The first and the second half."""
        middle = len(self) // 2
        return self._part(slice(0, middle)), self._part(slice(middle, None))

    def _part(self, rows: slice) -> "Batch":
        return Batch(self.tokens[rows], None if self.lengths is None else self.lengths[rows])

    def run(self, model: nn.Module) -> Any:
        """The model on these sequences, on its device, with a mask where they are padded."""
        device = next(model.parameters()).device
        mask = {}
        if self.lengths is not None or _masks_by_itself(model):
            mask[mask_argument(model)] = self.mask().to(device=device, dtype=torch.long)
        return model(self.tokens.to(device), **mask)

    def mask(self) -> Bool[Tensor, "batch pos"]:
        """Which positions are real tokens."""
        places = torch.arange(self.tokens.shape[1])
        lengths = self.lengths
        if lengths is None:
            lengths = torch.full((len(self.tokens),), self.tokens.shape[1])
        return places < lengths[:, None]


@dataclass(frozen=True)
class Extent:
    """How many sequences there are, and how long.

    Attributes:
        n_sequences: how many.
        longest: tokens of the longest.
        shortest: tokens of the shortest.
    """

    n_sequences: int
    longest: int
    shortest: int


class Batches:
    """Sequences in their own order, in batches of at most so many.

    Attributes:
        extent: how many and how long; None for a loader.
        n_sequences: how many; None for a loader of unknown length.
        longest: tokens of the longest; None if unknown.
        shortest: tokens of the shortest; 1 if unknown.
    """

    def __init__(
        self,
        model: nn.Module,
        sequences: Tensor | Sequence[Tensor] | None,
        loader: Iterable[Any] | None = None,
        name: str = "inputs",
        column: str | None = None,
        max_length: int | None = None,
    ) -> None:
        self._model, self._name, self._column = model, name, column
        self._max_length = max_length
        self._sequences, self._loader = sequences, loader
        self.extent: Extent | None = None
        self.n_sequences: int | None = None
        self.longest: int | None = None
        self.shortest = 1
        if sequences is not None:
            # sequences on disk know it, and are not read for it
            extent = getattr(sequences, "extent", None) or _extent(sequences)
            self.extent = extent
            self.n_sequences = extent.n_sequences
            self.longest, self.shortest = extent.longest, extent.shortest

    def sequences(self) -> Tensor | Sequence[Tensor]:
        """All sequences.

        Raises:
            InfoFlowError: for a loader, which may be read once only.
        """
        if self._sequences is None:
            raise InfoFlowError(
                f"{self._name} is a loader, which may be read once only: expected a tensor, a list "
                "or a datasets.Dataset"
            )
        return self._sequences

    def first(self, n: int) -> "Batches":
        """The first `n` sequences."""
        return self.part(0, n)

    def part(self, start: int, stop: int | None = None, longest: int | None = None) -> "Batches":
        """The sequences from `start` to before `stop`, cut to `longest` tokens."""
        rows = self.sequences()[start:stop]
        if longest is not None and len(rows):
            if isinstance(rows, Tensor):
                rows = rows[:, :longest]
            else:
                rows = rows.cut(longest) if hasattr(rows, "cut") else [r[:longest] for r in rows]
        return Batches(self._model, rows, name=self._name)

    def whole(self) -> Batch:
        """All sequences together, whether or not the model may be run on them so."""
        sequences = self.sequences()
        return Batch(sequences) if isinstance(sequences, Tensor) else _together(sequences)

    def batches(self, batch_size: int, skip: int = 0) -> Iterator[Batch]:
        """The batches, without the first `skip` sequences."""
        if isinstance(self._sequences, Tensor):
            for part in self._sequences[skip:].split(batch_size):
                yield Batch(part)
        elif self._sequences is not None:
            yield from self._padded(self._sequences[skip:], batch_size)
        else:
            yield from self._loaded(batch_size, skip)

    def _padded(self, sequences: Sequence[Tensor], batch_size: int) -> Iterator[Batch]:
        together: list[Tensor] = []
        for sequence in sequences:
            fits = not together or may_be_padded(self._model) or len(sequence) == len(together[0])
            if len(together) == batch_size or not fits:
                yield _together(together)
                together = []
            together.append(sequence)
        if together:
            yield _together(together)

    def _loaded(self, batch_size: int, skip: int) -> Iterator[Batch]:
        assert self._loader is not None
        for loaded in _rows_in_batches(self._loader, self._column, batch_size):
            given, mask = _inputs_of(loaded, self._column)
            if _is_transposed(self._loader, given):
                raise InfoFlowError(
                    f"{self._name} gave {len(given)} tensors of {len(given[0])} ids, one for each "
                    "position: torch collates rows that are lists so; expected a tensor [batch, "
                    "pos]; put .with_format('torch') on the dataset, or give a collate_fn"
                )
            part = read_inputs(
                self._model,
                given,
                attention_mask=mask,
                max_length=self._max_length,
                name=self._name,
            )
            if part.n_sequences is None:
                raise InfoFlowError(
                    f"{self._name} gave {_described(loaded)}: expected batches, each a tensor "
                    "[batch, pos], a list of sequences or of texts, or a mapping with a column of "
                    "these; collate rows into batches"
                )
            if skip >= part.n_sequences:
                skip -= part.n_sequences
                continue
            yield from part.batches(batch_size, skip)
            skip = 0


def _extent(sequences: Tensor | Sequence[Tensor]) -> Extent:
    if isinstance(sequences, Tensor):
        return Extent(len(sequences), sequences.shape[1], sequences.shape[1])
    lengths = [len(sequence) for sequence in sequences]
    return Extent(len(lengths), max(lengths), min(lengths))


Inputs: TypeAlias = Tensor | str | Sequence[str] | Sequence[Tensor] | Iterable[Any] | Batches


def _together(sequences: Sequence[Tensor]) -> Batch:
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    if (lengths == lengths[0]).all():
        return Batch(torch.stack(list(sequences)))
    return Batch(pad_sequence(list(sequences), batch_first=True), lengths)


def mask_argument(model: nn.Module) -> str:
    """What the model's forward calls the attention mask."""
    parameters = inspect.signature(type(model).forward).parameters
    return next((name for name in _MASKS if name in parameters), _MASKS[0])


def may_be_padded(model: nn.Module) -> bool:
    """Whether sequences of different lengths may share a batch.

    A bidirectional HookedTransformer ignores the mask, vector tokens take none, and rotary
    embeddings that depend on the length (longrope, dynamic NTK) take the longest of a batch.
    """
    if hasattr(model, "check_input") or depends_on_length(model):
        return False
    direction = getattr(getattr(model, "cfg", None), "attention_dir", "causal")
    return not (starts_at_layers(model) and direction == "bidirectional")


def depends_on_length(model: nn.Module) -> bool:
    """Whether what the model gives for a position depends on the length of its batch.

    These are the kinds of rotary embedding for which transformers writes the frequencies anew in
    every pass.
    """
    return any(_is_rewritten(getattr(module, "rope_type", None)) for module in model.modules())


def _is_rewritten(rope_type: Any) -> bool:
    kinds = rope_type.values() if isinstance(rope_type, Mapping) else (rope_type,)
    return any(kind == "longrope" or "dynamic" in str(kind) for kind in kinds)


def _masks_by_itself(model: nn.Module, padding_side: Any = None) -> bool:
    """Whether the model would take leading tokens that equal its pad token for padding.

    Args:
        model: the model.
        padding_side: what the call says, in place of the tokenizer's own side.
    """
    tokenizer = getattr(model, "tokenizer", None)
    side = padding_side if padding_side in ("left", "right") else None
    return (
        starts_at_layers(model)
        and may_be_padded(model)
        and tokenizer is not None
        and (side or getattr(tokenizer, "padding_side", "right")) == "left"
    )


def _inputs_of(loaded: Any, column: str | None) -> tuple[Any, Any]:
    """The inputs in a loader's batch, and their mask if it is named."""
    if isinstance(loaded, Mapping):
        column, has_mask = _column_of(list(loaded), column, "the batch")
        return loaded[column], loaded["attention_mask"] if has_mask else None
    if isinstance(loaded, (tuple, list)) and loaded and isinstance(loaded[0], Tensor):
        same = len({len(part) for part in loaded if isinstance(part, Tensor)}) == 1
        if isinstance(loaded, tuple) or (same and loaded[0].ndim >= 2):
            return _first_of(loaded), None
    return loaded, None


def _first_of(loaded: Sequence[Any]) -> Any:
    """The inputs of a batch (inputs, targets).

    Raises:
        InfoFlowError: if what stands beside them may as well be their mask.
    """
    for other in loaded[1:]:
        if _may_be_mask(other, loaded[0]):
            raise InfoFlowError(
                f"beside the token ids stands a tensor {tuple(other.shape)} of 0 and 1 that may be "
                "their attention_mask or their targets: expected a mask to be named; give "
                "{'input_ids': ids, 'attention_mask': mask}, or the ids alone"
            )
    return loaded[0]


def _rows_in_batches(loader: Iterable[Any], column: str | None, batch_size: int) -> Iterator[Any]:
    """What a loader gives; single rows, as streamed datasets give them, are put together."""
    rows: list[Mapping[str, Any]] = []
    for loaded in loader:
        if isinstance(loaded, Mapping) and _is_row(_inputs_of(loaded, column)[0]):
            rows.append(loaded)
            if len(rows) == batch_size:
                yield {name: [row[name] for row in rows] for name in rows[0]}
                rows = []
        else:
            yield loaded
    if rows:
        yield {name: [row[name] for row in rows] for name in rows[0]}


def _is_row(given: Any) -> bool:
    """Whether this is one text or one sequence of ids."""
    if isinstance(given, (list, tuple)):
        return len(given) > 0 and isinstance(given[0], int)
    return isinstance(given, str) or (isinstance(given, Tensor) and given.ndim == 1)


def _as_tensors(inputs: Any) -> Any:
    """Arrays of numpy as tensors; integers of every kind as int64, which embeddings read."""
    if isinstance(inputs, np.ndarray) and inputs.dtype != object:
        inputs = torch.from_numpy(inputs)
    if isinstance(inputs, (list, tuple)) and any(isinstance(part, np.ndarray) for part in inputs):
        return type(inputs)(_as_tensors(part) for part in inputs)
    if not isinstance(inputs, Tensor) or inputs.dtype == torch.bool:
        return inputs
    return inputs if inputs.is_floating_point() or inputs.is_complex() else inputs.long()


def _described(loaded: Any) -> str:
    of = type(loaded[0]).__name__ if isinstance(loaded, (list, tuple)) and loaded else ""
    return type(loaded).__name__ + (f" of {of}" if of else "")


def _is_transposed(loader: Any, given: Any) -> bool:
    """Whether these are a tensor [batch] for each position, as torch collates rows of lists."""
    by_default = getattr(loader, "collate_fn", None) is torch.utils.data.default_collate
    rows = isinstance(given, (list, tuple)) and len(given) > 0
    return by_default and rows and all(isinstance(p, Tensor) and p.ndim == 1 for p in given)


def _may_be_mask(other: Any, ids: Tensor) -> bool:
    """Whether a tensor beside token ids looks like their mask: ones, and zeros at one end."""
    if not isinstance(other, Tensor) or other.shape != ids.shape or ids.is_floating_point():
        return False
    return _is_binary(other) and not bool((other != 0).all()) and not len(_with_holes(other != 0))


def _is_binary(mask: Tensor) -> bool:
    return not mask.is_complex() and bool(((mask == 0) | (mask == 1)).all())


def _with_holes(real: Bool[Tensor, "batch pos"]) -> Int[Tensor, " row"]:
    """The rows whose real positions are not one stretch, or are none."""
    begins = real[:, 1:] & ~real[:, :-1]
    return (begins.sum(dim=1) + real[:, 0] != 1).nonzero().flatten()


def check_mask(mask: Any, name: str) -> Bool[Tensor, "batch pos"]:
    """A mask as booleans, True where positions are real.

    Raises:
        InfoFlowError: for other values than 0 and 1, and for sequences without real tokens or whose
            real tokens are not one stretch.
    """
    if not isinstance(mask, Tensor) or mask.ndim != 2 or not mask.shape[1] or not _is_binary(mask):
        shown = type(mask).__name__
        if isinstance(mask, Tensor):
            values = mask.unique()[:4].tolist() if not mask.is_complex() else ["complex"]
            shown = f"{mask.dtype} {tuple(mask.shape)} with values such as {values}"
        raise InfoFlowError(
            f"{name} is {shown}: expected a tensor [batch, pos] of 1 for real tokens and 0 for "
            "padding"
        )
    real = mask.bool()
    bad = _with_holes(real)
    if len(bad):
        places = real[bad[0]].nonzero()[:, 0].tolist()
        raise InfoFlowError(
            f"{name} has the real tokens of sequence {int(bad[0])} at {places}: "
            "expected one stretch of at least one, with padding before or behind it"
        )
    return real


def _column_of(names: Sequence[str], column: str | None, what: str) -> tuple[str, bool]:
    """The column with the inputs, and whether a mask goes with it.

    Raises:
        InfoFlowError: if there is none, with the columns.
    """
    if column is None:
        column = next((name for name in COLUMNS if name in names), None)
    if column is None or column not in names:
        raise InfoFlowError(
            f"{what} has the columns {', '.join(names) or 'none'}, without "
            f"{column or ' or '.join(COLUMNS)}: name the column that holds the texts or token ids"
        )
    return column, "attention_mask" in names and column != "text"


def example_input(model: nn.Module, n_sequences: int = 4, seed: int = 0) -> Tensor:
    """Random tokens for :func:`inspect_model`, always the same for a seed.

    They are 16 positions long, or two more than a local window, where the model takes as many;
    a window of more than 254 positions does not show.

    Args:
        model: a TransformerLens model.
        n_sequences: how many.
        seed: of their generator; the global random state is left alone.

    Returns:
        Token ids [n_sequences, pos] or vector tokens [n_sequences, pos, d_token].
    """
    layer_count(model)
    generator = torch.Generator().manual_seed(seed)
    first = next(model.parameters())
    if reads_vectors(model):
        architecture: Any = model.architecture
        shape = (n_sequences, architecture.n_tokens, architecture.d_token)
        return torch.randn(shape, generator=generator).to(first.dtype)
    cfg: Any = model.cfg
    length = min(max(16, local_window(model) + 2), _LONGEST_EXAMPLE, cfg.n_ctx)
    return torch.randint(cfg.d_vocab, (n_sequences, length), generator=generator)


def local_window(model: nn.Module) -> int:
    """How many positions the local layers see, as the config says; 0 where it names no window."""
    cfg: Any = getattr(model, "cfg", None)
    if getattr(cfg, "use_local_attn", False):
        return int(getattr(cfg, "window_size", None) or 0)
    # the config of a bridge does not say; that of the model it wraps does
    behind: Any = getattr(getattr(model, "original_model", None), "config", None)
    if not getattr(behind, "use_sliding_window", True):
        return 0
    for name in ("sliding_window", "window_size"):
        window = getattr(behind, name, None)
        if isinstance(window, int):
            return window
    return 0


def read_inputs(
    model: nn.Module,
    inputs: Inputs,
    *,
    attention_mask: Tensor | None = None,
    column: str | None = None,
    max_length: int | None = None,
    name: str = "inputs",
    first: int = 0,
) -> Batches:
    """Whatever a user has, as :class:`Batches`: checked, tokenised once, padding taken off.

    Args:
        model: the model that will read them.
        inputs: vector tokens [n, pos, d_token] or token ids [n, pos]; a text or a list of texts; a
            list of sequences of ids; a ``datasets.Dataset``; or a loader of batches of these.
        attention_mask: which positions of token ids are real, [n, pos]; padding may stand on
            either side.
        column: of a dataset; default, the first of input_ids, tokens, text, x.
        max_length: longer sequences of ids are cut to it.
        name: what errors call them.
        first: the number of the first, where these are a part of more.

    Raises:
        InfoFlowError: for an empty string, no tokenizer, a dataset without the column, sequences
            that are too long, masks of another shape, or what :func:`check_inputs` refuses.
    """
    if isinstance(inputs, Batches):
        return inputs
    if max_length is not None:
        max_length = check_integer(max_length, "max_length", 1, " token")
    given: Any = inputs
    if isinstance(given, Mapping):
        if any(hasattr(part, "column_names") for part in given.values()):
            raise InfoFlowError(
                f"{name} is a {type(given).__name__} with {', '.join(given)}: expected one split, "
                f"such as {name}[{next(iter(given))!r}]"
            )
        given, mask = _inputs_of(given, column)
        attention_mask = mask if attention_mask is None else attention_mask
    given = _as_tensors(given)
    several = isinstance(given, (tuple, list)) and len(given) > 1
    if several and all(isinstance(part, Tensor) for part in given) and given[0].ndim > 1:
        first = _first_of(given)  # a list may hold batches, but none that may be a mask
        given = first if isinstance(given, tuple) else given
    if isinstance(given, Tensor) and attention_mask is None:
        given = given[:, :max_length] if given.ndim == 2 else given
        check_inputs(model, given, name)
        return Batches(model, given)
    if hasattr(given, "column_names") and hasattr(given, "__getitem__"):  # datasets.Dataset
        column, has_mask = _column_of(given.column_names, column, name)
        plain = given.with_format(None)
        given = list(plain[column])
        if given and not isinstance(given[0], (str, list, tuple)):
            raise InfoFlowError(
                f"column {column!r} of {name} holds {type(given[0]).__name__}: expected texts or "
                "lists of token ids; name another column"
            )
        if has_mask and not (given and isinstance(given[0], str)):
            attention_mask = plain["attention_mask"]
    if isinstance(given, str):
        given = [given]
    if isinstance(given, Tensor) or _is_list_of_sequences(given):
        return Batches(
            model, _read_sequences(model, given, attention_mask, max_length, name, first)
        )
    if not isinstance(given, Iterable) or isinstance(given, bytes):
        raise InfoFlowError(
            f"{name} is {type(given).__name__}: expected a tensor, strings, a list of token ids, "
            "a datasets.Dataset or a DataLoader"
        )
    if attention_mask is not None:
        raise InfoFlowError(
            f"{name} is a loader with an attention_mask beside it: expected each batch to bring "
            "its own; let the loader give {'input_ids': ids, 'attention_mask': mask}"
        )
    batches = Batches(model, None, given, name, column, max_length)
    batches.n_sequences = _count(given)
    return batches


def _read_sequences(
    model: nn.Module, given: Any, attention_mask: Any, max_length: int | None, name: str, first: int
) -> Tensor | list[Tensor]:
    """Sequences, checked, and as one tensor where they are of one length."""
    rows = _sequences(model, given, attention_mask, name, max_length, first)
    if isinstance(rows, Tensor):
        check_inputs(model, rows, name)
        return rows
    rows = [row[:max_length] for row in rows]
    for row in rows:
        check_inputs(model, row[None], name)
    return torch.stack(rows) if len({len(row) for row in rows}) == 1 else rows


def _count(loader: Any) -> int | None:
    """The sequences of a loader, if its dataset knows them."""
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError):
        return None


def _is_list_of_sequences(inputs: Any) -> bool:
    if not isinstance(inputs, (list, tuple)):
        return False
    first = inputs[0] if len(inputs) else ""
    return isinstance(first, (str, list, tuple)) or (isinstance(first, Tensor) and first.ndim == 1)


def _sequences(
    model: nn.Module,
    inputs: Any,
    attention_mask: Any,
    name: str,
    max_length: int | None,
    first: int,
) -> Tensor | list[Tensor]:
    """Sequences of ids, each as long as it is, or one tensor of vectors."""
    if isinstance(inputs, Tensor) and not inputs.ndim:
        raise InfoFlowError(f"{name} is a tensor without axes: expected token ids [n, pos]")
    if not len(inputs):
        raise InfoFlowError(f"{name} is empty: expected at least one sequence")
    if isinstance(inputs[0], str):
        if attention_mask is not None:
            raise InfoFlowError(
                f"{name} holds texts with an attention_mask: expected none, as texts have no "
                "padding; give token ids with their mask, or the texts alone"
            )
        texts = enumerate(inputs, first)
        return [tokenized(model, text, f"{name}[{i}]", max_length) for i, text in texts]
    try:
        rows = [torch.as_tensor(row) for row in inputs]
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InfoFlowError(
            f"{name} cannot be read as token ids ({error}): expected integers or strings"
        ) from error
    if rows[0].ndim == 2:  # vector tokens, all of one length
        if attention_mask is not None:
            raise InfoFlowError(
                f"{name} holds vector tokens with an attention_mask: expected none, as every "
                "sequence of vectors has the same length"
            )
        return torch.stack(rows)
    for index, row in enumerate(rows, first):
        if row.ndim != 1 or not len(row) or row.is_floating_point():
            raise InfoFlowError(
                f"{name}[{index}] is {row.dtype} of shape {tuple(row.shape)}: expected a row of at "
                "least one token id"
            )
    if attention_mask is None:
        return rows
    n_masks = len(attention_mask) if _has_rows(attention_mask) else 0
    if n_masks != len(rows):
        given = f"has {n_masks} rows" if n_masks else f"is {_described(attention_mask)}"
        raise InfoFlowError(
            f"the attention_mask {given} for {len(rows)} sequences: expected a row for each"
        )
    masks = []
    for index, (row, given) in enumerate(zip(rows, attention_mask, strict=True), first):
        label = f"the attention_mask of {name}[{index}]"
        try:
            (mask,) = check_mask(torch.as_tensor(given)[None], label)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            if isinstance(error, InfoFlowError):
                raise
            raise InfoFlowError(f"{label} is {given!r}: expected 0 and 1") from error
        if mask.shape != row.shape:
            raise InfoFlowError(
                f"{label} has shape {tuple(mask.shape)}, the ids {tuple(row.shape)}: expected one "
                "entry for each id"
            )
        masks.append(mask)
    return [row[mask] for row, mask in zip(rows, masks)]


def _has_rows(mask: Any) -> bool:
    if isinstance(mask, (Tensor, np.ndarray)):
        return mask.ndim > 0
    rows = hasattr(mask, "__len__") and hasattr(mask, "__getitem__")
    return rows and not isinstance(mask, (str, bytes, Mapping))


def tokenized(
    model: nn.Module, text: str, name: str, max_length: int | None = None
) -> Int[Tensor, " pos"]:
    """The ids of a text, as the model itself tokenises it, with BOS where that is its default.

    Of a long text no more is read than its first tokens need: tokenizers take hundreds of bytes for
    each character. What is read ends at a blank, and has twice the tokens that are kept, so that
    the end does not change them.

    Args:
        model: with its tokenizer.
        text: to be tokenised.
        name: what errors call it.
        max_length: tokens that will be kept; default, one more than the model takes.

    Raises:
        InfoFlowError: for an empty text, or a model without a tokenizer.
    """
    if getattr(model, "tokenizer", None) is None:
        raise InfoFlowError(
            f"{name} is a text, but the model has no tokenizer: expected token ids; tokenise "
            "first, or load the model with its tokenizer"
        )
    if not isinstance(text, str) or not text:
        raise InfoFlowError(f"{name} is {text!r}: expected a text that is not empty")
    kept = max_length or int(getattr(getattr(model, "cfg", None), "n_ctx", None) or 2**20) + 1
    length = max(_LONG_TEXT, 16 * kept)
    while True:
        part = text[: max(text.rfind(" ", length // 2, length), 0) or length]
        part = text if length >= len(text) else part
        tokens: Tensor = model.to_tokens(part, truncate=False)  # type: ignore[operator]
        if part is text:
            return tokens[0].cpu()
        if tokens.shape[1] >= 2 * kept + 16:
            return tokens[0, :kept].cpu()
        length *= 4


def readable_tokens(model: nn.Module, sequences: Iterable[Tensor]) -> tuple[tuple[str, ...], ...]:
    """The tokens of every sequence as one reads them: words of the model's tokenizer, with blanks
    and line breaks that can be seen; else ids, and places where tokens are vectors.
    """
    tokenizer = getattr(model, "tokenizer", None)
    return tuple(
        tuple(str(place) for place in range(len(row)))
        if row.ndim > 1
        else tuple(
            str(i) if tokenizer is None else _readable(tokenizer.decode([i])) for i in row.tolist()
        )
        for row in sequences
    )


def _readable(token: str) -> str:
    if token.isprintable() and token.strip():
        return token
    return repr(token)[1:-1].replace(" ", "\u00b7")


def call_inputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Tensor | None, Bool[Tensor, "batch pos"] | None]:
    """The token ids of a call of the model, and which of them are real (None: all).

    Raises:
        InfoFlowError: for leading padding that the model masks without being told, and for cached
            keys that it leaves out.
    """
    _check_no_cached_keys(model, kwargs)
    kwargs = _named(model, args, kwargs)
    given = kwargs.get("input", kwargs.get("input_ids"))
    if given is None and args:
        given = args[0]
    mask = next((kwargs[name] for name in _MASKS if kwargs.get(name) is not None), None)
    if isinstance(given, str) or (
        isinstance(given, (list, tuple)) and given and isinstance(given[0], str)
    ):
        return _call_of_texts(model, given, kwargs)
    if not isinstance(given, Tensor):
        return None, None
    starts = kwargs.get("start_at_layer") is not None  # then it is a residual stream
    if isinstance(mask, Tensor):
        real = check_mask(mask, "attention_mask")
        return None if starts else given, None if bool(real.all()) else real
    if starts:
        return None, None
    side = kwargs.get("padding_side")
    if given.ndim == 2 and not given.is_floating_point() and _masks_by_itself(model, side):
        pad = int(model.tokenizer.pad_token_id)  # type: ignore[arg-type, union-attr]
        leading = given.eq(pad).long().cumprod(dim=1).sum(dim=1)
        allowed = int(pad == model.tokenizer.bos_token_id)  # type: ignore[union-attr]
        if int(leading.max()) > allowed:
            raise InfoFlowError(
                f"sequence {int(leading.argmax())} starts with {int(leading.max())} pad tokens, "
                "which this model masks by itself, as its tokenizer pads on the left: give the "
                "attention_mask, so that probes know what is masked"
            )
    return given, None


def _check_no_cached_keys(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Refuse cached keys for a bridge: it takes TransformerLens's cache, and leaves it out.

    Those of a HookedTransformer, and what a bridge makes of its own model's, show in the pattern.
    """
    length = getattr(kwargs.get("past_key_values"), "get_seq_length", lambda: 0)()
    if is_bridge(model) and (kwargs.get("past_kv_cache") is not None or length):
        raise InfoFlowError(
            "the call has cached keys, which a TransformerBridge may leave out in silence: "
            "expected one pass over whole sequences; run without past_kv_cache"
        )


def _named(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name."""
    try:
        bound = inspect.signature(type(model).forward).bind_partial(model, *args, **kwargs)
    except (TypeError, ValueError):  # the model itself will refuse the call
        return dict(kwargs)
    named = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
    return named


def _call_of_texts(
    model: nn.Module, texts: Any, kwargs: Mapping[str, Any]
) -> tuple[Tensor, Bool[Tensor, "batch pos"] | None]:
    texts = [texts] if isinstance(texts, str) else list(texts)
    chosen = {key: kwargs[key] for key in ("prepend_bos", "padding_side") if key in kwargs}
    tokens: Tensor = model.to_tokens(texts, **chosen)  # type: ignore[operator]
    bos = {key: value for key, value in chosen.items() if key == "prepend_bos"}
    lengths = torch.tensor([model.to_tokens(text, **bos).shape[1] for text in texts])  # type: ignore[operator]
    if bool((lengths == tokens.shape[1]).all()):
        return tokens, None
    side = chosen.get("padding_side") or getattr(model.tokenizer, "padding_side", "right")
    places = torch.arange(tokens.shape[1])
    if side == "left":
        places = tokens.shape[1] - 1 - places
    return tokens, places < lengths[:, None]
