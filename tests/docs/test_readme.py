"""README.md, and the page of its second example, against transformers and PyTorch alone."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, GPT2LMHeadModel
from transformers.models.gpt2 import modeling_gpt2

from infoflow_lens import flow
from infoflow_lens.models.shipped import find_package_folder
from tests.reference import real_models
from tests.reference.path_patching import TwoTexts

ROOT = Path(__file__).parents[2]
STATES = ROOT / "docs" / "how-to" / "what-a-state-holds.md"
TEXT = " ".join((ROOT / "README.md").read_text("utf-8").split())
OF_STATES = " ".join(STATES.read_text("utf-8").split())
STATE, PAREN, NAME = 23, 5, 6  # the last position; the first "(", and "name" behind it


@pytest.fixture(scope="module")
def shown():
    code = re.search(r'code = "(.*?)"\n', STATES.read_text("utf-8"))
    assert code is not None
    text = code[1].replace("\\n", "\n")
    folder = find_package_folder("stdlib-2l")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager").eval()
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    assert ids[0, 0] == tokenizer.bos_token_id
    assert tokenizer.convert_ids_to_tokens(ids[0].tolist())[PAREN : NAME + 1] == ["(", "name"]
    return text, model, ids


def measured(model, ids):
    """Norms of the last state's derivatives by tokens [pos]; attention [layer, head, ...]."""
    states = {}
    keep = model.transformer.h[-1].register_forward_hook(
        lambda module, inputs, output: states.update(last=output)
    )
    embedded = model.transformer.wte(ids).detach().requires_grad_()
    attention = model.transformer(inputs_embeds=embedded, output_attentions=True).attentions
    keep.remove()
    last = states["last"][0] if isinstance(states["last"], tuple) else states["last"]
    rows = [
        torch.autograd.grad(number, embedded, retain_graph=True)[0][0]
        for number in last.reshape(ids.shape[1], -1)[STATE]
    ]
    return torch.stack(rows).square().sum((0, 2)).sqrt(), torch.stack(attention)[:, 0].detach()


@pytest.mark.slow
def test_its_example(shown, monkeypatch):
    text, model, ids = shown
    influence, attention = measured(model, ids)
    share = influence[:STATE] / influence[:STATE].sum()
    held = sorted(flow("stdlib-2l", text, progress=False).sets.of(1, 0, STATE) - {STATE})
    n = len(held)

    def first(scores):
        return float(share[scores[:STATE].topk(n).indices].sum())

    half = attention.mean(1) / 2 + torch.eye(len(ids[0])) / 2
    rollout, layer_1 = (half[1] @ half[0])[STATE], attention[1, :, STATE].amax(0)
    assert f"{share[held].sum():.0%} of the influence of other tokens lies inside" in OF_STATES
    assert f"A random set of the same size would hold {n / STATE:.0%}; as many tokens" in OF_STATES
    found = {f"{first(scores):.0%}" for scores in (rollout, layer_1, influence)}
    assert len(found) == 1
    assert f"ranks first hold {found.pop()}, the most that a set of that size can hold" in OF_STATES
    assert round(float(attention[1, :, STATE, PAREN].max()), 2) == 0.05
    assert round(float(attention[0, :, NAME, PAREN].max()), 2) == 0.99
    assert "(at most .05 of a head's attention)" in OF_STATES
    assert "layer 0 has put the token before (.99)" in OF_STATES
    rank = int((share > share[PAREN]).sum()) + 1
    says = f"`(` has {share[PAREN]:.1%} of the influence of other tokens, rank {rank} of {STATE}"
    assert says in OF_STATES

    whole = modeling_gpt2.eager_attention_forward

    def cut(module, query, key, value, mask, **settings):
        output, weights = whole(module, query, key, value, mask, **settings)
        if module.layer_idx == 1:
            weights = weights.clone()
            weights[:, :, STATE, NAME] = 0
            output = (weights @ value).transpose(1, 2)
        return output, weights

    monkeypatch.setattr(modeling_gpt2, "eager_attention_forward", cut)
    left = measured(model, ids)[0][PAREN] / influence[PAREN]
    assert f"and {left:.0%} of that is left when layer 1's edge to `name` is cut" in OF_STATES


