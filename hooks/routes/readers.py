"""Which norm of a model reads a state, found by running it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from infoflow_lens.foundation.modules import bind_to_thread, eval_mode
from infoflow_lens.hooks.model.call import call, without_user_hooks
from infoflow_lens.hooks.model.inputs import example_input
from infoflow_lens.hooks.model.parts import Norm, is_norm
from infoflow_lens.hooks.model.points import reads_vectors
from infoflow_lens.hooks.passes.view import Pass


class Read(NamedTuple):
    """What a module has read.

    Attributes:
        path: of the module.
        module: itself.
        given: what it was given, of the shape of what it gave.
    """

    path: str
    module: nn.Module
    given: Tensor


def run_example(model: nn.Module, points: Sequence[str]) -> tuple[Pass, list[Read]]:
    """Run two short sequences, and note what each module reads that keeps a shape.

    Args:
        model: the model.
        points: hook points to catch; those that do not fire are missing in the pass.

    Returns:
        the pass, and what modules have read, in its order.
    """
    tokens = example_input(model, n_sequences=2).to(next(model.parameters()).device)
    if not reads_vectors(model):
        tokens = tokens[:, :8]
    reads: list[Read] = []

    def note(path: str, module: nn.Module) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            given = [one for one in args if isinstance(one, Tensor)]
            # a norm reads one tensor and gives one of the same shape
            if len(given) == 1 and isinstance(output, Tensor) and given[0].shape == output.shape:
                reads.append(Read(path, module, given[0].detach().float()))

        return module.register_forward_hook(bind_to_thread(hook))

    handles = [note(path, module) for path, module in model.named_modules() if path]
    try:
        with eval_mode(model), without_user_hooks(model):
            caught = call(model, tokens, points, output=True).activations
            return Pass(model, caught, tokens=tokens), reads
    finally:
        for handle in handles:
            handle.remove()


def find_norm(
    model: nn.Module, state: Float[Tensor, "batch pos d_model"], reads: Sequence[Read], bar: float
) -> str | None:
    """Find the norm that reads a state: of those that read nearly the same, the nearest.

    Args:
        model: the model.
        state: what is read.
        reads: what modules have read.
        bar: the largest distance for rounding, relative to the length of the state.

    Raises:
        InfoFlowError: if it is no norm with a scale for each position.
    """
    length = state.norm(dim=-1)
    nearest: tuple[float, Read | None] = bar, None
    for read in reads:
        if read.given.shape != state.shape:
            continue
        # each position by itself: one of them may be a thousand times as long as the others
        far = float(((read.given - state).norm(dim=-1) / length).max())
        if far < nearest[0]:
            like = read.given / read.given.norm(dim=-1, keepdim=True).clamp(min=1e-30)
            dtype = next(iter(read.module.parameters()), read.given).dtype
            with torch.no_grad():
                if is_norm(read.module, like.to(dtype)):
                    nearest = far, read
    if nearest[1] is None:
        return None
    path = nearest[1].path
    with without_user_hooks(model):
        Norm(path, state.shape[-1]).numbers(model)  # one that cannot be read is no other, and named
    return path
