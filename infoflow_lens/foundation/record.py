"""The record of a run: what was run, on what, with which versions.

Every result carries one, so that a number can be traced to the configuration that produced it. A
record holds no clock and no path: the same run gives the same record.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import re
import sys
import sysconfig
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from infoflow_lens.foundation.display import Displayed
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import modules_of
from infoflow_lens.foundation.packages import package_versions

# Fields of a config on which no number depends: where the model was found, who wrote the file.
_IGNORED_FIELDS = (
    "_name_or_path",
    "checkpoint_index",
    "checkpoint_label_type",
    "checkpoint_value",
    "device",
    "model_name",
    "n_devices",
    "name_or_path",
    "seed",
    "tokenizer_name",
    "transformers_version",
)


_COMPARED = 16  # numbers of an output, where its bits are those of another machine


def environment() -> dict[str, Any]:
    """Return the threads and the processor, on which the last digits of numbers depend."""
    return {
        "threads": torch.get_num_threads(),
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


@lru_cache
def _processor() -> str:
    """Return the processor's name, as the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model n")]
    except OSError:
        names = []
    return next(iter(names), platform.processor() or platform.machine())


def configuration_fingerprint(model: nn.Module) -> str:
    """Compute the SHA-256 over what a model computes with beside its weights, as 16 hex digits.

    That is the classes of its modules and their settings, its config, and that of the Hugging Face
    model in a bridge; not where it was found, nor on which device it lies.
    """
    parts: dict[str, Any] = {
        name: f"{type(module).__name__}({module.extra_repr()})"
        for name, module in model.named_modules()
    }
    parts["cfg"] = _settings_of(getattr(model, "cfg", None))
    parts["config"] = _settings_of(getattr(getattr(model, "original_model", model), "config", None))
    parts["architecture"] = _settings_of(getattr(model, "architecture", None))
    parts["attention"] = attention_kinds(model)  # which stands in no config
    return hash_values(parts)


def attention_kinds(model: nn.Module) -> list[str]:
    """List how each layer makes a pattern of its scores, as `set_attention` has left it."""
    layers = [getattr(block, "attn", None) for block in getattr(model, "blocks", ())]
    return [getattr(getattr(each, "hook_pattern", None), "kind", "softmax") for each in layers]


def _settings_of(config: Any) -> Any:
    if config is None:
        return None
    values = config.to_dict() if hasattr(config, "to_dict") else dict(vars(config))
    return {key: value for key, value in values.items() if key not in _IGNORED_FIELDS}


def tokenizer_fingerprint(tokenizer: Any | None) -> str | None:
    """Compute the SHA-256 over a tokenizer's words, rules and special tokens; None without one."""
    if tokenizer is None:
        return None
    rules = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = rules.to_str() if rules is not None else sorted(tokenizer.get_vocab().items())
    special = {name: str(word) for name, word in tokenizer.special_tokens_map.items()}
    return hash_values([vocabulary, special, getattr(tokenizer, "padding_side", None)])


