"""Which norm of a model reads a state, found by running it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from infoflow_lens.foundation.modules import eval_mode
from infoflow_lens.foundation.processes import bind_to_thread
from infoflow_lens.hooks.model.call import call, without_user_hooks
from infoflow_lens.hooks.model.inputs import example_input
from infoflow_lens.hooks.model.parts import is_plain_norm
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
    state: Float[Tensor, "batch pos d_model"], reads: Sequence[Read], bar: float
) -> str | None:
    """Find the norm that reads a state: of those that read nearly the same, the nearest.

    Args:
        state: what is read.
        reads: what modules have read.
        bar: the largest distance for rounding, relative to the length of the state.
    """
    length = state.norm(dim=-1)
    found: tuple[float, str | None] = bar, None
    for path, module, given in reads:
        if given.shape != state.shape:
            continue
        # each position by itself: one of them may be a thousand times as long as the others
        far = float(((given - state).norm(dim=-1) / length).max())
        if far < found[0]:
            with torch.no_grad():
                like = given / given.norm(dim=-1, keepdim=True).clamp(min=1e-30)
                like = like.to(next(iter(module.parameters()), given).dtype)
                if is_plain_norm(module, like):
                    found = far, path
    return found[1]
