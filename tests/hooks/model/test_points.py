"""Hook points that are read by hand."""

import torch

from infoflow_lens.hooks.model.points import run_catching
from tests.threads import other_call

NAMES = ("blocks.0.hook_resid_post", "blocks.1.hook_resid_post")


def test_what_is_caught_is_of_this_threads_call(token_model):
    """A call of another thread that began before ends while this one is under way."""
    ids, shorter = torch.arange(14).view(2, 7), torch.ones(3, 5, dtype=torch.long)
    alone = run_catching(token_model, ids, NAMES)[1]
    first, second = "blocks.0.hook_resid_pre", "blocks.1.hook_resid_pre"
    with other_call(token_model, lambda: token_model(shorter), first) as other:
        token_model.hook_dict[second].add_hook(lambda activation, hook: other.go_on())
        beside = run_catching(token_model, ids, NAMES)[1]
        assert other.output is not None
    assert all(beside[name].equal(alone[name]) for name in NAMES)
