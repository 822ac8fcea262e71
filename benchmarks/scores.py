"""How well graphs of scores are asked, what trees lose, ranks and costs, for docs/known-results.md.

Run: python -m benchmarks.scores [--write FOLDER]   (a minute of one core)

With ``--write``, scores.json of FOLDER is written anew, whose tables the page has.
"""

import argparse
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infoflow_lens import build_construction, estimate, load_task
from infoflow_lens.studies.bounds import softmin_gap
from infoflow_lens.tasks import Target
from infoflow_lens.theory import Component
from infoflow_lens.theory.cost import DigitCode, exponent
from infoflow_lens.theory.score_graph import graph_of, reversals
from infoflow_lens.theory.shapes import ModelShape
from tests.referee import built

Rows = list[dict[str, Any]]

D = 4
SCORES = 60
OUTER = {"id": lambda s: s, "exp": lambda s: (s / 4).exp(), "atan": torch.atan}
ASKED = [  # outer function, noise, weight of one weak edge, draws
    *(("id", 0.0, 1.0, n) for n in (50, 400, 2000)),
    *(("id", 0.0, weak, 400) for weak in (0.1, 0.01)),
    *((outer, 0.0, 1.0, 400) for outer in ("exp", "atan")),
    ("id", 0.01, 1.0, 400),
]
TREES = {
    "chain": ((0, 1), (1, 2)),
    "star of three arms": ((0, 1), (0, 2), (0, 3)),
    "chain of five": tuple((i, i + 1) for i in range(4)),
    "tree of six": ((0, 1), (1, 2), (2, 3), (1, 4), (2, 5)),
}
LENGTHS, BETAS = (12, 24, 64, 256), (1e1, 1e2, 1e3, 1e4, 1e5)
CODES = {  # coordinates, latents, two numbers of bits
    "1.33": (4, 3, (3, 6)), "1.5": (3, 2, (2, 4)), "2": (2, 1, (2, 4)), "3": (3, 1, (2, 4)),
    "4": (4, 1, (1, 2)),
}  # fmt: skip


def edge(rng: random.Random) -> Callable[[Tensor, Tensor], Tensor]:
    """A part of a score over two tokens: a form, a network, or a rare event."""
    generator = torch.Generator().manual_seed(rng.randrange(10**6))
    a, b = torch.randn(2, D, D, generator=generator)
    u, v = torch.randn(2, D, generator=generator) / D**0.5
    kind = rng.choice(("form", "network", "rare"))
    if kind == "form":
        return lambda x, y: ((x @ a) * y).sum(dim=-1)
    if kind == "network":
        return lambda x, y: torch.tanh(x @ a + y @ b).sum(dim=-1)
    return lambda x, y: 3 * torch.relu(x @ u - 1.5) * torch.relu(y @ v - 1)


def mixed(score: Any, arity: int, i: int, j: int, tokens: Tensor, n: int) -> bool:
    """Say whether differences by two places at once were seen: s - s_i' - s_j' + s_ij'.

    As for orders, what is below the rounding of 32-bit numbers counts as none.
    """
    generator = torch.Generator().manual_seed(n)
    x, y = (tokens[torch.randint(len(tokens), (n, arity), generator=generator)] for _ in range(2))
    terms = []
    for places in ([], [i], [j], [i, j]):
        z = x.clone()
        z[:, places] = y[:, places]
        terms.append(score(z).double())
    difference = terms[0] - terms[1] - terms[2] + terms[3]
    size = sum(term.abs() for term in terms) + terms[0].abs().median() / 10
    return bool((difference.abs() > 1e-5 * size).any())


def asked(outer: str, noise: float, weak: float, n: int) -> dict[str, int]:
    """Count edges of random scores that are asked by orders, those that are none, those missed.

    The same by mixed differences, which see through no outer function.
    """
    tokens = torch.randn(500, D, generator=torch.Generator().manual_seed(0))
    names = ("edges", "no edges", "false", "missed", "false, mixed", "missed, mixed")
    found = dict.fromkeys(names, 0)
    for seed in range(SCORES):
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        arity = rng.choice((3, 4))
        pairs = list(itertools.combinations(range(arity), 2))
        real = {pair for pair in pairs if rng.random() < 0.5}
        parts = [(pair, edge(rng), 1.0) for pair in sorted(real)]
        parts[:1] = [(pair, part, weak) for pair, part, _ in parts[:1]]

        def score(x: Tensor, parts: Any = parts, generator: Any = generator) -> Tensor:
            total = x[..., 0].sum(dim=-1)  # a part of each place alone
            for (i, j), part, weight in parts:
                total = total + weight * part(x[..., i, :], x[..., j, :])
            total = OUTER[outer](total)
            return total + noise * torch.randn(total.shape, generator=generator)

        edges = graph_of(Component(arity, score), tokens, n).edges
        # four scores a draw, and an order is asked of either place
        at_once = {pair for pair in pairs if mixed(score, arity, *pair, tokens, 2 * n)}
        found["edges"] += len(real)
        found["no edges"] += len(pairs) - len(real)
        for name, seen in (("", edges), (", mixed", at_once)):
            found[f"false{name}"] += len(seen - real)
            found[f"missed{name}"] += len(real - seen)
    return found


