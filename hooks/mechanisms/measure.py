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
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import eval_mode
from infoflow_lens.foundation.progress import progress_bar
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.hooks.model.inputs import Batch, Batches, Inputs, read_inputs
from infoflow_lens.hooks.model.points import (
    check_finite,
    hook_name,
    is_bridge,
    layer_count,
    pattern_hook,
    reads_vectors,
    run_catching,
    scores_hook,
    starts_at_layers,
    unmasked,
)
from infoflow_lens.hooks.passes.own import own_pass
from infoflow_lens.hooks.result import Result
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
_ROWS = 1024  # of logits in double precision at a time
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
        n_query, n_key = pattern.shape[-2:]
        return mean[:n_query, :n_key].to(pattern).expand_as(pattern) * allowed
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

        Raises:
            InfoFlowError: if they were measured on shorter ones, whose fixed positions say nothing
                of the rest.
        """
        layers: list[list[Rule]] = []
        n_pos = chosen[0].shape[2]
        longest = self.mean_patterns[0].shape[1]
        if n_pos > longest:
            raise InfoFlowError(
                f"mechanisms were measured on at most {longest} positions, these sequences have "
                f"{n_pos}: expected sequences at least as long; measure mechanisms on them too"
            )
        # a real query attends to something; beyond a sequence's end there is nothing to pass on
        real = (attended[0] >= 0).any(dim=3).any(dim=1)
        for layer, names in enumerate(self.mechanisms(threshold)):
            rules: list[Rule] = [MaxPosition(torch.full_like(chosen[layer][:, :1], -1))]
            for head, name in enumerate(names):
                mean = self.mean_patterns[layer][head][:n_pos, :n_pos]
                if name == "max_position":
                    rules.append(MaxPosition(chosen[layer][:, head : head + 1]))
                elif name == "specific_position":
                    least = share * mean.amax(dim=-1, keepdim=True)
                    rules.append(_by_position((mean >= least) & (mean > 0), real))
                elif name == "global":
                    rules.append(_by_position(mean > 0, real))  # every key that is allowed
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


@dataclass
class MechanismsProgress:
    """How far :func:`measure_mechanisms` has come, to go on from there.

    Attributes:
        n_done: sequences whose replacements are measured.
        mean_patterns: for every layer the mean patterns over all inputs.
        sums: the damage of every (layer, head, ideal) over these sequences, not yet scaled.
        seen: what the scale of the damage is made of.
    """

    n_done: int
    mean_patterns: list[Float[Tensor, "_head query key"]]
    sums: Float[Tensor, " replacement"]
    seen: dict[str, Any]


def check_damage(threshold: float) -> None:
    """Refuse thresholds that are no damage.

    Raises:
        InfoFlowError: unless it is at least 0.
    """
    if not threshold >= 0:  # also NaN
        raise InfoFlowError(f"threshold is {threshold}: expected a damage of at least 0")


def _by_position(reads: Bool[Tensor, "pos key"], real: Bool[Tensor, "batch pos"]) -> Rule:
    """Fixed keys, of those that each sequence has."""
    if real.all():
        return SpecificPositions(reads)
    keys = torch.arange(reads.shape[1])
    return MaxPosition(torch.where(reads & real[:, None, None, : len(keys)], keys, -1))


def measure_mechanisms(
    model: nn.Module,
    inputs: Inputs,
    *,
    metric: Metric | None = None,
    read: Sequence[int] | None = None,
    threshold: float = 0.05,
    k: int = 4,
    attention_mask: Tensor | None = None,
    column: str | None = None,
    max_length: int | None = None,
    batch_size: int = 64,
    resume: MechanismsProgress | None = None,
    after_batch: Callable[[MechanismsProgress], None] | None = None,
    progress: bool = True,
) -> MechanismsResult:
    """The mechanism that each head needs: its pattern replaced, one head and one ideal at a time.

    Two passes over the inputs: the mean patterns, then the replacements. Where a pass can start at
    a layer (HookedTransformer) each replacement runs only the layers from its own on. The model is
    left as it was found.

    Args:
        model: any TransformerLens model in which an edited pattern reaches the output.
        inputs: sequences, in any of the forms that `run_probes` reads.
        metric: "nmse", "kl" or "loss"; default "nmse" for vector outputs and "kl" for logits.
        read: the positions of the logits that count, such as (-1,), the last of each sequence; None
            for all. Vector models have one output.
        threshold: the damage up to which an ideal is enough.
        k: for "top_k".
        attention_mask, column, max_length: as for `run_probes`.
        batch_size: sequences in a pass.
        resume: from an earlier run on the same inputs with the same settings.
        after_batch: called with the progress after every batch.
        progress: show a bar.

    Raises:
        InfoFlowError: for bad inputs or settings, or a model whose patterns cannot be replaced.
    """
    n_layers = layer_count(model)
    batches = _read(model, inputs, attention_mask, column, max_length)
    measure = _metric_of(model, metric, read, batches)
    check_damage(threshold)
    if k < 1 or batch_size < 1:
        raise InfoFlowError(f"k is {k} and batch_size {batch_size}: expected at least 1 each")
    counts = _head_counts(model)
    replacements = [
        (layer, head, ideal)
        for layer in range(n_layers)
        for head in range(counts[layer])
        for ideal in IDEALS
    ]
    n = batches.n_sequences or 0
    total = n * (1 + len(replacements))
    done = resume.n_done * len(replacements) + n if resume else 0
    with eval_mode(model), own_pass(), progress_bar("substituting", total, progress, done) as step:
        _check_edits_reach(model, next(batches.batches(1)))
        if resume is None:
            means = _mean_patterns(model, batches, batch_size, step)
            sums = torch.zeros(len(replacements), dtype=torch.float64)
            at = MechanismsProgress(0, means, sums, measure.state())
        else:
            at = resume
            measure.load_state(at.seen)
        for batch in batches.batches(batch_size, skip=at.n_done):
            output, entering = _reference(model, batch)
            measure.see(output, batch)
            sums = at.sums.clone()
            for index, (layer, head, ideal) in enumerate(replacements):
                with substituted(model, {(layer, head): ideal}, at.mean_patterns, k):
                    changed = _run_from(model, batch, entering, layer)
                sums[index] += measure.damage(output, changed, batch)
                step(len(batch))
            at = MechanismsProgress(at.n_done + len(batch), at.mean_patterns, sums, measure.state())
            if after_batch is not None:
                after_batch(at)
    damage = (at.sums / measure.scale()).float().split([len(IDEALS) * count for count in counts])
    settings = {
        "metric": measure.name,
        "read": None if read is None else list(read),
        "threshold": threshold,
        "k": k,
        "n_sequences": n,
    }
    return MechanismsResult(
        ideals=IDEALS,
        metric=measure.name,
        threshold=threshold,
        k=k,
        damage=tuple(part.view(-1, len(IDEALS)) for part in damage),
        mean_patterns=tuple(mean.float().cpu() for mean in at.mean_patterns),
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
    inputs: Inputs,
    mechanisms: MechanismsResult,
    *,
    budget: float,
    read: Sequence[int] | None = None,
    attention_mask: Tensor | None = None,
    column: str | None = None,
    max_length: int | None = None,
    batch_size: int = 64,
    progress: bool = True,
) -> JointReplacement:
    """As many heads as can be replaced at once by their mechanisms within a budget, greedily.

    Heads come in the order of their own damage; each is taken if all taken ones together stay
    within the budget. Heads without a mechanism stay as they are.

    Args:
        model: the model that was measured.
        inputs: sequences, as for :func:`measure_mechanisms`.
        mechanisms: of these heads.
        budget: the largest joint damage, in the units of ``mechanisms.metric``.
        read, attention_mask, column, max_length: as for :func:`measure_mechanisms`.
        batch_size: sequences in a pass.
        progress: show a bar.

    Raises:
        InfoFlowError: for a negative budget or bad inputs.
    """
    if budget < 0:
        raise InfoFlowError(f"budget is {budget}: expected a damage of at least 0")
    batches = _read(model, inputs, attention_mask, column, max_length)
    candidates = sorted(
        (float(mechanisms.damage[layer][head][IDEALS.index(name)]), layer, head, name)
        for layer, names in enumerate(mechanisms.mechanisms())
        for head, name in enumerate(names)
        if name in IDEALS
    )
    taken: dict[tuple[int, int], Ideal] = {}
    reached = 0.0
    with eval_mode(model), own_pass(), progress_bar("joining", len(candidates), progress) as step:
        for _, layer, head, name in candidates:
            trial: dict[tuple[int, int], Ideal] = {**taken, (layer, head): name}
            measure = _metric_of(model, mechanisms.metric, read, batches)  # type: ignore[arg-type]
            lost = 0.0
            for batch in batches.batches(batch_size):
                output = batch.run(model)
                measure.see(output, batch)
                with substituted(model, trial, mechanisms.mean_patterns, mechanisms.k):
                    lost += measure.damage(output, batch.run(model), batch)
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

    def state(self) -> dict[str, Any]:
        """What was seen so far."""
        return {"_n": self._n, "_sum": self._sum, "_squares": self._squares}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what another had seen."""
        self.__dict__.update(state)

    def _rows(self, output: Tensor, batch: Batch) -> Float[Tensor, "row feature"]:
        """The output where it counts: at the read positions, or at all real tokens."""
        output = output.detach()
        if output.ndim == 2:
            return output
        if self.read is None:
            return output[batch.mask().to(output.device)]
        lengths = batch.mask().sum(dim=1)
        read = torch.tensor(self.read)
        places = torch.where(read < 0, lengths[:, None] + read, read).to(output.device)
        rows = torch.arange(len(output), device=output.device)[:, None]
        return output[rows, places].flatten(0, 1)

    def see(self, output: Tensor, batch: Batch) -> None:
        """Take in the unchanged output of a batch."""
        if self.name == "loss":
            # the last position of a sequence predicts nothing
            self._n += int(batch.mask().sum()) - len(batch)
            return
        rows = self._rows(output, batch)
        self._n += len(rows)
        if self.name == "nmse":
            rows = rows.double()
            self._sum = self._sum + rows.sum(dim=0)
            self._squares += float(rows.square().sum())

    def damage(self, output: Tensor, changed: Tensor, batch: Batch) -> float:
        """The sum over rows of what a batch lost."""
        if self.name == "loss":
            return float((_losses(changed, batch) - _losses(output, batch)).sum())
        total = 0.0
        # a few rows at a time: logits in double precision would not fit beside the model
        for before, after in zip(
            self._rows(output, batch).split(_ROWS),
            self._rows(changed, batch).split(_ROWS),
            strict=True,
        ):
            before, after = before.double(), after.double()
            if self.name == "nmse":
                total += float((after - before).square().sum())
                continue
            log_before, log_after = before.log_softmax(dim=-1), after.log_softmax(dim=-1)
            divergence = (log_before.exp() * (log_before - log_after)).sum(dim=-1)
            total += float(divergence.clamp(min=0).sum())  # rounding may give less than 0
        return total

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


