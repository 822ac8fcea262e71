"""What a change needs before it is committed, in about three minutes: `make check`.

Style, imports and types of everything, and of the tests those that execute a changed statement,
each test function once before any comes with its next parameters, within ``--seconds``. What is
left out is said. The change is what differs from the last commit; where nothing does, that commit.

Which tests execute which statements is recorded once (minutes), in ``build/executed``, and anew for
files of tests that have changed, each time that all is well. Statements of the recorded sources
stand for those of today's: lines that no longer are as they were, and those around new ones.
"""

import argparse
import ast
import difflib
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from tests.executed import forked, in_turns, is_hit, is_text, python_files, record_tests, rooms_of
from tests.processes import LIBRARIES

TABLE = Path("build/executed")
CHECKS = {
    "style": ["ruff", "check", "."],
    "format": ["ruff", "format", "--check", "."],
    "imports": ["lint-imports", "--no-cache"],
    "types": ["mypy", "-p", "infoflow_lens"],
}


class Table:
    """Which tests execute which statements, a record for each file of tests."""

    def __init__(self, folder: Path, package: str = "infoflow_lens", tests: str = "tests") -> None:
        self.folder, self.package, self.tests = folder, package, tests
        (folder / "sources").mkdir(parents=True, exist_ok=True)

    def record_of(self, path: str) -> dict[str, Any] | None:
        """What was recorded of a file of tests as it is now; None if nothing was."""
        place = self._place(path)
        if not place.exists():
            return None
        found: dict[str, Any] = json.loads(place.read_text())
        return found if found["digest"] == _digest(path) else None

    def stale(self) -> list[str]:
        """The files of tests of which there is no record as they are."""
        paths = [p for p in python_files(self.tests) if Path(p).name.startswith("test_")]
        return [path for path in paths if self.record_of(path) is None]

    def record(self, paths: Iterable[str], jobs: int = 2) -> Iterator[str]:
        """Run files of tests, and keep what they execute; the names of those that do not run."""
        modules = [path for room in rooms_of(self.package) for path in python_files(room)]
        sources = {path: _digest(path) for path in modules}
        for path, digest in sources.items():
            kept = self.folder / "sources" / digest
            if not kept.exists():
                kept.write_bytes(Path(path).read_bytes())
        work = [(path, partial(record_tests, modules, path, False)) for path in paths]
        for path, status, found, seconds in forked(work, jobs):
            if isinstance(found, str):
                yield f"{path} (status {status}): {found[-300:]}"
                continue
            lines = [found["collected"], *(test["lines"] for test in found["tests"].values())]
            used = {file for each in lines for file in each}
            found["digest"] = _digest(path)
            found["sources"] = {file: sources[file] for file in sorted(used)}
            self._place(path).write_text(json.dumps(found))
            say(f"  recorded {path}: {len(found['tests'])} tests, {seconds:.0f} s")

    def tests_of(self, changed: Iterable[str]) -> dict[str, float]:
        """The tests that execute what has changed in modules, in order, with their usual seconds.

        Of a statement that runs when its module is loaded, all tests that execute the module.
        """
        direct: dict[str, float] = {}
        near: dict[str, float] = {}
        modules = [path for path in changed if Path(path).exists()]
        for path in python_files(self.tests):
            record = self.record_of(path) if Path(path).name.startswith("test_") else None
            for file in modules if record else ():
                if file not in record["sources"]:
                    continue
                old = (self.folder / "sources" / record["sources"][file]).read_text("utf-8")
                inside, outside = changed_statements(old, Path(file).read_text("utf-8"))
                executed = [record["collected"], *(t["lines"] for t in record["tests"].values())]
                loads = any(is_hit(lines, file, at) for lines in executed for at in outside)
                for name, test in record["tests"].items():
                    if any(is_hit(test["lines"], file, line) for line in inside):
                        direct[name] = test["seconds"]
                    elif loads and file in test["lines"]:
                        near[name] = test["seconds"]
        near = {name: seconds for name, seconds in near.items() if name not in direct}
        return dict([*in_turns([*direct.items()]), *in_turns([*near.items()])])

    def _place(self, path: str) -> Path:
        return self.folder / f"{path.replace('/', '.')}.json"


