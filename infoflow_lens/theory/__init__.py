"""What InfoFlow says, without any model: sets of input positions, comparisons, costs and bounds."""

from infoflow_lens.theory.comparison import ComparisonProfile, ComparisonTree, Component
from infoflow_lens.theory.cost import DigitCode, exponent
from infoflow_lens.theory.estimate import Estimate
from infoflow_lens.theory.information_sets import GradedSets, InformationSets, propagate
from infoflow_lens.theory.rules import GlobalAggregation, MaxPosition, SpecificPositions
from infoflow_lens.theory.schedule import Schedule, learns, run_schedule
from infoflow_lens.theory.search import search
from infoflow_lens.theory.separability import (
    Dependence,
    OneLayerCertificate,
    OneLayerModel,
    Witness,
    check_witness,
    dependence,
    one_layer_certificate,
)

__all__ = [
    "ComparisonProfile",
    "ComparisonTree",
    "Component",
    "Dependence",
    "DigitCode",
    "Estimate",
    "GlobalAggregation",
    "GradedSets",
    "InformationSets",
    "MaxPosition",
    "OneLayerCertificate",
    "OneLayerModel",
    "Schedule",
    "SpecificPositions",
    "Witness",
    "check_witness",
    "dependence",
    "exponent",
    "learns",
    "one_layer_certificate",
    "propagate",
    "run_schedule",
    "search",
]
