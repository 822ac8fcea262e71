"""Probes leave a model as they found it, and see exactly the passes that are complete."""

import copy
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest
import torch
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge
from transformers import DynamicCache

from infoflow_lens import (
    InfoFlowError,
    JacobianInfluence,
    PositionsProbe,
    RecoveryProbe,
    attach,
    inspect_model,
    open_model,
    run_probes,
)
from infoflow_lens.hooks import (
    AttendedProbe,
    GradientTimesInput,
    Needs,
    PatternsProbe,
    ResampleInfluence,
    measure_edge_budget,
    measure_mechanisms,
    measure_sufficiency,
    measure_top_k,
    measure_why,
    probe_cache,
)
from infoflow_lens.hooks.model.semantics import attention_hooks
from infoflow_lens.hooks.probe import Split
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.models.host import build_model, build_token_model
from tests.conftest import some_of, spread
from tests.reference import zoo
from tests.versions import needs_hooked_transformer, needs_version_4


def all_probes():
    return [PositionsProbe((1, 2)), RecoveryProbe((1, 2)), JacobianInfluence()]


def snapshot(model):
    return {
        "hooks": {name: list(point.fwd_hooks) for name, point in model.hook_dict.items()},
        "raw hooks": {name: len(point._forward_hooks) for name, point in model.hook_dict.items()},
        "training": [module.training for module in model.modules()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "grads": [p.grad if p.grad is None else p.grad.tolist() for p in model.parameters()],
        "weights": [p.detach().clone() for p in model.parameters()],
        "torch rng": torch.get_rng_state(),
        "numpy rng": np.random.get_state()[1].tolist(),  # noqa: NPY002
        "python rng": random.getstate(),
        "grad mode": torch.is_grad_enabled(),
        "context": model.context_level,
    }


def assert_same(before, after):
    for name, value in before.items():
        if name in ("weights", "torch rng"):
            assert all(
                a.equal(b) for a, b in zip(torch.atleast_1d(*value), torch.atleast_1d(*after[name]))
            ), name
        else:
            assert value == after[name], name


@pytest.fixture(params=["vector tokens", "token ids"])
def case(request, model, inputs, token_model, token_inputs):
    return (model, inputs) if request.param == "vector tokens" else (token_model, token_inputs)


@pytest.mark.parametrize("make", [PositionsProbe, RecoveryProbe, JacobianInfluence])
def test_the_model_is_left_as_it_was_when_the_model_raises(case, make, monkeypatch):
    model, inputs = case

    def fail(*args, **kwargs):
        raise RuntimeError("inside the model")

    before = snapshot(model)
    attn = model.blocks[1].attn
    attn = getattr(attn, "original_component", attn)  # of a bridge, which has no forward of its own
    with monkeypatch.context() as patch:
        patch.setattr(attn, "forward", fail)
        with pytest.raises(RuntimeError, match="inside the model"):
            run_probes(model, inputs, [make()], progress=False)
    assert_same(before, snapshot(model))


def test_outputs_are_unchanged_while_probes_are_attached(case):
    model, inputs = case
    alone = model(inputs)
    with attach(model, *all_probes()):
        observed = model(inputs)
    assert observed.equal(alone)


def test_gradients_flow_through_a_probed_pass(model, inputs):
    with attach(model, *all_probes()):
        model(inputs).square().mean().backward()
    probed = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model(inputs).square().mean().backward()
    alone = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(a.equal(b) for a, b in zip(probed, alone, strict=True))


def test_hooks_of_the_user_run_once_a_pass_and_survive(model, inputs):
    seen = []
    model.add_hook("blocks.0.hook_resid_post", lambda activation, hook: seen.append(1))
    run_probes(model, inputs, [PositionsProbe(), RecoveryProbe()], batch_size=10, progress=False)
    assert len(seen) == 3
    model(inputs)
    assert len(seen) == 4


def test_an_intervention_of_the_user_is_part_of_what_is_probed(model, inputs):
    """Zeroing what layer 0 attends to leaves the sources only their own residual stream."""

    def ablate(activation, hook):
        return torch.zeros_like(activation)

    hooks = [("blocks.0.attn.hook_z", ablate)]
    probe = JacobianInfluence(through_hooks=True)
    with model.hooks(fwd_hooks=hooks):
        (result,) = run_probes(model, inputs[:3], [probe], progress=False)
    off_diagonal = result.influence[0, :, :7] * (1 - torch.eye(7))
    assert off_diagonal.abs().max() == 0


def test_an_intervention_is_refused_unless_it_takes_part(model, inputs):
    """Positions see it; a derivative that leaves it out would be of another model."""
    hooks = [("blocks.0.attn.hook_z", lambda activation, hook: activation * 2)]
    with (
        model.hooks(fwd_hooks=hooks),
        pytest.raises(InfoFlowError, match="through_hooks=True"),
    ):
        run_probes(model, inputs, [JacobianInfluence()], progress=False)


def test_an_intervention_at_the_tokens_is_refused(model, inputs):
    """Influence would be that of the changed tokens, not of the input."""
    with (
        model.hooks(fwd_hooks=[("hook_tokens", lambda tokens, hook: tokens * 2)]),
        pytest.raises(InfoFlowError, match="make the change in the inputs"),
    ):
        run_probes(model, inputs, [JacobianInfluence()], progress=False)


def test_what_the_user_stores_keeps_its_gradient(model, inputs):
    """Passes of the probe's own must not overwrite what a user's hook has stashed."""

    def loss():
        stored, calls = {}, []

        def stash(activation, hook):
            stored["state"] = activation
            calls.append(1)

        with model.hooks(fwd_hooks=[("blocks.0.hook_resid_post", stash)]):
            output = model(inputs[:4])
        return output.square().mean() + stored["state"].square().mean(), calls

    expected, _ = loss()
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(expected, parameters, allow_unused=True)
    with attach(model, JacobianInfluence()):
        probed, calls = loss()
    assert calls == [1]
    for mine, theirs in zip(
        torch.autograd.grad(probed, parameters, allow_unused=True), gradients, strict=True
    ):
        assert (mine is None and theirs is None) or mine.equal(theirs)


def test_a_cache_made_under_a_probe_is_an_ordinary_one(model, inputs):
    with attach(model, JacobianInfluence()):
        _, cache = model.run_with_cache(inputs)
    _, expected = model.run_with_cache(inputs)
    for name, value in expected.items():
        assert cache[name].cpu().numpy().tobytes() == value.numpy().tobytes(), name


def test_own_loop_equals_run_probes(model, inputs):
    positions, recovery, influence = all_probes()
    with attach(model, positions, recovery, influence) as probes:
        for batch in inputs.split(4):
            model(batch)
    by_loop = probes.results()
    by_call = run_probes(model, inputs, all_probes(), batch_size=9, progress=False)
    assert by_loop[0].positions[1].equal(by_call[0].positions[1])
    torch.testing.assert_close(by_loop[1].fvu[1], by_call[1].fvu[1], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(by_loop[2].influence, by_call[2].influence)


def test_plain_hooks_for_run_with_hooks(model, inputs):
    probe = PositionsProbe()
    model.run_with_hooks(inputs, fwd_hooks=probe.fwd_hooks(model))
    (expected,) = run_probes(model, inputs, [PositionsProbe()], progress=False)
    assert probe.result().positions[0].equal(expected.positions[0])


def test_fitting_and_evaluating_by_hand(model, inputs):
    with attach(model, RecoveryProbe()) as probes:
        with probes.fitting():
            model(inputs[:15])
        with probes.evaluating():
            model(inputs[15:])
    (expected,) = run_probes(
        model, inputs[:15], [RecoveryProbe()], eval_inputs=inputs[15:], progress=False
    )
    assert probes[0].result().n_fit == expected.n_fit == (15 * 7, 15 * 7)
    assert probes[0].result().fvu[0].equal(expected.fvu[0])


@pytest.mark.parametrize("sizes", [(1, 2, 3, 4), (10,), (5, 5)])
def test_the_split_depends_on_the_index_alone(sizes):
    split, first, parts = Split(every=3), 0, []
    for size in sizes:
        parts.append(split.held_out(split.indices(first, size)))
        first += size
    assert torch.cat(parts).nonzero().flatten().tolist() == [2, 5, 8]


def test_a_pass_that_ends_early_is_left_out_and_said(model, inputs):
    with attach(model, PositionsProbe()) as probes:
        model(inputs[:3], stop_at_layer=1)
        model(inputs[3:7])
    result = probes[0].result()
    assert len(result.positions[0]) == 4
    assert "1 incomplete forward pass" in result.notes[0]
    assert "blocks.1.attn.hook_attn_scores" in result.notes[0]


def test_only_partial_passes_name_the_hook_that_never_fired(model, inputs):
    with attach(model, PositionsProbe()) as probes:
        model(inputs, stop_at_layer=1)
        model(inputs, stop_at_layer=1)
    with pytest.raises(InfoFlowError, match=r"blocks\.1\.attn\.hook_attn_scores never fired"):
        probes[0].result()


def test_one_partial_pass_is_no_silence(model, inputs):
    with attach(model, PositionsProbe()) as probes:
        model(inputs, stop_at_layer=1)
    with pytest.raises(InfoFlowError, match=r"blocks\.1\.attn\.hook_attn_scores never fired"):
        probes[0].result()


def test_a_block_without_a_pass_has_no_result(model):
    with attach(model, PositionsProbe()) as probes:
        pass
    with pytest.raises(InfoFlowError, match="has measured nothing"):
        probes.results()


@pytest.mark.parametrize("name", ["blocks.0.hook_resid_pre", "blocks.1.hook_resid_post"])
def test_interrupted_probing_keeps_the_finished_batches(model, inputs, name):
    """Wherever in the third batch it happens, all probes have the same two."""
    calls = []

    def interrupt(activation, hook):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    model.add_hook(name, interrupt)
    probes = [PositionsProbe(), RecoveryProbe()]
    with pytest.raises(KeyboardInterrupt):
        run_probes(model, inputs, probes, batch_size=5, progress=False)
    model.reset_hooks()
    (expected,) = run_probes(model, inputs[:10], [RecoveryProbe()], progress=False)
    assert len(probes[0].result().positions[0]) == 10
    torch.testing.assert_close(probes[1].result().fvu[0], expected.fvu[0])


def test_parts_of_different_passes_are_not_stitched_together(model, inputs):
    middle = model(inputs[10:], stop_at_layer=1)
    with attach(model, PositionsProbe()) as probes:
        model(inputs[:10], stop_at_layer=1)
        model(middle, start_at_layer=1)
    with pytest.raises(InfoFlowError, match="never fired"):
        probes.results()


def test_a_probe_counts_every_sequence_once(model, inputs):
    probe = PositionsProbe()
    with pytest.raises(InfoFlowError, match="attached twice"):
        run_probes(model, inputs, [probe, probe], progress=False)
    with (
        attach(model, probe),
        pytest.raises(InfoFlowError, match="attached twice"),
        attach(model, probe),
    ):
        pass
    run_probes(model, inputs, [probe], progress=False)
    with pytest.raises(InfoFlowError, match="into itself"):
        probe.merge(probe)
    with pytest.raises(InfoFlowError, match="expected a list of probes"):
        run_probes(model, inputs, probe, progress=False)


def test_blocks_on_one_model_may_be_nested_and_end_in_any_order(model, inputs):
    first, second = attach(model, PositionsProbe()), attach(model, RecoveryProbe())
    outer = first.__enter__()
    model(inputs[:5])
    inner = second.__enter__()
    model(inputs[5:9])
    first.__exit__(None, None, None)
    model(inputs[9:])
    second.__exit__(None, None, None)
    model(inputs)
    assert "forward" not in model.__dict__
    assert [probe.n_sequences for probe in (*outer, *inner)] == [9, 18]


def test_passes_by_which_a_model_is_opened_are_not_measured():
    """A plain model is opened by whoever measures it, also while probes are attached to it."""
    plain, ids = zoo.build("gpt2").eval(), zoo.tokens(3, 7)
    with attach(plain, PositionsProbe()) as outer:
        run_probes(plain, ids, [PositionsProbe()], progress=False)
        with attach(plain, PositionsProbe()) as inner:
            plain(ids)
    assert [probes[0].n_sequences for probes in (outer, inner)] == [3, 3]


def test_passes_of_run_probes_are_its_own(model, inputs):
    with attach(model, PositionsProbe()) as probes:
        run_probes(model, inputs, [PositionsProbe()], progress=False)
        model(inputs[:5])
    assert probes[0].n_sequences == 5


def test_a_forward_that_the_user_wrapped_is_run_and_kept(model, inputs):
    own, calls = model.forward, []

    def wrapped(*args, **kwargs):
        calls.append(1)
        return own(*args, **kwargs)

    model.forward = wrapped
    with attach(model, PositionsProbe()) as probes:
        model(inputs)
    assert model.forward is wrapped
    assert (calls, probes[0].n_sequences) == ([1], 23)


def test_a_wrapper_that_changes_what_the_mask_is_for_is_refused(token_model, token_inputs):
    """Nobody could say where the padding stands then."""
    own, ids = token_model.forward, token_inputs[:, :6]
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0

    def longer(given, **settings):
        one = torch.ones_like(given[:, :1])
        mask = settings.get("attention_mask")
        if mask is not None:
            settings["attention_mask"] = torch.cat([mask, one], dim=1)
        return own(torch.cat([given, one], dim=1), **settings)

    token_model.forward = longer
    message = "7 positions, the attention_mask of the call 6: expected the same"
    with pytest.raises(InfoFlowError, match=message), attach(token_model, PositionsProbe()):
        token_model(ids, attention_mask=mask)


def test_what_a_block_does_not_support_is_refused_by_name(token_model, token_inputs, model, inputs):
    """A second thread, copying and pickling."""
    with attach(token_model, PositionsProbe()) as probes, torch.no_grad():
        token_model(token_inputs)
        with ThreadPoolExecutor(1) as pool:
            for call in (
                lambda: token_model(token_inputs),
                lambda: run_probes(token_model, token_inputs, [PositionsProbe()], progress=False),
                lambda: attach(token_model, PositionsProbe()).__enter__(),
            ):
                with pytest.raises(InfoFlowError, match=r"(second|another) thread"):
                    pool.submit(call).result()
    assert probes[0].n_sequences == len(token_inputs)
    for make in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        message = "copied or pickled while probes are attached"
        with attach(model, PositionsProbe()), pytest.raises(InfoFlowError, match=message):
            make(model)
        assert make(model)(inputs).equal(model(inputs))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch.compile, about TransformerLens
@pytest.mark.parametrize("compiled_before", [True, False])
def test_a_compiled_wrapper_of_an_attached_model_is_measured(case, compiled_before):
    model, inputs = case
    wrapper = torch.compile(model, backend="eager")
    with torch.no_grad():
        if compiled_before:
            wrapper(inputs)
        with attach(model, PositionsProbe()) as probes:
            wrapper(inputs)
    (expected,) = run_probes(model, inputs, [PositionsProbe()], progress=False)
    for one, other in zip(probes[0].result().positions, expected.positions, strict=True):
        assert one.equal(other)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch.compile, about TransformerLens
def test_batches_of_other_sizes_compile_nothing_of_ours(case):
    model, inputs = case
    wrapper = torch.compile(model, backend="eager")
    with (
        torch._dynamo.config.patch(error_on_recompile=True),
        torch.no_grad(),
        attach(model, PositionsProbe()) as probes,
    ):
        for n in (1, 2, 5):
            wrapper(inputs[:n])
    assert probes[0].n_sequences == 8


def test_resetting_hooks_takes_none_of_ours(model, inputs):
    """Between calls there are none, so a user's reset cannot leave a pass out in silence."""
    with attach(model, PositionsProbe()) as probes:
        model(inputs[:5])
        model.reset_hooks(including_permanent=True)
        model(inputs[5:])
    assert probes[0].n_sequences == 23
    assert probes[0].result().notes == ()


def test_inference_mode_and_ordinary_passes_add_up(model, inputs):
    with attach(model, RecoveryProbe(), PositionsProbe()) as probes:
        with torch.inference_mode():
            model(inputs[:10])
        model(inputs[10:])
    expected, _ = run_probes(model, inputs, [RecoveryProbe(), PositionsProbe()], progress=False)
    torch.testing.assert_close(probes[0].result().fvu[1], expected.fvu[1])


def test_an_empty_batch_is_no_pass(token_inputs):
    token_model = build_token_model(
        n_layers=2, n_heads=4, d_head=5, d_model=12, n_tokens=9, d_vocab=17, d_output=17,
        attention="softmax",
    )  # fmt: skip
    with attach(token_model, *all_probes()) as probes, torch.no_grad():
        token_model(token_inputs[:0])
        token_model(token_inputs)
    assert all(probe.n_sequences == 19 for probe in probes)


@needs_hooked_transformer
def test_cached_keys_are_refused(token_model, token_inputs):
    from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

    cache = TransformerLensKeyValueCache.init_cache(token_model.cfg, "cpu", 19)
    with attach(token_model, RecoveryProbe()):
        whole = torch.ones_like(token_inputs)
        token_model(token_inputs[:, :4], past_kv_cache=cache, attention_mask=whole[:, :4])
        with pytest.raises(InfoFlowError, match="without past_kv_cache"):
            token_model(token_inputs[:, 4:], past_kv_cache=cache, attention_mask=whole[:, 4:])


# transformers 5.24 and later
OLD_NAME = "ignore:`past_key_values` is deprecated:FutureWarning"


@pytest.mark.filterwarnings(OLD_NAME)
@pytest.mark.parametrize("native", [True, False])
def test_cached_keys_that_a_bridge_would_leave_out_are_refused(tmp_path, native):
    """It takes them and says nothing, so the pass would be of the last tokens alone."""
    if native:
        config = TransformerBridgeConfig(
            n_layers=2, d_model=12, n_ctx=9, d_head=3, n_heads=4, d_vocab=50, d_mlp=5, act_fn="gelu"
        )
        with torch.random.fork_rng():
            model = TransformerBridge.boot_native(config)
    else:
        model = zoo.bridge("gpt2")
    ids = zoo.tokens(2, 6)
    cache = DynamicCache()
    with attach(model, PositionsProbe()) as probes, torch.no_grad():
        with pytest.raises(InfoFlowError, match="without past_kv_cache"):
            model(ids, past_kv_cache=object())
        model(ids, past_key_values=cache)  # empty: a whole pass
        cache.update(torch.zeros(2, 4, 3, 4), torch.zeros(2, 4, 3, 4), 0)
        for name in ("past_key_values", "cache"):
            with pytest.raises(InfoFlowError, match="without past_kv_cache"):
                model(ids, **{name: cache})
        with pytest.raises(InfoFlowError, match="without past_kv_cache"):
            model(ids[:, 4:], attention_mask=torch.ones(2, 6))  # whose keys are not there
    assert probes[0].n_sequences == 2


def test_a_model_without_the_needed_hook(model, inputs):
    for name in ("hook_attn_scores", "hook_pattern"):
        del model.hook_dict[f"blocks.1.attn.{name}"]
    with pytest.raises(InfoFlowError, match="nor hook_pattern fires in layer 1"):
        run_probes(model, inputs, [PositionsProbe()], progress=False)


def test_a_model_from_elsewhere(inputs):
    with pytest.raises(InfoFlowError, match="Linear does not run on an example"):
        run_probes(torch.nn.Linear(3, 3), inputs, [PositionsProbe()], progress=False)


def test_nan_inside_the_model_is_named(model, inputs):
    with torch.no_grad():
        model.blocks[1].attn.W_Q[0, 0, 0] = torch.nan
    for probe in (PositionsProbe(), RecoveryProbe()):
        with pytest.raises(InfoFlowError, match=r"blocks\.1\.attn\.hook_attn_scores holds NaN"):
            run_probes(model, inputs, [probe], progress=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:0], "at least one sequence"),
        (lambda x: x[..., :2], r"vector tokens \[batch, 7, 3\]"),
        (lambda x: x[:, :5], r"vector tokens \[batch, 7, 3\]"),
        (lambda x: x.double(), r"convert with x\.to\(torch\.float32\)"),
        (lambda x: x[0, 0], "expected a tensor, vector tokens"),
        (lambda x: 7, "inputs is int"),
        (lambda x: x.masked_fill(x == x[7, 1, 2], torch.nan), "first in sequence 7"),
        (lambda x: x.masked_fill(x == x[7, 1, 2], torch.inf), "NaN or infinite tokens"),
    ],
)
def test_bad_inputs_are_named_before_the_model_runs(model, inputs, change, message):
    probe = PositionsProbe()
    with pytest.raises(InfoFlowError, match=message):
        run_probes(model, change(inputs), [probe], progress=False)
    with pytest.raises(InfoFlowError, match=message.replace("inputs is", "eval_inputs is")):
        run_probes(model, inputs, [probe], eval_inputs=change(inputs), progress=False)
    assert probe.n_sequences == 0