def referee_row(n: int = 300) -> dict[str, int]:
    """Count pairs of places that both ways of asking join in the scores of the referee's targets.

    An edge is what some of 20,000 draws reverse, by one place or the other.
    """
    found = dict.fromkeys(("scores", "pairs", "edges", "orders", "mixed", "mixed, no edges"), 0)
    for seed in range(n):
        case, *_ = built(seed)
        tokens = case.task.sample(400, seed)[0].flatten(0, 1)[:8192]
        for component in case.task.components:
            arity, score = component.arity, component.preference
            if arity < 2 or component.distinct or component.tuples is not None:
                continue
            found["scores"] += 1
            edges = graph_of(component, tokens).edges
            for i, j in itertools.combinations(range(arity), 2):
                rest = [place for place in range(arity) if place not in (i, j)]
                real = (i, j) in edges or any(
                    reversals(score, arity, [place], rest, tokens, 20_000, 5) > 0
                    for place in (i, j)
                )
                at_once = mixed(score, arity, i, j, tokens, 400)
                found["pairs"] += 1
                found["edges"] += real
                found["orders"] += (i, j) in edges
                found["mixed"] += real and at_once
                found["mixed, no edges"] += at_once and not real
    return found


def largest_sum(matrices: Tensor, edges: Any, x: Tensor) -> Tensor:
    """The largest sum of forms over a tree's edges: of all tuples, or by tables from leaves."""
    arity, n = len(edges) + 1, x.shape[1]
    forms = {}
    for (i, j), a in zip(edges, matrices.to(x), strict=True):
        forms[i, j] = x @ a @ x.mT
        forms[j, i] = forms[i, j].mT
    if n**arity <= 2 * 10**6:
        index = torch.cartesian_prod(*[torch.arange(n)] * arity)
        return sum(forms[i, j][:, index[:, i], index[:, j]] for i, j in edges).amax(dim=1)

    def table(place: int, parent: int | None) -> Tensor:
        below = [j for i, j in forms if i == place and j != parent]
        return sum(
            ((forms[place, j] + table(j, place)[:, None]).amax(dim=2) for j in below),
            x.new_zeros(x.shape[:2]),
        )

    return table(0, None).amax(dim=1)


def tree_rows() -> Iterator[dict[str, Any]]:
    """Yield graph, heads and errors of trees, hard and soft, against all tuples."""
    for name, edges in TREES.items():
        hard: list[float] = []
        soft: dict[str, list[list[float]]] = {}
        for n_tokens in LENGTHS:
            model, task = build_construction(
                "best_tree", edges=edges, n_tokens=n_tokens, attention="hardmax", beta=1.0
            )
            x = task.sample(4, seed=0)[0].double()
            expected = largest_sum(task.matrices, edges, x)

            def error(model: Any, x: Tensor = x, expected: Tensor = expected) -> float:
                model.to(torch.float64, print_details=False)
                return float((expected - model(x)[:, 0]).abs().max())

            with torch.no_grad():
                hard.append(error(model))
                soft[str(n_tokens)] = [
                    [error(build_construction(
                        "best_tree", edges=edges, n_tokens=n_tokens, beta=beta
                    )[0]), task.arity * softmin_gap(n_tokens, beta)]
                    for beta in BETAS
                ]  # fmt: skip
        (component,) = task.components
        graph = graph_of(Component(component.arity, component.score), x.flatten(0, 1).float())
        yield {
            "target": name, "asked as declared": graph.edges == task.graph.edges,
            "width": graph.width, "heads": model.architecture.n_heads, "hard": hard, "soft": soft,
        }  # fmt: skip