def hash_values(values: Any) -> str:
    """Return the SHA-256 of JSON-compatible values, as 16 hex digits.

    Other values count by the text of their repr(), without memory addresses.
    """

    def to_plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return fingerprint({"": value})
        if isinstance(value, (set, frozenset)):
            return sorted(map(str, value))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return asdict(value)
        return re.sub(r" at 0x[0-9a-f]+", "", getattr(value, "__qualname__", None) or repr(value))

    text = json.dumps(values, sort_keys=True, default=to_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Compute the SHA-256 over the names, shapes, dtypes and bytes of tensors, as 16 hex digits."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        tensor = tensor.detach()
        flat = (tensor if tensor.layout is torch.strided else tensor.to_dense()).cpu()
        flat = flat.contiguous().flatten()
        if flat.stride() != (1,):  # a single number keeps the stride that it had
            flat = flat.clone(memory_format=torch.contiguous_format)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


class WeightState:
    """A mark of a model's weights at one moment, by which later changes are noticed.

    It holds PyTorch's counter of writes to each tensor, and a sample of the numbers of each tensor.
    The sample shows most writes that the counters miss, such as those to ``parameter.data``.
    It keeps neither the model nor its tensors alive.
    """

    def __init__(self, model: nn.Module) -> None:
        # weak references: a record of its weights keeps no model alive
        self._model = weakref.ref(model)
        modules = list(modules_of(model))
        self._owners = _owners(modules)
        self._tensors = [
            (weakref.ref(module), kind, name, weakref.ref(tensor), _mark(tensor))
            for module in modules
            for kind, left_out in (
                ("_parameters", frozenset[str]()),
                ("_buffers", module._non_persistent_buffers_set),
            )
            for name, tensor in getattr(module, kind).items()
            if tensor is not None and name not in left_out
        ]
        self.adapters = _adapters(modules)
        self.marks = (*(mark for *_, mark in self._tensors), *self.adapters)
        self.sample = self._sample()

    def check(self) -> None:
        """Refuse weights that have changed since, by PyTorch's counters.

        Raises:
            InfoFlowError: if a counter has changed.
        """
        if not self.has_same_counters():
            raise InfoFlowError(
                "the model's weights changed between two passes of one result (by an optimizer "
                "step, load_state_dict, an adapter that was switched or another dtype, say): "
                "expected one model for each result; "
                "attach a new probe after each change"
            )

    def has_same_counters(self) -> bool:
        """Say whether no tensor was written, added or replaced since, by PyTorch's counters."""
        model = self._model()
        modules = [] if model is None else list(modules_of(model))
        if _owners(modules) != self._owners or _adapters(modules) != self.adapters:
            return False
        for module, kind, name, given, mark in self._tensors:
            tensor = getattr(module(), kind, {}).get(name)
            if tensor is None or _mark(tensor) != mark or tensor is not given():
                return False
        return True

    def has_same_sample(self) -> bool:
        """Say whether the sampled numbers of each tensor are unchanged."""
        return self._sample() == self.sample

    def _sample(self) -> bytes:
        parts = [
            _some_numbers(tensor)
            for *_, given, _ in self._tensors
            if (tensor := given()) is not None
            and tensor.layout is torch.strided
            and tensor.numel()
            and not tensor.is_meta
        ]
        # one transfer from each device, not one for each tensor
        by_device: dict[torch.device, list[Tensor]] = {}
        for part in parts:
            by_device.setdefault(part.device, []).append(part)
        return b"".join(torch.cat(some).cpu().numpy().tobytes() for some in by_device.values())


def _owners(modules: Sequence[nn.Module]) -> list[tuple[int, int]]:
    """List the modules that have weights, by identity, and how many; one may be replaced."""
    return [(id(module), len(module._parameters)) for module in modules if module._parameters]


def _adapters(modules: Sequence[nn.Module]) -> tuple[str, ...]:
    """Describe which adapters of PEFT act, and how much, which stands in none of their weights."""
    # a model has many modules of few classes, and each pass asks
    kinds = {
        kind
        for kind in set(map(type, modules))
        if isinstance(getattr(kind, "disable_adapters", None), property)
    }
    parts: list[Any] = [module for module in modules if type(module) in kinds]
    return tuple(
        repr((part.disable_adapters, part.active_adapters, getattr(part, "scaling", None)))
        for part in parts
    )


_SAMPLED = 256  # numbers of a tensor; more than a layer has heads


def _some_numbers(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)
    # an odd step goes through the columns of a matrix, too
    chosen = flat[:: max(1, len(flat) // _SAMPLED) | 1]
    return chosen.abs().double() if chosen.is_complex() else chosen.double()


def _mark(tensor: Tensor) -> tuple[Any, ...]:
    # tensors of inference mode have no counter
    version = 0 if tensor.is_inference() else tensor._version
    return version, tensor.data_ptr(), tensor.dtype, tensor.shape


_digests: WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], str]] = WeakKeyDictionary()


def model_fingerprint(model: nn.Module, state: WeightState | None = None) -> str:
    """Return the :func:`fingerprint` of a model's state, digested once for the same weights.

    Args:
        model: the model.
        state: of its weights now, if the caller has it.
    """
    state = WeightState(model) if state is None else state
    key = (state.marks, state.sample)
    known = _digests.get(model)
    if known is None or known[0] != key:
        digest = state_fingerprint(_state_of(model))
        known = (key, hash_values([digest, *state.adapters]) if state.adapters else digest)
        _digests[model] = known
    return known[1]


def _state_of(model: nn.Module) -> Mapping[str, Any]:
    """Return the model's state, by name.

    ``state_dict()`` of modules that write their own, as those of bitsandbytes do, may change them:
    of these the tensors are taken as they are.
    """
    if any(
        type(module)._save_to_state_dict is not nn.Module._save_to_state_dict
        for module in modules_of(model)
    ):
        return {
            f"{prefix}.{name}" if prefix else name: tensor
            for prefix, module in model.named_modules()
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None and name not in module._non_persistent_buffers_set
        }
    return model.state_dict()


