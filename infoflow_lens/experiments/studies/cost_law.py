"""What a state of width E tells of |I| tokens: the cost law on trained codes (Theorem 3)."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from infoflow_lens.experiments.claims import Claim, Numbers
from infoflow_lens.experiments.studies.depth_separation import slope
from infoflow_lens.experiments.study import (
    Pair,
    Row,
    Settings,
    Statement,
    Study,
    standardised,
)
from infoflow_lens.experiments.tables import markdown_table, spread
from infoflow_lens.foundation.drawing import SeededRandom
from infoflow_lens.foundation.seeds import derived_seed
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.models.host import build_model
from infoflow_lens.objectives import nmse
from infoflow_lens.tasks import IntrinsicDimension
from infoflow_lens.theory.cost import DigitCode, exponent
from infoflow_lens.training import TrainingConfig, train

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

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
    source: ClassVar[str] = "InfoFlow 2026, Theorem 3, Sec. 5.2"
    statement: ClassVar[Statement] = Statement.of("cost_law")
    presets: ClassVar[Mapping[str, int]] = {"smoke": 1, "quick": 3, "full": 5}

    def cases(self, preset: str) -> Sequence[Settings]:
        """Built codes by bits, trained ones by units for each latent, two layers by E."""
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
        """The error of one code or model, its units, and the error that the law gives them."""
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
                    "law_nmse": _by_law(settings, 2**code.bits_per_latent),
                }
            ]
        error = self._trained(settings, seed, device)
        return [
            {
                "nmse": error,
                "width": settings["units"] * settings["d_model"],
                "law": _exponent(settings),
                "law_nmse": _by_law(settings, settings["units"]),
            }
        ]

    def memory(self, settings: Settings) -> int:
        """Bytes of the tokens in three copies and of the widest layer where it is evaluated."""
        rows = settings.get("n_train", 0) + _VALIDATION
        widest = max(_ENCODER, settings.get("units", 1) * settings["d_model"])
        numbers = 2 * settings["size"] * settings["d_token"]
        return 4 * (3 * rows * numbers + 2 * _VALIDATION * widest)

    def judges(self, settings: Settings) -> bool:
        """The rule is about codes; single decoders and Transformers are reported."""
        return settings["model"] in (_CODE, _TRAINED)

    def _tokens(
        self, settings: Settings, part: str, seed: int, n: int
    ) -> Float[Tensor, "sample coordinate"]:
        """Coordinates of |I| tokens in [0, 1)."""
        generator = torch.Generator().manual_seed(derived_seed(self.name, part, seed))
        return torch.rand(n, settings["size"] * settings["d_token"], generator=generator)

    def _trained(self, settings: Settings, seed: int, device: str) -> float:
        """The error of a decoder, with an encoder that is trained, too, or with the code's."""
        size, n = settings["d_model"], settings["size"] * settings["d_token"]
        decoder = [(size, settings["units"] * size), (settings["units"] * size, n)]
        encoder, code = [(n, _ENCODER), (_ENCODER, _ENCODER), (_ENCODER, size)], None
        if settings["model"] == _DECODER:
            encoder, code = [], _digit_code(settings, _affordable_bits(settings))
        with SeededRandom(derived_seed(self.name, "weights", seed)):
            model = nn.Sequential(*_layers(encoder), *_layers(decoder)).to(device)

        def drawn(part: str, n: int) -> Pair:
            x = self._tokens(settings, part, seed, n)
            shown = x if code is None else code.encode(x.double()).float()
            return 2 * shown - 1, 2 * x - 1  # zero in the middle

        config = TrainingConfig(
            epochs=settings["epochs"], lr=1e-2, warmup_steps=100, weight_decay=0.0, seed=seed
        )
        return train(
            model,
            lambda epoch: drawn(f"train {epoch}", settings["n_train"]),
            drawn("validation", _VALIDATION),
            config,
            progress=False,
        ).nmse

    def _two_layers(self, settings: Settings, seed: int, device: str) -> float:
        """The error of a Transformer whose states have as many numbers."""
        task = IntrinsicDimension(
            n_tokens=4, d_token=settings["d_token"], n_components=1, matrix_kind="orthogonal",
            tokens="sphere", seed=derived_seed(self.name, "matrix", seed),
        )  # fmt: skip
        architecture = Architecture(
            n_heads=(1, 1), d_model=settings["d_model"], d_head=(3, 3), d_token=task.d_token,
            n_tokens=task.n_tokens, d_mlp=128, act_fn="gelu", init_mode="xavier_normal",
        )  # fmt: skip
        train_seed, seen_seed = (
            derived_seed(self.name, part, seed) for part in ("train", "validation")
        )
        data = standardised(
            task.sample(settings["n_train"], train_seed), task.sample(2000, seen_seed)
        )
        config = TrainingConfig(
            epochs=settings["epochs"], lr=5e-3, warmup_steps=100, weight_decay=0.0, seed=seed
        )
        model = build_model(architecture, seed=seed, device=device)
        return train(model, *data, config, progress=False).nmse

    def table(self, results: "pd.DataFrame") -> str:
        """Errors beside the law's, by |I| d / E and units; then two layers by E."""
        cells = []
        of_codes = results[results["model"] != _LAYERS]
        groups: Any = of_codes.groupby(["model", "law", *_SIZES, "width"], sort=False)
        for (model, law, size, d, e, width), rows in groups:
            at_law, least = float(rows["law_nmse"].iloc[0]), float(rows["nmse"].min())
            times = f"{least / at_law:.3g}" if at_law else "-"
            sizes = (f"{law:.3g}", size, d, e, int(width), f"{width / e:g}")
            cells.append((model, *sizes, spread(rows["nmse"]), f"{at_law:.3g}", times))
        codes = markdown_table(
            [
                *("code", "|I| d / E", "|I|", "d", "E", "decoder units", "for each latent"),
                *("NMSE", "by the law", "least, times the law's"),
            ],
            cells,
        )
        falls = markdown_table(
            ["code", "state", "|I| d / E", "fall of log NMSE with units, over the law's"],
            [
                (model, state, f"{law:.3g}", f"{share:.2f}")
                for model in (_CODE, _TRAINED, _DECODER)
                for (state, law), share in _shares(results, model).items()
            ],
        )
        layers = results[results["model"] == _LAYERS]
        of_widths: Any = layers.groupby("d_model")
        two = markdown_table(
            ["E", "|I| d / E", "NMSE", "least"],
            [
                (e, f"{rows['law'].iloc[0]:.3g}", spread(rows["nmse"]), f"{rows['nmse'].min():.2g}")
                for e, rows in of_widths
            ],
        )
        return "\n\n".join(
            [
                codes,
                "NMSE over all coordinates, mean (least to largest) over seeds. By the law: "
                "units for each latent to the power -2 E / (|I| d), which the digit code has; 0 "
                "where all coordinates fit.",
                falls,
                "Slopes of the least NMSE over seeds against units, log-log; 1 is the law's "
                "exponent, 0 says that more units bring nothing.",
                "Two-layer Transformers on the best pair, heads (1, 1):",
                two,
            ]
        )

    def figure(self, results: "pd.DataFrame") -> "Figure":
        """NMSE over units for each latent, by |I| d / E; two layers over E."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 4), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=[1.7, 1])
        laws = sorted({law for law in results["law"] if law > 1})
        for index, law in enumerate(laws):
            units = np.array([2.0, 80.0])
            left.plot(units, units ** (-2 / law), "--", color=f"C{index}", linewidth=0.8)
        for model, style in ((_CODE, "s"), (_TRAINED, "o-"), (_DECODER, "x:")):
            rows = results[(results["model"] == model) & (results["law"] > 1)]
            for i, ((law, *_), some) in enumerate(rows.groupby(["law", *_SIZES])):
                errors = some.groupby("width")["nmse"].min()
                units = errors.index.to_numpy() / some["d_model"].iloc[0]
                label = f"{model}, |I| d / E = {law:.3g}" if model == _TRAINED else None
                label = model if label is None and not i else label
                left.plot(units, errors, style, color=f"C{laws.index(law)}", label=label)
        left.set_xlabel("decoder units for each latent (dashed: the law)")
        left.set_ylabel("NMSE, least over seeds")
        left.legend(frameon=False, fontsize="x-small")
        layers = results[results["model"] == _LAYERS]
        right.plot(layers["d_model"], layers["nmse"], "o", alpha=0.6)
        right.axvline(6, color="#444444", linewidth=0.8, linestyle=":")
        right.set_xlabel("E of two layers (dotted: |I| d)")
        right.set_ylabel("validation NMSE")
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
        return figure

    def claims(self) -> Sequence[Claim]:
        """By the slopes of built and trained codes, and by errors between states."""
        fall = "the slope of log NMSE over log units is {bound} times the law's, for every state"
        return (
            Claim(
                f"of the digit code {fall}",
                lambda r: _named(_shares(r, _CODE)),
                "within",
                (0.9, 1.1),
            ),
            Claim(
                "the NMSE of a trained code is {bound} wherever |I| d <= E (least over seeds, the "
                "most units)",
                lambda r: {state: error for (state, law), error in _widest(r).items() if law <= 1},
                "<",
                0.01,
            ),
            Claim(
                "of trained codes with the same |I| d / E and units for each latent, the largest "
                "NMSE is {bound} times the smallest",
                _unlike,
                "<=",
                2,
            ),
            Claim(
                "from each |I| d / E to the next larger one the NMSE of trained codes grows by "
                "{bound} times (geometric mean over states, the most units)",
                _growth,
                ">=",
                1.2,
            ),
            Claim(f"of trained codes {fall}", lambda r: _named(_shares(r, _TRAINED)), ">=", 0.5),
        )

    def remarks(self, results: "pd.DataFrame") -> Sequence[str]:
        """Decoders alone, and two layers."""
        alone = _named(_shares(results, _DECODER))
        layers = results[results["model"] == _LAYERS].groupby("d_model")["nmse"].min()
        return [
            *(
                f"{_DECODER}, {state}: {share:.2f} of the law's slope"
                for state, share in alone.items()
            ),
            *(f"two layers, E = {e}: least NMSE {error:.2g}" for e, error in layers.items()),
        ]

    def controlled(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """The narrowest decoder for every width, and one |I| d / E for all."""
        trained = results["model"] == _TRAINED
        least = results[trained].groupby(_SIZES)["width"].min()
        narrow = results["width"] == [
            least.get(tuple(s), math.nan) for s in results[_SIZES].to_numpy()
        ]
        of_narrow = results[trained & narrow].groupby(_SIZES)["nmse"].min()
        put = [of_narrow.get(tuple(s), math.nan) for s in results[_SIZES].to_numpy()]
        some = results[trained & (results["law"] > 1)]
        alike = (
            some[some["law"] == some["law"].min()]
            .groupby(some["width"] / some["d_model"])["nmse"]
            .min()
        )
        units = results["width"] / results["d_model"]
        return {
            "one width": results.assign(nmse=results["nmse"].mask(trained, put)),
            "one exponent": results.assign(
                nmse=results["nmse"].mask(trained & (results["law"] > 1), units.map(alike))
            ),
        }


def _exponent(state: Mapping[str, Any]) -> float:
    """|I| d / E."""
    return exponent(state["size"], state["d_token"], state["d_model"])


def _by_law(state: Mapping[str, Any], units: float) -> float:
    """The NMSE that the law gives `units` for each latent, 0 where the identity codes."""
    law = _exponent(state)
    return float(units ** (-2 / law)) if law > 1 else 0.0


def _digit_code(state: Mapping[str, Any], bits: int) -> DigitCode:
    return DigitCode(state["size"] * state["d_token"], state["d_model"], bits)


def _bits(state: Mapping[str, Any]) -> list[int]:
    """Bits for each coordinate that are dealt to latents without a rest, three lengths."""
    n, e = state["size"] * state["d_token"], state["d_model"]
    step = e // math.gcd(n, e)
    return [step * i for i in (1, 2, 3)]


def _affordable_bits(settings: Settings) -> int:
    """The most bits for which the digit code needs no more units than the decoder has."""
    return max(1, int(math.log2(settings["units"]) / _exponent(settings)))


def _layers(sizes: Sequence[tuple[int, int]]) -> list[nn.Module]:
    """Linear maps of these sizes, with GELU between them."""
    modules: list[nn.Module] = []
    for n_in, n_out in sizes:
        modules += [nn.Linear(n_in, n_out), nn.GELU()]
    return modules[:-1]


def _state(sizes: Sequence[Any]) -> str:
    """In words."""
    return "|I| = {}, d = {}, E = {}".format(*(int(size) for size in sizes))


def _shares(results: "pd.DataFrame", model: str) -> dict[tuple[str, float], float]:
    """By state and |I| d / E, the slope of log NMSE over log units, over the law's -2 E/(|I| d)."""
    rows = results[(results["model"] == model) & (results["law"] > 1)]
    found = {}
    for sizes, some in rows.groupby(_SIZES, sort=False):
        law = float(some["law"].iloc[0])
        found[_state(sizes), law] = slope(some.groupby("width")["nmse"].min()) * law / -2
    return found


