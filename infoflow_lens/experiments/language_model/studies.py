"""The studies of language models by name."""

from collections.abc import Mapping

from infoflow_lens.experiments.language_model.graded_sets import GradedSetsStudy
from infoflow_lens.experiments.language_model.induction import Induction
from infoflow_lens.experiments.language_model.reasons import Reasons
from infoflow_lens.experiments.language_model.roles import Roles
from infoflow_lens.experiments.language_model.sets import Sets
from infoflow_lens.experiments.language_model.softness import Softness
from infoflow_lens.experiments.language_model.study import LanguageModelStudy
from infoflow_lens.experiments.language_model.sufficiency import Sufficiency
from infoflow_lens.experiments.language_model.topk import TopK
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.names import nearest

LANGUAGE_MODEL_STUDIES: Mapping[str, type[LanguageModelStudy]] = {
    kind.name: kind
    for kind in (Sufficiency, TopK, Sets, GradedSetsStudy, Roles, Softness, Induction, Reasons)
}


def find_language_model_study(name: str) -> type[LanguageModelStudy]:
    """The study of that name.

    Raises:
        InfoFlowError: for an unknown name, with the nearest known one.
    """
    if name not in LANGUAGE_MODEL_STUDIES:
        raise InfoFlowError(f"there is no study {name!r}{nearest(name, LANGUAGE_MODEL_STUDIES)}")
    return LANGUAGE_MODEL_STUDIES[name]
