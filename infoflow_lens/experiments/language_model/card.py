"""The model card, and models side by side, made from what was measured."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infoflow_lens.experiments.language_model.config import PRESETS
from infoflow_lens.experiments.tables import markdown_table
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.models.shipped import SHIPPED

_CARD = """\
---
language: code
library_name: transformers
pipeline_tag: text-generation
tags: [interpretability, induction-heads, infoflow-lens]
---

# {name}

{what}, trained by infoflow-lens on the source
files of Python's standard library. It is made to be looked into, not to write programs.

```python
from infoflow_lens import load_any

model = load_any("{name}").model{folder}
```

This command makes it again; with the same versions, the same text (fingerprint {corpus})
and the same number of threads ({threads}) to the same bytes:

```
{command}
```

| | |
|---|---|
{facts}

Every sequence began with `<|endoftext|>`; give it one (TransformerLens does so by itself).{mlp}

## Text

The Python files of the standard library of Python {python}, without tests, installed packages
and files that a build writes: {total} million characters. A keyed hash of a file's name decides
whether it trains, validates or tests, so no file is in two parts. The text is under the Python
Software Foundation License Version 2, with parts under licences of their own that Python's
documentation lists; it is not part of this folder. The weights are under the licence of
infoflow-lens, MIT.

| part | files | characters | tokens |
|---|---:|---:|---:|
{parts}

Of {batch} sequences of a step, {repeats} repeat one stretch of {shortest} to {longest} tokens
up to the end, half of them of text and half of random ids, which only a look back can continue.

## Loss

Nats a token. The n-grams (interpolated Kneser-Ney) count the same training tokens and predict the
same tokens. They see what stands before a window; the model begins anew every {window} tokens.

| | validation | test |
|---|---:|---:|
{losses}

{verdict}

On random tokens, repeated: {repeated:.2f} nats a token in the second half, where chance is
{chance:.2f}.

## Heads

On {half} different random tokens, repeated: *prefix matching* is the attention from a token to
the one that followed it before (Olsson et al. 2022), *previous token* that to the token before it.

| head | prefix matching | previous token |
|---|---:|---:|
{heads}

## Limits

