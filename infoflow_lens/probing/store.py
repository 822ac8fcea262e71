"""The sequences of a run: texts joined and cut, and one Arrow file, which is mapped into memory.

``datasets.Dataset.from_file`` opens the file, too: its column is "input_ids", or "x" for vectors;
others are what the model takes beside ids, such as "token_type_ids".
"""

import errno
import hashlib
import json
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from annotated_types import Ge
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import name_file_in_errors, read_signed, write_signed
from infoflow_lens.foundation.settings import check
from infoflow_lens.hooks.model.inputs import Batches, Extent, Rows
from infoflow_lens.hooks.model.texts import group_by_size, ids_of_texts, tokenize
from infoflow_lens.runs.folder import RunFolder

_FOLDER, _FILE, _ABOUT = "inputs", "sequences.arrow", "sequences.json"
_SCHEMA = "infoflow-lens sequences 1"
_DTYPE = b"torch.dtype"  # Arrow has no bfloat16, and ids need half of int64
_AT_ONCE = 256  # sequences that are read together
_MAPPED = 2**26  # bytes after whose reading the file is mapped anew, so that none stay in memory


class StoredSequences(Sequence[Tensor]):
    """The sequences that :func:`store_sequences` wrote, or some in a row, read as they are needed.

    Attributes:
        extent: how many, and how long.
        columns: what stands beside the ids, by name, a row for each sequence.
    """

    def __init__(
        self,
        file: "_ArrowFile",
        extent: Extent,
        start: int = 0,
        names: tuple[str, ...] = (),
        column: str | None = None,
    ) -> None:
        self.extent = extent
        self._file, self._start, self._names, self._column = file, start, names, column

    @property
    def columns(self) -> Mapping[str, "StoredSequences"]:
        """Read what stands beside the ids of these sequences, by name."""
        parts = (self._file, self.extent, self._start)
        return {name: StoredSequences(*parts, column=name) for name in self._names}

    def __len__(self) -> int:
        return self.extent.n_sequences

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> "StoredSequences": ...

    def __getitem__(self, index: int | slice) -> "Tensor | StoredSequences":
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise InfoFlowError(f"step is {step}: expected sequences in their own order")
            return self._select(start, max(start, stop))
        place = range(len(self))[index] + self._start
        return self._file.rows(place, place + 1, self._column)[0]

    def __iter__(self) -> Iterator[Tensor]:
        stop = self._start + len(self)
        for start in range(self._start, stop, _AT_ONCE):
            yield from self._file.rows(start, min(start + _AT_ONCE, stop), self._column)

    def _select(self, start: int, stop: int) -> "StoredSequences":
        """Select a stretch of these sequences, which stay in the file."""
        extent = self.extent
        # lengths are read only where some sequences are left out
        if stop - start < len(self):
            lengths = self._file.lengths(self._start + start, self._start + stop)
            extent = Extent(stop - start, *lengths)
        return StoredSequences(self._file, extent, self._start + start, self._names, self._column)


