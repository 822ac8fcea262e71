"""Hook points that are read by hand."""

import threading

import torch

from infoflow_lens.hooks.model.points import run_catching

NAMES = ("blocks.0.hook_resid_post", "blocks.1.hook_resid_post")


def test_what_is_caught_is_of_this_threads_call(token_model):
    """A call of another thread that began before ends while this one is under way."""
    mine = threading.get_ident()
    began, may_go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def wait_at_the_start(activation, hook):
        if threading.get_ident() != mine:
            began.set()
            assert may_go_on.wait(60)

    def let_the_other_run(activation, hook):
        if threading.get_ident() == mine:
            may_go_on.set()
            assert ended.wait(60)

    def call():
        token_model(torch.ones(3, 5, dtype=torch.long))
        ended.set()

    ids = torch.arange(14).view(2, 7)
    alone = run_catching(token_model, ids, NAMES)[1]
    token_model.hook_dict["blocks.0.hook_resid_pre"].add_hook(wait_at_the_start)
    token_model.hook_dict["blocks.1.hook_resid_pre"].add_hook(let_the_other_run)
    other = threading.Thread(target=call)
    other.start()
    assert began.wait(60)
    beside = run_catching(token_model, ids, NAMES)[1]
    other.join()
    assert all(beside[name].equal(alone[name]) for name in NAMES)