def _losses(logits: Tensor, batch: Batch) -> Float[Tensor, " row"]:
    """Next-token losses at all real tokens but the last of each sequence."""
    tokens = batch.tokens.to(logits.device)
    predicts = batch.mask()[:, 1:].to(logits.device)
    losses = [
        torch.nn.functional.cross_entropy(some.double(), wanted, reduction="none")
        for some, wanted in zip(
            logits[:, :-1][predicts].split(_ROWS), tokens[:, 1:][predicts].split(_ROWS)
        )
    ]
    return torch.cat(losses)


def _read(
    model: nn.Module,
    inputs: Inputs,
    attention_mask: Tensor | None,
    column: str | None,
    max_length: int | None,
) -> Batches:
    """The inputs, which several passes go over."""
    layer_count(model)
    batches = read_inputs(
        model, inputs, attention_mask=attention_mask, column=column, max_length=max_length
    )
    if batches.longest is None:
        raise InfoFlowError(
            f"inputs is {type(inputs).__name__}, which may be read once only: several passes go "
            "over the inputs; give a tensor, a list or a datasets.Dataset"
        )
    return batches


def _metric_of(
    model: nn.Module, metric: Metric | None, read: Sequence[int] | None, batches: Batches
) -> _Damage:
    chosen = metric or ("nmse" if reads_vectors(model) else "kl")
    if chosen not in METRICS:
        raise InfoFlowError(f"metric is {metric!r}: expected one of {', '.join(METRICS)}")
    if chosen != "nmse" and reads_vectors(model):
        raise InfoFlowError(
            f"metric is {chosen!r}, which compares distributions over tokens: the model's output "
            "is a vector; expected 'nmse'"
        )
    if chosen == "loss" and (read is not None or batches.shortest < 2):
        raise InfoFlowError(
            "metric 'loss' is over all next tokens: expected sequences of at least 2 tokens, and "
            "no positions to read; use 'kl' for single positions"
        )
    n_pos = batches.shortest
    for position in read or ():
        if not -n_pos <= position < n_pos:
            raise InfoFlowError(f"read has position {position}: expected {-n_pos} to {n_pos - 1}")
    return _Damage(chosen, read)


