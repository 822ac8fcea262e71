"""The cache of a named model, which gives no decomposition that does not add up."""

import re
from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens import ActivationCache
from transformer_lens.utilities import Slice

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.naming import nearest
from infoflow_lens.hooks.model.points import check_is_attention
from infoflow_lens.hooks.model.sites import EMBED, POS_EMBED, SCALE

_SUBLAYERS = ("attn_out", "mixer_out", "mlp_out", "extra_out")
_BARS = {torch.float16: 3e-2, torch.bfloat16: 1e-1}


class NamedCache(ActivationCache):
    """ActivationCache of any model: parts are compared with the state that they are to make.

    TransformerLens trusts the config, and gives parts of other models that miss the state by a
    third. Here a state whose parts do not add up (norms behind sums, scaled residuals, positions
    that are added elsewhere) is refused, and so are heads and neurons that do not give what their
    sublayer adds. The final norm is applied with its weight, so that ``logit_attrs`` are shares of
    the logits, up to what the biases of norm and unembedding add.
    """

    def decompose_resid(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        mode: Literal["all", "mlp", "attn"] = "all",
        apply_ln: bool = False,
        pos_slice: Any = None,
        incl_embeds: bool = True,
        return_labels: bool = False,
    ) -> Any:
        """Decompose a state as TransformerLens does, also where other mixers write to it.

        Args:
            layer, mlp_input, apply_ln, pos_slice, incl_embeds, return_labels: as in
                TransformerLens; a mixer in the place of attention is labelled "0_mixer_out", what
                a third sublayer adds "0_extra_out".
            mode: "all" parts, those of "mlp", or of "attn", in layers that have attention.

        Returns:
            [part, batch, pos, d_model], and the labels where they are asked for.

        Raises:
            InfoFlowError: if all parts do not add up to the state, for another mode, and for a
                layer that is not there.
        """
        kinds = {"all": _SUBLAYERS, "mlp": ("mlp_out",), "attn": ("attn_out",)}
        if mode not in kinds:
            raise InfoFlowError(f"mode is {mode!r}{nearest(mode, kinds)}")
        if mode == "all":
            self._check_sum(layer, mlp_input)
        points = self._points(layer, mlp_input, kinds[mode])
        # embeddings stand before the blocks
        names = [n for n in points if incl_embeds or n.startswith("blocks.")]
        if not names:
            raise InfoFlowError(
                f"mode is {mode!r}, and no layer below has hook_{' or hook_'.join(kinds[mode])}: "
                "expected parts that the model shows; take mode 'all', or a later layer"
            )
        pos = pos_slice if isinstance(pos_slice, Slice) else Slice(pos_slice)
        parts = torch.stack([pos.apply(self.cache_dict[name], dim=-2) for name in names])
        if apply_ln:
            parts = self.apply_ln_to_stack(parts, layer, mlp_input, pos_slice=pos)
        labels = [re.sub(r"blocks\.(\d+)\.", r"\1_", n).replace("hook_", "") for n in names]
        return (parts, labels) if return_labels else parts

    def get_full_resid_decomposition(
        self, layer: int | None = None, mlp_input: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        """Decompose a state into heads, neurons, embeddings and biases as TransformerLens does.

        Raises:
            InfoFlowError: if its parts do not add up to it, such as where another mixer, or a third
                sublayer, writes to it; and for a layer that is not there.
        """
        model: Any = self.model
        for below in range(self._last(layer, mlp_input) + mlp_input):
            check_is_attention(model, f"blocks.{below}.attn.hook_z")
        self._check_sum(layer, mlp_input, ("attn_out", "mlp_out"))  # which heads and neurons make
        return super().get_full_resid_decomposition(layer, mlp_input, *args, **kwargs)

    def compute_head_results(self) -> None:
        """Compute what each head adds as TransformerLens does.

        Raises:
            InfoFlowError: if a layer's heads do not add up to what its attention adds, or it has
                none.
        """
        self._check_heads()
        super().compute_head_results()

    def stack_head_results(self, layer: int = -1, *args: Any, **kwargs: Any) -> Any:
        """Stack what heads add as TransformerLens does.

        Raises:
            InfoFlowError: as :meth:`compute_head_results` does.
        """
        self._check_heads()
        return super().stack_head_results(layer, *args, **kwargs)

    def get_neuron_results(self, layer: int, *args: Any, **kwargs: Any) -> Any:
        """Give what each neuron of a layer adds as TransformerLens does.

        Raises:
            InfoFlowError: if they do not add up to what its MLP adds.
        """
        self._check_neurons(layer)
        return super().get_neuron_results(layer, *args, **kwargs)

    def stack_neuron_results(self, layer: int, *args: Any, **kwargs: Any) -> Any:
        """Stack what neurons add as TransformerLens does.

        Raises:
            InfoFlowError: as :meth:`get_neuron_results` does.
        """
        n_layers = self.model.cfg.n_layers
        for below in range(n_layers if layer in (None, -1) else layer):
            self._check_neurons(below)
        return super().stack_neuron_results(layer, *args, **kwargs)

    def apply_ln_to_stack(
        self,
        residual_stack: Float[Tensor, "part *batch_and_pos d_model"],
        layer: int | None = None,
        mlp_input: bool = False,
        pos_slice: Any = None,
        batch_slice: Any = None,
        has_batch_dim: bool = True,
        recompute_ln: bool = False,
    ) -> Float[Tensor, "part *batch_and_pos d_model"]:
        """Apply the final norm to parts of the last state, with its weight, without its bias.

        Args:
            residual_stack: the parts.
            layer: None, -1 or the number of layers, for the last state.
            mlp_input: False.
            pos_slice, batch_slice, has_batch_dim: as in TransformerLens.
            recompute_ln: norm each part with a scale of its own, and the bias.

        Raises:
            InfoFlowError: for another layer, whose norms are not among the hook points, and for a
                model whose last state is read by more than a norm.
        """
        model: Any = self.model
        pos, batch = (s if isinstance(s, Slice) else Slice(s) for s in (pos_slice, batch_slice))
        if mlp_input or layer not in (None, -1, model.cfg.n_layers):
            raise InfoFlowError(
                f"the norms of layer {layer} are not among the hook points: expected layer None, "
                "for the final norm; read the states, and apply the model's own norm"
            )
        if has_batch_dim:
            residual_stack = batch.apply(residual_stack, dim=1)
        if "ln_final" not in model._modules:
            if model.anatomy.end.gives_output:
                return residual_stack  # nothing stands before the unembedding
            raise InfoFlowError(
                f"no final norm was found in {model.cfg.model_name}: expected a norm that reads "
                "the last state; take gradients of the output"
            )
        # the norm anew for each part, or with the scale that the whole state had
        if recompute_ln:
            return torch.stack([model.ln_final(part) for part in residual_stack])
        if SCALE not in self.cache_dict:
            raise InfoFlowError(
                f"the cache lacks {SCALE}: expected it beside the states; name it in names_filter"
            )
        scale = pos.apply(self.cache_dict[SCALE], dim=-2)
        scale = batch.apply(scale) if self.has_batch_dim else scale
        return model.ln_final.numbers().apply(residual_stack, scale)

    # Whether parts add up

    def _points(
        self, layer: int | None, mlp_input: bool, kinds: Sequence[str] = _SUBLAYERS
    ) -> list[str]:
        """List the hook points whose activations are to make a state, in the order of the pass."""
        model: Any = self.model
        last, names = self._last(layer, mlp_input), [EMBED, POS_EMBED]
        # the input of an MLP holds the attention of its own block, and not yet the MLP
        for below in range(last + mlp_input):
            some = kinds if below < last else [k for k in kinds if k in ("attn_out", "mixer_out")]
            names += [f"blocks.{below}.hook_{kind}" for kind in some]
        return [name for name in names if name in model.hook_dict]

    def _last(self, layer: int | None, mlp_input: bool) -> int:
        """Find the layer whose input is meant: by default, what leaves the last one.

        Raises:
            InfoFlowError: for a layer that is not there.
        """
        model: Any = self.model
        n_layers = model.cfg.n_layers
        last: int = n_layers if layer is None or layer == -1 else layer
        if not 0 <= last + mlp_input <= n_layers:
            of = "mlp_input, and layer is" if mlp_input else "layer is"
            raise InfoFlowError(f"{of} {layer}: expected 0 to {n_layers - mlp_input}")
        return last

    def _check_sum(
        self, layer: int | None, mlp_input: bool, kinds: Sequence[str] = _SUBLAYERS
    ) -> None:
        model: Any = self.model
        last, n_layers = self._last(layer, mlp_input), model.cfg.n_layers
        point = "hook_resid_mid" if mlp_input else "hook_resid_pre"
        # behind the last block there is no further one to name the state by
        state = f"blocks.{last}.{point}"
        if last == n_layers:
            state = f"blocks.{last - 1}.hook_resid_post"
        names = self._points(layer, mlp_input, kinds)
        missing = [name for name in (*names, state) if name not in self.cache_dict]
        if missing:
            raise InfoFlowError(
                f"the cache lacks {', '.join(missing[:3])}: expected all parts of the state; the "
                f"model's lacks() says why it does not show them{self._reason(missing[0])}"
            )
        # parts that do not add up to the state would share it out wrongly
        parts = [self.cache_dict[name] for name in names]
        fits = all(part.shape == self.cache_dict[state].shape for part in parts)
        total = sum(parts) if fits else torch.tensor(torch.nan)
        lacks = (lack for lack in model.lacks().items() if lack[0].endswith("_out"))
        self._check(names, total, state, next(lacks, None))

    def _check_heads(self) -> None:
        model: Any = self.model
        for layer in range(model.cfg.n_layers):
            block, name = model.blocks[layer], f"blocks.{layer}.hook_attn_out"
            check_is_attention(model, f"blocks.{layer}.attn.hook_z")
            z = self.cache_dict[f"blocks.{layer}.attn.hook_z"]
            total = torch.einsum("...hd,hdm->...m", z, block.attn.W_O) + block.attn.b_O
            if name in self.cache_dict:
                self._check(["heads"], total, name)
            elif name not in model.hook_dict:
                raise InfoFlowError(
                    f"{name} is not shown{self._reason(name)}: expected what attention adds, to "
                    "which heads are to add up, as it may scale them; measure_shares() has all "
                    "that adds to the stream"
                )

    def _check_neurons(self, layer: int) -> None:
        model: Any = self.model
        mlp, name = model.blocks[layer]._modules.get("mlp"), f"blocks.{layer}.mlp.hook_post"
        if mlp is None or name not in self.cache_dict:
            raise InfoFlowError(
                f"the cache lacks {name}: expected what the last matrix of an MLP reads"
                f"{self._reason(name)}"
            )
        total = self.cache_dict[name] @ mlp.W_out + mlp.b_out
        self._check(["neurons"], total, f"blocks.{layer}.hook_mlp_out")

    def _reason(self, name: str) -> str:
        model: Any = self.model
        reason = model.lacks().get(name)
        return f" ({reason})" if reason else ""

    def _check(
        self, names: list[str], total: Any, state: str, lack: tuple[str, str] | None = None
    ) -> None:
        """Refuse parts that do not make a state.

        Raises:
            InfoFlowError: with how far they are off, and why a point is not shown.
        """
        expected = self.cache_dict[state]
        apart = float((total - expected).abs().max() / expected.abs().max())
        # written so that NaN, of shapes that differ, is refused, too
        if not apart <= _BARS.get(expected.dtype, 1e-3):
            more = f"; {lack[0]} is not shown: {lack[1]}" if lack else ""
            raise InfoFlowError(
                f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''} do not add up to "
                f"{state} (off by {apart:.0%} of its size): expected a model whose states are sums "
                "of their parts; in this one norms follow the sums, parts are scaled, or a block "
                f"adds something else{more}"
            )
