"""What users have, as batches that a model reads: strings, ids, masks, datasets, loaders."""

import inspect
import reprlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, groupby, islice
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from infoflow_lens.foundation.display import brief
from infoflow_lens.foundation.errors import InfoFlowError, InfoFlowWarning, first_line
from infoflow_lens.foundation.record import fingerprint
from infoflow_lens.foundation.sequences import check_is_plain
from infoflow_lens.foundation.settings import Count, Seed, checked
from infoflow_lens.hooks.model.points import (
    cache_by_mode,
    check_inputs,
    config_value,
    has_own_attention,
    is_causal,
    kind_of,
    reads_vectors,
    starts_at_layers,
    takes_model,
)
from infoflow_lens.hooks.model.texts import (
    SingleName,
    name_row,
    tokenize,
    tokenize_chats,
    tokenize_pairs,
)

COLUMNS = ("input_ids", "tokens", "text", "x")  # of datasets, in this order
_LONGEST_EXAMPLE = 256  # a longer window does not show in it
_ANY_LENGTH = 2**30  # tokens, more than a text has
# columns of tokenizers, whether or not a model takes them; and what forward is asked to give
_KNOWN = frozenset({"token_type_ids", "position_ids", "inputs_embeds"})
_HARMLESS = (
    "label", "labels", "start_positions", "end_positions", "return_dict", "return_type", "kwargs",
    "args", "to_keep", "output_attentions", "output_hidden_states",
)  # fmt: skip
MASKS = ("attention_mask", "one_zero_attention_mask")  # HookedEncoder has the second


Rows: TypeAlias = Tensor | Sequence[Tensor]