class _ArrowFile:
    """An Arrow file of sequences, opened where it is first read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._table: pa.Table | None = None
        self._n_read = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return the path alone, as another process opens the file by itself."""
        return {"path": self.path, "_table": None, "_n_read": 0}

    def rows(self, start: int, stop: int, name: str | None = None) -> list[Tensor]:
        """Return the sequences from `start` to before `stop`, or what a column has for them.

        Raises:
            InfoFlowError: if the file is spoiled or gone.
        """
        with self._open_rows(start, stop, name) as (table, column):
            rows = column.combine_chunks()
            offsets = rows.offsets.to_numpy()
            # a slice of lists still holds all values; its offsets say which are its own
            values = rows.values.slice(offsets[0], offsets[-1] - offsets[0])
            shape: tuple[int, ...] = (-1,)
            if pa.types.is_fixed_size_list(values.type):
                shape = (-1, values.type.list_size)
                values = values.flatten()
            of_column = _DTYPE if name is None else _DTYPE + b" " + name.encode()
            dtype = getattr(torch, table.schema.metadata[of_column].decode())
            # a copy, which stays when the file is mapped anew
            numbers = torch.from_numpy(np.array(values.to_numpy(zero_copy_only=False)))
            self._n_read += numbers.nbytes
            return list(numbers.to(dtype).reshape(shape).split(np.diff(offsets).tolist()))

    def extent(self) -> Extent:
        """Count the sequences of the file, and find their lengths."""
        with self._open_rows(0, 0) as (table, _):
            n = len(table)
        return Extent(n, *self.lengths(0, n))

    def columns(self) -> list[str]:
        """Name the columns beside the sequences."""
        with self._open_rows(0, 0) as (table, _):
            return list(table.column_names[1:])

    def lengths(self, start: int, stop: int) -> tuple[int, int]:
        """Return the tokens of the longest and of the shortest of some sequences; 0 for none."""
        with self._open_rows(start, stop) as (_, column):
            found = pc.min_max(pc.list_value_length(column)).as_py()
            return found["max"] or 0, found["min"] or 0

    def _open(self) -> Any:
        """Open the file, mapped, or to be read where a file system cannot map files (ENODEV)."""
        try:
            return pa.memory_map(str(self.path))
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise
            return pa.OSFile(str(self.path))

    @contextmanager
    def _open_rows(
        self, start: int, stop: int, name: str | None = None
    ) -> Iterator[tuple[pa.Table, pa.ChunkedArray]]:
        try:
            # mapped memory counts as the process's own until the file is opened anew
            if self._table is None or self._n_read > _MAPPED:
                self._table, self._n_read = None, 0
                with self._open() as file, pa.ipc.open_stream(file) as reader:
                    self._table = reader.read_all()
            column = self._table.column(name or 0).slice(start, stop - start)
            # a slice of Arrow ends silently where the table does
            if len(column) != stop - start:
                raise ValueError(f"it holds {len(self._table)} sequences, not {stop}")
            yield self._table, column
        except (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException) as e:
            raise InfoFlowError(
                f"{str(self.path)!r} cannot be read ({e}): expected the sequences of this run; "
                "run the same again, which writes them anew"
            ) from e


@dataclass(frozen=True)
class SequenceStore:
    """Sequences on disk, with their identity.

    Attributes:
        path: of the file.
        extent: how many, and how long.
        digest: of their numbers, types and lengths, whatever the file looks like.
        columns: what stands beside the ids and changes what the model gives.
    """

    path: Path
    extent: Extent
    digest: str
    columns: tuple[str, ...] = ()

    @property
    def sequences(self) -> StoredSequences:
        """The sequences, to be read."""
        return StoredSequences(_ArrowFile(self.path), self.extent, names=self.columns)

    def settle(self, into: RunFolder, made_from: Any) -> "SequenceStore":
        """Move the file to the folder of the run, where it replaces an earlier one.

        Args:
            into: the folder.
            made_from: JSON-compatible, by which :func:`find_sequences` finds them again; with None
                no later run uses them.
        """
        if self.path.parent == into.path / _FOLDER:
            return self
        write_signed(self.path.parent / _ABOUT, _SCHEMA, self.describe(made_from))
        into.replace_folder(self.path.parent, into.path / _FOLDER)
        return replace(self, path=into.path / _FOLDER / _FILE)

    def describe(self, made_from: Any) -> dict[str, Any]:
        """Return the note that lies beside the file, as JSON gives it back: tuples are lists."""
        about = {"identity": self.digest, "columns": self.columns, "made_from": made_from}
        note: dict[str, Any] = json.loads(json.dumps(asdict(self.extent) | about))
        return note


