"""What a model's hook points carry and which keys its queries see, found once by running it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import eval_mode
from infoflow_lens.foundation.record import (
    behaviour,
    code_digest,
    configuration_fingerprint,
    model_fingerprint,
)
from infoflow_lens.foundation.settings import check
from infoflow_lens.hooks.model.call import (
    call,
    output_of,
    run_few_tokens,
    user_hooks,
    without_user_hooks,
)
from infoflow_lens.hooks.model.inputs import Batches, depends_on_length
from infoflow_lens.hooks.model.points import (
    INSTEAD_OF_A_BRIDGE,
    cache_by_mode,
    check_is_attention,
    config_value,
    has_own_attention,
    hook_name,
    hook_points,
    layer_count,
    list_trials,
    reads_vectors,
)
from infoflow_lens.hooks.model.tap import AttentionCall, Site, Tap, suspend_compiler

Carried = Literal["scores", "pattern", "missing"]
State = Literal["post_attention", "resid_post"]

_SUMMED = ("hook_resid_pre", "hook_attn_out", "hook_mlp_out", "hook_resid_post")
_MIDDLE = "hook_resid_mid"
_MASKED = -1e3  # no score of a model in use lies so low; every mask does, in every dtype


@dataclass(frozen=True)
class HookSemantics:
    """What the hook points of a model carry.

    Attributes:
        scores: for each layer what ``hook_attn_scores`` carries: the "scores" before the softmax;
            the "pattern" in their place, as many bridges do; or nothing, "missing".
        pattern: for each layer whether ``hook_pattern`` fires; it does not with fused attention.
        layers_add: for each layer whether ``hook_attn_out`` is what is added to the state that
            enters; not so in BERT, whose norms stand behind the sums: there it is the next state.
            None where the hook points show neither, or do not fire.
    """

    scores: tuple[Carried, ...]
    pattern: tuple[bool, ...]
    layers_add: tuple[bool | None, ...]

    @property
    def adds(self) -> bool:
        """Say whether attention adds what its hook point shows, in every layer."""
        return all(self.layers_add)


def hook_semantics(model: nn.Module) -> HookSemantics:
    """Find what the hook points of `model` carry.

    TransformerLens's own attention shows its scores. A bridge shows what the module that it wraps
    gives, so it is run once on a few tokens. The values of other passes never decide.
    """
    if not has_own_attention(model):
        return _observe(model)
    points, names = hook_points(model), _attention_points(model)
    carried: list[Carried] = ["scores" if one in points else "missing" for one, _ in names]
    pattern = tuple(other in points for _, other in names)
    return HookSemantics(tuple(carried), pattern, (True,) * len(names))


def _attention_points(model: nn.Module) -> list[tuple[str, str]]:
    """Name the points of scores and of the pattern, layer by layer."""
    blocks = [f"blocks.{layer}.attn." for layer in range(layer_count(model))]
    return [(block + "hook_attn_scores", block + "hook_pattern") for block in blocks]


def visibility(model: nn.Module, n_pos: int) -> tuple[Bool[Tensor, "query key"], ...] | None:
    """Find the keys that queries of a bridge may see, by layer, whatever the tokens are.

    The model is run on one sequence of at least `n_pos` positions, and what closes keys is read by
    the tap. What holds for a length holds for the first positions of it.

    Returns:
        None for models of TransformerLens's own attention, which masks with -inf: no score is that.

    Raises:
        InfoFlowError: if the attention of some layer is not seen.
    """
    if has_own_attention(model):
        return None
    length = n_pos
    if not depends_on_length(model):  # else a longer pass would leave its frequencies behind
        n_ctx = config_value(model, "n_ctx")
        # the next power of two, so that texts of many lengths need few runs
        length = 1 << max(0, n_pos - 1).bit_length()
        length = max(n_pos, min(length, n_ctx or length))
    known: dict[Any, tuple[Bool[Tensor, "query key"], ...]] = list_trials(model)
    trial = _visible, length
    if trial not in known:
        known[trial] = _visible(model, length)
    return known[trial]


@cache_by_mode
def _observe(model: nn.Module) -> HookSemantics:
    points, attention = hook_points(model), _attention_points(model)
    blocks = [[f"blocks.{i}.{part}" for part in (*_SUMMED, _MIDDLE)] for i in range(len(attention))]
    wanted = [name for names in (*attention, *blocks) for name in names if name in points]
    # two sequences of a few tokens show what fires, and cost nothing beside a batch
    caught = run_few_tokens(model, wanted, n_sequences=2, n_pos=8).activations
    scores = tuple(_classify_scores(caught.get(one), caught.get(other)) for one, other in attention)
    pattern = tuple(other in caught for _, other in attention)
    return HookSemantics(scores, pattern, tuple(_adds(*map(caught.get, names)) for names in blocks))


def _adds(
    entering: Tensor | None,
    attention: Tensor | None,
    mlp: Tensor | None,
    leaving: Tensor | None,
    middle: Tensor | None,
) -> bool | None:
    """Say whether attention's output is added to the state, or is the state; None for neither."""
    if entering is None or attention is None or leaving is None:
        return None
    sums = entering + attention, attention if mlp is None else attention + mlp
    if _same(sums[0] if mlp is None else sums[0] + mlp, leaving):
        return True
    # a factor, or another part, may follow the sums; what the norm of the MLP reads tells then
    found = [middle is not None and _same(total, middle) for total in sums]
    return found[0] if any(found) else None


