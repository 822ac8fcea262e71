"""Questions of a model, beside exchanges in plain transformers."""

import copy
import math
import random
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from infoflow_lens import InfoFlowError
from infoflow_lens.foundation.saving import state_from_bytes, state_to_bytes
from infoflow_lens.hooks.answer import measure, steps
from infoflow_lens.hooks.answer import paths as paths_module
from infoflow_lens.hooks.answer.measure import choose_likely_text, measure_answer
from infoflow_lens.hooks.answer.paths import (
    Node,
    Path,
    connect,
    cut_paths,
    cut_together,
    find_circuit,
    share,
)
from infoflow_lens.hooks.answer.question import Question
from infoflow_lens.hooks.answer.result import KINDS, ORDERS, _percent
from infoflow_lens.hooks.answer.steps import (
    _products,
    guess_tokens,
    mean_and_error,
    measure_states,
    measure_tokens,
    measure_units,
)
from infoflow_lens.hooks.answer.streams import Streams
from infoflow_lens.hooks.interventions.kept import KeptNumbers
from infoflow_lens.hooks.readouts import (
    EmbeddingCosine,
    FunctionOfOutput,
    LogitDifference,
    LogProbability,
    Readout,
    logits_of,
)
from infoflow_lens.hooks.shares import measure_shares
from infoflow_lens.models.loading import load_any
from infoflow_lens.models.named import open_model
from tests.conftest import some_of, spread
from tests.reference import contributions, families, zoo
from tests.reference.path_patching import TwoTexts
from tests.versions import needs_version_4

ANSWER, AGAINST = 9, 23
READOUT = LogitDifference(ANSWER, AGAINST)
# whose blocks see positions through something else than what enters them
WITHOUT_PATHS = dict.fromkeys(("bloom", "falcon"), "gives something else at a single position")


opened = cache(lambda name: open_model(zoo.build(name)))  # which no question changes


def two_texts(length=6, changed=(2,)):
    clean = zoo.tokens(1, length, seed=5)[0]
    other = clean.clone()
    for position in changed:
        other[position] = 4 + (other[position] + 7 - 4) % (zoo.N_VOCAB - 4)
    return clean, other


def difference(logits):
    return (logits[-1, ANSWER] - logits[-1, AGAINST]).double()


@pytest.fixture(scope="module")
def plain():
    return TwoTexts(zoo.build("llama"), *two_texts(), difference)


@pytest.fixture(scope="module")
def question():
    return Question(opened("llama"), *two_texts(), READOUT, batch_size=3)


@pytest.fixture(scope="module")
def units(question):
    return measure_units(question)


def near(value):
    return pytest.approx(value, abs=1e-4, rel=1e-4)


# What is printed as an effect is one


def test_the_two_runs_are_those_of_the_plain_model(question, plain):
    assert (question.clean.value, question.other.value) == near([float(v) for v in plain.values])
    assert question.changed == [2]


def test_effects_of_heads_and_mlps_are_those_of_the_plain_model(units, plain):
    """But for MLP 0, which is left out."""
    for (layer, head), effect in zip(units.units, units.effect.tolist(), strict=True):
        if (layer, head) == (0, -1):
            assert effect != effect
        else:
            expected = plain.of_mlp(layer) if head < 0 else plain.of_head(layer, head)
            assert effect == near(expected)


@pytest.mark.parametrize(
    ("kind", "name"), [("jamba", "mamba"), ("qwen3_next", "linear_attn"), ("lfm2", "conv")]
)
def test_what_runs_in_the_place_of_attention_is_measured_as_heads_are(kind, name):
    """Such models were refused."""
    model, texts, kept = families.build(kind), two_texts(), {}
    mixer = getattr(model.model.layers[0], name)

    @torch.no_grad()
    def run(text, hook):
        handle = mixer.register_forward_hook(hook)
        logits = model(text[None]).logits[0]
        handle.remove()
        return difference(logits)

    before, _ = (run(text, lambda _, args, out, n=n: kept.update({n: out}))
                 for n, text in enumerate(texts))  # fmt: skip
    after = run(texts[0], lambda _, args, out: kept[1])
    found = measure_answer(open_model(model), *texts, READOUT, progress=False, quick=True)
    table = found.to_frame("heads").set_index("name")["effect"]
    assert table["mixer 0"] == near(float(after - before))
    assert not table.filter(like="MLP 1").empty
    assert "head mixer" not in found.describe_units()
    with pytest.raises(
        InfoFlowError, match=rf"blocks.0.attn.hook_z is not there, .* it runs {name}"
    ):
        Streams(Question(open_model(model), *texts, READOUT))


def test_strips_are_those_of_the_plain_model(question, plain):
    strips = measure_states(question, tolerance=0.0)
    assert [*strips] == [0, 1, 2]
    for layer in (0, 1):
        expected = [plain.of_state(layer, position) for position in range(6)]
        assert strips[layer].tolist() == near(expected)
    assert strips[0].tolist()[2] == near(float(plain.values[1] - plain.values[0]))
    assert strips[2].tolist() == near([0] * 5 + [-question.gap])


def test_strips_of_units_are_those_of_the_plain_model(plain):
    """The states of all tokens of a unit are exchanged at once."""
    spans = [(0, 1), (1, 4), (4, 6)]
    question = Question(opened("llama"), *two_texts(), READOUT, spans=spans)
    strips = measure_states(question, tolerance=0.0)
    for layer in (0, 1):
        other = plain.states[1][layer]
        expected = [
            plain.effect(states={layer: {at: other[at] for at in range(*span)}}) for span in spans
        ]
        assert strips[layer].tolist() == near(expected)


def test_effects_of_tokens_are_those_of_the_plain_model(question, plain):
    found = measure_tokens(question, seed=3)
    changes, (mean, error) = found.changes.tolist(), mean_and_error(found.changes)
    for position, donors in enumerate(found.donors.tolist()):
        expected = [plain.of_token(position, donor) for donor in donors if donor >= 0]
        assert changes[position][: len(expected)] == near(expected)
        assert float(mean[position]) == near(sum(expected) / len(expected))
        spread = torch.tensor(expected).std() / len(expected) ** 0.5
        assert float(error[position]) == near(float(spread))
        assert question.clean.tokens[0, position] not in donors
    replaced = question.replace_tokens().tolist()
    assert replaced == near([0, 0, plain.of_token(2, int(two_texts()[1][2])), 0, 0, 0])


@pytest.mark.parametrize(("n_ids", "n_drawn"), [(zoo.N_VOCAB, 4), (7, 4), (4, 3)])
def test_no_guess_is_drawn_twice(monkeypatch, n_ids, n_drawn):
    """A word that is drawn again says nothing new; also where one has all the chance."""
    text = torch.arange(6) % 3 + 1
    question = Question(opened("llama"), text, text.flip(0), READOUT, 16)
    guesses = torch.zeros(6, n_ids)
    guesses[:, 0] = 1.0
    monkeypatch.setattr(steps, "guess_tokens", lambda _: guesses)
    for position, row in enumerate(measure_tokens(question).donors.tolist()):
        drawn = [token for token in row if token >= 0]
        assert len(set(drawn)) == len(drawn) >= n_drawn
        assert int(text[position]) not in drawn
        assert 0 in drawn


def test_a_mean_counts_each_word_of_its_row_once():
    found = answer()
    for number, words in enumerate(found.replacements):
        effects = found.replacement_effects[number, : len(words)].numpy()
        assert float(found.token_mean[number]) == near(effects.mean())
        assert float(found.token_error[number]) == near(effects.std(ddof=1) / len(words) ** 0.5)
    assert found.to_frame("tokens")["replacements"].tolist() == [*map(len, found.replacements)]


def test_what_was_put_in_a_place_is_kept_with_what_it_did(plain):
    """Each other text that was measured, also the one that is compared with."""
    found = answer()
    rows = found.to_frame("replacements")
    assert set(rows["position"]) == set(range(6))
    assert two_texts()[1][2] in [int(word) for word in found.replacements[2]]
    with torch.no_grad():
        guesses = zoo.build("llama")(two_texts()[0][None]).logits[0].softmax(-1)
    for position, words in enumerate(found.replacements):
        effects = found.replacement_effects[position]
        assert effects[: len(words)].tolist() == near(
            [plain.of_token(position, int(word)) for word in words]
        )
        assert effects[len(words) :].isnan().all()
        assert len(set(words)) == len(words) >= 2
        chances = [float(guesses[position - 1, int(word)]) for word in words]
        assert chances == sorted(chances, reverse=True) or not position
    expected = [found.value + effect for effect in rows["effect"]]
    assert rows["readout"].tolist() == expected


