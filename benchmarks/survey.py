"""What a survey costs, in bare forward passes of the same sequences.

Run: python -m benchmarks.survey [--small]

The model is a random one in the sizes of GPT-2 small (12 layers of 12 heads, width 768) with a
vocabulary of 1,024, saved as a folder; the data are 32 sequences of 64 random ids. The time is of
the processor, on one thread. `--small` takes a quarter of the layers and a third of the width,
where fixed costs weigh more.
"""

import argparse
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import GPT2Config, GPT2LMHeadModel

from infoflow_lens.models.loading import load_any
from infoflow_lens.probing.survey import run_survey
from infoflow_lens.probing.survey_config import SurveyConfig

_GOAL, _N, _LENGTH, _VOCABULARY = 200, 32, 64, 1024


def main() -> None:
    """Print the ratio of each part, and their sum."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    layers, heads, width = (3, 4, 256) if parser.parse_args().small else (12, 12, 768)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder, data = Path(scratch) / "model", Path(scratch) / "ids.pt"
        with torch.random.fork_rng():
            torch.manual_seed(0)
            config = GPT2Config(
                n_layer=layers,
                n_head=heads,
                n_embd=width,
                vocab_size=_VOCABULARY,
                n_positions=128,
                bos_token_id=None,
                eos_token_id=None,
            )
            GPT2LMHeadModel(config).save_pretrained(folder)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(_VOCABULARY, (_N, _LENGTH), generator=generator)
        torch.save(ids, data)
        model = load_any(folder).model
        bare = _forward(model, ids)
        del model
        began: list[tuple[str, float]] = []

        def say(line: str) -> None:
            began.append((line, time.process_time()))

        start = time.process_time()
        settings = SurveyConfig(str(folder), str(data), n=_N, window=_LENGTH)
        run_survey(Path(scratch) / "out", settings, progress=False, say=say)
        end = time.process_time()
    rows = [("loading", start), *began, ("", end)]
    table = Table("part", "bare forward passes")
    for (name, since), (_, until) in pairwise(rows):
        table.add_row(name, f"{(until - since) / bare:.1f}")
    table.add_row(f"all (goal: at most {_GOAL})", f"{(end - start) / bare:.1f}")
    Console().print(table)


def _forward(model: torch.nn.Module, ids: torch.Tensor) -> float:
    """Seconds of one bare pass over all sequences, the least of three."""
    times = []
    with torch.no_grad():
        for _ in range(3):
            start = time.process_time()
            for batch in ids.split(8):
                model(batch)
            times.append(time.process_time() - start)
    return min(times)


if __name__ == "__main__":
    main()
