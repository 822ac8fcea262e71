"""A probe declares: what is refused, what follows from it, and a probe of one's own."""

import dataclasses
import typing

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.probe_of_your_own import PreviousToken
from infoflow_lens import (
    InfoFlowError,
    JacobianInfluence,
    PositionsProbe,
    RecoveryProbe,
    attach,
    probe,
    run_probes,
)
from infoflow_lens.hooks import (
    AttendedProbe,
    AttentionRollout,
    ContributionRoutes,
    LabelledResult,
    Needs,
    PowerRollout,
    Probe,
    ResampleInfluence,
    Result,
    check_probe,
    combined,
    concatenated,
    summed,
)
from infoflow_lens.hooks.states import latest
from tests.conftest import HEADS, some_of
from tests.hooks.test_invariants import MAKES

LENGTHS = (9, 4, 6, 9, 5)


@pytest.fixture
def texts(token_inputs):
    """Sequences of different length."""
    return [row[:n] for row, n in zip(token_inputs, LENGTHS, strict=False)]


class Attributes(PreviousToken):
    """Keeps its sum in an attribute, where nobody knows of it."""

    total = 0.0

    def update(self, seen):
        self.total = self.total + super().update(seen)["weight"][0]
        return {"weight": [self.total], "n_queries": torch.tensor(1.0)}

    def compute(self):
        return [self.total]


class Unmasked(PreviousToken):
    def update(self, seen):
        rows = [seen.pattern(i).diagonal(-1, 2, 3) for i in range(seen.n_layers)]
        n = torch.tensor(float(len(seen)))
        return {"weight": [row.mean(dim=2).sum(dim=0) for row in rows], "n_queries": n}


class Last(Probe):
    reads = ("pattern",)
    weight = combined(latest)  # of two only the later is left

    def update(self, seen):
        return {"weight": seen.mean_over_queries(seen.pattern(0)).amax(dim=-1).sum(dim=0)}

    def compute(self):
        return self.weight


class Random(PreviousToken):
    def update(self, seen):
        found = super().update(seen)
        return {**found, "weight": [w + torch.rand_like(w) for w in found["weight"]]}


class CountsPasses(PreviousToken):
    def update(self, seen):
        return {**super().update(seen), "n_queries": torch.tensor(1.0)}


class OfTheFirst(PreviousToken):
    """Its number is that of the first text, which alone merges rightly where order stays."""

    weight = combined(lambda one, other: one)

    def update(self, seen):
        rows = [seen.pattern(i)[0].diagonal(-1, 1, 2) for i in range(seen.n_layers)]
        weights = [row.mean(dim=1) for row in rows]
        return {**super().update(seen), "weight": weights}

    def compute(self):
        return self.weight


class MeanOfMeans(PreviousToken):
    """The example as it was published until 0.3."""

    def update(self, seen):
        rows = [seen.pattern(i).diagonal(-1, 2, 3) for i in range(seen.n_layers)]
        means = [seen.mean_over_queries(row, first=1).sum(dim=0) for row in rows]
        return {"weight": means, "n_queries": torch.tensor(float(len(seen)))}


class ChangesWhatIsKept(PreviousToken):
    def compute(self):
        return [weight.add_(1) / self.n_queries for weight in self.weight]


class CountsALittle(PreviousToken):
    def update(self, seen):
        return {**super().update(seen), "n_queries": torch.tensor(1e5)}


class SometimesMore(PreviousToken):
    passes = summed()

    def update(self, seen):
        return {**super().update(seen), "passes": torch.tensor(1)}

    def compute(self):
        more = {"more": self.weight} if self.passes > 1 else {}
        return {"value": super().compute(), **more}


class Fails(PreviousToken):
    def update(self, seen):
        found = super().update(seen)
        if not found["n_queries"]:
            raise ZeroDivisionError("no query")
        return found


# A probe of one's own


