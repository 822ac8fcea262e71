"""The settings of a survey; the options of `infoflow-lens survey` are made from them."""

from dataclasses import dataclass
from typing import Annotated

from infoflow_lens.foundation.checks import check_integer
from infoflow_lens.probing.config import Backend, Device, Dtype, ProbingConfig, Seed
from infoflow_lens.probing.registry import part_names

FEWEST = 5  # windows, of which recovery holds one out
_MOST_RANKS = 4  # of attended keys


@dataclass(frozen=True)
class SurveyConfig:
    """Settings of a survey; what each is stands beside its type.

    Raises:
        InfoFlowError: for values that make no sense, naming them.
    """

    model: Annotated[str, "An official name, owner/name@revision, or a Hugging Face folder."]
    data: Annotated[
        str,
        "A text file, or rows with a column of texts (json, jsonl, csv, parquet, a saved dataset, "
        "name[:config]:split on the hub); texts are joined and cut into windows.",
    ]
    column: Annotated[str | None, "Column of texts; default, the one that is known."] = None
    n: Annotated[int, "Windows, spread evenly over the text; half of them choose mechanisms."] = 64
    window: Annotated[int, "Tokens of a window."] = 64
    threshold: Annotated[float, "Damage up to which an ideal is enough, in nats."] = 0.05
    batch_size: Annotated[int, "Windows in a pass."] = 8
    n_shown: Annotated[int, "Windows that the report shows."] = 6
    seed: Seed = 0
    device: Device = "cpu"
    dtype: Dtype = None
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        check_integer(self.n, "n", FEWEST, ", of which half choose the mechanisms")
        check_integer(self.window, "window", 3)
        self.probing()

    def probing(self) -> ProbingConfig:
        """The probe run that the survey is."""
        return ProbingConfig(
            model=self.model,
            data=self.data,
            probes=part_names(),
            column=self.column,
            n=self.n,
            window=self.window,
            ranks=tuple(range(1, min(_MOST_RANKS, self.window) + 1)),
            n_detail=self.n // 2,
            threshold=self.threshold,
            batch_size=self.batch_size,
            n_shown=self.n_shown,
            seed=self.seed,
            device=self.device,
            dtype=self.dtype,
            backend=self.backend,
        )
