"""What one attention layer can fit: every answer is checked here again, in plain integers."""

import itertools
import random
from fractions import Fraction

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from infoflow_lens import InfoFlowError
from infoflow_lens.studies.certificates import separation
from infoflow_lens.studies.certificates.separability import (
    check_witness,
    dependence,
    one_layer_certificate,
)
from tests.reference.separability import (
    embed,
    indicators,
    relu_layer,
    separable,
    softmax_layer,
    theorem_1,
)

# The sets of the paper


def four_sequences():
    """Sec. 13.1: a b are 0 1, x y are 2 3, the response sign is 4; targets x x y y."""
    a, b, x, y, sign = range(5)
    rows = [
        [a, sign, x, b, sign, y, a, sign],
        [a, sign, y, b, sign, x, b, sign],
        [a, sign, y, b, sign, x, a, sign],
        [a, sign, x, b, sign, y, b, sign],
    ]
    return rows, [x, x, y, y]


def question_answering(n_pairs):
    """All in-context sets of n_pairs questions and answers: q r a ... q r, label a."""
    sign = 2 * n_pairs
    x, y = [], []
    orders = list(itertools.permutations(range(n_pairs)))
    for questions, answers, asked in itertools.product(orders, orders, range(n_pairs)):
        blocks = [[q, sign, n_pairs + a] for q, a in zip(questions, answers)]
        x.append([*itertools.chain(*blocks), questions[asked], sign])
        y.append(answers[asked])
    return x, y


def template(words):
    """The string of wildcards that the words follow, such as (0, 1, 0)."""
    names = {}
    return tuple(names.setdefault(word, len(names)) for word in words)


def templates(length, n_words):
    """Every string of words with its template as the label; n_words is the CLS token."""
    x = [[*words, n_words] for words in itertools.product(range(n_words), repeat=length)]
    kinds = sorted({template(row[:-1]) for row in x})
    return x, [kinds.index(template(row[:-1])) for row in x]


def few_substitutions(length, n_words, each, seed):
    """`each` strings of every template."""
    x, y = templates(length, n_words)
    rng = random.Random(seed)
    rows = [
        row
        for label in sorted(set(y))
        for row in rng.sample([r for r, kind in zip(x, y) if kind == label], each)
    ]
    lookup = {tuple(row): label for row, label in zip(x, y)}
    return rows, [lookup[tuple(row)] for row in rows]


def memorization(n_sequences, length, n_words, seed):
    """Different random sequences with different labels."""
    rng = random.Random(seed)
    rows = {tuple(rng.randrange(n_words) for _ in range(length - 1)) for _ in range(n_sequences)}
    x = [[*row, n_words] for row in sorted(rows)]
    return x, list(range(len(x)))


def tensors(x, y):
    return torch.tensor(x), torch.tensor(y)


def verified(x, y):
    """The certificate, after checking it with Python integers and by running its model."""
    certificate = one_layer_certificate(tensors(x, y))
    labels = sorted(set(y))
    assert list(certificate.classes) == labels
    if certificate.feasible:
        assert certificate.witness is None
        index = {tuple(pair): k for k, pair in enumerate(certificate.features.tolist())}
        weights = certificate.weights.tolist()
        margins = []
        for row, label in zip(x, y):
            features = [index[p, token] for p, token in enumerate(row[:-1])]
            scores = [sum(weights[f][c] for f in features) for c in range(len(labels))]
            own = scores.pop(labels.index(label))
            margins += [own - score for score in scores]
        if margins:
            assert min(margins) == certificate.margin >= 1
        logits = certificate.model(torch.tensor(x))
        right = logits.argmax(dim=1)
        assert [labels[c] for c in right.tolist()] == y
        assert ((logits == logits.max(dim=1, keepdim=True).values).sum(dim=1) == 1).all()
    else:
        assert certificate.model is certificate.weights is certificate.margin is None
        matrix = certificate.witness.dense()
        assert matrix.shape == (len(x), len(labels))
        assert matrix.any()
        totals = {}
        for row, label, entries in zip(x, y, matrix.tolist()):
            assert sum(entries) == 0
            for c, entry in enumerate(entries):
                assert isinstance(entry, int)
                assert entry >= 0 if labels[c] == label else entry <= 0
                for feature in enumerate(row):
                    totals[feature, c] = totals.get((feature, c), 0) + entry
        assert not any(totals.values())
        assert check_witness(*tensors(x, y), certificate.witness)
    return certificate


