"""Models by name, by folder or in memory: ours, Hugging Face's, TransformerLens's official ones."""

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from infoflow_lens.foundation.display import count, panel
from infoflow_lens.foundation.errors import (
    InfoFlowError,
    first_line,
    panics_as_errors,
)
from infoflow_lens.foundation.files import read_json, temporary_folder
from infoflow_lens.foundation.memory import check_device
from infoflow_lens.foundation.modules import outside_user_modes
from infoflow_lens.foundation.naming import GGUF, find_model, nearest
from infoflow_lens.foundation.settings import check
from infoflow_lens.models.adapters import ADAPTER, add_adapter, find_base
from infoflow_lens.models.hooked import HAS_HOOKED_TRANSFORMER
from infoflow_lens.models.host import load_model
from infoflow_lens.models.named import NamedModel, open_model
from infoflow_lens.models.pretrained import (
    SAVE_AGAIN,
    Place,
    Stored,
    check_config,
    check_needs_no_code,
    check_one_stack,
    check_sizes,
    config_of,
    config_of_gguf,
    load_tokenizer,
    transformers_model,
    without_trace,
)
from infoflow_lens.models.shipped import SHIPPED, find_package_folder

Backend = Literal["auto", "hooked", "opened"]
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")
}
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# Official names of TransformerLens that are not for HookedTransformer: it reads BERT's weights
# without complaint into blocks of another order, and has other classes for the rest.
_NOT_HOOKED = ("google-bert/", "google-t5/", "facebook/hubert", "facebook/wav2vec2")
# Official names whose files are not in the format of Hugging Face
_IN_OLD_FORMAT = ("NeelNanda/", "ArthurConmy/", "Baidicoot/")
Source = Literal["checkpoint", "folder", "file", "name", "memory"]


@dataclass(frozen=True, repr=False)
class LoadedModel:
    """A model that was loaded, in evaluation mode; one in memory has the mode that it had.

    Attributes:
        model: a model with TransformerLens's hook points.
        tokenizer: its tokenizer, or None where there is none.
        source: "checkpoint" (a folder of ours), "folder" (of Hugging Face), "file" (of llama.cpp),
            "name" or "memory".
        description: one line that says what it is.
    """

    model: nn.Module
    tokenizer: Any | None
    source: Source
    description: str

    def __repr__(self) -> str:
        return f"LoadedModel({self.description[:300]})"

    def _repr_html_(self) -> str:
        facts = {"source": self.source, "tokenizer": self.tokenizer is not None}
        return panel(
            self.description,
            facts,
            more="probes take it as it is; .model has TransformerLens's hook points",
        )


