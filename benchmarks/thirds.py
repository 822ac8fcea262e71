"""Judge on five trained models what InfoFlow says of heads, by thirds of layers and kinds of text.

Run: nice python -m benchmarks.thirds [--models smollm2 ...] [--write FOLDER]

Needs `make models`. It writes `mechanisms.csv.gz`, a row for each text, part of the layers and way
to replace its heads, and `labels.csv`, the heads of each label. What was predicted stands at the
head of docs/results/real_models/mechanisms.md, written before the run; `tables` makes the tables
of that page. The texts are those of `benchmarks.field`, on which no head had been labelled.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import depth, field, labels
from infoflow_lens import label_heads, run_probes
from infoflow_lens.hooks import AllHeads, HeadLabels, MeanPatternsProbe

ROWS, LABELS = "mechanisms.csv.gz", "labels.csv"
N_TEXTS = 32
FAMILIES = {"fixed": ("position", "offset"), "max": ("gated", "largest")}
SINGLE = tuple(ideal for family in FAMILIES.values() for ideal in family)
WAYS = ("labels", "dealt at random", *FAMILIES, *SINGLE, "top 4", "ablated")
THIRDS = ("first", "middle", "last")
_KINDS = ("prose", "code", "question", "repeat")
Heads = list[tuple[int, int]]


def texts(model: str) -> list[depth.Asked]:
    """The texts of a model; of SmolLM2 the four kinds in turn."""
    return field.texts(model)[:N_TEXTS]


def half_of(model: str, number: int) -> int:
    """Say in which half a text is; both have as many of each kind."""
    return (number // len(_KINDS) if model == "smollm2" else number) % 2


def parts_of(heads: Heads) -> dict[str, Heads]:
    """Divide heads by thirds of the layers, without those that have none; and all of them."""
    n_layers = 1 + max(layer for layer, _ in heads)
    bounds = [-(-n_layers * i // 3) for i in range(4)]
    thirds = {
        name: [head for head in heads if first <= head[0] < stop]
        for name, (first, stop) in zip(THIRDS, pairwise(bounds), strict=True)
    }
    return {name: some for name, some in thirds.items() if some} | {"all": heads}


def assign(found: HeadLabels, seed: int) -> dict[str, dict[tuple[int, int], str]]:
    """Say what takes the place of the heads of each part, in each way."""
    labelled = found.assignment()
    families = {
        name: dict(zip(labelled, _least(found, family), strict=True))
        for name, family in FAMILIES.items()
    }
    made: dict[str, dict[tuple[int, int], str]] = {}
    generator = torch.Generator().manual_seed(seed)
    for part, heads in parts_of(list(labelled)).items():
        order = torch.randperm(len(heads), generator=generator).tolist()
        made[f"{part}: labels"] = {head: labelled[head] for head in heads}
        made[f"{part}: dealt at random"] = {
            head: labelled[heads[i]] for head, i in zip(heads, order, strict=True)
        }
        for name, chosen in families.items():
            made[f"{part}: {name}"] = {head: chosen[head] for head in heads}
        for ideal in (*SINGLE, "top 4", "ablated"):
            made[f"{part}: {ideal}"] = dict.fromkeys(heads, ideal)
    return made


def _least(found: HeadLabels, family: Sequence[str]) -> list[str]:
    """Choose the ideal of least share for each head."""
    columns = [found.ideals.index(ideal) for ideal in family]
    return [family[i] for i in found.shares[:, columns].nan_to_num().argmin(dim=1).tolist()]


def count(found: HeadLabels, part: Heads) -> dict[str, tuple[int, float]]:
    """Count the heads of each label among some, and sum what they are worth."""
    frame = found.to_frame().set_index(["layer", "head"]).loc[part]
    groups = frame.assign(worth=frame["worth"].clip(lower=0)).groupby("label")["worth"]
    return {str(label): (len(worth), float(worth.sum())) for label, worth in groups}


def measure(model: str, batch_size: int = 8) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Label on each half of the texts, and replace heads on the other."""
    asked = texts(model)
    given = depth.opened(model, asked=asked)
    rows = [ids[0] for ids in given.ids]
    others: list[Tensor] = [ids[0] for ids in depth.opened(model).ids]
    if model == "smollm2":
        others += labels.calibration_of(given.model.tokenizer)
    run: dict[str, Any] = {"batch_size": batch_size, "progress": False}
    (means,) = run_probes(given.model, others, [MeanPatternsProbe()], **run)
    numbers: list[list[int]] = [[], []]
    for number in range(len(rows)):
        numbers[half_of(model, number)].append(number)
    lost, counted = [], []
    for half, (mine, judged) in enumerate((numbers, numbers[::-1])):
        here, there = ([rows[i] for i in some] for some in (mine, judged))
        # what label_heads judges itself is not read here, so few texts do
        found = label_heads(given.model, here, judge=there[:2], calibration=means, **run)
        (result,) = run_probes(given.model, there, [AllHeads(means, assign(found, half))], **run)
        for name, by_text in zip(result.edits, result.lost.T.tolist(), strict=True):
            part, _, way = name.partition(": ")
            for number, value, n in zip(judged, by_text, result.n_rows.tolist(), strict=True):
                what = {"model": model, "kind": asked[number].kind, "text": number, "part": part}
                value = round(value / result.per_row, 6)
                lost.append({**what, "way": way, "lost": value, "n_rows": n})
        heads: Heads = [(int(layer), int(head)) for layer, head in found.heads.tolist()]
        for part, some in parts_of(heads).items():
            for label, (n, worth) in count(found, some).items():
                what = {"model": model, "half": half, "part": part, "label": label}
                counted.append({**what, "heads": n, "worth": round(worth, 6)})
        print(model, half, found.counts(), round(found.forwards, 1), flush=True)
    return lost, counted


