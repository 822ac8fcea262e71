"""Tiny models of many architectures, saved as their makers save theirs.

``save(name, folder)`` writes a folder with config.json, model.safetensors and a tokenizer, as
``save_pretrained`` does; the weights are random, drawn from a generator of their own, and large
enough for attention that is far from uniform. ``save_in_cache`` puts such a folder where
huggingface_hub keeps what it has downloaded, so that the real code for official names finds it
without a network.

All have two layers, four heads of four features, a vocabulary of 50 and room for 32 tokens.
"""

import io
import shutil
import tempfile
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import torch

from tests.conftest import some_of
from tests.reference.copies import copied

N_LAYERS, N_HEADS, D_HEAD, D_MODEL, D_MLP, N_VOCAB, N_CTX = 2, 4, 4, 16, 64, 50, 32
N_KEY_VALUE_HEADS, WINDOW = 2, 4

_GPT2 = {"n_layer": N_LAYERS, "n_head": N_HEADS, "n_embd": D_MODEL, "n_inner": D_MLP}
_LLAMA = {
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": N_HEADS,
    "hidden_size": D_MODEL,
    "intermediate_size": D_MLP,
    "max_position_embeddings": N_CTX,
}
_GROUPED = {**_LLAMA, "num_key_value_heads": N_KEY_VALUE_HEADS}

