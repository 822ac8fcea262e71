"""How many layers a chain of questions needs (Chen & Zou 2024, Sec. 7)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from infoflow_lens.foundation.lazy import pd
from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.models.host import TokenTransformer
from infoflow_lens.studies.claims import Claim, Numbers
from infoflow_lens.studies.papers import token_models as tokens
from infoflow_lens.studies.plots import Axis, Curves, FigureSpec, Panel
from infoflow_lens.studies.study import Pair, Row, Settings, Statement
from infoflow_lens.studies.tables import Column, Part, TableSpec, groups
from infoflow_lens.tasks.tokens import TokenTask
from infoflow_lens.training import TrainingResult, evaluate_labels, train

_HOPS, _JUDGED_HOPS = (1, 2, 3), 2
_GROWING, _AT_ONCE = "growing", "at once"
_ASKED: Mapping[str, str] = {
    _GROWING: "asked from growing distances",
    _AT_ONCE: "asked from the starts alone",
}


@dataclass(frozen=True)
class _Plan:
    """A preset.

    Attributes:
        n_entities: entities of the task.
        n_train: sequences in an epoch.
        stage: epochs until questions are asked from a hop further.
        epochs: epochs of the last stage.
        layers: by hops, depths to train from a random start.
        noise: deviations around the construction.
    """

    n_entities: int
    n_train: int
    stage: int
    epochs: int
    layers: Mapping[int, tuple[int, ...]]
    noise: tuple[float, ...]


def fewest_layers(hops: int) -> int:
    """Count the layers of one max-position head that `hops` need, ceil(log2(2 hops + 1)) [derived].

    The answer hangs on 2 hops + 1 positions (both entities of every fact, and the query), and by
    update rule (1) (InfoFlow 2026, Sec. 5.1) one head a layer at most doubles what a state holds.
    As many are enough: layer 1 copies within facts; then every layer matches, at the sign and at
    all facts at once, so that facts of 1, 2, 4, .. hops take the sign 1, 3, 7, .. hops.
    """
    return (2 * hops).bit_length()


class NestedQuestions(tokens.TokenStudy):
    """Test accuracy for one to three hops, by layers, start, and how chains are asked in training.

    The context holds two chains, so a model that answers with any entity that is never asked about,
    an end of a chain, is right in half of the cases: `chance`. One ReLU head a layer, AdamW, every
    step on sequences that no step has seen. Models are tested on questions from the starts of
    chains alone, and validation, which chooses the epoch, has no others either.

    - "growing": from Gaussian W_QK and W_V, as wide as the construction; training asks at first
      from a hop before the end, of a model of two layers, then from one further with a layer more.
    - "at once": the same, asked from the starts alone.
    - "constructed": from the construction with a layer for each hop and one for copying, with noise
      on all weights; asked from the starts alone.

    `before` is the test accuracy without training, and `from_1`, `from_2`, .. that of the trained
    model when it is asked so many hops before the end. `end_last` is its accuracy where the last
    fact of the context ends one of the chains, `end_before` where it does not. All sizes and
    settings are [chosen].
    """

    name: ClassVar[str] = "nested_qa"
    title: ClassVar[str] = "How many attention layers do chains of questions need?"
    finding: ClassVar[str] = (
        "too few layers: {0} above chance, the most at 2 hops; enough layers: accuracy {1}"
    )
    source: ClassVar[str] = "Chen & Zou 2024, Sec. 7 (proposed there; no experiment)"
    statement: ClassVar[Statement] = Statement.read("nested_qa")
    presets: ClassVar[Mapping[str, int]] = {"smoke": 1, "quick": 2, "full": 5}
    judges_every_run: ClassVar[bool] = True

    def cases(self, preset: str) -> Sequence[Settings]:
        """Vary the start and way of asking, hops and layers, and noise."""
        plans: Mapping[str, _Plan] = {
            "smoke": _Plan(8, 256, 1, 1, {1: (1, 2), 2: (2, 3)}, (0.1,)),
            "quick": _Plan(8, 6400, 25, 50, {1: (1, 2), 2: (2, 3), 3: (2, 4)}, (0.03, 0.1, 0.3)),
            "full": _Plan(
                24,
                12800,
                100,
                200,
                {1: (1, 2, 3), 2: (1, 2, 3, 4), 3: (1, 2, 3, 4, 5)},
                (0.03, 0.05, 0.1, 0.15, 0.2, 0.3),
            ),
        }
        plan = plans[preset]
        base = {
            **tokens.FRESH,
            "preset": preset,
            "task": "nested_qa",
            "n_chains": 2,
            "n_entities": plan.n_entities,
            "n_train": plan.n_train,
        }
        cases = []
        for hops, depths in plan.layers.items():
            whole = {
                **base,
                "start": tokens.WHOLE,
                "hops": hops,
                "padding": (hops + 1) * plan.n_entities,
                "epochs": plan.epochs,
            }
            stages = {"asked": _GROWING, "stage": plan.stage}
            cases += [{**whole, **stages, "layers": layers} for layers in depths]
            if hops == _JUDGED_HOPS:
                # as many epochs in all
                epochs = plan.stage * (hops - 1) + plan.epochs
                once = {"asked": _AT_ONCE, "epochs": epochs}
                cases.append({**whole, **once, "layers": hops + 1})
        for hops in plan.layers:
            for noise in plan.noise:
                about = {"start": tokens.CONSTRUCTED, "form": "copy_once", "noise": noise}
                more = {"hops": hops, "layers": hops + 1, "epochs": max(1, plan.epochs // 6)}
                cases.append({**base, **about, **more, "asked": _AT_ONCE})
        return cases

    def train(self, settings: Settings, seed: int, device: str) -> tokens.TokenRun:
        """Train one model, at once or in stages."""
        if settings["asked"] == _GROWING:
            return _train_growing(self.name, settings, seed, device)
        return super().train(settings, seed, device)

    def extra_columns(self, settings: Settings, seed: int, run: tokens.TokenRun) -> Row:
        """Test accuracy before training, and of the trained model by distance from the end."""
        hops = int(settings["hops"])
        untrained, _ = tokens.start_model(settings, derive_seed(self.name, "weights", seed))
        untrained = untrained.to(next(run.model.parameters()).device)
        row: Row = {"before": evaluate_labels(untrained, (run.x, run.y)).accuracy}
        for near in range(1, hops + 1):
            x = move_queries(run.x, torch.full((len(run.x),), hops - near))
            row[f"from_{near}"] = evaluate_labels(run.model, (x, run.y)).accuracy
        last = ends_last(run.x)
        for name, some in (("end_last", last), ("end_before", ~last)):
            if some.any():
                row[name] = evaluate_labels(run.model, (run.x[some], run.y[some])).accuracy
        return row

    def judges(self, settings: Settings) -> bool:
        """Say whether the rule judges: constructions with noise are only reported."""
        return settings["start"] != tokens.CONSTRUCTED

    def tables(self) -> Sequence[Part]:
        """Test accuracies by start, hops and layers; then the layers that are enough by hand."""

        def layers(name: str, enough: Callable[[int], int]) -> Column:
            return Column(name, lambda runs: enough(int(runs["hops"].iloc[0])))

        columns: Sequence[Column | str] = (
            Column("chance", "chance", "mean"),
            Column("before training", "before"),
            "test_accuracy",
            Column("seeds >= .95", tokens.solving),
            Column("last fact ends a chain", "end_last"),
            Column("it does not", "end_before"),
            *(
                Column(f"asked {tokens.count_noun(n, 'hop')} before the end", f"from_{n}", "mean")
                for n in range(1, max(_HOPS))
            ),
        )
        by_hand = (
            layers("at least", fewest_layers),
            layers("copy-match a hop (the paper's design)", lambda hops: 2 * hops),
            layers("copy once, match a hop", lambda hops: hops + 1),
            layers("matching at facts, too", lambda hops: 1 + hops.bit_length()),
        )
        names = {"start": "start, and how training asks"}
        return (
            TableSpec(("start", "hops", "layers"), columns, _name_starts, names=names),
            "Test accuracy over seeds, mean (least to largest), of the epoch of the least "
            "validation loss, for questions from the starts of chains; of these, where the "
            "last fact of the context ends one of the chains, and where it does not; in the "
            "last columns the same models are asked from within. The paper proposes the task "
            "and gives no numbers. Layers of one head that are enough by weights set by hand, "
            "of which the last need two heads:",
            TableSpec(("hops",), by_hand, sort=True),
        )

    def plots(self) -> FigureSpec:
        """Return the plateau that growing distances avoid, what is learnt of chains, and noise."""

        def sizes(hops: float, layers: float) -> str:
            return (
                f"{tokens.count_noun(int(hops), 'hop')}, {tokens.count_noun(int(layers), 'layer')}"
            )

        colours = {_GROWING: "C1", _AT_ONCE: "C0"}
        losses = Curves(
            "epoch", "validation_loss", ["asked", "run"], "each", style="-",
            label=lambda asked, run: _ASKED[asked], colour=lambda asked, run: colours[asked],
        )  # fmt: skip
        asked = Curves("hops from the end", "accuracy", ["hops", "layers"], label=sizes, alpha=0.8)
        after, before = (
            Curves("noise", name, ["hops", "layers"], style=style, label=label)
            for name, style, label in (("test_accuracy", "o-", sizes), ("before", "o:", ""))
        )
        loss = Axis("validation loss (dotted: ln 2, either end)", "log", (1e-3, 10), [math.log(2)])
        accuracy = Axis("test accuracy (dotted: chance)", "linear", (-0.03, 1.03), [0.5])
        of_noise = Axis("test accuracy (dotted: before training)", "linear", (-0.03, 1.03))
        panels = [
            Panel([losses], Axis("epoch"), loss, sizes(_JUDGED_HOPS, _JUDGED_HOPS + 1), _epochs),
            Panel([asked], Axis("hops from the query to the end"), accuracy, _ASKED[_GROWING],
                  _find_accuracies),
            Panel([after, before], Axis("noise on all weights"), of_noise,
                  "construction plus noise", _select_built),
        ]  # fmt: skip
        return FigureSpec(panels, size=(3.8, 3.4))

    def claims(self) -> Sequence[Claim]:
        """Judge accuracy with too few layers, with just enough, and without growing distances."""
        return (
            Claim(
                "with fewer than ceil(log2(2 hops + 1)) layers the largest test accuracy over "
                "seeds and starts is {bound} above chance",
                _lead_of_few,
                "<=",
                tokens.ABOVE_CHANCE,
                name="accuracy above chance of too few layers",
            ),
            Claim(
                "from a Gaussian start asked from growing distances, the seed of the least "
                "validation loss has a test accuracy of {bound}",
                _accuracy_of_enough,
                ">=",
                tokens.SOLVED,
                name="accuracy of enough layers",
            ),
            Claim(
                "asked from the starts of chains alone, the largest test accuracy over seeds on "
                f"{tokens.count_noun(_JUDGED_HOPS, 'hop')} is " + "{bound} above chance",
                _lead_at_once,
                "<=",
                tokens.ABOVE_CHANCE,
                name="accuracy above chance, asked at once",
            ),
        )

    def remarks(self, results: "pd.DataFrame") -> Sequence[str]:
        """Return accuracies by depth and place, longer chains, and constructions with noise."""
        # of each kind of run the numbers that no claim has
        runs = tokens.last_epochs(results)
        remarks = []
        few = runs[runs["layers"] < runs["hops"].map(fewest_layers)]
        for hops, rows in few.groupby("hops"):
            highest = rows.loc[(rows["test_accuracy"] - rows["chance"]).idxmax()]
            by_place = (
                f", {highest['end_last']:.3f} where the last fact ends a chain, "
                f"{highest['end_before']:.3f} elsewhere"
                if hops > 1
                else ""
            )
            remarks.append(
                f"{tokens.count_noun(int(hops), 'hop')}, too few layers: highest test accuracy "
                f"{highest['test_accuracy']:.3f}{by_place}, chance {highest['chance']:.3f}"
            )
        whole = runs[runs["start"] == tokens.WHOLE]
        most = int(whole["hops"].max())
        rows = whole[(whole["hops"] == most) & (whole["asked"] == _GROWING)]
        if most > _JUDGED_HOPS and len(rows):
            rows = rows[rows["layers"] == rows["layers"].max()]
            best = rows.sort_values("best_validation_loss").iloc[0]
            accuracies = ", ".join(f"{best[f'from_{n}']:.3f}" for n in range(1, most + 1))
            remarks.append(
                f"{tokens.count_noun(most, 'hop')}, "
                f"{tokens.count_noun(int(best['layers']), 'layer')}: {accuracies} "
                f"when asked 1 to {most} hops before the end"
            )
        for noise, rows in runs[runs["start"] == tokens.CONSTRUCTED].groupby("noise"):
            remarks.append(
                f"construction plus noise of {noise:g}: test accuracy "
                f"{rows['before'].min():.3f} to {rows['before'].max():.3f} before training, "
                f"{rows['test_accuracy'].min():.3f} to {rows['test_accuracy'].max():.3f} after"
            )
        return remarks

    def control_results(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """Give every depth the accuracies of a layer less; exchange both ways of asking."""
        deeper = results.assign(layers=results["layers"] + 1)
        deepest = results.groupby("hops")["layers"].max()
        deeper = deeper[deeper["layers"] <= deeper["hops"].map(deepest)]
        # the ways of asking are compared at one depth, which both have
        shared = (results["start"] == tokens.WHOLE) & (results["hops"] == _JUDGED_HOPS)
        shared &= results["layers"] == _JUDGED_HOPS + 1

        def only(asked: str) -> "pd.DataFrame":
            """Return the runs of one way of asking, told as those of either."""
            rows = results[shared & (results["asked"] == asked)]
            twin = rows.assign(
                asked=_AT_ONCE if asked == _GROWING else _GROWING,
                run=rows["run"] + results["run"].max() + 1,
            )
            return pd.concat([results[~shared], rows, twin])

        return {
            "a layer less": deeper,
            "asked from the starts alone": only(_AT_ONCE),
            "no plateau": only(_GROWING),
        }


def ends_last(x: Tensor) -> Tensor:
    """Return nested questions [sample, pos] whose last fact ends a chain:
    nothing is told of its end.
    """
    return (x[:, 0:-2:3] != x[:, -3:-2]).all(dim=1)


def move_queries(x: Tensor, hops: Tensor) -> Tensor:
    """Move the query of nested questions [sample, pos] by `hops` [sample] along its chain."""
    x = x.clone()
    for done in range(int(hops.max()) if len(hops) else 0):
        # no entity starts two facts, so the first match is the only one
        fact = (x[:, 0:-2:3] == x[:, -2:-1]).int().argmax(1, keepdim=True)
        x[:, -2] = torch.where(hops > done, x[:, 2::3].gather(1, fact)[:, 0], x[:, -2])
    return x


def _train_growing(study: str, settings: Settings, seed: int, device: str) -> tokens.TokenRun:
    """Train a model that grows with the distance from which it is asked.

    Stage k asks from at most k hops before the end, half of the questions from just k, with k + 1
    layers, or as many as the model has; it is validated from just k. A layer that comes is
    Gaussian as all are, its W_V a tenth of that, so that at first it leaves what those below it
    found as it is.
    """
    hops, layers = int(settings["hops"]), int(settings["layers"])
    weights = derive_seed(study, "weights", seed)
    model: TokenTransformer | None = None
    training: TrainingResult | None = None
    history: list[Mapping[str, float | int]] = []
    # one hop more in each stage, and a layer more until all are there
    for stage in range(1, hops + 1):
        last = stage == hops
        depth = layers if last else min(layers, stage + 1)
        before, (model, task) = model, tokens.start_model({**settings, "layers": depth}, weights)
        if before is not None:
            _take_over(model, before)
        model = model.to(device)
        rows = task.dataset("validation", settings["n_test"], seed).with_format("torch")[:]
        x, y = rows["x"], rows["y"]
        config = tokens.training_config(settings, derive_seed("stage", seed, stage))
        # stages before the last are short, and keep the rate
        if not last:
            config = replace(config, epochs=settings["stage"], lr_end=config.lr)
        training = train(
            model,
            _draw_within(task, settings, stage, config.seed),
            (move_queries(x, torch.full((len(x),), hops - stage)), y),
            config,
            progress=False,
        )
        done = len(history)
        history += [{**row, "epoch": int(row["epoch"]) + done} for row in training.history]
    assert model is not None
    assert training is not None
    # one history, as of one training
    whole = replace(training, history=tuple(history), best_epoch=training.best_epoch + done)
    return tokens.TokenRun(model, task, whole, *tokens.draw_test(study, task, settings, seed))


def _take_over(model: TokenTransformer, before: TokenTransformer) -> None:
    """Copy the weights of a shallower model; the layers above begin with a tenth of W_V."""
    smaller = dict(before.named_parameters())
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name in smaller:
                weights.copy_(smaller[name])
        for block in model.blocks[len(before.blocks) :]:
            block.attn.W_V.mul_(0.1)


def _draw_within(
    task: TokenTask, settings: Settings, furthest: int, seed: int
) -> Callable[[int], Pair]:
    """Return what draws questions of an epoch, at most `furthest` hops before the end."""
    drawn = tokens.data_of(task, settings, seed)

    def draw(epoch: int) -> Pair:
        x, y = drawn(epoch)
        generator = torch.Generator().manual_seed(derive_seed("asked", seed, epoch))
        near = torch.randint(1, furthest + 1, (len(x),), generator=generator)
        # half of the questions are from the new distance; the others keep what was learnt
        near[torch.rand(len(x), generator=generator, dtype=torch.float32) < 0.5] = furthest
        return move_queries(x, int(settings["hops"]) - near), y

    return draw


def _name_starts(results: "pd.DataFrame") -> "pd.DataFrame":
    """Name runs by start, way of asking and noise; keep distances below the hops."""
    runs = tokens.last_epochs(results)
    parts = []
    for (start, asked, noise), some in groups(runs, ["start", "asked", "noise"]):
        name = (
            f"construction plus noise of {noise:g}"
            if start == tokens.CONSTRUCTED
            else tokens.STARTS[start]
        )
        parts.append(some.assign(start=f"{name}, {_ASKED[asked]}").sort_values(["hops", "layers"]))
    by_start = pd.concat(parts)
    # at one hop every fact ends a chain; from all hops away is the test itself
    places = dict.fromkeys(("end_last", "end_before"), 1)
    for name, hops in {**places, **{f"from_{n}": n for n in _HOPS}}.items():
        # fewer hops have been run than there are columns
        known = by_start.get(name, math.nan)
        by_start[name] = pd.Series(known, by_start.index).where(by_start["hops"] > hops)
    return by_start


def _epochs(results: "pd.DataFrame") -> "pd.DataFrame":
    """Select the epochs of the runs with which both ways of asking are compared."""
    judged = results[(results["hops"] == _JUDGED_HOPS) & (results["start"] == tokens.WHOLE)]
    return judged[judged["layers"] == _JUDGED_HOPS + 1]


def _find_accuracies(results: "pd.DataFrame") -> "pd.DataFrame":
    """Find by hops from the end the accuracy of each depth's run of least validation loss."""
    runs = tokens.last_epochs(results).sort_values("best_validation_loss", kind="stable")
    runs = runs[runs["asked"] == _GROWING].drop_duplicates(["hops", "layers"])
    runs = runs.sort_values(["hops", "layers"]).rename(columns={f"from_{n}": n for n in _HOPS})
    distances = [hops for hops in _HOPS if hops in runs]
    at = runs.melt(["hops", "layers"], distances, "hops from the end", "accuracy")
    return at.dropna(subset="accuracy").sort_values(["hops", "layers"], kind="stable")


