"""Recovery of the attended token, compared with untrained heads of the same softness."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.lazy import pd
from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.hooks.model.call import call
from infoflow_lens.hooks.model.inputs import Batch
from infoflow_lens.hooks.model.points import hook_name, layer_count, pattern_hook
from infoflow_lens.studies.claims import Claim
from infoflow_lens.studies.language_model.study import (
    TRAINED,
    UNTRAINED,
    BesideUntrained,
    average_heads,
    final,
    format_steps,
    measure_models,
    model_of,
    select_rows,
    stack_rows,
)
from infoflow_lens.studies.plots import ORANGE, Axis, Curves, FigureSpec, Panel
from infoflow_lens.studies.study import Row, Settings, Statement
from infoflow_lens.studies.tables import Column, Part, TableSpec, groups
from infoflow_lens.studies.tempering import map_errors, mean_entropy, temper

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_EVERY, _EXCESS, _CHANCE = 5, 0.1, 0.1
_FVU = {
    "fvu": "fvu",
    "untrained": "fvu_control",
    "least": "fvu_least",
    "untrained pattern": "fvu_pattern",
}


class Softness(BesideUntrained):
    """Every head, compared with nineteen untrained heads that are tempered to its entropy."""

    name: ClassVar[str] = "softness"
    title: ClassVar[str] = "How much of recovery is only that attention is peaked?"
    statement: ClassVar[Statement] = Statement.read("softness")
    windows: ClassVar[Mapping[str, int]] = {"smoke": 10, "quick": 40, "full": 256}
    steps: ClassVar[Mapping[str, int | None]] = {"smoke": 1, "quick": 3, "full": None}
    draws: ClassVar[Mapping[str, int]] = {"smoke": 3, "quick": 19, "full": 19}

    def contexts(self, moment: Any, preset: str) -> Sequence[Settings]:
        """Return windows of at most 64 tokens."""
        longest = min(24 if preset == "smoke" else 64, self.longest(moment))
        return [{"n_context": longest, "draws": self.draws[preset]}]

    def measure_model(
        self, model: nn.Module, settings: Settings, seed: int, kind: str
    ) -> list[Row]:
        """Make a row for each head."""
        windows = self.sequences(model, settings, seed)
        rows: list[Row] = []
        for layer in range(layer_count(model)):
            seen = _Layer(model, layer, windows)
            # untrained heads of the same layer, which see the same inputs
            heads = [
                _Control(seen, derive_seed("untrained head", seed, layer, draw))
                for draw in range(settings["draws"])
            ]
            for head in range(seen.pattern.shape[1]):
                pattern = seen.pattern[:, head]
                entropy = mean_entropy(pattern, seen.allowed)
                fvu = seen.measure_fvu(pattern, seen.z[:, :, head])
                whole, alone = [], []
                for control in heads:
                    # tempered to the entropy of the trained head, so that softness alone explains
                    # nothing
                    drawn = temper(control.scores, seen.allowed, entropy)
                    whole.append(seen.measure_fvu(drawn, drawn @ control.values))
                    # with the head's own values, to see what an untrained pattern alone loses
                    alone.append(seen.measure_fvu(drawn, drawn @ seen.v[:, head]))
                # beside the least of the draws, so that one lucky control does not decide alone
                median = float(torch.tensor(whole).median())
                rows.append(
                    {
                        "kind": kind,
                        "layer": layer,
                        "head": head,
                        "entropy": entropy,
                        "fvu": fvu,
                        "fvu_control": median,
                        "fvu_least": min(whole),
                        "fvu_first": whole[0],
                        "fvu_pattern": float(torch.tensor(alone).median()),
                        "excess": median - fvu,
                    }
                )
        return rows

    def tables(self) -> Sequence[Part]:
        """Return shares of heads; then every head of the last snapshots."""
        return (
            TableSpec(
                ("model", "step", "kind"),
                (
                    Column("heads", len),
                    Column("of these learnt", lambda heads: int(heads["learnt"].sum())),
                    Column("fvu (median)", "fvu", "median", ".2f"),
                    Column("of tempered untrained heads", "fvu_control", "median", ".2f"),
                    Column("excess (median)", "excess", "median", "+.2f"),
                    Column("largest", "excess", "most", "+.2f"),
                ),
                rows=lambda results: _average_heads(format_steps(results)),
                names={"kind": "weights"},
            ),
            "The heads of the last snapshots: fvu of the head, of tempered untrained heads (median "
            "and least of the draws), and of such patterns with the head's own values",
            TableSpec(
                ("model", "name"),
                (
                    Column("entropy (nats)", "entropy", "first", ".2f"),
                    *(Column(name, column, "first", ".2f") for name, column in _FVU.items()),
                    Column("excess", "excess", "first", "+.2f"),
                    Column("learnt", "learnt", "first"),
                ),
                rows=lambda results: select_rows("kind", TRAINED, _average_heads(final(results))),
                names={"name": "head"},
            ),
        )

    def plots(self) -> FigureSpec:
        """Draw each head and its control, and the excess over training."""
        heads = [
            Curves("fvu_control", "fvu", take="each", style="o", colour=colour, label=kind,
                   rows=partial(select_rows, "kind", kind))
            for kind, colour in ((UNTRAINED, "#bbbbbb"), (TRAINED, ORANGE))
        ]  # fmt: skip
        lines = Curves(
            "step", "excess", ("layer", "head"), style=".-", label="", alpha=0.6,
            colour=lambda layer, head: f"C{int(layer)}", rows=partial(select_rows, "kind", TRAINED),
        )  # fmt: skip
        return FigureSpec(
            (
                Panel((*heads, _draw_diagonal), Axis("fvu of untrained heads of the same entropy"),
                      Axis("fvu of the head"), model_of, final),
                Panel((lines,), Axis("training step (a line a head, a colour a layer)"),
                      Axis("excess (share of the variance)", levels=(_EXCESS,))),
            ),
            per="model",
        )  # fmt: skip

    def claims(self) -> Sequence[Claim]:
        """Judge the share of heads, beside that of the untrained model."""
        share = (
            "the share of heads whose attended token is recovered better than from each of "
            "nineteen untrained heads of the same entropy, and by .1 of the variance better than "
            "from their median, is {bound} more than that of the untrained model, in every model"
        )
        return (Claim(share, lambda rows: measure_models(rows, _share_learnt), ">", _CHANCE),)

    def remarks(self, results: "pd.DataFrame") -> Sequence[str]:
        """Say what is peaked and no more."""
        heads = select_rows("kind", TRAINED, _average_heads(final(results)))
        return [
            f"{model}: {(some['excess'] < _EXCESS).mean():.0%} of the heads exceed softness by "
            f"less than {_EXCESS}"
            for (model,), some in groups(heads, ("model",))
        ]

    def control_results(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """Return rows with the first tempered head, or the untrained model, for trained heads."""
        drawn = results.assign(
            fvu=results["fvu_first"], excess=results["fvu_control"] - results["fvu_first"]
        )
        own = results["kind"] == TRAINED
        model = results[~own]
        return {
            "untrained head": stack_rows(results[~own], drawn[own]),
            "untrained model": stack_rows(model, model.assign(kind=TRAINED)),
        }


def _draw_diagonal(axes: "Axes", rows: "pd.DataFrame") -> None:
    """Draw the line on which a head is as good as its control."""
    ends = [float(rows[["fvu", "fvu_control"]].min().min()), 1]
    axes.plot(ends, ends, "--", color="#bbbbbb", linewidth=0.8)


def _share_learnt(rows: "pd.DataFrame") -> float:
    """Give the share of heads that have learnt to retrieve, less the untrained model's."""
    heads = _average_heads(rows)
    own, control = (
        select_rows("kind", kind, heads)["learnt"].mean() for kind in (TRAINED, UNTRAINED)
    )
    return float(own - control)


