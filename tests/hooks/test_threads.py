"""A measurement beside threads of the user's: neither sees the other."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import pytest
import torch

import infoflow_lens.hooks
from infoflow_lens import InfoFlowError, JacobianInfluence, inspect_model, open_model, run_probes
from infoflow_lens.hooks import (
    FunctionOfOutput,
    GradientTimesInput,
    PatternsProbe,
    Result,
    measure_edge_budget,
    measure_mechanisms,
    measure_shares,
    measure_sufficiency,
    measure_top_k,
    measure_why,
    measure_why_all,
    replace_greedily,
)
from infoflow_lens.hooks.influence import derivatives
from infoflow_lens.hooks.model.call import call
from tests.conftest import make_token_model, some_of
from tests.hooks.test_invariants import EVERY, assert_equal, hosted_over_ids, token_ids
from tests.reference import zoo


def mechanisms_of(model, x):
    return measure_mechanisms(model, x, progress=False)


MEASURES = {
    "inspect_model": lambda model, x: inspect_model(model),
    "measure_mechanisms": mechanisms_of,
    "replace_greedily": lambda model, x: replace_greedily(
        model, x, mechanisms_of(model, x), budget=1.0, progress=False
    ),
    "measure_sufficiency": lambda model, x: measure_sufficiency(
        model, x[6:], mechanisms_of(model, x[:6]), draws=1, progress=False
    ),
    "measure_top_k": lambda model, x: measure_top_k(model, x, progress=False),
    "measure_edge_budget": lambda model, x: measure_edge_budget(
        model, x[6:], x[:6], budgets=(3, 5), draws=1, progress=False
    ),
    "measure_shares": lambda model, x: measure_shares(
        model, x[:1], FunctionOfOutput(lambda output: output.flatten(1)[:, -1], is_linear=True)
    ),
    "measure_why": lambda model, x: measure_why(model, x[:1], 1, 0),
    "measure_why_all": lambda model, x: measure_why_all(model, x[:2]),
}
PROBES = {
    name: lambda model, x, make=make: run_probes(model, x, [make(x)], progress=False)[0]
    for name, make in EVERY.items()
}


def test_every_measure_is_run_beside_threads():
    starts = ("inspect_", "measure_", "replace_")
    assert set(MEASURES) == {
        name for name in infoflow_lens.hooks.__all__ if name.startswith(starts)
    }


def differentiate():
    """What the user's thread does: the derivative of a small function, which is not 0."""
    weights = torch.eye(30)
    return torch.func.jvp(lambda x: (x @ weights).tanh().sum(), (weights,), (weights,))[1]


@contextmanager
def in_a_loop(step, expected):
    """Another thread that does something again and again, and what it got that it should not."""
    stop, begun, wrong = threading.Event(), threading.Event(), []

    def loop():
        while not stop.is_set() and not wrong:
            try:
                found = step()
                if not found.equal(expected):
                    wrong.append((found, expected))
            except Exception as error:
                wrong.append(error)
            begun.set()

    thread = threading.Thread(target=loop)
    thread.start()
    begun.wait()
    try:
        yield wrong
    finally:
        stop.set()
        thread.join()


MODELS = {"hosted": hosted_over_ids, "opened": lambda: open_model(zoo.build("gpt2").eval())}


OF_NEXT_TOKENS = {"measure_sufficiency", "measure_top_k", "measure_edge_budget"}
BESIDE = [
    (name, kind)
    for name in {**PROBES, **MEASURES}
    for kind in MODELS
    if kind == "opened" or name not in OF_NEXT_TOKENS
]


@pytest.mark.parametrize(("name", "kind"), some_of(BESIDE, *BESIDE[::6]))
def test_beside_threads_a_measure_is_what_it_is_alone(name, kind):
    """One calls the model, one differentiates: influence was 0, passes of the user's were wrong."""
    measure, x = {**PROBES, **MEASURES}[name], token_ids()
    alone, model = MODELS[kind]().eval(), MODELS[kind]().eval()
    with torch.no_grad():
        output = alone(x[:5])
    expected = measure(alone, x)

    def run_the_model():
        with torch.no_grad():
            return model(x[:5])

    with (
        in_a_loop(run_the_model, output) as passes,
        in_a_loop(differentiate, differentiate()) as derivatives_of_the_user,
    ):
        found = measure(model, x)
    assert not passes
    assert not derivatives_of_the_user
    if isinstance(found, Result):
        assert_equal(found, expected, tolerance=1e-4)
    else:
        assert found == expected


INFLUENCES = [
    lambda: JacobianInfluence(),
    lambda: JacobianInfluence(chunk_size=5),
    lambda: GradientTimesInput(),
]


@contextmanager
def differentiating(pool):
    """Another thread inside of torch.func.jvp, until it may leave."""
    inside, leave = threading.Event(), threading.Event()

    def wait(x):
        inside.set()
        leave.wait()
        return x

    def work():
        one = torch.ones(())
        return torch.func.jvp(wait, (one,), (one,))[1]

    done = pool.submit(work)
    inside.wait()
    try:
        yield lambda: (leave.set(), done.result())[1]
    finally:
        leave.set()


