"""Running somebody's module without leaving traces on it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Whatever happens in the block, every module has its own train or eval mode after it."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            if module.training != training:
                module.training = training


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation without gradients; afterwards every module has its own mode again."""
    with modes_kept(model), torch.no_grad():
        if any(module.training for module in model.modules()):
            model.eval()
        yield