class _Layer:
    """The states, patterns and tokens of one layer on all windows."""

    def __init__(self, model: nn.Module, layer: int, windows: Int[Tensor, "n pos"]) -> None:
        names = {
            "pattern": pattern_hook(model, layer),
            **{
                name: hook_name(model, f"blocks.{layer}.{point}")
                for name, point in (
                    ("z", "attn.hook_z"), ("v", "attn.hook_v"), ("resid", "hook_resid_pre"),
                )
            },
        }  # fmt: skip
        names["embedding"] = hook_name(model, "hook_embed")
        parts: dict[str, list[Tensor]] = {name: [] for name in names}
        for some in windows.split(16):
            with torch.no_grad():
                caught = call(model, Batch(some), tuple(names.values())).activations
            for name, hook in names.items():
                parts[name].append(caught[hook].float().cpu())
        found = {name: torch.cat(tensors) for name, tensors in parts.items()}
        self.pattern = found["pattern"]
        n_heads = self.pattern.shape[1]
        self.z = found["z"].view(*found["z"].shape[:2], n_heads, -1)
        # grouped values stand for all heads that share them
        values = found["v"].view(*found["v"].shape[:2], -1, self.z.shape[3]).transpose(1, 2)
        self.v = values.repeat_interleave(n_heads // values.shape[1], dim=1)
        resid = found["resid"].double()
        apart = resid - resid.mean(dim=2, keepdim=True)
        # as a layer norm without weights has it
        spread = apart.square().mean(dim=2, keepdim=True).sqrt()
        self.reads = (apart / spread.clamp(min=1e-12)).float()
        self.embedding = found["embedding"]
        # the heads of a layer have one mask
        self.allowed: Bool[Tensor, "query key"] = (self.pattern > 0).any(dim=1).any(dim=0)

    def measure_fvu(
        self, pattern: Float[Tensor, "n query key"], output: Float[Tensor, "n query d_head"]
    ) -> float:
        """Return the fvu of the embedding of the token of largest weight, on held-out windows."""
        n = len(pattern)
        place = pattern.argmax(dim=2)
        target = self.embedding[torch.arange(n)[:, None], place]
        # maps are fitted on four windows of five, and judged on the fifth
        held_out = torch.arange(n) % _EVERY == _EVERY - 1
        # the first query has one key only
        return map_errors(output[:, 1:], target[:, 1:], held_out).fvu


class _Control:
    """A head with random weights that reads the normalised residual stream."""

    def __init__(self, seen: _Layer, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        d_model, d_head = seen.reads.shape[2], seen.z.shape[3]
        # so numbers of queries and keys vary by about 1, whatever the width
        drawn = (
            torch.randn(3, d_model, d_head, generator=generator, dtype=torch.float32) / d_model**0.5
        )
        query, key, self.values = (seen.reads @ weight for weight in drawn)
        self.scores = query @ key.transpose(1, 2)


def _average_heads(rows: "pd.DataFrame") -> "pd.DataFrame":
    """Average over seeds for each head, and say whether it has learnt to retrieve."""
    found = average_heads(rows, ("entropy", *_FVU.values(), "excess"), ("step", "kind"))
    learnt = (found["fvu"] < found["fvu_least"]) & (found["excess"] >= _EXCESS)
    return found.assign(learnt=learnt)
