"""What is measured: probes for any TransformerLens model, through its hook points."""

from infoflow_lens.hooks.attach import AttachedProbes, attach, run_probes
from infoflow_lens.hooks.attended import AttendedProbe, AttendedResult
from infoflow_lens.hooks.influence import InfluenceResult, JacobianInfluence
from infoflow_lens.hooks.positions import PositionsProbe, PositionsResult
from infoflow_lens.hooks.probe import Probe, Split
from infoflow_lens.hooks.recovery import RecoveryProbe, RecoveryResult
from infoflow_lens.hooks.result import Result

__all__ = [
    "AttachedProbes",
    "AttendedProbe",
    "AttendedResult",
    "InfluenceResult",
    "JacobianInfluence",
    "PositionsProbe",
    "PositionsResult",
    "Probe",
    "RecoveryProbe",
    "RecoveryResult",
    "Result",
    "Split",
    "attach",
    "run_probes",
]
