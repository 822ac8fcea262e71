"""Rows of a pass for recovery maps: what is read, what is to be given back, and their buffer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import to_host
from infoflow_lens.foundation.settings import Index, check
from infoflow_lens.hooks.model.points import config_value, hook_name, position_count, reads_vectors
from infoflow_lens.hooks.passes.view import Pass
from infoflow_lens.hooks.probe import describe_setting
from infoflow_lens.hooks.recovery.statistics import RegressionStatistics


@dataclass
class Rows:
    """Rows of whole sequences, with the values that they chose among.

    Attributes:
        features: [row, feature].
        chosen: indices of values.
        values: [value, target]; or int [value], classes of one-hot targets.
        ends: after each sequence, the number of rows so far.
    """

    features: Float[Tensor, "row feature"]
    chosen: Int[Tensor, "row group"]
    values: Tensor
    ends: list[int]


@dataclass
class RowBuffer:
    """Regression statistics, with rows that wait until there are about `capacity` of them.

    The sums are large, so each addition is expensive. Rows are added in whole sequences as soon as
    these have `capacity` rows together. So the result does not depend on the size of the batches.

    Attributes:
        capacity: rows.
        n_classes: of one-hot targets; 0 for others.
    """

    made_of: ClassVar[dict[str, type]] = {"statistics": RegressionStatistics, "waiting": Rows}

    capacity: int
    n_classes: int = 0
    statistics: RegressionStatistics = field(default_factory=RegressionStatistics)
    waiting: list[Rows] = field(default_factory=list)

    @property
    def n(self) -> int:
        """The number of rows, those that wait included."""
        return self.statistics.n + sum(len(rows.features) for rows in self.waiting)

    def append(self, rows: Rows) -> None:
        """Let rows wait."""
        if len(rows.features):
            self.waiting.append(rows)

    def settle(self, everything: bool = False) -> None:
        """Add waiting rows to the statistics. If memory runs out, they go on waiting."""
        if not everything and sum(rows.ends[-1] for rows in self.waiting) < self.capacity:
            return  # as after most passes
        # cut where a sequence ends, so that the same rows come together whatever the batches
        while self.waiting:
            taken, count = [], 0
            for rows in self.waiting:
                enough = next((end for end in rows.ends if count + end >= self.capacity), None)
                if enough is not None:
                    taken.append((rows, enough))
                    count += enough
                    break
                taken.append((rows, len(rows.features)))
                count += len(rows.features)
            if count < self.capacity and not everything:
                return
            self._take_in(taken)
            last, used = taken[-1]
            rest = [_after(last, used)] if used < len(last.features) else []
            self.waiting = rest + self.waiting[len(taken) :]

    def _take_in(self, taken: list[tuple[Rows, int]]) -> None:
        features = torch.cat([rows.features[:n] for rows, n in taken])
        # values of all parts stand one behind the other, and chosen places move along with them
        first = [0, *accumulate(len(rows.values) for rows, _ in taken)]
        chosen = torch.cat(
            [rows.chosen[:n] + start for (rows, n), start in zip(taken, first, strict=False)]
        )
        values = torch.cat([rows.values for rows, _ in taken])
        if self.n_classes:
            self.statistics.update_classes(features, values, chosen, self.n_classes)
        else:
            self.statistics.update_chosen(features, values, chosen)

    def merge(self, other: "RowBuffer") -> None:
        """Add the rows of another buffer; those that wait are added when they are enough."""
        self.settle()
        self.statistics.merge(other.statistics)
        self.waiting = [*self.waiting, *other.waiting]


def _after(rows: Rows, used: int) -> Rows:
    ends = [end - used for end in rows.ends if end > used]
    return Rows(rows.features[used:], rows.chosen[used:], rows.values, ends)


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
            _, layer = self.target
            return (hook_name(model, f"blocks.{layer}.hook_resid_pre"),)
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
        """Make the targets of all tokens; with "identity" places in `classes`, -1 for others."""
        embedding = seen.embedding()
        n_source = embedding.shape[1]
        if isinstance(self.target, tuple):
            return seen.state(self.target[1], "resid_pre")[:, :n_source]
        if isinstance(self.target, str) and self.target == "embedding":
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
    """Draw orthonormal directions of the targets' space, the same for a seed.

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


@dataclass(frozen=True)
class LayerRows:
    """The queries of a pass in one layer.

    Attributes:
        features: [batch, pos, feature] for each set of features: one, or one for each head.
        chosen: int [batch, query, group] for each set: keys of its heads by rank, then those of the
            controls.
        valid: which queries take part; on the host once :func:`move_valid` has moved it.
        keys: int [batch, query, group], of all heads and ranks.
        n_heads: heads of the layer.
    """

    features: list[Float[Tensor, "batch _pos _feature"]]
    chosen: list[Int[Tensor, "batch query _group"]]
    valid: Bool[Tensor, "batch query"]
    keys: Int[Tensor, "batch query _key"]
    n_heads: int


@dataclass(frozen=True)
class Part:
    """Some sequences of a pass, for one buffer.

    Attributes:
        buffer: its index; 0 is for fitting.
        sequences: which.
        values: the targets of all their tokens, or the classes of these.
    """

    buffer: int
    sequences: Int[Tensor, " sequence"]
    values: Tensor


