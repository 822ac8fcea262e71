"""How many times as fast a survey is by several processes as by one, in the same run.

Run: python -m benchmarks.survey [--windows 64] [--layers 6] [--width 192] [--jobs 2]

The model is a random GPT-2 of four heads, the data are a text file. Each process has one thread.
Times are of whole commands, with the start of all processes; the results must be the same bytes. On
a machine that others use, too, the seconds of processors tell how much each was given.
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
        times = zip(alone, together, strict=True)
        seconds, busy = (f"{first:.0f} and {second:.0f} s" for first, second in times)
        print(
            f"{seconds} by one process and by {chosen.jobs}, {alone[0] / together[0]:.2f} times as "
            f"fast, {same}; of processors they got {busy}"
        )


def survey(home: Path, windows: int, jobs: int) -> tuple[tuple[float, float], dict[str, bytes]]:
    """Seconds of a command, by the clock and of processors, and what it leaves."""
    out = home / f"by-{jobs}"
    arguments = ["survey", home / "model", "--data", home / "texts.txt", "--n", windows, "--out",
                 out, "--jobs", jobs, "--threads", 1, "--quiet"]  # fmt: skip
    begun, before = time.monotonic(), os.times()
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "infoflow_lens.cli", *map(str, arguments)],
        check=True, stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    after = os.times()
    used = sum(after[2:4]) - sum(before[2:4])  # of child processes that have ended
    kept = (".safetensors", ".csv")
    seconds = time.monotonic() - begun, used
    return seconds, {path.name: path.read_bytes() for path in out.iterdir() if path.suffix in kept}


if __name__ == "__main__":
    main()