def test_what_it_says_of_rollout():
    """By the table of the study, of the five models of ours."""
    table = (ROOT / "docs/results/language_model/graded_sets.md").read_text("utf-8")

    def row(name):
        rows = re.findall(rf"^\| \**{re.escape(name)}\** \|(.*;.*)\|$", table, re.M)[:2]
        return [cell for line in rows for cell in line.split("|")[:5]]

    rollout, graded, plain = map(
        row, ("attention rollout", "graded: norm, product", "first choices")
    )
    assert len(rollout) == len(graded) == len(plain) == 10
    assert not [cell for cell in rollout if "ahead" in cell]

    def share(cell):
        return float(cell.split(";")[1].split()[0])

    def rank(cell):
        return float(cell.split(";")[0])

    assert all(rank(a) > rank(b) for a, b in zip(rollout, plain, strict=True))
    ahead = [
        share(a) - share(b) for a, b in zip(rollout, graded, strict=True) if share(a) > share(b)
    ]
    assert f"ahead by up to .{round(1000 * max(ahead)):03d} in" in OF_STATES
    assert len(ahead) == 3
    assert "in three of ten comparisons" in OF_STATES


def test_it_is_read_in_a_few_minutes():
    assert len((ROOT / "README.md").read_text("utf-8").split()) < 900


@pytest.mark.slow
def test_what_it_says_of_smollm2():
    """By exchanges in the plain model of transformers, with hooks of torch alone."""
    store = "When Mary and John went to the store, {} gave a drink to"
    assert f'"{store.format("John")}"' in TEXT
    model, tokenizer = real_models.load("smollm2", "eager")
    ids = [
        tokenizer(store.format(name), return_tensors="pt")["input_ids"][0]
        for name in ("John", "Mary")
    ]
    mary, john = (tokenizer(word)["input_ids"][0] for word in (" Mary", " John"))
    plain = TwoTexts(model, *ids, lambda logits: (logits[-1, mary] - logits[-1, john]).double())
    assert "falls from {:+.2f} to {:+.2f}".format(*map(float, plain.values)) in TEXT
    word, end = (-1, -1, 9), len(ids[0]) - 1
    assert tokenizer.decode(ids[0][9]) == " John"
    mover, later = (23, 3, end), (29, 1, end)
    paths = [(word, mover, "value"), (mover, None, "answer"), (mover, later, "value"),
             (later, None, "answer")]  # fmt: skip
    kept, lost = plain.share(paths), plain.share(paths, swap=True)
    assert f"Four paths keep {kept:.0%} of that" in TEXT
    assert f"cut, they lose {lost:.0%}" in TEXT

    with torch.no_grad():
        found = model(ids[0][None], output_attentions=True, output_hidden_states=True)
    chance = found.logits[0, -1].softmax(-1)[mary]
    assert found.logits[0, -1].argmax() == mary
    assert f"SmolLM2 says Mary ({chance:.0%})" in TEXT
    states = []
    keep = model.model.norm.register_forward_pre_hook(lambda module, args: states.append(args[0]))
    with torch.no_grad():
        model(ids[0][None])
    keep.remove()
    last = states[0][0, -1]
    scale = (last.square().mean() + model.config.rms_norm_eps).sqrt()
    toward = (model.lm_head.weight[mary] - model.lm_head.weight[john]) * model.model.norm.weight

    def look(layer, head, position):
        """How much a head looks at a position from the end, and what it writes from there."""
        run = plain._run(plain.embedded[0])
        d_head = model.config.head_dim
        group = head * model.config.num_key_value_heads // model.config.num_attention_heads
        value = run["v"][layer][position, group * d_head : (group + 1) * d_head]
        output = model.model.layers[layer].self_attn.o_proj.weight
        weight = found.attentions[layer][0, head, -1, position]
        wrote = output[:, head * d_head : (head + 1) * d_head] @ (weight * value)
        return f"{weight:.2f}".lstrip("0"), f"{wrote @ toward / scale:+.2f}"

    with torch.no_grad():
        looks, writes = look(23, 3, 9)
        assert f"at the second `John` ({looks}) and writes *against* the name" in TEXT
        assert f"that it looks at ({writes})" in TEXT
        looks, writes = look(23, 0, 1)
        assert f"which looks at `Mary` ({looks}) and writes it ({writes})" in TEXT