def test_the_example_measures_each_text_as_if_alone(token_model, texts):
    (result,) = run_probes(token_model, texts, [PreviousToken()], batch_size=3, progress=False)
    for layer, found in enumerate(result["value"]):
        weights = [
            token_model.run_with_cache(row[None])[1]["pattern", layer][0].diagonal(-1, 1, 2)
            for row in texts
        ]
        torch.testing.assert_close(found, torch.cat(weights, dim=1).mean(dim=1))


def test_a_text_without_a_second_query_spoils_no_number(token_model, texts):
    """The published example, once NaN for every head of a corpus with one such text."""
    (alone,) = run_probes(token_model, texts, [PreviousToken()], progress=False)
    more = [texts[0][:1], *texts, texts[1][:1]]
    (result,) = run_probes(token_model, more, [PreviousToken()], batch_size=3, progress=False)
    for one, other in zip(result["value"], alone["value"], strict=True):
        torch.testing.assert_close(one, other)


def test_it_is_taken_wherever_probes_are(token_model, token_inputs):
    (expected,) = run_probes(token_model, token_inputs, [PreviousToken()], progress=False)
    with attach(token_model, PreviousToken()) as probes:
        token_model(token_inputs)
    hooked = PreviousToken()
    token_model.run_with_hooks(token_inputs, fwd_hooks=hooked.fwd_hooks(token_model))
    whole = probe(
        token_model, list(token_inputs), probes=["positions", PreviousToken()], progress=False
    )
    for found in (probes[0].result(), hooked.result(), whole.found["previous_token"]):
        for one, other in zip(found["value"], expected["value"], strict=True):
            torch.testing.assert_close(one, other)


def test_its_result_is_a_table_a_picture_and_a_file(model, inputs, tmp_path):
    (result,) = run_probes(model, inputs, [PreviousToken()], progress=False)
    frame = result.to_frame()
    assert list(frame) == ["layer", "head", "value"]
    assert len(frame) == sum(HEADS)  # layers of different size
    assert float(frame["value"].iloc[-1]) == float(result["value"][-1][-1])
    result.save(tmp_path / "previous")
    loaded = Result.load(tmp_path / "previous")
    assert isinstance(loaded, LabelledResult)
    assert loaded.to_frame().equals(frame)
    assert loaded.plot().axes[0].get_ylabel() == "layer"
    with pytest.raises(InfoFlowError, match="no head 7"):
        loaded.array("value", head=7)


def test_several_arrays_have_axes_of_their_own(model, inputs, tmp_path):
    class Two(PreviousToken):
        dims: typing.ClassVar = {"heads": ("layer", "head"), "layers": ("layer",)}

        def compute(self):
            weights = super().compute()
            return {"heads": weights, "layers": torch.stack([w.mean() for w in weights])}

    (result,) = run_probes(model, inputs, [Two()], progress=False)
    frame = result.to_frame()
    same = dataclasses.replace(result, values={**result.values, "again": result.values["layers"]},
                   axes={**result.axes, "again": ("layer",)})  # fmt: skip
    same.save(tmp_path / "same")
    assert Result.load(tmp_path / "same")["again"].equal(result["layers"])
    means = frame.groupby("layer")["heads"].mean()
    np.testing.assert_allclose(frame.groupby("layer")["layers"].first(), means, rtol=1e-5)
    assert result.array("heads", layer=1).dims == ("head",)


def test_layers_of_different_heads_and_arrays_of_other_axes_make_one_table(model, inputs):
    class Weights(PreviousToken):
        dims: typing.ClassVar = {
            "weights": ("layer", "sample", "head", "query", "key"),
            "places": ("place",),
        }

        def compute(self):
            sizes = [part.shape[0] for part in super().compute()]
            made = [torch.arange(120.0 * h).view(2, h, 5, 12) for h in sizes]
            return {"weights": made, "places": torch.tensor([7.0, 8.0, 9.0])}

    (result,) = run_probes(model, inputs, [Weights()], progress=False)
    frame = result.to_frame()
    places = frame[frame["place"].notna()]
    assert places["places"].tolist() == [7, 8, 9]
    weights = frame[frame["place"].isna()]
    assert len(weights) == 120 * (2 + 5)
    for row in weights.sample(20, random_state=0).itertuples():
        where = {dim: int(getattr(row, dim)) for dim in ("sample", "head", "query", "key")}
        expected = result["weights"][int(row.layer)][tuple(where.values())]
        assert row.weights == expected
    two = result.array("weights", head=1)
    assert two.dims == ("layer", "sample", "query", "key")
    assert two.values[1].equal(result["weights"][1][:, 1])
    with pytest.raises(
        InfoFlowError, match="no array 'wights': expected one of weights, places; did"
    ):
        result.array("wights")
    # of four axes, one panel for each place of the first of the last three
    assert [axes.get_title() for axes in two.plot().axes[:2]] == ["sample 0", "sample 1"]


