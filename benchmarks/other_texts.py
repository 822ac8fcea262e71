"""Choose the other text of a question by itself: texts to choose a rule, and six to judge it.

Run: python -m benchmarks.other_texts {choose,judge} [--write FILE]

Without `instead`, `ask` took the text that reads most like the one asked about ("like"): of four
places and six guesses at each, all ordered at once. It often lost the answer: it changed a last
word or a function word behind which neither answer follows ("the monkey of" where it was "for"),
or gave a text of which the model says something else than `against`.

"said" (`choose_likely_text`) counts how probable `against` is behind the text, runs at four places
three guesses and then at the two best six more, in which nearness counts twice, takes nearness with
and without the mean of all embeddings, and prefers tokens that the model does not find probable all
over the text. It was made, and its numbers were chosen, on the 21 texts of "choose", of which
twelve had chosen and judged "like" before: there the model gives `against` at least 5%, and prefers
it by 1, in 11 texts, and of those of "like" in 8, for as many passes.
Gradients of the readout by embeddings named no good guesses; distances of embeddings from their
mean tell function words from others, but the wrong way round in some models.

Prediction. On the six texts that judge, which were written before and on which nothing was tried,
of the other texts of "said" the model prefers `against` in at least five, and in no fewer than of
those of "like"; it gives `against` at least 5%, so that no warning is due, in at least four, and in
no fewer than "like"; their log-probability with `against` behind them is in the mean no lower; and
whole circuits (kept and lost at least 70%) are found in no fewer.

Refuted, and "like" stays, if one of these fails. It held: six and five, five and four, -0.97 nats
and -1.17, four and three; in five of the six both rules choose the same text.

A text is as probable as the model finds its
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
from infoflow_lens.hooks.answer.measure import _embeddings, _find_unlike, choose_likely_text
from infoflow_lens.hooks.answer.question import Question
from infoflow_lens.hooks.answer.steps import guess_tokens, measure_tokens
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


def choose_like(question: Question, effect: Tensor) -> Tensor:
    """Choose by the former rule."""
    table = torch.nn.functional.normalize(_embeddings(question).float(), dim=1)
    clean, guesses = question.clean.tokens[0], guess_tokens(question).log()
    likeness = table[clean] @ table.T
    worth = (guesses + 10 * likeness).masked_fill(_find_unlike(question, len(table)), -torch.inf)
    places = effect[1:].abs().topk(4).indices + 1
    pairs = [(at, token) for at in places.tolist() for token in worth[at].topk(6).indices.tolist()]
    texts = clean.repeat(len(pairs), 1)
    for row, (at, token) in enumerate(pairs):
        texts[row, at] = token
    change, gain, _ = question.score_texts(texts)
    short = (max(question.clean.value, 0.0) + change + 1).clamp(min=0)
    return texts[int((gain + 10 * likeness[tuple(zip(*pairs))].double() - 3 * short).argmax())]


def find_other_texts(question: Question) -> dict[str, Tensor]:
    """Find the other text of each rule."""
    effect = measure_tokens(question).mean
    said = choose_likely_text(question, effect)
    assert said is not None  # SmolLM2 predicts the next token
    return {"like": choose_like(question, effect), "said": said}


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
                "chance of against": round(float(found.answer_chances[1, 1]), 3),
                "nats": round(loss, 1),
                "nats with against": round(loss + float(found.answer_chances[1, 1].log()), 1),
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
