"""Synthetic tasks whose active tokens are known: inputs, targets, datasets."""

from infoflow_lens.foundation import naming
from infoflow_lens.tasks.card import dataset_card as dataset_card
from infoflow_lens.tasks.questions import InContextQA as InContextQA
from infoflow_lens.tasks.questions import Memorization as Memorization
from infoflow_lens.tasks.questions import NestedQA as NestedQA
from infoflow_lens.tasks.registry import list_tasks as list_tasks
from infoflow_lens.tasks.registry import load_task as load_task
from infoflow_lens.tasks.single import DRetrieval as DRetrieval
from infoflow_lens.tasks.single import GlobalMean as GlobalMean
from infoflow_lens.tasks.single import KthLargest as KthLargest
from infoflow_lens.tasks.single import PositionSum as PositionSum
from infoflow_lens.tasks.task import Target as Target
from infoflow_lens.tasks.task import Task as Task
from infoflow_lens.tasks.task import VectorTask as VectorTask
from infoflow_lens.tasks.templates import InContextTemplateMatching as InContextTemplateMatching
from infoflow_lens.tasks.templates import TemplateMatching as TemplateMatching
from infoflow_lens.tasks.tokens import TokenTask as TokenTask
from infoflow_lens.tasks.tuples import BestTree as BestTree
from infoflow_lens.tasks.tuples import DepthSeparation as DepthSeparation
from infoflow_lens.tasks.tuples import IntrinsicDimension as IntrinsicDimension
from infoflow_lens.tasks.tuples import TriangleCenter as TriangleCenter

__all__ = naming.list_public(globals())
