"""Probes of several processes become one, however the sequences are shared out."""

import pytest
import torch
import torch.distributed as dist

from infoflow_lens import InfoFlowError, PositionsProbe, RecoveryProbe, attach, run_probes
from tests.conftest import D_TOKEN, N_TOKENS
from tests.processes import server

N = 40
SHARDS = ([0, 40, 40], [0, 13, 40])  # the end of each process's stretch; one has nothing


def data():
    return torch.randn(N, N_TOKENS, D_TOKEN, generator=torch.Generator().manual_seed(1))


def probes():
    return [RecoveryProbe((1, 2), controls=("random",), blocks=3), PositionsProbe()]


def work(rank, store, model, ends, queue):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mine = probes()
    first, last = ends[rank : rank + 2]
    with attach(model, *mine, first_index=first), torch.no_grad():
        if first < last:
            model(data()[first:last])
    for probe in mine:
        probe.all_reduce_().all_reduce_()  # the second time changes nothing
    refused = ""
    try:
        run_probes(model, data()[:10], mine, progress=False)
    except InfoFlowError as error:
        refused = str(error)
    recovery, positions = (probe.result() for probe in mine)
    fields = ("fvu", "fvu_low", "control_fvu", "second_moment")
    found = [getattr(recovery, name)[1].tolist() for name in fields]
    queue.put((rank, found, positions.positions[1].tolist(), refused))
    dist.destroy_process_group()


@pytest.mark.parametrize("ends", SHARDS, ids=["all on the first", "uneven"])
def test_two_processes_see_the_whole(model, tmp_path, ends):
    context = server()
    queue = context.Queue()
    workers = [
        context.Process(target=work, args=(rank, tmp_path / "store", model, ends, queue))
        for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    answers = sorted(queue.get(timeout=120) for _ in workers)
    for worker in workers:
        worker.join(timeout=60)
        assert worker.exitcode == 0
    whole, positions = run_probes(model, data(), probes(), batch_size=N, progress=False)
    for _, found, chosen, refused in answers:
        for name, values in zip(
            ("fvu", "fvu_low", "control_fvu", "second_moment"), found, strict=True
        ):
            torch.testing.assert_close(
                torch.tensor(values, dtype=torch.float64),
                getattr(whole, name)[1].double(),
                rtol=1e-6,
                atol=1e-9,
            )
        assert torch.tensor(chosen).equal(positions.positions[1].long())
        assert "what all processes have measured" in refused


def test_without_a_process_group_nothing_happens(model, inputs):
    probe = PositionsProbe()
    run_probes(model, inputs, [probe], progress=False)
    assert len(probe.all_reduce_().result().positions[0]) == 23


def test_the_split_goes_by_the_index_among_all_sequences(model, inputs):
    """Held-out sequences and random controls are the same, however sequences are dealt out."""
    make = lambda: RecoveryProbe((1,), controls=("random",), blocks=2)  # noqa: E731
    (whole,) = run_probes(model, inputs, [make()], progress=False)
    parts = [make() for _ in range(3)]
    for rank, probe in enumerate(parts):
        run_probes(model, inputs[rank::3], [probe], first_index=rank, index_step=3, progress=False)
    first, *rest = parts
    for probe in rest:
        first.merge(probe)
    found = first.result()
    for name in ("fvu", "fvu_low", "control_fvu"):
        torch.testing.assert_close(getattr(found, name), getattr(whole, name), rtol=1e-6, atol=1e-9)
    assert found.n_eval == whole.n_eval
