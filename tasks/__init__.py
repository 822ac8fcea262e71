"""Synthetic tasks whose active tokens are known: inputs, targets, datasets."""

from typing import Any

from infoflow_lens.tasks.aggregation import GlobalMean, PositionSum
from infoflow_lens.tasks.card import dataset_card
from infoflow_lens.tasks.d_retrieval import DRetrieval
from infoflow_lens.tasks.kth_largest import KthLargest
from infoflow_lens.tasks.memorization import Memorization
from infoflow_lens.tasks.question_answering import InContextQA, NestedQA
from infoflow_lens.tasks.registry import list_tasks, load_task
from infoflow_lens.tasks.target import Target
from infoflow_lens.tasks.task import Task, VectorTask
from infoflow_lens.tasks.templates import InContextTemplateMatching, TemplateMatching
from infoflow_lens.tasks.tokens import TokenTask
from infoflow_lens.tasks.tuples import BestTree, DepthSeparation, IntrinsicDimension, TriangleCenter

__all__ = [
    "BestTree",
    "DRetrieval",
    "DepthSeparation",
    "GlobalMean",
    "InContextQA",
    "InContextTemplateMatching",
    "IntrinsicDimension",
    "KthLargest",
    "Memorization",
    "NestedQA",
    "PositionSum",
    "Target",
    "Task",
    "TemplateMatching",
    "TokenTask",
    "TriangleCenter",
    "VectorTask",
    "dataset_card",
    "list_tasks",
    "load_task",
]


def __getattr__(name: str) -> Any:
    """Say what takes the place of a name that is gone."""
    instead = "; use infoflow_lens.foundation.naming.find_named" if name == "is_task" else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead}")
