"""The folder of a run: what others put there stays; what is read is what the run has written."""

import errno
import hashlib
import json
import os
import random
import resource
import shutil
import sys

import pytest

from infoflow_lens import InfoFlowError
from infoflow_lens.foundation.files import atomic_path, let_own, write_json, write_text
from infoflow_lens.runs.folder import MANIFEST, PRIVATE, RunFolder, read_output


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_nothing_but_its_own_scratch_is_swept(tmp_path):
    """Downloads and transfers under way, and what another run has begun below."""
    for name in (".movie.mkv.part", "a/.rsync.part/half", ".x.json.abc.part", ".lock"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    inner = tmp_path / "nest"
    with RunFolder.open(inner, "inner"), atomic_path(inner / "x.json") as begun:
        begun.write_text("half")
        before = contents(tmp_path)
        with RunFolder.open(tmp_path, "outer"):
            pass
        assert contents(tmp_path) == before
    left = tmp_path / PRIVATE / "scratch" / "of a run that was killed"
    left.mkdir(parents=True)
    with RunFolder.open(tmp_path, "outer"):
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
    with pytest.raises(InfoFlowError, match=PRIVATE), RunFolder.open(out, "a run"):
        pass
    assert contents(tmp_path) == before


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_no_link_is_followed_out_of_the_folder_of_a_run(tmp_path):
    (tmp_path / "theirs").mkdir()
    out = tmp_path / "out"
    with RunFolder.open(out, "a run"):
        (out / "positions").symlink_to(tmp_path / "theirs")
        (out / "record.json").symlink_to(tmp_path / "theirs" / "record.json")
        for name in ("positions/000000.json", "record.json"):
            with pytest.raises(InfoFlowError, match="is a link"):
                write_json(out / name, {})
    assert list((tmp_path / "theirs").iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX locks")
@pytest.mark.parametrize("number", ["ENOSYS", "ENOLCK", "EOPNOTSUPP", "EIO"])
def test_where_the_system_has_no_locks_a_file_says_that_the_folder_is_taken(
    tmp_path, monkeypatch, number
):
    import fcntl

    def missing(*args):
        raise OSError(getattr(errno, number), os.strerror(getattr(errno, number)))

    monkeypatch.setattr(fcntl, "flock", missing)
    with (
        RunFolder.open(tmp_path, "one"),
        pytest.raises(InfoFlowError, match="being written by one"),
        RunFolder.open(tmp_path, "two"),
    ):
        pass
    with RunFolder.open(tmp_path, "three"):
        pass


def test_a_file_system_that_cannot_synchronise_is_written_to(tmp_path, monkeypatch):
    def invalid(descriptor):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", invalid)
    write_run(tmp_path, (1, 2))
    assert RunFolder(tmp_path).holds("parts/0.json", "table.csv")

    def failed(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", failed)
    with pytest.raises(InfoFlowError, match="cannot write"):
        write_run(tmp_path.with_name("other"), (1, 2))


def test_a_part_that_is_gone_is_made_again_and_needs_no_room_on_the_disk(tmp_path):
    write_run(tmp_path, (1, 2))
    (tmp_path / "table.csv").unlink()
    said = r"table.csv' is gone, .*; delete parts/0.json and table.csv to make it again"
    with pytest.raises(InfoFlowError, match=said):
        RunFolder(tmp_path).holds("parts/0.json", "table.csv")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes have no names there")
@pytest.mark.parametrize("name", [MANIFEST, "table.csv", "parts/0.json", "finished.json"])
def test_nobody_waits_for_a_pipe_in_a_folder(tmp_path, name):
    """A pipe in the place of the manifest once held a command for ever."""
    write_run(tmp_path, (1, 2))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    if name == "finished.json":
        assert read_output(tmp_path, {}, {}) is None
    else:
        with pytest.raises(InfoFlowError, match="is no regular file"):
            RunFolder(tmp_path).holds("parts/0.json", "table.csv")


def test_a_line_that_a_full_disk_cuts_short_is_noticed_and_the_next_one_is_whole(tmp_path):
    """The manifest had half a line, nobody said so, and the finished folder was refused."""
    with RunFolder.open(tmp_path, "a run") as folder:
        folder.claim({"the settings": "a"})
        write_json(tmp_path / "one.json", {})
        size = (tmp_path / MANIFEST).stat().st_size
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 7, limits[1]))
        try:
            with pytest.raises(InfoFlowError, match=r"cannot write .*manifest.*make room"):
                write_json(tmp_path / "two.json", {})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert (tmp_path / MANIFEST).stat().st_size == size + 7
        assert not (tmp_path / "two.json").exists()
        write_json(tmp_path / "three.json", {})
        write_json(tmp_path / "two.json", {})
        worker = RunFolder(tmp_path)
        assert worker.holds("one.json", "two.json", "three.json")
    assert RunFolder(tmp_path).names() == ["one.json", "three.json", "two.json"]


def write_run(out, numbers, identity="a"):
    with RunFolder.open(out, "a run", ("table.csv",)) as folder:
        folder.claim({"the settings": identity})
        (out / "parts").mkdir(exist_ok=True)
        for index, number in enumerate(numbers):
            write_json(out / "parts" / f"{index}.json", {"number": number})
        write_text(out / "table.csv", " ".join(map(str, numbers)))


def test_a_run_goes_on_where_its_files_are_its_own(tmp_path):
    write_run(tmp_path, (1, 2))
    moved = shutil.move(tmp_path, tmp_path.with_name("moved"))
    tmp_path.mkdir()
    folder = RunFolder(tmp_path.with_name("moved"))
    assert folder.identity == {"the settings": "a"}
    assert folder.holds("parts/0.json", "table.csv")
    assert not folder.holds("parts/7.json")
    before = contents(folder.path)
    write_run(folder.path, (1, 2))
    assert contents(folder.path) == before
    with pytest.raises(InfoFlowError, match=r"the settings changed .*'a' -> 'b'"):
        write_run(folder.path, (1, 2), "b")
    shutil.rmtree(moved)


@pytest.mark.parametrize("name", ["table.csv", "parts/1.json"])
def test_files_of_others_in_the_places_of_the_runs_own_are_never_replaced(tmp_path, name):
    """Those of earlier versions, which have no manifest, are others' too."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    said = rf"holds {name.rpartition('/')[2]}, which .*another folder"
    with pytest.raises(InfoFlowError, match=said):
        write_run(tmp_path, (1, 2))
    assert (tmp_path / name).read_text() == "mine"


def test_what_a_run_removes_and_replaces_is_its_own(tmp_path):
    with RunFolder.open(tmp_path, "a run") as folder:
        for turn in (3, 2):
            new = folder.scratch / "inputs"
            new.mkdir()
            for index in range(turn):
                (new / f"{index}.bin").write_text(f"{turn}")
            folder.replace_folder(new, tmp_path / "inputs")
            (tmp_path / "inputs" / "notes.txt").write_text("mine")
        folder.remove("inputs/notes.txt", "inputs/0.bin", "nothing")
    assert contents(tmp_path / "inputs") == {"notes.txt": b"mine", "1.bin": b"2"}


def test_a_worker_writes_for_the_run(tmp_path):
    with RunFolder.open(tmp_path, "a run") as folder:
        write_text(tmp_path / "x", "1")
        with let_own(RunFolder(tmp_path)):  # as in another process
            write_text(tmp_path / "y", "2")
        assert folder.holds("y")
        write_text(tmp_path / "y", "3")
    assert RunFolder(tmp_path).holds("x", "y")


def test_a_folder_that_is_made_for_nothing_is_removed(tmp_path):
    with pytest.raises(InfoFlowError), RunFolder.open(tmp_path / "a" / "b", "a run"):
        raise InfoFlowError("bad settings")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_write_that_is_cut_off_leaves_one_of_two_states_that_are_the_runs(
    tmp_path, monkeypatch, when
):
    write_run(tmp_path, (1, 2))
    replace = os.replace

    def killed(source, target):
        if target.name == "table.csv":
            if when == "after":
                replace(source, target)
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            write_run(tmp_path, (3, 4))
    assert RunFolder(tmp_path).holds("table.csv")
    with (tmp_path / MANIFEST).open("a") as file:
        file.write('{"name": "parts/0.js')  # and the power goes
    write_run(tmp_path, (3, 4))
    write_run(tmp_path.with_name("whole"), (3, 4))
    assert contents(tmp_path) == contents(tmp_path.with_name("whole"))


@pytest.mark.parametrize("seed", range(40))
def test_parts_of_two_runs_mixed_in_any_way_are_refused_by_name_or_right(tmp_path, seed):
    """A pair, one part twice, a backup, the manifest alone: never another run's number."""
    drawn = random.Random(seed)
    mine, other = tmp_path / "mine", tmp_path / "other"
    write_run(mine, (1, 2, 3, 4))
    write_run(other, (5, 2, 6, 7), drawn.choice("ab"))
    names = [MANIFEST, "table.csv", *(f"parts/{index}.json" for index in range(4))]
    for name in drawn.sample(names, drawn.randint(1, 5)):
        source = drawn.choice([other / name, mine / drawn.choice(names[2:])])
        (mine / name).write_bytes(source.read_bytes())
    try:
        folder = RunFolder(mine)
        folder.check({"the settings": "a"})
        found = [folder.holds(f"parts/{index}.json") for index in range(4)]
    except InfoFlowError as error:
        said = str(error)
    else:
        said = ""
    if said:
        assert str(mine) in said
        return
    assert found == [True] * 4
    numbers = [json.loads((mine / f"parts/{index}.json").read_text()) for index in range(4)]
    assert [part["number"] for part in numbers] in ([1, 2, 3, 4], [5, 2, 6, 7])


def manifest_naming(folder, *names, identity=None):
    """A manifest as anybody can write one: with its digest, and names of their choice."""
    header = {"schema": "infoflow-lens run 1", "identity": identity}
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()[:16]
    lines = [{**header, "digest": digest}, *({"name": n, "sha256": "0"} for n in names)]
    folder.mkdir(exist_ok=True)
    (folder / MANIFEST).write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    "name",
    ["../thesis.tex", "inputs/../../thesis.tex", "/thesis.tex", "a//b", "./a", "a/.", "a\\b",
     "C:thesis.tex", "", ".."],
)  # fmt: skip
def test_a_manifest_that_names_files_elsewhere_is_refused(name, tmp_path):
    """A given folder once had the user's own file removed, beside the folder."""
    out, mine = tmp_path / "out", tmp_path / "thesis.tex"
    mine.write_text("mine")
    manifest_naming(out, "inputs/sequences.json", name)
    with pytest.raises(InfoFlowError, match="which is no file below the folder"):
        RunFolder(out)
    with pytest.raises(InfoFlowError, match="which is no file"), RunFolder.open(out, "a run"):
        pass
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("identity", [[1, 2], "xx", 5])
def test_an_identity_of_another_type_is_no_manifest_of_ours(identity, tmp_path):
    manifest_naming(tmp_path, identity=identity)
    with pytest.raises(InfoFlowError, match="is no manifest of a run of this version"):
        RunFolder(tmp_path)
