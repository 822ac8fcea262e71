"""What studies state beforehand, and that no rule passes without its controls."""

from dataclasses import replace
from functools import cache

import pytest

from infoflow_lens.experiments.studies import STUDIES
from tests.experiments.by_theory import BY_THEORY
from tests.experiments.studies import (
    test_agreement_over_training,
    test_separated_pairs,
    test_triangle_center,
    test_varying_heads,
)
from tests.experiments.test_results import RESULTS, rows_of

# results that pass: by the theory's own constructions, or, where there is none, as published
PASSING = {
    **BY_THEORY,
    "separated_pairs": test_separated_pairs.passing,
    "triangle_center": lambda: test_triangle_center.frame(
        {8: (0.2, 0.22), 16: (0.8, 0.85), 32: (0.95, 1.0)}
    ),
    "varying_heads": test_varying_heads.passing,
    "attention_maps": lambda: rows_of(RESULTS / "attention_maps"),
    "agreement_over_training": test_agreement_over_training.frame,
}
passing_rows = cache(lambda name: PASSING[name]())


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_states_what_it_expects_and_what_would_refute_it(name):
    study = STUDIES[name]
    statement = study.statement
    assert statement.text.startswith(f"# {study.title}\n\n{study.source}. Written on ")
    assert all(statement.part(name) for name in statement.PARTS)
    assert (RESULTS / name / "statement.md").read_text() == statement.text


@pytest.mark.parametrize("name", STUDIES)
def test_a_rule_is_said_and_judged_by_the_same_object(name):
    """A claim whose bound is moved says so, and no results pass it any more."""
    study, passing = STUDIES[name], passing_rows(name)
    for claim in study.claims():
        moved = replace(claim, op="<", bound=-1e9)
        assert "below -1000000000" in moved.rule() != claim.rule()
        judged = moved.judge(passing)
        assert not judged.passed or not claim.numbers(passing)
        assert all(moved.rule() in reason for reason in judged.reasons)


@pytest.mark.parametrize("name", STUDIES)
def test_the_statement_has_the_bounds_of_the_claims(name):
    """Statements are prose that was written before the run; the claims judge by their numbers."""
    rule = STUDIES[name].statement.part("Rule.")
    words = {"0.333": "a third", "2": "factor of 2"}
    for claim in STUDIES[name].claims():
        for bound in claim.bound if isinstance(claim.bound, tuple) else (claim.bound,):
            said = [f"{bound:g}", f"{bound:g}".removeprefix("0"), f"{bound:.0%}"]
            said += [words.get(f"{bound:.3g}", f"{bound:.0e}".replace("e-0", "e-"))]
            assert any(number in rule for number in said) or bound in (0, 0.5, 1), claim.rule()


@pytest.mark.parametrize("name", STUDIES)
def test_no_rule_passes_with_the_numbers_of_its_controls(name):
    study, passing = STUDIES[name], passing_rows(name)
    assert study.verdict(passing).passed
    controlled = study.controlled(passing)
    assert set(controlled) == set(study.statement.controls)
    for control, results in controlled.items():
        assert not study.verdict(results).passed, control
    assert study.verdict(passing).passed  # and the results are as they were
