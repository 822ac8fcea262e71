"""Everything that can be saved: it comes back as it was, and what is not it is refused at the door.

The kinds are found from the package, so that the next one cannot be forgotten: without an entry in
SAVED a test fails.
"""

import copy
import dataclasses
import errno
import math
import os
import resource
from itertools import product

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import infoflow_lens.probing.parts
from infoflow_lens import (
    Flow,
    InfoFlowError,
    JacobianInfluence,
    PositionsProbe,
    RecoveryProbe,
    ask,
    compare,
    flow,
    probe,
    propagate,
    run_probes,
)
from infoflow_lens.agreement import coverage_curve, explained
from infoflow_lens.foundation.files import read_signed, sync
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.foundation.saving import Savable, write_parts
from infoflow_lens.hooks import (
    AttendedProbe,
    AttentionRollout,
    GradedSetsProbe,
    HeadIdeals,
    LabelledResult,
    LogitDifference,
    MeanPatternsProbe,
    PatternsProbe,
    PowerRollout,
    Probe,
    Result,
    ShardedPositions,
    label_heads,
    measure_edge_budget,
    measure_mechanisms,
    measure_shares,
    measure_sufficiency,
    measure_top_k,
    measure_why,
    measure_why_all,
    replace_greedily,
    summed,
)
from infoflow_lens.hooks.answer.result import AnswerNumbers
from infoflow_lens.models.host import load_model, save_model
from infoflow_lens.ranking import compare_rankings
from infoflow_lens.report.phase import draw_phase_diagram
from infoflow_lens.tasks import load_task
from infoflow_lens.theory.estimate import phase_diagram
from tests.conftest import make_token_model, some_of, spread
from tests.foundation.test_documents import occupy

IDS = torch.randint(17, (8, 9), generator=torch.Generator().manual_seed(4))
QUIET = {"progress": False}


class Own(Probe):
    reads = ("pattern",)
    dims = ("layer", "head")
    weight = summed()

    def update(self, seen):
        return {"weight": [seen.pattern(i).sum(dim=(0, 2, 3)) for i in range(seen.n_layers)]}

    def compute(self):
        return list(self.weight)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One of every kind, by the name of its class."""
    model = make_token_model()
    texts = [row[:n] for row, n in zip(IDS, (9, 4, 6, 9, 5, 9, 9, 9), strict=True)]
    probes = [
        PositionsProbe((1, 2), spread=True), RecoveryProbe((1,), controls=True, maps=True),
        JacobianInfluence("resid_post"), AttendedProbe(), PatternsProbe(), AttentionRollout(),
        GradedSetsProbe("weight"), MeanPatternsProbe(), HeadIdeals(ideals=("gated",)),
        PowerRollout(), Own(),
    ]  # fmt: skip
    results = run_probes(model, texts, probes, **QUIET)
    positions, _, influence, attended, _, rollout, graded, *_, own = results
    mechanisms = measure_mechanisms(model, IDS[:4], **QUIET)
    sets = propagate(positions)
    run = probe(
        model, IDS, probes=["positions", "influence", "routes"], shard=3, ranks=(1,),
        out=tmp_path_factory.mktemp("run") / "out", **QUIET,
    )  # fmt: skip
    answer = ask(model, IDS[0, :5], 3, 5, **QUIET)
    every = [
        *results, mechanisms, run.found["positions"], run.found["routes"],
        measure_sufficiency(model, IDS[4:], mechanisms, draws=1, **QUIET),
        measure_top_k(model, IDS[4:], ks=(1, 2), **QUIET),
        measure_edge_budget(
            model, IDS[4:], IDS[:4], budgets=(3, 5), methods=("product", "rollout"), **QUIET
        ),
        label_heads(model, IDS, worthiest=1, **QUIET),
        measure_why(model, IDS[:1], 1, 2), measure_why_all(model, IDS[:2]),
        measure_shares(model, IDS[:1], LogitDifference(3, 5)), answer,
        AnswerNumbers(**{f.name: getattr(answer, f.name) for f in dataclasses.fields(answer)}),
        sets, propagate(strength=[p.float() for p in attended.attended]), compare(sets, influence),
        compare(sets, influence).cls, explained(sets, influence),
        coverage_curve(positions, influence),
        compare_rankings({"sets": sets}, {"rollout": rollout, "graded": graded}, influence),
        replace_greedily(model, IDS[4:], mechanisms, budget=0.5, **QUIET),
    ]  # fmt: skip
    assert own.values
    return {type(one).__name__: one for one in every}


def concrete(kind):
    found = {kind.__name__: kind} if dataclasses.is_dataclass(kind) else {}
    for sub in kind.__subclasses__():
        if sub.__module__.startswith("infoflow_lens."):
            found |= concrete(sub)
    return found


BASES = {"Result", "ShardedResult", "StateScores", "NextTokenResult"}
RESULTS = sorted(concrete(Result).keys() - BASES)
OTHERS = sorted(concrete(Savable).keys() - concrete(Result).keys() - {"Flow"})  # see flows/
SAVED = [*RESULTS, *OTHERS]


def test_everything_that_can_be_saved_is_here(made):
    assert set(made) == set(SAVED)
    assert infoflow_lens.probing.parts.RoutesComparison.__name__ in SAVED


def same(one, other):
    """Whether two values of any depth are the same, NaN equal to NaN."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(7), other.nan_to_num(7))
    if dataclasses.is_dataclass(one):
        return type(one) is type(other) and all(
            same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one)
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one == other or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