def test_bad_token_ids_are_named(token_model, token_inputs):
    with pytest.raises(InfoFlowError, match="where token ids are read"):
        run_probes(token_model, token_inputs.float(), [PositionsProbe()], progress=False)
    with pytest.raises(InfoFlowError, match="where token ids are read"):
        run_probes(token_model, token_inputs[:, :, None], [PositionsProbe()], progress=False)
    for wrong in (-100, 17):
        ids = token_inputs.clone()
        ids[3, 3] = wrong
        with pytest.raises(InfoFlowError, match=r"expected 0 to d_vocab - 1 \(16\)"):
            run_probes(token_model, ids, [PositionsProbe()], progress=False)
    long = token_inputs.repeat(1, 2)
    with pytest.raises(InfoFlowError, match="at most n_ctx 9"):
        run_probes(token_model, long, [PositionsProbe()], progress=False)


def test_ranks_that_no_query_has_are_undefined_and_said(model, inputs):
    """CLS is a position but no key, so one rank fewer than positions is defined."""
    with attach(model, PositionsProbe((1, 8))) as probes:
        model(inputs)
    (found,) = probes.results()
    assert (found.positions[0][..., 1] == -1).all()
    assert found.notes == tuple(f"layer {i}: no query has a key of rank 8" for i in (0, 1))
    with pytest.raises(InfoFlowError, match="rank 8 is beyond the number of keys"):
        run_probes(model, inputs, [PositionsProbe((8,))], progress=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"batch_size": 0}, "batch_size is 0"), ({"eval_every": 1}, "eval_every is 1")],
)
def test_bad_settings_are_named(model, inputs, arguments, message):
    with pytest.raises(InfoFlowError, match=message):
        run_probes(model, inputs, [PositionsProbe()], progress=False, **arguments)


