"""What is installed and what is shipped: every module and file, the public names, and no more."""

import email
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import tarfile
import typing
import zipfile
from collections import Counter
from itertools import chain
from pathlib import Path

import grimp
import pytest
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components

import infoflow_lens
from tests.processes import printed_by

ROOT = Path(__file__).parent.parent
ROOMS = ("hooks", "studies", "tasks")  # at the top of a clone, and linked to from the package
JUNK = {"__pycache__", ".ipynb_checkpoints", "build", "dist", "demo"}


def kept_files():
    """The files of the project, those that git keeps or would keep if it were asked."""
    if not (ROOT / ".git").exists():  # an unpacked source distribution
        found = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
        return {
            path
            for path in found
            if not JUNK.intersection(path.parts) and "egg-info" not in str(path)
        }
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {Path(name) for name in listed.split("\0") if name and (ROOT / name).exists()}


def in_package(paths):
    """Files of the package, by their place in it: each room stands inside."""
    top = "infoflow_lens"
    return {str(p) for p in paths if p.parts[0] == top and (ROOT / p).is_file()} | {
        str(Path(top) / p) for p in paths if p.parts[0] in ROOMS
    }


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The files that git keeps, elsewhere; links stay links."""
    folder = tmp_path_factory.mktemp("clone")
    for path in kept_files():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / path, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def built(clone, tmp_path_factory):
    """The source distribution, and the wheel that is built from it."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--outdir", str(out), str(clone)]
    subprocess.run(command, check=True, capture_output=True)
    return out


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def unpacked(built, tmp_path_factory):
    (path,) = built.glob("*.tar.gz")
    out = tmp_path_factory.mktemp("sdist")
    with tarfile.open(path) as archive:
        archive.extractall(out, filter="data")
    (folder,) = out.iterdir()
    return folder