@pytest.mark.parametrize("name", SAVED)
def test_it_comes_back_as_it_was(made, name, tmp_path):
    one = made[name]
    one.save(tmp_path / "x")
    other = type(one).load(tmp_path / "x")
    fields = {f.name for f in dataclasses.fields(one)} - {"record", "digests"}
    for field in fields:
        assert same(getattr(one, field), getattr(other, field)), field
    one.save(tmp_path / "x")  # an earlier one of its kind gives way
    assert same(getattr(one, min(fields)), getattr(type(one).load(tmp_path / "x"), min(fields)))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, None])
def test_numbers_that_json_does_not_have_come_back(made, value, tmp_path):
    """Infinity was read as NaN, and NaN as None where a field may be None."""
    one = made["Answer"]
    config = {"rise": value, "float": value, "each": [value, 1.0]}
    changed = dataclasses.replace(one, record=dataclasses.replace(one.record, config=config))
    changed.save(tmp_path / "x")
    assert same(type(one).load(tmp_path / "x").record.config, config)


@pytest.mark.parametrize("name", SAVED)
def test_it_is_not_loaded_as_another_kind(made, name, tmp_path):
    made[name].save(tmp_path / "x")
    other = made["RecoveryResult" if name != "RecoveryResult" else "PositionsResult"]
    with pytest.raises(InfoFlowError, match=r"is no |holds a "):
        type(other).load(tmp_path / "x")
    other = made["Agreement" if name != "Agreement" else "CoverageCurve"]
    with pytest.raises(InfoFlowError, match=r"is no |holds a "):
        type(other).load(tmp_path / "x")


# Hostile and old files: signed anew, so that only their types are wrong

SCHEMA = {True: "infoflow-lens result 2", False: "infoflow-lens saved 2"}
WRONG = [{"evil": 1}, [["x"], {}], "x", -3.5, None, True, 10**30]


def spoiled(one):
    """(what was done, values, tensors) for every field of a saved object, and every wrong value."""
    plain, tensors = one.to_parts()
    for name in plain:
        for wrong in WRONG:
            if wrong is not None and type(wrong) is type(plain[name]) is not list:
                continue  # of the right type
            changed = copy.deepcopy(plain)
            changed[name] = wrong
            yield f"{name} = {wrong!r}", changed, tensors
        changed = copy.deepcopy(plain)
        del changed[name]
        yield f"no {name}", changed, tensors
    for name, tensor in tensors.items():
        yield f"no tensor {name}", plain, {k: v for k, v in tensors.items() if k != name}
        other = torch.bool if tensor.dtype != torch.bool else torch.float32
        yield f"{name} as {other}", plain, {**tensors, name: tensor.to(other)}
        yield f"{name} with another axis", plain, {**tensors, name: tensor[None].clone()}
    extra = copy.deepcopy(plain)
    extra["more"] = 1
    yield "more", extra, tensors
    if isinstance(one, Result):
        yield "a tensor more", plain, {**tensors, "more": torch.zeros(2)}


