"""Every command that takes --out leaves what others have put into the folder as it was."""

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import time
from itertools import product

import datasets
import pytest
import typer
from typer.testing import CliRunner

from infoflow_lens import InfoFlowError, load_any
from infoflow_lens.cli import app
from infoflow_lens.foundation.progress import progress_bar
from infoflow_lens.foundation.streams import note
from infoflow_lens.runs.executor import Executor
from infoflow_lens.runs.folder import MANIFEST, PRIVATE, RunFolder
from infoflow_lens.studies import demo
from infoflow_lens.studies.language_model import training
from infoflow_lens.studies.language_model.config import preset
from infoflow_lens.studies.language_model.snapshots import reset_weights
from infoflow_lens.studies.papers.specific_position import SpecificPosition
from tests.conftest import some_of, spread
from tests.foundation.test_documents import occupy
from tests.processes import started
from tests.reference import zoo
from tests.studies.language_model.test_training import CONFIG, CORPUS

pytestmark = pytest.mark.filterwarnings("ignore::infoflow_lens.foundation.errors.InfoFlowWarning")


def of_config():
    """The options of a language model that is trained in a moment."""
    of_preset = vars(preset("stdlib-2l"))
    changed = {n: v for n, v in vars(CONFIG).items() if v != of_preset[n]}
    return [word for n, v in changed.items() for word in (f"--{n.replace('_', '-')}", str(v))]


ARGUMENTS = {
    "probe": [
        "MODEL",
        "--data",
        "repeated",
        "--shard",
        "4",
        "--probes",
        "positions",
        "--n",
        "6",
        "--max-length",
        "8",
        "--quiet",
    ],
    "survey": ["MODEL", "--data", "repeated", "--n", "6", "--window", "8", "--quiet"],
    "demo": ["--quiet"],
    "study": ["specific_position", "--preset", "smoke", "--quiet", "--resume"],
    "study, language model": [
        "top_k",
        "--model",
        "MODEL",
        "--preset",
        "smoke",
        "--quiet",
        "--resume",
    ],
    "train-language-model": ["stdlib-2l", *of_config(), "--quiet"],
    "certify": ["DATA", "--quiet"],
    "estimate": ["kth_largest", "--heads", "1", "--tokens", "8"],
    "flow": ["MODEL", "a b a b", "--quiet"],
    "ask": ["MODEL", "a b a b", "--quick", "--quiet"],
}
DOCUMENTS = {
    "certify": "certificate.json",
    "estimate": "witness.json",
    "flow": "flow.html",
    "ask": "answer.html",
}
# What others may have in a folder: downloads and transfers, notes beside files of the run, other
# runs, and links.
THEIRS = (
    ".movie.mkv.part", ".rsync.part/half", "inputs/notes.txt", "positions/mine.json",
    "runs/mine.json", "training/notes", "checkpoints/notes", "model/notes", ".lock", "data.csv",
    f"nested/{PRIVATE}/scratch/half", f"nested/{MANIFEST}", "nested/record.json",
)  # fmt: skip


def named(case):
    """The command of a case, which may say more behind a comma."""
    return case.partition(",")[0]


def with_out():
    """The names of the commands that take --out."""
    commands = typer.main.get_command(app).commands.items()
    return {n for n, c in commands if any("--out" in option.opts for option in c.params)}


def test_the_table_names_every_command_with_a_folder():
    assert {*map(named, ARGUMENTS)} == with_out()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return zoo.save("gpt2", tmp_path_factory.mktemp("gpt2"))


@pytest.fixture
def small(monkeypatch):
    """Sizes at which training takes a moment."""
    sizes = {"n_tokens": 4, "d_model": 8, "d_mlp": 8, "half_epochs": 1, "epochs": 1, "n_train": 40,
             "n_shown": 2, "n_validation": 10, "n_recovery": 20, "n_influence": 4}  # fmt: skip
    brief = {"n_tokens": 4, "epochs": 2, "n_train": 100}
    monkeypatch.setitem(SpecificPosition._SIZES, "smoke", brief)
    monkeypatch.setattr(training, "read_corpus", lambda: CORPUS)
    usual = demo.DemoConfig
    monkeypatch.setattr(demo, "DemoConfig", lambda seed=0: usual(seed=seed, **sizes))


def theirs(out):
    """Everything in a folder, with what links lead to."""
    return {p: os.readlink(p) if p.is_symlink() else p.read_bytes() for p in out.rglob("*")
            if p.is_symlink() or p.is_file()}  # fmt: skip


