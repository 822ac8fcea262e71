"""Trees of comparison (InfoFlow 2026, Def. 1): full binary trees over tuples of positions."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import Count, checked
from infoflow_lens.tasks.task import RetrievalTask
from infoflow_lens.theory.comparison import Component, Score, component_tuples

Shape = Literal["balanced", "chain"] | torch.Generator


@dataclass(frozen=True)
class Leaf:
    """A leaf of a tree of comparison: an ordered tuple of positions, which may repeat."""

    positions: tuple[int, ...]


@dataclass(frozen=True)
class Branch:
    """An internal node: of the tuples of its children it keeps the one of larger score."""

    left: "Leaf | Branch"
    right: "Leaf | Branch"
    score: Score


Node = Leaf | Branch


def postorder(root: Node) -> Iterator[Node]:
    """Order children before parents, without recursion: a tree may be as deep as it has leaves."""
    stack: list[tuple[Node, bool]] = [(root, False)]
    while stack:
        node, ready = stack.pop()
        if isinstance(node, Leaf) or ready:
            yield node
        else:
            stack += [(node, True), (node.right, False), (node.left, False)]


class ComparisonTree:
    """A tree of comparison (Def. 1): a full binary tree over ordered tuples of positions.

    Attributes:
        root: its root.
        n_leaves: the size of the tree.
        dimension: the largest length of a tuple.

    Raises:
        InfoFlowError: for an empty tuple at a leaf.
    """

    def __init__(self, root: Node) -> None:
        self.root = root
        leaves = [node.positions for node in postorder(root) if isinstance(node, Leaf)]
        if any(len(leaf) == 0 for leaf in leaves):
            raise InfoFlowError("a leaf holds no position: expected at least one in every tuple")
        if len({len(leaf) for leaf in leaves}) > 1:
            raise InfoFlowError(
                f"leaves hold tuples of lengths {sorted({len(leaf) for leaf in leaves})}: expected "
                "one length, that of the score"
            )
        if min(min(leaf) for leaf in leaves) < 0:
            raise InfoFlowError("a leaf holds a negative position: expected 0 to T - 1")
        self._highest = max(max(leaf) for leaf in leaves)
        self.n_leaves = len(leaves)
        self.dimension = max(len(leaf) for leaf in leaves)

    @classmethod
    @checked
    def over(
        cls,
        n_tokens: Count,
        component: Component,
        shape: Shape = "balanced",
    ) -> "ComparisonTree":
        """Return a tree over all tuples of a component, with its score at every node.

        Args:
            n_tokens: T.
            component: what is compared. Ordered tuples give the paper's T^arity leaves; a symmetric
                component is served by the C(T + arity - 1, arity) unordered ones.
            shape: "balanced", "chain" (a tournament of one winner), or a generator for a random
                shape.
        """
        if shape not in ("balanced", "chain") and not isinstance(shape, torch.Generator):
            raise InfoFlowError(f"shape is {shape!r}: expected 'balanced', 'chain' or a generator")
        nodes: list[Node] = [
            Leaf(tuple(row)) for row in component_tuples(n_tokens, component).tolist()
        ]
        while len(nodes) > 1:
            if shape == "chain":
                nodes[:2] = [Branch(nodes[0], nodes[1], component.preference)]
            elif isinstance(shape, torch.Generator):
                i, j = torch.randperm(len(nodes), generator=shape)[:2].sort().values.tolist()
                nodes[i] = Branch(nodes[i], nodes.pop(j), component.preference)
            else:
                pairs: list[Node] = [
                    Branch(a, b, component.preference)
                    for a, b in zip(nodes[::2], nodes[1::2], strict=False)
                ]
                # an odd node waits for the next round
                nodes = pairs + nodes[len(pairs) * 2 :]
        return cls(nodes[0])

    def evaluate(
        self, x: Float[Tensor, "batch pos d_token"]
    ) -> tuple[Int[Tensor, "batch arity"], int]:
        """Return the winning tuple of every sequence, and the number of comparisons made.

        A node compares its children's tuples by its score; ties go to the left.

        Raises:
            InfoFlowError: if a leaf holds a position that the sequences do not have.
        """
        if self._highest >= x.shape[1]:
            raise InfoFlowError(
                f"a leaf holds position {self._highest}, but sequences have {x.shape[1]} tokens: "
                "expected a tree over the same T"
            )
        sequences = torch.arange(len(x))[:, None]
        results: list[Tensor] = []
        made = 0
        for node in postorder(self.root):
            if isinstance(node, Leaf):
                results.append(torch.tensor(node.positions).expand(len(x), -1))
                continue
            # the right child was evaluated last, so it lies on top
            right, left = results.pop(), results.pop()
            keep = node.score(x[sequences, left]) >= node.score(x[sequences, right])
            results.append(torch.where(keep[:, None], left, right))
            made += 1
        return results.pop(), made


def trees_of(task: RetrievalTask, shape: Shape = "balanced") -> tuple[ComparisonTree, ...]:
    """Return a tree of comparison for each component of a target, which retrieves its tuple.

    Raises:
        InfoFlowError: for a component of rank above 1, which is no best tuple.
    """
    for component in task.components:
        if component.rank > 1:
            raise InfoFlowError(
                f"a component has rank {component.rank}: a tree keeps the best tuple, so expected "
                "rank 1"
            )
    return tuple(ComparisonTree.over(task.n_tokens, c, shape) for c in task.components)
