"""The parts of a named model: hook points, and beside them the matrices that analyses ask for."""

from typing import Any

import torch
from jaxtyping import Float, Int
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


# Methods that ActivationCache asks for, of all models that are no HookedTransformer of its own


def find_directions(
    model: Any, tokens: str | int | Int[Tensor, "*places"]
) -> Float[Tensor, "*places d_model"]:
    """Return the directions whose products with the normed last state are logits.

    Args:
        model: with a matrix W_U.
        tokens: numbers of outputs, or a word that is one token; a single one gives a vector,
            whatever its shape.

    Raises:
        InfoFlowError: for a word without a tokenizer, and where there is no such matrix.
    """
    known = model.to_single_token(tokens) if isinstance(tokens, str) else tokens
    directions: Tensor = model.W_U.T
    ids = torch.as_tensor(known, device=directions.device)
    return directions[int(ids) if ids.numel() == 1 else ids]


def sum_biases(
    model: Any, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
) -> Float[Tensor, " d_model"]:
    """Sum the output biases b_O and b_out of the layers below one, as TransformerLens's method.

    Args:
        model: a model with TransformerLens's names.
        layer: from 0 to the number of layers.
        mlp_input: whether b_O of the layer itself counts, too, as for the input of its MLP.
        include_mlp_biases: whether b_out counts.

    Raises:
        InfoFlowError: if attention or MLP of a block is no single linear map at its end.
    """
    total = torch.zeros(model.cfg.d_model, dtype=model.cfg.dtype, device=model.cfg.device)
    for number in range(layer + mlp_input):
        block = model.blocks[number]
        total = total + block.attn.b_O
        # of the last block the attention alone, where an MLP's input is asked for
        if include_mlp_biases and number < layer and "mlp" in block._modules:
            total = total + block.mlp.b_out
    return total