def test_cls_is_a_rank_where_it_is_a_key(inputs):
    """In eq 1 it is none."""
    sizes = {"n_heads": (2,), "d_model": 12, "d_token": 3, "n_tokens": 7}
    for cls_is_key in (False, True):
        model, ranks = build_model(Architecture(**sizes, cls_is_key=cls_is_key)), 7 + cls_is_key
        (found,) = run_probes(model, inputs, [PositionsProbe((ranks,))], progress=False)
        assert found.positions[0].ge(0).all()
        with pytest.raises(InfoFlowError, match=f"ask for ranks up to {ranks}"):
            run_probes(model, inputs, [PositionsProbe((ranks + 1,))], progress=False)


def test_attaching_no_probes_is_refused(model):
    with pytest.raises(InfoFlowError, match="no probes"), attach(model):
        pass


def test_a_probe_belongs_to_one_model(architecture, model, inputs):
    probe = PositionsProbe()
    run_probes(model, inputs, [probe], progress=False)
    other = build_model(architecture, seed=6)
    with pytest.raises(InfoFlowError, match="use a new probe for each model"):
        run_probes(other, inputs, [probe], progress=False)


def test_only_like_probes_merge(model, inputs):
    first, second = PositionsProbe((1,)), PositionsProbe((2,))
    with pytest.raises(InfoFlowError, match="cannot merge"):
        first.merge(second)


