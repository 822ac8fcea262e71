"""Judge attributions of the field beside contributions to a power, on five trained models.

Run: nice python -m benchmarks.field [--models smollm2 ...] [--texts N]

Needs `make models`. It adds to build/field.csv, a row for each text, layer, measure and method,
goes on where it was stopped, and packs all rows into `field.csv.gz`. What was predicted stands in
docs/results/real_models/field.md, written before the run; `tables` makes the page's tables.
"""

import argparse
import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from benchmarks import depth
from infoflow_lens import JacobianInfluence, baselines, run_probes
from infoflow_lens.hooks import ResampleInfluence
from infoflow_lens.hooks.influence.base import Rerun
from infoflow_lens.hooks.model.call import call
from infoflow_lens.hooks.model.inputs import Batch
from infoflow_lens.studies import attributions

ROWS = depth.FOLDER / "field.csv.gz"
COLUMNS = ("model", "kind", "text", "layer", "measure", "method", "value")
Row: TypeAlias = tuple[int, str, str, float]  # layer, measure, method, value
JudgeText: TypeAlias = Callable[[depth.Opened, str, int, Tensor, Tensor], Iterator[Row]]
FIELD = ("attention norms", "GlobEnc", "ALTI", "DecompX")
DERIVED = ("integrated gradients", *depth.DERIVED)
BESIDE = ("attention weight", "attention rollout", "contribution rollout")
ANSWERS = ("answer, replaced", "answer, gradient", "answer, signed")
# means of the first run, in the order of the models
_BEFORE = {
    "replacement": (0.66, 0.81, 0.67, 0.67, 0.82),
    "Jacobian": (0.73, 0.92, 0.66, 0.93, 0.92),
}
_STEPS, _CEILING = 12, 4  # points of the integral; every fourth text has other donors, too


def texts(model: str) -> list[depth.Asked]:
    """The texts of a model, written for this run; of SmolLM2 the four kinds in turn."""
    kinds = depth.read_texts("field")[model]
    # variable domains of antibodies, as published, are cut into four pieces
    if model == "antiberty":
        starts, chains = range(0, 112, 28), kinds["antibody"]
        kinds = {"antibody": [chain[at : at + 28] for at in starts for chain in chains]}
    rows = zip(*kinds.values(), strict=True)
    return [depth.Asked(k, line) for row in rows for k, line in zip(kinds, row, strict=True)]


class Answer(NamedTuple):
    """How the logit of the likeliest next token follows from the last state."""

    norm: attributions.Norm
    weight: Float[Tensor, " d"]

    def logit(self, state: Float[Tensor, "*row d"]) -> Float[Tensor, "*row"]:
        """The logit."""
        return self.norm.module(state) @ self.weight


def find_answer(plain: Any, state: Float[Tensor, " d"]) -> Answer:
    """The likeliest next token behind a last state."""
    inner = getattr(plain, "transformer", None) or plain.model
    norm = getattr(inner, "ln_f", None) or inner.norm
    token = int(plain.lm_head(norm(state)).argmax())
    return Answer(attributions.Norm(norm), plain.lm_head.weight[token].detach())


class Text(NamedTuple):
    """A text in its model: what enters, patterns, states, and what could enter in its place."""

    rerun: Rerun
    start: Float[Tensor, "pos d"]
    patterns: list[Float[Tensor, "head query key"]]
    states: list[Float[Tensor, "pos d"]]
    donated: Float[Tensor, "donor pos d"]
    reference: Float[Tensor, "pos d"]

    def run(self, rows: Float[Tensor, "row pos d"]) -> tuple[Tensor, ...]:
        """The states of the layers that are judged, for other inputs."""
        return self.rerun(rows, torch.zeros(len(rows), dtype=torch.long))


