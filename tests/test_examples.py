"""Every script in examples/, and all that README and the how-to pages say to run."""

import ast
import io
import re
import shlex
import tokenize
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infoflow_lens.cli import app
from tests.processes import printed_by

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(path, tmp_path):
    assert printed_by(path, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []  # it leaves nothing behind


def code_lines(path):
    """Lines with code: no comments, documentation strings or empty lines."""
    tree = ast.parse(path.read_text("utf-8"))
    said = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    read = tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline)
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    coded = {token.start[0] for token in read if token.type not in skipped and token.string}
    return len(coded - said)


@pytest.mark.parametrize(("what", "most"), [("probe", 15), ("target", 15), ("study", 30)])
def test_one_of_your_own_is_one_short_file(what, most):
    assert 8 < code_lines(ROOT / "examples" / f"{what}_of_your_own.py") <= most


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "how-to").glob("*.md"))]
SCRIPT = r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?"  # and what it prints, where that is shown
BLOCKS = [
    pytest.param(script, shown, id=f"{page.name}-{number}")
    for page in PAGES
    for number, (script, shown) in enumerate(re.findall(SCRIPT, page.read_text("utf-8"), re.S))
]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "shown"), BLOCKS)
def test_what_a_page_says_to_run_runs(script, shown, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(script)
    if "build/models" in script:
        if not (ROOT / "build" / "models" / "minilm").is_dir():
            pytest.skip("the real models are not here: make models brings them")
        (tmp_path / "build").symlink_to(ROOT / "build")
    printed = printed_by(path, folder=tmp_path)
    assert printed
    assert shown in ("", printed)


MODEL = str(ROOT / "infoflow_lens" / "models" / "shipped" / "stdlib-2l")


def commands(page):
    """The command lines of this package on a page; a local folder stands for a model of the hub."""
    for block in re.findall(r"```console\n(.*?)```", page.read_text("utf-8"), flags=re.S):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0] == "infoflow-lens":
                named = {"gpt2": MODEL, "gpt2-probed": "probed", "MODEL": MODEL}
                named["build/models/smollm2"] = MODEL
                yield [named.get(word, word) for word in words[1:]]


# What stands last is what counts: less work by the same command.
SMALLER = {
    "ask": ["--instead", "When Mary and John went to the store, Kohn gave a drink to", "--quick"],
    "serve": [
        "--instead",
        "When Mary and John went to the store, Kohn gave a drink to",
        "--quick",
        "--idle",
        "0",
    ],
    "probe": ["--n", "4", "--n-detail", "1", "--probes", "positions", "--max-length", "12"],
    "survey": ["--n", "8", "--device", "cpu"],
    "study": ["--preset", "smoke", "--jobs", "1"],
    "estimate": ["--heads", "2,2", "--components", "2", "--tokens", "16"],
}
COMMANDS = sorted({" ".join(words): words for page in PAGES for words in commands(page)}.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", COMMANDS, ids=lambda words: " ".join(words).replace(MODEL, "MODEL")
)
def test_a_command_that_a_page_names_works(words, tmp_path, monkeypatch):
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in words]
    (tmp_path / "texts.txt").write_text("import os, sys, re, json, math\n" * 100)
    whole = "--list" in words or (words[0] == "estimate" and "--sweep" not in words)
    extra = [] if whole else SMALLER.get(words[0], [])
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [*words, *extra])
    assert done.exit_code == 0, done.output
    assert done.stdout
