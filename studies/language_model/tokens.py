"""The tokenizer, byte-level BPE, and the corpus as token ids."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> "Tokenizer":
    """Return byte-level BPE with GPT-2's rule for words (Radford et al. 2019), learnt from texts.

    Args:
        texts: the training part.
        vocabulary: entries, of which 256 are bytes and the first is <|endoftext|>.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        # the alphabet comes in another order in each process
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: "Tokenizer", folder: Path, n_context: int) -> None:
    """Write the files from which ``AutoTokenizer`` loads it, without a network.

    What is loaded puts <|endoftext|> before each text, as every sequence of the training began.
    The class that they name is known to every version of transformers; what version 5 would write
    itself is unknown to version 4.
    """
    from tokenizers import Tokenizer, processors

    from infoflow_lens.foundation.files import write_json, write_text

    # a copy, as the run's own tokenizer puts nothing before a text
    saved = Tokenizer.from_str(tokenizer.to_str())
    saved.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, END_OF_TEXT_ID)]
    )
    text = saved.to_str(pretty=False)
    write_text(folder / "tokenizer.json", json.dumps(json.loads(text), ensure_ascii=False))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "model_max_length": n_context,
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", settings)


def token_stream(tokenizer: "Tokenizer", texts: Sequence[str]) -> Int[Tensor, " pos"]:
    """Join the ids of all texts, each with <|endoftext|> before it."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False):
        ids.append(END_OF_TEXT_ID)
        ids.extend(encoding.ids)
    # a vocabulary has at most 2^15 entries
    return torch.tensor(ids, dtype=torch.int16)
