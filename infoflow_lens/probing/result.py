"""What a probe run found."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infoflow_lens.agreement import Agreement, CoverageCurve
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.hooks import (
    InfluenceResult,
    MechanismsResult,
    ModelCapabilities,
    PositionsResult,
    RecoveryResult,
    Result,
)
from infoflow_lens.probing.config import ProbingConfig
from infoflow_lens.probing.part import Part
from infoflow_lens.theory import InformationSets


@dataclass(frozen=True)
class ProbingResult:
    """What a probe run found.

    Attributes:
        out: the folder with all of it.
        config: the settings.
        capabilities: what the model is.
        parts: the parts that were measured, by name.
        found: results by name; those of the parts, and what predictions are made from.
        agreement: predicted against measured sets, by the rule that made the prediction: "argmax",
            every head passes the key of its largest score, and "mechanisms", every head by its own.
        curve: influence inside the sets when heads pass their k largest positions.
        texts: the tokens of the shown sequences, as strings.
        predicted: sets by the same rules, for the sequences whose influence was measured.
        record: of the run.
    """

    out: Path
    config: ProbingConfig
    capabilities: ModelCapabilities
    parts: Mapping[str, Part]
    found: Mapping[str, Result]
    agreement: Mapping[str, Agreement]
    curve: CoverageCurve | None
    texts: tuple[tuple[str, ...], ...]
    predicted: Mapping[str, InformationSets]
    record: RunRecord

    @property
    def positions(self) -> PositionsResult | None:
        """Where heads look; None if it was not asked for, as for the next three."""
        return self._of("positions", PositionsResult)

    @property
    def recovery(self) -> RecoveryResult | None:
        """What states give back."""
        return self._of("recovery", RecoveryResult)

    @property
    def influence(self) -> InfluenceResult | None:
        """What states depend on."""
        return self._of("influence", InfluenceResult)

    @property
    def mechanisms(self) -> MechanismsResult | None:
        """What heads need."""
        return self._of("mechanisms", MechanismsResult)

    def _of(self, name: str, kind: type[Any]) -> Any:
        result = self.found.get(name)
        return result if isinstance(result, kind) else None

    def sentences(self) -> list[str]:
        """What the parts found, in words."""
        return [
            sentence
            for name, part in self.parts.items()
            for sentence in part.sentences(self.found[name])
        ]
