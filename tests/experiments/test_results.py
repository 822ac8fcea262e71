"""The results in docs/results: what stands there is what the studies make of their rows."""

import json
import math
import shutil
from pathlib import Path

import pandas as pd
import pytest
from scipy.stats import gmean, spearmanr
from typer.testing import CliRunner

from infoflow_lens import InfoFlowError
from infoflow_lens.cli import app
from infoflow_lens.experiments.studies import STUDIES, find_study
from infoflow_lens.experiments.studies.head_count import beside_published
from infoflow_lens.experiments.studies.token_models import epochs_until, last_epochs
from infoflow_lens.experiments.summary import (
    BEGIN,
    END,
    FULL,
    recorded_run,
    rows_of,
    runs_of,
    summarise,
)
from infoflow_lens.experiments.sweep import plain_cell

RESULTS = Path(__file__).parents[2] / "docs" / "results"
RUNS = {
    str(path.relative_to(RESULTS)): (study, path)
    for study in STUDIES.values()
    for path in runs_of(study, RESULTS)
}
of_each_run = pytest.mark.parametrize(("study", "path"), RUNS.values(), ids=RUNS)


def config_of(path):
    return json.loads((path / "record.json").read_text())["config"]


def test_every_run_is_by_the_present_settings_of_its_study():
    assert set(RUNS) >= set(STUDIES)
    for name in STUDIES:
        assert (f"{name}/{FULL}" in RUNS) is (RESULTS / name / FULL).is_dir()


@of_each_run
def test_a_run_is_whole(study, path):
    config = config_of(path)
    preset = "full" if path.name == FULL else "quick"
    assert config["preset"] == preset
    assert config["cases"] == json.loads(json.dumps(list(study.cases(preset))))
    assert config["seeds"] == list(range(study.presets[preset]))
    n_runs = len(config["cases"]) * len(config["seeds"])
    assert rows_of(path, None)["run"].nunique() == n_runs


@of_each_run
def test_the_recorded_run_is_that_of_the_rows(study, path):
    """A record keeps what was said then; a statement says where its rule was changed since."""
    said = config_of(path)["verdict"]["passed"]
    if " was seen" in study.statement.part("Rule.").partition("Changed on ")[2]:
        assert said is False
    else:
        assert recorded_run(study, path).verdict.passed is said


@of_each_run
def test_tables_and_figures_do_without_a_case(study, path):
    """One figure for each study, without the case that stands first in most tables."""
    rows = rows_of(path)
    cases = rows["run"] // len(config_of(path)["seeds"])
    drawn = path.name == FULL and study.name in RUNS
    for case in cases.unique():
        without = rows[cases != case]
        if not without.empty:
            assert study.table(without)
            assert drawn or study.figure(without).axes
            drawn = True


def test_the_pages_are_what_the_summary_writes(tmp_path):
    """Tables and the page over all studies, byte by byte."""
    copy = tmp_path / "results"
    shutil.copytree(RESULTS, copy, ignore=shutil.ignore_patterns("*.png", "language_model"))
    done = CliRunner().invoke(app, ["experiment", "--summary", "--out", str(copy)])
    assert done.exit_code == 0, done.output
    for page in sorted(copy.rglob("*.md")):
        assert page.read_text() == (RESULTS / page.relative_to(copy)).read_text(), page
    table = (copy / "README.md").read_text().split(BEGIN)[1].split(END)[0]
    lines = [line for line in table.splitlines() if line.startswith("| [`")]
    assert len(lines) == len(RUNS)
    for line, (name, (study, path)) in zip(lines, RUNS.items(), strict=True):
        assert (copy / study.name / "statement.md").is_file()
        full = ", full" if path.name == FULL else ""
        assert line.startswith(f"| [`{study.name}`]({name}/table.md){full} |")
        seen = "seen" if recorded_run(study, path).verdict.passed else "**not seen**"
        assert line.endswith(f"| {seen} |")


