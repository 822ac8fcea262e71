"""Choose the other text of a question by itself: four rules, six texts to choose, six to judge.

Run: python -m benchmarks.other_texts {choose,judge} [--write FILE]

Without `instead`, `ask` takes of the guesses that it draws for the tokens the one that moves the
readout most ("most"). That may be a broken sentence, such as "The- that the old sailor". All twelve
texts were written before any of these rules was tried on any text.

Rules. Of the guesses under which the readout falls: "says against", the most probable text of those
under which the model prefers `against`, or, if there are none, of those that move the readout half
as far as the one that moves it most; "half as far", the most probable of these in any case; "sum",
the one with the largest sum of the fall and of the log-probability of the text. A text is as
probable as the model finds its tokens from the guess on.

Prediction. One of the three, chosen on the first six texts by how many circuits are whole, then by
the log-probability that the texts lose, gives on the other six: texts that lose less of it than
those of "most" in at least five, in the median by 3 nats less; whole circuits (kept and lost at
least 70%) in as many texts as "most", or more.

Refuted, and the default stays, if either fails. Circuits are those of quick answers, not pruned.
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infoflow_lens import ask, load_any
from infoflow_lens.hooks.answer.question import Question
from infoflow_lens.hooks.answer.steps import measure_tokens
from infoflow_lens.hooks.readouts import LogitDifference
from infoflow_lens.models.named import NamedModel
from tests.reference.real_models import FOLDER

TEXTS = {
    "choose": (
        ("The keys that the old sailor left on the table", " were", " was"),
        ("The people of Paris speak", " French", " English"),
        ("Water turns into ice when it gets very", " cold", " hot"),
        ("The teacher gave the student a book because she wanted him to", " read", " write"),
        ("Yesterday we went to the beach and swam in the", " ocean", " pool"),
        ("The dog chased the cat up the", " tree", " stairs"),
    ),
    "judge": (
        ("The pictures that the young painter sold in the market", " were", " was"),
        ("The capital of Egypt is a city called", " Cairo", " Rome"),
        ("After a long winter the snow began to", " melt", " fall"),
        ("She put the milk back into the", " fridge", " cup"),
        ("Bees fly from flower to flower and make", " honey", " milk"),
        ("The doctor told the patient to take the medicine twice a", " day", " week"),
    ),
}
RULES = ("most", "says against", "half as far", "sum")


class Guess(NamedTuple):
    """A text with one of the model's own guesses: the readout's change, and its log-probability."""

    text: tuple[int, ...]
    change: float
    loss: float


def find_guesses(question: Question) -> list[Guess]:
    """Draw guesses as `ask` does; the log-probability is beside that of the text."""
    tokens, clean = measure_tokens(question), question.clean.tokens[0]
    found = []
    before = log_probability(question, clean)
    for position, changes in enumerate(tokens.changes.tolist()):
        drawn = dict(zip(tokens.donors[position].tolist(), changes, strict=True))
        for donor, change in drawn.items():
            if donor >= 0:
                text = clean.clone()
                text[position] = donor
                loss = log_probability(question, text) - before
                found.append(Guess(tuple(text.tolist()), change, loss))
    return found


@torch.no_grad()
def log_probability(question: Question, text: Tensor) -> float:
    """Sum the log-probabilities of all tokens but the first."""
    logits = question.model(text[None])[0].double().log_softmax(-1)  # type: ignore[operator]
    return float(logits[:-1].gather(1, text[1:, None]).sum())


def choose(guesses: list[Guess], value: float, rule: str) -> Guess:
    """Choose the other text by a rule."""
    if rule == "most":
        return max(guesses, key=lambda guess: abs(guess.change))
    falls = [guess for guess in guesses if guess.change < 0]
    if rule == "sum":
        return max(falls, key=lambda guess: guess.loss - guess.change)
    far = min(guess.change for guess in falls) / 2
    fine = [guess for guess in falls if guess.change <= far]
    if rule == "says against":
        fine = [guess for guess in falls if value + guess.change < 0] or fine
    return max(fine, key=lambda guess: guess.loss)


def judge(model: NamedModel, text: str, answer: str, against: str) -> list[dict[str, Any]]:
    """Ask with the other text of each rule."""
    ids = model.tokenizer(text, return_tensors="pt")["input_ids"][0]
    question = Question(model, ids, None, LogitDifference(answer, against).bind(model))
    guesses, rows, known = find_guesses(question), [], dict[tuple[int, ...], dict[str, Any]]()
    for rule in RULES:
        chosen = choose(guesses, question.clean.value, rule)
        if chosen.text not in known:
            other = torch.tensor(chosen.text)
            found = ask(model, ids, answer, against, other, quick=True, progress=False)
            known[chosen.text] = {
                "other text": model.tokenizer.decode(chosen.text),
                "value": round(found.value, 2),
                "other": round(found.other_value, 2),
                "nats": round(chosen.loss, 1),
                "paths": len(found.places),
                "kept": round(found.kept, 2),
                "lost": round(found.lost, 2),
            }
        rows.append({"text": text, "rule": rule, **known[chosen.text]})
    return rows


def main() -> None:
    """Judge all rules, and print a row of each text and rule."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("part", choices=list(TEXTS))
    parser.add_argument("--write", type=Path, help="where the rows go, as JSON")
    settings = parser.parse_args()
    model = load_any(FOLDER / "smollm2", backend="opened").model
    assert isinstance(model, NamedModel)
    rows = []
    for asked in TEXTS[settings.part]:
        rows += judge(model, *asked)
        for row in rows[-len(RULES) :]:
            print(json.dumps(row), flush=True)
        if settings.write:
            settings.write.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