def test_the_four_sequences_have_a_witness_of_ones():
    x, y = four_sequences()
    certificate = verified(x, y)
    assert not certificate.feasible
    assert set(certificate.witness.values) <= {-1, 0, 1}
    assert certificate.witness.support == (0, 1, 2, 3)
    assert certificate.accuracy_bound == Fraction(3, 4)
    assert "cannot fit" in str(certificate)
    assert "3/4" in certificate.describe()


@pytest.mark.parametrize("left_out", range(4))
def test_any_three_of_the_four_are_feasible(left_out):
    x, y = four_sequences()
    certificate = verified(x[:left_out] + x[left_out + 1 :], y[:left_out] + y[left_out + 1 :])
    assert certificate.feasible
    assert certificate.accuracy_bound == 1


@pytest.mark.parametrize("n_pairs", [2, 3])
def test_full_question_answering_is_infeasible(n_pairs):
    assert not verified(*question_answering(n_pairs)).feasible


@pytest.mark.parametrize(("length", "n_words"), [(2, 3), (2, 4), (3, 3), (3, 4)])
def test_templates_with_all_substitutions_are_infeasible(length, n_words):
    assert not verified(*templates(length, n_words)).feasible


def test_templates_with_few_substitutions_are_feasible():
    x, y = few_substitutions(3, 20, 10, seed=1)
    assert len(x) == 50
    assert verified(x, y).feasible


def test_memorization_is_feasible_even_if_dependent():
    x = [[*row, 4] for row in itertools.product(range(4), repeat=3)]
    assert dependence(x).dependent
    certificate = verified(x, list(range(len(x))))
    assert certificate.feasible
    assert certificate.margin >= 1


@pytest.mark.slow
def test_memorization_of_two_thousand():
    x, y = memorization(2000, 7, 500, seed=3)
    assert verified(x, y).feasible


def test_random_labels_on_a_small_vocabulary_are_infeasible():
    """More sequences than weights: the witness has large integers and is still exact."""
    rng = random.Random(5)
    x = [[rng.randrange(4) for _ in range(5)] + [4] for _ in range(130)]
    y = [rng.randrange(3) for _ in x]
    seen = {}
    x, y = zip(*[(row, label) for row, label in zip(x, y) if seen.setdefault(str(row), 1)])
    assert not verified(list(x), list(y)).feasible


def test_one_class_and_one_sequence_are_feasible():
    certificate = verified([[1, 2, 9], [2, 1, 9]], [5, 5])
    assert certificate.feasible
    assert certificate.margin is None
    assert "one class" in certificate.describe()
    assert verified([[3]], [0]).feasible


def test_a_sequence_with_two_labels_is_its_own_witness():
    certificate = verified([[1, 2, 9], [2, 2, 9], [1, 2, 9]], [0, 1, 1])
    assert not certificate.feasible
    assert certificate.witness.support == (0, 2)
    assert not verified([[7], [7]], [0, 1]).feasible


def test_question_answering_from_many_words_is_feasible():
    """A sample of a large set may fit though the set does not: pairs of answers rarely meet."""
    rng = random.Random(4)
    x, y = [], []
    for _ in range(700):
        questions, answers = rng.sample(range(40), 2), rng.sample(range(40, 80), 2)
        asked = rng.randrange(2)
        blocks = [[q, 80, a] for q, a in zip(questions, answers)]
        x.append([*blocks[0], *blocks[1], questions[asked], 80])
        y.append(answers[asked])
    assert verified(x, y).feasible


# Against an independent program


@st.composite
def small_sets(draw):
    n_words, length = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    n = draw(st.integers(1, 14))
    word = st.integers(0, n_words)
    x = draw(st.lists(st.lists(word, min_size=length, max_size=length), min_size=n, max_size=n))
    y = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    return [[*row, 8] for row in x], y


@given(small_sets())
def test_the_verdict_is_that_of_a_dense_program(pair):
    x, y = pair
    assert verified(x, y).feasible == separable(x, y)


