"""What a probe run costs as the corpus grows, and what more workers gain.

Run: python -m benchmarks.corpora [--most 100000] [--shared 400000] [--jobs 1,2,4]

The model is a random GPT-2 of two layers, four heads and width 32; the data are a text file with a
short sequence a line. The first table is of runs of `infoflow-lens probe` on 1/100, 1/10 and all of
`--most` sequences: the largest memory of the process beside that of the first, and the sequences a
second. The second is of one run on `--shared` sequences by each number of workers, one thread each:
how many times as fast as the first, and whether the results are the same bytes. Times are those in
which shards are measured, with the start of the workers.
"""

import argparse
import contextlib
import hashlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

_WORDS = 64


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--most", type=int, default=100_000)
    parser.add_argument("--shared", type=int, default=400_000, help="sequences of the second table")
    parser.add_argument("--jobs", default="1,2,4")
    parser.add_argument("--shard", type=int, default=2048)
    chosen = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        save_model(home / "model")
        save_texts(home / "texts.txt", max(chosen.most, chosen.shared))
        sizes = [max(chosen.most // 100, 1), max(chosen.most // 10, 1), chosen.most]
        table = Table("sequences", "largest memory", "beside the first", "sequences a second")
        first = 0
        for n in sizes:
            seconds, peak, _ = _run(home, n, chosen.shard, 1)
            first = first or peak
            table.add_row(
                str(n), f"{peak / 2**20:.0f} MiB", f"{peak / first:.3f}", f"{n / seconds:.0f}"
            )
        console.print(table)
        table = Table("workers", "times as fast", "the same bytes")
        alone, bytes_ = 0.0, ""
        for jobs in map(int, chosen.jobs.split(",")):
            seconds, _, digest = _run(home, chosen.shared, chosen.shard, jobs)
            alone, bytes_ = alone or seconds, bytes_ or digest
            table.add_row(str(jobs), f"{alone / seconds:.2f}", "yes" if digest == bytes_ else "NO")
        console.print(table)


def save_model(folder: Path, width: int = 32, n_positions: int = 32, n_layers: int = 2) -> None:
    """A random GPT-2 of four heads, and a tokenizer with a word a token."""
    words = {"<|endoftext|>": 0, **{f"w{i}": i + 1 for i in range(_WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    ).save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        GPT2LMHeadModel(
            GPT2Config(
                n_layer=n_layers, n_head=4, n_embd=width, vocab_size=len(words),
                n_positions=n_positions,
                bos_token_id=0, eos_token_id=0,
            )
        ).save_pretrained(folder)  # fmt: skip


def save_texts(path: Path, n: int, words: tuple[int, int] = (3, 9)) -> None:
    """A file with a text a line, of so many words at least and at most."""
    drawn = random.Random(0)
    with path.open("w") as file:
        for _ in range(n):
            chosen = drawn.choices(range(_WORDS), k=drawn.randint(*words))
            file.write(" ".join(f"w{word}" for word in chosen) + "\n")


def _run(home: Path, n: int, shard: int, jobs: int) -> tuple[float, int, str]:
    """Seconds in which shards are measured, the most memory of the process, a digest of results."""
    out = home / "out"
    shutil.rmtree(out, ignore_errors=True)
    arguments = ["probe", home / "model", "--data", home / "texts.txt", "--n", n, "--out", out,
                 "--probes", "positions,recovery", "--ranks", "1,2", "--batch-size", 256,
                 "--shard", shard, "--jobs", jobs, "--threads", 1, "--quiet"]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "infoflow_lens.cli", *map(str, arguments)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    began: list[float] = []
    said: list[str] = []

    def listen() -> None:
        for line in process.stderr or ():
            said.append(line)
            if line.startswith("positions, recovery"):  # all is loaded and tokenised
                began.append(time.monotonic())

    threading.Thread(target=listen, daemon=True).start()
    seen, peak, ended = psutil.Process(process.pid), 0, 0.0
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):
            peak = max(peak, seen.memory_info().rss)
        if not ended and (out / "positions.json").is_file():
            ended = time.monotonic()
        time.sleep(0.02)
    if process.wait():
        sys.exit(f"the run with {n} sequences and {jobs} jobs failed: {''.join(said[-3:])}")
    digest = hashlib.sha256()
    for path in sorted(out.rglob("*")):
        if path.is_file():
            digest.update(path.relative_to(out).as_posix().encode() + path.read_bytes())
    return (ended or time.monotonic()) - began[0], peak, digest.hexdigest()


if __name__ == "__main__":
    main()