def test_answers_are_as_probable_as_the_plain_model_finds_them():
    found = answer()
    with torch.no_grad():
        logits = zoo.build("llama")(torch.stack(two_texts())).logits[:, -1]
    assert found.answers == (str(ANSWER), str(AGAINST))
    expected = logits.double().softmax(-1)[:, [ANSWER, AGAINST]]
    torch.testing.assert_close(found.answer_chances, expected, atol=1e-6, rtol=1e-4)
    assert f"{ANSWER} has {expected[0, 0]:.0%}"[:4] in found.summary()
    several = measured(LogitDifference((ANSWER, 11), AGAINST), two_texts())
    expected = logits.double().softmax(-1)[:, [ANSWER, 11]].sum(1)
    torch.testing.assert_close(several.answer_chances[:, 0], expected, atol=1e-6, rtol=1e-4)
    assert measured(LogProbability(ANSWER), two_texts()).answers == ()


@pytest.mark.parametrize("kind", ["single_label_classification", "multi_label_classification"])
def test_classes_that_are_each_true_or_not_have_chances_of_their_own(kind):
    """They were said to be as probable as if they excluded one another."""
    from transformers import BertForSequenceClassification

    torch.manual_seed(1)
    config = zoo.build("bert").config
    config.num_labels, config.problem_type = 3, kind
    plain = BertForSequenceClassification(config).eval()
    with torch.no_grad():
        plain.classifier.weight.mul_(60)
        logits = plain(torch.stack(two_texts())).logits.double()
    several = kind.startswith("multi")
    expected = logits.sigmoid() if several else logits.softmax(-1)
    order = logits[0].argsort(descending=True).tolist()
    model = open_model(plain)
    read = LogitDifference(order[0], order[1])
    found = measure_answer(model, *two_texts(), read, progress=False, quick=True)
    torch.testing.assert_close(found.answer_chances, expected[:, order[:2]], atol=1e-5, rtol=1e-4)
    assert found.chance == near(float(expected[0].max()))
    assert ("odds" in found.describe_readout()) == several
    assert ("as probable as" in found.describe_readout()) != several
    both = LogitDifference(order[:2], order[2])
    together = measure_answer(model, *two_texts(), both, progress=False, quick=True)
    if several:  # how probable it is that one of two is true was said to be their sum
        assert together.answers == ()
        assert "has" not in together.summary()
        with pytest.raises(InfoFlowError, match="classes are each true or not"):
            LogProbability(1).bind(model)
    else:
        chance = float(expected[0, order[:2]].sum())
        assert float(together.answer_chances[0, 0]) == near(chance)
        assert LogProbability(1).bind(model).answer == (1,)


@pytest.mark.parametrize("place", [5, 2])
def test_an_answer_says_when_the_last_word_was_replaced(monkeypatch, place):
    """By the other text that is chosen; what one gives is one's own."""

    def choose(question, tokens):
        return two_texts(changed=(place,))[1], "chosen"

    monkeypatch.setattr(measure, "_choose_text", choose)
    said = " ".join(measured(READOUT, (two_texts()[0], None), quick=True).notes)
    assert ("the word that was replaced is the last one" in said) == (place == 5)
    pairs = [(0, 2), (2, 4), (4, 6)]
    said = " ".join(measured(READOUT, (two_texts()[0], None), quick=True, spans=pairs).notes)
    assert ("the last one" in said) == (place == 5)
    given = measured(READOUT, two_texts(changed=(5,)), quick=True)
    assert "the last one" not in " ".join(given.notes)


def test_how_sure_an_answer_is_is_said_of_what_was_measured():
    mean = torch.tensor([0.1, -0.2, -3.0, 0.0, -2.9, 0.3]).double()
    found = answer()
    effects = torch.where(found.replacement_effects.isfinite(), mean[:, None], torch.nan)
    found = replace(
        found, kept=0.81, lost=0.42, random=(0.0, 0.3, 0.1), forwards=77.0,
        places=torch.tensor([[-1, -1, 2, -1, -1, -1, 3]] * 2),
        token_mean=mean, replacement_effects=effects,
        token_error=torch.tensor([0.01] * 6).double(),
    )  # fmt: skip
    said = " ".join(found.describe_certainty())
    assert "keeps 81%: yes. Our bar is 70% of the difference" in said
    assert "paths were added until it was reached" in said
    assert "lost is 42%: not by our bar" in said
    below = replace(found, lost=0.6996)  # 70% is the bar, which it does not reach
    assert "lost is 69.9%: not by our bar" in " ".join(below.describe_certainty())
    assert "cut, they lose 69.9%" in below.summary()
    assert (
        "Of 3 draws of 2 paths at random the median one keeps 10% of the difference, the best 30%"
        in said
    )
    tokens, n = found.tokens, [len(words) for words in found.replacements]
    assert (
        f"{tokens[2]}@2 (-3.00 ± 0.01 by {n[2]} words), "
        f"then {tokens[4]}@4 (-2.90 ± 0.01 by {n[4]} words). That order is clear" in said
    )
    assert "77 passes" in said
    said = found.describe_tokens()
    assert f"goes from {found.value:+.2f} to {found.other_value:+.2f} with" in said
    assert (
        f"By other words in its place {tokens[2]}@2 matters most, and speaks for the answer" in said
    )
    assert f"then {tokens[4]}@4 ({found.value - 2.9:+.2f}, for), {tokens[5]}@5" in said
    assert found.describe_opposed_words() == f"{tokens[5]}@5 +0.30, {tokens[0]}@0 +0.10"
    open_ = replace(found, token_error=torch.tensor([0.1] * 6).double())
    assert "that order may turn" in " ".join(open_.describe_certainty())
    # two in five, or more, that say the contrary leave the direction open
    effects = effects.clone()
    effects[[2, 5], : (n[2] + 1) // 2] *= -1
    open_ = replace(found, replacement_effects=effects)
    said = open_.describe_tokens()
    assert f"{tokens[4]}@4 matters most, and speaks for the answer" in said
    assert (
        f"{tokens[2]}@2 changes it more, to {found.value - 3:+.2f}, but whether it speaks" in said
    )
    assert open_.describe_opposed_words() == f"{tokens[0]}@0 +0.10"
    assert "that order may turn" in " ".join(open_.describe_certainty())


def test_it_is_said_that_the_other_text_calls_for_neither_answer():
    found = replace(answer(), answer_chances=torch.tensor([[0.3, 0.02], [0.01, 0.04]]).double())
    words = (found.tokens[2], found.other_tokens[2], found.answers[1])
    said = (
        "neither answer is likely: what follows compares '{}' with '{}', and not with a word that"
    )
    assert f"{said} calls for {{}};".format(*words) in found.warning()
    one = replace(found, answer_chances=torch.tensor([[0.3, 0.02], [0.5, 0.04]]).double())
    assert f"{found.answers[1]} is unlikely: what follows" in one.warning()
    likely = torch.tensor([[0.3, 0.02], [0.01, 0.05]]).double()
    assert replace(found, answer_chances=likely).warning() == ""


def test_answers_that_lack_their_blank_are_told_of():
    """'P' and 'O' were compared where ' Priya' and ' Omar' were meant, without a word."""
    chances = torch.tensor([[0.01, 2e-5], [0.3, 0.3]]).double()
    found = replace(answer(), answer_chances=chances, answers=("'P'", "'O'"))
    assert found.warning() == ""  # here no token has one
    found = replace(found, tokens=("When", *(" x" for _ in found.tokens[1:])))
    assert found.warning().startswith(
        "neither answer is likely in the text ('P' 1%, 'O' below 0.01%): a word within a text "
    )
    for names in (("' P'", "'O'"), ("P", "O")):
        assert replace(found, answers=names).warning() == ""


def test_the_largest_heads_and_mlps_are_said_first():
    """By measured effects alone; what works against is named, and how many more do."""
    found = answer()
    effect = torch.full_like(found.unit_effect, torch.nan)
    units = [tuple(unit) for unit in found.units.tolist()]
    heads, mlps = ([i for i, u in enumerate(units) if (u[1] < 0) == mlp] for mlp in (False, True))
    effect[heads[:5]] = torch.tensor([-3.0, 0.1, 0.2, 2.0, 0.3]).double()
    effect[mlps[1]] = 0.4
    looked = torch.tensor([units[heads[0]], units[heads[3]]])
    looks = torch.zeros(2, 2, 6).double()
    looks[:, :, 2] = 0.75
    writes = torch.zeros(2, 2, 6).double()
    writes[1, 0, 2] = -1.25
    found = replace(found, unit_effect=effect, looked=looked, looks=looks, writes=writes)
    said = found.describe_units()
    first, second = ("{}.{}".format(*units[heads[i]]) for i in (0, 3))
    place, read = found._word(2), found._word(found.read_at)
    for name, size, writes_ in ((first, "-3.00", "+0.00"), (second, "+2.00", "-1.25")):
        look = f"from {read} it looks at {place} (0.75) and writes {writes_} from there"
        assert f"head {name} ({size}: {look})" in said
    # of each kind, as an MLP may stand beside larger heads that are not named
    assert said.startswith(f"The largest effects: of heads, head {first} (-3.00: ")
    assert f"from there); of MLPs, MLP {units[mlps[1]][0]} (+0.40). Each number" in said
    assert said.count("head ") == 2
    assert found.order_looks() == [1, 0]  # the first writes nothing here
    places = torch.tensor([[*units[heads[0]], found.read_at, -1, -1, -1, 3]])
    assert replace(found, places=places).order_looks() == [0, 1]  # but stands on a path
    assert found.describe_opposition().endswith("+0.30, and 2 more")
    assert "elsewhere" not in found.describe_looks()
    looks[0, 1, 3] = 0.8
    elsewhere = f"; elsewhere in the other text: {first} at {found._word(3, other=True)}"
    assert replace(found, looks=looks.clone()).describe_looks().endswith(elsewhere)


def test_estimates_of_paths_have_the_sign_of_their_effects():
    """By how the score changes, as all that is measured."""
    paths = torch.tensor([[-1, -1, 2, -1, -1, -1, 3], [0, 1, 2, -1, -1, -1, 3]])
    columns = {"path_effect": [-1.9, 0.2], "path_worth": [2.0, -0.3], "path_cost": [0.5, 0.1]}
    columns = {name: torch.tensor(values).double() for name, values in columns.items()}
    found = replace(answer(), value=3.0, other_value=1.0, lost=1.3, places=paths, **columns)
    assert found.to_frame("paths")["estimate"].tolist() == near([-2.0, 0.3])
    # the other text has the higher score: what carries the difference holds it down
    higher = replace(found, other_value=5.0)
    assert higher.to_frame("paths")["estimate"].tolist() == near([2.0, -0.3])
    assert "cut, they lose 130%: the score falls below that of the other text." in found.summary()
    for kept, lost, what in ((0.7, 0.7, "decide between the two"), (0.69, 1.0, "carry a part of"),
                             (1.0, 0.03, "carry a part of")):  # fmt: skip
        compared = replace(found, kept=kept, lost=lost).summary()
        assert f" 2 paths {what}" in compared  # 3% were said to decide
    for kept, no_more in ((-2.0, True), (0.4, True), (0.6, False)):
        compared = replace(found, kept=kept, random=(0.1, 0.5, 0.2)).summary()
        assert ("They explain no more than random paths do." in compared) is no_more


def test_guesses_are_the_models_own_without_what_stands_there(question):
    guesses = guess_tokens(question)
    with torch.no_grad():
        logits = zoo.build("llama")(two_texts()[0][None]).logits[0]
    expected = logits.softmax(-1)[1]
    expected[two_texts()[0][2]] = 0
    torch.testing.assert_close(guesses[2], expected, atol=1e-5, rtol=1e-4)


def test_blocks_before_a_change_do_not_run_and_nothing_else_changes(question):
    rows = [[question.exchange(question.z(1), question.find_head(1, head))] for head in range(4)]
    calls = []
    handles = [
        block.self_attn.register_forward_hook(lambda *given, layer=layer: calls.append(layer))
        for layer, block in enumerate(question.model.original_model.model.layers)
    ]
    found = question.measure(rows)
    for handle in handles:
        handle.remove()
    assert calls == [1, 1]  # two batches
    blocks, question._starts.blocks = question._starts.blocks, []
    whole = question.measure(rows)
    question._starts.blocks = blocks
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)
    assert not any("forward" in vars(m) for m in question.model.original_model.modules())


