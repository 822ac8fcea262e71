"""In how many directions do the queries of heads look, and do more directions cost more?"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from infoflow_lens.foundation.lazy import pd
from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.hooks import (
    Edit,
    EditsOfPass,
    InterventionResult,
    MeanPatternsProbe,
    NextTokenLoss,
    Pass,
    edit_head_output,
    heads_of,
    run_probes,
)
from infoflow_lens.studies.claims import Claim, Numbers
from infoflow_lens.studies.language_model.queries import Directions, directions, projecting
from infoflow_lens.studies.language_model.study import (
    TRAINED,
    UNTRAINED,
    BesideUntrained,
    average_heads,
    final,
    format_steps,
    least_within,
    measure_models,
    model_of,
    select_rows,
    stack_rows,
)
from infoflow_lens.studies.plots import GREEN, GREY, ORANGE, Axis, Curves, FigureSpec, Panel
from infoflow_lens.studies.study import Row, Settings, Statement
from infoflow_lens.studies.tables import Column, Part, TableSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TOLERANCE, _BATCH, _PERMUTATIONS, _LEVEL = 0.01, 16, 1000, 0.95
_RANKS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
_SHARES = ("fixed", "by_token", "by_token_shuffled", "by_position")


class Roles(BesideUntrained):
    """Directions of the queries of every head; projections of all; mean ablation of each."""

    name: ClassVar[str] = "roles"
    title: ClassVar[str] = "Does a head retrieve in one direction, or in several?"
    statement: ClassVar[Statement] = Statement.read("roles")
    windows: ClassVar[Mapping[str, int]] = {"smoke": 10, "quick": 32, "full": 256}
    steps: ClassVar[Mapping[str, int | None]] = {"smoke": 1, "quick": 4, "full": None}
    draws: ClassVar[Mapping[str, int]] = {"smoke": 1, "quick": 2, "full": 8}

    def contexts(self, moment: Any, preset: str) -> Sequence[Settings]:
        """Return the longest context."""
        longest = 24 if preset == "smoke" else self.longest(moment)
        return [{"n_context": longest, "draws": self.draws[preset]}]

    def measure_model(
        self, model: nn.Module, settings: Settings, seed: int, kind: str
    ) -> list[Row]:
        """Make a row for each head, and for each number of directions."""
        windows = self.sequences(model, settings, seed)
        found = directions(model, windows[0::2], _BATCH)
        with torch.no_grad():
            heads, bare, n_tokens = self._heads(model, found, windows, seed)
            # reported, not judged: attention to the first token outweighs other differences
            without = [
                roles
                for own in directions(model, windows[0::2], _BATCH, first_key=1)
                for roles in own.roles().tolist()
            ]
            for row, roles in zip(heads, without, strict=True):
                row["roles_without_first"] = roles
            curve = self._curve(model, found, windows[1::2], settings["draws"], seed)
        common: Row = {"kind": kind, "loss": bare / n_tokens}
        return [{**common, **row} for row in (*heads, *curve)]

    def _heads(
        self, model: nn.Module, found: Sequence[Directions], windows: Tensor, seed: int
    ) -> tuple[list[Row], float, int]:
        """Make a row for each head; and the loss of the model as it is, and of how many tokens."""
        # heads are described on one half of the windows, and judged on the other
        looked_at, judged = windows[0::2], windows[1::2]
        token = looked_at[:, 1:].flatten()
        place = torch.arange(1, looked_at.shape[1]).repeat(len(looked_at))
        # the control: tokens that belong to other queries
        generator = torch.Generator().manual_seed(derive_seed("shuffled", seed))
        shuffled = token[torch.randperm(len(token), generator=generator)]
        (means,) = run_probes(
            model, judged, [MeanPatternsProbe("outputs")], batch_size=_BATCH, progress=False
        )
        whole = means.mean_outputs()

        def without_each(plain: Pass) -> Iterable[Edit]:
            for layer, head in heads_of(plain):
                mean = whole[layer][head]
                yield edit_head_output(plain, layer, head, mean.expand_as, f"{layer}.{head}")

        result = _loss_with(model, judged, without_each)
        cost = dict(zip(result.edits, result.risen().tolist(), strict=True))
        rows: list[Row] = []
        for layer, own in enumerate(found):
            columns = {
                "roles": own.roles(),
                "fixed": own.share_of_mean(),
                "by_token": own.share_by(token),
                "by_token_shuffled": own.share_by(shuffled),
                "by_position": own.share_by(place),
                "deviation": own.u.square().sum(dim=2).mean(dim=1).sqrt(),
            }
            for head in range(len(own.u)):
                values: Row = {name: float(value[head]) for name, value in columns.items()}
                values["cost"] = cost[f"{layer}.{head}"]
                rows.append({"part": "head", "layer": layer, "head": head, **values})
        return rows, float(result.bare.sum()), int(result.n_tokens.sum())

    def _curve(
        self,
        model: nn.Module,
        found: Sequence[Directions],
        judged: Tensor,
        draws: int,
        seed: int,
    ) -> list[Row]:
        d_head = found[0].u.shape[2]
        each: dict[str, Row] = {}
        edits = []
        for rank in (*(r for r in _RANKS if r < d_head), d_head):
            chosen = {"first": [[own.axes[:, :, :rank] for own in found]]}
            chosen["random"] = [
                [_random(own, rank, derive_seed("directions", seed, draw, i))
                 for i, own in enumerate(found)]
                # no direction, and all of them, leave nothing to draw
                for draw in range(draws if 0 < rank < d_head else 1)
            ]  # fmt: skip
            for name, several in chosen.items():
                for draw, bases in enumerate(several):
                    each[f"{name} {rank} {draw}"] = {"part": "curve", "of": name, "rank": rank}
                    edits.append(Edit(f"{name} {rank} {draw}", dict(projecting(found, bases))))
        result = _loss_with(model, judged, lambda plain: edits)
        rise = dict(zip(result.edits, result.rise.sum(dim=0) / result.bare.sum(), strict=True))
        return [{**row, "rise": float(rise[name])} for name, row in each.items()]

    def tables(self) -> Sequence[Part]:
        """Return directions needed and correlations; then every head of the last snapshots."""
        return (
            TableSpec(
                ("model", "step", "kind"),
                (
                    Column("loss", "loss", "mean", ".3f"),
                    Column("directions needed", partial(_rank, "first")),
                    Column("of random ones", partial(_rank, "random")),
                    Column("of d_head", lambda rows: int(rows["rank"].max())),
                    Column("roles (median, range)", _range_of_roles),
                    Column("roles with cost", _correlation, form="+.2f"),
                ),
                rows=format_steps,
                names={"kind": "weights"},
            ),
            "The heads of the last snapshots: the deviation of scores over keys (nats), roles (in "
            "brackets where the first token is no key, told and not judged), shares of the energy "
            "(fixed direction; by the query's token, in brackets with "
            "shuffled tokens; by position), and what the loss rises by without the head",
            TableSpec(
                ("model", "name"),
                (
                    Column("deviation", "deviation", "first", ".2f"),
                    Column("roles", partial(_bracket, "roles", "roles_without_first", ".1f")),
                    Column("fixed", "fixed", "first", ".2f"),
                    Column("by token", partial(_bracket, "by_token", "by_token_shuffled", ".2f")),
                    Column("by position", "by_position", "first", ".2f"),
                    Column("cost (nats)", "cost", "first", "+.3f"),
                ),
                rows=lambda results: _average_heads(select_rows("kind", TRAINED, final(results))),
                names={"name": "head"},
            ),
        )

    def plots(self) -> FigureSpec:
        """Return loss by directions, cost by roles, shares of the energy."""
        curves = [
            Curves("rank", "percent", style=style, colour=ORANGE, label=f"{of} directions",
                   rows=partial(_curve, of))
            for of, style in (("first", ".-"), ("random", ".:"))
        ]  # fmt: skip
        heads = [
            Curves("roles", "cost", take="each", style="o", colour=colour, label=kind,
                   rows=partial(select_rows, "kind", kind))
            for kind, colour in ((UNTRAINED, "#bbbbbb"), (TRAINED, ORANGE))
        ]  # fmt: skip
        loss = Axis("rise of the loss (%)", "symlog", (0, None), (100 * _TOLERANCE,))
        return FigureSpec(
            (
                Panel(curves, Axis("directions a head"), loss, model_of,
                      partial(select_rows, "kind", TRAINED)),
                Panel(heads, Axis("roles of a head"), Axis("cost without it (nats)")),
                Panel((_draw_shares,), y=Axis("share of the energy"),
                      rows=partial(select_rows, "kind", TRAINED), legend="above"),
            ),
            per="model",
            rows=final,
        )  # fmt: skip

    def claims(self) -> Sequence[Claim]:
        """Return claims on the directions that are needed, and on what correlates with roles."""
        return (
            Claim(
                "to keep the loss within 1%, {bound} direction a head is needed in every model",
                partial(_collect, partial(_rank, "first")), ">", 1,
            ),
            Claim(
                "of random directions {bound} more are needed",
                partial(_collect, lambda own: _rank("random", own) - _rank("first", own)),
                ">", 0,
            ),
            Claim(
                "the rank correlation of the heads' roles with what they cost is {bound}",
                partial(_collect, _correlation), ">", 0,
            ),
            Claim(
                "the share of permutations below it is {bound}",
                partial(_collect, _level), ">", _LEVEL,
            ),
            Claim(
                "the correlation less that of the untrained model is {bound}",
                lambda results: measure_models(results, _lead), ">", 0,
            ),
        )  # fmt: skip

    def control_results(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """Return rows with random directions for the first, or untrained heads for trained ones."""
        own = results["kind"] == TRAINED
        first = results[~(own & (results["of"] == "first"))]
        drawn = results[own & (results["of"] == "random")].assign(of="first")
        untrained = results[~own]
        return {
            "random directions": stack_rows(first, drawn),
            "untrained": stack_rows(untrained, untrained.assign(kind=TRAINED)),
        }


def _collect(number: "Callable[[pd.DataFrame], float]", results: "pd.DataFrame") -> Numbers:
    """Collect a number of each trained model."""
    return measure_models(select_rows("kind", TRAINED, results), number)


def _lead(rows: "pd.DataFrame") -> float:
    """Return the correlation less the untrained model's; all of it where that has none."""
    own, control = (_correlation(select_rows("kind", kind, rows)) for kind in (TRAINED, UNTRAINED))
    # a model of alike heads has no order of costs to correlate with
    return own if math.isnan(control) else own - control


