"""One search for faults: what draws cases at random, for some minutes, from a seed.

``make hunt MINUTES=30 SEED=1`` gives every tool the same share of the time, in small steps with a
seed each, and prints a table. It goes on behind the steps that ``build/hunt`` already holds: the
more minutes, the more cases. Each fault is printed with the command that shows it again.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FAILED, DONE, CUT = "FAULT", "done", "out of time"


def _python(code: str) -> list[str]:
    return ["-c", code]


def _chaos(seed: int) -> list[str]:
    """A few disturbed runs of one command; no cluster, which takes long to start."""
    from tests.chaos import commands

    with tempfile.TemporaryDirectory() as home:
        names = list(commands(Path(home), None))
    return ["-m", "tests.chaos", "--rounds", "5", "--seed", f"{seed}", "--command",
            names[seed % len(names)]]  # fmt: skip


# What one step of a tool runs, by its seed.
TOOLS: dict[str, Callable[[int], list[str]]] = {
    "inputs": lambda seed: ["-m", "tests.fuzz", "--cases", "300", "--seed", f"{seed}"],
    "interruptions": _chaos,
    "verdicts": lambda seed: ["-m", "tests.referee", "--n", "20", "--impossible", "5", "--seed",
                              f"{1000 * (1000 + seed)}"],
    "schedules": lambda seed: _python(
        f"from tests.theory.test_search import by_brute_force; by_brute_force({1000 + seed})"
    ),
    "threads": lambda seed: ["-m", "pytest", "-q", "-n", "0", "-k", "thread or process",
                             "-p", "no:cacheprovider", "tests/hooks", "tests/models"],
}  # fmt: skip
MUTANTS = "mutants"  # of which each step tries ten more; survivors are listed, they are no faults


class Hunt:
    """Steps of all tools and what became of them, kept in a folder."""

    def __init__(self, out: Path, seed: int, tools: Sequence[str]) -> None:
        self.out, self.seed, self.tools = out, seed, tools
        out.mkdir(parents=True, exist_ok=True)
        self.path = out / f"steps-{seed}.jsonl"
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def command(self, tool: str) -> list[str]:
        """The next step of a tool."""
        number = sum(row["tool"] == tool and row["outcome"] != CUT for row in self.rows)
        if tool == MUTANTS:
            return ["-m", "tests.mutants", "--seed", f"{self.seed}", "--n", f"{10 * (number + 1)}",
                    "--out", f"{self.out / 'mutants'}"]  # fmt: skip
        return TOOLS[tool](10_000 * self.seed + number)

    def step(self, tool: str, seconds: float) -> float:
        """Run one step, at most so long; how long it took."""
        command, begun = self.command(tool), time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, *command], timeout=seconds, capture_output=True, text=True
            )
            outcome, said = (FAILED if done.returncode else DONE), done.stdout + done.stderr
        except subprocess.TimeoutExpired as error:
            outcome, said = CUT, (error.stdout or b"").decode("utf-8", "replace")
        took = time.monotonic() - begun
        row = {"tool": tool, "outcome": outcome, "seconds": round(took, 1), "command": command,
               "said": said[-3000:]}  # fmt: skip
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        sys.stdout.write(f"{tool}: {outcome} in {took:.0f} s\n")
        sys.stdout.flush()
        return took

    def run(self, minutes: float) -> None:
        """Steps in turn, the next of the tool that has had the least time."""
        end, spent = time.monotonic() + 60 * minutes, Counter(dict.fromkeys(self.tools, 0.0))
        while (left := end - time.monotonic()) > 0:
            tool = min(self.tools, key=lambda name: spent[name])
            spent[tool] += self.step(tool, left)

    def table(self) -> str:
        """What was tried and found, and how to see each fault again."""
        lines = [f"{'':15} {'steps':>6} {'minutes':>8} {'faults':>7}"]
        for tool in self.tools:
            rows = [row for row in self.rows if row["tool"] == tool]
            minutes = sum(row["seconds"] for row in rows) / 60
            faults = sum(row["outcome"] == FAILED for row in rows)
            lines.append(f"{tool:15} {len(rows):6} {minutes:8.1f} {faults:7}")
        survivors = self.out / "mutants" / "survivors.txt"
        if survivors.exists():
            lines.append(f"mutants that no test found are listed in {survivors}")
        for row in self.faults():
            words = " ".join(f"'{word}'" if " " in word else word for word in row["command"])
            lines.append(f"\n{row['said'].strip()[-800:]}\nagain: python {words}")
        return "\n".join(lines) + "\n"

    def faults(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["outcome"] == FAILED]


def main() -> None:
    """Hunt for some minutes, and print the table."""
    every = (*TOOLS, MUTANTS)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/hunt"))
    parser.add_argument("--tool", choices=every, action="append", help="instead of all")
    chosen = parser.parse_args()
    hunt = Hunt(chosen.out, chosen.seed, chosen.tool or every)
    hunt.run(chosen.minutes)
    sys.stdout.write(hunt.table())
    sys.exit(bool(hunt.faults()))


if __name__ == "__main__":
    main()
