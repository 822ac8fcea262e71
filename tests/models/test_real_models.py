"""Real models, opened, against plain transformers and what is known of them (`make models`)."""

import re

import pytest
import torch
from scipy.stats import spearmanr

from infoflow_lens import (
    InfoFlowError,
    JacobianInfluence,
    PositionsProbe,
    RecoveryProbe,
    ask,
    open_model,
    run_probes,
)
from infoflow_lens.hooks import AttentionWeight, EmbeddingCosine, measure_mechanisms
from tests.reference import real_models

pytestmark = pytest.mark.slow  # and skipped, with the reason, where `make models` has not run

STORE = "When Mary and John went to the store, John gave a drink to"
TEXTS = {
    "smollm2": [STORE, "The capital of France is"],
    "minilm": ["a man is eating food", "the cat sat on the mat and slept for a long while"],
    "rxnmapper": ["CCO.CC(=O)O>>CC(=O)OCC", "CC(C)S.CN(C)C=O.Fc1cccnc1F>>CC(C)Sc1ncccc1F"],
    "antiberty": ["QVQLQQSGAELARPGASVK", "EVQLVESGGGLVQPGGSLRLSCAAS"],
}
SIZES = {"smollm2": (30, 9, 3), "minilm": (6, 12, 12), "rxnmapper": (12, 8, 8),
         "antiberty": (8, 8, 8)}  # fmt: skip


@pytest.fixture(scope="module")
def load():
    loaded = {}

    def get(name, how="eager"):
        if (name, how) not in loaded:
            loaded.clear()  # one at a time
            loaded[name, how] = real_models.load(name, how)
        return loaded[name, how]

    return get


def batch_of(tokenizer, name):
    """Two texts, padded."""
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return dict(tokenizer(TEXTS[name], return_tensors="pt", padding=True))


@pytest.mark.parametrize("how", ["eager", "sdpa"])
@pytest.mark.parametrize("name", SIZES)
def test_padded_batches_show_what_transformers_gives(load, name, how):
    plain, tokenizer = load(name)
    call = batch_of(tokenizer, name)
    with torch.no_grad():
        expected = plain(**call, output_attentions=True, output_hidden_states=True)
    model, _ = load(name, how)
    forwards = []
    handle = model.register_forward_pre_hook(lambda module, args: forwards.append(module))
    named = open_model(model, tokenizer)
    handle.remove()
    assert len(forwards) == 2
    n_layers, n_heads, n_kv_heads = SIZES[name]
    assert len(named.blocks) == n_layers
    assert (named.cfg.n_heads, named.cfg.n_key_value_heads) == (n_heads, n_kv_heads)
    output, cache = named.run_with_cache(**call)
    real = call["attention_mask"].bool()
    open_keys = real[:, None, None].expand(-1, 1, real.shape[1], -1)
    if name == "smollm2":
        open_keys = open_keys & torch.ones(open_keys.shape[-2:], dtype=bool).tril()
    assert torch.allclose(output[real], expected[0][real], atol=1e-4)
    for layer in range(n_layers):
        gap = cache["pattern", layer] - expected.attentions[layer]
        assert (gap * real[:, None, :, None]).abs().max() < 1e-5
        state = expected.hidden_states[layer]
        gap = (cache["resid_pre", layer] - state)[real].abs().max()
        assert gap < 1e-5 * state.abs().max()
        visible = (cache["attn_scores", layer] > -torch.inf) & real[:, None, :, None]
        assert torch.equal(visible, (open_keys & real[:, None, :, None]).expand_as(visible))


def test_smollm2_knows_who_got_the_drink(load):
    model, tokenizer = load("smollm2", "sdpa")
    named = open_model(model, tokenizer)
    logits, cache = named.run_with_cache(STORE)
    mary, john = (named.to_single_token(name) for name in (" Mary", " John"))
    assert logits[0, -1].softmax(-1)[mary] > 0.8
    parts, labels = cache.decompose_resid(return_labels=True)
    shares = cache.logit_attrs(parts, torch.tensor(mary), torch.tensor(john))[:, 0, -1]
    assert torch.allclose(shares.sum(), logits[0, -1, mary] - logits[0, -1, john], atol=1e-3)
    assert len(labels) == 61
    heads, labels = cache.stack_head_results(-1, return_labels=True)
    direct = cache.logit_attrs(heads, torch.tensor(mary), torch.tensor(john))[:, 0, -1]
    assert labels[int(direct.argmax())] == "L23H3"  # it looks at John, and writes against him
    with pytest.raises(InfoFlowError, match="norms of layer 3 are not among the hook points"):
        cache.decompose_resid(3, apply_ln=True)
    assert tokenizer.decode(named("The capital of France is")[0, -1].argmax()).strip() == "Paris"


