"""What an edit does to outputs of other kinds: classes, one number, places; by plain transformers.

The edit empties a head, of which the plain model's next matrix reads zeros.
"""

import pytest
import torch
from torch import nn

from infoflow_lens import InfoFlowError, ask, run_probes
from infoflow_lens.hooks import (
    EditsOfPass,
    EmbeddingCosine,
    FunctionOfOutput,
    LogitDifference,
    LogProbability,
    NextTokenLoss,
    measure_mechanisms,
)
from tests.hooks.test_invariants import empty_one_head
from tests.reference import families

LENGTHS = (8, 4, 6)
CLASSIFIER = ("AutoModelForSequenceClassification",)
PLACES = ("AutoModelForQuestionAnswering",)


def texts():
    ids = torch.randint(3, 100, (len(LENGTHS), 8), generator=torch.Generator().manual_seed(2))
    return [row[:n] for row, n in zip(ids, LENGTHS, strict=True)]


def run_by_hand(plain, edited):
    """What the model gives of each text alone, in float64."""

    def empty(module, args):
        z = args[0].clone()
        z[..., 8:16] = 0
        return (z, *args[1:])

    dense = plain.bert.encoder.layer[1].attention.output.dense
    handle = dense.register_forward_pre_hook(empty) if edited else None
    with torch.no_grad():
        found = [plain(row[None])[0][0].double() for row in texts()]
    if handle is not None:
        handle.remove()
    return found


def measure(plain, batch_size=3, **asked):
    probe = EditsOfPass(empty_one_head, **asked)
    (found,) = run_probes(plain, texts(), [probe], progress=False, batch_size=batch_size)
    return found


def near(value):
    return pytest.approx(value, rel=2e-3, abs=1e-8)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_padding_is_no_place_of_an_answer(batch_size):
    """The places that a text was padded with had a share of the probability."""
    plain = families.build("bert", auto=PLACES)
    bare, edited = run_by_hand(plain, False), run_by_hand(plain, True)
    pairs = [(one.log_softmax(-1), two.log_softmax(-1)) for one, two in zip(bare, edited)]
    expected = [float((p.exp() * (p - q)).sum()) for p, q in pairs]
    assert measure(plain, batch_size).lost[:, 0].tolist() == near(expected)
    first = FunctionOfOutput(lambda logits: logits.log_softmax(-1)[:, -1])
    by_readout = measure(plain, batch_size, readout=first)
    assert by_readout.bare.tolist() == near([float(p[-1]) for p, _ in pairs])
    squares = measure(plain, batch_size, metric="nmse")
    change = torch.cat(edited) - torch.cat(bare)
    fraction = change.square().mean() / torch.cat(bare).var(correction=0)
    assert float(squares.damage()[0]) == near(float(fraction))


@pytest.mark.parametrize("kind", ["one number", "several labels"])
def test_outputs_that_are_no_distribution_are_compared_as_vectors(kind):
    """The divergence of a regression was 0 whatever was edited, and its log-probability, too."""
    several = {"num_labels": 3, "problem_type": "multi_label_classification"}
    more = {"num_labels": 1} if kind == "one number" else several
    plain = families.build("bert", auto=CLASSIFIER, **more)
    bare, edited = (torch.stack(run_by_hand(plain, on)) for on in (False, True))
    fraction = (edited - bare).square().sum() / (bare - bare.mean(0)).square().sum()
    found = measure(plain)
    assert (found.metric, float(found.damage()[0])) == ("nmse", near(float(fraction)))
    message = "output is one number" if kind == "one number" else "each true or not"
    with pytest.raises(InfoFlowError, match=f"compares distributions, .*{message}"):
        measure(plain, metric="kl")
    with pytest.raises(InfoFlowError, match=message):
        measure(plain, readout=LogProbability(0))
    if kind == "one number":
        with pytest.raises(InfoFlowError, match="one number, which minus the mean"):
            measure(plain, readout=LogitDifference(0))


