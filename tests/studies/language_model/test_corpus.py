import sysconfig
from pathlib import Path

import pytest

from infoflow_lens import InfoFlowError
from infoflow_lens.studies.language_model.corpus import SPLITS, read_corpus, split_of


def fill(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def named_for(split, n=1):
    """Names of files that the hash gives to a part."""
    names = (f"module_{i}.py" for i in range(10_000))
    return [name for name in names if split_of(name) == split][:n]


@pytest.fixture
def library(tmp_path):
    fill(tmp_path, {named_for(split)[0]: f"# {split}\n" for split in SPLITS})
    return tmp_path


def test_a_name_decides_the_part_for_good():
    """Frozen: the shipped model was trained on the one part and measured on the other."""
    parts = {name: split_of(name) for name in ("json/decoder.py", "ast.py", "cgi.py", "enum.py")}
    assert parts == {
        "json/decoder.py": "train",
        "ast.py": "train",
        "cgi.py": "validation",
        "enum.py": "test",
    }
    shares = [split_of(f"{i}.py") for i in range(20_000)]
    assert shares.count("validation") / 20_000 == pytest.approx(0.05, abs=0.01)
    assert shares.count("test") / 20_000 == pytest.approx(0.05, abs=0.01)


def test_each_file_is_in_its_part_and_no_other(library):
    corpus = read_corpus(library)
    assert {split: corpus.texts(split) for split in SPLITS} == {
        split: [f"# {split}\n"] for split in SPLITS
    }


def test_tests_packages_build_files_and_unreadable_files_are_left_out(library):
    before = read_corpus(library)
    fill(
        library,
        {
            "json/tests/test_all.py": "assert 1",
            "site-packages/numpy/core.py": "x = 1",
            "_sysconfigdata__linux.py": "prefix = '/home/somebody'",
            "latin.py": "é".encode("latin-1"),
            "empty.py": "\n",
            "notes.txt": "no Python",
        },
    )
    assert read_corpus(library) == before


def test_the_fingerprint_sees_every_text_and_name(library):
    seen = {read_corpus(library).fingerprint}
    (name,) = named_for("train")
    fill(library, {name: "# changed\n"})
    seen.add(read_corpus(library).fingerprint)
    (library / name).rename(library / named_for("train", 2)[1])
    seen.add(read_corpus(library).fingerprint)
    assert len(seen) == 3


def test_line_ends_of_windows_change_nothing(library):
    (name,) = named_for("train")
    fill(library, {name: "a = 1\nb = 2\n"})
    before = read_corpus(library)
    fill(library, {name: "a = 1\r\nb = 2\r\n"})
    assert read_corpus(library) == before


def test_a_library_in_an_archive_is_refused(tmp_path):
    with pytest.raises(InfoFlowError, match="no Python files for train, validation, test"):
        read_corpus(tmp_path)


def test_the_running_python_has_it():
    corpus = read_corpus()
    assert Path(sysconfig.get_path("stdlib"), next(iter(corpus.files["test"]))).is_file()
    sizes = corpus.sizes()
    assert sizes["train"]["characters"] > 5e6
    for split in ("validation", "test"):
        share = sizes[split]["characters"] / sizes["train"]["characters"]
        assert 0.02 < share < 0.1