def find_sequences(folder: RunFolder, made_from: Any) -> SequenceStore | None:
    """Find the sequences in the folder of a run; None if they are spoiled or made from other data.

    Args:
        folder: of the run.
        made_from: as given to :meth:`SequenceStore.settle`.
    """
    names = [f"{_FOLDER}/{name}" for name in (_ABOUT, _FILE)]
    try:
        if made_from is None or not folder.holds(*names):
            return None
        about = read_signed(folder.path / names[0], _SCHEMA, "note on sequences", "")
        file = _ArrowFile(folder.path / names[1])
        extent, held = file.extent(), file.columns()
    except InfoFlowError:  # they are written anew, where the folder may be written
        return None
    identity, columns = about.get("identity"), about.get("columns", [])
    if not isinstance(identity, str) or not isinstance(columns, list):
        return None
    found = SequenceStore(folder.path / names[1], extent, identity, tuple(columns))
    is_same = {"columns": columns, **about} == found.describe(made_from)
    return found if is_same and all(name in held for name in columns) else None


def store_sequences(parts: Iterable[Batches], scratch: Path, what: str) -> SequenceStore:
    """Write sequences, one part after another, to a new folder in `scratch`.

    :meth:`SequenceStore.settle` moves them to the folder of the run.

    Args:
        parts: some sequences at a time: token ids [pos], with columns beside them, or vectors [pos,
            d_token].
        scratch: a folder.
        what: what errors call the sequences.

    Raises:
        InfoFlowError: for no sequences, for parts with other columns or types than those before,
            and where they cannot be written.
    """
    path = scratch / f"sequences.{uuid.uuid4().hex[:12]}" / _FILE
    digests: dict[str, Any] = {}  # of the sequences, by "", and of each column
    changed: set[str] = set()
    n, longest, shortest = 0, 0, 2**63
    with ExitStack() as stack:
        stack.enter_context(name_file_in_errors(path))  # closing writes, too, also behind an error
        writer = None
        # written as they come: all sequences need not fit into memory
        for part in parts:
            if not len(part.rows):
                continue
            lengths = [len(row) for row in part.rows]
            numbers = {"": _join(part.rows)}
            numbers |= {name: _join(rows) for name, rows in sorted(part.columns.items())}
            for name, of_column in numbers.items():
                _add_to(digests.setdefault(name, hashlib.sha256()), of_column, lengths)
            changed.update(part.list_active_columns())
            batch = _make_rows(numbers, lengths, what)
            if writer is None:
                path.parent.mkdir(parents=True)
                file = stack.enter_context(pa.OSFile(str(path), "wb"))
                schema = batch.schema
                writer = stack.enter_context(pa.ipc.new_stream(file, schema))
            # a stream has one schema
            elif not batch.schema.equals(schema, check_metadata=True):
                own = numbers[""]
                raise InfoFlowError(
                    f"{what} holds {own.dtype} {list(own.shape[1:])} "
                    f"{' '.join(batch.schema.names)} behind others: expected sequences of one "
                    "type, with the same columns"
                )
            writer.write_batch(batch)
            longest, shortest = max(longest, *lengths), min(shortest, *lengths)
            n += len(lengths)
    if not n:
        raise InfoFlowError(f"{what} is empty: expected at least one sequence")
    # columns that hold nothing of their own are no part of the data
    names = tuple(sorted(changed))
    whole = digests[""]
    for name in names:
        whole.update(f"{name} {digests[name].hexdigest()}".encode())
    return SequenceStore(path, Extent(n, longest, shortest), whole.hexdigest()[:16], names)


def _join(rows: Rows) -> Tensor:
    return rows.flatten(0, 1) if isinstance(rows, Tensor) else torch.cat(list(rows))


def _add_to(digest: Any, numbers: Tensor, lengths: Sequence[int]) -> None:
    """Add sequences to a digest, each with its type and its shape before its numbers."""
    raw_bytes = numbers.contiguous().view(torch.uint8).numpy().reshape(-1)
    # bytes of one token, an id or a vector
    size = len(raw_bytes) // len(numbers)
    stop = 0
    for length in lengths:
        start, stop = stop, stop + length * size
        digest.update(f"{numbers.dtype}{(length, *numbers.shape[1:])}".encode())
        digest.update(raw_bytes[start:stop])


