"""Paths that users name: one grammar for all, in what is written and in what is read.

The functions are found from the package, and the parameters of commands from the command line, so
that the next one cannot be forgotten: without an entry here a test fails.
"""

import inspect
import os
import pkgutil
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import infoflow_lens
from infoflow_lens import (
    InfoFlowError,
    PositionsProbe,
    ask,
    build_model,
    compare_flows,
    flow,
    load_any,
    load_model,
    load_task,
    open_model,
    probe,
    propagate,
    run_probes,
    save_model,
    train,
    why,
    why_all,
)
from infoflow_lens.cli import app
from infoflow_lens.flows.ask import cut_lines
from infoflow_lens.flows.result import Flow
from infoflow_lens.foundation.files import user_path
from infoflow_lens.hooks import Result
from infoflow_lens.models.configs import read_shape
from infoflow_lens.probing.config import ProbingConfig, SurveyConfig
from infoflow_lens.probing.run import run_probing, run_survey
from infoflow_lens.report.pages import write_flow
from infoflow_lens.report.phase import check_picture_path, draw_phase_diagram
from infoflow_lens.studies.demo import run_demo
from infoflow_lens.studies.language_model.corpus import read_corpus
from infoflow_lens.studies.language_model.snapshots import snapshots
from infoflow_lens.studies.language_model.training import train_language_model
from infoflow_lens.studies.papers import STUDIES
from infoflow_lens.studies.summary import BEGIN, END, summarise
from infoflow_lens.studies.sweep import run_study
from infoflow_lens.theory.estimate import phase_diagram
from infoflow_lens.theory.information_sets import InformationSets
from infoflow_lens.theory.shapes import shape_of
from infoflow_lens.training import TrainingConfig
from tests.conftest import make_token_model, some_of
from tests.reference import zoo
from tests.runs.test_commands import ARGUMENTS, DOCUMENTS, named, runs, small  # noqa: F401
from tests.studies.language_model.test_training import CONFIG, CORPUS

