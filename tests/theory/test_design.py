"""Designs: the front, what is recommended, and what lies below it."""

import itertools
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infoflow_lens import InfoFlowError, load_task
from infoflow_lens.cli import app
from infoflow_lens.tasks import Target, list_tasks
from infoflow_lens.theory.comparison import Component
from infoflow_lens.theory.cost import exponent
from infoflow_lens.theory.design import design
from infoflow_lens.theory.question import Question
from infoflow_lens.theory.search import find


def designed(name, lengths=(16, 64), task=None, **settings):
    return design(load_task(name, **(task or {})), lengths, verify=10, **settings)


def test_the_front_is_that_of_brute_force():
    """Every choice of heads and widths, and none that another one beats."""
    task = load_task("d_retrieval", n_components=3, n_tokens=64)
    found = design(task, (64,), max_layers=2, max_heads=3, verify=0)
    points = {}
    for layers in (1, 2):
        for heads in itertools.product(range(1, 4), repeat=layers):
            for alone in (False, True):
                schedule = find(task.components, heads, 64, max_position_only=alone).schedule
                if schedule is None:
                    continue
                size = schedule.size
                inside = 3 * 64 if schedule.mechanism == "global aggregation" else 0
                for share in (1, 2, 4):
                    width = -(-size * 4 // share)
                    k = exponent(size, 4, width, "total")
                    points[heads, width, alone] = (layers, sum(heads), width, k, inside)
    best = {
        p
        for p in points.values()
        if not any(
            q != p and all(a <= b for a, b in zip(q, p, strict=True)) for q in points.values()
        )
    }
    assert {c.measures for c in found.front} == best


def test_d_retrieval_takes_d_heads_or_a_width_of_t_d():
    found = designed("d_retrieval", (16, 64, 128), {"n_components": 3})
    assert (found.recommended.n_heads, found.recommended.d_model) == ((3,), 12)
    assert found.recommended.information == (3, 3, 3)
    assert found.recommended.verified == 1.0
    (below,) = found.neighbours
    assert (below.n_heads, below.verdict) == ((2,), "excluded, proved")
    whole = [c for c in found.front if c.mechanisms == "global aggregation" and c.exponent == 0]
    assert [(c.n_heads, c.d_model) for c in whole] == [((1,), 128 * 4)]


def test_the_closest_pair_takes_two_layers_of_one_head():
    found = designed("depth_separation")
    assert found.recommended.n_heads == (1, 1)
    assert {n.n_heads: n.verdict for n in found.neighbours} == {(1,): "excluded, proved"}


def test_best_pairs_take_as_many_first_heads():
    found = designed("intrinsic_dimension", (16, 64), {"n_components": 2})
    assert found.recommended.n_heads == (2, 2)
    verdicts = {n.n_heads: n.verdict for n in found.neighbours}
    assert verdicts[1, 2] == "excluded by the paper's count"
    assert verdicts[2,] == "excluded, proved"


def test_the_nonlinear_part_costs_and_two_layers_are_weighed():
    """One layer of one head was recommended, and NMSE .68 came of it; (1, 1) was not listed (T2).

    Of C(8 + 2, 3) triples, C(8 + 1, 2) hold a given token.
    """
    found = designed("triangle_center", (8,))
    whole = {c.n_heads: c.inside for c in found.front if c.exponent == 0}
    assert whole == {(1,): 120, (1, 1): 45}
    assert found.recommended.n_heads == (1, 1)
    assert found.recommended.verified == 1.0


def test_a_chain_is_designed_by_its_places():
    """Heads were weighed up to the number of components, which is one."""
    found = designed("best_tree", (8,))
    assert (found.recommended.n_heads, found.recommended.d_model) == ((2, 1), 9)
    assert found.recommended.d_head == (3, 1)
    assert found.recommended.inside == 6  # a product for each of 3 coordinates, of 2 messages
    assert {n.n_heads: n.verdict for n in found.neighbours}[1, 1] == "excluded, proved"


def test_a_search_below_what_was_found_costs_its_step():
    """96 parameters were named for the k-th largest, without the jump of its score (T9)."""
    small, large = (designed("kth_largest", (8,), error=eps).front for eps in (1e-2, 1e-3))
    steps = [{c.inside for c in front if len(c.n_heads) == 2} for front in (small, large)]
    assert steps == [{100}, {1000}]
    assert all("its score jumps" in c.schedule for c in small if len(c.n_heads) == 2)


def test_a_target_of_ones_own_with_mixed_arities():
    pair = Component(2, lambda x: -(x[..., 0, :] - x[..., 1, :]).norm(dim=-1), True, distinct=True)
    single = Component(1, lambda x: x[..., 0, 0], True)
    task = Target(components=(pair, single), n_tokens=16, d_token=2)
    found = design(task, (16, 32), verify=10)
    assert found.recommended.n_heads == (1, 1)
    assert found.recommended.information == (3, 3)
    assert found.recommended.d_model == 6


def test_a_budget_and_limits_are_kept():
    wide = designed("d_retrieval", (64,), {"n_components": 4}, max_heads=2, max_layers=1)
    assert all(c.n_heads in ((1,), (2,)) for c in wide.front)
    assert wide.recommended.mechanisms == "global aggregation"
    none = designed(
        "d_retrieval", (64,), {"n_components": 4}, max_heads=2, max_layers=1, parameters=1e4
    )
    assert none.recommended is None
    assert none.front == ()


def test_a_target_is_read_once_at_each_length(monkeypatch):
    """It was read for each candidate and each neighbour, which took most of the time."""
    lengths, read = [], Question.read

    def counted(task, seed):
        lengths.append(task.n_tokens)
        return read(task, seed)

    monkeypatch.setattr(Question, "read", counted)
    found = designed("d_retrieval", (8, 16), {"n_components": 2}, max_layers=1)
    assert found.neighbours
    assert lengths == [8, 16]


def test_token_tasks_keep_their_length():
    found = design(load_task("in_context_qa"), (14,), verify=10)
    assert found.recommended.mechanisms == "fixed positions"
    with pytest.raises(InfoFlowError, match="which follow from its other sizes"):
        design(load_task("in_context_qa"), (16,))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"error": 2.0}, "error is 2.0"),
        ({"max_layers": 0}, "max_layers is 0"),
        ({"max_heads": 10**6}, "max_heads is 1000000"),
        ({"parameters": -1}, "parameters is -1"),
    ],
)
def test_bad_values_are_named(settings, message):
    with pytest.raises(InfoFlowError, match=message):
        design(load_task("d_retrieval"), (16,), **settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["d_retrieval", "--seeds", "0"], "seeds is 0: expected an integer of at least 1"),
        (["d_retrieval", "--epochs", "0"], "epochs is 0: expected an integer of at least 1"),
        (["in_context_qa"], "has token ids: expected one over vector tokens"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_the_design(arguments, message, monkeypatch):
    """Each was refused once the design was done."""
    monkeypatch.setattr("infoflow_lens.theory.design.design", lambda *_, **__: pytest.fail("done"))
    result = CliRunner().invoke(app, ["design", *arguments, "--verify", "--quiet"])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


PAGE = Path(__file__).parents[2] / "docs" / "known-results.md"
ROWS = re.findall(r"^\| `design (.*?)` \| (.*) \|$", PAGE.read_text(), flags=re.MULTILINE)


def test_the_table_of_designs_has_every_task():
    assert {command.split()[0] for command, _ in ROWS} == set(list_tasks())


@pytest.mark.slow
@pytest.mark.parametrize(("command", "row"), ROWS)
def test_the_table_of_designs_is_what_the_command_says(command, row):
    """What is recommended, and what is known of that below it; errors are of trainings."""
    arguments = ["design", *command.replace(" --verify", "").split(), "--json"]
    values = json.loads(CliRunner().invoke(app, arguments).stdout)
    heads = lambda design: f"({', '.join(map(str, design['n_heads']))})"  # noqa: E731
    recommended, _, learnt, below, predicted, *_ = row.split(" | ")
    best = values["recommended"]
    assert recommended == f"{heads(best)}, E = {best['d_model']}"
    if not values["neighbours"]:
        assert below == "none: one layer of one head"
        return
    assert (below, predicted) in [(heads(n), n["verdict"]) for n in values["neighbours"]]
    assert ("--verify" in command) == (learnt in ("yes", "no"))


def test_the_command_prints_the_front_and_what_is_below():
    arguments = ["design", "d_retrieval", "--components", "2", "--tokens", "16", "--quiet"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "just below" in result.output
    values = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    best = values["recommended"]
    assert best["n_heads"] == [2]
    cells = next(line for line in result.output.splitlines() if "*" in line).split("│")
    expected = ["2", str(best["d_model"]), ", ".join(map(str, best["information"]))]
    assert [cell.strip() for cell in cells[2:5]] == expected
    least = CliRunner().invoke(app, ["design", "global_mean", "--tokens", "8", "--quiet"])
    assert "nothing has fewer heads or layers than one layer of one head" in " ".join(
        least.output.split()
    )
    alone = CliRunner().invoke(app, [*arguments, "--seeds", "3", "--epochs", "2"])
    assert "without --verify: expected no --seeds and no --epochs" in alone.stderr
    absurd = CliRunner().invoke(app, ["design", "d_retrieval", "--components", "99999999"])
    assert absurd.exit_code == 2
    assert "expected 1 to 256" in absurd.output
