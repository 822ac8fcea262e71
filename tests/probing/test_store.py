"""Sequences on disk are the sequences that were given, whatever part of them is asked for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infoflow_lens import InfoFlowError
from infoflow_lens.probing import store as storing
from infoflow_lens.probing.store import settle, store
from infoflow_lens.runs.folder import MANIFEST, RunFolder


def rows(n, vectors=False):
    generator = torch.Generator().manual_seed(n)
    if vectors:
        return list(torch.randn(n, 5, 3, generator=generator))
    lengths = [1 + (3 * i) % 7 for i in range(n)]
    return [torch.randint(50, (length,), generator=generator) for length in lengths]


def stored(given, folder):
    with RunFolder.open(folder, "a run") as of_run:
        found, _ = store(given, of_run.scratch, "rows")
        return settle(found, folder / "rows", of_run)


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    monkeypatch.setattr(storing, "_SHARD", 4)


@pytest.mark.parametrize("vectors", [False, True])
@pytest.mark.parametrize("n", [1, 4, 11])
def test_they_come_back_as_they_were(tmp_path, n, vectors):
    given = rows(n, vectors)
    found = stored(iter(given), tmp_path)
    assert len(found) == n
    for one, other in zip(found, given, strict=True):
        assert one.equal(other)
        assert one.dtype == other.dtype
    assert found[-1].equal(given[-1])
    extent = found.extent
    lengths = [len(row) for row in given]
    assert (extent.longest, extent.shortest) == (max(lengths), min(lengths))


@settings(max_examples=40, deadline=None)
@given(
    start=st.integers(0, 12),
    stop=st.integers(0, 12),
    inner=st.tuples(st.integers(0, 12), st.integers(0, 12)),
    longest=st.integers(1, 8),
)
def test_any_part_is_that_of_a_list(tmp_path_factory, start, stop, inner, longest):
    given = rows(11)
    found = stored(given, tmp_path_factory.mktemp("rows"))[start:stop].cut(longest)
    expected = [row[:longest] for row in given[start:stop]]
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
    digests = [store(some, tmp_path, "rows")[1] for some in (given, given, *others)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 5


def test_what_was_there_stays_until_the_new_ones_settle(tmp_path):
    before = stored(rows(5), tmp_path)

    def failing():
        yield torch.tensor([1])
        raise InfoFlowError("row 1 is bad")

    with pytest.raises(InfoFlowError, match="row 1 is bad"):
        store(failing(), tmp_path, "rows")
    with pytest.raises(InfoFlowError, match="rows is empty"):
        store([], tmp_path, "rows")
    assert sorted(path.name for path in tmp_path.iterdir()) == [MANIFEST, "rows"]
    assert len(list(before)) == 5


def test_a_file_that_is_gone_is_named(tmp_path):
    found = stored(rows(9), tmp_path)
    (tmp_path / "rows" / "000001.safetensors").unlink()
    assert len(found[:4][0]) == 1
    with pytest.raises(InfoFlowError, match=r"000001.safetensors' cannot be read .* run the same"):
        list(found)
