"""All studies by name: those of the papers, and those of language models."""

from collections.abc import Mapping, Sequence

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.naming import nearest
from infoflow_lens.studies.language_model.edge_budget import EdgeBudget
from infoflow_lens.studies.language_model.graded_sets import GradedSetsStudy
from infoflow_lens.studies.language_model.induction import Induction
from infoflow_lens.studies.language_model.reasons import Reasons
from infoflow_lens.studies.language_model.roles import Roles
from infoflow_lens.studies.language_model.sets import Sets
from infoflow_lens.studies.language_model.softness import Softness
from infoflow_lens.studies.language_model.study import LanguageModelStudy
from infoflow_lens.studies.language_model.sufficiency import Sufficiency
from infoflow_lens.studies.language_model.topk import TopK
from infoflow_lens.studies.papers import STUDIES
from infoflow_lens.studies.study import Study

LANGUAGE_MODEL_STUDIES: Mapping[str, type[LanguageModelStudy]] = {
    kind.name: kind
    for kind in (
        Sufficiency,
        TopK,
        Sets,
        GradedSetsStudy,
        Roles,
        Softness,
        Induction,
        Reasons,
        EdgeBudget,
    )
}
STUDY_KINDS: Mapping[str, type[Study]] = {
    **{name: type(study) for name, study in STUDIES.items()},
    **LANGUAGE_MODEL_STUDIES,
}


def find_study(name: str, models: Sequence[str] = (), data: str | None = None) -> Study:
    """Return the study of that name.

    Args:
        name: one of :data:`STUDY_KINDS`.
        models: what a study of language models is about.
        data: the text that it reads; default, its own.

    Raises:
        InfoFlowError: for an unknown name, with the nearest known one; or for models or data of a
            study that makes its own.
    """
    if name not in STUDY_KINDS:
        raise InfoFlowError(f"there is no study {name!r}{nearest(name, STUDY_KINDS)}")
    if name in LANGUAGE_MODEL_STUDIES:
        return LANGUAGE_MODEL_STUDIES[name](models, data)
    if models or data is not None:
        raise InfoFlowError(
            f"{name} trains models of its own: expected no --model and no --data; the studies of "
            f"language models are {', '.join(LANGUAGE_MODEL_STUDIES)}"
        )
    return STUDIES[name]
