"""One attention layer and the k-th largest number: only the extremes are easy (Theorem 2)."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from infoflow_lens.foundation.lazy import pd
from infoflow_lens.hooks import PositionsProbe, run_probes
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.models.host import VectorTransformer
from infoflow_lens.studies.claims import Claim, Numbers
from infoflow_lens.studies.plots import Axis, Curves, FigureSpec, Panel
from infoflow_lens.studies.study import Pair, Row, Settings, Statement, TrainedStudy
from infoflow_lens.studies.tables import Column, Part, TableSpec
from infoflow_lens.tasks import KthLargest
from infoflow_lens.training import TrainingConfig, TrainingResult


class KthLargestStudy(TrainedStudy):
    """NMSE against k for one head and one layer, and the rank of the number that CLS attends to."""

    name: ClassVar[str] = "kth_largest"
    title: ClassVar[str] = "Which of T numbers can one attention layer pick by its rank?"
    finding: ClassVar[str] = (
        "ranks in between end at {0} times the NMSE of the smallest and the largest"
    )
    source: ClassVar[str] = "InfoFlow 2026, Theorem 2 (Sec. 4.1)"
    statement: ClassVar[Statement] = Statement.read("kth_largest")
    presets: ClassVar[Mapping[str, int]] = {"smoke": 1, "quick": 3, "full": 2}

    def cases(self, preset: str) -> Sequence[Settings]:
        """Vary k."""
        sizes: Mapping[str, Mapping[str, int]] = {
            "smoke": {"n_tokens": 4, "n_train": 2000, "epochs": 4},
            "quick": {"n_tokens": 16, "n_train": 16000, "epochs": 60},
            "full": {"n_tokens": 64, "n_train": 100000, "epochs": 15},
        }
        n_tokens = sizes[preset]["n_tokens"]
        # T is a power of two, so that both extremes are among them
        ranks = [2**i for i in range(n_tokens.bit_length())]
        return [{"k": k, **sizes[preset]} for k in ranks]

    def architecture(self, settings: Settings) -> Architecture:
        """Return a model of one head and one layer."""
        return Architecture(
            n_heads=(1,),
            d_model=32,
            d_token=1,
            n_tokens=settings["n_tokens"],
            d_mlp=64,
            act_fn="gelu",
        )

    def task(self, settings: Settings) -> KthLargest:
        """Return the target."""
        return KthLargest(n_tokens=settings["n_tokens"], k=settings["k"])

    def data(self, settings: Settings, seed: int) -> tuple[Pair, Pair]:
        """Draw sequences of the target."""
        task = self.task(settings)
        return (
            self.draw(task, "train", settings["n_train"], seed),
            self.draw(task, "validation", 2000, seed),
        )

    def training(self, settings: Settings) -> TrainingConfig:
        """Return batches of 256, along a cosine."""
        return TrainingConfig(epochs=settings["epochs"], batch_size=256, lr=4e-3)

    def rows(
        self, settings: Settings, seed: int, model: VectorTransformer, result: TrainingResult
    ) -> list[Row]:
        """Give the error, and how often the head's first choice is the largest, k-th, smallest."""
        task = self.task(settings)
        x = self.draw(task, "test", 2000, seed)[0]
        (positions,) = run_probes(model, x, [PositionsProbe()], progress=False)
        chosen = positions.argmax[0][:, 0, -1].long()  # of CLS
        # argsort twice gives each number's rank, 0 for the largest
        rank = x[..., 0].argsort(dim=1, descending=True).argsort(dim=1).gather(1, chosen[:, None])
        return [
            {
                "nmse": result.nmse,
                "chooses_largest": float((rank == 0).double().mean()),
                "chooses_kth": float((rank == settings["k"] - 1).double().mean()),
                "chooses_smallest": float((rank == task.n_tokens - 1).double().mean()),
            }
        ]

    def tables(self) -> Sequence[Part]:
        """Return errors and choices by k."""
        columns = (
            "nmse",
            Column("attends to the largest", "chooses_largest"),
            Column("to the k-th", "chooses_kth"),
            Column("to the smallest", "chooses_smallest"),
        )
        note = "The paper states exponents and prints no experiment."
        return TableSpec(("n_tokens", "k"), columns), note

    def plots(self) -> FigureSpec:
        """Return NMSE over k."""
        seeds = Curves("k", "nmse", take="each", style="o", label="each seed", alpha=0.5)
        least = Curves("k", "nmse", take="least", style="-", label="least over seeds", colour="C1")
        panel = Panel([seeds, least], Axis("k", "log2"), Axis("validation NMSE", "log"))
        return FigureSpec([panel], size=(6, 3.4))

    def claims(self) -> Sequence[Claim]:
        """Judge the errors between the extremes, and what the head of k = 1 attends to."""
        between = (
            "every k in between has {bound} times the NMSE of k = 1 and of k = T (least over seeds)"
        )
        attends = (
            "the head of the best model of k = 1 attends to the largest number in {bound} of the "
            "samples"
        )
        return (
            Claim(between, _over_extremes, ">=", 5, name="NMSE over that of k = 1 and T"),
            Claim(attends, _attends, ">=", 0.95, name="attention to the largest"),
        )

    def remarks(self, results: "pd.DataFrame") -> Sequence[str]:
        """Return the errors."""
        least = results.groupby("k")["nmse"].min()
        between = least.iloc[1:-1]
        return [
            f"least NMSE: k = 1: {least.iloc[0]:.2e}, k = T: {least.iloc[-1]:.2e}, between: "
            f"{between.min():.2e} to {between.max():.2e}"
        ]

    def control_results(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """Put k = 1 in the place of what lies between; the head of k = T in that of k = 1."""
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


def _over_extremes(results: "pd.DataFrame") -> Numbers:
    """Return the least error of every k in between, over the larger one of the extremes."""
    least = results.groupby("k")["nmse"].min()
    extremes = max(least.iloc[0], least.iloc[-1])
    return {f"k = {k}": float(error / extremes) for k, error in least.iloc[1:-1].items()}


def _attends(results: "pd.DataFrame") -> Numbers:
    """Read how often the best model of k = 1 attends to the largest number."""
    best = results[results["k"] == 1].sort_values("nmse").iloc[0]
    return {"": float(best["chooses_largest"])}