def _loss_with(
    model: nn.Module, windows: Tensor, make: Callable[[Pass], Iterable[Edit]]
) -> InterventionResult:
    """Measure the loss of the next token with each edit."""
    probe = EditsOfPass(make, readout=NextTokenLoss(), rows=1)
    result: InterventionResult
    (result,) = run_probes(model, windows, [probe], batch_size=_BATCH, progress=False)
    return result


def _random(own: Directions, rank: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(own.axes.shape, generator=generator, dtype=torch.float64)
    # the seed is the same for all ranks, so that larger subspaces hold the smaller
    return torch.linalg.qr(drawn).Q[:, :, :rank]


def _curve(of: str, rows: "pd.DataFrame") -> "pd.DataFrame":
    """Return the rise of the loss in percent, by the number of directions."""
    curve = rows[(rows["part"] == "curve") & (rows["of"] == of)]
    return curve.assign(percent=100 * curve["rise"])


def _rank(of: str, rows: "pd.DataFrame") -> int:
    """Return the least number of directions from which on the mean rise is within."""
    curve = _curve(of, rows)
    least = least_within(curve, "rank", _TOLERANCE)
    return int(curve["rank"].max()) if least is None else least


def _average_heads(rows: "pd.DataFrame") -> "pd.DataFrame":
    columns = ["roles", "roles_without_first", "deviation", "cost", *_SHARES]
    return average_heads(rows[rows["part"] == "head"], columns)


def _range_of_roles(rows: "pd.DataFrame") -> str:
    roles = _average_heads(rows)["roles"]
    return f"{roles.median():.1f} ({roles.min():.1f} to {roles.max():.1f})"


def _bracket(name: str, other: str, form: str, heads: "pd.DataFrame") -> str:
    """Format a number of a head, and another in brackets."""
    return f"{heads[name].iloc[0]:{form}} ({heads[other].iloc[0]:{form}})"


def _draw_shares(axes: "Axes", rows: "pd.DataFrame") -> None:
    """Draw bars of the shares of each head, on each other."""
    heads = _average_heads(rows)
    below = 0 * heads["fixed"]
    for name, colour in (("fixed", GREY), ("by_token", ORANGE), ("by_position", GREEN)):
        share, label = heads[name].clip(lower=0), name.replace("_", " ")
        axes.bar(heads["name"], share, bottom=below, color=colour, label=label)
        below = below + share
    axes.tick_params(axis="x", rotation=90, labelsize="x-small")


def _correlation(rows: "pd.DataFrame") -> float:
    """Return Spearman's correlation of roles and cost over heads."""
    values = _average_heads(rows)
    if len(values) < 3:
        return math.nan
    return float(values["roles"].corr(values["cost"], method="spearman"))


def _level(rows: "pd.DataFrame") -> float:
    """Return the share of permutations of the costs whose correlation is smaller."""
    values = _average_heads(rows).rank()
    roles, cost = (torch.tensor(values[name].to_numpy()) for name in ("roles", "cost"))
    roles, cost = roles - roles.mean(), cost - cost.mean()
    generator = torch.Generator().manual_seed(derive_seed("roles"))
    # a correlation of centred ranks is a product, since permuting changes neither norm
    orders = torch.rand(_PERMUTATIONS, len(cost), generator=generator, dtype=torch.float32).argsort(
        dim=1
    )
    return float(((cost[orders] @ roles) < (cost @ roles)).double().mean())