# What the page says, from the rows


def by_text(rows: Any, model: str, part: str, kind: str | None = None) -> Any:
    """What each text loses in each way."""
    here = rows[(rows["model"] == model) & (rows["part"] == part)]
    return (here if kind is None else here[here["kind"] == kind]).pivot(
        index="text", columns="way", values="lost"
    )


def interval(lost: Any, way: str, without: str | None = None) -> tuple[float, float, float]:
    """The share of what is lost without the heads, or a difference of two, and its interval."""
    top = (lost[way] - (0 if without is None else lost[without])).to_numpy()
    bottom = lost["ablated"].to_numpy()
    draws = np.random.default_rng(0).integers(len(top), size=(depth._DRAWS, len(top)))
    low, high = np.quantile(top[draws].sum(1) / bottom[draws].sum(1), (0.025, 0.975))
    return float(top.sum() / bottom.sum()), float(low), float(high)


def shown(found: tuple[float, float, float]) -> str:
    """A share with its interval."""
    return f"{found[0]:.2f} [{found[1]:.2f}, {found[2]:.2f}]"


def places(rows: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield every model, third, and what its texts lose."""
    for model in depth.MODELS:
        for part in THIRDS:
            if len(lost := by_text(rows, model, part)):
                yield model, part, lost


def best_single(lost: Any) -> str:
    """The one ideal for all heads that loses least on the judged texts."""
    return str(lost[list(SINGLE)].sum().idxmin())


def share_table(rows: Any) -> str:
    """Every way in every part of every model, and where labels are ahead of it or behind."""
    lines = []
    for model in depth.MODELS:
        for part in (*THIRDS, "all"):
            lost = by_text(rows, model, part)
            if not len(lost):
                continue
            cells = [model, part, shown(interval(lost, "labels"))]
            for way in ("dealt at random", *FAMILIES, best_single(lost), "top 4"):
                _, low, high = interval(lost, way, "labels")
                said = "ahead" if low > 0 else "behind" if high < 0 else ""
                name = f"{way}: " if way in SINGLE else ""
                cells.append(f"{name}{interval(lost, way)[0]:.2f} {said}".strip())
            n = rows[(rows["model"] == model) & (rows["part"] == part)].drop_duplicates("text")
            cells.append(f"{lost['ablated'].sum() / n['n_rows'].sum():.3g}")
            lines.append(cells)
    head = ["model", "layers", "by labels", "dealt at random", *FAMILIES, "best single", "top 4"]
    return depth.markdown([*head, "without heads"], lines)


def kind_table(rows: Any) -> str:
    """SmolLM2, by part and kind: labels, and both families."""
    lines = []
    for part in (*THIRDS, "all"):
        for way in ("labels", *FAMILIES):
            cells = [shown(interval(by_text(rows, "smollm2", part, k), way)) for k in _KINDS]
            lines.append([part, way, *cells])
    return depth.markdown(["SmolLM2, layers", "heads by", *_KINDS], lines)


def label_table(counts: Any) -> str:
    """The heads of each label in each third, and their share of worth, for both halves."""
    names = ("fixed", "max", "several", "spread", "undecided")
    lines = []
    for model in depth.MODELS:
        for part in THIRDS:
            here = counts[(counts["model"] == model) & (counts["part"] == part)]
            if not len(here):
                continue
            cells = []
            for name in names:
                halves = []
                for half in (0, 1):
                    own = here[here["half"] == half].set_index("label")
                    worth = own["worth"] / own["worth"].sum()
                    halves.append(f"{own['heads'].get(name, 0)} ({worth.get(name, 0):.2f})")
                cells.append(" / ".join(halves))
            lines.append([model, part, *cells])
    return depth.markdown(["model", "layers", *names], lines)


def verdicts(rows: Any, counts: Any) -> str:
    """Each prediction of the statement, what came, and whether it was seen."""
    every = list(places(rows))
    n, found = len(every), []
    shares = {(model, part): interval(lost, "labels") for model, part, lost in every}
    above = [" ".join(k) for k, s in shares.items() if s[2] > 0.5 and k != ("stdlib-2l", "first")]
    found.append(("1: at most 1/2 in each third but one", ", ".join(above) or "in all", not above))
    little = sum(share[0] <= 0.25 for share in shares.values())
    found.append(("2: at most 1/4 in half of the thirds", f"in {little} of {n}", 2 * little >= n))
    leads = [interval(lost, best_single(lost), "labels") for _, _, lost in every]
    mean, sure = sum(lead[0] > 0 for lead in leads), sum(lead[1] > 0 for lead in leads)
    what = "3: less than the best single ideal in 10 thirds, by the interval in 7"
    found.append((what, f"in {mean}, in {sure}", mean >= 10 and sure >= 7))
    leads = [interval(lost, "dealt at random", "labels") for _, _, lost in every]
    sure, behind = sum(lead[1] > 0 for lead in leads), sum(lead[2] < 0 for lead in leads)
    what = "4: less than the same dealt at random in 10 thirds, by the interval; more in none"
    found.append((what, f"in {sure}; in {behind}", sure >= 10 and not behind))
    leads = [interval(by_text(rows, "smollm2", part), "fixed", "max") for part in THIRDS]
    what = "5: SmolLM2, fixed minus max above 0, below 0, above 0, by the intervals"
    came = "; ".join(map(shown, leads))
    found.append((what, came, leads[0][1] > 0 and leads[1][2] < 0 and leads[2][1] > 0))
    repeat, prose = (
        interval(by_text(rows, "smollm2", "middle", kind), "fixed", "max")
        for kind in ("repeat", "prose")
    )
    what = "6: middle third of SmolLM2, fixed minus max above 0 over repeats, below 0 over prose"
    found.append((what, f"{shown(repeat)}; {shown(prose)}", repeat[1] > 0 and prose[2] < 0))
    kinds = {k: interval(by_text(rows, "smollm2", "all", k), "labels")[0] for k in _KINDS}
    most = max(kinds, key=lambda kind: kinds[kind])
    what = "7: all heads of SmolLM2 by labels lose the largest share over repeats"
    came = ", ".join(f"{kind} {share:.2f}" for kind, share in kinds.items())
    found.append((what, came, most == "repeat"))
    firsts = [
        interval(by_text(rows, model, "first"), "fixed", "max")
        for model in ("minilm", "rxnmapper", "antiberty")
    ]
    what = "8: first third of encoders, fixed minus max below 0"
    found.append((what, "; ".join(map(shown, firsts)), all(lead[2] < 0 for lead in firsts)))
    fewer = sum(lost["top 4"].sum() < lost["labels"].sum() for _, _, lost in every)
    what = "9: four keys for every head lose less than labels in 12 thirds"
    found.append((what, f"in {fewer}", fewer >= 12))
    some = counts[(counts["model"] == "smollm2") & counts["label"].isin(["several", "spread"])]
    numbers = some.groupby(["half", "part"])["heads"].sum().unstack(fill_value=0)
    halves = [[int(numbers.loc[half].get(part, 0)) for part in THIRDS] for half in (0, 1)]
    what = "10: heads of several keys or spread are most in the last third of SmolLM2, both halves"
    came = "; ".join(", ".join(map(str, half)) for half in halves)
    found.append((what, came, all(half[2] > max(half[:2]) for half in halves)))
    return depth.verdict_table(found)


def read(folder: Path = depth.FOLDER) -> tuple[Any, Any]:
    """The rows of the page."""
    import pandas as pd

    return pd.read_csv(folder / ROWS), pd.read_csv(folder / LABELS)


def tables(folder: Path = depth.FOLDER) -> list[str]:
    """All tables of the page."""
    rows, counts = read(folder)
    return [verdicts(rows, counts), share_table(rows), kind_table(rows), label_table(counts)]


def main() -> None:
    """Measure the models that are asked for; rows of others stay."""
    import pandas as pd

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=depth.MODELS, choices=depth.MODELS)
    parser.add_argument("--write", type=Path, default=depth.FOLDER)
    arguments = parser.parse_args()
    for model in arguments.models:
        for name, fresh in zip((ROWS, LABELS), measure(model), strict=True):
            path = arguments.write / name
            frame = pd.DataFrame(fresh)
            if path.is_file():
                old = pd.read_csv(path)
                frame = pd.concat([old[old["model"] != model], frame], ignore_index=True)
            how = {"method": "gzip", "mtime": 0} if path.suffix == ".gz" else None
            frame.to_csv(path, index=False, compression=how)


if __name__ == "__main__":
    main()
