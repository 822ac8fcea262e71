"""Choose the other text of a question by itself: six texts to choose a rule, six to judge it.

Run: python -m benchmarks.other_texts {choose,judge} [--write FILE]

Without `instead`, `ask` took of the guesses that it draws for the tokens the one that moves the
readout most ("most"). That may be a broken sentence, such as "The- that the old sailor". All twelve
texts were written before any other rule was tried on any text.

Rules that take another of the same draws, by the probability of the text, were given up on the
first six texts: there is no good sentence among the draws ("The and that the old sailor"). "like"
(`choose_likely_text`) was made and its numbers chosen on these six, before it saw the others.

Prediction. On the six texts that judge, those of "like" lose less log-probability than those of
"most" in at least five, in the median by 3 nats less; whole circuits (kept and lost at least 70%)
in as many texts as "most", or more; the model prefers `against` in at least five.

Refuted, and the default stays, if one of these fails. A text is as probable as the model finds its
tokens but for the first. Circuits are those of quick answers, not pruned.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.depth import read_texts
from infoflow_lens import ask, load_any
from infoflow_lens.hooks.answer.other_text import choose_likely_text
from infoflow_lens.hooks.answer.question import Question
from infoflow_lens.hooks.answer.steps import measure_tokens
from infoflow_lens.hooks.readouts import LogitDifference
from infoflow_lens.models.named import NamedModel
from tests.reference.real_models import FOLDER

# a text, the answer and the one against it
TEXTS = {
    part: [line.split(" |") for line in lines]
    for part, lines in read_texts("other_texts")["smollm2"].items()
}


@torch.no_grad()
def log_probability(model: NamedModel, text: Tensor) -> float:
    """Sum the log-probabilities of all tokens but the first."""
    logits = model(text[None])[0].double().log_softmax(-1)
    return float(logits[:-1].gather(1, text[1:, None]).sum())


def find_other_texts(question: Question) -> dict[str, Tensor]:
    """Find the other text of each rule."""
    tokens, clean = measure_tokens(question), question.clean.tokens[0]
    like = choose_likely_text(question, tokens.mean)
    assert like is not None  # SmolLM2 predicts the next token
    largest = int(tokens.changes.abs().nan_to_num(-1).argmax())
    most = clean.clone()
    most[largest // tokens.changes.shape[1]] = tokens.donors.flatten()[largest]
    return {"most": most, "like": like}


def judge(model: NamedModel, text: str, answer: str, against: str) -> list[dict[str, Any]]:
    """Ask with the other text of each rule."""
    ids = model.tokenizer(text, return_tensors="pt")["input_ids"][0]
    question = Question(model, ids, None, LogitDifference(answer, against).bind(model))
    rows = []
    for rule, other in find_other_texts(question).items():
        found = ask(model, ids, answer, against, other, quick=True, progress=False)
        loss = log_probability(model, other) - log_probability(model, ids)
        rows.append(
            {
                "text": text,
                "rule": rule,
                "other text": model.tokenizer.decode(other),
                "value": round(found.value, 2),
                "other": round(found.other_value, 2),
                "nats": round(loss, 1),
                "paths": len(found.places),
                "kept": round(found.kept, 2),
                "lost": round(found.lost, 2),
            }
        )
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
        for row in rows[-2:]:
            print(json.dumps(row), flush=True)
        if settings.write:
            settings.write.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