@outside_user_modes()  # whose weights would take part in no derivative
def load_any(
    name_or_path: str | os.PathLike[str] | nn.Module | LoadedModel,
    *,
    tokenizer: Any | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    backend: str = "auto",
) -> LoadedModel:
    """Load a model by its name or from a folder, or open one that is in memory.

    What is loaded is the model of transformers itself, opened by :func:`open_model`: any class that
    its config names, with the attention that transformers chooses (fused, where it has that), the
    tokens that its own tokenizer gives, and no copy. "stdlib-2l" comes with the package and needs
    no network; a folder of that name goes before it. A folder with architecture.json is one that
    ``save_model`` wrote, and holds a model of ours. A GGUF file of llama.cpp is opened, its weights
    as numbers of `dtype`. A folder with adapter_config.json, a LoRA of PEFT, is opened with its
    base, a folder, or a model of the hub that was downloaded before. Files that lack weights are
    refused.

    A model in memory is opened as it is, with its attention function, adapters, precision and mode.
    One of TransformerLens, a HookedTransformer or a bridge, is measured as it is. TransformerLens's
    own models by name are asked for: `backend` "hooked", which needs TransformerLens 3. Names of
    models from before the format of Hugging Face are hosted by TransformerLens.

    Weights are left as they were trained, also of a HookedTransformer, whose layer norms
    TransformerLens would by default fold into the weights behind them: states would change their
    basis and lose a dimension.

    Args:
        name_or_path: a folder, "stdlib-2l", an official name such as "gpt2", or owner/name, each
            also with "file:" or "hub:" in front, where a name could be both; these
            names with ``@revision`` behind them are that branch, tag or commit of the hub, such as
            "EleutherAI/pythia-70m@step1000"; a model in memory, of transformers or
            TransformerLens; or what this function gave.
        tokenizer: of a model of transformers in memory; default, the one of the place that it was
            loaded from. Models by name or folder bring their own.
        device: where to put it, such as "cpu" or "cuda:0"; default "cpu", and for a model in memory
            where it is.
        dtype: "float32", "bfloat16", "float16" or "float64"; default, float32, and for a folder of
            ours, or a model in memory, what it is.
        backend: "auto"; "hooked" for HookedTransformer; or "opened", to open models of
            TransformerLens and of ours, too.

    Raises:
        InfoFlowError: if there is no such model, it cannot be had here, weights are missing or no
            numbers, it has no attention over tokens, or an option is unknown or not of the
            installed TransformerLens.
    """
    if backend == "bridge":
        raise InfoFlowError(
            "backend is 'bridge', which was removed, as models are measured as transformers loads "
            "them: expected 'auto'; to measure a bridge, give one in memory, "
            "TransformerBridge.boot_transformers(name)"
        )
    wanted_backend: Backend = check(backend, Backend, "backend")
    wanted = _read_dtype(dtype)
    if device is not None:
        device = check_device(device)
    found = _load(name_or_path, tokenizer, device, wanted, wanted_backend)
    if wanted_backend == "opened":
        return replace(found, model=open_model(found.model, found.tokenizer))
    return found


def _load(
    name_or_path: str | os.PathLike[str] | nn.Module | LoadedModel,
    tokenizer: Any,
    device: str | None,
    wanted: torch.dtype | None,
    backend: Backend,
) -> LoadedModel:
    """Find out what the model is, and load it."""
    hooked = backend == "hooked"
    if isinstance(name_or_path, nn.Module | LoadedModel):
        return _take_model(name_or_path, tokenizer, device, wanted, hooked)
    if not isinstance(name_or_path, str | os.PathLike):
        raise InfoFlowError(
            f"the model is of type {type(name_or_path).__name__}: expected a name such as gpt2, a "
            "folder, or a model of transformers or TransformerLens"
        )
    name = os.fspath(name_or_path)
    if not name.strip():
        raise InfoFlowError(
            "the model's name is empty: expected an official name such as gpt2, or a folder"
        )
    if tokenizer is not None:
        raise InfoFlowError(
            f"a tokenizer is given beside {name!r}: expected none, as models by name or folder "
            "bring their own; load the model with transformers, and give both"
        )
    place = Place(device or "cpu", wanted or torch.float32)
    # a file, a folder, a name that comes with the package, or one of the hub
    named = find_model(name)
    name = named.name
    if named.kind == "file":
        folder = named.path
        if folder.suffix == GGUF and folder.is_file():
            _refuse_backend(hooked, f"{name!r} is a GGUF file")
            return _load_gguf(folder, place)
        kind = _find_kind_of_folder(folder)
        if kind == "checkpoint":
            return _load_checkpoint(folder, place.device, wanted)
        _refuse_backend(hooked, f"{name!r} is a local folder")
        if kind == "adapter":
            return _open_adapter(folder, place)
        return _open(str(folder), place, "folder")
    if shipped := find_package_folder(name):
        _refuse_backend(hooked, f"{shipped.name!r} comes with this package")
        return _open(str(shipped), place, "name", shipped.name)
    # libraries read a folder of that name in the place of the hub
    if os.path.isdir(name) and "@" not in name:
        raise InfoFlowError(
            f"hub:{name} names a model of the hub, but the libraries would read the folder "
            f"{name!r} instead: run this from another folder, or give file:{name} for the folder"
        )
    if "@" in name:
        _refuse_backend(hooked, f"{name!r} names a revision")
        return _open(_download_revision(name), place, "name", name)
    return _load_name(name, place, hooked)


