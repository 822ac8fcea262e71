"""What a whole `infoflow-lens probe` costs beside the same model alone, in seconds of processors.

Run: python -m benchmarks.commands [--few 100] [--many 2000] [--batch-size 8]
    [--width 64] [--layers 2] [--parts start,sequence,tokens]

The model is a random GPT-2 of `--layers` layers, four heads and width `--width`, with a word a
token, in one thread; the data are texts of 40 to 63 words; the probes are positions and recovery.
Seconds are of user and system together, so that other work on the machine changes them little.

- start: a run of `--few` sequences, the imports of PyTorch and TransformerLens alone, and the same
  command again, which finds its answer in the folder.
- sequence: what each more costs, from `--few` to `--many` sequences, over the forward pass of the
  same bridge in a plain loop with as many in a batch; and over that of the transformers model.
- tokens: from texts to stored sequences, by lines and by `--window`, over the tokenizer alone on
  the same lines, and on the same text in pieces.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.corpora import save_model, save_texts
from infoflow_lens import load_any
from infoflow_lens.probing.data import stream_data
from infoflow_lens.probing.store import store_sequences

_LIBRARIES = "import torch, transformer_lens; from transformers import GPT2LMHeadModel"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--few", type=int, default=100)
    parser.add_argument("--many", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--parts", default="start,sequence,tokens")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("what", "seconds of processors", "ratio")
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        save_model(home / "model", chosen.width, n_positions=64, n_layers=chosen.layers)
        for name, n in (("few", chosen.few), ("many", chosen.many)):
            save_texts(home / f"{name}.txt", n, (40, 63))
        parts = chosen.parts.split(",")
        if "start" in parts:
            _start(home, table)
        if "sequence" in parts:
            _sequence(home, table, chosen.few, chosen.many, chosen.batch_size)
        if "tokens" in parts:
            _tokens(home, table)
    Console().print(table)


def _start(home: Path, table: Table) -> None:
    libraries = _command("-c", _LIBRARIES)
    first, again = _probe(home, "few"), _probe(home, "few", fresh=False)
    table.add_row("imports of PyTorch, TransformerLens, transformers", f"{libraries:.2f}", "1")
    table.add_row("a run of few sequences", f"{first:.2f}", f"{first / libraries:.2f}")
    table.add_row("the same again", f"{again:.2f}", f"{again / libraries:.2f}")


def _sequence(home: Path, table: Table, few: int, many: int, batch_size: int) -> None:
    each = (_probe(home, "many", batch_size) - _probe(home, "few", batch_size)) / (many - few)
    model = load_any(str(home / "model")).model
    ids = torch.randint(64, (1000, 52), generator=torch.Generator().manual_seed(0))

    def loop(model: Callable[[torch.Tensor], object]) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                for batch in ids.split(batch_size):
                    model(batch)

        return run

    plain, below = (_seconds(loop(m)) / 1000 for m in (model, model.original_model))
    table.add_row("a sequence of the opened model in a plain loop", f"{plain:.5f}", "1")
    table.add_row("  of the transformers model", f"{below:.5f}", f"{below / plain:.2f}")
    table.add_row("  of the command", f"{each:.5f}", f"{each / plain:.2f}")


def _tokens(home: Path, table: Table) -> None:
    model = load_any(str(home / "model")).model
    save_texts(home / "texts.txt", 20_000, (40, 63))
    texts = (home / "texts.txt").read_text().splitlines()

    def tokenizer() -> None:
        for start in range(0, len(texts), 1000):
            model.tokenizer(texts[start : start + 1000])

    def stored(**settings: int) -> Callable[[], None]:
        def run() -> None:
            shutil.rmtree(home / "scratch", ignore_errors=True)
            (home / "scratch").mkdir()
            given = stream_data(
                model, str(home / "texts.txt"), scratch=home / "scratch", **settings
            )
            store_sequences(given, home / "scratch", "texts")

        return run

    def tokenizer_of_pieces() -> None:
        text = "\n".join(texts)
        for start in range(0, len(text), 2**20):
            model.tokenizer(text[start : start + 2**20])

    for name, settings, alone in (
        ("lines", {}, tokenizer), ("windows", {"window": 64}, tokenizer_of_pieces)
    ):  # fmt: skip
        theirs, ours = _seconds(alone), _seconds(stored(**settings))
        table.add_row(f"{name}: the tokenizer alone", f"{theirs:.2f}", "1")
        table.add_row("  stored", f"{ours:.2f}", f"{ours / theirs:.2f}")


def _seconds(function: Callable[[], object], rounds: int = 3) -> float:
    """The fewest seconds of this process in some rounds."""
    found = []
    for _ in range(rounds):
        begin = time.process_time()
        function()
        found.append(time.process_time() - begin)
    return min(found)


def _probe(home: Path, data: str, batch_size: int = 8, fresh: bool = True) -> float:
    if fresh:
        shutil.rmtree(home / "out", ignore_errors=True)
    return _command(
        "-W", "ignore", "-m", "infoflow_lens.cli", "probe", home / "model", "--data",
        home / f"{data}.txt", "--out", home / "out", "--probes", "positions,recovery",
        "--ranks", "1,2", "--batch-size", batch_size, "--threads", 1, "--quiet",
    )  # fmt: skip


def _command(*arguments: object) -> float:
    """Seconds of processors that a Python command takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *map(str, arguments)],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
