"""How many small faults put into the code do its tests find?

``python -m tests.mutants --seed 1 --n 200 --out FOLDER`` changes one expression or statement at a
time (a mutant), runs the tests that execute it, and counts the mutants that some test
fails on. It writes one line of JSON for each mutant and goes on where it was stopped; the table
stands at the end, and in FOLDER. No file outside of FOLDER changes.

One process imports the libraries and none of our modules; each mutant is a fork of it, in which an
import hook gives the changed module. Which tests execute which statement is measured first, once
for each test file, and kept in FOLDER.
"""

import argparse
import ast
import copy
import hashlib
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import sysconfig
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

from tests.processes import LIBRARIES

# A test may take 5 times its usual time, and a minute for fixtures that it shared when measured.
SLOWER, SPARE = 5, 60
MEMORY = 6 * 2**30  # bytes that a mutant may add to those of the process it is forked from
_EXECUTED = "_executed_lines_"
_DIGITS = bytes.maketrans(b"\0\1", b"01")

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.MatMult: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}


@dataclass
class Mutation:
    """One node of a tree, replaced.

    Attributes:
        operator: the kind of change.
        line: where the node begins.
        statement: the line of the statement whose execution executes the node.
        parent, field, index: where the node hangs; index is None where it is no list.
        old, new: the node, and what replaces it.
    """

    operator: str
    line: int
    statement: int
    parent: ast.AST
    field: str
    index: int | None
    old: ast.AST
    new: ast.AST

    def apply(self) -> None:
        ast.copy_location(self.new, self.old)
        if self.index is None:
            setattr(self.parent, self.field, self.new)
        else:
            getattr(self.parent, self.field)[self.index] = self.new

    def __str__(self) -> str:
        old, new = ((ast.unparse(node).splitlines() or [""])[0] for node in (self.old, self.new))
        return f"{old}  ->  {new}"


def _changed(node: ast.AST, **fields: Any) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _negated(test: ast.expr) -> ast.expr | None:
    """The opposite of a condition; None where a change of its operator says the same."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return None
    if isinstance(test, ast.Compare) and len(test.ops) == len(COMPARISONS[type(test.ops[0])]) == 1:
        return None
    return ast.UnaryOp(ast.Not(), test)


def _replacements(node: ast.AST, modules: set[str]) -> Iterator[tuple[str, ast.AST]]:
    """What may stand in the place of a node, with the kind of change."""
    match node:
        case ast.Compare():
            for place, operator in enumerate(node.ops):
                for other in COMPARISONS[type(operator)]:
                    ops = [*node.ops[:place], other(), *node.ops[place + 1 :]]
                    yield "comparison", _changed(node, ops=ops)
        case ast.BinOp():
            yield "arithmetic", _changed(node, op=ARITHMETIC[type(node.op)]())
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "boolean", _changed(node, op=other)
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert()):
            yield "boolean" if isinstance(node.op, ast.Not) else "arithmetic", node.operand
        case ast.Constant(value=bool()):
            yield "constant", ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield "constant", ast.Constant(node.value + 1)
        case ast.Constant(value=str()) if not any(map(str.isspace, node.value)):
            yield "constant", ast.Constant(f"XX{node.value}")  # prose has spaces
        case ast.If() | ast.While() | ast.IfExp():
            if (test := _negated(node.test)) is not None:
                yield "condition", _changed(node, test=test)
        case ast.comprehension():
            for place, condition in enumerate(node.ifs):
                if (test := _negated(condition)) is not None:
                    ifs = [*node.ifs[:place], test, *node.ifs[place + 1 :]]
                    yield "condition", _changed(node, ifs=ifs)
        case ast.Return(value=ast.expr()) if not _is_none(node.value):
            yield "return", ast.Return(ast.Constant(None))
        case ast.AugAssign():
            yield "arithmetic", _changed(node, op=ARITHMETIC[type(node.op)]())
            yield "removed", ast.Pass()
        case ast.Expr() | ast.Raise() | ast.Delete() | ast.Continue() | ast.Break():
            yield "removed", ast.Pass()
        case ast.Call(func=ast.Attribute(value=receiver)) if _is_value(receiver, modules):
            yield "method", receiver
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "removed", ast.Pass()


def _is_none(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_value(node: ast.expr, modules: set[str]) -> bool:
    """Whether a method is called on a value, not a function of a module, a class or self."""
    if isinstance(node, ast.Name):
        return node.id not in {*modules, "self", "cls"} and not node.id[0].isupper()
    return not isinstance(node, ast.Attribute) or _is_value(node.value, modules)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_skipped(node: ast.AST, parent: ast.AST, field: str) -> bool:
    """What no test of behaviour can be about, and what only people read."""
    if field in ("annotation", "returns", "decorator_list", "bases", "type_params"):
        return True
    match node:
        case ast.Import() | ast.ImportFrom() | ast.JoinedStr() | ast.Assert():
            return True
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
            return True
    if isinstance(parent, ast.Raise):  # the text of an error
        return True
    called = parent.func if isinstance(parent, ast.Call) else None
    name = getattr(called, "id", getattr(called, "attr", ""))
    return name in ("warn", "cast", "TypeVar") and node is not called


def mutations(tree: ast.AST) -> list[Mutation]:
    """All changes of one node, in the order of the tree."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {(name.asname or name.name).split(".")[0] for node in imports for name in node.names}
    return list(_walk(tree, 0, modules))


