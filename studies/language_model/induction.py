"""The induction circuit of a language model, measured in three ways."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.lazy import pd
from infoflow_lens.foundation.modules import derive_seed, eval_mode
from infoflow_lens.hooks import IDEALS, RecoveryProbe, measure_mechanisms, run_probes, substituted
from infoflow_lens.hooks.model.call import call
from infoflow_lens.hooks.model.points import hook_name, layer_count, pattern_hook
from infoflow_lens.studies.claims import Claim, Numbers
from infoflow_lens.studies.language_model.batches import repeat_random, repeat_stretches
from infoflow_lens.studies.language_model.measures import prefix_matching, previous_token
from infoflow_lens.studies.language_model.snapshots import load_snapshot
from infoflow_lens.studies.language_model.study import (
    IS_INDUCTION,
    OnRepeats,
    final,
    format_steps,
    model_of,
)
from infoflow_lens.studies.plots import BLUE, GREY, ORANGE, Axis, Curves, FigureSpec, Panel
from infoflow_lens.studies.study import Row, Settings, Statement
from infoflow_lens.studies.tables import Column, Part, TableSpec, groups

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BATCH = 32
_CARRIED = 0.5  # of the variance that a head of this width can carry, the least share recovered
_BY_CHANCE = 0.1  # of it, the most that a control's map recovers
_COSTS = 1.0  # nats that an ablation costs at least
_STRETCH = (20, 33)  # different ids before they repeat
_MORE = 4  # times as many sequences for recovery, whose maps are large

Head = tuple[int, int]


class Induction(OnRepeats):
    """Mechanism, recovery and ablation of heads with high prefix matching."""

    name: ClassVar[str] = "induction"
    title: ClassVar[str] = "Is the induction circuit what it is said to be?"
    statement: ClassVar[Statement] = Statement.read("induction")
    windows: ClassVar[Mapping[str, int]] = {"smoke": 10, "quick": 64, "full": 256}

    def measure(self, settings: Settings, seed: int, device: str) -> list[Row]:
        """Return a row for each head."""
        model = load_snapshot(self.source_of(settings), device)
        half, n = settings["half"], settings["n"]
        vocabulary, begin = ids_of(model, half)
        draw = derive_seed("induction", seed)
        # the token behind the first of the second half is the first that can be known
        ids = repeat_random(vocabulary, n, half, draw, begin)
        seen = _Seen(model, ids, range(half + 1, 2 * half))
        # In every sequence the stretch has another length. If all had one, the place of the token
        # to copy would be the same in all, and a specific position would be as good as a maximum.
        shortest, longest = (min(size, half) for size in _STRETCH)
        stretches = repeat_stretches(
            vocabulary, _MORE * n, 2 * half, shortest, longest, draw, begin
        )
        # behind the longest stretch every sequence repeats, so the next token is known
        known = range(longest + 1, 2 * half)
        mechanisms = measure_mechanisms(
            model,
            stretches[:n],
            held_out=False,  # as in the published rows
            read=tuple(known),
            threshold=0.05,
            batch_size=_BATCH,
            progress=False,
        )
        probe = RecoveryProbe(
            (1,), without=(0,), controls=("random", "shuffled"), maps=False, seed=seed
        )
        (recovered,) = run_probes(model, stretches, [probe], batch_size=_BATCH, progress=False)
        labels = mechanisms.mechanisms()
        induction = [head for head, score in seen.prefix_matching.items() if score > IS_INDUCTION]
        together: dict[str, Any] = {"loss": seen.loss, "induction_ablated": None}
        together |= dict.fromkeys(f"induction_{ideal}" for ideal in IDEALS)
        if induction:
            varied = _Seen(model, stretches[:n], known)
            # heads may stand in for each other, so they are replaced together as well as one by one
            together["induction_ablated"] = seen.loss_without(induction, zero=False)
            for ideal in IDEALS:
                with substituted(model, dict.fromkeys(induction, ideal), mechanisms.mean_patterns):
                    together[f"induction_{ideal}"] = varied.divergence()
        rows: list[Row] = []
        bounds = [_bound(model, stretches, mean.shape[1]) for mean in seen.means]
        frame = recovered.to_frame().set_index(["layer", "head"])
        for layer, head in seen.prefix_matching:
            found = frame.loc[layer, head]
            rows.append(
                {
                    "layer": layer,
                    "head": head,
                    "prefix_matching": seen.prefix_matching[layer, head],
                    "previous_token": seen.previous_token[layer, head],
                    "mechanism": labels[layer][head],
                    **{
                        f"damage_{ideal}": float(mechanisms.damage[layer][head, i])
                        for i, ideal in enumerate(IDEALS)
                    },
                    "fvu": float(found["fvu"]),
                    "fvu_bound": bounds[layer],
                    "fvu_random": float(found["fvu_random"]),
                    "fvu_shuffled": float(found["fvu_shuffled"]),
                    "mean_ablated": seen.loss_without([(layer, head)], zero=False),
                    "zero_ablated": seen.loss_without([(layer, head)], zero=True),
                    **together,
                }
            )
        return rows

    def tables(self) -> Sequence[Part]:
        """Show each way by model and step; then the heads of the circuit."""
        return (
            TableSpec(
                ("model", "step"),
                (
                    Column(
                        "loss on repeats (nats)", lambda rows: _Circuit.read(rows).loss, form=".2f"
                    ),
                    Column("induction heads", lambda rows: len(_Circuit.read(rows).induction)),
                    Column("largest prefix matching", "prefix_matching", "most", ".2f"),
                    *(
                        Column(way, partial(_confirms, claims))
                        for way, claims in self._ways().items()
                    ),
                ),
                rows=format_steps,
            ),
            "Heads of the circuits at the last step: damage in nats of divergence when the pattern "
            "is replaced, fvu of the attended token beside its control's (random keys for the "
            "previous-token head, shuffled ones for induction heads) and the least that a linear "
            "map behind one head of that width can reach, and the rise of the loss when the output "
            "is replaced by its mean or by zero",
            TableSpec(
                ("model", "name"),
                (
                    Column("role", "role", "first"),
                    Column("score", "score", "first", ".2f"),
                    Column("mechanism", "mechanism", "first"),
                    *(
                        Column(ideal.replace("_", " "), f"damage_{ideal}", "first", ".3f")
                        for ideal in IDEALS[:4]
                    ),
                    Column("fvu", "fvu", "first", ".2f"),
                    Column("least", "fvu_bound", "first", ".2f"),
                    Column("control", "control", "first", ".2f"),
                    Column("mean", "mean", "first", "+.2f"),
                    Column("zero", "zero", "first", "+.2f"),
                ),
                rows=_heads,
                names={"name": "head"},
            ),
            "All induction heads at once, replaced by one ideal (nats of divergence), or by "
            "their mean outputs (rise of the loss)",
            TableSpec(
                ("model",),
                (
                    *(
                        Column(ideal.replace("_", " "), f"induction_{ideal}", "mean", ".3f")
                        for ideal in IDEALS
                    ),
                    Column("ablated", "ablated", "mean", "+.2f"),
                ),
                rows=_together,
            ),
        )

    def plots(self) -> FigureSpec:
        """Give scores and losses over training, and what each head's ablation costs at its end."""
        scores = [
            Curves(
                "step", column, style=".-", colour=colour, label=f"largest {name}", rows=_largest
            )
            for column, name, colour in (
                ("prefix_matching", "prefix matching", ORANGE),
                ("previous_token", "previous token", BLUE),
            )
        ]
        loss = Curves("step", "loss", style=".:", colour=GREY, label="")
        costs = Axis("rise of the loss without the head (nats)")
        return FigureSpec(
            (
                Panel(scores, Axis("training step"), Axis("attention", limits=(0, 1)), model_of),
                Panel((loss,), Axis("training step"), Axis("loss on repeats (nats)")),
                Panel((_draw_costs,), y=costs, rows=final),
            ),
            per="model",
        )

    def claims(self) -> Sequence[Claim]:
        """Judge the last snapshot of every model that has an induction head."""
        there = Claim(
            f"models with an induction head (prefix matching above {IS_INDUCTION:g}) are {{bound}}",
            lambda results: {"": len(_collect(lambda circuit: {"": 1}, results))}, ">=", 1,
        )  # fmt: skip
        return (there, *(claim for claims in self._ways().values() for claim in claims))

    def _ways(self) -> Mapping[str, Sequence[Claim]]:
        """Return the claims of each of the three ways to measure."""
        return {
            "mechanism": (
                Claim(
                    "of its previous-token head and its induction head {bound} have the labels "
                    "specific_position and max_position",
                    partial(_collect, _Circuit.count_labels), ">=", 2,
                ),
            ),
            "recovery": (
                Claim(
                    "of what a head of that width can carry of their tokens {bound} is recovered",
                    partial(_collect, _Circuit.recovery), ">=", _CARRIED,
                ),
                Claim(
                    "of the control's {bound}", partial(_collect, _Circuit.chance),
                    "<=", _BY_CHANCE,
                ),
            ),
            "ablation": (
                Claim(
                    "without the previous-token head, and without all induction heads, the loss on "
                    "repeated tokens rises by {bound} nats",
                    partial(_collect, _Circuit.costs), ">", _COSTS,
                ),
                Claim(
                    "without each of these heads alone it rises by {bound} more than without any "
                    "other head of its layer",
                    partial(_collect, _Circuit.lead), ">", 0,
                ),
            ),
        }  # fmt: skip

    def control_results(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """Return rows with the recovery of other keys in place of the attended ones."""
        return {name: results.assign(fvu=results[f"fvu_{name}"]) for name in ("random", "shuffled")}


def _confirms(claims: Sequence[Claim], snapshot: "pd.DataFrame") -> str | None:
    """Say whether claims hold for the rows of one snapshot; None without a circuit."""
    if not _Circuit.read(snapshot).induction:
        return None
    verdicts = [claim.judge(snapshot.assign(final=True)) for claim in claims]
    return "confirms" if all(verdict.passed for verdict in verdicts) else "disagrees"


def _circuits(results: "pd.DataFrame") -> "dict[str, _Circuit]":
    """Return the circuit of the last snapshot of each model that has an induction head."""
    found = {model: _Circuit.read(rows) for (model,), rows in groups(final(results), ("model",))}
    return {model: circuit for model, circuit in found.items() if circuit.induction}


def _collect(
    numbers: "Callable[[_Circuit], Mapping[str, float]]", results: "pd.DataFrame"
) -> Numbers:
    """Collect numbers of each circuit."""
    return {
        f"{model} {label}".strip(): number
        for model, circuit in _circuits(results).items()
        for label, number in numbers(circuit).items()
    }


def _heads(results: "pd.DataFrame") -> "pd.DataFrame":
    """Return a row for each head of the circuits."""
    rows = [
        {
            **circuit.row(head), "model": model, "name": _label(head), "role": role,
            "score": circuit.row(head)[score], "control": circuit.row(head)[control],
            "mean": circuit.row(head)["mean_ablated"] - circuit.loss,
            "zero": circuit.row(head)["zero_ablated"] - circuit.loss,
        }
        for model, circuit in _circuits(results).items()
        for role, score, control, heads in circuit.roles()
        for head in heads
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=None if rows else ["model", "name"])


def _together(results: "pd.DataFrame") -> "pd.DataFrame":
    """Return the rows of models with a circuit, with what its induction heads cost together."""
    rows = final(results)
    rows = rows[rows["model"].isin(list(_circuits(results)))]
    return rows.assign(ablated=rows["induction_ablated"] - rows["loss"])


def _largest(rows: "pd.DataFrame") -> "pd.DataFrame":
    return rows.groupby("step")[["prefix_matching", "previous_token"]].max().reset_index()


def _draw_costs(axes: "Axes", rows: "pd.DataFrame") -> None:
    """Draw what each head's ablation costs; the circuit in colour."""
    circuit = _Circuit.read(rows)
    rises = circuit.rises()
    axes.bar(
        [_label(head) for head in rises.index], rises,
        color=[ORANGE if head in circuit.induction else BLUE if head == circuit.previous else
               "#bbbbbb" for head in rises.index],
    )  # fmt: skip
    axes.tick_params(axis="x", rotation=90, labelsize="small")


@dataclass(frozen=True)
class _Circuit:
    """The circuit of one snapshot, as the rule reads it.

    Attributes:
        heads: a row a head, by layer and head.
        induction: heads with prefix matching above .5, the largest first.
        previous: the previous-token head in a layer before the first of these; None without one.
        loss: on repeats, nats a token.
        together: what replacing all induction heads costs.
    """

    heads: "pd.DataFrame"
    induction: tuple[Head, ...]
    previous: Head | None
    loss: float
    together: Mapping[str, float]

    @classmethod
    def read(cls, rows: "pd.DataFrame") -> "_Circuit":
        # means over seeds
        values = rows.groupby(["layer", "head"])
        heads = values.mean(numeric_only=True)
        # labels have no mean: the most frequent one of the seeds
        heads["mechanism"] = values["mechanism"].agg(lambda names: names.mode().iloc[0])
        named = heads[heads["prefix_matching"] > IS_INDUCTION]["prefix_matching"]
        induction = tuple(named.sort_values(ascending=False).index)
        previous = None
        if induction:
            before = heads[heads.index.get_level_values("layer") < induction[0][0]]
            previous = before["previous_token"].idxmax() if len(before) else None
        together = {str(name): value for name, value in heads.iloc[0].items()}
        return cls(heads, induction, previous, float(heads["loss"].iloc[0]), together)

    def row(self, head: Head) -> Any:
        """Return what was measured of a head."""
        return self.heads.loc[head]

    def roles(self) -> list[tuple[str, str, str, tuple[Head, ...]]]:
        """List each role, its score, its control and its heads."""
        before = () if self.previous is None else (self.previous,)
        return [
            ("previous token", "previous_token", "fvu_random", before),
            ("induction", "prefix_matching", "fvu_shuffled", self.induction),
        ]

    def count_labels(self) -> dict[str, float]:
        """Count how many of the two heads have the expected label."""
        labels = dict(
            zip((self.previous, self.induction[0]), ("specific_position", "max_position"))
        )
        return {
            "": float(sum(h is not None and self.row(h)["mechanism"] == labels[h] for h in labels))
        }

    def recovery(self) -> dict[str, float]:
        """Return the recovered share of what the head's width can carry, by head."""
        return self._share_of_room("fvu", "fvu")

    def chance(self) -> dict[str, float]:
        """Return the share of it that the controls recover, by head."""
        return self._share_of_room("fvu_random", "fvu_shuffled")

    def _share_of_room(self, before: str, after: str) -> dict[str, float]:
        found = {}
        for head, name in ((self.previous, before), (self.induction[0], after)):
            row = None if head is None else self.row(head)
            found[_label(head)] = (
                math.nan if row is None else float((1 - row[name]) / (1 - row["fvu_bound"]))
            )
        return found

    def costs(self) -> dict[str, float]:
        """Return how much the loss rises, in nats a token, without heads of the circuit.

        These are the previous-token head, and all induction heads together.
        """
        jointly = float(self.together["induction_ablated"] - self.loss)
        alone = math.nan if self.previous is None else float(self.rises()[self.previous])
        return {_label(self.previous): alone, f"{len(self.induction)} induction heads": jointly}

    def lead(self) -> dict[str, float]:
        """Return by how many nats a token each head of the circuit leads the rest of its layer.

        That is how much more the loss rises without it than without any other head.
        """
        rises, circuit = self.rises(), (self.previous, *self.induction)
        layers = rises.index.get_level_values("layer")
        found = {}
        for head in circuit:
            if head is None:
                found[_label(head)] = math.nan
                continue
            # other induction heads do the same work, and are no rivals
            own = (head,) if head == self.previous else self.induction
            others = rises[(layers == head[0]) & ~rises.index.isin(own)]
            found[_label(head)] = float(rises[head] - (others.max() if len(others) else 0))
        return found

    def rises(self) -> "pd.Series[float]":
        """Return the rise of the loss without each head, in nats a token."""
        rises: pd.Series[float] = self.heads["mean_ablated"] - self.loss
        return rises


def _label(head: Head | None) -> str:
    return "no previous-token head" if head is None else "{}.{}".format(*head)


class _Seen:
    """The loss of a model on repeated random tokens, whole and with heads ablated."""

    def __init__(self, model: nn.Module, ids: Int[Tensor, "n pos"], known: Sequence[int]) -> None:
        self.model, self.ids, self.known = model, ids, torch.tensor(known)
        self.prefix_matching: dict[Head, float] = {}
        self.previous_token: dict[Head, float] = {}
        self.means: list[Float[Tensor, "_head d_head"]] = []
        n_layers = layer_count(model)
        self.z = [hook_name(model, f"blocks.{layer}.attn.hook_z") for layer in range(n_layers)]
        sums: dict[str, Any] = {}
        hooks: list[tuple[str, Callable[..., None]]] = []

        # sums over batches, so that patterns of one batch are in memory
        def add(key: str, value: Tensor) -> None:
            sums[key] = sums.get(key, 0) + value.double()

        for layer in range(n_layers):
            for point in (pattern_hook(model, layer), self.z[layer]):

                def catch(
                    activation: Tensor,
                    hook: Any,
                    # defaults hold this layer's values, a closure would see the last one's
                    point: str = point,
                    is_pattern: bool = point != self.z[layer],
                ) -> None:
                    if is_pattern:
                        pattern = activation.detach().float().cpu()[None]
                        add(f"{point} prefix", len(pattern[0]) * prefix_matching(pattern)[0])
                        add(f"{point} previous", len(pattern[0]) * previous_token(pattern)[0])
                    else:
                        add(point, activation.detach().float().sum(dim=(0, 1)))

                hooks.append((point, catch))
        # one pass over all texts gives scores, mean outputs and losses
        with model.hooks(fwd_hooks=hooks):  # type: ignore[operator]
            self.log_probabilities = self._run()
        self.loss = self._loss(self.log_probabilities)
        for layer in range(n_layers):
            point = pattern_hook(model, layer)
            for name, scores in (
                ("prefix", self.prefix_matching),
                ("previous", self.previous_token),
            ):
                for head, score in enumerate((sums[f"{point} {name}"] / len(ids)).tolist()):
                    scores[layer, head] = score
            n_heads = len(sums[f"{point} prefix"])
            # over all tokens; z may come flat, so the heads are split here
            mean = sums[self.z[layer]] / (len(ids) * ids.shape[1])
            self.means.append(mean.float().view(n_heads, -1))

    def _run(self) -> Float[Tensor, "n known vocabulary"]:
        """Return log-probabilities of the next token where it can be known."""
        device = next(self.model.parameters()).device
        with eval_mode(self.model):
            parts = [
                self.model(rows.to(device))[:, self.known].float().log_softmax(dim=-1).cpu()
                for rows in self.ids.split(_BATCH)
            ]
        return torch.cat(parts)

    def _loss(self, log_probabilities: Float[Tensor, "n known vocabulary"]) -> float:
        target = self.ids[:, self.known + 1, None]
        return -float(log_probabilities.gather(2, target).double().mean())

    def divergence(self) -> float:
        """Return KL of the model as it is now from the model as it was, nats."""
        now, before = self._run(), self.log_probabilities
        return float((before.exp() * (before - now)).sum(dim=2).double().mean())

    def loss_without(self, heads: Sequence[Head], zero: bool) -> float:
        """Return the loss with the outputs of heads replaced by their means, or by zero."""
        hooks: list[tuple[str, Callable[..., Tensor]]] = []
        for layer in sorted({layer for layer, _ in heads}):
            own = [head for at, head in heads if at == layer]

            def replace(z: Tensor, hook: Any, layer: int = layer, own: Any = own) -> Tensor:
                means = self.means[layer].to(z)
                by_head = z.clone().view(*z.shape[:2], *means.shape)
                by_head[:, :, own] = 0 if zero else means[own]
                return by_head.view(z.shape)

            hooks.append((self.z[layer], replace))
        with self.model.hooks(fwd_hooks=hooks):  # type: ignore[operator]
            return self._loss(self._run())


def _bound(model: nn.Module, ids: Int[Tensor, "n pos"], d_head: int) -> float:
    """Return the least fvu of a linear map from `d_head` numbers to the embeddings of these tokens.

    It is the share of their variance outside the first `d_head` principal components.
    """
    name = hook_name(model, "hook_embed")
    with torch.no_grad():
        some = ids[:_BATCH].to(next(model.parameters()).device)
        caught = call(model, some, [name]).activations
    embedded = caught[name][:, 1:].flatten(0, 1).double().cpu()
    # a map behind one head sees d_head numbers: more components it cannot carry
    variances = torch.linalg.eigvalsh(torch.cov(embedded.T)).flip(0).clamp(min=0)
    return float(variances[d_head:].sum() / variances.sum())


def ids_of(model: nn.Module, half: int) -> tuple[int, int]:
    """Return the number of ids, and the one that begins a text.

    Raises:
        InfoFlowError: for a vocabulary or a context that is too small.
    """
    vocabulary = int(model.cfg.d_vocab)  # type: ignore[union-attr,arg-type]
    if half < 4 or vocabulary <= half:
        raise InfoFlowError(
            f"the model has {vocabulary} ids and room for {half} of them twice: expected more ids "
            "than that, and room for at least 4"
        )
    tokenizer: Any = getattr(model, "tokenizer", None)
    begin = next(
        (
            found
            for name in ("bos_token_id", "eos_token_id")
            if (found := getattr(tokenizer, name, None)) is not None
        ),
        0,
    )
    return vocabulary, int(begin)
