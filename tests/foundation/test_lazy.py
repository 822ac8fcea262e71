"""Libraries that load where they are first used."""

import subprocess
import sys
from typing import get_type_hints

import pandas
import pytest

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


@pytest.mark.slow
def test_tasks_load_no_library_of_data_before_a_dataset_is_asked_for():
    code = (
        "import sys, typing, infoflow_lens.tasks as tasks; task = tasks.load_task('kth_largest'); "
        "task.draw(2, __import__('torch').Generator()); "
        "assert not {'datasets', 'pandas'} & set(sys.modules); "
        "assert len(task.dataset('train', 2)) == 2; "
        "hint = typing.get_type_hints(task.features)['return']; "
        "assert hint is sys.modules['datasets'].Features"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_training_on_tensors_loads_no_library_of_data():
    code = (
        "import sys, typing, torch; from infoflow_lens.training import TrainingConfig, train; "
        "data = torch.arange(6.)[:, None], torch.arange(6.)[:, None]; "
        "train(torch.nn.Linear(1, 1), data, data, TrainingConfig(epochs=1), progress=False); "
        "assert not {'datasets', 'pandas'} & set(sys.modules); "
        "kinds = typing.get_args(typing.get_type_hints(train)['train_data']); "
        "assert sys.modules['datasets'].Dataset in kinds"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
