"""Earlier names say the present ones."""

import pytest

from infoflow_lens import InfoFlowWarning, hooks
from infoflow_lens.hooks.scores import StateScores
from infoflow_lens.hooks.states import State
from infoflow_lens.models.architecture import TokenArchitecture
from infoflow_lens.report.charts import Table


@pytest.mark.parametrize(
    ("kind", "earlier", "present"),
    [
        (hooks.LabelledArray, "filled", "to_tensor"),
        (hooks.LabelledArray, "of_layer", "take_layer"),
        (hooks.Result, "stored", "to_parts"),
        (hooks.PositionsResult, "of_stored", "from_parts"),
        (hooks.PositionsResult, "joined", "join"),
        (hooks.PositionsProbe, "filled", "make_result"),
        (hooks.Pass, "counted", "renumber"),
        (hooks.LogitDifference, "spelled", "spell_ids"),
        (State, "added", "add"),
        (State, "merged", "merge"),
        (State, "rebuilt", "rebuild"),
        (StateScores, "scattered", "scatter"),
        (StateScores, "asked", "has_scores"),
        (TokenArchitecture, "of_layers", "from_layers"),
        (Table, "of_frame", "from_frame"),
    ],
)
def test_an_earlier_name_says_the_present_one(kind, earlier, present):
    assert hasattr(kind, present)
    with pytest.raises(AttributeError, match=f"{earlier} was removed in 0.4: expected {present}"):
        getattr(kind, earlier)


def test_an_object_says_it_too():
    with pytest.raises(AttributeError, match=r"spelled was removed in 0\.4: expected spell_ids"):
        hooks.LogitDifference(1, 0).spelled  # noqa: B018
    assert not hasattr(hooks.LogitDifference(1, 0), "spelled")


def test_a_subclass_that_defines_an_earlier_name_is_warned_of():
    with pytest.warns(InfoFlowWarning, match=r"Mine.added is never called: State.added was remo"):
        type("Mine", (State,), {"added": lambda self: self})
    with pytest.warns(InfoFlowWarning, match=r"Mine.filled .* Probe.filled was removed in 0"):
        type("Mine", (hooks.PositionsProbe,), {"filled": lambda self: self})
