"""Which mechanism a head needs: its pattern replaced by an ideal one."""

from infoflow_lens.hooks.interventions.damage import METRICS, Metric
from infoflow_lens.hooks.interventions.patterns import IDEALS, SOFT, Ideal, substituted
from infoflow_lens.hooks.mechanisms.greedy import JointReplacement, replace_greedily
from infoflow_lens.hooks.mechanisms.measure import measure_mechanisms
from infoflow_lens.hooks.mechanisms.result import MechanismsResult

__all__ = [
    "IDEALS",
    "METRICS",
    "SOFT",
    "Ideal",
    "JointReplacement",
    "MechanismsResult",
    "Metric",
    "measure_mechanisms",
    "replace_greedily",
    "substituted",
]
