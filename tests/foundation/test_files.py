"""Files are whole or absent; the folder of a run keeps what is not the run's."""

import errno
import json
import math
import os
import sys

import pytest

from infoflow_lens import InfoFlowError
from infoflow_lens.foundation.files import (
    PRIVATE,
    atomic_path,
    locked,
    writable_folder,
    write_json,
)


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


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_nothing_but_its_own_scratch_is_swept(tmp_path):
    """Downloads and transfers under way, and what another run has begun below."""
    for name in (".movie.mkv.part", "a/.rsync.part/half", ".x.json.abc.part", ".lock"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    with locked(tmp_path / "nest", "inner") as inner, atomic_path(inner / "x.json") as begun:
        begun.write_text("half")
        before = contents(tmp_path)
        with locked(tmp_path, "outer"):
            pass
        assert contents(tmp_path) == before
    left = tmp_path / PRIVATE / "scratch" / "of a run that was killed"
    left.mkdir(parents=True)
    with locked(tmp_path, "outer"):
        assert not left.exists()
    assert not (tmp_path / PRIVATE).exists()


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
@pytest.mark.parametrize("name", ["", "/lock", "/scratch", "/lock hard"])
def test_a_lock_that_is_a_link_is_refused_and_what_it_leads_to_is_kept(tmp_path, name):
    out, victim = tmp_path / "out", tmp_path / "victim"
    place = out / f"{PRIVATE}{name.removesuffix(' hard')}"
    place.parent.mkdir(parents=True)
    if name.endswith("lock"):
        victim.write_text("mine" * 2000)
        place.symlink_to(victim)
    elif name.endswith("hard"):
        victim.write_text("mine" * 2000)
        place.hardlink_to(victim)
    else:
        victim.mkdir()
        (victim / "lock").write_text("mine")
        place.symlink_to(victim)
    before = contents(tmp_path)
    with pytest.raises(InfoFlowError, match=PRIVATE), locked(out, "a run"):
        pass
    assert contents(tmp_path) == before


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_no_link_is_followed_out_of_the_folder_of_a_run(tmp_path):
    (tmp_path / "theirs").mkdir()
    with locked(tmp_path / "out", "a run") as out:
        (out / "positions").symlink_to(tmp_path / "theirs")
        (out / "record.json").symlink_to(tmp_path / "theirs" / "record.json")
        for name in ("positions/000000.json", "record.json"):
            with pytest.raises(InfoFlowError, match="is a link"):
                write_json(out / name, {})
    assert list((tmp_path / "theirs").iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX locks")
def test_where_the_system_has_no_locks_a_file_says_that_the_folder_is_taken(tmp_path, monkeypatch):
    import fcntl

    def missing(*args):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", missing)
    with (
        locked(tmp_path, "one"),
        pytest.raises(InfoFlowError, match="being written by one"),
        locked(tmp_path, "two"),
    ):
        pass
    with locked(tmp_path, "three"):
        pass


def test_a_file_system_without_permissions_is_written_to(tmp_path, monkeypatch):
    """Some CIFS and FUSE mounts refuse every change of them."""

    def refused(*args, **kwargs):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    for name in ("chmod", "fchmod"):
        monkeypatch.setattr(os, name, refused, raising=False)
    with locked(tmp_path / "out", "a run") as out:
        write_json(out / "x.json", {"a": 1})
    assert json.loads((tmp_path / "out" / "x.json").read_text()) == {"a": 1}


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
