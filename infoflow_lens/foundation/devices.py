"""Devices: whether numbers can be put on them."""

from typing import Any

from infoflow_lens.foundation.errors import InfoFlowError, first_line


def check_device(device: Any, name: str = "device") -> str:
    """`device`, if numbers can be put on it.

    Raises:
        InfoFlowError: with what it answered.
    """
    import torch

    try:
        torch.empty(1, device=device)
        kind = torch.device(device).type
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        raise InfoFlowError(
            f"{name} is {device!r}, which does not answer ({first_line(error)}): expected "
            "cpu, or an accelerator that this PyTorch sees, such as cuda:0"
        ) from error
    if kind == "meta":
        raise InfoFlowError(f"{name} 'meta' holds no numbers: expected cpu, or an accelerator")
    return str(device)