def pass_through(given: depth.Opened, ids: Tensor, donors: Tensor, held: Tensor) -> Text:
    """One pass of a text, with its donors and the reference: the last donor's, but where held."""
    entrance = "blocks.0.hook_resid_pre"
    reading = attributions.read_text(given.model, ids)
    others = call(given.model, Batch(donors), [entrance]).activations[entrance]
    start = reading.states[0]
    reference = torch.where(held[:, None], start, others[-1])
    rerun = Rerun(given.model, None, depth.layers_of(given.model), "resid_post", Batch(ids))
    return Text(rerun, start, *reading, others[: depth._DONORS], reference)


def attribute(
    given: depth.Opened, text: Text, places: tuple[int, ...], integrate: bool
) -> tuple[dict[str, Tensor], attributions.Edges]:
    """Scores [layer, place, pos] of the field's methods, and control numbers [layer, place, 1]."""
    layers = list(depth.layers_of(given.model))
    blocks = attributions.read_blocks(given.model.original_model)
    clean = text.run(text.start[None])
    towards = None
    if given.is_causal:
        answer = find_answer(given.model.original_model, clean[-1][0, -1])
        scale = answer.norm.scale(clean[-1][0, -1:])[0]
        towards = answer.norm.linear(torch.eye(len(answer.weight))) @ answer.weight / scale
    edges = attributions.measure_edges(blocks, text.patterns, text.states, towards)
    at = list(places)
    found = {
        "attention norms": edges.norms[layers][:, at],
        "GlobEnc": attributions.roll_out(edges.globenc)[layers][:, at],
        "ALTI": attributions.roll_out(edges.alti)[layers][:, at],
    }
    every = enumerate(attributions.decompose(blocks, text.patterns, text.start))
    parts = [vectors for layer, vectors in every if layer in layers]
    found["DecompX"] = torch.stack([one[:, at].norm(dim=-1).T for one in parts])
    sums = [(one.sum(0) - state[0])[at] for one, state in zip(parts, clean, strict=True)]
    gaps = [
        gap.norm(dim=-1) / state[0, at].norm(dim=-1) for gap, state in zip(sums, clean, strict=True)
    ]
    found["control: DecompX"] = torch.stack(gaps)[..., None]
    if not integrate:
        return found, edges
    begin = text.run(text.reference[None])
    ways = [(c - b)[0, at] for c, b in zip(clean, begin, strict=True)]
    ways = [way / way.norm(dim=-1, keepdim=True) for way in ways]

    def along(rows: Tensor) -> Tensor:
        states = text.run(rows)
        return torch.cat([(s[:, at] * w).sum(-1) for s, w in zip(states, ways, strict=True)], dim=1)

    done = attributions.integrate_gradients(along, text.start, text.reference, _STEPS)
    shape = (len(layers), len(at), -1)
    found["integrated gradients"] = done.parts.abs().reshape(shape)
    found["control: integrated gradients"] = done.error.reshape(shape)
    return found, edges


def judge_answer(
    given: depth.Opened,
    text: Text,
    edges: attributions.Edges,
    scores: dict[str, Tensor],
    keep: Tensor,
) -> Iterator[tuple[str, str, float]]:
    """Spearman of measure and method for the logit of the likeliest next token."""
    clean = text.run(text.start[None])[-1][0, -1]
    answer = find_answer(given.model.original_model, clean)
    n, n_donors = len(text.start), len(text.donated)
    rows = text.start.repeat(n * n_donors, 1, 1)
    at = torch.arange(n).repeat_interleave(n_donors)
    rows[torch.arange(len(rows)), at] = text.donated[torch.arange(n_donors).repeat(n), at]
    with torch.no_grad():
        last = torch.cat([text.run(part)[-1][:, -1] for part in rows.split(32)])
    falls = (answer.logit(clean) - answer.logit(last)).detach().view(n, n_donors)

    def logit(rows: Tensor) -> Tensor:
        return answer.logit(text.run(rows)[-1][:, -1:])

    start = text.start[None].clone().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(logit(start).sum(), start)
    done = attributions.integrate_gradients(logit, text.start, text.reference, _STEPS)
    blocks = attributions.read_blocks(given.model.original_model)
    *_, vectors = attributions.decompose(blocks, text.patterns, text.start)
    parts = answer.norm.decompose(vectors[:, -1:])[:, 0] @ answer.weight
    signed = {
        "ALTI-Logit": attributions.alti_logit(edges),
        "DecompX": parts,
        "gradient x input": (slope[0] * text.start).sum(-1),
        "integrated gradients": done.parts[0],
    }
    truths = {
        "answer, replaced": falls.abs().median(dim=1).values,
        "answer, gradient": slope[0].norm(dim=-1),
        "answer, signed": falls.median(dim=1).values,
    }
    unsigned = {name: values[-1, 0] for name, values in scores.items() if "control" not in name}
    unsigned |= {name: values.abs() for name, values in signed.items()}
    unsigned["gradient"] = truths["answer, gradient"]
    for truth, measured in truths.items():
        for method, values in (signed if truth.endswith("signed") else unsigned).items():
            yield truth, method, depth.spearman(values[keep].detach(), measured[keep])
    yield "answer, replaced", "control: integrated gradients", float(done.error[0])


