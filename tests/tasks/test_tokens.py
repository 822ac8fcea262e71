"""Tasks over token ids: what they ask, what they depend on, and splits that share nothing."""

import hashlib
import itertools
import json
import math
import os
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path

import datasets
import pytest
import torch
from scipy.stats import chisquare

from infoflow_lens import InfoFlowError, load_task
from infoflow_lens.tasks import list_tasks
from infoflow_lens.tasks.templates import all_patterns, patterns_of
from tests.conftest import some_of
from tests.processes import server

ROOT = Path(__file__).parents[2]
SMALL = {
    "memorization": {"n_words": 3, "length": 4, "n_sequences": 13},
    "in_context_qa": {"n_questions": 4, "n_answers": 3, "n_pairs": 2},
    "template_matching": {"n_words": 4, "length": 3},
    "in_context_template_matching": {"n_words": 3, "length": 2, "n_answers": 3, "n_pairs": 2},
    "nested_qa": {"n_entities": 6, "hops": 2, "n_chains": 2},
}
MORE = [
    *SMALL.items(),
    ("in_context_qa", {"n_questions": 3, "n_answers": 4, "n_pairs": 3}),
    ("in_context_qa", {"n_questions": 3, "n_answers": 4, "n_pairs": 1}),
    ("template_matching", {"n_words": 3, "length": 4, "templates": ("aaaa", "abab", "abac")}),
    ("template_matching", {"n_words": 3, "length": 3, "templates": ("xyx",)}),
    (
        "in_context_template_matching",
        {"n_words": 2, "length": 3, "n_answers": 2, "templates": ("aab", "abb", "aba")},
    ),
    ("nested_qa", {"n_entities": 4, "hops": 1, "n_chains": 2}),
]
CASES = pytest.mark.parametrize(("name", "sizes"), MORE)
EACH = pytest.mark.parametrize("name", SMALL)


def answer(task, names):
    """The label of a sequence of token names, from the words of the paper."""
    *context, query = [part.split() for part in " ".join(names[:-1]).replace("->", "|").split("|")]
    if task.name == "template_matching":
        first = {}
        return "".join("abcd"[first.setdefault(w, len(first))] for w in query)
    # context: [question], [answer, question], .., [answer, query]
    questions, answers = [context[0]], []
    for part in [*context[1:], query]:
        answers.append(part[0])
        questions.append(part[1:])
    asked = questions.pop()
    if task.name == "nested_qa":
        facts = {q[0]: a for q, a in zip(questions, answers, strict=True)}
        here = asked[0]
        for _ in range(task.hops):
            here = facts[here]
        return here
    if task.name == "in_context_qa":
        (found,) = [a for q, a in zip(questions, answers, strict=True) if q == asked]
        return found
    shape = [[a == b for a in asked] for b in asked]
    (found,) = [
        a
        for q, a in zip(questions, answers, strict=True)
        if [[x == y for x in q] for y in q] == shape
    ]
    return found


@CASES
def test_the_label_is_what_the_paper_asks(name, sizes):
    task = load_task(name, **sizes)
    x, y = task.all_sequences()
    if name == "memorization":
        assert y.tolist() == list(range(13))
        return
    for sequence, label in zip(x.tolist(), y.tolist(), strict=True):
        names = [task.token_names[token] for token in sequence]
        assert task.label_names[label] == answer(task, names)


@CASES
def test_the_sample_space_is_counted_and_listed_without_repetition(name, sizes):
    task = load_task(name, **sizes)
    x, y = task.all_sequences()
    assert len(x) == task.space_size == len({tuple(row) for row in x.tolist()})
    assert x.shape[1] == task.n_tokens
    assert int(x.max()) < task.d_vocab
    assert 0 <= int(y.min()) <= int(y.max()) < task.n_labels


@CASES
def test_active_positions_are_a_minimal_set_that_fixes_the_label(name, sizes):
    """By all sequences of the space: those that agree there have the label; fewer do not do."""
    task = load_task(name, **sizes)
    x, y = task.all_sequences()
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:25]
    active = task.active_index_set(x)[chosen]

    def fixed(row, positions):
        agree = (x[:, positions] == x[row, positions]).all(dim=1)
        return len(y[agree].unique()) == 1

    for row, members in zip(chosen.tolist(), active, strict=True):
        positions = members.nonzero().flatten().tolist()
        assert fixed(row, positions)
        for position in positions:
            assert not fixed(row, [p for p in positions if p != position])


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("in_context_qa", {"n_questions": 3, "n_answers": 1, "n_pairs": 1}),
        ("in_context_qa", {"n_questions": 3, "n_answers": 2, "n_pairs": 1}),
        (
            "in_context_template_matching",
            {"n_words": 3, "length": 2, "n_answers": 1, "n_pairs": 1},
        ),
        ("nested_qa", {"n_entities": 4, "hops": 1, "n_chains": 1}),
        ("nested_qa", {"n_entities": 4, "hops": 2, "n_chains": 1}),
        ("nested_qa", {"n_entities": 5, "hops": 3, "n_chains": 1}),
    ],
)
def test_active_positions_are_minimal_where_little_is_asked(name, sizes):
    """One answer, one pair, one chain (findings T9)."""
    test_active_positions_are_a_minimal_set_that_fixes_the_label(name, sizes)


