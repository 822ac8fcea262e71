"""The parts of a named model: hook points, and beside them the matrices that analyses ask for."""

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.hooks.model.anatomy import Anatomy
from infoflow_lens.hooks.model.parts import NormNumbers, Projection, run_forward


class Part(nn.Module):
    """Hook points of a part of a model.

    Args:
        owner: the named model, which is no submodule of its parts.
    """

    _owner: Any

    def __init__(self, owner: Any) -> None:
        super().__init__()
        self.__dict__["_owner"] = owner

    @property
    def _model(self) -> nn.Module:
        model: nn.Module = self._owner.original_model
        return model

    @property
    def _anatomy(self) -> Anatomy:
        """The anatomy of the model as it is now."""
        self._owner.refresh()
        anatomy: Anatomy = self._owner.anatomy
        return anatomy

    def _matrix(self, found: Projection | None, what: str) -> Projection:
        if found is None:
            raise InfoFlowError(
                f"{self.name} has no {what}: expected a single matrix that is not followed by a "
                "norm or a gate, and reads nothing else"
            )
        return found


class AttentionPart(Part):
    """One attention.

    Args:
        owner: the named model.
        layer: of its block.
        number: among the attentions of the block.
    """

    def __init__(self, owner: Any, layer: int, number: int) -> None:
        super().__init__(owner)
        self._place = layer, number

    def _output(self) -> Projection:
        layer, number = self._place
        return self._matrix(self._anatomy.blocks[layer].attentions[number].output, "W_O")

    @property
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:
        """Read what each head's z is multiplied by.

        Raises:
            InfoFlowError: if no single matrix reads z.
        """
        layer, number = self._place
        weight = self._output().weight(self._model)
        n_heads = self._owner.anatomy.blocks[layer].attentions[number].n_heads
        return weight.reshape(n_heads, -1, weight.shape[1])

    @property
    def b_O(self) -> Float[Tensor, " d_model"]:
        """Read what is added to that."""
        return self._output().bias(self._model)


class MLPPart(Part):
    """An MLP.

    Args:
        owner: the named model.
        layer: of its block.
    """

    def __init__(self, owner: Any, layer: int) -> None:
        super().__init__(owner)
        self._layer = layer

    def _output(self) -> Projection:
        return self._matrix(self._anatomy.blocks[self._layer].mlp_output, "W_out")

    @property
    def W_out(self) -> Float[Tensor, "d_mlp d_model"]:
        """Read what its neurons are multiplied by."""
        return self._output().weight(self._model)

    @property
    def b_out(self) -> Float[Tensor, " d_model"]:
        """Read what is added to that."""
        return self._output().bias(self._model)


class FinalNorm(Part):
    """The norm behind the last block."""

    def numbers(self) -> NormNumbers:
        """Read its weight and bias, and whether it centers."""
        norm = self._anatomy.end.norm
        assert norm is not None  # else there is no such part
        return norm.numbers(self._model)

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Norm a state, with a scale of its own."""
        norm = self._anatomy.end.norm
        assert norm is not None  # as before
        flat = run_forward(self._model.get_submodule(norm.path), x.flatten(0, -2))
        return flat.reshape(x.shape)


class UnembedPart(Part):
    """The matrix that makes logits."""

    def _output(self) -> Projection:
        return self._matrix(self._anatomy.end.unembed, "W_U")

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        """Read what the normed last state is multiplied by."""
        return self._output().weight(self._model)

    @property
    def b_U(self) -> Float[Tensor, " d_vocab"]:
        """Read what is added to that."""
        return self._output().bias(self._model)
