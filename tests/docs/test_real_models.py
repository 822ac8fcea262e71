"""The page of real models is that of the rows of its run."""

from functools import cache

import pandas as pd
import pytest

from benchmarks import depth, edges, field, parting, thirds

PAGE = (depth.FOLDER / "README.md").read_text("utf-8")


@pytest.fixture(scope="module")
def rows():
    return pd.read_csv(depth.FOLDER / "results.csv.gz")


@pytest.fixture(scope="module")
def mean(rows):
    return rows.groupby(["measure", "method", "model"])["spearman"].mean()


@pytest.mark.slow
def test_the_tables_of_the_page_are_those_of_the_rows():
    for table in depth.tables():
        assert table in PAGE


def test_every_text_was_measured_in_every_layer_by_every_method(rows):
    for model in depth.MODELS:
        mine = rows[rows["model"] == model]
        assert sorted(set(mine["text"])) == list(range(len(depth.texts(model))))
        counts = mine.groupby(["measure", "layer", "text"])["method"].nunique()
        assert set(counts) == {len(depth.FREE) + len(depth.DERIVED) + 2 + 1}


def test_numbers_in_the_text_are_those_of_the_rows(mean):
    """Means over texts of equally many layers are means over rows."""

    def of(truth, method):
        return [mean[truth, method, model] for model in depth.MODELS]

    replaced, small = (of(truth, method) for truth, method in depth.QUESTION.items())
    assert f"replaced tokens {min(replaced):.2f} to {max(replaced):.2f}".replace("0.", ".") in PAGE
    assert f"{min(small):.2f} to {max(small):.2f} with Jacobian".replace("0.", ".") in PAGE
    cheap = [
        f"{one:.2f}".lstrip("0")
        for one in of("replacement", "power rollout, replacing a token, L2")
    ]
    assert f"has {', '.join(cheap[:-1])} and {cheap[-1]}" in PAGE
    assert f"agree by {mean['replacement', 'Jacobian', 'smollm2']:.2f}".replace("0.", ".") in PAGE


def test_the_statement_was_not_changed_after_the_run():
    """It says what the code draws: texts, donors, directions."""
    said = (depth.FOLDER / "statement.md").read_text("utf-8")
    assert f"median of {depth._DONORS} donors" in said
    assert f"`JacobianInfluence`, {depth._DIRECTIONS} directions" in said
    kinds = pd.Series([one.kind for one in depth.texts("smollm2")]).value_counts()
    assert set(kinds) == {6}
    assert len(kinds) == 4
    assert {len(depth.texts(model)) for model in depth.MODELS[1:]} == {16}


@pytest.fixture(scope="module")
def beside():
    return field.read()


@pytest.mark.slow
def test_the_tables_of_the_field_are_those_of_its_rows():
    for table in field.tables():
        assert table in PAGE


def test_every_method_of_the_field_was_measured_in_every_text_and_layer(beside):
    for model in depth.MODELS:
        mine = beside[beside["model"] == model]
        numbers = sorted(set(mine["text"]))
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= 16
        for truth in depth.TRUTHS:
            here = mine[mine["measure"] == truth]
            counts = here[here["method"].isin(field.FIELD)].groupby(["layer", "text"])["method"]
            assert set(counts.nunique()) == {len(field.FIELD)}
    gaps = beside[beside["method"] == "control: DecompX"]["spearman"]
    assert gaps.max() < 1e-4


def test_sentences_on_the_field_are_those_of_its_rows(beside):
    mean = beside.groupby(["measure", "method", "model"])["spearman"].mean()

    def listed(truth, method):
        numbers = [f"{mean[truth, method, m]:.2f}".replace("0.", ".") for m in depth.MODELS]
        return f"{', '.join(numbers[:-1])} and {numbers[-1]}"

    setting = depth.QUESTION["replacement"]
    said = (
        f"DecompX has {listed('replacement', 'DecompX')}, the setting "
        f"{listed('replacement', setting)}"
    )
    assert said in " ".join(PAGE.split())
    other = listed("replacement", "other donors")
    assert f"other donors order tokens by {other}" in " ".join(PAGE.split())
    answers = mean["answer, replaced"].xs("smollm2", level="model")
    measured = [
        "control: integrated gradients",
        "replacement",
        "Jacobian",
        "other donors",
        "gradient",
    ]
    best, state = answers.drop(measured).max(), answers["replacement"]
    page = " ".join(PAGE.split())
    assert f"no attribution has more than {best:.2f}".replace("0.", ".") in page
    assert f"influence on the last state itself has {state:.2f}".replace("0.", ".") in page


def test_the_statement_of_the_field_says_what_the_code_draws():
    said = (depth.FOLDER / "field.md").read_text("utf-8")
    assert f"{field._STEPS} points" in said
    assert f"{len(field.texts('smollm2'))} short ones of SmolLM2" in said
    assert {len(field.texts(model)) for model in depth.MODELS[1:]} == {32}
    old = {one.text for model in depth.MODELS for one in depth.texts(model)}
    assert not old & {one.text for model in depth.MODELS for one in field.texts(model)}


