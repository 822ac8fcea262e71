"""Data by what a user types: what is read, and what is refused in words."""

import errno
import json
import os
from itertools import product

import datasets
import numpy as np
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import save_file

from infoflow_lens import InfoFlowError, PositionsProbe, load_any, run_probes
from infoflow_lens.hooks.model.inputs import Batches
from infoflow_lens.probing import data as data_module
from infoflow_lens.probing.data import check_data, read_rows, read_texts
from infoflow_lens.probing.store import store_sequences
from tests.conftest import some_of, spread
from tests.hooks.model.test_inputs import UNUSUAL
from tests.reference import zoo
from tests.reference.data import read_data


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    zoo.save("gpt2", folder)
    return load_any(folder).model


def test_the_mark_at_the_beginning_of_a_file_is_no_text(model, tmp_path):
    plain, marked = tmp_path / "plain.txt", tmp_path / "marked.txt"
    plain.write_text("w5 w6\nw7 w8\n", encoding="utf-8")
    marked.write_text("w5 w6\nw7 w8\n", encoding="utf-8-sig")
    assert read_texts(str(marked)) == read_texts(str(plain))
    found, expected = (read_data(model, str(path)).sequences() for path in (marked, plain))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", ["<i4", ">i4", ">i8", "<u2"])
def test_arrays_of_integers_of_every_kind(model, tmp_path, dtype):
    ids = zoo.tokens(4, 9)
    np.save(tmp_path / "ids.npy", ids.numpy().astype(dtype))
    assert read_data(model, str(tmp_path / "ids.npy")).sequences().equal(ids)


def test_files_of_no_numbers_are_refused(model, tmp_path):
    np.save(tmp_path / "words.npy", np.array([["a", "b"]]))
    with pytest.raises(InfoFlowError, match="cannot be read as a tensor"):
        read_data(model, str(tmp_path / "words.npy"))


@pytest.mark.filterwarnings(
    "ignore:torch.quantize_per|The PyTorch API of nested|TypedStorage|Validating sparse"
)
@pytest.mark.parametrize("kind", UNUSUAL)
def test_tensors_of_unusual_kinds_are_refused_in_files(model, kind, tmp_path):
    torch.save(UNUSUAL[kind](), tmp_path / "x.pt")
    with pytest.raises(InfoFlowError, match=r"x.pt' cannot be read as a tensor .*expected") as e:
        read_data(model, str(tmp_path / "x.pt"))
    # since torch 2.15 some are not loaded at all
    assert "ordinary numbers" in str(e.value) or "Unsupported global" in str(e.value)


def test_a_window_that_the_model_does_not_take_is_refused_by_the_name_of_the_data(model, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("w5 w6 w7 w8 " * 2000)
    with pytest.raises(InfoFlowError, match=r"text\.txt has sequences of 4000 tokens"):
        read_data(model, str(path), window=4000)


@pytest.mark.slow
def test_rows_that_change_their_columns_late_are_refused_with_the_columns(model, tmp_path):
    """The first block of a large file tells the columns."""
    path = tmp_path / "rows.jsonl"
    first, late = {"text": "w5 " * 300}, {"text": "w5", "extra": 3}
    rows = [json.dumps(first)] * 12000 + [json.dumps(late)] * 12000
    path.write_text("\n".join(rows))
    with pytest.raises(InfoFlowError, match=r"rows\.jsonl.*extra"):
        read_data(model, str(path), n=30000, max_length=2)


@pytest.mark.parametrize("name", ["text.txt", "ids.npy", "repeated", "d_retrieval"])
def test_a_column_of_what_has_none_is_refused_before_a_model_is_loaded(tmp_path, name):
    (tmp_path / "text.txt").write_text("w5 w6\n")
    np.save(tmp_path / "ids.npy", zoo.tokens(4, 9).numpy())
    data = str(tmp_path / name) if "." in name else name
    with pytest.raises(InfoFlowError, match=r"column is 'other'.*no columns: leave the column out"):
        check_data(data, "other")


def test_empty_first_rows_are_named_and_left_out_of_joined_texts(model, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in (None, "w5 w6", "w7 w8 w9")))
    with pytest.raises(InfoFlowError, match=r"NoneType in row 0.*leave that row out"):
        read_data(model, str(path))
    whole = tmp_path / "whole.jsonl"
    whole.write_text("\n".join(json.dumps({"text": text}) for text in ("w5 w6", "w7 w8 w9")))
    found, expected = (read_data(model, str(p), window=3).sequences() for p in (path, whole))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("name", "meant"), [("d_retreival", "d_retrieval"), ("repeatd", "repeated")]
)
def test_a_misspelt_task_is_no_dataset_of_the_hub(name, meant):
    with pytest.raises(InfoFlowError, match=f"is {name!r}.*did you mean {meant!r}"):
        check_data(name)
    check_data("imdb")
    check_data("owner/d_retreival")


