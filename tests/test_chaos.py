"""A few rounds of trouble; ``python -m tests.chaos`` makes hundreds, with workers and a cluster."""

import pytest

from tests.chaos import rounds


@pytest.mark.acceptance
def test_disturbed_runs_end_as_undisturbed_ones(tmp_path):
    found = list(rounds(2, seed=5, chosen=["probe"], home=tmp_path))
    assert len(found) == 2
    assert [(kind, said) for _, kind, outcome, said in found if outcome != "same bytes"] == []
