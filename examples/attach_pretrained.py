"""Probe a pretrained model by name; without a network, a small random one in the same format.

Run: python examples/attach_pretrained.py [MODEL]   (seconds for the small one, minutes for gpt2)
"""

import sys
import tempfile
import warnings

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from infoflow_lens import (
    InfoFlowError,
    InfoFlowWarning,
    JacobianInfluence,
    PositionsProbe,
    RecoveryProbe,
    compare,
    inspect_model,
    load_any,
    propagate,
    run_probes,
)

warnings.simplefilter("ignore", InfoFlowWarning)  # few texts: the maps are under-determined

TEXTS = [
    "When Mary and John went to the store, John gave a drink to Mary",
    "The keys to the cabinet are on the table, and the cabinet is open",
    "One two three four five, one two three four five",
    "The cat sat on the mat and the dog sat on the rug",
    "Paris is in France, Rome is in Italy, Berlin is in Germany",
]


def small_model(folder):
    """A random GPT-2 of the size of a toy, with a tokenizer for the texts."""
    words = sorted({word for text in TEXTS for word in text.replace(",", " ,").split()})
    vocabulary = {word: index for index, word in enumerate(["<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<unk>", bos_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    size = len(vocabulary)
    config = GPT2Config(
        n_layer=2, n_head=4, n_embd=32, n_positions=64, vocab_size=size, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)


with tempfile.TemporaryDirectory() as folder:
    try:
        loaded = load_any(sys.argv[1] if len(sys.argv) > 1 else "gpt2")
    except InfoFlowError as error:
        print(f"{error}\n\nGoing on with a small random model.\n")
        small_model(folder)
        loaded = load_any(folder)
model = loaded.model
print(loaded.description)

# What can be asked of it is found out by running it.
found = inspect_model(model, model.to_tokens(TEXTS[0]))
print(found.to_frame().to_string(index=False))
print("\n".join(found.problems()) or "every probe can be used", "\n")

# Texts of different lengths: padding takes part in nothing.
positions, recovery = run_probes(
    model,
    TEXTS,
    [PositionsProbe((1, 2), spread=True), RecoveryProbe((1, 2), ridge="gcv", controls=("self",))],
    progress=False,
)
print(positions.summary(skip=1).head(8).to_string(index=False, float_format="{:.2f}".format))
best = recovery.to_frame().sort_values("fvu").head(3)
print("\nbest recovered (five texts say little; give a hundred):")
print(best[["layer", "head", "rank", "fvu", "fvu_self"]].to_string(index=False), "\n")

# What does the last token depend on, and is it what the heads' first choices allow?
text = TEXTS[0]
chosen, influence = run_probes(
    model,
    text,
    [PositionsProbe(), JacobianInfluence("resid_post", positions=(-1,), estimate=16)],
    progress=False,
)
agreement = compare(propagate(chosen.argmax), influence)
scores = influence.influence[-1, 0, 0]
order = scores.argsort(descending=True)[:5].tolist()
tokens = model.to_str_tokens(text)
print("most influence on the last state:", ", ".join(f"{tokens[i]!r} ({i})" for i in order))
print(f"share of influence inside the predicted set: {agreement.cls.influence_inside:.2f}")