@pytest.mark.parametrize("seed", range(12))
def test_linear_programs_alone_give_the_same_verdict(seed, monkeypatch):
    """Without descent, and with a first working set that is far too small."""

    def no_descent(problem, iterations=0):
        hinges = np.ones((len(problem), problem.n_classes))
        hinges[np.arange(len(problem)), problem.y] = 0
        return np.zeros((len(problem.sequences.features), problem.n_classes)), hinges

    monkeypatch.setattr(separation, "_descend", no_descent)
    monkeypatch.setattr(separation, "_MOST_PAIRS", 5)
    rng = random.Random(seed)
    x = [[rng.randrange(4 + seed % 3) for _ in range(4)] + [7] for _ in range(40)]
    y = [rng.randrange(4) for _ in x]
    assert verified(x, y).feasible == separable(x, y)


@given(small_sets(), st.randoms(use_true_random=False))
def test_names_and_orders_do_not_matter(pair, rng):
    x, y = pair
    order = rng.sample(range(len(x)), len(x))
    positions = rng.sample(range(len(x[0]) - 1), len(x[0]) - 1)
    names = rng.sample(range(50), 9)
    moved = [[names[x[i][p]] for p in positions] + [names[x[i][-1]]] for i in order]
    labels = rng.sample(range(9), 4)
    assert (
        verified(moved, [labels[y[i]] for i in order]).feasible
        == one_layer_certificate(tensors(x, y)).feasible
    )


@given(small_sets())
def test_dependence_is_rank_deficiency(pair):
    x, _ = pair
    rank = np.linalg.matrix_rank(indicators(x))
    result = dependence(x)
    assert result.rank == rank
    assert result.n_dependences == len(x) - rank
    assert result.dependent == (rank < len(x))
    check_dependence(x, result)


def check_dependence(x, result):
    totals = {}
    for i, coefficient in zip(result.indices, result.coefficients):
        assert isinstance(coefficient, int)
        assert coefficient != 0
        for feature in enumerate(x[i]):
            totals[feature] = totals.get(feature, 0) + coefficient
    assert not any(totals.values())


# The model


@pytest.mark.parametrize(
    "make",
    [
        lambda: few_substitutions(3, 20, 4, seed=2),
        lambda: memorization(9, 5, 4, seed=1),
        lambda: [rows[:3] for rows in four_sequences()],
    ],
)
def test_the_model_is_that_of_dense_matrices(make):
    x, y = make()
    certificate = verified(x, y)
    model = certificate.model
    vocabulary = sorted({token for row in x for token in row})
    matrices = theorem_1(
        certificate.weights.tolist(), certificate.features.tolist(), vocabulary, len(x[0])
    )
    query_key, value, classifier = matrices
    logits = model(torch.tensor(x))
    for row, got in zip(x, logits):
        state = relu_layer(embed(row, vocabulary, len(certificate.classes)), query_key, value)
        np.testing.assert_array_equal(classifier @ state[:, -1], got.numpy())
    assert model.n_heads == len(x[0]) - 1


def test_the_model_runs_on_other_sequences_of_its_words():
    x, y = memorization(9, 5, 4, seed=1)
    model = one_layer_certificate(tensors(x, y)).model
    assert model(torch.tensor([[0, 0, 0, 0, 4]])).shape == (1, 9)
    with pytest.raises(InfoFlowError, match="token 77 is in no sequence"):
        model(torch.tensor([[0, 77, 0, 0, 4]]))
    with pytest.raises(InfoFlowError, match="expected \\[batch, 5\\]"):
        model(torch.tensor([[0, 0, 4]]))


# Witnesses of others


def test_wrong_witnesses_are_refused():
    x, y = tensors(*four_sequences())
    good = torch.tensor([[1, -1], [1, -1], [-1, 1], [-1, 1]])
    assert check_witness(x, y, good)
    assert check_witness(x, y, 7 * good)
    assert check_witness(x, y, sparse.coo_matrix(good.numpy()))
    assert not check_witness(x, y, sparse.csr_matrix(-good.numpy()))
    named = one_layer_certificate((x, y)).witness
    assert check_witness(x, y, named)
    assert not check_witness(x, y + 1, named)  # of other labels
    assert not check_witness(x, y, -good)
    assert not check_witness(x, y, 0 * good)
    for i, c in itertools.product(range(4), range(2)):
        changed = good.clone()
        changed[i, c] *= 2
        assert not check_witness(x, y, changed)
    assert not check_witness(x, y, good * torch.tensor([[1], [0], [1], [0]]))
    with pytest.raises(InfoFlowError, match=r"shape \[3, 2\]: expected \[4, 2\]"):
        check_witness(x, y, good[:3])
    with pytest.raises(InfoFlowError, match="expected integers"):
        check_witness(x, y, good.double())