read_thirds = cache(thirds.read)
HEADS = (depth.FOLDER / "mechanisms.md").read_text("utf-8")


@pytest.mark.slow
def test_the_tables_of_mechanisms_are_those_of_their_rows():
    for table in thirds.tables():
        assert table in HEADS


def test_every_text_was_replaced_in_every_way_by_labels_of_the_other_half():
    rows, _ = read_thirds()
    for model in depth.MODELS:
        here = rows[rows["model"] == model]
        assert sorted(set(here["text"])) == list(range(thirds.N_TEXTS))
        ways = here.groupby(["part", "text"])["way"].agg(list)
        assert all(sorted(each) == sorted(thirds.WAYS) for each in ways)
        kinds = {
            (thirds.half_of(model, text), kind) for text, kind in zip(here["text"], here["kind"])
        }
        assert len(kinds) == 2 * here["kind"].nunique()


def test_sentences_on_mechanisms_are_those_of_their_rows():
    rows, counts = read_thirds()
    every = list(thirds.places(rows))
    shares = sorted(round(thirds.interval(lost, "labels")[0], 2) for _, _, lost in every)
    little = sum(share <= 0.25 for share in shares)
    page = " ".join(HEADS.split())
    assert f"at most a quarter is lost in {little} of {len(every)} thirds" in page
    assert f"{shares[little]:.2f} to {shares[-1]:.2f} of what".replace("0.", ".") in page
    few = [thirds.interval(lost, "top 4")[0] for _, _, lost in every]
    fewer = sum(lost["top 4"].sum() < lost["labels"].sum() for _, _, lost in every)
    small = sum(share < 0.155 for share in few)
    assert f"lose is less in {fewer} thirds, and at most .15 in {small} of them" in page
    dealt = [thirds.interval(lost, "dealt at random", "labels") for _, _, lost in every]
    single = [thirds.interval(lost, thirds.best_single(lost), "labels") for _, _, lost in every]
    sure, ahead = sum(lead[1] > 0 for lead in dealt), sum(lead[0] > 0 for lead in single)
    assert f"in {sure} of {len(every)} thirds, by the interval" in page
    assert f"chosen on the judged texts, in {ahead}." in page
    thirds_alone = counts[counts["part"] != "all"]
    undecided = thirds_alone[thirds_alone["label"] == "undecided"]["heads"].sum()
    assert f"{undecided} of {thirds_alone['heads'].sum():,} labels" in page


def test_the_statement_of_mechanisms_says_what_the_code_does():
    said = HEADS.split("## What came")[0]
    assert f"{thirds.N_TEXTS} texts: 8 of prose, code, questions, repeats" in said
    kinds = pd.Series([one.kind for one in thirds.texts("smollm2")]).value_counts()
    assert set(kinds) == {8}
    assert {len(thirds.texts(model)) for model in depth.MODELS} == {thirds.N_TEXTS}
    assert f"{depth._DRAWS:,} draws of texts" in said


@pytest.mark.parametrize(
    ("page", "tables"), [("parting.md", parting.tables), ("edges.md", lambda: [edges.table()])]
)
def test_a_page_has_the_tables_of_its_rows(page, tables):
    text = (depth.FOLDER / page).read_text("utf-8")
    for table in tables():
        assert table in text


def test_where_everything_is_held_a_model_is_linear():
    rows = field.read(parting.ROWS)
    held = rows[rows["method"] == "everything"].groupby("measure")["spearman"]
    assert held.min()[parting.AGREEMENT] > 0.99
    assert held.min()[parting.GROWTH] == pytest.approx(1, abs=0.01)
    assert held.max()[parting.GROWTH] == pytest.approx(1, abs=0.01)
    assert set(rows["model"]) == set(depth.MODELS)


def test_numbers_of_what_parts_the_measures_are_those_of_its_rows():
    rows, said = (
        field.read(parting.ROWS),
        " ".join((depth.FOLDER / "parting.md").read_text("utf-8").split()),
    )

    def mean(model, held):
        found = depth.by_text(rows, model, parting.AGREEMENT)[held].mean()
        return f"{found:.2f}".removeprefix("0")

    nothing, patterns, gates = "nothing", parting.PATTERNS, parting.GATES
    for model, name in (
        ("minilm", "MiniLM"),
        ("antiberty", "AntiBERTy"),
        ("stdlib-2l", "stdlib-2l"),
    ):
        assert f"{mean(model, nothing)} to {mean(model, patterns)} in {name}" in said
    for model in ("smollm2", "rxnmapper"):
        ours = f"{mean(model, nothing)} to {mean(model, gates)} and"
        assert ours in said
        assert mean(model, patterns) in said.split(ours)[1][:20]