@dataclass(frozen=True)
class Batch:
    """Some sequences, padded on the right.

    Attributes:
        tokens: vector tokens [batch, pos, d_token] or token ids [batch, pos].
        lengths: int [batch], the real tokens of each; None if nothing is padded.
        columns: what else the model's forward takes for each token, by name, such as
            ``token_type_ids`` [batch, pos]; and a mask [batch, head, query, key].
    """

    tokens: Tensor
    lengths: Int[Tensor, " batch"] | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    def halves(self) -> tuple["Batch", "Batch"]:
        """Return the first and the second half."""
        middle = len(self) // 2
        return self.take(slice(0, middle)), self.take(slice(middle, None))

    def take(self, rows: slice | Int[Tensor, " row"]) -> "Batch":
        """Return some of the sequences, or copies of them."""

        def part(values: Tensor) -> Tensor:
            return values[rows if isinstance(rows, slice) else rows.to(values.device)]

        lengths = None if self.lengths is None else part(self.lengths)
        columns = {name: part(values) for name, values in self.columns.items()}
        return Batch(part(self.tokens), lengths, columns)

    def cut(self, n_pos: int) -> "Batch":
        """Return the first tokens of each sequence."""
        lengths = None if self.lengths is None else self.lengths.clamp(max=n_pos)
        # a mask with more axes ends in queries and keys
        columns = {
            name: values[:, :n_pos] if values.ndim == 2 else values[..., :n_pos, :n_pos]
            for name, values in self.columns.items()
        }
        return Batch(self.tokens[:, :n_pos], lengths, columns)

    def run(self, model: nn.Module, device: torch.device | None = None) -> Any:
        """Run the model on these sequences, on its device, with a mask where they are padded.

        Raises:
            InfoFlowError: for the decoder behind an encoder, which reads sequences of its own, and
                for one that does not run without them, or without others that it was opened on.
        """
        if is_second_stack(model):
            raise InfoFlowError(
                f"{kind_of(model)} was opened at its decoder, which reads decoder_input_ids beside "
                "the encoder's inputs: call the model yourself inside attach(model, probe), with "
                "probes that make no passes of their own"
            )
        device = device or next(model.parameters()).device
        more = {name: values.to(device) for name, values in self.columns.items()}
        if self.lengths is not None or _masks_by_itself(model):
            taken = inspect.signature(type(model).forward).parameters
            name = next((name for name in MASKS if name in taken), MASKS[0])
            more[name] = self.mask().to(device=device, dtype=torch.long)
        tokens = self.tokens.to(device)
        # vectors in the place of ids have a name of their own
        reads_ids = hasattr(model, "anatomy") and config_value(model, "d_vocab")
        named = tokens.is_floating_point() and reads_ids
        args = () if named else (tokens,)
        more |= {"inputs_embeds": tokens} if named else {}
        try:
            return model(*args, **more)
        except InfoFlowError:
            raise
        except (AttributeError, TypeError, ValueError) as error:
            names = getattr(model, "example_names", ())
            # a mask may be left out
            lacking = [name for name in names[1:] if name not in (*more, *MASKS)]
            if lacking and not has_second_stack(model):
                raise InfoFlowError(
                    f"{kind_of(model)} was opened on {', '.join(names)}, and a pass of its own "
                    f"gives it one of them alone, with which it fails ({first_line(error)}): "
                    "expected probes that make no such passes (positions, recovery), in attach; or "
                    "open a module of your own whose forward takes one and gives the rest itself"
                ) from error
            if not isinstance(error, ValueError) or not has_second_stack(model):
                raise
            raise InfoFlowError(
                f"{kind_of(model)} runs its decoder behind its encoder, which "
                f"has no inputs here ({first_line(error)}): expected decoder_input_ids beside the "
                "ids; or the encoder alone: open_model(model.get_encoder(), tokenizer)"
            ) from error

    def mask(self) -> Bool[Tensor, "batch pos"]:
        """Return the mask of real tokens, False on padding."""
        if self.lengths is None:
            return torch.ones(self.tokens.shape[:2], dtype=torch.bool)
        return torch.arange(self.tokens.shape[1]) < self.lengths[:, None]


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
        rows: the sequences.
        columns: what else the model's forward takes for each token, by name, a row each.
        is_single: whether one text or row was given, as a stream gives them.
    """

    rows: Rows
    columns: Mapping[str, Sequence[Tensor]] = MappingProxyType({})
    extent: Extent | None = None
    n_sequences: int | None = None
    longest: int | None = None
    shortest: int = 1

    def __init__(
        self,
        model: nn.Module,
        sequences: Tensor | Sequence[Tensor],
        name: str = "inputs",
        columns: Mapping[str, Sequence[Tensor]] | None = None,
        is_single: bool = False,
    ) -> None:
        self._model, self._name, self.is_single = model, name, is_single
        # sequences on disk bring their columns
        own = getattr(sequences, "columns", {}) if columns is None else columns
        self.rows, self.columns = sequences, dict(own)
        # sequences on disk know their extent, and are not read for it
        self.extent = getattr(sequences, "extent", None) or _extent(sequences)
        self.n_sequences = self.extent.n_sequences
        self.longest, self.shortest = self.extent.longest, self.extent.shortest

    def sequences(self) -> Tensor | Sequence[Tensor]:
        """Return all sequences, for what runs the model on these alone.

        Raises:
            InfoFlowError: for a loader, which may be read once only, and for columns beside them.
        """
        if self.columns:
            raise InfoFlowError(
                f"{self._name} has {' and '.join(self.columns)} beside its token ids, which change "
                "what the model gives: expected ids alone, as this measurement reads no more; "
                "leave these out, or measure with run_probes"
            )
        return self.rows

    def list_active_columns(self) -> list[str]:
        """Name the columns that hold something else than the model takes where there is none."""
        return [n for n, c in self.columns.items() if not _is_default(self._model, n, list(c))]

    def first(self, n: int) -> "Batches":
        """Return the first `n` sequences."""
        return self.part(0, n)

    def part(self, start: int, stop: int | None = None) -> "Batches":
        """Return the sequences from `start` to before `stop`."""
        columns = {name: rows[start:stop] for name, rows in self.columns.items()}
        return Batches(self._model, self.rows[start:stop], self._name, columns)

    def take(self, indices: Sequence[int]) -> "Batches":
        """Return some of the sequences, in this order."""
        rows = self.rows
        some = rows[list(indices)] if isinstance(rows, Tensor) else [rows[i] for i in indices]
        columns = {name: [rows[i] for i in indices] for name, rows in self.columns.items()}
        return Batches(self._model, some, self._name, columns)

    def fingerprint(self) -> str:
        """Return a digest of all sequences, by which those of another run are noticed.

        Raises:
            InfoFlowError: for a loader, which may be read once only.
        """
        rows = self.rows
        named = {"": rows} if isinstance(rows, Tensor) else {str(i): r for i, r in enumerate(rows)}
        for name, column in self.columns.items():
            named |= {f"{name} {i}": row for i, row in enumerate(column)}
        return fingerprint(named)

    def batches(self, batch_size: int, skip: int = 0) -> Iterator[Batch]:
        """Yield the batches, without the first `skip` sequences."""
        rows = self.rows[skip:]
        if isinstance(rows, Tensor):
            for start in range(0, len(rows), batch_size):
                yield self._together(rows[start : start + batch_size], skip + start)
            return
        # positions that begin anew mean several documents only where no mask is given
        packed = "position_ids" in self.columns and MASKS[0] not in self.columns
        padded = accepts_padding(self._model) and not packed
        together: list[Tensor] = []
        for index, row in enumerate(rows, skip):
            fits = not together or padded or len(row) == len(together[0])
            if len(together) == batch_size or not fits:
                yield self._together(together, index - len(together))
                together = []
            together.append(row)
        if together:
            yield self._together(together, skip + len(rows) - len(together))

    def whole(self) -> Batch:
        """Return all sequences together, whether or not the model may be run on them so."""
        return self._together(self.rows, 0)

    def _together(self, rows: Tensor | Sequence[Tensor], start: int) -> Batch:
        """Put sequences from `start` on together, padded on the right where lengths differ."""
        columns = {
            name: _pad(column[start : start + len(rows)]) for name, column in self.columns.items()
        }
        if isinstance(rows, Tensor):
            return Batch(rows, None, columns)
        lengths = torch.tensor([len(row) for row in rows])
        same = bool((lengths == lengths[0]).all())
        fill = 0 if rows[0].is_floating_point() else pad_id(self._model)
        return Batch(_pad(rows, fill), None if same else lengths, columns)


def _pad(rows: Tensor | Sequence[Tensor], fill: int = 0) -> Tensor:
    if isinstance(rows, Tensor):
        return rows
    return pad_sequence(list(rows), batch_first=True, padding_value=fill)


def pad_id(model: nn.Module) -> int:
    """Return the token id of padding, by which classifiers find the end of a text; else 0."""
    config = _config(model)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    found, n_ids = getattr(config, "pad_token_id", None), getattr(config, "vocab_size", 0)
    return found if isinstance(found, int) and 0 <= found < n_ids else 0


class _LoadedBatches(Batches):
    """What a loader gives: each thing is read as if it were given alone."""

    def __init__(self, reader: "_Reader", loader: Iterable[Any]) -> None:
        self._reader, self._loader = reader, loader
        try:
            self.n_sequences = len(loader.dataset)  # type: ignore[attr-defined]
        except (AttributeError, TypeError):
            self.n_sequences = None

    @property
    def rows(self) -> Rows:  # type: ignore[override]
        """There are none.

        Raises:
            InfoFlowError: always.
        """
        raise InfoFlowError(
            f"{self._reader.name} is a loader, which may be read once only: expected a tensor, a "
            "list or a datasets.Dataset"
        )

    def batches(self, batch_size: int, skip: int = 0) -> Iterator[Batch]:
        for read in self._parts(batch_size):
            if skip < len(read.rows):
                yield from read.batches(batch_size, skip)
            skip = max(0, skip - len(read.rows))

    def _parts(self, batch_size: int) -> Iterator[Batches]:
        """Yield batches as the loader makes them; single rows, as of streams, are put together."""
        # rows with other columns cannot share a batch
        for (single, names), read in groupby(self._read(), lambda r: (r.is_single, [*r.columns])):
            if not single:
                yield from read
            while single and (some := list(islice(read, batch_size))):
                columns = {name: [one.columns[name][0] for one in some] for name in names}
                yield Batches(self._reader.model, [one.rows[0] for one in some], columns=columns)

    def _read(self) -> Iterator[Batches]:
        seen = 0
        for loaded in self._loader:
            read = self._reader.read(loaded, first=seen, loader=self._loader)
            if read is None:
                raise InfoFlowError(
                    f"{self._reader.name} gave {_describe_type(loaded)}: expected batches, each a "
                    "tensor [batch, pos], a list of sequences or of texts, or a mapping with a "
                    "column of these; collate rows into batches"
                )
            yield read
            seen += len(read.rows)


def _extent(sequences: Tensor | Sequence[Tensor]) -> Extent:
    if isinstance(sequences, Tensor):
        return Extent(len(sequences), sequences.shape[1], sequences.shape[1])
    lengths = [len(sequence) for sequence in sequences]
    return Extent(len(lengths), max(lengths), min(lengths))


Inputs: TypeAlias = Tensor | str | Sequence[str] | Sequence[Tensor] | Iterable[Any] | Batches


def accepts_padding(model: nn.Module) -> bool:
    """Say whether sequences of different lengths may share a batch.

    A bidirectional HookedTransformer ignores the mask, vector tokens take none, and rotary
    embeddings that depend on the length (longrope, dynamic NTK) take the longest of a batch. Opened
    models are run on a few tokens to find out.
    """
    if hasattr(model, "check_input") or depends_on_length(model):
        return False
    if hasattr(model, "takes_padding"):
        return bool(model.takes_padding)
    return is_causal(model) or not starts_at_layers(model)


def check_accepts_padding(model: nn.Module, lengths: Int[Tensor, " batch"] | None) -> None:
    """Refuse sequences of different lengths in one batch of a model that would read their padding.

    Raises:
        InfoFlowError: with the remedy.
    """
    if lengths is not None and not accepts_padding(model):
        raise InfoFlowError(
            f"{kind_of(model)} gives other activations for a padded sequence than for the sequence "
            "alone, even with an attention_mask: expected sequences without padding; run those of "
            "one length together, or one by one (batch_size=1)"
        )


@cache_by_mode
def depends_on_length(model: nn.Module) -> bool:
    """Say whether what the model gives for a position depends on the length of its batch.

    These are the kinds of rotary embedding for which transformers writes the frequencies anew in
    every pass.
    """
    types = [getattr(module, "rope_type", None) for module in model.modules()]
    kinds = [k for t in types for k in (t.values() if isinstance(t, Mapping) else (t,))]
    return any(kind == "longrope" or "dynamic" in str(kind) for kind in kinds)


def _masks_by_itself(model: nn.Module, padding_side: Any = None) -> bool:
    """Say whether the model would take leading tokens that equal its pad token for padding.

    Args:
        model: the model.
        padding_side: what the call says, in place of the tokenizer's own side.
    """
    tokenizer = getattr(model, "tokenizer", None)
    side = padding_side if padding_side in ("left", "right") else None
    return (
        tokenizer is not None
        and (side or getattr(tokenizer, "padding_side", "right")) == "left"
        and starts_at_layers(model)
        and accepts_padding(model)
    )


@takes_model
@checked
def example_input(model: nn.Module, n_sequences: Count = 4, seed: Seed = 0) -> Tensor:
    """Return random tokens for :func:`inspect_model`, always the same for a seed.

    They are 16 positions long, or two more than a local window, where the model takes as many;
    a window of more than 254 positions does not show.

    Args:
        model: any Transformer.
        n_sequences: how many.
        seed: of their generator; the global random state is left alone.

    Returns:
        Token ids [n_sequences, pos] or vector tokens [n_sequences, pos, d_token].

    Raises:
        InfoFlowError: for a model of anything else.
    """
    generator = torch.Generator().manual_seed(seed)
    first = next(model.parameters())
    if reads_vectors(model):
        architecture: Any = model.architecture
        shape = (n_sequences, architecture.n_tokens, architecture.d_token)
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(first.dtype)
    cfg: Any = model.cfg
    if not cfg.d_vocab:
        raise InfoFlowError(
            f"{kind_of(model)} has no vocabulary to draw token ids from: expected a model of token "
            "ids; to measure another one, call it yourself inside attach(model, probe), with a "
            "probe that edits nothing"
        )
    length = min(max(16, local_window(model) + 2), _LONGEST_EXAMPLE, cfg.n_ctx)
    return torch.randint(cfg.d_vocab, (n_sequences, length), generator=generator)


def local_window(model: nn.Module) -> int:
    """Count the positions that local layers see, by the config; 0 where it names no window."""
    cfg: Any = getattr(model, "cfg", None)
    if getattr(cfg, "use_local_attn", False):
        return int(getattr(cfg, "window_size", None) or 0)
    # the config of a bridge does not say; that of the model it wraps does
    behind: Any = getattr(getattr(model, "original_model", None), "config", None)
    # Qwen2 names a window in its config, and does not use it
    if not getattr(behind, "use_sliding_window", True):
        return 0
    for name in ("sliding_window", "window_size"):
        window = getattr(behind, name, None)
        if isinstance(window, int):
            return window
    return 0


@checked
def read_inputs(
    model: nn.Module,
    inputs: Inputs,
    *,
    attention_mask: Any = None,
    column: str | None = None,
    max_length: Count | None = None,
    name: str = "inputs",
    first: int = 0,
    with_defaults: bool = False,
    any_length: bool = False,
    is_alone: bool = False,
) -> Batches:
    """Read what a user has as :class:`Batches`: checked, tokenised once, padding taken off.

    Args:
        model: the model that will read them.
        inputs: vector tokens [n, pos, d_token] or token ids [n, pos]; a text or a list of texts, of
            pairs of texts as tuples, or of chat messages; a list of sequences of ids; a
            ``datasets.Dataset`` or another mapping with a column of these, and others with a
            number for each id that the model's forward takes, such as ``token_type_ids``; or a
            loader: an iterable of any of these, or of single rows.
        attention_mask: which positions of token ids are real, [n, pos]; padding may stand on
            either side.
        column: of a dataset; default, the first of input_ids, tokens, text, x; two with a comma
            between them hold pairs of texts.
        max_length: longer sequences of ids are cut to it, texts as their tokenizer does, which
            keeps what it puts behind them.
        name: what errors call them.
        first: the number of the first, where these are a part of more.
        with_defaults: keep columns that hold what the model takes without them, too, as other parts
            may hold something else.
        any_length: read sequences that are longer than the model takes, too; then they are to be
            cut before they run.
        is_alone: they are one sequence, which errors call by the name alone, without a number.

    Raises:
        InfoFlowError: for an empty string, no tokenizer, a dataset without the column, sequences
            that are too long, masks of another shape, or what :func:`check_inputs` refuses.
    """
    # read before: nothing is read twice
    if isinstance(inputs, Batches):
        return inputs
    # texts are read no further than the model takes, where no length is given
    length = _ANY_LENGTH if any_length else max_length
    name = SingleName(name) if is_alone else name
    reader = _Reader(model, name, column, length, with_defaults)
    read = reader.read(inputs, attention_mask, first)
    if read is not None:
        return read
    # what holds no sequences itself may give them batch by batch
    if not isinstance(inputs, Iterable) or isinstance(inputs, (bytes, Mapping)):
        raise InfoFlowError(
            f"{name} is {_describe_type(inputs)}: expected a tensor, strings, a list of token ids, "
            "a datasets.Dataset or a DataLoader"
        )
    if attention_mask is not None:
        raise InfoFlowError(
            f"{name} is a loader, and an attention_mask is given beside it: expected a mask in "
            "each batch; let the loader give {'input_ids': ids, 'attention_mask': mask}"
        )
    return _LoadedBatches(reader, inputs)


def read_one(model: nn.Module, inputs: Inputs, name: str = "inputs", **options: Any) -> Batches:
    """Read one sequence, or a pair of texts as a tuple, as :func:`read_inputs`.

    Raises:
        InfoFlowError: for several, and as there.
    """
    given: Inputs = [inputs] if holds_pairs([inputs]) else inputs
    several = isinstance(given, (list, tuple)) and len(given) > 1 and not _is_chat(given)
    found = read_inputs(model, given, name=name, is_alone=not several, **options)
    if (n := len(found.rows)) != 1:
        raise InfoFlowError(
            f"{name} holds {n} sequences: expected one; ask for each alone, or give a pair of "
            "texts as a tuple"
        )
    return found


@dataclass(frozen=True)
class _Reader:
    """Makes sequences of what a user has; arguments as for :func:`read_inputs`."""

    model: nn.Module
    name: str
    column: str | None
    max_length: int | None
    with_defaults: bool = False

    def read(
        self, given: Any, mask: Any = None, first: int = 0, loader: Any = None
    ) -> Batches | None:
        """Return sequences, checked and without padding; None for a loader, which holds none.

        Args:
            given: what the user has, or what their loader gives.
            mask: which positions are real, [n, pos] or a row for each.
            first: the number of the first sequence.
            loader: which gave it.
        """
        given, is_single = _as_tensors(given, self.name), isinstance(given, str)
        # columns beside the ids, by name
        more: dict[str, Any] = {}
        is_dataset = hasattr(given, "column_names") and hasattr(given, "__getitem__")
        if isinstance(given, Mapping) or is_dataset:
            given, more = self._column_of(given, first)
            is_single = _is_row(given)
            if is_single:
                more = {name: [values] for name, values in more.items()}
            # a mask in the table gives way to one that the caller has given
            own = more.pop(MASKS[0], None)
            mask = own if mask is None else mask
        given = _turn_columns(given, loader)
        if loader is None and holds_pairs([given]):
            raise InfoFlowError(
                f"{self.name} is {brief(given)}, a tuple of two texts, which may be a pair or two "
                "sequences: expected [(first, second)] for a pair, [first, second] for sequences"
            )
        if holds_pairs(given):
            more = dict(tokenize_pairs(self.model, given, self.name, self.max_length))
            given = more.pop("input_ids")
        elif _is_chat(given):
            given, is_single = tokenize_chats(self.model, [given], self.name)[0], True
        elif _is_list(given) and all(map(_is_chat, given)):
            given = tokenize_chats(self.model, given, self.name)
        else:
            given = _first_of(given, loader)
        if is_single:
            given = [given]
        # nothing to take off and no columns: the tensor goes on as it is, which checks say more of
        if isinstance(given, Tensor) and (given.ndim < 2 or (mask is None and not more)):
            rows = given[:, : self.max_length] if given.ndim == 2 else given
            _warn_of_padding(self.model, rows, self.name)
            self._check_rows(rows, self.name)
            return Batches(self.model, rows, self.name, is_single=is_single)
        # a loader, or something else that gives batches one by one
        if not isinstance(given, Tensor) and not _is_list_of_sequences(given):
            return None
        if not len(given):
            raise InfoFlowError(f"{self.name} is empty: expected at least one sequence")
        if _is_by_position(given, loader):
            raise InfoFlowError(
                f"{self.name} gave {len(given)} tensors of {len(given[0])} ids, one for each "
                "position: torch collates rows that are lists so; expected a tensor [batch, pos]; "
                "put .with_format('torch') on the dataset, or give a collate_fn"
            )
        if more and mask is not None and "position_ids" in more:
            more[MASKS[0]] = mask  # with it, positions that begin anew are no other documents
        # real tokens of each sequence; padding is made anew for each batch
        sequences, columns = self._sequences(given, mask, more, first)
        self._check(sequences, first)
        same = len({len(row) for row in sequences}) == 1
        whole = torch.stack(sequences) if same else sequences
        return Batches(self.model, whole, self.name, columns, is_single)

    def _check(self, rows: list[Tensor], first: int) -> None:
        """Refuse sequences that the model cannot read, naming the first of them.

        Raises:
            InfoFlowError: see :func:`check_inputs`.
        """
        alike = len({(row.dtype, row.shape[1:]) for row in rows}) == 1
        lengths = {len(row) for row in rows}
        may_differ = not hasattr(self.model, "check_input")
        if alike and 0 not in lengths and (may_differ or len(lengths) == 1):
            with suppress(InfoFlowError):  # together, with one that is there in place of padding
                fill = float(rows[0].flatten()[0])
                together = pad_sequence(rows, batch_first=True, padding_value=fill)
                return self._check_rows(together, self.name)
        # one by one, so that the error names the sequence
        for index, row in enumerate(rows, first):
            self._check_rows(row[None], name_row(self.name, index))
        return None

    def _check_rows(self, rows: Tensor, name: str) -> None:
        check_inputs(self.model, rows, name, any_length=self.max_length == _ANY_LENGTH)

    def _column_of(self, table: Any, first: int) -> tuple[Any, dict[str, Any]]:
        """Find the column of a table that holds the inputs, and what belongs to them.

        Returns:
            The inputs, and, for token ids, the mask and what else the model's forward takes.

        Raises:
            InfoFlowError: for several splits, and if there is no such column, with the columns.
        """
        is_dataset = not isinstance(table, Mapping)
        # a DatasetDict is a mapping, too, whose values are tables
        if not is_dataset and any(hasattr(part, "column_names") for part in table.values()):
            raise InfoFlowError(
                f"{self.name} is a {type(table).__name__} with {', '.join(map(str, table))}: "
                f"expected one split, such as {self.name}[{next(iter(table))!r}]"
            )
        given = table.column_names if is_dataset else table
        names = [name for name in given if isinstance(name, str)]
        column = self.column or next((name for name in COLUMNS if name in names), None)
        sides = split_columns(column)
        if len(sides) == 2 and column not in names and {*sides} <= {*names}:
            return self._pairs_of(table, sides, first), {}
        if column not in names:
            raise InfoFlowError(
                f"{self.name} has the columns {', '.join(names) or 'none'}, without "
                f"{column or ' or '.join(COLUMNS)}: name the column that holds the texts or token "
                "ids, column='NAME', or those that hold pairs, column='FIRST,SECOND'; to measure a "
                "model that reads something else, call it yourself inside attach(model, probe)"
            )
        more = [name for name in names if name == MASKS[0] or name in find_pass_columns(self.model)]
        if is_dataset:
            # a format, such as that of torch, may stack rows or move them to a device
            plain = table.with_format(None)
            table = {name: list(plain[name]) for name in {column, *more}}
            # each row is a batch already, so its sequences are rows
            if not reads_vectors(self.model) and _holds_batches(table[column]):
                table = {name: [*chain.from_iterable(rows)] for name, rows in table.items()}
        found = _as_tensors(table[column], f"column {column!r} of {self.name}")
        is_list = isinstance(found, (list, tuple)) and len(found) > 0
        is_missing = is_list and isinstance(found[0], float | None)  # in tables of pandas
        if is_missing or (is_dataset and is_list and not isinstance(found[0], (str, list, tuple))):
            raise InfoFlowError(
                f"column {column!r} of {self.name} holds {type(found[0]).__name__} in row {first}: "
                "expected texts or lists of token ids; leave that row out, or name another column"
            )
        text = found[0] if is_list else found
        is_text = isinstance(text, str)
        # a table that has no lists holds ids as they are printed
        if is_text and (column == COLUMNS[0] or (column == COLUMNS[1] and text.startswith("["))):
            raise InfoFlowError(
                f"column {column!r} of {self.name} holds texts, such as {brief(text)}: expected "
                "lists of token ids, which csv files do not have; write them to json or parquet, "
                "or name a column of texts, column='NAME'"
            )
        # columns of texts have no number for each token
        beside = {} if is_text else {n: table[n] for n in more if n != column}
        return found, {name: values for name, values in beside.items() if values is not None}

    def _pairs_of(self, table: Any, sides: Sequence[str], first: int) -> list[tuple[str, str]]:
        """Read pairs of texts from two columns of a table, or the one pair of a row.

        Raises:
            InfoFlowError: for what is no text.
        """
        both = [table[side] for side in sides]
        if all(isinstance(text, str) for text in both):
            both = [[text] for text in both]
        pairs = list(zip(*map(list, both), strict=True))
        for index, pair in enumerate(pairs, first):
            for side, text in zip(sides, pair, strict=True):
                if not isinstance(text, str):
                    raise InfoFlowError(
                        f"column {side!r} of {self.name} holds {type(text).__name__} in row "
                        f"{index}: expected texts, as columns {' and '.join(sides)} are read as "
                        "pairs; leave that row out, or name one column of ids"
                    )
        return pairs

    def _sequences(
        self, given: Any, mask: Any, more: Mapping[str, Any], first: int
    ) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """Read the real tokens of sequences, and what belongs to each, cut; vectors are not cut."""
        kind = "texts" if isinstance(given[0], str) else "vector tokens"
        if kind == "texts":
            rows = tokenize(self.model, given, self.name, self.max_length, first)
        else:
            of_texts = (
                i for i, row in enumerate(given) if _is_list(row) and isinstance(row[0], str)
            )
            if (index := next(of_texts, None)) is not None:
                texts = reprlib.repr(given[index])
                raise InfoFlowError(
                    f"{name_row(self.name, index + first)} is a list of texts, {texts}: expected "
                    "one text, or token ids, in each row; join words, ' '.join(row), and give each "
                    "text of a batch a row of its own"
                )
            rows = [
                _tensor(row, name_row(self.name, i), "token ids") for i, row in enumerate(given)
            ]
            single = next((i for i, row in enumerate(rows) if not row.ndim), None)
            if single is not None:
                raise InfoFlowError(
                    f"{name_row(self.name, single + first)} is {given[single]!r}: expected a "
                    "sequence; leave rows without one out"
                )
        # texts and vectors cannot be masked, as nothing says where their padding would be
        if mask is not None and (kind == "texts" or rows[0].ndim == 2):
            raise InfoFlowError(
                f"{self.name} holds {kind} with an attention_mask: expected none, as {kind} "
                "have no padding; give token ids with their mask, or the inputs alone"
            )
        columns = {
            name: self._read_column(rows, values, name, first) for name, values in more.items()
        }
        # what the mask leaves out is left out of every column
        if mask is not None:
            masks = self._read_column(rows, mask, MASKS[0], first)
            label = f"the {MASKS[0]} of {self.name}"
            real = [check_mask(one[None], f"{label}[{i}]")[0] for i, one in enumerate(masks, first)]
            rows = [row[here] for row, here in zip(rows, real)]
            columns = {n: [row[h] for row, h in zip(c, real)] for n, c in columns.items()}
        # texts are cut already, before what their tokenizer puts behind them
        columns = {n: [row[: self.max_length] for row in column] for n, column in columns.items()}
        cut = [row[: self.max_length] if row.ndim == 1 else row for row in rows]
        # columns of default values are not passed on: models without that argument may run, then
        kept = {n: c for n, c in columns.items() if not _is_default(self.model, n, c)}
        for name in kept:
            if name not in forward_names(self.model):
                raise InfoFlowError(
                    f"{self.name} has {name}, which {kind_of(self.model)} does not take: "
                    "expected what its forward reads; leave it out"
                )
        if self.with_defaults:
            kept = {n: c for n, c in columns.items() if n in forward_names(self.model)}
        return cut, kept

    def _read_column(self, rows: list[Tensor], values: Any, name: str, first: int) -> list[Tensor]:
        """Read what a mask or another column has for each id.

        Raises:
            InfoFlowError: if it has anything else.
        """
        label = f"the {name} of {self.name}"
        expected = "1 and 0" if name == MASKS[0] else "a number for each id"
        try:
            found = [_tensor(row, f"{label}[{i}]", expected) for i, row in enumerate(values, first)]
        except TypeError:
            raise InfoFlowError(
                f"{label} is {_describe_type(values)}: expected rows of "
                f"{'0 and 1' if name == MASKS[0] else 'numbers, one for each id'}"
            ) from None
        if [tuple(one.shape) for one in found] != [tuple(row.shape) for row in rows]:
            shapes = [reprlib.repr([list(row.shape) for row in part]) for part in (found, rows)]
            own_call = name != MASKS[0] or any(one.ndim > 1 for one in found)
            remedy = f"; call the model with {name} inside attach(model, probe)" * own_call
            raise InfoFlowError(
                f"{label} has rows of shapes {shapes[0]}, the ids {shapes[1]}: expected a row for "
                f"each sequence, and one entry for each id{remedy}"
            )
        return found


def split_columns(column: str | None) -> list[str]:
    """Split the names of two columns of texts that are read as pairs, such as "premise,answer"."""
    sides = [side.strip() for side in (column or "").split(",")]
    return sides if len(sides) == 2 and all(sides) else []


def forward_names(model: nn.Module) -> frozenset[str]:
    """Find what the forward of a model takes, by name, or that of the model which it wraps."""
    found, seen, inner = set[str](), set[int](), model
    while isinstance(inner, nn.Module) and id(inner) not in seen:
        seen.add(id(inner))
        found |= inspect.signature(type(inner).forward).parameters.keys()
        # base_model of transformers may be the model itself, so a repeat ends the search
        held = (getattr(inner, name, None) for name in ("original_model", "base_model", "model"))
        inner = next((one for one in held if isinstance(one, nn.Module)), None)  # type: ignore[assignment]
    return frozenset(found)


def find_pass_columns(model: nn.Module) -> frozenset[str]:
    """Find the columns that change a pass of the model, beside its inputs and their mask."""
    if reads_vectors(model):
        return frozenset()
    names = {name for name in forward_names(model) | _KNOWN if not name.endswith(_HARMLESS)}
    if getattr(_config(model), "is_encoder_decoder", False):
        names.add("labels")  # its decoder reads them
    return frozenset(names - {*COLUMNS, *MASKS, "self", "input"})


def _config(model: nn.Module) -> Any:
    return getattr(getattr(model, "original_model", model), "config", None)


def _is_default(model: nn.Module, name: str, column: list[Tensor]) -> bool:
    """Say whether a column holds what the model takes where there is none."""
    if name == "position_ids" and name not in forward_names(model):
        return all(row.equal(torch.arange(len(row))) for row in column)
    if name != "token_type_ids":
        return False
    # without a table of types, as in GPT-2, type 0 has the embedding of token 0, and is no default
    has_types = name in forward_names(model) and not hasattr(_config(model), "type_vocab_size")
    return not has_types and not any(bool(row.any()) for row in column)


def _holds_batches(rows: list[Any]) -> bool:
    """Say whether each row of a table is a batch of sequences of ids, as of ``.batch(n)``."""
    first = rows[0][0] if rows and isinstance(rows[0], list) and rows[0] else None
    return isinstance(first, list)


def holds_pairs(given: Any) -> bool:
    """Say whether these are pairs of texts, each a tuple."""
    return _is_list(given) and all(
        isinstance(one, tuple) and len(one) == 2 and all(isinstance(text, str) for text in one)
        for one in given
    )


def _is_chat(given: Any) -> bool:
    """Say whether these are messages, each with a role."""
    return _is_list(given) and all(isinstance(one, dict) and "role" in one for one in given)


def _is_list(given: Any) -> bool:
    return isinstance(given, (list, tuple)) and len(given) > 0


def _is_row(given: Any) -> bool:
    """Say whether this is one text or one sequence of ids."""
    if isinstance(given, (list, tuple)):
        return len(given) > 0 and isinstance(given[0], int)
    return isinstance(given, str) or (isinstance(given, Tensor) and given.ndim == 1)


def _is_list_of_sequences(given: Any) -> bool:
    if not isinstance(given, (list, tuple)):
        return False
    first = given[0] if len(given) else ""
    return isinstance(first, (str, list, tuple)) or (isinstance(first, Tensor) and first.ndim == 1)


def _warn_of_padding(model: nn.Module, ids: Tensor, name: str) -> None:
    """Warn of ids that seem padded, which have no mask: the model reads padding as tokens."""
    pad = getattr(getattr(model, "tokenizer", None), "pad_token_id", None)
    if pad is None or ids.ndim != 2 or ids.is_floating_point():
        return
    for is_pad in (ids == pad, (ids == pad).flip(1)):
        at_end = is_pad.long().cumprod(dim=1).sum(dim=1)
        # one may be a text's own, as where it is EOS, too; and all end alike where they are cut
        if len(ids) and at_end.max() > at_end.min() + 1:
            warnings.warn(
                f"{name}[{int(at_end.argmax())}] has {int(at_end.max())} pad tokens at an end, "
                "where others have fewer, and they count as tokens: expected an attention_mask "
                "where sequences are padded; give all that the tokenizer returns, or the texts",
                InfoFlowWarning,
                stacklevel=2,
            )


def _is_by_position(given: Any, loader: Any) -> bool:
    """Say whether these are a tensor [batch] for each position, as torch collates rows of lists."""
    return (
        _collates_by_default(loader)
        and isinstance(given, list)
        and all(isinstance(part, Tensor) and part.ndim == 1 for part in given)
    )


def _turn_columns(given: Any, loader: Any) -> Any:
    """Return the texts, or pairs, of rows that torch has collated to a tuple for each place."""
    if not (_collates_by_default(loader) and isinstance(given, list)):
        return given
    columns = [
        column
        for column in given
        if isinstance(column, tuple) and all(isinstance(text, str) for text in column)
    ]
    # numbers beside them are labels
    if not columns or columns[0] is not given[0]:
        return given
    return [*columns[0]] if len(columns) == 1 else [*zip(*columns, strict=True)]


def _collates_by_default(loader: Any) -> bool:
    return getattr(loader, "collate_fn", None) is default_collate


def _first_of(given: Any, loader: Any) -> Any:
    """Return the inputs of a batch (inputs, targets); all else as it is.

    A list may also be several batches, except from a loader, which collates pairs into lists.

    Raises:
        InfoFlowError: if what stands beside the inputs may as well be their mask.
    """
    if not (isinstance(given, (tuple, list)) and given and isinstance(given[0], Tensor)):
        return given
    # a batch of a loader is (inputs, targets); a list of tensors may be inputs alone
    inputs, *others = given
    is_pair = loader is not None and isinstance(given, tuple)
    if inputs.ndim > 1:
        for other in others:
            if _may_be_mask(other, inputs):
                raise InfoFlowError(
                    f"beside the token ids stands a tensor {tuple(other.shape)} of 0 and 1 that "
                    "may be their attention_mask or their targets: expected a mask to be named; "
                    "give {'input_ids': ids, 'attention_mask': mask}, or the ids alone"
                )
        tensors = [part for part in given if isinstance(part, Tensor)]
        collated = loader is not None and len({part.shape[:1] for part in tensors}) == 1
        is_pair = isinstance(given, tuple) or collated
    return inputs if is_pair else given


def _may_be_mask(other: Any, ids: Tensor) -> bool:
    """Say whether a tensor beside token ids reads as their mask, with some padding."""
    if not isinstance(other, Tensor) or other.shape != ids.shape or ids.is_floating_point():
        return False
    try:
        return not bool(check_mask(other, "").all())
    except InfoFlowError:
        return False


def _as_tensors(given: Any, name: str) -> Any:
    """Return arrays as tensors, also those in lists.

    Integers of every kind become int64, which embeddings read. Arrays of texts or of rows, and
    columns of pandas, become lists; tables of pandas become columns by name.
    """
    # a pandas table or column
    if hasattr(given, "iloc"):
        names = getattr(given, "columns", None)
        if names is None:
            return _as_tensors(given.tolist(), name)
        if len({*names}) < len(names):
            raise InfoFlowError(
                f"{name} has several columns of one name ({', '.join(map(str, names))}): expected "
                "each once"
            )
        return {column: given[column].tolist() for column in names}
    if isinstance(given, np.ma.MaskedArray) and np.ma.is_masked(given):
        raise InfoFlowError(
            f"{name} is an array with masked entries, whose numbers are no ids: expected them left "
            "out; give a list of sequences, or its .data with attention_mask="
        )
    # arrays of texts
    if isinstance(given, np.ndarray) and given.dtype.kind in "UO":
        return _as_tensors(given.tolist(), name)
    # tensors have the byte order of the machine, and none that is read-only
    if isinstance(given, np.ndarray) and given.dtype.kind in "iufc":
        given = given.astype(
            given.dtype.newbyteorder("="), order="C", copy=not given.flags.writeable
        )
    # lists of arrays become lists of tensors, which may have different lengths
    if isinstance(given, (list, tuple)) and any(
        isinstance(part, (np.ndarray, Tensor)) for part in given
    ):
        parts = (_as_tensors(part, name) for part in given)
        return tuple(parts) if isinstance(given, tuple) else list(parts)
    if isinstance(given, Tensor) or (isinstance(given, np.ndarray) and given.dtype.kind in "biufc"):
        return _tensor(given, name, "numbers")
    return given


def _tensor(values: Any, name: str, expected: str) -> Tensor:
    """Return values as a tensor, integers as int64.

    Raises:
        InfoFlowError: for what is no numbers, or a tensor without ordinary ones.
    """
    try:
        found = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InfoFlowError(
            f"{name} is {reprlib.repr(values)}, no row of numbers ({error}): expected {expected}"
        ) from error
    check_is_plain(found, name)
    if found.is_inference():  # which takes no part in a derivative; a copy does
        with torch.inference_mode(False):
            found = found.clone()
    is_integer = not (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool)
    return found.long() if is_integer else found


def _describe_type(given: Any) -> str:
    of = type(given[0]).__name__ if isinstance(given, (list, tuple)) and given else ""
    return type(given).__name__ + (f" of {of}" if of else "")


def check_mask(mask: Any, name: str) -> Bool[Tensor, "batch pos"]:
    """Return a mask as booleans, True where positions are real.

    Raises:
        InfoFlowError: for other values than 0 and 1, and for sequences without real tokens or whose
            real tokens are not one stretch.
    """
    given = _tensor(mask, name, "a tensor [batch, pos] of 1 for real tokens and 0 for padding")
    # anything but 0 and 1 (weights, positions) is no mask
    wrong = given[(given != 0) & (given != 1)]
    if given.ndim != 2 or not given.shape[1] or given.is_complex() or len(wrong):
        raise InfoFlowError(
            f"{name} is {given.dtype} {tuple(given.shape)} with values such as "
            f"{(wrong if len(wrong) else given.flatten())[:4].tolist()}: expected a tensor [batch, "
            "pos] of 1 for real tokens and 0 for padding"
        )
    real = given.bool()
    # where a run of real tokens begins; more than one is a hole
    starts = (real[:, 1:] & ~real[:, :-1]).sum(dim=1) + real[:, 0]
    bad = (starts != 1).nonzero().flatten().tolist()
    if bad:
        raise InfoFlowError(
            f"{name} has the real tokens of sequence {bad[0]} at "
            f"{real[bad[0]].nonzero()[:, 0].tolist()}: expected one stretch of at least one, with "
            "padding before or behind it"
        )
    return real


def call_columns(
    model: nn.Module, tokens: Tensor | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Find what a call of the model has for each token beside its id, by name."""
    if tokens is None:
        return {}
    named, size = _bind_arguments(model, args, kwargs), tokens.shape[:2]
    found = {
        name: values.expand(size)
        for name, values in named.items()
        if name in find_pass_columns(model) and isinstance(values, Tensor) and values.ndim == 2
        if values is not tokens  # which models of one's own call as they like
        if values.shape in (size, (1, size[1]))
    }
    mask = named.get(MASKS[0])
    # beside positions it tells padding from packed documents; with more axes it is no padding
    if isinstance(mask, Tensor) and ("position_ids" in found or mask.ndim > 2):
        found[MASKS[0]] = mask.expand(size[0], *mask.shape[1:])
    return {} if is_second_stack(model) else found