@pytest.mark.parametrize("name", zoo.some_families(zoo.FAMILIES, zoo.FEW))
def test_positions_before_a_change_do_not_run_and_nothing_else_changes(name):
    """But for an encoder, whose states before a change are others."""
    clean, other = two_texts(7, changed=(3,))
    read = LogitDifference(ANSWER, AGAINST, 6 if name == "bert" else -1)
    model = open_model(zoo.build(name))
    question = Question(model, clean, other, read)
    states = [[question.exchange(question.state(1), at)] for at in (3, 5)]
    heads = [[question.exchange(question.z(0), question.find_head(0, head))] for head in range(4)]
    seen = []
    block = question.model.anatomy.blocks[1].module
    handle = block.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((*args, *kwargs.values())[0].shape[1]),
        with_kwargs=True,
    )
    found = question.measure(states + heads)
    texts = question.measure([()] * 3, torch.stack([clean, other, other]))
    handle.remove()
    assert (max(seen) == 4) == (name != "bert")
    question._prefix = None
    expected = question.measure(states + heads)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert texts.tolist() == near([0, -question.gap, -question.gap])


def test_positions_run_where_the_first_ones_depend_on_the_last():
    """Attention is causal, but embeddings bring all tokens: keys that are kept would be wrong."""
    plain = zoo.build("llama")
    plain.model.embed_tokens.register_forward_hook(
        lambda module, args, out: out + 0.1 * out.mean(dim=1, keepdim=True)
    )
    clean, other = two_texts(7, changed=(5,))
    question = Question(open_model(plain), clean, other, READOUT)
    assert question._prefix is None
    with torch.no_grad():
        values = [difference(plain(ids[None]).logits[0]) for ids in (clean, other)]
    found = float(question.measure([()], other[None])[0])
    assert found == near(float(values[1] - values[0]))


def test_positions_run_where_a_window_hides_the_last_token_from_the_middle():
    """Gemma 3 that looks both ways: keys in the middle of the first layer are right anyhow."""
    plain = zoo.build("gemma3", attention=None, use_bidirectional_attention=True)
    clean, other = two_texts(7, changed=(5,))
    question = Question(open_model(plain), clean, other, READOUT)
    with torch.no_grad():
        values = [difference(plain(ids[None]).logits[0]) for ids in (clean, other)]
    found = float(question.measure([()], other[None])[0])
    assert found == near(float(values[1] - values[0]))


def test_positions_run_where_a_pad_token_among_them_counts_otherwise(monkeypatch):
    """RoBERTa counts positions from the tokens that are no padding, in each pass anew."""
    sizes = {**zoo._LLAMA, "is_decoder": True, "max_position_embeddings": 40}
    monkeypatch.setitem(
        zoo.ARCHITECTURES, "roberta", ("RobertaConfig", "RobertaForCausalLM", sizes)
    )
    plain = zoo.build("roberta", attention=None)
    clean, _ = two_texts(9)
    clean[5] = plain.config.pad_token_id
    other = clean.clone()
    other[7] += 1
    question = Question(open_model(plain), clean, other, READOUT)
    with torch.no_grad():
        values = [difference(plain(ids[None]).logits[0]) for ids in (clean, other)]
    found = float(question.measure([()], other[None])[0])
    assert found == near(float(values[1] - values[0]))


@dataclass(frozen=True)
class Neighbours(Readout):
    """A readout of one's own that reads beside its position, too."""

    position: int = 3

    def read(self, output):
        logits = logits_of(output)
        return logits[:, self.position, ANSWER] + logits[:, self.position - 1, AGAINST]


def test_a_readout_of_ones_own_may_read_beside_its_position():
    clean, other = two_texts(8, changed=(5, 6))
    question = Question(opened("llama"), clean, other, Neighbours())
    assert question.measure([()], other[None]).tolist() == near([0.0])


class Plain(Readout):
    """A readout of one's own that is no dataclass."""

    def __init__(self, position):
        self.position = position

    def read(self, output):
        logits = logits_of(output)[:, self.position].double()
        return logits[:, AGAINST] - logits[:, ANSWER]


def test_a_readout_of_ones_own_need_not_be_a_dataclass():
    texts = two_texts(changed=(4,))
    found = measured(Plain(-1), texts, quick=True)
    torch.testing.assert_close(found.path_effect, turned_answer().path_effect, rtol=0, atol=1e-5)