@pytest.mark.parametrize("make", INFLUENCES)
def test_a_thread_that_was_there_before_takes_no_tangents_away(make, model, inputs, monkeypatch):
    monkeypatch.setattr(derivatives, "_PATIENCE", 0.01)
    (expected,) = run_probes(model, inputs[:3], [make()], progress=False)
    with ThreadPoolExecutor(1) as pool, differentiating(pool) as leave:
        (found,) = run_probes(model, inputs[:3], [make()], progress=False)
        assert leave() == 1
    torch.testing.assert_close(found.influence, expected.influence, rtol=1e-4, atol=1e-6)
    assert found.notes == expected.notes
    assert not derivatives._is_ours


@pytest.mark.parametrize("make", INFLUENCES)
def test_tangents_that_are_taken_away_are_noticed(make, model, inputs, monkeypatch):
    """By the number that goes along, where other code enters past all that keeps it out."""
    (expected,) = run_probes(model, inputs[:3], [make()], progress=False)
    monkeypatch.setattr(derivatives, "_level", nullcontext)
    taken = []
    with ThreadPoolExecutor(1) as pool, differentiating(pool) as leave:

        def take_tangents_away(module, inputs):
            if torch._C._functorch.is_functorch_wrapped_tensor(inputs[0]) and not taken:
                taken.append(leave())

        model.blocks[1].register_forward_pre_hook(take_tangents_away)
        (found,) = run_probes(model, inputs[:3], [make()], progress=False)
    assert taken
    torch.testing.assert_close(found.influence, expected.influence, rtol=1e-4, atol=1e-6)


def test_a_thread_that_comes_later_keeps_its_tangents(model, inputs, monkeypatch):
    """It stays inside until the measurement has ended, and the level stays for it."""
    monkeypatch.setattr(derivatives, "_PATIENCE", 0.01)
    (expected,) = run_probes(model, inputs[:3], [JacobianInfluence()], progress=False)
    others = []
    with ThreadPoolExecutor(1) as pool:

        def come(module, inputs):
            if not others and derivatives._is_ours:
                others.append(differentiating(pool))
                others.append(others[0].__enter__())

        model.blocks[1].register_forward_pre_hook(come)
        (found,) = run_probes(model, inputs[:3], [JacobianInfluence()], progress=False)
        is_left_open = derivatives._is_ours
        assert others[1]() == 1
    assert is_left_open
    assert found.influence.equal(expected.influence)
    assert run_probes(model, inputs[:3], [JacobianInfluence()], progress=False)[0].influence.equal(
        expected.influence
    )
    assert not derivatives._is_ours
    assert differentiate() != 0


def test_a_bridge_that_mixes_passes_of_two_threads_is_refused():
    """TransformerLens 4 keeps how many sequences a pass has where the pass of another finds it."""
    model = zoo.bridge("gpt2")
    if not hasattr(model, "pos_embed"):
        pytest.skip("no bridge of TransformerLens 4")
    ids = zoo.tokens(1, 7)
    run_probes(model, ids, [PatternsProbe()], progress=False)

    def other_thread(activation, hook):
        model.pos_embed._current_batch_size = 5

    model.add_hook("pos_embed.hook_in", other_thread)
    with pytest.raises(InfoFlowError, match=r"5 sequences in a pass of 1: .* mixes passes of two"):
        run_probes(model, ids, [PatternsProbe()], progress=False)


def model_of(kind):
    if kind == "own":
        return make_token_model().eval()
    return zoo.bridge("llama") if kind == "bridge" else open_model(zoo.build("llama"))


@pytest.mark.parametrize("kind", ["own", "bridge"])
def test_edits_and_starts_are_those_of_the_thread_that_makes_them(kind, tmp_path):
    model, x = model_of(kind), token_ids(3)
    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        plain = model(x)
        meanwhile = []

        def other_pass(activation, hook):
            if not meanwhile:
                meanwhile.append(None)  # before the pass, which would come here as well
                with torch.no_grad():
                    meanwhile[0] = pool.submit(lambda: model(x).detach()).result()
            return activation * 2

        entering = torch.ones(3, x.shape[1], model.cfg.d_model)
        for start in (None, ("blocks.0.hook_resid_pre", entering)):
            meanwhile.clear()
            edit = {"blocks.0.hook_resid_post": other_pass}
            edited = call(model, x, edit=edit, start=start, output=True).output
            assert not edited.allclose(plain)
            assert meanwhile[0].equal(plain)


def test_hooks_of_the_user_act_on_their_own_passes_meanwhile(token_model, token_inputs):
    """Influence runs without them, also where another thread runs the model with them."""
    x, seen = token_inputs[:2], []
    with ThreadPoolExecutor(1) as pool:

        def run_beside(module, inputs):
            if derivatives._is_ours and not seen:
                seen.append(None)
                seen[0] = pool.submit(lambda: token_model(x).detach()).result()

        token_model.blocks[0].register_forward_pre_hook(run_beside)
        token_model.add_hook("blocks.1.hook_resid_post", lambda activation, hook: activation * 2)
        expected = token_model(x).detach()
        run_probes(token_model, x, [JacobianInfluence(layers=(0,))], progress=False)
        assert seen[0].equal(expected)
