"""Files are whole or absent."""

import json
import math

import pytest

from infoflow_lens import InfoFlowError
from infoflow_lens.foundation.files import atomic_path, writable_folder, write_json


def test_a_failed_write_leaves_the_old_file(tmp_path):
    target = tmp_path / "numbers.json"
    write_json(target, {"a": 1})

    def fail_halfway():
        with atomic_path(target) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()
    assert json.loads(target.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["numbers.json"]


def test_json_has_no_nan(tmp_path):
    write_json(tmp_path / "n.json", {"a": [math.nan, 1.5], "b": (math.inf,)})
    assert json.loads((tmp_path / "n.json").read_text()) == {"a": [None, 1.5], "b": [None]}


def test_an_output_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InfoFlowError, match="cannot write to the output folder"):
        writable_folder(tmp_path / "file" / "below")