def has_second_stack(model: nn.Module) -> bool:
    """Say whether an opened model is an encoder with the decoder behind it.

    Either alone takes no inputs of the other, and has a config that speaks of both. The attention
    of one of them may be of a kind that cannot be shown, and then the model has one stack.
    """
    both = getattr(_config(model), "is_encoder_decoder", False)
    if not both or not hasattr(model, "anatomy"):
        return False
    anatomy: Any = model.anatomy
    return len(anatomy.stacks) > 1 or "decoder_input_ids" in forward_names(model)


def is_second_stack(model: nn.Module) -> bool:
    """Say whether a model is opened by its decoder, behind an encoder."""
    if not has_second_stack(model):
        return False
    anatomy: Any = model.anatomy
    decoder: Any = model.original_model.get_decoder()  # type: ignore[operator, union-attr]
    return any(module is anatomy.blocks[0].module for module in decoder.modules())


def call_inputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Tensor | None, Bool[Tensor, "batch pos"] | None]:
    """Return the token ids of a call of the model, and which of them are real (None: all).

    Raises:
        InfoFlowError: for leading padding that the model masks without being told, for cached
            keys that it leaves out, and for a decoder whose own inputs are not given.
    """
    kwargs = _bind_arguments(model, args, kwargs)
    # the names by which models of three libraries take their inputs
    names = ("input", "input_ids", "inputs_embeds")
    if is_second_stack(model):
        args = ()
        # the decoder's own, under the names that other models have: n[8:] is without "decoder_"
        kwargs = {n[8:]: value for n, value in kwargs.items() if n.startswith("decoder_")}
        if not any(kwargs.get(name) is not None for name in names):
            raise InfoFlowError(
                "the call has no decoder_input_ids, so the decoder makes its inputs from other "
                "columns, and probes on the decoder do not know its tokens: give decoder_input_ids"
            )
    found = [kwargs[name] for name in names if kwargs.get(name) is not None]
    given = next(iter((*found, *args)), None)
    if given is None:  # what the model takes first under a name of its own, such as pixel_values
        given = kwargs.get(_first_argument(model))
    mask = next((kwargs[name] for name in MASKS if kwargs.get(name) is not None), None)
    if not has_own_attention(model):
        _refuse_key_cache(kwargs, given, mask)
    if isinstance(given[0] if isinstance(given, (list, tuple)) and given else given, str):
        return _call_of_texts(model, given, kwargs)
    if not isinstance(given, Tensor) or (
        given.ndim == 3 and not found and has_positions_first(model)
    ):
        return None, None
    # a residual stream has no tokens to read
    starts = kwargs.get("start_at_layer") is not None  # then it is a residual stream
    if isinstance(mask, Tensor):
        # one of queries and keys leaves nothing out as padding; the pass shows what it closes
        if mask.ndim > 2:
            return None if starts else given, None
        real = check_mask(mask, "attention_mask")
        return None if starts else given, None if bool(real.all()) else real
    if starts:
        return None, None
    side = kwargs.get("padding_side")
    # the model masks leading pad tokens by itself, which the probes do not see
    if given.ndim == 2 and not given.is_floating_point() and _masks_by_itself(model, side):
        pad = int(model.tokenizer.pad_token_id)  # type: ignore[arg-type, union-attr]
        leading = given.eq(pad).long().cumprod(dim=1).sum(dim=1)
        # the first may be BOS, which often is the pad token
        allowed = int(pad == model.tokenizer.bos_token_id)  # type: ignore[union-attr]
        if int(leading.max()) > allowed:
            raise InfoFlowError(
                f"sequence {int(leading.argmax())} starts with {int(leading.max())} pad tokens, "
                "which this model masks by itself, as its tokenizer pads on the left: give the "
                "attention_mask, so that probes know what is masked"
            )
    return given, None


