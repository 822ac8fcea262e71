from collections import Counter
from dataclasses import replace

import pytest
import torch

from infoflow_lens.studies.language_model.batches import (
    repeat_random,
    repeat_stretches,
    text_windows,
    training_batch,
)
from infoflow_lens.studies.language_model.config import LanguageModelConfig

CONFIG = LanguageModelConfig(
    vocabulary=500, n_context=41, batch_size=20, shortest_repeat=4, longest_repeat=12
)
STREAM = torch.arange(1, 400, dtype=torch.int16)  # text that never repeats


def period(row):
    """The least period of a sequence; its length if it never repeats."""
    row = row.tolist()
    return next(p for p in range(1, len(row) + 1) if row[p:] == row[:-p])


def test_a_batch_is_windows_of_the_text_and_the_stated_share_of_repeats():
    rows = training_batch(STREAM, CONFIG, step=3)
    assert rows.shape == (20, 41)
    assert (rows[:, 0] == 0).all()
    periods = [period(row[1:]) for row in rows]
    repeats = [p for p in periods if p < 40]
    assert len(repeats) == 6  # .3 of 20
    assert all(4 <= p <= 12 for p in repeats)
    for row, p in zip(rows[:, 1:].tolist(), periods, strict=True):
        text = row == list(range(row[0], row[0] + 40))
        assert text == (p == 40)


def test_of_every_two_repeats_one_is_of_text():
    rows = training_batch(STREAM, replace(CONFIG, repeated=1.0), step=0)[:, 1:]
    consecutive = Counter(bool((row[1:4] == row[:3] + 1).all()) for row in rows)
    assert consecutive == {True: 10, False: 10}


def test_a_batch_depends_on_seed_and_step_alone():
    torch.manual_seed(1)
    first = training_batch(STREAM, CONFIG, step=7)
    torch.manual_seed(2)
    assert training_batch(STREAM, CONFIG, step=7).equal(first)
    assert not training_batch(STREAM, CONFIG, step=8).equal(first)
    assert not training_batch(STREAM, replace(CONFIG, seed=1), step=7).equal(first)


def test_windows_cover_the_text_once():
    windows = text_windows(STREAM, 41)
    assert windows[:, 1:].flatten().tolist() == list(range(1, 361))
    some = text_windows(STREAM, 41, 3)
    assert some[:, 1].tolist() == [1, 161, 321]


@pytest.mark.parametrize("begin", [0, 5, 29])
def test_repeated_random_ids_are_different_and_come_twice(begin):
    rows = repeat_random(30, 8, 12, seed=4, begin=begin)
    assert rows.shape == (8, 25)
    assert (rows[:, 0] == begin).all()
    assert rows[:, 1:13].equal(rows[:, 13:])
    assert all(len(set(row.tolist())) == 13 for row in rows[:, :13])
    assert rows.max() < 30
    assert rows.min() >= 0


def test_stretches_repeat_after_different_numbers_of_ids():
    rows = repeat_stretches(50, 60, 30, 5, 9, seed=1, begin=7)
    periods = [period(row[1:]) for row in rows]
    assert set(periods) == {5, 6, 7, 8, 9}
    for row, p in zip(rows, periods, strict=True):
        assert len(set(row[: p + 1].tolist())) == p + 1