def _named(values: Mapping[tuple[str, float], float]) -> Numbers:
    return {state: value for (state, _), value in values.items()}


def _widest(results: "pd.DataFrame") -> dict[tuple[str, float], float]:
    """By state and |I| d / E the least NMSE of a trained code with the most units."""
    rows = results[results["model"] == _TRAINED]
    found = {}
    for sizes, some in rows.groupby(_SIZES, sort=False):
        widest = some[some["width"] == some["width"].max()]
        found[_state(sizes), float(some["law"].iloc[0])] = float(widest["nmse"].min())
    return found


def _unlike(results: "pd.DataFrame") -> Numbers:
    """By |I| d / E and units, the largest NMSE over the smallest, where several states have it."""
    rows = results[(results["model"] == _TRAINED) & (results["law"] > 1)]
    least = rows.assign(units=rows["width"] / rows["d_model"]).groupby(["law", "units", *_SIZES])
    groups: Any = least["nmse"].min().groupby(level=["law", "units"])
    return {
        f"{law:.3g}, {units:g} units": float(errors.max() / errors.min())
        for (law, units), errors in groups
        if len(errors) > 1
    }


def _growth(results: "pd.DataFrame") -> Numbers:
    """The mean NMSE of each |I| d / E over that of the one before."""
    errors: dict[float, list[float]] = {}
    for (_, law), error in _widest(results).items():
        errors.setdefault(law, []).append(error)
    laws = sorted(errors)
    means = [float(np.exp(np.mean(np.log(np.maximum(errors[law], 1e-300))))) for law in laws]
    return {
        f"{low:.3g} to {high:.3g}": after / before
        for low, high, before, after in zip(laws, laws[1:], means, means[1:], strict=False)
    }
