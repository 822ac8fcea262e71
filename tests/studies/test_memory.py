"""What fits in memory: what a run takes, and who is refused."""

import pytest
import torch

from infoflow_lens import Architecture, InfoFlowError, build_model
from infoflow_lens.foundation import memory
from infoflow_lens.foundation.memory import check_device, check_memory
from infoflow_lens.studies.study import run_bytes

GIB = 2**30


def test_where_nothing_is_known_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(memory, "free_on", lambda device: None)
    check_memory(2**60, "cpu")


def test_what_does_not_fit_is_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr(memory, "free_on", lambda device: 4 * GIB)
    check_memory(4 * GIB, "cpu")
    with pytest.raises(InfoFlowError, match=r"a run needs about 5\.0 GiB .* 4\.0 GiB is free"):
        check_memory(5 * GIB, "cpu")
    check_memory(GIB, "cpu", jobs=2)
    with pytest.raises(InfoFlowError, match=r"3 runs at a time need .* choose fewer jobs, or a s"):
        check_memory(GIB, "cpu", jobs=3)  # with the workers themselves


def test_a_cuda_device_has_memory_of_its_own(monkeypatch):
    monkeypatch.setattr(memory, "check_device", lambda device: None)  # as if it were there
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB // 2, GIB))
    with pytest.raises(InfoFlowError, match=r"1\.0 GiB of memory on cuda:0, but 512 MiB is free"):
        check_memory(GIB, "cuda:0")


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "meta:y"])
def test_a_device_that_does_not_answer_is_named(device):
    with pytest.raises(InfoFlowError, match=f"device is '{device}', which does not answer"):
        check_device(device)
    check_device("cpu")


def test_a_cuda_device_that_is_not_there_is_named():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(InfoFlowError, match="device is 'cuda', which does not answer"):
        check_memory(1, "cuda")


@pytest.mark.parametrize(
    ("n_tokens", "heads", "d_mlp"), [(16, (4, 1), 64), (48, (4, 4, 4), 0), (64, (8, 8), 32)]
)
def test_the_estimate_against_what_a_step_keeps(n_tokens, heads, d_mlp):
    """What PyTorch saves for the gradient, every storage once."""
    d_model, batch = 32, 2048
    model = build_model(
        Architecture(n_heads=heads, d_model=d_model, d_token=4, n_tokens=n_tokens, d_mlp=d_mlp)
    )
    sizes = {}

    def saved(tensor):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(64, n_tokens, 4)
    with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
        loss = (
            model.forward_readout(x).square().mean()
        )  # keeps its graph, so that no storage is given away
    kept = sum(sizes.values()) * batch / len(x)
    assert loss.requires_grad
    estimate = run_bytes(
        n_train=batch, n_tokens=n_tokens, d_token=4, batch_size=batch, d_model=d_model,
        heads=heads, d_mlp=d_mlp,
    )  # fmt: skip
    assert kept < estimate < 4 * kept


def test_what_makes_a_run_large():
    sizes = {
        "n_train": 10_000, "n_tokens": 16, "d_token": 4, "batch_size": 256, "d_model": 32,
        "heads": (4, 1), "d_mlp": 64,
    }  # fmt: skip
    base = run_bytes(**sizes)
    more_data = run_bytes(**(sizes | {"n_train": 1_010_000}))
    assert more_data - base == 10**6 * 3 * 4 * (16 * 4 + 1)
    # four times the tokens: scores grow by sixteen
    assert run_bytes(**(sizes | {"n_tokens": 1024})) > 12 * run_bytes(**(sizes | {"n_tokens": 256}))
    steps = run_bytes(**(sizes | {"batch_size": 10_000}))  # so large that evaluation takes less
    for more in (
        {"d_head": 64}, {"d_encoder": 64}, {"d_mlp": 128}, {"d_token": 8}, {"d_model": 64},
        {"heads": (4, 2)},
    ):  # fmt: skip
        assert run_bytes(**(sizes | {"batch_size": 10_000} | more)) > steps, more
