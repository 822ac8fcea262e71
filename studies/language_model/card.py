"""The model card and the comparison of models, made from measured numbers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.models.shipped import SHIPPED
from infoflow_lens.studies.language_model.config import PRESETS
from infoflow_lens.studies.pages import CARD, render_page
from infoflow_lens.studies.tables import markdown_table

_COLUMNS = (
    "", "parameters", "steps", "validation", "test", "repeated", "heads above .5",
    "largest prefix matching", "largest previous token",
)  # fmt: skip


def model_card(name: str, measured: Mapping[str, Any]) -> str:
    """Return the card in Markdown.

    Args:
        name: of the model, which is the preset it was made by.
        measured: what training wrote to measured.json.
    """
    ngram = measured["ngram"]["test"]
    about = {
        "name": name,
        "shipped": name in SHIPPED,
        "config": measured["record"]["config"]["config"],
        "best": min(ngram, key=ngram.__getitem__),
        "beaten": [order for order in ngram if measured["loss"]["test"] < ngram[order]],
    }
    return render_page(CARD, {**measured, **about})


def read_models(folder: Path) -> dict[str, Any]:
    """Read what training measured of the models in a folder, ``NAME.json``; the presets first."""
    names = sorted(path.stem for path in folder.glob("*.json"))
    # a name that is no preset comes behind all presets
    names.sort(key=lambda name: [*PRESETS, name].index(name))
    return {name: json.loads((folder / f"{name}.json").read_text("utf-8")) for name in names}


def comparison(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """Compare models, and n-grams that count the same tokens, in a table in Markdown.

    Args:
        measured: by the model's name, what training wrote to measured.json; of the same text and
            tokens.

    Raises:
        InfoFlowError: without a model, or for models of different texts or tokens.
    """
    # losses compare only on one text with one tokenizer
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
    """Return the largest score, and the head that has it."""
    score, layer, head = max(
        (score, layer, head)
        for layer, of_layer in enumerate(scores)
        for head, score in enumerate(of_layer)
    )
    return f"{score:.2f} ({layer}.{head})"
