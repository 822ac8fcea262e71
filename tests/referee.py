"""A referee of the theory's verdicts, which knows only what a user calls.

Targets are drawn from a grammar of small networks, each built before its verdict is asked and run
to know its error: none may be excluded. Others are impossible, by a proof of the referee's own:
none may be allowed. ``python -m tests.referee --n 1000 --impossible 200 --seed 0`` prints verdicts
by family.
"""

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass

import torch

from infoflow_lens import Architecture, estimate
from infoflow_lens.tasks import Target
from infoflow_lens.theory import Component
from tests.reference.networks import Heads, make

LENGTHS = {1: (6, 20), 2: (6, 20), 3: (6, 12), 4: (6, 8), 5: (6, 7)}


@dataclass
class Case:
    """A target, an architecture, and what is known of them.

    Attributes:
        name: what it is, with its seed.
        task: the target.
        architecture: heads and sizes.
        proof: why it is impossible, in words; None where a network does it.
    """

    name: str
    task: Target
    architecture: Architecture
    proof: str | None = None


def architecture_of(heads, task, positional):
    """Sizes in which everything fits; d_head, too: scores of networks have any rank."""
    return Architecture(
        n_heads=tuple(heads), d_model=64, d_head=(64,) * len(heads), d_token=task.d_token,
        n_tokens=task.n_tokens, positional_embedding="learned" if positional else "none",
    )  # fmt: skip


def built(seed):
    """A target with the network that computes it: the case, and the network's largest error."""
    family, made, d, rng = make(seed)
    low, high = LENGTHS[made.arity]
    task = Target(
        components=tuple(made.components),
        outer=lambda z: made.outer(z)[:, None],
        n_tokens=rng.randint(low, high),
        d_token=d,
        tokens="sphere" if made.rare is None and rng.random() < 0.5 else "normal",
        subsets=None if made.subset is None else (tuple(made.subset),) * len(made.components),
    )
    x, y = task.sample(100, seed)
    heads = Heads()
    error = float((made.network(heads, x) - y[:, 0]).abs().max() / y.std())
    positional = made.subset is not None or seed % 4 == 0
    case = Case(f"{family} {seed}", task, architecture_of(heads.by_layer, task, positional))
    return case, error, made


def held(heads):
    """The most tokens that CLS can hold by heads that retrieve one position each."""
    token, cls = 1, 0
    for n in heads:
        token, cls = (1 + n) * token, cls + n * token
    return cls


def impossible(seed):
    """A target and too small an architecture, with a proof of it; None where none is at hand."""
    if seed % 5 == 0:
        return tied(seed)
    case, error, made = built(seed)
    if made.subset is not None or error > 1e-4:
        return None
    x = case.task.sample(100, seed + 1)[0].double().requires_grad_(True)
    try:
        (gradient,) = torch.autograd.grad(made.network(Heads(), x.float()).sum(), x)
    except RuntimeError:
        return None
    # so many matter on a third of inputs: `judge` leaves less than .15 of them open
    active = int(
        (gradient.norm(dim=-1) > 1e-6).sum(dim=1).float().quantile(2 / 3, interpolation="lower")
    )
    heads = [1] * len(case.architecture.n_heads)
    while held(heads) >= active and len(heads) > 1:
        heads.pop()
    if held(heads) >= active:
        return None
    proof = f"{active} tokens matter on a third of inputs, CLS holds {held(heads)}"
    smaller = architecture_of(heads, case.task, seed % 2 == 0)
    return Case(f"twin of {case.name}", case.task, smaller, proof)


