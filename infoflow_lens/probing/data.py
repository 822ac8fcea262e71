"""Data for a probe run, by what a user types: a file, a folder, a task, or a name on the hub.

Of a table only the columns of texts or ids are read. Pictures and sounds in other columns are
neither decoded nor fetched, and no network is asked unless the user named something on the hub.
"""

import errno
import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError, first_line
from infoflow_lens.foundation.files import (
    digest_of,
    open_regular,
    read_json,
    read_tensors,
    temporary_folder,
)
from infoflow_lens.foundation.naming import Named, find_named, nearest
from infoflow_lens.foundation.sequences import check_is_plain
from infoflow_lens.foundation.settings import Count, Seed, checked
from infoflow_lens.hooks.model.inputs import (
    COLUMNS,
    MASKS,
    Batches,
    find_pass_columns,
    read_inputs,
    split_columns,
)
from infoflow_lens.hooks.model.points import check_inputs
from infoflow_lens.probing.store import windows
from infoflow_lens.runs.folder import file_digests
from infoflow_lens.tasks import TokenTask, list_tasks
from infoflow_lens.tasks.registry import load_task_for

REPEATED = "repeated"  # random tokens, twice: the test of induction

_TABLES = {
    ".txt": "text",
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}
_TENSORS = (".pt", ".npy", ".safetensors")
_ALIKE = 0.8  # similarity from which on an unknown name counts as a misspelt one
_ROWS = 1000  # read at a time
_PIECE = 2**20  # characters of a text that is joined, at a time
_LINE = 2**26  # characters of a text that is a line of its own, at most


@checked
def stream_data(
    model: nn.Module,
    data: str,
    *,
    column: str | None = None,
    n: Count | None = None,
    max_length: Count | None = None,
    window: Count | None = None,
    seed: Seed = 0,
    scratch: Path | None = None,
) -> Iterator[Batches]:
    """Yield the sequences that a user names as they are read: token ids [pos], or vectors.

    They come in parts, so that at most some hundred texts or rows of a file are in memory.

    Args:
        model: the model that will read them.
        data: a file of texts (txt, one a line), of rows (json, jsonl, csv, parquet) or of ids or
            vectors (pt, npy, safetensors); a folder that ``datasets`` has saved; "repeated", random
            tokens twice in a row; the name of a task of ours; or "name", "name:split" or
            "name:config:split" on the hub. See :func:`find_data` for what is what.
        column: the column that holds texts or ids; two with a comma between them hold pairs of
            texts.
        n: at most so many sequences.
        max_length: longer sequences are cut to it.
        window: join all texts, and cut them into sequences of so many tokens, `n` of them spread
            evenly; a text file is one text, with its line breaks. Ids are cut to it.
        seed: of what is drawn.
        scratch: a folder for what does not fit in memory; None keeps all in memory.

    Raises:
        InfoFlowError: for data that are not there or cannot be read, naming them.
    """
    check_data(data, column)
    # windows cut one long text; other data keeps its sequences
    if window is not None:
        max_length = min(window, max_length or window)
        texts = stream_texts(data, column, scratch)
        if texts is not None:
            one_text = _is_text_file(find_data(data))
            for rows in windows(
                model, texts, max_length, n, data, one_text=one_text, scratch=scratch
            ):
                check_inputs(model, rows, data)
                yield Batches(model, rows, data)
            return
    seen = 0
    # 256 sequences of what is drawn and has no end; files are read to theirs
    for part in _parts(model, data, n or 256, max_length, seed, scratch, column):
        if n is not None:
            most = min(n - seen, len(part))
            part = part.select(range(most)) if hasattr(part, "column_names") else part[:most]
        yield read_inputs(
            model, part, column=column, max_length=max_length, name=data, first=seen,
            with_defaults=True,
        )  # fmt: skip
        seen += len(part)
        if seen == n:
            return


def find_data(data: str) -> Named:
    """Find what a user means by data, importing nothing and asking no network.

    The order is that of :func:`~infoflow_lens.foundation.naming.find_named`; "repeated" counts as a
    task.

    Raises:
        InfoFlowError: for no name.
    """
    return find_named(data, (REPEATED, *list_tasks()), (*_TABLES, *_TENSORS))