def uses(one):
    """What a user does with a loaded object: it must not fail later."""
    for call in ("to_frame", "summary", "mechanisms", "excess", "rise", "sizes", "sentences"):
        method = getattr(one, call, None)
        if callable(method):
            method()
    repr(one)
    one._repr_html_() if hasattr(one, "_repr_html_") else None


MANY_FIELDS = {"Answer", "AnswerNumbers", "HeadLabels", "RankingAgreement", "RecoveryResult"}
FEWER = [name for name in SAVED if name not in MANY_FIELDS]


@pytest.mark.parametrize("name", some_of([*SAVED], *FEWER[::10]))
def test_a_field_of_another_type_is_refused_when_it_is_loaded(made, name, tmp_path):
    """Or it is of the right type by chance (a number for NaN), and works."""
    one, n_refused = made[name], 0
    for what, plain, tensors in spoiled(one):
        write_parts(tmp_path / "x", SCHEMA[isinstance(one, Result)], plain, dict(tensors))
        try:
            loaded = type(one).load(tmp_path / "x")
        except InfoFlowError:
            n_refused += 1
            continue
        try:
            uses(loaded)
        except InfoFlowError:
            pass  # says what is wrong
        except Exception as error:
            pytest.fail(f"{name} with {what} fails later: {type(error).__name__}: {error}")
    assert n_refused > 5


@pytest.mark.parametrize("axis", ["sample", "rank", "layers"])
def test_axes_of_one_name_have_one_size(made, axis, tmp_path):
    """A result cut by hand: fewer sequences, ranks that are not named, a layer gone."""
    plain, tensors = made["PositionsResult"].to_parts()
    if axis == "sample":
        tensors["lengths"] = tensors["lengths"][:-1].clone()
    elif axis == "rank":
        plain["ranks"] = [1, 2, 3]
    else:
        del tensors["ties.1"]
    write_parts(tmp_path / "x", SCHEMA[True], plain, tensors)
    with pytest.raises(InfoFlowError, match=r"x\.safetensors' cannot be read .*expected"):
        Result.load(tmp_path / "x")


def test_a_flow_of_wrong_values_is_refused_when_it_is_loaded(tmp_path):
    flow(make_token_model(n_layers=1, n_heads=1), [[1, 2]], **QUIET).save(tmp_path / "x")
    schema = "infoflow-lens flow 2"
    plain = read_signed(tmp_path / "x.json", schema, "flow", "")
    tensors = load_file(tmp_path / "x.safetensors")
    del plain["tensors"]
    Flow.load(tmp_path / "x")
    changes = [(name, wrong) for name in plain for wrong in (*WRONG, "evil", [])]
    n_refused = 0
    for name, wrong in changes:
        if type(wrong) is type(plain[name]):
            continue
        write_parts(tmp_path / "x", schema, {**plain, name: wrong}, dict(tensors))
        try:
            found = Flow.load(tmp_path / "x")
        except InfoFlowError:
            n_refused += 1
        else:
            uses(found)
            assert found.view
    assert n_refused > 40
    for config in ({}, {**plain["record"]["config"], "threshold": "x"},
                   {**plain["record"]["config"], "without": ["x"]}):  # fmt: skip
        record = {**plain["record"], "config": config}
        write_parts(tmp_path / "x", schema, {**plain, "record": record}, dict(tensors))
        with pytest.raises(InfoFlowError):
            Flow.load(tmp_path / "x")
    write_parts(tmp_path / "x", schema, {**plain, "rule": "evil"}, dict(tensors))
    with pytest.raises(InfoFlowError, match="rule is 'evil': expected one of max_position"):
        Flow.load(tmp_path / "x")


# Places that are taken


@pytest.fixture(scope="module")
def shown():
    return flow(make_token_model(), [[1, 2, 3]], **QUIET)


@pytest.fixture(scope="module")
def probed():
    return probe(make_token_model(), IDS, probes=["positions"], **QUIET)


