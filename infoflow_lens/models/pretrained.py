"""Models of transformers, by name or folder: checked before they are loaded, and loaded whole."""

import inspect
import logging
import math
import os
import re
import threading
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float
from safetensors import safe_open
from torch import Tensor, nn

from infoflow_lens.foundation.display import printable
from infoflow_lens.foundation.errors import InfoFlowError, InfoFlowWarning, first_line
from infoflow_lens.foundation.files import check_regular, read_json
from infoflow_lens.foundation.modules import SeededRandom
from infoflow_lens.foundation.naming import GGUF
from infoflow_lens.foundation.packages import import_optional


def _load_shapes(path: Path) -> dict[str, torch.Tensor]:
    """Load the tensors of a bin file without their numbers."""
    try:
        return torch.load(path, weights_only=True, mmap=True, map_location="meta")
    except RuntimeError:  # a file from before PyTorch 1.6 cannot be mapped
        return torch.load(path, weights_only=True, map_location="meta")


def read_shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Read the shapes of all tensors of safetensors and bin files, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        check_regular(path)  # whoever opens a pipe waits for its other end
        if path.suffix == ".bin":  # tensors alone, and their numbers stay on the disk
            held = _load_shapes(path)
            shapes |= {name: tuple(t.shape) for name, t in held.items() if hasattr(t, "shape")}
            continue
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
    return shapes


SAVE_AGAIN = "expected what save_pretrained writes; save or download it again"
_LARGEST = 2**24  # of a whole number in a config, where the weights are fewer
_SLACK = 64  # times the stored numbers that a model may have: layers may share their weights
_FEWEST = 2**20  # numbers that any model may have, such as masks and tables of positions
_MOST_LABELS = 1000  # that a model may name without weights for them
_MOST_LAYERS = 1000  # that may share their weights
# in the names of whole numbers that are no size
_NO_SIZES = ("theta", "base", "token_id", "seed", "max_length", "param")
# fields of a GGUF file's head that transformers does not read, and where its configs have them
_LEFT_OUT = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
}
_EPSILONS = ("layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon", "rms_norm_eps")
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
_loading = threading.RLock()


@dataclass(frozen=True)
class Place:
    """Where a model is put, and in which precision."""

    device: str
    dtype: torch.dtype


def check_needs_no_code(name: str, error: BaseException) -> None:
    """Raise if transformers has refused a model or a tokenizer for the code that its files name.

    Raises:
        InfoFlowError: naming the model, with what to do.
    """
    if "custom code" in str(error) and "trust_remote_code" in str(error):
        raise InfoFlowError(
            f"{name!r} needs Python code of its own (auto_map in its config.json or "
            "tokenizer_config.json), which would run here: expected a model of a class that "
            "transformers has. If you trust that code, load the model and its tokenizer yourself, "
            "with trust_remote_code=True, and give both to load_any(model, tokenizer=...)"
        ) from error