def _is_text_file(named: Named) -> bool:
    return named.kind == "file" and named.path.suffix == ".txt"


def data_identity(data: str) -> Any:
    """Return digests of the files of named data; None for data that are drawn at random.

    Returns:
        JSON-compatible values without paths.

    Raises:
        InfoFlowError: for a dataset of the hub that cannot be read.
    """
    named = find_data(data)
    if named.kind == "task":
        return None
    if named.kind == "hub":
        return _from_hub(named.name)._fingerprint
    path = named.path
    return file_digests(path) if path.is_dir() else [path.suffix, digest_of(path)]


def check_data(data: str, column: str | None = None) -> None:
    """Refuse, before a model is loaded, missing files, and a column for data without columns.

    Raises:
        InfoFlowError: for no name, for a file or a path that does not exist, for a task that is
            misspelt, and for a column of lines of text, tensors or sequences that are drawn.
    """
    if not data:
        raise InfoFlowError("data is empty: expected a file, a task or the name of a dataset")
    named = find_data(data)
    path = named.path
    if named.kind == "file" and not path.is_dir():
        _check_file(path)
    known = [REPEATED, *list_tasks()]
    if named.kind == "hub" and not named.is_said and "/" not in data:
        near = get_close_matches(data, known, n=1, cutoff=_ALIKE)
        if near:  # the hub would be asked for half a minute where there is no network
            raise InfoFlowError(
                f"data is {data!r}, which is no file and no task; did you mean {near[0]!r}? A "
                f"dataset of the hub is named OWNER/NAME, or hub:{data}"
            )
    is_text = _is_text_file(named)
    is_tensor = named.kind == "file" and path.suffix in _TENSORS
    has_columns = not (is_text or is_tensor or named.kind == "task")
    if column is not None and not has_columns and not (is_text and column == "text"):
        held = "lines of text" if is_text else "sequences"
        raise InfoFlowError(
            f"column is {column!r}, but {data!r} has {held} and no columns: leave the column out"
        )


def read_texts(data: str, column: str | None = None) -> list[str] | None:
    """Return the texts that a user names, in memory; None for what holds ids or vectors.

    Raises:
        InfoFlowError: as for :func:`stream_texts`; and for a text file that holds no text.
    """
    texts = stream_texts(data, column)
    if texts is None:
        return None
    found = list(texts)
    return ["".join(found)] if _is_text_file(find_data(data)) else found or None


def stream_texts(
    data: str, column: str | None = None, scratch: Path | None = None
) -> Iterator[str] | None:
    """Return the texts that a user names, as they are read; None for what holds ids or vectors.

    Args:
        data: a text file, which is one text, given in pieces that end with a line; rows with a
            column of texts; or a name on the hub.
        column: of the rows.
        scratch: as for :func:`stream_data`.

    Raises:
        InfoFlowError: for data that are not there, cannot be read, or are empty.
    """
    # tasks and tensors are sequences already
    named = find_data(data)
    path = named.path
    if named.kind == "task" or (named.kind == "file" and path.suffix in _TENSORS):
        return None
    if _is_text_file(named) and path.is_file():
        return _pieces(path)
    parts = (
        iter([_from_hub(named.name)])
        if named.kind == "hub"
        else _rows_of(path, scratch, _columns_read(column))
    )
    # of a table, the first part tells whether its column holds texts
    first = next(parts)
    chosen = column or next((name for name in COLUMNS if name in first.column_names), "")
    if chosen not in first.column_names:
        return None
    known = (value for value in first[chosen] if value is not None)
    if not isinstance(next(known, None), str):
        return None
    every = (row for part in chain([first], parts) for row in part[chosen])
    return (text for text in every if isinstance(text, str) and text.strip())


