"""Modes of a model: evaluated without a trace, by one thread at a time."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from infoflow_lens import InfoFlowError
from infoflow_lens.foundation.modules import eval_mode, keep_modes


class Bridge(nn.Module):
    """Holds a model beside its own modules, as bridges of TransformerLens do."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Dropout(0.5)])
        self.__dict__["original_model"] = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2))


def modes(model):
    return [m.training for part in (model, model.original_model) for m in part.modules()]


@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_all_modules_are_evaluated_and_have_their_own_mode_again(own, hidden):
    model = Bridge().train(own)
    model.original_model.train(hidden)
    model.original_model[1].train(not hidden)  # they may differ
    before = modes(model)
    with eval_mode(model):
        assert not any(modes(model))
        assert not torch.is_grad_enabled()
        model.train()  # a hook of the user
    assert modes(model) == before
    assert torch.is_grad_enabled()


def test_an_error_leaves_the_modes():
    model = Bridge()
    with pytest.raises(ZeroDivisionError), eval_mode(model):
        1 / 0  # noqa: B018
    assert all(modes(model))


class Adapter(nn.Linear):
    """Merges an update into its weights when it is evaluated, as some adapters do."""

    def train(self, mode=True):
        if not mode:
            self.weight.data += 1
        return super().train(mode)


def test_evaluation_writes_no_weights():
    model = nn.Sequential(Adapter(2, 2))
    before = model[0].weight.detach().clone()
    with eval_mode(model):
        assert model[0].weight.equal(before)


def test_a_model_is_evaluated_by_one_thread_at_a_time():
    model, other = Bridge(), Bridge()

    def evaluated(model):
        with eval_mode(model):
            return modes(model)

    with eval_mode(model), ThreadPoolExecutor(1) as pool:
        with eval_mode(model):
            pass
        with pytest.raises(InfoFlowError, match="another thread"):
            pool.submit(evaluated, model).result()
        assert not any(pool.submit(evaluated, other).result())
    assert all(modes(model))


def test_a_block_that_another_thread_ends_says_so_and_leaves_the_model_free():
    model = Bridge()
    block = eval_mode(model)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(block.__enter__).result()
    with pytest.raises(InfoFlowError, match="entered in one thread and is left in another"):
        block.__exit__(None, None, None)
    assert all(modes(model))
    with eval_mode(model):
        assert not any(modes(model))


def fail_in_training(model):
    model.train()
    raise ZeroDivisionError


def test_modes_are_kept_where_training_ends_in_an_error():
    model = Bridge().eval()
    model.original_model.eval()
    with pytest.raises(ZeroDivisionError), keep_modes(model):
        fail_in_training(model)
    assert not any(modes(model))
