"""What the package never does, read in its sources: run what data name, share a random state."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import infoflow_lens
from infoflow_lens.studies.pages import TEMPLATES

ROOT = Path(infoflow_lens.__file__).resolve().parent.parent
FOLDERS = ("infoflow_lens", "hooks", "studies", "tasks")

# Modules that evaluate text, load code or start programs, and the places that may import them.
# What is neither here nor in HARMLESS is not imported at all: it is put into one of them first.
EVALUATES = {
    "datasets": {
        "infoflow_lens/foundation/lazy.py": "for those that name it there",
        "infoflow_lens/foundation/progress.py": "its bars",
        "infoflow_lens/objectives.py": "datasets that the package makes",
        "infoflow_lens/probing/data.py": "files, and the hub where the user named it",
        "tasks/task.py": "datasets that the package makes",
        "tasks/tokens.py": "datasets that the package makes",
    },
    "distributed": {"infoflow_lens/runs/executor.py": "a cluster that the user named"},
    "importlib": {
        "infoflow_lens/__init__.py": "the public names, from a table in the file",
        "infoflow_lens/cli.py": "the commands of studies, where they are installed",
        "studies/__init__.py": "the public names, from a table in the file",
        "studies/language_model/training.py": "the version of a package",
        "infoflow_lens/foundation/lazy.py": "three libraries, named in the file",
        "infoflow_lens/foundation/packages.py": "versions, entry points, and packages that the "
        "callers name in the source",
        "infoflow_lens/models/hooked.py": "transformer_lens, which two versions arrange otherwise",
        "infoflow_lens/models/loading.py": "transformer_lens, as before",
        "infoflow_lens/probing/part.py": "parts of ours, from a table in the file",
        "infoflow_lens/report/assets.py": "files of the package",
        "hooks/model/points.py": "the module that opens models, from the source",
        "hooks/passes/ranking.py": "whether triton is installed",
        "tasks/registry.py": "a module or file that the user named as a task",
    },
    "jinja2": {
        "studies/pages.py": "templates of the package, in a sandbox",
        "infoflow_lens/report/assets.py": "templates of the package",
        "infoflow_lens/report/pages.py": "JSON for pages",
    },
    "joblib": {"infoflow_lens/runs/executor.py": "processes of this machine"},
    "pkgutil": {"infoflow_lens/__init__.py": "the modules of the package"},
    "transformer_lens": {
        "infoflow_lens/models/attention.py": "its modules",
        "infoflow_lens/models/blocks.py": "its modules",
        "infoflow_lens/models/hooked.py": "its modules",
        "infoflow_lens/models/host.py": "its activations",
        "infoflow_lens/models/loading.py": "official names",
        "infoflow_lens/models/named.py": "its modules",
        "infoflow_lens/models/named_cache.py": "its cache",
    },
    "transformers": {
        "hooks/answer/question.py": "a cache of keys and values",
        "studies/language_model/snapshots.py": "without remote code",
        "studies/language_model/graded_sets.py": "a model that is made here",
        "studies/language_model/measures.py": "a type",
        "studies/language_model/model.py": "a model that is made here",
        "infoflow_lens/foundation/progress.py": "its bars",
        "infoflow_lens/models/pretrained.py": "without remote code",
        "infoflow_lens/models/configs.py": "without remote code",
        "infoflow_lens/models/loading.py": "without remote code",
        "infoflow_lens/theory/shapes.py": "its own classes of configs, without remote code",
    },
}
# Modules that evaluate nothing that they read, but for what UNSAFE names.
HARMLESS = {
    *(
        "__future__",
        "abc",
        "annotated_types",
        "asyncio",
        "base64",
        "collections",
        "concurrent",
        "contextlib",
    ),
    *(
        "contextvars",
        "copy",
        "dataclasses",
        "difflib",
        "einops",
        "errno",
        "filelock",
        "fractions",
        "gguf",
        "gzip",
    ),
    *(
        "functools",
        "glob",
        "hashlib",
        "hmac",
        "html",
        "huggingface_hub",
        "inspect",
        "io",
        "itertools",
        "logging",
        "gzip",
    ),
    *(
        "jaxtyping",
        "json",
        "markupsafe",
        "math",
        "matplotlib",
        "mpl",
        "numbers",
        "numpy",
        "operator",
    ),
    *("os", "pandas", "pathlib", "pd", "platform", "pyarrow", "pydantic", "queue", "re", "reprlib"),
    *(
        "rich",
        "safetensors",
        "scipy",
        "secrets",
        "shlex",
        "shutil",
        "signal",
        "socket",
        "stat",
        "sys",
        "sysconfig",
        "tempfile",
    ),
    *("threading", "time", "tokenizers", "torch", "tqdm", "triton", "typer", "types", "typing"),
    *(
        "typing_extensions",
        "random",
        "traceback",
        "uuid",
        "warnings",
        "weakref",
        "zlib",
        "unicodedata",
        "urllib",
        "logging",
        "gzip",
    ),
}
# What of these, or of Python itself, runs what a text or a file says, and where it may stand.
UNSAFE = {
    "torch.load": {
        "infoflow_lens/probing/data.py": "data of users, with weights_only=True: tensors alone",
        "infoflow_lens/models/pretrained.py": "shapes of weights, with weights_only=True",
    },
    "torch.save": {},
    "joblib.load": {},
    "joblib.dump": {},
    "eval": {},
    "exec": {},
    "compile": {},
    "__import__": {},
    "os.system": {},
    "os.popen": {},
    "pandas.eval": {},
    "pd.eval": {},
    "read_pickle": {},
    "torch.jit.load": {},
    "torch.hub": {},
    "all_gather_object": {},
    "broadcast_object_list": {},
    "gather_object": {},
    "scatter_object_list": {},
    "np.load": {"infoflow_lens/probing/data.py": "with allow_pickle=False"},
    "exec_module": {"tasks/registry.py": "a file that the user named as a task"},
    "trust_remote_code": {
        "studies/language_model/snapshots.py": "False",
        "infoflow_lens/models/pretrained.py": "False",
        "infoflow_lens/models/configs.py": "False",
        "infoflow_lens/models/loading.py": "False",
        "infoflow_lens/models/adapters.py": "False",
    },
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
def nodes() -> tuple[tuple[str, ast.AST], ...]:
    """All imports, names, keywords and calls, each with its file."""
    kinds = (ast.Import, ast.ImportFrom, ast.Attribute, ast.Name, ast.keyword, ast.Call)
    return tuple(
        (where, node)
        for where, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, kinds)
    )


@cache
def names() -> dict[str, set[str]]:
    """The files that name something, by what is named."""
    found: dict[str, set[str]] = {}
    for where, node in nodes():
        for name in named(node):
            found.setdefault(name, set()).add(where)
    return found


@cache
def calls() -> tuple[tuple[str, ast.Call], ...]:
    return tuple((where, node) for where, node in nodes() if isinstance(node, ast.Call))


def _parsed() -> Iterator[tuple[str, ast.Module]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            where = path.relative_to(ROOT).as_posix()
            if where.startswith(tuple(f"infoflow_lens/{room}/" for room in FOLDERS[1:])):
                continue  # links to the folders at the top
            yield where, ast.parse(path.read_text(encoding="utf-8"))


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def named(node: ast.AST) -> Iterator[str]:
    """What a part of a module names: of imports, attributes, calls, keywords."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, (ast.Attribute, ast.Name)):
        yield dotted(node)
    elif isinstance(node, ast.keyword):
        yield node.arg or ""


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
    places = set().union(*(places for name, places in names().items() if matches(name, unsafe)))
    assert places == set(allowed), f"{unsafe} in {sorted(places ^ set(allowed))}"