def heads_table(path):
    """Mean epochs, seeds that reach .95, and rates, by start, task and heads."""
    lines = (path / "table.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    columns = ({tuple(row[:3]): row[place] for row in rows} for place in (4, 5, 3))
    epochs, reached, rates = columns
    return {key: cell.split(" ")[0] for key, cell in epochs.items()}, reached, rates


def test_what_is_told_of_more_heads_is_what_the_table_says():
    """The table is of the rows, as another test says."""
    epochs, reached, _ = heads_table(RESULTS / "varying_heads")
    start, noise = "the paper's start", "the paper's start plus noise"
    text = told("More heads")
    one, two, four, eight = (epochs[start, "memorization", heads] for heads in "1248")
    assert f"{one}, {two}, {four} and {eight} epochs with one, two, four and eight" in text
    summed = [epochs[f"{start}, heads summed", "memorization", heads] for heads in "248"]
    assert f"take {summed[0]}, {summed[1]} and {summed[2]} epochs with two, four and" in text
    counts = ("1 1", "2 2", "4 4")
    assert {epochs[noise, "reasoning", heads] for heads in counts} == {"2"}
    assert "averaged heads need 2 epochs with any count" in text
    found = [reached[noise, "reasoning", heads] for heads in counts]
    assert found == ["1 of 2", "2 of 2", "2 of 2"]
    assert "(one of two with one head, both with two and four)" in text
    three, deep = ((noise, "contextual generalization", h) for h in ("1 1 1", "1 1 1 1"))
    assert f"three layers need {epochs[three]} epochs and four layers {epochs[deep]}" in text
    assert [reached[three], reached[deep]] == ["1 of 2", "1 of 2"]
    assert reached[noise, "generalization", "1 1"] == "0 of 2"
    rows = rows_of(RESULTS / "varying_heads" / "earlier")
    rows = rows[(rows["task"] == "memorization") & (rows["start"] == "paper")]
    by = {heads: epochs_until(runs, 0.95).mean() for heads, runs in rows.groupby("heads")}
    said = [f"{by[heads]:g}" for heads in sorted(by, key=str) if str(heads) in "18"]
    assert f"({said[0]} epochs with one, {said[1]} with eight)" in text
    rows = rows_of(RESULTS / "varying_heads")
    rows = rows[(rows["task"] == "memorization") & (rows["start"] == "paper")]
    same = rows[(rows["rate"] / rows["heads"].astype(int)).round(9) == 0.6]
    by = [epochs_until(runs, 0.95).mean() for _, runs in same.groupby(same["heads"].astype(int))]
    assert "at the same rate per head the curves do not fall together" in text
    assert by[0] >= 2 * by[-1]


def test_what_is_told_of_heads_at_the_papers_sizes_is_what_the_rows_say():
    rows = rows_of(RESULTS / "varying_heads" / FULL)
    # what judges a run is known before it is stopped
    stopped = last_epochs(rows)[lambda runs: runs["epoch"] < runs["epochs"]]
    assert len(stopped) > 100
    assert (stopped["validation_accuracy"] >= 0.95).all()
    text = told("Heads at the paper's sizes")
    epochs, reached, rates = heads_table(RESULTS / "varying_heads" / FULL)
    start, noise = "the paper's start", "the paper's start plus noise"
    one, two, four, eight = (epochs[start, "memorization", heads] for heads in "1248")
    assert f"takes {one}, {two}, {four} and {eight} epochs with one, two, four and eight" in text
    two, four, eight = (epochs[f"{start}, heads summed", "memorization", heads] for heads in "248")
    assert f"summed heads take {two}, {four} and {eight}" in text
    counts = ("1 1", "2 2", "4 4")
    one, two, four = (epochs[noise, "reasoning", heads] for heads in counts)
    assert f"in {one}, {two} and {four} epochs" in text
    assert {reached[noise, "reasoning", heads] for heads in counts} == {"3 of 3"}
    summed = [reached[f"{noise}, heads summed", "reasoning", heads] for heads in counts[1:]]
    assert summed == ["2 of 3", "0 of 3"]
    found = [reached[noise, "generalization", heads] for heads in counts]
    assert found == ["1 of 3", "2 of 3", "3 of 3"]
    assert {rates[noise, "generalization", heads] for heads in counts} == {"1"}
    runs = last_epochs(rows).set_index("run")
    runs["until"] = epochs_until(rows, 0.95)
    noisy = runs[runs["start"] == "noisy"]
    low = noisy[(noisy["task"] == "template_matching") & (noisy["rate"] == 0.5)]
    low = low.groupby("heads")["until"]
    assert (low.count() == 6).all()
    one, two, four = (f"{mean:.3g}" for mean in low.mean())
    assert f"in means of {one}, {two} and {four} epochs" in text
    contextual = noisy[noisy["task"] == "in_context_template_matching"]
    judged = contextual[contextual["seed"] >= 3].set_index(["heads", "rate"])["until"]
    least, most = sorted(judged.loc["1 1 1", 0.003].dropna())
    assert f"need {least:g} and {most:g} epochs in two of three judged seeds" in text
    assert reached[noise, "contextual generalization", "1 1 1 1"] == "0 of 3"
    assert (contextual.groupby("heads").size() == 12).all()
    three, four, last = contextual.groupby("heads")["until"].count()[["1 1 1", "1 1 1 1", "1 1 4"]]
    assert f"in {three} of 12 runs, four layers in {four}, and three layers" in text
    assert f"with four heads in the last in {last}." in text
    quick = rows_of(RESULTS / "varying_heads")
    before = last_epochs(quick).set_index("run")
    before["until"] = epochs_until(quick, 0.95)
    of_case = ["task", "start", "heads", "rate", "seed"]
    both = contextual.merge(before, on=of_case, suffixes=("", "_quick"))
    assert len(both) == 3 * 2 * 4
    assert both["until"].equals(both["until_quick"].rename("until"))


def test_what_is_told_of_depth_is_what_the_rows_say():
    runs = last_epochs(rows_of(RESULTS / "varying_depth"))
    reading, templates, context = (
        "in_context_qa",
        "template_matching",
        "in_context_template_matching",
    )
    by = runs.set_index(["task", "layers", "start"]).sort_index()
    text, solved = told("Depth."), []
    for task in (reading, templates):
        rows = by.loc[(task, 2, "noisy")]
        chosen = rows.loc[rows["best_validation_loss"] == rows["best_validation_loss"].min()]
        assert chosen["test_accuracy"].tolist() == [1.0]
        solved.append(int((rows["test_accuracy"] >= 0.95).sum()))
    assert "(by three of three seeds on reasoning, by one of three on generalization)" in text
    assert solved == [3, 1]
    moving = runs[runs["start"].isin(["noisy", "whole"]) & (runs["layers"] == 1)]
    for task, name in ((reading, "reasoning"), (templates, "generalization")):
        rows = moving[moving["task"] == task]
        most, chance = plain(rows["test_accuracy"].max()), plain(rows["chance"].mean())
        assert f"on {name} (at most {most}, chance {chance})" in text
        two = by.loc[(task, 2, "whole"), "test_accuracy"]
        assert f"{plain(two.min())} to {plain(two.max())} on {name}" in text
        assert two.max() < 0.95
    gradients = by.loc[[(task, 1, "whole") for task in (reading, templates)], "context_gradient"]
    assert f"is at least {plain(gradients.min(), 4)} on these two tasks" in text
    assert (runs[runs["start"] == "paper"]["context_gradient"] == 0).all()
    text = told("Three layers for contextual generalization")
    three = by.loc[(context, 3, "noisy")]
    least, most = (plain(f(three["test_accuracy"])) for f in (min, max))
    assert len(three) == 3
    assert f"test accuracy is {least} to {most} in all three seeds" in text
    assert "within .002 of ln 2" in text
    assert (three["train_loss"] - math.log(2)).abs().max() < 0.002
    heads = last_epochs(rows_of(RESULTS / "varying_heads"))
    heads = heads[(heads["task"] == context) & (heads["heads"].astype(str) == "1 1 1")]
    solved = (heads["test_accuracy"] == 1).groupby(heads["rate"]).agg(["sum", "size"])
    assert solved.loc[0.003].tolist() == [2, 4]
    assert solved.loc[0.001].tolist() == [3, 4]
    assert "two of four runs reach 1.000 (three of four at a rate of .001)" in text


def test_what_is_told_of_nested_questions_is_what_the_rows_say():
    runs = last_epochs(rows_of(RESULTS / "nested_qa"))
    by = runs[runs["start"] == "whole"].set_index(["hops", "layers", "asked"]).sort_index()
    once, grown = by.loc[(2, 3, "at once")], by.loc[(2, 3, "growing")]
    few, many = by.loc[(2, 2, "growing")], by.loc[(3, 4, "growing")]
    text, accuracy = told("Nested questions"), "test_accuracy"
    assert f"({plain(once[accuracy].min())} to {plain(once[accuracy].max())})" in text
    assert "validation loss ends within .01 of ln 2" in text
    assert (once["validation_loss"] - math.log(2)).abs().max() < 0.01
    other = plain(grown[accuracy].min())
    assert f"two hops are learnt by one seed of two (the other: {other})" in text
    assert "One hop with two layers is learnt by both" in text
    assert sorted(grown[accuracy] >= 0.95) == [False, True]
    assert (by.loc[(1, 2, "growing"), accuracy] >= 0.95).tolist() == [True, True]
    near = [plain(many[name].mean()) for name in ("from_1", "from_2", accuracy)]
    assert (
        f"({near[0]}, mean of two seeds), and not from two or three ({near[1]}, {near[2]})" in text
    )
    near = [plain(by.loc[(3, 2, "growing"), n].mean()) for n in ("from_1", "from_2", accuracy)]
    assert f"Two layers do as well ({', '.join(near)})" in text
    earlier = last_epochs(rows_of(RESULTS / "nested_qa" / "earlier"))
    learnt = (earlier[accuracy] >= 0.95).groupby([earlier["hops"], earlier["layers"]]).sum()
    assert "which learnt neither" in text
    assert learnt[1, 2] == learnt[2].sum() == 0
    (best,) = few.nlargest(1, accuracy).to_dict("records")
    assert f"two layers on two hops reach {plain(best[accuracy])} with one seed" in text
    assert f"{best['end_last']:.2f} where the last fact" in text
    assert f"the chains, {plain(best['end_before'])} elsewhere" in text
    assert "Against the prediction (at most .6)" in text
    assert sorted(few[accuracy] > best["chance"] + 0.1) == [False, True]


def test_what_is_told_of_the_cost_of_tokens_is_what_the_rows_say():
    rows = rows_of(RESULTS / "cost_law")
    claims = find_study("cost_law").claims()
    _, _, alike, growth, falls = (claim.numbers(rows) for claim in claims)
    trained = rows[rows["model"] == "trained"]
    units = (trained["width"] / trained["d_model"]).rename("units")
    whole = trained[(trained["law"] <= 1) & (units == 64)]["nmse"].mean()
    coded = trained[trained["law"] > 1]
    least = (coded["nmse"] / coded["law_nmse"]).groupby([coded["law"], coded["size"], units]).min()
    times = least.unstack("units")
    alone = rows[rows["model"].str.startswith("trained decoder")]
    alone = alone[alone["width"] == 64 * alone["d_model"]]
    layers = rows[rows["model"] == "two layers"].groupby("d_model")["nmse"]
    at = [plain(layers.min()[e], digits) for e, digits in ((3, 2), (6, 4), (12, 4), (24, 5))]
    grown = [f"{number:.2f}" for number in list(growth.values())[1:]]
    for words in (
        f"(NMSE {whole:.1e} in the mean, with 64 units for each of the E numbers)",
        f"(within {max(alike.values()):.2f} times,",
        f"the error grows by {grown[0]}, {grown[1]} and {grown[2]} times",
        f"falls by {plain(min(falls.values()))} to {plain(max(falls.values()))} of what the law",
        f"({plain(times[4].min())} to {times[4].max():.2f} times its error)",
        f"they are {times[64].min():.1f} to {times[64].max():.1f} times worse",
        f"end {(alone['nmse'] / alone['law_nmse']).min():.0f} times above it",
        f"is {at[0]} at E = 3, {at[1]} at 6, and {at[2]} and {at[3]} at 12 and 24",
    ):
        assert words in told("The cost of holding tokens")


def test_what_is_told_of_triples_is_what_the_rows_say():
    rows = rows_of(RESULTS / "triangle_center")
    errors = rows.groupby(["target", "n_tokens", "heads"])["nmse"].mean()
    text = told("Triples, or training?")
    triples = [errors["triples", n] for n in (8, 16, 32)]
    for found, word in zip(triples, ("", "", "and "), strict=True):
        assert f"{word}{plain(found.min())} to {plain(found.max())}" in text
    pairs = [plain(errors["pairs", n].item()) for n in (8, 16, 32)]
    assert f"in part only ({pairs[0]}, {pairs[1]} and {pairs[2]})" in text
    assert f"at every T (mean NMSE at most {plain(errors['tokens'].max(), 4)})" in text
    for n, found in zip((8, 16, 32), triples, strict=True):
        assert found.min() > errors["pairs", n].item()
    rise = [errors[target, 32, "4 4"] - errors[target, 8, "4 4"] for target in ("pairs", "triples")]
    assert "more than half of the rise from T = 8 to 32" in text
    assert 0.5 * rise[1] < rise[0] < rise[1]
    text = told("Sizes that perform alike")
    per_size = rows[rows["target"] == "triples"].groupby(["n_tokens", "heads"])
    on_training = per_size["train_nmse"].mean().unstack()
    assert "on training data too (within 1.05 times)" in text
    for n in (16, 32):
        assert on_training.loc[n].max() < 1.05 * on_training.loc[n].min()
    small = [plain(on_training.loc[8, heads]) for heads in ("2 2", "4 4", "8 8")]
    assert f"somewhat better there ({small[0]}, {small[1]} and {small[2]})" in text
    assert "the exponent for E = 64 is at most a quarter of that for E = 16" in text
    for column in ("exponent_lower", "exponent_upper"):
        by = per_size[column].first().unstack()
        assert (4 * by["8 8"] <= by["2 2"]).all()
    assert "no information at all at T = 16" in text
    assert (per_size["information_proved"].first().loc[16] == 0).all()


def test_what_is_told_of_the_gap_of_depth_is_what_the_rows_say():
    rows = rows_of(RESULTS / "depth_separation")
    least = rows.groupby(["model", "parameters"])["nmse"].min()
    one, two = (least[kind] for kind in ("one layer", "two layers"))
    text = told("Depth separation")
    assert f"We measure {one.min() / two.iloc[-1]:.0f} times (best of two seeds)" in text
    assert rows["seed"].nunique() == 2
    table = (RESULTS / "depth_separation" / "table.md").read_text()
    assert "at least 0.2 (0.5 by the sharper count)" in table
    assert "layer is .2 (.5 by the sharper count), below the 1 that two" in text


def test_what_is_told_of_depth_at_length_16_is_what_the_rows_say():
    study, path = RUNS["depth_separation/full"]
    rows = rows_of(path)
    least = rows.groupby(["model", "parameters"])["nmse"].min()
    one, two = (least[kind] for kind in ("one layer", "two layers"))
    all_one, all_two = (rows[rows["model"] == kind]["nmse"] for kind in ("one layer", "two layers"))
    built = least["two layers, built"]
    slopes = recorded_run(study, path).verdict.remarks
    text = told("Depth separation")
    assert "at least 1.8 (2.5 by the sharper count)" in (path / "table.md").read_text()
    assert "(an exponent of 1.8, or 2.5)" in text
    assert [words.rsplit(" ", 1)[1] for words in slopes[:2]] == ["-0.00", "-0.12"]
    assert rows["seed"].nunique() == 3
    for words in (
        f"we measure [{one.min() / two.iloc[-1]:.0f} times](depth_separation/full/table.md), best",
        f"stays at {plain(all_one.min())} to {all_one.max():.2f} of the error of a constant",
        f"with up to {one.index.max()} parameters",
        f"two layers reach {plain(all_two.min(), 4)} to {plain(all_two.max(), 4)}.",
        "its slopes say little (-.00 and -.12)",
        f"(least NMSE {plain(two.iloc[0], 4)} and {plain(two.iloc[-1], 4)})",
        f"set by hand has {plain(built.iloc[-1], 4)} with {built.index[-1]} weights",
    ):
        assert words in text
    assert round(two.index[-1] / two.index[0]) == 12


def test_what_is_told_of_the_kth_largest_is_what_the_rows_say():
    text = told("The k-th largest")
    for folder, words in (
        ("", "is {0} and {1} at T = 16 against {2} to {3} between"),
        (FULL, "{0} and {1} at [T = 64](kth_largest/full/table.md) against {2} to {3}."),
    ):
        rows = rows_of(RESULTS / "kth_largest" / folder)
        least = rows.groupby("k")["nmse"].min()
        between = least.iloc[1:-1]
        digits = (4 if least[1] < 0.01 else 3), 4, 2, 2
        numbers = least.iloc[0], least.iloc[-1], between.min(), between.max()
        said = [plain(n, d) for n, d in zip(numbers, digits, strict=True)]
        assert words.format(*said) in text
        assert (rows[rows["k"] < rows["k"].max()]["chooses_largest"] == 1).all()
    times = between.min() / max(least.iloc[0], least.iloc[-1])
    assert f"the extremes are {times:.1f} times better" in text
    by_seed = rows.pivot_table(index="k", columns="seed", values="nmse")
    worst = by_seed.iloc[1:-1].min() / by_seed.iloc[[0, -1]].max()
    assert f"({worst[0]:.2f} and {worst[1]:.2f} by seed)" in text


def test_what_is_told_of_fixed_positions_is_what_the_rows_say():
    runs = [rows_of(RESULTS / "specific_position" / folder) for folder in ("", FULL)]
    both = pd.concat(runs)
    summed = both["position"] <= 3
    text = told("Fixed positions")
    weights = both[summed]["weight"]
    for words in (
        f"puts {plain(weights.min(), 3)} to {plain(weights.max(), 3)} of its attention",
        f"between samples of at most {plain(both['weight_deviation'].max(), 4)},",
        f"and at most {plain(both[~summed]['weight'].max(), 4)} on any other",
        f"at T = {runs[0]['position'].max()}, and at [T = {runs[1]['position'].max()}]",
        f"where there are {runs[1]['position'].max() - 3} others",
    ):
        assert words in text
    worst = [rows.groupby("model", sort=False)["mse"].max().to_dict() for rows in runs]
    ours, paper = ([f"{of[model]:.1e}" for of in worst] for model in worst[0])
    assert f"is {ours[0]} and {ours[1]} without normalization" in text
    assert f"{paper[0]} and {paper[1]} with the paper's LayerNorm" in text


def test_what_is_told_of_agreement_is_what_the_rows_say():
    rows = rows_of(RESULTS / "agreement_over_training")
    ranked, small, held, later, shares = [], [], [], [], []
    for _, run in rows.groupby("seed"):
        run = run.sort_values("epoch")
        first = run[run["auroc"] > 0.95].iloc[0]
        good = run[run["nmse"] < 0.01].iloc[0]
        ranked.append(first["epoch"])
        small.append(good["epoch"])
        held.append(plain(first["coverage"]))
        later.append(good["coverage"])
        shares.append(plain(run.iloc[-1]["concentration"]))
    text = told("When models become InfoFlow-like")
    assert f"after {min(ranked)} to {max(ranked)} epochs" in text
    assert f"{min(small)} to {max(small)} epochs), in each of three seeds" in text
    assert all(a < b for a, b in zip(ranked, small, strict=True))
    assert f"the sets hold {held[0]}, {held[1]} and {held[2]} of the active tokens" in text
    assert f"at least {plain(math.floor(100 * min(later)) / 100)}." in text
    assert f"at the end is {shares[0]}, {shares[1]} and {shares[2]}" in text


def test_what_is_told_of_random_starts_is_what_the_rows_say():
    rows = rows_of(RESULTS / "attention_maps")
    rows = rows[(rows["task"] == "in_context_qa") & rows["share"].notna()]
    by = {
        (start, kind, operation): runs
        for (start, kind, operation), runs in rows.groupby(["start", "model", "operation"])
    }
    text = told("Random starts")
    trained = by["paper", "trained", "matching"]
    solved = trained[trained["test_accuracy"] >= 0.95]["share"]
    assert "the four of five models that solve reasoning" in text
    assert (len(solved), len(trained)) == (4, 5)
    assert f"match in {plain(solved.min())} to {plain(solved.max())} of the sequences" in text
    assert (by["paper", "initial", "copying"]["share"] == 1).all()
    for operation, words in (
        ("copying", "copying in {share} of the sequences (by chance {chance})"),
        ("matching", "matching in {least} to {most} (by chance {chance})"),
    ):
        runs = by["random", "trained", operation]
        share, chance = plain(runs["share"].mean()), plain(runs["chance"].mean())
        least, most = plain(runs["share"].min()), plain(runs["share"].max())
        assert words.format(share=share, chance=chance, least=least, most=most) in text
        accuracy = runs["test_accuracy"]
        assert len(runs) == 5
        assert f"all five solve it ({plain(accuracy.min())} to {accuracy.max():.2f})" in text


def test_how_many_statements_are_older_than_their_runs_is_told():
    ages = [(RESULTS / name / "statement.md").read_text() for name in STUDIES]
    after = sum("when a run by these settings was known" in text for text in ages)
    assert (after, len(ages)) == (5, 14)
    page = " ".join((RESULTS / "README.md").read_text().split())
    assert "for five of the fourteen, after it" in page


def test_what_the_page_says_of_intrinsic_dimension_is_in_its_rows():
    page = " ".join((RESULTS / "README.md").read_text().split())
    rows = rows_of(RESULTS / "intrinsic_dimension")
    runs = rows.drop_duplicates("run")
    least = runs.groupby(["matrices", "heads", "draw"])["nmse"].min()
    least = least.groupby(["matrices", "heads"]).agg(gmean)
    times = {
        kind: least[kind, "1 3"] / least[kind, "2 2"]
        for kind in ("gaussian, linear encoder", "orthogonal", "gaussian")
    }
    linear, rotated, plain = (f"{value:.0f}" for value in times.values())
    assert f"{linear} times behind a linear encoder, {rotated} times with orthogonal" in page
    assert f"{plain} times with Gaussian ones" in page
    least_by_draw = runs.groupby(["matrices", "heads", "draw"])["nmse"].min()
    draws = least_by_draw["gaussian", "1 3"] / least_by_draw["gaussian", "2 2"]
    said = " and ".join(f"{value:.0f}" for value in draws)
    assert f"one of {plain} times ({said} by draw)" in page
    mean = runs.groupby(["matrices", "heads"])["nmse"].mean()
    by_mean = [mean[kind, "1 3"] / mean[kind, "2 2"] for kind in times]
    said = f"{by_mean[0]:.0f}, {by_mean[1]:.2g} and {by_mean[2]:.0f}"
    assert f"by the mean over seeds they are {said}" in page
    best = runs.loc[runs.groupby(["matrices", "heads"])["nmse"].idxmin(), "run"]
    for kind, heads in rows[rows["run"].isin(best) & (rows["heads"] == "2 2")].groupby("matrices"):
        shares = [heads[[f"first_{i}", f"second_{i}"]].max(axis=1) for i in (1, 2)]
        assert sorted(int(share.argmax()) for share in shares) == [0, 1]
        if kind == "orthogonal":
            two = sorted(f"{share.max():.2f}".lstrip("0") for share in shares)
            assert f"({' and '.join(two)} of the sequences" in page
    worst = runs[(runs["matrices"] == "orthogonal") & (runs["heads"] == "2 2")]["nmse"]
    said = f"({worst.max():.2f}), and the other reaches {worst.min():.3f}".replace("0.", ".")
    assert said in page
    few = runs[runs["heads"] == "1 3"].groupby("matrices")[["nmse", "floor"]].agg(["min", "max"])
    nmse, floor = few["nmse"]["min"], few["floor"]
    said = (
        f"an NMSE of {nmse['gaussian, linear encoder']:.3f} behind a linear encoder and "
        f"{nmse['orthogonal']:.2f} with orthogonal matrices"
    )
    assert said.replace("0.", ".") in page
    said = f"{floor['max']['gaussian, linear encoder']:.2f} and {floor['max']['orthogonal']:.2f}."
    assert f"leaves {said}".replace("0.", ".") in page
    alone = rows[(rows["matrices"] == "gaussian") & (rows["heads"] == "1 3")].set_index("draw")
    shares = [alone[[f"first_{i}", f"second_{i}"]].max(axis=1) for i in (1, 2)]
    assert "attends to the partners of one matrix alone, at the second to those of both" in page
    assert (shares[0][0].max() < 0.05) != (shares[1][0].max() < 0.05)
    assert min(share[1].min() for share in shares) > 0.4
    said = f"({floor['min']['gaussian']:.2f} and {floor['max']['gaussian']:.3f})"
    assert said.replace("0.", ".") in page


def test_what_is_told_of_three_and_four_best_pairs_is_in_its_rows():
    text = told("Three and four best pairs")
    rows = rows_of(RESULTS / "intrinsic_dimension" / FULL)
    runs = rows.drop_duplicates("run")
    by_draw = runs.groupby(["D", "matrices", "heads", "draw"])["nmse"].min()
    least = by_draw.groupby(["D", "matrices", "heads"]).agg(gmean)
    linear, rotated = "gaussian, linear encoder", "orthogonal"

    def times(d, kind, first):
        return least[d, kind, f"{first} {2 * d - first}"] / least[d, kind, f"{d} {d}"]

    one = [f"{times(d, linear, 1):.3g}" for d in (2, 3, 4)]
    assert f"are {one[0]}, {one[1]} and {one[2]} times better than one at D = 2, 3 and 4" in text
    fewer = [f"{times(d, linear, d - 1):.2g}" for d in (3, 4)]
    assert f"{fewer[0]} and {fewer[1]} times better than D - 1 at D = 3 and 4" in text
    turned = [f"{times(d, rotated, 1):.2g}" for d in (2, 3, 4)]
    assert f"{turned[0]}, {turned[1]} and {turned[2]} times better than one" in text
    turned = [f"{times(d, rotated, d - 1):.2g}".lstrip("0") for d in (3, 4)]
    assert f"{turned[0]} and {turned[1]} times better than D - 1" in text

    best = rows[
        rows["run"].isin(runs.loc[runs.groupby(by_draw.index.names)["nmse"].idxmin(), "run"])
    ]
    shares = best.filter(regex="^(first|second)_")
    attended = {}
    for key, heads in best.groupby(["D", "matrices", "heads", "draw"]):
        most = shares.loc[heads.index].max()
        attended[key] = sum(
            max(most[f"first_{i}"], most[f"second_{i}"]) >= 0.85 for i in range(1, key[0] + 1)
        )
    whole = {key[:2] + key[3:]: n for key, n in attended.items() if key[2] == f"{key[0]} {key[0]}"}
    assert {(d, n) for (d, kind, _), n in whole.items() if kind == linear and d < 4} == {
        (2, 2),
        (3, 3),
    }
    assert [whole[d, rotated, 0] for d in (2, 3, 4)] == [2, 2, 2]
    assert [whole[4, linear, draw] for draw in (0, 1)] == [3, 4]
    assert "partners of all matrices at D = 2, and at D = 3 behind a linear encoder" in text
    assert "of two of three, and two of four, with orthogonal matrices" in text
    by_heads = by_draw[4, linear].unstack()
    said = [f"{by_heads[1][heads] / by_heads[1]['4 4']:.2g}" for heads in ("1 7", "3 5")]
    assert f"{said[0]} times better than one there, and {said[1]} times better than three" in text
    floor = runs.groupby(["D", "matrices", "heads"])["floor"].max()[4, linear, "3 5"]
    assert f"owes no gap (routed heads leave {floor:.2f})".replace("0.", ".") in text
    errors = [by_draw[3, rotated, heads, 0] for heads in ("3 3", "2 4")]
    assert f"(errors: {errors[0]:.2f} and {errors[1]:.3f})".replace("0.", ".") in text
    errors = [by_draw[4, rotated, heads, 0] for heads in ("4 4", "3 5")]
    assert f"({errors[0]:.2f} and {errors[1]:.2f})".replace("0.", ".") in text
    assert attended[3, rotated, "2 4", 0] == 2
    assert attended[4, rotated, "3 5", 0] == 3
    verdict = recorded_run(*RUNS["intrinsic_dimension/full"]).verdict
    assert not verdict.passed


def test_a_page_without_a_place_for_the_summary_is_left_alone(tmp_path):
    for text in ("", f"{END} {BEGIN}", f"{BEGIN} {BEGIN} {END}"):
        (tmp_path / "README.md").write_text(text)
        with pytest.raises(InfoFlowError, match="has no place for the summary"):
            summarise(tmp_path)
        assert (tmp_path / "README.md").read_text() == text


def test_numbers_that_change_change_the_summary(tmp_path):
    """A summary is of the rows beside it."""
    study = find_study("specific_position")
    copy = tmp_path / study.name
    shutil.copytree(RESULTS / study.name, copy)
    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    summarise(tmp_path)
    before = (tmp_path / "README.md").read_text()
    rows = pd.read_csv(copy / "results.csv")
    rows.assign(mse=0.5).to_csv(copy / "results.csv", index=False)
    summarise(tmp_path)
    broken = "the test MSE is below 0.001 in every run: **no**, 0 of 2 (no normalization: 0.5;"
    assert broken in (tmp_path / "README.md").read_text()
    assert broken not in before
    assert "**Not seen**" in (copy / "table.md").read_text()


@pytest.mark.parametrize("spoiled", ["", FULL], ids=["quick", "full"])
@pytest.mark.parametrize("change", [{"cases": []}, {"preset": "smoke"}, {"study": "head_count"}])
def test_a_run_by_other_settings_is_said_to_be_missing(spoiled, change, tmp_path):
    shutil.copytree(RESULTS / "kth_largest", tmp_path / "kth_largest")
    record = tmp_path / "kth_largest" / spoiled / "record.json"
    text = json.loads(record.read_text())
    record.write_text(json.dumps({**text, "config": {**text["config"], **change}}))
    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    summarise(tmp_path)
    page = (tmp_path / "README.md").read_text()
    quick, full = (line for line in page.splitlines() if line.startswith("| [`kth_largest`]"))
    assert quick.endswith("| awaits its run |" if not spoiled else "| seen |")
    assert full.endswith("| awaits its run |" if spoiled else "| seen |")


@pytest.mark.parametrize(
    "name", [name for name in RUNS if len(config_of(RESULTS / name)["cases"]) > 1]
)
def test_a_case_of_which_every_run_diverged_is_told(name, tmp_path):
    """Of each run the first case that is judged."""
    study, path = RUNS[name]
    config = config_of(path)
    case = next(i for i, settings in enumerate(config["cases"]) if study.judges(settings))
    rows = rows_of(path, None)
    lost = rows["run"] // len(config["seeds"]) == case
    copy = tmp_path / path.relative_to(RESULTS)
    copy.mkdir(parents=True)
    shutil.copy(path / "record.json", copy)
    rows.assign(status=rows["status"].mask(lost, "diverged")).to_csv(copy / "results.csv")
    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    summarise(tmp_path)
    lines = (tmp_path / "README.md").read_text().splitlines()
    [row] = [line for line in lines if "every run diverged with {" in line]
    assert row.endswith("| **not seen** |")
    assert "every run diverged with {" in (copy / "table.md").read_text()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("record.json", '{"config": {"study"', "is no record of a study"),
        ("record.json", "[]", "it holds a list"),
        ("record.json", "{}", "its study is None"),
        ("record.json", '{"config": {"study": "kth_largest", "preset": 3}}', "its preset is 3"),
        ("results.csv", "", "has no rows"),
        ("results.csv", "\0", "has no column 'run'"),
        ("results.csv", "run,seed\n0,0\n", "has no column 'status'"),
        ("results.csv", None, "has no results.csv"),
        ("results.csv", "run,seed,status\n0,0,finished\n", "has no rows of run 1: expected runs 0"),
        ("results.csv", ("\n14,", "\n99,"), "has no rows of run 14"),
        ("results.csv", ("\n14,", "\n<<<<<<< HEAD\n14,"), "a run that is no number"),
        ("results.csv", ("\n14,finished", "\n14,finshed"), "has the status 'finshed'"),
        ("results.csv", ("\n14,", "\n14,finished,7,16,16,16000,60,1,0,1,1\n14,"), "seed of run 14"),
        ("results.csv", ("seed,k,", "seed,x,"), "has no column 'k'"),
        ("results.csv", (",nmse,", ",error,"), "cannot be judged .KeyError"),
        ("results.csv", (",0.0006107844435404661,", ",x,"), "cannot be judged"),
        ("results.csv", ("\n14,finished,2,16,", "\n14,finished,2,x,"), "k of run 14 is 'x'"),
        ("results.csv", ("\n14,finished,2,16,", "\n14,finished,2,8,"), "k of run 14 is 8, but 16"),
        ("results.csv", ("\n14,finished,2,", "\n14,finished,7,"), "seed of run 14 is 7, but 2"),
    ],
)  # fmt: skip
def test_a_run_that_cannot_be_read_is_named_before_anything_is_written(
    name, text, message, tmp_path
):
    of_study = tmp_path / "kth_largest"
    shutil.copytree(RESULTS / "kth_largest", of_study)
    spoiled = of_study / name
    if text is None:
        spoiled.unlink()
    elif isinstance(text, tuple):
        assert spoiled.read_text().count(text[0]) == 1
        spoiled.write_text(spoiled.read_text().replace(*text))
    else:
        spoiled.write_text(text)
    for page in (tmp_path / "README.md", of_study / "table.md", of_study / "statement.md"):
        page.write_text(f"{BEGIN}\n{END}\n")
    with pytest.raises(InfoFlowError, match=message) as refused:
        summarise(tmp_path)
    assert str(of_study if text is None else spoiled) in str(refused.value)
    for page in (tmp_path / "README.md", of_study / "table.md", of_study / "statement.md"):
        assert page.read_text() == f"{BEGIN}\n{END}\n"


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_settings_survive_the_file_of_the_rows(study, tmp_path):
    """By every preset: the rows are those of the record, and only what is measured is missing."""
    for preset in study.presets:
        cases = study.cases(preset)
        config = {"study": study.name, "preset": preset, "seeds": [0], "cases": cases}
        (tmp_path / "record.json").write_text(json.dumps({"config": config}))
        rows = [
            {"run": run, "status": "finished", "seed": 0}
            | {name: plain_cell(value) for name, value in case.items()}
            for run, case in enumerate(cases)
        ]
        pd.DataFrame(rows).to_csv(tmp_path / "results.csv", index=False)
        with pytest.raises(InfoFlowError, match="cannot be judged"):
            recorded_run(study, tmp_path)


