"""What is measured: probes for any TransformerLens model, through its hook points."""

import typing

from infoflow_lens.foundation import naming
from infoflow_lens.hooks.checking import check_probe as check_probe
from infoflow_lens.hooks.influence.base import InfluenceResult as InfluenceResult
from infoflow_lens.hooks.influence.probes import JacobianInfluence as JacobianInfluence
from infoflow_lens.hooks.influence.probes import ResampleInfluence as ResampleInfluence
from infoflow_lens.hooks.interventions.damage import METRICS as METRICS
from infoflow_lens.hooks.interventions.damage import NextTokenLoss as NextTokenLoss
from infoflow_lens.hooks.interventions.edits import Edit as Edit
from infoflow_lens.hooks.interventions.edits import edit_head as edit_head
from infoflow_lens.hooks.interventions.edits import edit_head_output as edit_head_output
from infoflow_lens.hooks.interventions.edits import heads_of as heads_of
from infoflow_lens.hooks.interventions.heads import HeadLabels as HeadLabels
from infoflow_lens.hooks.interventions.heads import label_heads as label_heads
from infoflow_lens.hooks.interventions.ideals import HEAD_IDEALS as HEAD_IDEALS
from infoflow_lens.hooks.interventions.ideals import AllHeads as AllHeads
from infoflow_lens.hooks.interventions.ideals import HeadIdeals as HeadIdeals
from infoflow_lens.hooks.interventions.patterns import IDEALS as IDEALS
from infoflow_lens.hooks.interventions.patterns import MeanPatterns as MeanPatterns
from infoflow_lens.hooks.interventions.patterns import MeanPatternsProbe as MeanPatternsProbe
from infoflow_lens.hooks.interventions.patterns import substituted as substituted
from infoflow_lens.hooks.interventions.probe import EditsOfPass as EditsOfPass
from infoflow_lens.hooks.interventions.probe import Intervention as Intervention
from infoflow_lens.hooks.interventions.probe import InterventionResult as InterventionResult
from infoflow_lens.hooks.mechanisms.budgets import EdgeBudgetResult as EdgeBudgetResult
from infoflow_lens.hooks.mechanisms.budgets import TopKResult as TopKResult
from infoflow_lens.hooks.mechanisms.budgets import measure_edge_budget as measure_edge_budget
from infoflow_lens.hooks.mechanisms.budgets import measure_top_k as measure_top_k
from infoflow_lens.hooks.mechanisms.measure import JointReplacement as JointReplacement
from infoflow_lens.hooks.mechanisms.measure import SufficiencyResult as SufficiencyResult
from infoflow_lens.hooks.mechanisms.measure import measure_mechanisms as measure_mechanisms
from infoflow_lens.hooks.mechanisms.measure import measure_sufficiency as measure_sufficiency
from infoflow_lens.hooks.mechanisms.measure import replace_greedily as replace_greedily
from infoflow_lens.hooks.mechanisms.result import MechanismsResult as MechanismsResult
from infoflow_lens.hooks.model.capabilities import LayerCapabilities as LayerCapabilities
from infoflow_lens.hooks.model.capabilities import ModelCapabilities as ModelCapabilities
from infoflow_lens.hooks.model.capabilities import inspect_model as inspect_model
from infoflow_lens.hooks.model.inputs import example_input as example_input
from infoflow_lens.hooks.passes.run import probe_cache as probe_cache
from infoflow_lens.hooks.passes.run import run as run
from infoflow_lens.hooks.passes.run import run_probes as run_probes
from infoflow_lens.hooks.passes.view import Needs as Needs
from infoflow_lens.hooks.passes.view import Pass as Pass
from infoflow_lens.hooks.positions import AttendedProbe as AttendedProbe
from infoflow_lens.hooks.positions import AttendedResult as AttendedResult
from infoflow_lens.hooks.positions import PatternsProbe as PatternsProbe
from infoflow_lens.hooks.positions import PatternsResult as PatternsResult
from infoflow_lens.hooks.positions import PositionsProbe as PositionsProbe
from infoflow_lens.hooks.positions import PositionsResult as PositionsResult
from infoflow_lens.hooks.positions import ShardedPositions as ShardedPositions
from infoflow_lens.hooks.probe import Probe as Probe
from infoflow_lens.hooks.probe import Split as Split
from infoflow_lens.hooks.readouts import EmbeddingCosine as EmbeddingCosine
from infoflow_lens.hooks.readouts import FunctionOfOutput as FunctionOfOutput
from infoflow_lens.hooks.readouts import LogitDifference as LogitDifference
from infoflow_lens.hooks.readouts import LogProbability as LogProbability
from infoflow_lens.hooks.readouts import Readout as Readout
from infoflow_lens.hooks.recovery.probe import RecoveryProbe as RecoveryProbe
from infoflow_lens.hooks.recovery.probe import RecoveryResult as RecoveryResult
from infoflow_lens.hooks.relations import find_heads as find_heads
from infoflow_lens.hooks.result import LabelledArray as LabelledArray
from infoflow_lens.hooks.result import LabelledResult as LabelledResult
from infoflow_lens.hooks.result import Result as Result
from infoflow_lens.hooks.routes.baselines import AttentionFlow as AttentionFlow
from infoflow_lens.hooks.routes.baselines import AttentionRollout as AttentionRollout
from infoflow_lens.hooks.routes.baselines import AttentionWeight as AttentionWeight
from infoflow_lens.hooks.routes.baselines import GradientTimesInput as GradientTimesInput
from infoflow_lens.hooks.routes.baselines import baselines as baselines
from infoflow_lens.hooks.routes.contributions import ContributionRoutes as ContributionRoutes
from infoflow_lens.hooks.routes.contributions import RoutesResult as RoutesResult
from infoflow_lens.hooks.routes.graded import GradedSetsProbe as GradedSetsProbe
from infoflow_lens.hooks.routes.graded import GradedSetsResult as GradedSetsResult
from infoflow_lens.hooks.routes.graded import PowerRollout as PowerRollout
from infoflow_lens.hooks.routes.graded import PowerRolloutResult as PowerRolloutResult
from infoflow_lens.hooks.scores import StateScores as StateScores
from infoflow_lens.hooks.shares import Shares as Shares
from infoflow_lens.hooks.shares import measure_shares as measure_shares
from infoflow_lens.hooks.states import State as State
from infoflow_lens.hooks.states import combined as combined
from infoflow_lens.hooks.states import concatenated as concatenated
from infoflow_lens.hooks.states import summed as summed
from infoflow_lens.hooks.why import Why as Why
from infoflow_lens.hooks.why import WhyAll as WhyAll
from infoflow_lens.hooks.why import measure_why as measure_why
from infoflow_lens.hooks.why import measure_why_all as measure_why_all

if typing.TYPE_CHECKING:
    from infoflow_lens.hooks.passes.attach import AttachedProbes as AttachedProbes
    from infoflow_lens.hooks.passes.attach import attach as attach

_LATE = ("AttachedProbes", "attach")
__all__ = sorted([*naming.list_public(globals()), *_LATE])


def __getattr__(name: str) -> typing.Any:
    """Import :func:`attach` on its first use: it loads PyTorch's compiler, which takes long."""
    if name == "MechanismsProgress":
        raise AttributeError(f"{name} is gone: measure_mechanisms(after=...) gives a mapping")
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from infoflow_lens.hooks.passes import attach as module

    return getattr(module, name)
