"""Libraries that load where they are first used."""

import subprocess
import sys
from typing import get_type_hints

import pandas

from infoflow_lens.agreement import Agreement
from infoflow_lens.foundation.lazy import mpl, pd


def test_they_are_the_libraries_themselves():
    import matplotlib.figure

    assert pd.DataFrame is pandas.DataFrame
    assert mpl.Figure is matplotlib.figure.Figure
    assert get_type_hints(Agreement.to_frame)["return"] is pandas.DataFrame


def test_they_are_loaded_by_what_is_asked_for_and_not_by_a_look():
    code = (
        "import sys, inspect; from infoflow_lens.foundation.lazy import mpl, pd; repr(pd); "
        "inspect.ismodule(mpl), inspect.unwrap(pd), hasattr(pd, '__file__'); "
        "assert not {'pandas', 'matplotlib'} & set(sys.modules); "
        "pd.DataFrame; assert 'pandas' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