def test_quick_numbers_are_not_told_as_those_of_full(tmp_path):
    shutil.copytree(RESULTS / "kth_largest", tmp_path / "kth_largest")
    shutil.copy(RESULTS / "kth_largest" / "record.json", tmp_path / "kth_largest" / FULL)
    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    summarise(tmp_path)
    page = (tmp_path / "README.md").read_text()
    _, full = (line for line in page.splitlines() if line.startswith("| [`kth_largest`]"))
    assert full.endswith("| awaits its run |")


def told(name):
    """The paragraph of the page that begins with these words, on one line."""
    (paragraph,) = [
        part
        for part in (RESULTS / "README.md").read_text().split("\n- ")
        if part.startswith(f"**{name}")
    ]
    return " ".join(paragraph.split("\n\n")[0].split())


def test_what_is_told_of_head_counts_is_what_the_rows_say():
    cells = beside_published(rows_of(RESULTS / "head_count"))
    run = cells[cells["run"]].set_index(["table", "heads"])
    times, by_variance = run["relative_times"], run["nmse_times"]
    three, four = run.loc[("3", 3)], run.loc[("3", 4)]
    text = told("The number of heads")
    for words in (
        f"by {three['nmse'] / four['nmse']:.0f} times from three heads to four at T = 16",
        f"(published: {three['published'] / four['published']:.0f})",
        f"Of the {len(cells)} cells of Tables 2, 3 and 5 the run has {len(run)}, all at T = 16",
        f"{int(times.between(1 / 2, 2).sum())} of them lie within a factor of 2",
        f"one and two heads are {plain(times['3', 1], 3)} and {plain(times['3', 2], 3)} of",
        f"four and five heads {times['3', 4]:.1f} and {times['3', 5]:.1f} times as large",
        f"By variance they are {by_variance.min():.1f} to {by_variance.max():.0f} times as large",
    ):
        assert words in text
    assert set(run["n_tokens"]) == {16}