def test_a_frozen_model_is_asked_as_it_is():
    """As beneath an adapter; derivatives of frozen weights were asked for, and there are none."""
    texts, read = two_texts(changed=(4,)), LogitDifference(AGAINST, ANSWER)
    frozen = open_model(zoo.build("llama").requires_grad_(False))
    found = measure_answer(frozen, *texts, read.bind(frozen), quick=True, progress=False)
    expected = turned_answer()
    assert len(found.places) == len(expected.places) > 0
    torch.testing.assert_close(found.path_effect, expected.path_effect)


def test_a_vocabulary_smaller_than_the_guesses(monkeypatch):
    monkeypatch.setattr(zoo, "N_VOCAB", 5)
    model = open_model(zoo.build("llama"))
    text = torch.tensor([1, 1, 4, 3, 4, 1])
    question = Question(model, text, None, LogitDifference(4, 1))
    chosen = choose_likely_text(question, torch.ones(6, dtype=torch.float64))
    assert int((chosen != text).sum()) == 1


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_texts_are_as_probable_as_the_plain_model_finds_them(name):
    plain = zoo.build(name)
    question = Question(open_model(plain), two_texts()[0], None, READOUT, batch_size=4)
    texts = zoo.tokens(6, 6, seed=8)
    texts[0] = question.clean.tokens[0]
    texts[1:3, :4] = texts[0, :4]
    texts[3, :5] = texts[0, :5]
    change, gain, chance = question.score_texts(texts)
    with torch.no_grad():
        logits = plain(texts).logits
    values = torch.stack([difference(row) for row in logits])
    assert change.tolist() == near((values - values[0]).tolist())
    logs = logits.double().log_softmax(-1)[:, :-1].gather(2, texts[:, 1:, None]).sum(dim=(1, 2))
    assert gain.tolist() == near((logs - logs[0]).tolist())
    assert chance.tolist() == near(logits[:, -1].double().log_softmax(-1)[:, AGAINST].tolist())