def test_merging_appends_sequences(model, inputs):
    first, second = PositionsProbe(), PositionsProbe()
    run_probes(model, inputs[:9], [first], progress=False)
    run_probes(model, inputs[9:], [second], progress=False)
    (whole,) = run_probes(model, inputs, [PositionsProbe()], progress=False)
    assert first.merge(second).result().positions[1].equal(whole.positions[1])
    assert PositionsProbe().merge(first).result().positions[1].equal(whole.positions[1])


def test_a_cache_that_one_has_gives_the_same(case):
    model, inputs = case
    expected = run_probes(model, inputs, all_probes(), progress=False)
    model.eval()
    probes, found = all_probes(), ()
    for batch in inputs.split(10):
        _, cache = model.run_with_cache(batch)
        found = probe_cache(model, cache, probes, tokens=batch)
    for one, other in zip(found, expected, strict=True):
        assert one.to_frame().round(5).equals(other.to_frame().round(5))


def test_a_cache_that_lacks_something_is_refused(token_model, token_inputs):
    _, cache = token_model.run_with_cache(token_inputs, names_filter="blocks.0.hook_resid_pre")
    missing = ", ".join(attention_hooks(token_model, (0, 1)))
    with pytest.raises(InfoFlowError, match=f"lacks {missing}, which PositionsProbe read"):
        probe_cache(token_model, cache, [PositionsProbe()])
    _, cache = token_model.run_with_cache(token_inputs[:1], remove_batch_dim=True)
    with pytest.raises(InfoFlowError, match="has no batch axis"):
        probe_cache(token_model, cache, [PositionsProbe()])