pytestmark = [
    pytest.mark.filterwarnings("ignore::infoflow_lens.foundation.errors.InfoFlowWarning"),
    pytest.mark.usefixtures("small"),
]
IDS = zoo.tokens(6, 8) % 17
OWN_TASK = "from infoflow_lens.tasks import load_task\ntask = load_task('kth_largest')\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    token_model = make_token_model()
    out = tmp_path_factory.mktemp("run") / "out"
    probed = probe(token_model, IDS, out, probes=["positions"], shard=2, ranks=(1,), progress=False)
    shown = flow(token_model, [[1, 2, 3]], progress=False)
    (positions,) = run_probes(token_model, IDS, [PositionsProbe((1,))], progress=False)
    answer = ask(zoo_model_of_words(), "w4 w5 w6", "w9", "w7", quick=True, progress=False)
    rows = phase_diagram(load_task("kth_largest", n_tokens=8), ((1,), (2,)), (8,), "paper", 1)
    return {"model": token_model, "probed": probed, "flow": shown, "result": positions,
            "answer": answer, "rows": rows,
            "folder": zoo.save("gpt2", tmp_path_factory.mktemp("gpt2"))}  # fmt: skip


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The home folder of a user who is in an empty folder elsewhere."""
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home"


def zoo_model_of_words():
    return open_model(zoo.build("gpt2"), zoo.tokenizer())


def trained(path):
    architecture = infoflow_lens.Architecture(n_heads=(1,), d_model=8, d_token=3, n_tokens=4)
    config = TrainingConfig(epochs=1, batch_size=8)
    task = load_task("d_retrieval", n_tokens=4, d_token=3)
    return train(build_model(architecture), task, config, n_train=8, n_validation=4,
                 checkpoint_dir=path, progress=False)  # fmt: skip


def ours():
    return build_model(infoflow_lens.Architecture(n_heads=(1,), d_model=8, d_token=3, n_tokens=4))


def summarised(path):
    place = user_path(path)
    place.mkdir(exist_ok=True)
    (place / "README.md").write_text(f"{BEGIN}\n{END}\n")
    summarise(path)


# What writes a file, or files with this beginning: the end of its name, and the call.
FILES = {
    "Pictured.to_html": (".html", lambda m, p: m["flow"].to_html(p)),
    "Pictured.to_html, of two": (".html", lambda m, p: compare_flows(*[m["flow"]] * 2).to_html(p)),
    "write_flow": (".html", lambda m, p: write_flow(m["flow"].view, p)),
    "Answer.to_html": (".html", lambda m, p: m["answer"].to_html(p)),
    "ProbingResult.report": (".html", lambda m, p: m["probed"].report(p)),
    "draw_phase_diagram": (".png", lambda m, p: draw_phase_diagram(m["rows"], "x", p)),
    "check_picture_path": (".svg", lambda m, p: check_picture_path(p).write_text("x")),
    "Flow.save": ("", lambda m, p: m["flow"].save(p)),
    "Result.save": ("", lambda m, p: m["result"].save(p)),
    "Savable.save": ("", lambda m, p: propagate(m["result"]).save(p)),
    "ShardedResult.save": ("", lambda m, p: m["probed"].found["positions"].save(p)),
}
# What writes to a folder.
FOLDERS = {
    "save_model": lambda m, p: save_model(ours(), p),
    "train": lambda m, p: trained(p),
    "probe(out=)": lambda m, p: probe(
        m["model"], IDS, p, probes=["positions"], ranks=(1,), progress=False
    ),
    "run_probing": lambda m, p: run_probing(
        p, ProbingConfig(str(m["folder"]), "repeated", n=4, probes=("positions",)), progress=False
    ),
    "run_survey": lambda m, p: run_survey(
        p, SurveyConfig(str(m["folder"]), "repeated", n=6, window=8), progress=False
    ),
    "run_demo": lambda m, p: run_demo(p, progress=False),
    "run_study": lambda m, p: run_study(STUDIES["specific_position"], p, preset="smoke", seeds=1,
                                        progress=False),
    "train_language_model": lambda m, p: train_language_model(
        p, CONFIG, corpus=CORPUS, progress=False
    ),
    "summarise": lambda m, p: summarised(p),
    "ask(resume=)": lambda m, p: ask(
        m["folder"], "w4 w5 w6", quick=True, progress=False, resume=p
    ),
}  # fmt: skip
# What reads: how to make what lies at a path, and the call.
READERS = {
    "Flow.load": (lambda m, p: m["flow"].save(p), Flow.load),
    "Result.load": (lambda m, p: m["result"].save(p), Result.load),
    "Savable.load": (lambda m, p: propagate(m["result"]).save(p), InformationSets.load),
    "ShardedResult.load": (
        lambda m, p: m["probed"].found["positions"].save(p),
        lambda p: Result.load(p).whole(),
    ),
    "load_model": (lambda m, p: save_model(ours(), p), load_model),
    "load_any": (lambda m, p: save_model(ours(), p), load_any),
    "load_any, file:": (lambda m, p: save_model(ours(), p), lambda p: load_any(f"file:{p}")),
    "shape_of": (lambda m, p: save_model(ours(), p), shape_of),
    "read_shape": (lambda m, p: save_model(ours(), p), read_shape),
    "ask": (
        lambda m, p: zoo.save("gpt2", p),
        lambda p: ask(p, "w4 w5 w6", quick=True, progress=False),
    ),
    "cut_lines": (
        lambda m, p: zoo.save("llama", p),
        lambda p: cut_lines(p, ask(p, "w7 w34 w29 w47 w30 w5", quick=True, progress=False), [1]),
    ),
    "flow": (lambda m, p: zoo.save("gpt2", p), lambda p: flow(p, "w4 w5", progress=False)),
    "why": (lambda m, p: zoo.save("gpt2", p), lambda p: why(p, "w4 w5 w6", 0, 1)),
    "why_all": (lambda m, p: zoo.save("gpt2", p), lambda p: why_all(p, "w4 w5 w6")),
    "snapshots": (lambda m, p: zoo.save("gpt2", p), lambda p: snapshots(p)[0].source.index("home")),
    "probe(model)": (
        lambda m, p: zoo.save("gpt2", p),
        lambda p: probe(p, "repeated", n=4, probes=["positions"], progress=False),
    ),
    "probe(data)": (
        lambda m, p: Path(f"{p}.txt").write_text("w4 w5 w6 w7\n"),
        lambda p: probe(zoo_model(), f"{p}.txt", probes=["positions"], progress=False),
    ),
    "load_task": (
        lambda m, p: Path(f"{p}.py").write_text(OWN_TASK),
        lambda p: load_task(f"{p}.py:task"),
    ),
    "read_corpus": (
        lambda m, p: [p.mkdir(), *((p / f"m{i}.py").write_text(f"x = {i}\n") for i in range(99))],
        read_corpus,
    ),
}


def zoo_model():
    return load_any(zoo_folder[0]).model


zoo_folder = []


# Every function with such a parameter: os.PathLike says that a user gives it.
OWNERS = ("infoflow_lens.foundation.", "infoflow_lens.runs.")  # of what all of them call
INSIDE = {  # these are called by the ones above
    "read_fields", "save_fields", "digest_of_result", "ShardedResult.from_shards",
    "ShardedResult.save_shard", "read_shape",
}  # fmt: skip


def functions_that_take_paths():
    found = set()
    for module in pkgutil.walk_packages(infoflow_lens.__path__, "infoflow_lens."):
        loaded = import_module(module.name)
        for owner in (loaded, *filter(inspect.isclass, vars(loaded).values())):
            for name, value in vars(owner).items():
                function = inspect.unwrap(getattr(value, "__func__", value))
                if (
                    inspect.isfunction(function)
                    and not name.startswith("_")
                    and function.__module__.startswith("infoflow_lens.")
                    and not function.__module__.startswith(OWNERS)
                    and "PathLike" in str(inspect.signature(function))
                ):
                    found.add(function.__qualname__)
    return found


def test_the_tables_hold_every_function_that_takes_a_path():
    names = {n.partition("(")[0].partition(",")[0] for n in (*FILES, *FOLDERS, *READERS)}
    found = functions_that_take_paths()
    assert len(found) > 20
    assert found <= names | INSIDE, found - names - INSIDE


@pytest.mark.parametrize("name", some_of([*FILES], *[*FILES][::4]))
def test_a_file_is_written_to_the_home_folder(name, made, home):
    end, call = FILES[name]
    call(made, f"~/below/x{end}")
    assert [p for p in (home / "below").iterdir() if p.name.startswith("x")]
    call(made, Path(f"~/y{end}"))
    assert [p for p in home.iterdir() if p.name.startswith("y")]
    with pytest.raises(InfoFlowError, match="there is no home folder of that name"):
        call(made, f"~nobody-here/x{end}")
    assert list(Path.cwd().iterdir()) == []
    call(made, f"./~x{end}")  # as in a shell, this is a name
    assert all(p.name.startswith("~x") for p in Path.cwd().iterdir())


@pytest.mark.parametrize("name", some_of(sorted(FOLDERS), "save_model", "probe(out=)", "train"))
def test_a_folder_is_written_in_the_home_folder(name, made, home):
    call = FOLDERS[name]
    call(made, "~/x")
    assert list((home / "x").iterdir())
    with pytest.raises(InfoFlowError, match="no home folder"):
        call(made, "~nobody-here/x")
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("name", some_of([*READERS], *[*READERS][::4]))
def test_what_is_in_the_home_folder_is_read(name, made, home):
    make, call = READERS[name]
    make(made, home / "x")
    zoo_folder[:] = [made["folder"]]
    call("~/x")
    with pytest.raises(InfoFlowError, match=r"is no path|there is no|no official name|is no "):
        call("~nobody-here/x")
    assert list(Path.cwd().iterdir()) == []


# Names as long as they may be, and longer


@pytest.mark.parametrize("name", some_of([*FILES], *[*FILES][::4]))
def test_the_longest_name_is_written_and_a_longer_one_refused_before_work(name, made, tmp_path):
    """Names of 237 to 255 bytes were refused behind the work, with the advice to make room."""
    end, call = FILES[name]
    longest = 255 - len(end or ".safetensors")
    for letter in ("x", "é", "漢"):
        size = len(letter.encode())
        for length in {longest // size, (longest - 15) // size}:
            call(made, tmp_path / (letter * length + end))
            assert [p for p in tmp_path.iterdir() if p.name.startswith(letter * length)]
        before = set(tmp_path.iterdir())
        with pytest.raises(InfoFlowError, match=r"is no name of a file .*too long") as refused:
            call(made, tmp_path / (letter * (longest // size + 1) + end))
        assert "room" not in str(refused.value)
        assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", some_of(sorted(FOLDERS), "save_model", "probe(out=)", "train"))
def test_the_longest_name_of_a_folder(name, made, tmp_path):
    call = FOLDERS[name]
    call(made, tmp_path / ("x" * 255))
    assert list((tmp_path / ("x" * 255)).iterdir())
    with pytest.raises((InfoFlowError, OSError), match="too long"):
        call(made, tmp_path / ("x" * 256))
    assert len(list(tmp_path.iterdir())) == 1


def test_one_function_makes_temporary_folders():
    """It names what cannot be done, where the system's own errors would end a run."""
    root = Path(infoflow_lens.__file__).parents[1]
    found = {
        path.name
        for room in ("infoflow_lens", "hooks", "studies", "tasks")
        for path in (root / room).rglob("*.py")
        if any(name in path.read_text(encoding="utf-8") for name in ("TemporaryDir", "mkdtemp"))
    }
    assert found == {"files.py"}


