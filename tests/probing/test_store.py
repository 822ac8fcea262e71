"""Sequences on disk are the sequences that were given, whatever part of them is asked for."""

import json
import pickle

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infoflow_lens import InfoFlowError
from infoflow_lens.foundation.files import write_signed
from infoflow_lens.hooks.model.inputs import Batches
from infoflow_lens.probing import store as storing
from infoflow_lens.probing.store import find_sequences, store_sequences
from infoflow_lens.runs.folder import MANIFEST, RunFolder

DTYPES = ["int64", "float32", "float64", "float16", "bfloat16"]


def rows(n, dtype="int64"):
    generator = torch.Generator().manual_seed(n)
    if dtype != "int64":
        return list(torch.randn(n, 5, 3, generator=generator).to(getattr(torch, dtype)))
    lengths = [1 + (3 * i) % 7 for i in range(n)]
    return [torch.randint(50, (length,), generator=generator) for length in lengths]


def in_parts(given, size=3):
    return (part(given[start : start + size]) for start in range(0, len(given), size))


def part(some, **columns):
    return Batches(None, some, columns=columns)


def stored(given, folder, made_from=None):
    with RunFolder.open(folder, "a run") as of_run:
        return store_sequences(in_parts(given), of_run.scratch, "rows").settle(of_run, made_from)


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch):
    monkeypatch.setattr(storing, "_AT_ONCE", 4)
    monkeypatch.setattr(storing, "_MAPPED", 100)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 4, 11])
def test_they_come_back_as_they_were(tmp_path, n, dtype):
    given = rows(n, dtype)
    found = stored(given, tmp_path)
    sequences = found.sequences
    assert len(sequences) == n
    for one, other in zip(sequences, given, strict=True):
        assert one.equal(other)
        assert one.dtype == other.dtype
    assert sequences[-1].equal(given[-1])
    lengths = [len(row) for row in given]
    assert (found.extent.longest, found.extent.shortest) == (max(lengths), min(lengths))
    elsewhere = pickle.loads(pickle.dumps(sequences))  # as workers get them
    assert [row.tolist() for row in elsewhere] == [row.tolist() for row in given]


@pytest.mark.parametrize("dtype", ["int64", "float32"])
def test_datasets_opens_them(tmp_path, dtype):
    given = rows(11, dtype)
    table = datasets.Dataset.from_file(str(stored(given, tmp_path).path))
    (column,) = table.column_names
    assert list(table[column]) == [row.tolist() for row in given]


@settings(max_examples=40, deadline=None)
@given(
    start=st.integers(0, 12),
    stop=st.integers(0, 12),
    inner=st.tuples(st.integers(0, 12), st.integers(0, 12)),
)
def test_any_part_is_that_of_a_list(tmp_path_factory, start, stop, inner):
    given = rows(11)
    found = stored(given, tmp_path_factory.mktemp("rows")).sequences[start:stop]
    expected = given[start:stop]
    for a, b in ((None, None), inner):
        part, wanted = found[a:b], expected[a:b]
        assert [row.tolist() for row in part] == [row.tolist() for row in wanted]
        if wanted:
            lengths = [len(row) for row in wanted]
            assert part.extent.longest == max(lengths)
            assert part.extent.shortest == min(lengths)


def test_the_digest_knows_every_number_and_where_sequences_end(tmp_path):
    given = [torch.tensor([1, 2]), torch.tensor([3])]
    others = [
        [torch.tensor([1]), torch.tensor([2, 3])],
        [torch.tensor([1, 2]), torch.tensor([4])],
        [torch.tensor([1.0, 2.0]), torch.tensor([3.0])],
        [torch.tensor([3]), torch.tensor([1, 2])],
    ]
    digests = [
        store_sequences([part(some)], tmp_path, "rows").digest for some in (given, given, *others)
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 5


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_digest_does_not_know_how_they_came(tmp_path, dtype):
    given = rows(11, dtype)
    digests = {
        store_sequences(in_parts(given, size), tmp_path, "rows").digest for size in (1, 3, 11)
    }
    if dtype != "int64":
        digests.add(store_sequences([part(torch.stack(given))], tmp_path, "rows").digest)
    assert len(digests) == 1


def test_those_of_the_same_source_are_found_again(tmp_path):
    before = stored(rows(5), tmp_path, {"data": "x", "n": None})
    with RunFolder.open(tmp_path, "a run") as of_run:
        assert find_sequences(of_run, {"data": "x", "n": None}) == before
        for other in ({"data": "y", "n": None}, {"data": "x", "n": 5}, None):
            assert find_sequences(of_run, other) is None
    for name in ("sequences.arrow", "sequences.json"):
        content = (tmp_path / "inputs" / name).read_bytes()
        (tmp_path / "inputs" / name).write_bytes(content.replace(b"e", b"f", 1))
        with RunFolder.open(tmp_path, "a run") as of_run:
            assert find_sequences(of_run, {"data": "x", "n": None}) is None
        (tmp_path / "inputs" / name).write_bytes(content)


@pytest.mark.parametrize(
    "changes",
    [
        *({name: None} for name in ("n_sequences", "longest", "shortest", "identity", "made_from")),
        {"n_sequences": 10**30}, {"n_sequences": "5"}, {"longest": 9}, {"shortest": 0},
        {"identity": 5}, {"another": 1}, {"columns": 5}, {"columns": ["token_type_ids"]},
    ],
)  # fmt: skip
def test_a_note_that_was_signed_anew_is_not_believed(tmp_path, changes):
    """Its numbers stood in the page of a folder that somebody gave away."""
    stored(rows(5), tmp_path, {"data": "x"})
    path = tmp_path / "inputs" / "sequences.json"
    values = json.loads(path.read_text())
    schema = values.pop("schema")
    del values["digest"]
    values = {k: v for k, v in {**values, **changes}.items() if v is not None}
    with RunFolder.open(tmp_path, "a run") as of_run:
        write_signed(path, schema, values)
        assert find_sequences(of_run, {"data": "x"}) is None


def test_what_was_there_stays_until_the_new_ones_settle(tmp_path):
    before = stored(rows(5), tmp_path)

    def failing():
        yield part([torch.tensor([1])])
        raise InfoFlowError("row 1 is bad")

    with RunFolder.open(tmp_path, "a run") as of_run:
        with pytest.raises(InfoFlowError, match="row 1 is bad"):
            store_sequences(failing(), of_run.scratch, "rows")
        with pytest.raises(InfoFlowError, match="rows is empty"):
            store_sequences([], of_run.scratch, "rows")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inputs", MANIFEST]
    assert len(list(before.sequences)) == 5


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ([torch.ones(2, 3)], "expected sequences of one type"),
        ([torch.tensor([2**31])], "2147483648"),
    ],
)
def test_what_cannot_stand_beside_the_others_is_refused(tmp_path, others, message):
    with pytest.raises(InfoFlowError, match=message):
        store_sequences([part([torch.tensor([1, 2])]), part(others)], tmp_path, "rows")


@pytest.mark.parametrize("spoil", [lambda path: path.unlink(), lambda path: path.write_bytes(b"x")])
def test_a_file_that_is_gone_or_spoiled_is_named(tmp_path, spoil):
    found = stored(rows(9), tmp_path)
    spoil(found.path)
    with pytest.raises(InfoFlowError, match=r"sequences.arrow' cannot be read .* run the same"):
        list(found.sequences)
