"""infoflow-lens: which input tokens a hidden state can depend on, and which it does depend on.

It measures both in Transformers, and compares them with what theory allows.

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
    from infoflow_lens.agreement import compare as compare
    from infoflow_lens.flows.ask import Answer as Answer
    from infoflow_lens.flows.ask import ask as ask
    from infoflow_lens.flows.result import Flow as Flow
    from infoflow_lens.flows.result import compare_flows as compare_flows
    from infoflow_lens.flows.run import flow as flow
    from infoflow_lens.flows.why import why as why
    from infoflow_lens.flows.why import why_all as why_all
    from infoflow_lens.foundation.errors import InfoFlowError as InfoFlowError
    from infoflow_lens.foundation.errors import InfoFlowWarning as InfoFlowWarning
    from infoflow_lens.hooks import JacobianInfluence as JacobianInfluence
    from infoflow_lens.hooks import PositionsProbe as PositionsProbe
    from infoflow_lens.hooks import RecoveryProbe as RecoveryProbe
    from infoflow_lens.hooks import attach as attach
    from infoflow_lens.hooks import baselines as baselines
    from infoflow_lens.hooks import inspect_model as inspect_model
    from infoflow_lens.hooks import label_heads as label_heads
    from infoflow_lens.hooks import run_probes as run_probes
    from infoflow_lens.models.architecture import Architecture as Architecture
    from infoflow_lens.models.host import build_model as build_model
    from infoflow_lens.models.host import load_model as load_model
    from infoflow_lens.models.host import save_model as save_model
    from infoflow_lens.models.loading import load_any as load_any
    from infoflow_lens.models.named import open_model as open_model
    from infoflow_lens.named import design as design
    from infoflow_lens.named import estimate as estimate
    from infoflow_lens.probing.run import probe as probe
    from infoflow_lens.tasks import load_task as load_task
    from infoflow_lens.theory import propagate as propagate
    from infoflow_lens.training import train as train

_HOMES = {
    "Answer": "flows.ask",
    "Architecture": "models.architecture",
    "Flow": "flows.result",
    "InfoFlowError": "foundation.errors",
    "InfoFlowWarning": "foundation.errors",
    "JacobianInfluence": "hooks",
    "PositionsProbe": "hooks",
    "RecoveryProbe": "hooks",
    "ask": "flows.ask",
    "attach": "hooks",
    "baselines": "hooks",
    "build_model": "models.host",
    "compare": "agreement",
    "compare_flows": "flows.result",
    "design": "named",
    "estimate": "named",
    "flow": "flows.run",
    "inspect_model": "hooks",
    "load_any": "models.loading",
    "load_model": "models.host",
    "load_task": "tasks",
    "label_heads": "hooks",
    "open_model": "models.named",
    "probe": "probing.run",
    "propagate": "theory",
    "run_probes": "hooks",
    "save_model": "models.host",
    "train": "training",
    "why": "flows.why",
    "why_all": "flows.why",
}

__all__ = sorted(_HOMES)

# Names that are in the laboratory since 0.4 and go on here.
_IN_STUDIES = ("build_construction", "one_layer_certificate")
# Names that are in a module since 0.4, and go on here until 0.5.
_MOVED = {
    "dependence": "studies",
    "list_constructions": "studies",
    "train_together": "studies",
    "Agreement": "agreement",
    "AttendedProbe": "hooks",
    "AttentionFlow": "hooks",
    "AttentionRollout": "hooks",
    "AttentionWeight": "hooks",
    "Component": "theory",
    "ContributionRoutes": "hooks",
    "GradedSets": "theory",
    "GradedSetsProbe": "hooks",
    "GradientTimesInput": "hooks",
    "HeadLabels": "hooks",
    "InformationSets": "theory",
    "NamedModel": "models.named",
    "PatternsProbe": "hooks",
    "PowerRollout": "hooks",
    "RankingAgreement": "ranking",
    "ResampleInfluence": "hooks",
    "Target": "tasks",
    "TrainingConfig": "training",
    "Why": "hooks",
    "WhyAll": "hooks",
    "build_token_model": "models.host",
    "compare_by_position": "agreement",
    "compare_rankings": "ranking",
    "coverage_curve": "agreement",
    "dataset_card": "tasks",
    "learns": "named",
    "list_tasks": "tasks",
    "measure_edge_budget": "hooks",
    "measure_mechanisms": "hooks",
    "measure_sufficiency": "hooks",
    "measure_top_k": "hooks",
    "probe_cache": "hooks",
    "replace_greedily": "hooks",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name in _MOVED:
        import warnings

        module = f"{__name__}.{_MOVED[name]}"
        # `from infoflow_lens import name` asks twice, first whether there is such a name
        if sys._getframe(1).f_code.co_name != "_handle_fromlist":
            warnings.warn(
                f"{name} is in {module}: import it from there; this one goes with 0.5",
                FutureWarning,
                stacklevel=2,
            )
        return getattr(import_module(module), name)
    if name in _IN_STUDIES:
        return getattr(import_module(f"{__name__}.studies"), name)
    if name == "__version__":
        from infoflow_lens.foundation.packages import find_version

        return find_version()
    if name in _rooms():
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _rooms() -> list[str]:
    """Return the modules of the package."""
    return [module.name for module in iter_modules(__path__)]


def __dir__() -> list[str]:
    return sorted({*_HOMES, *_rooms(), "__version__"})
