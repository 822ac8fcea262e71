"""Training what a design recommends: predicted beside measured."""

import pytest

from infoflow_lens import InfoFlowError, load_task
from infoflow_lens.theory.design import design
from infoflow_lens.verification import Measured, judged, verify_design


def test_recommended_and_neighbours_are_trained_alike():
    task = load_task("d_retrieval", n_components=2, n_tokens=6, d_token=2)
    found = design(task, (6,), verify=5)
    seen = []
    checked = verify_design(
        found, task, epochs=2, n_train=600, advance=lambda steps=1, status="": seen.append(status)
    )
    assert [m.n_heads for m in checked.models] == [(2,), (1,)]
    assert checked.models[0].times == 1
    assert checked.models[1].predicted == "excluded, proved"
    assert len(seen) == 2
    again = verify_design(found, task, epochs=2, n_train=600)
    assert again == checked  # same seed, same numbers


@pytest.mark.parametrize(
    ("rows", "confirmed", "words"),
    [
        ([("excluded, proved", 20.0)], True, ""),
        ([("excluded, proved", 3.0)], False, "3.0 times worse"),
        ([("excluded by the paper's count", 2.0)], False, "several roles"),
        ([("open", 1.0)], None, "nothing is owed"),
    ],
)
def test_the_rule_is_ten_times(rows, confirmed, words):
    models = (Measured((2,), "recommended", 1e-3, 1.0),)
    models += tuple(Measured((1,), verdict, times * 1e-3, times) for verdict, times in rows)
    found, why = judged(models)
    assert found is confirmed
    assert words in why


def test_an_untrained_recommendation_is_told():
    models = (
        Measured((2,), "recommended", 0.9, 1.0),
        Measured((1,), "excluded, proved", 0.95, 1.05),
    )
    assert "is not trained" in judged(models)[1]


def test_token_tasks_are_refused():
    task = load_task("in_context_qa")
    with pytest.raises(InfoFlowError, match="has token ids"):
        verify_design(design(task, (14,), verify=0), task)
