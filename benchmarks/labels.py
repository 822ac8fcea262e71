"""Label the heads of SmolLM2 on sixteen texts, and replace all of them at once.

Run: python -m benchmarks.labels [--write FILE]

The texts, four of each of four kinds, were written before any head was labelled on them; so was
what follows, from what was found on other texts. Copies of random tokens are of different lengths,
since copies of one length make content look fixed.

Prediction. 16.0 is "fixed", by the name "previous"; 17.3, 17.4, 17.5 and 18.6, which complete
copies, are "max". On the texts that no label has seen, all 270 heads by their labels' ideals lose
less than by the best single ideal of the theory's kind (position, offset, gated, largest), and less
than by the same ideals dealt at random. All of it takes at most 60 passes.

Rule. Labels are of the texts with even numbers, the judgement is of the others; then the same the
other way round. Means are of 48 other texts.

Refuted if two of the five heads get another label on both halves, or if labels lose as much as the
best single ideal on both. A head that is undecided is neither.
"""

import argparse
import bisect
import cmd
import code
import csv
import inspect
import json
import pydoc_data.topics
import queue
import sched
import shlex
import statistics
import string
import textwrap
from pathlib import Path
from typing import Any

import torch

from benchmarks.depth import read_texts
from infoflow_lens import label_heads, load_any, run_probes
from infoflow_lens.foundation.packages import package_versions
from infoflow_lens.hooks import HeadLabels, MeanPatternsProbe
from tests.reference.real_models import FOLDER

N_POS, N_LAYERS = 32, 30
KNOWN = {(16, 0): "fixed", (17, 3): "max", (17, 4): "max", (17, 5): "max", (18, 6): "max"}
SINGLE = ("position", "offset", "gated", "largest")

_CODE = [string, statistics, textwrap, bisect]
_LENGTHS = (11, 13, 15, 12)  # of the copies


def encode(tokenizer: Any, text: str) -> torch.Tensor:
    """Begin a text with the token that texts begin with, and cut it."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return torch.tensor([tokenizer.bos_token_id, *ids][:N_POS])


def copies(tokenizer: Any, seed: int, length: int) -> torch.Tensor:
    """Random tokens, and the same again, cut."""
    generator = torch.Generator().manual_seed(seed)
    some = torch.randint(1000, 40000, (length,), generator=generator)
    return torch.cat([torch.tensor([tokenizer.bos_token_id]), some, some])[:N_POS]


def texts_of(tokenizer: Any) -> list[torch.Tensor]:
    """Sixteen texts, the four kinds in turn, so that each half has two of each."""
    sources = [inspect.getsource(module)[400:900] for module in _CODE]
    prose, questions = read_texts("labels")["smollm2"].values()
    kinds = [
        [encode(tokenizer, text) for text in prose],
        [encode(tokenizer, text) for text in sources],
        [copies(tokenizer, 70 + i, length) for i, length in enumerate(_LENGTHS)],
        [encode(tokenizer, text) for text in questions],
    ]
    return [rows[at] for pair in ((0, 1), (2, 3)) for rows in kinds for at in pair]


def calibration_of(tokenizer: Any) -> list[torch.Tensor]:
    """Forty-eight other texts of the same kinds."""
    names = sorted(pydoc_data.topics.topics)
    prose = [" ".join(pydoc_data.topics.topics[name].split()[8:60]) for name in names[:48:4]]
    modules = (csv, queue, sched, shlex, cmd, code)
    sources = [inspect.getsource(m)[start : start + 400] for m in modules for start in (900, 2500)]
    people = ["Rosa", "Karl", "Mina", "Hugo", "Vera", "Ivan"]
    asked = [
        f"At the {place} {one} and {other} were talking about the {thing}. In the end {one} "
        f"offered the {thing} to {other}, and {other} said to"
        for place, thing in (("market", "horse"), ("school", "guitar"))
        for one, other in zip(people, people[1:] + people[:1], strict=True)
    ]
    rows = [encode(tokenizer, text) for text in (*prose, *sources, *asked)]
    return rows + [copies(tokenizer, 900 + i, 9 + i % 8) for i in range(12)]


def row_of(found: HeadLabels, half: str) -> dict[str, Any]:
    """What one half found, as plain values."""
    joint = found.joint_frame().set_index("all heads by")
    return {
        "half": half,
        "known": {f"{layer}.{head}": found.label_of(layer, head) for layer, head in KNOWN},
        "counts": found.counts(),
        "idle": int(found.idle.sum()),
        "repaired": found.n_repaired,
        "forwards": round(found.forwards, 1),
        "damage": {name: round(float(value), 3) for name, value in joint["damage"].items()},
        "rise": {name: round(float(value), 3) for name, value in joint["rise"].items()},
        "labels": list(found.labels),
    }


def table(document: dict[str, Any]) -> str:
    """Write what was found as a table for the docs."""
    halves = document["rows"]
    names = " | ".join(f"labels of the {row['half']} texts" for row in halves)
    lines = [f"| all heads at once, on the other half | {names} |", "|---|---|---|"]
    for name in sorted(halves[0]["damage"], key=lambda n: halves[0]["damage"][n]):
        each = [f"{row['damage'][name]:.2f} ({row['rise'][name]:+.2f})" for row in halves]
        lines.append(f"| {name} | {' | '.join(each)} |")
    known = [f"| {head} | " + " | ".join(row["known"][head] for row in halves) + " |"
             for head in halves[0]["known"]]  # fmt: skip
    lines += ["", f"| what is known of | {names} |", "|---|---|---|", *known]
    kinds = sorted({label for row in halves for label in row["labels"]})
    lines += ["", f"| heads of layers, even / odd texts | {' | '.join(kinds)} |"]
    lines.append("|---" * (len(kinds) + 1) + "|")
    size = len(halves[0]["labels"]) // 3
    n_layers = N_LAYERS // 3
    for i in range(3):
        some = [row["labels"][i * size : (i + 1) * size] for row in halves]
        counts = [" / ".join(str(part.count(kind)) for part in some) for kind in kinds]
        layers = f"{i * n_layers} to {(i + 1) * n_layers - 1}"
        lines.append(f"| {layers} | {' | '.join(counts)} |")
    return "\n".join(lines)


def main() -> None:
    """Label on each half, and print what came."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    loaded = load_any(FOLDER / "smollm2", backend="opened")
    model, tokenizer = loaded.model, loaded.model.tokenizer
    texts, others = texts_of(tokenizer), calibration_of(tokenizer)
    (means,) = run_probes(model, others, [MeanPatternsProbe()], batch_size=16, progress=False)
    rows = []
    for half, first in (("even", 0), ("odd", 1)):
        found = label_heads(
            model, texts[first::2], judge=texts[1 - first :: 2], calibration=means, progress=False
        )
        rows.append(row_of(found, half))
        print(found.joint_frame().round(3).to_string())
        shown = ("known", "counts", "idle", "repaired", "forwards")
        print({name: rows[-1][name] for name in shown})
    same = [a == b for a, b in zip(rows[0]["labels"], rows[1]["labels"], strict=True)]
    decided = [
        a == b
        for a, b in zip(rows[0]["labels"], rows[1]["labels"], strict=True)
        if "undecided" not in (a, b)
    ]
    agree = {"all": [sum(same), len(same)], "decided": [sum(decided), len(decided)]}
    print(f"the halves agree on {agree}")
    if arguments.write is not None:
        document = {"rows": rows, "agree": agree, "versions": package_versions()}
        arguments.write.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