def _refuse_backend(hooked: bool, why: str) -> None:
    """Refuse a HookedTransformer where it is asked for and cannot be had.

    Raises:
        InfoFlowError: with the reason.
    """
    if hooked:
        _check_backend()
        raise InfoFlowError(
            f"{why}, which HookedTransformer does not load: expected backend 'auto'"
        )


def _check_backend() -> None:
    """Refuse a HookedTransformer where the installed TransformerLens has none.

    Raises:
        InfoFlowError: with the version.
    """
    if not HAS_HOOKED_TRANSFORMER:
        raise InfoFlowError(
            f"backend is 'hooked', but transformer-lens {version('transformer-lens')} has no "
            "HookedTransformer: expected backend 'auto', or transformer-lens 3.9"
        )


def _read_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or dtype in DTYPES.values():
        return dtype  # type: ignore[return-value]
    label = str(dtype).removeprefix("torch.")
    if label not in DTYPES:
        raise InfoFlowError(f"dtype is {label!r}{nearest(label, DTYPES)}")
    return DTYPES[label]


def _find_kind_of_folder(folder: Path) -> Literal["checkpoint", "adapter", "folder"]:
    """Tell what a folder holds, by its files."""
    if not folder.is_dir():
        what = "a file" if folder.is_file() else "missing"
        raise InfoFlowError(
            f"{str(folder)!r} is {what}: expected a folder with a model, or an official name such "
            "as gpt2"
        )
    if (folder / "architecture.json").is_file():
        return "checkpoint"
    is_adapter = (folder / ADAPTER).exists()
    if not is_adapter and not (folder / "config.json").is_file():
        raise InfoFlowError(
            f"the folder {str(folder)!r} is no model (config.json missing, architecture.json "
            "missing): expected a folder written by save_pretrained of Hugging Face or by "
            "save_model, or a GGUF file"
        )
    odd = [p.name for p in folder.iterdir() if p.exists() and not (p.is_file() or p.is_dir())]
    if odd:  # whoever reads a pipe waits for its other end
        raise InfoFlowError(
            f"the folder {str(folder)!r} holds {', '.join(sorted(odd))}, which is no regular file: "
            + SAVE_AGAIN
        )
    for index in (folder / name for name in _WEIGHTS if name.endswith(".index.json")):
        if index.exists():
            _check_index(index)
    if is_adapter:
        return "adapter"
    if not any((folder / file).is_file() for file in _WEIGHTS):
        raise InfoFlowError(
            f"the folder {str(folder)!r} has a config.json but no weights (one of "
            f"{', '.join(_WEIGHTS)} missing): {SAVE_AGAIN}"
        )
    return "folder"


def _check_index(index: Path) -> None:
    """Refuse an index of weights that names files elsewhere, which nobody has looked at.

    Raises:
        InfoFlowError: naming the first, or for what is no index.
    """
    places = read_json(index, "index of weights", SAVE_AGAIN).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(n, str) for n in places.values()):
        raise InfoFlowError(f"{str(index)!r} has no weight_map from names to files: {SAVE_AGAIN}")
    if odd := [n for n in places.values() if n in ("", ".", "..") or Path(n).name != n]:
        raise InfoFlowError(
            f"{str(index)!r} names {odd[0]!r}, which is no file beside it: {SAVE_AGAIN}"
        )


def _load_checkpoint(folder: Path, device: str, dtype: torch.dtype | None) -> LoadedModel:
    model = load_model(folder, device)
    if dtype is not None:
        model.to(dtype)
    model.eval()
    return _describe(model, "checkpoint", str(folder))