DEEP = Path(*["a"] * 2000)


@pytest.mark.parametrize("name", [*FILES, *FOLDERS, *READERS])
def test_folders_in_one_another_that_are_too_many_are_named(name, made, home):
    zoo_folder[:] = [made["folder"]]
    end, call = FILES.get(name, ("", None))
    call = call or FOLDERS.get(name) or (lambda m, p: READERS[name][1](str(p)))
    with pytest.raises(InfoFlowError, match=r"is no path \(2\d{3} folders in one another\)"):
        call(made, Path.cwd() / DEEP / f"x{end}")
    assert list(Path.cwd().iterdir()) == []


# Commands

# What the parameters of commands name: a place to write, or what is read.
WRITTEN = {(named(case), "out") for case in ARGUMENTS} | {("estimate", "plot")}
READ = {
    ("inspect", "model"): "MODEL",
    ("probe", "model"): "MODEL",
    ("probe", "data"): "DATA",
    ("survey", "model"): "MODEL",
    ("survey", "data"): "DATA",
    ("ask", "model"): "MODEL",
    ("flow", "model"): "MODEL",
    ("flow", "with_model"): "MODEL",
    ("serve", "model"): "MODEL",
    ("why", "model"): "MODEL",
    ("study", "model"): "MODEL",
    ("study", "data"): "DATA",
    ("estimate", "task"): "TASK",
    ("estimate", "like"): "MODEL",
    ("design", "task"): "TASK",
    ("tasks", "name"): "TASK",
    ("certify", "data"): "ROWS",
}
NAMES = {"train-language-model", "study"}  # whose argument `name` names no file
LINES = {
    ("inspect", "model"): ["MODEL"],
    ("probe", "model"): ["MODEL", "--data", "repeated", "--n", "4", "--probes", "positions"],
    ("probe", "data"): ["stdlib-2l", "--data", "DATA", "--n", "2", "--probes", "positions"],
    ("survey", "model"): ["MODEL", "--data", "repeated", "--n", "6", "--window", "8"],
    ("survey", "data"): ["stdlib-2l", "--data", "DATA", "--n", "6", "--window", "8"],
    ("ask", "model"): ["MODEL", "w4 w5", "--quick", "--quiet"],
    ("flow", "model"): ["MODEL", "w4 w5", "--quiet"],
    ("flow", "with_model"): ["stdlib-2l", "a b", "--with-model", "MODEL", "--quiet"],
    ("serve", "model"): ["MODEL", "w4 w5", "--quick", "--quiet", "--idle", "0"],
    ("why", "model"): ["MODEL", "w4 w5 w6", "--layer", "0", "--head", "1"],
    ("study", "model"): ["top_k", "--model", "MODEL", "--preset", "smoke", "--quiet"],
    ("study", "data"): ["top_k", "--model", "stdlib-2l", "--data", "DATA", "--preset", "smoke"],
    ("estimate", "task"): ["TASK", "--heads", "1", "--tokens", "8"],  # excluded, with proof
    ("estimate", "like"): ["all", "--like", "MODEL", "--tokens", "8"],
    ("design", "task"): ["TASK", "--tokens", "8", "--max-heads", "2", "--quiet"],
    ("tasks", "name"): ["TASK"],
    ("certify", "data"): ["ROWS", "--quiet"],
}


