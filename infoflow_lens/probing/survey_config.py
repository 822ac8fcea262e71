"""The settings of a survey; the options of `infoflow-lens survey` are made from them."""

from dataclasses import asdict
from typing import Annotated

from annotated_types import Ge

from infoflow_lens.foundation.settings import Count, Remedy, settings
from infoflow_lens.probing.config import Backend, Device, DrawingSeed, Dtype, ProbingConfig
from infoflow_lens.probing.registry import part_names

FEWEST = 5  # windows, of which recovery holds one out
_MOST_RANKS = 4  # of attended keys


@settings
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
    column: Annotated[str | None, "Column of texts; default, found by its name."] = None
    n: Annotated[
        int,
        Ge(FEWEST),
        Remedy("of which half are for labels"),
        "Number of windows, spread evenly over the text; half of them are for labels of heads.",
    ] = 64
    window: Annotated[int, Ge(3), "Tokens of a window."] = 64
    batch_size: Annotated[Count, "Windows in a pass."] = 8
    n_shown: Annotated[Count, "Windows that the report shows."] = 6
    seed: DrawingSeed = 0
    device: Device = "cpu"
    dtype: Dtype = None
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        self.probing()

    def probing(self) -> ProbingConfig:
        """Return the probe run that the survey is."""
        return ProbingConfig(
            **asdict(self),
            probes=part_names(),
            ranks=tuple(range(1, min(_MOST_RANKS, self.window) + 1)),
            n_detail=self.n // 2,
        )
