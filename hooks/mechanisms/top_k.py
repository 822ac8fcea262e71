"""How many keys does a layer need? Every head keeps its k largest, and what that costs.

Heads that pass on one token need as many keys whatever the length of the context (max-position);
heads that take a mean over all need the more the longer it is (global).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Final, Literal, TypeAlias

import torch
from annotated_types import MinLen
from jaxtyping import Float
from torch import Tensor, nn

from infoflow_lens.foundation.lazy import mpl, pd
from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.foundation.settings import Count, Distinct, Positive, Seed, checked
from infoflow_lens.hooks.interventions.damage import NextTokenLoss
from infoflow_lens.hooks.interventions.edits import Edit
from infoflow_lens.hooks.interventions.kept import KeptNumbers, Reached, identify
from infoflow_lens.hooks.interventions.patterns import ideal_pattern, rescale
from infoflow_lens.hooks.interventions.probe import EditsOfPass
from infoflow_lens.hooks.mechanisms.driver import NextTokenResult, Rounds, read_again
from infoflow_lens.hooks.model.inputs import Inputs
from infoflow_lens.hooks.model.points import layer_count, pattern_hook, takes_model
from infoflow_lens.hooks.passes.view import Pass
from infoflow_lens.hooks.result import LabelledArray, frame_of

Kept: TypeAlias = Literal["largest", "random"]
LARGEST: Final = "largest"
RANDOM: Final = "random"

Ks = Annotated[tuple[Count, ...], MinLen(1), Distinct()]


@dataclass(frozen=True, eq=False, kw_only=True)
class TopKResult(NextTokenResult):
    """The loss with all but k keys of every row taken out, and the rest rescaled.

    Attributes:
        ks: the numbers of keys, rising.
        tolerance: the relative rise of the loss up to which k is enough.
        kept: which keys stay, in the order of the first axis: "largest", those of largest weight;
            "random", the control, any that are allowed.
        losses: float [kept, layer, k, sequence], summed next-token loss in nats; the last entry of
            the layer axis is all layers at once; NaN where a search did not look.
        n_pos: tokens of the longest sequence.
    """

    ks: tuple[int, ...]
    tolerance: float
    kept: tuple[Kept, ...]
    losses: Float[Tensor, "kept layer k sequence"]
    n_pos: int

    def rise(self) -> Float[Tensor, "kept layer k"]:
        """Compute by how much the loss rises, relative to it."""
        return (self.losses - self.bare).sum(dim=3) / self.bare.sum()

    def least(self, kept: str = LARGEST) -> tuple[int, ...]:
        """Return the least k of each layer, and of all at once, from which on the loss is within.

        Where even the largest of `ks` is not enough, or is more, it is ``n_pos``, all keys.
        """
        enough = self.rise()[self.kept.index(kept)] <= self.tolerance
        found = []
        for row, known in zip(enough, ~self.losses[self.kept.index(kept), ..., 0].isnan()):
            least = self.n_pos
            # from the largest k down to the first that is not enough, past those not looked at
            for k, good, seen in reversed(list(zip(self.ks, row.tolist(), known.tolist()))):
                if seen and not good:
                    break
                least = k if seen else least
            found.append(min(least, self.n_pos))
        return tuple(found)

    def sentences(self) -> list[str]:
        """Say the least k of every layer, and of all at once."""
        *layers, together = self.least()
        return [
            f"top k: keys that keep the loss within {100 * self.tolerance:.3g}%, by layer: "
            f"{' '.join(map(str, layers))}; all layers at once: {together} (of {self.n_pos})",
        ]

    def to_frame(self) -> "pd.DataFrame":
        """Make a row for what is kept, layer ("all" for all at once) and k that was looked at."""
        rise = self.rise()
        dims = ("kept", "layer", "k")
        layers = [*map(str, range(rise.shape[1] - 1)), "all"]
        coords = {"kept": self.kept, "layer": layers, "k": self.ks}
        numbers = {"loss": self.loss * (1 + rise), "rise": rise}
        return frame_of(
            [LabelledArray(name, values, dims, coords) for name, values in numbers.items()],
            LabelledArray("looked", ~rise.isnan(), dims),
        )

    def plot(self) -> "mpl.Figure":
        """Draw the least k of every layer."""
        least = LabelledArray(
            f"keys of at most {self.n_pos}",
            torch.tensor(self.least()),
            ("layer",),
            {"layer": [*range(self.losses.shape[1] - 1), "all at once"]},
        )
        return least.plot(f"The least k that keeps the loss within {100 * self.tolerance:.3g}%")


@takes_model
@checked
def measure_top_k(
    model: nn.Module,
    inputs: Inputs,
    *,
    ks: Ks | None = None,
    tolerance: Positive = 0.01,
    search: bool = False,
    control: bool = False,
    last: Count | None = None,
    seed: Seed = 0,
    attention_mask: Tensor | None = None,
    column: str | None = None,
    max_length: Count | None = None,
    batch_size: Count = 16,
    resume: Reached | None = None,
    after: Callable[[Reached], None] | None = None,
    progress: bool = True,
) -> TopKResult:
    """Measure the next-token loss where the heads of a layer keep k keys of every row.

    Args:
        model: a language model in which an edited pattern reaches the output.
        inputs: sequences.
        ks: numbers of keys; default, powers of two below the length.
        tolerance: the relative rise of the loss that is allowed.
        search: look at as few k as halving needs, which takes the loss to fall as k rises.
        control: keep random keys, too, in place of the largest.
        last: how many predictions of each sequence count, the last ones; None for all.
        seed: of the random keys.
        attention_mask, column, max_length: as for `run_probes`.
        batch_size: sequences in a pass.
        resume: what `after` was last given.
        after: called after each batch with all that is measured so far.
        progress: show a bar.

    Raises:
        InfoFlowError: for k below 1, a tolerance that is not positive, a model without next
            tokens, or one in which edited patterns do not reach the output.
    """
    batches = read_again(model, inputs, attention_mask, column, max_length)
    loss = NextTokenLoss(last)
    loss.check(model, batches.shortest)
    n_pos = batches.longest or 0
    powers = [2**i for i in range(n_pos.bit_length()) if 2**i < n_pos]
    chosen = tuple(sorted(ks or powers or (1,)))
    kinds: tuple[Kept, ...] = (LARGEST, RANDOM) if control else (LARGEST,)
    n_layers = layer_count(model)
    settings = {
        "probe": "top_k",
        "ks": list(chosen),
        "tolerance": float(tolerance),
        "search": search,
        "control": control,
        "last": last,
        "seed": seed,
    }
    kept = KeptNumbers(identify(model, settings, inputs=batches), resume, after)
    rounds = Rounds(model, batches, None, kept, batch_size, progress)
    n = batches.n_sequences or 0
    losses = torch.full((len(kinds), n_layers + 1, len(chosen), n), torch.nan).double()
    # where to look, of each kind and layer: from one place in `chosen` to before another
    ends = {(kind, layer): (0, len(chosen)) for kind in kinds for layer in range(n_layers + 1)}
    n_rounds = 0
    while ends:
        places = [
            (kind, layer, at)
            for (kind, layer), (low, high) in ends.items()
            for at in ([(low + high) // 2] if search else range(low, high))
        ]
        points = tuple((kind, layer, chosen[at]) for kind, layer, at in places)
        make = partial(_keep_few, points, seed)
        probe = EditsOfPass(make, readout=loss, rows=1, through_hooks=True)
        found = rounds.measure(f"round {n_rounds}", probe)
        values, most, n_rounds = found.values(), (1 + tolerance) * found.bare.sum(), n_rounds + 1
        for kind, layer, at in places:
            lost = losses[kinds.index(kind), layer, at] = values[f"{kind} {layer} {chosen[at]}"]
            # without a search a layer has several places in one round, and is done with the first
            low, high = ends.pop((kind, layer), (0, 0))
            low, high = (low, at) if bool(lost.sum() <= most) else (at + 1, high)
            if search and low < high:
                ends[kind, layer] = low, high
    return TopKResult(
        ks=chosen,
        tolerance=float(tolerance),
        kept=kinds,
        losses=losses,
        bare=found.bare,
        n_tokens=found.n_tokens,
        n_pos=n_pos,
        record=RunRecord.from_model(model, settings, seed),
    )


def _keep_few(points: Iterable[tuple[Kept, int, int]], seed: int, plain: Pass) -> Iterable[Edit]:
    """Make an edit for each point: which keys stay, the layer, their number for all, how many."""
    for kind, layer, k in points:
        layers = range(plain.n_layers) if layer == plain.n_layers else [layer]
        drawn = seed if kind == RANDOM else None
        edited = {pattern_hook(plain.model, i): partial(_keep, plain, i, k, drawn) for i in layers}
        yield Edit(f"{kind} {layer} {k}", edited)


def _keep(plain: Pass, layer: int, k: int, seed: int | None, pattern: Tensor) -> Tensor:
    """Keep k keys of every row; the largest, or with a seed any that are seen."""
    visible = plain.visible(layer)[:, None]
    if seed is None:
        return ideal_pattern(pattern, visible, "top_k", k=k)
    # random numbers in the place of scores, below them all for closed keys and padding
    order = torch.full(pattern.shape, -1.0)
    lengths = plain.lengths_of(pattern.shape[2]).tolist()
    for row, index, n in zip(order, plain.indices.tolist(), lengths, strict=True):
        # by sequence, without its padding, so whatever the batch
        generator = torch.Generator().manual_seed(derive_seed("top k", seed, layer, index))
        row[:, :n, :n] = torch.rand(len(row), n, n, generator=generator, dtype=torch.float32)
    order = order.to(pattern.device).masked_fill(~visible, -1.0)
    least = order.topk(min(k, order.shape[-1]), dim=-1).values[..., -1:]
    kept = pattern * ((order >= least) & visible)
    return rescale(kept, pattern.sum(dim=-1, keepdim=True))
