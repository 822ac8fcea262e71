"""The command `infoflow-lens probe` as a function, also for models and data in memory."""

import functools
import inspect
import os
import shutil
from collections.abc import Callable, Mapping, Sized
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from infoflow_lens.foundation.display import brief
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import make_temporary_folder
from infoflow_lens.foundation.naming import is_path, nearest
from infoflow_lens.hooks import Probe
from infoflow_lens.hooks.model.inputs import COLUMNS, Batches, Inputs, read_inputs
from infoflow_lens.hooks.sharded import ShardedResult
from infoflow_lens.models.loading import LoadedModel, load_any
from infoflow_lens.probing.config import ProbingConfig, register_parts
from infoflow_lens.probing.part import Part, ProbePart, Say
from infoflow_lens.probing.run import ProbingResult, run_probing
from infoflow_lens.probing.windows import spread_windows, token_stream

_SETTINGS = {item.name: item for item in fields(ProbingConfig)}
_OF_MODEL = ("device", "dtype", "backend")


def _accept_probes(function: Callable[..., ProbingResult]) -> Callable[..., ProbingResult]:
    """Wrap a function so that its argument `probes` may hold probes as well as names of probes."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> ProbingResult:
        given = kwargs.get("probes")
        parts: dict[str, Part] = {}
        # probes become parts of this call alone, under their names
        if isinstance(given, (list, tuple)):
            names = []
            for each in given:
                part = ProbePart(each) if isinstance(each, Probe) else None
                if part is not None:
                    parts[part.name] = part
                names.append(each if part is None else part.name)
            kwargs["probes"] = tuple(names)
        with register_parts(parts):
            return function(*args, **kwargs)

    return call


@_accept_probes
def probe(
    model: str | os.PathLike[str] | nn.Module | LoadedModel,
    data: str | os.PathLike[str] | Inputs,
    out: str | os.PathLike[str] | None = None,
    *,
    tokenizer: Any | None = None,
    progress: bool = True,
    say: Say = lambda line: None,
    jobs: int = 1,
    scheduler: str | None = None,
    n_threads: int | None = None,
    **settings: Any,
) -> ProbingResult:
    """Probe a model on data: measure, predict, compare. The same as `infoflow-lens probe`.

    Args:
        model: a name or a folder, or a model in memory; see `load_any`.
        data: what the command takes: a file, a saved dataset, "repeated", a task, or a name on the
            hub; or data in memory: a list of texts, token ids, vectors, a ``datasets.Dataset``.
        out: a folder for results, from which an interrupted run goes on; None keeps nothing but
            what is returned.
        tokenizer: of a model of transformers in memory.
        progress: show bars.
        say: called with a line for every part that begins.
        jobs, scheduler, n_threads: who measures; see
            :func:`~infoflow_lens.probing.run.run_probing`. Workers load the model by its name.
        settings: those of :class:`ProbingConfig`, the command's options: probes, n, max_length,
            ranks, influence, batch_size, seed, ... Among `probes` may be probes of your own, as in
            ``probes=["positions", MyProbe()]``; the name of the result is that of the class.

    Returns:
        The results; ``.report("report.html")`` writes the page.

    Raises:
        InfoFlowError: for bad settings, models or data, before work starts; for a folder with
            results of other settings; for what probes refuse; without a folder, for results that
            do not fit in memory.
        KeyboardInterrupt: when it is stopped, with what to do to go on.

    Example:
        >>> import infoflow_lens as il
        >>> found = il.probe("gpt2", ["The cat sat on the mat.", "The dog ate the cat."] * 40)
        >>> found.report("report.html")
    """
    unknown = [name for name in settings if name not in _SETTINGS]
    if unknown:
        known = [name for name in _SETTINGS if name not in ("model", "data")]
        raise InfoFlowError(f"there is no setting {unknown[0]!r}{nearest(unknown[0], known)}")
    _refuse_text(data)
    if out is not None and not os.fspath(out).strip():
        raise InfoFlowError(
            f"out is {out!r}: expected a folder for results; give '.' for this one, or None"
        )
    config = ProbingConfig(
        model=os.fspath(model) if isinstance(model, (str, os.PathLike)) else _name_of(model),
        data=os.fspath(data) if isinstance(data, (str, os.PathLike)) else _describe_data(data),
        **_name_devices(settings),
    )
    loaded = None
    # other processes load the model by its name or from its folder
    if not isinstance(model, (str, os.PathLike)):
        if jobs != 1 or scheduler is not None:
            raise InfoFlowError(
                f"the model is in memory, and jobs is {jobs}, scheduler {scheduler!r}: expected a "
                "name or a folder, from which workers load it; save it first"
            )
        of_model: dict[str, Any] = {
            name: settings.get(name, "auto" if name == "backend" else None) for name in _OF_MODEL
        }
        loaded = load_any(model, tokenizer=tokenizer, **of_model)
        config = replace(config, device=str(next(loaded.model.parameters()).device))
    elif tokenizer is not None:
        load_any(model, tokenizer=tokenizer)  # refuses it
    # data in memory is read once, here
    batches = None
    if not isinstance(data, (str, os.PathLike)):
        if loaded is None:
            loaded = load_any(
                config.model, device=config.device, dtype=config.dtype, backend=config.backend
            )
        batches = _read(loaded.model, data, config)
    workers: dict[str, Any] = {"jobs": jobs, "scheduler": scheduler, "n_threads": n_threads}
    if out is not None:
        return run_probing(out, config, progress, say, loaded, batches, **workers)
    # without a folder of the user's, results pass through one that goes
    folder = make_temporary_folder("infoflow-probe-")
    try:
        result = run_probing(folder, config, progress, say, loaded, batches, **workers)
        in_memory = {
            name: part.whole() if isinstance(part, ShardedResult) else part
            for name, part in result.found.items()
        }
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"what is finished is kept; run the same with out={str(folder)!r} to go on"
        ) from None
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    return replace(result, out=None, found=in_memory)


def _name_devices(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with PyTorch's devices and number types by name, as records keep them."""
    named = dict(settings)
    if isinstance(named.get("device"), torch.device):
        named["device"] = str(named["device"])
    if isinstance(named.get("dtype"), torch.dtype):
        named["dtype"] = str(named["dtype"]).removeprefix("torch.")
    if "device" in named and named["device"] is None:  # the default, as in `load_any`
        del named["device"]
    return named


