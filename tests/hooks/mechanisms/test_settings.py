"""Every option of every measurement: wrong types are refused by name, NumPy numbers are taken."""

import copy
import inspect
from typing import get_type_hints

import numpy as np
import pytest
import torch

from infoflow_lens import InfoFlowError
from infoflow_lens.hooks import (
    label_heads,
    measure_edge_budget,
    measure_mechanisms,
    measure_sufficiency,
    measure_top_k,
    replace_greedily,
)
from tests.conftest import make_token_model, some_of

WRONG = {  # by the kind of option
    "count": ("4", 2.5, True, 0, float("nan"), None),
    "count or None": ("4", 2.5, True, 0),
    "integer": ("1", 1.5, True, -1, None),
    "number": ("0.1", True, -1, float("nan"), float("inf"), None),
    "positive": ("0.1", True, 0, -1, float("nan"), None),
    "flag": ("no", 0, None),
    "text": (3, True),
    "positions": (-1, "1", (True,), (), (1.5,), (0, 0), (99,)),
    "counts": (0, "1", (True,), (), (0, 1), (2, 2), (1.5,)),
    "keys": (0, "1", (True,), (0, 1), (2, 2), (1.5,)),
    "ideals": ("global", (), ("hard",), ("global", "global"), 3),
    "shares": (0.5, "1", (), (0.5, 1.5), (0,), ("1",)),
    "function": (3, "print"),
    "metric": ("mse", 1, True),
    "methods": ("product", ("flow",), (1,), True),
    "budgets": (0.5, "1", (), (0,), (-0.5,), (0.5, 0.5), ("1",), (1.5,), (0.5, 2)),
}
RIGHT = {
    "count": np.int64(2),
    "count or None": np.int32(3),
    "integer": np.uint8(3),
    "number": np.float32(0.25),
    "positive": np.float32(0.25),
    "positions": np.array([-2, 2]),
    "counts": np.arange(1, 3),
    "keys": np.arange(1, 3),
    "shares": np.array([0.5, 1.0]),
    "budgets": np.array([0.25, 0.5]),
}
SHARED = {
    "column": "text",
    "max_length": "count or None",
    "batch_size": "count",
    "progress": "flag",
}
NEXT = {"last": "count or None", "seed": "integer", "after": "function"}
OPTIONS = {
    measure_mechanisms: {
        "metric": "metric", "read": "positions", "threshold": "number", "k": "count",
        "held_out": "flag", "after": "function",
    },
    replace_greedily: {"budget": "number", "read": "positions", "ideals": "ideals"},
    measure_sufficiency: {"shares": "shares", "draws": "integer", "ks": "keys", **NEXT},
    measure_edge_budget: {
        "methods": "methods", "budgets": "budgets", "metric": "metric", "read": "positions",
        "draws": "integer", "seed": "integer", "after": "function",
    },
    measure_top_k: {
        "ks": "counts", "tolerance": "positive", "search": "flag", "control": "flag", **NEXT
    },
}  # fmt: skip
CASES = [
    (measure, option, kind)
    for measure, own in OPTIONS.items()
    for option, kind in {**SHARED, **own}.items()
]
MODEL = make_token_model(n_layers=1, n_heads=1)
TOKENS = torch.randint(17, (4, 6), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def mechanisms():
    return measure_mechanisms(MODEL, TOKENS, progress=False)


def run(measure, mechanisms, model=MODEL, given=TOKENS, **options):
    parameters = inspect.signature(measure).parameters
    others = (mechanisms,) if "mechanisms" in parameters else ()
    others = (TOKENS,) if measure is measure_edge_budget else others
    needed = {replace_greedily: {"budget": 1.0}, measure_edge_budget: {"methods": ("product",)}}
    return measure(
        model, given, *others, **{**needed.get(measure, {}), "progress": False, **options}
    )


@pytest.mark.parametrize(("measure", "option", "kind"), CASES)
def test_an_option_takes_what_it_means_and_nothing_else(measure, option, kind, mechanisms):
    for value in WRONG[kind]:
        with pytest.raises(InfoFlowError, match=rf"\b{option}\b"):
            run(measure, mechanisms, **{option: value})


OF_NUMPY = [case for case in CASES if case[2] in RIGHT]


@pytest.mark.parametrize(("measure", "option", "kind"), some_of(OF_NUMPY, *OF_NUMPY[::4]))
def test_numbers_of_numpy_are_numbers(measure, option, kind, mechanisms):
    plain = RIGHT[kind].tolist()
    given, expected = (run(measure, mechanisms, **{option: v}) for v in (RIGHT[kind], plain))
    if measure is replace_greedily:
        assert given == expected
    else:
        assert given.record.config == expected.record.config


def test_no_option_is_left_out():
    for measure, own in OPTIONS.items():
        keywords = {
            name
            for name, parameter in inspect.signature(measure).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY
        }
        given = {"attention_mask", "resume", "calibration", "others"}
        assert keywords - given == {*SHARED, *own}
        assert get_type_hints(measure)


@pytest.mark.parametrize("measure", OPTIONS, ids=lambda measure: measure.__name__)
def test_inputs_that_may_be_read_once_only_are_refused(measure, mechanisms):
    """Each goes over its sequences more than once."""
    with pytest.raises(InfoFlowError, match="generator, which may be read once only"):
        run(measure, mechanisms, given=(row for row in TOKENS))


@pytest.mark.parametrize("measure", [measure_sufficiency, measure_top_k])
def test_next_tokens_need_a_language_model_and_two_tokens(measure, mechanisms, model, inputs):
    with pytest.raises(InfoFlowError, match="a sequence has 1 token: expected at least 2"):
        run(measure, mechanisms, given=[TOKENS[0], TOKENS[1, :1]])
    found = measure_mechanisms(model, inputs, progress=False)
    with pytest.raises(InfoFlowError, match="is a vector, which predicts no next token"):
        run(measure, found, model=model, given=inputs)


# resume= is of the same run

OTHERS = {
    "other inputs": lambda x: {"inputs": x.flip(0)},
    "other last": lambda x: {"last": 3},
    "other seed": lambda x: {"seed": 7},
    "other tolerance": lambda x: {"tolerance": 0.3},
    "other control": lambda x: {"control": True},
    "other ks": lambda x: {"ks": (1, 3)},
    "other draws": lambda x: {"draws": 2},
    "other budgets": lambda x: {"budgets": (3, 6)},
}
MEASURES = {
    "top_k": (
        measure_top_k,
        lambda m, x: (m, x[4:]),
        {"ks": (1, 2)},
        ("other inputs", "other last", "other tolerance", "other control", "other ks"),
    ),
    "sufficiency": (
        measure_sufficiency,
        lambda m, x: (m, x[4:], measure_mechanisms(m, x[:4], progress=False)),
        {"draws": 1},
        ("other inputs", "other last", "other seed", "other draws"),
    ),
    "edge budget": (
        measure_edge_budget,
        lambda m, x: (m, x[4:], x[:4]),
        {"budgets": (3, 5), "draws": 1, "methods": ("product", "chance")},
        ("other inputs", "other seed", "other draws", "other budgets"),
    ),
}


@pytest.mark.parametrize("name", some_of(MEASURES, "top_k", "sufficiency"))
def test_what_another_run_has_measured_is_refused(name, token_model, token_inputs):
    """It was taken in silence: 10.05 of other inputs where 10.60 is right."""
    measure, arguments, settings, others = MEASURES[name]
    model, mine, *more = arguments(token_model, token_inputs[:8])
    kept = []
    expected = measure(model, mine, *more, **settings, after=kept.append, progress=False)
    again = measure(model, mine, *more, **settings, resume=kept[-1], progress=False)
    assert again.losses.nan_to_num(0).equal(expected.losses.nan_to_num(0))
    for other in others:
        changed = OTHERS[other](mine)
        inputs = changed.pop("inputs", mine)
        with pytest.raises(InfoFlowError, match=f"resume is of another run: {other[6:]} = "):
            measure(
                model, inputs, *more, **{**settings, **changed}, resume=kept[-1], progress=False
            )
    with pytest.raises(InfoFlowError, match="resume is of another run"):
        measure(model, mine, *more, **settings, resume={"bare": expected.bare}, progress=False)
    model.add_hook("blocks.0.hook_resid_pre", lambda activation, hook: activation * 2)
    with pytest.raises(InfoFlowError, match="the model has hooks of your own"):
        measure(model, mine, *more, **settings, resume=kept[-1], progress=False)
    model.reset_hooks()
    first = next(model.parameters())
    before = first.detach().clone()
    with torch.no_grad():
        first.mul_(1.5)
    try:
        with pytest.raises(InfoFlowError, match=r"run: model = |other weights"):
            measure(model, mine, *more, **settings, resume=kept[-1], progress=False)
    finally:
        with torch.no_grad():
            first.copy_(before)


def test_another_metric_or_calibration_is_another_run(token_model, token_inputs):
    """A run by the loss went on with numbers of a divergence, and its record said "loss"."""
    x, kept = token_inputs[:8], []
    settings = {"budgets": (3, 5), "draws": 1, "methods": ("product",), "progress": False}
    measure_edge_budget(token_model, x[4:], x[:4], metric="kl", after=kept.append, **settings)
    for other in ({"metric": "loss"}, {"metric": "kl", "calibration": x[:3]}):
        calibration = other.pop("calibration", x[:4])
        with pytest.raises(InfoFlowError, match="resume is of another run"):
            measure_edge_budget(
                token_model, x[4:], calibration, **other, resume=kept[-1], **settings
            )


def test_mechanisms_of_other_inputs_are_another_run(token_model, token_inputs):
    kept = []
    measure_mechanisms(token_model, token_inputs[:4], after=kept.append, progress=False)
    with pytest.raises(InfoFlowError, match="resume is of another run: inputs = "):
        measure_mechanisms(token_model, token_inputs[4:8], resume=kept[0], progress=False)


@pytest.mark.parametrize("measure", [*OPTIONS][:1] + [*OPTIONS][2:], ids=lambda m: m.__name__)
@pytest.mark.parametrize("resume", [3, True, "x", [], torch.ones(2), object()])
def test_what_no_run_gives_is_refused(measure, resume, mechanisms):
    """A number ended in an AttributeError, or was told to be of another run."""
    with pytest.raises(InfoFlowError, match=r"resume is .*: expected the M\w+ that a run"):
        run(measure, mechanisms, resume=resume)


def test_a_resume_that_lacks_what_is_kept_together_is_refused(token_model, token_inputs):
    """It was taken in silence: sequences were counted twice, damages off by nats."""
    kept, inputs = [], token_inputs[:4]
    label_heads(token_model, inputs, batch_size=2, after=kept.append, progress=False)
    for missing in ("n_estimated", "estimates", "seen"):
        whole = next(state for state in kept if missing in state)
        part = {name: value for name, value in whole.items() if name != missing}
        with pytest.raises(InfoFlowError, match=f"resume lacks '{missing}': expected all entries"):
            label_heads(token_model, inputs, batch_size=2, resume=part, progress=False)


def spoiled(value):
    """What a value made by hand may be in the place of a tensor."""
    yield value[..., :-1]
    yield value + 1  # numbers as good as any
    yield value[None]
    yield value.tolist()
    yield None
    if value.is_floating_point():
        yield value.float()
        for bad in (torch.nan, torch.inf):
            yield value.clone().index_fill_(-1, torch.tensor([0]), bad)
    else:
        yield value.double()


def tensors_in(state):
    """The keys of all tensors in nested dicts, each behind the dict that holds it."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            yield state, key
        elif isinstance(value, dict):
            yield from tensors_in(value)


@pytest.mark.parametrize("name", some_of(MEASURES, "top_k", "sufficiency"))
def test_losses_made_by_hand_are_refused(name, token_model, token_inputs):
    """NaN and other numbers went into the result; another length ended in an error of torch."""
    measure, arguments, settings, _ = MEASURES[name]
    kept = []
    given = (token_model, *arguments(token_model, token_inputs[:8])[1:])
    measure(*given, **settings, after=kept.append, progress=False)
    state = copy.deepcopy(kept[-1])
    entries = [name for name in state if name not in ("identity", "digests")]
    for entry in {entries[0], entries[-1]}:
        places = list(tensors_in({entry: state[entry]}))
        assert len(places) > 1
        for holder, key in places[-6::2]:
            own = holder[key]
            for value in spoiled(own):
                holder[key] = value
                with pytest.raises(InfoFlowError, match=rf"resume holds .* as {entry}: expected"):
                    measure(*given, **settings, resume=state, progress=False)
            holder[key] = own
    measure(*given, **settings, resume=state, progress=False)


def test_names_and_counts_made_by_hand_are_refused(token_model, token_inputs):
    """Edits of another name ended as NaN in the result, and another count in another worth."""
    kept, inputs = [], token_inputs[:4]

    def change_edit(state):
        state["round 0"]["measured"]["table"]["edits"][0] = "x"

    def change_work(state):
        state["round 0"]["measured"]["work"] = None

    def change_record(state):
        state["round 0"]["record"] = "x"

    def change_count(state):
        state["seen"]["n_rows"] += 1

    def change_digests(state):
        state["digests"] = None

    def add(state):
        state["more"] = 1

    def add_unreadable(state):
        state["more"] = {(0, 1): 2}

    cases = {
        measure_top_k: (change_edit, change_work, change_record, change_digests, add),
        label_heads: (change_count, change_digests, add_unreadable),
    }
    for measure, changes in cases.items():
        kept.clear()
        settings = {"batch_size": 2, "progress": False}
        measure(token_model, inputs, after=kept.append, **settings)
        for change in changes:
            state = copy.deepcopy(kept[0])
            change(state)
            with pytest.raises(InfoFlowError, match=r"resume holds .*: expected the numbers"):
                measure(token_model, inputs, resume=state, **settings)
