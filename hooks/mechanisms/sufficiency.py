"""Are the mechanisms enough together? Many heads replaced at once, and what loss remains.

A head's mechanism is the cheapest that is enough for it alone. Whether they are enough together is
asked on other sequences than those on which they were found, in nats of next-token loss, beside
random mechanisms and no head at all.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import torch
from annotated_types import Gt, Le, MinLen
from jaxtyping import Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.record import RunRecord, model_fingerprint
from infoflow_lens.foundation.seeds import derived_seed
from infoflow_lens.foundation.settings import Count, Index, Seed, checked
from infoflow_lens.hooks.arrays import LabelledArray, frame_of
from infoflow_lens.hooks.mechanisms.driver import Reading
from infoflow_lens.hooks.mechanisms.ideals import Ideal, substituted
from infoflow_lens.hooks.mechanisms.next_token import (
    KeptLosses,
    Losses,
    NextTokenLoss,
    NextTokenResult,
)
from infoflow_lens.hooks.mechanisms.result import MechanismsResult
from infoflow_lens.hooks.model.call import call, catching
from infoflow_lens.hooks.model.inputs import Batch, Batches, Inputs
from infoflow_lens.hooks.model.points import hook_name

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

MECHANISMS, MEAN, RANDOM = "mechanisms", "mean ablation", "random mechanisms"
SHARES = (0.25, 0.5, 0.75, 1.0)

Shares = Annotated[tuple[Annotated[float, Gt(0), Le(1)], ...], MinLen(1)]

Head = tuple[int, int]


@dataclass(frozen=True, eq=False, kw_only=True)
class SufficiencyResult(NextTokenResult):
    """The loss with shares of the heads replaced.

    Attributes:
        shares: of all heads, those whose own damage is least first.
        n_replaced: the heads of each share.
        assignments: what takes the place of a head, in the order of the first axis: "mechanisms",
            its own; "mean ablation", its mean output; "random mechanisms 0", ..., the mechanisms of
            all heads dealt at random.
        losses: float [assignment, share, sequence], summed next-token loss in nats.
        heads: int [head, 2], layer and head in the order of replacement.
        ideals: for each of these the ideal that takes its place.
    """

    shares: tuple[float, ...]
    n_replaced: tuple[int, ...]
    assignments: tuple[str, ...]
    losses: Float[Tensor, "assignment share sequence"]
    heads: Int[Tensor, "head two"]
    ideals: tuple[str, ...]

    def excess(self) -> Float[Tensor, "assignment share"]:
        """What the loss rises by, in nats a token."""
        return (self.losses - self.bare).sum(dim=2) / self.n_tokens.sum()

    def errors(self) -> Float[Tensor, "assignment share"]:
        """One standard error of :meth:`excess`, over sequences."""
        n = len(self.bare)
        if n < 2:
            return torch.full(self.losses.shape[:2], torch.nan, dtype=torch.float64)
        weight = self.n_tokens / self.n_tokens.sum()
        apart = (self.losses - self.bare) / self.n_tokens - self.excess()[..., None]
        return ((apart * weight).square().sum(dim=2) * n / (n - 1)).sqrt()

    def to_frame(self) -> "pd.DataFrame":
        """One row for each assignment and share."""
        excess = self.excess()
        numbers = {
            "n_replaced": torch.tensor(self.n_replaced).expand(excess.shape),
            "loss": self.loss + excess,
            "excess": excess,
            "error": self.errors(),
        }
        dims, coords = (
            ("assignment", "share"),
            {"assignment": self.assignments, "share": self.shares},
        )
        return frame_of([LabelledArray(name, v, dims, coords) for name, v in numbers.items()])

    def plot(self) -> "Figure":
        """The loss by the share of heads that are replaced."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 3.5), layout="constrained")
        axes = figure.subplots()
        colours = {MECHANISMS: "#d55e00", MEAN: "#444444"}
        for name, rows in self.to_frame().groupby("assignment", sort=False):
            kind = RANDOM if str(name).startswith(RANDOM) else str(name)
            shares, losses = [0.0, *rows["share"]], [self.loss, *rows["loss"]]
            axes.plot(shares, losses, color=colours.get(kind, "#56b4e9"), label=kind)
        lines = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        axes.legend(lines.values(), lines.keys())
        axes.set(
            xlabel="share of heads", ylabel="nats a token", title="Heads replaced, all at once"
        )
        return figure


def assigned(mechanisms: MechanismsResult) -> dict[Head, tuple[Ideal, float]]:
    """Every head's ideal and its damage, the least damage first.

    A head that stays soft has none that is enough; it gets the one of least damage, of those whose
    damage was measured.
    """
    found: dict[Head, tuple[Ideal, float]] = {}
    for layer, names in enumerate(mechanisms.mechanisms()):
        for head, name in enumerate(names):
            damage = mechanisms.damage[layer][head]
            if name not in mechanisms.ideals:
                measured = mechanisms.replaced[layer][head] > 0
                known = measured if bool(measured.any()) else torch.ones_like(measured)
                name = mechanisms.ideals[int(damage.masked_fill(~known, torch.inf).argmin())]
            ideal: Any = name
            found[layer, head] = ideal, float(damage[mechanisms.ideals.index(name)])
    return dict(sorted(found.items(), key=lambda item: (item[1][1], item[0])))