def check_one_stack(name: str, config: Any) -> None:
    """Refuse an encoder with a decoder.

    Raises:
        InfoFlowError: for such a model.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise InfoFlowError(
            f"{name!r} is an encoder with a decoder: expected one stack of blocks, such as gpt2 or "
            "bert-base-cased; load it with transformers, and give "
            'open_model(model, tokenizer, stack="encoder") or "decoder"'
        )


def config_of(name: str) -> Any:
    """Read the config of a name or folder.

    Its attention is what transformers chooses, fused where the class has it, or eager where the
    file says so. No file chooses another, whose code may be compiled, or fetched.
    """
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(name, trust_remote_code=False)
    is_eager = config._attn_implementation == "eager"
    config._attn_implementation = "eager" if is_eager else None  # of its parts, too
    return config


def config_of_gguf(path: Path) -> Any:
    """Read the config of transformers that the head of a GGUF file stands for.

    Raises:
        InfoFlowError: without the package that reads it, for a file that is none, and for one whose
            rotary positions are scaled otherwise than linearly, or as in Llama 3.1.
    """
    import_optional("gguf", "gguf", f"the model {path.name!r}")
    from transformers import AutoConfig

    check_regular(path)
    try:
        config = AutoConfig.from_pretrained(
            path.parent, gguf_file=path.name, trust_remote_code=False
        )
        scaled = _read_what_is_left_out(path, config)
    except Exception as error:  # of many kinds, as the file is read without checks
        raise InfoFlowError(
            f"{str(path)!r} cannot be read ({first_line(error)}): expected a GGUF file of a model "
            "that transformers has; download it again"
        ) from error
    if scaled:
        raise InfoFlowError(
            f"{str(path)!r} scales rotary positions ({', '.join(scaled)}) neither linearly nor as "
            "Llama 3.1 does, and transformers reads from no such file how, so that attention would "
            "be wrong: expected the folder of safetensors that it was made from"
        )
    return config


def _read_what_is_left_out(path: Path, config: Any) -> list[str]:
    """Set what transformers leaves out of the head of a GGUF file; name what scales positions."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    kind = str(reader.fields["general.architecture"].contents())
    head = {
        name.removeprefix(f"{kind}."): field.contents() for name, field in reader.fields.items()
    }
    for name, own in _LEFT_OUT.items():
        # the keys of Gemma 4 are those of its full attention alone
        if name in head and hasattr(config, own) and (kind, own) != ("gemma4", "head_dim"):
            setattr(config, own, head[name])
    for own in _EPSILONS:
        if hasattr(config, own):
            epsilon = head.get("attention.layer_norm_epsilon", getattr(config, own))
            setattr(config, own, head.get("attention.layer_norm_rms_epsilon", epsilon))
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # that of windows is the same in all files
    if "rope_theta" in rope and "rope.freq_base" in head:
        rope["rope_theta"] = float(head["rope.freq_base"])
    if "partial_rotary_factor" in rope and "rope.dimension_count" in head:
        width = getattr(config, "head_dim", None)
        width = width or config.hidden_size // config.num_attention_heads
        rope["partial_rotary_factor"] = head["rope.dimension_count"] / width
    # files of the kind llama have no windows, also where transformers takes them for Mistral's
    if kind == "llama" and hasattr(config, "sliding_window"):
        config.sliding_window = head.get("attention.sliding_window")
    if kind in _LAYERS_OF_27B:  # no head says it: llama.cpp knows the one of 27B by its layers
        is_27b = config.num_hidden_layers == _LAYERS_OF_27B[kind]
        width = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = width if is_27b else config.head_dim
    if kind == "gpt-oss":  # of which transformers reads the scale
        return []
    names = ("rope.scaling.factor", "rope.scale_linear")
    factors = [name for name in names if head.get(name, 1) not in (0, 1)]
    tables = {t.name: t.data for t in reader.tensors if t.name.startswith("rope_")}
    tables = {name: table for name, table in tables.items() if (table != 1).any()}
    # of llama.cpp, which scales linearly where a file does not say how
    is_linear = bool(factors) and head.get("rope.scaling.type", "linear") == "linear"
    scaling: dict[str, Any] = {}
    if "rope_theta" in rope and list(tables) == ["rope_freqs.weight"] and not factors:
        scaling = _scaling_of_llama_3(rope["rope_theta"], torch.tensor(*tables.values()))
    elif "rope_theta" in rope and is_linear and not tables:
        scaling = {"rope_type": "linear", "factor": float(head[factors[0]])}
    rope.update(scaling)
    return [] if scaling else [*(f"{kind}.{name}" for name in factors), *tables]


def _scaling_of_llama_3(
    base: float, divisors: Float[Tensor, " frequency"]
) -> dict[str, str | float]:
    """Return how Llama 3.1 scales rotary positions, if it gives these divisors of frequencies."""
    first, low, high, factor = 8192, 1.0, 4.0, float(divisors.max())
    shares = torch.arange(len(divisors), dtype=torch.float64) / len(divisors)
    turns = first / (2 * math.pi * base**shares)  # of each frequency, in the first context
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    if not torch.allclose(1 / ((1 - smooth) / factor + smooth), divisors.double(), rtol=1e-5):
        return {}
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": first,
    }


def find_class(config: Any) -> Any:
    """Return the class of transformers that a config names, if it is a model; else of decoders.

    A config names any attribute of transformers that it likes: what is no model is not called.
    """
    import transformers

    kind = getattr(transformers, next(iter(config.architectures or ()), ""), None)
    if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
        return kind
    return transformers.AutoModelForCausalLM


def transformers_model(name: str, config: Any, place: Place, **options: Any) -> tuple[Any, str]:
    """Load a model of transformers, whose `options` are these.

    Files of an encoder often lack the weights of its pooler, which makes another output than those
    that are read. They are 0 then.

    Returns:
        The model; and a note on weights that are not there, else empty.

    Raises:
        InfoFlowError: if the files lack other weights, which transformers would draw at random.
    """
    # fused attention of transformers 5.20 leaves a soft cap of the scores out, in silence
    if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None:
        config._attn_implementation = "eager"
    # what is missing would be random
    model, info = find_class(config).from_pretrained(
        name,
        config=config,
        dtype=place.dtype,
        output_loading_info=True,
        trust_remote_code=False,
        **options,
    )
    missing = sorted(info["missing_keys"])
    absent = [model.get_parameter(key) for key in missing if key.startswith("pooler.")]
    if len(absent) < len(missing):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise InfoFlowError(
            f"{name!r} lacks weights ({', '.join(missing[:3])}{more}), which would be random: "
            f"expected all of {type(model).__name__}; save or download it again"
        )
    # weights that nothing reads: zeros, so that the model is the same each time
    for weight in absent:
        nn.init.zeros_(weight)
    note = "without weights of its pooler, which are not read" if absent else ""
    return model.to(place.device).eval(), note


