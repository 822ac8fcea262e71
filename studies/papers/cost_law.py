"""What a state of width E tells of |I| tokens: the cost law on trained codes (Theorem 3)."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from infoflow_lens.foundation.lazy import pd
from infoflow_lens.foundation.modules import SeededRandom, derive_seed
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.models.host import build_model
from infoflow_lens.objectives import nmse
from infoflow_lens.studies.claims import Claim, Numbers
from infoflow_lens.studies.papers.depth_separation import slope
from infoflow_lens.studies.papers.rows import numbers_of
from infoflow_lens.studies.plots import Axis, Curves, FigureSpec, Panel
from infoflow_lens.studies.study import (
    Pair,
    Row,
    Settings,
    Statement,
    Study,
    standardise,
)
from infoflow_lens.studies.tables import Column, Part, TableSpec, Words
from infoflow_lens.tasks import IntrinsicDimension
from infoflow_lens.theory.cost import DigitCode, exponent
from infoflow_lens.training import TrainingConfig, train

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CODE, _TRAINED = "digit code", "trained"
_DECODER, _LAYERS = "trained decoder of the digit code", "two layers"
_SIZES = ["size", "d_token", "d_model"]
_ENCODER = 128  # hidden units of either layer of a trained encoder
_VALIDATION = 4000  # sets of tokens that errors are measured on


class CostLaw(Study):
    """Error of |I| tokens that are read off E numbers, over the units of the decoder.

    No paper has this experiment: all settings are [chosen]. Tokens are uniform on a cube, and the
    error is the NMSE of all their coordinates. By the law a decoder of error eps has eps^(-|I| d/E)
    units, so with u units for each of the E numbers the NMSE is like u^(-2 E / (|I| d)).

    - "digit code": Theorem 3's code, built and run
      (:class:`~infoflow_lens.theory.cost.DigitCode`).
    - "trained": an encoder of two hidden layers of 128 units and a decoder of one hidden layer,
      trained together on tokens that no step has seen. Codes need not stay in a box.
    - "trained decoder of the digit code": the encoder is the code's, with as many bits as the
      decoder has units for; whether it is the decoder that training does not find.
    - "two layers": a Transformer on the best pair under a rotation, heads (1, 1) behind a linear
      encoder, T = 4 and d = 3. A state of its first layer has to tell of two tokens, so the law's
      exponent is 6 / E. Its target is one number, so the law is no bound of its error.
    """

    name: ClassVar[str] = "cost_law"
    title: ClassVar[str] = "What does it cost to hold |I| tokens in a state of width E?"
    finding: ClassVar[str] = (
        "a code by hand follows the law (slope {0} of it), trained codes do not ({4})"
    )
    source: ClassVar[str] = "InfoFlow 2026, Theorem 3, Sec. 5.2"
    statement: ClassVar[Statement] = Statement.read("cost_law")
    presets: ClassVar[Mapping[str, int]] = {"smoke": 1, "quick": 3, "full": 5}

    def cases(self, preset: str) -> Sequence[Settings]:
        """Vary built codes by bits, trained ones by units for each latent, two layers by E."""
        few = [(2, 2, 4), (3, 1, 2), (2, 1, 1), (4, 2, 4), (3, 1, 1), (3, 2, 2), (4, 2, 2)]
        more = [(4, 1, 2), (6, 2, 4), (8, 2, 4), (4, 1, 1)]
        states: Mapping[str, Sequence[tuple[int, int, int]]] = {
            "smoke": [(2, 1, 2), (2, 1, 1), (3, 1, 1)],
            "quick": few,
            "full": [*few, *more],
        }
        units: Mapping[str, Sequence[int]] = {
            "smoke": (4, 16),
            "quick": (4, 16, 64),
            "full": (4, 16, 64, 256),
        }
        training: Mapping[str, Mapping[str, int]] = {
            "smoke": {"epochs": 1, "n_train": 1024},
            "quick": {"epochs": 48, "n_train": 16384},
            "full": {"epochs": 192, "n_train": 16384},
        }
        widths = {"smoke": (3, 12), "quick": (3, 6, 12, 24), "full": (2, 3, 4, 6, 8, 12, 24)}
        of_states = [dict(zip(_SIZES, sizes, strict=True)) for sizes in states[preset]]
        # where all coordinates fit, there is nothing to code
        coded = [s for s in of_states if _exponent(s) > 1]
        return [
            *({"model": _CODE, **s, "bits": bits} for s in coded for bits in _bits(s)),
            *(
                {"model": _TRAINED, **s, "units": u, **training[preset]}
                for s in of_states
                for u in units[preset]
            ),
            *(
                {"model": _DECODER, **s, "units": u, **training[preset]}
                for s in coded
                if _exponent(s) == 2
                for u in units[preset]
            ),
            *(
                {"model": _LAYERS, **dict(zip(_SIZES, (2, 3, e), strict=True)), **training[preset]}
                for e in widths[preset]
            ),
        ]

    def measure(self, settings: Settings, seed: int, device: str) -> list[Row]:
        """Give the error of one code or model, its units, and the error that the law gives them."""
        model = settings["model"]
        if model == _LAYERS:
            return [{"nmse": self._two_layers(settings, seed, device), "law": _exponent(settings)}]
        if model == _CODE:
            x = self._tokens(settings, "validation", seed, _VALIDATION)
            code = _digit_code(settings, settings["bits"])
            return [
                {
                    "nmse": nmse(code.decode(code.encode(x)), x),
                    "width": code.decoder_units,
                    "law": _exponent(settings),
                    "law_nmse": _predict(settings, 2**code.bits_per_latent),
                }
            ]
        error = self._train_decoder(settings, seed, device)
        return [
            {
                "nmse": error,
                "width": settings["units"] * settings["d_model"],
                "law": _exponent(settings),
                "law_nmse": _predict(settings, settings["units"]),
            }
        ]

    def memory(self, settings: Settings) -> int:
        """Return the bytes of three copies of the tokens and of the widest layer's values."""
        rows = settings.get("n_train", 0) + _VALIDATION
        widest = max(_ENCODER, settings.get("units", 1) * settings["d_model"])
        numbers = 2 * settings["size"] * settings["d_token"]
        return 4 * (3 * rows * numbers + 2 * _VALIDATION * widest)

    def judges(self, settings: Settings) -> bool:
        """Say whether the rule judges these settings.

        It is about codes; numbers of single decoders and Transformers are only reported.
        """
        return settings["model"] in (_CODE, _TRAINED)

    def _tokens(
        self, settings: Settings, part: str, seed: int, n: int
    ) -> Float[Tensor, "sample coordinate"]:
        """Return coordinates of |I| tokens in [0, 1)."""
        generator = torch.Generator().manual_seed(derive_seed(self.name, part, seed))
        return torch.rand(
            n, settings["size"] * settings["d_token"], generator=generator, dtype=torch.float32
        )

    def _train_decoder(self, settings: Settings, seed: int, device: str) -> float:
        """Return the error of a decoder, with an encoder that is trained, too, or the code's."""
        size, n = settings["d_model"], settings["size"] * settings["d_token"]
        decoder = [(size, settings["units"] * size), (settings["units"] * size, n)]
        encoder, code = [(n, _ENCODER), (_ENCODER, _ENCODER), (_ENCODER, size)], None
        if settings["model"] == _DECODER:
            encoder, code = [], _digit_code(settings, _affordable_bits(settings))
        with SeededRandom(derive_seed(self.name, "weights", seed)):
            model = nn.Sequential(*_layers(encoder), *_layers(decoder)).to(device)

        def draw(part: str, n: int) -> Pair:
            x = self._tokens(settings, part, seed, n)
            # a trained encoder is part of the model, which then takes the tokens themselves
            latents = x if code is None else code.encode(x.double()).float()
            return 2 * latents - 1, 2 * x - 1  # zero in the middle

        config = TrainingConfig(
            epochs=settings["epochs"], lr=1e-2, warmup_steps=100, weight_decay=0.0, seed=seed
        )
        return train(
            model,
            lambda epoch: draw(f"train {epoch}", settings["n_train"]),
            draw("validation", _VALIDATION),
            config,
            progress=False,
        ).nmse

    def _two_layers(self, settings: Settings, seed: int, device: str) -> float:
        """Return the error of a Transformer whose states have as many numbers."""
        task = IntrinsicDimension(
            n_tokens=4, d_token=settings["d_token"], n_components=1, matrix_kind="orthogonal",
            tokens="sphere", seed=derive_seed(self.name, "matrix", seed),
        )  # fmt: skip
        architecture = Architecture(
            n_heads=(1, 1), d_model=settings["d_model"], d_head=(3, 3), d_token=task.d_token,
            n_tokens=task.n_tokens, d_mlp=128, act_fn="gelu", init_mode="xavier_normal",
        )  # fmt: skip
        train_seed, seen_seed = (
            derive_seed(self.name, part, seed) for part in ("train", "validation")
        )
        data = standardise(
            task.sample(settings["n_train"], train_seed), task.sample(2000, seen_seed)
        )
        config = TrainingConfig(
            epochs=settings["epochs"], lr=5e-3, warmup_steps=100, weight_decay=0.0, seed=seed
        )
        model = build_model(architecture, seed=seed, device=device)
        return train(model, *data, config, progress=False).nmse

    def tables(self) -> Sequence[Part]:
        """Return errors beside the law's, by |I| d / E and units; then two layers by E."""
        codes = (
            Column("for each latent", "units", "first", "g"),
            "nmse",
            Column("by the law", "law_nmse", "first"),
            Column("least, times the law's", _times_law),
        )
        falls = (Column("fall of log NMSE with units, over the law's", _fall, form=".2f"),)
        layers = (
            Column("|I| d / E", "law", "first"),
            "nmse",
            Column("least", "nmse", "least", ".2g"),
        )
        names = {"model": "code", "law": "|I| d / E", "width": "decoder units"}
        words: Mapping[str, Words] = {"law": "{:.3g}".format, "width": "{:.0f}".format}
        return (
            TableSpec(["model", "state", "law"], falls, _short_codes, words, names),
            "Slopes of the least NMSE over seeds against units, log-log; 1 is the law's "
            "exponent, 0 says that more units bring nothing. The digit code has its weights set "
            "by hand: the law holds for some code, and training does not find it.",
            TableSpec(["model", "law", *_SIZES, "width"], codes, _codes, words, names),
            "NMSE over all coordinates, mean (least to largest) over seeds. By the law: "
            "units for each latent to the power -2 E / (|I| d), which the digit code has; 0 "
            "where all coordinates fit.",
            "Two-layer Transformers on the best pair, heads (1, 1):",
            TableSpec(["d_model"], layers, _two_layers, sort=True),
        )

    def plots(self) -> FigureSpec:
        """Return NMSE over units for each latent, by |I| d / E; two layers over E."""
        labels: Mapping[str, Any] = {
            _CODE: _CODE,
            _TRAINED: lambda law, state: f"{_TRAINED}, |I| d / E = {law:.3g}",
            _DECODER: _DECODER,
        }
        codes = [
            Curves(
                "units", "nmse", ["law", "state"], "least", style=style, label=labels[model],
                rows=partial(_short_codes, model=model), colour=lambda law, *_: _colour(law),
            )
            for model, style in ((_CODE, "s"), (_TRAINED, "o-"), (_DECODER, "x:"))
        ]  # fmt: skip
        seeds = Curves("d_model", "nmse", take="each", style="o", alpha=0.6, rows=_two_layers)
        units = Axis("decoder units for each latent (dashed: the law)", "log2")
        widths = Axis("E of two layers (dotted: |I| d)", "log2", levels=[6])
        panels = [
            Panel([_draw_laws, *codes], units, Axis("NMSE, least over seeds", "log"), width=1.7),
            Panel([seeds], widths, Axis("validation NMSE", "log"), legend=""),
        ]
        return FigureSpec(panels, size=(3.7, 4))

    def claims(self) -> Sequence[Claim]:
        """Judge the slopes of built and trained codes, and errors between states."""
        fall = "the slope of log NMSE over log units is {bound} times the law's, for every state"
        fits = (
            "the NMSE of a trained code is {bound} wherever |I| d <= E (least over seeds, the most "
            "units)"
        )
        unlike = (
            "of trained codes with the same |I| d / E and units for each latent, the largest NMSE "
            "is {bound} times the smallest"
        )
        growth = (
            "from each |I| d / E to the next larger one the NMSE of trained codes grows by {bound} "
            "times (geometric mean over states, the most units)"
        )
        return (
            Claim(
                f"of the digit code {fall}",
                partial(_falls, model=_CODE),
                "within",
                (0.9, 1.1),
                name="slope of the digit code over the law's",
            ),
            Claim(fits, _where_all_fits, "<", 0.01, name="trained NMSE where all fits"),
            Claim(unlike, _unlike, "<=", 2, name="largest over smallest at one |I| d / E"),
            Claim(growth, _growth, ">=", 1.2, name="growth to the next |I| d / E"),
            Claim(
                f"of trained codes {fall}",
                partial(_falls, model=_TRAINED),
                ">=",
                0.5,
                name="slope of trained codes over the law's",
            ),
        )

    def remarks(self, results: "pd.DataFrame") -> Sequence[str]:
        """Return decoders alone, and two layers."""
        alone = _falls(results, _DECODER)
        layers = _two_layers(results).groupby("d_model")["nmse"].min()
        return [
            *(
                f"{_DECODER}, {state}: {share:.2f} of the law's slope"
                for state, share in alone.items()
            ),
            *(f"two layers, E = {e}: least NMSE {error:.2g}" for e, error in layers.items()),
        ]

    def control_results(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """Take the narrowest decoder for every width, and one |I| d / E for all."""
        codes = _codes(results)
        short = _short_codes(results, _TRAINED)
        # the narrowest decoders stand for all, as if width made no difference
        narrow = codes[
            codes["width"] == codes.groupby(["model", "state"])["width"].transform("min")
        ]
        of_narrow = narrow[narrow["model"] == _TRAINED].groupby("state")["nmse"].min()
        alike = short[short["law"] == short["law"].min()].groupby("units")["nmse"].min()
        trained = codes["model"] == _TRAINED
        one_width = codes["nmse"].mask(trained, codes["state"].map(of_narrow))
        one_exponent = codes["nmse"].mask(trained & (codes["law"] > 1), codes["units"].map(alike))
        return {
            "one width": codes.assign(nmse=one_width),
            "one exponent": codes.assign(nmse=one_exponent),
        }


def _exponent(state: Mapping[str, Any]) -> float:
    """Return |I| d / E."""
    return exponent(state["size"], state["d_token"], state["d_model"], "law")


def _predict(state: Mapping[str, Any], units: float) -> float:
    """Return the NMSE that the law gives `units` for each latent, 0 where the identity codes."""
    law = _exponent(state)
    return float(units ** (-2 / law)) if law > 1 else 0.0


def _digit_code(state: Mapping[str, Any], bits: int) -> DigitCode:
    return DigitCode(state["size"] * state["d_token"], state["d_model"], bits)


def _bits(state: Mapping[str, Any]) -> list[int]:
    """Return bits for each coordinate that are dealt to latents without a rest, three lengths."""
    n, e = state["size"] * state["d_token"], state["d_model"]
    # the least number of bits with which those of all coordinates divide by E
    step = e // math.gcd(n, e)
    return [step * i for i in (1, 2, 3)]


def _affordable_bits(settings: Settings) -> int:
    """Return the most bits for which the digit code needs no more units than the decoder has."""
    return max(1, int(math.log2(settings["units"]) / _exponent(settings)))


def _layers(sizes: Sequence[tuple[int, int]]) -> list[nn.Module]:
    """Return linear maps of these sizes, with GELU between them."""
    modules: list[nn.Module] = []
    for n_in, n_out in sizes:
        modules += [nn.Linear(n_in, n_out), nn.GELU()]
    # no activation behind the last map
    return modules[:-1]


# Results


def _codes(results: "pd.DataFrame") -> "pd.DataFrame":
    """Return the rows of codes, with their states in words and the units for each latent."""
    codes = results[results["model"] != _LAYERS]
    sizes = zip(*(codes[name] for name in _SIZES), strict=True)
    state = ["|I| = {}, d = {}, E = {}".format(*map(int, of_state)) for of_state in sizes]
    return codes.assign(state=state, units=codes["width"] / codes["d_model"])


def _short_codes(results: "pd.DataFrame", model: str = "") -> "pd.DataFrame":
    """Select the codes in whose states not all fits, of one kind or of all."""
    codes = _codes(results)
    codes = codes[codes["law"] > 1]
    return codes[codes["model"] == model] if model else codes


def _two_layers(results: "pd.DataFrame") -> "pd.DataFrame":
    return results[results["model"] == _LAYERS]


def _fall(rows: "pd.DataFrame") -> float:
    """Return the slope of log NMSE over log units, over the law's -2 E / (|I| d), in one state."""
    return slope(rows.groupby("width")["nmse"].min()) * float(rows["law"].iloc[0]) / -2


def _falls(results: "pd.DataFrame", model: str) -> Numbers:
    return numbers_of(_short_codes(results, model), ["state"], _fall)


def _times_law(rows: "pd.DataFrame") -> float | None:
    """Divide the least error by that of the law; None where all coordinates fit."""
    at_law = float(rows["law_nmse"].iloc[0])
    return float(rows["nmse"].min()) / at_law if at_law else None


def _widest(results: "pd.DataFrame") -> "pd.DataFrame":
    """Select trained codes with the most units of their state."""
    codes = _codes(results)
    codes = codes[codes["model"] == _TRAINED]
    return codes[codes["width"] == codes.groupby("state")["width"].transform("max")]


def _where_all_fits(results: "pd.DataFrame") -> Numbers:
    widest = _widest(results)
    return numbers_of(widest[widest["law"] <= 1], ["state"], lambda rows: rows["nmse"].min())


def _unlike(results: "pd.DataFrame") -> Numbers:
    """Divide the largest NMSE by the smallest, for each |I| d / E and units of several states."""
    codes = _short_codes(results, _TRAINED)
    least = codes.groupby(["law", "units", "state"])["nmse"].min().groupby(level=["law", "units"])
    ratios: Any = (least.max() / least.min())[least.size() > 1].items()
    return {f"{law:.3g}, {units:g} units": float(ratio) for (law, units), ratio in ratios}


def _growth(results: "pd.DataFrame") -> Numbers:
    """Return the mean NMSE of each |I| d / E over that of the one before."""
    # an error of 0 has no logarithm
    least = _widest(results).groupby(["law", "state"])["nmse"].min().clip(lower=1e-300)
    logs: Any = np.log(least)
    means = np.exp(logs.groupby(level="law").mean())
    growth = means / means.shift()
    return {
        f"{low:.3g} to {high:.3g}": float(growth[high])
        for low, high in zip(means.index, means.index[1:], strict=False)
    }


def _colour(law: float) -> str:
    """Return a colour for laws that differ by halves."""
    return f"C{round(2 * law)}"


def _draw_laws(axes: "Axes", results: "pd.DataFrame") -> None:
    units = np.array([2.0, 80.0])
    for law in sorted(set(_short_codes(results)["law"])):
        axes.plot(units, units ** (-2 / law), "--", color=_colour(law), linewidth=0.8)