@pytest.mark.parametrize("length", [18, 24, 30])
def test_labels_of_long_templates(length):
    """As one number in int64 a template of 24 words lost two of its positions (findings T1)."""
    templates = ("a" * length, "a" + "b" * (length - 1), "a" * (length - 1) + "b")
    task = load_task("template_matching", length=length, n_words=5, templates=templates)
    x, y = task.sample(400, seed=0)
    expected = [[[s == r for s in row] for r in row] for row in x[:, :length].tolist()]
    shapes = [[[s == r for s in t] for r in t] for t in templates]
    assert y.tolist() == [shapes.index(shape) for shape in expected]
    assert len(y.unique()) == 3


@EACH
def test_samples_are_uniform_over_the_papers_space(name):
    task = load_task(name, **SMALL[name])
    x, y = task.sample(20_000, seed=3)
    assert y.equal(task.target(x))
    counts = Counter(map(tuple, x.tolist()))
    space, _ = task.all_sequences()
    assert set(counts) <= set(map(tuple, space.tolist()))
    weights = torch.ones(len(space), dtype=torch.float64)
    if "template" in name:  # first templates, then substitutions
        blocks = patterns_of(space[:, task.word_places()])
        for pattern in all_patterns(task.length):
            same = (blocks == torch.tensor(pattern)).all(dim=-1).sum(dim=1)
            weights /= float(math.perm(task.n_words, max(pattern) + 1)) ** same
    expected = weights / weights.sum() * 20_000
    seen = [counts[tuple(row)] for row in space.tolist()]
    assert chisquare(seen, expected.tolist()).pvalue > 1e-3


@pytest.mark.parametrize(
    "name",
    some_of([name for name in SMALL if name != "memorization"], "in_context_qa", "nested_qa"),
)
def test_splits_share_no_sequence_and_use_up_the_space(name):
    task = load_task(name, **SMALL[name])
    parts = [
        {tuple(row) for row in task.dataset(split, 4000, seed=seed)["x"]}
        for seed, split in enumerate(("train", "validation", "test"))
    ]
    assert all(part for part in parts)
    assert not any(a & b for a, b in itertools.combinations(parts, 2))
    assert len(set.union(*parts)) > 0.9 * min(task.space_size, 4000)


def test_splits_of_a_space_too_large_to_list_share_no_sequence():
    task = load_task("in_context_qa", n_questions=9, n_answers=9, n_pairs=3)
    assert task.space_size > 20_000
    train, validation, test = (
        {tuple(row) for row in task.dataset(split, 8_000)["x"]}
        for split in ("train", "validation", "test")
    )
    assert not train & validation
    assert not train & test
    assert not validation & test


@pytest.mark.parametrize("name", ["template_matching", "in_context_template_matching"])
def test_held_out_words_are_new_in_every_split(name):
    task = load_task(name, n_words=30, length=3, holdout="words")
    words = [
        {token for row in task.dataset(split, 500)["x"] for token in row if token < 30}
        for split in ("train", "validation", "test")
    ]
    assert [len(part) for part in words] == [24, 3, 3]
    assert not any(a & b for a, b in itertools.combinations(words, 2))


def test_held_out_templates_are_new_in_every_split():
    task = load_task("in_context_template_matching", n_words=9, length=4, holdout="templates")
    seen = []
    for split in ("train", "validation", "test"):
        x = torch.tensor(task.dataset(split, 500)["x"])
        which = patterns_of(x[:, task.word_places()]).flatten(0, 1)
        seen.append({tuple(row) for row in which.tolist()})
    assert [len(part) for part in seen] == [11, 2, 2]
    assert not any(a & b for a, b in itertools.combinations(seen, 2))


