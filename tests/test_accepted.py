"""What a user would try first: results, names and models where tensors and objects are asked.

Each either works, or says in a line what to do.
"""

import inspect
from types import SimpleNamespace

import pytest
import torch

import infoflow_lens as il
import infoflow_lens.hooks
from infoflow_lens import InfoFlowError
from infoflow_lens.hooks import ModelCapabilities
from infoflow_lens.theory.estimate import Estimate
from tests.conftest import make_token_model
from tests.reference import zoo


@pytest.fixture(scope="module")
def have():
    """A model, inputs, and what probes gave."""
    model = make_token_model()
    ids = torch.randint(17, (4, 9), generator=torch.Generator().manual_seed(4))
    attended = il.hooks.AttendedProbe()
    probes = [il.PositionsProbe((1, 2)), attended, il.JacobianInfluence("resid_post")]
    positions, attended, influence = il.run_probes(model, ids, probes, progress=False)
    return SimpleNamespace(
        model=model,
        ids=ids,
        hf=zoo.build("gpt2"),
        loaded=il.load_any(model),
        positions=positions,
        attended=attended,
        influence=influence,
        mechanisms=il.hooks.measure_mechanisms(model, ids, progress=False),
        task=il.load_task("d_retrieval"),
    )


def same_sets(one, other):
    return one.members.equal(other.members)


WORKS = {
    "propagate, of positions": lambda h: same_sets(
        il.propagate(h.positions), il.propagate(h.positions.argmax)
    ),
    "propagate, of attended keys": lambda h: same_sets(
        il.propagate(h.attended), il.propagate(h.attended.positions)
    ),
    "coverage_curve, of results": lambda h: (
        il.agreement.coverage_curve(h.positions, h.influence)
        == il.agreement.coverage_curve(h.positions.positions, h.influence)
    ),
    "compare, of results": lambda h: (
        il.compare(h.positions, h.influence)
        == il.compare(il.propagate(h.positions.argmax), h.influence)
    ),
    "compare, of members": lambda h: (
        il.compare(il.propagate(h.positions).members, h.influence)
        == il.compare(h.positions, h.influence)
    ),
    "compare_by_position, of results": lambda h: il.agreement.compare_by_position(
        h.attended, h.influence
    ).equals(il.agreement.compare_by_position(il.propagate(h.attended), h.influence)),
    "rules, of results": lambda h: same_sets(
        il.propagate(h.mechanisms.rules(h.attended, h.positions)),
        il.propagate(h.mechanisms.rules(h.attended.positions, h.positions.argmax)),
    ),
    "inspect_model, of a loaded model": lambda h: (
        il.inspect_model(h.loaded).kind == il.inspect_model(h.model).kind
    ),
    "dataset_card, of a name": lambda h: (
        str(il.tasks.dataset_card("d_retrieval")) == str(il.tasks.dataset_card(h.task))
    ),
    "estimate, of names and heads": lambda h: (
        isinstance(il.estimate("d_retrieval", (3, 1), verify=0), Estimate)
        and il.estimate("d_retrieval", (3, 1), verify=0).to_dict()
        == il.estimate((3, 1), h.task, verify=0).to_dict()
    ),
    "estimate, of a model": lambda h: il.estimate(h.hf, "d_retrieval", verify=0).n_heads == (4, 4),
    "design, of a name": lambda h: (
        il.design("d_retrieval", (8,), max_layers=1, verify=0).to_dict()
        == il.design(h.task, (8,), max_layers=1, verify=0).to_dict()
    ),
    "inspect_model, without an example": lambda h: (
        isinstance(il.inspect_model(h.model), ModelCapabilities)
        and il.inspect_model(h.model) == il.inspect_model(h.model, h.ids)
    ),
    "load_any, of a model of transformers": lambda h: il.load_any(h.hf).source == "memory",
    "run_probes, of a model of transformers": lambda h: (
        il.run_probes(h.hf, h.ids, [il.PositionsProbe()], progress=False)[0].positions[0].shape
        == (4, 4, 9, 1)
    ),
    "inspect_model, of a model of transformers": lambda h: (
        il.inspect_model(h.hf, h.ids).problems() == ()
    ),
    "load_any, of what it gave": lambda h: il.load_any(h.loaded) is h.loaded,
    "the version": lambda h: il.__version__.count(".") >= 1,
    "rooms, before use": lambda h: il.hooks.PositionsProbe is il.PositionsProbe,
}