def _pieces(path: Path) -> Iterator[str]:
    """Yield a text file in pieces that end with a line, or with a word where lines are very long.

    Raises:
        InfoFlowError: if it is not UTF-8, or holds nothing but blanks.
    """
    empty, rest = True, ""
    with _open_text(path) as file:
        while read := file.read(_PIECE):
            empty = empty and not read.strip()
            text = rest + read
            # at the last line's end, or at a blank where a line is longer than a piece
            stop = text.rfind("\n") + 1 or max(text.rfind(" "), 0) or len(text)
            rest = text[stop:]
            yield text[:stop]
    if rest:
        yield rest
    if empty:
        raise InfoFlowError(f"{str(path)!r} holds no text: expected a text that is not empty")


def _parts(
    model: nn.Module,
    data: str,
    n: int,
    max_length: int | None,
    seed: int,
    scratch: Path | None,
    column: str | None,
) -> Iterator[Any]:
    """Yield what a user names, some sequences at a time."""
    named = find_data(data)
    path = named.path
    if named.kind == "hub":
        yield from _split_rows(_from_hub(named.name))
    elif named.name == REPEATED and named.kind == "task":
        yield _draw_twice(model, n, max_length, seed)
    elif named.kind == "task":
        yield _task(model, named.name, n, seed)
    elif path.suffix in _TENSORS and path.is_file():
        yield from _read_tensor(path)
    else:
        more = sorted(find_pass_columns(model))
        yield from _rows_of(path, scratch, (*_columns_read(column), *more))


def _columns_read(column: str | None) -> tuple[str, ...]:
    """Return the columns of a table of which one may be read, and that of masks behind them."""
    return (*(COLUMNS if column is None else (column, *split_columns(column))), MASKS[0])


def _split_rows(table: Any) -> Iterator[Any]:
    """Yield a table, some rows at a time."""
    for start in range(0, len(table), _ROWS):
        yield table.select(range(start, min(start + _ROWS, len(table))))


def _rows_of(path: Path, scratch: Path | None = None, columns: Sequence[str] = ()) -> Iterator[Any]:
    """Yield the rows of a file or of a saved dataset, in tables of some rows.

    Args:
        path: of the file or the folder.
        scratch: as for :func:`stream_data`.
        columns: those that are read, of which a table may have some; default, all.

    Raises:
        InfoFlowError: for what is not there, cannot be read, or holds no rows.
    """
    if path.is_dir():
        yield from _split_rows(_folder(path))
        return
    _check_file(path)
    if not path.stat().st_size:
        raise InfoFlowError(f"{str(path)!r} is empty: expected at least one text or row")
    n = 0
    for part in _lines_of(path) if path.suffix == ".txt" else _stream_rows(path, scratch, columns):
        n += 1
        yield part
    if not n:
        raise InfoFlowError(f"{str(path)!r} holds no rows: expected at least one text")


def _lines_of(path: Path) -> Iterator[list[str]]:
    """Yield the lines of a text file, without blank ones, which part paragraphs."""
    with _open_text(path) as file:
        lines = (line.rstrip("\n") for line in _read_lines(file))
        texts = (line for line in lines if line.strip())
        while some := list(islice(texts, _ROWS)):
            yield some


@contextmanager
def _open_text(path: Path) -> Iterator[TextIO]:
    """Open a text file for a block; what goes wrong there is an error that names the file."""
    try:
        with path.open(encoding="utf-8-sig") as file:  # a mark before the text is no text
            yield file
    except (OSError, UnicodeDecodeError) as error:
        raise InfoFlowError(
            f"{str(path)!r} cannot be read ({type(error).__name__}: {error}): expected texts in "
            "UTF-8"
        ) from error


def _read_lines(file: TextIO) -> Iterator[str]:
    """Yield the lines of a file; a very long line is cut, as no model reads all of it."""
    while line := file.readline(_LINE):
        yield line
        while len(line) == _LINE and not line.endswith("\n"):
            line = file.readline(_LINE)


def _check_file(path: Path) -> None:
    """Check that a file is there, that it is no pipe or device, and that its end is known.

    Raises:
        InfoFlowError: naming files of the same name with another end.
    """
    if path.exists() and not path.is_file():
        raise InfoFlowError(f"{str(path)!r} is no regular file: expected a file of texts or rows")
    if not path.exists():
        raise InfoFlowError(
            f"there is no file {str(path)!r}: expected a file of texts or rows{_meant(path)}"
        )
    if path.suffix not in (*_TABLES, *_TENSORS):
        raise InfoFlowError(
            f"{str(path)!r} does not say what it holds: expected a name that ends in "
            f"{', '.join((*_TABLES, *_TENSORS))}; rename it (hub:{path.name} is a name on the hub)"
        )