@pytest.mark.parametrize(
    ("kind", "auto"),
    [("gpt2", ("AutoModel",)), ("gpt2", CLASSIFIER), ("gpt2", PLACES), ("bert", CLASSIFIER)],
)
def test_what_gives_no_logits_of_tokens_has_no_loss_of_them(kind, auto):
    """States were read as logits, and classes ended in an error of PyTorch."""
    plain = families.build(kind, auto=auto)
    with pytest.raises(InfoFlowError, match="no logits of a next token"):
        measure(plain, readout=NextTokenLoss())
    with pytest.raises(InfoFlowError, match=r"no logits of a next token|output is a vector"):
        measure_mechanisms(plain, texts(), metric="loss", progress=False)


def test_an_encoder_has_no_next_token_loss():
    """Its logits are of the token that stands at a position, which it has seen."""
    with pytest.raises(InfoFlowError, match="attend to later keys"):
        measure(families.build("bert"), metric="loss")


def test_why_an_answer_begins_at_a_place():
    """It asked a state alone for a choice of places, and was refused by the wrong number."""
    plain, text = families.build("bert", auto=PLACES), texts()[0]
    other = text.clone()
    other[2] = 50
    found = ask(plain, text, 3, 5, other, progress=False, exact=True, quick=True)
    with torch.no_grad():
        one, two = (plain(ids[None]).start_logits[0].double() for ids in (text, other))
    expected = [float(row[3] - row[5]) for row in (one, two)]
    assert [found.value, found.other_value] == near(expected)
    assert "place 3 has" in found.summary()
    z = []
    dense = plain.bert.encoder.layer[1].attention.output.dense
    handle = dense.register_forward_pre_hook(lambda module, args: z.append(args[0].clone()))
    with torch.no_grad():
        plain(other[None])
    handle.remove()

    def exchange(module, args):
        z[0][..., :8], z[0][..., 16:] = args[0][..., :8], args[0][..., 16:]
        return (z[0],)

    handle = dense.register_forward_pre_hook(exchange)
    with torch.no_grad():
        edited = plain(text[None]).start_logits[0].double()
    handle.remove()
    heads = found.to_frame("heads").set_index("name")["effect"]
    assert heads["1.1"] == pytest.approx(
        float(edited[3] - edited[5] - one[3] + one[5]), rel=1e-3, abs=1e-6
    )
    with pytest.raises(InfoFlowError, match="are positions of the text"):
        ask(plain, text, "Paris", progress=False)


def test_a_text_of_one_token_loses_no_next_token_whatever_the_batch():
    """Alone it was not measured (NaN), and in a batch it lost 0."""
    plain, rows = families.build("gpt2"), [texts()[0], texts()[1][:1]]
    alone, both = (
        run_probes(plain, rows, [EditsOfPass(empty_one_head)], batch_size=n, progress=False)[0]
        for n in (1, 2)
    )
    assert alone.rise[1].tolist() == both.rise[1].tolist() == [0]
    torch.testing.assert_close(alone.risen(), both.risen(), rtol=1e-3, atol=1e-7)
    assert (alone.n_tokens.tolist(), alone.bare[1]) == ([7, 0], 0)


class Pooled(nn.Module):
    """A user's own module around an encoder, which gives an embedding of each text."""

    def __init__(self):
        super().__init__()
        self.inner = families.build("bert", auto=("AutoModel",))
        self.config = self.inner.config

    def forward(self, input_ids, attention_mask=None):
        return self.inner(input_ids, attention_mask).last_hidden_state[:, 0]


def test_an_embedding_is_no_distribution_and_as_many_classes_are_one():
    """Pooled states were compared by the divergence of their softmax."""
    assert measure(Pooled()).metric == "nmse"
    with pytest.raises(InfoFlowError, match="output is a vector"):
        measure(Pooled(), metric="kl")
    assert measure(families.build("bert", auto=CLASSIFIER, num_labels=32)).metric == "kl"


@pytest.mark.parametrize(
    "readout",
    [
        LogitDifference((3, 5, 9), 7),
        LogitDifference(3),
        LogProbability((3, 5)),
        EmbeddingCosine(torch.linspace(-1, 1, 40)),
    ],
    ids=str,
)
def test_half_precision_is_read_as_wide_as_the_same_numbers_in_double(readout):
    output = (6 * torch.randn(8, 5, 40, generator=torch.Generator().manual_seed(0))).bfloat16()
    torch.testing.assert_close(
        readout.read(output).double(), readout.read(output.double()), rtol=1e-5, atol=1e-5
    )
