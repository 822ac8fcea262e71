"""A document takes no place but a new one, or that of an earlier document of its kind."""

import json
import os
import re
import resource
import socket
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors import safe_open
from safetensors.torch import save_file

from infoflow_lens import InfoFlowError
from infoflow_lens.foundation.documents import (
    ANSWER_PAGE,
    CERTIFICATE,
    FLOW_PAGE,
    PICTURE,
    PROBE_PAGE,
    RESULT,
    WITNESS,
    Document,
)
from infoflow_lens.foundation.files import add_digest, read_json
from infoflow_lens.foundation.saving import read_parts, read_state, write_parts, write_state
from infoflow_lens.report.phase import draw_phase_diagram
from infoflow_lens.tasks import load_task
from infoflow_lens.theory.estimate import phase_diagram

KINDS = {
    "answer page": (ANSWER_PAGE, '<meta name="generator" content="infoflow-lens ask">\n'),
    "flow page": (FLOW_PAGE, '<meta name="generator" content="infoflow-lens flow">\n'),
    "probe page": (PROBE_PAGE, '<meta name="generator" content="infoflow-lens probe">\n'),
    "picture": (PICTURE, "<svg>infoflow-lens estimate --plot</svg>"),
    "certificate": (CERTIFICATE, add_digest({"format": "infoflow-lens one-layer certificate 1"})),
    "witness": (WITNESS, add_digest({"format": "infoflow-lens exclusion 1", "pairs": [0.5]})),
    "result": (RESULT, add_digest({"schema": "infoflow-lens result 1"})),
}
of_each_kind = pytest.mark.parametrize(("kind", "text"), KINDS.values(), ids=KINDS)


def bind(path):
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))


# What may stand in the place of a file that a user names, and never gives way.
TAKEN = {
    "pipe": lambda path, other: os.mkfifo(path),
    "link": lambda path, other: path.symlink_to(other),
    "dangling link": lambda path, other: path.symlink_to(other / "nowhere"),
    "folder": lambda path, other: path.mkdir(),
    "socket": lambda path, other: bind(path),
    "device": lambda path, other: os.mknod(path, 0o020666, os.makedev(1, 3)),  # as /dev/null
}


def occupy(how, path, other):
    try:
        TAKEN[how](path, other)
    except PermissionError:
        pytest.skip("only root makes devices")


def edits_of(content):
    """What somebody may make of a file, with our mark and all that we wrote in it."""
    quoted = re.sub(rb"[0-9a-f]{16,32}", lambda found: b"0" * len(found[0]), content)
    yield from (content.replace(b"infoflow", b"infoFlow", 1), quoted, b"mine\n" + content)
    yield from (content[:-3] + b"mine" + content[-3:], content + b"<p>mine</p>", content * 2)


@of_each_kind
def test_an_earlier_document_gives_way_and_other_files_when_asked(kind, text, tmp_path):
    path = tmp_path / "below" / "document"
    kind.write(path, text)
    assert path.read_text().startswith(text)
    kind.write(path, text + " ")
    written = path.read_bytes()
    for edited in (b"mine", text.encode(), *edits_of(written)):
        if edited == written or (kind.mark is None and edited == text.encode()):
            continue
        path.write_bytes(edited)
        with pytest.raises(InfoFlowError, match=r"is there and is no .*choose another name"):
            kind.write(path, text)
        assert path.read_bytes() == edited
    kind.write(path, text, overwrite=True)
    assert path.read_text().startswith(text)
    assert [p.name for p in path.parent.iterdir()] == ["document"]


