"""The page of real models is that of the rows of its run."""

import pandas as pd
import pytest

from benchmarks import depth, field

PAGE = (depth.FOLDER / "README.md").read_text("utf-8")


@pytest.fixture(scope="module")
def rows():
    return pd.read_csv(depth.FOLDER / "results.csv.gz")


@pytest.fixture(scope="module")
def mean(rows):
    return rows.groupby(["measure", "method", "model"])["spearman"].mean()


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
