"""Whatever happens to a run, it ends with the bytes of an undisturbed one, or says what to do.

``python -m tests.chaos --rounds 200`` sends signals at random times, kills workers, spoils files,
fills the disk and starts runs twice in one folder, over every command that goes on, alone, with
jobs and on a dask cluster; then lets each run end, and prints a table. tests/test_chaos.py runs a
few rounds.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from infoflow_lens import probe
from tests.fuzz import SPOILS, spoiled
from tests.processes import Program, started
from tests.reference import zoo

_STUCK, _STILL = 1000, "still running"
TROUBLES = ("SIGINT", "SIGTERM", "SIGKILL", "worker", "spoiled", "full disk", "twice", "closed")
# Files of at most so many bytes, or without standard streams, then the command.
_LIMITED = """
import faulthandler, os, resource, runpy, signal, sys
faulthandler.register(signal.SIGUSR1)  # what it does, if it does not end
limit = int(sys.argv[1])
if limit > 0:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, -1))
elif limit < 0:
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.close(number)
        setattr(sys, name, None)
del sys.argv[:2]
if sys.argv[0].endswith(".py"):
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
_SMALL_DEMO = """
import sys
from pathlib import Path

import typer

from infoflow_lens.commands.common import report_errors
from infoflow_lens.studies.demo import DemoConfig, run_demo
config = DemoConfig(n_tokens=4, d_model=8, d_mlp=8, half_epochs=4, epochs=16, n_train=400,
                    n_validation=100, n_recovery=200, n_influence=20, n_shown=2)
try:
    with report_errors():
        run_demo(Path(sys.argv[1]), config, progress=False)
except typer.Exit as left:
    sys.exit(left.exit_code)
"""
_SMALL_TRAINING = """
import sys
from pathlib import Path

import typer

from infoflow_lens.commands.common import report_errors
from infoflow_lens.studies.language_model.config import LanguageModelConfig
from infoflow_lens.studies.language_model.corpus import Corpus
from infoflow_lens.studies.language_model.training import train_language_model
config = LanguageModelConfig(d_model=16, n_heads=2, n_context=24, vocabulary=300, n_steps=40,
                             batch_size=4, warmup_steps=2, shortest_repeat=3, longest_repeat=8,
                             evaluate_every=5, save_every=2, threads=1)
lines = [f"def f_{i}(x, y={i % 7}):\\n    return x + y * {i % 5}\\n\\n" for i in range(120)]
places = {"train": lines[:90], "validation": lines[90:105], "test": lines[105:]}
corpus = Corpus({name: {"a.py": "".join(some)} for name, some in places.items()}, "ours")
try:
    with report_errors():
        train_language_model(Path(sys.argv[1]), config, corpus=corpus, progress=False)
except typer.Exit as left:
    sys.exit(left.exit_code)
"""
# A result of fewer parts over one of more, of which a kill may leave files that have no name yet.
_SAVING = """
import sys
from pathlib import Path

import typer

from infoflow_lens.commands.common import report_errors
from infoflow_lens.foundation.streams import open_streams
from infoflow_lens.hooks import Result
open_streams()
home, out = Path(sys.argv[0]).parent, Path(sys.argv[1])
try:
    with report_errors():
        for name in ("larger", "smaller"):
            Result.load(home / name / "positions").save(out / "positions")
        Result.load(out / "positions").whole()
except typer.Exit as left:
    sys.exit(left.exit_code)
"""
_UNNAMED = r"\..*\.[0-9a-f]{12}\.part"


@dataclass
class Place:
    """Where commands are run.

    Attributes:
        home: a folder.
        cluster: the scheduler and the workers of a dask cluster; empty without.
    """

    home: Path
    cluster: list[Program]

    def start(self, command: list[str], out: Path, limit: int = 0) -> Program:
        """The command, with its folder; it must be stopped."""
        (self.home / "limited.py").write_text(_LIMITED)
        arguments = [str(self.home / "limited.py"), str(limit), *command, str(out)]
        return Program(arguments, self.home, Path(tempfile.mkdtemp(dir=self.home)))