def test_a_pass_ends_when_all_is_seen(model, inputs, monkeypatch):
    """The MLP of the last layer is never run, unless a hook of the user's could look at it."""
    ran = []
    original = model.blocks[1].mlp.forward
    monkeypatch.setattr(
        model.blocks[1].mlp, "forward", lambda x: (ran.append(len(x)), original(x))[1]
    )
    probes = [PositionsProbe(), RecoveryProbe()]
    expected = run_probes(model, inputs, probes, batch_size=10, progress=False)
    assert ran == []
    seen = []
    with model.hooks(fwd_hooks=[("blocks.1.hook_resid_post", lambda a, hook: seen.append(1))]):
        found = run_probes(
            model, inputs, [PositionsProbe(), RecoveryProbe()], batch_size=10, progress=False
        )
    assert len(ran) == len(seen) == 3
    for one, other in zip(found, expected, strict=True):
        assert one.to_frame().equals(other.to_frame())
    with attach(model, PositionsProbe()):
        assert model(inputs).shape == (23, 1)  # the user's own call is never cut short


@pytest.mark.filterwarnings(OLD_NAME)
@pytest.mark.parametrize("make", [PositionsProbe, AttendedProbe])
@pytest.mark.parametrize(
    "kind", ["bridge", pytest.param("token model", marks=needs_hooked_transformer)]
)
def test_generation_with_a_cache_is_refused(token_model, tmp_path, make, kind):
    model = token_model if kind == "token model" else zoo.bridge("gpt2")
    with attach(model, make()), pytest.raises(InfoFlowError, match="without past_kv_cache"):
        model.generate(zoo.tokens(2, 4) % 17, max_new_tokens=3, verbose=False, stop_at_eos=False)


