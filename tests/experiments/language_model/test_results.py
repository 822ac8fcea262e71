"""What docs/results/language_model says is what the studies make of their rows."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest

from infoflow_lens import InfoFlowError
from infoflow_lens.experiments.language_model.card import comparison
from infoflow_lens.experiments.language_model.config import PRESETS
from infoflow_lens.experiments.language_model.edge_budget import (
    ALL,
    GRADED,
    ONE,
    PILOT,
    EdgeBudget,
    outcome,
)
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
from infoflow_lens.experiments.language_model.reasons import Reasons
from infoflow_lens.experiments.language_model.roles import Roles
from infoflow_lens.experiments.language_model.sets import Sets
from infoflow_lens.experiments.language_model.softness import Softness
from infoflow_lens.experiments.language_model.sufficiency import EVERY, TOP_4, Sufficiency
from infoflow_lens.experiments.language_model.topk import TopK
from infoflow_lens.hooks import IDEALS
from infoflow_lens.models.shipped import SHIPPED, shipped_folder

RESULTS = Path(__file__).parents[3] / "docs" / "results" / "language_model"
STUDIES = {study.name: study for study in (Sufficiency(), TopK(), Roles(), Softness())}


def rows_of(name):
    return pd.read_csv(RESULTS / name / "results.csv")


def words_of(name):
    return " ".join((RESULTS / name).read_text().split())


def judged_in(record):
    """The verdict of a record, without what is told beside it."""
    return [record["verdict"][name] for name in ("passed", "reasons")]


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


def points_of_the_referee(rows):
    """The four points of the shipped model, in the page's table: known before, and now."""
    rows = rows[rows["model"] == "stdlib-2l"]
    heads, ladder = rows[rows["kind"] == "head"], rows[rows["kind"] == "windows"]
    excess = rows[rows["kind"] == "assignment"].set_index("assignment")["excess"]
    able = heads[heads["sufficient_max_position"] == 1]

    def head(row):
        low, high = (
            row["damage_max_position"] + sign * 1.96 * row["error_max_position"] for sign in (-1, 1)
        )
        damage = shown(row["damage_max_position"])
        return f"{row['layer']:.0f}.{row['head']:.0f} at {damage} ({shown(low)} to {shown(high)})"

    def by_windows(column, measure, form):
        cells = []
        for _, some in ladder[ladder["measure"] == measure].groupby("n_windows"):
            values = sorted(some[column])
            ends = [values[0], values[-1]] if len(values) > 1 else values
            cells.append(" to ".join(dict.fromkeys(form(value) for value in ends)))
        return ", ".join(cells)

    numbers = [f"{n:.0f}" for n in sorted(set(ladder["n_windows"]))]
    tops = ", ".join(shown(excess[f"every head top {k}"]) for k in (1, 2, 4, 8))
    whole, percent = "{:.0f}".format, "{:.0%}".format
    said = [
        (
            "heads that can do with the hard maximum",
            "none told; 0.6 at .017",
            f"{len(able)} of {len(heads)}: " + ", ".join(head(row) for _, row in able.iterrows()),
        ),
        (
            f"heads called specific position, {', '.join(numbers)} windows",
            "8, 5, 6, not measured",
            f"same windows {by_windows('n_specific_position', 'same windows', whole)}; "
            f"held out {by_windows('n_specific_position', 'held out', whole)}",
        ),
        (
            f"share of mean ablation, {', '.join(numbers)} windows",
            "31%, 23%, 27%, not measured",
            f"same windows {by_windows('share', 'same windows', percent)}; "
            f"held out {by_windows('share', 'held out', percent)}",
        ),
        (
            "every head top 1, 2, 4, 8 (nats)",
            "1.713, .828, .344, .128",
            tops,
        ),
        (
            "every head its mean pattern; the mechanisms (nats)",
            "1.144; .447 to .524",
            f"{shown(excess['every head specific_position'])}; {shown(excess['mechanisms'])}",
        ),
    ]
    return [f"| {' | '.join(line)} |" for line in said]