def phase(path):
    rows = phase_diagram(load_task("kth_largest", n_tokens=8), ((1,), (2,)), (8,), "paper", 1)
    draw_phase_diagram(rows, "heads", path)


WRITERS = {
    **{name: lambda fixtures, path, name=name: fixtures["made"][name].save(path) for name in SAVED},
    "flow": lambda fixtures, path: fixtures["shown"].save(path),
    "flow page": lambda fixtures, path: fixtures["shown"].to_html(path),
    "probe page": lambda fixtures, path: fixtures["probed"].report(path),
    "png": lambda fixtures, path: phase(path.with_suffix(".png")),
    "svg": lambda fixtures, path: phase(path.with_suffix(".svg")),
    "pdf": lambda fixtures, path: phase(path.with_suffix(".pdf")),
    "model": lambda fixtures, path: save_model(fixtures["model"], path),
}


@pytest.fixture
def fixtures(made, shown, probed, model):
    return {"made": made, "shown": shown, "probed": probed, "model": model}


def files_of(path):
    return sorted(p for p in path.parent.rglob("*") if not p.is_dir())


@pytest.mark.parametrize("name", WRITERS)
def test_each_file_that_is_written_may_be_written_again_and_no_other_is_touched(
    fixtures, name, tmp_path
):
    write, path = WRITERS[name], tmp_path / "x"
    (tmp_path / "x.notes").write_text("mine")
    (tmp_path / "x").mkdir() if name in ("model", "ShardedPositions") else None
    notes = tmp_path / "x" / "notes.txt"
    if notes.parent.is_dir():
        notes.write_text("mine")
    theirs = {p: p.read_bytes() for p in files_of(path)}
    write(fixtures, path)
    mine = [p for p in files_of(path) if p not in theirs]
    write(fixtures, path)
    assert {p: p.read_bytes() for p in theirs} == theirs
    assert mine
    for place in mine:
        content = place.read_bytes()
        place.write_bytes(b"notes of somebody")
        others = {p: p.read_bytes() for p in files_of(path)}
        with pytest.raises(InfoFlowError, match="choose another name"):
            write(fixtures, path)
        assert {p: p.read_bytes() for p in files_of(path)} == others
        place.unlink()
        write(fixtures, path)
        assert place.read_bytes() == content or name in ("pdf", "svg")


HOWS = ["pipe", "link", "dangling link", "folder"]


@pytest.mark.parametrize(
    ("name", "how"), some_of(list(product(WRITERS, HOWS)), *spread([*WRITERS], HOWS))
)
def test_a_place_that_is_taken_stays_as_it_is(fixtures, name, how, tmp_path):
    write, path = WRITERS[name], tmp_path / "x"
    write(fixtures, path)
    mine = files_of(path)
    other = tmp_path.parent / f"{tmp_path.name}-theirs"
    other.write_text("theirs")
    for place in mine:
        content = place.read_bytes()
        place.unlink()
        occupy(how, place, other)
        with pytest.raises(InfoFlowError, match=r"is a (pipe|link|folder)"):
            write(fixtures, path)
        place.rmdir() if how == "folder" else place.unlink()
        place.write_bytes(content)
    assert other.read_text() == "theirs"


# What lies beside a result


@pytest.fixture
def given(made, tmp_path):
    """A folder of results from somebody, with a link to a secret and a file beside its parts."""
    secret = tmp_path / "home" / "secret"
    secret.parent.mkdir()
    secret.write_text("key")
    folder = tmp_path / "given"
    made["ShardedPositions"].save(folder / "positions")
    (folder / "positions" / "more").symlink_to(secret.parent)
    (folder / "positions" / "key").symlink_to(secret)
    (folder / "positions" / "notes.txt").write_text("theirs")
    return folder / "positions"


def test_a_copy_holds_the_result_and_nothing_that_lies_beside_it(given, tmp_path):
    """It once followed links, and replaced notes of the user."""
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "notes.txt").write_text("mine")
    found = Result.load(given)
    found.save(tmp_path / "copy")
    names = {p.name for p in (tmp_path / "copy").iterdir()}
    assert names == {"notes.txt", *(f"{i:06d}.{e}" for i in range(found.n_shards)
                                    for e in ("json", "safetensors"))}  # fmt: skip
    assert (tmp_path / "copy" / "notes.txt").read_text() == "mine"
    assert ShardedPositions.load(tmp_path / "copy").to_frame().equals(found.to_frame())