def _meant(path: Path) -> str:
    """Return the end of an error that names a file of the same name with another end."""
    ends = sorted(other.name for other in path.parent.glob(f"{glob.escape(path.name)}.*"))
    return f"; did you mean {ends[0]!r}?" if ends else ""


def _stream_rows(path: Path, scratch: Path | None, columns: Sequence[str]) -> Iterator[Any]:
    """Yield the rows of a json, jsonl, csv or parquet file by ``datasets``, some at a time.

    Its readers of files are called by themselves: ``load_dataset`` would ask the hub first. They
    get a list of files, for a path is a pattern to them.
    """
    import datasets
    from datasets.data_files import DataFilesDict, DataFilesList

    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the error below says it
    try:
        options: dict[str, Any] = {"streaming": True, "split": "train"}
        if scratch is not None:
            options["cache_dir"] = str(scratch)  # it puts a lock there
        if path.suffix == ".parquet":
            # the default reads whole row groups, which may be as large as the unpacked file
            options |= {"batch_size": _ROWS, "columns": _chosen(_names_in(path), columns)}
        if path.suffix == ".csv":
            options["keep_default_na"] = False  # "NA" is a word, too
        read = getattr(datasets.Dataset, f"from_{_TABLES[path.suffix]}")
        with _plain_name(path) as place:
            rows = read(DataFilesDict(train=DataFilesList([place], [()])), **options)
            if path.suffix == ".parquet":
                rows = rows.decode(False)  # its header may call addresses pictures: they stay text
            for part in rows.iter(batch_size=_ROWS):
                kept = {name: part[name] for name in _chosen(part, columns)}
                yield datasets.Dataset.from_dict(kept)
    except Exception as error:  # the readers of four formats raise their own errors
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = " ".join(str(cause).split())[:300] or type(cause).__name__
        raise InfoFlowError(
            f"{str(path)!r} cannot be read ({type(cause).__name__}: {reason}): expected rows of "
            f"{_TABLES[path.suffix]} in UTF-8"
        ) from error
    finally:
        datasets.logging.set_verbosity(verbosity)


@contextmanager
def _plain_name(path: Path) -> Iterator[str]:
    """Yield a name by which ``datasets`` finds a file or a folder: "::" joins places for it."""
    place = path.absolute()
    if "::" not in str(place):
        yield str(place)
        return
    with temporary_folder() as folder:
        link = folder / f"data{path.suffix}"
        link.symlink_to(place)
        yield str(link)


def _names_in(path: Path) -> list[str]:
    from pyarrow import parquet

    with open_regular(path) as file:
        return list(parquet.read_schema(file).names)


def _chosen(names: Iterable[str], columns: Sequence[str]) -> list[str]:
    """Return the names of a table's columns that are read; all where none of them is."""
    found = list(names)
    chosen = [name for name in found if name in columns]
    inputs = columns[: columns.index(MASKS[0])] if columns else ()
    return chosen if set(chosen) & set(inputs) else found  # else the error names all


def read_rows(data: str) -> Any:
    """Read a dataset from a file of rows or a folder that ``datasets`` has saved.

    Raises:
        InfoFlowError: for what is neither, or cannot be read.
    """
    import datasets

    path = find_data(data).path
    if path.is_dir():
        return _folder(path)
    if path.suffix not in _TABLES or not path.is_file():
        said = f"{data!r} holds no rows" if path.exists() else f"there is no file {data!r}"
        raise InfoFlowError(
            f"{said}: expected a file of rows ({', '.join(_TABLES)}), a saved dataset, "
            "or a task (task:MODULE:NAME for one of your own in a module)"
        )
    parts = (
        datasets.Dataset.from_dict({"text": part}) if isinstance(part, list) else part
        for part in _rows_of(path)
    )
    return datasets.concatenate_datasets(list(parts))