def test_numbers_of_sufficiency():
    rows = rows_of("sufficiency")
    page = (RESULTS / "sufficiency.md").read_text()
    new, _, _ = page.partition("## The first study")
    for line in points_of_the_referee(rows):
        assert line in new
    said = " ".join(new.split())
    for model, some in rows[rows["kind"] == "assignment"].groupby("model"):
        by = some.set_index("assignment")
        own, mean = by.loc["mechanisms"], by.loc["mean ablation"]
        assert (
            f"| {model} | {shown(own['excess'])} | {shown(mean['excess'])} | {own['share']:.0%} "
            f"({own['share_low']:.0%} to {own['share_high']:.0%}) | "
            + " | ".join(
                shown(by["excess"][name])
                for name in ("every head top 1", "every head top 4", "every head specific_position",
                             "best of three", "greedy")
            )
            + " |"
        ) in page  # fmt: skip
    leads = rows[rows["kind"] == "assignment"].set_index(["model", "assignment"])
    for (model, name), row in leads.iterrows():
        lead = {TOP_4: "lead", f"{EVERY}specific_position": "best_lead"}.get(name)
        if lead is not None:
            numbers = [shown(row[lead + end]) for end in ("", "_low", "_high")]
            value, low, high = (n if n.startswith("-") else f"+{n}" for n in numbers)
            assert f"`{model}` {value} ({low} to {high})" in said
    heads = rows[rows["kind"] == "head"]
    for model, some in heads.groupby("model"):
        able = some[some["sufficient_max_position"] == 1]
        assert f"{len(able)} of {len(some)} in `{model}`" in said
        assert (able["sufficient_global"] + able["sufficient_specific_position"] > 0).all()
    few = rows[(rows["kind"] == "windows") & (rows["n_windows"] == 32)]
    labels = few[few["model"] == "stdlib-2l"].groupby("measure")["n_specific_position"]
    low, high = labels.min(), labels.max()
    assert (
        f"calls {low['same windows']:.0f} or {high['same windows']:.0f} heads specific position in "
        f"every draw, the held-out one {low['held out']:.0f} to {high['held out']:.0f};" in said
    )
    for reason in Sufficiency().verdict(rows).reasons:
        model, claims = reason.partition(": ")[0], reason.rpartition(": ")[2]
        assert f"`{model}`: {claims}" in said


