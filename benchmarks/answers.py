"""Ask twenty questions of SmolLM2, and measure all that `ask` only estimates.

Run: python -m benchmarks.answers [--write FILE] [--kinds fact agreement]

The texts are of five kinds, four of each, and were chosen before `ask` saw any of them; so was what
follows, from what was found on 21 other texts.

Prediction. Where the model prefers the answer and the two texts differ by at least 1: the heads
that are measured hold at least nine of the ten largest, and the largest always; paths keep 70% and
lose 70% in three of four texts; as many random paths keep at most 10% in the median; a text of at
most 15 tokens takes at most 120 passes.

Rule. Heads are judged by exchanging each of the 270 by itself, kept and lost as `ask` measures.

With --tokens it asks instead how well the order of tokens can be known: the Spearman correlation of
the effects by the four to eight guesses of `ask` with those by 24, and of these with 24 others. The
first token is left out, as nothing predicts it.

Refuted if the largest head is missed once, or fewer than eight of ten are found twice, or paths are
found in fewer than half of the texts.
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from infoflow_lens import Answer, InfoFlowError, ask, load_any
from infoflow_lens.hooks.answer.paths import TARGET
from infoflow_lens.hooks.answer.question import Question
from infoflow_lens.hooks.answer.steps import guess_tokens, measure_tokens
from infoflow_lens.hooks.readouts import LogitDifference
from infoflow_lens.hooks.scores import spearman
from infoflow_lens.models.named import NamedModel
from tests.reference.real_models import FOLDER

TEN, MOST, MANY = 10, 120, 24
TEXTS = Path(__file__).parent / "texts" / "answers.txt"


class Asked(NamedTuple):
    """A question: a text, the other text, the answer and the one against it."""

    kind: str
    text: str
    instead: str
    answer: str
    against: str


def _read(line: str) -> Asked:
    """Read ``kind: a text with {}: what stands there, in the other text; answer, against``."""
    kind, rest = line.split(": ", 1)
    template, rest = rest.rsplit(": ", 1)
    words, answers = (part.split(", ") for part in rest.split("; "))
    texts = [template.format(word) for word in words]
    return Asked(kind, texts[0], texts[1], f" {answers[0]}", f" {answers[1]}")


PAIRS = [_read(line) for line in TEXTS.read_text("utf-8").splitlines()]


def measure_all_heads(model: NamedModel, asked: Asked) -> torch.Tensor:
    """Exchange each head by itself; float [layer, head]."""
    ids = [model.tokenizer(t, return_tensors="pt")["input_ids"][0] for t in asked[1:3]]
    read = LogitDifference(asked.answer, asked.against).bind(model)
    question = Question(model, ids[0], ids[1], read, batch_size=18)
    n_heads = question.n_heads[0]
    rows = [
        [question.exchange(question.z(layer), question.find_head(layer, head))]
        for layer in range(question.n_layers)
        for head in range(n_heads)
    ]
    return question.measure(rows).reshape(-1, n_heads)


def judge_tokens(model: NamedModel, asked: Asked) -> dict[str, Any]:
    """Compare the guesses of `ask` with 24 replacements of each token, and these with 24 others."""
    ids = model.tokenizer(asked.text, return_tensors="pt")["input_ids"][0]
    read = LogitDifference(asked.answer, asked.against).bind(model)
    question = Question(model, ids, None, read, batch_size=64)
    found = [measure_tokens(question).mean[1:]]
    guesses = guess_tokens(question)
    for seed in (101, 102):
        draw = torch.Generator().manual_seed(seed)
        rows = ids.repeat(len(ids) - 1, MANY, 1)
        for place in range(1, len(ids)):
            rows[place - 1, :, place] = torch.multinomial(
                guesses[place], MANY, True, generator=draw
            )
        effects = question.measure_texts(rows.flatten(0, 1)).view(-1, MANY)
        found.append(effects.mean(dim=1))
    every = torch.ones(1, len(ids) - 1, dtype=torch.bool)
    pairs = {"ask and 24": (0, 1), "ask and 24 others": (0, 2), "24 and 24 others": (1, 2)}
    return {
        "text": asked.text,
        **{
            name: round(float(spearman(found[one][None], found[other][None], every)), 2)
            for name, (one, other) in pairs.items()
        },
    }


def judge(model: NamedModel, asked: Asked) -> dict[str, Any]:
    """Ask, and compare with all heads."""
    about = {"kind": asked.kind, "text": asked.text, "answer": asked.answer}
    try:
        found: Answer = ask(
            model, asked.text, asked.answer, asked.against, asked.instead, progress=False
        )
    except InfoFlowError as error:
        return {**about, "refused": str(error)}
    truth = measure_all_heads(model, asked)
    effects = dict(zip(map(tuple, found.units.tolist()), found.unit_effect.tolist(), strict=True))
    measured = {place for place, effect in effects.items() if effect == effect and place[1] >= 0}
    order = truth.abs().flatten().argsort(descending=True).tolist()
    largest = [divmod(place, truth.shape[1]) for place in order[:TEN]]
    return {
        **about,
        "tokens": len(found.tokens),
        "value": round(found.value, 2),
        "other": round(found.other_value, 2),
        "heads found": sum(head in measured for head in largest),
        "largest": "{}.{}".format(*largest[0]),
        "is largest found": largest[0] in measured,
        "paths": len(found.places),
        "bundles": len(found.bundles()),
        "kept": round(found.kept, 2),
        "lost": round(found.lost, 2),
        "random": round(sorted(found.random)[len(found.random) // 2], 2) if found.random else None,
        "random at most": round(max(found.random, default=0.0), 2),
        "passes": round(found.forwards),
        "notes": list(found.notes),
    }


COLUMNS = ("text", "answer", "value", "other", "heads found", "largest", "paths", "bundles", "kept",
           "lost", "random", "passes")  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Make a table in Markdown, and what it comes to, of the rows of a run."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for row in rows:
        cells = (
            row[name] if row["paths"] or name not in ("kept", "lost") else "" for name in COLUMNS
        )
        said = [
            ""
            if cell is None
            else f"{cell + 0.0:g}"
            if isinstance(cell, float)
            else str(cell).strip()
            for cell in cells
        ]
        lines.append(f"| {' | '.join(said)} |")
    asked = [row for row in rows if row["value"] > 0 and row["value"] - row["other"] >= 1]
    whole = sum(min(row["kept"], row["lost"]) >= TARGET for row in asked)
    heads = sum(row["heads found"] >= TEN - 1 for row in asked)
    largest = sum(row["is largest found"] for row in asked)
    within = sum(row["passes"] <= MOST for row in rows)
    lines += [
        "",
        f"Of {len(rows)} texts the model prefers the answer, and by 1 or more than in the other "
        f"text, in {len(asked)}. The largest head is measured in {largest} of these, nine or all "
        f"of the ten largest in {heads}; paths keep and lose 70% in {whole}; {within} texts of all "
        f"take at most {MOST} "
        "passes.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Ask all questions, and print a row of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kinds", nargs="*", default=sorted({asked.kind for asked in PAIRS}))
    parser.add_argument("--tokens", action="store_true", help="judge the order of tokens alone")
    parser.add_argument("--write", type=Path, help="where the rows go, as JSON")
    settings = parser.parse_args()
    model = load_any(FOLDER / "smollm2", backend="opened").model
    assert isinstance(model, NamedModel)
    rows = []
    for asked in PAIRS:
        if asked.kind in settings.kinds:
            rows.append((judge_tokens if settings.tokens else judge)(model, asked))
            print(json.dumps(rows[-1]), flush=True)
            if settings.write:
                settings.write.write_text(json.dumps(rows, indent=1))
    if not settings.tokens:
        print(table(rows))


if __name__ == "__main__":
    main()
