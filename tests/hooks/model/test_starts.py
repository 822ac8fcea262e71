"""Passes that begin at a block give what whole passes give, and leave out what stands before."""

import copy

import pytest
import torch

from infoflow_lens import inspect_model, open_model
from infoflow_lens.hooks import measure_mechanisms
from infoflow_lens.hooks.influence.base import Rerun
from infoflow_lens.hooks.model.call import block_starts, call
from infoflow_lens.hooks.model.inputs import Batch
from tests.reference import families, zoo

LAYER = 1


@pytest.fixture(params=["gpt2", "llama", "bert", "gpt_neox"])
def opened(request):
    return open_model(zoo.build(request.param))


def test_a_pass_that_starts_at_a_layer_gives_the_same_and_runs_the_rest_alone(opened):
    batch = Batch(zoo.tokens(3, 7))
    point = f"blocks.{LAYER}.hook_resid_pre"
    plain = call(opened, batch, [point], output=True)
    moved = plain.activations[point] + 0.1
    # the reference replaces what enters the layer by a plain hook, with all blocks run
    with opened.hooks(fwd_hooks=[(point, lambda activation, hook: moved)]):
        whole = opened(batch.tokens)
    calls = []
    inner = opened.anatomy.blocks[0].module
    forward = type(inner).forward

    def count(module, *args, **kwargs):
        calls.append(module)
        return forward(module, *args, **kwargs)

    type(inner).forward = count
    try:
        opened.refresh()
        from_layer = call(opened, batch, start=(point, moved), output=True).output
    finally:
        type(inner).forward = forward
    torch.testing.assert_close(from_layer, whole)
    n_layers = len(opened.anatomy.blocks)
    assert len(calls) in (n_layers - LAYER, 2 * n_layers - LAYER)  # the first start asks one pass


def test_what_stands_before_a_start_is_shown_where_somebody_looks(opened):
    batch = Batch(zoo.tokens(2, 6))
    point = f"blocks.{LAYER}.hook_resid_pre"
    entering = call(opened, batch, [point]).activations[point]
    below = "blocks.0.attn.hook_pattern"
    shown = call(opened, batch, [below, point], start=(point, entering * 2), output=True)
    torch.testing.assert_close(
        shown.activations[below], call(opened, batch, [below]).activations[below]
    )


def test_states_again_from_a_layer_are_those_of_the_pass(opened):
    batch = Batch(zoo.tokens(3, 7))
    point = f"blocks.{LAYER}.hook_resid_pre"
    after = [f"blocks.{layer}.hook_resid_post" for layer in range(LAYER, 2)]
    seen = call(opened, batch, [point, *after]).activations
    again = Rerun(opened, LAYER, (LAYER,), "resid_post", batch)(seen[point])
    torch.testing.assert_close(again[0], seen[after[0]])


def test_a_block_that_was_replaced_runs_where_passes_start():
    """What is known of the blocks is found anew: the next one stood still in the place of it."""
    plain = zoo.build("gpt2").eval()
    model, batch, point = open_model(plain), Batch(zoo.tokens(3, 7)), "blocks.1.hook_resid_pre"
    for _ in range(2):
        whole = call(model, batch, [point], output=True)
        again = call(model, batch, start=(point, whole.activations[point]), output=True)
        torch.testing.assert_close(again.output, whole.output)
        plain.transformer.h[0] = copy.deepcopy(plain.transformer.h[0])


@pytest.mark.parametrize(("name", "expected"), [("llama", True), ("bloom", False)])
def test_inspect_says_whether_passes_start_at_a_layer(name, expected):
    """BLOOM's first block works out what the position adds to all scores, so all of it runs."""
    model = open_model(zoo.build(name))
    assert block_starts(model).can_start(1) == expected
    assert inspect_model(model).starts_at_layers == expected


def test_states_with_positions_first_run_whole():
    """XLNet has [pos, batch, d_model] between its blocks."""
    model = open_model(families.build("xlnet"))
    assert not inspect_model(model).starts_at_layers
    ids = torch.randint(5, 100, (3, 6), generator=torch.Generator().manual_seed(1))
    found = measure_mechanisms(model, ids, progress=False)
    assert all(layer.isfinite().all() for layer in found.damage)