def test_numbers_of_the_first_study_of_sufficiency():
    rows = rows_of("sufficiency_before")
    whole = rows[(rows["share"] == 1) & (rows["n_context"] == 128)]
    end = whole[whole["final"]].set_index("assignment")["excess"]
    dealt = end[end.index.str.startswith("random")]
    early = whole[whole["step"] == 256].set_index("assignment")["excess"]
    half = rows[(rows["share"] == 0.5) & rows["final"] & (rows["n_context"] == 128)]
    half = half.set_index("assignment")["excess"]
    said = words_of("sufficiency.md").split("## The first study")[1]
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
    other = rows[(rows["model"] == "stdlib-2l-mlp-s0") & (rows["kind"] == "assignment")]
    other = {name: shown(value) for name, value in other.set_index("assignment")["excess"].items()}
    assert f"{other['best of three']} of {other['mean ablation']} nats where mean" in said
    assert f"for all cost {other['every head specific_position']}, but no better than" in said
    assert f"for every head, {other['every head top 4']}. And" in said
    by = rows[rows["model"] == "stdlib-2l-s1"].dropna(subset="assignment")
    seed = {name: shown(value) for name, value in by.set_index("assignment")["excess"].items()}
    assert f"mechanisms cost {seed['mechanisms']}, less than four" in said
    assert f"keys for every head ({seed['every head top 4']}), and the three more" in said
    pair = f"({seed['best of three']}, {seed['every head specific_position']})"
    assert f"than mean patterns for all {pair}" in said
    heads = rows[(rows["model"] == "stdlib-2l-mlp-s0") & (rows["kind"] == "head")]
    able = heads[heads["sufficient_max_position"] == 1]
    assert len(able) == 6
    assert set(able["layer"]) == {1}
    assert able["sufficient_global"].all()
    rows = rows[rows["model"] == "stdlib-2l"]
    by = rows[rows["kind"] == "assignment"].set_index("assignment")
    excess = {name: shown(value) for name, value in by["excess"].items()}
    own, mean = excess["mechanisms"], excess["mean ablation"]
    share = by.loc["mechanisms"]
    assert (
        f"{own} of {mean} nats, {share['share']:.0%} (at most {share['share_high']:.0%}); below "
        f"all deals and every one ideal; four keys for every head {excess['every head top 4']}"
        in said
    )
    dealt = by["excess"][by.index.str.startswith("random")]
    assert f"the model loses {own} of the {mean} nats" in said
    assert f"cost {shown(dealt.min())} to {shown(dealt.max())}, and one ideal" in said
    assert f"{excess['every head specific_position']} (mean patterns) or more" in said
    assert f"it loses {excess['every head top 4']}, with eight {excess['every head top 8']}" in said
    assert f"it loses {excess['best of three']}, no less than" in said
    assert by["best_lead_low"]["every head specific_position"] < 0
    heads = rows[rows["kind"] == "head"]
    counts = {i: int(heads[f"sufficient_{i}"].sum()) for i in IDEALS}
    able = heads[heads["sufficient_max_position"] == 1][["layer", "head"]].to_numpy().tolist()
    assert able == [[0, 6]]
    assert f"{counts['top_k']} can with their four largest keys" in said
    assert f"enough for {counts['specific_position']}, evenly for {counts['global']}" in said
    few = rows[(rows["kind"] == "windows") & (rows["n_windows"] == 32)]
    labels = few.groupby("measure")["n_specific_position"]
    low, high = labels.min(), labels.max()
    assert f"it is {low['same windows']:.0f} or {high['same windows']:.0f} where" in said
    assert f"and {low['held out']:.0f} to {high['held out']:.0f} where they are not" in said
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
    others = {path.stem for path in (RESULTS / "models").glob("*.json")} - set(PRESETS)
    measured = {name: measured_of(name) for name in (*PRESETS, *sorted(others))}
    page = (RESULTS / "README.md").read_text()
    assert f"<!-- models -->\n\n{comparison(measured)}\n\n<!-- end of models -->" in page
    for name, config in PRESETS.items():
        assert measured[name]["record"]["config"]["config"] == config.to_dict()
    for name in others:  # "-s1": the preset's settings, with this seed and so many steps
        kind, _, seed = name.rpartition("-s")
        config = measured[name]["record"]["config"]["config"]
        changed = {"n_steps": 4000, "decay": 0.3, "seed": int(seed), "threads": 1}
        assert config == {**PRESETS[kind].to_dict(), **changed, "evaluate_every": 500}
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
    [
        (Sets(), "sets", "results.csv.gz"),
        (Induction(), "induction_mlp", "results.csv"),
        (EdgeBudget(), "edge_budget", "results.csv"),
    ],
)
def test_tables_and_records_of_several_models(study, folder, file):
    rows = pd.read_csv(RESULTS / folder / file)
    record = json.loads((RESULTS / folder / "record.json").read_text())["config"]
    verdict = study.verdict(rows)
    assert study.table(rows) in (RESULTS / folder / "table.md").read_text()
    assert [verdict.passed, list(verdict.reasons)] == [
        record["verdict"][name] for name in ("passed", "reasons")
    ]
    for case in record["cases"]:
        if case["final"] and case["model"] in PRESETS:
            # a shipped model tells no step
            assert case["step"] in (-1, PRESETS[case["model"]].n_steps)
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


