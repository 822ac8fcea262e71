"""Paths from the words that differ to the answer: found by estimates, kept by what they carry.

A path runs from a writer (the embedding of a changed token, or a head at a position) to one input
of a reader (the query, a key or a value of a head at a position) or to the answer. MLPs belong to
the way (Wang et al. 2023 stop at attention alone). A circuit is the smallest set of paths found
that carries the target share of the difference between two texts when all else has the other text's
values, and without which as much is lost.
"""

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from infoflow_lens.hooks.answer.question import Change, Question
from infoflow_lens.hooks.answer.steps import UnitEffects
from infoflow_lens.hooks.answer.streams import LayerRun, Streams

N_NODES = 60  # heads at positions, between which paths are scored
TARGET = 0.7  # of the difference, that a circuit keeps, and that is lost without it
_FIRST, _MOST = 8, 120  # paths that are tried first, and at most
_PRUNED, _ROUNDS = 40, 12  # a circuit of more paths is not pruned; rounds of pruning
_RANDOM = 10  # random circuits of as many paths


class Node(NamedTuple):
    """A head at a position; head -1 is the embedding of a token, before layer 0."""

    layer: int
    head: int
    position: int

    @property
    def is_embedding(self) -> bool:
        """Say whether it is the embedding of a token."""
        return self.head < 0


# a position, and the writers whose values it carries
Stream: TypeAlias = "tuple[int, frozenset[Node]]"


class Path(NamedTuple):
    """What a writer brings to one input of a reader.

    Attributes:
        writer: who writes.
        reader: whose input it is; None for the answer.
        kind: "query", "key" or "value" of the reader; "answer".
    """

    writer: Node
    reader: Node | None
    kind: str


def _order(path: Path) -> tuple[Any, ...]:
    """Order paths, those to the answer first among those of a writer."""
    return path.writer, path.reader or (), path.kind


@dataclass
class Circuit:
    """Paths that carry an answer.

    Attributes:
        paths: in the order of their worth.
        worth: of every path that was scored, estimated: positive for what makes the two texts
            differ as they do.
        kept: share of the difference when all else has the other text's values.
        lost: share that is lost when these alone have the other text's values.
        cost: by path, the share that is lost when it is taken out of the circuit.
        pruned: paths that were found and taken out, as the circuit does without them.
        effect: by path, measured: the change of the readout when it alone is cut in the clean text.
        random: shares that as many random connected paths keep.
        is_whole: whether it reaches the target.
    """

    paths: list[Path]
    worth: dict[Path, float]
    kept: float
    lost: float
    cost: dict[Path, float] = field(default_factory=dict)
    pruned: list[Path] = field(default_factory=list)
    effect: dict[Path, float] = field(default_factory=dict)
    random: list[float] = field(default_factory=list)
    is_whole: bool = True


