"""What is measured: probes for any TransformerLens model, through its hook points."""

from typing import TYPE_CHECKING, Any

from infoflow_lens.hooks.arrays import LabelledArray
from infoflow_lens.hooks.attended import AttendedProbe, AttendedResult
from infoflow_lens.hooks.checking import check_probe
from infoflow_lens.hooks.influence.base import InfluenceResult
from infoflow_lens.hooks.influence.jacobian import JacobianInfluence
from infoflow_lens.hooks.influence.resample import ResampleInfluence
from infoflow_lens.hooks.interventions import (
    HEAD_IDEALS,
    AllHeads,
    Edit,
    EditsOfPass,
    HeadIdeals,
    HeadLabels,
    Intervention,
    InterventionResult,
    MeanPatterns,
    MeanPatternsProbe,
    NextTokenLoss,
    edit_head,
    edit_head_output,
    heads_of,
    label_heads,
)
from infoflow_lens.hooks.mechanisms import (
    IDEALS,
    METRICS,
    JointReplacement,
    MechanismsProgress,
    MechanismsResult,
    measure_mechanisms,
    replace_greedily,
    substituted,
)
from infoflow_lens.hooks.mechanisms.edge_budget import EdgeBudgetResult, measure_edge_budget
from infoflow_lens.hooks.mechanisms.sufficiency import SufficiencyResult, measure_sufficiency
from infoflow_lens.hooks.mechanisms.top_k import TopKResult, measure_top_k
from infoflow_lens.hooks.model.capabilities import (
    LayerCapabilities,
    ModelCapabilities,
    inspect_model,
)
from infoflow_lens.hooks.model.inputs import example_input
from infoflow_lens.hooks.passes.run import probe_cache, run, run_probes
from infoflow_lens.hooks.passes.view import Needs, Pass
from infoflow_lens.hooks.patterns import PatternsProbe, PatternsResult
from infoflow_lens.hooks.positions.probe import PositionsProbe
from infoflow_lens.hooks.positions.result import PositionsResult, ShardedPositions
from infoflow_lens.hooks.probe import Probe, Split
from infoflow_lens.hooks.readouts import (
    EmbeddingCosine,
    FunctionOfOutput,
    LogitDifference,
    LogProbability,
    Readout,
)
from infoflow_lens.hooks.recovery.probe import RecoveryProbe, RecoveryResult
from infoflow_lens.hooks.relations import find_heads
from infoflow_lens.hooks.result import LabelledResult, Result
from infoflow_lens.hooks.routes.attention import AttentionRollout, AttentionWeight
from infoflow_lens.hooks.routes.base import RoutesResult
from infoflow_lens.hooks.routes.contributions import ContributionRoutes
from infoflow_lens.hooks.routes.every import baselines
from infoflow_lens.hooks.routes.flow import AttentionFlow
from infoflow_lens.hooks.routes.graded import GradedSetsProbe, GradedSetsResult
from infoflow_lens.hooks.routes.gradient import GradientTimesInput
from infoflow_lens.hooks.routes.powers import PowerRollout, PowerRolloutResult
from infoflow_lens.hooks.scores import StateScores
from infoflow_lens.hooks.shares.measure import measure_shares
from infoflow_lens.hooks.shares.result import Shares
from infoflow_lens.hooks.states import State, combined, concatenated, summed
from infoflow_lens.hooks.why import Why, WhyAll, measure_why, measure_why_all

if TYPE_CHECKING:
    from infoflow_lens.hooks.passes.attach import AttachedProbes, attach

__all__ = [
    "HEAD_IDEALS",
    "IDEALS",
    "METRICS",
    "AllHeads",
    "AttachedProbes",
    "AttendedProbe",
    "AttendedResult",
    "AttentionFlow",
    "AttentionRollout",
    "AttentionWeight",
    "ContributionRoutes",
    "EdgeBudgetResult",
    "Edit",
    "EditsOfPass",
    "EmbeddingCosine",
    "FunctionOfOutput",
    "GradedSetsProbe",
    "GradedSetsResult",
    "GradientTimesInput",
    "HeadIdeals",
    "HeadLabels",
    "InfluenceResult",
    "Intervention",
    "InterventionResult",
    "JacobianInfluence",
    "JointReplacement",
    "LabelledArray",
    "LabelledResult",
    "LayerCapabilities",
    "LogProbability",
    "LogitDifference",
    "MeanPatterns",
    "MeanPatternsProbe",
    "MechanismsProgress",
    "MechanismsResult",
    "ModelCapabilities",
    "Needs",
    "NextTokenLoss",
    "Pass",
    "PatternsProbe",
    "PatternsResult",
    "PositionsProbe",
    "PositionsResult",
    "PowerRollout",
    "PowerRolloutResult",
    "Probe",
    "Readout",
    "RecoveryProbe",
    "RecoveryResult",
    "ResampleInfluence",
    "Result",
    "RoutesResult",
    "ShardedPositions",
    "Shares",
    "Split",
    "State",
    "StateScores",
    "SufficiencyResult",
    "TopKResult",
    "Why",
    "WhyAll",
    "attach",
    "baselines",
    "check_probe",
    "combined",
    "concatenated",
    "edit_head",
    "edit_head_output",
    "example_input",
    "find_heads",
    "heads_of",
    "inspect_model",
    "label_heads",
    "measure_edge_budget",
    "measure_mechanisms",
    "measure_shares",
    "measure_sufficiency",
    "measure_top_k",
    "measure_why",
    "measure_why_all",
    "probe_cache",
    "replace_greedily",
    "run",
    "run_probes",
    "substituted",
    "summed",
]


def __getattr__(name: str) -> Any:
    """Import :func:`attach` on its first use: it loads PyTorch's compiler, which takes long."""
    if name not in ("AttachedProbes", "attach"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from infoflow_lens.hooks.passes import attach as module

    return getattr(module, name)