def test_what_is_told_of_recovery_is_what_the_rows_say():
    rows = rows_of(RESULTS / "max_position_recovery")
    rows = rows[rows["lost_without"] >= 0.01]  # in use
    counts = rows["heads"].str.split().str[0].astype(int)
    pairs = rows["target"] == "pairs"
    enough, fewer = rows[pairs & (counts >= rows["D"])], rows[pairs & (counts < rows["D"])]
    first, second = (enough[enough["rank"] == rank] for rank in (1, 2))
    text = told("Recovery")
    best = [(heads, runs["nmse"].min()) for heads, runs in first.groupby("heads")]
    of_best, of_second = (
        part[[pair in best for pair in zip(part["heads"], part["nmse"], strict=True)]]
        for part in (first, second)
    )
    low, high = plain(of_best["ratio"].min(), 3), plain(of_best["ratio"].max(), 3)
    assert f"with {low} to {high} of the error before training" in text
    assert (len(of_best), of_best["run"].nunique()) == (5, 2)
    assert set(of_best["queries"]) == {"tokens"}
    assert "five heads of two models, at the queries of tokens; at CLS none is in use" in text
    means = sorted(f"{mean:.2f}" for mean in of_second.groupby("heads")["ratio"].mean())
    assert f"(mean ratios {means[0]} and {means[1]};" in text
    below = int((first["ratio"] < 0.1).sum())
    assert f"of {len(first)} heads in use {below} are below .1" in text
    assert f"the largest ratio is {plain(first['ratio'].max())}" in text
    tempered = of_best["tempered_ratio"]
    said = f"reach {plain(tempered.min(), 3)} to {plain(tempered.max(), 3)}"
    assert f"{said}, up to {(tempered / of_best['ratio']).max():.1f} times" in text
    fewer = fewer[(fewer["rank"] == 1) & (fewer["nmse"] == fewer["nmse"].min())]
    by = {queries: plain(runs["ratio"].item(), 3) for queries, runs in fewer.groupby("queries")}
    assert f"one head has {by['tokens']} at tokens and {by['CLS']} at CLS" in text
    single = rows[~pairs & (rows["rank"] == 1)]
    trained = [plain(value) for value in single["ratio"]]
    tempered = [plain(value, 3) for value in single["tempered_ratio"]]
    assert f"The two in use have {trained[0]} and {trained[1]}" in text
    assert f"where tempered ones have {tempered[0]} and {tempered[1]}" in text
    assert len(single) == 2