# What is refused


def no_pass(activation, hook):
    raise AssertionError("the model was run")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "Mine has no compute and no update"),
        ({"update": lambda self, seen: {}}, "Mine has no compute"),
        ({"update": lambda self: {}, "compute": lambda self: 1}, r"Mine\.update cannot be called"),
        ({"t": None}, "declares nothing that it keeps"),
        ({"reads": ("patern",)}, "reads patern of a pass"),
        ({"reads": ()}, "reads nothing of a pass"),
        ({"needs": lambda self, model: ["hook_embed"]}, "needs gave list"),
        ({"needs": lambda self, model: Needs.of(model, points=["no.hook"])}, "no hook point"),
    ],
)
def test_missing_and_wrong_methods_are_refused_before_any_pass(model, inputs, body, message):
    whole = {"update": lambda self, seen: {"t": 1.0}, "compute": lambda self: torch.ones(1)}
    if "update" not in body and body:
        body = whole | body
    mine = type("Mine", (Probe,), {"reads": ("pattern",), "t": summed()} | body)
    with (
        model.hooks(fwd_hooks=[("hook_embed", no_pass)]),
        pytest.raises(InfoFlowError, match=message),
    ):
        run_probes(model, inputs, [mine()], progress=False)


@pytest.mark.parametrize("part", [None, 1.0, {}, {"t": 1.0, "more": 2.0}])
def test_update_returns_what_was_declared(model, inputs, part):
    class Mine(PreviousToken):
        def update(self, seen):
            return part

    mine = Mine()
    with pytest.raises(InfoFlowError, match=r"Mine\.update returned .* weight"):
        run_probes(model, inputs, [mine], progress=False)
    assert mine.n_sequences == 0
    assert mine.weight is None


@pytest.mark.parametrize("found", [1, None, "text", {}, [], [1.0], {"a": 1}, {3: torch.ones(1)}])
def test_a_senseless_result_is_refused_by_name(model, inputs, found):
    mine = type("Mine", (PreviousToken,), {"compute": lambda self: found})
    with pytest.raises(InfoFlowError, match=r"Mine\.compute returned"):
        run_probes(model, inputs, [mine()], progress=False)


def test_axes_that_do_not_fit_are_refused_by_name(model, inputs):
    mine = type("Mine", (PreviousToken,), {"dims": ("layer",)})
    with pytest.raises(InfoFlowError, match=r"Mine\.compute and Mine\.dims do not fit"):
        run_probes(model, inputs, [mine()], progress=False)


def test_names_that_every_probe_has_are_refused():
    with pytest.raises(InfoFlowError, match="declares merge"):
        type("Mine", (PreviousToken,), {"__annotations__": {"merge": int}, "merge": 1})
    with pytest.raises(InfoFlowError, match="expected update"):
        PreviousToken().weight = 1.0


def test_settings_that_no_record_would_know_are_refused(model):
    with pytest.raises(InfoFlowError, match="Mine defines __init__"):
        type("Mine", (PreviousToken,), {"__init__": lambda self, share: None})
    mine = type("Mine", (PreviousToken,), {"__annotations__": {"thing": object}})
    with pytest.raises(InfoFlowError, match="a setting is"):
        mine(object()).prepare(model)


# check_probe