def _load_gguf(path: Path, place: Place) -> LoadedModel:
    """Return a model of llama.cpp, with the tokenizer that its file holds, opened.

    Raises:
        InfoFlowError: without the package that reads it, for an adapter beside it, which
            transformers would add, and for sizes far above what the file holds.
    """
    if (path.parent / ADAPTER).exists():
        raise InfoFlowError(
            f"an adapter (adapter_config.json) lies beside {str(path)!r}: expected the file in a "
            "folder without one; move it"
        )
    with without_trace(), _name_model_in_errors(str(path)):
        config, folder = config_of_gguf(path), str(path.parent)
        check_one_stack(str(path), config)
        check_sizes(path, config, Stored.read_gguf(path))
        alone, _ = transformers_model(folder, config, place, gguf_file=path.name)
        opened = open_model(alone, load_tokenizer(folder, gguf_file=path.name))
    return _describe(opened, "file", str(path))


def _load_name(name: str, place: Place, hooked: bool) -> LoadedModel:
    official = _map_official_names().get(name.lower())
    if hooked:
        _check_backend()
    if official is None:
        if hooked or "/" not in name:
            raise InfoFlowError(
                f"{name!r} is no official name of TransformerLens{_suggest(name)}; expected an "
                "official name such as gpt2, owner/name of the Hugging Face hub (backend 'auto'), "
                f"a local folder, or what comes with this package: {', '.join(SHIPPED)}"
            )
        return _open(name, place, "name")
    if hooked and official.startswith(_NOT_HOOKED):
        _refuse_backend(hooked, f"{official!r} is no decoder of tokens")
    if hooked and _runs_code(official):
        _refuse_backend(hooked, f"{official!r} would run Python from the hub")
    # HookedTransformer, where it is asked for, or where weights are in its own format alone
    if hooked or (HAS_HOOKED_TRANSFORMER and official.startswith(_IN_OLD_FORMAT)):
        return _load_by_transformer_lens(official, place)
    if official.startswith(_IN_OLD_FORMAT):
        return _load_old_format(official, place)
    return _open(official, place, "name")


def _runs_code(official: str) -> bool:
    """Return whether HookedTransformer loads a model by code that stands beside its weights.

    TransformerLens 3 asks for ``trust_remote_code=True`` by itself for some of its official names.
    """
    module = import_module("transformer_lens.loading_from_pretrained")
    return official.startswith(tuple(module.NEED_REMOTE_CODE_MODELS))


def _map_official_names() -> dict[str, str]:
    """Map official names and their aliases, in lower case, to official names."""
    from transformer_lens.supported_models import MODEL_ALIASES, OFFICIAL_MODEL_NAMES

    return {
        label.lower(): official
        for official in OFFICIAL_MODEL_NAMES
        for label in (*MODEL_ALIASES.get(official, ()), official)
    }


def _suggest(name: str) -> str:
    """Find the names, official or of models that come with the package, most like `name`."""
    known = {**_map_official_names(), **{label: label for label in SHIPPED}}
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    names = list(dict.fromkeys(known[label] for label in near))
    return f" (did you mean {', '.join(names)}?)" if names else ""


def _load_by_transformer_lens(name: str, place: Place) -> LoadedModel:
    import transformer_lens
    from huggingface_hub import errors, hf_hub_download

    with without_trace(), _name_model_in_errors(name):
        try:
            hf_hub_download(name, "config.json")  # without a network, stop at the first attempt
        except errors.LocalEntryNotFoundError:
            raise
        except errors.EntryNotFoundError:
            pass  # some official models have a config of another kind
        # HookedTransformer loads a tokenizer anew from where it came from
        with temporary_folder() as folder:
            words = None if load_tokenizer(name) is not None else _make_empty_tokenizer(folder)
            model = transformer_lens.HookedTransformer.from_pretrained_no_processing(
                name, dtype=place.dtype, device=place.device, tokenizer=words
            )
    if words is not None:
        model.tokenizer = None
    return _describe(model.eval(), "name", name)


def _make_empty_tokenizer(folder: Path) -> Any:
    """Make a tokenizer that stands in for a missing one, while HookedTransformer loads."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>"))
    special = dict.fromkeys(("unk_token", "pad_token", "bos_token", "eos_token"), "<unk>")
    PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False)


def _load_old_format(name: str, place: Place) -> LoadedModel:
    """Load a model from before the format of Hugging Face as TransformerLens 4's native bridge."""
    with without_trace(), _name_model_in_errors(name):
        sources = import_module("transformer_lens.model_bridge.sources")
        model = sources.boot_tl_legacy(name, device=place.device, dtype=place.dtype)
    return _describe(model.eval(), "name", name)


