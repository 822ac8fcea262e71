"""Comparing triples is hard for two layers of any size (InfoFlow 2026, App. C.5, Table 12)."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from infoflow_lens.foundation.lazy import pd
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.models.host import VectorTransformer
from infoflow_lens.studies.claims import Claim, Numbers
from infoflow_lens.studies.papers.rows import heads_shown
from infoflow_lens.studies.plots import Axis, Curves, FigureSpec, Panel
from infoflow_lens.studies.study import FreshStudy, Row, Settings, Statement
from infoflow_lens.studies.tables import Column, Part, TableSpec, Words
from infoflow_lens.tasks import DepthSeparation, DRetrieval, Target, TriangleCenter
from infoflow_lens.tasks.task import RetrievalTask
from infoflow_lens.theory.cost import exponent
from infoflow_lens.theory.estimate import estimate
from infoflow_lens.training import TrainingResult

_SIZES = ((2, 16), (4, 32), (8, 64))  # heads of either layer, E
_D_TOKEN = 4
_STEPS: Mapping[str, Mapping[int, int]] = {  # by T
    "smoke": {4: 10, 8: 10},
    "quick": {8: 6000, 16: 6000, 32: 8000},
    "full": {8: 12000, 16: 12000, 32: 18000, 48: 24000, 64: 30000},
}
_NOISE, _CEILING = 0.01, 0.9  # by which NMSE above the second may fall from one T to the next
_LEARNT = 0.3  # of the controls: the most
_TRIPLES, _PAIRS, _TOKENS = "triples", "pairs", "tokens"
_CONTROLS = (_PAIRS, _TOKENS)
_LINEAR = "pairs, linear encoder"


class TriangleCenterStudy(FreshStudy):
    """NMSE by T for three sizes of two-layer models without positional encoding.

    Stated: three sizes, T growing, AdamW with a cosine schedule, clamped norms, the best validation
    NMSE averaged over seeds. Its numbers are stripped from the text, and so are all sizes: heads,
    E, d = 4, the MLP's width of 64, T, the learning rate and the number of steps are [chosen].

    Controls at every T, of the same tokens and under the same training, with the middle size: the
    best pair min ||x(s) + x(t)||^2, and a sum of the largest of three directions (D-retrieval).
    Their norms differ, so the score of a pair holds ||x(s)||^2, which no bilinear form of the
    tokens does: the encoder has a hidden layer. Beside them stand pairs behind a linear one at T up
    to 16, which no rule judges.

    Beside it stands what the estimate says before training: the exponent |I| d/E of the cost law,
    from below by counting comparisons (`count="paper"`) and from above by the best schedule, which
    without positions is global aggregation.
    """

    name: ClassVar[str] = "triangle_center"
    title: ClassVar[str] = "Does a target over triples defeat two layers of every size as T grows?"
    finding: ClassVar[str] = (
        "at the largest T triples end at NMSE {1}, whatever the size; pairs and tokens at {3}"
    )
    source: ClassVar[str] = "InfoFlow 2026, App. C.5, Table 12, Fig. 1b"
    statement: ClassVar[Statement] = Statement.read("triangle_center")
    presets: ClassVar[Mapping[str, int]] = {"smoke": 1, "quick": 2, "full": 5}

    def cases(self, preset: str) -> Sequence[Settings]:
        """Vary length and size."""
        return [
            {
                "target": target,
                "n_tokens": n_tokens,
                "heads": [h, h],
                "d_model": d_model,
                "d_encoder": None if target == _LINEAR else 64,
                "lr": 5e-3,
                **self.steps(steps),
            }
            for n_tokens, steps in _STEPS[preset].items()
            for target in (_TRIPLES, *_CONTROLS, _LINEAR)
            for h, d_model in (_SIZES if target == _TRIPLES else _SIZES[1:2])
            if target != _LINEAR or n_tokens <= 16
        ]

    def architecture(self, settings: Settings) -> Architecture:
        """Return two layers of the same heads, without positions."""
        return Architecture(
            n_heads=tuple(settings["heads"]),
            d_model=settings["d_model"],
            d_token=_D_TOKEN,
            n_tokens=settings["n_tokens"],
            d_mlp=64,
            d_encoder=settings["d_encoder"],
            act_fn="gelu",
            init_mode="kaiming_uniform",
        )

    def task(self, settings: Settings) -> RetrievalTask:
        """Return the target over triples, or a control."""
        return task_of(settings["target"], settings["n_tokens"], _D_TOKEN)

    def rows(
        self, settings: Settings, seed: int, model: VectorTransformer, result: TrainingResult
    ) -> list[Row]:
        """Return the errors of one model, and the estimate for its architecture."""
        paper, proved = (
            estimate(self.architecture(settings), self.task(settings), count=count, verify=0)
            for count in ("paper", "proved")
        )
        return [
            {
                "nmse": result.nmse,
                # of standardised targets
                "train_nmse": result.history[result.best_epoch - 1]["train_loss"],
                "information": paper.min_information,
                "information_proved": proved.min_information,
                "exponent_lower": exponent(
                    paper.min_information, _D_TOKEN, settings["d_model"], "law"
                ),
                "exponent_upper": paper.upper["law"],
            }
        ]

    def tables(self) -> Sequence[Part]:
        """Return errors by T and size, and what was estimated."""
        columns = (
            "nmse",
            Column("on training data", "train_nmse"),
            Column("|I| by counting: paper, proved", _information),
            Column("exponent: at least, at most", _exponents),
        )
        words: Mapping[str, Words] = {"heads": lambda heads: ", ".join(heads.split())}
        return (
            TableSpec(("target", "n_tokens", "heads", "d_model"), columns, words=words),
            "Published (the numbers of Table 12 do not survive): NMSE grows fast with T and "
            "approaches 1, almost identically for all three sizes. Pairs behind a linear encoder "
            "are in no rule: their score holds squares, which only an encoder with a hidden layer "
            "makes, as all others here have. The exponent is that of the "
            "cost law, |I| d/E, with |I| from counting (paper) and from the best schedule; "
            "up to 1 a state can hold all of I uncoded. By the law a larger E is cheaper, so "
            "that sizes perform alike does not follow from it.",
        )

    def plots(self) -> FigureSpec:
        """Return NMSE over T for each size, and the range of the estimated exponent."""
        controls = [
            Curves("n_tokens", "nmse", style="s:", label=f"control: {target}", colour=colour,
                   rows=partial(_select, target=target))
            for target, colour in zip(_CONTROLS, ("C5", "C6"), strict=True)
        ]  # fmt: skip
        triples = Curves(
            "n_tokens", "nmse", ["heads", "d_model"], band=True, rows=_select,
            label=lambda heads, e: f"heads {heads_shown(heads)}, E = {e}",
        )  # fmt: skip
        ends = [
            Curves("n_tokens", f"exponent_{end}", ["d_model"], style=style, label="", rows=_select)
            for end, style in (("upper", "-"), ("lower", ":"))
        ]
        length = Axis("T", "log2")
        error = Axis("validation NMSE (dotted: a constant)", limits=(0, None), levels=[1])
        exponent = Axis("|I| d / E by estimate (dotted: at least)", levels=[1])
        panels = [Panel([*controls, triples], length, error), Panel(ends, length, exponent)]
        return FigureSpec(panels, size=(4.25, 3.6))

    def claims(self) -> Sequence[Claim]:
        """Judge the means over seeds of every T and size."""
        rise = (
            "the mean NMSE over seeds rises by {bound} from each T to the next, for every size "
            f"(where it was above {_CEILING:g}, a fall of {_NOISE:g} counts as none)"
        )
        apart = (
            "at every T at which some size has a mean of at most "
            f"{_CEILING:g} the largest mean of the sizes is " + "{bound} times the smallest"
        )
        over = "and at the largest T {bound} of that of the triples"
        return (
            Claim(rise, _rises, ">=", 0, name="rise of the mean NMSE to this T"),
            Claim(
                "it is {bound} at the largest T, for every size",
                _largest,
                ">",
                0.8,
                name="mean NMSE",
            ),
            Claim(apart, _ratios, "<=", 1.2, name="largest over smallest size"),
            Claim(
                "with both controls the mean NMSE is {bound} at every T that was run",
                lambda r: _control_means(r, slice(None)),
                "<",
                _LEARNT,
                name="mean NMSE of a control",
            ),
            Claim(over, _controls_over, "<=", 1 / 3, name="control over triples"),
        )

    def control_results(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """Put each control in the place of triples, and triples in the place of both."""
        by = ["target", "n_tokens"]
        means = results.groupby(by)["nmse"].mean()
        of_triples = results["target"] == _TRIPLES

        def exchange(target: str, rows: "pd.Series[bool]") -> "pd.DataFrame":
            errors = results["n_tokens"].map(means[target])
            return results.assign(nmse=results["nmse"].mask(rows, errors))

        return {
            "pairs": exchange(_PAIRS, of_triples),
            "tokens": exchange(_TOKENS, of_triples),
            "no easy target": exchange(_TRIPLES, ~of_triples),
        }


def task_of(target: str, n_tokens: int, d_token: int) -> RetrievalTask:
    """Return the target over triples, or a control whose tokens have norms clamped alike."""
    triples = TriangleCenter(n_tokens=n_tokens, d_token=d_token)
    if target == _TRIPLES:
        return triples

    def tokens(shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
        return triples.draw(shape[0], generator)

    sizes: dict[str, Any] = {"n_tokens": n_tokens, "d_token": d_token}
    components = {
        _PAIRS: DepthSeparation(n_tokens=n_tokens).components,
        _LINEAR: DepthSeparation(n_tokens=n_tokens).components,
        _TOKENS: DRetrieval(n_components=3, **sizes).components,
    }[target]
    return Target(components=components, tokens=tokens, name=f"control {target}", **sizes)


def _select(results: "pd.DataFrame", target: str = _TRIPLES) -> "pd.DataFrame":
    return results[results["target"] == target]


def _information(rows: "pd.DataFrame") -> str:
    row = rows.iloc[0]
    return f"{row['information']}, {row['information_proved']}"


def _exponents(rows: "pd.DataFrame") -> str:
    row = rows.iloc[0]
    return f"{row['exponent_lower']:.3g}, {row['exponent_upper']:.3g}"


def _means(results: "pd.DataFrame") -> "pd.DataFrame":
    """Return the mean NMSE of triples over seeds, T by E."""
    return _select(results).groupby(["n_tokens", "d_model"])["nmse"].mean().unstack()


def _cells(means: "pd.DataFrame") -> Numbers:
    cells: Any = means.stack(future_stack=True).items()
    return {f"T = {t}, E = {e}": float(value) for (t, e), value in cells}


def _rises(results: "pd.DataFrame") -> Numbers:
    means = _means(results)
    # errors near 1 are those of a constant, and move by noise alone
    slack = _NOISE * (means.shift() > _CEILING)
    return _cells((means.diff() + slack).iloc[1:])


def _largest(results: "pd.DataFrame") -> Numbers:
    return _cells(_means(results).iloc[[-1]])


def _ratios(results: "pd.DataFrame") -> Numbers:
    means = _means(results)
    means = means[~(means.min(axis=1) > _CEILING)]  # models that learnt nothing are alike
    ratios = means.max(axis=1, skipna=False) / means.min(axis=1, skipna=False)
    return {f"T = {t}": float(ratio) for t, ratio in ratios.items()}


def _control_means(results: "pd.DataFrame", lengths: slice) -> Numbers:
    """Average the NMSE of each control at these lengths; NaN where it was not run."""
    every = _means(results).index
    found = {}
    for target in _CONTROLS:
        rows = results[results["target"] == target]
        means = rows.groupby("n_tokens")["nmse"].mean().reindex(every)[lengths]
        found.update({f"{target}, T = {t}": float(mean) for t, mean in means.items()})
    return found


def _controls_over(results: "pd.DataFrame") -> Numbers:
    # against the size that does best on triples
    least = float(_means(results).iloc[-1].min())
    last = _control_means(results, slice(-1, None))
    return {name: mean / least for name, mean in last.items()}