def commands(home: Path, address: str | None) -> dict[str, list[str]]:
    """What is run, without its folder."""
    demo, training, saving = (home / f"{name}.py" for name in ("demo", "training", "saving"))
    for script, text in ((demo, _SMALL_DEMO), (training, _SMALL_TRAINING), (saving, _SAVING)):
        script.write_text(text)
    lens = "infoflow_lens.cli"
    probe = [lens, "probe", str(home / "model"), "--data", "repeated", "--n", "60",
             "--max-length", "12", "--batch-size", "2", "--n-detail", "6", "--ranks", "1,2",
             "--shard", "16", "--threads", "1", "--quiet"]  # fmt: skip
    study = [lens, "study", "specific_position", "--preset", "smoke", "--seeds", "3",
             "--quiet", "--resume"]  # fmt: skip
    found = {
        "probe": [*probe, "--out"],
        "probe, jobs": [*probe, "--jobs", "2", "--out"],
        "survey": [lens, "survey", str(home / "model"), "--data", "repeated", "--n", "12",
                   "--window", "8", "--quiet", "--out"],
        "demo": [str(demo)],
        "train-language-model": [str(training)],
        "save": [str(saving)],
        "study": [*study, "--out"],
        "study, language model": [lens, "study", "top_k", "--model", str(home / "model"),
                                  "--preset", "smoke", "--quiet", "--resume", "--out"],
        "study, jobs": [*study, "--jobs", "2", "--out"],
    }  # fmt: skip
    if address is not None:
        found["probe, dask"] = [*probe, "--scheduler", address, "--out"]
        found["study, dask"] = [*study, "--scheduler", address, "--out"]
    return found


@contextmanager
def cluster(home: Path) -> Iterator[tuple[str, list[Program]]]:
    """A dask scheduler on loopback with two workers, which a nanny starts again if they die."""
    file = home / "scheduler.json"
    with ExitStack() as stack:
        scheduler = stack.enter_context(
            started("-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0",
                    "--no-dashboard", "--scheduler-file", file, folder=home)
        )  # fmt: skip
        scheduler.wait_until(file.is_file)
        address = json.loads(file.read_text())["address"]
        workers = [
            stack.enter_context(
                started("-m", "distributed.cli.dask_worker", address, "--nthreads", "1",
                        "--no-dashboard", folder=home)
            )
            for _ in range(2)
        ]  # fmt: skip
        yield address, [scheduler, *workers]


def contents(out: Path) -> dict[str, bytes]:
    """The results in a folder; pages and logs with them."""
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file() and not re.fullmatch(_UNNAMED, path.name)
    }


def ended(program: Program, seconds: float = 900) -> tuple[int, str]:
    """How a program ends, and what it said; one that does not end says what it does."""
    program.process.join(seconds)
    if program.process.exitcode is None:
        program.send_signal(signal.SIGUSR1)
        time.sleep(2)
        program.process.kill()
        return _STUCK, f"{_STILL} after {seconds:.0f} seconds: {program.stderr}"
    return program.wait(1), program.stderr


def kill_a_worker(program: Program, place: Place, drawn: random.Random) -> None:
    """Kill one of the processes that measure for the program; itself where it has none."""
    roots = [program.process.pid, *(worker.process.pid for worker in place.cluster[1:])]
    own = [p for root in roots[:1] for p in psutil.Process(root).children(recursive=True)]
    of_dask = [p for root in roots[1:] for p in psutil.Process(root).children(recursive=True)]
    candidates = own or of_dask or [psutil.Process(roots[0])]
    with suppress(psutil.Error):
        drawn.choice(sorted(candidates, key=lambda process: process.pid)).kill()


def trouble(
    kind: str, command: list[str], out: Path, seconds: float, place: Place, drawn: random.Random
) -> str:
    """Trouble for one run; what it said."""
    limits = {"full disk": [500, 3000, 20_000], "closed": [-1]}
    program = place.start(command, out, drawn.choice(limits.get(kind, [0])))
    if kind in limits:
        return ended(program)[1]
    time.sleep(drawn.uniform(0.2, 1.1 * seconds))
    if kind == "twice":
        return ended(place.start(command, out))[1] + ended(program)[1]
    with suppress(ProcessLookupError, psutil.Error):
        if kind == "worker":
            kill_a_worker(program, place, drawn)
        else:
            program.send_signal(signal.SIGKILL if kind == "spoiled" else getattr(signal, kind))
    said = ended(program)[1]
    files = [path for path in out.rglob("*") if path.is_file()] if out.is_dir() else []
    if kind == "spoiled" and files:
        spoiled(drawn.choice(sorted(files)), drawn.choice(SPOILS), drawn.random(), b"\x80\x04N.")
    return said


