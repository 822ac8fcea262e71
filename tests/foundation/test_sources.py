"""What the package never does, read in its sources: run what data name, share a random state."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import infoflow_lens

ROOT = Path(infoflow_lens.__file__).resolve().parent.parent
FOLDERS = ("infoflow_lens", "hooks", "tasks")

# What can run code that data name, and where it may stand nevertheless.
UNSAFE = {
    "torch.load": {
        "infoflow_lens/probing/data.py": "data of users, with weights_only=True: tensors alone",
    },
    "torch.save": {},
    "pickle": {},
    "cPickle": {},
    "cloudpickle": {},
    "dill": {},
    "joblib.load": {},
    "joblib.dump": {},
    "shelve": {},
    "marshal": {},
    "yaml": {},
    "eval": {},
    "exec": {},
    "compile": {},
    "__import__": {},
    "subprocess": {},
    "os.system": {},
    "torch.jit.load": {},
    "torch.hub": {},
    "all_gather_object": {},
    "broadcast_object_list": {},
    "gather_object": {},
    "scatter_object_list": {},
    "runpy": {},
    "np.load": {"infoflow_lens/probing/data.py": "with allow_pickle=False"},
    "import_module": {
        "infoflow_lens/__init__.py": "the public names, from a table in the file",
        "infoflow_lens/foundation/extras.py": "packages that the callers name in the source",
        "infoflow_lens/probing/registry.py": "parts of ours, from a table in the file",
        "infoflow_lens/models/hooked.py": "transformer_lens, which two versions arrange otherwise",
        "infoflow_lens/models/loading.py": "transformer_lens, as before",
        "tasks/registry.py": "tasks of ours, from a table in the file",
    },
    "trust_remote_code": {},
}
# What moves a random state that others share.
GLOBAL_RANDOM = (
    "torch.manual_seed",
    "torch.seed",
    "torch.random.manual_seed",
    "torch.random.fork_rng",
    "torch.set_rng_state",
    "torch.cuda.manual_seed",
    "torch.cuda.manual_seed_all",
    "torch.default_generator",
    "random.seed",
    "random.random",
    "np.random.seed",
    "numpy.random.seed",
    "np.random.rand",
    "np.random.randn",
    "np.random.randint",
    "np.random.permutation",
    "np.random.shuffle",
    "transformers.set_seed",
)
DRAWS = ("rand", "randn", "randint", "randperm", "normal", "multinomial", "bernoulli")


@cache
def sources() -> tuple[tuple[str, ast.Module], ...]:
    return tuple(_parsed())


@cache
def names() -> tuple[tuple[str, str], ...]:
    """(file, name) of everything that is named."""
    return tuple({(where, name) for where, tree in sources() for name, _ in named(tree)})


def _parsed() -> Iterator[tuple[str, ast.Module]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            where = path.relative_to(ROOT).as_posix()
            if where.startswith(("infoflow_lens/hooks/", "infoflow_lens/tasks/")):
                continue  # links to the folders at the top
            yield where, ast.parse(path.read_text(encoding="utf-8"))


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def named(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Everything that a module names: imports, attributes, calls, keywords."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node
        elif isinstance(node, (ast.Attribute, ast.Name)):
            yield dotted(node), node
        elif isinstance(node, ast.keyword):
            yield node.arg or "", node


def matches(name: str, unsafe: str) -> bool:
    if "." not in unsafe and unsafe in ("eval", "exec", "compile", "__import__"):
        return name == unsafe
    if name.startswith("safetensors."):  # whose functions have the same names
        return False
    return name == unsafe or name.startswith(f"{unsafe}.") or name.endswith(f".{unsafe}")


def test_the_walk_sees_all_rooms():
    found = [where for where, _ in sources()]
    assert len(found) > 100
    for room in ("infoflow_lens/foundation/", "infoflow_lens/probing/", "hooks/", "tasks/"):
        assert any(where.startswith(room) for where in found)


@pytest.mark.parametrize("unsafe", UNSAFE)
def test_nothing_runs_what_data_name(unsafe):
    allowed = UNSAFE[unsafe]
    places = {where for where, name in names() if matches(name, unsafe)}
    assert places == set(allowed), f"{unsafe} in {sorted(places ^ set(allowed))}"


def test_what_is_allowed_is_told_to_refuse_callables():
    calls = [
        node
        for _, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and dotted(node.func) in ("torch.load", "np.load")
    ]
    assert len(calls) == 2
    for call in calls:
        told = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        assert {"weights_only": True}.items() <= told.items() or told.get("allow_pickle") is False


@pytest.mark.parametrize("name", GLOBAL_RANDOM)
def test_nothing_moves_the_global_random_state(name):
    places = [where for where, named in names() if named == name]
    assert places == []


def test_every_draw_has_a_generator():
    bare = []
    for where, tree in sources():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            module, name = dotted(node.func.value), node.func.attr
            if module == "torch" and name in DRAWS:
                given = {keyword.arg for keyword in node.keywords}
                if "generator" not in given:
                    bare.append(f"{where}:{node.lineno}")
    assert bare == []
