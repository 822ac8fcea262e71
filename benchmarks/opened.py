"""What it costs to look at an opened model: ratios against its bare forward pass, in one run.

Run: python -m benchmarks.opened [--rounds 15]

Beside it stands ``output_attentions`` of transformers. Rounds are
interleaved, on one thread, in processor time, and the least of each is compared, so that a loaded
machine changes little. SmolLM2 is measured where `make models` has brought it.
"""

import argparse
import logging
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from infoflow_lens import open_model
from tests.reference.real_models import FOLDER

_PATTERNS = "attn.hook_pattern"


def gpt2(attention: str) -> nn.Module:
    """A random model of GPT-2's size."""
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        transformers.GPT2Config(), attn_implementation=attention
    ).eval()


def smollm2(attention: str) -> nn.Module:
    """SmolLM2."""
    folder = FOLDER / "smollm2"
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=attention
    ).eval()


def ways(make: Callable[[str], nn.Module], attention: str, ids: Tensor) -> dict[str, Any]:
    """Each way to look, as a function of nothing."""
    model, eager = make(attention), make("eager")
    named = open_model(model)

    def patterns(host: Any) -> Callable[[], object]:
        return lambda: host.run_with_cache(ids, names_filter=lambda name: name.endswith(_PATTERNS))

    return {
        "bare": lambda: model(ids),
        "opened, nobody looks": lambda: named(ids),
        "opened, patterns": patterns(named),
        "opened, all points": lambda: named.run_with_cache(ids),
        "output_attentions (eager)": lambda: eager(ids, output_attentions=True),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    cases = {"GPT-2's size, 4 x 128": (gpt2, torch.arange(512).reshape(4, 128))}
    if (FOLDER / "smollm2").is_dir():
        cases["SmolLM2, 1 x 64"] = (smollm2, torch.arange(64)[None] + 100)
    table = Table("model", "attention", "what", "of a bare pass")
    for label, (make, ids) in cases.items():
        for attention in ("eager", "sdpa"):
            functions = ways(make, attention, ids)
            times: dict[str, list[float]] = {name: [] for name in functions}
            with torch.no_grad():
                for _ in range(rounds + 1):
                    for name, function in functions.items():
                        start = time.process_time()
                        function()
                        times[name].append(time.process_time() - start)
            least = {name: min(found[1:]) for name, found in times.items()}
            for name, seconds in least.items():
                table.add_row(label, attention, name, f"{seconds / least['bare']:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