def _download_revision(name: str) -> str:
    """Find the folder in the hub's cache of name@revision; download it if it is not there."""
    from huggingface_hub import snapshot_download

    known, _, revision = name.partition("@")
    official = _map_official_names().get(known.lower(), known)
    with _name_model_in_errors(name):
        files = ["*.json", "*.safetensors", "pytorch_model*.bin", "*.txt", "*.model"]
        return snapshot_download(official, revision=revision or None, allow_patterns=files)


def _check_no_adapter(name: str, known_as: str) -> None:
    """Refuse a name with an adapter, which transformers would load as its config says.

    Raises:
        InfoFlowError: saying how it is loaded.
    """
    from transformers.utils import find_adapter_config_file

    if find_adapter_config_file(name) is not None:
        raise InfoFlowError(
            f"{known_as!r} holds an adapter ({ADAPTER}): expected a whole model; download it with "
            "huggingface_hub.snapshot_download, and give the folder, whose adapter is checked"
        )


def _open(
    name: str, place: Place, source: Literal["folder", "name"], known_as: str | None = None
) -> LoadedModel:
    """Open a folder or a name of the hub; messages call it `known_as`, by default the same."""
    with without_trace(), _name_model_in_errors(known_as or name):
        stored = Stored.read_folder(Path(name)) if source == "folder" else None
        if stored is not None:
            check_config(Path(name), stored)
        else:
            _check_no_adapter(name, known_as or name)
        config = config_of(name)
        check_one_stack(name, config)
        if stored is not None:
            check_sizes(Path(name), config, stored)
        alone, note = transformers_model(name, config, place)
        opened = open_model(alone, load_tokenizer(name))
    return _describe(opened, source, known_as or name, note)


def _open_adapter(folder: Path, place: Place) -> LoadedModel:
    """Open an adapter of PEFT on its base.

    Raises:
        InfoFlowError: for a base that is no folder of Hugging Face with a whole model.
    """
    with _name_model_in_errors(str(folder)):
        base = find_base(folder)
    if _find_kind_of_folder(base) != "folder":
        raise InfoFlowError(
            f"the base of the adapter in {str(folder)!r} is {str(base)!r}, which is no model of "
            "transformers by itself: expected a folder that save_pretrained wrote; load both "
            "yourself, and give the model"
        )
    found = _open(str(base), place, "folder")
    with without_trace(), _name_model_in_errors(str(folder)):
        model = add_adapter(found.model.original_model, folder, place.device)
        # an adapter may bring a tokenizer with tokens of its own
        opened = open_model(model, load_tokenizer(str(folder)) or found.tokenizer)
    return _describe(opened, "folder", str(folder), f"an adapter on {str(base)!r}")


def _take_model(
    given: nn.Module | LoadedModel,
    tokenizer: Any,
    device: str | None,
    dtype: torch.dtype | None,
    hooked: bool,
) -> LoadedModel:
    """Take a model that is there already.

    Raises:
        InfoFlowError: for a device or dtype that it does not have: moving it would move the user's
            own.
    """
    loaded = given if isinstance(given, LoadedModel) else None
    model = given.model if isinstance(given, LoadedModel) else given
    kind = type(model).__name__
    first = next(model.parameters(), None)
    if first is None:
        raise InfoFlowError(f"the model, a {kind}, has no weights: expected a Transformer")
    # "cuda" is any device of that kind
    other_device = device is not None and device not in (str(first.device), first.device.type)
    for what, wanted, has, differs in (
        ("device", device, first.device, other_device),
        ("dtype", dtype, first.dtype, dtype not in (None, first.dtype)),
    ):
        if differs:
            raise InfoFlowError(
                f"{what} is {str(wanted)!r}, but the {kind} in memory has {str(has)!r}: expected "
                f"no {what}; move the model yourself, with model.to(...)"
            )
    if hooked and not any(base.__name__ == "HookedTransformer" for base in type(model).__mro__):
        raise InfoFlowError(
            f"backend is 'hooked', and the {kind} in memory is no HookedTransformer: expected "
            "backend 'auto', which measures it as it is, or the model's name"
        )
    # models of TransformerLens are measured as they are
    if hasattr(model, "hook_dict"):
        if tokenizer is not None:
            raise InfoFlowError(
                f"a tokenizer is given beside a {kind}: expected none, as a model of "
                "TransformerLens has its own; set it there, model.tokenizer = ..."
            )
        return loaded or _describe(model, "memory", "in memory")
    name = getattr(model, "name_or_path", None)
    tokenizer = load_tokenizer(name) if tokenizer is None and isinstance(name, str) else tokenizer
    return _describe(open_model(model, tokenizer), "memory", name or kind)


