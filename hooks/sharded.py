"""Results that grow with the sequences, in files of which one is in memory at a time."""

import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import user_path
from infoflow_lens.foundation.memory import format_bytes, free_memory
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.foundation.saving import open_parts, part_of
from infoflow_lens.hooks.result import Result, digest_of_result

PartT = TypeVar("PartT", bound=Result)


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardedResult(Result, Generic[PartT]):
    """The result of many sequences, a file for every few of them, in their order.

    Attributes:
        n_sequences: how many sequences were seen.
        n_shards: how many files hold them.
        digests: of these files, in their order, by which one of another run, or in the place of
            another one, is noticed.
    """

    of: ClassVar[type[Any]]
    n_sequences: int
    n_shards: int
    digests: tuple[str, ...] = field(repr=False)

    @classmethod
    def from_shards(
        cls, path: str | os.PathLike[str], summaries: Sequence[Mapping[str, Any]], record: RunRecord
    ) -> "ShardedResult[PartT]":
        """Build the result whose parts :meth:`save_shard` has written.

        Args:
            path: as there.
            summaries: what it has returned, of all parts in their order.
            record: of the run.
        """
        result = cls(
            n_sequences=sum(part["n_sequences"] for part in summaries),
            n_shards=len(summaries),
            digests=tuple(part["digest"] for part in summaries),
            record=record,
            notes=common_notes(part["notes"] for part in summaries),
        )
        return result._locate(path)

    @staticmethod
    def save_shard(path: str | os.PathLike[str], index: int, part: Any) -> dict[str, Any]:
        """Write one part.

        Args:
            path: of the whole result, without an end.
            index: which part it is.
            part: its result.

        Returns:
            What :meth:`from_shards` must know of it, as plain values.
        """
        part.save(part_of(path, index))
        return {
            "n_sequences": part.n_sequences,
            "notes": list(part.notes),
            "digest": digest_of_result(part_of(path, index)),
        }

    def shards(self) -> Iterator[PartT]:
        """Yield the results of the parts, read one after the other.

        Raises:
            InfoFlowError: if one is gone or spoiled, or is not the one that was measured.
        """
        for index, digest in enumerate(self.digests):
            path = part_of(self._folder, index)
            try:
                if digest_of_result(path) != digest:
                    raise InfoFlowError(f"{str(path)!r} is of another run or of other sequences")
                part = self.of.load(path)
            except InfoFlowError as error:
                raise InfoFlowError(
                    f"a part of the result {self._folder.name} is spoiled: {error}; then delete "
                    f"{self._folder.name}.json, too, and run the same again"
                ) from error
            yield part

    @abstractmethod
    def _join(self, parts: Sequence[PartT]) -> PartT:
        """Join the results of several parts."""

    def first(self, n: int) -> PartT:
        """Return the result of the first `n` sequences.

        Raises:
            InfoFlowError: as for :meth:`shards`.
        """
        parts: list[Any] = []
        for part in self.shards():
            parts.append(part)
            if sum(one.n_sequences for one in parts) >= n:
                break
        whole: Any = self._join(parts)
        return cast(PartT, whole.first(n))

    def whole(self) -> PartT:
        """Return the result of all sequences, in memory.

        Raises:
            InfoFlowError: if it does not fit in what is free; and as for :meth:`shards`.
        """
        names = [f"{part_of(self._folder, index)}.safetensors" for index in range(self.n_shards)]
        try:
            size = sum(Path(name).stat().st_size for name in names)
        except OSError as error:
            raise InfoFlowError(
                f"{error.filename!r} cannot be read ({error.strerror}): expected all parts of the "
                f"result; delete {self._folder.name}.json, and run the same again"
            ) from error
        free = free_memory()
        if free is not None and 2 * size > free:  # the parts, and all together
            raise InfoFlowError(
                f"the results of {self.n_sequences} sequences take {format_bytes(2 * size)} of "
                f"memory, and {format_bytes(free)} is free: expected it to fit; go through "
                ".shards(), or take the .first(n) sequences"
            )
        return self._join(list(self.shards()))

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write ``<path>.safetensors``, ``<path>.json`` and the parts in the folder `path`.

        These are the parts of this result and nothing else that lies beside them.

        Args:
            path, overwrite: as for :meth:`Result.save`.

        Raises:
            InfoFlowError: as for :meth:`Result.save` and :meth:`shards`; and for a link in the
                place of the folder.
        """
        place = user_path(path)
        # where it lies already, only the file that describes it is written
        is_here = place.exists() and self._folder.exists() and place.samefile(self._folder)
        copies = 0 if is_here else self.n_shards
        if copies and place.is_symlink():
            raise InfoFlowError(
                f"{os.fspath(path)!r} is a link: expected a new folder or an earlier one of "
                "such a result; choose another name"
            )
        is_new = not place.exists()
        paths = [*(part_of(path, index) for index in range(copies)), path]
        try:
            n = self.n_shards
            with open_parts(paths, self.schema, n_parts=n, overwrite=overwrite) as writes:
                parts = self.shards() if copies else ()
                digests = [write(*part.to_parts()) for write, part in zip(writes, parts)]
                saved = replace(self, digests=tuple(digests)) if copies else self
                writes[-1](*saved.to_parts())
        # nothing half written stays, and no folder that was not there
        except BaseException:
            if is_new:
                with suppress(OSError):  # the folder that was made for the parts
                    place.rmdir()
            raise

    def _locate(self, path: str | os.PathLike[str]) -> "ShardedResult[PartT]":
        if len(self.digests) != self.n_shards or self.n_sequences < self.n_shards:
            raise InfoFlowError(
                f"{Path(path).name}.json lists {len(self.digests)} of {self.n_shards} files: "
                "expected what save() wrote; delete it, and run the same again"
            )
        missing = [
            index
            for index in range(self.n_shards)
            if not Path(f"{part_of(path, index)}.json").is_file()
        ]
        if missing:
            raise InfoFlowError(
                f"{str(part_of(path, missing[0]))!r} is gone ({len(missing)} of {self.n_shards} "
                f"files are missing): expected all files beside {Path(path).name}.json; delete "
                "that file, and run the same again"
            )
        object.__setattr__(self, "_folder", user_path(path))
        return self

    _folder: ClassVar[Path] = Path()


def common_notes(all_notes: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Return the notes of every part: what one says of its own sequences is not said of all."""
    notes = list(all_notes)
    return tuple(note for note in notes[0] if all(note in others for others in notes))
