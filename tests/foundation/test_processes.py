"""Threads that do not disturb each other's numbers, and workers that end with who started them."""

import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from infoflow_lens import build_model, train
from infoflow_lens.foundation.processes import threads
from infoflow_lens.training import TrainingConfig
from tests.processes import started


def test_overlapping_blocks_of_threads_end_as_they_began():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first, second = threads(1), threads(1)
        first.__enter__()
        second.__enter__()
        assert torch.get_num_threads() == 1
        first.__exit__(None, None, None)
        assert torch.get_num_threads() == 1
        second.__exit__(None, None, None)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_block_inside_another_one_ends_as_it_began():
    """An estimate inside of a training left one thread to the rest of it."""
    before = torch.get_num_threads()
    with threads(3):
        for _ in range(2):
            with threads(1):
                assert torch.get_num_threads() == 1
            assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == before


def test_threads_of_one_process_give_the_numbers_of_one(architecture, inputs):
    """As in a worker of several threads: nothing is drawn from the generator that they share."""

    def trained(seed):
        model = build_model(architecture, seed=seed)
        model.embed.register_forward_hook(lambda *args: torch.dropout(args[2], 0.1, model.training))
        data = (inputs, inputs.mean(dim=1)[:, :1])
        config = TrainingConfig(epochs=3, batch_size=8, seed=seed)
        return train(model, data, data, config, progress=False).history

    seeds = [0, 1, 0, 1]
    alone = [trained(seed) for seed in seeds]
    state = torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(trained, seeds)) == alone
    assert torch.get_rng_state().equal(state)
    assert alone[:2] == alone[2:]
    assert alone[0] != alone[1]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("looks", ["before", "after"])
def test_a_worker_ends_with_the_process_that_started_it(tmp_path, looks):
    """Also one that looks for it when it is gone, which stayed for ever."""
    script = tmp_path / "script.py"
    tells = "open('child', 'w').write(f'{os.getpid()}\\n')"
    until_gone = "exec('while os.getppid() == parent: time.sleep(.01)')"
    steps = ["exit_with_parent(parent)", tells]
    if looks == "after":
        steps = [tells, until_gone, "exit_with_parent(parent)"]
    script.write_text(
        "import os, time\n"
        "from infoflow_lens.foundation.processes import exit_with_parent\n"
        "parent, child = os.getpid(), os.fork()\n"
        f"if not child: {'; '.join(steps)}\n"
        "time.sleep(60)\n"
    )
    child = tmp_path / "child"
    with started(script, folder=tmp_path) as program:
        program.wait_until(lambda: child.exists() and child.read_text().endswith("\n"))
        program.send_signal(signal.SIGKILL)
        program.wait(10)
    of_child = Path("/proc", child.read_text().strip(), "stat")
    deadline = time.monotonic() + 10
    while of_child.exists() and of_child.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)
