"""Two flows side by side: which positions stand for each other, and what changed."""

from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from infoflow_lens import Flow, InfoFlowError, build_model, compare_flows, flow
from infoflow_lens.cli import app
from infoflow_lens.flows.result import FlowComparison, align_tokens
from infoflow_lens.models.architecture import Architecture
from tests.conftest import make_token_model
from tests.reference import zoo


@pytest.fixture(scope="module")
def model():
    return make_token_model()


def quick(model, ids, **settings):
    return flow(model, [ids], progress=False, position="all", **settings)


IDS, OTHER = [1, 2, 3, 4, 5, 6], [1, 2, 9, 4, 6]  # one token replaced, one left out


@pytest.fixture(scope="module")
def compared(model):
    return compare_flows(quick(model, IDS), quick(model, OTHER))


@pytest.mark.parametrize(
    ("one", "other", "pairs"),
    [
        ("abcd", "abcd", [(0, 0), (1, 1), (2, 2), (3, 3)]),
        ("abcd", "axcd", [(0, 0), (1, 1), (2, 2), (3, 3)]),  # one in the place of one
        ("abcd", "abxcd", [(0, 0), (1, 1), (2, 3), (3, 4)]),  # inserted
        ("abcd", "ad", [(0, 0), (3, 1)]),
        ("abcd", "axyzd", [(0, 0), (3, 4)]),  # three in the place of two: none stands for any
        ("ab", "xyz", []),
    ],
)
def test_positions_stand_for_each_other_where_tokens_are_the_same_or_replaced(one, other, pairs):
    assert align_tokens(one, other) == pairs
    assert align_tokens(other, one) == [(b, a) for a, b in pairs]


def test_the_table_has_each_side_as_its_own_table_has_it(compared):
    frame = compared.to_frame()
    assert compared.aligned == ((0, 0), (1, 1), (2, 2), (3, 3), (5, 4))
    for side, own in (("first", compared.first), ("second", compared.second)):
        names = ["position", "source"] if side == "first" else ["position_second", "source_second"]
        kept = frame[(frame[names] >= 0).all(axis=1)].sort_values(["layer", *names])
        expected = own.to_frame().sort_values(["layer", "position", "source"])
        for name in ("predicted", "influence", "share"):
            found = kept[f"{name}_{side}"].astype(float).to_numpy()
            assert found == pytest.approx(expected[name].astype(float).to_numpy(), nan_ok=True)
    both = frame[(frame["position"] >= 0) & (frame["position_second"] >= 0)]
    there = dict(compared.aligned)
    assert all(
        there[one] == other
        for one, other in zip(both["position"], both["position_second"], strict=True)
    )


def test_a_side_without_influence_has_its_columns_and_equal_names_are_told_apart(model, compared):
    silent = quick(model, IDS, influence=None)
    found = compare_flows(silent, compared.second, ("same", "same"))
    assert found.names == ("1: same", "2: same")
    assert len(found.view.record) == 2
    frame, whole = found.to_frame(), compared.to_frame()
    assert set(frame.columns) == set(whole.columns)
    assert frame["influence_first"].isna().all()
    assert frame["share_second"].sum() == pytest.approx(whole["share_second"].sum())


def test_choices_are_those_whose_keys_do_not_stand_for_each_other(compared):
    there, expected = dict(compared.aligned), set()
    for layer in range(compared.first.sets.n_layers):
        one, other = (each.positions.argmax[layer][0] for each in (compared.first, compared.second))
        for place, second in compared.aligned:
            for head in range(one.shape[0]):
                keys = int(one[head, place]), int(other[head, second])
                if there.get(keys[0]) != keys[1]:
                    expected.add((layer, head, place, second, *keys))
    assert set(compared.choices().itertuples(index=False, name=None)) == expected


def test_the_same_twice_changed_nothing(model):
    made = quick(model, IDS)
    same = compare_flows(made, made)
    assert "0 of 12 predicted sets differ, and 0 of" in same.summary()
    assert len(same.choices()) == 0
    frame = same.to_frame()
    assert (frame["predicted_first"] == frame["predicted_second"]).all()
    assert same.names == ("first", "second")
    assert same.view.inputs[0].marked == []


