"""One attention layer and the k-th largest number: only the extremes are easy (Theorem 2)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from infoflow_lens.experiments.study import Row, Settings, Statement, VectorStudy, Verdict
from infoflow_lens.experiments.tables import markdown_table, spread
from infoflow_lens.hooks import PositionsProbe, run_probes
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.models.host import build_model
from infoflow_lens.tasks import KthLargest
from infoflow_lens.training import TrainingConfig, train

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


class KthLargestStudy(VectorStudy):
    """NMSE against k for one head and one layer, and the rank of the number that CLS attends to."""

    name: ClassVar[str] = "kth_largest"
    title: ClassVar[str] = "Which of T numbers can one attention layer pick by its rank?"
    source: ClassVar[str] = "InfoFlow 2026, Theorem 2 (Sec. 4.1)"
    acceptance: ClassVar[str] = (
        "the least NMSE over seeds of every k in between is at least 5 times that of k = 1 and of "
        "k = T, and the head of the best model of k = 1 attends to the largest number in 95% of "
        "the samples"
    )
    statement: ClassVar[Statement] = Statement(
        written="2026-11-22",
        after_run=True,
        in_short=(
            "one layer picks the largest and the smallest number; what lies between costs "
            "exponentially"
        ),
        prediction=(
            "One head of one layer fits k = 1 and k = T; every k in between stays at least "
            "5 times above."
        ),
        controls={
            "an extreme between": (
                "the errors of k = 1, which one head can pick, in the place of those between"
            ),
            "another head": ("the choices of the head of k = T in the place of those of k = 1"),
        },
        refuted_by=(
            "a k in between within a factor of 5 of the extremes at some seed, or k = 1 "
            "fitted by a head that does not attend to the largest number."
        ),
    )
    presets: ClassVar[Mapping[str, int]] = {"smoke": 1, "quick": 3, "full": 2}

    def cases(self, preset: str) -> Sequence[Settings]:
        """By k."""
        sizes: Mapping[str, Mapping[str, int]] = {
            "smoke": {"n_tokens": 4, "n_train": 2000, "epochs": 4},
            "quick": {"n_tokens": 16, "n_train": 16000, "epochs": 60},
            "full": {"n_tokens": 64, "n_train": 100000, "epochs": 15},
        }
        n_tokens = sizes[preset]["n_tokens"]
        ranks = [2**i for i in range(n_tokens.bit_length())]
        return [{"k": k, **sizes[preset]} for k in ranks]

    def architecture(self, settings: Settings) -> Architecture:
        """One head, one layer."""
        return Architecture(
            n_heads=(1,),
            d_model=32,
            d_token=1,
            n_tokens=settings["n_tokens"],
            d_mlp=64,
            act_fn="gelu",
        )

    def measure(self, settings: Settings, seed: int, device: str) -> list[Row]:
        """The error, and how often the head's first choice is the largest, k-th, smallest."""
        task = KthLargest(n_tokens=settings["n_tokens"], k=settings["k"])
        model = build_model(self.architecture(settings), seed=seed, device=device)
        training = train(
            model,
            self.drawn(task, "train", settings["n_train"], seed),
            self.drawn(task, "validation", 2000, seed),
            TrainingConfig(epochs=settings["epochs"], batch_size=256, lr=4e-3, seed=seed),
            progress=False,
        )
        x = self.drawn(task, "test", 2000, seed)[0]
        (positions,) = run_probes(model, x, [PositionsProbe()], progress=False)
        chosen = positions.argmax[0][:, 0, -1].long()  # of CLS
        rank = x[..., 0].argsort(dim=1, descending=True).argsort(dim=1).gather(1, chosen[:, None])
        return [
            {
                "nmse": training.nmse,
                "chooses_largest": float((rank == 0).double().mean()),
                "chooses_kth": float((rank == settings["k"] - 1).double().mean()),
                "chooses_smallest": float((rank == task.n_tokens - 1).double().mean()),
            }
        ]

    def table(self, results: "pd.DataFrame") -> str:
        """Errors and choices by k."""
        measured = ("nmse", "chooses_largest", "chooses_kth", "chooses_smallest")
        groups: Any = results.groupby(["n_tokens", "k"])
        table = markdown_table(
            ["T", "k", "NMSE", "attends to the largest", "to the k-th", "to the smallest"],
            [(*key, *(spread(rows[name]) for name in measured)) for key, rows in groups],
        )
        return f"{table}\n\nThe paper states exponents and prints no experiment."

    def figure(self, results: "pd.DataFrame") -> "Figure":
        """NMSE over k."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 3.4), layout="constrained")
        axes = figure.subplots()
        axes.plot(results["k"], results["nmse"], "o", alpha=0.5, label="each seed")
        least = results.groupby("k")["nmse"].min()
        axes.plot(least.index, least, "-", label="least over seeds")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("k")
        axes.set_ylabel("validation NMSE")
        axes.legend(frameon=False)
        return figure

    def verdict(self, results: "pd.DataFrame") -> Verdict:
        """By the errors between the extremes, and by what the head of k = 1 attends to."""
        least = results.groupby("k")["nmse"].min()
        extremes = max(float(least.iloc[0]), float(least.iloc[-1]))
        between = least.iloc[1:-1]
        best = results[results["k"] == 1].sort_values("nmse").iloc[0]
        picks = float(best["chooses_largest"])
        reasons = [f"k = 1: {least.iloc[0]:.2e}, k = T: {least.iloc[-1]:.2e}"]
        reasons.append(
            f"between: {between.min():.2e} to {between.max():.2e}, at least "
            f"{between.min() / extremes:.1f} times the extremes"
        )
        reasons.append(f"the best model of k = 1 attends to the largest in {picks:.1%}")
        passed = picks >= 0.95 and bool((between >= 5 * extremes).all())
        return Verdict(passed, tuple(reasons))

    def controlled(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """k = 1 in the place of what lies between; the head of k = T in that of k = 1."""
        of_k = results.groupby("k")
        first, last = min(results["k"]), max(results["k"])
        easy = float(of_k["nmse"].min().loc[first])
        picks = float(of_k["chooses_largest"].min().loc[last])
        between = results["k"].between(first, last, inclusive="neither")
        return {
            "an extreme between": results.assign(nmse=results["nmse"].mask(between, easy)),
            "another head": results.assign(
                chooses_largest=results["chooses_largest"].mask(results["k"] == first, picks)
            ),
        }