def _select_built(results: "pd.DataFrame") -> "pd.DataFrame":
    runs = tokens.last_epochs(results)
    return runs[runs["start"] == tokens.CONSTRUCTED]


def _lead_of_few(results: "pd.DataFrame") -> Numbers:
    """Return the largest lead over chance, by hops; NaN where no run with too few layers ended."""
    runs = tokens.last_epochs(results)
    found = {}
    for hops in sorted(int(h) for h in runs["hops"].unique()):
        few = runs[(runs["hops"] == hops) & (runs["layers"] < fewest_layers(hops))]
        found[tokens.count_noun(hops, "hop")] = float((few["test_accuracy"] - few["chance"]).max())
    return found


def _select_runs(results: "pd.DataFrame", hops: int, asked: str) -> "pd.DataFrame":
    """Select the runs from a Gaussian start with just enough layers."""
    runs = tokens.last_epochs(results)
    runs = runs[(runs["start"] == tokens.WHOLE) & (runs["layers"] == hops + 1)]
    return runs[(runs["hops"] == hops) & (runs["asked"] == asked)]


def _accuracy_of_enough(results: "pd.DataFrame") -> Numbers:
    found = {}
    for hops in (1, _JUDGED_HOPS):
        rows = _select_runs(results, hops, _GROWING)
        label = f"{tokens.count_noun(hops, 'hop')}, {tokens.count_noun(hops + 1, 'layer')}"
        found[label] = tokens.chosen_accuracy(rows) if len(rows) else math.nan
    return found


def _lead_at_once(results: "pd.DataFrame") -> Numbers:
    rows = _select_runs(results, _JUDGED_HOPS, _AT_ONCE)
    return {"": float((rows["test_accuracy"] - rows["chance"]).max())}
