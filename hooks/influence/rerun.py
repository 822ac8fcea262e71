"""A forward pass again, from where sources enter, on changed sources."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from infoflow_lens.hooks.model.call import call
from infoflow_lens.hooks.model.inputs import Batch
from infoflow_lens.hooks.model.points import config_value, hook_name, reads_vectors, token_hook
from infoflow_lens.hooks.model.semantics import state_hooks, state_sum

# numbers in the largest tensor of a pass: on a CPU, larger passes leave the caches and are slower
_ROOM_CPU, _ROOM_GPU = 2**21, 2**26


def rows_at_once(model: nn.Module, n_pos: int, d_model: int, device: torch.device) -> int:
    """Choose how many sequences of this length a pass has, by the size of its largest tensor."""
    heads = config_value(model, "n_heads") or 8
    room = _ROOM_CPU if device.type == "cpu" else _ROOM_GPU
    return max(1, room // (n_pos * max(4 * d_model, int(heads) * n_pos)))


def start_point(model: nn.Module, source_layer: int | None) -> str:
    """Return the hook point where sources enter."""
    if source_layer is None and reads_vectors(model):
        return token_hook(model)
    return hook_name(model, f"blocks.{source_layer or 0}.hook_resid_pre")


@dataclass(frozen=True, eq=False)
class Rerun:
    """States as a function of what enters at the sources.

    Attributes:
        model: the model.
        source_layer: None for the tokens, else the layer whose resid_pre is the source.
        layers: whose states are wanted.
        state: "post_attention" or "resid_post".
        batch: what the model read, for models that run whole; None if unknown.
    """

    model: nn.Module
    source_layer: int | None
    layers: tuple[int, ...]
    state: str
    batch: Batch | None = None

    @property
    def real(self) -> Bool[Tensor, "batch pos"] | None:
        """The mask of positions, False on padding; None where nothing is padded."""
        if self.batch is None or self.batch.lengths is None:
            return None
        return self.batch.mask()

    def __call__(
        self,
        start: Float[Tensor, "row position d_source"],
        sequences: Int[Tensor, " row"] | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the states of all wanted layers.

        Args:
            start: what enters at the sources.
            sequences: of which sequence each row is a copy; default, all in their order.
        """
        wanted = [state_hooks(self.model, layer, self.state) for layer in self.layers]
        names = dict.fromkeys(name for names in wanted for name in names)
        batch = self.batch
        # a model that starts at its residual stream looks at the tokens' shape alone
        if batch is None:
            batch = Batch(torch.zeros(start.shape[:2], dtype=torch.long))
        elif sequences is not None:
            batch = batch.take(sequences)
        caught = call(
            self.model,
            batch,
            tuple(names),
            start=(start_point(self.model, self.source_layer), start),
            keep_graph=True,
            may_end=True,
        ).activations
        return tuple(state_sum(caught, names) for names in wanted)


def take_places(
    values: Float[Tensor, "batch pos d"], place: Int[Tensor, "batch asked"]
) -> Float[Tensor, "batch asked d"]:
    """Take the rows at these positions; anything where they are negative."""
    index = place.clamp(min=0).to(values.device)[:, :, None]
    return values.gather(1, index.expand(-1, -1, values.shape[2]))
