"""Rows of a forward pass for recovery maps: what is read, and which keys are to be given back."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from infoflow_lens.foundation.modules import to_host
from infoflow_lens.hooks.model.points import position_count
from infoflow_lens.hooks.passes.view import Pass
from infoflow_lens.hooks.recovery.buffer import Rows
from infoflow_lens.hooks.recovery.targets import random_keys


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
        """Features, chosen keys and defined queries of a layer.

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
        by_head = [
            torch.cat(
                [
                    group.unflatten(-1, (n_heads, -1))[:, :, head]
                    if group.shape == keys.shape
                    else group
                    for group in groups
                ],
                dim=-1,
            )
            for head in range(n_heads)
        ]
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
            random = random_keys(allowed, lengths, self.seed, seen.indices.tolist())[
                ..., None
            ].int()
            groups["random"] = random
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
    """The sequences that go to each buffer: those to fit on, and held-out ones dealt in turn.

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
        picked.append(
            (
                part.buffer,
                part.values.to(device),
                valid.sum(dim=1).cumsum(0).tolist(),
                sequence.to(device),
                queries.expand_as(valid)[valid].to(device),
                start.expand_as(valid)[valid].to(device),  # of the sequence's values
            )
        )
    # the same rows for every set of features: only what is read differs
    sets = []
    for features, chosen in zip(layer.features, layer.chosen, strict=True):
        n_pos = features.shape[1]
        flat, keys = features.reshape(-1, features.shape[2]), chosen.flatten(0, 1)
        sets.append(
            [
                (
                    buffer,
                    Rows(
                        flat.index_select(0, sequence * n_pos + query),
                        keys.index_select(0, sequence * n_query + query) + start[:, None],
                        values,
                        ends,
                    ),
                )
                for buffer, values, ends, sequence, query, start in picked
            ]
        )
    order = torch.cat(held_out) if held_out else queries[:0]
    return sets, order.argsort(stable=True).to(device)


def move_valid(layers: Sequence[LayerRows]) -> list[LayerRows]:
    """The same, with the queries that take part known on the host, of all layers in one copy."""
    moved = to_host([layer.valid for layer in layers])
    return [replace(layer, valid=valid) for layer, valid in zip(layers, moved, strict=True)]
