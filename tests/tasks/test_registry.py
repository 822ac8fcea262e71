"""Tasks are found by name, and near misses are explained."""

from functools import cache

import pytest
import torch

from infoflow_lens import InfoFlowError, load_task
from infoflow_lens.tasks import list_tasks


def test_every_listed_task_loads_with_its_defaults():
    for name in list_tasks():
        x, y = load_task(name).sample(2, seed=0)
        assert len(x) == len(y) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_of_torch_changes_no_draw(dtype):
    """The same seed gave other texts under torch.set_default_dtype."""
    expected = {name: load_task(name).sample(8, seed=1) for name in list_tasks()}
    torch.set_default_dtype(dtype)
    try:
        found = {name: load_task(name).sample(8, seed=1) for name in list_tasks()}
    finally:
        torch.set_default_dtype(torch.float32)
    near = 4 * torch.finfo(dtype).eps
    for name, (x, y) in found.items():
        wanted, target = expected[name]
        assert x.dtype == (dtype if wanted.is_floating_point() else torch.int64), name
        assert torch.allclose(x.double(), wanted.double(), atol=near), name
        # sums of products of a half precision are rounded more than what they are made of
        if not (y.is_floating_point() and dtype == torch.bfloat16):
            assert torch.allclose(y.double(), target.double(), atol=1e-5), name


def test_the_default_device_of_torch_changes_no_sample():
    """On "meta" they ended in errors of torch and NumPy, or showed memory that nobody had set."""

    def draw(name):
        task = load_task(name)
        return [*task.sample(4, seed=1), *task.dataset("test", 4).with_format("torch")[:].values()]

    expected = {name: draw(name) for name in list_tasks()}
    with torch.device("meta"):
        # columns become tensors of torch where a dataset is read, so they are read outside
        samples = {name: load_task(name).sample(4, seed=1) for name in list_tasks()}
        data = {name: load_task(name).dataset("test", 4) for name in list_tasks()}
    for name, wanted in expected.items():
        found = [*samples[name], *data[name].with_format("torch")[:].values()]
        assert all(a.equal(b) for a, b in zip(found, wanted, strict=True)), name


as_usual = cache(lambda name: load_task(name).dataset("test", 8))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_dataset_has_its_own_types_whatever_the_default_dtype_of_torch_is(dtype):
    """Arrow has no bfloat16, which was an error; halves are rounded, and have their own digest."""
    torch.set_default_dtype(dtype)
    try:
        found = {name: load_task(name).dataset("test", 8) for name in list_tasks()}
    finally:
        torch.set_default_dtype(torch.float32)
    for name, data in found.items():
        wanted = as_usual(name)
        x, expected = (d.with_format("torch")["x"][:] for d in (data, wanted))
        assert data.features == wanted.features
        assert torch.allclose(x.double(), expected.double(), atol=4 * torch.finfo(dtype).eps), name
        is_rounded = x.is_floating_point() and dtype != torch.float64
        assert (data._fingerprint == wanted._fingerprint) != is_rounded, name


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("d_retreival", {}, "did you mean 'd_retrieval'"),
        ("sorting", {}, "expected one of d_retrieval"),
        ("d_retrieval", {"n_token": 3}, "did you mean 'n_tokens'"),
    ],
)
def test_unknown_names_suggest_the_nearest(name, parameters, message):
    with pytest.raises(InfoFlowError, match=message):
        load_task(name, **parameters)


def test_packages_add_tasks_by_entry_points(tmp_path, monkeypatch):
    package = tmp_path / "yours-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: yours\nVersion: 1.0\n")
    entries = "mine = infoflow_lens.tasks.single:DRetrieval\nbroken = no_such_module:Task\n"
    (package / "entry_points.txt").write_text("[infoflow_lens.tasks]\n" + entries)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert list_tasks()[-2:] == ("mine", "broken")
    assert load_task("mine", n_tokens=5).sample(3, seed=0)[0].shape == (3, 5, 4)
    with pytest.raises(InfoFlowError, match="did you mean 'n_tokens'"):
        load_task("mine", n_token=5)
    with pytest.raises(InfoFlowError, match=r"'broken' of infoflow_lens\.tasks cannot be imported"):
        load_task("broken")
    later = tmp_path / "later-1.0.dist-info"  # installed while the process runs
    later.mkdir()
    (later / "METADATA").write_text("Metadata-Version: 2.1\nName: later\nVersion: 1.0\n")
    entry = "late = infoflow_lens.tasks.single:DRetrieval\n"
    (later / "entry_points.txt").write_text("[infoflow_lens.tasks]\n" + entry)
    assert "late" in list_tasks()
