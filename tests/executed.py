"""Which tests execute which statements.

Modules are loaded from changed trees, in which each statement notes its line. One process imports
the libraries and none of our modules; each file of tests runs in a fork of it.
"""

import ast
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import sysconfig
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

MEMORY = 6 * 2**30  # bytes that a fork may add to those of the process it comes from
_EXECUTED = "_executed_lines_"
_DIGITS = bytes.maketrans(b"\0\1", b"01")


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def marked(tree: ast.Module) -> ast.Module:
    """The tree with a statement before each statement that notes its line."""

    def note(line: int) -> ast.stmt:
        return ast.parse(f"{_EXECUTED}[{line}] = 1").body[0]

    for node in list(ast.walk(tree)):
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if not isinstance(statements, list):
                continue
            with_notes: list[ast.stmt] = []
            for place, child in enumerate(statements):
                first = place == 0 and is_text(child)
                future = isinstance(child, ast.ImportFrom) and child.module == "__future__"
                with_notes += [child] if first or future else [note(child.lineno), child]
            setattr(node, field, with_notes)
    return ast.fix_missing_locations(tree)


class _Loader(SourceFileLoader):
    """Loads a module from a changed tree."""

    def __init__(self, name: str, path: str, change: Callable[[ast.Module], ast.Module]) -> None:
        super().__init__(name, path)
        self.change = change

    def get_code(self, fullname: str) -> Any:
        tree = ast.parse(Path(self.path).read_text("utf-8"))
        return compile(self.change(tree), self.path, "exec")


class Changes:
    """An import hook: the modules of some files are loaded from changed trees.

    Files are known by their real paths, as hooks/ and tasks/ are linked into the package.
    """

    def __init__(self, of_files: Mapping[str, Callable[[ast.Module], ast.Module]]) -> None:
        self.of_files = {os.path.realpath(file): change for file, change in of_files.items()}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin is None:
            return None
        change = self.of_files.get(os.path.realpath(spec.origin))
        if change is None:
            return None
        spec.loader = _Loader(name, spec.origin, change)
        return spec


class Recorder:
    """A plugin of pytest: the statements that each test executes, and how long it takes."""

    def __init__(self, files: Iterable[str]) -> None:
        self.executed = {
            file: bytearray(Path(file).read_bytes().count(b"\n") + 2) for file in files
        }
        self.tests: dict[str, dict[str, Any]] = {}
        self.collected: dict[str, str] = {}
        self.failed: set[str] = set()

    def mark(self, file: str) -> Callable[[ast.Module], ast.Module]:
        import builtins

        name = f"{_EXECUTED}{list(self.executed).index(file)}"
        setattr(builtins, name, self.executed[file])  # seen from everywhere, in no module

        def change(tree: ast.Module) -> ast.Module:
            for node in ast.walk(marked(tree)):
                if isinstance(node, ast.Name) and node.id == _EXECUTED:
                    node.id = name
            return tree

        return change

    def lines(self) -> dict[str, str]:
        """The lines executed since the last call, a hexadecimal number with a bit for each."""
        found = {}
        for file, executed in self.executed.items():
            if any(executed):
                found[file] = f"{int(executed[::-1].translate(_DIGITS), 2):x}"
                executed[:] = bytes(len(executed))
        return found

    def pytest_collection_finish(self) -> None:
        self.collected = self.lines()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        seconds = time.perf_counter() - begun
        self.tests[item.nodeid] = {"seconds": round(seconds, 4), "lines": self.lines()}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)


def run_pytest(paths: Sequence[str], plugin: object, scratch: Path, slow: bool) -> int:
    import hypothesis.configuration

    hypothesis.configuration.set_hypothesis_home_dir(scratch)  # one mutant's examples alone
    tempfile.tempdir = str(scratch)
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-seed=0",
               "-W", "ignore::pytest.PytestAssertRewriteWarning",
               f"--basetemp={scratch / 'pytest'}"]  # fmt: skip
    if isinstance(plugin, Recorder):
        options.remove("-x")
    if slow:
        options += ["-m", "not acceptance"]
    return int(pytest.main([*options, *paths], plugins=[plugin]))


