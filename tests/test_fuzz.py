"""A few cases of every kind, always the same; ``python -m tests.fuzz`` draws thousands."""

import pytest

from tests.fuzz import KINDS, SEEN, check

CASES = {"data files": 40, "ids and masks": 60, "settings": 60, "configs of models": 10,
         "architectures of models": 20, "spoiled folders": 4, "command lines": 10}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_given_is_right_or_refused_by_name(kind):
    check(kind, CASES[kind], derandomize=True)
    assert SEEN[kind, "refused"] > 0