@EACH
def test_datasets_name_their_tokens_and_labels(name):
    task = load_task(name, **SMALL[name])
    data = task.dataset("train", 17, seed=1)
    feature = data.features["x"].feature
    assert tuple(feature.names) == task.token_names
    assert data.features["y"].int2str(data[0]["y"]) == task.label_names[data[0]["y"]]
    rows = data.with_format("torch")[:]
    assert rows["x"].shape == (17, task.n_tokens)
    assert task.target(rows["x"]).equal(rows["y"])
    assert feature.int2str(data[0]["x"])[-1] == "->"


def test_long_templates_have_their_active_words_at_once():
    task = load_task("template_matching", length=8)
    x, _ = task.sample(200, seed=0)
    assert task.active_index_set(x)[:, :8].all()
    assert load_task("memorization", n_words=10**9, length=10**4, n_sequences=3).space_size == 3


@pytest.mark.parametrize("name", list_tasks())
def test_no_sequences_have_no_labels(name):
    task = load_task(name)
    x, _ = task.sample(2, seed=0)
    assert len(task.target(x[:0])) == len(task.active_index_set(x[:0])) == 0


DRAWN = {name: (name, SMALL.get(name, {})) for name in list_tasks()}
DRAWN["d_retrieval of 3"] = ("d_retrieval", {"n_components": 3})


def drawn(name, sizes):
    """The fingerprint of a dataset and a digest of its rows, for two splits."""
    task = load_task(name, **sizes)
    data = [task.dataset(split, n, seed=2) for split, n in (("train", 9), ("test", 40))]
    return [[d._fingerprint, hashlib.sha256(repr(d[:]).encode()).hexdigest()] for d in data]


@pytest.fixture(scope="module")
def drawn_elsewhere():
    """What another process draws, in which strings have other hashes."""
    script = (
        "import json\n"
        "from tests.tasks.test_tokens import DRAWN, drawn\n"
        "print(json.dumps({case: drawn(*DRAWN[case]) for case in DRAWN}))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("case", DRAWN)
def test_equal_arguments_give_equal_bytes_and_fingerprints_in_any_process(case, drawn_elsewhere):
    assert drawn(*DRAWN[case]) == drawn_elsewhere[case]


@pytest.mark.parametrize("name", some_of([*SMALL, "d_retrieval"], "memorization", "d_retrieval"))
def test_a_stream_is_endless_reproducible_and_of_its_split(name):
    task = load_task(name, **SMALL.get(name, {}))
    stream = task.dataset("train", None, seed=4)
    assert isinstance(stream, datasets.IterableDataset)
    first = list(stream.with_format("torch").take(1100))
    again = list(task.dataset("train", None, seed=4).with_format("torch").take(1100))
    assert all(a["x"].equal(b["x"]) for a, b in zip(first, again, strict=True))
    assert not first[0]["x"].equal(first[1024]["x"])
    x = torch.stack([row["x"] for row in first])
    torch.testing.assert_close(task.target(x), torch.stack([row["y"] for row in first]))
    if name not in ("memorization", "d_retrieval"):
        tested = {tuple(row) for row in task.dataset("test", 1000)["x"]}
        assert not tested & set(map(tuple, x.tolist()))
    assert stream.features == task.features()


def test_workers_of_a_stream_draw_different_sequences():
    stream = load_task("in_context_qa").dataset("train", None)
    parts = [
        [tuple(row["x"]) for row in stream.shard(num_shards=2, index=index).take(50)]
        for index in range(2)
    ]
    assert not set(parts[0]) & set(parts[1])


@pytest.mark.slow
def test_streams_reach_workers_that_are_no_copies_of_this_process():
    stream = load_task("in_context_qa", n_pairs=2).dataset("train", None).with_format("torch")
    assert pickle.loads(pickle.dumps(stream)).features == stream.features
    loader = torch.utils.data.DataLoader(
        stream, batch_size=16, num_workers=2, multiprocessing_context=server()
    )
    batches = [batch["x"] for batch in itertools.islice(loader, 4)]
    rows = torch.cat(batches)
    assert rows.shape == (64, 8)
    assert len(rows.unique(dim=0)) == 64


def test_sequences_read_as_in_the_paper():
    task = load_task("in_context_qa", n_questions=2, n_answers=2, n_pairs=2)
    x = torch.tensor([[0, 2, 3, 1, 2, 4, 0, 2]])
    assert task.render(x) == ["a -> 1  b -> 2  a -> ?"]
    assert task.render(x, answer=True) == ["a -> 1  b -> 2  a -> 1"]
    task = load_task("template_matching", n_words=3, length=3)
    assert task.render(torch.tensor([[0, 1, 1, 3]]), answer=True) == ["a b b -> abb"]
    task = load_task(
        "in_context_template_matching", n_words=3, length=2, n_answers=2, templates=("aa", "ab")
    )
    x = torch.tensor([[0, 0, 3, 4, 0, 1, 3, 5, 2, 2, 3]])
    assert task.render(x, answer=True) == ["a a -> 1  a b -> 2  c c -> 1"]


@pytest.mark.parametrize(("length", "bell"), [(1, 1), (2, 2), (3, 5), (4, 15), (5, 52), (6, 203)])
def test_templates_are_counted_by_bell_numbers(length, bell):
    patterns = list(all_patterns(length))
    assert len(patterns) == len(set(patterns)) == bell
    assert patterns_of(torch.tensor(patterns)).equal(torch.tensor(patterns))


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("memorization", {"n_words": 2, "length": 3, "n_sequences": 9}, "make only 8 sequences"),
        ("in_context_qa", {"n_questions": 3}, "n_questions is 3, too few for n_pairs 4"),
        ("in_context_qa", {"n_answers": 2}, "n_answers is 2, too few"),
        ("nested_qa", {"n_entities": 7}, "n_entities is 7, too few for 2 chains of 4"),
        ("template_matching", {"n_words": 3, "length": 4}, "longer than the alphabet"),
        ("template_matching", {"templates": ("ab",)}, "template 'ab' has length 2"),
        ("template_matching", {"templates": ("aab", "bba")}, "'aab' and 'bba' are the same"),
        ("template_matching", {"templates": ()}, "templates are .*such as"),
        ("template_matching", {"templates": ("aab", "aab")}, "are the same"),
        ("template_matching", {"length": 12}, "too many templates of that length"),
        ("in_context_template_matching", {"length": 40}, "too many templates"),
        ("memorization", {"n_sequences": 10**8}, "n_sequences is 100000000: .* to 1000000"),
        ("template_matching", {"n_words": 2, "templates": ("abc",)}, "'abc' has 3 wildcards"),
        ("template_matching", {"holdout": "templates"}, "holdout is 'templates'"),
        ("template_matching", {"n_words": 8, "holdout": "words"}, "8 words cannot be split"),
        (
            "in_context_template_matching",
            {"length": 2, "holdout": "templates"},
            "2 templates cannot be split",
        ),
        ("in_context_template_matching", {"length": 2, "n_pairs": 3}, "there are 2 templates"),
        ("in_context_template_matching", {"n_answers": 1}, "n_answers is 1, too few"),
        ("in_context_qa", {"n_pair": 2}, "did you mean 'n_pairs'"),
    ],
)
def test_bad_parameters_are_named_before_anything_is_drawn(name, parameters, message):
    with pytest.raises(InfoFlowError, match=message):
        load_task(name, **parameters)