def test_names_begin_where_the_texts_part_and_marks_say_where(compared):
    assert compared.names == ("123456", "12946")
    assert [viewed.marked for viewed in compared.view.inputs] == [[2, 4], [2]]
    assert "predicted sets differ" in repr(compared)


def test_two_models_of_other_depth_stand_side_by_side():
    sizes = {"d_model": 12, "d_token": 3, "n_tokens": 5}
    models = [build_model(Architecture(n_heads=heads, **sizes), seed=0) for heads in ((2,), (3, 2))]
    x = torch.randn(1, 5, 3, generator=torch.Generator().manual_seed(0))
    one, other = (flow(each, x, progress=False) for each in models)
    compared = compare_flows(one, other, names=("shallow", "deep"))
    assert compared.aligned == tuple((place, place) for place in range(6))  # with CLS
    assert compared.view.groups == [("shallow", 1), ("deep", 1)]
    assert len(compared.choices()) == 0  # no layer has as many heads on both sides
    assert "of 6 predicted sets differ, and 0 of 0" in compared.summary()
    assert compared.summary().endswith(", in layers 0 to 0, which both have")


def test_what_cannot_stand_side_by_side_is_refused(model):
    two = flow(model, [IDS, OTHER], progress=False, influence=None)
    one = quick(model, IDS)
    with pytest.raises(InfoFlowError, match="second is a flow of 2 inputs: expected one"):
        compare_flows(one, two)
    top = quick(model, IDS, rule="top_k", k=2)
    with pytest.raises(InfoFlowError, match="'top_k' with k=2: expected the same"):
        compare_flows(one, top)
    with pytest.raises(InfoFlowError, match="second is a str: expected a Flow, as flow"):
        compare_flows(one, "no flow")


def test_both_go_into_one_page(compared, tmp_path):
    path = compared.to_html(tmp_path / "compared.html")
    assert '"aligned":[[0,0],[1,1],[2,2],[3,3],[5,4]]' in path.read_text()
    assert "data-infoflow" in compared._repr_html_()


def test_a_saved_flow_can_be_compared(compared, tmp_path):
    compared.second.save(tmp_path / "second")
    again = compare_flows(compared.first, Flow.load(tmp_path / "second"))
    assert again.summary() == compared.summary()
    assert again.to_frame().equals(compared.to_frame())


def test_the_command_puts_two_texts_or_two_models_side_by_side(tmp_path):
    folders = [str(zoo.save("gpt2", tmp_path / name)) for name in ("one", "other")]
    out = tmp_path / "beside.html"

    def call(*words):
        return CliRunner().invoke(app, ["flow", *words, "--out", str(out), "--quiet"])

    done = call(folders[0], "w5 w7 w9", "--with", "w5 w8 w9")
    assert done.exit_code == 0, done.output
    assert "at 4 pairs of positions that stand for each other" in done.stdout
    assert '"groups":[{"name":"' in out.read_text()
    done = call(folders[0], "w5 w7 w9", "--with-model", folders[1])
    assert done.exit_code == 0, done.output
    assert "0 of 8 predicted sets differ" in done.stdout
    refused = call(folders[0], "w5 w7", "w9 w5", "--with", "w5")
    assert refused.exit_code != 0
    assert "stand beside one text: expected one, not 2" in " ".join(refused.stderr.split())


def test_a_key_without_a_counterpart_is_not_the_same_as_no_key():
    """The second text has no token for key 1; its head looks at nothing."""
    some = SimpleNamespace(
        aligned=((0, 0), (2, 1)), _first_keys=lambda: [(0, 2, 1, [(1, -1), (-1, -1), (2, 1)])]
    )
    (row,) = FlowComparison.choices(some).itertuples(index=False)
    assert (row.head, row.key, row.key_second) == (0, 1, -1)