@pytest.mark.parametrize("command", some_of(sorted(ARGUMENTS), "probe", "study"))
def test_files_links_and_runs_of_others_stay_as_they_are(command, model, small, tmp_path):
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    for name in THEIRS:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(name)
    (elsewhere / "deep").mkdir(parents=True)
    (elsewhere / "deep" / "x.json").write_text("theirs")
    (out / "data").symlink_to(elsewhere)
    before = theirs(tmp_path)
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(f'{{"x": ["{a}", "{b}", "?"], "y": "{a}"}}\n' for a in "ab" for b in "cd")
    )
    words = {"MODEL": str(model), "DATA": str(data)}
    arguments = [words.get(word, word) for word in ARGUMENTS[command]]
    place = out / DOCUMENTS.get(command, "")
    for _ in range(2):  # a second run goes on, or makes all of it again
        result = CliRunner().invoke(app, [named(command), *arguments, "--out", str(place)])
        assert result.exit_code == 0, result.output
        after = theirs(tmp_path)
        assert {path: after.get(path) for path in before} == before
        assert len(after) > len(before) + 1  # and it has written its own


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
@pytest.mark.parametrize(
    ("command", "name"),
    [("probe", "positions"), ("probe", "inputs"), ("probe", "report.html"), ("demo", "training"),
     ("demo", "summary.json"), ("study", "runs"), ("study", MANIFEST),
     ("probe", PRIVATE), ("certify", "certificate.json"), ("estimate", "witness.json"),
     ("flow", "flow.html"),
     ("demo", "model")],
)  # fmt: skip
def test_links_in_the_places_of_the_runs_own_files_are_refused(
    command, name, model, small, tmp_path
):
    out, victim = tmp_path / "out", tmp_path / "victim"
    out.mkdir()
    if "." in name.lstrip("."):
        victim.write_text("theirs")
    else:
        victim.mkdir()
        (victim / "000000.json").write_text("theirs")
    (out / name).symlink_to(victim)
    before = theirs(tmp_path)
    data = tmp_path / "data.jsonl"
    data.write_text('{"x": ["a", "?"], "y": "a"}\n{"x": ["b", "?"], "y": "b"}\n')
    words = {"MODEL": str(model), "DATA": str(data)}
    arguments = [words.get(word, word) for word in ARGUMENTS[command]]
    place = out / name if command in DOCUMENTS else out
    result = CliRunner().invoke(app, [named(command), *arguments, "--out", str(place)])
    assert result.exit_code == 2, result.output
    assert name in result.stderr
    after = theirs(tmp_path)
    assert {path: after.get(path) for path in before} == before


# No command asks a network, unless the user named something on the hub

WITHOUT_OUT = {
    "inspect": ["MODEL"],
    "why": ["MODEL", "a b a b", "--layer", "0", "--head", "1"],
    "design": ["kth_largest", "--tokens", "8", "--max-heads", "2", "--quiet"],
    "serve": ["MODEL", "a b a b", "--quick", "--quiet", "--idle", "0"],
    "tasks": [],
    "constructions": [],
}


def test_the_tables_name_every_command():
    assert {*map(named, ARGUMENTS), *WITHOUT_OUT} == set(typer.main.get_command(app).commands)


@pytest.fixture
def no_network(monkeypatch):
    """Every try to reach one, which fails."""
    tried = []

    def refuse(*args, **kwargs):
        tried.append(args)
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for place in ("huggingface_hub.constants.HF_HUB_OFFLINE", "datasets.config.HF_HUB_OFFLINE"):
        monkeypatch.setattr(place, False)
    return tried


def runs(command, arguments, out, words):
    asked = [words.get(word, word) for word in arguments]
    place = [] if command in WITHOUT_OUT else ["--out", str(out / DOCUMENTS.get(command, ""))]
    return CliRunner().invoke(app, [named(command), *asked, *place])


EVERY = {**ARGUMENTS, **WITHOUT_OUT}


@pytest.mark.parametrize("command", some_of(sorted(EVERY), "probe", "inspect"))
def test_no_command_asks_a_network(command, model, small, no_network, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"x": ["a", "?"], "y": "a"}\n{"x": ["b", "?"], "y": "b"}\n')
    words = {"MODEL": str(model), "DATA": str(data)}
    result = runs(command, EVERY[command], tmp_path / "out", words)
    assert result.exit_code == 0, result.output
    assert no_network == []


KINDS = ["txt", "jsonl", "json", "csv", "parquet", "saved"]