@checked
def measure_sufficiency(
    model: nn.Module,
    inputs: Inputs,
    mechanisms: MechanismsResult,
    *,
    shares: Shares = SHARES,
    draws: Index = 4,
    last: Count | None = None,
    seed: Seed = 0,
    attention_mask: Tensor | None = None,
    column: str | None = None,
    max_length: Count | None = None,
    batch_size: Count = 64,
    resume: Losses | None = None,
    after: Callable[[Losses], None] | None = None,
    progress: bool = True,
) -> SufficiencyResult:
    """The next-token loss with many heads replaced at once by their mechanisms.

    Controls: the same mechanisms dealt to the heads at random, and mean ablation, every replaced
    head's output its mean over these sequences (which favours the control).

    Args:
        model: the language model whose mechanisms these are.
        inputs: sequences, best others than those on which mechanisms were measured, and no longer.
        mechanisms: of :func:`~infoflow_lens.hooks.measure_mechanisms`.
        shares: of all heads.
        draws: of random mechanisms.
        last: how many predictions of each sequence count, the last ones; None for all.
        seed: of the random mechanisms.
        attention_mask, column, max_length: as for `run_probes`.
        batch_size: sequences in a pass.
        resume: what `after` was last given.
        after: called after each point of the curves with all losses so far.
        progress: show a bar.

    Raises:
        InfoFlowError: for another model than the one that was measured, shares outside of (0, 1],
            sequences that are longer than the mean patterns, a model without next tokens, or one in
            which edited patterns do not reach the output.
    """
    reading = Reading(attention_mask, column, max_length, batch_size, progress)
    batches = reading.batches(model, inputs)
    loss = NextTokenLoss(model, batches, batch_size, last)
    fingerprint = model_fingerprint(model)
    if mechanisms.record.model_fingerprint != fingerprint:
        raise InfoFlowError(
            f"mechanisms are of model {mechanisms.record.model_fingerprint}, this is {fingerprint} "
            "(other weights): expected the same; measure its mechanisms"
        )
    longest = mechanisms.mean_patterns[0].shape[1]
    if (batches.longest or 0) > longest:
        raise InfoFlowError(
            f"mechanisms were measured on at most {longest} positions, these sequences have "
            f"{batches.longest}: expected none longer; cut them with max_length={longest}"
        )
    mine = assigned(mechanisms)
    heads = list(mine)
    ideals = [ideal for ideal, _ in mine.values()]
    dealt = {MECHANISMS: ideals, MEAN: None}
    for draw in range(draws):
        generator = torch.Generator().manual_seed(derived_seed("sufficiency", seed, draw))
        order = torch.randperm(len(heads), generator=generator).tolist()
        dealt[f"{RANDOM} {draw}"] = [ideals[i] for i in order]
    counts = [max(1, round(share * len(heads))) for share in shares]
    once = KeptLosses(resume, after).once

    n_points = len(dealt) * len(counts)
    with reading.measuring(model, batches, "sufficiency", n_points) as step:
        bare = once("bare", loss.sums)
        means = mean_outputs(model, batches, loss.batch_size)
        rows = []
        for name, given in dealt.items():
            for n in counts:

                def edited(batch: Batch, first: int, given: Any = given, n: int = n) -> Any:
                    if given is None:
                        return mean_ablated(model, heads[:n], means)
                    some = dict(zip(heads[:n], given, strict=False))
                    return substituted(model, some, mechanisms.mean_patterns, mechanisms.k)

                rows.append(once(f"{name} {n}", partial(loss.sums, edited)))
                step()
    return SufficiencyResult(
        shares=shares,
        n_replaced=tuple(counts),
        assignments=tuple(dealt),
        losses=torch.stack(rows).view(len(dealt), len(counts), -1),
        bare=bare,
        n_tokens=loss.counts(),
        heads=torch.tensor(heads),
        ideals=tuple(ideals),
        record=RunRecord.of_model(
            model,
            {
                "probe": "sufficiency",
                "shares": list(shares),
                "draws": draws,
                "last": last,
                "seed": seed,
                "mechanisms": dict(mechanisms.record.config),
            },
            seed,
            fingerprint_of_model=fingerprint,
        ),
    )


def mean_outputs(
    model: nn.Module, batches: Batches, batch_size: int
) -> list[Float[Tensor, "... d_head"]]:
    """The mean of each layer's head outputs, over all real positions."""
    names = _outputs(model)
    sums: list[Tensor] = []
    n = 0
    for batch in batches.batches(batch_size):
        caught = call(model, batch, names).activations
        real = batch.mask()
        parts = [caught[name][real.to(caught[name].device)].double().sum(dim=0) for name in names]
        sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
        n += int(real.sum())
    return [total / n for total in sums]


def _outputs(model: nn.Module) -> list[str]:
    blocks: Any = model.blocks
    return [hook_name(model, f"blocks.{layer}.attn.hook_z") for layer in range(len(blocks))]


@contextmanager
def mean_ablated(
    model: nn.Module, heads: Sequence[Head], means: Sequence[Tensor]
) -> Iterator[None]:
    """The model with the outputs of some heads at their mean, while the block lasts.

    Args:
        model: a TransformerLens model.
        heads: (layer, head) of each.
        means: as :func:`mean_outputs` gives them.
    """
    by_layer: dict[int, list[int]] = {}
    for layer, head in heads:
        by_layer.setdefault(layer, []).append(head)
    names = _outputs(model)
    hooks = [(names[i], _to_mean(some, means[i], model, i)) for i, some in by_layer.items()]
    with catching(model, (), hooks):
        yield


def _to_mean(heads: list[int], mean: Tensor, model: nn.Module, layer: int) -> Callable[..., Tensor]:
    block: Any = model.blocks[layer]  # type: ignore[index]
    n_heads = int(block.attn.W_O.shape[0])

    def hook_fn(z: Tensor, hook: Any) -> Tensor:
        edited = z.clone().view(*z.shape[:2], n_heads, -1)
        edited[:, :, heads] = mean.to(z).view(n_heads, -1)[heads]
        return edited.view(z.shape)

    return hook_fn
