"""Models of transformers, hosted by a bridge of TransformerLens and compared with themselves."""

import math
import os
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infoflow_lens.foundation.drawing import SeededRandom
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.models.weights import stored_shapes

# Sizes that a config says and that no weight may fall short of
_WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "n_inner",  # as GPT-2 calls it
    "ffn_dim",
    "d_ff",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
_LARGEST = 10**7  # of a size that no weights tell
_SLACK = 64  # layers may share their weights
_loading = threading.RLock()
# How far a bridge's logits may lie from those of its model, as a share of their range
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}


@dataclass(frozen=True)
class Place:
    """Where a model is put, and in which precision."""

    device: str
    dtype: torch.dtype


def check_one_stack(name: str, config: Any) -> None:
    """Refuse an encoder with a decoder.

    Raises:
        InfoFlowError: for such a model.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise InfoFlowError(
            f"{name!r} is an encoder with a decoder: expected one stack of blocks, a decoder "
            "such as gpt2 or an encoder such as bert-base-cased"
        )


def hosted(name: str, alone: Any, tokenizer: Any, has_words: bool) -> Any:
    """A model of transformers in a bridge, which puts its own parts into it.

    Args:
        name: of the model.
        alone: the model, with eager attention.
        tokenizer: of it; None for that of the name.
        has_words: whether the tokenizer is its own.

    Raises:
        InfoFlowError: for a bridge with other logits than the model.
    """
    from transformer_lens.model_bridge import TransformerBridge

    first = next(alone.parameters())
    device, dtype = str(first.device), first.dtype
    tokens, expected = _few_tokens(alone.config, device), None
    if alone.main_input_name == "input_ids":
        # now: a bridge changes the model
        with torch.no_grad():
            expected = getattr(alone(tokens), "logits", None)
    # by its whole path: a folder may be called what TransformerLens takes for another model
    place = str(Path(name).absolute()) if Path(name).is_dir() else name
    model = TransformerBridge.boot_transformers(
        place, hf_model=alone, device=device, dtype=dtype, tokenizer=tokenizer
    )
    model.cfg.model_name = name
    if not has_words:
        model.tokenizer = None
    model.eval()
    if expected is not None:
        _check_computes(model, tokens, expected, name, type(alone).__name__)
    return model


def class_of_transformers(model: nn.Module) -> str:
    """The name of a model's class, or of the class of transformers that it is made from."""
    import transformers

    names = [kind.__name__ for kind in type(model).__mro__]
    return next((name for name in names if hasattr(transformers, name)), names[0])


def transformers_model(name: str, config: Any, place: Place) -> Any:
    """The model of transformers, with eager attention.

    Raises:
        InfoFlowError: if the files lack weights, which transformers would draw at random.
    """
    import transformers

    architecture = next(iter(config.architectures or ()), "")
    kind: Any = getattr(transformers, architecture, transformers.AutoModelForCausalLM)
    model, info = kind.from_pretrained(
        name, dtype=place.dtype, attn_implementation="eager", output_loading_info=True
    )
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise InfoFlowError(
            f"{name!r} lacks weights ({', '.join(missing[:3])}{more}), which would be random: "
            f"expected all of {type(model).__name__}; save or download it again"
        )
    return model.to(place.device).eval()


def check_sizes(folder: Path, config: Any) -> None:
    """Refuse a config far larger than the weights beside it, before memory is taken for it.

    Raises:
        InfoFlowError: with the size that is too large.
    """
    shapes = stored_shapes(sorted(folder.glob("*.safetensors")))
    text = config.get_text_config()
    asked = {name: getattr(text, name, None) for name in (*_WIDTHS, "num_hidden_layers")}
    known = {name: size for name, size in asked.items() if isinstance(size, int)}
    largest = max((size for shape in shapes.values() for size in shape), default=_LARGEST)
    numbers = sum(math.prod(shape) for shape in shapes.values()) or _LARGEST**2
    limits = dict.fromkeys(_WIDTHS, largest) | {"max_position_embeddings": _LARGEST}
    counted = {int(part) for name in shapes for part in name.split(".") if part.isdigit()}
    limits["num_hidden_layers"] = len(counted) if counted else _LARGEST
    width = known.get("hidden_size", 1)
    for name, size in known.items():
        by = width if name == "max_position_embeddings" else size
        squared = name in (*_WIDTHS[:2], "max_position_embeddings")
        if size > limits[name] or (squared and size * by > _SLACK * max(numbers, 2**20)):
            raise InfoFlowError(
                f"config.json in {str(folder)!r} says {name} {size}, which the weights beside it "
                "do not hold: expected what save_pretrained writes; save or download it again"
            )


def _few_tokens(config: Any, device: str) -> torch.Tensor:
    """Ids from all over the vocabulary, [2, 8]."""
    text: Any = config.get_text_config()
    generator = torch.Generator().manual_seed(0)
    return torch.randint(getattr(text, "vocab_size", 1), (2, 8), generator=generator).to(device)


def _check_computes(
    model: Any, tokens: torch.Tensor, expected: torch.Tensor, name: str, kind: str
) -> None:
    """Refuse a bridge with other logits than its model.

    Raises:
        InfoFlowError: with the difference.
    """
    with torch.no_grad():
        found = model(tokens)
    largest = float((expected - expected.mean(-1, keepdim=True)).abs().max())
    same_shape = found.shape == expected.shape
    apart = float((found.float() - expected.float()).abs().max()) if same_shape else float("inf")
    if not apart <= _TOLERANCE[expected.dtype] * largest:
        raise InfoFlowError(
            f"the TransformerBridge of transformer-lens {version('transformer-lens')} computes "
            f"something else than {name!r} itself, a {kind}: logits differ by "
            f"{apart / largest:.0%} of their range; what is measured on it would be said of "
            "another model. Expected an architecture that the bridge reproduces; try another "
            "version of transformer-lens"
        )


@contextmanager
def without_trace() -> Iterator[None]:
    """Random state and warning filters are left as found, and nothing is printed to stdout.

    That TransformerLens 4 drops HookedTransformer is known. Threads take turns: filters and stdout
    are of all of them, and whoever begins last would put back what another had put there.
    """
    with (
        _loading,
        SeededRandom(0),
        warnings.catch_warnings(),
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        redirect_stdout(nowhere),
    ):
        warnings.filterwarnings(
            "ignore",
            message=r"HookedTransformer(\.from_pretrained)? is deprecated",
            category=DeprecationWarning,
        )
        yield


@contextmanager
def tokenizer_of(place: str | None, given: Any | None = None) -> Iterator[tuple[Any, bool]]:
    """A tokenizer for TransformerLens, and whether it has words.

    TransformerLens copies a tokenizer by the place that it came from. Where there is none, one
    without words stands in for it while the model loads.

    Args:
        place: the name or folder of a model, whose tokenizer is found there; None for nowhere.
        given: a tokenizer in its stead.
    """
    if given is None and place and _has_tokenizer(place):
        yield None, True
        return
    words = given
    if words is None:
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import PreTrainedTokenizerFast

        inner = Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>"))
        special = dict.fromkeys(("unk_token", "pad_token", "bos_token", "eos_token"), "<unk>")
        words = PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    with tempfile.TemporaryDirectory() as folder:
        words.save_pretrained(folder)
        yield type(words).from_pretrained(folder), given is not None


def _has_tokenizer(name: str) -> bool:
    """Whether there is a tokenizer with words.

    For some architectures transformers makes one of special tokens alone where there is no file.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception:  # of many kinds: no file, no network, a missing package
        return False
    return not set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens)