@pytest.mark.parametrize("kind", some_of(KINDS, "jsonl", "saved"))
def test_no_file_of_data_asks_a_network(kind, model, no_network, tmp_path):
    rows = datasets.Dataset.from_dict({"text": ["w4 w5 w6", "w7 w8"] * 3})
    path = tmp_path / f"data.{kind}"
    if kind == "txt":
        path.write_text("w4 w5 w6\nw7 w8\n")
    elif kind == "saved":
        rows.save_to_disk(path)
    else:
        write = getattr(rows, f"to_{'json' if kind == 'jsonl' else kind}")
        write(path, lines=True) if kind == "json" else write(path)
    out = tmp_path / "out"
    arguments = ["MODEL", "--data", str(path), "--probes", "positions", "--quiet"]
    result = runs("probe", arguments, out, {"MODEL": str(model)})
    assert result.exit_code == 0, result.output
    assert no_network == []


def spoil_config(folder, changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


NAMED = "owner/chosen-by-the-config"
HOSTILE = {
    **{kind: {"model_type": kind, "backbone": NAMED}
       for kind in ("dpt", "mask2former", "upernet", "detr", "rf_detr", "zoedepth", "vitpose")},
    "timm": {"model_type": "timm_wrapper", "architecture": f"hf-hub:{NAMED}"},
    "part": {"model_type": "llava", "vision_config": {"model_type": "dpt", "backbone": NAMED}},
    "part of timm": {"model_type": "gemma3n", "vision_config": {"architecture": f"hf_hub:{NAMED}"}},
    "list of parts": {"sub_configs": [{"model_type": "dpt", "backbone": NAMED}]},
    "unknown": {"model_type": "no-such-model", "backbone": NAMED},
    "two stacks": {"model_type": "t5", "is_encoder_decoder": True},
}  # fmt: skip


@pytest.mark.parametrize("changes", HOSTILE.values(), ids=HOSTILE)
def test_no_config_of_a_folder_asks_a_network(changes, no_network, tmp_path):
    """`backbone` was asked for on the hub, with the token of the user, and refused behind it."""
    folder = zoo.save("gpt2", tmp_path / "gpt2")
    spoil_config(folder, changes)
    for command in ("inspect", "estimate"):
        more = ["kth_largest", "--tokens", "8", "--like"] if command == "estimate" else []
        result = CliRunner().invoke(app, [command, *more, str(folder)])
        assert command == "estimate" or result.exit_code == 2, result.output
        assert no_network == []
    with contextlib.suppress(InfoFlowError), reset_weights(str(folder), 0):
        pass
    assert no_network == []


@pytest.mark.slow
def test_no_kind_of_config_asks_a_network(no_network, tmp_path):
    from transformers import CONFIG_MAPPING

    folder = zoo.save("gpt2", tmp_path / "gpt2")
    for kind in CONFIG_MAPPING:
        for part in ({}, {"text_config": {"model_type": "dpt", "backbone": NAMED}}):
            spoil_config(folder, {"model_type": kind, "backbone": NAMED, **part})
            with pytest.raises(InfoFlowError, match=r"over tokens|names 'owner/chosen"):
                load_any(folder)
    assert no_network == []


def test_the_base_of_an_adapter_is_not_fetched(no_network, tmp_path):
    folder = zoo.save("gpt2", tmp_path / "gpt2")
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(f'{{"base_model_name_or_path": "{NAMED}", "r": 2}}')
    result = CliRunner().invoke(app, ["inspect", str(folder)])
    assert result.exit_code == 2
    assert "load it once by its name" in result.stderr
    assert no_network == []


def test_a_name_on_the_hub_does(model, no_network, monkeypatch, tmp_path):
    """So that the test above can fail."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the client tries again and again
    arguments = ["MODEL", "--data", "hub:owner/texts", "--probes", "positions", "--quiet"]
    result = runs("probe", arguments, tmp_path / "out", {"MODEL": str(model)})
    assert result.exit_code == 2
    assert "no dataset of the hub" in result.output
    assert no_network


# What a terminal would take for a command

ESCAPE = "\x1b]0;pwned\x07\x1b[2J\u202e"


@pytest.mark.parametrize("command", sorted(EVERY))
def test_names_that_are_no_names_send_nothing_to_the_terminal(command, tmp_path):
    """Whatever a command says of a name, in errors as in what it prints."""
    table = EVERY[command]
    asked = [ESCAPE if word in ("MODEL", "DATA", "a b a b") else word for word in table]
    asked = [ESCAPE, *asked[1:]] if asked and not asked[0].startswith("-") else [*asked, ESCAPE]
    place = [] if command in WITHOUT_OUT else ["--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [named(command), *asked, *place])
    assert result.exit_code == 2
    assert not {"\x1b", "\x07"} & set(result.output + result.stderr)


def test_what_a_folder_says_of_its_writer_is_shown_and_not_sent(tmp_path):
    (tmp_path / PRIVATE).mkdir()
    with RunFolder.open(tmp_path, ESCAPE), pytest.raises(InfoFlowError) as refused:
        RunFolder.open(tmp_path, "two").__enter__()
    assert "\\x1b]0;pwned" in str(refused.value)
    assert "\x1b" not in str(refused.value)


def test_what_a_model_is_called_is_shown_and_not_sent(tmp_path, capsys):
    folder = zoo.save("gpt2", tmp_path / f"x{ESCAPE}")
    result = CliRunner().invoke(app, ["inspect", str(folder)])
    assert result.exit_code == 0, result.output
    assert "\\x1b" in result.output
    assert not {"\x1b", "\x07", "\u202e"} & set(result.output)


# Documents


def test_a_picture_takes_no_place_of_another_file(tmp_path):
    """--plot replaced any file, where --out refused."""
    sweep = ["estimate", "kth_largest", "--heads", "2", "--tokens", "8", "--sweep", "heads,tokens"]
    place = tmp_path / "notes.png"
    place.write_text("mine")
    result = CliRunner().invoke(app, [*sweep, "--plot", str(place)])
    assert result.exit_code == 2
    assert "is no picture of infoflow-lens" in result.stderr
    assert place.read_text() == "mine"
    for more in (["--overwrite"], []):  # then it is one of ours
        result = CliRunner().invoke(app, [*sweep, "--plot", str(place), *more])
        assert result.exit_code == 0, result.output
    assert place.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("command", "name"),
    some_of(
        [("probe", "report.html"), ("probe", "positions.csv"), ("survey", "heads.csv"),
         ("demo", "report.html"), ("study", "table.md"), ("study", "figure.svg"),
         ("certify", "certificate.json"), ("estimate", "witness.json"), ("flow", "flow.html")],
        ("probe", "positions.csv"), ("flow", "flow.html"),
        ("estimate", "witness.json"),
    ),
)  # fmt: skip
def test_what_the_user_has_edited_stays(command, name, model, small, tmp_path):
    """A note in report.html of a finished run was gone when the command was repeated."""
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    data.write_text('{"x": ["a", "?"], "y": "a"}\n{"x": ["b", "?"], "y": "b"}\n')
    words = {"MODEL": str(model), "DATA": str(data)}
    result = runs(command, ARGUMENTS[command], out, words)
    assert result.exit_code == 0, result.output
    content = (out / name).read_bytes()
    edited = content.replace(b"a", b"A", 1) + b"mine\n"
    (out / name).write_bytes(edited)
    result = runs(command, ARGUMENTS[command], out, words)
    assert result.exit_code == 2, result.output
    assert name in result.stderr
    assert (out / name).read_bytes() == edited
    if command in DOCUMENTS:
        result = runs(command, [*ARGUMENTS[command], "--overwrite"], out, words)
    else:
        (out / name).rename(tmp_path / "kept")
        result = runs(command, ARGUMENTS[command], out, words)
    assert result.exit_code == 0, result.output
    assert (out / name).read_bytes() == content or name.endswith("svg")


@pytest.mark.parametrize("option", ["--out", "--witness"])
@pytest.mark.parametrize("asked", [["kth_largest", "--sweep", "heads,tokens"], ["all"]])
def test_a_proof_is_of_one_verdict(asked, option, tmp_path):
    """--out with --sweep ended well, and wrote nothing."""
    more = [option, str(tmp_path / "x")] if option == "--out" else [option]
    result = CliRunner().invoke(app, ["estimate", *asked, "--heads", "2", "--tokens", "8", *more])
    assert result.exit_code == 2
    assert "give the proof of one verdict" in result.stderr


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full device")
def test_output_without_room_is_one_line(tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "infoflow_lens.cli", "tasks", "--json"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: the output cannot be written (No space left on device): expected room"
    ]


CLOSED = """
import os, sys
for number, name in enumerate(("stdin", "stdout", "stderr")):
    if name in sys.argv[1].split(","):
        os.close(number)
        setattr(sys, name, None)  # as Python does where it is started so
del sys.argv[:2]
import runpy
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
STREAMS = ("stdout", "stderr", "stdin,stdout,stderr")


@pytest.mark.parametrize(
    ("command", "closed"),
    some_of(
        list(product(sorted(EVERY), STREAMS)),
        ("probe", "stdout"),
        ("tasks", "stdin,stdout,stderr"),
    ),
)
def test_commands_work_where_streams_are_closed(command, closed, model, small, tmp_path):
    """Every command ended in a traceback; and what libraries print went into our own files."""
    if command in ("demo", "train-language-model"):
        pytest.skip("the sizes of these are small in this process alone")
    (tmp_path / "closed.py").write_text(CLOSED)
    data = tmp_path / "data.jsonl"
    data.write_text('{"x": ["a", "?"], "y": "a"}\n{"x": ["b", "?"], "y": "b"}\n')
    words = {"MODEL": str(model), "DATA": str(data)}
    asked = [words.get(word, word) for word in EVERY[command] if word != "--quiet"]
    place = [] if command in WITHOUT_OUT else ["--out", tmp_path / "o" / DOCUMENTS.get(command, "")]
    line = [tmp_path / "closed.py", closed, "infoflow_lens.cli", named(command), *asked, *place]
    with started(*line, folder=tmp_path) as program:
        assert program.wait(600) == 0, program.stderr
        assert "Traceback" not in program.stdout + program.stderr
        assert bool(program.stdout) == ("stdout" not in closed)
    if command not in WITHOUT_OUT:
        assert list((tmp_path / "o").iterdir())


def test_a_bar_that_cannot_be_written_does_not_end_the_work(monkeypatch):
    class Full:
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

        flush = isatty = lambda self: False

    for stream in (Full(), None):
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setattr("infoflow_lens.foundation.progress._PAUSE", 1e-9)
        with progress_bar("work", 3) as advance:
            for _ in range(3):
                advance(1, "status")
        note("stopping")


def test_a_run_goes_on_however_its_precision_and_host_were_asked_for(model, tmp_path):
    """What was computed counts, and not what was typed: float32 is what nothing gives."""
    start = ["probe", str(model), *ARGUMENTS["probe"][1:], "--out", str(tmp_path / "out")]
    first = CliRunner().invoke(app, start)
    assert first.exit_code == 0, first.output
    before = (tmp_path / "out" / "positions.json").read_bytes()
    for spelled in (["--dtype", "float32"], ["--backend", "opened"]):
        again = CliRunner().invoke(app, [*start, *spelled])
        assert again.exit_code == 0, again.output
    assert (tmp_path / "out" / "positions.json").read_bytes() == before
    other = CliRunner().invoke(app, [*start, "--dtype", "float64"])
    assert other.exit_code == 2
    assert "the model's weights changed" in other.stderr


def test_a_scheduler_that_says_nothing_is_not_waited_for(monkeypatch):
    """It took a minute and a half."""
    monkeypatch.setattr("infoflow_lens.runs.executor._ANSWER", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        started = time.monotonic()
        with pytest.raises(InfoFlowError, match="there is no dask scheduler at"):
            Executor(scheduler=address).start_workers("all").__enter__()
    assert time.monotonic() - started < 20


OCCUPIED = ["pipe", "link", "dangling link", "folder", "foreign"]


@pytest.mark.parametrize(
    ("command", "how"),
    some_of(list(product(sorted(ARGUMENTS), OCCUPIED)), *spread(sorted(ARGUMENTS), OCCUPIED)),
)
def test_no_command_waits_for_or_replaces_what_is_no_file_of_its_own(
    command, how, model, small, tmp_path
):
    """A pipe as manifest, record or page once held a command for ever."""
    out, other = tmp_path / "out", tmp_path / "theirs"
    out.mkdir()
    other.write_text("theirs")
    place = out / DOCUMENTS.get(command, MANIFEST)
    place.write_text("theirs") if how == "foreign" else occupy(how, place, other)
    data = tmp_path / "data.jsonl"
    data.write_text('{"x": ["a", "?"], "y": "a"}\n{"x": ["b", "?"], "y": "b"}\n')
    words = {"MODEL": str(model), "DATA": str(data)}
    result = runs(command, ARGUMENTS[command], out, words)
    assert result.exit_code == 2, result.output
    assert place.name in result.stderr
    assert other.read_text() == "theirs"
    assert how != "foreign" or place.read_text() == "theirs"
