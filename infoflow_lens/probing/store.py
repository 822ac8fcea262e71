"""Sequences on disk, in shards of which one is in memory at a time."""

import hashlib
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, overload

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import naming_file
from infoflow_lens.hooks.model.inputs import Extent
from infoflow_lens.runs.folder import RunFolder

_SHARD = 1024  # sequences in a file


class StoredSequences(Sequence[Tensor]):
    """The sequences that :func:`store` wrote, or some of them in a row, read as they are needed.

    Attributes:
        folder: of the files.
        extent: how many, and how long.
    """

    def __init__(
        self, folder: Path, extent: Extent, start: int = 0, longest: int | None = None
    ) -> None:
        self.folder, self.extent = folder, extent
        self._start, self._longest = start, longest
        self._read: tuple[int, list[Tensor]] = (-1, [])

    def __getstate__(self) -> dict[str, Any]:
        """Without what was read, which another process reads by itself."""
        return {**vars(self), "_read": (-1, [])}

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
            return self._rows(start, max(start, stop))
        place = range(len(self))[index] + self._start
        return self._cut(self._shard(place // _SHARD)[place % _SHARD])

    def __iter__(self) -> Iterator[Tensor]:
        stop = self._start + len(self)
        for shard in range(self._start // _SHARD, -(-stop // _SHARD)):
            first = shard * _SHARD
            for row in self._shard(shard)[max(self._start - first, 0) : stop - first]:
                yield self._cut(row)

    def cut(self, longest: int) -> "StoredSequences":
        """The same sequences, of at most so many tokens each."""
        extent = Extent(
            len(self), min(self.extent.longest, longest), min(self.extent.shortest, longest)
        )
        return StoredSequences(self.folder, extent, self._start, longest)

    def _cut(self, row: Tensor) -> Tensor:
        return row[: self._longest]

    def _rows(self, start: int, stop: int) -> "StoredSequences":
        part = StoredSequences(
            self.folder, Extent(stop - start, 0, 0), self._start + start, self._longest
        )
        if stop - start == len(self):
            part.extent = self.extent
        elif stop > start:
            lengths = self._lengths(part._start, part._start + len(part))
            if self._longest is not None:
                lengths = [min(length, self._longest) for length in lengths]
            part.extent = Extent(len(lengths), max(lengths), min(lengths))
        return part

    def _lengths(self, start: int, stop: int) -> list[int]:
        """The lengths of some sequences, as they were stored."""
        lengths: list[int] = []
        for number in range(start // _SHARD, -(-stop // _SHARD)):
            with self._opened(number) as file:
                lengths += file.get_tensor("lengths").tolist()
        first = start // _SHARD * _SHARD
        return lengths[start - first : stop - first]

    def _shard(self, number: int) -> list[Tensor]:
        """The sequences of a file."""
        if self._read[0] != number:
            with self._opened(number) as file:
                tokens, lengths = file.get_tensor("tokens").clone(), file.get_tensor("lengths")
                rows = [row[:length] for row, length in zip(tokens, lengths.tolist(), strict=True)]
            self._read = (number, rows)
        return self._read[1]

    @contextmanager
    def _opened(self, number: int) -> Iterator[Any]:
        """A file.

        Raises:
            InfoFlowError: if it is spoiled or gone.
        """
        path = _path(self.folder, number)
        try:
            with safe_open(path, framework="pt") as file:
                yield file
        except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
            raise InfoFlowError(
                f"{str(path)!r} cannot be read ({error}): expected the sequences of this run; "
                "run the same again, which writes them anew"
            ) from error


def store(rows: Iterable[Tensor], scratch: Path, what: str) -> tuple[StoredSequences, str]:
    """Write sequences as they come, to a folder in `scratch` until :func:`settle`.

    Args:
        rows: token ids [pos] or vectors [pos, d_token].
        scratch: a folder.
        what: what errors call the rows.

    Returns:
        The sequences, and a digest of them all.

    Raises:
        InfoFlowError: for no rows, and where they cannot be written.
    """
    new = scratch / f"sequences.{uuid.uuid4().hex[:12]}"
    with naming_file(new):
        new.mkdir(parents=True)
    digest = hashlib.sha256()
    n, longest, shortest = 0, 0, 0
    coming = iter(rows)
    try:
        while together := list(islice(coming, _SHARD)):
            lengths = [len(row) for row in together]
            for row in together:
                digest.update(f"{row.dtype}{tuple(row.shape)}".encode())
                digest.update(row.contiguous().view(torch.uint8).numpy().tobytes())
            contents = {
                "tokens": pad_sequence(together, batch_first=True).contiguous(),
                "lengths": torch.tensor(lengths),
            }
            with naming_file(_path(new, n // _SHARD)):
                save_file(contents, _path(new, n // _SHARD))
            shortest = min(lengths) if not n else min(shortest, *lengths)
            longest = max(longest, *lengths)
            n += len(together)
        if not n:
            raise InfoFlowError(f"{what} is empty: expected at least one sequence")
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    return StoredSequences(new, Extent(n, longest, shortest)), digest.hexdigest()[:16]


@contextmanager
def unless_settled(stored: StoredSequences) -> Iterator[None]:
    """Remove stored sequences if the block ends before they are settled."""
    try:
        yield
    finally:
        shutil.rmtree(stored.folder, ignore_errors=True)


def settle(stored: StoredSequences, folder: Path, into: RunFolder) -> StoredSequences:
    """Stored sequences in their folder, in the place of those that the run had there."""
    into.replace_folder(stored.folder, folder)
    return StoredSequences(folder, stored.extent)


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.safetensors"
