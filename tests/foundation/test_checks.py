"""Checks of what users give."""

import numpy as np
import pytest

from infoflow_lens import InfoFlowError
from infoflow_lens.foundation.checks import check_by_layer


def test_one_number_for_all_layers_or_one_for_each():
    assert check_by_layer(3, "roles", 2) == (3, 3)
    assert check_by_layer([3, 4], "roles", 2) == (3, 4)
    assert check_by_layer(np.array([3, 4]), "roles", 2) == (3, 4)


@pytest.mark.parametrize("given", [0, (3,), (3, 0), (3, 1.5), 2.0, None, True, "32"])
def test_other_numbers_are_refused_by_name(given):
    with pytest.raises(InfoFlowError, match=r"width is .*: expected .* each of 2 layers"):
        check_by_layer(given, "width", 2)