@pytest.mark.parametrize(
    ("data", "asked"),
    [
        ("owner/texts", ("owner/texts", None, "train")),
        ("owner/texts:test", ("owner/texts", None, "test")),
        ("owner/texts:small:test[:5]", ("owner/texts", "small", "test[:5]")),
    ],
)
def test_a_dataset_of_the_hub_is_asked_for_by_name_config_and_split(
    model, data, asked, monkeypatch
):
    def loaded(name, config, split):
        assert (name, config, split) == asked
        return datasets.Dataset.from_dict({"text": ["w5 w6", "w7 w8"]})

    monkeypatch.setattr(datasets, "load_dataset", loaded)
    assert read_texts(data) == ["w5 w6", "w7 w8"]
    assert len(read_data(model, data).sequences()) == 2


def test_what_is_nowhere_is_refused_with_the_file_that_was_meant(model, tmp_path, monkeypatch):
    def gone(*args, **kwargs):
        raise FileNotFoundError("no such dataset")

    monkeypatch.setattr(datasets, "load_dataset", gone)
    (tmp_path / "texts.txt").write_text("w5 w6\n")
    with pytest.raises(InfoFlowError, match=r"there is no file .*did you mean 'texts\.txt'"):
        read_texts(str(tmp_path / "texts"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InfoFlowError, match=r"no such dataset.*did you mean 'texts\.txt'"):
        read_texts("texts")


def test_tensors_of_other_shapes_and_files_of_several_are_refused(model, tmp_path):
    flat, table, several = (tmp_path / n for n in ("flat.pt", "table.pt", "several.safetensors"))
    torch.save(torch.arange(5), flat)
    torch.save({"x": torch.zeros(2, 3)}, table)
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(2, 3)}, several)
    for path, message in (
        (flat, r"holds a tensor \(5,\): expected token ids \[n, pos\]"),
        (table, "holds a dict: expected a tensor"),
        (several, "it holds 2 tensors"),
    ):
        with pytest.raises(InfoFlowError, match=message):
            read_data(model, str(path))


def test_words_that_mean_missing_elsewhere_are_words(model, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("text\nNA\nnull\nw5\n")
    assert read_texts(str(path)) == ["NA", "null", "w5"]


# What a header calls a picture or a sound

MEDIA = {
    "image": datasets.Image(),
    "audio": datasets.Audio(),
    "images": datasets.List(datasets.Image()),
    "nested": {"inner": datasets.Image()},
}


def with_media(kind, path):
    """A dataset with texts, and a column that would be fetched or opened if it were decoded."""
    value = {"path": "https://nowhere.invalid/x.png", "bytes": None}
    held = {"images": [value], "nested": {"inner": value}}.get(kind, value)
    features = datasets.Features({"text": datasets.Value("string"), "media": MEDIA[kind]})
    rows = datasets.Dataset.from_dict({"text": ["w4 w5", "w6 w7 w8"], "media": [held, held]})
    table = rows.data.table.replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": features.to_dict()}})}
    )
    pyarrow.parquet.write_table(table, path)
    return path


@pytest.mark.parametrize("kind", MEDIA)
@pytest.mark.parametrize("stored", ["file", "folder"])
def test_columns_of_media_are_neither_decoded_nor_fetched(
    model, kind, stored, tmp_path, monkeypatch
):
    """A header of a parquet file once made addresses in it be fetched."""

    def refuse(*args, **kwargs):
        raise AssertionError("it was decoded")

    path = with_media(kind, tmp_path / "x.parquet")
    if stored == "folder":
        datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "c")).save_to_disk(
            tmp_path / "saved"
        )
        path = tmp_path / "saved"
    for media in (datasets.Image, datasets.Audio):
        monkeypatch.setattr(media, "decode_example", refuse)
    assert [len(row) for row in read_data(model, str(path)).sequences()] == [3, 4]  # with BOS
    assert read_texts(str(path)) == ["w4 w5", "w6 w7 w8"]
    assert read_rows(str(path))["text"][:] == ["w4 w5", "w6 w7 w8"]
    with pytest.raises(InfoFlowError, match="media"):
        read_data(model, str(path), column="media")


# Names that a library may take for patterns, chains, protocols or files of its own, and what lies
# beside them, which must not be read.
ODD = {
    "run[1]": "run1", "a*": "ab", "q?": "qr", "a**": "a", "zip::x": "zip", "~x": "x",
    "dataset_info": "other", ".hidden": "hidden", "{a,b}": "a", "a b%20#x": "a b", "file:x": "x",
    "d[1]/x": "d1/x", "d*/x": "de/x", "a::b/x": "a", ".hidden/x": "hidden/x", "__x__/y": "x/y",
}  # fmt: skip


