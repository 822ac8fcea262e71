"""Modes of a model: evaluated without a trace, by one thread at a time."""

import threading

import pytest
import torch
from torch import nn

from infoflow_lens.foundation.modules import eval_mode, modes_kept


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


class Interrupted(nn.Linear):
    """The user presses Ctrl-C while its mode is set for the second time."""

    n_set = 0

    def __setattr__(self, name, value):
        if name == "training":
            self.__dict__["n_set"] = self.n_set + 1
            if self.n_set == 2:  # evaluated, restored
                raise KeyboardInterrupt
        super().__setattr__(name, value)


def test_ctrl_c_while_modes_are_restored_leaves_none_behind():
    model = nn.Sequential(nn.Dropout(0.5), Interrupted(2, 2), nn.Dropout(0.5))
    with pytest.raises(KeyboardInterrupt), eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert all(module.training for module in model.modules())


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


def test_threads_take_turns():
    """The one that comes second finds the model in its own mode."""
    model = Bridge()
    inside, may_end = threading.Event(), threading.Event()

    def evaluate():
        with eval_mode(model):
            inside.set()
            assert may_end.wait(60)

    first = threading.Thread(target=evaluate)
    first.start()
    assert inside.wait(60)
    ending = threading.Timer(0.05, may_end.set)
    ending.start()
    with eval_mode(model):
        assert may_end.is_set()
    first.join()
    ending.join()
    assert all(modes(model))


def test_other_models_do_not_wait():
    with eval_mode(Bridge()):
        seen = []
        other = threading.Thread(target=lambda: seen.extend(evaluated(Bridge())))
        other.start()
        other.join(60)
        assert seen
        assert not any(seen)


def evaluated(model):
    with eval_mode(model):
        return modes(model)


def fail_in_training(model):
    model.train()
    raise ZeroDivisionError


def test_modes_are_kept_where_training_ends_in_an_error():
    model = Bridge().eval()
    model.original_model.eval()
    with pytest.raises(ZeroDivisionError), modes_kept(model):
        fail_in_training(model)
    assert not any(modes(model))
