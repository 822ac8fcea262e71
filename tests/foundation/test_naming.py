"""What a text names is decided by one order, which imports nothing and asks no network."""

import sys

import pytest

from infoflow_lens import InfoFlowError, load_any, load_task
from infoflow_lens.foundation.naming import Named, find_model, find_named
from infoflow_lens.models.configs import read_shape
from infoflow_lens.probing.data import check_data, find_data

PYTHON = "import pathlib\npathlib.Path('ran').write_text('it ran')\ntrain = task = None\n"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("file:x", Named("file", "x", True)),
        ("task:d_retrieval", Named("task", "d_retrieval", True)),
        ("task:module:name", Named("task", "module:name", True)),
        ("hub:owner/name:train", Named("hub", "owner/name:train", True)),
        ("there", Named("file", "there")),
        ("known", Named("task", "known")),
        ("own.py:task", Named("task", "own.py:task")),
        ("missing.py:task", Named("hub", "missing.py:task")),
        ("texts.txt", Named("file", "texts.txt")),
        ("./texts", Named("file", "./texts")),
        ("~/texts", Named("file", "~/texts")),
        (r"C:\texts\one", Named("file", r"C:\texts\one")),
        ("c:/texts", Named("file", "c:/texts")),
        (r"texts\one", Named("file", r"texts\one")),
        (r"\\server\texts", Named("file", r"\\server\texts")),
        ("texts/", Named("file", "texts/")),
        ("owner/name", Named("hub", "owner/name")),
        ("imdb:train", Named("hub", "imdb:train")),
        ("this:train", Named("hub", "this:train")),
        ("C:train", Named("hub", "C:train")),
        ("x" * 5000, Named("hub", "x" * 5000)),
        ("null\0byte", Named("hub", "null\0byte")),
    ],
)
def test_the_first_that_fits(here, text, expected):
    (here / "there").mkdir()
    (here / "own.py").write_text("")
    assert find_named(text, ["known"], [".txt"]) == expected


def test_what_exists_goes_before_a_task_and_what_is_said_before_both(here):
    (here / "d_retrieval").mkdir()
    assert find_data("d_retrieval").kind == "file"
    assert find_data("task:d_retrieval").kind == "task"
    assert find_data("hub:d_retrieval").kind == "hub"


@pytest.mark.parametrize("text", ["", "  ", "file:", "task: ", "hub:"])
def test_a_name_must_be_there(text):
    with pytest.raises(InfoFlowError, match=r"is empty|names no"):
        find_named(text)


@pytest.mark.parametrize("data", ["imdb:train", "pkg.inner:train", "this:train", "wikitext:train"])
def test_a_split_of_the_hub_is_no_module_of_the_working_folder(here, data, capsys):
    """`--data imdb:train` once ran ./imdb.py, and a mere folder wikitext/ made the split fail."""
    (here / "imdb.py").write_text(PYTHON)
    (here / "pkg").mkdir()
    (here / "pkg" / "__init__.py").write_text(PYTHON)
    (here / "pkg" / "inner.py").write_text(PYTHON)
    (here / "wikitext").mkdir()
    before = set(sys.modules)
    assert find_data(data) == Named("hub", data)
    check_data(data)
    assert not (here / "ran").exists()
    assert not {"imdb", "pkg", "this", "wikitext"} & (set(sys.modules) - before)
    assert capsys.readouterr().out == ""  # where `this` would be printed


def test_code_of_the_user_runs_where_they_named_it(here):
    (here / "imdb.py").write_text(PYTHON)
    with pytest.raises(InfoFlowError, match="is a NoneType: expected a Target"):
        load_task("task:imdb:train")
    assert (here / "ran").read_text() == "it ran"
    sys.modules.pop("imdb")


def test_tasks_may_be_said_everywhere():
    assert load_task("task:d_retrieval", n_tokens=5).n_tokens == 5


def test_models_are_named_by_the_same_grammar(here):
    assert find_model("gpt2") == Named("hub", "gpt2")
    assert find_model("a/b/c").kind == "file"
    with pytest.raises(InfoFlowError, match="is missing: expected a folder with a model"):
        load_any("file:gpt2")
    with pytest.raises(InfoFlowError, match=r"'task:x', a task: expected a folder"):
        load_any("task:x")
    with pytest.raises(InfoFlowError, match="a task: expected a folder"):
        read_shape("task:x")
    (here / "gpt2").mkdir()
    with pytest.raises(InfoFlowError, match=r"the folder 'gpt2' is no model"):
        load_any("gpt2")
    assert read_shape("hub:gpt2").n_layers == 12
    with pytest.raises(InfoFlowError, match=r"names a model of the hub, but .* the folder 'gpt2'"):
        load_any("hub:gpt2")
