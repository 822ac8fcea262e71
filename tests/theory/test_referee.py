"""No verdict excludes what a network does, or allows what is impossible: targets of a referee."""

import os
from hashlib import sha256

import pytest

from tests.referee import run

MARKS = [(), *[pytest.mark.slow] * 9, *[pytest.mark.acceptance] * 90]
BLOCKS = [pytest.param(block, marks=marks) for block, marks in enumerate(MARKS)]


def seeds_of(run_id, block, n):
    """Seeds that are new in every run, unless INFOFLOW_REFEREE names one."""
    start = sha256(os.environ.get("INFOFLOW_REFEREE", run_id).encode()).digest()
    first = int.from_bytes(start[:4], "big") // 1000 * 1000 + n * block
    return range(first, first + n)


@pytest.mark.parametrize("block", BLOCKS)
def test_nothing_that_a_network_does_is_excluded(block, testrun_uid):
    """5 new targets in every run, some 20 with slow; 1,000 with acceptance, or any number by
    `python -m tests.referee`.
    """
    said, wrong = run(seeds_of(testrun_uid, block, 5))
    assert wrong == []
    allowed = sum(n for (_, verdict), n in said.items() if verdict == "allowed by construction")
    assert allowed >= 2, said


@pytest.mark.parametrize("block", BLOCKS)
def test_nothing_that_is_impossible_is_allowed(block, testrun_uid):
    """About 2 targets in every run, 180 with acceptance, each with a proof of its own."""
    _, wrong = run(seeds_of(testrun_uid, block, 5), "impossible")
    assert wrong == []