def state_fingerprint(state: Mapping[str, Any]) -> str:
    """Return :func:`model_fingerprint` of the model with this ``state_dict()``."""
    tensors = {k: v for k, v in state.items() if isinstance(v, Tensor)}
    empty = [name for name, tensor in tensors.items() if tensor.is_meta]
    if empty:
        raise InfoFlowError(
            f"{', '.join(empty[:3])} of the model lie on the device 'meta', without numbers: "
            "expected weights; load them first"
        )
    return fingerprint(tensors)


def behaviour(output: Tensor, again: Tensor) -> dict[str, Any]:
    """Describe what a model gave for a few sequences, for :func:`is_same`.

    Args:
        output: of one pass.
        again: of the same pass, made again; where it differs, no bits are compared.
    """
    bits, same = (fingerprint({"": each}) for each in (output, again))
    numbers = output.detach().flatten()
    return {
        "bits": bits if bits == same else None,
        "numbers": numbers[:: max(1, len(numbers) // _COMPARED) | 1].double().tolist(),
        "tolerance": 1e-3 if output.dtype in (torch.float32, torch.float64) else 5e-2,
        "environment": {**environment(), "device": output.device.type},
    }


def is_same(before: Any, now: Any) -> bool:
    """Say whether two entries of an identity are the same, as values of JSON.

    Of :func:`behaviour` bits are compared, and on another machine numbers.
    """
    if not (isinstance(before, dict) and isinstance(now, dict) and "bits" in now):
        return bool(before == now)
    known = [each.get("bits") for each in (before, now)]
    # other machines may round otherwise, so bits say something on the same one alone
    if None not in known and before.get("environment") == now["environment"]:
        return known[0] == known[1]
    try:
        numbers, current = (torch.tensor(each.get("numbers")).double() for each in (before, now))
        return bool((numbers - current).abs().max() <= now["tolerance"] * current.abs().max())
    except (TypeError, ValueError, RuntimeError):  # it is not of our making
        return False


def weight_processing(model: nn.Module) -> dict[str, Any]:
    """Say how the weights of a TransformerLens model were processed, as its config tells.

    Folding a layer norm changes the basis of the residual stream: a map that was fitted in one
    basis means nothing in another.
    """
    cfg = getattr(model, "cfg", None)
    normalization = getattr(cfg, "normalization_type", None)
    return {
        "normalization_type": normalization,
        "layer_norm_folded": isinstance(normalization, str) and normalization.endswith("Pre"),
    }


@dataclass(frozen=True)
class RunRecord(Displayed):
    """What a result needs to be reproduced.

    Attributes:
        config: the settings of the run, as JSON-compatible values.
        seed: the seed of the run, or None where it draws nothing.
        versions: see :func:`package_versions`.
        model_fingerprint: see :func:`model_fingerprint`; None where no model took part.
        configuration_fingerprint: see :func:`configuration_fingerprint`; None where it was not
            asked for.
        weight_processing: see :func:`weight_processing`.
        environment: see :func:`environment`.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    versions: Mapping[str, str] = field(default_factory=package_versions)
    model_fingerprint: str | None = None
    configuration_fingerprint: str | None = None
    weight_processing: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=environment)

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        config: Mapping[str, Any],
        seed: int | None = None,
        fingerprint_of_model: str | None = None,
    ) -> RunRecord:
        """Make the record of a run on `model`, whose fingerprint may be known already."""
        return cls(
            config=dict(config),
            seed=seed,
            model_fingerprint=fingerprint_of_model or model_fingerprint(model),
            weight_processing=weight_processing(model),
        )

    def check_model(self, fingerprint: str, what: str, remedy: str) -> None:
        """Refuse a model with other weights than that of the record.

        Args:
            fingerprint: of the model.
            what: what the record is of, such as "the maps were fitted on".
            remedy: the end of the error.

        Raises:
            InfoFlowError: with both fingerprints.
        """
        if self.model_fingerprint != fingerprint:
            raise InfoFlowError(
                f"{what} model {self.model_fingerprint}, this is {fingerprint} (other weights or "
                f"adapters, or another precision): {remedy}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON-compatible values."""
        return asdict(self)


_CONSTANTS = (type(None), bool, int, float, complex, str, bytes)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platlib", "purelib")})
_THIS = __name__.partition(".")[0]


def is_own(thing: Any, root: str = "") -> bool:
    """Say whether a function, class or module is the user's: of no package, Python or this one.

    Args:
        thing: the function, class or module.
        root: a package, whose code counts as the user's wherever it lies.
    """
    name = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None)
    top = (name or "builtins").partition(".")[0]
    if top == _THIS or top in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(name or ""), "__file__", None)
    return top == root or file is None or not str(Path(file)).startswith(_INSTALLED)