def test_the_verdict_says_for_what_it_holds():
    infeasible = one_layer_certificate(tensors(*four_sequences())).holds_for
    assert "any number of heads" in infeasible
    assert "softmax attention with a single head" in infeasible
    assert "does not hold for softmax attention with several heads" in infeasible
    feasible = one_layer_certificate(tensors(*memorization(9, 5, 4, seed=1))).holds_for
    assert "4 heads or more" in feasible


# Dependence (Def. 3, Props 7 to 10)


def test_the_example_of_definition_3():
    """(a b r) + (b a r) = (a a r) + (b b r)."""
    result = dependence([[0, 1, 2], [1, 0, 2], [0, 0, 2], [1, 1, 2]])
    assert (result.rank, result.n_dependences) == (3, 1)
    sign = result.coefficients[0]
    assert tuple(sign * value for value in result.coefficients) == (1, 1, -1, -1)


def test_labels_of_dependent_sequences_exclude_one_layer_or_do_not():
    x, y = four_sequences()
    assert not verified(x, y).feasible
    assert verified(x, [0, 1, 0, 1]).feasible


def dependent_sequences():
    x, y = question_answering(3)
    return [row for row, _ in zip(x, y)][:60]


@pytest.mark.parametrize("seed", range(3))
def test_one_relu_layer_keeps_dependence(seed):
    """Props 7 and 8, for random weights."""
    x = dependent_sequences()
    vocabulary = sorted({token for row in x for token in row})
    rng = np.random.default_rng(seed)
    size = len(embed(x[0], vocabulary, 2))
    query_key, value = rng.normal(size=(2, 5, size, size))
    classifier = rng.normal(size=(3, size))
    states = [relu_layer(embed(row, vocabulary, 2), query_key, value)[:, -1] for row in x]
    result = dependence(x)
    assert result.dependent
    assert result.combine(torch.tensor(np.array(states))).abs().max() < 1e-9
    outputs = torch.tensor(np.array([classifier @ state for state in states]))
    assert outputs.abs().max() > 1
    assert result.combine(outputs).shape == (3,)
    assert result.combine(outputs).abs().max() < 1e-9


@pytest.mark.parametrize("seed", range(3))
def test_one_softmax_head_keeps_dependence_with_normalisers(seed):
    """Props 9 and 10; without the normalisers the sum does not vanish."""
    x = dependent_sequences()
    vocabulary = sorted({token for row in x for token in row})
    rng = np.random.default_rng(seed)
    size = len(embed(x[0], vocabulary, 2))
    query_key, value = rng.normal(size=(2, size, size))
    pairs = [softmax_layer(embed(row, vocabulary, 2), query_key, value) for row in x]
    outputs = torch.tensor(np.array([output for output, _ in pairs]))
    normalisers = torch.tensor([normaliser for _, normaliser in pairs])
    result = dependence(x)
    scale = float(normalisers.max())
    assert result.combine(outputs, normalisers / scale).abs().max() < 1e-9
    assert result.combine(outputs).abs().max() > 1e-3


def test_dependences_with_large_integers_are_exact():
    rng = random.Random(8)
    x = [[rng.randrange(9) for _ in range(6)] + [9] for _ in range(70)]
    result = dependence(x)
    assert result.rank == np.linalg.matrix_rank(indicators(x)) < 70
    check_dependence(x, result)


def test_independent_sequences_have_no_dependence():
    result = dependence([[0, 1, 9], [1, 0, 9], [0, 0, 9]])
    assert not result.dependent
    assert result.n_dependences == 0
    assert result.coefficients == ()
    with pytest.raises(InfoFlowError, match="independent: there is nothing to combine"):
        result.combine(torch.zeros(3, 2))


# Input


def dataset(**columns):
    return datasets.Dataset.from_dict(columns)


