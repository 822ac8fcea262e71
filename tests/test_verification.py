"""Training what a design recommends: predicted beside measured."""

from dataclasses import replace

import pytest

from infoflow_lens import InfoFlowError, load_task
from infoflow_lens.commands.theory import _print_verification
from infoflow_lens.theory.design import design
from infoflow_lens.verification import Measured, Verification, judge, verify_design


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
    assert checked.target == found.error == 0.01
    assert checked.learnt is (checked.models[0].nmse <= 0.01)
    again = verify_design(found, task, epochs=2, n_train=600)
    assert again == checked  # same seed, same numbers


@pytest.mark.parametrize(
    ("rows", "confirmed", "words"),
    [
        ([("excluded, proved", 20.0)], True, ""),
        ([("excluded, proved", 3.0)], False, "3.0 times worse"),
        ([("excluded by the paper's count", 2.0)], False, "several roles"),
        ([("open", 1.0)], None, "learnt, NMSE 0.001; no neighbour is excluded"),
    ],
)
def test_the_rule_is_ten_times(rows, confirmed, words):
    models = (Measured((2,), "recommended", 1e-3, 1.0),)
    models += tuple(Measured((1,), verdict, times * 1e-3, times) for verdict, times in rows)
    found, why = judge(models, 1e-2)
    assert found is confirmed
    assert words in why


@pytest.mark.parametrize("verdict", ["excluded, proved", "open"])
def test_what_is_not_learnt_is_said(verdict):
    """An NMSE of .675 was "nothing is owed" where no neighbour was excluded (T2)."""
    models = (Measured((2,), "recommended", 0.675, 1.0), Measured((1,), verdict, 0.7, 1.04))
    confirmed, why = judge(models, 1e-2)
    assert confirmed is False
    assert "not learnt" in why
    assert "NMSE of 0.68, above 0.01" in why


def test_token_tasks_are_refused():
    task = load_task("in_context_qa")
    with pytest.raises(InfoFlowError, match="has token ids"):
        verify_design(design(task, (14,), verify=0), task)


def test_neighbours_are_judged_at_the_length_at_which_they_are_trained():
    """Two heads hold both of two tokens, whatever is excluded of 16."""
    task = load_task("d_retrieval", n_components=3, d_token=2)
    found = design(task, (2, 16), max_layers=1, verify=5)
    assert [(n.n_heads, n.verdict) for n in found.neighbours] == [((2,), "excluded, proved")]
    checked = verify_design(found, task, epochs=1, n_train=256)
    assert [model.n_heads for model in checked.models] == [(3,), (2,)]
    assert not checked.models[1].predicted.startswith("excluded")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seeds": 0}, "seeds is 0: expected an integer of at least 1"),
        ({"n_tokens": 0}, "n_tokens is 0: expected an integer of at least 1"),
        ({"task": "d_retrieval"}, "task is 'd_retrieval': expected the task that was designed for"),
        ({"task": load_task("depth_separation")}, "the design is for 'd_retrieval' with d_token 4"),
        ({"task": load_task("d_retrieval", d_token=5)}, "expected the task that was designed for"),
    ],
)
def test_what_is_no_training_of_the_design_is_refused(changed, message):
    """Another target was trained, and judged by verdicts on the first; T = 0 was the default."""
    task = load_task("d_retrieval", n_components=1)
    found = design(task, (3,), verify=0)
    with pytest.raises(InfoFlowError, match=message):
        verify_design(found, **{"task": task, **changed})


def test_the_command_keeps_the_letters_of_what_it_says(capsys):
    checked = Verification(8, 1e-2, (Measured((1,), "recommended", 1e-5, 1.0),), True, None, "x")
    _print_verification(replace(checked, why_not=judge(checked.models, 1e-2)[1]))
    assert "Learnt, NMSE 1e-05; no neighbour is excluded" in capsys.readouterr().out