def test_heads_of_minilm_look_one_back_and_one_ahead(load):
    model, tokenizer = load("minilm")
    named = open_model(model, tokenizer)
    texts = TEXTS["minilm"] + ["bread is made of flour, water and salt, and baked in an oven"]
    rows = [named.to_tokens(text)[0] for text in texts]
    (found,) = run_probes(named, rows, [PositionsProbe()], progress=False)
    for (layer, head), step in {(0, 2): -1, (1, 8): 1}.items():
        hits, n = 0, 0
        for index, row in enumerate(rows):
            first = found.positions[layer][index, head, 1 : len(row) - 1, 0]
            hits += int((first == torch.arange(1, len(row) - 1) + step).sum())
            n += len(row) - 2
        assert hits / n > 0.8
    pair = tokenizer("a man is eating", "someone eats food", return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(named(**pair), model(**pair)[0])
    assert not torch.equal(named(pair["input_ids"]), named(**pair))  # token types count


# reactions whose atoms are numbered by their products', written as RXNMapper's makers give them
REACTIONS = [
    "[CH3:1][CH:2]([CH3:3])[SH:4].CN(C)C=O.F[c:5]1[n:6][cH:7][cH:8][cH:9][c:10]1[F:11]>>"
    "[CH3:1][CH:2]([CH3:3])[S:4][c:5]1[n:6][cH:7][cH:8][cH:9][c:10]1[F:11]",
    "Br[CH2:2][CH3:1].[Na+].[O-:3][CH2:4][CH3:5]>>[CH3:1][CH2:2][O:3][CH2:4][CH3:5]",
]


def test_head_5_of_rxnmapper_maps_atoms(load):
    """It looks from an atom of the product at the same atom among what reacts."""
    model, tokenizer = load("rxnmapper", "sdpa")
    named = open_model(model, tokenizer)
    hits, n = 0, 0
    for reaction in REACTIONS:
        parts = re.findall(real_models.SMILES, reaction)
        numbers = [int(p[p.index(":") + 1 : -1]) if ":" in p else None for p in parts]
        symbols = [re.sub(r"^\[([A-Z]?[a-z]?)H?\d?:\d+\]$", r"\1", p) for p in parts]
        symbols = ["[O-]" if s == "[O-:3]" else s for s in symbols]
        ids = tokenizer.convert_tokens_to_ids(["[CLS]", *symbols, "[SEP]"])
        assert tokenizer.unk_token_id not in ids
        middle = parts.index(">>")
        _, cache = named.run_with_cache(torch.tensor([ids]))
        pattern = cache["pattern", 10][0, 5]
        sources = [i for i in range(middle) if symbols[i][0].isalpha() or symbols[i][0] == "["]
        for place in range(middle + 1, len(parts)):
            if numbers[place] is not None:
                best = max(sources, key=lambda i, row=pattern[place + 1]: float(row[i + 1]))
                hits, n = hits + (numbers[best] == numbers[place]), n + 1
    assert n == 16
    assert hits / n > 0.8


@pytest.mark.parametrize("name", ["minilm", "rxnmapper", "antiberty"])
def test_measures_of_encoders(load, name):
    """Ranks, recovery, influence and mechanisms, against the model's own weights and autograd."""
    model, tokenizer = load(name, "sdpa")
    named = open_model(model, tokenizer)
    rows = [named.to_tokens(text)[0] for text in TEXTS[name]]
    probes = [
        PositionsProbe(ranks=(1,)),
        RecoveryProbe((1,), ridge=0.1),
        AttentionWeight(),
        JacobianInfluence("resid_post", positions=(-1,), layers=(1,)),
    ]
    positions, _, _, influence = run_probes(named, rows, probes, eval_every=2, progress=False)
    with torch.no_grad():
        expected = real_models.load(name)[0](rows[1][None], output_attentions=True)
    for layer, weights in enumerate(expected.attentions):
        found = positions.positions[layer][1, :, : len(rows[1]), 0]
        chosen = weights[0].gather(-1, found[..., None].long())[..., 0]
        assert torch.allclose(chosen, weights[0].amax(-1), atol=1e-6)  # ties may differ
    _, cache = named.run_with_cache(rows[1][None])

    def last_state(enters):
        state = []
        hooks = [
            ("blocks.0.hook_resid_pre", lambda t, hook: enters[None]),
            ("blocks.1.hook_resid_post", lambda t, hook: state.append(t)),
        ]
        named.run_with_hooks(rows[1][None], fwd_hooks=hooks)
        return state[0][0, -1]

    enters = cache["resid_pre", 0][0]
    direction = torch.randn(enters.shape, generator=torch.Generator().manual_seed(0)) * 1e-2
    step = (last_state(enters + direction) - last_state(enters - direction)) / 2
    sizes = influence.influence[-1, 1, 0, : len(rows[1])]
    bound = (sizes * direction.norm(dim=-1)).sum()
    assert 0 < step.norm() < 1.05 * bound


def test_mechanisms_of_an_encoder(load):
    model, tokenizer = load("minilm", "sdpa")
    named = open_model(model, tokenizer)
    rows = [named.to_tokens(text)[0] for text in TEXTS["minilm"]]
    found = measure_mechanisms(named, rows, progress=False)
    assert len(found.to_frame()) >= 72


PAIRS = [
    ("A woman is playing the violin in the park.", "Somebody plays music outside."),
    ("The company lost money because of the strike.", "A walkout made the firm less profitable."),
    ("My cat sleeps on the warm radiator all day.", "The kitten naps near a heater."),
    ("Heavy rain flooded several streets last night.", "Water covered the roads after the storm."),
]


def test_what_makes_two_sentences_near_is_what_leaving_it_out_takes_away(load):
    plain, tokenizer = load("minilm")

    def embed(ids):
        with torch.no_grad():
            return plain(input_ids=torch.tensor([ids])).last_hidden_state.mean(dim=1)[0]

    orders = []
    for text, other in PAIRS:
        ids, to = tokenizer(text)["input_ids"], embed(tokenizer(other)["input_ids"])
        near = lambda kept, to=to: float(torch.cosine_similarity(embed(kept), to, dim=0))  # noqa: E731
        inner = range(1, len(ids) - 1)  # [CLS] and [SEP] stay
        without = [near(ids[:i] + ids[i + 1 :]) - near(ids) for i in inner]
        named = open_model(plain, tokenizer)
        found = ask(named, text, readout=EmbeddingCosine(to), progress=False)
        assert found.value == pytest.approx(near(ids), abs=1e-4)
        effects = found.to_frame("tokens")["effect"].to_numpy()[list(inner)]
        orders.append(spearmanr(effects, without).statistic)
    assert min(orders) > 0.2
    assert sum(orders) / len(orders) > 0.6