def test_splits_that_cannot_be_are_refused_before_anything_is_drawn():
    task = load_task("template_matching", n_words=2, length=1)
    for n in (5, None):
        with pytest.raises(InfoFlowError, match="2 sequences of task 'template_matching' cannot"):
            task.dataset("test", n)
    assert task.sample(5, seed=0)[0].shape == (5, 2)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ([[0, 4, 5, 1, 4, 6, 2]], "sequences have 7 tokens, .* takes 8"),
        ([[0.0] * 8], "expects integer token ids"),
        ([[0, 4, 5, 1, 4, 6, 2, 9]], "token 9 at position 7: .* expects ids from 4 to 4"),
        ([[0, 4, 5, 1, 4, 6, 2, 4]], "0 questions that match"),
        ([[1, 4, 5, 1, 4, 6, 1, 4]], "2 questions that match"),
    ],
)
def test_sequences_that_are_none_are_named(x, message):
    task = load_task("in_context_qa", **SMALL["in_context_qa"])
    for call in (task.target, task.active_index_set):
        with pytest.raises(InfoFlowError, match=message):
            call(torch.tensor(x))


def test_sequences_that_were_not_stored_and_templates_that_are_not_asked_are_named():
    stored = load_task("memorization", **SMALL["memorization"])
    space = torch.cartesian_prod(*[torch.arange(3)] * 4)
    everything = torch.cat([space, torch.full((81, 1), 3)], dim=1)
    with pytest.raises(InfoFlowError, match="none of the 13 stored"):
        stored.target(everything)
    task = load_task("template_matching", n_words=3, length=3, templates=("aab", "aba"))
    with pytest.raises(InfoFlowError, match="follow template 'abb': expected one of aab, aba"):
        task.target(torch.tensor([[0, 1, 1, 3]]))


def test_a_space_is_listed_up_to_a_limit_only():
    with pytest.raises(InfoFlowError, match="more than 1000000"):
        load_task("in_context_qa").all_sequences()