def write_rows(path, text):
    rows = datasets.Dataset.from_dict({"text": [text] * 3})
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".saved":
        rows.save_to_disk(path.with_suffix(""))
    elif path.suffix == ".txt":
        path.write_text(f"{text}\n" * 3)
    else:
        write = getattr(rows, f"to_{path.suffix[1:].removesuffix('l')}")
        write(path, lines=path.suffix == ".jsonl") if "json" in path.suffix else write(path)


ENDS = ["txt", "csv", "json", "jsonl", "parquet", "saved"]


@pytest.mark.parametrize(("name", "end"), some_of(list(product(ODD, ENDS)), *spread([*ODD], ENDS)))
def test_the_file_that_is_named_is_read_and_no_other(name, end, tmp_path, monkeypatch):
    """`datasets` takes a path for a pattern: run[1].csv was read as run1.csv."""
    monkeypatch.chdir(tmp_path)
    for place, text in ((name, "w5 w6"), (ODD[name], "other")):
        # `datasets` itself cannot save to some of these names
        write_rows(tmp_path / "made" / f"x.{end}", text)
        made = tmp_path / "made" / ("x" if end == "saved" else f"x.{end}")
        target = tmp_path / (place if end == "saved" else f"{place}.{end}")
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            made.rename(target)
    ending = "" if end == "saved" else f".{end}"
    for data in (str(tmp_path / f"{name}{ending}"), f"file:./{name}{ending}"):
        if data.startswith("file:./~"):
            continue
        assert list(read_rows(data)["text"]) == ["w5 w6"] * 3
        texts = read_texts(data)
        assert texts == (["w5 w6\nw5 w6\nw5 w6\n"] if end == "txt" else ["w5 w6"] * 3)