@cache
def changed_statements(old: str, new: str) -> tuple[frozenset[int], frozenset[int]]:
    """First lines of the old statements that have changed: inside functions, and outside of them.

    Of a function whose head has changed, the first statement inside counts.
    """
    before, after = old.splitlines(), new.splitlines()
    lines: set[int] = set()
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for kind, first, last, _, _ in matcher.get_opcodes():
        if kind == "insert":
            lines |= {first, first + 1}  # of the statements around it
        elif kind != "equal":
            lines |= set(range(first + 1, last + 1))
    inside, outside = set(), set()

    def visit(node: ast.AST, in_function: bool) -> None:
        for child in ast.iter_child_nodes(node):
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            if isinstance(child, ast.stmt) and not is_text(child):
                below = [n for n in ast.iter_child_nodes(child) if isinstance(n, ast.stmt)]
                end = below[0].lineno - 1 if below else child.end_lineno or child.lineno
                decorators = getattr(child, "decorator_list", ())
                begin = min([child.lineno, *(each.lineno for each in decorators)])
                if any(line in lines for line in range(begin, end + 1)):
                    (inside if in_function else outside).add(child.lineno)
                    if is_function:
                        inside.add(next((n.lineno for n in below if not is_text(n)), child.lineno))
            visit(child, in_function or is_function)

    visit(ast.parse(old), False)
    return frozenset(inside), frozenset(outside)


def changed_files() -> list[str]:
    """Files that differ from the last commit, or if none does, those that it changed."""

    def ask(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    own = ask("ls-files", "--others", "--exclude-standard")
    return [*ask("diff", "--name-only", "HEAD"), *own] or ask("diff", "--name-only", "HEAD~1")


def whole_files(changed: Iterable[str], stale: Iterable[str]) -> list[str]:
    """Files and folders of tests that run whole: those that have changed, and those of the room of
    files that are no modules, such as pages and scripts.
    """
    found = {path for path in stale if Path(path).exists()}
    for path in changed:
        name = Path(path)
        if name.name.startswith("test_") and name.suffix == ".py" and name.exists():
            found.add(path)
        elif name.suffix != ".py":
            room = next(part for part in name.parts if part != "infoflow_lens")
            found |= {f"tests/{room}"} if Path(f"tests/{room}").is_dir() else {"tests/docs"}
    return sorted(path for path in found if found.isdisjoint(map(str, Path(path).parents)))


def run_checks() -> bool:
    """Run what reads the code without running it; whether all of it passes."""
    passed = True
    for name, command in CHECKS.items():
        begun = time.monotonic()
        path = str(Path(sys.executable).parent / command[0])
        done = subprocess.run([path, *command[1:]], capture_output=True, text=True)
        outcome = "FAILED" if done.returncode else "ok"
        say(f"{name}: {outcome}, {time.monotonic() - begun:.0f} s")
        if done.returncode:
            say(done.stdout + done.stderr)
            passed = False
    return passed


def run_tests(names: Iterable[str]) -> bool:
    """Run tests and files of tests by name; whether they pass."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(names))
        file.flush()
        command = [sys.executable, "-m", "pytest", "-q", f"@{file.name}"]
        return subprocess.run(command).returncode in (0, 5)  # 5: all of them are marked slow


def choose(chosen: Mapping[str, float], seconds: float) -> tuple[list[str], list[str]]:
    """The tests that fit into the time, in order, and those that do not."""
    taken, left, used = [], [], 0.0
    for name, usual in chosen.items():
        fits = used + usual <= seconds
        (taken if fits else left).append(name)
        used += usual if fits else 0
    return taken, left


def main() -> None:
    """Check a change."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=150, help="of tests, of both processes")
    settings = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    passed, changed = run_checks(), changed_files()
    table = Table(TABLE)
    missing = [path for path in table.stale() if not table._place(path).exists()]
    if len(missing) > 20:  # a first time
        say("recording which tests execute what: once, as long as the tests take (make test)")
        import_libraries()
        for path in table.record(missing):
            say(f"  {path}")
    stale = table.stale()
    whole = whole_files(changed, stale)
    names = table.tests_of(path for path in changed if path.endswith(".py"))
    names = {name: s for name, s in names.items() if not any(name.startswith(w) for w in whole)}
    taken, left = choose(names, settings.seconds)
    say(f"tests: {len(taken)} of {len(names)} that execute the change, and {whole or 'no files'}")
    if whole or taken:
        passed = run_tests([*whole, *taken]) and passed
    if left:
        files = Counter(name.split("::")[0] for name in left)
        said = ", ".join(f"{path} ({n})" for path, n in files.most_common(12))
        usual = sum(names[name] for name in left)
        say(f"left out: {len(left)} tests, {usual:.0f} s ({said}); make test runs them")
    if passed and stale:
        import_libraries()
        for path in table.record(stale):
            say(f"  {path}")
    say("passed" if passed else "FAILED")
    sys.exit(not passed)


def import_libraries() -> None:
    """Import what every fork needs, and none of our modules."""
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, os.getcwd())
    for name in (*LIBRARIES, "hypothesis", "sklearn.linear_model"):
        importlib.import_module(name)


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
