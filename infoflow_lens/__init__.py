"""infoflow-lens: which input tokens can a hidden state depend on, which does it depend on, and is
that what theory allows?

Names load on first use, so that importing the package costs nothing that you do not use.
"""

import sys
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

if "ipykernel" in sys.modules:  # a notebook, in which the libraries below would warn
    from infoflow_lens.foundation.progress import quiet_tqdm

    quiet_tqdm()

if TYPE_CHECKING:
    from infoflow_lens.agreement import Agreement as Agreement
    from infoflow_lens.agreement import compare as compare
    from infoflow_lens.agreement import compare_by_position as compare_by_position
    from infoflow_lens.agreement import coverage_curve as coverage_curve
    from infoflow_lens.flows.answer import Answer as Answer
    from infoflow_lens.flows.ask import ask as ask
    from infoflow_lens.flows.comparing import compare_flows as compare_flows
    from infoflow_lens.flows.result import Flow as Flow
    from infoflow_lens.flows.run import flow as flow
    from infoflow_lens.flows.why import why as why
    from infoflow_lens.flows.why import why_all as why_all
    from infoflow_lens.foundation.errors import InfoFlowError as InfoFlowError
    from infoflow_lens.foundation.errors import InfoFlowWarning as InfoFlowWarning
    from infoflow_lens.hooks import AttendedProbe as AttendedProbe
    from infoflow_lens.hooks import AttentionFlow as AttentionFlow
    from infoflow_lens.hooks import AttentionRollout as AttentionRollout
    from infoflow_lens.hooks import AttentionWeight as AttentionWeight
    from infoflow_lens.hooks import ContributionRoutes as ContributionRoutes
    from infoflow_lens.hooks import GradedSetsProbe as GradedSetsProbe
    from infoflow_lens.hooks import GradientTimesInput as GradientTimesInput
    from infoflow_lens.hooks import HeadLabels as HeadLabels
    from infoflow_lens.hooks import JacobianInfluence as JacobianInfluence
    from infoflow_lens.hooks import PatternsProbe as PatternsProbe
    from infoflow_lens.hooks import PositionsProbe as PositionsProbe
    from infoflow_lens.hooks import PowerRollout as PowerRollout
    from infoflow_lens.hooks import RecoveryProbe as RecoveryProbe
    from infoflow_lens.hooks import ResampleInfluence as ResampleInfluence
    from infoflow_lens.hooks import Why as Why
    from infoflow_lens.hooks import WhyAll as WhyAll
    from infoflow_lens.hooks import attach as attach
    from infoflow_lens.hooks import baselines as baselines
    from infoflow_lens.hooks import inspect_model as inspect_model
    from infoflow_lens.hooks import label_heads as label_heads
    from infoflow_lens.hooks import measure_edge_budget as measure_edge_budget
    from infoflow_lens.hooks import measure_mechanisms as measure_mechanisms
    from infoflow_lens.hooks import measure_sufficiency as measure_sufficiency
    from infoflow_lens.hooks import measure_top_k as measure_top_k
    from infoflow_lens.hooks import probe_cache as probe_cache
    from infoflow_lens.hooks import replace_greedily as replace_greedily
    from infoflow_lens.hooks import run_probes as run_probes
    from infoflow_lens.models.architecture import Architecture as Architecture
    from infoflow_lens.models.host import build_model as build_model
    from infoflow_lens.models.host import build_token_model as build_token_model
    from infoflow_lens.models.host import load_model as load_model
    from infoflow_lens.models.host import save_model as save_model
    from infoflow_lens.models.loading import load_any as load_any
    from infoflow_lens.models.named import NamedModel as NamedModel
    from infoflow_lens.models.named import open_model as open_model
    from infoflow_lens.named import design as design
    from infoflow_lens.named import estimate as estimate
    from infoflow_lens.named import learns as learns
    from infoflow_lens.probing.call import probe as probe
    from infoflow_lens.ranking import RankingAgreement as RankingAgreement
    from infoflow_lens.ranking import compare_rankings as compare_rankings
    from infoflow_lens.tasks import Target as Target
    from infoflow_lens.tasks import dataset_card as dataset_card
    from infoflow_lens.tasks import list_tasks as list_tasks
    from infoflow_lens.tasks import load_task as load_task
    from infoflow_lens.theory import Component as Component
    from infoflow_lens.theory import GradedSets as GradedSets
    from infoflow_lens.theory import InformationSets as InformationSets
    from infoflow_lens.theory import propagate as propagate
    from infoflow_lens.training import TrainingConfig as TrainingConfig
    from infoflow_lens.training import train as train

