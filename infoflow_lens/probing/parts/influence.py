"""The influence of tokens on states."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from infoflow_lens.hooks import (
    AttendedProbe,
    JacobianInfluence,
    PositionsProbe,
    Probe,
    ResampleInfluence,
)
from infoflow_lens.hooks.influence.resample import donors_from
from infoflow_lens.probing.part import Part, RunContext

if TYPE_CHECKING:
    from infoflow_lens.report.charts import Chart

_DIRECTIONS = 16  # of an estimate
_EXACT_UP_TO = 2048  # input directions (tokens times width) that are differentiated one by one


class InfluencePart(Part):
    """Influence on states, and attention on the same sequences, from which it is predicted."""

    title = "What states depend on"
    sequences = "detail"
    edits = ("hook_resid_pre",)
    fixed: ClassVar[Mapping[str, Sequence[str]]] = {
        "influence": ("state", "source_layer", "layers"),
        "influence_positions": ("ranks", "without"),
    }

    def probes(self, context: RunContext) -> Mapping[str, Probe[Any]]:
        """Return the probe of influence, and the probes of attention from which it is predicted."""
        return {
            "influence_attended": AttendedProbe(),
            "influence_positions": PositionsProbe(
                context.config.ranks, without=context.config.without, spread=True
            ),
            "influence": _probe(context),
        }

    def figures(self, result: Any) -> Sequence["Chart"]:
        """Return no figures: the report shows influence beside the predictions."""
        return ()


def _probe(context: RunContext) -> Probe[Any]:
    """The probe for the kind of influence in the settings; "auto" is exact where that is cheap."""
    config, longest = context.config, context.detail.longest or 1
    if config.influence == "resample":
        return ResampleInfluence(
            donors_from(context.batches, config.n_detail, longest), "median", state="resid_post"
        )
    affordable = longest * context.width <= _EXACT_UP_TO
    if config.influence == "exact" or (config.influence == "auto" and affordable):
        return JacobianInfluence("resid_post", seed=config.seed)
    return JacobianInfluence("resid_post", positions=(-1,), estimate=_DIRECTIONS, seed=config.seed)
