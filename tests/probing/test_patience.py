"""Who waits long is told so, once, and what takes less."""

import time

import pytest

from infoflow_lens.probing import shards
from infoflow_lens.probing.shards import warn_if_long


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(shards, "_SOON", 0.05)


def said_of(seconds, batches=()):
    said = []
    with warn_if_long(said.append, "influence", 20, 2048) as advance:
        for n in batches:
            advance(n)
        time.sleep(seconds)
    return said


def test_a_first_batch_that_takes_long_is_told_once_with_what_takes_less():
    (line,) = said_of(0.3)
    for word in ("influence", "20 sequences of up to 2048 tokens", "no batch", "n_detail",
                 "max_length", "probes"):  # fmt: skip
        assert word in line


def test_how_much_is_left_is_told_where_it_is_long(monkeypatch):
    monkeypatch.setattr(shards, "_LONG", 0.1)
    (line,) = said_of(0.3, [4])
    assert "left" in line
    assert "no batch" not in line


@pytest.mark.parametrize(("seconds", "batches"), [(0.0, []), (0.3, [4, 14])])
def test_nothing_is_said_of_what_is_soon_done(seconds, batches):
    assert said_of(seconds, batches) == []