def _folder(path: Path) -> Any:
    import datasets

    _check_dataset(path)
    try:
        with _plain_name(path) as place:
            # a file system without mapping reads all into memory
            try:
                found = datasets.load_from_disk(place)
            except OSError as error:
                if error.errno != errno.ENODEV:
                    raise
                found = datasets.load_from_disk(place, keep_in_memory=True)
    except Exception as error:
        raise InfoFlowError(
            f"{str(path)!r} is no saved dataset ({error}): expected a folder that "
            "datasets.Dataset.save_to_disk wrote"
        ) from error
    return _without_media(found)


def _check_dataset(path: Path) -> None:
    """Check that a saved dataset is one, and holds files, of which none lies elsewhere.

    Raises:
        InfoFlowError: naming the file.
    """
    # a link may lead to a file that somebody else changes
    for file in path.rglob("*"):
        if file.is_symlink():
            raise InfoFlowError(
                f"{str(file)!r} is a link: expected the files of a saved dataset themselves, as "
                "what lies elsewhere is not read; copy the folder with what its links lead to"
            )
        if not (file.is_file() or file.is_dir()):
            raise InfoFlowError(f"{str(file)!r} is no regular file: expected those of a dataset")
    # what the files of datasets name must lie beside them
    for state in path.rglob("state.json"):
        held = read_json(state, "state of a saved dataset", "save the dataset again")
        named = held.get("_data_files")
        for entry in named if isinstance(named, list) else ():
            _check_beside(state, entry.get("filename") if isinstance(entry, dict) else None, "file")
    several = path / "dataset_dict.json"
    if several.exists() and not (path / "state.json").exists():
        held = read_json(several, "list of splits", "save the dataset again")
        splits: Any = held.get("splits")
        for split in splits if isinstance(splits, list) and splits else (None,):
            _check_beside(several, split, "folder")
        raise InfoFlowError(
            f"{str(path)!r} holds several splits ({', '.join(splits)}): expected one; give its "
            f"folder, such as {path / splits[0]}"
        )


def _check_beside(file: Path, name: Any, what: str) -> None:
    """Refuse a name in a file of a saved dataset that leads elsewhere.

    Raises:
        InfoFlowError: with the name.
    """
    if not isinstance(name, str) or name != Path(name).name or name in ("", ".", ".."):
        raise InfoFlowError(
            f"{str(file)!r} names {name!r}: expected the names of {what}s beside it; save the "
            "dataset again"
        )


def _without_media(table: Any) -> Any:
    """Return a dataset without columns that would be decoded when a row is read."""
    from datasets.features.features import require_decoding

    kept = [name for name, kind in table.features.items() if not require_decoding(kind)]
    return table if len(kept) == len(table.features) else table.select_columns(kept)


def _read_tensor(path: Path) -> Iterator[Tensor]:
    """Yield token ids [n, pos] or vectors [n, pos, d_token] of a file, some at a time.

    Raises:
        InfoFlowError: if it cannot be read, or has too few axes.
    """
    import numpy as np

    def read(mapped: bool) -> Any:
        if path.suffix == ".npy":
            return np.load(path, allow_pickle=False, mmap_mode="r" if mapped else None)
        if path.suffix == ".safetensors":
            tensors = read_tensors(path)
            if len(tensors) != 1:
                raise ValueError(f"it holds {len(tensors)} tensors")
            return next(iter(tensors.values()))
        return torch.load(path, weights_only=True, mmap=mapped)

    try:
        try:
            found = read(mapped=True)
        except (OSError, RuntimeError) as error:
            if os.strerror(errno.ENODEV) not in str(error):
                raise
            found = read(mapped=False)  # the file system cannot map files
        # a type that torch has not is refused before rows are read
        if isinstance(found, np.ndarray):
            torch.from_numpy(_native(found[:0]))  # of a type that torch has
        elif isinstance(found, Tensor):
            check_is_plain(found, "it")
        # a file that was cut off says more numbers than it holds
        if isinstance(found, Tensor) and found.nbytes > found.untyped_storage().nbytes():
            raise ValueError(f"it says {found.numel()} numbers, of which its file holds fewer")
    except Exception as error:
        # torch says in many lines what a file holds that it does not load, at their end
        named = [line.strip() for line in str(error).splitlines() if "Unsupported" in line]
        reason = named[0] if named else first_line(error)
        raise InfoFlowError(
            f"{str(path)!r} cannot be read as a tensor ({reason}): "
            "expected token ids [n, pos] or vector tokens [n, pos, d_token]"
        ) from error
    if not isinstance(found, (Tensor, np.ndarray)):
        raise InfoFlowError(f"{str(path)!r} holds a {type(found).__name__}: expected a tensor")
    if found.ndim < 2:
        raise InfoFlowError(
            f"{str(path)!r} holds a tensor {tuple(found.shape)}: expected token ids [n, pos] or "
            "vector tokens [n, pos, d_token]"
        )
    # a copy, as the mapped file may go while a part is in use
    for start in range(0, max(len(found), 1), _ROWS):
        part = found[start : start + _ROWS]
        yield torch.from_numpy(_native(part)) if isinstance(part, np.ndarray) else part.clone()


