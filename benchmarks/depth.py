"""Judge predictions that take no derivative on five trained models, and on untrained ones.

Run: python -m benchmarks.depth [--write FOLDER] [--models minilm ...]

Needs `make models`. It writes `results.csv.gz`, a row for each text, layer, measure and method, and
`models.csv`, a row for each model; `tables` makes the page's tables of them. What was predicted
stands in docs/results/real_models/statement.md, written before the run; texts/depth.txt was
written for it, and no setting was chosen on it.
"""

import argparse
import csv
import gzip
import io
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from infoflow_lens import (
    JacobianInfluence,
    PositionsProbe,
    baselines,
    load_any,
    open_model,
    propagate,
    run_probes,
)
from infoflow_lens.hooks import PowerRollout, ResampleInfluence
from infoflow_lens.hooks.model.points import layer_count
from infoflow_lens.hooks.routes.graded import PEAKED
from tests.reference.real_models import load

FOLDER = Path(__file__).parents[1] / "docs" / "results" / "real_models"
MODELS = ("smollm2", "minilm", "rxnmapper", "antiberty", "stdlib-2l")
TRUTHS = ("replacement", "Jacobian")
QUESTION = {
    "replacement": "power rollout, replacing a token",
    "Jacobian": "power rollout, small changes",
}
FREE = (
    "attention weight", "attention rollout", "graded sets", "contribution routes",
    "contribution rollout", "information sets", "recency",
)  # fmt: skip
DERIVED = ("gradient x input", "Jacobian")
# what was found before, on other texts, in the order of MODELS
_BEFORE = {
    "replacement": (0.64, 0.79, 0.74, 0.81, 0.84),
    "Jacobian": (0.72, 0.94, 0.66, 0.91, 0.94),
}
_DONORS, _DIRECTIONS, _DRAWS, _UNTRAINED = 3, 4, 4000, 4
_TEXTS = Path(__file__).parent / "texts"


class Asked(NamedTuple):
    """A text, and what kind it is of."""

    kind: str
    text: str


def read_texts(run: str) -> dict[str, dict[str, list[str]]]:
    """Read the texts of a run by model and kind: a line each, below ``== model: kind``."""
    found: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for line in (_TEXTS / f"{run}.txt").read_text("utf-8").splitlines():
        if line.startswith("== "):
            model, kind = line[3:].split(": ")
            found[model][kind] = []
        else:
            found[model][kind].append(line.replace("\\n", "\n"))
    return found


def texts(model: str) -> list[Asked]:
    """The texts of a model."""
    kinds = read_texts("depth")[model]
    return [Asked(kind, line) for kind, lines in kinds.items() for line in lines]


class Opened(NamedTuple):
    """A model, its inputs, and which tokens are candidates."""

    model: nn.Module
    ids: list[Tensor]
    special: frozenset[int]
    is_causal: bool


def opened(name: str, trained: bool = True, asked: Sequence[Asked] | None = None) -> Opened:
    """Open a model, with texts as ids, its own by default; untrained, as its makers start it."""
    special: frozenset[int]
    if name == "stdlib-2l":
        model: Any = load_any(name).model
        tokenizer = model.tokenizer
    else:
        plain, tokenizer = load(name)
        if not trained:
            torch.manual_seed(0)
            plain = type(plain)(plain.config).eval()
        model = open_model(plain, tokenizer)
    special = frozenset(tokenizer.all_special_ids)
    rows = []
    for one in texts(name) if asked is None else asked:
        text = " ".join(one.text) if name == "antiberty" else one.text
        ids = tokenizer(text, add_special_tokens=name != "stdlib-2l")["input_ids"]
        first = [1] if name == "smollm2" else []  # its beginning of a text
        rows.append(torch.tensor([first + list(ids)]))
    return Opened(model, rows, special, name in ("smollm2", "stdlib-2l"))


