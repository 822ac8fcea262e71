"""Files are whole or absent."""

import errno
import json
import math
import os

import pytest

from infoflow_lens import InfoFlowError
from infoflow_lens.foundation.files import atomic_path, user_path, writable_folder, write_json


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


class Entry(os.PathLike):
    def __fspath__(self):
        return b"x"


@pytest.mark.parametrize("given", [b"x", 5, None, Entry()])
def test_what_gives_no_text_is_no_path(given):
    """An object that gives bytes ended in an error of Python."""
    with pytest.raises(InfoFlowError, match="is no path: expected the name of a file"):
        user_path(given)


def test_a_file_system_without_permissions_is_written_to(tmp_path, monkeypatch):
    """Some CIFS and FUSE mounts refuse every change of them."""

    def refused(*args, **kwargs):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    for name in ("chmod", "fchmod"):
        monkeypatch.setattr(os, name, refused, raising=False)
    write_json(tmp_path / "x.json", {"a": 1})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
def test_files_have_the_permissions_that_the_user_asks_for(tmp_path):
    before = os.umask(0o077)
    try:
        write_json(tmp_path / "x.json", {})
    finally:
        os.umask(before)
    write_json(tmp_path / "y.json", {})
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("x.json", "y.json")]
    assert modes == [0o600, 0o666 & ~before]
