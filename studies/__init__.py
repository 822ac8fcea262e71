"""The laboratory: studies of the papers and of language models, constructions, certificates.

Names load on first use. Nothing of the library imports from here.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infoflow_lens.studies.certificates.separability import dependence as dependence
    from infoflow_lens.studies.certificates.separability import (
        one_layer_certificate as one_layer_certificate,
    )
    from infoflow_lens.studies.checking import check_study as check_study
    from infoflow_lens.studies.constructions import build_construction as build_construction
    from infoflow_lens.studies.constructions import list_constructions as list_constructions
    from infoflow_lens.studies.study import Study as Study
    from infoflow_lens.studies.sweep import run_study as run_study
    from infoflow_lens.studies.together import train_together as train_together

_HOMES = {
    "Study": "study",
    "build_construction": "constructions",
    "check_study": "checking",
    "dependence": "certificates.separability",
    "list_constructions": "constructions",
    "one_layer_certificate": "certificates.separability",
    "run_study": "sweep",
    "train_together": "together",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
