"""State on disk: what was written is read, equal states give equal bytes, nothing is called."""

import math
import pickle

import pytest
import torch
from safetensors.torch import save_file

from infoflow_lens import InfoFlowError
from infoflow_lens.foundation.saving import (
    read_state,
    state_from_bytes,
    state_to_bytes,
    write_state,
)

A = torch.arange(6.0).reshape(2, 3)
STATE = {
    "tensors": [A, A.T, A[:1], A, torch.zeros(0, 3), torch.tensor(True), A.bfloat16()],
    "plain": (1, 2.5, -math.inf, "x", None, True, {3: "three", (1, 2): []}),
}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.equal(b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b and type(a) is type(b)


def test_what_was_written_is_read(tmp_path):
    write_state(tmp_path / "state", STATE)
    assert same(read_state(tmp_path / "state", "the state", "begin again"), STATE)
    assert same(state_from_bytes(state_to_bytes(STATE)), STATE)
    assert math.isnan(state_from_bytes(state_to_bytes({"x": math.nan}))["x"])


def test_the_same_state_gives_the_same_bytes():
    assert len({state_to_bytes(STATE) for _ in range(20)}) == 1


def test_values_of_other_kinds_are_not_written(tmp_path):
    with pytest.raises(InfoFlowError, match=r"is no JSON .*function"):
        write_state(tmp_path / "state", {"x": same})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", [0.01, 0.2, 0.5, 0.9, 0.999])
def test_every_change_is_noticed(tmp_path, place):
    write_state(tmp_path / "state", STATE)
    content = bytearray((tmp_path / "state").read_bytes())
    content[int(place * len(content))] ^= 1
    (tmp_path / "state").write_bytes(content)
    with pytest.raises(InfoFlowError, match=r"the state .* cannot be read .*: begin again"):
        read_state(tmp_path / "state", "the state", "begin again")


def test_other_files_are_no_state(tmp_path):
    save_file({"x": A}, tmp_path / "state")
    with pytest.raises(InfoFlowError, match="no state of infoflow-lens"):
        read_state(tmp_path / "state", "the state", "begin again")
    for data in (b"", b"\x80", pickle.dumps(print), b"\xff" * 40):
        with pytest.raises(InfoFlowError, match="is no state"):
            state_from_bytes(data)