It is small and knows one kind of text. What is true of its heads need not be true of those of a
large model. Some held-out files resemble files in training (the tables in encodings/, say), so its
losses, and those of the n-grams, are lower than they would be on text of another kind.
"""

_COLUMNS = (
    "", "parameters", "steps", "validation", "test", "repeated", "heads above .5",
    "largest prefix matching", "largest previous token",
)  # fmt: skip
_NO_MLP = """
GPT-2's format has no block without an MLP, so each block has one of width 1 whose weights are zero
and were not trained: it adds exactly nothing."""


def model_card(name: str, measured: Mapping[str, Any]) -> str:
    """The card in Markdown.

    Args:
        name: of the model, which is the preset it was made by.
        measured: what training wrote to measured.json.
    """
    config, record = measured["record"]["config"]["config"], measured["record"]
    n_layers = config["n_layers"]
    attention_only = config["attention_only"]
    number = {1: "One", 2: "Two", 4: "Four"}.get(n_layers, str(n_layers))
    kind = "attention-only layers" if attention_only else "layers with MLPs"
    facts = {
        "layers": n_layers,
        "width": config["d_model"],
        "heads a layer": config["n_heads"],
        "context": f"{config['n_context']} tokens",
        "vocabulary": f"{config['vocabulary']}, byte-level BPE",
        "trained parameters": f"{measured['parameters']:,}",
        "weights": f"float16, rounded from float32 after training, which moves the validation "
        f"loss by {abs(measured['loss']['validation'] - measured['loss_float32']):.0e} nats",
        "training": f"{config['n_steps']:,} steps of AdamW on {config['batch_size']} sequences, "
        f"peak learning rate {config['lr']:g}, seed {config['seed']}",
        "versions": ", ".join(f"{k} {v}" for k, v in measured["versions"].items()),
    }
    loss, ngram = measured["loss"], measured["ngram"]
    rows = [
        (f"{order}-gram", ngram["validation"][order], ngram["test"][order])
        for order in ngram["test"]
    ]
    splits = measured["corpus"]
    return _CARD.format(
        name=name,
        what=f"{number} {kind} of {config['n_heads']} heads in GPT-2's format",
        command=f"infoflow-lens train-language-model {name} --out FOLDER",
        corpus=record["config"]["corpus"],
        threads=config["threads"],
        facts=_table(facts.items()),
        mlp=_NO_MLP if attention_only else "",
        folder="  # comes with the package" if name in SHIPPED else "  # or the folder's path",
        python=record["versions"]["python"],
        total=f"{sum(part['characters'] for part in splits.values()) / 1e6:.1f}",
        parts=_table(
            (split, f"{part['files']:,}", f"{part['characters']:,}", f"{part['tokens']:,}")
            for split, part in splits.items()
        ),
        batch=config["batch_size"],
        repeats=round(config["repeated"] * config["batch_size"]),
        shortest=config["shortest_repeat"],
        longest=config["longest_repeat"],
        window=config["n_context"] - 1,
        losses=_table(
            (label, f"{validation:.3f}", f"{test:.3f}")
            for label, validation, test in [
                ("this model", loss["validation"], loss["test"]),
                *rows,
            ]
        ),
        verdict=_verdict(loss["test"], ngram["test"]),
        repeated=measured["repeated_loss"],
        chance=measured["chance"],
        half=measured["half"],
        heads=_table(
            (f"{layer}.{head}", f"{matched:.2f}", f"{previous:.2f}")
            for layer, (matches, before) in enumerate(
                zip(measured["prefix_matching"], measured["previous_token"], strict=True)
            )
            for head, (matched, previous) in enumerate(zip(matches, before, strict=True))
        ),
    )


def measured_models(folder: Path) -> dict[str, Any]:
    """What training measured of the models in a folder, ``NAME.json``; the presets first."""
    names = sorted(path.stem for path in folder.glob("*.json"))
    names.sort(key=lambda name: [*PRESETS, name].index(name))
    return {name: json.loads((folder / f"{name}.json").read_text("utf-8")) for name in names}


def comparison(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """Models side by side, and the n-grams that count the same tokens, as a table in Markdown.

    Args:
        measured: by the model's name, what training wrote to measured.json; of the same text and
            tokens.

    Raises:
        InfoFlowError: without a model, or for models of different texts or tokens.
    """
    texts = {
        (of["record"]["config"]["corpus"], of["record"]["config"]["tokens"])
        for of in measured.values()
    }
    if len(texts) != 1:
        raise InfoFlowError(
            f"models are {list(measured)}, of {len(texts)} texts: expected at least one model, all "
            "trained on the same text with the same tokens; train them again on one text"
        )
    rows: list[tuple[object, ...]] = []
    for name, of in measured.items():
        matches, before = of["prefix_matching"], of["previous_token"]
        above = sum(score > 0.5 for layer in matches for score in layer)
        steps = f"{of['record']['config']['config']['n_steps']:,}"
        losses = [f"{of['loss'][part]:.3f}" for part in ("validation", "test")]
        repeated = f"{of['repeated_loss']:.2f}"
        heads = above, _largest(matches), _largest(before)
        rows.append((name, f"{of['parameters']:,}", steps, *losses, repeated, *heads))
    ngram, chance = (next(iter(measured.values()))[key] for key in ("ngram", "chance"))
    nothing = [None] * len(_COLUMNS)
    for order in ngram["test"]:
        losses = [f"{ngram[part][order]:.3f}" for part in ("validation", "test")]
        rows.append((f"{order}-gram", *nothing[:2], *losses, *nothing[5:]))
    rows.append(("chance", *nothing[:4], f"{chance:.2f}", *nothing[6:]))
    return markdown_table(_COLUMNS, rows, numbers=True)


def _largest(scores: Any) -> str:
    """The largest score, and the head that has it."""
    score, layer, head = max(
        (score, layer, head)
        for layer, of_layer in enumerate(scores)
        for head, score in enumerate(of_layer)
    )
    return f"{score:.2f} ({layer}.{head})"


def _verdict(loss: float, ngram: Mapping[str, float]) -> str:
    """How the model stands to the n-grams, in a sentence."""
    beaten = [order for order, other in ngram.items() if loss < other]
    best = min(ngram, key=lambda order: ngram[order])
    if best in beaten:
        return f"It predicts the test part better than every n-gram up to {max(ngram)} tokens."
    better = f"better than the {max(beaten)}-gram and " if beaten else ""
    return (
        f"It predicts the test part {better}worse than the {best}-gram, which stores the counts "
        "of all\nthat it has seen."
    )


def _table(rows: Any) -> str:
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)