def test_check_probe_takes_what_is_right(token_model, texts, model, inputs):
    assert check_probe(PreviousToken(), token_model, texts).to_frame().notna().all().all()
    check_probe(PreviousToken(), token_model, torch.stack([texts[0], texts[3]]))  # cuts one
    check_probe(PreviousToken(), model, inputs[:5])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Unmasked, "padding may enter"),
        (Last, "does not give what each gives alone"),
        (Attributes, "alone|merge|stored state"),
        (Random, "it is random"),
        (CountsPasses, "may count passes"),
        (OfTheFirst, "another order"),
        (MeanOfMeans, "one token among others turns value into NaN"),
        (ChangesWhatIsKept, "asked for again"),
        (CountsALittle, "may count passes"),
        (SometimesMore, "only one of the two results has the array more"),
        (Fails, "a text of one token alone ends in ZeroDivisionError"),
    ],
)
def test_check_probe_finds_what_is_wrong(token_model, texts, wrong, message):
    with pytest.raises(InfoFlowError, match=f"{wrong.__name__}: .*({message})"):
        check_probe(wrong(), token_model, texts)


OF_FEW_ROWS = [kind for kind in MAKES if kind.__name__ != "RecoveryProbe"]


@pytest.mark.parametrize("kind", some_of(OF_FEW_ROWS, *OF_FEW_ROWS[::4]))
def test_every_probe_passes_it(token_model, texts, kind, token_inputs):
    for make in MAKES[kind]:  # maps of recovery need more rows than features
        check_probe(make(token_inputs), token_model, texts, tolerance=2e-4)


# States


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    split=st.integers(0, 6),
    seed=st.integers(0, 99),
)
def test_states_merge_in_any_grouping_to_the_whole(sizes, split, seed):
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randint(9, (2, n), generator=generator) for n in sizes]
    width = max(sizes)

    def folded(state, some):
        kept = None
        for part in some:
            kept = state.add(kept, part)
        return kept

    for declare, expected in (
        (summed, lambda padded: sum(padded)),
        (lambda: concatenated(1, fill=-1), lambda padded: torch.cat(padded)),
    ):
        state = declare()
        fill = -1 if state.grows else 0
        padded = [torch.nn.functional.pad(p, (0, width - p.shape[1]), value=fill) for p in parts]
        whole = state.value(folded(state, parts))
        merged = state.merge(folded(state, parts[:split]), folded(state, parts[split:]))
        assert whole.equal(expected(padded))
        assert state.value(merged).equal(whole)


@pytest.mark.parametrize(
    ("axes", "shapes"),
    [
        ((2, 3), [(2, 4, 5), (2, 4, 6)]),
        ((), [(2, 4, 5), (2, 4, 6)]),
        ((2,), [(2, 4, 5), (2, 3, 5)]),
    ],
)
def test_rows_that_do_not_join_are_refused_by_the_name_of_their_state(axes, shapes):
    """This was torch's IndexError, or its RuntimeError, of no state and without a remedy."""

    class Owner:
        rows = concatenated(*axes)

    state = vars(Owner)["rows"]
    kept = [torch.zeros(shape) for shape in shapes]
    declared = rf"concatenated\({', '.join(map(str, axes))}\)"
    with pytest.raises(InfoFlowError, match=rf"rows is declared {declared}.*such as concatenated"):
        state.value(kept)
    with pytest.raises(InfoFlowError, match=r"concatenated\(axes\).*'query'"):
        concatenated("query")


def test_sums_of_what_is_named_hold_what_either_has():
    """What the first pass did not name was dropped, and what the second lacked was a KeyError."""
    state = summed()
    passes = [{"a": torch.ones(2)}, {"b": torch.ones(3)}, {"a": torch.ones(2), "b": torch.ones(3)}]
    kept = None
    for part in passes:
        kept = state.add(kept, part)
    assert {name: value.tolist() for name, value in kept.items()} == {"a": [2, 2], "b": [2, 2, 2]}
    assert passes[1]["b"].tolist() == [1, 1, 1]


# Settings

