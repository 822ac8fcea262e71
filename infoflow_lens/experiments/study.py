"""What a study is: configurations to run, a row for each, and a rule by which it is judged."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from torch import Tensor

from infoflow_lens.foundation.seeds import derived_seed
from infoflow_lens.tasks import VectorTask

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Settings: TypeAlias = Mapping[str, Any]
Row: TypeAlias = dict[str, float | int | str | None]


@dataclass(frozen=True)
class Verdict:
    """Whether an effect was seen.

    Attributes:
        passed: by the study's stated rule.
        reasons: the numbers behind it, a line each.
    """

    passed: bool
    reasons: tuple[str, ...]


class Study(ABC):
    """A table or figure of a paper: what to train, what to measure, what to compare it with.

    A study holds no state. `measure` is a function of its settings and seed alone, so that runs can
    go to other processes and machines, and the same seed gives the same rows.

    Attributes:
        name: as on the command line.
        title: what is asked, in a line.
        source: paper, section, table.
        acceptance: the rule of the verdict, in words.
        presets: for each preset, how many seeds it runs by default.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]
    acceptance: ClassVar[str]
    presets: ClassVar[Mapping[str, int]] = {"smoke": 1, "quick": 3, "full": 5}

    @abstractmethod
    def cases(self, preset: str) -> Sequence[Settings]:
        """The configurations of a preset, as JSON-compatible values, without seeds."""

    @abstractmethod
    def measure(self, settings: Settings, seed: int, device: str) -> list[Row]:
        """Train and measure one configuration: one row, or one for each head or position."""

    def drawn(self, task: VectorTask, part: str, n: int, seed: int) -> tuple[Tensor, Tensor]:
        """Sequences and targets for a part of a run; different parts and seeds share nothing."""
        return task.sample(n, seed=derived_seed(self.name, part, seed))

    @abstractmethod
    def table(self, results: "pd.DataFrame") -> str:
        """Our numbers beside the published ones, in Markdown, with seeds and spread."""

    @abstractmethod
    def figure(self, results: "pd.DataFrame") -> "Figure":
        """The effect at a glance."""

    @abstractmethod
    def verdict(self, results: "pd.DataFrame") -> Verdict:
        """Whether the effect was seen, by the stated rule."""


def spread(values: "pd.Series[float]") -> str:
    """A mean and the range over seeds, for tables."""
    if not len(values):
        return "-"
    if len(values) == 1:
        return f"{values.iloc[0]:.3g}"
    return f"{values.mean():.3g} ({values.min():.3g} to {values.max():.3g})"
