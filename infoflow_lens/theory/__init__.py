"""What InfoFlow says, without any model: sets of input positions, comparisons, costs and bounds."""

from infoflow_lens.foundation import naming
from infoflow_lens.theory.comparison import ComparisonProfile as ComparisonProfile
from infoflow_lens.theory.comparison import Component as Component
from infoflow_lens.theory.cost import DigitCode as DigitCode
from infoflow_lens.theory.cost import exponent as exponent
from infoflow_lens.theory.estimate import Estimate as Estimate
from infoflow_lens.theory.information_sets import GradedSets as GradedSets
from infoflow_lens.theory.information_sets import InformationSets as InformationSets
from infoflow_lens.theory.information_sets import propagate as propagate
from infoflow_lens.theory.rules import GlobalAggregation as GlobalAggregation
from infoflow_lens.theory.rules import MaxPosition as MaxPosition
from infoflow_lens.theory.rules import SpecificPositions as SpecificPositions
from infoflow_lens.theory.schedule import Schedule as Schedule
from infoflow_lens.theory.schedule import learns as learns
from infoflow_lens.theory.schedule import run_schedule as run_schedule

__all__ = naming.list_public(globals())
