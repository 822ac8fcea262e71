"""Probes of several processes become one."""

import multiprocessing

import torch
import torch.distributed as dist

from infoflow_lens import PositionsProbe, RecoveryProbe, run_probes
from tests.conftest import D_TOKEN, N_TOKENS


def data():
    x = torch.randn(40, N_TOKENS, D_TOKEN, generator=torch.Generator().manual_seed(1))
    return x[:30], x[30:]


def work(rank, store, model, queue):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    fit, held_out = data()
    probes = [RecoveryProbe((1, 2)), PositionsProbe()]
    run_probes(model, fit[rank::2], probes, eval_inputs=held_out[rank::2], progress=False)
    recovery, positions = (probe.all_reduce_().result() for probe in probes)
    queue.put((rank, recovery.fvu[1].tolist(), len(positions.positions[0])))
    dist.destroy_process_group()


def test_two_processes_see_the_whole(model, tmp_path):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    workers = [
        context.Process(target=work, args=(rank, tmp_path / "store", model, queue))
        for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    answers = sorted(queue.get(timeout=120) for _ in workers)
    for worker in workers:
        worker.join(timeout=60)
        assert worker.exitcode == 0
    fit, held_out = data()
    (whole,) = run_probes(model, fit, [RecoveryProbe((1, 2))], eval_inputs=held_out, progress=False)
    for _, fvu, n_sequences in answers:
        torch.testing.assert_close(
            torch.tensor(fvu).double(), whole.fvu[1], rtol=1e-6, atol=1e-9, check_dtype=False
        )
        assert n_sequences == 40


def test_without_a_process_group_nothing_happens(model, inputs):
    probe = PositionsProbe()
    run_probes(model, inputs, [probe], progress=False)
    assert len(probe.all_reduce_().result().positions[0]) == 23