def _same(total: Tensor, state: Tensor) -> bool:
    gap = (total - state).float()
    return bool(gap.norm() <= 0.05 * state.float().norm())  # bfloat16 rounds every part


def _classify_scores(scores: Tensor | None, pattern: Tensor | None) -> Carried:
    if scores is None:
        return "missing"
    if pattern is None or scores.shape != pattern.shape:
        return "scores"
    same = torch.allclose(scores.float(), pattern.float(), atol=1e-3)
    return "pattern" if same else "scores"


def _visible(model: nn.Module, length: int) -> tuple[Bool[Tensor, "query key"], ...]:
    """Run a sequence, and read which keys are closed in it."""
    cfg: Any = model.cfg
    # from the middle of the vocabulary on, as those at its ends may stand for padding
    tokens = (torch.arange(length)[None] + cfg.d_vocab // 2) % cfg.d_vocab
    found: dict[int, Tensor] = {}
    read: set[int] = set()  # attentions, where products of patterns and values are seen

    def look(attention: AttentionCall, site: Site, tensor: Tensor) -> None:
        # keys may be closed behind the softmax, too; the attention of all layers would not fit
        if site in ("pattern", "z"):
            found[attention.number] = attention.visible().any(dim=(0, 1))
            read.update({attention.number} if site == "z" else ())

    with eval_mode(model), without_user_hooks(model), suspend_compiler(), Tap(look, batch=1):
        call(model, tokens, output=True)
    seen = [keys for number, keys in found.items() if number in read or not read]
    if len(seen) != layer_count(model):
        raise InfoFlowError(
            f"{len(seen)} attentions were seen in {type(model).__name__} of {layer_count(model)} "
            f"layers, so it is not known which keys they hide: expected one attention a layer; "
            f"{INSTEAD_OF_A_BRIDGE}"
        )
    keys: list[Tensor] = []
    for visible in seen:
        # most layers see the same keys: they share one tensor
        keys.append(next((other for other in keys if other.equal(visible)), visible))
    return tuple(keys)


def visible_keys(
    model: nn.Module, layer: int, scores: Float[Tensor, "batch head query key"]
) -> Bool[Tensor, "batch head query key"]:
    """Find the keys that queries of unpadded sequences may see, given the scores of a layer."""
    known = visibility(model, scores.shape[-1])
    if known is None:
        return scores > -torch.inf
    n_pos = scores.shape[-1]
    return known[layer][:n_pos, :n_pos].to(scores.device).expand_as(scores)


def find_keys_in_use(
    model: nn.Module, attention: Float[Tensor, "batch head query key"], by_weight: bool
) -> Bool[Tensor, "batch query key"]:
    """Find the keys that some head of a pass attends to.

    Args:
        model: the model.
        attention: scores, of which those of closed keys are masks; or a pattern.
        by_weight: whether it is a pattern.
    """
    highest = attention.amax(dim=1)
    if by_weight:
        return highest > 0
    if has_own_attention(model):
        return highest > -torch.inf
    least = attention.clamp(min=torch.finfo(attention.dtype).min).min()
    # between masks, which a model may divide and rounding moves, and scores
    return highest > torch.where(least < _MASKED, least / 2, -torch.inf)


def attention_hooks(model: nn.Module, layers: Sequence[int]) -> list[str]:
    """Return the hook points that ranks of keys are read from, one for each layer.

    It is the layer's scores where the model shows them, else its pattern.

    Raises:
        InfoFlowError: if a layer shows neither.
    """
    found, names = hook_semantics(model), _attention_points(model)
    for layer in layers:
        if found.scores[layer] != "scores" and not found.pattern[layer]:
            check_is_attention(model, names[layer][1])
            raise InfoFlowError(
                f"neither hook_attn_scores nor hook_pattern fires in layer {layer}: expected a "
                "model that shows its attention; load it with eager attention "
                "(attn_implementation='eager')"
            )
    return [names[layer][found.scores[layer] != "scores"] for layer in layers]


def post_attention_hooks(model: nn.Module, layer: int) -> tuple[str, ...]:
    """Hook points whose sum is the post-attention state x'_l (eq 1) of a layer.

    Attention-only and parallel blocks have no ``hook_resid_mid``; there the state is the sum of
    what enters the block and what attention adds. On bridges ``hook_resid_mid`` is the input of
    the second norm, which is another state where norms come after the sums, as in BERT; there
    ``hook_attn_out`` is the state itself.

    Raises:
        InfoFlowError: if the model lacks a hook point, or has no residual stream.
    """
    known = hook_points(model)
    middle = f"blocks.{layer}.{_MIDDLE}"
    if has_own_attention(model) and middle in known:
        return (middle,)
    if f"blocks.{layer}.hook_mixer_out" in known:
        raise InfoFlowError(
            f"layer {layer} shows no state behind its mixer, hook_resid_mid: expected one; give "
            "state='resid_post', what leaves the layer"
        )
    attention = hook_name(model, f"blocks.{layer}.hook_attn_out")
    # with a norm in between, attention's own output is the state
    adds = hook_semantics(model).layers_add[layer]
    if adds is None:
        raise InfoFlowError(
            f"{', '.join(_SUMMED)} of layer {layer} do not all fire, or are no sum of what enters "
            "it and of its parts: expected a transformer block that adds attention and MLP to a "
            f"residual stream; {INSTEAD_OF_A_BRIDGE}"
        )
    return (hook_name(model, f"blocks.{layer}.hook_resid_pre"), attention) if adds else (attention,)


def state_hooks(model: nn.Module, layer: int, state: str) -> tuple[str, ...]:
    """Hook points whose sum is a layer's state: "post_attention" or "resid_post".

    Raises:
        InfoFlowError: for another name, or a model without the hook points.
    """
    if check(state, State, "state") == "post_attention":
        return post_attention_hooks(model, layer)
    return (hook_name(model, f"blocks.{layer}.hook_resid_post"),)


def state_sum(activations: Mapping[str, Tensor], names: tuple[str, ...]) -> Tensor:
    """Give the state that :func:`state_hooks` resolved, from the activations of a forward pass."""
    state = activations[names[0]]
    for name in names[1:]:
        state = state + activations[name]
    return state


_N_SEQUENCES, _N_TOKENS = 2, 128  # there is no room for the logits of many tokens
HOOKS = "hooks"


def model_identity(model: nn.Module, batches: Batches) -> dict[str, Any]:
    """Return what the numbers of a model depend on, as JSON-compatible values.

    What no weight and no config tells, such as an attribute, a buffer that is not saved or another
    ``forward``, shows in the outputs of the first sequences: they are compared bit by bit.

    Args:
        model: a TransformerLens model.
        batches: the sequences of a run.

    Returns:
        Digests of "model", its weights, and of its "configuration"; the user's "hooks" on it, by
        module and code; and its "outputs", see
        :func:`~infoflow_lens.foundation.record.behaviour`.
    """
    batch = next(batches.batches(_N_SEQUENCES))
    if not reads_vectors(model):
        batch = batch.cut(_N_TOKENS)
    with eval_mode(model):
        # twice, as bits count only where a model gives the same bits again
        outputs = behaviour(output_of(model, batch), output_of(model, batch))
    names = {module: name for name, module in model.named_modules()}
    return {
        "model": model_fingerprint(model),
        "configuration": configuration_fingerprint(model),
        HOOKS: [[names[module], code_digest(hook)] for module, hook in user_hooks(model)],
        "outputs": outputs,  # last: they follow from all others
    }
