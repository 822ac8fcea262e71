"""Whatever happens to a run, it ends with the bytes of an undisturbed one, or says what to do.

``python -m tests.chaos --rounds 200`` sends signals at random times, spoils files, fills the disk,
starts runs twice in one folder and kills workers, over probe, demo and experiment, then lets each
run end, and prints a table.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.fuzz import SPOILS, spoiled
from tests.reference import zoo

REPOSITORY = Path(__file__).resolve().parent.parent
TROUBLES = ("SIGINT", "SIGTERM", "SIGKILL", "spoiled", "full disk", "twice")
_LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({}, -1))"
_SMALL_DEMO = """
import sys
from pathlib import Path
from infoflow_lens.commands.common import reported
from infoflow_lens.experiments.demo import DemoConfig, run_demo
config = DemoConfig(n_tokens=4, d_model=8, d_mlp=8, epochs=20, n_train=400, n_validation=100,
                    n_recovery=200, n_influence=20, n_shown=2)
with reported():
    run_demo(Path(sys.argv[1]), config, progress=False)
"""


def commands(model: Path, home: Path) -> dict[str, list[str]]:
    """What is run, without its folder."""
    lens = [sys.executable, "-W", "ignore", "-m", "infoflow_lens.cli"]
    demo = home / "demo.py"
    demo.write_text(_SMALL_DEMO)
    return {
        "probe": [*lens, "probe", str(model), "--data", "repeated", "--n", "60", "--max-length",
                  "12", "--batch-size", "2", "--n-detail", "6", "--ranks", "1,2", "--quiet",
                  "--out"],
        "demo": [sys.executable, "-W", "ignore", str(demo)],
        "experiment": [*lens, "experiment", "specific_position", "--preset", "smoke", "--seeds",
                       "3", "--quiet", "--resume", "--out"],
        "jobs": [*lens, "experiment", "specific_position", "--preset", "smoke", "--seeds", "3",
                 "--jobs", "2", "--quiet", "--resume", "--out"],
    }  # fmt: skip


def contents(out: Path) -> dict[str, bytes]:
    """The results in a folder; pages and logs with them."""
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }


def start(command: list[str], out: Path, limit: int | None = None) -> subprocess.Popen[str]:
    """A process of its own session, so that signals reach it alone."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(REPOSITORY),
    }  # fmt: skip
    arguments = [*command, str(out)]
    if limit is not None:
        arguments = [
            sys.executable, "-c",
            _LIMIT.format(limit) + "; import os, sys; os.execv(sys.argv[1], sys.argv[1:])",
            *arguments,
        ]  # fmt: skip
    return subprocess.Popen(
        arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment,
        cwd=out.parent,
    )  # fmt: skip


def trouble(kind: str, command: list[str], out: Path, seconds: float, drawn: random.Random) -> str:
    """Trouble for one run; what it said."""
    limit = drawn.choice([500, 3000, 20_000]) if kind == "full disk" else None
    process = start(command, out, limit)
    if kind == "full disk":
        return process.communicate()[1]
    if kind == "twice":
        time.sleep(drawn.uniform(0, seconds))
        second = start(command, out)
        said = second.communicate()[1]
        return said + process.communicate()[1]
    time.sleep(drawn.uniform(0, 1.1 * seconds))
    if kind == "spoiled":
        process.kill()
    else:
        process.send_signal(getattr(signal, kind))
    said = process.communicate()[1]
    files = [path for path in out.rglob("*") if path.is_file()] if out.is_dir() else []
    if kind == "spoiled" and files:
        spoiled(drawn.choice(sorted(files)), drawn.choice(SPOILS), drawn.random(), b"\x80\x04N.")
    return said


def main() -> None:
    """Disturb runs, let them end, compare, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--command", action="append", default=None)
    chosen = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="chaos"))
    zoo.save("gpt2", home / "model")
    all_commands = commands(home / "model", home)
    names = chosen.command or list(all_commands)
    whole, seconds = {}, {}
    for name in names:
        begun = time.monotonic()
        process = start(all_commands[name], home / f"whole-{name}")
        said = process.communicate()[1]
        if process.returncode:
            sys.exit(f"{name} does not run: {said}")
        seconds[name] = time.monotonic() - begun
        whole[name] = contents(home / f"whole-{name}")
    table: Counter[tuple[str, str, str]] = Counter()
    drawn = random.Random(chosen.seed)
    wrong = []
    for number in range(chosen.rounds):
        name, kind = names[number % len(names)], drawn.choice(TROUBLES)
        out = home / f"out-{number}"
        said = [trouble(kind, all_commands[name], out, seconds[name], drawn)]
        outcome = "refused by name"
        for _ in range(12):  # what is refused by name is deleted, as the message says
            process = start(all_commands[name], out)
            said.append(process.communicate()[1])
            if process.returncode == 0:
                same = contents(out) == whole[name]
                outcome = "same bytes" if same else "WRONG"
                break
            named = [path for path in out.rglob("*") if f"{path.name}" in said[-1]]
            stems = {path.name.partition(".")[0] or path.name for path in named}
            for path in [p for p in out.rglob("*") if p.name.partition(".")[0] in stems] or named:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        if any("Traceback" in text for text in said):
            outcome = "TRACEBACK"
        if outcome.isupper():
            wrong.append((number, name, kind, outcome, said))
        table[name, kind, outcome] += 1
        if outcome == "same bytes":
            shutil.rmtree(out)
    for (name, kind, outcome), n in sorted(table.items()):
        sys.stdout.write(f"{name:12} {kind:10} {outcome:16} {n:4}\n")
    for number, name, _, outcome, said in wrong[:5]:
        differing = ""
        if outcome == "WRONG":
            found = contents(home / f"out-{number}")
            names_of = {*found, *whole[name]}
            differing = str(sorted(p for p in names_of if found.get(p) != whole[name].get(p)))
        sys.stdout.write(f"round {number}: {outcome} {differing} {json.dumps(said)[-1500:]}\n")
    if not wrong:
        shutil.rmtree(home)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
