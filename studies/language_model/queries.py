"""The directions in which the queries of a head look, in units of the scores' deviation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.hooks.model.call import call
from infoflow_lens.hooks.model.inputs import Batch
from infoflow_lens.hooks.model.points import layer_count, scores_hook
from infoflow_lens.hooks.model.semantics import hook_semantics, visible_keys

_TOLERANCE = 1e-2  # of the scores' deviation, between scores and products of queries and keys
_POINTS = (("attn.hook_rot_q", "attn.hook_rot_k"), ("attn.hook_q", "attn.hook_k"))


@dataclass(frozen=True)
class Directions:
    """The queries of one layer.

    Attributes:
        point: the hook point of the queries.
        u: the directions [head, query, d_head]; |u|^2 is the variance of the query's scores over
            keys, in nats squared, and u . u' their covariance.
        to: [head, d_head, d_head], from queries to directions.
        back: from directions to queries of the same scores, up to what all keys have in common.
        axes: [head, d_head, d_head], orthonormal columns, those of most energy first.
        energies: [head, d_head], of these.
    """

    point: str
    u: Float[Tensor, "head query d_head"]
    to: Float[Tensor, "head d_head d_head"]
    back: Float[Tensor, "head d_head d_head"]
    axes: Float[Tensor, "head d_head d_head"]
    energies: Float[Tensor, "head d_head"]

    def roles(self) -> Float[Tensor, " head"]:
        """Divide one by the mean squared cosine between two queries, weighed by their energies."""
        total = self.energies.sum(dim=1)
        return total.square() / self.energies.square().sum(dim=1).clamp(min=1e-300)

    def share_of_mean(self) -> Float[Tensor, " head"]:
        """Return the share of the energy in the mean direction of all queries."""
        mean = self.u.mean(dim=1).square().sum(dim=1)
        return mean / self.u.square().sum(dim=2).mean(dim=1).clamp(min=1e-300)

    def share_by(self, label: Int[Tensor, " query"]) -> Float[Tensor, " head"]:
        """Return the share of the energy that the means of labels add to the mean of all queries.

        Corrected for chance, as omega squared is: labels that say nothing give 0 in expectation.
        """
        _, group, counts = label.unique(return_inverse=True, return_counts=True)
        n, n_groups = len(label), len(counts)
        apart = self.u - self.u.mean(dim=1, keepdim=True)
        # [head, label, d_head]
        sums = apart.new_zeros(len(apart), n_groups, apart.shape[2]).index_add_(1, group, apart)
        # a one-way analysis of variance; `chance` is what groups of this size explain of noise
        between = (sums.square().sum(dim=2) / counts).sum(dim=1)
        within = apart.square().sum(dim=(1, 2)) - between
        chance = (n_groups - 1) * within / max(1, n - n_groups)
        return (between - chance) / self.u.square().sum(dim=(1, 2)).clamp(min=1e-300)


def directions(
    model: nn.Module,
    rows: Int[Tensor, "n pos"],
    batch_size: int,
    first: int = 1,
    first_key: int = 0,
) -> list[Directions]:
    """Return the directions of all queries of all layers, layer by layer.

    Args:
        model: a language model that shows queries, keys and scores.
        rows: sequences of one length.
        batch_size: of a pass.
        first: the first position whose queries count; earlier ones choose among too few keys.
        first_key: the first position that counts as a key; 1 leaves out a first token on which
            attention rests, and which outweighs all other differences between keys.

    Raises:
        InfoFlowError: if queries and keys do not make the scores, as where the model turns them by
            their positions behind the hook points.
    """
    layers = range(layer_count(model))
    return [_read_layer(model, i, rows, batch_size, first, first_key) for i in layers]


def _read_layer(
    model: nn.Module, layer: int, rows: Tensor, batch_size: int, first: int, first_key: int
) -> Directions:
    pairs = _pairs(model, layer)
    names = pairs[0]
    caught_q, caught_k = [], []
    scale: Tensor | None = None
    for part in rows.split(batch_size):
        with torch.no_grad():
            wanted = (*(name for pair in pairs for name in pair), scores_hook(model, layer))
            caught = call(model, Batch(part), wanted).activations
        # a bridge may list points behind the rotation that never fire
        names = next((pair for pair in pairs if caught.keys() >= set(pair)), None) or _none(layer)
        scores = caught[scores_hook(model, layer)]
        n_heads = scores.shape[1]
        q, k = (_split_heads(caught[name], n_heads) for name in names)
        # one number for a layer, which the first batch tells
        if scale is None:
            scale = _scale(model, layer, q, k, scores)
        caught_q.append(q[:, :, first:].double().cpu())
        caught_k.append(k[:, :, first_key:].double().cpu())
    assert scale is not None
    q = torch.cat(caught_q).transpose(0, 1).flatten(1, 2)
    k = torch.cat(caught_k).transpose(0, 1).flatten(1, 2)
    # what all keys have in common moves all scores of a query alike
    apart = k - k.mean(dim=1, keepdim=True)
    values, vectors = torch.linalg.eigh(apart.transpose(1, 2) @ apart / apart.shape[1])
    root = values.clamp(min=0).sqrt()
    # in directions that no key has there are no scores, and no way back
    kept = root > 1e-6 * root.amax(dim=1, keepdim=True)
    inverse = torch.where(kept, 1 / root.clamp(min=1e-300), 0)
    # the root of the keys' covariance: lengths are then deviations of scores over keys
    to = scale * vectors @ torch.diag_embed(root) @ vectors.transpose(1, 2)
    back = vectors @ torch.diag_embed(inverse) @ vectors.transpose(1, 2) / scale
    u = q @ to
    # in rising order, hence the flips below
    energies, axes = torch.linalg.eigh(u.transpose(1, 2) @ u / u.shape[1])
    return Directions(names[0], u, to, back, axes.flip(2), energies.flip(1).clamp(min=0))


def _pairs(model: nn.Module, layer: int) -> list[tuple[str, str]]:
    """Return points of queries and keys that the model lists."""
    known: Any = model.hook_dict
    if hook_semantics(model).scores[layer] != "scores":
        raise InfoFlowError(
            f"layer {layer} does not show its scores, so its queries cannot be checked against "
            "them: expected hook_attn_scores; try another backend"
        )
    named = [(f"blocks.{layer}.{q}", f"blocks.{layer}.{k}") for q, k in _POINTS]
    return [pair for pair in named if set(pair) <= set(known)] or [_none(layer)]


def _none(layer: int) -> NoReturn:
    raise InfoFlowError(f"layer {layer} shows no queries: expected attn.hook_q and attn.hook_k")


def _split_heads(activation: Tensor, n_heads: int) -> Float[Tensor, "batch head pos d_head"]:
    """Split queries or keys into heads; repeat grouped keys for the queries that share them."""
    if activation.ndim == 3:
        raise InfoFlowError(
            f"queries or keys have the shape {tuple(activation.shape)}: expected [batch, pos, "
            "head, d_head]"
        )
    found = activation.transpose(1, 2)
    return found.repeat_interleave(n_heads // found.shape[1], dim=1)


def _scale(model: nn.Module, layer: int, q: Tensor, k: Tensor, scores: Tensor) -> Tensor:
    """Return the number that makes scores of the products of queries and keys.

    Raises:
        InfoFlowError: if there is none.
    """
    allowed = visible_keys(model, layer, scores)
    product = (q @ k.transpose(2, 3)).double()
    # a softmax does not see what all keys of a row have in common
    ours, theirs = (_centre(x, allowed) for x in (product, scores.double()))
    scale = (ours * theirs).sum() / ours.square().sum().clamp(min=1e-300)
    apart = (theirs - scale * ours).square().sum() / theirs.square().sum().clamp(min=1e-300)
    if float(apart.sqrt()) > _TOLERANCE:
        raise InfoFlowError(
            f"the scores of layer {layer} are not products of its queries and keys (off by "
            f"{float(apart.sqrt()):.0%} of their deviation): expected models that do not turn them "
            "by their positions (rotary embeddings) behind the hook points, such as GPT-2"
        )
    return scale.cpu()


def _centre(scores: Tensor, allowed: Tensor) -> Tensor:
    kept = torch.where(allowed, scores, 0)
    mean = kept.sum(dim=-1, keepdim=True) / allowed.sum(dim=-1, keepdim=True).clamp(min=1)
    return torch.where(allowed, kept - mean, 0)


def projecting(
    found: Sequence[Directions], bases: Sequence[Float[Tensor, "head d_head rank"]]
) -> list[tuple[str, Callable[..., Tensor]]]:
    """Make functions that project every query to a subspace of its head's directions.

    Args:
        found: the directions, layer by layer.
        bases: for each layer orthonormal columns [head, d_head, rank].
    """
    return [
        (layer.point, _onto(layer.to @ basis @ basis.transpose(1, 2) @ layer.back))
        for layer, basis in zip(found, bases, strict=True)
    ]


def _onto(matrix: Float[Tensor, "head d_head d_head"]) -> Callable[..., Tensor]:
    def hook_fn(q: Tensor, hook: Any = None) -> Tensor:
        return torch.einsum("bphd,hde->bphe", q, matrix.to(q))

    return hook_fn