def find_circuit(
    question: Question,
    units: UnitEffects,
    *,
    prune: bool = True,
    seed: int = 0,
) -> Circuit:
    """Find the paths that decide between the two texts.

    Raises:
        InfoFlowError: for a model whose blocks cannot be run at single positions.
    """
    streams = Streams(question)
    nodes = _strongest(units)
    gradients = _mean_gradients(question)
    down = score_paths(streams, nodes, gradients, streams.clean, streams.other)
    up = score_paths(streams, nodes, gradients, streams.other, streams.clean)
    sign = math.copysign(1, question.gap)
    # the mean over both texts, as what a path does depends on the rest
    worth = {path: (up[path] - down[path]) / 2 * sign for path in down}
    rank = sorted((p for p in worth if worth[p] > 0), key=lambda p: -worth[p])

    def measure(sets: Sequence[set[Path]]) -> list[tuple[float, float]]:
        """Measure the share that each set keeps by itself, and that is lost where it is cut."""
        question.advance(0)
        jobs = [(paths, swap) for paths in sets for swap in (False, True)]
        shares = share(streams, jobs)
        return list(zip(shares[::2], shares[1::2], strict=True))

    n, found, both = _FIRST, set[Path](), (0.0, 0.0)
    while True:
        found = connect(rank[:n])
        both = measure([found])[0]
        if min(both) >= TARGET or n > _MOST or n >= len(rank):
            break
        n = max(n + 2, int(1.3 * n))
    first, cost = set(found), dict[Path, float]()
    rounds = _ROUNDS if prune and min(both) >= TARGET and len(found) <= _PRUNED else 0
    for _ in range(rounds):  # a tenth of the paths at once, else the one that matters least
        without = {path: connect(found - {path}) for path in found}
        measured = dict(zip(without, measure([*without.values()]), strict=True))
        left = {path: min(each) for path, each in measured.items()}
        cost = {path: min(both) - left[path] for path in found}
        fine = [path for path in found if left[path] >= TARGET]
        # a path with which others lose their way makes the circuit smaller: each counts .02
        fine.sort(key=lambda p: (-(left[p] + 0.02 * (len(found) - len(without[p]))), _order(p)))
        if not fine or len(found) == 1:
            break
        fewer = connect(found - set(fine[: max(1, len(found) // 10)]))
        # a tenth of fewer than 20 is one path, whose removal was measured above
        reached = measure([fewer])[0] if len(found) >= 20 else measured[fine[0]]
        if min(reached) >= TARGET:
            found, both = fewer, reached
        else:
            found, both = without[fine[0]], measured[fine[0]]
    paths = sorted(found, key=lambda p: -worth[p])
    circuit = Circuit(
        paths,
        worth,
        *both,
        {path: cost[path] for path in paths if path in cost},
        sorted(first - found, key=lambda p: -worth[p]),
        is_whole=min(both) >= TARGET,
    )
    circuit.random = _random_shares(streams, worth, len(paths), seed)
    circuit.effect = cut_paths(streams, paths)
    return circuit


def _strongest(units: UnitEffects) -> list[Node]:
    """Find the heads at positions with the largest products of gradient and difference."""
    sized = [
        (abs(float(value)), Node(layer, head, position))
        for layer, by_place in enumerate(units.by_place)
        for position, row in enumerate(by_place.tolist())
        for head, value in enumerate(row)
    ]
    sized.sort(key=lambda pair: (-pair[0], pair[1]))
    return sorted(node for _, node in sized[:N_NODES])


def _mean_gradients(question: Question) -> list[Tensor]:
    """Average the derivatives of the readout by what heads write; by layer [pos, head, d_head]."""
    found = []
    for layer in range(question.n_layers):
        parts = [g[question.z(layer)] for g in question.known_gradients.values()]
        mean = torch.stack(parts).mean(dim=0)[0]
        found.append(mean.reshape(len(mean), question.n_heads[layer], -1))
    return found


@torch.no_grad()
def score_paths(
    streams: Streams,
    nodes: Sequence[Node],
    gradients: Sequence[Tensor],
    base: Sequence[LayerRun],
    other: Sequence[LayerRun],
) -> dict[Path, float]:
    """Estimate what each path does in a run, when its writer has the other text's value.

    The change is followed through MLPs on the writer's own position; the reader's attention is
    computed anew; what follows it is its gradient.
    """
    question, end = streams.question, streams.end
    writers = [Node(-1, -1, position) for position in question.changed] + sorted(nodes)
    behind = max((node.layer for node in nodes), default=0)
    # a writer at another position reaches the answer by the heads that read it alone
    until = {
        _alone(node): question.n_layers if node.position == end else behind for node in writers
    }
    scores: dict[Path, float] = {}
    for layer, followed, found in _follow(streams, until, base, other):
        live = [writer for _, (writer,) in followed]
        if layer == question.n_layers:
            values = streams.question.read_states(found["out"]) - _value_of(streams, base)
            answers = [Path(writer, None, "answer") for writer in live]
            scores |= zip(answers, values.tolist(), strict=True)
        for reader in (node for node in nodes if node.layer == layer):
            head, query = reader.head, reader.position
            before, gradient = base[layer].z[query, head], gradients[layer][query, head]
            for row, writer in enumerate(live):
                at = writer.position
                is_open = bool(base[layer].scores[head, query, at] > -torch.inf)
                for kind in ["query"] * (at == query) + ["key", "value"] * is_open:
                    z = streams.attend(base[layer], reader, found, {(kind, at): row})
                    scores[Path(writer, reader, kind)] = float((z - before) @ gradient)
    return scores


def _follow(
    streams: Streams,
    until: Mapping[Stream, int],
    base: Sequence[LayerRun],
    other: Sequence[LayerRun],
) -> Iterator[tuple[int, list[Stream], dict[str, Tensor]]]:
    """Follow what writers change on their own positions when they have the other run's values.

    Args:
        streams: of the question.
        until: by stream, the last layer that is asked for; their number for the end.
        base: the run in which all else stays.
        other: the run from which the writers' values come.

    Yields:
        A layer, the streams whose change enters it, and what the block makes of their states, a row
        each; behind the last layer these states themselves ("out").
    """
    states = _enter(until, other)
    for layer, run in enumerate(base):
        live = [stream for stream in states if until[stream] >= layer]
        own = [stream for stream in until if any(w.layer == layer for w in stream[1])]
        # live ones first, so that the rows of what is yielded begin with theirs, in their order
        rows = [*dict.fromkeys(live + own)]
        if not rows:
            continue
        places = torch.tensor([position for position, _ in rows])
        # a stream that begins in this layer enters it as in the base run
        entering = [states.get(stream, run.state[stream[0]]) for stream in rows]
        z = run.z[places].clone()
        for row, (position, writers) in enumerate(rows):
            for writer in writers:
                if writer.layer == layer:
                    z[row, writer.head] = other[layer].z[position, writer.head]
        found = streams.step(layer, torch.stack(entering), places, z)
        yield layer, live, found
        states |= zip(rows, found["out"], strict=True)
    n_layers = len(base)
    live = [stream for stream in states if until[stream] == n_layers]
    if live:
        yield n_layers, live, {"out": torch.stack([states[stream] for stream in live])}


def _alone(writer: Node) -> Stream:
    """Make the stream of one writer."""
    return writer.position, frozenset([writer])


def _find_ends(streams: Streams, reads: Iterable[tuple[Node | None, Stream]]) -> dict[Stream, int]:
    """Find the layer of the last reader of each stream; the number of layers for the answer."""
    until: dict[Stream, int] = {}
    for reader, stream in reads:
        last = streams.question.n_layers if reader is None else reader.layer
        until[stream] = max(until.get(stream, 0), last)
    return until


def _enter(streams: Iterable[Stream], run: Sequence[LayerRun]) -> dict[Stream, Tensor]:
    """Find the states of the streams that begin before the first layer, with an embedding."""
    return {
        (position, writers): run[0].state[position]
        for position, writers in streams
        if any(writer.is_embedding for writer in writers)
    }


def _value_of(streams: Streams, base: Sequence[LayerRun]) -> float:
    question = streams.question
    return question.clean.value if base is streams.clean else question.other.value


def connect(paths: Iterable[Path]) -> set[Path]:
    """Leave out paths whose reader leads nowhere, or whose writer is reached by none."""
    left = set(paths)
    while True:
        writers, readers = {p.writer for p in left}, {p.reader for p in left}
        kept = {
            p
            for p in left
            if (p.reader is None or p.reader in writers)
            and (p.writer.is_embedding or p.writer in readers)
        }
        if kept == left:
            return kept
        left = kept


def _readers_of(paths: Iterable[Path]) -> dict[Node | None, dict[tuple[str, int], Stream]]:
    """Find the stream that each input of each reader reads, by reader, input and position."""
    inputs: dict[tuple[Node | None, str, int], set[Node]] = {}
    for path in paths:
        key = (path.reader, path.kind, path.writer.position)
        inputs.setdefault(key, set()).add(path.writer)
    readers: dict[Node | None, dict[tuple[str, int], Stream]] = {}
    for (reader, kind, position), writers in inputs.items():
        readers.setdefault(reader, {})[kind, position] = (position, frozenset(writers))
    return readers


@dataclass
class _Job:
    """A set of paths that is measured: what runs live, and what its readers read.

    Attributes:
        frozen, live: the run of all else, and the one from which the paths bring values.
        readers: by reader, input and position, the stream that it reads: a position and writers.
        until: by stream, the layer of its last reader.
        states: of the streams that have begun, before the layer that comes next.
    """

    frozen: Sequence[LayerRun]
    live: Sequence[LayerRun]
    readers: dict[Node | None, dict[tuple[str, int], Stream]]
    until: dict[Stream, int]
    states: dict[Stream, Tensor]

    @classmethod
    def begin(cls, streams: Streams, paths: Iterable[Path], swap: bool) -> "_Job":
        """Begin with the embeddings among the writers."""
        frozen, live = (streams.clean, streams.other) if swap else (streams.other, streams.clean)
        readers = _readers_of(paths)
        until = _find_ends(streams, ((r, s) for r, read in readers.items() for s in read.values()))
        return cls(frozen, live, readers, until, _enter(until, live))

    def find_readers(self, layer: int) -> dict[Node, dict[tuple[str, int], Stream]]:
        """Find the readers of a layer that read a stream which has begun."""
        return {
            reader: read
            for reader, read in self.readers.items()
            if reader is not None
            and reader.layer == layer
            and any(stream in self.states for stream in read.values())
        }


@torch.no_grad()
def share(streams: Streams, jobs: Sequence[tuple[Iterable[Path], bool]]) -> list[float]:
    """Measure which part of the difference paths carry when all else has the other text's values.

    Each input of each reader has a stream of its own: a copy of the state at its position, which
    differs from the frozen run by what the writers of its paths bring. All sets go through the
    model together.

    Args:
        streams: of the question.
        jobs: connected sets, each with whether to measure what is lost when they alone have the
            other text's values.
    """
    in_order = [(tuple(sorted(paths, key=_order)), swap) for paths, swap in jobs]
    each = [*dict.fromkeys(in_order)]  # once
    asked = ["shares", streams.question.other.tokens, each]
    found = streams.question.measure_once(asked, lambda: _share(streams, each)).tolist()
    by_job = dict(zip(each, found, strict=True))
    return [by_job[job] for job in in_order]


def _share(streams: Streams, jobs: Sequence[tuple[Sequence[Path], bool]]) -> Float[Tensor, " job"]:
    running = [_Job.begin(streams, paths, swap) for paths, swap in jobs]
    for layer in range(streams.question.n_layers):
        read = [
            (job, stream)
            for job in running
            for stream in dict.fromkeys(
                s for r in job.find_readers(layer).values() for s in r.values()
            )
            if stream in job.states
        ]
        # once for what these streams give as queries, keys and values of the readers
        shown = _step(streams, layer, [(job, stream, None) for job, stream in read])
        rows = {(id(job), stream): row for row, (job, stream) in enumerate(read)}
        moved: list[tuple[_Job, Stream, dict[Node, Tensor] | None]] = []
        for job in running:
            z_of: dict[Node, Tensor] = {}
            for reader, inputs in job.find_readers(layer).items():
                begun = {at: rows[id(job), s] for at, s in inputs.items() if s in job.states}
                z_of[reader] = streams.attend(job.frozen[layer], reader, shown, begun)
            for stream, last in job.until.items():
                mine = {node: z_of[node] for node in stream[1] if node in z_of}
                # a stream begins with its first writer, and goes on up to its last reader
                if last > layer and (mine or stream in job.states):
                    moved.append((job, stream, mine))
        # and again with what the readers now write, for the states that leave the block
        left = _step(streams, layer, moved).get("out", ())
        for (job, stream, _), state in zip(moved, left, strict=True):
            job.states[stream] = state
    found = torch.zeros(len(running), dtype=torch.float64)
    ends = []
    for number, job in enumerate(running):
        end = job.readers.get(None, {}).get(("answer", streams.end))
        if end is not None and end in job.states:
            ends.append((number, job.states[end]))
    if ends:
        values = streams.question.read_states(torch.stack([state for _, state in ends]))
        for (number, _), value in zip(ends, values.tolist(), strict=True):
            job = running[number]
            before, after = _value_of(streams, job.frozen), _value_of(streams, job.live)
            found[number] = (value - before) / (after - before)
    return found


def _step(
    streams: Streams,
    layer: int,
    rows: Sequence[tuple[_Job, Stream, dict[Node, Tensor] | None]],
) -> dict[str, Tensor]:
    """Run a block on streams, with what their writers now give."""
    if not rows:
        return {}
    entering, heads = [], []
    for job, stream, given in rows:
        run, position = job.frozen[layer], stream[0]
        entering.append(job.states.get(stream, run.state[position]))
        z = run.z[position]
        if given:
            z = z.clone()
            for node, value in given.items():
                z[node.head] = value
        heads.append(z)
    places = torch.tensor([stream[0] for _, stream, _ in rows])
    return streams.step(layer, torch.stack(entering), places, torch.stack(heads))


@torch.no_grad()
def cut_paths(streams: Streams, paths: Sequence[Path]) -> dict[Path, float]:
    """Measure what cutting each path alone does to the readout of the clean text.

    The reader's input takes what it would be with the other text's value of the writer; all that
    follows the reader goes free.
    """
    asked = ["cuts", streams.question.other.tokens, paths]
    found = streams.question.measure_once(asked, lambda: _cut_paths(streams, paths))
    return dict(zip(paths, found.tolist(), strict=True))


def _cut_paths(streams: Streams, paths: Sequence[Path]) -> Float[Tensor, " path"]:
    question, base = streams.question, streams.clean
    until = _find_ends(streams, ((path.reader, _alone(path.writer)) for path in paths))
    changes, effect = dict[Path, Tensor](), dict[Path, float]()
    for layer, followed, found in _follow(streams, until, base, streams.other):
        live = [writer for _, (writer,) in followed]
        if layer == question.n_layers:
            values = question.read_states(found["out"]) - question.clean.value
            effect |= zip([Path(w, None, "answer") for w in live], values.tolist(), strict=True)
        for path in paths:
            if path.reader is not None and path.reader.layer == layer and path.writer in live:
                given = {(path.kind, path.writer.position): live.index(path.writer)}
                changes[path] = streams.attend(base[layer], path.reader, found, given)
    rows = []
    for path, z in changes.items():
        assert path.reader is not None
        layer, head, position = path.reader
        _, of_head = question.find_head(layer, head)
        rows.append([(question.z(layer), (position, of_head), z)])
    effect |= zip(changes, question.measure(rows).tolist(), strict=True)
    return torch.tensor([effect[path] for path in paths], dtype=torch.float64)


@torch.no_grad()
def cut_together(streams: Streams, paths: Sequence[Path]) -> float:
    """Measure what cutting several paths at once does to the readout of the clean text.

    From the first reader to the last, inputs take what they would be with the other text's values
    of their writers, in the run in which earlier ones are cut; all behind goes free.
    """
    question, base = streams.question, streams.clean
    readers, edits = _readers_of(paths), list[Change]()
    direct = readers.pop(None, {})
    for layer in sorted({reader.layer for reader in readers if reader is not None}):
        here = {r: read for r, read in readers.items() if r is not None and r.layer == layer}
        until = {stream: layer for read in here.values() for stream in read.values()}
        # the last layer that is followed is the one of these readers
        *_, (_, live, found) = _follow(streams, until, base, streams.other)
        for reader, read in here.items():
            given = {at: live.index(stream) for at, stream in read.items()}
            z = streams.attend(base[layer], reader, found, given)
            _, of_head = question.find_head(layer, reader.head)
            edits.append((question.z(layer), (reader.position, of_head), z))
        base = streams.run(question.clean.tokens, edits)
    if not direct:
        return float(question.measure([edits])[0])
    (stream,) = direct.values()
    *_, (_, _, found) = _follow(streams, {stream: question.n_layers}, base, streams.other)
    return float(question.read_states(found["out"])[0]) - question.clean.value


def _random_shares(
    streams: Streams, worth: dict[Path, float], n_paths: int, seed: int
) -> list[float]:
    """Measure as many random paths, by which what differs reaches the answer."""
    draw, into = random.Random(seed), dict[Node | None, list[Path]]()
    for path in worth:
        into.setdefault(path.reader, []).append(path)
    # how many paths bring what differs to a writer, at least; readers stand behind their writers
    least: dict[Node, int] = {path.writer: 0 for path in worth if path.writer.is_embedding}
    for reader in sorted(reader for reader in into if reader is not None):
        steps = [least[path.writer] + 1 for path in into[reader] if path.writer in least]
        least |= {reader: min(steps)} if steps else {}
    sets = []
    for _ in range(_RANDOM):
        some: set[Path] = set()
        # bounded, as draws may repeat, or end at readers that nothing more leads to
        for _ in range(20 * n_paths):
            if len(some) >= n_paths:
                break
            some |= _draw_route(draw, into, least, some, n_paths - len(some))
        sets.append(some)
    return share(streams, [(paths, False) for paths in sets])


def _draw_route(
    draw: random.Random,
    into: Mapping[Node | None, Sequence[Path]],
    least: Mapping[Node, int],
    some: set[Path],
    room: int,
) -> set[Path]:
    """Draw a route from what differs, or from a reader of some paths, to the answer or to these.

    Args:
        draw: draws.
        into: all paths, by reader.
        least: by writer, how many paths lead to it at least; writers that none reach are left out.
        some: paths that what differs reaches the answer by.
        room: how many paths it may have.

    Returns:
        Its paths; none where no route has so few.
    """
    reached = {path.reader for path in some}
    reader: Node | None = draw.choice([None, *sorted(node for node in reached if node is not None)])
    route: set[Path] = set()
    while True:
        left = room - len(route)
        # what can still be brought here by the paths that are left
        near = [
            path
            for path in into.get(reader, ())
            if path not in some
            and (0 if path.writer in reached else least.get(path.writer, left)) < left
        ]
        if not near:
            return set()
        path = draw.choice(near)
        route.add(path)
        if path.writer.is_embedding or path.writer in reached:
            return route
        reader = path.writer
