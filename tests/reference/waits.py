"""How often a host would wait for a device, counted on a CPU by following what comes of a model."""

from contextlib import contextmanager
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

_READS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "unique", "is_nonzero")


class Waits(TorchDispatchMode):
    """Takes the parameters of a model, and all that is computed from them, to lie on a device.

    Attributes:
        counted: what made the host wait, in order.
    """

    def __init__(self, model):
        super().__init__()
        self.counted = []
        self._on_device = WeakTensorKeyDictionary()
        for tensor in (*model.parameters(), *model.buffers()):
            self._on_device[tensor] = True

    def is_there(self, value):
        return isinstance(value, torch.Tensor) and value in self._on_device

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        given = tree_leaves((args, kwargs or {}))
        there = any(self.is_there(value) for value in given)
        name = operator.overloadpacket.__name__
        if there and name.startswith(_READS):
            self.counted.append(name)
        if name in ("index", "index_put", "index_put_"):
            # by a mask: the host must know how many of its entries are true
            for value in args[1]:
                if self.is_there(value) and value.dtype == torch.bool:
                    self.counted.append(f"{name} by a mask")
        output = operator(*args, **(kwargs or {}))
        if there:
            for value in tree_leaves(output):
                if isinstance(value, torch.Tensor):
                    self._on_device[value] = True
        return output


@contextmanager
def waits(model):
    """Count the waits of what runs in the block."""
    mode = Waits(model)

    def counting(name):
        original = getattr(torch.Tensor, name)

        def to_host(tensor, *args, **kwargs):
            if not mode.is_there(tensor):
                return original(tensor, *args, **kwargs)
            mode.counted.append("copy to the host")
            with _disable_current_modes():
                found = original(tensor, *args, **kwargs)
                return found.clone() if isinstance(found, torch.Tensor) else found

        return mock.patch.object(torch.Tensor, name, to_host)

    patches = [counting(name) for name in ("cpu", "tolist", "numpy")]
    with mode:
        for patch in patches:
            patch.start()
        try:
            yield mode.counted
        finally:
            for patch in patches:
                patch.stop()
