"""What docs/results/language_model says is what the studies make of their rows."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest

from infoflow_lens import InfoFlowError
from infoflow_lens.experiments.language_model.card import comparison
from infoflow_lens.experiments.language_model.config import PRESETS
from infoflow_lens.experiments.language_model.graded_sets import (
    GradedSetsStudy,
    choice_table,
    chosen_of,
    last_layer_table,
    table_of,
    tally,
    tally_table,
)
from infoflow_lens.experiments.language_model.induction import Induction
from infoflow_lens.experiments.language_model.roles import Roles
from infoflow_lens.experiments.language_model.sets import Sets
from infoflow_lens.experiments.language_model.softness import Softness
from infoflow_lens.experiments.language_model.sufficiency import Sufficiency
from infoflow_lens.experiments.language_model.topk import TopK
from infoflow_lens.models.shipped import SHIPPED, shipped_folder

RESULTS = Path(__file__).parents[3] / "docs" / "results" / "language_model"
STUDIES = {study.name: study for study in (Sufficiency(), TopK(), Roles(), Softness())}


def rows_of(name):
    return pd.read_csv(RESULTS / name / "results.csv")


def words_of(name):
    return " ".join((RESULTS / name).read_text().split())


def shown(value, digits=3):
    """As prose has it: without the zero before the point."""
    return re.sub(r"(?<!\d)0\.", ".", f"{value:.{digits}f}")


@pytest.mark.parametrize("name", STUDIES)
def test_the_table_and_the_verdict_are_those_of_the_rows(name):
    study, rows = STUDIES[name], rows_of(name)
    table = (RESULTS / name / "table.md").read_text()
    record = json.loads((RESULTS / name / "record.json").read_text())["config"]
    verdict = study.verdict(rows)
    assert study.table(rows) in table
    assert verdict.passed is record["verdict"]["passed"]
    assert f"**{'Seen' if verdict.passed else 'Not seen'}**, by the rule" in table
    for reason in verdict.reasons:
        assert f"- {reason}" in table
    verdicts = words_of(f"{name}.md")
    assert ("**Seen**" if verdict.passed else "**Not seen**") in verdicts.split("## Rule")[1]


@pytest.mark.parametrize("name", STUDIES)
def test_a_table_and_a_figure_of_one_moment(name):
    rows = rows_of(name)
    assert STUDIES[name].table(rows[rows["final"]])
    assert STUDIES[name].figure(rows).axes


@pytest.mark.parametrize("name", STUDIES)
def test_the_rule_was_stated_before_and_is_the_one_that_judges(name):
    said = words_of(f"{name}.md")
    assert "before any trained model was looked at" in said
    for part in ("## Question", "## Measure", "## Controls", "## Predicted", "## Rule"):
        assert part in said


def test_numbers_of_sufficiency():
    rows = rows_of("sufficiency")
    whole = rows[(rows["share"] == 1) & (rows["n_context"] == 128)]
    end = whole[whole["final"]].set_index("assignment")["excess"]
    dealt = end[end.index.str.startswith("random")]
    early = whole[whole["step"] == 256].set_index("assignment")["excess"]
    half = rows[(rows["share"] == 0.5) & rows["final"] & (rows["n_context"] == 128)]
    half = half.set_index("assignment")["excess"]
    said = words_of("sufficiency.md")
    own, mean = end["mechanisms"], end["mean ablation"]
    assert f"rises by {shown(own)} nats, {own / mean:.0%} of the {shown(mean)} nats" in said
    assert f"({shown(dealt.min())} to {shown(dealt.max())})" in said
    assert f"at once for {shown(half['mechanisms'])} nats" in said
    assert (
        f"cost more ({shown(early['mechanisms'])}) than mean ablation "
        f"({shown(early['mean ablation'])})" in said
    )
    heads = rows[rows["final"] & (rows["n_context"] == 128)].iloc[0]
    assert heads["n_max_position"] == heads["n_soft"] == heads["n_own_position"] == 0
    assert (
        f"are {heads['n_global']} global, {heads['n_specific_position']} specific position, and "
        f"{heads['n_top_k']} top 4" in said
    )
    short = rows[(rows["share"] == 1) & rows["final"] & (rows["n_context"] == 32)]
    short = short.set_index("assignment")["excess"]
    assert (
        f"({shown(short['mechanisms'])} to {shown(own)} and {shown(short['mean ablation'])} to "
        f"{shown(mean)} nats" in said
    )


def test_numbers_of_roles():
    rows = rows_of("roles")
    end = rows[rows["final"]]
    own = end[end["kind"] == "trained"]
    curve = own[(own["part"] == "curve") & (own["of"] == "first")].groupby("rank")["rise"].mean()
    said = words_of("roles.md")
    assert f"rises by {curve[1]:.0%}, with four by {curve[4]:.0%}" in said
    reasons = Roles().verdict(rows).reasons[0]
    assert reasons.startswith("stdlib-2l: 12 directions needed, 16 of random ones")
    assert "12 of 16 are needed" in said
    heads = own[own["part"] == "head"].set_index(["layer", "head"])
    rho = heads["roles"].corr(heads["cost"], method="spearman")
    assert f"the rank correlation is {shown(rho, 2)}" in said
    assert heads["cost"].idxmax() == (0, 6)
    several = heads["roles"][heads["roles"] > 1.6]
    assert list(several.index) == [(1, 0), (1, 1), (1, 5)]
    assert (
        " and ".join([", ".join(f"{r:.1f}" for r in several[:2]), f"{several.iloc[2]:.1f}"]) in said
    )
    untrained = end[(end["kind"] == "untrained") & (end["part"] == "head")]["roles"].median()
    assert (
        f"has {untrained:.1f} roles (median), a trained one {heads['roles'].median():.1f}" in said
    )


def test_numbers_of_the_page():
    said = words_of("README.md")
    rows = rows_of("sufficiency")
    end = rows[rows["final"] & (rows["n_context"] == 128)].set_index(["assignment", "share"])
    own, mean = (end["excess"][name, 1.0] for name in ("mechanisms", "mean ablation"))
    assert f"{shown(own)} nats of {shown(mean)}, {own / mean:.0%}; below all eight" in said
    half, loss = end["excess"]["mechanisms", 0.5], end["loss"]["none", 0.0]
    assert f"loses {shown(half)} nats of its loss of {shown(loss)}; with all of them" in said
    assert f"with all of them {shown(own)}, where no head at all costs {shown(mean)}" in said
    heads = rows_of("roles")
    heads = heads[heads["final"] & (heads["part"] == "head")]
    roles = heads.groupby("kind")["roles"].median()
    assert f"{roles['untrained']:.1f} before, {roles['trained']:.1f} after (the median)" in said
    rows_of_page = (RESULTS / "README.md").read_text().splitlines()
    for name, study in STUDIES.items():
        (line,) = [row for row in rows_of_page if row.startswith(f"| [{name.replace('_', ' ')}]")]
        assert ("**seen**" if study.verdict(rows_of(name)).passed else "**not seen**") in line


def test_numbers_of_softness():
    rows = rows_of("softness")
    own = rows[rows["final"] & (rows["kind"] == "trained")].set_index(["layer", "head"])
    learnt = (own["fvu"] < own["fvu_least"]) & (own["excess"] >= 0.1)
    assert list(own.index[learnt]) == [(0, 4), (1, 7)]
    said = words_of("softness.md")
    assert f"{learnt.sum()} of {len(own)} heads have learnt to retrieve" in said
    assert (
        f"{(own['excess'] < 0.1).mean():.0%} of the heads exceed softness by less than .1" in said
    )
    first, *others = (
        f"{own['excess'][head]:+.2f}".replace("0.", ".", 1)
        for head in ((0, 6), (1, 0), (1, 1), (1, 5))
    )
    assert f"has an excess of {first} and" in said
    assert f"have {others[0]}, {others[1]} and {others[2]}." in said


def test_numbers_of_top_k():
    first, second, together = TopK().verdict(rows_of("top_k")).reasons
    assert together.endswith("growing (global)")
    said = words_of("top_k.md")
    for reason, layer, word in ((first, 0, "from"), (second, 1, "from")):
        low, high, slope = re.search(r": (\d+) to (\d+) keys, slope ([\d.]+)", reason).groups()
        keys = "keys " if layer == 0 else ""
        assert f"{word} {low} to {high} {keys}in layer {layer} (slope {slope.lstrip('0')}" in said
        assert reason.split("random keys ")[1].startswith("128,")


def measured_of(name):
    return json.loads((RESULTS / "models" / f"{name}.json").read_text())


def test_the_models_on_the_page_are_those_that_were_measured():
    measured = {name: measured_of(name) for name in PRESETS}
    page = (RESULTS / "README.md").read_text()
    assert f"<!-- models -->\n\n{comparison(measured)}\n\n<!-- end of models -->" in page
    for name, config in PRESETS.items():
        assert measured[name]["record"]["config"]["config"] == config.to_dict()
    for name in SHIPPED:
        assert measured[name] == json.loads((shipped_folder(name) / "measured.json").read_text())


def test_models_side_by_side_are_of_one_text():
    first, other = measured_of("stdlib-2l"), measured_of("stdlib-4l-mlp")
    assert len(comparison({"a": first, "b": other}).splitlines()) == 2 + 2 + 5 + 1
    other["record"]["config"]["corpus"] = "another"
    with pytest.raises(InfoFlowError, match="of 2 texts"):
        comparison({"a": first, "b": other})
    with pytest.raises(InfoFlowError, match="of 0 texts"):
        comparison({})


@pytest.mark.parametrize(
    ("study", "folder", "file"),
    [(Sets(), "sets", "results.csv.gz"), (Induction(), "induction_mlp", "results.csv")],
)
def test_tables_and_records_of_all_three_models(study, folder, file):
    rows = pd.read_csv(RESULTS / folder / file)
    record = json.loads((RESULTS / folder / "record.json").read_text())["config"]
    verdict = study.verdict(rows)
    assert study.table(rows) in (RESULTS / folder / "table.md").read_text()
    assert [verdict.passed, list(verdict.reasons)] == list(record["verdict"].values())
    for case in record["cases"]:
        if case["final"] and case["model"] in PRESETS:
            assert case["step"] == PRESETS[case["model"]].n_steps
        assert "/" not in case["model"]


def test_numbers_of_sets():
    rows = pd.read_csv(RESULTS / "sets" / "results.csv.gz")
    rows = rows[(rows["part"] == "all") & rows["final"] & (rows["size_of"] == "k=1")]
    last = rows[rows["layer"] == rows.groupby("model")["layer"].transform("max")]
    page = (RESULTS / "sets.md").read_text().replace("**", "")
    for method, some in last[last["model"] != "built circuit"].groupby("method"):
        cells = [
            f"{'1' if method == 'measured' else shown(auroc)} ({shown(inside)})"
            for auroc, inside in zip(some["auroc"], some["influence_inside"], strict=True)
        ]
        name = "InfoFlow, k = 1" if method == "k=1" else method
        assert f"| {name} | {' | '.join(cells)} |" in page
    own = last[(last["model"] == "stdlib-4l-mlp") & (last["method"] == "k=1")].iloc[0]
    said = words_of("sets.md")
    assert (
        f"hold {own['mean_size']:.1f} of {own['mean_candidates']:.1f} candidates in the "
        f"{own['n_states']} states where they leave any out, and all in {own['n_whole']};" in said
    )


def test_the_page_of_graded_sets_is_that_of_its_rows():
    """Its tables and its verdict are code's, and the words hold for the rows."""
    rows, study = pd.read_csv(RESULTS / "graded_sets" / "results.csv.gz"), GradedSetsStudy()
    record = json.loads((RESULTS / "graded_sets" / "record.json").read_text())["config"]
    page, verdict = (RESULTS / "graded_sets.md").read_text(), study.verdict(rows)
    assert study.table(rows) in (RESULTS / "graded_sets" / "table.md").read_text()
    assert [verdict.passed, list(verdict.reasons)] == list(record["verdict"].values())
    deep = rows[rows["model"] == "random 12 x 12"]
    for part in (
        choice_table(rows),
        *(last_layer_table(rows, influence) for influence in ("jacobian", "resample")),
        tally_table(rows),
        table_of(deep),
        "\n".join(f"- {reason}" for reason in verdict.reasons),
    ):
        assert f"\n\n{part}\n\n" in page
    said, found, chosen = words_of("graded_sets.md"), tally(rows), chosen_of(rows)
    assert f"chose *{chosen.removeprefix('graded: ')}*" in said
    answer = "Seen" if verdict.passed else "Not seen"
    over, under = (found["attention rollout", i] for i in ("resample", "jacobian"))
    n_models = sum(over.values())
    assert (
        f"**{answer}**, by the rule, and not refuted. Of {n_models} trained models the chosen "
        f"graded sets are ahead of rollout on {over['ahead']} against resample ablation, and on "
        f"{under['ahead']} against the Jacobian, where they are level on {under['level']} and "
        f"behind on {under['behind']}." in said
    )
    assert over["behind"] + under["behind"] == 0  # not refuted
    for influence in ("jacobian", "resample"):
        assert found["first choices", influence]["ahead"] == n_models
    by_weight = [found["graded: weight, product", i] for i in ("resample", "jacobian")]
    assert (
        f"resample ablation on {by_weight[0]['ahead']} of {n_models} models, and against the "
        f"Jacobian on {by_weight[1]['ahead']}." in said
    )
    assert not any(counts["behind"] for counts in found.values())
    assert "No method is ahead of the chosen graded sets on any trained model" in said
    four = rows[(rows["model"] == "stdlib-4l-mlp-s0") & (rows["layer"] == 3)]
    four = four[four["on"] == "test"]
    rank = four.groupby(["method", "influence"])["spearman"].mean()
    assert (
        f"are {shown(rank[chosen, 'jacobian'])} (Jacobian, estimated) and "
        f"{shown(rank[chosen, 'resample'])} (resample ablation), of rollout "
        f"{shown(rank['attention rollout', 'jacobian'])} and "
        f"{shown(rank['attention rollout', 'resample'])}, of the first choices " in said
    )
    by_weight = [rank["graded: weight, product", i] for i in ("jacobian", "resample")]
    assert f"the same paths have {shown(by_weight[0])} and {shown(by_weight[1])}, about" in said
    first = four[four["method"] == "first choices"]
    size, candidates = first["size"].mean(), first["candidates"].mean()
    assert f"where the set of first choices holds {size:.1f} of {candidates:.1f} tokens" in said
    end = deep[(deep["layer"] == 11) & (deep["on"] == "test")]
    first = end[end["method"] == "first choices"]
    rank = end.groupby(["method", "influence"])["spearman"].mean()
    both = {
        method: " and ".join(shown(rank[method, i]) for i in ("jacobian", "resample"))
        for method in (chosen, "attention rollout", "graded: norm, weakest")
    }
    assert (
        f"holds {first['size'].mean():.1f} of {first['candidates'].mean():.1f} tokens and its "
        f"order is chance ({shown(rank['first choices', 'jacobian'])}). The chosen graded sets "
        f"still rank the tokens, at {both[chosen]} (Jacobian" in said
    )
    assert (
        f"ranks them better in the mean, at {both['attention rollout']}, and so do weakest edges"
        in said
    )
    assert f"weakest edges, at {both['graded: norm, weakest']}." in said