def _complete_signature() -> inspect.Signature:
    """Return the signature with every setting, for completion and help."""
    own = inspect.signature(probe)
    kept = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    more = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=item.default, annotation=item.type
        )
        for name, item in _SETTINGS.items()
        if name not in ("model", "data")
    ]
    return own.replace(parameters=[*kept, *more])


probe.__signature__ = _complete_signature()  # type: ignore[attr-defined]


def _name_of(model: Any) -> str:
    """Name a model in memory, for records and errors."""
    if isinstance(model, LoadedModel):
        return model.description.split(":")[0]
    name = getattr(model, "name_or_path", "") or type(model).__name__
    return f"{name} in memory"


def _refuse_text(data: Any) -> None:
    """Refuse a text where the name of data is expected.

    Raises:
        InfoFlowError: for a text, and for no data.
    """
    if isinstance(data, str) and len(data.split()) > 1 and not is_path(data):
        raise InfoFlowError(
            f"data is the text {brief(data)}: expected a list of texts, as in [text], or the name "
            "of a file, a task or a dataset"
        )
    if data is None or (isinstance(data, (list, tuple)) and not len(data)):
        raise InfoFlowError(f"data is {data!r}: expected at least one text or sequence")


def _describe_data(data: Any) -> str:
    if isinstance(data, Batches):
        return f"{data.n_sequences} sequences in memory"
    n = f"{len(data)} " if isinstance(data, Sized) else ""
    first = data[0] if isinstance(data, (list, tuple)) and data else None
    return f"{n}{'texts' if isinstance(first, str) else 'sequences'} in memory"


def _read(model: nn.Module, data: Any, config: ProbingConfig) -> Batches:
    """Data in memory as sequences, at most `config.n` of them; texts in windows if it says so.

    Raises:
        InfoFlowError: for what is no data, or a loader, which may be read once only.
    """
    longest = config.max_length
    if config.window is not None:
        longest = min(config.window, longest or config.window)
        texts = _texts(data, config.column)
        if texts is not None:
            prefix, stream = token_stream(model, texts)
            data = spread_windows(prefix, stream, longest, config.n, "data")
    # a table is cut before its texts are tokenised, other data afterwards
    if config.n is not None and hasattr(data, "column_names") and hasattr(data, "select"):
        data = data.select(range(min(config.n, len(data))))
    batches = read_inputs(model, data, column=config.column, max_length=longest, name="data")
    _ = batches.rows  # asked for its error: loaders are refused before the run begins
    return batches if config.n is None else batches.first(config.n)


def _texts(data: Any, column: str | None) -> list[str] | None:
    """Return the texts among data in memory; None for ids and vectors."""
    names = getattr(data, "column_names", None)
    if names is not None or isinstance(data, Mapping):
        names = list(names or data)
        chosen = column or next((name for name in COLUMNS if name in names), "")
        data = list(data[chosen]) if chosen in names else []
    if not isinstance(data, (list, tuple)) or not all(isinstance(text, str) for text in data):
        return None
    return [text for text in data if text.strip()] or None