def tied(seed):
    """A star of rotations and heads that see no two of the tuples that tie above all others."""
    generator = torch.Generator().manual_seed(seed)
    arms, d = 1 + seed // 5 % 3, 4
    turns = torch.linalg.qr(torch.randn(arms, d, d, generator=generator))[0]
    heads = [(1,), (4,), (1, 1), (1, 2)][seed // 15 % 4]
    token, before = 1, 0
    for n in heads[:-1]:
        token, before = (1 + n) * token, before + n * token
    a = arms + 1
    m = held(heads) // a + 1
    if before + 2 * token >= 2 * a or a * m > 12:
        return None

    def score(x):
        return sum(
            ((x[..., 0, :] @ t.to(x)) * x[..., k + 1, :]).sum(-1) for k, t in enumerate(turns)
        )

    # tied: the arms lie where the rotations take the middle, tilted alike
    for attempt in range(200):
        generator.manual_seed(1000 * seed + attempt)
        middle = torch.nn.functional.normalize(
            torch.randn(m, d, generator=generator, dtype=torch.float64), dim=-1
        )
        aside = torch.randn(m, d, generator=generator, dtype=torch.float64)
        aside -= (aside * middle).sum(-1, keepdim=True) * middle
        ends = middle + 0.05 * torch.nn.functional.normalize(aside, dim=-1)
        ends = torch.nn.functional.normalize(ends, dim=-1)
        tokens = torch.stack([middle, *[ends @ t.double() for t in turns]], dim=1)
        flat = tokens.flatten(0, 1)
        tuples = torch.cartesian_prod(*[torch.arange(len(flat))] * a)
        own = torch.arange(len(flat)).view(m, a)
        others = tuples[~(tuples[:, None] == own).all(-1).any(-1)]
        best = score(flat[own])
        if (
            float(best.std(correction=0)) < 1e-12
            and float(score(flat[others]).max()) < best[0] - 1e-3
        ):
            break
    else:
        return None
    task = Target(components=(Component(a, score),), n_tokens=12, d_token=d, tokens="sphere")
    proof = f"a choice sees {before + 2 * token} of the {2 * a} tokens of two of {m} tied tuples"
    return Case(f"tied {seed}", task, architecture_of(heads, task, seed % 2 == 0), proof)


def judge(case, seed):
    """The verdict on a case, by the public call."""
    return estimate(case.architecture, case.task, verify=20, seed=seed)


def run(seeds, wanted="built"):
    """Judge the cases of some seeds: verdicts by family, and what is wrong."""
    said, wrong = Counter(), []
    for seed in seeds:
        if wanted == "built":
            case, error, _ = built(seed)
            if error > 1e-4:
                wrong.append(f"{case.name}: the network's own error is {error:.1e}")
                continue
        elif (case := impossible(seed)) is None:
            continue
        found = judge(case, seed)
        said[case.name.rsplit(maxsplit=1)[0], found.verdict] += 1
        bad = "excluded" if case.proof is None else "allowed"
        if found.verdict.startswith(bad):
            heads = case.architecture.n_heads
            wrong.append(f"{case.name}, heads {heads}: {found.verdict}, {found.why}; {case.proof}")
    return said, wrong


def say(text):
    """Print a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main():
    """Judge as many as are asked for, and print verdicts by family."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=1000)
    parser.add_argument("--impossible", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    start, status = time.perf_counter(), 0
    for wanted, n in (("built", asked.n), ("impossible", asked.impossible)):
        said, wrong, seed = Counter(), [], asked.seed
        while said.total() + len(wrong) < n:
            more, also = run([seed], wanted)
            said, wrong, seed = said + more, wrong + also, seed + 1
        verdicts = sorted({verdict for _, verdict in said})
        say(f"{wanted}: {said.total()} in {time.perf_counter() - start:.0f} s")
        for family in sorted({name for name, _ in said}):
            say(f"  {family:28} { {v: said[family, v] for v in verdicts if said[family, v]} }")
        say(f"  all: { {v: sum(said[f, w] for f, w in said if w == v) for v in verdicts} }")
        for line in wrong:
            say(f"  WRONG {line}")
        status |= bool(wrong)
    return status


if __name__ == "__main__":
    sys.exit(main())