def _make_rows(columns: Mapping[str, Tensor], lengths: Sequence[int], what: str) -> pa.RecordBatch:
    """Return sequences, one behind the other, as rows of an Arrow table, with their columns."""
    offsets = pa.array(np.cumsum([0, *lengths], dtype=np.int32))
    named = {
        (name or ("x" if numbers.ndim > 1 else "input_ids")): pa.ListArray.from_arrays(
            offsets, _read_values(numbers, what)
        )
        for name, numbers in columns.items()
    }
    types = {
        f"{_DTYPE.decode()} {name}".strip(): str(numbers.dtype).removeprefix("torch.")
        for name, numbers in columns.items()
    }
    batch = pa.record_batch([*named.values()], names=[*named])
    return batch.replace_schema_metadata(types)


def _read_values(numbers: Tensor, what: str) -> pa.Array:
    """Return the numbers of sequences in a row, as Arrow has them."""
    kept = numbers.float() if numbers.dtype == torch.bfloat16 else numbers
    values = pa.array(kept.flatten().numpy())
    # four bytes a token; ids of all tokenizers fit
    if not (numbers.is_floating_point() or numbers.dtype == torch.bool):
        try:
            values = values.cast(pa.int32())
        except pa.ArrowInvalid as error:
            raise InfoFlowError(
                f"{what} has token ids up to {int(numbers.max())}: expected less than 2**31"
            ) from error
    if numbers.ndim > 1:
        values = pa.FixedSizeListArray.from_arrays(values, numbers.shape[1])
    return values


_PIECE = 2**20  # characters that are tokenised at a time, about; each takes hundreds of bytes
_WINDOWS_AT_ONCE = 1000


def token_stream(
    model: nn.Module, texts: Sequence[str]
) -> tuple[Int[Tensor, " prefix"], Int[Tensor, " pos"]]:
    """Join all texts as ids, and find what the model's tokenizer puts before a text.

    Args:
        model: with a tokenizer.
        texts: at least one; the ids of each begin with what the tokenizer puts before a text. Those
            of more than a million characters are tokenised in pieces that end with a line.

    Returns:
        The prefix, such as BOS, which may be empty; and the stream.

    Raises:
        InfoFlowError: for no text, or a model without a tokenizer.
    """
    prefix, *parts = _prefix_and_stream(model, texts)
    return prefix, torch.cat(parts)


def spread_windows(
    prefix: Int[Tensor, " prefix"],
    stream: Int[Tensor, " pos"],
    length: int,
    n: int | None,
    name: str = "the text",
) -> Int[Tensor, "window length"]:
    """Cut windows that share no token, spread evenly over the stream, each behind the prefix.

    Args:
        prefix, stream: as :func:`token_stream` gives them.
        length: tokens of a window, prefix included.
        n: at most so many windows; None for all.
        name: what errors call the stream.

    Raises:
        InfoFlowError: for a length without room, or a stream shorter than one window.
    """
    return torch.cat(list(_spread(prefix, stream.numpy().take, len(stream), length, n, name)))