@needs_version_4
def test_generation_without_a_cache_is_whole_passes(token_model, token_inputs):
    """As a native bridge generates: every pass reads the sequence from its beginning."""
    with attach(token_model, PositionsProbe()) as probes:
        ids = token_model.generate(
            token_inputs[:2, :4], max_new_tokens=2, verbose=False, stop_at_eos=False
        )
    found = probes[0].result()
    (expected,) = run_probes(token_model, ids[:, :5], [PositionsProbe()], progress=False)
    assert found.lengths.tolist() == [4, 4, 5, 5]
    for one, other in zip(found.positions, expected.positions, strict=True):
        assert one[2:].equal(other)


EDITED = ["token model", "bridge"], [None, 1]


@pytest.mark.parametrize(
    ("kind", "source_layer"), some_of(list(product(*EDITED)), *spread(*EDITED))
)
def test_an_edit_where_sources_enter_is_refused_and_looking_is_not(
    token_model, token_inputs, tmp_path, kind, source_layer
):
    if kind == "bridge":  # its passes run whole
        token_model = zoo.bridge("gpt2")
    point = f"blocks.{source_layer or 0}.hook_resid_pre"
    make = lambda **more: JacobianInfluence(source_layer=source_layer, **more)  # noqa: E731
    (plain,) = run_probes(token_model, token_inputs[:3], [make()], progress=False)

    def cut(activation, hook):
        activation = activation.clone()
        activation[:, 3] = 0
        return activation

    with (
        token_model.hooks(fwd_hooks=[(point, cut)]),
        pytest.raises(InfoFlowError, match="where the sources enter"),
    ):
        run_probes(token_model, token_inputs[:3], [make()], progress=False)
    with token_model.hooks(fwd_hooks=[(point, cut)]):
        (through,) = run_probes(
            token_model, token_inputs[:3], [make(through_hooks=True)], progress=False
        )
    assert (through.influence[..., 3] == 0).all()
    with token_model.hooks(fwd_hooks=[(point, lambda activation, hook: None)]):
        (looked_at,) = run_probes(token_model, token_inputs[:3], [make()], progress=False)
    assert looked_at.influence.equal(plain.influence)
    mask = torch.ones(3, token_inputs.shape[1], dtype=torch.long)
    mask[0, -2:] = 0
    with (
        token_model.hooks(fwd_hooks=[(point, lambda activation, hook: None)]),
        attach(token_model, make()) as probes,
        torch.no_grad(),
    ):
        token_model(token_inputs[:3], attention_mask=mask)
    torch.testing.assert_close(probes[0].result().influence[:, 1:], plain.influence[:, 1:])


ON_THE_WAY = (
    [JacobianInfluence, GradientTimesInput, ResampleInfluence],
    [(None, "hook_embed"), (1, "blocks.0.hook_resid_post")],
)


@pytest.mark.parametrize(
    ("make", "place"), some_of(list(product(*ON_THE_WAY)), *spread(*ON_THE_WAY))
)
def test_an_edit_on_the_way_to_the_sources_is_refused(token_model, token_inputs, make, place):
    source_layer, point = place
    x, donors = token_inputs[:3], token_inputs[3:5]
    given = (donors,) if make is ResampleInfluence else ()
    probe = lambda **more: make(*given, source_layer=source_layer, **more)  # noqa: E731
    with token_model.hooks(fwd_hooks=[(point, lambda activation, hook: 1.7 * activation)]):
        with pytest.raises(InfoFlowError, match="where the sources enter"):
            run_probes(token_model, x, [probe()], progress=False)
        run_probes(token_model, x, [probe(through_hooks=True)], progress=False)
    with token_model.hooks(fwd_hooks=[(point, lambda activation, hook: None)]):
        run_probes(token_model, x, [probe()], progress=False)


