"""A few cases of every kind, always the same; ``python -m tests.fuzz`` draws thousands."""

import pytest

from tests.fuzz import KINDS, SEEN, check

CASES = {"data files": 20, "ids and masks": 30, "settings": 30, "configs of models": 6,
         "architectures of models": 10, "spoiled folders": 3, "command lines": 6}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_given_is_right_or_refused_by_name(kind):
    check(kind, CASES[kind], derandomize=True)
    assert SEEN[kind, "refused"] > 0