def windows(
    model: nn.Module,
    texts: Iterable[str],
    length: int,
    n: int | None,
    name: str,
    *,
    one_text: bool = False,
    scratch: Path | None = None,
) -> Iterator[Int[Tensor, "window length"]]:
    """Yield the windows of :func:`spread_windows` over a :func:`token_stream`, some at a time.

    Args:
        model: with a tokenizer.
        texts: as they are read.
        length, n, name: as for :func:`spread_windows`.
        one_text: whether these are pieces of one text.
        scratch: a folder for the stream, of four bytes a token; None keeps it in memory.

    Raises:
        InfoFlowError: as for :func:`token_stream` and :func:`spread_windows`, and if the stream
            cannot be written to `scratch`.
    """
    parts = _prefix_and_stream(model, texts, one_text)
    prefix = next(parts)
    if scratch is None:
        yield spread_windows(prefix, torch.cat(list(parts)), length, n, name)
        return
    n_stream = 0
    with ExitStack() as stack:
        with name_file_in_errors(scratch):
            file = stack.enter_context(tempfile.TemporaryFile(dir=scratch))
        for ids in parts:
            n_stream += len(ids)
            with name_file_in_errors(scratch):
                file.write(ids.to(torch.int32).numpy().tobytes())
        with name_file_in_errors(scratch):
            file.flush()
        # mapped anew for every part, so that what was read does not stay in memory
        yield from _spread(
            prefix, lambda places: np.memmap(file, np.int32, "r")[places], n_stream, length, n, name
        )


def _spread(
    prefix: Tensor,
    read: Callable[[NDArray[np.int64]], NDArray[np.integer[Any]]],
    n_stream: int,
    length: int,
    n: int | None,
    name: str,
) -> Iterator[Tensor]:
    """Yield the windows of a stream that is read by places; see :func:`spread_windows`."""
    own: int = check(length, Annotated[int, Ge(len(prefix) + 1)], "window") - len(prefix)
    n_stream -= len(prefix)  # the stream begins with one, and each window brings its own
    most = n_stream // own
    if most < 1:
        raise InfoFlowError(
            f"{name} has {n_stream} tokens: expected at least {own}, one window; give more text "
            "or a shorter window"
        )
    # no more windows than fit side by side, so none overlap; float64 is exact for these places
    chosen = torch.linspace(0, n_stream - own, min(most, n or most), dtype=torch.float64).long()
    for starts in (chosen + len(prefix)).split(_WINDOWS_AT_ONCE):
        rows = torch.from_numpy(np.array(read(starts.numpy()[:, None] + np.arange(own)))).long()
        yield torch.cat([prefix.expand(len(rows), -1), rows], dim=1)


def _prefix_and_stream(
    model: nn.Module, texts: Iterable[str], one_text: bool = False
) -> Iterator[Tensor]:
    """Yield the prefix that the tokenizer puts before a text, then the ids of all texts.

    The ids of each text begin with the prefix.

    Args:
        model: with a tokenizer.
        texts: as they are read.
        one_text: whether these are pieces of one text; then only the first has the prefix.

    Raises:
        InfoFlowError: for no text, or a model without a tokenizer.
    """
    coming = iter(texts)
    first = next(coming, None)
    if first is None:
        raise InfoFlowError("there are no texts: expected at least one")
    # the start of a text is enough to see what the tokenizer puts before it
    beginning = [first[:256]]
    (whole,), (bare,) = (
        tokenize(model, beginning, "the texts"), ids_of_texts(model, beginning, bare=True)
    )  # fmt: skip
    prefix = whole[: len(whole) - len(bare)]
    yield prefix
    # only the first piece of a text begins with the prefix; a file is one text
    pieces = (
        (piece, place == 0 and not (one_text and index))
        for index, text in enumerate(chain([first], coming))
        for place, piece in enumerate(_pieces(text))
    )
    for group in group_by_size(pieces, size=lambda pair: len(pair[0])):
        rows = ids_of_texts(model, [piece for piece, _ in group], bare=True)
        yield torch.cat(
            [torch.cat([prefix, row]) if begins else row for row, (_, begins) in zip(rows, group)]
        )


def _pieces(text: str) -> Iterator[str]:
    """Yield a text in pieces that end with a line, or with a word where lines are very long."""
    start = 0
    while len(text) - start > _PIECE:
        stop = text.rfind("\n", start, start + _PIECE) + 1
        stop = stop if stop > start else text.rfind(" ", start + 1, start + _PIECE)
        stop = stop if stop > start else start + _PIECE
        yield text[start:stop]
        start = stop
    yield text[start:]
