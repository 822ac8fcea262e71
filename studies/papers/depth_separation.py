"""One attention layer against two on the closest pair (InfoFlow 2026, Theorem 1)."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from infoflow_lens.foundation.lazy import pd
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.models.host import build_model
from infoflow_lens.objectives import nmse, outputs_of
from infoflow_lens.studies.bounds import depth_separation_bound
from infoflow_lens.studies.claims import Claim, Numbers
from infoflow_lens.studies.constructions import build_construction
from infoflow_lens.studies.plots import Axis, Curves, FigureSpec, Panel
from infoflow_lens.studies.stages import Stages, train_in_stages
from infoflow_lens.studies.study import (
    Pair,
    Row,
    Settings,
    Statement,
    VectorStudy,
    standardise,
)
from infoflow_lens.studies.tables import Column, Part, TableSpec, groups
from infoflow_lens.tasks import DepthSeparation
from infoflow_lens.training import TrainingConfig, train

_BATCH = 256
_D_HEAD = 3  # of the single head of every layer; scores x.y of tokens of R^3 need as many
_ONE, _TWO, _BUILT = "one layer", "two layers", "two layers, built"
_CAVEAT = (
    "The theorem speaks of the smallest uniform error that some weights of size at most 1 reach, "
    "up to constants; here stands the mean squared error of the weights that training found. "
    "So no slope here proves or disproves an exponent: training may stop above what a model can "
    "do, and a mean may be small where the largest error is not. The weights that are set by hand "
    "show what two layers can do: their scores have a factor beta of order log(T) / eps, which "
    "costs no parameters."
)


class DepthSeparationStudy(VectorStudy):
    """NMSE over the number of parameters, for one layer, two layers and weights set by hand.

    The paper proves the separation and prints no experiment, so all settings are [chosen]: a head a
    layer with three dimensions, in both depths, tokens on the unit sphere of R^3, E = 16, GELU. The
    encoder has a hidden layer, since the theorem lets the one layer encode tokens as it likes;
    encoder and MLPs have the same width, which grows. Targets are standardised for training. The
    longer the sequences, the longer two layers stay near NMSE 1 before they learn anything
    (pilots: hundreds of steps at T = 8, thousands at 12 and 16), so preset quick has T = 8, where
    the bound on one layer is weak. Preset full has T = 16, where it is not; there all models train
    on shorter sequences first (:class:`~infoflow_lens.studies.stages.Stages`).

    Exponents: for error eps one layer needs eps^-k parameters (see `depth_separation_bound`), two
    layers need O(1 / eps). With NMSE like eps^2, NMSE falls no faster than parameters^(-2 / k) for
    one layer, and like parameters^-2 for the best two layers.
    """

    name: ClassVar[str] = "depth_separation"
    title: ClassVar[str] = "What do two layers do that no width of one layer does?"
    finding: ClassVar[str] = (
        "one layer ends at {1} times the NMSE of two, with {0} times the parameters"
    )
    source: ClassVar[str] = "InfoFlow 2026, Theorem 1 (eq 8); App. A.1"
    statement: ClassVar[Statement] = Statement.read("depth_separation")
    presets: ClassVar[Mapping[str, int]] = {"smoke": 1, "quick": 2, "full": 3}

    def cases(self, preset: str) -> Sequence[Settings]:
        """Vary depth and width; and the precision of the construction."""
        widths: Mapping[str, Mapping[str, Sequence[int]]] = {
            "smoke": {_ONE: (4, 32), _TWO: (4, 8)},
            "quick": {_ONE: (8, 16, 32, 64, 128, 256), _TWO: (8, 16, 32, 64, 128)},
            "full": {_ONE: (16, 64, 256, 512), _TWO: (16, 64, 256)},
        }
        sizes: Mapping[str, Mapping[str, Any]] = {
            "smoke": {"n_tokens": 4, "n_train": 1000, "epochs": 4},
            "quick": {"n_tokens": 8, "n_train": 32000, "epochs": 35},
            "full": {
                "n_tokens": 16, "n_train": 64000, "lengths": [4, 8],
                "epochs_each": 8, "epochs": 4, "last_epochs": 40,
            },
        }  # fmt: skip
        trained = [
            {"model": model, "width": width, **sizes[preset]}
            for model, some in widths[preset].items()
            for width in some
        ]
        n_tokens = sizes[preset]["n_tokens"]
        built = [
            {"model": _BUILT, "eps": eps, "n_tokens": n_tokens}
            for eps in (0.2, 0.1, 0.05, 0.02, 0.01)
        ]
        return [*trained, *built]

    def architecture(self, settings: Settings) -> Architecture:
        """Return the trained models; the built ones have one of their own."""
        n_layers = 1 if settings["model"] == _ONE else 2
        return Architecture(
            n_heads=(1,) * n_layers,
            d_head=(_D_HEAD,) * n_layers,
            d_model=16,
            d_token=3,
            n_tokens=settings["n_tokens"],
            d_encoder=settings["width"],
            d_mlp=settings["width"],
            act_fn="gelu",
        )

    def memory(self, settings: Settings) -> int:
        """Count as any study over vectors does; little for built models, which are not trained."""
        return 0 if settings["model"] == _BUILT else super().memory(settings)

    def measure(self, settings: Settings, seed: int, device: str) -> list[Row]:
        """Return the error of one model, and its number of parameters."""
        if settings["model"] == _BUILT:
            validation = self._data(settings["n_tokens"], 2000, "validation", seed)
            return [_built(settings["n_tokens"], settings["eps"], validation)]
        # twice through the data before the rate is at its full height
        steps = math.ceil(settings["n_train"] / _BATCH)
        config = TrainingConfig(
            epochs=settings["epochs"],
            batch_size=_BATCH,
            lr=4e-3,
            warmup_steps=2 * steps,
            seed=seed,
        )

        def data(n_tokens: int) -> tuple[Pair, Pair]:
            return standardise(
                self._data(n_tokens, settings["n_train"], "train", seed),
                self._data(n_tokens, 2000, "validation", seed),
            )

        architecture = self.architecture(settings)
        model: nn.Module
        # long sequences are trained by growing them
        if "lengths" in settings:
            staged = train_in_stages(
                architecture, data, Stages.read(settings), config, model_seed=seed, device=device
            )
            model, training = staged.model, staged.last
        else:
            model = build_model(architecture, seed=seed, device=device)
            training = train(model, *data(settings["n_tokens"]), config, progress=False)
        return [
            {
                "nmse": training.nmse,
                "parameters": sum(weights.numel() for weights in model.parameters()),
                "best_epoch": training.best_epoch,
                "max_error": None,
            }
        ]

    def _data(self, n_tokens: int, n: int, part: str, seed: int) -> Pair:
        return self.draw(DepthSeparation(n_tokens=n_tokens, d_token=3), part, n, seed)

    def tables(self) -> Sequence[Part]:
        """Return errors by parameters, then slopes beside the exponents of the theorem."""
        errors = "nmse", Column("least NMSE", "nmse", "least", ".2e")
        slopes = (
            Column("fitted slope of log NMSE", lambda r: slope(_least(r)), form=".2f"),
            Column("exponent of the theorem", lambda rows: _state_exponent(rows)[0]),
            Column("slope that it stands for", lambda rows: _state_exponent(rows)[1]),
        )
        return (
            TableSpec(("model", "parameters"), errors, sort=True),
            TableSpec(("model",), slopes, sort=True),
            _precision,
            f"The paper prints no experiment. {_CAVEAT}",
        )

    def plots(self) -> FigureSpec:
        """Return NMSE over parameters, log-log, with the fitted lines."""
        seeds = Curves("parameters", "nmse", ["model"], "each", style="o", label="", alpha=0.5)
        laws = Curves("parameters", "nmse", ["line"], style="--", rows=_fit)
        sizes = Axis("parameters (built: those set)", "log")
        errors = Axis("validation NMSE (dotted: a constant)", "log", levels=[1])
        return FigureSpec([Panel([seeds, laws], sizes, errors)], size=(6.5, 4))

    def claims(self) -> Sequence[Claim]:
        """Judge the largest two-layer model against every one-layer model, and the slopes."""
        return (
            Claim(
                "the largest one-layer model has {bound} times the parameters of the largest with "
                "two layers",
                lambda r: _compare_depths(r, lambda one, two: one.index.max() / two.index.max()),
                ">=",
                1,
                name="parameters of one layer over those of two",
            ),
            Claim(
                "the best one-layer model has {bound} times the NMSE of the largest with two "
                "layers (least over seeds)",
                lambda r: _compare_depths(r, lambda one, two: one.min() / two.loc[two.index.max()]),
                ">=",
                5,
                name="NMSE of one layer over that of two",
            ),
            Claim(
                "the slope of the least NMSE over parameters (log-log) of two layers, minus that "
                "of one, is {bound}",
                lambda r: _compare_depths(r, lambda one, two: slope(two) - slope(one)),
                "<",
                0,
                name="slope of two layers minus that of one",
            ),
        )

    def remarks(self, results: "pd.DataFrame") -> Sequence[str]:
        """Return the errors and slopes of both."""
        remarks = []
        for (model,), rows in groups(results, ["model"], sort=True):
            errors = _least(rows)
            remarks.append(
                f"{model}: least NMSE {errors.min():.2e} to {errors.max():.2e} with "
                f"{errors.index.min()} to {errors.index.max()} parameters, slope "
                f"{slope(errors):.2f}"
            )
        return remarks

    def control_results(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """Put one layer in the place of two."""
        one = results[results["model"] == _ONE]
        return {"one layer twice": pd.concat([one, one.assign(model=_TWO)])}


def _built(n_tokens: int, eps: float, data: tuple[torch.Tensor, torch.Tensor]) -> Row:
    """Return the construction of Theorem 1, its errors and the number of weights that it sets."""
    model: Any = build_construction("depth_separation", n_tokens=n_tokens, eps=eps)[0]
    output = outputs_of(model, model.forward_readout, data[0])
    return {
        "nmse": nmse(output, data[1]),
        # weights that are set: the zeros of the host are no choice of the construction
        "parameters": sum(int((weights != 0).sum()) for weights in model.parameters()),
        "best_epoch": None,
        "max_error": float((output - data[1]).abs().max()),
    }


def _state_exponent(rows: "pd.DataFrame") -> tuple[str, str]:
    """State a model's exponent, by the theorem and by the sharper count, and the slope with it."""
    if rows["model"].iloc[0] != _ONE:
        return "at most 1", "-2 can be reached"
    n_tokens = int(rows["n_tokens"].iloc[0])
    bound, sharp = (
        depth_separation_bound(n_tokens, 1, _D_HEAD, sharp=sharp) for sharp in (False, True)
    )
    if sharp.vacuous:
        return "vacuous at this T", "any"
    exponents = "vacuous" if bound.vacuous else f"at least {bound.exponent:.3g}"
    return (
        f"{exponents} ({sharp.exponent:.3g} by the sharper count)",
        f"not below {-2 / sharp.exponent:.3g}",
    )