def test_numbers_of_reasons():
    study, rows = Reasons(), rows_of("reasons")
    verdict = study.verdict(rows)
    table = (RESULTS / "reasons" / "table.md").read_text()
    record = json.loads((RESULTS / "reasons" / "record.json").read_text())["config"]
    assert study.table(rows) in table
    assert judged_in(record) == [
        verdict.passed,
        list(verdict.reasons),
    ]
    said = words_of("reasons.md")
    found, word = said.split("# Found")[1], "Seen" if verdict.passed else "Not seen"
    assert f"**{word}** in `stdlib-2l`" in found
    own = rows.set_index(["kind", "layer", "head", "part"]).sort_index()
    for head in (0, 1, 5):
        part = own.loc["trained", 1, head, "head 0.6"]
        untrained = own.loc["untrained", 1, head, "head 0.6"]
        assert (
            f"| 1.{head} | {part['share']:.2f} | {shown(part['low'], 2)} to {part['high']:.2f} | "
            f"{part['largest']:.1%} | {untrained['largest']:.1%} | {part['begins_second']:.0%} |"
        ) in found
    assert verdict.passed
    parts = rows[(rows["kind"] == "trained")].pivot(index="part", columns="head", values="share")
    first, second, third = (shown(value, 2) for value in parts.loc["token embedding"])
    assert f"its token embedding ({first}, {second} and {third} of the margin)" in found
    first, second = (shown(-value, 2) for value in parts.loc["head 0.4", [0, 1]])
    assert f"Head 0.4 takes {first} away in 1.0 and {second} in 1.1." in found
    untrained = rows[(rows["kind"] == "untrained") & (rows["part"] == "head 0.6")]["share"]
    assert f"the same part has at most {shown(untrained.abs().max(), 2)} of" in found
    others = parts[parts.index.str.startswith("head ") & (parts.index != "head 0.6")]
    assert f"the largest share is {shown(others.max().max(), 2)}." in found


def test_numbers_of_reasons_in_other_trainings():
    study, rows = Reasons(), rows_of("reasons_trained")
    verdict = study.verdict(rows)
    assert study.table(rows) in (RESULTS / "reasons_trained" / "table.md").read_text()
    record = json.loads((RESULTS / "reasons_trained" / "record.json").read_text())["config"]
    assert judged_in(record) == [
        verdict.passed,
        list(verdict.reasons),
    ]
    page = (RESULTS / "reasons.md").read_text()
    trained = rows[rows["kind"] == "trained"]
    for reason in verdict.reasons:
        model, _, said = reason.partition(": ")
        if said.startswith("no induction head"):
            score = trained.loc[trained["model"] == model, "prefix_matching"].max()
            assert f"| {model} | none ({score:.2f}) |" in page
            continue
        name = said.split()[0]
        layer, head = map(int, name.split("."))
        own = trained[(trained["model"] == model) & (trained["layer"] == layer)]
        own = own[own["head"] == head].set_index("part")
        part = own[own["is_previous"] == 1].iloc[0]
        assert (
            f"| {model} | {name} | {part.name.removeprefix('head ')} | {part['share']:.2f} | "
            f"{part['largest']:.1%} | {own.loc['MLP 0', 'share']:.2f} | "
            f"{'passes' if said.startswith(f'{name} passes') else 'fails'} |"
        ) in page
    said, with_mlp = words_of("reasons.md"), rows[rows["model"].str.contains("mlp")]
    ranges = [
        f"{shown(shares.min(), 2)} to {shown(shares.max(), 2)}"
        for kind in ("trained", "untrained")
        for _, shares in with_mlp[
            (with_mlp["part"] == "MLP 0") & (with_mlp["kind"] == kind)
        ].groupby("model")["share"]
    ]
    assert f"({ranges[0]} with two layers, {ranges[1]} with four)" in said
    assert f"({ranges[2]}, {ranges[3]})" in said
    own = with_mlp[with_mlp["kind"] == "trained"].dropna(subset=["head"])
    heads = own[own["part"].str.startswith("head ")]["share"]
    assert f"and no head more than {shown(heads.max(), 2)}, also not 0.6" in said
    attention = own[own["model"] == "stdlib-4l-mlp-s0"]["previous_token"].iloc[0]
    assert f"gives the token before {shown(attention, 2)} of its attention" in said
    embedded = own[own["part"].str.contains("embedding")]["share"].abs().max()
    assert f"they add at most {shown(embedded, 2)}." in said