@dataclass(frozen=True)
class Stored:
    """What the weights of a folder hold, read without taking memory for them.

    Attributes:
        n_tensors: how many tensors.
        n_numbers: how many numbers, at most one for each byte of the files: a file may say that one
            number is many.
        longest: the longest axis of a tensor.
    """

    n_tensors: int
    n_numbers: int
    longest: int

    @classmethod
    def read_folder(cls, folder: Path) -> "Stored":
        """Read what a folder of Hugging Face holds.

        Raises:
            InfoFlowError: for files that are no weights.
        """
        files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
        try:
            shapes = read_shapes(files)
            n_bytes = sum(file.stat().st_size for file in files)
        except Exception as error:  # the readers of two formats raise their own errors
            raise InfoFlowError(
                f"the weights in {str(folder)!r} cannot be read ({first_line(error)}): expected "
                "what save_pretrained writes; save or download them again"
            ) from error
        return cls._count([*shapes.values()], n_bytes)

    @classmethod
    def read_gguf(cls, path: Path) -> "Stored":
        """Read what a GGUF file holds, of which a byte may be several numbers."""
        from gguf import GGUFReader

        shapes = [tuple(map(int, tensor.shape)) for tensor in GGUFReader(path).tensors]
        return cls._count(shapes, 8 * path.stat().st_size)

    @classmethod
    def _count(cls, shapes: list[tuple[int, ...]], most: int) -> "Stored":
        """Count the numbers of tensors, of which a file holds at most so many."""
        longest = max((size for shape in shapes for size in shape), default=0)
        return cls(len(shapes), min(sum(map(math.prod, shapes)), most), min(longest, most))


def check_config(folder: Path, stored: Stored) -> None:
    """Refuse, before it is made, a config of another kind of model, or far above the weights.

    A config takes memory for each label and for each layer that it names. Entries that its class
    does not know size nothing. A config of some other kinds asks the hub about the parts that it
    names, as it is made.

    Raises:
        InfoFlowError: naming the kind, the part or the number.
    """
    from transformers import CONFIG_MAPPING

    values = read_json(folder / "config.json", "config", SAVE_AGAIN)
    name = values.get("model_type")
    # the folder is from elsewhere: nothing of it is believed before it is looked at
    if isinstance(name, str) and name in CONFIG_MAPPING and name not in _kinds_over_tokens():
        raise InfoFlowError(
            f"config.json in {str(folder)!r} is of a {name}: expected a model over tokens, such as "
            "a GPT-2 or a BERT"
        )
    check_one_stack(
        str(folder), SimpleNamespace(is_encoder_decoder=values.get("is_encoder_decoder"))
    )
    if part := next(_parts_elsewhere(values), None):
        raise InfoFlowError(
            f"config.json in {str(folder)!r} names {part!r} as a part of the model, which would be "
            "fetched from the hub: expected a folder that holds the whole model"
        )
    # numbers of sizes that no such weights have would take all memory
    kind: Any = CONFIG_MAPPING[name] if isinstance(name, str) and name in CONFIG_MAPPING else None
    known = {"num_labels"}
    if kind is not None:
        known |= {*inspect.signature(kind.__init__).parameters, *kind.attribute_map}
    for name, value in _whole_numbers(values, known):
        labels = max(_MOST_LABELS, stored.longest)
        most = labels if name == "num_labels" else max(_LARGEST, stored.n_numbers)
        if value > most and not any(word in name for word in _NO_SIZES):
            raise _too_large(folder, f"{name} {value}")