@pytest.mark.parametrize("name", WORKS)
def test_what_a_user_would_try_first_gives_what_the_long_way_gives(have, name):
    assert WORKS[name](have)


LOAD = r"give load_any\('gpt2'\)\.model"
PROBE = [il.PositionsProbe()]
SAYS = {
    "propagate, of influence": (
        lambda h: il.propagate(h.influence),
        "layers is a InfluenceResult: expected .* or a result of PositionsProbe or AttendedProbe",
    ),
    "propagate, of mechanisms": (
        lambda h: il.propagate(h.mechanisms),
        r"expected result\.rules\(attended, positions\)",
    ),
    "coverage_curve, of other ranks": (
        lambda h: il.agreement.coverage_curve(
            il.run_probes(h.model, h.ids, [il.PositionsProbe((2, 1))], progress=False)[0],
            h.influence,
        ),
        r"of ranks \(2, 1\): expected 1 to some K.* PositionsProbe\(\(1, 2, 3\)\)",
    ),
    "coverage_curve, of attended keys": (
        lambda h: il.agreement.coverage_curve(h.attended, h.influence),
        "positions is a AttendedResult: expected what PositionsProbe",
    ),
    "compare, the other way round": (
        lambda h: il.compare(h.influence, il.propagate(h.positions)),
        "what was measured comes second",
    ),
    "compare, with no measurement": (
        lambda h: il.compare(h.positions, h.mechanisms),
        "measured is a MechanismsResult: expected an InfluenceResult",
    ),
    "rules, the other way round": (
        lambda h: h.mechanisms.rules(h.positions, h.attended),
        "give results of AttendedProbe and PositionsProbe, in this order",
    ),
    "InformationSets, of a result": (
        lambda h: il.theory.InformationSets(h.positions),
        r"are a PositionsResult: expected bool .* propagate\(\.\.\.\) makes them",
    ),
    "estimate, of an unknown name": (
        lambda h: il.estimate("d_retrival", (3, 1)),
        "unknown task 'd_retrival'.* did you mean 'd_retrieval'",
    ),
    "estimate, of a class": (
        lambda h: il.estimate((3, 1), type(h.task)),
        r"make one, DRetrieval\(\)",
    ),
    "learns, without a schedule": (
        lambda h: il.named.learns("d_retrieval", None),
        r"expected a Schedule, such as estimate\(architecture, task\)\.schedule",
    ),
    "dataset_card, of a number": (
        lambda h: il.tasks.dataset_card(3),
        "task is 3: expected a task, or the name of one: d_retrieval",
    ),
    "load_task, of a task": (
        lambda h: il.load_task(h.task),
        "name is a DRetrieval: expected the name of a task",
    ),
    "inspect_model, of a name": (lambda h: il.inspect_model("gpt2"), LOAD),
    "run_probes, of a name": (lambda h: il.run_probes("gpt2", h.ids, PROBE), LOAD),
    "probe_cache, of a model of transformers": (
        lambda h: il.hooks.probe_cache(h.hf, {}, PROBE),
        "the cache lacks blocks.0.attn.hook_attn_scores",
    ),
    "measure_mechanisms, of a name": (lambda h: il.hooks.measure_mechanisms("gpt2", h.ids), LOAD),
    "load_any, of nothing": (
        lambda h: il.load_any(None),
        "the model is of type NoneType: expected a name",
    ),
    "train, of a name": (
        lambda h: il.train("gpt2", "d_retrieval"),
        r"model is a str: expected a module; make one with build_model",
    ),
    "evaluate, of a name": (
        lambda h: il.training.evaluate("gpt2", (h.ids, h.ids.float())),
        r"model is a str: expected a module; make one with build_model",
    ),
    "train, of what has no weights": (
        lambda h: il.train(torch.nn.Identity(), *[(h.ids.float(), h.ids.float())] * 2),
        "the Identity has no parameters: expected a module that can be trained",
    ),
    "train, by a mapping": (
        lambda h: il.train(h.hf, "d_retrieval", config={"epochs": 1}),
        r"config is a dict: expected a TrainingConfig, such as TrainingConfig\(epochs=10\)",
    ),
    "build_model, of a name": (
        lambda h: il.build_model("gpt2"),
        "architecture is a str: expected an Architecture",
    ),
    "load_model, of a model": (
        lambda h: il.load_model(h.hf),
        r"a model in memory is hosted by load_any\(model\)",
    ),
}