def _first_argument(model: nn.Module) -> str:
    """Find the name of what the model itself takes first; empty where it names nothing."""
    kind: Any = type(getattr(model, "original_model", model))
    _, *parameters = inspect.signature(kind.forward).parameters.values()  # without self
    return next((p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD), "")


def has_positions_first(model: Any) -> bool:
    """Say whether an opened model has positions first, then sequences, as torch's own may."""
    axes = model.anatomy.blocks[0].axes if hasattr(model, "anatomy") else None
    return axes is not None and axes[0] != 0


def _refuse_key_cache(kwargs: Mapping[str, Any], given: Any, mask: Any) -> None:
    """Refuse cached keys for a bridge: it takes TransformerLens's cache, and leaves it out.

    Those of a HookedTransformer, and what a bridge makes of its own model's, show in the pattern.
    A cache of transformers has had several names, and is known by what it is; where the bridge has
    lost its keys, a mask is longer than the sequences that are given.
    """
    length = max((getattr(v, "get_seq_length", lambda: 0)() for v in kwargs.values()), default=0)
    both = isinstance(given, Tensor) and isinstance(mask, Tensor) and given.ndim == mask.ndim == 2
    if (
        kwargs.get("past_kv_cache") is not None
        or length
        or (both and mask.shape[1] > given.shape[1])
    ):
        raise InfoFlowError(
            "the call has cached keys, which a TransformerBridge may leave out in silence: "
            "expected one pass over whole sequences; run without past_kv_cache"
        )


def _bind_arguments(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all arguments of a call by name."""
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
    # to_tokens gives no mask, so each text alone tells how many of its tokens are real
    lengths = torch.tensor([model.to_tokens(text, **bos).shape[1] for text in texts])  # type: ignore[operator]
    real = Batch(tokens, lengths).mask()
    if bool(real.all()):
        return tokens, None
    side = chosen.get("padding_side") or getattr(model.tokenizer, "padding_side", "right")
    return tokens, real.flip(1) if side == "left" else real
