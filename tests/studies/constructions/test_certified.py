"""A feasible certificate comes with a model that runs; an infeasible one with no way round it."""

import itertools

import pytest
import torch

from infoflow_lens import InfoFlowError, load_task
from infoflow_lens.studies.certificates.separability import check_witness, one_layer_certificate
from infoflow_lens.studies.constructions import build_construction, certified_model

FEW_TEMPLATES = {"n_words": 20, "length": 3}


def few_substitutions(task, per_template):
    """Sequences of every template, some of each."""
    x, y = task.sample(2000, seed=0)
    chosen = [(y == label).nonzero()[:per_template, 0] for label in range(task.n_labels)]
    rows = torch.cat(chosen)
    return x[rows], y[rows]


@pytest.mark.parametrize(
    "data",
    [
        load_task("memorization", n_words=5, length=4, n_sequences=60).all_sequences(),
        load_task("memorization", n_sequences=300).all_sequences(),
        few_substitutions(load_task("template_matching", **FEW_TEMPLATES), 10),
        load_task("in_context_qa").sample(200, seed=0),
    ],
    ids=["memorization", "memorization at the paper's size", "templates", "questions"],
)
def test_the_hosted_model_is_right_on_every_sequence_with_the_certified_margin(data):
    x, y = data
    certificate = one_layer_certificate(data)
    assert certificate.feasible
    model = certified_model(certificate)
    with torch.no_grad():
        logits = torch.cat([model(part)[:, -1] for part in x.split(100)]).double()
    torch.testing.assert_close(logits, certificate.model(x), rtol=1e-6, atol=1e-3)
    index = torch.searchsorted(torch.tensor(certificate.classes), y)
    right = logits.gather(1, index[:, None])[:, 0]
    others = logits.scatter(1, index[:, None], -torch.inf).amax(dim=1)
    assert float((right - others).min()) == pytest.approx(certificate.margin)


def four_sequences():
    """a -> 1 b -> 2 a?, and so on: the set of the proof of Theorem 2."""
    task = load_task("in_context_qa", n_questions=2, n_answers=2, n_pairs=2)
    x, y = task.all_sequences()
    kept = (x[:, 0] == 0).nonzero()[:, 0]
    return x[kept], y[kept]


def test_four_sequences_are_too_many_and_any_three_are_not():
    x, y = four_sequences()
    assert len(x) == 4
    certificate = one_layer_certificate((x, y))
    assert not certificate.feasible
    assert check_witness(x, y, certificate.witness)
    assert {abs(value) for value in certificate.witness.values} == {1}
    assert float(certificate.accuracy_bound) == 0.75
    with pytest.raises(InfoFlowError, match="certificate is infeasible"):
        certified_model(certificate)
    for three in itertools.combinations(range(4), 3):
        assert one_layer_certificate((x[list(three)], y[list(three)])).feasible


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("in_context_qa", {"n_questions": 2, "n_answers": 2, "n_pairs": 2}),
        *(
            pytest.param(
                "in_context_qa",
                {"n_questions": 3, "n_answers": 3, "n_pairs": n},
                marks=pytest.mark.slow,
            )
            for n in (2, 3)
        ),
        pytest.param("template_matching", {"n_words": 4, "length": 2}, marks=pytest.mark.slow),
        ("template_matching", {"n_words": 4, "length": 3}),
    ],
)
def test_one_relu_layer_fails_where_many_softmax_heads_do_not(name, sizes):
    """The certificate says for which attention it holds: the same set, one softmax layer."""
    task = load_task(name, **sizes)
    data = task.dataset("train", 2000)
    x, y = task.all_sequences()
    certificate = one_layer_certificate((x, y))
    assert not certificate.feasible
    assert not one_layer_certificate(data).feasible  # most of the space, with repetitions
    assert "does not hold for softmax attention with several heads" in certificate.holds_for
    model, _ = build_construction(f"{name}_one_layer", **sizes)
    assert model.cfg.n_layers == 1
    assert model(x)[:, -1].argmax(dim=1).equal(y)


@pytest.mark.parametrize("bits", [20, 33, 40])
def test_large_weights_are_hosted_exactly(bits):
    """A decision list: the first differing bit decides, so weights must grow like powers of 2."""
    rows, labels = [], []
    for first in range(bits):
        for decided in (0, 1):
            rest = [1 - decided] * (bits - first - 1)
            rows.append([2] * first + [decided] + rest + [9])
            labels.append(decided)
    x, y = torch.tensor(rows), torch.tensor(labels)
    certificate = one_layer_certificate((x, y))
    assert certificate.feasible
    logits = certified_model(certificate)(x)[:, -1].detach().double()
    own = logits.gather(1, y[:, None])[:, 0]
    other = logits.gather(1, 1 - y[:, None])[:, 0]
    assert float((own - other).min()) == certificate.margin


def test_models_too_large_to_host_are_refused():
    x = torch.tensor([[50_000, 3, 1], [4, 3, 1]])
    certificate = one_layer_certificate((x, torch.tensor([0, 1])))
    assert certificate.feasible
    with pytest.raises(InfoFlowError, match="number the tokens anew"):
        certified_model(certificate)
    with pytest.raises(InfoFlowError, match="certificate is NoneType"):
        certified_model(None)
    alone = one_layer_certificate((torch.tensor([[3], [3]]), torch.tensor([0, 0])))
    with pytest.raises(InfoFlowError, match="have a single token: expected at least one before"):
        certified_model(alone)