@cache
def _kinds_over_tokens() -> frozenset[str]:
    """List the kinds of models that transformers has with an output for tokens or a text."""
    from transformers.models.auto import modeling_auto

    heads = ("CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT", "SEQUENCE_CLASSIFICATION",
             "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING")  # fmt: skip
    known = (getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES") for head in heads)
    return frozenset(kind for names in known for kind in names)


def _parts_elsewhere(values: Any, key: str = "") -> Iterator[str]:
    """Return what a config, or a part of it, names that its libraries would fetch."""
    if isinstance(values, str) and (key == "backbone" or values.startswith(("hf-hub:", "hf_hub:"))):
        yield values
    for name, value in values.items() if isinstance(values, dict) else ():
        yield from _parts_elsewhere(value, name)
    for value in values if isinstance(values, list) else ():
        yield from _parts_elsewhere(value, key)


def _whole_numbers(values: Any, known: Collection[str]) -> Iterator[tuple[str, int]]:
    """Return the whole numbers of a config by name, of its parts all."""
    for name, value in values.items():
        if isinstance(value, dict) and name.endswith("config"):
            yield from _whole_numbers(value, value)
        elif isinstance(value, int) and name in known:
            yield name, value


def _too_large(folder: Path, what: str) -> InfoFlowError:
    where = "the head of" if folder.suffix == GGUF else "config.json in"
    return InfoFlowError(
        f"{where} {str(folder)!r} says {what}, which the weights beside it do not hold: "
        + SAVE_AGAIN
    )


def check_sizes(folder: Path, config: Any, stored: Stored) -> None:
    """Refuse a config of a model far larger than the weights beside it, before memory is taken.

    The model is made where tensors have sizes and no numbers, and compared with what is stored.

    Raises:
        InfoFlowError: with the size that is too large, and for a class that reads another config.
    """
    n_layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    # layers are counted first: a twin with too many takes memory even without numbers
    if isinstance(n_layers, int) and n_layers > max(stored.n_tensors, _MOST_LAYERS):
        raise _too_large(folder, f"num_hidden_layers {n_layers}")
    kind = find_class(config)
    reads = getattr(kind, "config_class", None)
    if isinstance(reads, type) and not isinstance(config, reads):
        raise InfoFlowError(
            f"config.json in {str(folder)!r} is of a {config.model_type}, and its architectures "
            f"name {kind.__name__}, which reads another kind of config and would take its own "
            "sizes: expected a class of the same family; correct architectures in that file"
        )
    # made without memory, to compare its size with that of the file
    try:
        with torch.device("meta"):
            made = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
    except Exception:  # a model that cannot be made so is judged when it is loaded
        return
    asked = {name: t.numel() for name, t in (*made.named_parameters(), *made.named_buffers())}
    if sum(asked.values()) > _SLACK * max(stored.n_numbers, _FEWEST):
        largest = max(asked, key=asked.__getitem__)
        raise _too_large(folder, f"sizes of a model whose {largest} has {asked[largest]} numbers")


@contextmanager
def without_trace() -> Iterator[None]:
    """Leave random state and warning filters as they were, and print nothing to stdout.

    That TransformerLens 4 drops HookedTransformer is known. Threads take turns: filters and stdout
    are of all of them, and whoever begins last would put back what another had put there.
    """
    with (
        _loading,
        SeededRandom(0),
        warnings.catch_warnings(),
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        redirect_stdout(nowhere),
        _printable_messages(),
    ):
        warnings.filterwarnings(
            "ignore",
            message=r"HookedTransformer(\.from_pretrained)? is deprecated",
            category=DeprecationWarning,
        )
        yield


@contextmanager
def _printable_messages() -> Iterator[None]:
    """Let transformers log what it says of a model's files without what a terminal would take."""

    def clean(record: logging.LogRecord) -> bool:
        text = re.sub(r"\x1b\[[0-9;]*m", "", record.getMessage())  # its own colours, and others
        record.msg, record.args = printable(text), ()
        return True

    handlers = list(logging.getLogger("transformers").handlers)
    for handler in handlers:
        handler.addFilter(clean)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(clean)


def _file_of_tokenizer(name: str, gguf_file: str | None = None) -> str | None:
    """Find which file of a folder, or of a name in the hub's cache, holds a tokenizer's words."""
    if gguf_file is not None:
        from gguf import GGUFReader

        fields = GGUFReader(Path(name, gguf_file)).fields
        return gguf_file if any(field.startswith("tokenizer.") for field in fields) else None
    from huggingface_hub import try_to_load_from_cache

    for file in ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt"):
        local = Path(name, file).is_file() if os.path.isdir(name) else None
        if local or (local is None and isinstance(try_to_load_from_cache(name, file), str)):
            return file
    return None


def load_tokenizer(name: str | None, **options: Any) -> Any | None:
    """Load the tokenizer of a name or folder, where it has one with words.

    `options` are those of transformers. A file that cannot be read is warned of.

    For some architectures transformers makes one of special tokens alone where there is no file.
    """
    if not name:
        return None
    from transformers import AutoTokenizer

    try:
        found: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)
    except Exception as error:  # of many kinds: no file, no network, a missing package
        check_needs_no_code(name, error)
        if file := _file_of_tokenizer(name, options.get("gguf_file")):
            warnings.warn(
                f"the tokenizer of {name!r} cannot be read ({file}: {type(error).__name__}: "
                f"{first_line(error)}): the model is loaded without one and takes token ids alone; "
                "save or download the file again",
                InfoFlowWarning,
                stacklevel=2,
            )
        return None
    return None if set(found.get_vocab()) <= set(found.all_special_tokens) else found