def test_the_page_of_graded_sets_is_that_of_its_rows():
    """Its tables and its verdict are code's, and the words hold for the rows."""
    rows, study = pd.read_csv(RESULTS / "graded_sets" / "results.csv.gz"), GradedSetsStudy()
    record = json.loads((RESULTS / "graded_sets" / "record.json").read_text())["config"]
    page, verdict = (RESULTS / "graded_sets.md").read_text(), study.verdict(rows)
    assert study.table(rows) in (RESULTS / "graded_sets" / "table.md").read_text()
    assert [verdict.passed, list(verdict.reasons)] == [
        record["verdict"][name] for name in ("passed", "reasons")
    ]
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


def test_numbers_of_the_edge_budget():
    rows = rows_of("edge_budget")
    needed = rows[rows["kind"] == "needed"]
    page = (RESULTS / "edge_budget.md").read_text()
    said = words_of("edge_budget.md")
    for (part, method), some in needed.groupby(["part", "method"]):
        cells = []
        for row in some.to_dict("records"):
            how = "level" if method == GRADED else outcome(row)
            cells.append(f"{row['needed']:,.0f}" + (f" *{how}*" if how != "level" else ""))
        assert f"| {method} | {' | '.join(cells)} |" in page
        edges = " | ".join(f"{n:,.0f}" for n in some["n_edges"])
        assert f"| {part} | {' | '.join(f'`{model}`' for model in some['model'])} |" in page
        assert f"| all edges | {edges} |" in page
    passed = EdgeBudget().verdict(rows).passed
    assert ("**Seen**" if passed else "**Not seen**") in said.split("## Answer")[1]
    judged = needed[needed["model"] != PILOT].set_index(["part", "method"]).sort_index()

    def times(part, method):
        return span(judged.loc[[(part, method)], "times"], shown_times)

    own = judged.loc[[(ONE, GRADED)]]
    answer = said.split("## Answer")[1]
    for words in (
        f"The graded choice needs {span(own['needed'], '{:.0f}'.format)} edges of a window "
        f"({span(own['needed'] / own['n_edges'], '{:.1%}'.format)} of all)",
        f"chance needs {times(ONE, 'chance')} times as many, another window's edges "
        f"{times(ONE, 'another window')}",
        f"Rollout needs {times(ONE, 'rollout')} times as many",
        f"gradient x change**, which needs {times(ONE, 'gradient x change')} times as many",
        f"weight x norm needs {times(ONE, 'weight x norm')} times as many, attention weight "
        f"{times(ONE, 'attention weight')}",
        f"Weight x norm needs {times(ALL, 'weight x norm')} times the edges of the graded choice",
        f"needs at most {judged.loc[[(ALL, GRADED)]].eval('needed / n_edges').max():.0%} of the",
    ):
        assert words in answer, words
    (row,) = [
        line
        for line in (RESULTS / "README.md").read_text().splitlines()
        if line.startswith("| [edge budget]")
    ]
    for words in (
        f"{span(own['needed'], '{:.0f}'.format)} edges, "
        f"{span(own['needed'] / own['n_edges'], '{:.1%}'.format)} of all",
        f"rollout needs {times(ONE, 'rollout')} times as many",
        f"attention weight without paths {times(ONE, 'attention weight')} times",
    ):
        assert words in row
    assert row.endswith("**seen**, on four models |") is (passed and len(own) == 4)


def span(values, form):
    """The least and the most, or the one."""
    return " to ".join(dict.fromkeys((form(values.min()), form(values.max()))))


def shown_times(times):
    """Two digits, without the zero before the point."""
    return f"{times:.0f}" if times >= 9.95 else shown(times, 1 if times >= 0.995 else 2)