def test_a_state_of_other_settings_is_refused(token_model, token_inputs):
    probe = PositionsProbe((2,))
    run_probes(token_model, token_inputs, [probe], progress=False)
    said = r"a state of \{'ranks': \[2\]\} with \{'ranks': \[1\]\}: expected"  # and not the rest
    with pytest.raises(InfoFlowError, match=said):
        PositionsProbe((1,)).load_state_dict(probe.state_dict())
    again = PositionsProbe((2,))
    again.load_state_dict(probe.state_dict())
    assert again.n_sequences == 19


def test_tokens_and_masks_must_be_those_of_the_cache(token_model, token_inputs):
    _, cache = token_model.run_with_cache(token_inputs)
    for wrong in (token_inputs[:, :5], token_inputs[:5]):
        with pytest.raises(InfoFlowError, match="tokens has shape"):
            probe_cache(token_model, cache, [PositionsProbe()], tokens=wrong)
    with pytest.raises(InfoFlowError, match="attention_mask has shape"):
        probe_cache(token_model, cache, [PositionsProbe()], attention_mask=torch.ones(19, 8))


# What a hostile look at the collector found


def test_backward_hooks_of_the_user_take_no_part(token_model, token_inputs):
    """They would change derivatives that the probe takes for itself."""
    x = token_inputs[:3]
    probes = [JacobianInfluence(positions=(-1,)), JacobianInfluence(estimate=4)]
    expected = run_probes(token_model, x, probes, progress=False)
    fired = []

    def block(gradient, hook):
        fired.append(1)
        return (gradient * 0,)

    token_model.add_hook("blocks.0.hook_attn_out", block, dir="bwd")
    found = run_probes(
        token_model,
        x,
        [JacobianInfluence(positions=(-1,)), JacobianInfluence(estimate=4)],
        progress=False,
    )
    for one, other in zip(found, expected, strict=True):
        assert one.influence.equal(other.influence)
    assert not fired


def test_passes_of_plain_hooks_are_not_stitched_together(model, inputs):
    """A pass that starts late, then a whole one: the late one counts as incomplete."""
    probe = PositionsProbe()
    hooks = probe.fwd_hooks(model)
    middle = model(inputs[5:10], stop_at_layer=1)
    model.run_with_hooks(middle, start_at_layer=1, fwd_hooks=hooks)
    model.run_with_hooks(inputs[:5], fwd_hooks=hooks)
    (expected,) = run_probes(model, inputs[:5], [PositionsProbe()], progress=False)
    for layer, positions in enumerate(probe.result().positions):
        assert positions.equal(expected.positions[layer])
    assert "1 incomplete" in probe.result().notes[0]


def test_plain_hooks_count_a_pass_once(model, inputs):
    probe = PositionsProbe()
    hooks = probe.fwd_hooks(model)
    with attach(model, probe):
        model.run_with_hooks(inputs[:5], fwd_hooks=hooks)
    assert probe.n_sequences == 5
    twice = probe.fwd_hooks(model) + probe.fwd_hooks(model)
    model.run_with_hooks(inputs[:5], fwd_hooks=twice)
    assert probe.n_sequences == 10


def test_plain_hooks_of_another_model_are_refused(architecture, model, inputs):
    other, probe = build_model(architecture, seed=6), PositionsProbe()
    with pytest.raises(InfoFlowError, match="for one model stand on another"):
        other.run_with_hooks(inputs, fwd_hooks=probe.fwd_hooks(model))


def test_activations_written_in_place_are_refused(token_model, token_inputs):
    def add(activation, hook):
        activation += 1.0
        return activation

    with (
        token_model.hooks(fwd_hooks=[("blocks.1.hook_resid_pre", add)]),
        attach(token_model, RecoveryProbe(source="resid_post")),
        torch.no_grad(),
        pytest.raises(InfoFlowError, match="was written in place after its hooks had run"),
    ):
        token_model(token_inputs)


@pytest.mark.parametrize("side", ["left", "right"])
def test_masks_given_by_place_are_seen(token_model, token_inputs, side):
    import inspect

    ids, mask = token_inputs.clone(), torch.ones_like(token_inputs)
    place = slice(0, 3) if side == "left" else slice(6, 9)
    mask[::2, place] = 0
    names = list(inspect.signature(type(token_model).forward).parameters)
    values = {
        name: parameter.default
        for name, parameter in inspect.signature(type(token_model).forward).parameters.items()
    }
    before = names[2 : names.index("attention_mask")]
    if any(values[name] is inspect.Parameter.empty for name in before):
        pytest.skip("the mask has no place in this version's signature")
    with attach(token_model, PositionsProbe()) as probes, torch.no_grad():
        token_model(ids, *(values[name] for name in before), mask)
    assert probes[0].result().lengths.tolist() == mask.sum(dim=1).tolist()


def test_states_that_cannot_be_read_are_named(model, inputs):
    probe = PositionsProbe()
    run_probes(model, inputs, [probe], progress=False)
    state = probe.state_dict()
    for broken in (
        None,
        {},
        {k: v for k, v in state.items() if k != "record"},
        state | {"record": {"unknown": 1}},
        state | {"measured": {}},
    ):
        again = PositionsProbe()
        with pytest.raises(InfoFlowError, match=r"cannot (be read|go on)"):
            again.load_state_dict(broken)
        assert again.n_sequences == 0


