"""All sequences of a user's data at once, where runs read them in parts."""

from typing import Any

import torch
from torch import nn

from infoflow_lens.hooks.model.inputs import Batches
from infoflow_lens.probing.data import stream_data


def read_data(model: nn.Module, data: str, **settings: Any) -> Batches:
    """The sequences that a user names, in memory; arguments as for :func:`stream_data`."""
    rows = [row for part in stream_data(model, data, **settings) for row in part.rows]
    together = len({len(row) for row in rows}) == 1
    return Batches(model, torch.stack(rows) if together else rows, name=data)