def parameters_that_name_files():
    for name, command in typer.main.get_command(app).commands.items():
        for parameter in command.params:
            given = parameter.name
            if given in ("model", "with_model", "data", "like", "task", "out", "plot") or (
                given == "name" and name not in NAMES
            ):
                yield name, given


def test_the_tables_hold_every_parameter_of_a_command():
    assert set(parameters_that_name_files()) == WRITTEN | READ.keys()
    assert set(LINES) == READ.keys()


@pytest.mark.parametrize(("command", "given"), some_of(
    sorted(READ), ("inspect", "model"), ("probe", "data"), ("certify", "data"), ("tasks", "name")
))  # fmt: skip
def test_commands_read_from_the_home_folder(command, given, home):
    zoo.save("gpt2", home / "model")
    (home / "texts.txt").write_text("w4 w5 w6 w7 w8 w9\n" * 400)
    (home / "own.py").write_text(OWN_TASK)
    (home / "rows.jsonl").write_text('{"x": ["a", "?"], "y": "a"}\n{"x": ["b", "?"], "y": "b"}\n')
    words = {"MODEL": "~/model", "DATA": "~/texts.txt", "TASK": "~/own.py:task",
             "ROWS": "~/rows.jsonl"}  # fmt: skip
    asked = [words.get(word, word) for word in LINES[command, given]]
    place = f"~/{DOCUMENTS.get(command, 'o')}"
    out = ["--out", place] if command in ARGUMENTS and asked[0] != "all" else []
    before = set(home.iterdir()) | {home / "__pycache__"}  # of the task in own.py
    result = CliRunner().invoke(app, [command, *asked, *out])
    assert result.exit_code == 0, result.output
    assert bool(set(home.iterdir()) - before) == bool(out)
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("command", some_of(sorted(ARGUMENTS), "probe", "flow", "certify"))
def test_commands_write_to_the_home_folder(command, made, home, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"x": ["a", "?"], "y": "a"}\n{"x": ["b", "?"], "y": "b"}\n')
    words = {"MODEL": str(made["folder"]), "DATA": str(data)}
    result = runs(command, ARGUMENTS[command], Path("~/out"), words)
    assert result.exit_code == 0, result.output
    assert list((home / "out").iterdir())
    assert list(Path.cwd().iterdir()) == []
    result = runs(command, ARGUMENTS[command], Path("~nobody-here/out"), words)
    assert result.exit_code == 2
    assert "there is no home folder of that name" in " ".join(result.stderr.split()).replace(
        "│ ", ""
    )


@pytest.mark.parametrize("command", sorted(DOCUMENTS))
def test_commands_refuse_a_long_name_before_they_work(command, made, tmp_path, monkeypatch):
    def work(*args, **kwargs):
        raise AssertionError("it began to work")

    for place in ("flows.run.flow", "theory.estimate.estimate", "probing.data.read_rows"):
        monkeypatch.setattr(f"infoflow_lens.{place}", work)
    words = {"MODEL": str(made["folder"]), "DATA": str(tmp_path)}
    asked = [words.get(word, word) for word in ARGUMENTS[command]]
    end = os.path.splitext(DOCUMENTS[command])[1]
    place = tmp_path / ("x" * (256 - len(end)) + end)
    result = CliRunner().invoke(app, [command, *asked, "--out", str(place)])
    assert result.exit_code == 2, result.output
    assert "is no name of a file (File name too long)" in result.stderr
