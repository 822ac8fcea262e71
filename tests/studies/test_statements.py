"""What studies state beforehand, and that no rule passes without its controls."""

import re
from dataclasses import replace
from functools import cache

import pandas as pd
import pytest

from infoflow_lens import InfoFlowError
from infoflow_lens.studies.papers import STUDIES
from infoflow_lens.studies.registry import LANGUAGE_MODEL_STUDIES, STUDY_KINDS
from infoflow_lens.studies.study import Statement
from tests.conftest import some_of
from tests.studies.by_theory import BY_THEORY
from tests.studies.language_model import test_studies as language_models
from tests.studies.papers import (
    test_agreement_over_training,
    test_separated_pairs,
    test_triangle_center,
    test_varying_heads,
)
from tests.studies.test_results import RESULTS, rows_of

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
    **language_models.PASSING,
}
ALL = {name: kind() for name, kind in STUDY_KINDS.items()}
passing_rows = cache(lambda name: PASSING[name]())


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_states_what_it_expects_and_what_would_refute_it(name):
    study = STUDIES[name]
    statement = study.statement
    assert statement.text.startswith(f"# {study.title}\n\n{study.source}. Written on ")
    assert all(statement.part(name) for name in statement.PARTS)
    assert (RESULTS / name / "statement.md").read_text() == statement.text


@pytest.mark.parametrize("name", LANGUAGE_MODEL_STUDIES)
def test_a_study_of_language_models_states_its_rule_before_it_looks(name):
    statement = ALL[name].statement
    assert re.search(r"\nWritten on \d{4}-\d{2}-\d{2}\b", statement.text)
    assert statement.part("Rule.").strip()
    assert statement.part("Question.").strip()


def test_a_statement_without_a_part_is_refused():
    for name in ("head_count", "top_k"):
        text = ALL[name].statement.text
        assert Statement(text).controls
        for without in ("# ", "Rule"):
            with pytest.raises(InfoFlowError, match="expected Markdown with a title and the parts"):
                Statement(text.replace(without, "", 1))


@pytest.mark.parametrize("name", some_of(STUDY_KINDS, "head_count", "cost_law", "sets"))
def test_a_rule_is_said_and_judged_by_the_same_object(name):
    """A claim whose bound is moved says so, and no results pass it any more."""
    study, passing = ALL[name], passing_rows(name)
    for claim in study.claims():
        moved = replace(claim, op="<", bound=-1e9)
        assert "below -1000000000" in moved.rule() != claim.rule()
        judged = moved.judge(passing)
        assert not judged.passed or not claim.numbers(passing)
        assert all(moved.rule() in reason for reason in judged.reasons)


@pytest.mark.parametrize("name", STUDY_KINDS)
def test_the_statement_has_the_bounds_of_the_claims(name):
    """Statements are prose that was written before the run; the claims judge by their numbers."""
    statement = ALL[name].statement
    rule = statement.text if name in LANGUAGE_MODEL_STUDIES else statement.part("Rule.")
    words = {"0.333": "a third", "2": "factor of 2", "0.25": "1/4" if "1/4" in rule else "quarter"}
    words["0.1"] = "tenth"
    for claim in ALL[name].claims():
        for bound in claim.bound if isinstance(claim.bound, tuple) else (claim.bound,):
            said = [f"{bound:g}", f"{bound:g}".removeprefix("0"), f"{bound:.0%}"]
            said += [words.get(f"{bound:.3g}", f"{bound:.0e}".replace("e-0", "e-"))]
            assert any(number in rule for number in said) or bound in (0, 0.5, 1), claim.rule()


@pytest.mark.parametrize(
    "name", some_of(STUDY_KINDS, "head_count", "cost_law", "triangle_center", "sets", "induction")
)
def test_no_rule_passes_with_the_numbers_of_its_controls(name):
    study, passing = ALL[name], passing_rows(name)
    before = passing.copy()
    assert study.verdict(passing).passed
    controlled = study.control_results(passing)
    if name in STUDIES:
        assert set(controlled) == set(study.statement.controls)
    text = " ".join(study.statement.text.split()).lower()
    assert controlled
    assert all(control.lower() in text for control in controlled)
    for control, results in controlled.items():
        assert not study.verdict(results).passed, control
    pd.testing.assert_frame_equal(passing, before)
