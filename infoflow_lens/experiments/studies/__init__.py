"""The studies, a file each; by name in :data:`STUDIES`."""

from collections.abc import Mapping

from infoflow_lens.experiments.studies.head_count import HeadCount
from infoflow_lens.experiments.studies.kth_largest import KthLargestStudy
from infoflow_lens.experiments.studies.max_position_recovery import MaxPositionRecovery
from infoflow_lens.experiments.studies.specific_position import SpecificPosition
from infoflow_lens.experiments.studies.varying_depth import VaryingDepth
from infoflow_lens.experiments.study import Study
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.names import nearest

_ALL: tuple[Study, ...] = (
    MaxPositionRecovery(),
    SpecificPosition(),
    HeadCount(),
    KthLargestStudy(),
    VaryingDepth(),
)
STUDIES: Mapping[str, Study] = {study.name: study for study in _ALL}


def find_study(name: str) -> Study:
    """The study of that name.

    Raises:
        InfoFlowError: for an unknown name, with the nearest known one.
    """
    if name not in STUDIES:
        raise InfoFlowError(f"there is no experiment {name!r}{nearest(name, STUDIES)}")
    return STUDIES[name]