def _native(array: Any) -> Any:
    """Return a copy of an array, with its bytes in the order of this machine."""
    return array.astype(array.dtype.newbyteorder("="))


def _draw_twice(model: nn.Module, n: int, max_length: int | None, seed: int) -> Tensor:
    """Draw random different tokens twice, behind BOS where the model has one."""
    cfg = getattr(model, "cfg", None)
    n_ctx, d_vocab = getattr(cfg, "n_ctx", None), getattr(cfg, "d_vocab", None)
    if n_ctx is None or d_vocab is None or getattr(model, "reads_vectors", False):
        raise InfoFlowError(
            f"data is {REPEATED!r}, random token ids twice: {type(model).__name__} reads no token "
            "ids; give a task"
        )
    bos = getattr(getattr(model, "tokenizer", None), "bos_token_id", None)
    # as long as the model takes, twice, and no token comes twice in a half
    half = (min(n_ctx, max_length or 64) - int(bos is not None)) // 2
    half = min(half, d_vocab)
    if half < 2:
        raise InfoFlowError(
            f"data is {REPEATED!r} with n_ctx {n_ctx} and d_vocab {d_vocab}: expected room for two "
            "tokens twice"
        )
    generator = torch.Generator().manual_seed(seed)
    first = torch.stack([torch.randperm(d_vocab, generator=generator)[:half] for _ in range(n)])
    start = torch.full((n, int(bos is not None)), bos or 0)
    return torch.cat([start, first, first], dim=1)


def _task(model: nn.Module, name: str, n: int, seed: int) -> Tensor:
    """Draw from a task, in the sizes of the model."""
    task = load_task_for(model, name)
    if not isinstance(task, TokenTask) and not hasattr(model, "architecture"):
        raise InfoFlowError(
            f"task {name!r} has vector tokens, but {type(model).__name__} reads token ids: "
            "expected a model of ours, or texts"
        )
    x, _ = task.sample(n, seed=seed)
    return x


def _from_hub(data: str) -> Any:
    import datasets
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    name, *rest = re.split(r":(?![^\[]*\])", data)  # a split may be a slice, "train[:50]"
    split = rest[-1] if rest else "train"
    config = rest[0] if len(rest) > 1 else None
    # the library reads folders, and builders of its own, in the place of such a name
    if os.path.isdir(name) or name in _PACKAGED_DATASETS_MODULES:
        what = "the folder of that name" if os.path.isdir(name) else "all files of this folder"
        raise InfoFlowError(
            f"{data!r} names a dataset of the hub, but the libraries would read {what} instead: "
            f"give OWNER/NAME, run this from another folder, or give file:{name} for the folder"
        )
    try:
        return _without_media(datasets.load_dataset(name, config, split=split))
    except Exception as error:  # of the hub, of the network, of the builder
        known = [REPEATED, *list_tasks()]
        meant = _meant(Path(data))
        raise InfoFlowError(
            f"data is {data!r}, which is no file, no folder and no dataset of the hub "
            f"({first_line(error)}){meant or nearest(data, known)}; a task of your own in a module "
            f"is task:{data}"
        ) from error