# name -> class of the config, class of the model, settings beyond the vocabulary
ARCHITECTURES: dict[str, tuple[str, str, dict[str, object]]] = {
    # learned positions
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {**_GPT2, "n_positions": N_CTX, "n_ctx": N_CTX}),
    # learned positions; the second layer sees a window
    "gpt_neo": (
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        {
            "num_layers": N_LAYERS,
            "num_heads": N_HEADS,
            "hidden_size": D_MODEL,
            "intermediate_size": D_MLP,
            "max_position_embeddings": N_CTX,
            "attention_types": [[["global", "local"], 1]],
            "window_size": WINDOW,
        },
    ),
    # learned positions, counted from the attention mask
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            "num_hidden_layers": N_LAYERS,
            "num_attention_heads": N_HEADS,
            "hidden_size": D_MODEL,
            "ffn_dim": D_MLP,
            "word_embed_proj_dim": D_MODEL,
            "max_position_embeddings": N_CTX,
        },
    ),
    # ALiBi
    "bloom": (
        "BloomConfig",
        "BloomForCausalLM",
        {"n_layer": N_LAYERS, "n_head": N_HEADS, "hidden_size": D_MODEL},
    ),
    # rotary, attention and MLP side by side behind one normalization
    "gptj": (
        "GPTJConfig",
        "GPTJForCausalLM",
        {**_GPT2, "n_positions": N_CTX, "rotary_dim": D_HEAD},
    ),
    # rotary in half of the features, attention and MLP side by side
    "gpt_neox": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {**_LLAMA, "use_parallel_residual": True, "rotary_pct": 0.5},
    ),
    # rotary, RMS norm, grouped queries
    "llama": ("LlamaConfig", "LlamaForCausalLM", _GROUPED),
    # the same with a window in each layer
    "mistral": ("MistralConfig", "MistralForCausalLM", {**_GROUPED, "sliding_window": WINDOW}),
    # the same with biases on queries, keys and values
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _GROUPED),
    # soft caps on scores and logits, norms after attention and MLP, a window in the first layer
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            **_GROUPED,
            "head_dim": D_HEAD,
            "query_pre_attn_scalar": D_HEAD,
            "sliding_window": WINDOW,
        },
    ),
    # attention sinks, experts, a window in the first layer
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            **_GROUPED,
            "head_dim": D_HEAD,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "sliding_window": WINDOW,
        },
    ),
    # an encoder: bidirectional, norms behind the sums
    "bert": ("BertConfig", "BertForMaskedLM", _LLAMA),
    # rotary, norms of queries and keys, norms after attention and MLP, a window
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            **_GROUPED,
            "head_dim": D_HEAD,
            "query_pre_attn_scalar": D_HEAD,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    # norms of queries and keys
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_GROUPED, "head_dim": D_HEAD}),
    # factors on embeddings, scores, sums and logits
    "granite": (
        "GraniteConfig",
        "GraniteForCausalLM",
        {
            **_GROUPED,
            "embedding_multiplier": 2.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.7,
            "logits_scaling": 1.5,
        },
    ),
    # norms after attention and MLP alone, norms over all queries and keys
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", _GROUPED),
    # rotary in part of the features, layer norm
    "stablelm": (
        "StableLmConfig",
        "StableLmForCausalLM",
        {**_GROUPED, "partial_rotary_factor": 0.5},
    ),
    # one head of keys and values, attention and MLP side by side
    "falcon": (
        "FalconConfig",
        "FalconForCausalLM",
        {"num_hidden_layers": N_LAYERS, "num_attention_heads": N_HEADS, "hidden_size": D_MODEL},
    ),
    # queries, keys and values in one matrix
    "phi3": ("Phi3Config", "Phi3ForCausalLM", _GROUPED),
    # attention and MLP side by side, rotary in adjacent pairs, a factor on logits
    "cohere": ("CohereConfig", "CohereForCausalLM", {**_GROUPED, "logit_scale": 0.5}),
    "cohere2": (
        "Cohere2Config",
        "Cohere2ForCausalLM",
        {**_GROUPED, "head_dim": D_HEAD, "logit_scale": 0.5, "sliding_window": WINDOW},
    ),
    # rotary, attention and MLP side by side; scores are divided after they are masked
    "codegen": (
        "CodeGenConfig",
        "CodeGenForCausalLM",
        {**_GPT2, "n_positions": N_CTX, "rotary_dim": D_HEAD},
    ),
    # not hosted by anyone here: an encoder and a decoder, and a model without attention
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "num_layers": N_LAYERS,
            "num_heads": N_HEADS,
            "d_model": D_MODEL,
            "d_kv": D_HEAD,
            "d_ff": D_MLP,
            "decoder_start_token_id": 0,
        },
    ),
    "mamba": (
        "MambaConfig",
        "MambaForCausalLM",
        {"num_hidden_layers": N_LAYERS, "hidden_size": D_MODEL, "state_size": 4},
    ),
}
# transformers rebuilds the tokenizer of these, whatever is saved, as one of bytes
WITHOUT_TOKENIZER = ("qwen2",)
WITHOUT_ATTENTION_OF_ONE_STACK = ("t5", "mamba")
FAMILIES = tuple(name for name in ARCHITECTURES if name not in WITHOUT_ATTENTION_OF_ONE_STACK)
NAMES = FAMILIES[: FAMILIES.index("bert") + 1]  # the first twelve
# Each has what no other of them has: positions, masks, sinks, shared keys, blocks side by side
DIFFERENT = (
    "gpt2", "gpt_neo", "opt", "bloom", "gptj", "llama", "gemma2", "gpt_oss", "bert", "falcon"
)  # fmt: skip
# parallel blocks, norms behind sums, sinks and experts, and an encoder with norms behind its sums
FEW = ("gptj", "gemma2", "gpt_oss", "bert")


def some_families(cases, always=DIFFERENT):
    """Cases by family: DIFFERENT ones run always, the others with SLOW=1."""
    family = {case: case[0] if isinstance(case, tuple) else case for case in cases}
    return some_of(cases, *(case for case in cases if family[case] in always))


def words() -> list[str]:
    """The vocabulary: four special tokens, then w4, w5, ..."""
    return ["<pad>", "<unk>", "<bos>", "<eos>", *(f"w{i}" for i in range(4, N_VOCAB))]