def places_of(ids: Tensor, is_causal: bool) -> tuple[int, ...]:
    """The positions of the states that are judged."""
    n = ids.shape[1]
    return (n - 1, 2 * n // 3) if is_causal else (n // 4, n // 2, 3 * n // 4)


def layers_of(model: nn.Module) -> tuple[int, ...]:
    """The ends of the thirds and of the half, from 0."""
    n = layer_count(model)
    return tuple(sorted({max(0, round(n * part) - 1) for part in (1 / 3, 1 / 2, 2 / 3, 1)}))


def spearman(one: Float[Tensor, " n"], other: Float[Tensor, " n"]) -> float:
    """The rank correlation; 0 where all are equal."""
    from scipy.stats import rankdata

    ranks = [rankdata(values.double().numpy()) for values in (one, other)]
    if any(np.ptp(rank) == 0 for rank in ranks):
        return 0.0
    return float(np.corrcoef(*ranks)[0, 1])


def agree_by_layer(
    given: Opened,
    ids: Tensor,
    places: Sequence[int],
    values: Float[Tensor, "layer place pos"],
    truth: Float[Tensor, "layer place pos"],
) -> list[float]:
    """Spearman with what is true, for each layer, in the mean over places.

    Tokens are those that a place sees, but the first, itself and special ones.
    """
    at = torch.arange(ids.shape[1])
    is_special = torch.tensor([int(token) in given.special for token in ids[0]])
    means = []
    for row in range(len(values)):
        found = []
        for column, place in enumerate(places):
            keep = (at != place) & (at != 0) & ~is_special
            keep &= (at <= place) if given.is_causal else True
            found.append(spearman(values[row, column, keep], truth[row, column, keep]))
        means.append(float(np.mean(found)))
    return means


def judge(given: Opened, ids: Tensor, donors: Tensor) -> Iterator[dict[str, Any]]:
    """Spearman of every method with both measures, for each layer, in the mean over positions."""
    model, places, layers = given.model, places_of(ids, given.is_causal), layers_of(given.model)
    truths = {
        "replacement": ResampleInfluence(
            donors, state="resid_post", positions=places, layers=layers
        ),
        "Jacobian": JacobianInfluence(
            "resid_post", positions=places, layers=layers, estimate=_DIRECTIONS
        ),
    }
    probes: dict[str, Any] = baselines(model, "resid_post", positions=places)
    del probes["attention flow"]
    probes["power rollout, replacing a token, L2"] = PowerRollout(size="L2", positions=places)
    ranking = PositionsProbe()
    results = run_probes(model, ids, [*truths.values(), *probes.values(), ranking], progress=False)
    named = dict(zip([*truths, *probes], results[:-1], strict=True))
    n = ids.shape[1]
    at = torch.arange(n)
    scores = {
        name: found.values[list(layers) if len(found.layers) > len(layers) else slice(None), 0]
        for name, found in named.items()
    }
    sets = propagate(results[-1]).members[list(layers), 0].float()
    scores["information sets"] = sets[:, list(places)]
    scores["recency"] = -(torch.tensor(places)[:, None] - at).abs().expand(len(layers), -1, -1)
    for truth in truths:
        for method, values in scores.items():
            if method == truth:
                continue
            agreement = agree_by_layer(given, ids, places, values, scores[truth])
            for layer, value in zip(layers, agreement, strict=True):
                yield {
                    "layer": layer + 1, "measure": truth, "method": method,
                    "spearman": round(value, 4),
                }  # fmt: skip


def measure(name: str, trained: bool = True) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All rows of a model, and what is said of the model."""
    given = opened(name, trained)
    generator = torch.Generator().manual_seed(0)
    pool = torch.cat([ids[0] for ids in given.ids])
    pool = pool[[int(token) not in given.special for token in pool]]
    model = name if trained else f"{name}, untrained"
    rows, peaks = [], []
    for number, (asked, ids) in enumerate(zip(texts(name), given.ids, strict=True)):
        if not trained and number >= _UNTRAINED:
            break
        n = ids.shape[1]
        donors = pool[torch.randint(len(pool), (_DONORS, n), generator=generator)]
        what = {"model": model, "kind": asked.kind, "text": number}
        rows += [what | row for row in judge(given, ids, donors)]
        (found,) = run_probes(given.model, ids, [PowerRollout()], progress=False)
        peaks.append(found.peakedness)
        print(model, number, n, flush=True)
    said = {
        "model": model, "texts": len(peaks), "layers": layer_count(given.model),
        "peakedness": round(float(np.mean(peaks)), 4), "least": round(min(peaks), 4),
        "most": round(max(peaks), 4),
    }  # fmt: skip
    return rows, said


# What the page says, from the rows


def by_text(rows: Any, model: str, truth: str, **where: Any) -> Any:
    """Spearman of each text and method, in the mean over layers."""
    here = rows[(rows["model"] == model) & (rows["measure"] == truth)]
    for column, value in where.items():
        here = here[here[column] == value]
    return here.pivot_table("spearman", "text", "method")


def interval(values: Any) -> tuple[float, float, float]:
    """The mean over the texts that have one, and where 95% of the means of draws of them lie."""
    values = np.asarray(values)
    values = values[~np.isnan(values)]
    draws = np.random.default_rng(0).integers(len(values), size=(_DRAWS, len(values)))
    low, high = np.quantile(values[draws].mean(axis=1), (0.025, 0.975))
    return float(values.mean()), float(low), float(high)


def shown(values: Any) -> str:
    """A mean with its interval."""
    mean, low, high = interval(values)
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def beside(found: Any, method: str, truth: str) -> str:
    """Whether the setting for a question is ahead of a method, behind it, or neither."""
    _, low, high = interval(found[QUESTION[truth]] - found[method])
    return "ahead" if low > 0 else "behind" if high < 0 else ""


def markdown(head: Sequence[Any], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [list(map(str, head)), ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def verdict_table(found: Sequence[tuple[str, str, bool]]) -> str:
    """A row for each prediction: what came, and whether it was seen."""
    lines = [[what, came, "yes" if seen else "**no**"] for what, came, seen in found]
    return markdown(["predicted", "what came", "seen"], lines)


def main_table(
    rows: Any, truth: str, derived: Sequence[str] = DERIVED, free: Sequence[str] = FREE
) -> str:
    """Every method in every trained model, and whether the setting is ahead of it or behind."""
    mine = QUESTION[truth]
    methods = [mine, *(q for q in QUESTION.values() if q != mine), *derived, *free]
    lines = []
    for method in methods:
        if method == truth:
            continue
        name = f"**{method}**" if method == mine else method
        cells = [f"{name} (derivatives)" if method in derived else name]
        for model in MODELS:
            found = by_text(rows, model, truth)
            said = "" if method == mine else beside(found, method, truth)
            cells.append(f"{shown(found[method])} {said}".strip())
        lines.append(cells)
    return markdown([truth, *MODELS], lines)


def part_table(rows: Any, column: str, methods: Sequence[str] = ()) -> str:
    """Both settings and other methods in SmolLM2, by layer or by kind of text."""
    ours = rows[rows["model"] == "smollm2"]
    parts = list(dict.fromkeys(ours[column]))
    lines = [
        [f"{method}: {truth}"]
        + [shown(by_text(rows, "smollm2", truth, **{column: part})[method]) for part in parts]
        for truth, mine in QUESTION.items()
        for method in (mine, *methods)
    ]
    return markdown([f"SmolLM2, by {column}", *parts], lines)


def model_table(rows: Any, models: Any) -> str:
    """How peaked attention is, and what both settings and rollout give, trained or not."""
    lines = []
    for row in models.to_dict("records"):
        cells = [row["model"], str(row["texts"])]
        cells.append(f"{row['peakedness']:.4f} ({row['least']:.4f} to {row['most']:.4f})")
        cells.append("yes" if row["peakedness"] >= PEAKED else "no")
        for truth, method in QUESTION.items():
            found = by_text(rows, row["model"], truth).mean()
            cells.append(f"{found[method]:.2f}; {found['attention rollout']:.2f}")
        lines.append(cells)
    head = ["model", "texts", "peakedness (over texts)", "may claim"]
    return markdown([*head, "replacement: ours; rollout", "Jacobian: ours; rollout"], lines)


def verdicts(rows: Any, models: Any) -> str:
    """Each prediction of the statement, what came, and whether it was seen."""
    found: list[tuple[str, str, bool]] = []
    for truth, method in QUESTION.items():
        name = method.split(", ")[1]
        said = {
            (model, other): beside(by_text(rows, model, truth), other, truth)
            for model in MODELS
            for other in FREE
        }
        behind = [f"{other} in {model}" for (model, other), s in said.items() if s == "behind"]
        what = f"1, {name}: behind no method without derivatives in any model"
        found.append((what, ", ".join(behind) or "behind none", not behind))
        ahead = {other: sum(said[model, other] == "ahead" for model in MODELS) for other in FREE}
        least = min(ahead, key=lambda other: ahead[other])
        what = f"2, {name}: ahead of each in at least three models"
        found.append((what, f"of {least} in {ahead[least]}", ahead[least] >= 3))
        means = [by_text(rows, model, truth)[method].mean() for model in MODELS]
        far = [abs(one - other) for one, other in zip(means, _BEFORE[truth], strict=True)]
        at = int(np.argmax(far))
        what = f"3, {name}: within .10 of what was found before"
        came = f"furthest {MODELS[at]}: {means[at]:.2f} for {_BEFORE[truth][at]:.2f}"
        found.append((what, came, max(far) <= 0.1))
    ours = by_text(rows, "smollm2", "replacement")
    lead = ours[QUESTION["replacement"]] - ours["Jacobian"]
    what = "4: replaced tokens better than by Jacobian norms in SmolLM2"
    found.append((what, f"by {shown(lead)}", interval(lead)[1] > 0))
    last, repeats = (
        by_text(rows, "smollm2", "replacement", **part)[QUESTION["replacement"]].mean()
        for part in ({"layer": 30}, {"kind": "repeat"})
    )
    what = "5: below .60 in the last layer of SmolLM2, below .50 over repeats"
    found.append((what, f"{last:.2f}; {repeats:.2f}", last < 0.6 and repeats < 0.5))
    sets = [by_text(rows, "smollm2", truth)["information sets"].mean() for truth in TRUTHS]
    what = "6: information sets at most .2 in SmolLM2"
    found.append((what, "; ".join(f"{one:.2f}" for one in sets), max(sets) <= 0.2))
    peaks = dict(zip(models["model"], models["peakedness"], strict=True))
    trained = min(peak for model, peak in peaks.items() if "untrained" not in model)
    started = max(peak for model, peak in peaks.items() if "untrained" in model)
    what = "7: peakedness at least .06 where trained, below where not"
    came = f"at least {trained:.2f}; at most {started:.4f}"
    found.append((what, came, trained >= PEAKED > started))
    below = {
        model: beside(by_text(rows, model, "replacement"), "attention rollout", "replacement")
        for model in peaks
        if "untrained" in model
    }
    what = "8: behind attention rollout on replaced tokens, where untrained"
    came = "; ".join(f"{model.split(',')[0]}: {s or 'neither'}" for model, s in below.items())
    found.append((what, came, set(below.values()) == {"behind"}))
    return verdict_table(found)


def tables(folder: Path = FOLDER) -> list[str]:
    """All tables of the page."""
    import pandas as pd

    rows, models = (pd.read_csv(folder / name) for name in ("results.csv.gz", "models.csv"))
    return [
        verdicts(rows, models),
        *(main_table(rows, truth) for truth in TRUTHS),
        *(part_table(rows, column) for column in ("layer", "kind")),
        model_table(rows, models),
    ]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows as a table, packed, the same bytes each time."""
    packed = gzip.GzipFile(path, "wb", mtime=0) if path.suffix == ".gz" else path.open("wb")
    with packed as raw, io.TextIOWrapper(raw, "utf-8", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def main() -> None:
    """Measure all models, each into rows of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, default=FOLDER)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    asked = parser.parse_args()
    asked.write.mkdir(parents=True, exist_ok=True)
    every: list[dict[str, Any]] = []
    models: list[dict[str, Any]] = []
    for name in asked.models:
        for trained in (True, False) if name != "stdlib-2l" else (True,):
            rows, said = measure(name, trained)
            every += rows
            models.append(said)
    write(asked.write / "results.csv.gz", every)
    write(asked.write / "models.csv", models)


if __name__ == "__main__":
    main()