@dataclass(frozen=True)
class RowMaker:
    """Makes rows of passes, by the settings of a RecoveryProbe."""

    ranks: tuple[int, ...]
    source: str
    without: tuple[int, ...]
    controls: tuple[str, ...]
    seed: int

    def layer(
        self,
        seen: Pass,
        layer: int,
        n_source: int,
        before: Int[Tensor, "_query _key"] | None,
    ) -> LayerRows:
        """Find features, chosen keys and defined queries of a layer.

        Args:
            seen: the pass.
            layer: the layer.
            n_source: tokens of each sequence.
            before: the keys of the last sequence before this pass.
        """
        state = seen.state(layer, self.source)
        positions = seen.ranked(layer, self.ranks, self.without).positions[:, :, :n_source]
        n_heads = positions.shape[1]
        keys = rearrange(positions, "batch head query rank -> batch query (head rank)").int()
        keys = keys.to(state.device)
        # CLS stands behind the tokens, and is none that a map could give back
        valid = ((keys >= 0) & (keys < n_source)).all(dim=-1)
        n_pos = position_count(seen.model, n_source)
        kept = ~seen.places(self.without, n_pos)[:, :n_source].to(valid.device)
        valid &= kept
        groups = [keys]
        if self.controls:
            allowed = seen.visible(layer)[:, :n_source, :n_source].to(state.device)
            allowed = allowed & kept[:, None]
            groups += self._control_keys(seen, keys, allowed, before)
        if self.source != "head":
            return LayerRows([state], [torch.cat(groups, dim=-1)], valid, keys, n_heads)
        # groups with one entry for each (head, rank) are split by head; others belong to every head
        by_head = []
        for head in range(n_heads):
            own = [
                group.unflatten(-1, (n_heads, -1))[:, :, head]
                if group.shape == keys.shape
                else group
                for group in groups
            ]
            by_head.append(torch.cat(own, dim=-1))
        return LayerRows(list(state.unbind(dim=2)), by_head, valid, keys, n_heads)

    def _control_keys(
        self,
        seen: Pass,
        keys: Int[Tensor, "batch query key"],
        allowed: Bool[Tensor, "batch query source"],
        before: Int[Tensor, "_query _key"] | None,
    ) -> list[Int[Tensor, "batch query _group"]]:
        n_query = keys.shape[1]
        # where the sequence before has no key, its place takes a random one
        lengths = [n_query] * len(keys) if seen.lengths is None else seen.lengths.tolist()
        groups = {}
        if "random" in self.controls or "shuffled" in self.controls:
            drawn = random_keys(allowed, lengths, self.seed, seen.indices.tolist())
            groups["random"] = random = drawn[..., None].int()
            earlier = torch.full_like(keys, -1)
            earlier[1:] = keys[:-1]
            if before is not None:
                n_before = min(n_query, len(before))
                earlier[0, :n_before] = before[:n_before].to(keys.device)
            within = earlier < torch.tensor(lengths, device=keys.device)[:, None, None]
            groups["shuffled"] = torch.where((earlier >= 0) & within, earlier, random)
        itself = torch.arange(n_query, device=keys.device, dtype=keys.dtype)
        groups["self"] = itself[None, :, None].expand(len(keys), -1, 1)
        return [groups[name] for name in self.controls]


def parts_of(values: Tensor, seen: Pass, n_blocks: int) -> list[Part]:
    """Divide sequences by buffer: those to fit on, and held-out ones dealt in turn.

    Args:
        values: targets [batch, source, d_target], or classes.
        seen: the pass, which knows the sequences that are held out.
        n_blocks: how many buffers of held-out sequences there are.
    """
    index = torch.where(seen.held_out, 1 + seen.turns % n_blocks, 0)
    parts = []
    for buffer in index.unique().tolist():
        sequences = (index == buffer).nonzero().flatten()
        # a copy: the user may write to the tokens later
        chosen = values.index_select(0, sequences.to(values.device))
        parts.append(Part(buffer, sequences, chosen.flatten(0, 1)))
    return parts


def rows_of(
    layer: LayerRows, parts: Sequence[Part]
) -> tuple[list[list[tuple[int, Rows]]], Int[Tensor, " row"]]:
    """Return each set of features' rows for each buffer, and the order of the held-out rows.

    The order is that of the sequences, whatever the buffers that they are in.
    """
    device, n_query = layer.keys.device, layer.valid.shape[1]
    queries = torch.arange(n_query)
    picked = []
    # the fit has one buffer, held-out rows one for each block of sequences
    held_out = []
    for part in parts:
        valid = layer.valid[part.sequences]
        start = torch.arange(len(part.sequences))[:, None] * n_query
        sequence = part.sequences[:, None].expand_as(valid)[valid]
        held_out += [sequence] if part.buffer else []
        query = queries.expand_as(valid)[valid].to(device)
        of_values = start.expand_as(valid)[valid].to(device)
        values, ends = part.values.to(device), valid.sum(dim=1).cumsum(0).tolist()
        picked.append((part.buffer, values, ends, sequence.to(device), query, of_values))
    # the same rows for every set of features: only what is read differs
    sets = []
    for features, chosen in zip(layer.features, layer.chosen, strict=True):
        n_pos = features.shape[1]
        flat, keys = features.reshape(-1, features.shape[2]), chosen.flatten(0, 1)
        rows = []
        for buffer, values, ends, sequence, query, of_values in picked:
            read = flat.index_select(0, sequence * n_pos + query)
            some = keys.index_select(0, sequence * n_query + query) + of_values[:, None]
            rows.append((buffer, Rows(read, some, values, ends)))
        sets.append(rows)
    order = torch.cat(held_out) if held_out else queries[:0]
    return sets, order.argsort(stable=True).to(device)


def move_valid(layers: Sequence[LayerRows]) -> list[LayerRows]:
    """Move to the host which queries take part, of all layers in one copy."""
    moved = to_host([layer.valid for layer in layers])
    return [replace(layer, valid=valid) for layer, valid in zip(layers, moved, strict=True)]