def test_a_probe_that_asks_for_nothing_there_is_refused(model, inputs):
    class Odd(PositionsProbe):
        def needs(self, model):
            return Needs(("blocks.9.hook_nowhere",))

    with pytest.raises(InfoFlowError, match=r"no hook point 'blocks\.9\.hook_nowhere'"):
        run_probes(model, inputs, [Odd()], progress=False)


ENTRANCES = {
    "attach": lambda model, x: attach(model, PositionsProbe()).__enter__(),
    "run_probes": lambda model, x: run_probes(model, x, [PositionsProbe()], progress=False),
    "probe_cache": lambda model, x: probe_cache(model, {}, [PositionsProbe()], tokens=x),
    "inspect_model": lambda model, x: inspect_model(model),
    "measure_mechanisms": lambda model, x: measure_mechanisms(model, x, progress=False),
    "measure_sufficiency": lambda model, x: measure_sufficiency(model, x, None, progress=False),
    "measure_edge_budget": lambda model, x: measure_edge_budget(model, x, x, progress=False),
    "measure_top_k": lambda model, x: measure_top_k(model, x, progress=False),
    "measure_why": lambda model, x: measure_why(model, x[0], 0, 0, 1),
    "fwd_hooks": lambda model, x: PositionsProbe().fwd_hooks(model),
}


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_compiled_models_are_refused(token_model, token_inputs, entrance):
    compiled = torch.compile(token_model, backend="eager")
    with pytest.raises(InfoFlowError, match="compiled code leaves hooks out"):
        ENTRANCES[entrance](compiled, token_inputs)


def test_a_model_that_another_module_wraps_is_measured_as_itself(tmp_path):
    class Wrapper(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.inner, name)

        def forward(self, *args, **kwargs):
            return self.inner(*args, **kwargs)

    model = zoo.bridge("llama")
    x = zoo.tokens(2, 7)
    found = [
        run_probes(m, x, [PositionsProbe((1, 2))], progress=False)[0]
        for m in (model, Wrapper(model))
    ]
    for one, other in zip(*(result.positions for result in found), strict=True):
        assert one.equal(other)


def test_models_that_compiled_themselves_are_refused(token_model, token_inputs):
    copied = copy.deepcopy(token_model)
    copied.compile(backend="eager")
    with pytest.raises(InfoFlowError, match="compiled code leaves hooks out"):
        run_probes(copied, token_inputs, [PositionsProbe()], progress=False)


@pytest.mark.parametrize("what", [lambda bridge: bridge, open_model], ids=["bridge", "opened"])
def test_a_bridge_is_probed_without_dropout_and_left_training(what):
    """Also in the modules that its own list of modules leaves out."""
    bridge = zoo.bridge("gpt2")
    bridge.train()
    drop = bridge.original_model.transformer.drop
    seen = []
    drop.register_forward_hook(lambda module, inputs, output: seen.append(module.training))
    run_probes(what(bridge), torch.ones(2, 7, dtype=torch.long), [PositionsProbe()])
    assert set(seen) == {False}
    assert drop.training
    assert all(module.training for module in bridge.original_model.modules())


@pytest.mark.parametrize("kind", [bool, float])
def test_a_mask_of_queries_and_keys_is_measured_in_a_call_of_ones_own(kind):
    """A prefix that sees all of itself, and a key that later queries lack; it was refused."""
    model, n = zoo.build("llama", attention="sdpa"), 8
    ids = torch.randint(zoo.N_VOCAB, (2, n), generator=torch.Generator().manual_seed(0))
    seen = torch.ones(n, n).tril().bool()
    seen[:4, :4], seen[6:, 5] = True, False
    added = torch.zeros(2, 1, n, n).masked_fill(~seen, torch.finfo(torch.float32).min)
    mask = seen.expand(2, 1, n, n) if kind is bool else added
    probes = (PositionsProbe(), PatternsProbe(), JacobianInfluence("resid_post"))
    with attach(model, *probes) as attached:
        model(input_ids=ids, attention_mask=mask)
    positions, patterns, influence = attached.results()
    plain = zoo.build("llama", attention="eager")
    with torch.no_grad():
        expected = plain(ids, attention_mask=added, output_attentions=True).attentions
    for layer, pattern in enumerate(expected):
        torch.testing.assert_close(patterns.patterns[layer], pattern, rtol=0, atol=1e-5)
        assert positions.positions[layer][..., 0].equal(pattern.argmax(-1))
    # passes that are run anew have the mask, too: what a query of layer 0 depends on
    depends = influence.influence[0] > 0
    assert depends.equal((seen | torch.eye(n).bool()).expand_as(depends))
    others = torch.randint(zoo.N_VOCAB, (4, n), generator=torch.Generator().manual_seed(1))
    with attach(model, ResampleInfluence(others, "mean")) as attached:
        model(input_ids=ids, attention_mask=mask)
    (replaced,) = attached.results()
    depends = replaced.influence[0] > 0
    assert depends.equal((seen | torch.eye(n).bool()).expand_as(depends))
