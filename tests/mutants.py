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
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from tests.executed import (
    Changes,
    forked,
    in_turns,
    is_hit,
    is_text,
    python_files,
    read_records,
    record_tests,
    rooms_of,
    run_pytest,
)
from tests.processes import LIBRARIES

# A test may take 5 times its usual time, and a minute for fixtures that it shared when measured.
SLOWER, SPARE = 5, 60

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
                at = next((inner.lineno for inner in body if not is_text(inner)), statement)
            if not is_text(child):
                for operator, new in _replacements(child, modules):
                    if operator == "method" and isinstance(node, ast.Expr):
                        continue  # the same as removing the statement
                    line = getattr(child, "lineno", at)
                    yield Mutation(operator, line, at, node, field, index, child, new)
                yield from _walk(child, at, modules)


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
        slow: whether the tests of ``make test SLOW=all`` are among them.
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
                work.append(((path, kept), partial(record_tests, modules, path, self.slow)))
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
        for of_file in read_records(self.out / "executed"):
            tests = {n: t for n, t in of_file["tests"].items() if n not in of_file["failed"]}
            hits = [n for n, test in tests.items() if is_hit(test["lines"], file, statement)]
            direct += [(n, tests[n]["seconds"]) for n in hits]
            if hits or is_hit(of_file["collected"], file, statement):
                touching = {n for n, test in tests.items() if file in test["lines"]} - {*hits}
                near += [(n, tests[n]["seconds"]) for n in touching]
        chosen: dict[str, float] = {}
        for name, seconds in [*in_turns(direct), *in_turns(near)]:
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


def _outcome(status: int, found: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(found, str):
        outcome = "timeout" if status == -signal.SIGALRM else "killed"
        return {"outcome": outcome, "ran": 0, "by": f"status {status}", "why": found[-200:]}
    return found


@cache
def _parsed(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text("utf-8"))


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
    status = run_pytest(list(dict.fromkeys(n.split("::")[0] for n in tests)), plugin, scratch, slow)
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
    parser.add_argument("--slow", action="store_true", help="also the tests of make test SLOW=all")
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
