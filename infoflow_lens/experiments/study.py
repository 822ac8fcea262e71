"""What a study is: configurations to run, a row for each, and a rule by which it is judged."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from torch import Tensor

from infoflow_lens.experiments.memory import run_bytes
from infoflow_lens.foundation.seeds import derived_seed
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.tasks import VectorTask

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Settings: TypeAlias = Mapping[str, Any]
Row: TypeAlias = dict[str, float | int | str | None]
Pair: TypeAlias = tuple[Tensor, Tensor]  # sequences and targets


@dataclass(frozen=True)
class Verdict:
    """Whether an effect was seen.

    Attributes:
        passed: by the study's stated rule.
        reasons: the numbers behind it, a line each.
    """

    passed: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Statement:
    """What is said of a study before it is run, so that its numbers can be held against it.

    Attributes:
        written: the day, as in ``2026-01-31``.
        in_short: the prediction in a line, for the summary of all studies.
        prediction: what theory, or the paper, says that the numbers will be.
        controls: by name, a comparison without which the rule could pass for another reason.
        refuted_by: the numbers that would speak against the prediction.
        after_run: whether numbers by the present settings were known when it was written.
    """

    written: str
    in_short: str
    prediction: str
    controls: Mapping[str, str]
    refuted_by: str
    after_run: bool = False

    def markdown(self, study: "Study") -> str:
        """The file ``statement.md`` of a study's folder."""
        when = (
            "when a run by these settings was known: its rule is older than the run, the rest is "
            "not"
            if self.after_run
            else "before any run by these settings"
        )
        controls = "\n".join(f"- {name}: {what}" for name, what in self.controls.items())
        return (
            f"# {study.title}\n\n{study.source}. Written on {self.written}, {when}.\n\n"
            f"**Prediction.** {self.prediction}\n\n**Rule.** Seen if {study.acceptance}\n\n"
            f"**Controls.** The rule must fail with the numbers of each in the place of its own.\n"
            f"\n{controls}\n\n**What would refute it.** {self.refuted_by}\n"
        )


class Study(ABC):
    """A table or figure of a paper: what to train, what to measure, what to compare it with.

    A study holds no state. `measure` is a function of its settings and seed alone, so that runs can
    go to other processes and machines, and the same seed gives the same rows. What makes a run slow
    or large stands in the settings.

    Attributes:
        name: as on the command line.
        title: what is asked, in a line.
        source: paper, section, table.
        acceptance: the rule of the verdict, in words.
        statement: prediction, controls, and what would refute it, written before the run; a run
            puts it into its folder before it starts.
        presets: for each preset, how many seeds it runs by default.
        judges_every_run: whether the rule is about every run, so that one that diverged breaks it.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]
    acceptance: ClassVar[str]
    statement: ClassVar[Statement | None] = None
    presets: ClassVar[Mapping[str, int]] = {"smoke": 1, "quick": 3, "full": 5}
    judges_every_run: ClassVar[bool] = False

    @abstractmethod
    def cases(self, preset: str) -> Sequence[Settings]:
        """The configurations of a preset, as JSON-compatible values, without seeds."""

    @abstractmethod
    def measure(self, settings: Settings, seed: int, device: str) -> list[Row]:
        """Train and measure one configuration: one row, or one for each head or position."""

    def memory(self, settings: Settings) -> int:
        """Bytes that a run takes at its peak, about; 0 where that is not known."""
        return 0

    @abstractmethod
    def table(self, results: "pd.DataFrame") -> str:
        """Our numbers beside the published ones, in Markdown, with seeds and spread."""

    @abstractmethod
    def figure(self, results: "pd.DataFrame") -> "Figure":
        """The effect at a glance."""

    @abstractmethod
    def verdict(self, results: "pd.DataFrame") -> Verdict:
        """Whether the effect was seen, by the stated rule."""

    def judges(self, settings: Settings) -> bool:
        """Whether the rule is about a configuration; the others are reported."""
        return True

    def controlled(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """By control of the statement: results with its numbers in the place of the judged ones.

        A rule that passes with these proves nothing.
        """
        return {}


class VectorStudy(Study):
    """A study that trains models over vector tokens, on ``n_train`` sequences."""

    @abstractmethod
    def architecture(self, settings: Settings) -> Architecture:
        """The models of a configuration."""

    def memory(self, settings: Settings) -> int:
        """Bytes that a run takes at its peak, about: its data, and a step or an evaluation."""
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

    def drawn(self, task: VectorTask, part: str, n: int, seed: int) -> Pair:
        """Sequences and targets for a part of a run; different parts and seeds share nothing."""
        return task.sample(n, seed=derived_seed(self.name, part, seed))

    def data_of(
        self, task: VectorTask, settings: Settings, seed: int, n: int, part: str = "validation"
    ) -> tuple[Pair, Pair]:
        """Standardised sequences to train on, and `n` of another part; each length has its own."""
        length = task.n_tokens
        return standardised(
            self.drawn(task, f"train {length}", settings["n_train"], seed),
            self.drawn(task, f"{part} {length}", n, seed),
        )


def standardised(train: Pair, validation: Pair) -> tuple[Pair, Pair]:
    """Both with the targets' mean and deviation in training taken out; NMSE stays what it is.

    Sequences [sample, ...] and targets [sample, d_output], which must not be constant.
    """
    mean, deviation = train[1].mean(), train[1].std()
    return (train[0], (train[1] - mean) / deviation), (
        validation[0],
        (validation[1] - mean) / deviation,
    )