def test_what_is_told_of_more_configurations_is_what_the_rows_say():
    study, path = RUNS["max_position_recovery/full"]
    verdict = recorded_run(study, path).verdict
    rows = rows_of(path)
    models = rows[rows["target"] == "pairs"]
    first = models[(models["lost_without"] >= 0.01) & (models["rank"] == 1)]
    small = first[first["nmse"] < 1e-3]
    least = {key: runs["nmse"].min() for key, runs in models.groupby("heads")}
    of_best = {heads: first[first["nmse"] == error]["ratio"] for heads, error in least.items()}
    near = (first["ratio"] / first["tempered_ratio"]).between(1 / 3, 3)
    counts = models["heads"].str.split().str[0].astype(int)
    second = models[(models["lost_without"] >= 0.01) & (models["rank"] == 2)]
    enough = second[(counts >= models["D"]).reindex(second.index)]
    of_second = enough[enough["nmse"] == enough["heads"].map(least)]
    means = of_second.groupby("heads")["ratio"].mean()
    text = told("More configurations of recovery")
    assert not verdict.passed
    assert "8 of 21" in verdict.reasons[1]
    assert small["run"].nunique() == 5
    assert sum(models.groupby("run")["nmse"].first() < 1e-3) == 5
    assert models[models["D"] == 2]["heads"].nunique() == 6
    for words in (
        "with at least D heads 8 of 21 are below .1",
        f"all {len(small)} heads in use are below .1 "
        f"({plain(small['ratio'].min(), 3)} to {plain(small['ratio'].max(), 3)})",
        f"The least NMSE is {plain(least['2 1'], 3)} with heads (2, 1)",
        f"{plain(least['5 5'], 4)} and {plain(least['6 6'], 4)} at D = 6 with five and six heads",
        f"have ratios of {plain(of_best['5 5'].min(), 3)} to {plain(of_best['5 5'].max(), 3)} "
        f"and {plain(of_best['6 6'].min(), 3)} to {plain(of_best['6 6'].max(), 3)}",
        f"Over all {len(first)} heads in use",
        f"(rank correlation {plain(spearmanr(first['entropy'], first['ratio']).statistic)})",
        f"{int(near.sum())} of them are within a factor of 3",
        f"of the other {int((~near).sum())}, {int((~near[small.index]).sum())} are among those",
        f"up to {(first['tempered_ratio'] / first['ratio']).max():.1f} times",
        f"(rank correlation {plain(spearmanr(first['nmse'], first['ratio']).statistic)})",
        f"{int(((first['ratio'] < 0.1) & (first['nmse'] >= 1e-3)).sum())} others below .1",
        f"(means of {means.min():.2f} to {means.max():.2f}, which is no part of the rule now)",
        f"the largest ratio of all is {first['ratio'].max():.2f}",
    ):
        assert words in text