def forked(
    work: Iterable[tuple[Any, Callable[[Path], Any]]], jobs: int
) -> Iterator[tuple[Any, int, Any, float]]:
    """Call each function in a fork of this process.

    Yields:
        Its key, how the process ended (0, or the negative number of a signal), what it returned,
        which goes through JSON, or what it printed last if it did not return, and seconds.
    """
    waiting, running = iter(work), {}
    home = Path(tempfile.mkdtemp(prefix="mutants"))
    try:
        while True:
            while len(running) < jobs and (task := next(waiting, None)) is not None:
                key, function = task
                scratch = Path(tempfile.mkdtemp(dir=home))
                pid = os.fork()
                if pid == 0:
                    _child(function, scratch)
                running[pid] = key, scratch, time.monotonic()
            if not running:
                return
            pid, status = os.wait()
            key, scratch, begun = running.pop(pid)
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # what it started
            answer = scratch / "answer.json"
            if answer.exists():
                found, libraries = json.loads(answer.read_text())
                for name in libraries:
                    with suppress(Exception):  # the next fork need not load it
                        importlib.import_module(name)
            else:
                found = (scratch / "output").read_text("utf-8", "replace")[-2000:]
            shutil.rmtree(scratch, ignore_errors=True)
            yield key, os.waitstatus_to_exitcode(status), found, time.monotonic() - begun
    finally:
        for pid in running:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        shutil.rmtree(home, ignore_errors=True)


def _child(function: Callable[[Path], Any], scratch: Path) -> None:
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        with (scratch / "output").open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        before = {*sys.modules}
        found = function(scratch)
        libraries = [
            name
            for name, module in sys.modules.items()
            if name not in before
            and (getattr(module, "__file__", None) or "").startswith(sysconfig.get_path("purelib"))
        ]
        unfinished = scratch / "unfinished"
        unfinished.write_text(json.dumps([found, libraries]))
        unfinished.rename(scratch / "answer.json")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def record_tests(modules: Sequence[str], path: str, slow: bool, scratch: Path) -> dict[str, Any]:
    """Run a file of tests, and note the statements of modules that each test executes."""
    recorder = Recorder(modules)
    sys.meta_path.insert(0, Changes({file: recorder.mark(file) for file in recorder.executed}))
    run_pytest([path], recorder, scratch, slow)
    return {"collected": recorder.collected, "tests": recorder.tests,
            "failed": sorted(recorder.failed)}  # fmt: skip


def in_turns(tests: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Tests in order: each function once before any comes with its next parameters, short first."""
    turns, order = Counter[str](), []
    for name, seconds in sorted(tests, key=lambda test: (test[1], test[0])):
        function = name.split("[")[0]
        order.append((turns[function], seconds, name))
        turns[function] += 1
    return [(name, seconds) for _, seconds, name in sorted(order)]


@cache
def read_records(folder: Path) -> list[dict[str, Any]]:
    """What was measured, a file of tests an entry."""
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


def is_hit(lines: Mapping[str, str], file: str, line: int) -> bool:
    """Whether a statement of a file is among executed ones."""
    return file in lines and bool(int(lines[file], 16) >> line & 1)


def python_files(folder: str) -> list[str]:
    """The modules in a folder, or the one that is named."""
    path = Path(folder)
    return [path.as_posix()] if path.is_file() else sorted(p.as_posix() for p in path.rglob("*.py"))


def rooms_of(package: str) -> list[str]:
    """The folders of a package, where links lead, and its modules."""
    inside = [
        path
        for path in sorted(Path(package).iterdir())
        if python_files(path.as_posix()) and (path.is_dir() or path.suffix == ".py")
    ]
    found = [path.resolve().relative_to(Path.cwd()) for path in inside]
    return [path.as_posix() for path in found if path.name != "__init__.py"]