_HOMES = {
    "Agreement": "agreement",
    "Answer": "flows.answer",
    "Architecture": "models.architecture",
    "AttendedProbe": "hooks",
    "AttentionFlow": "hooks",
    "AttentionRollout": "hooks",
    "AttentionWeight": "hooks",
    "Component": "theory",
    "ContributionRoutes": "hooks",
    "GradedSets": "theory",
    "GradedSetsProbe": "hooks",
    "GradientTimesInput": "hooks",
    "Flow": "flows.result",
    "InfoFlowError": "foundation.errors",
    "InfoFlowWarning": "foundation.errors",
    "InformationSets": "theory",
    "JacobianInfluence": "hooks",
    "NamedModel": "models.named",
    "PatternsProbe": "hooks",
    "PositionsProbe": "hooks",
    "PowerRollout": "hooks",
    "RankingAgreement": "ranking",
    "RecoveryProbe": "hooks",
    "ResampleInfluence": "hooks",
    "Target": "tasks",
    "TrainingConfig": "training",
    "Why": "hooks",
    "WhyAll": "hooks",
    "ask": "flows.ask",
    "attach": "hooks",
    "baselines": "hooks",
    "build_model": "models.host",
    "build_token_model": "models.host",
    "compare": "agreement",
    "compare_by_position": "agreement",
    "compare_flows": "flows.comparing",
    "compare_rankings": "ranking",
    "coverage_curve": "agreement",
    "dataset_card": "tasks",
    "design": "named",
    "estimate": "named",
    "flow": "flows.run",
    "inspect_model": "hooks",
    "learns": "named",
    "list_tasks": "tasks",
    "load_any": "models.loading",
    "load_model": "models.host",
    "load_task": "tasks",
    "measure_edge_budget": "hooks",
    "HeadLabels": "hooks",
    "label_heads": "hooks",
    "measure_mechanisms": "hooks",
    "measure_sufficiency": "hooks",
    "measure_top_k": "hooks",
    "open_model": "models.named",
    "probe": "probing.call",
    "probe_cache": "hooks",
    "propagate": "theory",
    "replace_greedily": "hooks",
    "run_probes": "hooks",
    "save_model": "models.host",
    "train": "training",
    "why": "flows.why",
    "why_all": "flows.why",
}

__all__ = sorted(_HOMES)

# Names that are in the laboratory since 0.4: the first two go on here, others go with 0.5.
_IN_STUDIES = ("build_construction", "one_layer_certificate")
_MOVED = ("dependence", "list_constructions", "train_together")


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name in _MOVED:
        import warnings

        warnings.warn(
            f"{name} is in infoflow_lens.studies: import it from there; this one goes with 0.5",
            FutureWarning,
            stacklevel=2,
        )
    if name in (*_IN_STUDIES, *_MOVED):
        return getattr(import_module(f"{__name__}.studies"), name)
    if name == "__version__":
        from infoflow_lens.foundation.versions import find_version

        return find_version()
    if name in _rooms():
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _rooms() -> list[str]:
    """The modules of the package."""
    return [module.name for module in iter_modules(__path__)]


def __dir__() -> list[str]:
    return sorted({*_HOMES, *_rooms(), "__version__"})
