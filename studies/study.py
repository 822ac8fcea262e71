"""What a study is: configurations to run, a row for each, and a rule by which it is judged."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.lazy import mpl, pd
from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.models.host import VectorTransformer, build_model
from infoflow_lens.objectives import Pair, standardise
from infoflow_lens.studies.claims import Claim, Verdict, judge_claims, say_range
from infoflow_lens.studies.plots import Axis, Curves, FigureSpec, Panel
from infoflow_lens.studies.tables import Part, TableSpec, render
from infoflow_lens.studies.together import train_together
from infoflow_lens.tasks import VectorTask
from infoflow_lens.training import Data, Draw, TrainingConfig, TrainingResult, train

Settings: TypeAlias = Mapping[str, Any]
Row: TypeAlias = dict[str, float | int | str | None]

ABOUT = ("run", "status", "seed")  # columns that every row of a study has


@dataclass(frozen=True)
class Statement:
    """The prediction of a study, written before its run, with which its numbers are compared.

    It is a text in Markdown with a title and several parts. Each part begins with its name, in bold
    at the beginning of a paragraph (``**Rule.** ...``) or as a heading (``## Rule``). Code reads
    the text, and never writes it.

    Attributes:
        text: all of it.

    Raises:
        InfoFlowError: if a part is missing.
    """

    text: str

    PARTS: ClassVar[tuple[str, ...]] = (
        "In short.",
        "Prediction.",
        "Rule.",
        "Controls.",
        "What would refute it.",
    )
    HEADINGS: ClassVar[tuple[str, ...]] = ("Question", "Rule")

    def __post_init__(self) -> None:
        expected = [f"**{part}**" for part in self.PARTS]
        # statements of papers name their parts in bold, those of language models by headings
        if "\n## " in self.text:
            expected = [f"\n## {part}\n" for part in self.HEADINGS]
        if not self.text.startswith("# ") or any(part not in self.text for part in expected):
            raise InfoFlowError(
                f"a statement begins {self.text[:40]!r}: expected Markdown with a title and the "
                f"parts {', '.join(part.strip() for part in expected)}"
            )

    @classmethod
    def read(cls, name: str) -> "Statement":
        """Read the statement of a study of this package.

        Args:
            name: of the study.
        """
        (path,) = Path(__file__).parent.glob(f"*/statements/{name}.md")
        return cls(path.read_text(encoding="utf-8"))

    def part(self, name: str) -> str:
        """Return the text of a part; empty if the statement has no such part."""
        heading = f"\n## {name.rstrip('.')}\n"
        if heading in self.text:
            return self.text.split(heading)[1].split("\n## ")[0].strip()
        text = self.text.partition(f"**{name}**")[2]
        return re.split(r"\n\n\*\*", text)[0].strip()

    @property
    def summary(self) -> str:
        """The prediction in one line, for the summary of all studies; without it the title."""
        return self.part("In short.") or self.text.splitlines()[0].removeprefix("# ")

    @property
    def controls(self) -> tuple[str, ...]:
        """The names of comparisons without which the rule could pass for another reason."""
        # a control is what an item begins with, in bold or before a colon
        items = re.findall(r"^- (?:\*\*(.+?)\*\*|([^:\n]+):)", self.part("Controls."), re.M)
        return tuple(bold.lower() or plain for bold, plain in items)


class Study(ABC):
    """A table or figure of a paper: what to train, what to measure, what to compare it with.

    A study holds no state. `measure` is a function of its settings and seed alone, so that runs can
    go to other processes and machines, and the same seed gives the same rows. What makes a run slow
    or large stands in the settings.

    Attributes:
        name: as on the command line.
        title: what is asked, in a line.
        source: paper, section, table.
        statement: prediction, controls, and what would refute it, written before the run; a run
            puts it into its folder before it starts.
        presets: for each preset, how many seeds it runs by default.
        judges_every_run: whether the rule is about every run, so that one that diverged breaks it.
        finding: what came, in a sentence, with ``{0}`` where the numbers of the first claim stand.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str] = "A study of one's own"
    statement: ClassVar[Statement | None] = None
    presets: ClassVar[Mapping[str, int]] = {"smoke": 1, "quick": 3, "full": 5}
    judges_every_run: ClassVar[bool] = False
    finding: ClassVar[str] = ""

    @abstractmethod
    def cases(self, preset: str) -> Sequence[Settings]:
        """Return the configurations of a preset, as JSON-compatible values, without seeds."""

    @abstractmethod
    def measure(self, settings: Settings, seed: int, device: str) -> list[Row]:
        """Train and measure one configuration.

        Args:
            settings: one of :meth:`cases`.
            seed: of everything that is drawn.
            device: as PyTorch names it.

        Returns:
            One row, or one for each head or position.
        """

    def memory(self, settings: Settings) -> int:
        """Return about how many bytes a run takes at its peak; 0 if that is not known."""
        return 0

    def tables(self) -> Sequence[Part]:
        """Return tables of our numbers and the published ones, and the text between them.

        By default the page shows each measured number by the settings that differ.
        """
        return ()

    def plots(self) -> FigureSpec | None:
        """Return the figure of the effect; None for a panel for each measured number."""
        return None

    def table(self, results: "pd.DataFrame") -> str:
        """Return the tables of some rows, in Markdown."""
        return render(self.tables() or [TableSpec(*self._columns(results))], results)

    def figure(self, results: "pd.DataFrame") -> "mpl.Figure":
        """Return the figure of some rows."""
        plots = self.plots()
        if plots is not None:
            return plots.draw(results)
        settings, measured = self._columns(results)
        # a place on the axis for each combination of the settings that differ
        named = results.assign(case=results[settings].astype(str).agg(", ".join, axis=1))
        panels = [
            Panel(
                [Curves("case", name, take="each", style="o", alpha=0.6, label="")],
                Axis(", ".join(settings)),
                Axis(name),
            )
            for name in measured
        ]
        return FigureSpec(panels).draw(named)

    def _columns(self, results: "pd.DataFrame") -> tuple[list[str], list[str]]:
        """Return the settings that differ between runs, or all, and the measured numbers."""
        # what a case of some preset names is a setting, all other numbers were measured
        known = {name for preset in self.presets for case in self.cases(preset) for name in case}
        settings = [name for name in results if name in known]
        differing = [name for name in settings if results[name].nunique() > 1]
        others = results.drop(columns=[*settings, *ABOUT], errors="ignore")
        return differing or settings, list(others.select_dtypes("number"))

    def claims(self) -> Sequence[Claim]:
        """Return the rule: what must hold of the rows for the effect to be seen."""
        return ()

    def remarks(self, results: "pd.DataFrame") -> Sequence[str]:
        """Return sentences beside the claims, which judge nothing."""
        return ()

    def rule(self) -> str:
        """Return the rule in words."""
        return "; ".join(claim.rule() for claim in self.claims())

    def verdict(self, results: "pd.DataFrame") -> Verdict:
        """Judge whether the effect was seen, by the stated rule."""
        return judge_claims(self.claims(), results, self.remarks(results))

    def say_finding(self, results: "pd.DataFrame") -> str:
        """Say what came, with the numbers of some rows; nothing where the study says nothing."""
        return self.finding.format(*(say_range(one.numbers(results)) for one in self.claims()))

    def judges(self, settings: Settings) -> bool:
        """Say whether the rule is about a configuration; the others are reported."""
        return True

    def control_results(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """Return, by control, results with the control's numbers in the place of the judged ones.

        A rule that passes with these proves nothing.
        """
        return {}


class VectorStudy(Study):
    """A study that trains models over vector tokens, on ``n_train`` sequences."""

    @abstractmethod
    def architecture(self, settings: Settings) -> Architecture:
        """Return the models of a configuration."""

    def memory(self, settings: Settings) -> int:
        """Give bytes that a run takes at its peak, about: its data, and a step or an evaluation."""
        architecture = self.architecture(settings)
        return run_bytes(
            n_train=settings["n_train"],
            n_tokens=architecture.n_tokens,
            d_token=architecture.d_token,
            batch_size=256,
            d_model=architecture.d_model,
            heads=architecture.n_heads,
            d_head=max(architecture.head_dimensions),
            d_mlp=architecture.d_mlp,
            d_encoder=architecture.d_encoder or 0,
        )

    def draw(self, task: VectorTask, part: str, n: int, seed: int) -> Pair:
        """Draw sequences and targets for a part of a run; other parts and seeds share nothing."""
        return task.sample(n, seed=derive_seed(self.name, part, seed))

    def data_of(
        self, task: VectorTask, settings: Settings, seed: int, n: int, part: str = "validation"
    ) -> tuple[Pair, Pair]:
        """Draw standardised sequences to train on, and `n` of another part, at each length."""
        length = task.n_tokens
        return standardise(
            self.draw(task, f"train {length}", settings["n_train"], seed),
            self.draw(task, f"{part} {length}", n, seed),
        )


class TogetherStudy(VectorStudy):
    """A study of which the seeds of a configuration can be trained together."""

    @abstractmethod
    def measure_together(
        self, settings: Settings, seeds: Sequence[int], device: str
    ) -> list[list[Row] | None]:
        """Return the rows of `measure` for each seed, to rounding; None for one that diverged."""


class TrainedStudy(TogetherStudy):
    """A study whose runs are one training each."""

    @abstractmethod
    def data(self, settings: Settings, seed: int) -> tuple[Data | Draw, Data]:
        """Return what the model of a seed is trained on and validated with, as `train` takes it."""

    @abstractmethod
    def training(self, settings: Settings) -> TrainingConfig:
        """Say how models are trained; the seed is the run's."""

    @abstractmethod
    def rows(
        self, settings: Settings, seed: int, model: VectorTransformer, result: TrainingResult
    ) -> list[Row]:
        """Measure a trained model."""

    def measure(self, settings: Settings, seed: int, device: str) -> list[Row]:
        """Train one model, and measure it."""
        model = build_model(self.architecture(settings), seed=seed, device=device)
        config = replace(self.training(settings), seed=seed)
        result = train(model, *self.data(settings, seed), config, progress=False)
        return self.rows(settings, seed, model, result)

    def measure_together(
        self, settings: Settings, seeds: Sequence[int], device: str
    ) -> list[list[Row] | None]:
        """Train all seeds in one batched model, compiled where that pays, not on a CPU."""
        together = train_together(
            self.architecture(settings),
            partial(self.data, settings),
            seeds,
            self.training(settings),
            device=device,
            compiled=device != "cpu",
            progress=False,
        )
        return [
            None
            if trained.result.stopped == "diverged"
            else self.rows(settings, seed, trained.model, trained.result)
            for seed, trained in zip(seeds, together, strict=True)
        ]


class FreshStudy(TrainedStudy):
    """A study of models that are trained on sequences which no step sees twice, along a cosine.

    Settings name the learning rate `lr`, the `steps` of `BATCH` sequences, and in `n_train` how
    many sequences an epoch draws. Targets have mean 0 and deviation 1.
    """

    BATCH: ClassVar[int] = 256

    @abstractmethod
    def task(self, settings: Settings) -> VectorTask:
        """Return the target; it is the same for all seeds."""

    def data(self, settings: Settings, seed: int) -> tuple[Draw, Pair]:
        """Draw fresh sequences in every epoch, and those that validate."""
        drawn = self.scale_draws(settings)

        def draw(epoch: int) -> Pair:
            return drawn("train", settings["n_train"], derive_seed(seed, epoch))

        return draw, drawn("validation", 4000, seed)

    def scale_draws(self, settings: Settings) -> Callable[[str, int, int], Pair]:
        """Return what draws sequences of a seed for a part; targets have mean 0, deviation 1."""
        task = self.task(settings)
        # one scale for all seeds and parts, by which errors of runs compare
        scale = self.draw(task, "scale", 20000, 0)
        return lambda part, n, seed: standardise(scale, self.draw(task, part, n, seed))[1]

    def training(self, settings: Settings) -> TrainingConfig:
        """Train along a cosine, at full length from the start."""
        return TrainingConfig(
            epochs=settings["steps"] * self.BATCH // settings["n_train"],
            batch_size=self.BATCH,
            lr=settings["lr"],
            betas=(0.9, 0.99),
            warmup_steps=100,
            weight_decay=0.0,
        )

    def steps(self, steps: int) -> Row:
        """Return the settings of so many steps; an epoch has at most 100."""
        return {"steps": steps, "n_train": min(steps, 100) * self.BATCH}


_FLOAT = 4  # bytes
_EVALUATED_AT_ONCE = 2048  # sequences, without gradients


def run_bytes(
    *,
    n_train: int,
    n_tokens: int,
    d_token: int,
    batch_size: int,
    d_model: int,
    heads: Sequence[int],
    d_head: int | None = None,
    d_mlp: int = 0,
    d_encoder: int = 0,
) -> int:
    """Return an upper estimate, in bytes, of the peak memory of a training run of a hosted model.

    It counts three copies of the training sequences (drawn, converted, on the device); the weights
    with gradients, moments and kept states; and the larger of two numbers: what a step keeps for
    its gradient, and what the largest layer takes in an evaluation. The last layer has one query
    only. Intermediate data of a task and probes are not counted.

    Args:
        n_train: training sequences.
        n_tokens: their length, T.
        d_token: numbers in a token; 2 for token ids, which are long integers.
        batch_size: sequences in a step.
        d_model: width of the residual stream.
        heads: of every layer.
        d_head: dimension of a head; default, heads share `d_model`.
        d_mlp: width of the feed-forward networks; 0 for none.
        d_encoder: hidden width of the encoder; 0 for a linear one.
    """
    n_pos = n_tokens + 1
    widths = [max(d_model, h * d_head) if d_head else d_model for h in heads]
    # numbers for each sequence: states, queries, keys, values and outputs, and the scores
    layers = [
        n_pos * (3 * d_model + 4 * width + 2 * d_mlp + 4 * h * n_pos)
        for h, width in zip(heads, widths, strict=True)
    ]
    layers[-1] = n_pos * (3 * d_model + 2 * widths[-1] + 4 * heads[-1])
    # the encoder counts as a layer, though without attention
    layers.append(n_pos * (2 * d_encoder + d_model))
    step = batch_size * (sum(layers) + max(layers))
    evaluation = _EVALUATED_AT_ONCE * max(layers)
    data = 3 * n_train * (n_tokens * d_token + 1)
    weights = 6 * sum(d_model * (4 * width + 2 * d_mlp) for width in widths)
    return _FLOAT * (data + weights + max(step, evaluation))