def test_a_link_in_the_place_of_the_folder_of_parts_is_refused(made, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "x").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InfoFlowError, match="is a link"):
        made["ShardedPositions"].save(tmp_path / "x")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_saved_model_does_not_take_the_place_of_another(model, tmp_path):
    save_file({"weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(InfoFlowError, match="is no architecture of a saved model"):
        save_model(model, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"model.safetensors"}
    save_model(model, tmp_path, overwrite=True)
    assert load_model(tmp_path).architecture == model.architecture
    save_model(model, tmp_path)


# A save that fails leaves what was saved before


def numbers_of(values, **config):
    return LabelledResult(values={"v": values}, axes={"v": ["x"]}, record=RunRecord(config=config))


def test_a_save_of_what_is_no_json_leaves_the_earlier_result(tmp_path):
    numbers_of(torch.zeros(3), lr=1.0).save(tmp_path / "r")
    with pytest.raises(InfoFlowError, match=r"is no JSON .*float32"):
        numbers_of(torch.ones(3), lr=np.float32(1)).save(tmp_path / "r")
    assert Result.load(tmp_path / "r").values["v"].equal(torch.zeros(3))


@pytest.mark.parametrize("room", [10, 1000, 10_000])
def test_a_full_disk_leaves_the_earlier_result(room, tmp_path):
    numbers_of(torch.zeros(3), lr=1.0).save(tmp_path / "r")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(InfoFlowError, match="cannot write"):
            numbers_of(torch.ones(3), notes="x" * 30_000).save(tmp_path / "r")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert Result.load(tmp_path / "r").values["v"].equal(torch.zeros(3))
    assert len(list(tmp_path.iterdir())) == 2


def test_parts_that_cannot_all_be_copied_leave_the_earlier_result(made, tmp_path):
    result = made["ShardedPositions"]
    result.save(tmp_path / "a")
    result.save(tmp_path / "b")
    spoiled = Result.load(tmp_path / "b")
    (tmp_path / "b" / "000001.safetensors").write_bytes(b"")
    with pytest.raises(InfoFlowError, match="is spoiled"):
        spoiled.save(tmp_path / "a")
    assert Result.load(tmp_path / "a").to_frame().equals(result.to_frame())
    (tmp_path / "b" / "000001.safetensors").unlink()
    with pytest.raises(InfoFlowError, match="expected all parts of the result"):
        spoiled.whole()
    (tmp_path / "c.json").write_text("mine")
    with pytest.raises(InfoFlowError, match="is there and is no saved result"):
        result.save(tmp_path / "c")
    assert not (tmp_path / "c").exists() or not list((tmp_path / "c").iterdir())


@pytest.fixture(scope="module")
def smaller(tmp_path_factory):
    """Two parts, of other numbers than the three of the large one."""
    run = probe(make_token_model(), IDS[4:], probes=["positions"], shard=3, ranks=(1,),
                out=tmp_path_factory.mktemp("smaller") / "out", **QUIET)  # fmt: skip
    assert run.found["positions"].n_shards == 2
    return run.found["positions"]


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


FAILS = {
    "os.replace": os.replace,
    "os.open": os.open,
    "infoflow_lens.foundation.saving.save_file": save_file,
    "infoflow_lens.foundation.files.sync": sync,
}


EARLIER = ["larger", "smaller", "none"]
ERRORS = [OSError(errno.ENOSPC, "No space"), KeyboardInterrupt()]


@pytest.mark.parametrize(
    ("earlier", "error", "place"),
    some_of(list(product(EARLIER, ERRORS, FAILS)), *spread(EARLIER, ERRORS, [*FAILS])),
)
def test_a_save_of_several_parts_that_fails_leaves_the_earlier_one(
    made, smaller, place, error, earlier, tmp_path, monkeypatch
):
    """A full disk at the third part left neither; it may be full, or a key be pressed, anywhere."""
    results = {"larger": made["ShardedPositions"], "smaller": smaller}
    saved = smaller if earlier == "larger" else made["ShardedPositions"]
    left, n_failed = None, 0

    def fails(*args, **settings):
        nonlocal left
        left = left and left - 1
        if left == 0:
            left = None
            raise error
        return FAILS[place](*args, **settings)

    monkeypatch.setattr(place, fails)
    for n_before in range(60):
        path = tmp_path / f"{n_before}" / "x"
        if earlier in results:
            results[earlier].save(path)
        before, left = contents(path.parent), n_before + 1
        try:
            saved.save(path)
        except (InfoFlowError, KeyboardInterrupt):
            n_failed += 1
            assert contents(path.parent) == before
        if left is not None:  # it has ended before the last
            break
    left = None
    assert n_failed > saved.n_shards
    assert Result.load(path).whole().to_frame().equals(saved.whole().to_frame())


@pytest.mark.parametrize("room", [10, 500, 3000])
def test_a_full_disk_leaves_the_earlier_parts(made, smaller, room, tmp_path):
    smaller.save(tmp_path / "x")
    before = contents(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(InfoFlowError, match=r"cannot write .*(room|large)"):
            made["ShardedPositions"].save(tmp_path / "x")
        with pytest.raises(InfoFlowError, match="cannot write"):
            made["ShardedPositions"].save(tmp_path / "y")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(tmp_path) == before
    assert {p.name for p in tmp_path.iterdir()} == {"x", "x.json", "x.safetensors"}


def test_a_smaller_result_leaves_no_parts_of_a_larger_one(made, smaller, tmp_path):
    larger = made["ShardedPositions"]
    larger.save(tmp_path / "x")
    (tmp_path / "x" / "notes.txt").write_text("mine")
    (tmp_path / "x" / "000007.json").write_text("mine")
    smaller.save(tmp_path / "x")
    smaller.save(tmp_path / "y")
    parts = {p.name for p in (tmp_path / "y").iterdir()}
    assert {p.name for p in (tmp_path / "x").iterdir()} == {*parts, "notes.txt", "000007.json"}
    assert Result.load(tmp_path / "x").to_frame().equals(smaller.to_frame())
    larger.save(tmp_path / "y")
    made["PositionsResult"].save(tmp_path / "y")  # of no parts at all
    assert list((tmp_path / "y").iterdir()) == []
    larger.save(tmp_path / "z")
    (tmp_path / "z" / "000002.safetensors").write_bytes(b"mine")  # which is nobody's part
    smaller.save(tmp_path / "z")
    assert {p.name for p in (tmp_path / "z").iterdir()} == {*parts, "000002.safetensors"}


@pytest.mark.parametrize(("name", "value"), [("n_shards", 10**30), ("n_sequences", -5)])
def test_counts_of_parts_that_cannot_be_are_refused_at_once(made, name, value, tmp_path):
    plain, tensors = made["ShardedPositions"].to_parts()
    made["ShardedPositions"].save(tmp_path / "x")
    write_parts(tmp_path / "x", SCHEMA[True], {**plain, name: value}, tensors)
    with pytest.raises(InfoFlowError, match="expected what save"):
        Result.load(tmp_path / "x")


@pytest.mark.parametrize("view", [lambda t: t[1:], lambda t: t[::2], lambda t: t.to_sparse()])
def test_arrays_that_share_their_numbers_are_saved(view, tmp_path):
    values = torch.arange(6.0)
    both = {"all": values[:4], "part": view(values)}
    axes = {key: ["x"] for key in both}
    LabelledResult(values=both, axes=axes, record=RunRecord()).save(tmp_path / "v")
    found = Result.load(tmp_path / "v").values
    assert found["all"].equal(values[:4])
    assert found["part"].equal(view(values).to_dense())


def test_a_result_does_not_take_the_place_of_the_weights_of_a_model(made, model, tmp_path):
    save_model(model, tmp_path)
    with pytest.raises(InfoFlowError, match="is there and is no saved result"):
        made["PositionsResult"].save(tmp_path / "model")
    load_model(tmp_path)


def test_a_file_that_names_sizes_is_no_architecture_of_ours(model, tmp_path):
    (tmp_path / "architecture.json").write_text('{"n_heads": 12, "d_model": 768, "d_head": 64}')
    (tmp_path / "model.safetensors").write_bytes(b"my own weights")
    with pytest.raises(InfoFlowError, match="is there and is no architecture"):
        save_model(model, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == b"my own weights"


@pytest.mark.parametrize("name", ["", ".", "..", "a/", "a\0b", "\ud800"])
def test_names_that_are_no_names_of_files(made, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InfoFlowError, match="cannot be saved as"):
        made["PositionsResult"].save(name)
    assert list(tmp_path.iterdir()) == []


def test_saving_again_keeps_who_may_read_it(made, tmp_path):
    made["Agreement"].save(tmp_path / "x")
    for path in tmp_path.iterdir():
        path.chmod(0o600)
    made["Agreement"].save(tmp_path / "x")
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


CUT = [
    ("AttendedResult", lambda p, t: t.update(lengths=t["lengths"][:1].clone())),
    ("SufficiencyResult", lambda p, t: p.update(n_replaced=p["n_replaced"][:-1])),
    ("SufficiencyResult", lambda p, t: p.update(n_replaced=[10**30] * len(p["n_replaced"]))),
    ("TopKResult", lambda p, t: p.update(kept=["x", *p["kept"][1:]])),
    ("RecoveryResult", lambda p, t: p.update(n_fit=[])),
    ("RoutesComparison", lambda p, t: p.update(rows=[{"layer": [1]}])),
]


@pytest.mark.parametrize(("name", "cut"), CUT)
def test_results_that_were_cut_are_refused_when_they_are_loaded(made, name, cut, tmp_path):
    """Of the right types, and yet no table could be made of them."""
    plain, tensors = copy.deepcopy(made[name].to_parts())
    cut(plain, tensors)
    write_parts(tmp_path / "x", SCHEMA[True], plain, tensors)
    with pytest.raises(InfoFlowError, match="cannot be read"):
        Result.load(tmp_path / "x")


@pytest.mark.parametrize(
    ("name", "field"),
    [("Agreement", "layers"), ("CoverageCurve", "chance"), ("RankingAgreement", "sets")],
)
def test_what_else_was_cut_is_refused_too(made, name, field, tmp_path):
    plain, tensors = made[name].to_parts()
    plain[field] = plain[field][:-1]
    write_parts(tmp_path / "x", SCHEMA[False], plain, dict(tensors))
    try:
        found = type(made[name]).load(tmp_path / "x")
    except InfoFlowError:
        return
    uses(found)


FLOW_CUT = {
    "a chance that is none": lambda p: p["next_tokens"][0][0][0].__setitem__(1, None),
    "next tokens of a position": lambda p: p["next_tokens"][0].pop(),
    "how influence was measured": lambda p: p["influence"]["record"]["config"].clear(),
    "a layer that is none": lambda p: p["influence"]["layers"].__setitem__(0, 10**30),
    "positions that are none": lambda p: p["influence"].update(n_positions=-3),
}


@pytest.mark.parametrize("cut", FLOW_CUT.values(), ids=FLOW_CUT)
def test_a_flow_that_was_cut_is_refused_when_it_is_loaded(shown, cut, tmp_path):
    shown.save(tmp_path / "x")
    schema = "infoflow-lens flow 2"
    plain = read_signed(tmp_path / "x.json", schema, "flow", "")
    del plain["tensors"]
    cut(plain)
    write_parts(tmp_path / "x", schema, plain, load_file(tmp_path / "x.safetensors"))
    with pytest.raises(InfoFlowError, match="cannot be read"):
        Flow.load(tmp_path / "x")


def test_a_result_of_no_sequence_is_refused(made, tmp_path):
    plain, tensors = made["PositionsResult"].to_parts()
    none = {name: tensor[:0].clone() for name, tensor in tensors.items()}
    write_parts(tmp_path / "x", SCHEMA[True], plain, none)
    with pytest.raises(InfoFlowError, match="of no sequence"):
        Result.load(tmp_path / "x")


def test_uploads_are_left_to_the_hub(made):
    for name in ("push_to_hub", "from_hub"):
        with pytest.raises(AttributeError, match=r"removed in 0.4: expected .*huggingface_hub"):
            getattr(made["PositionsResult"], name)