def judge(
    given: depth.Opened, ids: Tensor, donors: Tensor, ceiling: bool, integrate: bool
) -> Iterator[Row]:
    """Layer, measure, method and Spearman, in the mean over positions."""
    model, places = given.model, depth.places_of(ids, given.is_causal)
    layers, n = depth.layers_of(model), ids.shape[1]
    at = torch.arange(n)
    is_special = torch.tensor([int(token) in given.special for token in ids[0]])
    asked: dict[str, Any] = {"state": "resid_post", "positions": places, "layers": layers}
    ours = baselines(model, "resid_post", positions=places)
    names = ["attention weight", "attention rollout", "contribution rollout", "gradient x input"]
    names += list(depth.QUESTION.values())
    probes: dict[str, Any] = {
        "replacement": ResampleInfluence(donors[: depth._DONORS], **asked),
        "Jacobian": JacobianInfluence(**asked, estimate=depth._DIRECTIONS),
    } | {name: ours[name] for name in names}
    if ceiling:
        more = donors[depth._DONORS : -1]
        probes["other donors"] = ResampleInfluence(more, **asked)
    results = run_probes(model, ids, list(probes.values()), progress=False)
    scores = {
        name: found.values[list(layers) if len(found.layers) > len(layers) else slice(None), 0]
        for name, found in zip(probes, results, strict=True)
    }
    text = pass_through(given, ids, donors, is_special | (at == 0))
    field, edges = attribute(given, text, places, integrate)
    scores |= field
    for truth in depth.TRUTHS:
        for method, values in scores.items():
            if method == truth or (method == "other donors" and truth == "Jacobian"):
                continue
            if method.startswith("control"):
                if truth == "replacement":
                    for row, layer in enumerate(layers):
                        yield layer + 1, "control", method, float(values[row].max())
                continue
            agreement = depth.agree_by_layer(given, ids, places, values, scores[truth])
            for layer, value in zip(layers, agreement, strict=True):
                yield layer + 1, truth, method, value
    if given.is_causal and integrate:
        keep = (at != n - 1) & (at != 0) & ~is_special
        for truth, method, value in judge_answer(given, text, edges, scores, keep):
            yield layers[-1] + 1, truth, method, value


# What the page says, from the rows