def _check_edits_reach(model: nn.Module, batch: Batch) -> None:
    """Refuse bridges in which an edited pattern changes nothing.

    Raises:
        InfoFlowError: naming the layer.
    """
    if not is_bridge(model):
        return
    output = batch.run(model)

    def empty(pattern: Tensor, hook: Any) -> Tensor:
        return torch.zeros_like(pattern)

    for layer in range(layer_count(model)):
        with model.hooks(fwd_hooks=[(pattern_hook(model, layer), empty)]):  # type: ignore[operator]
            edited = batch.run(model)
        if edited.equal(output):
            raise InfoFlowError(
                f"edits of the pattern of layer {layer} do not reach the output of this bridge: "
                "patterns cannot be replaced in it; load the model as a HookedTransformer"
            )


def _head_counts(model: nn.Module) -> list[int]:
    """Heads of each layer, from the weights."""
    return [int(block.attn.W_O.shape[0]) for block in model.blocks]  # type: ignore[union-attr]


def _reference(model: nn.Module, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """The output, and what enters every layer (nothing where passes cannot start there)."""
    names = []
    if starts_at_layers(model):
        names = [hook_name(model, f"blocks.{i}.hook_resid_pre") for i in range(layer_count(model))]
    output, caught = run_catching(model, batch, names)
    check_finite(output, "the output", 0)
    return output, [caught[name] for name in names]


def _run_from(model: nn.Module, batch: Batch, entering: Sequence[Tensor], layer: int) -> Tensor:
    """The output, from a layer on if possible: what comes before is not changed."""
    if not entering:
        output: Tensor = batch.run(model)
        return output
    # padding stands on the right, where nothing real looks
    changed: Tensor = model(entering[layer], start_at_layer=layer)
    return changed


def _mean_patterns(
    model: nn.Module, batches: Batches, batch_size: int, advance: Callable[[int], None]
) -> list[Float[Tensor, "_head query key"]]:
    """Mean patterns over the sequences that have the query."""
    names = [pattern_hook(model, layer) for layer in range(layer_count(model))]
    sums: dict[str, Tensor] = {}
    n_real: dict[str, Tensor] = {}
    for batch in batches.batches(batch_size):
        for name, pattern in run_catching(model, batch, names)[1].items():
            _, n_head, n_query, n_key = pattern.shape
            if name not in sums:
                missing = (batches.longest or 0) - batch.tokens.shape[1]
                size = (n_head, n_query + missing, n_key + missing)
                sums[name] = pattern.new_zeros(size, dtype=torch.float64)
                n_real[name] = pattern.new_zeros(size[1], dtype=torch.float64)
            real = pattern.new_ones(len(batch), n_query, dtype=torch.float64)
            if batch.lengths is not None:
                real = batch.mask().to(real)
            weighed = pattern.double() * real[:, None, :, None]
            sums[name][:, :n_query, :n_key] += weighed.sum(dim=0)
            n_real[name][:n_query] += real.sum(dim=0)
        advance(len(batch))
    return [sums[name] / n_real[name][:, None].clamp(min=1) for name in names]