@pytest.fixture(scope="module")
def description(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    return email.message_from_bytes(wheel.read(name))


def run(*arguments, folder, **environment):
    """What ``python *arguments`` prints in a folder, from which it may import."""
    environment = {**os.environ, "PYTHONPATH": "", "PYTHONWARNINGS": "ignore", **environment}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout.strip()


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(wheel):
    """Modules, and what they read: templates, scripts of pages, the model, the type marker."""
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == in_package(kept_files())
    assert {"infoflow_lens/py.typed", "infoflow_lens/hooks/__init__.py"} <= held
    assert any(name.startswith("infoflow_lens/report/templates/") for name in held)


@pytest.mark.slow
def test_the_source_distribution_holds_everything_else_too(unpacked):
    held = {path.relative_to(unpacked) for path in unpacked.rglob("*") if path.is_file()}
    paths = {path for path in kept_files() if (ROOT / path).is_file()}
    outside = {path for path in paths if path.parts[0] not in ("infoflow_lens", *ROOMS)}
    assert outside - held == {Path(".gitignore")} & outside
    assert in_package(paths) <= {str(path) for path in held}


@pytest.mark.slow
def test_the_source_distribution_tests_itself(unpacked):
    where = "import infoflow_lens.hooks as h; print(h.__file__)"
    assert Path(run("-c", where, folder=unpacked)).is_relative_to(unpacked)
    few = ("tests/theory/test_cost.py", "tests/foundation/test_files.py")
    assert "passed" in run("-m", "pytest", "-n", "0", "-q", *few, folder=unpacked)


@pytest.mark.slow
@pytest.mark.parametrize("installed", ["elsewhere", "not at all"])
def test_a_clone_works_from_its_root(installed, clone, wheel, tmp_path):
    """The clone's package, whole, whatever is installed beside it."""
    place = tmp_path / "site-packages"
    wheel.extractall(place)
    if installed == "not at all":
        shutil.rmtree(place)
    script = (
        "import importlib.metadata as metadata, pathlib, sys\n"
        "known = metadata.version\n"
        "def version(name):\n"
        "    if name == 'infoflow-lens': raise metadata.PackageNotFoundError(name)\n"
        "    return known(name)\n"
        f"if {installed == 'not at all'}: metadata.version = version\n"
        "import infoflow_lens.hooks, infoflow_lens.tasks\n"
        "from infoflow_lens.cli import main\n"
        "assert infoflow_lens.load_task('d_retrieval') and infoflow_lens.propagate\n"
        "for module in (infoflow_lens, infoflow_lens.hooks, infoflow_lens.tasks):\n"
        "    assert pathlib.Path(module.__file__).is_relative_to(pathlib.Path.cwd()), module\n"
        "sys.argv = ['infoflow-lens', '--version']\n"
        "main()\n"
    )
    assert run("-c", script, folder=clone, PYTHONPATH=str(place)).startswith("infoflow-lens")


@pytest.mark.slow
def test_one_version_is_named_everywhere(description):
    version = description["Version"]
    changes = re.findall(r"^## (\d\S*) - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    citation = (ROOT / "CITATION.cff").read_text()
    cited = re.findall(r"^(?:version|date-released): (\S+)$", citation, re.M)
    assert changes[0] == (version, cited[1])
    assert cited[0] == version


@pytest.mark.slow
def test_a_package_page_can_follow_every_link(description):
    """It shows README.md without the files beside it."""
    text = description.get_payload(decode=True).decode()
    links = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text)
    assert any(link.startswith("https://") for link in links)
    assert all(link.startswith(("https://", "#")) for link in links)
    assert "CITATION.cff" in text  # the words of a link to a file stay


@pytest.mark.slow
def test_packages_that_only_some_work_needs_are_extras(description):
    core = {
        re.match(r"[\w-]+", line)[0]
        for line in description.get_all("Requires-Dist")
        if "extra ==" not in line
    }
    assert not core & {"joblib", "python-flint", "dask", "distributed", "tornado", "pytest"}
    assert {"all", "certificates", "cluster", "serve", "studies"} <= set(
        description.get_all("Provides-Extra")
    )


@pytest.mark.slow
def test_only_what_needs_an_extra_imports_it(clone):
    """Everything public loads without them."""
    script = clone / "script.py"
    script.write_text(
        "import sys\n"
        "for name in ('joblib', 'flint', 'dask', 'distributed', 'tornado'):\n"
        "    sys.modules[name] = None\n"
        "import infoflow_lens, infoflow_lens.studies.papers, infoflow_lens.studies.demo\n"
        "[getattr(infoflow_lens, name) for name in infoflow_lens.__all__]\n"
        "import infoflow_lens.flows.serve, infoflow_lens.probing.run\n"
        "import infoflow_lens.studies.commands.certify\n"
        "print('loaded')"
    )
    assert printed_by(script, folder=clone).strip() == "loaded"


def test_every_public_name_is_there_and_documented():
    for name in infoflow_lens.__all__:
        value = getattr(infoflow_lens, name)
        assert value.__doc__, name
    assert set(dir(infoflow_lens)) >= set(infoflow_lens.__all__)
    with pytest.raises(AttributeError, match="no attribute 'prob'"):
        infoflow_lens.prob  # noqa: B018


@pytest.mark.parametrize("name", infoflow_lens._MOVED)
def test_names_that_have_moved_go_on_with_a_warning(name):
    module = f"infoflow_lens.{infoflow_lens._MOVED[name]}"
    with pytest.warns(FutureWarning, match=f"^{name} is in {module}: import it from there"):
        moved = getattr(infoflow_lens, name)
    assert moved is getattr(importlib.import_module(module), name)
    assert name not in infoflow_lens.__all__


def test_an_import_of_a_name_that_has_moved_warns_once():
    with pytest.warns(FutureWarning) as caught:
        from infoflow_lens import Why  # noqa: F401
    assert [Path(each.filename) for each in caught] == [Path(__file__)]


def hinted_parts(thing):
    """A class and its methods, or a function: all that has annotations of its own."""
    yield thing
    for _, part in inspect.getmembers(thing) if inspect.isclass(thing) else ():
        part = part.fget if isinstance(part, property) else part
        if inspect.isfunction(part) and part.__module__.startswith("infoflow_lens."):
            yield part


def kinds_of(kind):
    found = {kind} if kind.__module__.startswith("infoflow_lens.") else set()
    return found.union(*map(kinds_of, kind.__subclasses__()))


def test_annotations_of_public_names_can_be_read():
    """Those of every probe and result, and of their methods, too."""
    public = {getattr(m, name) for m in (infoflow_lens, infoflow_lens.hooks) for name in m.__all__
              if name != "__version__"}  # fmt: skip
    public |= kinds_of(infoflow_lens.hooks.Probe) | kinds_of(infoflow_lens.hooks.Result)
    classes = [thing for thing in public if inspect.isclass(thing)]
    assert len(classes) > 60
    for part in chain(*map(hinted_parts, [*classes, *filter(inspect.isfunction, public)])):
        assert isinstance(typing.get_type_hints(part), dict)


def test_public_names_are_those_that_type_checkers_see():
    """The lazy table and the imports for type checkers must not drift apart."""
    source = Path(infoflow_lens.__file__).read_text()
    typed = set(re.findall(r"^    from \S+ import (\w+) as \1$", source, re.M))
    assert typed == set(infoflow_lens.__all__)


@pytest.mark.parametrize(
    ("imports", "heavy"),
    [
        ("import infoflow_lens", ("torch", "transformer_lens", "datasets", "pandas")),
        pytest.param(
            "from infoflow_lens import run_probes",
            ("torch._dynamo", "datasets", "pandas"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_importing_the_package_loads_nothing_heavy(imports, heavy):
    script = f"import sys; {imports}; print([m for m in {heavy} if m in sys.modules])"
    assert run("-c", script, folder=ROOT) == "[]"


def test_no_file_imports_itself_by_way_of_others():
    """Imports inside functions count; those for types alone do not."""
    graph = grimp.build_graph("infoflow_lens", exclude_type_checking_imports=True, cache_dir=None)
    names = sorted(graph.modules)
    place = {name: i for i, name in enumerate(names)}
    edges = [
        (place[a], place[b]) for a in names for b in graph.find_modules_directly_imported_by(a)
    ]
    rows, columns = zip(*edges, strict=True)
    matrix = csr_matrix(([1] * len(edges), (rows, columns)), shape=(len(names),) * 2)
    _, component = connected_components(matrix, connection="strong")
    members = Counter(component.tolist())
    assert [name for name in names if members[component[place[name]]] > 1] == []


@pytest.mark.slow
def test_probes_and_theory_do_without_transformer_lens():
    script = (
        "import sys, infoflow_lens.hooks, infoflow_lens.theory, infoflow_lens.tasks\n"
        "print('transformer_lens' in sys.modules)"
    )
    assert run("-c", script, folder=ROOT) == "False"


# What rooms give by their names: one that is gone needs a word in the changelog
NAMES = {
    "hooks": """
        AllHeads AttachedProbes AttendedProbe AttendedResult AttentionFlow AttentionRollout
        AttentionWeight ContributionRoutes EdgeBudgetResult Edit EditsOfPass EmbeddingCosine
        FunctionOfOutput GradedSetsProbe GradedSetsResult GradientTimesInput HEAD_IDEALS
        HeadIdeals HeadLabels IDEALS InfluenceResult Intervention InterventionResult
        JacobianInfluence JointReplacement LabelledArray LabelledResult LayerCapabilities
        LogProbability LogitDifference METRICS MeanPatterns MeanPatternsProbe
        MechanismsResult ModelCapabilities Needs NextTokenLoss Pass PatternsProbe PatternsResult
        PositionsProbe PositionsResult PowerRollout PowerRolloutResult Probe Readout
        RecoveryProbe RecoveryResult ResampleInfluence Result RoutesResult ShardedPositions
        Shares Split State StateScores SufficiencyResult TopKResult Why WhyAll attach baselines
        check_probe combined concatenated edit_head edit_head_output example_input find_heads
        heads_of inspect_model label_heads measure_edge_budget measure_mechanisms measure_shares
        measure_sufficiency measure_top_k measure_why measure_why_all probe_cache
        replace_greedily run run_probes substituted summed
    """,
    "tasks": """
        BestTree DRetrieval DepthSeparation GlobalMean InContextQA InContextTemplateMatching
        IntrinsicDimension KthLargest Memorization NestedQA PositionSum Target Task
        TemplateMatching TokenTask TriangleCenter VectorTask dataset_card list_tasks load_task
    """,
    "theory": """
        ComparisonProfile Component DigitCode Estimate GlobalAggregation
        GradedSets InformationSets MaxPosition Schedule SpecificPositions exponent learns
        propagate run_schedule
    """,
}


@pytest.mark.parametrize("room", NAMES)
def test_rooms_give_these_names(room):
    module = importlib.import_module(f"infoflow_lens.{room}")
    assert set(module.__all__) == set(NAMES[room].split())
    for name in module.__all__:
        assert getattr(module, name).__doc__, name
