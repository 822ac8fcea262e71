"""What the interactive picture of information flow shows; it knows nothing of models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.theory.rules import MaxPosition, Rule

RULES = {
    "max_position": "each head passes on the token of its largest score",
    "top_k": "each head passes on its k largest scores",
    "mechanisms": "each head passes on what describes it",
}


@dataclass(frozen=True, eq=False)
class Move:
    """Which keys a head moves to each query; the page reads it as `propagate` does.

    Attributes:
        most: how many of the keys of its largest scores; None for the k that is asked.
        keys: the keys that it moves in their place, int [pos, k], -1 for none.
    """

    most: int | None = None
    keys: Int[Tensor, "pos k"] | None = None

    def rule(self, ranked: Int[Tensor, "_head pos k"], k: int) -> Rule:
        """Return the update rule of `propagate` for this move.

        Args:
            ranked: the ranked keys of the heads.
            k: how many keys, where the move leaves it open.
        """
        if self.keys is not None:
            return MaxPosition(self.keys[None, None])
        return MaxPosition(ranked[None, :, :, : k if self.most is None else self.most])


@dataclass(frozen=True, eq=False)
class ViewedMechanism:
    """The mechanism of one head on one input.

    Attributes:
        name: a label of HeadLabels ("fixed: previous", "max", ...).
        keys: what it passes on: int [pos, k], key positions, -1 for none.
    """

    name: str
    keys: Int[Tensor, "pos k"]


def view_mechanisms(
    names: Sequence[Sequence[str]], rules: Sequence[Sequence[Rule]], sequence: int, n_states: int
) -> list[list[ViewedMechanism]]:
    """Make what the picture says of each head of one input.

    Args:
        names: of every head, layer by layer.
        rules: one for each head.
        sequence: which of the inputs that the rules are of.
        n_states: its positions; what lies behind them is padding.
    """
    layers = []
    for heads, of_layer in zip(names, rules, strict=True):
        viewed = []
        for name, rule in zip(heads, of_layer, strict=True):
            keys = rule.describe(sequence)[:n_states]
            keys = torch.where(keys < n_states, keys, -1)
            # columns without any key are left out; a head without columns passes on nothing
            viewed.append(ViewedMechanism(name, keys[:, (keys >= 0).any(dim=0)]))
        layers.append(viewed)
    return layers


@dataclass(frozen=True, eq=False)
class ViewedReasons:
    """Why heads prefer their first key to their second, in one input; for each layer a tensor.

    Attributes:
        keys: int [head, pos, 2], the first and the second key; -1 where there are not two.
        margins: float [head, pos], the first key's score minus the second's.
        parts: int [head, pos, part], the parts of the keys that matter most, as places in
            `part_names`; -1 for none.
        values: float [head, pos, part], what these add to the margin.
        rest: float [head, pos], what all other parts add.
        part_names: such as "head 0.3" or "token embedding".
    """

    keys: Sequence[Int[Tensor, "_head pos 2"]]
    margins: Sequence[Float[Tensor, "_head pos"]]
    parts: Sequence[Int[Tensor, "_head pos part"]]
    values: Sequence[Float[Tensor, "_head pos part"]]
    rest: Sequence[Float[Tensor, "_head pos"]]
    part_names: Sequence[str]


# of each position the most probable next tokens, with their probabilities
NextTokens: TypeAlias = tuple[tuple[tuple[str, float], ...], ...]


@dataclass(frozen=True)
class Replaced:
    """The next tokens that a model predicts when one token of a text is replaced, one by one.

    Attributes:
        by: for each token what was put in its place: the most probable other token, as the model
            reads the text before it; for the first, the token that is likeliest after it.
        next_tokens: for each replaced token and each position from that one on, the most probable
            next tokens, as pairs of token and probability; earlier positions do not change.
    """

    by: tuple[str, ...]
    next_tokens: tuple[NextTokens, ...]


@dataclass(frozen=True, eq=False)
class ViewedInput:
    """One input, its attention and its measured influence. Layers count from 0.

    Attributes:
        tokens: readable strings, one for each source position.
        n_queries: positions of states; more than tokens where there is a CLS.
        ranked: for each layer int [head, pos, k], key positions by falling score, -1 where there
            are fewer.
        weights: for each layer float [head, pos, k], the attention weights of these keys; None if
            they were not read.
        scores: for each layer float [head, pos, k], their attention scores; None if not read.
        patterns: for each layer float [head, pos, key]; given for few inputs only, as they are
            large.
        mechanisms: for each layer one for each head; None if they were not measured.
        influence: float [layer, pos, source], NaN where it was not measured; None if it was not
            measured at all.
        edges: for each layer float [pos, key], the measured influence of the state below on the
            state above; None if not measured.
        marked: sources with a mark of their own, such as the active index set of a target.
        left_out: sources that are no candidates: they stand in no count, share or chance.
        possible: int [layer, pos], how many candidates each state could hold by the model's mask;
            None for all, or all before it where the input is causal.
        reasons: why heads prefer their first keys; None if not known.
        next_tokens: for each position the most probable next tokens, as pairs of token and
            probability; None if not known.
        replaced: the same with each token replaced in turn; None if not known.
        causal: whether queries read no later keys, as the page says where it shows none.
        name: of the input, where its number says too little.

    Raises:
        InfoFlowError: if shapes do not fit.
    """

    tokens: Sequence[str]
    n_queries: int
    ranked: Sequence[Int[Tensor, "_head pos k"]]
    weights: Sequence[Float[Tensor, "_head pos k"]] | None = None
    scores: Sequence[Float[Tensor, "_head pos k"]] | None = None
    patterns: Sequence[Float[Tensor, "_head pos key"]] | None = None
    mechanisms: Sequence[Sequence[ViewedMechanism]] | None = None
    influence: Float[Tensor, "layer pos source"] | None = None
    edges: Sequence[Float[Tensor, "pos key"]] | None = None
    marked: Sequence[int] = ()
    left_out: Sequence[int] = ()
    possible: Int[Tensor, "layer pos"] | None = None
    reasons: ViewedReasons | None = None
    next_tokens: Sequence[Sequence[tuple[str, float]]] | None = None
    replaced: Replaced | None = None
    causal: bool = True
    name: str = ""

    def __post_init__(self) -> None:
        # refused here, where the sizes are known, as the page's script would fail in silence
        n_layers, n_source, n_pos = len(self.ranked), len(self.tokens), self.n_queries
        if not n_layers or not 1 <= n_source <= n_pos:
            raise InfoFlowError(
                f"the input has {n_layers} layers, {n_source} tokens and {n_pos} states: expected "
                "at least one layer and one token, and a state for every token"
            )
        for layer, keys in enumerate(self.ranked):
            if keys.ndim != 3 or keys.shape[1] != n_pos or keys.is_floating_point():
                raise InfoFlowError(
                    f"ranked keys of layer {layer} are {keys.dtype} of shape {tuple(keys.shape)}: "
                    f"expected integers [head, {n_pos}, k]"
                )
            if keys.numel() and not -1 <= int(keys.min()) <= int(keys.max()) < n_pos:
                raise InfoFlowError(
                    f"ranked keys of layer {layer} lie in [{int(keys.min())}, {int(keys.max())}]: "
                    f"expected 0 to {n_pos - 1}, or -1 for none"
                )
        shapes = [tuple(keys.shape) for keys in self.ranked]
        n_heads = [count for count, _, _ in shapes]
        by_query = [(count, n_pos) for count in n_heads]
        # for each, the shapes that are expected of its tensors, where keys may be of any number
        for what, found, expected in (
            ("weights", self.weights, shapes),
            ("scores", self.scores, shapes),
            ("patterns", self.patterns, [(*shape, "key") for shape in by_query]),
            ("edges", self.edges, [(n_pos, "key")] * n_layers),
            ("margins of reasons", self.reasons and self.reasons.margins, by_query),
            ("influence", None if self.influence is None else [self.influence],
             [(n_layers, n_pos, n_source)]),
        ):  # fmt: skip
            given: list[tuple[Any, ...]] = [tuple(each.shape) for each in found or ()]
            compared = [(*shape[:-1], "key") for shape in given] if "key" in expected[0] else given
            if found is not None and compared != expected:
                raise InfoFlowError(f"shapes of {what} are {given}: expected {expected}")
        if self.mechanisms is not None and [len(m) for m in self.mechanisms] != n_heads:
            raise InfoFlowError(
                f"mechanisms are given for {[len(m) for m in self.mechanisms]} heads: expected "
                f"{n_heads}, one for each head of each layer"
            )
        if self.next_tokens is not None and len(self.next_tokens) != n_pos:
            raise InfoFlowError(
                f"next tokens are given for {len(self.next_tokens)} positions: expected {n_pos}"
            )
        if self.replaced is not None:
            ends = [start + len(after) for start, after in enumerate(self.replaced.next_tokens)]
            if len(self.replaced.by) != n_source or ends != [n_pos] * n_source:
                raise InfoFlowError(
                    f"{len(self.replaced.by)} tokens are replaced, with next tokens up to {ends}: "
                    f"expected {n_source}, each with those of all positions from its own on"
                )
        for what, sources in (("marked", self.marked), ("left out", self.left_out)):
            if not all(0 <= source < n_source for source in sources):
                raise InfoFlowError(
                    f"{what} sources are {list(sources)}: expected 0 to {n_source - 1}"
                )

    def describe(self, rule: str) -> Move | list[list[Move]]:
        """Say how a rule moves sets: one move for all heads, or one for each head of each layer.

        Args:
            rule: "max_position", "top_k" or "mechanisms".

        Raises:
            InfoFlowError: for other rules, and for mechanisms that were not measured.
        """
        if rule not in RULES or (rule == "mechanisms" and self.mechanisms is None):
            raise InfoFlowError(
                f"there is no rule {rule!r} for this input: expected {', '.join(RULES)}, "
                "mechanisms only where they were measured"
            )
        if rule != "mechanisms":
            return Move(most=1 if rule == "max_position" else None)
        return [[Move(keys=head.keys) for head in layer] for layer in self.mechanisms or ()]

    def layers_of(self, rule: str, k: int = 1) -> list[list[Rule]]:
        """Return what `propagate` takes, for the same sets as the picture's.

        Args:
            rule: "max_position", "top_k" or "mechanisms".
            k: of "top_k".

        Raises:
            InfoFlowError: as :meth:`describe`.
        """
        moves = self.describe(rule)
        if isinstance(moves, Move):
            return [[moves.rule(ranked, k)] for ranked in self.ranked]
        none = MaxPosition(torch.full((1, 1, self.n_queries), -1))
        return [
            [none, *(move.rule(ranked[head, None], k) for head, move in enumerate(layer))]
            for ranked, layer in zip(self.ranked, moves, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class FlowView:
    """All that the interactive picture shows: inputs, rules, notes and the record.

    Attributes:
        title: of the picture, in a few words.
        inputs: at least one.
        rules: the rules to choose from, the first of which is shown at first: a name of `RULES`
            and what the page calls it, in words.
        record: of the run, as JSON-compatible values; shown as it is.
        notes: what a reader must know, a sentence each.
        influence_name: how influence was measured, in words.
        unmeasured: what to do where influence on a chosen state was not measured, in words.
        marked_name: what the marked sources are.
        selected: layer and position of the state that is shown at first; None for the last one.
        k: of "top_k", at first.
        first: the input that is shown at first.
        groups: of inputs, as (name, number of inputs), in their order: a model before and after
            training. The page then has a switch.
        aligned: positions of the first of two inputs with those of the second that stand for them.
            The page then shows both side by side, each under the name of its group.

    Raises:
        InfoFlowError: without inputs, or for rules that the page does not know.
    """

    title: str
    inputs: Sequence[ViewedInput]
    rules: Mapping[str, str] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    influence_name: str = "norm of the Jacobian"
    unmeasured: str = ""
    marked_name: str = ""
    selected: tuple[int, int] | None = None
    groups: Sequence[tuple[str, int]] = ()
    k: int = 2
    first: int = 0
    aligned: Sequence[tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        if not self.inputs:
            raise InfoFlowError("there is no input to show: expected at least one")
        rules = dict(self.rules) or self._possible_rules()
        unknown = [name for name in rules if name not in RULES]
        if unknown:
            raise InfoFlowError(
                f"rules are {', '.join(rules)}: expected some of {', '.join(RULES)}"
            )
        object.__setattr__(self, "rules", rules)
        if self.groups and sum(n for _, n in self.groups) != len(self.inputs):
            raise InfoFlowError(
                f"groups hold {sum(n for _, n in self.groups)} inputs: expected {len(self.inputs)}"
            )
        if self.aligned is not None:
            self._check_pairs(self.aligned)

    def _check_pairs(self, pairs: Sequence[tuple[int, int]]) -> None:
        if len(self.inputs) != 2 or [n for _, n in self.groups] != [1, 1]:
            raise InfoFlowError(
                f"positions are aligned between {len(self.inputs)} inputs in {len(self.groups)} "
                "groups: expected two inputs, each in a group of its own"
            )
        for one, other in pairs:
            for place, viewed in ((one, self.inputs[0]), (other, self.inputs[1])):
                if not 0 <= place < viewed.n_queries:
                    raise InfoFlowError(
                        f"positions {one} and {other} are aligned: expected 0 to "
                        f"{viewed.n_queries - 1}"
                    )

    def _possible_rules(self) -> dict[str, str]:
        possible = {"max_position": True}
        possible["top_k"] = any(layer.shape[2] > 1 for i in self.inputs for layer in i.ranked)
        possible["mechanisms"] = any(i.mechanisms is not None for i in self.inputs)
        return {name: words for name, words in RULES.items() if possible[name]}