@pytest.mark.parametrize("name", SAYS)
def test_it_says_what_to_do(have, name):
    call, message = SAYS[name]
    with pytest.raises(InfoFlowError, match=message) as caught:
        call(have)
    assert "\n" not in str(caught.value)


HOOKS = {
    name: function
    for name, function in vars(infoflow_lens.hooks).items()
    if inspect.isfunction(function) and "model" in inspect.signature(function).parameters
}
BESIDE = {
    "inputs": torch.zeros(1, 4, dtype=torch.long),
    "batch": torch.zeros(1, 4, dtype=torch.long),
    "cache": {},
    "want": (),
    "probe": il.PositionsProbe(),
    "probes": [il.PositionsProbe()],
    "layer": 0,
    "head": 0,
    "query": 3,
    "budget": 0.1,
    "relation": "previous",
    "readout": il.hooks.LogitDifference(1),
    "heads": {(0, 0): "global"},
    "calibration": torch.zeros(2, 4, dtype=torch.long),
}


class AskedError(Exception):
    """The model itself is asked for something."""


class Watched(torch.nn.Module):
    def __getattr__(self, name):
        raise AskedError(name)


@pytest.mark.parametrize("name", HOOKS)
def test_what_loading_gives_stands_for_its_model(have, name):
    beside = BESIDE | {"mechanisms": have.mechanisms}
    args, kwargs = [], {}
    for part in inspect.signature(HOOKS[name]).parameters.values():
        if part.name == "model":
            args.append(SimpleNamespace(model=Watched()))
        elif part.kind is part.VAR_POSITIONAL:
            args += beside[part.name]
        elif part.default is part.empty and part.kind is part.KEYWORD_ONLY:
            kwargs[part.name] = beside[part.name]
        elif part.default is part.empty and part.kind is not part.VAR_KEYWORD:
            args.append(beside[part.name])
    begin = HOOKS[name]
    if hasattr(begin, "__wrapped__") and inspect.isgeneratorfunction(inspect.unwrap(begin)):
        begin = lambda *args, **kwargs: HOOKS[name](*args, **kwargs).__enter__()  # noqa: E731
    with pytest.raises(AskedError):
        begin(*args, **kwargs)


def test_a_model_is_trained_on_a_task_by_name_in_its_own_sizes(model):
    config = il.training.TrainingConfig(epochs=1)
    result = il.train(model, "d_retrieval", config, n_train=32, n_validation=8, progress=False)
    assert result.epochs_run == 1


def test_completion_knows_every_name_and_room_from_a_fresh_import():
    import subprocess
    import sys

    script = (
        "import infoflow_lens as il\n"
        "names = dir(il)\n"
        "for name in ('flow', 'probe', 'load_any', 'hooks', 'tasks', 'theory', '__version__'):\n"
        "    assert name in names, name\n"
        "import sys\n"
        "print('torch' in sys.modules)\n"
        "print(il.foundation.__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == ["False", "infoflow_lens.foundation"]
