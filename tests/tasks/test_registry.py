"""Tasks are found by name, and near misses are explained."""

import pytest

from infoflow_lens import InfoFlowError, list_tasks, load_task


def test_every_listed_task_loads_with_its_defaults():
    for name in list_tasks():
        x, y = load_task(name).sample(2, seed=0)
        assert len(x) == len(y) == 2


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("d_retreival", {}, "did you mean 'd_retrieval'"),
        ("sorting", {}, "expected one of d_retrieval"),
        ("d_retrieval", {"n_token": 3}, "did you mean 'n_tokens'"),
    ],
)
def test_unknown_names_suggest_the_nearest(name, parameters, message):
    with pytest.raises(InfoFlowError, match=message):
        load_task(name, **parameters)
