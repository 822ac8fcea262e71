"""What recovery maps read, what they should give back, and what to compare them with."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.settings import Index, check
from infoflow_lens.hooks.model.points import config_value, hook_name, reads_vectors
from infoflow_lens.hooks.passes.view import Pass
from infoflow_lens.hooks.probe import describe_setting

Target: TypeAlias = str | tuple[str, int] | Tensor | Callable[[Tensor], Tensor]

Source = Literal["post_attention", "resid_post", "head"]
Control = Literal["random", "shuffled", "self"]
CONTROLS: tuple[Control, ...] = get_args(Control)
_MOST_CLASSES = 4096  # of a vocabulary, unless the user names its tokens


class TargetOfMaps:
    """The vectors, or the classes, that recovery maps should give back.

    Args:
        target: "embedding", ("resid_pre", layer), "identity", a table [d_vocab, d], or a function
            from tokens [batch, pos] (or vector tokens) to [batch, pos, d].
        vocabulary: with "identity", the token ids that are told apart.

    Raises:
        InfoFlowError: for anything else.
    """

    def __init__(self, target: Target, vocabulary: tuple[int, ...] | None = None) -> None:
        self.target, self.vocabulary = target, vocabulary
        # what each kind of target must look like
        known = target in ("embedding", "identity") if isinstance(target, str) else True
        if isinstance(target, tuple):
            known = (
                len(target) == 2
                and target[0] == "resid_pre"
                and check(target[1], Index, "the layer of target") >= 0
            )
        elif isinstance(target, Tensor):
            known = target.ndim == 2 and target.is_floating_point()
        elif not isinstance(target, str):
            known = callable(target)
        if not known:
            form = tuple(target.shape) if isinstance(target, Tensor) else repr(target)
            raise InfoFlowError(
                f"target is {form}: expected 'embedding', 'identity', ('resid_pre', layer), a "
                "table [d_vocab, d] of numbers, or a function from tokens to [batch, pos, d]"
            )
        if vocabulary is not None and (not self.is_identity or not self.vocabulary):
            raise InfoFlowError(
                f"vocabulary is {vocabulary!r}: expected token ids, with target='identity' only"
            )

    @property
    def is_identity(self) -> bool:
        """Say whether targets are one-hot."""
        return isinstance(self.target, str) and self.target == "identity"

    def points(self, model: nn.Module) -> tuple[str, ...]:
        """Return the hook points that targets come from.

        Raises:
            InfoFlowError: if the model lacks one, or has no ids or too many.
        """
        if self.is_identity and reads_vectors(model):
            raise InfoFlowError(
                "target is 'identity', but the model reads vectors: expected token ids; use "
                "target='embedding', the vector itself"
            )
        if self.is_identity:
            self.classes(model)
        if isinstance(self.target, tuple):
            return (hook_name(model, f"blocks.{self.target[1]}.hook_resid_pre"),)
        return ()

    def classes(self, model: nn.Module) -> tuple[int, ...]:
        """Return the token ids of the vocabulary.

        Raises:
            InfoFlowError: if nobody stated it and the model's is large or unknown.
        """
        size = config_value(model, "d_vocab")
        if self.vocabulary is not None:
            if size is not None and max(self.vocabulary) >= size:
                raise InfoFlowError(
                    f"vocabulary holds {max(self.vocabulary)}, but the model has {size} tokens: "
                    f"expected ids from 0 to {size - 1}"
                )
            return self.vocabulary
        if size is None or size > _MOST_CLASSES:
            raise InfoFlowError(
                f"target is 'identity' and the model has {size or 'an unknown number of'} tokens: "
                f"expected a vocabulary of at most about {_MOST_CLASSES}, since maps have a column "
                "for each; say which tokens to tell apart, RecoveryProbe(vocabulary=ids)"
            )
        return tuple(range(size))

    def values(
        self, seen: Pass, classes: Sequence[int]
    ) -> Float[Tensor, "batch source d_target"] | Int[Tensor, "batch source"]:
        """Targets of every token; with "identity" places in `classes`, -1 for other tokens."""
        embedding = seen.embedding()
        n_source = embedding.shape[1]
        if isinstance(self.target, tuple):
            return seen.state(self.target[1], "resid_pre")[:, :n_source]
        if self.target == "embedding" if isinstance(self.target, str) else False:
            return embedding
        # all other targets are made of token ids
        tokens = seen.tokens
        if tokens is None:
            raise InfoFlowError(
                f"target is {describe_setting(self.target)!r}, but hooks alone do not see the "
                "tokens: use attach() or run_probes(), or target='embedding'"
            )
        if self.is_identity:
            return _places(tokens, classes)
        if isinstance(self.target, Tensor):
            return self._from_table(self.target, tokens)
        assert callable(self.target)
        made: Any = self.target(tokens)
        if not isinstance(made, Tensor) or made.ndim != 3 or made.shape[:2] != embedding.shape[:2]:
            shape = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
            raise InfoFlowError(
                f"target gave {shape} for tokens of shape {tuple(tokens.shape)}: expected a "
                f"tensor [{embedding.shape[0]}, {n_source}, d]"
            )
        return made.detach()

    def _from_table(
        self, table: Float[Tensor, "d_vocab d_target"], tokens: Tensor
    ) -> Float[Tensor, "batch source d_target"]:
        if tokens.is_floating_point() or int(tokens.max()) >= len(table):
            raise InfoFlowError(
                f"target is a table of {len(table)} rows, and tokens are {tokens.dtype} up to "
                f"{float(tokens.max()):g}: expected a row for each token id"
            )
        return table.detach()[tokens.to(table.device).long()]


def _places(
    tokens: Int[Tensor, "batch source"], classes: Sequence[int]
) -> Int[Tensor, "batch source"]:
    ids = torch.tensor(classes, device=tokens.device)
    # a token behind the last class is compared with that one, and is none, either
    ordered, order = ids.sort()
    found = torch.searchsorted(ordered, tokens.contiguous()).clamp(max=len(ids) - 1)
    return torch.where(ordered[found] == tokens, order[found], -1)


def sketch_matrix(
    d_target: int, sketch: int, seed: int, device: torch.device
) -> Float[Tensor, "d_target sketch"]:
    """Orthonormal random directions of the targets' space, the same for a seed.

    Raises:
        InfoFlowError: if they would be no fewer than the dimensions.
    """
    if sketch >= d_target:
        raise InfoFlowError(
            f"sketch is {sketch} for targets of {d_target} dimensions: expected fewer; leave it "
            "out, and targets are exact"
        )
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(d_target, sketch, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(drawn)[0].to(device)


def random_keys(
    allowed: Bool[Tensor, "batch query key"],
    lengths: Sequence[int],
    seed: int,
    indices: Sequence[int],
) -> Int[Tensor, "batch query"]:
    """Return a random allowed key for each query, -1 where there is none.

    Args:
        allowed: the keys that may be attended to.
        lengths: real tokens of each sequence.
        seed: with the sequence's index, the seed of what is drawn for it.
        indices: of the sequences.
    """
    batch, n_query, _ = allowed.shape
    drawn = torch.zeros(batch, n_query, dtype=torch.float64)
    for row, (index, length) in enumerate(zip(indices, lengths, strict=True)):
        generator = torch.Generator().manual_seed(((seed << 32) + index) % 2**63)
        length = min(length, n_query)
        drawn[row, :length] = torch.rand(length, generator=generator, dtype=torch.float64)
    # a share of the count becomes the number of an allowed key; rounding may give the count itself
    count = allowed.sum(dim=-1)
    wanted = (drawn.to(allowed.device) * count).long().clamp(max=(count - 1).clamp(min=0))
    # allowed key number `wanted` is the first one at which the count of allowed keys reaches it
    place = (allowed.cumsum(dim=-1) == (wanted + 1)[..., None]).to(torch.uint8).argmax(dim=-1)
    return place.masked_fill(count == 0, -1)