def _describe(model: Any, source: Source, name: str, note: str = "") -> LoadedModel:
    """Describe a model, by its name and with a note behind all else."""
    tokenizer = getattr(model, "tokenizer", None)
    weight = next(model.parameters())
    kind = type(model.original_model if isinstance(model, NamedModel) else model)
    words = [
        f"{name}: {kind.__name__}",
        count(len(model.blocks), "layer"),
        f"d_model {model.cfg.d_model}",
        str(weight.dtype).removeprefix("torch."),
        str(weight.device),
    ]
    if getattr(model, "reads_vectors", False):
        words.append("over vector tokens")
    elif tokenizer is None:
        words.append("no tokenizer")
    return LoadedModel(model, tokenizer, source, ", ".join([*words, *filter(None, [note])]))


@contextmanager
def _name_model_in_errors(name: str) -> Iterator[None]:
    """Name the model in errors while it loads, with what to do."""
    try:
        with panics_as_errors(repr(name)):
            yield
    except InfoFlowError:
        raise
    except Exception as error:  # the loaders raise errors of every kind
        check_needs_no_code(name, error)
        raise InfoFlowError(_explain(name, error)) from error


def _explain(name: str, error: BaseException) -> str:
    from huggingface_hub import errors as hub

    # libraries wrap the reason in errors of their own: look at all causes
    causes = list(_list_causes(error))
    text = " ".join(str(cause) for cause in causes).lower()
    # first, as a gated repository is a kind of repository that is not found
    if any(isinstance(cause, hub.GatedRepoError) for cause in causes) or "gated repo" in text:
        return (
            f"{name!r} is gated on the Hugging Face hub: ask for access there and log in (hf auth "
            "login, or HF_TOKEN), or give a local folder"
        )
    offline = (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled, ConnectionError)
    if any(isinstance(cause, offline) for cause in causes) or "couldn't connect" in text:
        known = name.lower() in _map_official_names()
        return (
            f"{name!r} is not in the local cache of Hugging Face and cannot be downloaded (no "
            f"network, or HF_HUB_OFFLINE is set){'' if known else _suggest(name)}: "
            "give a local folder with config.json, weights and tokenizer, load it once where "
            f"there is a network, or take what comes with this package: {', '.join(SHIPPED)}"
        )
    missing = (hub.RepositoryNotFoundError, hub.HFValidationError)
    if any(isinstance(cause, missing) for cause in causes) or "not a valid model id" in text:
        return (
            f"{name!r} is no model of the Hugging Face hub{_suggest(name)}: expected an official "
            "name such as gpt2, owner/name, or a local folder"
        )
    if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
        return f"{name!r} does not fit into memory: try dtype bfloat16, or another device"
    expected = (
        "expected a whole GGUF file of a kind that transformers reads from such files; give the "
        "folder of safetensors that it was made from"
        if name.endswith(GGUF)
        else "expected a model of a class that transformers has, with whole files; look at its "
        "config.json and weights"
    )
    return f"{name!r} cannot be loaded ({type(error).__name__}: {first_line(error)}): {expected}"


def _list_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
