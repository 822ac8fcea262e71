"""How many times as fast a survey is by several processes as by one, in the same run.

Run: python -m benchmarks.survey [--windows 64] [--layers 6] [--width 192] [--jobs 2]

The model is a random GPT-2 of four heads, the data are a text file. Each process has one thread.
Times are of whole commands, with the start of all processes; the results must be the same bytes.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.corpora import save_model, save_texts


def main() -> None:
    """Print the seconds of both, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--jobs", type=int, default=2)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        save_model(home / "model", chosen.width, 64, chosen.layers)
        save_texts(home / "texts.txt", 20 * chosen.windows)
        alone, one = survey(home, chosen.windows, 1)
        together, several = survey(home, chosen.windows, chosen.jobs)
        same = "the same bytes" if one == several else "OTHER BYTES"
        print(
            f"{alone:.0f} s by one process, {together:.0f} s by {chosen.jobs}: "
            f"{alone / together:.2f} times as fast, {same}"
        )


def survey(home: Path, windows: int, jobs: int) -> tuple[float, dict[str, bytes]]:
    """Seconds of a command, and the tables and tensors that it leaves."""
    out = home / f"by-{jobs}"
    arguments = ["survey", home / "model", "--data", home / "texts.txt", "--n", windows, "--out",
                 out, "--jobs", jobs, "--threads", 1, "--quiet"]  # fmt: skip
    begun = time.monotonic()
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "infoflow_lens.cli", *map(str, arguments)],
        check=True, stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    seconds = time.monotonic() - begun
    kept = (".safetensors", ".csv")
    return seconds, {path.name: path.read_bytes() for path in out.iterdir() if path.suffix in kept}


if __name__ == "__main__":
    main()
