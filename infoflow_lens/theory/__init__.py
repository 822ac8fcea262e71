"""What InfoFlow says, without any model: sets of input positions, comparisons, costs and bounds."""

from infoflow_lens.theory.comparison import ComparisonProfile, ComparisonTree, Component
from infoflow_lens.theory.cost import DigitCode, exponent
from infoflow_lens.theory.estimate import Estimate
from infoflow_lens.theory.information_sets import GradedSets, InformationSets, propagate
from infoflow_lens.theory.rules import GlobalAggregation, MaxPosition, SpecificPositions
from infoflow_lens.theory.schedule import Schedule, learns, run_schedule
from infoflow_lens.theory.search import search

__all__ = [
    "ComparisonProfile",
    "ComparisonTree",
    "Component",
    "DigitCode",
    "Estimate",
    "GlobalAggregation",
    "GradedSets",
    "InformationSets",
    "MaxPosition",
    "Schedule",
    "SpecificPositions",
    "exponent",
    "learns",
    "propagate",
    "run_schedule",
    "search",
]