def verdicts(rows: Any) -> str:
    """Each prediction of the statement, what came, and whether it was seen."""
    found: list[tuple[str, str, bool]] = []
    for truth, method in depth.QUESTION.items():
        name, texts_of = method.split(", ")[1], {}
        for model in depth.MODELS:
            texts_of[model] = depth.by_text(rows, model, truth)
        said = {
            (model, other): depth.beside(texts_of[model], other, truth)
            for model in depth.MODELS
            for other in FIELD
        }
        behind = [f"{other} in {model}" for (model, other), s in said.items() if s == "behind"]
        what = f"1, {name}: behind none of the four in any model"
        found.append((what, ", ".join(behind) or "behind none", not behind))
        ahead = {o: sum(said[model, o] == "ahead" for model in depth.MODELS) for o in FIELD}
        came = ", ".join(f"of {other} in {count}" for other, count in ahead.items())
        what = f"2, {name}: ahead of each in at least three models"
        found.append((what, came, min(ahead.values()) >= 3))
        failed = len({model for (model, _), s in said.items() if s == "behind"})
        what = f"{name}: 1 fails in at most one model, 2 holds in two (else refuted)"
        came = f"1 fails in {failed}, 2 holds in {min(ahead.values())}"
        found.append((what, came, failed < 2 and min(ahead.values()) >= 2))
        means = [texts_of[model][method].mean() for model in depth.MODELS]
        far = [abs(one - other) for one, other in zip(means, _BEFORE[truth], strict=True)]
        at = int(np.argmax(far))
        what = f"3, {name}: within .10 of the first run"
        came = f"furthest {depth.MODELS[at]}: {means[at]:.2f} for {_BEFORE[truth][at]:.2f}"
        found.append((what, came, max(far) <= 0.1))
    ours = depth.by_text(rows, "smollm2", "replacement")["GlobEnc"]
    what = "4: GlobEnc below 0 on replaced tokens in SmolLM2"
    found.append((what, depth.shown(ours), depth.interval(ours)[2] < 0))
    better, behind = [], []
    for model in depth.MODELS:
        here = depth.by_text(rows, model, "replacement")
        lead = here["integrated gradients"] - here["gradient x input"]
        better += [model] if depth.interval(lead)[1] > 0 else []
        if depth.beside(here, "integrated gradients", "replacement") == "behind":
            behind.append(model)
    what = (
        "5: integrated gradients ahead of gradient x input in three models, of ours in at most two"
    )
    came = f"in {len(better)}; {', '.join(behind) or 'none'}"
    found.append((what, came, len(better) >= 3 and len(behind) <= 2))
    answer = depth.by_text(rows, "smollm2", "answer, replaced")
    lead = answer[depth.QUESTION["replacement"]] - answer["ALTI-Logit"]
    what = "6: answers of SmolLM2, replaced tokens: ahead of ALTI-Logit"
    found.append((what, f"by {depth.shown(lead)}", depth.interval(lead)[1] > 0))
    signed = depth.by_text(rows, "smollm2", "answer, signed")
    lead = signed["integrated gradients"] - signed["ALTI-Logit"]
    theirs = signed["ALTI-Logit"].mean()
    what = "7: signed, integrated gradients ahead of ALTI-Logit, which is below .3"
    came = f"by {depth.shown(lead)}; {theirs:.2f}"
    found.append((what, came, depth.interval(lead)[1] > 0 and theirs < 0.3))
    return depth.verdict_table(found)


def answer_table(rows: Any) -> str:
    """Every method on the logit of the likeliest next token."""
    columns = [(m, truth) for m in ("smollm2", "stdlib-2l") for truth in ANSWERS]
    found = {column: depth.by_text(rows, *column) for column in columns}
    methods = dict.fromkeys(
        [*depth.QUESTION.values(), "ALTI-Logit", "integrated gradients", "gradient x input",
         "gradient", *FIELD, "attention rollout"]
    )  # fmt: skip
    lines = [
        [method]
        + [
            depth.shown(found[c][method]) if method in found[c] and c[1].split()[-1] != method
            else ""
            for c in columns
        ]
        for method in methods
    ]  # fmt: skip
    return depth.markdown(["answer", *(f"{m}, {t.split()[1]}" for m, t in columns)], lines)


