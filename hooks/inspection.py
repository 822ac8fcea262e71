"""What a model can be asked, found out by running it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from infoflow_lens.hooks.capabilities import (
    check_inputs,
    layer_count,
    reads_vectors,
    run_catching,
    starts_at_layers,
    unmasked,
)
from infoflow_lens.hooks.own import own_pass
from jaxtyping import Bool, Float
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import eval_mode
from infoflow_lens.foundation.record import weight_processing

if TYPE_CHECKING:
    import pandas as pd

_SCORES, _PATTERN = "attn.hook_attn_scores", "attn.hook_pattern"
_POINTS = (
    "hook_resid_pre",
    _SCORES,
    _PATTERN,
    "attn.hook_z",
    "hook_attn_out",
    "hook_resid_mid",
    "hook_mlp_out",
    "hook_resid_post",
)
_EDITED = (_SCORES, _PATTERN, "hook_resid_pre", "hook_resid_mid", "hook_resid_post")


@dataclass(frozen=True)
class LayerCapabilities:
    """One layer.

    Attributes:
        n_heads: heads, from the pattern; None where there is no pattern.
        n_key_value_heads: heads of keys and values; fewer with grouped queries.
        attends: "causal", "local(w)" (causal within w positions), "bidirectional", or
            "bidirectional, last position is no key", for this input.
        pattern: what the pattern is of the scores: "softmax", "softmax with sinks" (rows sum to
            less than 1), "relu", "hardmax", or "unknown".
        scores: whether ``hook_attn_scores`` carries "scores" before the softmax, the "pattern" in
            their place, or is "missing".
        fires: the hook points that fire, of those that probes use.
        edits_reach: the hook points whose edits change the output.
    """

    n_heads: int | None
    n_key_value_heads: int | None
    attends: str
    pattern: str
    scores: str
    fires: tuple[str, ...]
    edits_reach: tuple[str, ...]


@dataclass(frozen=True)
class ModelCapabilities:
    """What a model is and what can be measured on it.

    Attributes:
        kind: the class, such as "HookedTransformer" or "TransformerBridge".
        layers: its attention layers.
        reads_vectors: whether it reads vector tokens in place of ids.
        starts_at_layers: whether a pass can start at a layer, as influence and substitution need.
        dtype, device: of its weights; several devices are joined by commas.
        training: whether it was in training mode.
        dropout: whether it has dropout that training would switch on.
        normalization: what the config calls it, and whether it is folded.
    """

    kind: str
    layers: tuple[LayerCapabilities, ...]
    reads_vectors: bool
    starts_at_layers: bool
    dtype: str
    device: str
    training: bool
    dropout: bool
    normalization: Mapping[str, Any]

    def problems(self) -> tuple[str, ...]:
        """What cannot be asked of this model, why, and what to do."""
        found = []
        for index, layer in enumerate(self.layers):
            if layer.scores == "pattern":
                found.append(
                    f"layer {index}: hook_attn_scores carries the pattern, so PositionsProbe and "
                    "RecoveryProbe refuse it; AttendedProbe reads the pattern; load the model as a "
                    "HookedTransformer for the others"
                )
            elif layer.scores == "missing":
                found.append(
                    f"layer {index}: hook_attn_scores does not fire; use AttendedProbe, or load "
                    "the model as a HookedTransformer"
                )
            if _PATTERN not in layer.fires:
                found.append(
                    f"layer {index}: hook_pattern does not fire; load the model with eager "
                    "attention (attn_implementation='eager')"
                )
            elif _PATTERN not in layer.edits_reach:
                found.append(
                    f"layer {index}: edits of hook_pattern do not reach the output, so patterns "
                    "cannot be substituted; load the model as a HookedTransformer"
                )
        if not self.starts_at_layers:
            found.append(
                "a pass cannot start at a layer, so JacobianInfluence, ResampleInfluence and "
                "measure_mechanisms refuse it; load the model as a HookedTransformer"
            )
        if "," in self.device:
            found.append(f"its weights lie on several devices ({self.device}); move it to one")
        return tuple(found)

    def to_frame(self) -> "pd.DataFrame":
        """One row for each layer."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "layer": index,
                    "heads": layer.n_heads,
                    "kv_heads": layer.n_key_value_heads,
                    "attends": layer.attends,
                    "pattern": layer.pattern,
                    "scores": layer.scores,
                    "missing": ", ".join(p for p in _POINTS if p not in layer.fires),
                    "edits_lost": ", ".join(
                        p for p in _EDITED if p in layer.fires and p not in layer.edits_reach
                    ),
                }
                for index, layer in enumerate(self.layers)
            ]
        )

    def _repr_html_(self) -> str:
        problems = "".join(f"<li>{problem}</li>" for problem in self.problems())
        head = f"<b>{self.kind}</b>, {self.dtype}, {self.device}<ul>{problems}</ul>"
        return head + str(self.to_frame().to_html(index=False))


