"""Synthetic tasks whose active tokens are known: inputs, targets, datasets."""

from infoflow_lens.tasks.d_retrieval import DRetrieval
from infoflow_lens.tasks.registry import list_tasks, load_task
from infoflow_lens.tasks.task import VectorTask
from infoflow_lens.tasks.tuples import DepthSeparation, IntrinsicDimension, TriangleCenter

__all__ = [
    "DRetrieval",
    "DepthSeparation",
    "IntrinsicDimension",
    "TriangleCenter",
    "VectorTask",
    "list_tasks",
    "load_task",
]