def test_a_likely_text_has_one_token_more_and_is_the_best_of_those_that_were_run(monkeypatch):
    """By brute force over all places and tokens, where as many are run as there are."""
    monkeypatch.setattr(measure, "_PLACES", 5)
    for name in ("_FIRST", "_POOL"):
        monkeypatch.setattr(measure, name, zoo.N_VOCAB)
    plain = zoo.build("llama")
    clean = two_texts()[0]
    question = Question(open_model(plain), clean, None, READOUT)
    chosen = choose_likely_text(question, torch.zeros(6, dtype=torch.float64))
    texts = clean.repeat(5 * zoo.N_VOCAB, 1)
    for row in range(len(texts)):
        texts[row, 1 + row // zoo.N_VOCAB] = row % zoo.N_VOCAB
    config = plain.config
    special = (config.bos_token_id, config.eos_token_id, config.pad_token_id)
    swapped = texts[torch.arange(len(texts)), 1 + torch.arange(len(texts)) // zoo.N_VOCAB]
    fits = torch.tensor([int(token) not in special for token in swapped])
    texts = torch.cat([clean[None], texts[fits & (texts != clean).any(dim=1)]])
    with torch.no_grad():
        logits = plain(texts).logits
    value = torch.stack([difference(row) for row in logits])
    logs = logits.double().log_softmax(-1)[:, :-1].gather(2, texts[:, 1:, None]).sum(dim=(1, 2))
    table = plain.get_input_embeddings().weight.detach()
    like = torch.cosine_similarity(table[texts], table[clean], dim=-1).sum(dim=1) - 5
    short = (1 + max(float(value[0]), 0) - value[0] + value).clamp(min=0)
    said = logits[:, -1].double().log_softmax(-1)[:, AGAINST]
    common = logits[0].log_softmax(-1).sort(dim=0).values[2]  # the third of six
    commoner = common[torch.stack([texts, clean.expand_as(texts)])].amax(dim=0)[texts != clean]
    score = logs + said + 10 * like - 5 * short
    score[1:] -= 0.5 * commoner
    score[0] = -torch.inf
    assert chosen.equal(texts[score.argmax()])


@dataclass
class Names:
    """A tokenizer of words with a blank before them, but for some that join the word before."""

    joined: list[int]
    all_special_ids = (0,)

    def __len__(self):
        return zoo.N_VOCAB

    def convert_ids_to_tokens(self, ids):
        return ["w" if i in self.joined else "\u0120w" for i in ids]


def test_a_word_with_a_blank_is_not_replaced_by_one_that_joins_the_word_before(monkeypatch):
    """Else "The pilots" becomes "Thenoun", which the model finds probable as code."""
    monkeypatch.setattr(measure, "_PLACES", 1)
    model, clean = open_model(zoo.build("llama")), two_texts()[0]
    effect = torch.tensor([0, 0, 1, 0, 0, 0], dtype=torch.float64)
    seen = []
    for joined in ([], seen):
        model.tokenizer = Names(joined)
        question = Question(model, clean, None, READOUT)
        chosen = choose_likely_text(question, effect)
        assert (chosen != clean).nonzero().flatten().tolist() == [2]
        assert int(chosen[2]) not in (*seen, *Names.all_special_ids)
        seen.append(int(chosen[2]))


def test_a_likely_text_is_not_chosen_where_nothing_predicts_the_next_token():
    clean = two_texts()[0]
    for name, read in (("bert", LogitDifference(ANSWER, AGAINST, 2)), ("llama", LogProbability(9))):
        question = Question(opened(name), clean, None, read)
        assert choose_likely_text(question, torch.ones(6)) is None


@needs_version_4
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_rankings_and_effects_are_those_of_transformerlens(name):
    """Its attribution patching, whose gradient is at what it calls corrupt; and its exact loop."""
    from transformer_lens import patching
    from transformer_lens.tools.analysis import attribution_patch

    bridge = zoo.bridge(name)
    question = Question(opened(name), *two_texts(), READOUT)
    clean, other = (ids[None] for ids in two_texts())

    def metric(logits):
        return logits[0, -1, ANSWER] - logits[0, -1, AGAINST]

    for at, texts, sign in ((0.0, (other, clean), 1), (1.0, (clean, other), -1)):
        expected = {}
        for node, score in attribution_patch(bridge, *texts, metric).node_scores.items():
            unit = node.layer, -1 if node.head is None else node.head
            expected[unit] = expected.get(unit, 0) + sign * score
        found = question.differentiate(at)
        for layer in range(2):
            heads = _products(question, found, question.z(layer), 4).sum(0).tolist()
            mlp = _products(question, found, question.mlp(layer), 1).sum(0).tolist()
            for head, value in zip((0, 1, 2, 3, -1), heads + mlp, strict=True):
                assert value == near(expected[layer, head])
    _, cache = bridge.run_with_cache(other)
    patched = patching.get_act_patch_attn_head_out_all_pos(bridge, clean, cache, metric)
    units = measure_units(question)
    for unit, effect in zip(units.units, units.effect.tolist(), strict=True):
        if unit[1] >= 0:
            assert effect == near(float(patched[unit]) - question.clean.value)


# Paths


def all_paths(streams):
    """Every path between heads at positions, and from each changed embedding."""
    question = streams.question
    nodes = [
        Node(layer, head, position)
        for layer in range(question.n_layers)
        for head in range(question.n_heads[layer])
        for position in range(question.n_pos)
    ]
    writers = [Node(-1, -1, position) for position in question.changed] + nodes
    paths = [Path(w, None, "answer") for w in writers if w.position == streams.end]
    for reader in nodes:
        open_ = streams.clean[reader.layer].scores[reader.head, reader.position] > -torch.inf
        for writer in writers:
            if writer.layer < reader.layer:
                kinds = ["query"] if writer.position == reader.position else []
                kinds += ["key", "value"] if open_[writer.position] else []
                paths += [Path(writer, reader, kind) for kind in kinds]
    return paths


@pytest.mark.parametrize("name", zoo.some_families(zoo.FAMILIES, zoo.FEW))
def test_all_paths_keep_and_lose_everything_and_none_nothing(name):
    clean, other = two_texts(5, changed=(1, 2))
    at = 4 if name == "bert" else -1
    read = LogitDifference(ANSWER, AGAINST, at)
    question = Question(opened(name), clean, other, read)
    if name in WITHOUT_PATHS:
        with pytest.raises(InfoFlowError, match=WITHOUT_PATHS[name]):
            Streams(question)
        return
    streams = Streams(question)
    paths = all_paths(streams)
    found = share(streams, [(paths, False), (paths, True), ([], False), ([], True)])
    assert found == pytest.approx([1, 1, 0, 0], abs=1e-3)


@pytest.mark.parametrize("length", [1, zoo.N_HEADS, zoo.D_MODEL])
def test_texts_that_are_as_long_as_something_is_wide_have_paths(length):
    """Rotations [1, pos, d_head] were taken for a mask, in an error of Python."""
    question = Question(opened("llama"), *two_texts(length, (0,)), READOUT)
    streams = Streams(question)
    nodes = [Node(layer, head, length - 1) for layer in range(2) for head in range(4)]
    paths = [Path(Node(-1, -1, 0), node, "value") for node in nodes]
    paths += [Path(node, None, "answer") for node in nodes]
    plain = TwoTexts(zoo.build("llama"), *two_texts(length, (0,)), difference)
    as_plain = [(tuple(w), r and tuple(r), kind) for w, r, kind in paths]
    assert share(streams, [(paths, False)]) == near([plain.share(as_plain)])


@pytest.mark.parametrize("other", [115, 396, 707])
def test_weights_that_lack_rounding_to_1_have_no_sink(other):
    """Heads that look at the first token alone: without it what rounding lacks outweighs all."""
    model = load_any("stdlib-2l", backend="opened").model
    clean = model.tokenizer("The keys", return_tensors="pt")["input_ids"][0]
    instead = torch.cat([clean.new_tensor([other]), clean[1:]])
    streams = Streams(Question(model, clean, instead, READOUT))
    for layer, run in enumerate(streams.other):
        for head, z in enumerate(run.z[-1]):
            made = {side: getattr(run, side) for side in "qkv"}
            rows = {(kind, at): at for kind in ("key", "value") for at in range(len(clean))}
            rows["query", len(clean) - 1] = len(clean) - 1
            reader = layer, head, len(clean) - 1
            found = streams.attend(streams.clean[layer], reader, made, rows)
            torch.testing.assert_close(found, z, atol=1e-3 * float(run.z.abs().max()), rtol=1e-3)


PRECISIONS, ATTENTION = (torch.float16, torch.bfloat16, torch.float64), ("eager", "sdpa")


@pytest.mark.parametrize(
    ("dtype", "attention"),
    some_of(list(product(PRECISIONS, ATTENTION)), *spread(PRECISIONS, ATTENTION)),
)
def test_other_precisions_have_paths(dtype, attention):
    """A derivative in half precision is no multiple of a key to 1e-4."""
    plain = zoo.build("llama").to(dtype)
    plain.set_attn_implementation(attention)
    question = Question(open_model(plain), *two_texts(5), READOUT)
    streams = Streams(question)
    assert {rule.cap for rule in streams.rules} == {torch.inf}
    paths = all_paths(streams)
    near_one = 1e-6 if dtype == torch.float64 else 0.15
    assert share(streams, [(paths, False), (paths, True)]) == pytest.approx([1, 1], abs=near_one)


@pytest.mark.parametrize("seed", range(3))
def test_shares_of_paths_are_those_of_the_plain_model(seed, plain, question):
    """Whether they are measured alone or among others."""
    streams = Streams(question)
    paths = all_paths(streams)
    draw = random.Random(seed)
    sets = []
    while len(sets) < 2:
        chosen = connect(draw.sample(paths, 25) + [p for p in paths if p.reader is None])
        if len(chosen) > 4:
            sets.append(chosen)
    jobs = [(chosen, swap) for chosen in sets for swap in (False, True)]
    together = share(streams, jobs)
    alone = [share(streams, [job])[0] for job in jobs]
    expected = [
        plain.share([(tuple(w), r and tuple(r), kind) for w, r, kind in chosen], swap)
        for chosen, swap in jobs
    ]
    assert together == near(alone)
    assert together == near(expected)
    assert any(abs(value) > 0.01 for value in expected)


def test_cuts_of_paths_are_those_of_the_plain_model(plain, question):
    """A reader takes what it would have with the other text's value of the writer."""
    streams = Streams(question)
    paths = [p for p in all_paths(streams) if p.reader is not None][:40:3]
    cuts = cut_paths(streams, paths)
    for path in paths:
        (w_layer, w_head, at), (layer, head, position) = path.writer, path.reader
        embedded, pins = plain.embedded[0].clone(), {n: z.clone() for n, z in plain.z[0].items()}
        if w_head < 0:
            embedded[at] = plain.embedded[1][at]
        else:
            part = plain._slice(w_head)
            pins[w_layer][at, part] = plain.z[1][w_layer][at, part]
        side = path.kind[0]
        n = plain.n_heads if side == "q" else plain.n_kv
        of_head = head * n // plain.n_heads
        vector = plain._run(embedded, pins)[side][layer][at].reshape(n, -1)[of_head]
        changed = plain._run(
            plain.embedded[0], projections={(layer, side): {(at, of_head): vector}}
        )
        pinned = plain.z[0][layer].clone()
        part = plain._slice(head)
        pinned[position, part] = changed["z"][layer][position, part]
        assert cuts[path] == near(plain.effect(pins={layer: pinned}))


def test_paths_that_are_cut_together_are_cut_one_after_the_other(plain, question):
    """One alone as by itself; two in a row as in a plain model that is run twice."""
    streams = Streams(question)
    paths = all_paths(streams)
    some = [*paths[5:60:9], next(p for p in paths if p.reader is None)]
    alone = cut_paths(streams, some)
    assert [cut_together(streams, [path]) for path in some] == near([*alone.values()])
    first = Path(Node(-1, -1, 2), Node(0, 1, 5), "value")
    second = Path(Node(0, 2, 5), Node(1, 3, 5), "query")
    third = Path(Node(1, 0, 5), None, "answer")
    n, n_kv, part = plain.n_heads, plain.n_kv, plain._slice
    # the first one's reader, with the value that the other text's word gives
    vector = plain._run(plain.embedded[1])["v"][0][2].reshape(n_kv, -1)[1 * n_kv // n]
    changed = plain._run(plain.embedded[0], projections={(0, "v"): {(2, 1 * n_kv // n): vector}})
    pins = {0: plain.z[0][0].clone()}
    pins[0][5, part(1)] = changed["z"][0][5, part(1)]
    # the second one's, in that run
    spoiled = {0: pins[0].clone()}
    spoiled[0][5, part(2)] = plain.z[1][0][5, part(2)]
    query = plain._run(plain.embedded[0], spoiled)["q"][1][5].reshape(n, -1)[3]
    run = plain._run(plain.embedded[0], pins, projections={(1, "q"): {(5, 3): query}})
    two = plain._run(plain.embedded[0], pins)
    pins[1] = two["z"][1].clone()
    pins[1][5, part(3)] = run["z"][1][5, part(3)]
    assert cut_together(streams, [first, second]) == near(plain.effect(pins=pins))
    pins[1][5, part(0)] = plain.z[1][1][5, part(0)]
    assert cut_together(streams, [first, second, third]) == near(plain.effect(pins=pins))


@pytest.mark.parametrize("changed", [(2,), (1, 5)])
def test_random_paths_are_as_many_and_what_differs_reaches_the_answer_by_them(monkeypatch, changed):
    """Most draws led nowhere, and nothing was compared with none."""
    question = Question(opened("llama"), *two_texts(6, changed), READOUT)
    sets = []

    def kept(streams, jobs):
        sets.extend(paths for paths, _ in jobs)
        return share(streams, jobs)

    monkeypatch.setattr(paths_module, "share", kept)
    for seed, n in ((0, 2), (1, 3), (2, 7), (3, 15)):
        worth = dict.fromkeys(all_paths(streams := Streams(question)), 1.0)
        sets.clear()
        shares = paths_module._random_shares(streams, worth, n, seed)
        sizes = [len(paths) for paths in sets]
        assert len(sizes) == 10
        assert sum(sizes) > 9.5 * n  # the last path may find no place in so few layers
        assert max(sizes) == n
        assert all(connect(paths) == set(paths) for paths in sets)
        assert len({frozenset(paths) for paths in sets}) > 3
        assert any(shares)


def test_a_circuit_carries_what_it_says(plain, question, units):
    circuit = find_circuit(question, units)
    as_plain = [(tuple(w), r and tuple(r), kind) for w, r, kind in circuit.paths]
    assert circuit.kept == near(plain.share(as_plain))
    assert circuit.lost == near(plain.share(as_plain, swap=True))
    assert circuit.is_whole == (min(circuit.kept, circuit.lost) >= 0.7)
    assert connect(circuit.paths) == set(circuit.paths)
    assert len(circuit.random) == 10
    assert set(circuit.effect) == set(circuit.paths)
    if circuit.cost:  # pruned to where each path is needed
        assert min(circuit.kept, circuit.lost) - max(circuit.cost.values()) < 0.7


# What comes of it


def measured(readout=READOUT, texts=None, name="llama", **settings):
    model = opened(name)
    clean, other = two_texts() if texts is None else texts
    settings = {"progress": False, **settings}
    return measure_answer(model, clean, other, readout.bind(model), **settings)


@cache
def answer():
    """Of the question that most tests ask; no test changes it."""
    return measured()


@cache
def quick_answer():
    """Of the same question, in fewer passes."""
    return measured(quick=True)


@cache
def turned_answer():
    """Of the other of both answers, where another word differs."""
    return measured(LogitDifference(AGAINST, ANSWER), two_texts(changed=(4,)), quick=True)


def test_an_answer_says_what_was_measured(plain):
    found = answer()
    assert (found.value, found.other_value) == near([float(v) for v in plain.values])
    assert found.changed == (2,)
    heads = found.to_frame("heads")
    assert abs(heads["effect"].iloc[0]) == heads["effect"].abs().max()
    tokens = found.to_frame("tokens")
    assert tokens["effect of the other token"].iloc[2] == near(-found.gap)
    states = found.to_frame("states")
    assert states["share"].iloc[2] == near(1.0)  # the changed token, before the first layer
    if len(found.places):
        assert len(found.to_frame("paths")) == len(found.places)
        assert sorted(n for _, group in found.bundles() for n in group) == [
            *range(len(found.places))
        ]
    with pytest.raises(InfoFlowError, match="expected one of tokens, replacements, states, heads"):
        found.to_frame("edges")


def test_where_heads_look_is_what_the_plain_model_attends_to():
    found = answer()
    assert len(found.looked) == 8
    for text, ids in enumerate(two_texts()):
        with torch.no_grad():
            attentions = zoo.build("llama")(ids[None], output_attentions=True).attentions
        shares = measure_shares(opened("llama"), ids[None], READOUT)
        for row, (layer, head) in enumerate(found.looked.tolist()):
            expected = attentions[layer][0, head, -1].double()
            torch.testing.assert_close(found.looks[row, text], expected, atol=1e-5, rtol=1e-4)
            direct = shares.by_writer().values[shares.writers.index(f"head {layer}.{head}")]
            assert float(found.writes[row, text].sum()) == near(float(direct))
            assert f"{layer}.{head}" in found.look(row)
    rows = found.to_frame("looks")
    assert len(rows) == 8 * 2 * 6
    moved = (found.looks[:, 0] - found.looks[:, 1]).abs().sum(-1).max() / 2
    assert found.looks_elsewhere == near(float(moved))
    assert quick_answer().writes.isnan().all()


@pytest.mark.parametrize("kind", ["class", "first", "mean"])
def test_heads_look_from_where_a_classifier_and_an_embedding_are_read(kind):
    """From the first position, and not from the last; an embedding of all has no such place."""
    from transformers import BertForSequenceClassification

    torch.manual_seed(1)
    config = zoo.build("bert").config
    config.num_labels = 3
    plain = BertForSequenceClassification(config).eval()
    with torch.no_grad():
        plain.classifier.weight.mul_(60)
        for layer in plain.bert.encoder.layer:
            layer.attention.self.query.weight.mul_(60)
    read = LogitDifference(1, 0)
    if kind != "class":
        plain, read = plain.bert, EmbeddingCosine(torch.arange(16.0) - 5, pooling=kind)
    clean, other = two_texts(6, (2, 4))
    found = measure_answer(open_model(plain), clean, other, read, progress=False)
    if kind == "mean":
        assert not len(found.looks)
        assert "reads 6 positions: where heads look is not shown" in " ".join(found.notes)
        return
    assert found.read_at == 0
    plain.set_attn_implementation("eager")
    with torch.no_grad():
        seen = [plain(ids[None], output_attentions=True).attentions for ids in (clean, other)]
    assert len(found.looks) > 4
    for (layer, head), looks in zip(found.looked.tolist(), found.looks, strict=True):
        expected = torch.stack([of_text[layer][0, head, 0] for of_text in seen]).double()
        torch.testing.assert_close(looks, expected, atol=1e-5, rtol=1e-4)
    assert any((looks - looks.mean()).abs().max() > 0.05 for looks in found.looks)
    if kind == "class":
        # what leaves the last layer counts at the first position alone
        assert found.strips[-1].tolist() == near([-found.gap, 0, 0, 0, 0, 0])
        assert not found.token_predicted[:2].isnan().all()
        near_first = found.token_predicted[2]
        assert near_first.nan_to_num(-9).argmax() == 0


def test_predicted_orders_stand_beside_the_measured_one():
    """Contributions of the plain model; the rank correlation of scipy, without what is read."""
    from scipy.stats import spearmanr

    found, ids = answer(), two_texts()[0]
    plain = zoo.build("llama")
    plain.set_attn_implementation("eager")
    held = contributions.power_rollout(contributions.edges(plain, ids[None]), 2)[-1, -1]
    np.testing.assert_allclose(found.token_predicted[0], held, atol=1e-5)
    orders = found.orders()
    assert tuple(orders) == ORDERS
    assert found.read_at == len(ids) - 1
    keep = slice(0, len(ids) - 1)
    for name, scores in zip(ORDERS, found.token_predicted, strict=True):
        expected = spearmanr(scores[keep], found.token_mean.abs()[keep]).statistic
        assert orders[name] == near(expected)
    best = max(orders, key=orders.get)
    assert f"Spearman: {best} {orders[best]:.2f}" in found.nearest_order()
    assert ("none came near" in found.nearest_order()) == (orders[best] <= 0.98)  # of 5 tokens
    tokens = found.to_frame("tokens")
    np.testing.assert_allclose(tokens["contributions in squares"], held, atol=1e-5)
    quick = quick_answer()
    assert quick.token_predicted.isnan().all()
    assert (quick.orders(), quick.nearest_order()) == ({}, "")


def test_tokens_that_are_not_seen_are_no_candidates():
    found = measured(LogitDifference(3, 5, 3))
    assert found.read_at == 3
    assert found.token_predicted[:, 4:].isnan().all()
    # the measured order itself, which was said not to come near
    same = found.token_mean.abs().where(found.token_predicted[0].isfinite(), torch.nan)
    found = replace(found, token_predicted=same.expand(3, -1))
    assert [*found.orders().values()] == near([1, 1, 1])
    assert found.nearest_order().startswith("3 tokens are too few")


def test_the_same_question_has_the_same_answer():
    one, two = answer(), measured()
    for name in ("token_mean", "unit_effect", "places", "path_effect"):
        torch.testing.assert_close(getattr(one, name), getattr(two, name), equal_nan=True)
    assert (one.kept, one.lost, one.random) == (two.kept, two.lost, two.random)


@pytest.mark.parametrize("at", some_of([0.0, 0.3, 0.6, 0.95], 0.6))
def test_a_question_that_was_stopped_goes_on_to_the_same_bits(at):
    """Between two passes, with nothing that was measured lost."""
    states = []
    whole = measured(batch_size=3, after=states.append)
    assert len(states) > 20
    stop, kept = int(at * len(states)), []

    def stopping(state):
        kept.append(state)
        if len(kept) > stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(batch_size=3, after=stopping)
    state, more = state_from_bytes(state_to_bytes(kept[-1])), []
    again = measured(batch_size=3, resume=state, after=more.append)
    assert len(kept) + len(more) == len(states)
    for field in fields(whole):
        one, two = getattr(whole, field.name), getattr(again, field.name)
        if isinstance(one, torch.Tensor):
            assert one.nan_to_num(7.5).equal(two.nan_to_num(7.5)), field.name
        else:
            assert one == two, field.name


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"texts": two_texts(5)}, "inputs"),
        ({"readout": LogitDifference(ANSWER, 7)}, "readout"),
        ({"name": "gpt2"}, "model"),
        ({"resume": {"identity": None}}, "readout"),
    ],
)
def test_another_question_does_not_go_on(change, name):
    states = []
    measured(quick=True, after=states.append)
    with pytest.raises(InfoFlowError, match=f"resume is of another run: {name}"):
        measured(**{"quick": True, "resume": states[-1], **change})


def test_shares_of_another_comparison_are_not_taken_up():
    """The folder of an answer takes another other text, in which the same paths do other things."""
    (clean, first), model = two_texts(), open_model(zoo.build("llama"))
    second, kept = first.clone(), KeptNumbers({}, None, None)
    second[2] = 4 + (int(first[2]) - 4 + 3) % (zoo.N_VOCAB - 4)

    def measure_paths(other, kept):
        streams = Streams(Question(model, clean, other, READOUT, kept=kept))
        paths = all_paths(streams)[:20]
        return [*share(streams, [(paths, False)]), *cut_paths(streams, paths).values()]

    one, two = measure_paths(first, None), measure_paths(second, None)
    assert one != near(two)
    assert measure_paths(first, kept) == near(one)
    assert measure_paths(second, kept) == near(two)


def test_exact_measures_all_heads_and_quick_fewer_passes():
    exact, quick = measured(exact=True), quick_answer()
    heads = exact.units[:, 1] >= 0
    assert exact.unit_effect[heads].isfinite().all()
    assert quick.forwards < exact.forwards / 2
    assert not quick.strips.numel()
    assert quick.token_mean.isnan().all()


def test_without_another_text_the_models_own_guess_is_taken():
    clean = two_texts()[0]
    found = measured(LogProbability(ANSWER), (clean, None))
    (place,) = found.changed
    assert "own guess" in found.notes[0]
    largest = found.token_other.abs().max()
    assert found.token_other.abs().argmax() == place
    assert largest >= found.token_mean.abs().max() - 1e-6


@pytest.mark.parametrize("position", [0, 2, 5])
def test_the_place_that_an_encoder_is_asked_at_stands_in_both_texts(position):
    """The mask was replaced, whose place says again what stands there; or a special token."""
    clean, words = two_texts()[0], zoo.tokenizer(begins=False)
    words.mask_token, words.sep_token = "w49", "w48"
    clean[position], clean[(position + 3) % 6] = 49, 48
    model = open_model(zoo.build("bert"), words)
    read = LogitDifference(ANSWER, AGAINST, position)
    found = measure_answer(model, clean, None, read, progress=False, quick=True)
    (place,) = found.changed
    assert place not in (position, (position + 3) % 6)
    kept = [at for at in range(6) if at not in (position, (position + 3) % 6)]
    moved = found.replacement_effects.abs().nan_to_num(-1).amax(dim=1)
    assert place == max(kept, key=lambda at: float(moved[at]))
    whole = measure_answer(model, clean, None, read, progress=False, quick=True, spans=[(0, 6)])
    assert whole.changed  # all is one unit


def test_of_two_answers_a_text_is_chosen_that_reads_like_the_one_asked_about():
    clean, model = two_texts()[0], open_model(zoo.build("llama"))
    read = LogitDifference(AGAINST, ANSWER)
    found = measured(read, (clean, None))
    assert "see that it reads well" in found.notes[0]
    likely = choose_likely_text(Question(model, clean, None, read), found.token_mean)
    assert found.record.config["instead"] == likely.tolist()
    assert found.gap >= 1
    # one token of a unit, where all of its tokens were replaced by guesses
    by_units = measured(read, (clean, None), spans=[(0, 1), (1, 4), (4, 6)])
    assert "see that it reads well" in by_units.notes[0]
    assert len(by_units.changed) == 1
    with torch.no_grad():
        model.original_model.lm_head.weight.mul_(0.01)
    small = measure_answer(model, clean, None, read.bind(model), progress=False)
    assert "own guess" in small.notes[0]  # where no such text changes the readout by 1


def test_no_paths_where_two_texts_hardly_differ():
    clean, other = two_texts(changed=(2,))
    model = open_model(zoo.build("llama"))
    with torch.no_grad():
        model.original_model.lm_head.weight.mul_(0.01)
    found = measure_answer(model, clean, other, READOUT.bind(model), progress=False)
    assert "no paths are drawn" in " ".join(found.notes)
    assert not len(found.places)
    assert found.unit_effect.isfinite().any()
    assert found.strip_layers == (0, 2)  # a tenth of the bar, not of a difference of .03


def test_a_masked_word_of_an_encoder():
    clean, other = two_texts(6, changed=(4,))
    read = LogProbability(ANSWER, position=2)
    found = measured(read, (clean, other), "bert")
    model = zoo.build("bert")
    with torch.no_grad():
        expected = model(clean[None]).logits[0, 2].log_softmax(-1)[ANSWER]
    assert found.value == near(float(expected))
    assert found.strips[0].tolist()[4] == near(-found.gap)
    assert not found.strips[0][[0, 1, 2, 3, 5]].any()


def test_any_function_of_the_output():
    read = FunctionOfOutput(lambda logits: logits[:, -1].norm(dim=-1), name="size")
    found = measured(read)
    with torch.no_grad():
        sizes = [zoo.build("llama")(ids[None]).logits[0, -1].norm() for ids in two_texts()]
    assert (found.value, found.other_value) == near([float(s) for s in sizes])
    assert found.readout == "size"


def test_why_two_sentences_are_near():
    """The mean of the last states: words and heads, and no paths, which lead to one position."""
    model = zoo.build("bert").bert
    clean, other = two_texts()
    with torch.no_grad():
        to = model(zoo.tokens(1, 7, seed=9)).last_hidden_state[0].mean(0)
        means = [model(ids[None]).last_hidden_state[0].mean(0) for ids in (clean, other)]
    found = measure_answer(
        open_model(model), clean, other, EmbeddingCosine(to), progress=False, batch_size=4
    )
    expected = [float(torch.cosine_similarity(mean, to, dim=0)) for mean in means]
    assert (found.value, found.other_value) == near(expected)
    assert float(found.strips[0][2]) == near(expected[1] - expected[0])
    assert float(found.strips[-1].sum()) != near(0)  # all positions are read
    assert not len(found.places)
    assert "reads other positions" in " ".join(found.notes)
    assert "The model says" not in found.summary()
    # of scores from -1 to 1 most effects were said to be 0.00
    effect = found.to_frame("heads")["effect"].dropna().iloc[0]
    assert f" ({effect:+.3f})" in found.describe_units()
    alone = measure_answer(
        open_model(model), clean, None, EmbeddingCosine(to), progress=False, quick=True
    )
    assert "a token drawn at random where such a token moves" in alone.notes[0]  # no guess


def test_one_block_in_several_layers_has_paths():
    """As in ALBERT."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    torch.manual_seed(0)
    config = AlbertConfig(
        vocab_size=zoo.N_VOCAB, embedding_size=8, hidden_size=16, num_hidden_layers=3,
        num_attention_heads=4, intermediate_size=32, initializer_range=0.4,
        attn_implementation="eager",
    )  # fmt: skip
    clean, other = two_texts(5)
    read = LogitDifference(ANSWER, AGAINST, 3)
    question = Question(open_model(AlbertForMaskedLM(config).eval()), clean, other, read)
    streams = Streams(question)
    paths = all_paths(streams)
    found = share(streams, [(paths, False), (paths, True)])
    assert found == pytest.approx([1, 1], abs=1e-3)
    row = [[question.exchange(question.z(2), question.find_head(2, 1))]]
    at_last = question.measure(row)
    question._blocks = []
    torch.testing.assert_close(at_last, question.measure(row), atol=1e-5, rtol=1e-4)


def test_blocks_that_have_positions_first_have_no_paths():
    """As in XLNet: states that were read as single positions were the whole text."""
    from transformers import XLNetConfig, XLNetLMHeadModel

    torch.manual_seed(0)
    config = XLNetConfig(
        vocab_size=zoo.N_VOCAB, d_model=16, n_layer=2, n_head=4, d_inner=32, attn_type="uni",
        initializer_range=0.4,
    )  # fmt: skip
    plain = XLNetLMHeadModel(config).eval()
    for length in (4, 7, 16):
        clean, other = two_texts(length)
        with torch.no_grad():
            values = [float(difference(plain(ids[None]).logits[0])) for ids in (clean, other)]
        read = READOUT if values[0] > 0 else LogitDifference(AGAINST, ANSWER)
        found = measure_answer(open_model(plain), clean, other, read, progress=False)
        assert abs(found.value) == near(abs(values[0]))
        if abs(found.gap) >= 1:
            assert "pass states on in another order" in " ".join(found.notes)
        assert not len(found.places)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda clean, other: (clean, other[:-1]), "have 6 and 5 tokens: expected as many"),
        (lambda clean, other: (clean, clean.clone()), "the two texts have the same tokens"),
    ],
)
def test_texts_that_cannot_be_compared_are_refused(change, match):
    with pytest.raises(InfoFlowError, match=match):
        measured(texts=change(*two_texts()))


# Units of tokens


def test_tokens_of_a_unit_are_replaced_at_once():
    """Logits of the plain model on the texts that were drawn, and on half of the other text."""
    spans = [(0, 1), (1, 4), (4, 5), (5, 6)]
    clean, other = two_texts(changed=(2, 3, 4))
    question = Question(opened("llama"), clean, other, READOUT, batch_size=3, spans=spans)
    plain = zoo.build("llama")

    def effect(span, tokens):
        ids = clean.clone()
        ids[slice(*span)] = tokens
        with torch.no_grad():
            new, old = (difference(plain(row[None]).logits[0]) for row in (ids, clean))
        return float(new - old)

    found = measure_tokens(question, seed=3)
    for number, span in enumerate(spans):
        drawn = found.donors[slice(*span)]
        expected = [effect(span, tokens) for tokens in drawn.T if (tokens >= 0).all()]
        assert found.changes[number].tolist()[: len(expected)] == near(expected)
        assert float(mean_and_error(found.changes)[0][number]) == near(
            sum(expected) / len(expected)
        )
        assert not (drawn == clean[slice(*span), None]).any()
    replaced = question.replace_tokens().tolist()
    assert replaced == near([effect(span, other[slice(*span)]) for span in spans])
    question.spans = [(at, at + 1) for at in range(6)]
    single = question.replace_tokens()
    assert replaced[1] != pytest.approx(float(single[2] + single[3]), abs=0.01)  # which differs


def test_an_answer_by_units_takes_fewer_passes_and_says_them():
    texts = two_texts(changed=(2, 3))
    spans = [(0, 1), (1, 4), (4, 6)]
    found, alone = (measured(texts=texts, spans=given) for given in (spans, None))
    # three tokens less, of four draws each, which run from their positions on: 4, 3 and 1 of six
    assert found.forwards < alone.forwards - 4 * (4 + 3 + 1) / 6
    assert (found.has_units, alone.has_units) == (True, False)
    assert found.span_words[1] == " ".join(map(str, texts[0][1:4].tolist()))
    assert alone.span_words == alone.tokens
    rows = found.to_frame("tokens")
    assert rows["position"].tolist() == [0, 1, 4]
    assert rows["tokens"].tolist() == [1, 3, 2]
    assert rows["effect of the other token"].tolist() == near([0, -found.gap, 0])
    assert found.strips[0].tolist() == near([0, -found.gap, 0])
    assert (found.orders(), found.nearest_order()) == ({}, "")
    guess = measured(texts=(texts[0], None), spans=spans)
    assert guess.changed in ((0,), (1, 2, 3), (4, 5))


def test_a_line_joins_the_paths_from_one_unit_to_another():
    texts, read = two_texts(changed=(2, 3)), LogitDifference(AGAINST, ANSWER)
    found, alone = (
        measured(read, texts, spans=spans, quick=True) for spans in ([(0, 1), (1, 4), (4, 6)], None)
    )
    assert found.places.equal(alone.places)  # paths stay with single tokens
    lines = found.bundles()
    assert 0 < len(lines) < len(alone.bundles())
    for _, group in lines:
        ends = found.places[group][:, [2, 5]]
        assert len({tuple(map(found.find_unit, row)) for row in ends.tolist()}) == 1
    words = " ".join(map(str, texts[0][1:4].tolist()))
    assert any(said.startswith(f"{words}@1 ") for said, _ in lines)


@pytest.mark.parametrize(
    ("reader", "kind", "one", "two"),
    [
        ((-1, -1, -1), "answer", "writes", "write"),
        ((1, 0, 4), "key", "is found", "are found"),
        # not "where to look at" that position
        ((1, 0, 4), "query", "tells 1.0 at {}@4 where", "tell 1.0 at {}@4 where"),
    ],
)
def test_several_writers_have_a_verb_in_the_plural(reader, kind, one, two):
    places = torch.tensor([[0, head, 3, *reader, KINDS.index(kind)] for head in (0, 1)])
    for verb, n in ((one, 1), (two, 2)):
        empty = dict.fromkeys(("path_worth", "path_cost", "path_effect"), torch.zeros(n))
        found = replace(answer(), places=places[:n], **empty)
        ((said, _),) = found.bundles()
        assert f"@3 {verb.format(found.tokens[4])} " in said


def test_a_readout_that_is_no_number_is_refused_at_once():
    """It gave a whole answer of NaN, without a word."""
    nothing = FunctionOfOutput(lambda output: logits_of(output)[:, -1, 0] * math.nan)
    with pytest.raises(
        InfoFlowError, match="readout is nan in this text: expected a finite number"
    ):
        measured(nothing)


def test_answers_of_several_tokens_are_no_odds():
    """A mean of logits was said to be the logarithm of how many times more probable one is."""
    said = measured(LogitDifference((AGAINST, 5), ANSWER)).describe_readout()
    assert "mean logit" in said
    assert "times" not in said


@pytest.mark.parametrize(
    ("chance", "said"),
    [(0.00005, "below 0.01%"), (0.0123, "1.2%"), (0.0997, "10%"), (0.42, "42%"),
     (0.9958, "99.6%"), (0.9999, "above 99.9%")],
)  # fmt: skip
def test_chances_are_written_as_people_do(chance, said):
    assert _percent(chance) == said


def test_a_small_chance_is_not_said_to_be_none():
    """The model said a token of .45% with 0%, beside its .45%."""
    found = replace(answer(), guess="space", chance=0.0045, other_guess="x", other_chance=0.0)
    assert "says 'space' (0.45%), and in the other text 'x' (below 0.01%)" in found.summary()


def test_one_unit_that_was_replaced_is_not_said_to_be_open():
    found = measured(texts=two_texts(3, changed=(1,)), spans=[(0, 3)])
    said = " ".join(found.describe_certainty())
    assert "Words were not replaced by guesses" not in said


TYPES = torch.tensor([0, 0, 0, 1, 1, 1])


def with_types_at_places(kind):
    """A model, and its twin that has the types of these tokens among its positions."""
    from transformers import BertForSequenceClassification

    torch.manual_seed(1)
    one = zoo.build("gpt2" if kind == "gpt2" else "bert")
    with torch.no_grad():
        if kind == "class":
            one = BertForSequenceClassification(one.config).eval()
            one.classifier.weight.mul_(60)
            for layer in one.bert.encoder.layer:
                layer.attention.self.value.weight.mul_(60)
        if kind == "gpt2":
            types = one.transformer.wte.weight  # nothing is added where no types are given
            added = types[TYPES]
        else:
            types = one.bert.embeddings.token_type_embeddings.weight.mul_(50)
            added = types[TYPES] - types[0]
        twin = copy.deepcopy(one)
        inner = twin.transformer.wpe if kind == "gpt2" else twin.bert.embeddings.position_embeddings
        inner.weight[:6] += added
    return one, twin


@pytest.mark.parametrize("kind", ["masked", "class", "gpt2"])
def test_what_stands_beside_the_ids_takes_part(kind):
    """In every pass, of both texts: the same as of a model that has it among its positions."""
    one, twin = with_types_at_places(kind)
    read = LogitDifference(1, 0) if kind == "class" else LogitDifference(9, 23, 4)
    clean, other = two_texts(changed=(2, 4))
    columns = {"token_type_ids": TYPES}
    found = measure_answer(open_model(one), clean, other, read, columns=columns, progress=False)
    expected = measure_answer(open_model(twin), clean, other, read, progress=False)
    with torch.no_grad():
        rows = [one(ids[None], token_type_ids=TYPES[None]).logits[0] for ids in (clean, other)]
    values = [read.read(row[None]) for row in rows]
    assert (found.value, found.other_value) == near([float(v) for v in values])
    alone = Question(open_model(one), clean, other, read).clean
    assert abs(alone.value - found.value) > 1e-3
    for name, value in vars(expected).items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(
                getattr(found, name), value, atol=1e-4, rtol=1e-3, equal_nan=True
            )
        elif name not in ("record", "forwards", "notes"):
            assert getattr(found, name) == (near(value) if isinstance(value, float) else value)
    # a cut reads them from the answer
    if len(found.places):
        cut = measure.measure_cut(open_model(one), found, [0], read)
        assert cut == near(measure.measure_cut(open_model(twin), expected, [0], read))
