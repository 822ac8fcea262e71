"""Checking a one-layer certificate again, from its file alone, in plain integers.

Nothing of the package is used here, so that the check is independent of how the certificate was
found: copy this page and run ``python proof.py certificate.json``.

A certificate holds ``sequences`` (lists of tokens, all of one length and with the same last token),
``labels``, and one of

* ``witness``: entries [sequence, label, integer]. By Gordan's theorem no one-layer model with a
  linear classifier is right on all sequences if the entries of a sequence sum to 0, are at least
  0 at its own label and at most 0 elsewhere, not all 0, and if for every position, token and label
  the entries of all sequences with that token there sum to 0: each logit is a sum over positions of
  a number for the token there, so that the entries times the logits sum to 0, while they would be
  positive if all were right.
* ``weights``: entries [position, token, label, integer]. A label's score of a sequence is the sum
  over its tokens; the right label's must be the largest, strictly. One head a position realises it.
"""

import json
import sys
from collections import defaultdict
from typing import Any, TextIO


def verify_witness(sequences: Any, labels: Any, witness: Any) -> list[str]:
    """Say what is wrong with a witness; an empty list if it proves that one layer fails.

    Args:
        sequences: lists of tokens.
        labels: one a sequence.
        witness: entries [sequence, label, integer].
    """
    wrong = _wrong_data(sequences, labels)
    sums: dict[Any, int] = defaultdict(int)
    places: dict[Any, int] = defaultdict(int)
    known = set(labels)
    for index, label, value in witness:
        # true in JSON would count as 1
        if not isinstance(value, int) or isinstance(value, bool):
            wrong.append(f"entry {value!r} is no integer")
            continue
        if not 0 <= index < len(sequences) or label not in known:
            wrong.append(f"entry for sequence {index}, label {label!r}: there is no such")
            continue
        # at least 0 at a sequence's own label, at most 0 elsewhere
        if (value < 0) == (label == labels[index]) and value != 0:
            wrong.append(f"the sign of {value} for sequence {index}, label {label!r} is wrong")
        sums[index] += value
        # what an entry adds at each place of its sequence must cancel with the others
        for position, token in enumerate(sequences[index]):
            places[position, token, label] += value
    if not any(value for _, _, value in witness):
        wrong.append("all entries are 0")
    # weights of one layer are a sum over places: if all sums are 0, no weights fit all signs
    wrong += [f"entries of sequence {i} sum to {total}" for i, total in sums.items() if total]
    wrong += [
        f"entries at position {p}, token {t!r}, label {c!r} sum to {total}"
        for (p, t, c), total in places.items()
        if total
    ]
    return wrong


def verify_weights(sequences: Any, labels: Any, weights: Any) -> list[str]:
    """Say what is wrong with a model; an empty list if it is right on every sequence.

    Args:
        sequences: lists of tokens.
        labels: one a sequence.
        weights: entries [position, token, label, integer]; others are 0.
    """
    wrong = _wrong_data(sequences, labels)
    table: dict[Any, int] = defaultdict(int)
    for position, token, label, value in weights:
        if not isinstance(value, int) or isinstance(value, bool):
            wrong.append(f"weight {value!r} is no integer")
            return wrong
        table[position, token, label] += value
    classes = sorted(set(labels), key=str)
    for index, (sequence, own) in enumerate(zip(sequences, labels)):
        scores = {c: sum(table[p, t, c] for p, t in enumerate(sequence)) for c in classes}
        wrong += [
            f"sequence {index}: label {c!r} scores {scores[c]}, its own {own!r} {scores[own]}"
            for c in classes
            if c != own and scores[c] >= scores[own]
        ]
    return wrong


def _wrong_data(sequences: Any, labels: Any) -> list[str]:
    wrong = []
    if not sequences or len(sequences) != len(labels):
        wrong.append(f"{len(sequences)} sequences and {len(labels)} labels")
    if len({len(sequence) for sequence in sequences}) != 1:
        wrong.append("sequences have several lengths")
    # the state that is read holds its own token, which must not tell sequences apart
    elif len({sequence[-1] for sequence in sequences}) != 1:
        wrong.append("sequences end in several tokens")
    return wrong


def verify(certificate: Any) -> list[str]:
    """Say what is wrong with a certificate; an empty list if it proves what it says."""
    sequences, labels = certificate.get("sequences", []), certificate.get("labels", [])
    if ("witness" in certificate) == ("weights" in certificate):
        return ["expected a witness or weights, one of them"]
    if "witness" in certificate:
        wrong = verify_witness(sequences, labels, certificate["witness"])
        says = "cannot fit"
    else:
        wrong, says = verify_weights(sequences, labels, certificate["weights"]), "fits"
    if certificate.get("verdict") != says:
        wrong.append(f"verdict {certificate.get('verdict')!r}: what is proved is {says!r}")
    return wrong


def main(arguments: list[str]) -> int:
    """Verify the file that is named; 0 if it proves what it says, 1 if not, 2 if there is none."""
    try:
        (place,) = arguments
        with open(place, encoding="utf-8") as file:
            certificate = json.load(file)
        found = verify(certificate)
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        reason = str(error) or type(error).__name__
        _write(sys.stderr, f"error: {reason}: expected one file, which `certify --out` wrote")
        return 2
    _write(sys.stdout, "\n".join(found or ["proved"]))
    return 1 if found else 0


def _write(stream: TextIO | None, text: str) -> None:
    if stream is not None:  # as where it is closed
        stream.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