def _precision(results: "pd.DataFrame") -> str:
    """Return the largest errors of the models that are built, in words."""
    built = groups(results[results["model"] == _BUILT], ["eps"], sort=True)
    worst = ", ".join(f"{rows['max_error'].max():.2g} (eps = {eps:g})" for (eps,), rows in built)
    return f"Largest errors of the built models: {worst}; parameters are those set."


def _fit(results: "pd.DataFrame") -> "pd.DataFrame":
    """Fit power laws, at the sizes that were run."""
    laws = []
    for (model,), rows in groups(results, ["model"], sort=True):
        least = _least(rows)
        logs, power = np.log(least.index.to_numpy(dtype=float)), slope(least)
        # a line of least squares goes through the means of both logarithms
        line = np.exp(np.log(least.to_numpy()).mean() + power * (logs - logs.mean()))
        law = {"line": f"{model}, slope {power:.2f}", "parameters": least.index, "nmse": line}
        laws.append(pd.DataFrame(law))
    return pd.concat(laws)


def _least(rows: "pd.DataFrame") -> "pd.Series[float]":
    """Return the least NMSE over seeds by the number of parameters, of one kind of model."""
    return rows.groupby("parameters")["nmse"].min()


def slope(errors: "pd.Series[float]") -> float:
    """Give the slope of log NMSE over the log of sizes, its index; NaN for fewer than two sizes."""
    if len(errors) < 2:
        return math.nan
    x, y = np.log(errors.index.to_numpy(dtype=float)), np.log(errors.to_numpy())
    return float(np.polyfit(x, y, 1)[0])


def _compare_depths(results: "pd.DataFrame", number: Callable[[Any, Any], float]) -> Numbers:
    """Compare the least NMSE by parameters of one layer and of two; nothing without either."""
    one, two = (_least(results[results["model"] == model]) for model in (_ONE, _TWO))
    return {} if one.empty or two.empty else {"": float(number(one, two))}