EVERY_FIELD = [
    pytest.param(kind, item.name, id=f"{kind.__name__}.{item.name}")
    for kind in MAKES
    for item in dataclasses.fields(kind)
    if item.init
]
WRONG = ["no", "0.1", b"1", 1j, {}, {"a": 1}, object(), float("nan"), float("inf"), -1.5,
         [["a"]], ("no",), (1.5,), (True,), np.array(["no"]), np.array([[0.5]])]  # fmt: skip


BEYOND = [
    (PositionsProbe, {"ranks": [(), (0,), (1, 1), 2], "without": [(0, 0)]}),
    (AttendedProbe, {"share": [-0.1, 1.5]}),
    (AttentionRollout, {"heads": ["sum"], "positions": [(), (1, 1)]}),
    (ContributionRoutes, {"combine": ["sum"], "heads_apart": [1]}),
    (PowerRollout, {"question": ["both"], "size": ["L3", 1]}),
    (
        JacobianInfluence,
        {"state": ["resid_mid"], "chunk_size": [0], "estimate": [1], "positions": [(), 3],
         "layers": [(1, 1), (-1,)], "seed": [2**63]},
    ),
    (
        ResampleInfluence,
        {"donors": [torch.zeros(0, 7), [[1, 2]]], "aggregate": ["max", 1.5, True],
         "replacement": ["zero"]},
    ),
    (
        RecoveryProbe,
        {"target": ["tokens", ("resid_pre", -1), torch.zeros(3)], "source": ["mlp"],
         "vocabulary": [(1, 2)], "controls": ["random", ("other",)], "ridge": [0.0, "loo"],
         "blocks": [0], "sketch": [1], "without": [(0, 0)]},
    ),
]  # fmt: skip


def test_one_sequence_compares_with_nothing(token_model, token_inputs):
    with pytest.raises(InfoFlowError, match="there is 1 sequence: expected at least two"):
        check_probe(PositionsProbe(), token_model, token_inputs[:1])


@pytest.mark.parametrize(("kind", "settings"), BEYOND, ids=lambda entry: str(entry)[:40])
def test_values_beyond_the_range_are_named(kind, settings, token_inputs):
    for name, values in settings.items():
        for value in values:
            with pytest.raises(InfoFlowError, match=name):
                make(kind, token_inputs, **{name: value})


def test_settings_that_exclude_each_other_are_named():
    with pytest.raises(InfoFlowError, match="'identity' with a sketch"):
        RecoveryProbe(target="identity", sketch=3)


def no_edits(plain):
    return []


def make(kind, token_inputs, **settings):
    needed = {"donors": token_inputs[:3]} if "donors" in kind.__dataclass_fields__ else {}
    if "make" in kind.__dataclass_fields__:
        needed = {"make": no_edits}
    if "assignments" in kind.__dataclass_fields__:
        needed = {"means": None, "assignments": {"one": {(0, 0): "own"}}}
    return kind(**(needed | settings))


@pytest.mark.parametrize(("kind", "name"), EVERY_FIELD)
def test_no_field_takes_what_it_should_not(kind, name, token_inputs):
    for value in WRONG:
        with pytest.raises(InfoFlowError, match=name):
            make(kind, token_inputs, **{name: value})


@pytest.mark.parametrize(("kind", "name"), EVERY_FIELD)
def test_numbers_of_numpy_are_numbers(kind, name, token_inputs):
    """What a field has by default, or takes, it takes from NumPy, and keeps as a plain value."""
    plain = getattr(make(kind, token_inputs), name)
    if name in ("donors", "target"):
        return
    tried = [1, 2, 0.5, (1, 2), True] if plain is None or isinstance(plain, str) else [plain]
    for value in tried:
        try:
            expected = getattr(make(kind, token_inputs, **{name: value}), name)
        except InfoFlowError:
            continue
        given = np.asarray(value)
        given = given if given.ndim else given[()]
        found = getattr(make(kind, token_inputs, **{name: given}), name)
        assert found == expected
        assert type(found) is type(expected)
        if not isinstance(value, (bool, tuple)):
            with pytest.raises(InfoFlowError, match=name):
                make(kind, token_inputs, **{name: True})