def code_digest(thing: Any) -> str:
    """Compute the SHA-256, as 16 hex digits, of the code of a function or class and all it calls.

    That is the compiled code of the user's own functions and classes, with the constants, tensors
    and functions that they read; of an object also what it holds. Of packages the names count.
    Lists, dicts and objects that code reads elsewhere do not, as they may change while it runs;
    comments and names of variables do not, either.
    """
    root = (getattr(thing, "__module__", None) or "").partition(".")[0]
    text = json.dumps(_Reader(root).read(thing))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _Reader:
    """What was read so far, so that nothing is read twice, and circles end."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._seen: dict[int, tuple[int, Any]] = {}

    def read(self, value: Any) -> Any:
        """Return a value for JSON that is another where `value` does something else."""
        # plain values by what they are
        if isinstance(value, _CONSTANTS):
            return repr(value)
        if isinstance(value, Tensor):
            return fingerprint({"": value})
        if isinstance(value, tuple):
            return [self.read(part) for part in value]
        if isinstance(value, (set, frozenset)):
            return sorted(map(repr, value))
        # functions of the user's own by their bytecode, so that comments change nothing
        if isinstance(value, CodeType):
            return [value.co_code.hex(), value.co_names, self.read(value.co_consts)]
        # what was met before is named by its number: values may hold themselves
        if id(value) in self._seen:
            return self._seen[id(value)][0]
        self._seen[id(value)] = len(self._seen), value  # kept, so that no other has its number
        if isinstance(value, list):
            return [self.read(part) for part in value]
        if isinstance(value, Mapping):
            return [[self.read(key), self.read(part)] for key, part in value.items()]
        if isinstance(value, (staticmethod, classmethod)):
            return self.read(value.__func__)
        if isinstance(value, property):
            return self.read((value.fget, value.fset))
        if isinstance(value, partial):
            return self.read((value.func, value.args, value.keywords))
        if isinstance(value, MethodType):
            return self.read((value.__func__, value.__self__))
        # of others' code the name is enough, as the version of the package is in the record
        if isinstance(value, FunctionType) and is_own(value, self.root):
            return [self.read(value.__code__), *map(self.read, self._read_by(value))]
        if isinstance(value, type) and is_own(value, self.root):
            parts = [(name, part) for name, part in vars(value).items() if _is_code(name, part)]
            return [self.read(sorted(parts)), self.read(value.__bases__)]
        if _wraps_another(value) and not isinstance(value, (type, FunctionType)):
            return self.read(value.__wrapped__)
        if isinstance(value, (type, FunctionType)) or not hasattr(value, "__dict__"):
            return getattr(value, "__qualname__", type(value).__qualname__)
        return [self.read(type(value)), self.read(vars(value))]

    def _read_by(self, function: FunctionType) -> Iterator[Any]:
        """Yield what a function reads beside its arguments, as far as it stays the same."""
        cells = [cell.cell_contents for cell in function.__closure__ or () if _has_value(cell)]
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        names = _names(function.__code__)
        found = [function.__globals__.get(name) for name in names]
        modules = [m for m in found if isinstance(m, ModuleType) and is_own(m, self.root)]
        # code reads module.name as two names: each is looked up in each module of the user's own
        found += [vars(module).get(name) for module in modules for name in names]
        return (value for value in (*defaults, *cells, *found) if _stays(value))


def _names(code: CodeType) -> tuple[str, ...]:
    """Return the names that code looks up, also in the functions inside of it."""
    inner = [part for part in code.co_consts if isinstance(part, CodeType)]
    return (*code.co_names, *(name for part in inner for name in _names(part)))


def _has_value(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _stays(value: Any) -> bool:
    kinds = (*_CONSTANTS, Tensor, FunctionType, MethodType, partial, type, tuple, frozenset)
    return isinstance(value, kinds) or _wraps_another(value)


def _wraps_another(value: Any) -> bool:
    """Say whether a function was wrapped; objects that make up attributes are not asked for one."""
    return "__wrapped__" in getattr(value, "__dict__", ())


def _is_code(name: str, part: Any) -> bool:
    """Say whether a part of a class does something: its text, say, does not."""
    descriptors = (FunctionType, staticmethod, classmethod, property)
    if isinstance(part, descriptors) or hasattr(type(part), "__set_name__"):
        return True
    return _stays(part) and not name.startswith("__")