def test_what_is_told_of_separated_pairs_is_what_the_rows_say():
    rows = rows_of(RESULTS / "separated_pairs", None)
    runs, text = rows.drop_duplicates("run"), told("Separated pairs")
    assert set(zip(runs["D"], runs["n_tokens"], strict=True)) == {(2, 4), (3, 4)}
    assert (runs.groupby(["D", "draw", "heads"]).size() == 3).all()
    of = runs.groupby("heads")["nmse"]
    low, high = of.min(), of.max()
    for heads, words, digits in (
        ("2 2", "(2, 2) reaches {} to {} at D = 2", 5), ("3 3", "(3, 3) {} to {} at D = 3", 5),
        ("1 3", "(1, 3) ends at {} to {}", 3), ("2 4", "(2, 4) at {} to {}", 3),
        ("1 5", "(1, 5) at {} to {}", 3),
    ):  # fmt: skip
        assert words.format(plain(low[heads], digits), plain(high[heads], digits)) in text
    least = runs.groupby(["heads", "draw"])["nmse"].min().groupby("heads").agg(gmean)
    pairs = (("1 3", "2 2"), ("2 4", "3 3"), ("1 5", "3 3"))
    times = [least[fewer] / least[enough] for fewer, enough in pairs]
    assert "{:.0f}, {:.0f} and {:.0f} times better".format(*times) in text
    assert not STUDIES["separated_pairs"].verdict(rows).passed
    best = rows[rows["run"].isin(runs.loc[of_draws(runs)["nmse"].idxmin(), "run"])]
    shares = best[[f"{side}_{i}" for side in ("first", "second") for i in (1, 2, 3)]].max(axis=1)
    whole = best["heads"].isin(["2 2", "3 3"])
    for part, words in ((whole, "{} to {} in models with D heads"), (~whole, "{} to {} in the o")):
        assert words.format(plain(shares[part].min()), plain(shares[part].max())) in text
    first, second = best[whole]["first_choice"], best[whole]["second_choice"]
    assert f"leaves {plain(first.min(), 3)} to {plain(first.max(), 3)} of the error" in text
    assert f"second choice {second.min():.2f} to {second.max():.2f}" in text
    floors = runs.groupby("heads")["floor"].mean()
    said = (plain(floors["1 3"]), plain(floors["2 4"], 3), plain(floors["1 5"]))
    assert "leave {}, {} and {} in the place".format(*said) in text
    beyond = min(floors[heads] / least[heads] for heads in ("1 3", "2 4", "1 5"))
    assert f"{beyond:.1f} times and more" in text


def of_draws(runs):
    return runs.groupby(["D", "draw", "heads"])


def plain(number, digits=2):
    """A number below 1 as prose writes it."""
    return f"{number:.{digits}f}".removeprefix("0")