def inspect_model(model: nn.Module, example_input: Tensor) -> ModelCapabilities:
    """Find out by running a model what it is and what it can be asked.

    It is run once to see which hook points fire and what they carry, and once for each hook point
    and layer with an edit there, to see whether the edit reaches the output. The model is left as
    it was found.

    Args:
        model: a TransformerLens model.
        example_input: a few sequences, vector tokens [batch, pos, d_token] or ids [batch, pos]; the
            longer, the more a local window shows.

    Raises:
        InfoFlowError: if it is no TransformerLens model, or the input is none for it.
    """
    n_layers = layer_count(model)
    check_inputs(model, example_input, "example_input")
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    first = next(model.parameters())
    training = model.training
    inputs = example_input.to(first.device)
    known: Mapping[str, Any] = model.hook_dict  # type: ignore[assignment]
    wanted = [
        f"blocks.{layer}.{point}"
        for layer in range(n_layers)
        for point in (*_POINTS, "attn.hook_k")
        if f"blocks.{layer}.{point}" in known
    ]
    with eval_mode(model), own_pass():
        output, caught = run_catching(model, inputs, wanted)
        if not output.isfinite().all():
            raise InfoFlowError(
                "the output holds NaN or infinity on the example input: expected numbers; look for "
                "bad weights, or run in float32"
            )
        layers = []
        for layer in range(n_layers):
            found = {
                point: caught[f"blocks.{layer}.{point}"]
                for point in (*_POINTS, "attn.hook_k")
                if f"blocks.{layer}.{point}" in caught
            }
            reached = tuple(
                point
                for point in _EDITED
                if point in found
                and not _same(_edited(model, inputs, f"blocks.{layer}.{point}"), output)
            )
            layers.append(_layer(found, reached))
    return ModelCapabilities(
        kind=type(model).__name__,
        layers=tuple(layers),
        reads_vectors=reads_vectors(model),
        starts_at_layers=starts_at_layers(model),
        dtype=str(first.dtype).removeprefix("torch."),
        device=", ".join(devices),
        training=training,
        dropout=any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules()),
        normalization=weight_processing(model),
    )


def _edited(model: nn.Module, inputs: Tensor, name: str) -> Tensor:
    """The output with random numbers, as large as the activation's, added to an activation."""
    generator = torch.Generator().manual_seed(0)

    def edit(activation: Tensor, hook: Any) -> Tensor:
        noise = torch.randn(activation.shape, generator=generator).to(activation)
        moved = unmasked(activation)
        return activation + noise * (activation[moved].abs().max() + 1) * moved

    with model.hooks(fwd_hooks=[(name, edit)]):  # type: ignore[operator]
        output: Tensor = model(inputs)
    return output


def _same(one: Tensor, other: Tensor) -> bool:
    return bool(torch.allclose(one.float(), other.float(), rtol=1e-6, atol=0))


def _layer(found: Mapping[str, Tensor], reached: tuple[str, ...]) -> LayerCapabilities:
    pattern, scores = found.get(_PATTERN), found.get(_SCORES)
    keys = found.get("attn.hook_k")
    carries = "missing"
    if scores is not None:
        same = pattern is not None and torch.allclose(scores.float(), pattern.float())
        # scores that are not negative are their own ReLU, but no shares
        shares = bool(((scores.float().sum(dim=-1) - 1).abs() < 2e-2).all())
        carries = "pattern" if same and shares else "scores"
    # a raw bridge's keys are flat, [batch, pos, features]
    n_key_value_heads = keys.shape[2] if keys is not None and keys.ndim == 4 else None
    return LayerCapabilities(
        n_heads=None if pattern is None else pattern.shape[1],
        n_key_value_heads=n_key_value_heads,
        attends="unknown" if pattern is None else _attends(_allowed(pattern, scores, carries)),
        pattern="unknown" if pattern is None else _kind_of(pattern, scores, carries),
        scores=carries,
        fires=tuple(point for point in _POINTS if point in found),
        edits_reach=reached,
    )


def _allowed(
    pattern: Float[Tensor, "batch head query key"],
    scores: Float[Tensor, "batch head query key"] | None,
    carries: str,
) -> Bool[Tensor, "query key"]:
    """The keys that some query of some sequence may attend to."""
    if scores is not None and carries == "scores":
        return unmasked(scores).flatten(0, 1).any(dim=0)
    return (pattern > 0).flatten(0, 1).any(dim=0)


def _attends(allowed: Bool[Tensor, "query key"]) -> str:
    query, key = allowed.nonzero(as_tuple=True)
    distance = query - key
    if len(distance) and int(distance.min()) >= 0:
        window = int(distance.max()) + 1
        return "causal" if window == len(allowed) else f"local({window})"
    no_key = not allowed[:, -1].any() and bool(allowed[:, :-1].all())
    return "bidirectional, last position is no key" if no_key else "bidirectional"


def _kind_of(
    pattern: Float[Tensor, "batch head query key"],
    scores: Float[Tensor, "batch head query key"] | None,
    carries: str,
) -> str:
    total = pattern.float().sum(dim=-1)
    tolerance = 1e-4 if pattern.dtype in (torch.float32, torch.float64) else 2e-2
    if scores is not None and carries == "scores":
        expected = {
            "softmax": scores.float().softmax(dim=-1).nan_to_num(),
            "relu": scores.float().relu(),
        }
        for kind, made in expected.items():
            if torch.allclose(pattern.float(), made, atol=tolerance):
                return kind
        if bool(((pattern == 0) | (pattern == 1)).all()) and bool((total <= 1).all()):
            return "hardmax"
    if bool((total < 1 - tolerance).any()) and bool((total <= 1 + tolerance).all()):
        return "softmax with sinks"
    return "softmax" if bool(((total - 1).abs() <= tolerance).all()) else "unknown"