def control_table(rows: Any) -> str:
    """How far sums miss, and the texts of each model."""
    lines = []
    for model in depth.MODELS:
        mine = rows[rows["model"] == model]
        cells = [model, str(mine["text"].nunique())]
        for method in ("DecompX", "integrated gradients"):
            gaps = mine[mine["method"] == f"control: {method}"]
            cells.append(str(gaps["text"].nunique()))
            gaps = gaps[gaps["measure"] == "control"]["spearman"]
            cells.append(f"{gaps.median():.1g}, {gaps.max():.1g}")
        lines.append([*cells[:2], cells[3], *cells[4:]])
    head = ["model", "texts", "DecompX misses its sum by (median, most)"]
    return depth.markdown([*head, "texts of integrated gradients", "miss by"], lines)


def read(path: Path = ROWS) -> Any:
    """The rows of a run, with the column of values named as in the first one."""
    import pandas as pd

    return pd.read_csv(path).rename(columns={"value": "spearman"})


def tables() -> list[str]:
    """All tables of the page."""
    rows = read()
    free = (*FIELD, *BESIDE)
    return [
        verdicts(rows),
        depth.main_table(rows, "replacement", DERIVED, (*free, "other donors")),
        depth.main_table(rows, "Jacobian", DERIVED, free),
        depth.part_table(rows[rows["measure"].isin(depth.TRUTHS)], "layer", ["DecompX"]),
        answer_table(rows),
        control_table(rows),
    ]


def measured(path: Path) -> set[tuple[str, int]]:
    """The texts whose rows are there."""
    if not path.exists():
        return set()
    with path.open(newline="") as file:
        return {(row["model"], int(row["text"])) for row in csv.DictReader(file)}


def measure(
    name: str, limit: int, path: Path, judge_text: JudgeText, n_donors: int, seed: int
) -> None:
    """Add the rows of a model's texts, one text after the other."""
    asked, done = texts(name), measured(path)
    given = depth.opened(name, asked=asked)
    given.model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    pool = torch.cat([ids[0] for ids in given.ids])
    pool = pool[[int(token) not in given.special for token in pool]]
    for number, (one, ids) in enumerate(zip(asked, given.ids, strict=True)):
        donors = pool[torch.randint(len(pool), (n_donors, ids.shape[1]), generator=generator)]
        if number >= limit or (name, number) in done:
            continue
        rows = list(judge_text(given, name, number, ids, donors))
        is_new = not path.exists()
        with path.open("a", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            if is_new:
                table.writerow(COLUMNS)
            for layer, truth, method, value in rows:
                table.writerow((name, one.kind, number, layer, truth, method, f"{value:.4g}"))
        print(name, number, ids.shape[1], flush=True)


def run(
    what: str | None, judge_text: JudgeText, n_donors: int, packed: Path, *, most: int, seed: int
) -> None:
    """Measure the models of the command line, go on where rows are missing, and pack all rows.

    Args:
        what: the run does.
        judge_text: makes the rows of a text.
        n_donors: texts whose tokens take the place of its own.
        packed: where the rows go; beneath build/ they grow in a file of its name.
        most: texts of a model.
        seed: of donors.
    """
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--models", nargs="*", default=list(depth.MODELS))
    parser.add_argument("--texts", type=int, default=most)
    parser.add_argument("--rows", type=Path, default=Path("build") / packed.stem)
    asked = parser.parse_args()
    for name in asked.models:
        measure(name, asked.texts, asked.rows, judge_text, n_donors, seed)
    with asked.rows.open(newline="") as file:
        depth.write(packed, list(csv.DictReader(file)))


def judge_text(
    given: depth.Opened, name: str, number: int, ids: Tensor, donors: Tensor
) -> Iterator[Row]:
    """Judge a text; other donors every few texts, and what takes longest not always."""
    # of SmolLM2, which takes longest, one round of four kinds in two
    integrate = name != "smollm2" or number // 4 % 2 == 0
    yield from judge(given, ids, donors, number % _CEILING == 0, integrate)


if __name__ == "__main__":
    run(__doc__, judge_text, 2 * depth._DONORS + 1, ROWS, most=64, seed=0)
