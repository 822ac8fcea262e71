"""Lower bounds that run: pairs of Theorems 1 and 3, and leaves that cannot be missing (App. D)."""

import pytest
import torch

from infoflow_lens import InfoFlowError, load_task
from infoflow_lens.studies.bounds import encoding_bound
from infoflow_lens.studies.comparison_trees import Branch, ComparisonTree, Leaf, trees_of
from infoflow_lens.studies.constructions.depth_separation import depth_separation_on_cube
from infoflow_lens.theory.cost import DigitCode
from infoflow_lens.theory.estimate import estimate
from infoflow_lens.theory.shapes import ModelShape
from tests.reference.pigeonholes import (
    closest_pair_collision,
    encoding_collision,
    largest_radius,
    uncovered_input,
)


def heads(n_heads, d_head, seed):
    """Random smooth scores and bounded values on the sphere."""
    generator = torch.Generator().manual_seed(seed)

    def one():
        a = torch.randn(3, 3, generator=generator).double()
        b = torch.randn(3, generator=generator).double()
        c = torch.randn(3, d_head, generator=generator).double()
        return (
            lambda x: ((x @ a) * x).sum(-1) + 2 * x @ b,
            lambda x: torch.tanh(x @ c),
        )

    return [one() for _ in range(n_heads)]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("n_heads", "d_head", "free", "points"), [(1, 1, 5, 9), (2, 1, 7, 5)])
def test_the_pigeonhole_pairs_of_theorem_1(n_heads, d_head, free, points, seed):
    """The closest pairs differ by 4 eps, every head's average by less than the proof says."""
    eps = largest_radius(n_heads) ** 2 / (4 * free * points) * 0.999
    found = closest_pair_collision(heads(n_heads, d_head, seed), free + n_heads + 1, eps)
    assert found.gap >= 4 * eps * (1 - 1e-6)
    assert found.distance <= found.distance_bound
    assert found.forced_width > 0
    for x in (found.first, found.second):
        assert torch.allclose(x.norm(dim=1), torch.ones(len(x), dtype=torch.float64))


def test_finer_precision_forces_wider_layers():
    widths = [closest_pair_collision(heads(1, 1, 0), 7, eps).forced_width for eps in (2e-3, 1e-3)]
    assert widths[1] > widths[0]


@pytest.mark.parametrize("seed", range(4))
def test_the_pigeonhole_pairs_of_theorem_3(seed):
    weight = torch.randn(4, 2, generator=torch.Generator().manual_seed(seed)).double()
    found = encoding_collision(lambda x: torch.tanh(x @ weight), 4, 0.02)
    assert found.gap >= 4 * 0.02 * (1 - 1e-9)
    assert found.distance <= found.distance_bound


def test_forced_widths_have_theorem_3s_exponent():
    """Width grows like eps^-(rd/E - 1); the digit code collides like any other."""
    code = lambda x: torch.tanh(x @ torch.tensor([[0.3], [0.9]]).double())  # noqa: E731
    coarse, fine = (encoding_collision(code, 2, eps).forced_width for eps in (1e-2, 1e-3))
    slope = torch.tensor(fine / coarse).log10()
    assert float(slope) == pytest.approx(encoding_bound(2, 1, 1).exponent, abs=0.15)
    digits = DigitCode(2, 1, 3)
    found = encoding_collision(lambda x: digits.encode(x.clamp(max=1 - 1e-9)), 2, 0.02)
    assert found.distance <= found.distance_bound


def without_leaf(tree, positions):
    """The same tree but for one leaf."""

    def rebuilt(node):
        if isinstance(node, Leaf):
            return None if node.positions == positions else node
        left, right = rebuilt(node.left), rebuilt(node.right)
        if left is None or right is None:
            return right if left is None else left
        return Branch(left, right, node.score)

    return ComparisonTree(rebuilt(tree.root))


@pytest.mark.parametrize("name", ["d_retrieval", "depth_separation", "triangle_center"])
def test_no_leaf_can_be_missing(name):
    """App. D: of all distinct tuples each must be a leaf, or some input is lost."""
    sizes = {"n_components": 1} if name == "d_retrieval" else {}
    task = load_task(name, n_tokens=5, **sizes)
    whole = trees_of(task)
    assert uncovered_input(task, whole) is None
    arity = task.components[0].arity
    for positions in [(0, 1, 2)[:arity], (1, 3, 4)[:arity]]:
        part = [without_leaf(tree, positions) for tree in whole]
        assert part[0].n_leaves == whole[0].n_leaves - 1
        lost = uncovered_input(task, part)
        assert lost is not None
        winner, _ = part[0].evaluate(lost[None])
        active = task.active_index_set(lost[None])[0].nonzero()[:, 0].tolist()
        assert not set(active) <= set(winner[0].tolist())


def test_the_remark_on_the_cube():
    """Tokens in [0, 1]^3: two layers of one head still do it, one layer does not."""
    task = depth_separation_on_cube(16)
    x, y = task.sample(30, seed=0)
    sums = (x[:, :, None] + x[:, None] - 1).square().sum(-1) + 9 * torch.eye(16)
    assert torch.allclose(y[:, 0], sums.flatten(1).amin(dim=1), atol=1e-6)
    assert estimate(ModelShape((1, 1), (8, 8), 16), task).verdict == "allowed by construction"
    assert estimate(ModelShape((1,), (8,), 16), task).verdict == "excluded, proved"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: closest_pair_collision(heads(2, 1, 0), 3, 1e-3), "T of at least h \\+ 2"),
        (lambda: closest_pair_collision(heads(1, 1, 0), 9, 0.1), "choose another eps"),
        (lambda: encoding_collision(lambda x: 3 * x, 2, 0.02), "codes reach"),
        (lambda: encoding_collision(lambda x: x, 9, 1e-3), "choose another eps"),
    ],
)
def test_bad_values_are_named(call, message):
    with pytest.raises(InfoFlowError, match=message):
        call()