def _walk(node: ast.AST, statement: int, modules: set[str]) -> Iterator[Mutation]:
    for field, value in ast.iter_fields(node):
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or _is_skipped(child, node, field):
                continue
            at = statement
            if isinstance(child, ast.stmt):
                at = child.lineno
            elif isinstance(child, ast.arguments):
                # a default is used when the function runs, not when it is defined
                body = node.body if isinstance(node, ast.FunctionDef) else []
                at = next((inner.lineno for inner in body if not _is_text(inner)), statement)
            if not _is_text(child):
                for operator, new in _replacements(child, modules):
                    if operator == "method" and isinstance(node, ast.Expr):
                        continue  # the same as removing the statement
                    line = getattr(child, "lineno", at)
                    yield Mutation(operator, line, at, node, field, index, child, new)
                yield from _walk(child, at, modules)


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
                first = place == 0 and _is_text(child)
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


class Chosen:
    """A plugin of pytest: only some tests, in a given order, each with a limit of time."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self.seconds = seconds
        self.ran = 0
        self.by, self.why = "", ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        found = {item.nodeid: item for item in items}
        items[:] = [found[name] for name in self.seconds if name in found]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        # by default, SIGALRM ends the process, also inside of a library's loop
        signal.setitimer(signal.ITIMER_REAL, SLOWER * self.seconds[item.nodeid] + SPARE)
        yield
        self.ran += 1
        signal.setitimer(signal.ITIMER_REAL, SLOWER * SPARE)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed(report)

    def _failed(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        crash = getattr(report.longrepr, "reprcrash", None)
        self.by = report.nodeid or "collection"
        self.why = (crash.message if crash else report.longreprtext[-200:])[:200]


def _pytest(paths: Sequence[str], plugin: object, scratch: Path, slow: bool) -> int:
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


@dataclass
class Guard:
    """The mutants of some rooms, and what the tests make of them.

    Attributes:
        rooms: folders of sources, or single modules.
        tests: the folder of the tests.
        out: where results are kept.
        seed: of the sample.
        budget: how many seconds of tests a mutant may take, by their usual time.
        jobs: how many processes at once.
        slow: whether the tests of ``make test SLOW=1`` are among them.
    """

    rooms: Sequence[str]
    tests: str
    out: Path
    seed: int
    budget: float
    jobs: int
    slow: bool

    def __post_init__(self) -> None:
        self.out = self.out.resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        about = {"rooms": [*self.rooms], "tests": self.tests, "seed": self.seed,
                 "budget": self.budget, "slow": self.slow, "code": self._digest()}  # fmt: skip
        path = self.out / "about.json"
        if path.exists() and json.loads(path.read_text()) != about:
            sys.exit(f"{self.out} holds mutants of other code or settings: name another folder")
        path.write_text(json.dumps(about, indent=1))

    def _digest(self) -> str:
        digest = hashlib.sha256(Path(__file__).read_bytes())
        for path in [*self._modules(), *python_files(self.tests)]:
            digest.update(path.encode() + Path(path).read_bytes())
        return digest.hexdigest()

    def _modules(self) -> list[str]:
        return [path for room in self.rooms for path in python_files(room)]

    def measure(self) -> None:
        """Find which tests execute which statements, a file of tests at a time."""
        work, modules = [], self._modules()
        (self.out / "executed").mkdir(exist_ok=True)
        for path in python_files(self.tests):
            kept = self.out / "executed" / f"{path.replace('/', '.')}.json"
            if Path(path).name.startswith("test_") and not kept.exists():
                work.append(((path, kept), partial(_record, modules, path, self.slow)))
        for (path, kept), status, found, seconds in forked(work, self.jobs):
            if isinstance(found, str):
                sys.exit(f"{path} ends with status {status} where nothing is changed: {found}")
            kept.write_text(json.dumps(found))
            failed = f", {len(found['failed'])} FAILED" if found["failed"] else ""
            say(f"{path}: {len(found['tests'])} tests in {seconds:.0f} s{failed}")

    def sample(self) -> Iterator[tuple[int, str, str, int]]:
        """All mutants in random order: number, room, file, and which of the file's mutations.

        Each line that can be changed is there once, with one change. Any number of mutants from
        the beginning is a fair sample, to which each room gives its share of such lines.
        """
        drawn = random.Random(self.seed)
        order = []
        for room in self.rooms:
            lines = defaultdict(list)
            for file in python_files(room):
                for number, mutation in enumerate(mutations(_parsed(file))):
                    lines[file, mutation.line].append(number)
            places = sorted(lines)
            drawn.shuffle(places)
            offset = drawn.random()
            for place, key in enumerate(places):
                number = drawn.choice(lines[key])
                order.append(((place + offset) / len(places), room, key[0], number))
        for number, (_, *mutant) in enumerate(sorted(order)):
            yield (number, *mutant)

    def tests_of(self, file: str, statement: int) -> dict[str, float]:
        """The tests for a statement, in order, each with its usual time, within the budget.

        First those that execute it, then those that execute other statements of its module, of
        the test files that execute it at all: there it may run in what is kept between tests, or
        when modules are loaded. Each test function comes once before any comes with its next
        parameters, the shortest first.
        """
        direct, near = [], []
        for of_file in _executed(self.out / "executed"):
            tests = {n: t for n, t in of_file["tests"].items() if n not in of_file["failed"]}
            hits = [n for n, test in tests.items() if _hit(test["lines"], file, statement)]
            direct += [(n, tests[n]["seconds"]) for n in hits]
            if hits or _hit(of_file["collected"], file, statement):
                touching = {n for n, test in tests.items() if file in test["lines"]} - {*hits}
                near += [(n, tests[n]["seconds"]) for n in touching]
        chosen: dict[str, float] = {}
        for name, seconds in [*_in_turns(direct), *_in_turns(near)]:
            if not chosen or sum(chosen.values()) + seconds <= self.budget:
                chosen[name] = seconds
        return chosen

    def run(self, n: int) -> list[dict[str, Any]]:
        """The outcomes of the first `n` mutants, those of earlier calls included."""
        path = self.out / "mutants.jsonl"
        done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        numbers = {row["number"] for row in done}
        work = []
        for number, room, file, which in self.sample():
            if number < n and number not in numbers:
                mutation = mutations(_parsed(file))[which]
                tests = self.tests_of(file, mutation.statement)
                row = {"number": number, "room": room, "file": file, "line": mutation.line,
                       "operator": mutation.operator, "change": str(mutation),
                       "chosen": len(tests)}  # fmt: skip
                work.append((row, partial(_try, file, which, tests, self.slow)))
        with path.open("a") as lines, suppress(KeyboardInterrupt):
            for row, status, found, seconds in forked(work, self.jobs):
                row |= _outcome(status, found) | {"seconds": round(seconds, 1)}
                done.append(row)
                lines.write(json.dumps(row) + "\n")
                lines.flush()
                ran = f"{row['ran']} of {row['chosen']} tests, {seconds:.0f} s"
                place = f"{row['file']}:{row['line']}"
                say(f"{row['number']}: {place} {row['outcome']} ({ran}) {row['change']}")
        return [row for row in done if row["number"] < n]


def _in_turns(tests: list[tuple[str, float]]) -> list[tuple[str, float]]:
    turns, order = Counter[str](), []
    for name, seconds in sorted(tests, key=lambda test: (test[1], test[0])):
        function = name.split("[")[0]
        order.append((turns[function], seconds, name))
        turns[function] += 1
    return [(name, seconds) for _, seconds, name in sorted(order)]


@cache
def _executed(folder: Path) -> list[dict[str, Any]]:
    """What was measured, a file of tests an entry."""
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


def _hit(lines: Mapping[str, str], file: str, line: int) -> bool:
    return file in lines and bool(int(lines[file], 16) >> line & 1)


def _outcome(status: int, found: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(found, str):
        outcome = "timeout" if status == -signal.SIGALRM else "killed"
        return {"outcome": outcome, "ran": 0, "by": f"status {status}", "why": found[-200:]}
    return found


@cache
def _parsed(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text("utf-8"))


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


def _record(modules: Sequence[str], path: str, slow: bool, scratch: Path) -> dict[str, Any]:
    recorder = Recorder(modules)
    sys.meta_path.insert(0, Changes({file: recorder.mark(file) for file in recorder.executed}))
    _pytest([path], recorder, scratch, slow)
    return {"collected": recorder.collected, "tests": recorder.tests,
            "failed": sorted(recorder.failed)}  # fmt: skip


def _try(
    file: str, which: int, tests: Mapping[str, float], slow: bool, scratch: Path
) -> dict[str, Any]:
    if not tests:
        return {"outcome": "survived", "ran": 0, "by": "", "why": "no test executes it"}

    def change(tree: ast.Module) -> ast.Module:
        mutations(tree)[which].apply()
        return ast.fix_missing_locations(tree)

    sys.meta_path.insert(0, Changes({file: change}))
    plugin = Chosen(tests)
    signal.setitimer(signal.ITIMER_REAL, SLOWER * SPARE)  # loading modules may not end, either
    status = _pytest(list(dict.fromkeys(n.split("::")[0] for n in tests)), plugin, scratch, slow)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return {"outcome": "survived" if status == 0 else "killed", "ran": plugin.ran,
            "by": plugin.by or ("" if status == 0 else f"pytest's status {status}"),
            "why": plugin.why}  # fmt: skip


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """What became of the mutants, by room and by the kind of change."""
    from scipy.stats import binomtest

    lines = [f"{'':22} mutants  killed  of these timeouts  survived  not executed   share (95%)"]
    groups = [
        ("all", list(rows)),
        *((f"{g}", [r for r in rows if r[by] == g])
          for by in ("room", "operator") for g in sorted({r[by] for r in rows})),
    ]  # fmt: skip
    for name, group in groups:
        if not group:
            continue
        outcomes = Counter(row["outcome"] for row in group)
        killed = len(group) - outcomes["survived"]
        low, high = binomtest(killed, len(group)).proportion_ci(method="wilson")
        unseen = sum(row["chosen"] == 0 for row in group)
        lines.append(
            f"{name:22} {len(group):7} {killed:7} {outcomes['timeout']:18} "
            f"{outcomes['survived']:9} {unseen:13}   "
            f"{killed / len(group):.3f} ({low:.3f} to {high:.3f})"
        )
    return "\n".join(lines) + "\n"


def survivors(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each mutant on which no test fails."""
    kept = [row for row in rows if row["outcome"] == "survived"]
    return "".join(
        f"{row['file']}:{row['line']}  {row['operator']}  {row['change']}"
        f"  ({row['ran']} tests ran)\n"
        for row in sorted(kept, key=lambda row: (row["file"], row["line"]))
    )


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """Try mutants and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=30, help="seconds of tests for a mutant")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--slow", action="store_true", help="also the tests of make test SLOW=1")
    parser.add_argument("--package", default="infoflow_lens")
    parser.add_argument("--tests", default="tests")
    parser.add_argument("--room", action="append", help="a folder or module, instead of all")
    chosen = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # ends the forks, and prints the table
        signal.signal(number, signal.default_int_handler)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    rooms = chosen.room or rooms_of(chosen.package)
    sys.path.insert(0, os.getcwd())
    for name in (*LIBRARIES, "hypothesis", "sklearn.linear_model"):
        importlib.import_module(name)
    loaded = [name for name in sys.modules if name.split(".")[0] == chosen.package]
    assert not loaded, loaded
    guard = Guard(
        rooms, chosen.tests, chosen.out, chosen.seed, chosen.budget, chosen.jobs, chosen.slow
    )
    guard.measure()
    rows = guard.run(chosen.n)
    (guard.out / "survivors.txt").write_text(survivors(rows))
    (guard.out / "table.txt").write_text(table(rows))
    say(table(rows))


if __name__ == "__main__":
    main()