def test_datasets_pairs_and_arrays_are_the_same():
    x, y = four_sequences()
    names = datasets.ClassLabel(names=["a", "b", "x", "y", "="])
    features = datasets.Features({"x": datasets.Sequence(names), "y": names})
    expected = one_layer_certificate(tensors(x, y))
    for data in (
        dataset(x=x, y=y),
        datasets.Dataset.from_dict({"x": x, "y": y}, features=features),
        dataset(x=x, y=y).with_format("torch"),
        (np.array(x, dtype=np.uint8), np.array(y, dtype=np.int32)),
        (x, y),
    ):
        certificate = one_layer_certificate(data)
        assert certificate.witness == expected.witness
        assert certificate.classes == expected.classes
    assert dependence(dataset(x=x)) == dependence(np.array(x)) == dependence((x, y))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (dataset(x=[[1, 2]], label=[0]), r"columns \['x', 'label'\], without y"),
        (dataset(text=[[1, 2]], y=[0]), r"columns \['text', 'y'\], without x"),
        (dataset(x=[], y=[]), "is empty: expected at least one sequence"),
        (dataset(x=[[1, 2], [1, 2, 2]], y=[0, 1]), r"lengths 2, 3: expected one length"),
        (dataset(x=[[1.5, 2.0]], y=[0]), "x holds 1.5 .*: expected integers"),
        (dataset(x=[[1, 2]], y=["cat"]), "y holds 'cat' .*: expected integers"),
        (dataset(x=[[1, 2], [1, 3]], y=[0, 1]), "end in tokens 2, 3: expected the same last"),
        (([[1, 2], [-4, 2]], [0, 1]), "x holds -4: expected ids of 0 or more"),
        (([[1, 2], [4, 2]], [0, -1]), "y holds -1: expected ids of 0 or more"),
        (([[1, 2]], [0, 1]), "x has 1 sequences but y has 2 labels"),
        (([1, 2], [0, 1]), r"x\[0\] is 1: expected a sequence"),
        ((torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)), "x holds 0.0 .*: expected int"),
        ((torch.zeros(2, 3, 1).long(), torch.zeros(2).long()), r"shape \(2, 3, 1\)"),
        (([[True, False]], [0]), "x holds True .*: expected integers"),
        (([[]], [0]), r"shape \(1, 0\)"),
        ((np.zeros((2, 0), int), np.zeros(2, int)), "have no token: expected at least one"),
        ({"x": [[1, 2]], "y": [0]}, "the dataset is dict: expected a datasets.Dataset"),
        ((np.zeros((5001, 2), int), np.zeros(5001, int)), "5001 sequences: expected at most 5000"),
    ],
)
def test_bad_sets_are_refused(data, message):
    with pytest.raises(InfoFlowError, match=message):
        one_layer_certificate(data)


def test_the_limit_can_be_moved():
    x, y = four_sequences()
    with pytest.raises(InfoFlowError, match="4 sequences: expected at most 3"):
        one_layer_certificate((x, y), max_sequences=3)
    many = (np.zeros((5001, 2), int), np.zeros(5001, int))
    assert one_layer_certificate(many, max_sequences=6000).feasible
    with pytest.raises(InfoFlowError, match="expected at most 3"):
        dependence(x, max_sequences=3)


def test_bad_questions_to_a_dependence_are_refused():
    result = dependence(four_sequences()[0])
    with pytest.raises(InfoFlowError, match="outputs have 3 rows: expected 4"):
        result.combine(torch.zeros(3, 2))
    with pytest.raises(InfoFlowError, match="normalisers have 5 rows: expected 4"):
        result.combine(torch.zeros(4, 2), torch.zeros(5))


def test_equal_sequences_with_different_labels_are_called_a_mistake_in_the_data():
    certificate = one_layer_certificate(([[0, 1, 9], [0, 2, 9], [0, 1, 9]], [0, 0, 1]))
    assert not certificate.feasible
    assert certificate.contradiction == (0, 2)
    assert "Sequences 0 and 2 are equal but have different labels" in certificate.describe()
    assert "softmax" not in certificate.holds_for


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (["a b ?"], "expected a datasets.Dataset"),
        ((["a b ?", "b a ?"], [0, 1]), r"x\[0\] is 'a b \?'"),
        ((5, 6), "x is 5"),
        ((torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64)), "x holds"),
        (datasets.DatasetDict({"train": dataset(x=[[1]], y=[0])}), "expected one split"),
    ],
)
def test_what_is_no_set_of_sequences_is_named(data, message):
    with pytest.raises(InfoFlowError, match=message):
        one_layer_certificate(data)


def test_endless_data_are_refused():
    from infoflow_lens import load_task

    stream = load_task("in_context_qa").dataset("train", None)
    with pytest.raises(InfoFlowError, match="endless IterableDataset"):
        one_layer_certificate(stream)