def test_only_the_columns_that_are_used_are_read(model, tmp_path):
    path = tmp_path / "x.jsonl"
    rows = [{"text": "w4 w5", "more": 1}, {"text": "w6", "more": 2}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (part,) = data_module._stream_rows(path, None, ("text", "attention_mask"))
    assert part.column_names == ["text"]
    assert len(read_data(model, str(path)).sequences()) == 2


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes have no names there")
@pytest.mark.parametrize("end", ["txt", "jsonl", "parquet", "pt", "npy"])
def test_a_pipe_is_no_file_of_data(model, end, tmp_path):
    os.mkfifo(tmp_path / f"x.{end}")
    with pytest.raises(InfoFlowError, match="is no regular file"):
        read_data(model, str(tmp_path / f"x.{end}"))


@pytest.mark.parametrize("end", ["pt", "npy", "safetensors"])
def test_a_file_system_that_cannot_map_files_is_read(model, end, tmp_path, monkeypatch):
    ids, path = zoo.tokens(4, 9), tmp_path / f"x.{end}"
    writers = {"pt": torch.save, "npy": lambda x, p: np.save(p, x.numpy()),
               "safetensors": lambda x, p: save_file({"x": x}, p)}  # fmt: skip
    writers[end](ids, path)
    originals = {"pt": torch.load, "npy": np.load}

    def unmapped(original, option):
        def read(*args, **settings):
            if settings.get(option):
                raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
            return original(*args, **settings)

        return read

    if end == "safetensors":
        fails = unmapped(None, "mapped")
        monkeypatch.setattr("safetensors.torch.load_file", lambda path: fails(mapped=True))
    else:
        place = {"pt": "torch.load", "npy": "numpy.load"}[end]
        option = {"pt": "mmap", "npy": "mmap_mode"}[end]
        monkeypatch.setattr(place, unmapped(originals[end], option))
    assert read_data(model, str(path)).sequences().equal(ids)


def test_half_a_character_is_named(model):
    """A lone surrogate once ended in a UnicodeEncodeError of the tokenizer."""
    with pytest.raises(InfoFlowError, match=r"inputs\[1\] holds half a character"):
        run_probes(model, ["w4 w5", "w6 \ud800 w7"], [PositionsProbe()], progress=False)


@pytest.mark.parametrize("name", ["texts", "texts.md", "texts.TXT"])
def test_a_file_that_does_not_say_what_it_holds_is_named(model, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("w4 w5")
    for call in (check_data, read_texts, lambda data: read_data(model, data)):
        with pytest.raises(InfoFlowError, match=rf"'{name}' does not say what it holds.*\.jsonl"):
            call(name)


def test_a_column_that_is_not_there_is_told_with_all_that_are(model, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "w4 w5", "attention_mask": [1, 1]}\n')
    with pytest.raises(InfoFlowError, match="has the columns text, attention_mask, without nope"):
        read_data(model, str(path), column="nope")


def saved(path, text="w4 w5"):
    datasets.Dataset.from_dict({"text": [text] * 3}).save_to_disk(path)
    return path


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes have no names there")
def test_a_pipe_in_a_saved_dataset_is_refused(tmp_path):
    path = saved(tmp_path / "ds")
    (arrow,) = path.glob("*.arrow")
    arrow.unlink()
    os.mkfifo(arrow)
    with pytest.raises(InfoFlowError, match="is no regular file"):
        read_rows(str(path))


@pytest.mark.parametrize("name", ["../good/data-00000-of-00001.arrow", "/etc/hosts", "", 5])
def test_a_saved_dataset_that_names_files_elsewhere_is_refused(name, tmp_path):
    """Its digests were of the files below it alone."""
    saved(tmp_path / "good")
    state = saved(tmp_path / "ds") / "state.json"
    values = json.loads(state.read_text())
    state.write_text(json.dumps({**values, "_data_files": [{"filename": name}]}))
    with pytest.raises(InfoFlowError, match="expected the names of files beside it"):
        read_rows(str(tmp_path / "ds"))


@pytest.mark.parametrize("what", ["arrow", "state.json", "dataset_info.json", "folder"])
def test_a_link_in_a_saved_dataset_is_refused(what, tmp_path):
    """A dataset that somebody gave away read a file of its reader's."""
    saved(tmp_path / "good")
    path = saved(tmp_path / "ds")
    if what == "folder":
        (path / "more").symlink_to(tmp_path / "good")
    else:
        (file,) = path.glob(f"*{what}")
        (tmp_path / "elsewhere").write_bytes(file.read_bytes())
        file.unlink()
        file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InfoFlowError, match=r"is a link: expected the files of a saved dataset"):
        read_rows(str(path))
    (tmp_path / "link").symlink_to(tmp_path / "good")  # which the user named
    assert len(read_rows(str(tmp_path / "link"))) == 3


@pytest.mark.parametrize("split", ["../good", "/etc", "a/b", "", ".", 5])
def test_splits_elsewhere_are_refused_before_they_are_opened(split, tmp_path, monkeypatch):
    """The refusal itself once named the folder elsewhere as the one to give."""
    saved(tmp_path / "good")
    both = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["w4"]})})
    both.save_to_disk(tmp_path / "ds")
    with pytest.raises(InfoFlowError, match=r"holds several splits \(train\).*ds/train"):
        read_rows(str(tmp_path / "ds"))
    (tmp_path / "ds" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", split]}))
    monkeypatch.setattr(datasets, "load_from_disk", lambda path: pytest.fail("it was opened"))
    with pytest.raises(InfoFlowError, match="expected the names of folders beside it") as refused:
        read_rows(str(tmp_path / "ds"))
    assert "ds/../good" not in str(refused.value)


@pytest.mark.parametrize("name", ["texts", "owner/texts", "csv", "text"])
def test_what_is_said_to_be_on_the_hub_is_not_read_from_here(name, tmp_path, monkeypatch):
    """`datasets` takes a folder of that name first, and its own readers all files of this one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.csv").write_text("text\nw4 w5\n")
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / "mine.csv").write_text("text\nw4 w5\n")
    for data in (f"hub:{name}", f"{name}:train"):
        with pytest.raises(InfoFlowError, match=r"names a dataset of the hub, but .* would read"):
            read_texts(data)


@pytest.mark.parametrize("kind", ["of a run", "saved"])
def test_arrow_files_are_read_where_files_cannot_be_mapped(kind, tmp_path, monkeypatch):
    """A run advised to run the same again, for ever."""

    def unmapped(*args, **kwargs):
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    if kind == "saved":
        saved(tmp_path / "ds")
        monkeypatch.setattr("pyarrow.memory_map", unmapped)
        assert list(read_rows(str(tmp_path / "ds"))["text"]) == ["w4 w5"] * 3
        return
    ids = zoo.tokens(4, 9)
    store = store_sequences([Batches(None, ids)], tmp_path, "ids")
    monkeypatch.setattr("pyarrow.memory_map", unmapped)
    assert torch.stack(list(store.sequences)).equal(ids)
    assert store.sequences[2].equal(ids[2])


def test_a_tensor_of_more_numbers_than_its_file_holds_is_refused(model, tmp_path):
    torch.save(torch.zeros(1, dtype=torch.long).expand(1000, 10**10), tmp_path / "x.pt")
    with pytest.raises(InfoFlowError, match="of which its file holds fewer"):
        read_data(model, str(tmp_path / "x.pt"))


@pytest.mark.parametrize("data", ["~nouser/x.txt", "file:" + "x" * 5000, "x" * 5000 + ".txt"])
def test_what_is_no_path_is_named(data):
    with pytest.raises(InfoFlowError, match="is no path"):
        check_data(data)
    if not data.endswith("x.txt"):
        with pytest.raises(InfoFlowError, match=r"is no path|no official name"):
            load_any(data)
