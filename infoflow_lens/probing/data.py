"""Data for a probe run, by what a user types: a file, a folder, a task, or a name on the hub."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from infoflow_lens.foundation.checks import check_integer
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.names import nearest
from infoflow_lens.hooks.model.inputs import COLUMNS, Batches, read_inputs
from infoflow_lens.probing.windows import evenly_spread, token_stream
from infoflow_lens.tasks import TokenTask, is_task, list_tasks, load_task

REPEATED = "repeated"  # random tokens, twice: the test of induction

_TABLES = {
    ".txt": "text",
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}
_TENSORS = (".pt", ".npy", ".safetensors")


def read_data(
    model: nn.Module,
    data: str,
    *,
    column: str | None = None,
    n: int | None = None,
    max_length: int | None = None,
    window: int | None = None,
    seed: int = 0,
) -> Batches:
    """The sequences that a user names, tokenised once.

    Args:
        model: the model that will read them.
        data: a file of texts (txt, one a line), of rows (json, jsonl, csv, parquet) or of ids or
            vectors (pt, npy, safetensors); a folder that ``datasets`` has saved; "repeated", random
            tokens twice in a row; the name of a task of ours; or "name", "name:split" or
            "name:config:split" on the hub.
        column: the column that holds texts or ids.
        n: at most so many sequences.
        max_length: longer sequences are cut to it.
        window: join all texts, and cut them into sequences of so many tokens, `n` of them spread
            evenly; a text file is one text, with its line breaks. Ids are cut to it.
        seed: of what is drawn.

    Raises:
        InfoFlowError: for data that are not there or cannot be read, naming them.
    """
    if n is not None and n < 1:
        raise InfoFlowError(f"n is {n}: expected at least 1 sequence")
    if not data:
        raise InfoFlowError("data is empty: expected a file, a task or the name of a dataset")
    if window is not None:
        window = check_integer(window, "window", 1, " token")
        max_length = min(window, max_length or window)
        texts = read_texts(data, column)
        if texts is not None:
            prefix, stream = token_stream(model, texts)
            return read_inputs(model, evenly_spread(prefix, stream, max_length, n, data), name=data)
    given = _load(model, data, n or 256, max_length, seed)
    if n is not None:
        table = hasattr(given, "column_names")
        given = given.select(range(min(n, len(given)))) if table else given[:n]
    return read_inputs(model, given, column=column, max_length=max_length, name=data)


def check_data(data: str) -> None:
    """Refuse, before a model is loaded, files that are not there.

    Raises:
        InfoFlowError: for no name, and for a file or a path that does not exist.
    """
    if not data:
        raise InfoFlowError("data is empty: expected a file, a task or the name of a dataset")
    path = Path(data)
    looks_like_a_file = path.suffix in (*_TABLES, *_TENSORS) or data.startswith((".", "/", "~"))
    if looks_like_a_file and not path.exists() and not is_task(data):
        raise InfoFlowError(f"there is no file {data!r}: expected a file of texts or rows")


def read_texts(data: str, column: str | None = None) -> list[str] | None:
    """The texts that a user names; None for what holds ids or vectors.

    Args:
        data: a text file, which is one text; rows with a column of texts; or a name on the hub.
        column: of the rows.

    Raises:
        InfoFlowError: for data that are not there, cannot be read, or are empty.
    """
    path = Path(data)
    if path.suffix == ".txt" and path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InfoFlowError(f"{data!r} cannot be read ({error}): expected UTF-8") from error
        if not text.strip():
            raise InfoFlowError(f"{data!r} holds no text: expected some")
        return [text]
    if path.suffix in _TENSORS or data == REPEATED or is_task(data):
        return None
    given = read_rows(data) if path.is_dir() or path.suffix in _TABLES else _from_hub(data)
    names = list(getattr(given, "column_names", ()))
    chosen = column or next((name for name in COLUMNS if name in names), "")
    values = list(given[chosen]) if chosen in names else []
    if not values or not all(isinstance(value, str) for value in values):
        return None
    return [text for text in values if text.strip()] or None


def _load(model: nn.Module, data: str, n: int, max_length: int | None, seed: int) -> Any:
    path = Path(data)
    if path.is_dir():
        return _folder(path)
    if path.suffix in _TENSORS and path.is_file():
        return _with_axes(_tensor(path), path)
    if path.suffix in _TABLES:
        if not path.is_file():
            raise InfoFlowError(f"there is no file {data!r}: expected a file of texts or rows")
        return _table(path)
    if data == REPEATED:
        return _repeated(model, n, max_length, seed)
    if is_task(data):
        return _task(model, data, n, seed)
    return _from_hub(data)


def read_rows(data: str) -> Any:
    """A dataset from a file of rows or a folder that ``datasets`` has saved.

    Raises:
        InfoFlowError: for what is neither, or cannot be read.
    """
    path = Path(data)
    if path.is_dir():
        return _folder(path)
    if path.suffix not in _TABLES or not path.is_file():
        raise InfoFlowError(
            f"there is no file {data!r}: expected a file of rows ({', '.join(_TABLES)}), a saved "
            "dataset, or a task"
        )
    return _table(path)


def _table(path: Path) -> Any:
    import datasets

    if not path.stat().st_size:
        raise InfoFlowError(f"{str(path)!r} is empty: expected at least one text or row")
    told = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the error below says it
    try:
        table = datasets.load_dataset(
            _TABLES[path.suffix], data_files=str(path), split="train", keep_in_memory=True
        )
    except Exception as error:  # the readers of five formats raise their own errors
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = (str(cause) or type(cause).__name__).splitlines()[0]
        raise InfoFlowError(
            f"{str(path)!r} cannot be read ({type(cause).__name__}: {reason}): expected rows of "
            f"{_TABLES[path.suffix]} in UTF-8"
        ) from error
    finally:
        datasets.logging.set_verbosity(told)
    if path.suffix == ".txt":  # blank lines part paragraphs
        table = table.select([i for i, text in enumerate(table["text"]) if text.strip()])
    if not len(table):
        raise InfoFlowError(f"{str(path)!r} holds no rows: expected at least one text")
    return table


def _folder(path: Path) -> Any:
    import datasets

    try:
        found = datasets.load_from_disk(str(path))
    except Exception as error:
        raise InfoFlowError(
            f"{str(path)!r} is no saved dataset ({error}): expected a folder that "
            "datasets.Dataset.save_to_disk wrote"
        ) from error
    if hasattr(found, "keys"):
        splits = ", ".join(found)
        raise InfoFlowError(
            f"{str(path)!r} holds several splits ({splits}): expected one; give its folder, such "
            f"as {path / next(iter(found))}"
        )
    return found


def _tensor(path: Path) -> Tensor:
    import numpy as np
    from safetensors.torch import load_file

    try:
        if path.suffix == ".npy":
            return torch.from_numpy(np.load(path, allow_pickle=False))
        if path.suffix == ".safetensors":
            tensors = load_file(path)
            if len(tensors) == 1:
                return next(iter(tensors.values()))
            raise ValueError(f"it holds {len(tensors)} tensors")
        loaded = torch.load(path, weights_only=True)
    except Exception as error:
        raise InfoFlowError(
            f"{str(path)!r} cannot be read as a tensor ({error}): expected token ids [n, pos] or "
            "vector tokens [n, pos, d_token]"
        ) from error
    if not isinstance(loaded, Tensor):
        raise InfoFlowError(f"{str(path)!r} holds a {type(loaded).__name__}: expected a tensor")
    return loaded


def _with_axes(tensor: Tensor, path: Path) -> Tensor:
    """The tensor, if it may hold several sequences.

    Raises:
        InfoFlowError: if it has too few axes.
    """
    if tensor.ndim < 2:
        raise InfoFlowError(
            f"{str(path)!r} holds a tensor {tuple(tensor.shape)}: expected token ids [n, pos] or "
            "vector tokens [n, pos, d_token]"
        )
    return tensor


def _repeated(model: nn.Module, n: int, max_length: int | None, seed: int) -> Tensor:
    """BOS where the model has one, then random different tokens, then the same again."""
    cfg = getattr(model, "cfg", None)
    n_ctx, d_vocab = getattr(cfg, "n_ctx", None), getattr(cfg, "d_vocab", None)
    if n_ctx is None or d_vocab is None or getattr(model, "reads_vectors", False):
        raise InfoFlowError(
            f"data is {REPEATED!r}, random token ids twice: {type(model).__name__} reads no token "
            "ids; give a task"
        )
    bos = getattr(getattr(model, "tokenizer", None), "bos_token_id", None)
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
    """Samples of a task of ours, in the sizes of the model."""
    architecture = getattr(model, "architecture", None)
    if isinstance(load_task(name), TokenTask):
        task = load_task(name)
    elif architecture is None:
        raise InfoFlowError(
            f"task {name!r} has vector tokens, but {type(model).__name__} reads token ids: "
            "expected a model of ours, or texts"
        )
    else:
        # a task of the user's own says its sizes itself
        sizes = {"n_tokens": architecture.n_tokens, "d_token": architecture.d_token}
        task = load_task(name, **(sizes if name in list_tasks() else {}))
    x, _ = task.sample(n, seed=seed)
    return x


def _from_hub(data: str) -> Any:
    import datasets

    name, *rest = data.split(":")
    split = rest[-1] if rest else "train"
    config = rest[0] if len(rest) > 1 else None
    try:
        return datasets.load_dataset(name, config, split=split)
    except Exception as error:  # of the hub, of the network, of the builder
        known = [REPEATED, *list_tasks()]
        raise InfoFlowError(
            f"data is {data!r}, which is no file, no folder, no task{nearest(data, known)} and "
            f"cannot be loaded from the hub ({type(error).__name__}: {error}): expected one of "
            "these"
        ) from error