@of_each_kind
@pytest.mark.parametrize("how", TAKEN)
def test_what_is_no_file_never_gives_way(kind, text, how, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    other = tmp_path / "theirs"
    other.write_text(text)
    occupy(how, tmp_path / "x", other)
    for overwrite in (False, True):
        with pytest.raises(InfoFlowError, match=r"'x' is a (pipe|link|folder|socket|device)"):
            kind.write("x", "new", overwrite=overwrite)
    assert other.read_text() == text
    assert {p.name for p in tmp_path.iterdir()} == {"x", "theirs"}


@of_each_kind
def test_a_document_of_another_kind_is_no_document_of_this(kind, text, tmp_path):
    for other, content in KINDS.values():
        (tmp_path / "x").write_bytes(other.sign(content.encode()))
        assert other.recognises(tmp_path / "x")
        if other is not kind:
            assert not kind.recognises(tmp_path / "x")


def test_deep_and_broken_json_is_no_document(tmp_path):
    for text in ("[" * 10**5, "{", "null", "[]", "\0"):
        (tmp_path / "x").write_text(text)
        assert not WITNESS.recognises(tmp_path / "x")


def test_places_that_are_none(tmp_path):
    for place in ("", ".", "/"):
        with pytest.raises(InfoFlowError, match="names no file"):
            PICTURE.check(place)
    (tmp_path / "file").write_text("")
    with pytest.raises(InfoFlowError, match="cannot write to the output folder"):
        PICTURE.check(tmp_path / "file" / "below")


WRITERS = {
    "document": (lambda path: PICTURE.write(path / "x", "text"), ["x"]),
    "parts": (
        lambda path: write_parts(path / "x", "infoflow-lens result 1", {}, {"a": torch.ones(3)}),
        ["x.json", "x.safetensors"],
    ),
    "state": (lambda path: write_state(path / "x", {"a": torch.ones(3)}), ["x"]),
}


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
@pytest.mark.parametrize(("write", "names"), WRITERS.values(), ids=WRITERS)
def test_files_have_the_permissions_of_new_files(write, names, umask, tmp_path):
    """safetensors 0.8 makes files that their owner alone may read."""
    before = os.umask(umask)
    try:
        write(tmp_path)
    finally:
        os.umask(before)
    modes = {p.name: p.stat().st_mode & 0o777 for p in tmp_path.iterdir()}
    assert modes == dict.fromkeys(names, 0o666 & ~umask)


@pytest.mark.parametrize(("write", "names"), WRITERS.values(), ids=WRITERS)
def test_a_write_that_is_cut_short_leaves_nothing(write, names, tmp_path):
    """A limit on sizes gives short writes and then an error, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2, limits[1]))
    try:
        with pytest.raises(InfoFlowError, match=r"cannot write .*make room"):
            write(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize(("write", "names"), WRITERS.values(), ids=WRITERS)
def test_a_folder_that_may_not_be_written_is_named(write, names, tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(InfoFlowError, match="cannot write"):
        write(tmp_path)


READERS = {
    "json": lambda path: read_json(path, "record", "write it again"),
    "state": lambda path: read_state(path, "the state", "write it again"),
    "parts, text": lambda path: list(_read(path.with_suffix(""), path, ".json")),
    "parts, tensors": lambda path: list(_read(path.with_suffix(""), path, ".safetensors")),
}


def _read(stem, path, end):
    if end == ".safetensors":
        write_parts(stem, "infoflow-lens result 1", {}, {})
        stem.with_suffix(end).unlink()
    path.rename(stem.with_suffix(end))
    with read_parts(stem, "infoflow-lens result 1", "result") as parts:
        yield parts


@pytest.mark.parametrize("how", ["pipe", "folder", "device"])
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_nobody_waits_for_what_is_no_file(read, how, tmp_path):
    """A pipe in the place of a record once held a command for ever."""
    occupy(how, tmp_path / "x.y", tmp_path)
    with pytest.raises(InfoFlowError, match="it is no regular file"):
        read(tmp_path / "x.y")


def test_kinds_are_all_here():
    from infoflow_lens.foundation import documents

    assert {id(kind) for kind, _ in KINDS.values()} == {
        id(value) for value in vars(documents).values() if isinstance(value, Document)
    } - {id(documents.NUMBERS)}  # of tensors: see below


def save(path, overwrite=False, **config):
    write_parts(path, "infoflow-lens result 1", config, {"a": torch.ones(3)}, overwrite=overwrite)


def test_tensors_beside_a_file_of_ours_are_ours_while_they_are_unchanged(tmp_path):
    """Others gave way where a json of ours lay beside them."""
    save(tmp_path / "x")
    (tmp_path / "x.json").unlink()
    save(tmp_path / "x")  # their header tells it, too
    other = {"a": torch.zeros(3)}
    header = header_of(tmp_path / "x.safetensors")
    for tensors, metadata in ((other, None), ({"a": torch.ones(4)}, None), (other, header)):
        save_file(tensors, tmp_path / "x.safetensors", metadata=metadata)
        before = (tmp_path / "x.safetensors").read_bytes()
        with pytest.raises(InfoFlowError, match=r"x\.safetensors' is there and is no saved result"):
            save(tmp_path / "x")
        assert (tmp_path / "x.safetensors").read_bytes() == before
        save(tmp_path / "x", overwrite=True)
    save_file({"a": torch.ones(3)}, tmp_path / "x.safetensors")  # as version 0.3 wrote them
    save(tmp_path / "x")


def header_of(path):
    with safe_open(path, framework="pt") as file:
        return file.metadata()


@pytest.mark.parametrize("end", ["png", "svg", "pdf"])
def test_pictures_are_whole_with_their_signature_and_known_by_it(end, tmp_path):
    rows = phase_diagram(load_task("kth_largest", n_tokens=8), ((1,), (2,)), (8,), "paper", 1)
    path = tmp_path / f"x.{end}"
    draw_phase_diagram(rows, "x", path)
    content = path.read_bytes()
    if end == "png":
        with Image.open(path) as image:
            image.load()
            assert image.text["Comment"].startswith("picture of infoflow-lens ")
            info = PngInfo()
            for key, value in image.text.items():
                info.add_text(key, value)
            image.putpixel((3, 3), (0, 0, 0, 255))
            image.save(path, pnginfo=info)
    elif end == "svg":
        ElementTree.fromstring(content)
        path.write_bytes(content.replace(b"</svg>", b"<g/></svg>"))
    else:
        assert content.rstrip().splitlines()[-2] == b"%%EOF"
        path.write_bytes(content.replace(b"/Creator", b"/Author "))
    edited = path.read_bytes()
    assert edited != content
    with pytest.raises(InfoFlowError, match="is no picture of infoflow-lens"):
        draw_phase_diagram(rows, "x", path)
    assert path.read_bytes() == edited
    path.write_bytes(content)
    draw_phase_diagram(rows, "another", path)
    assert json.loads(KINDS["witness"][1])
