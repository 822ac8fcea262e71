"""Which mechanism does a head need? Its pattern replaced by an idealised one, and what that costs.

InfoFlow's three mechanisms (Yu, Jiang, Bao, Li 2026, Sec. 4) are idealised patterns. If the model's
output stays as it is when a head's pattern is replaced by one of them, that mechanism is all that
the head needs on these inputs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from infoflow_lens.hooks.capabilities import (
    check_finite,
    check_inputs,
    hook_name,
    layer_count,
    pattern_hook,
    reads_vectors,
    run_catching,
    scores_hook,
    starts_at_layers,
    unmasked,
)
from infoflow_lens.hooks.own import own_pass
from infoflow_lens.hooks.result import Result
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import eval_mode
from infoflow_lens.foundation.progress import progress_bar
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.theory.information_sets import MaxPosition, Rule, SpecificPositions

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

Ideal = Literal["own_position", "global", "specific_position", "max_position", "top_k"]
Metric = Literal["nmse", "kl", "loss"]

# From what needs nothing of the input to what needs most of it [chosen]: a head that may look
# anywhere evenly, or by position, does not compare tokens; a hard maximum does.
IDEALS: tuple[Ideal, ...] = (
    "own_position",
    "global",
    "specific_position",
    "max_position",
    "top_k",
)
METRICS: tuple[Metric, ...] = ("nmse", "kl", "loss")
SOFT = "soft"  # the mechanism of a head that no ideal replaces

Heads = Mapping[tuple[int, int], Ideal]


def ideal_pattern(
    pattern: Float[Tensor, "batch query key"],
    allowed: Bool[Tensor, "batch query key"],
    ideal: Ideal,
    mean: Float[Tensor, "query key"] | None = None,
    k: int = 4,
) -> Float[Tensor, "batch query key"]:
    """A head's pattern, idealised; every row keeps its sum (1 for a softmax without sinks).

    Args:
        pattern: of one head.
        allowed: the keys that each query may attend to.
        ideal: "own_position", all weight on the query's own position, or none where it is no key;
            "global", evenly on all allowed keys; "specific_position", the mean pattern over inputs;
            "max_position", all on the largest, the lowest of equals; "top_k", the k largest as they
            are, rescaled.
        mean: the mean pattern, for "specific_position".
        k: for "top_k".
    """
    total = pattern.sum(dim=-1, keepdim=True)
    if ideal == "own_position":
        own = torch.eye(*pattern.shape[-2:], dtype=pattern.dtype, device=pattern.device)
        return own * allowed * total
    if ideal == "global":
        return allowed / allowed.sum(dim=-1, keepdim=True).clamp(min=1) * total
    if ideal == "specific_position":
        assert mean is not None
        return mean.to(pattern).expand_as(pattern) * allowed
    if ideal == "max_position":
        largest = pattern.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(pattern).scatter_(-1, largest, total)
    kept = pattern.topk(min(k, pattern.shape[-1]), dim=-1)
    shares = kept.values / kept.values.sum(dim=-1, keepdim=True).clamp(min=1e-30)
    return torch.zeros_like(pattern).scatter_(-1, kept.indices, shares * total)


@contextmanager
def substituted(
    model: nn.Module,
    heads: Heads,
    mean_patterns: Sequence[Float[Tensor, "_head query key"]] | None = None,
    k: int = 4,
) -> Iterator[None]:
    """The model with the patterns of some heads replaced by idealised ones, while the block lasts.

    Args:
        model: a TransformerLens model whose pattern, when edited, reaches the output.
        heads: (layer, head) and what takes the place of its pattern; see :func:`ideal_pattern`.
        mean_patterns: for every layer the mean patterns, as `MechanismsResult.mean_patterns` has
            them; needed for "specific_position".
        k: for "top_k".

    Raises:
        InfoFlowError: for unknown layers, heads or ideals, or missing mean patterns.
    """
    counts = _head_counts(model)
    by_layer: dict[int, dict[int, Ideal]] = {}
    for (layer, head), ideal in heads.items():
        if not (0 <= layer < len(counts) and 0 <= head < counts[layer]):
            raise InfoFlowError(
                f"there is no head {head} in layer {layer}: expected layers 0 to "
                f"{len(counts) - 1} with {', '.join(map(str, counts))} heads"
            )
        if ideal not in IDEALS:
            raise InfoFlowError(f"ideal is {ideal!r}: expected one of {', '.join(IDEALS)}")
        if ideal == "specific_position" and mean_patterns is None:
            raise InfoFlowError(
                "'specific_position' needs the mean patterns: give mean_patterns, as "
                "measure_mechanisms(...).mean_patterns"
            )
        by_layer.setdefault(layer, {})[head] = ideal
    masks: dict[int, Tensor] = {}
    hooks: list[tuple[str, Callable[..., Any]]] = []

    def remember(layer: int) -> Callable[..., None]:
        def hook_fn(scores: Tensor, hook: Any) -> None:
            masks[layer] = unmasked(scores)

        return hook_fn

    def replace(layer: int) -> Callable[..., Tensor]:
        def hook_fn(pattern: Tensor, hook: Any) -> Tensor:
            replaced = pattern.clone()
            for head, ideal in by_layer[layer].items():
                mean = None if mean_patterns is None else mean_patterns[layer][head]
                replaced[:, head] = ideal_pattern(
                    pattern[:, head], masks[layer][:, head], ideal, mean, k
                )
            return replaced

        return hook_fn

    for layer in by_layer:
        hooks.append((scores_hook(model, layer), remember(layer)))
        hooks.append((pattern_hook(model, layer), replace(layer)))
    with model.hooks(fwd_hooks=hooks):  # type: ignore[operator]
        yield


@dataclass(frozen=True, eq=False, kw_only=True)
class MechanismsResult(Result):
    """What the output loses when a head's pattern is idealised.

    Attributes:
        ideals: the idealisations, cheapest first, in the order of the last axis.
        metric: "nmse", the squared change of the output over the variance of the output; "kl", the
            divergence of the new next-token distribution from the old one, in nats; "loss", the
            rise of the next-token loss, in nats.
        threshold: the damage up to which an idealisation counts as enough.
        k: of "top_k".
        damage: for every layer float [head, ideal].
        mean_patterns: for every layer the mean pattern of each head, float [head, query, key].
    """

    ideals: tuple[str, ...]
    metric: str
    threshold: float
    k: int
    damage: tuple[Float[Tensor, "_head ideal"], ...]
    mean_patterns: tuple[Float[Tensor, "_head query key"], ...]

    def mechanisms(self, threshold: float | None = None) -> tuple[tuple[str, ...], ...]:
        """The mechanism of every head: the cheapest ideal within the threshold, else "soft".

        The order of cost is that of `ideals` [chosen]: what does not look at the tokens comes
        before what compares them. A head that does not matter needs its own position alone.
        """
        most = self.threshold if threshold is None else threshold
        return tuple(
            tuple(
                next((n for n, d in zip(self.ideals, row.tolist(), strict=True) if d <= most), SOFT)
                for row in layer
            )
            for layer in self.damage
        )

    def rules(
        self,
        attended: Sequence[Int[Tensor, "batch _head query key"]],
        chosen: Sequence[Int[Tensor, "batch _head query"]],
        threshold: float | None = None,
        share: float = 0.05,
    ) -> list[list[Rule]]:
        """Update rules for `propagate`, each head by its own mechanism (Sec. 5.1).

        Args:
            attended: all keys that heads draw from, `AttendedResult.positions`: for heads that stay
                soft, or need several keys.
            chosen: the argmax positions, `PositionsResult.argmax`: for max-position heads.
            threshold: as for :meth:`mechanisms`.
            share: the least share of a row's largest mean weight that is a fixed position.
        """
        layers: list[list[Rule]] = []
        for layer, names in enumerate(self.mechanisms(threshold)):
            rules: list[Rule] = [MaxPosition(torch.full_like(chosen[layer][:, :1], -1))]
            for head, name in enumerate(names):
                mean = self.mean_patterns[layer][head]
                if name == "max_position":
                    rules.append(MaxPosition(chosen[layer][:, head : head + 1]))
                elif name == "specific_position":
                    least = share * mean.amax(dim=-1, keepdim=True)
                    rules.append(SpecificPositions((mean >= least) & (mean > 0)))
                elif name == "global":
                    rules.append(SpecificPositions(mean > 0))  # every key that is allowed
                elif name != "own_position":
                    rules.append(MaxPosition(attended[layer][:, head : head + 1]))
            layers.append(rules)
        return layers

    def to_frame(self) -> "pd.DataFrame":
        """One row for each layer and head: its mechanism, and the damage of every ideal."""
        import pandas as pd

        rows = []
        for layer, (names, damage) in enumerate(zip(self.mechanisms(), self.damage, strict=True)):
            for head, (name, row) in enumerate(zip(names, damage.tolist(), strict=True)):
                by_ideal = dict(zip(self.ideals, row, strict=True))
                rows.append({"layer": layer, "head": head, "mechanism": name, **by_ideal})
        return pd.DataFrame(rows)

    def plot(self) -> "go.Figure":
        """The damage of every head in every ideal, on a logarithmic scale."""
        import plotly.express as px

        damage = torch.cat(self.damage).clamp(min=1e-6).log10()
        labels = [f"{i}.{h}" for i, layer in enumerate(self.damage) for h in range(len(layer))]
        return px.imshow(
            damage.numpy(),
            x=list(self.ideals),
            y=labels,
            labels={"x": "idealised pattern", "y": "layer.head", "color": f"log10 {self.metric}"},
            title="What the output loses",
        )


def measure_mechanisms(
    model: nn.Module,
    inputs: Tensor,
    *,
    metric: Metric | None = None,
    read: Sequence[int] | None = None,
    threshold: float = 0.05,
    k: int = 4,
    batch_size: int = 64,
    progress: bool = True,
) -> MechanismsResult:
    """The mechanism that each head needs: its pattern replaced, one head and one ideal at a time.

    Two passes over the inputs: the mean patterns, then the replacements, each of which runs only
    the layers from its own on. The model is left as it was found.

    Args:
        model: a HookedTransformer, over vector tokens or token ids.
        inputs: vector tokens [n, pos, d_token] or token ids [n, pos], of one length.
        metric: "nmse", "kl" or "loss"; default "nmse" for vector outputs and "kl" for logits.
        read: the positions of the logits that count, such as (-1,); None for all. Vector models
            have one output.
        threshold: the damage up to which an ideal is enough.
        k: for "top_k".
        batch_size: sequences in a pass.
        progress: show a bar.

    Raises:
        InfoFlowError: for bad inputs or settings, or a model whose patterns cannot be replaced.
    """
    n_layers = layer_count(model)
    check_inputs(model, inputs, "inputs")
    measure = _metric_of(model, metric, read, inputs)
    if threshold < 0:
        raise InfoFlowError(f"threshold is {threshold}: expected a damage of at least 0")
    if k < 1 or batch_size < 1:
        raise InfoFlowError(f"k is {k} and batch_size {batch_size}: expected at least 1 each")
    counts = _head_counts(model)
    replacements = [
        (layer, head, ideal)
        for layer in range(n_layers)
        for head in range(counts[layer])
        for ideal in IDEALS
    ]
    device = next(model.parameters()).device
    sums = torch.zeros(len(replacements), dtype=torch.float64)
    total = len(inputs) * (1 + len(replacements))
    with eval_mode(model), own_pass(), progress_bar("substituting", total, progress) as advance:
        means = _mean_patterns(model, inputs, batch_size, device, advance)
        for batch in inputs.split(batch_size):
            batch = batch.to(device)
            output, entering = _reference(model, batch)
            measure.see(output)
            for index, (layer, head, ideal) in enumerate(replacements):
                with substituted(model, {(layer, head): ideal}, means, k):
                    changed = model(entering[layer], start_at_layer=layer)
                sums[index] += measure.damage(output, changed, batch)
                advance(len(batch))
    damage = (sums / measure.scale()).float().split([len(IDEALS) * count for count in counts])
    settings = {
        "metric": measure.name,
        "read": None if read is None else list(read),
        "threshold": threshold,
        "k": k,
        "n_sequences": len(inputs),
    }
    return MechanismsResult(
        ideals=IDEALS,
        metric=measure.name,
        threshold=threshold,
        k=k,
        damage=tuple(part.view(-1, len(IDEALS)) for part in damage),
        mean_patterns=tuple(mean.float().cpu() for mean in means),
        record=RunRecord.of_model(model, {"probe": "mechanisms", **settings}),
    )


@dataclass(frozen=True)
class JointReplacement:
    """Heads that are replaced at once.

    Attributes:
        heads: (layer, head) and its ideal, in the order in which they were taken.
        damage: what the output loses with all of them replaced.
        share: their share of all heads.
    """

    heads: dict[tuple[int, int], Ideal]
    damage: float
    share: float


def replace_greedily(
    model: nn.Module,
    inputs: Tensor,
    mechanisms: MechanismsResult,
    *,
    budget: float,
    read: Sequence[int] | None = None,
    batch_size: int = 64,
    progress: bool = True,
) -> JointReplacement:
    """As many heads as can be replaced at once by their mechanisms within a budget, greedily.

    Heads come in the order of their own damage; each is taken if all taken ones together stay
    within the budget. Heads without a mechanism stay as they are.

    Args:
        model: the model that was measured.
        inputs: sequences of the same length.
        mechanisms: of these heads.
        budget: the largest joint damage, in the units of ``mechanisms.metric``.
        read: as for :func:`measure_mechanisms`.
        batch_size: sequences in a pass.
        progress: show a bar.

    Raises:
        InfoFlowError: for a negative budget or bad inputs.
    """
    if budget < 0:
        raise InfoFlowError(f"budget is {budget}: expected a damage of at least 0")
    check_inputs(model, inputs, "inputs")
    candidates = sorted(
        (float(mechanisms.damage[layer][head][IDEALS.index(name)]), layer, head, name)
        for layer, names in enumerate(mechanisms.mechanisms())
        for head, name in enumerate(names)
        if name in IDEALS
    )
    device = next(model.parameters()).device
    taken: dict[tuple[int, int], Ideal] = {}
    reached = 0.0
    with eval_mode(model), own_pass(), progress_bar("joining", len(candidates), progress) as step:
        for _, layer, head, name in candidates:
            trial: dict[tuple[int, int], Ideal] = {**taken, (layer, head): name}
            measure = _metric_of(model, mechanisms.metric, read, inputs)  # type: ignore[arg-type]
            lost = 0.0
            for batch in inputs.split(batch_size):
                batch = batch.to(device)
                output = model(batch)
                measure.see(output)
                with substituted(model, trial, mechanisms.mean_patterns, mechanisms.k):
                    lost += measure.damage(output, model(batch), batch)
            damage = lost / measure.scale()
            if damage <= budget:
                taken, reached = trial, damage
            step()
    n_heads = sum(len(layer) for layer in mechanisms.damage)
    return JointReplacement(taken, reached, len(taken) / n_heads)


# Measuring damage


class _Damage:
    """Sums of what the output loses, over batches."""

    def __init__(self, name: Metric, read: Sequence[int] | None) -> None:
        self.name = name
        self.read = None if read is None else list(read)
        self._n = 0.0
        self._sum: Tensor | float = 0.0
        self._squares = 0.0

    def _rows(self, output: Tensor) -> Float[Tensor, "row feature"]:
        if output.ndim == 3 and self.read is not None:
            output = output[:, self.read]
        return output.detach().double().flatten(0, -2)

    def see(self, output: Tensor) -> None:
        """Take in the unchanged output of a batch."""
        rows = self._rows(output)
        # the last position of a sequence predicts nothing
        self._n += len(rows) - (len(output) if self.name == "loss" else 0)
        self._sum = self._sum + rows.sum(dim=0)
        self._squares += float(rows.square().sum())

    def damage(self, output: Tensor, changed: Tensor, batch: Tensor) -> float:
        """The sum over rows of what a batch lost."""
        if self.name == "loss":
            return float((_losses(changed, batch) - _losses(output, batch)).sum())
        before, after = self._rows(output), self._rows(changed)
        if self.name == "nmse":
            return float((after - before).square().sum())
        log_before, log_after = before.log_softmax(dim=-1), after.log_softmax(dim=-1)
        divergence = (log_before.exp() * (log_before - log_after)).sum(dim=-1)
        return float(divergence.clamp(min=0).sum())  # rounding may give less than 0

    def scale(self) -> float:
        """What the sums are divided by."""
        if self.name in ("kl", "loss"):
            return self._n
        variance = self._squares - float(torch.as_tensor(self._sum).square().sum()) / self._n
        if variance <= 1e-12 * max(self._squares, 1e-300):
            raise InfoFlowError(
                "the output is the same for all inputs, so no share of its variance can be lost: "
                "expected inputs with different outputs; give more of them"
            )
        return variance


def _losses(logits: Tensor, tokens: Tensor) -> Float[Tensor, "batch pos"]:
    """Next-token losses; a position that predicts nothing counts 0."""
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].double().transpose(1, 2), tokens[:, 1:], reduction="none"
    )
    return torch.nn.functional.pad(losses, (0, 1))


def _metric_of(
    model: nn.Module, metric: Metric | None, read: Sequence[int] | None, inputs: Tensor
) -> _Damage:
    chosen = metric or ("nmse" if reads_vectors(model) else "kl")
    if chosen not in METRICS:
        raise InfoFlowError(f"metric is {metric!r}: expected one of {', '.join(METRICS)}")
    if chosen != "nmse" and reads_vectors(model):
        raise InfoFlowError(
            f"metric is {chosen!r}, which compares distributions over tokens: the model's output "
            "is a vector; expected 'nmse'"
        )
    if chosen == "loss" and (read is not None or inputs.shape[1] < 2):
        raise InfoFlowError(
            "metric 'loss' is over all next tokens: expected sequences of at least 2 tokens, and "
            "no positions to read; use 'kl' for single positions"
        )
    n_pos = inputs.shape[1]
    for position in read or ():
        if not -n_pos <= position < n_pos:
            raise InfoFlowError(f"read has position {position}: expected {-n_pos} to {n_pos - 1}")
    if not starts_at_layers(model):
        raise InfoFlowError(
            f"{type(model).__name__} cannot start at a layer: expected a HookedTransformer; "
            "patterns of this model cannot be replaced here"
        )
    return _Damage(chosen, read)


def _head_counts(model: nn.Module) -> list[int]:
    """Heads of each layer, from the weights."""
    return [int(block.attn.W_Q.shape[0]) for block in model.blocks]  # type: ignore[union-attr]


def _reference(model: nn.Module, batch: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The output, and what enters every layer."""
    names = [hook_name(model, f"blocks.{i}.hook_resid_pre") for i in range(layer_count(model))]
    output, caught = run_catching(model, batch, names)
    check_finite(output, "the output", 0)
    return output, [caught[name] for name in names]


def _mean_patterns(
    model: nn.Module,
    inputs: Tensor,
    batch_size: int,
    device: torch.device,
    advance: Callable[[int], None],
) -> list[Float[Tensor, "_head query key"]]:
    names = [pattern_hook(model, layer) for layer in range(layer_count(model))]
    sums: dict[str, Tensor | float] = dict.fromkeys(names, 0.0)
    for batch in inputs.split(batch_size):
        for name, pattern in run_catching(model, batch.to(device), names)[1].items():
            sums[name] = sums[name] + pattern.double().sum(dim=0)
        advance(len(batch))
    return [torch.as_tensor(sums[name]) / len(inputs) for name in names]