def imported() -> dict[str, set[str]]:
    """The places that import each module, by its first name."""
    found: dict[str, set[str]] = {}
    for where, node in nodes():
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            lazy = node.module == "infoflow_lens.foundation.lazy"  # under the library's name
            modules = [a.name for a in node.names] if lazy else [str(node.module)]
        for module in modules:
            found.setdefault(module.partition(".")[0], set()).add(where)
    return found


def test_every_module_that_evaluates_text_stands_in_its_place_alone():
    """A module that nobody has looked at is refused, and so is one that evaluates elsewhere."""
    found = imported()
    unknown = found.keys() - EVALUATES.keys() - HARMLESS - {"infoflow_lens"}
    assert not unknown, f"put {sorted(unknown)} into EVALUATES, with its places, or into HARMLESS"
    for module, places in EVALUATES.items():
        assert found.get(module, set()) == set(places), module


def test_models_and_tokenizers_never_bring_code():
    """Each call of transformers says so: else it asks a question, which nobody may see."""
    made = [
        (where, node)
        for where, node in calls()
        if isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained"
    ]
    assert len(made) > 5
    for where, call in made:
        told = {k.arg: getattr(k.value, "value", None) for k in call.keywords}
        assert told.get("trust_remote_code") is False, f"{where}:{call.lineno}"


def test_no_question_is_asked():
    """A command that waits for an answer hangs where nobody sees it."""
    asked = [where for where, node in calls() if dotted(node.func) in ("input", "typer.confirm")]
    assert asked == []


def test_what_is_printed_goes_through_one_place():
    """`say` and `console` of commands/common.py, which show escapes and do not send them."""
    printing = ("typer.echo", "click.echo", "print")
    found = names().items()
    places = set().union(*(p for n, p in found if n in printing or n.endswith(".Console")))
    assert places == {"infoflow_lens/commands/common.py"}


def test_templates_belong_to_the_package():
    """Environments load from folders of the package, and no text from elsewhere is a template."""
    made = {
        where: ast.unparse(node)
        for where, node in calls()
        if dotted(node.func).endswith("Environment")
    }
    assert set(made) == {
        "studies/pages.py", "infoflow_lens/report/assets.py",
    }  # fmt: skip
    assert "FileSystemLoader(TEMPLATES)" in made["studies/pages.py"]
    assert "PackageLoader('infoflow_lens.report'" in made["infoflow_lens/report/assets.py"]
    assert TEMPLATES.resolve().is_relative_to(ROOT)
    assert not [name for name in names() if name.endswith((".from_string", ".Template"))]


def test_what_is_allowed_is_told_to_refuse_callables():
    loads = [node for _, node in calls() if dotted(node.func) in ("torch.load", "np.load")]
    assert len(loads) == 4
    for call in loads:
        told = {keyword.arg: getattr(keyword.value, "value", None) for keyword in call.keywords}
        assert {"weights_only": True}.items() <= told.items() or told.get("allow_pickle") is False


@pytest.mark.parametrize("name", GLOBAL_RANDOM)
def test_nothing_moves_the_global_random_state(name):
    assert name not in names()


def test_every_draw_has_a_generator_and_a_type_of_its_own():
    """The default type is the user's, and another one draws other numbers."""
    bare = []
    for where, node in calls():
        if not isinstance(node.func, ast.Attribute):
            continue
        module, name = dotted(node.func.value), node.func.attr
        if module == "torch" and name in DRAWS:
            given = {keyword.arg for keyword in node.keywords}
            if "generator" not in given or (name in ("rand", "randn") and "dtype" not in given):
                bare.append(f"{where}:{node.lineno}")
    assert bare == []
