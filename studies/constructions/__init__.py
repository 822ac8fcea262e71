"""Weights set by hand: what the papers prove that a model can do, as models that run."""

from infoflow_lens.studies.constructions import (  # noqa: F401  # each registers what it holds
    aggregation,
    depth_separation,
    kth_largest,
    memorization,
    nested,
    position_attention,
    question_answering,
    retrieval,
    templates,
    trees,
)
from infoflow_lens.studies.constructions.attention_only import AttentionOnly, Head, Rows
from infoflow_lens.studies.constructions.certified import certified_model
from infoflow_lens.studies.constructions.registry import (
    CONSTRUCTIONS,
    Construction,
    build_construction,
    list_constructions,
)
from infoflow_lens.studies.constructions.starts import perturbed_construction, with_scores_of

__all__ = [
    "CONSTRUCTIONS",
    "AttentionOnly",
    "Construction",
    "Head",
    "Rows",
    "build_construction",
    "certified_model",
    "list_constructions",
    "perturbed_construction",
    "with_scores_of",
]