def rank_rows() -> Iterator[dict[str, Any]]:
    """Yield the d_head that an estimate asks of the first layer."""
    scores: dict[str, Any] = {
        "-|x - y|^2": lambda x: -x.diff(dim=-2).square().sum(dim=(-2, -1)),
        "-(x0 - y0)^2": lambda x: -(x[..., 0, 0] - x[..., 1, 0]).square(),
        "u(x) v(y)": lambda x: x[..., 0, 0].exp() * x[..., 1, 1],
        "-|x - y|_1": lambda x: -x.diff(dim=-2).abs().sum(dim=(-2, -1)),
    }
    cases: dict[str, Any] = {"closest pair": load_task("depth_separation", n_tokens=12)}
    for name, score in scores.items():
        component = Component(2, score, distinct=True)
        cases[name] = Target(components=(component,), n_tokens=12, d_token=3)
    for name, task in cases.items():
        yield {"score": name, "d_head": estimate(ModelShape((1, 1), (32, 32), 12), task).d_head[0]}


def code_rows() -> Iterator[dict[str, Any]]:
    """Yield by how much decoders of Theorem 3's code grow as the error is halved, beside laws."""
    for law, (n, latents, bits) in CODES.items():
        x = torch.rand(4000, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        points = []
        for b in bits:
            code = DigitCode(n, latents, b, analog=True)
            error = float((code.decode(code.encode(x)) - x).abs().max())
            points.append((math.log(error), math.log(code.decoder_units)))
        (e0, u0), (e1, u1) = points
        yield {
            "|I| d / E": law,
            "measured": (u1 - u0) / (e0 - e1),
            "decoder": exponent(n, 1, latents, "decoder"),
            "printed": exponent(n, 1, latents, "law"),
        }  # fmt: skip


def measure() -> dict[str, Rows]:
    """Return the rows of all tables."""
    names = ("outer", "noise", "weak edge", "draws")
    rates = [dict(zip(names, case, strict=True)) | asked(*case) for case in ASKED]
    return {
        "rates": rates,
        "referee": [referee_row()],
        "trees": list(tree_rows()),
        "ranks": list(rank_rows()),
        "codes": list(code_rows()),
    }


def _table(columns: list[str], rows: list[list[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def tables(rows: dict[str, Rows]) -> str:
    """Return the tables of the page, from rows or from their file."""
    rates = [
        [r["outer"], f"{r['noise']:g}", f"{r['weak edge']:g}", r["draws"],
         *(f"{r[f'{what}{by}']} of {r[of]}"
           for by in ("", ", mixed") for what, of in (("false", "no edges"), ("missed", "edges")))]
        for r in rows["rates"]
    ]  # fmt: skip
    trees = []
    for r in rows["trees"]:
        hard = ", ".join(f"{error:.0e}" if error else "0" for error in r["hard"])
        said, heads = "yes" if r["asked as declared"] else "no", ", ".join(map(str, r["heads"]))
        trees.append([r["target"], said, r["width"], f"({heads})", hard])
    soft = [
        [r["target"], n, *(f"{error:.1e} [{bound:.1e}]" for error, bound in pairs)]
        for r in rows["trees"]
        for n, pairs in r["soft"].items()
        if int(n) in (24, 256)
    ]
    columns = ["outer", "noise", "weak edge", "draws", "by orders: false", "missed"]
    columns += ["by mixed differences: false", "missed"]
    lengths = f"hard error, T = {', '.join(map(str, LENGTHS))}"
    names = ("scores", "pairs", "edges", "orders", "mixed", "mixed, no edges")
    ranks = [[r["score"].replace("|", r"\|"), r["d_head"]] for r in rows["ranks"]]
    codes = [
        [r["|I| d / E"], *(f"{r[k]:.2f}" for k in ("measured", "decoder", "printed"))]
        for r in rows["codes"]
    ]
    return "\n\n".join(
        [
            _table(columns, rates),
            _table(
                [*names[:3], "of these by orders", "by mixed differences", "and no edges by these"],
                [[row[name] for name in names] for row in rows["referee"]],
            ),
            _table(["target", "asked as declared", "width", "heads", lengths], trees),
            _table(["target", "T", *(f"beta {beta:g}" for beta in BETAS)], soft),
            _table(["score", "d_head"], ranks),
            _table([r"\|I\| d / E", "exponent measured", "decoder", "printed law"], codes),
        ]
    )


def main() -> None:
    """Print the tables, and write their rows where that is asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    folder = parser.parse_args().write
    torch.set_num_threads(1)
    rows = measure()
    print(tables(json.loads(json.dumps(rows))))
    if folder is not None:
        text = json.dumps(rows, indent=1) + "\n"
        (folder / "scores.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