def tokenizer(begins: bool = True):
    """One token for each word between spaces; ids as in :func:`words`.

    Args:
        begins: whether it puts <bos> before a text.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(words())}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if begins:
        inner.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
    )


def pair_tokenizer():
    """One that writes <bos> a <eos> b <eos>, with types."""
    from tokenizers.processors import TemplateProcessing

    made = tokenizer()
    made._tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>",
        pair="<bos> $A <eos> $B:1 <eos>:1",
        special_tokens=[("<bos>", made.bos_token_id), ("<eos>", made.eos_token_id)],
    )
    made.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return made


@copied
def build(name: str, seed: int = 0, attention: str | None = "eager", **changes: object):
    """A model of transformers, float32, in evaluation mode.

    Args:
        name: a key of ARCHITECTURES.
        seed: of the weights.
        attention: as transformers calls it; None for what it chooses itself.
        changes: settings of its config to change.
    """
    import transformers

    config_class, model_class, settings = ARCHITECTURES[name]
    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    config = getattr(transformers, config_class)(
        vocab_size=N_VOCAB, **{**special, **settings, **changes}
    )
    config.architectures = [model_class]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config._attn_implementation = attention
        model = getattr(transformers, model_class)(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
            elif "norm" in label.lower() or "ln_" in label:
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(0.3 * noise)
    return model.eval()


_FILES: dict[str, dict[str, bytes]] = {}  # of each model that was saved


def save(
    name: str, folder: Path, *, seed: int = 0, with_tokenizer: bool = True, **changes: object
) -> Path:
    """Save a model, and a tokenizer, as ``save_pretrained`` does; the folder.

    Of equal arguments the files are made once.
    """
    key = repr((name, seed, with_tokenizer, sorted(changes.items())))
    if key not in _FILES:
        with tempfile.TemporaryDirectory() as scratch:
            build(name, seed, **changes).save_pretrained(scratch)
            if with_tokenizer and name not in WITHOUT_TOKENIZER:
                tokenizer().save_pretrained(scratch)
            _FILES[key] = {path.name: path.read_bytes() for path in Path(scratch).iterdir()}
    Path(folder).mkdir(parents=True, exist_ok=True)
    for file, content in _FILES[key].items():
        Path(folder, file).write_bytes(content)
    return folder


def save_with_text(name: str, folder: Path, n_words: int) -> tuple[str, str]:
    """Save a model, and a text of words that it knows; the paths of both."""
    text = " ".join(f"w{(7 * i + i * i // 5) % 40 + 4}" for i in range(n_words))
    (folder / "text.txt").write_text(text)
    return str(save(name, folder / name)), str(folder / "text.txt")


@copied
def bridge(source: str | Path, dtype: torch.dtype = torch.float32, **changes: object):
    """A TransformerBridge in evaluation mode, as users of TransformerLens make one.

    Args:
        source: a folder that :func:`save` wrote, or a key of ARCHITECTURES.
        dtype: of its weights.
        changes: settings of the config to change, of a key.
    """
    from transformer_lens.model_bridge import TransformerBridge

    with tempfile.TemporaryDirectory() as scratch:
        known = str(source) in ARCHITECTURES
        folder = save(str(source), Path(scratch), **changes) if known else source
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            made = TransformerBridge.boot_transformers(str(folder), device="cpu", dtype=dtype)
    return made.eval()


def in_cache(official: str, cache: Path) -> Path:
    """An empty folder where huggingface_hub looks for what it has downloaded under a name."""
    repository = cache / f"models--{official.replace('/', '--')}"
    revision = "0" * 40
    snapshot = repository / "snapshots" / revision
    shutil.rmtree(repository, ignore_errors=True)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    return snapshot


def save_in_cache(name: str, official: str, cache: Path, **changes: object) -> Path:
    """Save a model in the layout of huggingface_hub's cache, as if it had been downloaded.

    Args:
        name: a key of ARCHITECTURES.
        official: the name that it is downloaded under, such as "gpt2".
        cache: what HF_HUB_CACHE names.
        changes: as for :func:`build`.
    """
    return save(name, in_cache(official, cache), **changes)


def tokens(n: int, length: int, seed: int = 0) -> torch.Tensor:
    """Ids of ordinary words, [n, length]."""
    return torch.randint(4, N_VOCAB, (n, length), generator=torch.Generator().manual_seed(seed))


class _Bent(torch.nn.Module):
    """Attention whose output is bent before it is added."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, *args, **kwargs):
        out, *rest = self.attention(*args, **kwargs)
        return out.tanh(), *rest


def bend(model):
    """Give a Llama's first layer attention that adds no sum of what its heads bring."""
    layer = model.model.layers[0]
    layer.self_attn = _Bent(layer.self_attn)
    return model
