"""Opened models that mix padding in before they mask it are found by running them, and refused."""

import pytest
import torch
import transformers
from torch import nn

from infoflow_lens import InfoFlowError, JacobianInfluence, attach, open_model, run_probes
from infoflow_lens.hooks import PatternsProbe
from infoflow_lens.hooks.model.call import output_of
from infoflow_lens.hooks.model.inputs import accepts_padding, read_inputs
from tests.conftest import some_of
from tests.reference import families

# convolutions over neighbours, beside attention or of its values
LEAKING = ("convbert", "nystromformer")
LENGTHS = (8, 4, 6)


@pytest.fixture(params=LEAKING)
def model(request):
    return families.build(request.param)


def rows():
    ids = torch.randint(3, 100, (len(LENGTHS), 8), generator=torch.Generator().manual_seed(2))
    return [row[:n] for row, n in zip(ids, LENGTHS, strict=True)]


def padded():
    ids = nn.utils.rnn.pad_sequence(rows(), batch_first=True)
    return ids, (torch.arange(8) < torch.tensor(LENGTHS)[:, None]).long()


def test_what_is_padded_there_is_another_state(model):
    """In transformers alone."""
    ids, mask = padded()
    with torch.no_grad():
        whole = model(ids, attention_mask=mask)[0][1, :4]
        alone = model(rows()[1][None])[0][0]
    assert (whole - alone).abs().max() > 0.01 * alone.abs().max()


def test_padded_calls_are_refused_and_sequences_run_by_their_length(model):
    named = open_model(model)
    assert not accepts_padding(named)
    ids, mask = padded()
    message = rf"{type(model).__name__} gives other activations .*batch_size=1"
    with attach(named, PatternsProbe()), pytest.raises(InfoFlowError, match=message):
        named(ids, attention_mask=mask)
    (together,) = run_probes(model, rows(), [PatternsProbe()], progress=False)
    for index, row in enumerate(rows()):
        with torch.no_grad():
            expected = model(row[None], output_attentions=True).attentions
        for layer, pattern in zip(together.patterns, expected, strict=True):
            found = layer[index, :, : len(row), : len(row)]
            if found.shape == pattern[0].shape:
                torch.testing.assert_close(found, pattern[0], rtol=0, atol=1e-6)
    run_probes(model, rows(), [JacobianInfluence(positions=(-1,))], batch_size=3, progress=False)


@pytest.mark.parametrize(("landmarks", "length"), [(4, 8), (2, 32)])
def test_attention_to_landmarks_is_refused(landmarks, length):
    """Such a model runs on texts of one length alone, and its keys are no tokens."""
    sizes = {"num_landmarks": landmarks, "segment_means_seq_len": length}
    model = families.build("nystromformer", **sizes)
    message = f"{landmarks} queries over {landmarks} keys where its stream has {length} positions"
    with pytest.raises(InfoFlowError, match=message):
        open_model(model)


def test_nobody_sees_how_it_is_found_out(model):
    named = open_model(model)
    model.train()
    seen, state = [], torch.get_rng_state()
    named.add_hook("blocks.0.attn.hook_pattern", lambda pattern, hook: seen.append(pattern))
    with attach(named, PatternsProbe()) as probes:
        assert not named.takes_padding
    assert model.training
    assert not seen
    assert probes[0].n_sequences == 0
    assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize(
    "kind",
    some_of([k for k in families.KINDS if k not in LEAKING], "gpt2", "bert", "roberta", "lfm2"),
)
def test_all_others_take_padding(kind):
    try:
        named = open_model(families.build(kind))
    except (InfoFlowError, TypeError, ValueError) as error:
        pytest.skip(str(error)[:80])
    assert named.takes_padding


def test_a_classifier_without_a_pad_token_asks_for_one():
    plain = transformers.GPT2ForSequenceClassification(families.build("gpt2").config)
    plain.config.pad_token_id = None
    with pytest.raises(InfoFlowError, match=r"no padding token.*set model.config.pad_token_id"):
        open_model(plain)
    plain.config.pad_token_id = 3
    assert open_model(plain).takes_padding


class MeanOfStates(nn.Module):
    """A classifier of a user's own, whose mean forgets the mask or does not."""

    def __init__(self, keeps_mask):
        super().__init__()
        self.base, self.keeps_mask = families.build("bert").bert, keeps_mask
        self.config = self.base.config

    def forward(self, input_ids, attention_mask=None):
        states = self.base(input_ids, attention_mask=attention_mask).last_hidden_state
        if attention_mask is None or not self.keeps_mask:
            return states.mean(dim=1)
        real = attention_mask[..., None].float()
        return (states * real).sum(dim=1) / real.sum(dim=1)


@pytest.mark.parametrize("keeps_mask", [True, False])
def test_an_output_that_reads_padding_is_that_of_each_text_alone(keeps_mask):
    """It was that of a text and its padding, in silence."""
    plain = MeanOfStates(keeps_mask).eval()
    model = open_model(plain)
    texts = [torch.arange(3, 3 + n) for n in (4, 7)]
    given = list(read_inputs(model, texts).batches(2))
    assert len(given) == (1 if keeps_mask else 2)
    found = torch.cat([output_of(model, batch) for batch in given])
    expected = torch.cat([plain(text[None]) for text in texts])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_model_that_takes_no_mask_and_sees_later_positions_is_run_by_length():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(50, 12)
            layer = nn.TransformerEncoderLayer(12, 3, 20, dropout=0.0, batch_first=True)
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, input_ids):
            return self.layers(self.embed(input_ids))

    torch.manual_seed(0)
    assert not accepts_padding(open_model(Encoder().eval()))
