"""The studies, a file each; by name in :data:`STUDIES`."""

from collections.abc import Mapping

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.naming import nearest
from infoflow_lens.studies.papers.agreement_over_training import AgreementOverTraining
from infoflow_lens.studies.papers.attention_maps import AttentionMaps
from infoflow_lens.studies.papers.cost_law import CostLaw
from infoflow_lens.studies.papers.depth_separation import DepthSeparationStudy
from infoflow_lens.studies.papers.head_count import HeadCount
from infoflow_lens.studies.papers.intrinsic_dimension import IntrinsicDimensionStudy
from infoflow_lens.studies.papers.kth_largest import KthLargestStudy
from infoflow_lens.studies.papers.max_position_recovery import MaxPositionRecovery
from infoflow_lens.studies.papers.nested_qa import NestedQuestions
from infoflow_lens.studies.papers.separated_pairs import SeparatedPairs
from infoflow_lens.studies.papers.specific_position import SpecificPosition
from infoflow_lens.studies.papers.triangle_center import TriangleCenterStudy
from infoflow_lens.studies.papers.varying_depth import VaryingDepth
from infoflow_lens.studies.papers.varying_heads import VaryingHeads
from infoflow_lens.studies.study import Study

_ALL: tuple[Study, ...] = (  # the order of the papers
    MaxPositionRecovery(),
    SpecificPosition(),
    IntrinsicDimensionStudy(),
    SeparatedPairs(),
    TriangleCenterStudy(),
    HeadCount(),
    DepthSeparationStudy(),
    KthLargestStudy(),
    CostLaw(),
    VaryingDepth(),
    VaryingHeads(),
    AttentionMaps(),
    NestedQuestions(),
    AgreementOverTraining(),
)
STUDIES: Mapping[str, Study] = {study.name: study for study in _ALL}


def find_study(name: str) -> Study:
    """Return the study of that name.

    Raises:
        InfoFlowError: for an unknown name, with the nearest known one.
    """
    if name not in STUDIES:
        raise InfoFlowError(f"there is no study {name!r}{nearest(name, STUDIES)}")
    return STUDIES[name]