def obeyed(said: str, out: Path) -> None:
    """What an error names is deleted, with what belongs to it: x.json and x.safetensors."""
    error = next((line for line in said.splitlines() if line.startswith("error: ")), "")
    named = [
        path for path in out.rglob("*") if re.search(rf"(^|[^\w.]){re.escape(path.name)}", error)
    ]
    stems = {path.stem for path in named}
    for path in [path for path in out.rglob("*") if path.stem in stems]:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def settled(
    command: list[str], out: Path, place: Place, whole: Mapping[str, bytes], said: list[str]
) -> str:
    """The same command again and again, until it ends well: the outcome."""
    for _ in range(12):
        status, answer = ended(place.start(command, out))
        said.append(answer)
        if status == 0:
            return "same bytes" if contents(out) == whole else "WRONG"
        obeyed(answer, out)
    return "REFUSED FOR EVER"


def rounds(n: int, seed: int, chosen: list[str] | None, home: Path) -> Iterator[tuple[str, ...]]:
    """Disturb runs, and let them end: command, trouble, outcome and what was said, of each."""
    zoo.save("gpt2", home / "model")
    for name, size in (("larger", 20), ("smaller", 9)):
        probe(str(home / "model"), "repeated", home / name, n=size, max_length=8, shard=4,
              probes=["positions"], progress=False)  # fmt: skip
    drawn = random.Random(seed)
    with ExitStack() as stack:
        address, programs = None, []
        if chosen is None or any("dask" in name for name in chosen):
            address, programs = stack.enter_context(cluster(home))
        place = Place(home, programs)
        every = commands(home, address)
        names = chosen or list(every)
        whole, seconds = {}, {}
        for name in names:
            begun = time.monotonic()
            status, said = ended(place.start(every[name], home / f"whole-{name}"))
            if status:
                sys.exit(f"{name} does not run: {said}")
            seconds[name] = time.monotonic() - begun
            whole[name] = contents(home / f"whole-{name}")
        for number in range(n):
            name, kind = names[number % len(names)], drawn.choice(TROUBLES)
            out = home / f"out-{number}"
            said_all = [trouble(kind, every[name], out, seconds[name], place, drawn)]
            outcome = settled(every[name], out, place, whole[name], said_all)
            if any(text.startswith(_STILL) for text in said_all):
                outcome = "STUCK"
            if any("Traceback" in text and "infoflow_lens" in text for text in said_all):
                outcome = "TRACEBACK"
            differing = ""
            if outcome == "WRONG":
                now = contents(out)
                every_name = {*now, *whole[name]}
                differing = str(sorted(p for p in every_name if now.get(p) != whole[name].get(p)))
            shutil.rmtree(out)
            yield name, kind, outcome, differing + json.dumps(said_all)


def main() -> None:
    """Print the table, and the first of what went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--command", action="append", default=None)
    chosen = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell lets & ignore
    with tempfile.TemporaryDirectory(prefix="chaos") as home:
        found = []
        with suppress(KeyboardInterrupt):  # the table is of the rounds so far
            for row in rounds(chosen.rounds, chosen.seed, chosen.command, Path(home)):
                found.append(row)
                sys.stdout.write(f"{len(found)}: {', '.join(row[:3])}\n")
                sys.stdout.flush()
    table = Counter((name, kind, outcome) for name, kind, outcome, _ in found)
    for (name, kind, outcome), n in sorted(table.items()):
        sys.stdout.write(f"{name:20} {kind:10} {outcome:18} {n:4}\n")
    wrong = [row for row in found if row[2] != "same bytes"]
    for name, kind, outcome, said in wrong[:5]:
        sys.stdout.write(f"{name}, {kind}: {outcome} {said[-3000:]}\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
