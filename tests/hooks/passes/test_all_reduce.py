"""Probes of several processes become one, however the sequences are shared out."""

import json
import os
import time

import pytest
import torch
import torch.distributed as dist

from infoflow_lens import InfoFlowError, PositionsProbe, RecoveryProbe, attach, run_probes
from tests.conftest import D_TOKEN, N_TOKENS
from tests.processes import server

N = 40
ENDS = {  # the ends of the stretches of three processes
    "all on the first": [0, 40, 40, 40],
    "uneven": [0, 13, 20, 40],
    "one has nothing": [0, 11, 11, 40],
    "all on the last": [0, 0, 0, 40],
}
FIELDS = ("fvu", "fvu_low", "control_fvu", "second_moment")


def data():
    drawn = torch.randn(N, N_TOKENS, D_TOKEN, generator=torch.Generator().manual_seed(1))
    return drawn.double()


def probes():
    return [RecoveryProbe((1, 2), controls=("random",), blocks=3), PositionsProbe()]


def begin(rank, folder):
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=3)


def work(rank, folder, model):
    begin(rank, folder)
    answers = []
    for case, ends in ENDS.items():
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
        found = [getattr(recovery, name)[1].tolist() for name in FIELDS]
        answers.append((case, found, positions.positions[1].tolist(), refused))
    (folder / f"{rank}.json").write_text(json.dumps(answers))
    dist.destroy_process_group()


def answers_of(target, folder, model):
    """What each of three processes has written, by rank; and how each has ended."""
    ranks = [server().Process(target=target, args=(rank, folder, model)) for rank in range(3)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=120)
    found = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}
    return found, [process.exitcode for process in ranks]


@pytest.mark.slow
def test_several_processes_see_the_whole(model, tmp_path):
    model = model.double()
    answers, codes = answers_of(work, tmp_path, model)
    assert codes == [0, 0, 0]
    whole, positions = run_probes(model, data(), probes(), batch_size=N, progress=False)
    for case, found, chosen, refused in (row for rank in range(3) for row in answers[rank]):
        for name, values in zip(FIELDS, found, strict=True):
            value, expected = (
                torch.tensor(values, dtype=torch.float64),
                getattr(whole, name)[1].double(),
            )
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12, msg=case)
        assert torch.tensor(chosen).equal(positions.positions[1].long()), case
        assert "what all processes have measured" in refused


def dying(rank, folder, model):
    begin(rank, folder)
    probe = PositionsProbe()
    with attach(model, probe), torch.no_grad():
        model(data()[:4].float())
    if rank == 1:
        os._exit(9)
    try:
        probe.all_reduce_()
    except InfoFlowError as error:
        (folder / f"{rank}.json").write_text(json.dumps([str(error), probe.n_sequences]))
    os._exit(0)


@pytest.mark.slow
def test_a_process_that_dies_is_an_error_in_the_others(model, tmp_path):
    begun = time.monotonic()
    answers, codes = answers_of(dying, tmp_path, model)
    assert codes == [0, 9, 0]
    assert sorted(answers) == [0, 2]
    for said, n_sequences in answers.values():
        assert "another process of torch.distributed is gone" in said
        assert n_sequences == 4
    assert time.monotonic() - begun < 60


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
