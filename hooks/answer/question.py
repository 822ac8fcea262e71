"""A question of a model: two texts, what is read of it, and runs in which parts are exchanged.

Every effect is a change of one number, the readout, when a part takes the value that it has in the
other text (Wang et al. 2023, "path patching"; noising: the text that is asked about runs, and parts
of it are spoiled).
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.record import hash_values
from infoflow_lens.hooks.interventions.kept import KeptNumbers
from infoflow_lens.hooks.model.call import BlockStarts, HookFunction, NamedHook, call, first_layer
from infoflow_lens.hooks.model.inputs import Batch, Batches
from infoflow_lens.hooks.model.points import hook_points, is_causal, layer_count
from infoflow_lens.hooks.readouts import LogitDifference, LogProbability, Readout, logits_of

_CACHE = "past_key_values"


@dataclass(frozen=True)
class Continuation(Batch):
    """The last tokens of some sequences, of which the model knows the first by keys and values.

    Attributes:
        cache: of the first tokens, in as many rows; the model adds to it.
    """

    cache: Any = None

    def run(self, model: nn.Module, device: torch.device | None = None) -> Any:
        """Run the model on these tokens, which see those before."""
        device = device or next(model.parameters()).device
        return model(self.tokens.to(device), **{_CACHE: self.cache}, use_cache=True)


class Prefix:
    """Keys and values of a text, of which any first part may stand before other tokens.

    Args:
        layers: keys and values [1, head, pos, d_head] of each attention.
    """

    def __init__(self, layers: list[tuple[Tensor, Tensor]]) -> None:
        self._layers = layers

    @classmethod
    @torch.no_grad()
    def find(cls, model: nn.Module, tokens: Int[Tensor, "1 pos"]) -> "Prefix | None":
        """Run a text and keep its keys and values; None of a model that does not give them."""
        original = getattr(model, "original_model", None)
        if original is None or _CACHE not in inspect.signature(original.forward).parameters:
            return None
        from transformers import DynamicCache

        cache = DynamicCache()
        try:
            # an empty cache, which the model fills
            call(model, Continuation(tokens, cache=cache), output=True)
            layers: list[Any] = [(layer.keys, layer.values) for layer in list[Any](cache.layers)]
        except (RuntimeError, TypeError, AttributeError, LookupError, ValueError):
            return None  # it wants a cache of another kind
        n_pos = tokens.shape[1]
        # layers that keep a window of keys alone have too few for all first parts
        if not layers or any(not isinstance(k, Tensor) or k.shape[2] != n_pos for k, _ in layers):
            return None
        return cls(layers)

    def continue_with(self, tokens: Int[Tensor, "row rest"], first: int) -> Continuation:
        """Put tokens behind the first ones of the text.

        Args:
            tokens: those from position `first` on.
            first: how many stand before.
        """
        from transformers import DynamicCache

        rows = [
            tuple(part[:, :, :first].expand(len(tokens), -1, -1, -1) for part in layer)
            for layer in self._layers
        ]
        return Continuation(tokens, cache=DynamicCache(rows))


# a hook point, the place within a sequence, and what stands there instead
Change: TypeAlias = tuple[str, Any, Tensor]
Span: TypeAlias = tuple[int, int]  # from a position to one, which is no more in it

MLP, MIXER = -1, -2  # in the place of a head, what else writes in a layer

_EACH = 30  # a batch costs as much as so many tokens more
_GRADIENT = 3  # passes that a gradient costs: one forward, and a derivative, which counts as two
_SAME = 1e-5  # of the readout: as near as passes of other batches come


@dataclass(frozen=True)
class Run:
    """One text, run as it is.

    Attributes:
        tokens: int [1, pos].
        value: of the readout.
        logits: what the model gives, [pos, choice]; of a classifier or an embedding, [choice].
        shown: activations by hook point, [1, pos, ...].
    """

    tokens: Int[Tensor, "1 pos"]
    value: float
    logits: Tensor
    shown: dict[str, Tensor]


class Question:
    """Two texts of equal length, and a readout.

    Args:
        model: any Transformer with hook points, in evaluation mode.
        text: token ids [pos], the text that is asked about.
        instead: token ids [pos], the other text; None if it is not known yet.
        readout: bound to the model.
        batch_size: rows that run together.
        kept: where what is measured is kept, and taken from.
        columns: what stands beside the ids of both texts, by name, such as ``token_type_ids``.
        spans: of all tokens, in their order, that are replaced at once; default, each by itself.
        advance: called with the number of rows that have run.

    Attributes:
        clean, other: the two runs.
        changed: the positions at which the texts differ.
        ends: the positions that the readout reads.
        end: the one, or the last of the text where it reads several.
        n_layers, n_heads: layers, and heads by layer.
        known_gradients: by the point between the texts, what :meth:`differentiate` gave.
        forwards: passes over one text so far; a derivative counts as two.

    Raises:
        InfoFlowError: for texts that differ in length or nowhere, and for a model that does not
            show its states, or what its heads write.
    """

    def __init__(
        self,
        model: nn.Module,
        text: Int[Tensor, " pos"],
        instead: Int[Tensor, " pos"] | None,
        readout: Readout,
        batch_size: int = 16,
        kept: KeptNumbers | None = None,
        columns: Mapping[str, Int[Tensor, " pos"]] | None = None,
        spans: Sequence[Span] | None = None,
        advance: Callable[[int], None] = lambda n: None,
    ) -> None:
        self._kept, self._columns = kept, dict(columns or {})
        self.spans, self.advance = spans or [(at, at + 1) for at in range(len(text))], advance
        self.model, self.readout, self.batch_size = model, readout, batch_size
        self.forwards = 0.0
        self.known_gradients: dict[float, dict[str, Tensor]] = {}
        self.n_layers = layer_count(model)
        self._known = hook_points(model)
        self._points = self._list_points()
        self._starts = BlockStarts.find(model)
        with self._starts.watch():
            self.clean = self.other = self._run(text[None])
        if not math.isfinite(self.clean.value):
            raise InfoFlowError(
                f"the readout is {self.clean.value} in this text: expected a finite number; choose "
                "another readout, or load the model in float32"
            )
        self.ends = self._find_ends()
        self.end = self.ends[0] if len(self.ends) == 1 else self.n_pos - 1
        self._reads_one = False
        self._prefix: Prefix | None = None
        # in this order: each is tried with passes that use what those before have found
        self._check_starts()
        self._check_end()
        self._prefix = self._find_prefix()
        self.changed: list[int] = []
        self._known_texts = {tuple(text.tolist()): 0.0}
        self.n_heads = [self._count_heads(layer) for layer in range(self.n_layers)]
        if instead is not None:
            self.compare_with(instead)

    def compare_with(self, instead: Int[Tensor, " pos"]) -> None:
        """Run the other text.

        Raises:
            InfoFlowError: for a text of another length, and for the same one.
        """
        text = self.clean.tokens[0]
        if text.shape != instead.shape:
            raise InfoFlowError(
                f"the two texts have {len(text)} and {len(instead)} tokens: expected as many, so "
                "that each place of the one has its place in the other; change words into words of "
                "as many tokens"
            )
        if text.equal(instead.to(text)):
            raise InfoFlowError(
                "the two texts have the same tokens: expected another text to compare with; change "
                "a word of it"
            )
        self.other = self._run(instead[None])
        self.changed = (text != instead.to(text)).nonzero().flatten().tolist()
        self._known_texts[tuple(instead.tolist())] = self.other.value - self.clean.value

    @property
    def gap(self) -> float:
        """Subtract the readout of the other text from that of the text."""
        return self.clean.value - self.other.value

    @property
    def n_pos(self) -> int:
        """The length of the texts."""
        return self.clean.tokens.shape[1]

    def batch(self, tokens: Int[Tensor, "row pos"]) -> Batch:
        """Make a batch of texts, or of their beginnings, with what stands beside their ids."""
        columns = {
            name: column[: tokens.shape[1]].expand(len(tokens), -1)
            for name, column in self._columns.items()
        }
        return Batch(tokens, None, columns)

    def sequences(self, tokens: Int[Tensor, "row pos"]) -> Batches:
        """Make inputs of probes of texts, with what stands beside their ids."""
        columns = {name: list(column) for name, column in self.batch(tokens).columns.items()}
        return Batches(self.model, tokens, columns=columns)

    def state(self, layer: int) -> str:
        """Name the hook point of the states that enter a layer; of those that leave the last."""
        if layer == self.n_layers:
            return f"blocks.{layer - 1}.hook_resid_post"
        return f"blocks.{layer}.hook_resid_pre"

    def z(self, layer: int) -> str:
        """Name the hook point of what the heads of a layer write, or its mixer without any."""
        z, mixer = f"blocks.{layer}.attn.hook_z", f"blocks.{layer}.hook_mixer_out"
        return mixer if z not in self._known and mixer in self._known else z

    def list_heads(self, layer: int) -> list[int]:
        """List the heads of a layer; of one with another mixer, :data:`MIXER`."""
        return [MIXER] if self.z(layer).endswith("mixer_out") else [*range(self.n_heads[layer])]

    def mlp(self, layer: int) -> str:
        """Name the hook point of what the MLP of a layer writes."""
        return f"blocks.{layer}.hook_mlp_out"

    def has_mlp(self, layer: int) -> bool:
        """Say whether a layer has an MLP that shows what it writes."""
        return self.mlp(layer) in self.clean.shown

    def find_head(self, layer: int, head: int) -> Any:
        """Find a head's place in the z of a sequence, at all positions."""
        z = self.clean.shown[self.z(layer)]
        if z.ndim == 4:
            return slice(None), head
        width = z.shape[-1] // self.n_heads[layer]
        return slice(None), slice(head * width, (head + 1) * width)

    def exchange(self, point: str, place: Any) -> Change:
        """Make the change that brings a part's value from the other text."""
        return point, place, self.other.shown[point][0][place]

    @torch.no_grad()
    def measure(
        self,
        rows: Sequence[Sequence[Change]],
        tokens: Int[Tensor, "row pos"] | None = None,
    ) -> Float[Tensor, " row"]:
        """Read what each row of changes does to the readout: its value minus the clean one.

        Blocks and positions before the first change of a batch do not run, as they would give the
        same again.

        Args:
            rows: changes of the clean text, for each row.
            tokens: other texts, one a row, in the place of the clean one.
        """
        found = torch.zeros(len(rows), dtype=torch.float64)
        texts = self.clean.tokens.expand(len(rows), -1) if tokens is None else tokens
        starts = []
        for text, row in zip(texts, rows, strict=True):
            # another text differs from the first block on
            layer = max(first_layer(point for point, *_ in row) or 0, 0) if tokens is None else 0
            starts.append((layer, self._first_position(text, row)))
        order = sorted(range(len(rows)), key=lambda row: starts[row])
        for these in self._batches(order, starts):
            some, start = [rows[row] for row in these], _find_earliest(starts[row] for row in these)
            asked = ["passes", texts[these], some]
            run = partial(self._read, texts[these], some, *start)
            found[these] = self.measure_once(asked, run)
            self.advance(len(some))
        return found - self.clean.value

    def _first_position(self, text: Int[Tensor, " pos"], changes: Sequence[Change]) -> int:
        """Find the first position at which a changed text is not the clean one, up to the end."""
        if self._prefix is None:
            return 0
        differ = text != self.clean.tokens[0]
        for point, place, value in changes:
            clean = self.clean.shown[point][0]
            changed = clean.clone()
            changed[place] = value.to(clean.dtype)
            differ = differ | (changed != clean).flatten(1).any(dim=1)
        return min([*differ.nonzero().flatten().tolist(), self.end])

    def _batches(self, order: list[int], starts: Sequence[tuple[int, int]]) -> list[list[int]]:
        """Cut rows in the order of their starts into the batches that cost least.

        All rows of a batch run from the first layer and the first position of any on.
        """
        best: list[tuple[float, list[int]]] = [(0.0, [])]  # cost, and where batches end
        for stop in range(1, len(order) + 1):
            options = []
            position = self.n_pos
            for first in range(stop - 1, max(-1, stop - 1 - self.batch_size), -1):
                # rows are sorted by their start, so the first one of a batch has its lowest layer
                layer, at = starts[order[first]]
                position = min(position, at)
                tokens = (stop - first) * (self.n_pos - position) + _EACH
                cost, ends = best[first]
                options.append((cost + (self.n_layers - layer) * tokens, [*ends, stop]))
            best.append(min(options))
        ends = best[-1][1]
        return [order[first:stop] for first, stop in pairwise([0, *ends])]

    def measure_once(
        self, asked: Any, measure: Callable[[], Float[Tensor, " number"]]
    ) -> Float[Tensor, " number"]:
        """Measure some numbers, unless a run that was stopped has measured them.

        Args:
            asked: all that they depend on, beside the model and the readout.
            measure: gives them.
        """
        if self._kept is None:
            return measure()
        before = self.forwards

        def count() -> Float[Tensor, " number"]:
            found = measure()
            # kept with the numbers, so that a run which goes on counts these passes, too
            return torch.cat([found, found.new_tensor([self.forwards - before])])

        found = self._kept.measure_once(hash_values(asked), count)
        self.forwards = before + float(found[-1])
        return found[:-1]

    def _read(
        self,
        tokens: Int[Tensor, "row pos"],
        rows: Sequence[Sequence[Change]],
        layer: int,
        position: int,
    ) -> Float[Tensor, " row"]:
        """Run changed texts from a layer and a position on, and read them."""
        before = {point: self.clean.shown[point][0][:position] for row in rows for point, *_ in row}
        edits = make_edits(rows, before)
        last = self.state(self.n_layers)
        batch = self._continue(tokens, position)
        with self.start_at(layer, position) as share:
            if self._reads_one:  # nothing behind the blocks runs for the other positions
                states = call(self.model, batch, [last], edit=edits).activations[last]
            else:
                output = call(self.model, batch, edit=edits, output=True).output
        self.forwards += len(rows) * share
        if self._reads_one:
            return self.read_states(states[:, self.end - position])
        readout = self._read_at(self.end - position) if position else self.readout
        return readout.read(output).detach().double().cpu()

    def _continue(self, tokens: Int[Tensor, "row pos"], position: int) -> Batch:
        """Make the batch of what stands from a position on."""
        if not position:
            return self.batch(tokens)
        assert self._prefix is not None  # else no position but the first is asked for
        return self._prefix.continue_with(tokens[:, position:], position)

    def _read_at(self, position: int) -> Readout:
        """Make the readout of another position."""
        return replace(self.readout, position=position)  # type: ignore[type-var]

    @torch.no_grad()
    def read_states(self, states: Float[Tensor, "row d_model"]) -> Float[Tensor, " row"]:
        """Read the readout off last states at the position that it reads."""
        point = self.state(self.n_layers)
        n, at, readout = self.n_pos, self.end, self.readout
        if self._reads_one:
            n, at, readout = 1, 0, self._read_at(0)
        found = []
        for some in states.split(self.batch_size):
            edit = (point, _make_writer([(slice(None), (slice(None), at), some)]))
            tokens = self.clean.tokens[:, :n].expand(len(some), -1)
            with self.start_at(self.n_layers) as share:
                output = call(self.model, self.batch(tokens), edit=[edit], output=True).output
            self.forwards += len(some) * n / self.n_pos * share
            found.append(readout.read(output).detach().double().cpu())
        return torch.cat(found)

    def replace_tokens(self) -> Float[Tensor, " span"]:
        """Replace the tokens of each span at once by the other text's.

        Returns:
            The change of the readout, 0 where the texts are one.
        """
        found = torch.zeros(len(self.spans), dtype=torch.float64)
        differ = [
            i for i, span in enumerate(self.spans) if not {*range(*span)}.isdisjoint(self.changed)
        ]
        rows = self.clean.tokens.repeat(len(differ), 1)
        for row, number in enumerate(differ):
            place = slice(*self.spans[number])
            rows[row, place] = self.other.tokens[0, place]
        found[differ] = self.measure_texts(rows)
        return found

    def measure_texts(self, texts: Int[Tensor, "row pos"]) -> Float[Tensor, " row"]:
        """Read what other texts change, each of which is run once."""
        asked = [*map(tuple, texts.tolist())]
        new = [text for text in dict.fromkeys(asked) if text not in self._known_texts]
        tokens = self.clean.tokens.new_tensor(new).reshape(-1, self.n_pos)
        found = self.measure([()] * len(new), tokens)
        self._known_texts |= zip(new, found.tolist(), strict=True)
        return torch.tensor([self._known_texts[text] for text in asked], dtype=torch.float64)

    def list_replacements(self) -> list[dict[tuple[int, ...], float]]:
        """List what was put in the place of each span alone, and what that changed."""
        clean = self.clean.tokens[0].tolist()
        found: list[dict[tuple[int, ...], float]] = [{} for _ in self.spans]
        for text, effect in self._known_texts.items():
            places = [at for at in range(len(clean)) if text[at] != clean[at]]
            for number, (start, stop) in enumerate(self.spans):
                if places and start <= places[0] and places[-1] < stop:
                    found[number][text[start:stop]] = effect
        return found

    @torch.no_grad()
    def score_texts(
        self, texts: Int[Tensor, "row pos"]
    ) -> tuple[Float[Tensor, " row"], Float[Tensor, " row"], Float[Tensor, " row"]]:
        """Read what other texts change, and how probable the model finds them and `against`.

        Args:
            texts: for a causal model that predicts the next token, and a difference of logits at
                the last position.

        Returns:
            The change of the readout; that of the sum of the log-probabilities of all tokens but
            the first; and the log-probability of `against` behind the text, 0 where all logits are
            that.
        """
        starts = [(0, self._first_position(text, ())) for text in texts]
        found = torch.zeros(3, len(texts), dtype=torch.float64)
        order = sorted(range(len(texts)), key=lambda row: starts[row])
        for these in self._batches(order, starts):
            _, first = _find_earliest(starts[row] for row in these)
            run = partial(self._score, texts[these], first)
            numbers = self.measure_once(["chances", texts[these], first], run)
            found[:, these] = numbers.view(3, -1)
        self._known_texts |= zip(map(tuple, texts.tolist()), found[0].tolist(), strict=True)
        return found[0], found[1], found[2]

    def _score(self, texts: Int[Tensor, "row pos"], first: int) -> Float[Tensor, " number"]:
        """Run texts from a position on; what :meth:`score_texts` gives, one after the other."""
        output = call(self.model, self._continue(texts, first), output=True).output
        self.forwards += len(texts) * (1 - first / self.n_pos)
        value = self._read_at(self.end - first).read(output).detach().double().cpu()
        # where nothing ran, logits are those of the clean text; the last of them predicts the first
        # token that did
        before = self.clean.logits[None, :first].expand(len(texts), -1, -1)
        rows = torch.cat([before, logits_of(output)], dim=1)[:, max(first - 1, 0) :]
        gains = []
        for logits, ids in (
            (rows, texts),
            (self.clean.logits[None, max(first - 1, 0) :], self.clean.tokens),
        ):
            of_next = logits[:, :-1].gather(2, ids[:, max(first, 1) :, None])[..., 0]
            gains.append((of_next - logits[:, :-1].logsumexp(-1)).sum(1).double().cpu())
        against = getattr(self.readout, "against", None)
        chance = torch.zeros_like(value)
        if against is not None:
            chance = LogProbability(against).read(rows).double().cpu()
        return torch.cat([value - self.clean.value, gains[0] - gains[1], chance])

    @torch.enable_grad()
    def differentiate(self, at: float) -> dict[str, Tensor]:
        """Differentiate the readout by what heads and MLPs write; `known_gradients` keeps it.

        Args:
            at: the point between the embeddings of the two texts where this is done: 0 is the clean
                text, 1 the other.

        Returns:
            The gradient by hook point, [1, pos, ...].
        """
        clean, other = (run.shown["hook_embed"] for run in (self.clean, self.other))
        embedded = (clean + at * (other - clean)).detach().requires_grad_()
        shown: dict[str, Tensor] = {}
        written = (".hook_z", ".hook_mixer_out", ".hook_mlp_out")
        points = [name for name in self._points if name.endswith(written)]
        # a copy goes on: a model may write to it in place, which a leaf does not allow
        edits: list[NamedHook] = [("hook_embed", lambda activation, hook: embedded.clone())]
        edits += [(name, keep_shown(name, shown)) for name in points]
        texts = self.batch(self.clean.tokens)
        output = call(self.model, texts, edit=edits, output=True, keep_graph=True).output
        value = self.readout.read(output).sum()
        self.forwards += _GRADIENT
        found = torch.autograd.grad(value, [shown[name] for name in points], allow_unused=True)
        self.known_gradients[at] = {
            name: torch.zeros_like(shown[name]) if gradient is None else gradient
            for name, gradient in zip(points, found, strict=True)
        }
        return self.known_gradients[at]

    # Runs

    @torch.enable_grad()
    def _find_ends(self) -> list[int]:
        """Find the positions of which the readout reads the last states.

        A classifier has a place of its own, such as that of [CLS]; an embedding may be of all.
        """
        if hasattr(self.readout, "position") and self.clean.logits.ndim == 2:
            return [int(self.readout.position) % self.n_pos]
        point, shown = self.state(self.n_layers), dict[str, Tensor]()
        edit = [(point, keep_shown(point, shown))]
        texts = self.batch(self.clean.tokens)
        output = call(self.model, texts, edit=edit, output=True, keep_graph=True).output
        self.forwards += _GRADIENT
        value = self.readout.read(output).sum()
        (gradient,) = torch.autograd.grad(value, [shown[point]], allow_unused=True)
        if gradient is None:
            return []
        return gradient[0].flatten(1).any(dim=1).nonzero().flatten().tolist()

    def _find_prefix(self) -> Prefix | None:
        """Find the keys and values of the text, where passes that begin behind some give the same.

        They are those of a text with another last token, which a causal model does not see. Passes
        are compared that begin at the end and in the middle: positions may be counted otherwise
        behind padding, and a window may hide the last token from the middle.
        """
        tokens = self.clean.tokens.clone()
        others = tokens[tokens != tokens[0, -1]]
        # readouts of others may read beside their position, and what stands beside the ids would
        # have to begin there, too
        is_known = isinstance(self.readout, (LogitDifference, LogProbability))
        if not is_causal(self.model) or not is_known or not len(others) or self._columns:
            return None
        tokens[0, -1] = others[-1]
        prefix = self._prefix = Prefix.find(self.model, tokens)
        self.forwards += 1
        if prefix is None:
            return None
        last = self.clean.shown[self.state(self.n_layers)]
        for first in sorted({self.end, self.end // 2} - {0}):
            try:
                run = partial(self._read, self.clean.tokens, [()], 0, first)
                again = self.measure_once(["prefix", self.clean.tokens, first], run)
            except (RuntimeError, TypeError, AttributeError, LookupError, ValueError):
                return None  # no pass of the model begins behind others
            if abs(float(again) - self.clean.value) > self._bound_rounding(last.dtype):
                return None
        return prefix

    def _check_end(self) -> None:
        """Find whether the readout follows from the last state at one position alone."""
        if not is_dataclass(self.readout) or not hasattr(self.readout, "position"):
            return  # a readout of the user's may not be made anew
        if len(self.ends) > 1:
            return  # such as of places, among which one alone is no choice
        if not self._starts.can_start(self.n_layers):
            return
        last = self.clean.shown[self.state(self.n_layers)][0, [self.end]]
        self._reads_one = True
        apart = float(self.read_states(last)[0]) - self.clean.value
        self._reads_one = abs(apart) <= self._bound_rounding(last.dtype)

    def _bound_rounding(self, dtype: torch.dtype) -> float:
        """Bound how far a readout comes from itself in passes that run otherwise."""
        rounding = 8 * torch.finfo(dtype).eps
        return max(_SAME, rounding) * max(1.0, abs(self.clean.value))

    def _check_starts(self) -> None:
        """Let all passes run whole where one from the last layer on gives something else."""
        if self._starts.blocks:
            point = self.z(self.n_layers - 1)
            same = self.clean.shown[point][0]
            again = float(self.measure([[(point, (), same)]])[0])
            if not abs(again) <= self._bound_rounding(same.dtype):
                self._starts.blocks = []

    @contextmanager
    def start_at(self, layer: int, position: int = 0) -> Iterator[float]:
        """Run passes of this thread from a layer on: blocks before it give the clean states.

        Args:
            layer: the first block that runs; their number for none.
            position: the first one that runs.

        Yields:
            The share of the blocks and positions that runs.
        """
        if not self._starts.can_start(layer):
            layer = 0
        states = [self.clean.shown[self.state(n + 1)][:, position:] for n in range(layer)]
        with self._starts.start_at(layer, states):
            yield (1 - layer / self.n_layers) * (1 - position / self.n_pos)

    def _list_points(self) -> list[str]:
        known = self._known
        needed = ["hook_embed", *(self.state(layer) for layer in range(self.n_layers + 1))]
        needed += [self.z(layer) for layer in range(self.n_layers)]
        missing = [name for name in needed if name not in known]
        if missing:
            raise InfoFlowError(
                f"{type(self.model).__name__} does not show {', '.join(missing[:3])}: expected a "
                "model whose embedding, states and heads can be seen; open_model(model).lacks() "
                "gives the reason for each"
            )
        mlps = (self.mlp(layer) for layer in range(self.n_layers))
        patterns = (f"blocks.{layer}.attn.hook_pattern" for layer in range(self.n_layers))
        return needed + [name for name in (*mlps, *patterns) if name in known]

    @torch.no_grad()
    def _run(self, tokens: Int[Tensor, "1 pos"]) -> Run:
        caught = call(self.model, self.batch(tokens), self._points, output=True)
        self.forwards += 1
        value = float(self.readout.read(caught.output)[0].double())
        output = getattr(caught.output, "logits", caught.output)
        logits = output if isinstance(output, Tensor) else next(iter(output.values()))
        return Run(tokens, value, logits[0].detach(), caught.activations)

    def _count_heads(self, layer: int) -> int:
        z = self.clean.shown[self.z(layer)]
        if z.ndim == 4:
            return z.shape[2]
        pattern = self.clean.shown.get(f"blocks.{layer}.attn.hook_pattern")
        return 1 if pattern is None else pattern.shape[1]


def make_edits(
    rows: Iterable[Sequence[Change]], before: Mapping[str, Tensor] | None = None
) -> list[NamedHook]:
    """Make the hooks that write the changes of each row.

    Args:
        rows: of each row of the batch, the changes.
        before: by hook point, the activations of the positions before the first one that runs; None
            where all positions run.
    """
    by_point: dict[str, list[tuple[Any, Any, Tensor]]] = {}
    for row, changes in enumerate(rows):
        for point, place, value in changes:
            by_point.setdefault(point, []).append((row, place, value))
    return [
        (point, _make_writer(these, None if before is None else before[point]))
        for point, these in by_point.items()
    ]


def _make_writer(
    changes: Iterable[tuple[Any, Any, Tensor]], before: Tensor | None = None
) -> HookFunction:
    """Make a hook that writes values into rows, which begin behind some positions."""

    def hook_fn(activation: Tensor, hook: Any) -> Tensor:
        n = 0 if before is None else len(before)
        if before is not None and n:
            activation = torch.cat([before.expand(len(activation), *before.shape), activation], 1)
        activation = activation.clone()
        for row, place, value in changes:
            activation[row][place] = value.to(activation.dtype)
        return activation[:, n:] if n else activation

    return hook_fn


def _find_earliest(starts: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Find the first layer and the first position of any row."""
    layers, positions = zip(*starts, strict=True)
    return min(layers), min(positions)


def keep_shown(name: str, shown: dict[str, Tensor]) -> HookFunction:
    """Make a hook that keeps an activation, by name, on which the rest depends."""

    def hook_fn(activation: Tensor, hook: Any) -> Tensor:
        shown[name] = activation.clone()  # on which the rest depends, also where this is a view
        if torch.is_grad_enabled() and not activation.requires_grad:
            shown[name].requires_grad_()  # all weights are frozen, as beneath an adapter
        return shown[name]

    return hook_fn
