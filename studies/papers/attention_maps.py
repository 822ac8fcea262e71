"""What the heads of trained two-layer models do (Chen & Zou 2024, Sec. 6.2, Fig. 3)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.lazy import pd
from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.hooks import (
    AttendedProbe,
    PositionsProbe,
    measure_mechanisms,
    run_probes,
)
from infoflow_lens.hooks.model.call import call
from infoflow_lens.models.host import TokenTransformer
from infoflow_lens.studies.claims import Claim, Numbers
from infoflow_lens.studies.constructions import build_construction
from infoflow_lens.studies.papers import token_models as tokens
from infoflow_lens.studies.papers.rows import numbers_of
from infoflow_lens.studies.plots import FigureSpec, HeatMap, Panel
from infoflow_lens.studies.study import Row, Settings, Statement
from infoflow_lens.studies.tables import Column, Part, TableSpec, Words, groups, spread
from infoflow_lens.tasks.questions import InContextQA
from infoflow_lens.tasks.templates import TemplateMatching
from infoflow_lens.tasks.tokens import TokenTask
from infoflow_lens.training import evaluate_labels, restored

_QA, _TEMPLATES = "in_context_qa", "template_matching"
_DRAWS = 0.1  # the least share of a row's largest weight that moves a value [chosen]
_OFTEN = 0.9
_N_MECHANISMS = 256  # sequences
_OPERATIONS: Mapping[str, str] = {
    "copying": "layer 1: some position of the context holds the asked pair, the last the query",
    "matching": "layer 2: the last position attends most, in the context, to such a position",
    "parsing": "layer 1: of the other words, each repeated word attends most to one equal to it",
    "strict parsing": "layer 1: each word draws from the words equal to it, and from no others",
}
_JUDGED = ("copying", "matching", "parsing")
_SIZES: Mapping[str, Mapping[str, Mapping[str, int]]] = {
    "smoke": {
        _QA: {"n_questions": 6, "n_answers": 6, "n_pairs": 2},
        _TEMPLATES: {"n_words": 10, "length": 3},
    },
    "quick": {  # two pairs and three words, as in the paper's figures
        _QA: {"n_questions": 10, "n_answers": 10, "n_pairs": 2},
        _TEMPLATES: {"n_words": 100, "length": 3},
    },
    "full": {
        _QA: {"n_questions": 100, "n_answers": 100, "n_pairs": 2},
        _TEMPLATES: {"n_words": 210, "length": 3},
    },
}


@dataclass(frozen=True)
class Operations:
    """In which sequences operations happen.

    Attributes:
        happens: by name, bool [sample], over the sequences that the operation is about.
        chance: by name, how often it would happen with keys drawn at random.
    """

    happens: Mapping[str, Bool[Tensor, " sample"]]
    chance: Mapping[str, float]


class AttentionMaps(tokens.TokenStudy):
    """Copying, matching and parsing, identified by probes in every test sequence.

    The paper shows the maps of single sequences. Here `AttendedProbe` gives the keys that each
    position of layer 1 draws from (at least .1 of the row's largest weight [chosen]), and a
    position holds, after it, its own token and theirs. `PositionsProbe` gives the position of the
    context with the largest score of the last position in layer 2; its weight must be above 0.

    - copying: some position of the context holds the asked question and its answer, and the last
      position holds the query;
    - matching: the last position attends most to such a position;
    - parsing, in sequences in which a word is repeated: of all other words, every such word attends
      most to one that is equal, with a weight above 0;
    - strict parsing, which is not judged: in the whole sequence the words that each word draws from
      are exactly those equal to it.

    Each is measured in the trained model, in the same model before training, in the construction
    of the theorem, and with the keys of each row of layer 1 (for matching, the position that is
    attended to) drawn at random. The paper's start scores in layer 1 as the construction does, so
    copying and parsing are there before training; random starts, which are not judged, show whether
    training finds them. Two rows more say what the answer owes to each head: its mechanism by
    `measure_mechanisms`, and the divergence when the head attends to its own position alone.
    """

    name: ClassVar[str] = "attention_maps"
    title: ClassVar[str] = "Do trained models copy, match and parse as the constructions do?"
    finding: ClassVar[str] = (
        "where models learn it from the paper's start, it happens in {1} of the sequences"
    )
    source: ClassVar[str] = "Chen & Zou 2024, Sec. 6.2, Fig. 3"
    statement: ClassVar[Statement] = Statement.read("attention_maps")
    presets: ClassVar[Mapping[str, int]] = {"smoke": 1, "quick": 5, "full": 5}

    def cases(self, preset: str) -> Sequence[Settings]:
        """Vary the start and the task."""
        starts: Mapping[str, Mapping[str, Any]] = {tokens.PAPER: {}, tokens.RANDOM: tokens.ADAMW}
        return [
            {"start": start, "task": task, "layers": 2, **sizes, **_training(preset, task), **more}
            for start, more in starts.items()
            for task, sizes in _SIZES[preset].items()
        ]

    def measure(self, settings: Settings, seed: int, device: str) -> list[Row]:
        """Return rows for operations and models, for heads, and for cells of two mean maps."""
        run = tokens.train_run(self.name, settings, seed, device)
        about: Row = {"test_accuracy": evaluate_labels(run.model, (run.x, run.y)).accuracy}
        models: dict[str, TokenTransformer] = {
            "trained": run.model,
            "initial": restored(run.model, run.training.initial_state),
        }
        if settings["start"] == tokens.PAPER:
            models["construction"] = _construction(run.task).to(device, print_details=False)
        rows: list[Row] = []
        # the same operations in the model before and after training, and in the paper's
        # construction
        for name, model in models.items():
            found = find_operations(model, run.task, run.x, derive_seed(self.name, "keys", seed))
            for operation, happens in found.happens.items():
                rows.append(
                    {
                        "kind": "operation",
                        "operation": operation,
                        "model": name,
                        "share": float(happens.double().mean()),
                        "chance": found.chance[operation],
                    }
                )
        rows += _mechanisms(run)
        rows += _mean_maps(run)
        return [{**about, **row} for row in rows]

    def tables(self) -> Sequence[Part]:
        """Return shares by operation and model, and the mechanisms of heads."""
        shares = (
            Column("", "share", across="model"),
            Column("by chance", lambda rows: spread(_after_training(rows)["chance"])),
            Column("test accuracy", lambda rows: spread(_after_training(rows)["test_accuracy"])),
        )
        mechanisms = (
            Column("mechanism of the head, a seed each", lambda r: ", ".join(r["mechanism"])),
            Column("KL if it attends to its own position alone", "own_position_kl"),
        )
        words: Mapping[str, Words] = {
            **tokens.WORDS,
            "model": lambda model: "before training" if model == "initial" else model,
            "layer": lambda layer: int(layer) + 1,
        }
        return (
            TableSpec(("start", "task", "operation"), shares, partial(_select, "operation"), words),
            "\n".join(f"- {operation}, {what}" for operation, what in _OPERATIONS.items()),
            TableSpec(("start", "task", "layer"), mechanisms, partial(_select, "head"), words),
            "Shares of test sequences, over seeds, mean (least to largest). The paper's start has "
            "the scores of its construction in the first layer, all else random: what happens "
            "before training says nothing of training. The paper shows "
            "maps of single sequences, without numbers.",
        )

    def plots(self) -> FigureSpec:
        """Draw mean maps of the first seed from the paper's start, a column for each task.

        Queries downwards, keys to the right; weights as shares of the largest of each map.
        """
        cells = HeatMap("query", "key", "weight", names="example")
        panels = [
            Panel([cells], rows=partial(_map, example, layer), title=_map_shown)
            for example in range(2)
            for layer in range(2)
        ]
        return FigureSpec(
            panels, "task", (2.9, 2.9), rows=partial(_select, "map", start=tokens.PAPER)
        )

    def claims(self) -> Sequence[Claim]:
        """Judge the shares in the models that solve their task."""
        solving = "{bound} of the models from the paper's start reach a test accuracy of " + str(
            tokens.SOLVED
        )
        share = "in these models the operation happens in {bound} of the test sequences"
        gain = "which is {bound} beyond the untrained model, unless the start does it already"
        return (
            Claim(solving, _solving, ">=", 1, name="models that learn it"),
            Claim(
                share,
                lambda r: {n: of["trained"].min() for n, of in _shares(r)},
                ">=",
                _OFTEN,
                name="sequences in which it happens",
            ),
            Claim(gain, _gains, ">", 0, needed=False, name="beyond the untrained model"),
        )

    def control_results(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """Put untrained models, and random keys, in the place of the trained models."""
        trained = (results["kind"] == "operation") & (results["model"] == "trained")
        initial = results[(results["kind"] == "operation") & (results["model"] == "initial")]
        by = ["run", "operation"]
        # all columns are the trained model's but the share
        of_untrained = results[trained].merge(initial[[*by, "share"]], on=by, suffixes=("_", ""))
        chance = results["share"].mask(trained, results["chance"])
        return {
            "before training": pd.concat([results[~trained], of_untrained]),
            "by chance": results.assign(share=chance),
        }


# Operations


def find_operations(model: TokenTransformer, task: TokenTask, x: Tensor, seed: int) -> Operations:
    """Find which of its task's operations a two-layer model with one head a layer does, and where.

    Args:
        model: the model.
        task: in-context question answering or template matching.
        x: sequences of the task, [sample, pos].
        seed: of the random keys.

    Raises:
        InfoFlowError: for another task.
    """
    if not isinstance(task, (InContextQA, TemplateMatching)):
        raise InfoFlowError(
            f"task is {task.name!r}: expected in_context_qa or template_matching, whose operations "
            "are known"
        )
    n = task.n_tokens
    # keys are sought in the context, without the query and the sign
    without = (n - 2, n - 1) if isinstance(task, InContextQA) else (n - 1,)
    # draws: keys of at least a tenth of the row's largest weight; weighs: all above 0
    draws, weighs, positions = run_probes(
        model,
        x,
        [AttendedProbe(_DRAWS), AttendedProbe(0.0), PositionsProbe((1, 2), without=without)],
        progress=False,
    )
    first = draws.attended[0][:, 0]
    generator = torch.Generator().manual_seed(seed)
    if isinstance(task, InContextQA):
        pair = task.active_index_set(x)
        pair[:, n - 2] = False  # the query
        has_pair, copied = _find_copies(first, pair)
        at_random = _find_copies(_shuffle(first, generator), pair)[1]
        # matching: what the last position attends to, where it has weight, holds the pair
        chosen = positions.argmax[1][:, 0, -1:].long()
        weight = weighs.attended[1][:, 0, -1].gather(1, chosen)
        matched = (has_pair.gather(1, chosen) & weight)[:, 0]
        return Operations(
            {"copying": copied, "matching": matched},
            {"copying": _share(at_random), "matching": _share(has_pair)},
        )
    words = x[:, : task.length]
    own = torch.arange(task.length)[:, None]
    ranked = positions.positions[0][:, 0, : task.length].long()
    # a word's first choice beside itself
    best = torch.where(ranked[:, :, :1] == own, ranked[:, :, 1:], ranked[:, :, :1])
    weight = weighs.attended[0][:, 0, : task.length].gather(2, best)
    anywhere = torch.randint(task.length - 1, best.shape, generator=generator)
    anywhere += anywhere >= own  # another word
    return Operations(
        {
            "parsing": _check_pairs(best, words, weight),
            "strict parsing": _check_parse(first, words),
        },
        {
            "parsing": _share(_check_pairs(anywhere, words, torch.ones_like(weight))),
            "strict parsing": _share(_check_parse(_shuffle(first, generator), words)),
        },
    )


def _find_copies(
    draws: Bool[Tensor, "sample query key"], pair: Bool[Tensor, "sample key"]
) -> tuple[Bool[Tensor, "sample context"], Bool[Tensor, " sample"]]:
    """Mark positions of the context that hold all of the pair; say whether copying happened."""
    query = draws.shape[1] - 2
    holds = draws | torch.eye(draws.shape[1], dtype=torch.bool)
    # all of the pair must be held; of other positions anything may
    has_pair = (holds | ~pair[:, None]).all(dim=2)[:, :query]
    return has_pair, has_pair.any(dim=1) & holds[:, -1, query]


def _check_pairs(
    chosen: Int[Tensor, "sample word 1"],
    words: Int[Tensor, "sample word"],
    weight: Bool[Tensor, "sample word 1"],
) -> Bool[Tensor, " sample"]:
    """Say whether all repeated words choose, with weight, an equal word, where there are any."""
    # only words with an equal one can be right or wrong
    repeated = (words[:, :, None] == words[:, None]).sum(dim=2) > 1
    equal = (words.gather(1, chosen[:, :, 0]) == words) & weight[:, :, 0]
    return (equal | ~repeated).all(dim=1)[repeated.any(dim=1)]


def _check_parse(draws: Bool[Tensor, "sample query key"], words: Tensor) -> Bool[Tensor, " sample"]:
    """Say whether each word draws from the other words that are equal, and from no others."""
    length = words.shape[1]
    others = ~torch.eye(length, dtype=torch.bool)
    equal = words[:, :, None] == words[:, None]
    return ((draws[:, :length, :length] == equal) | ~others).all(dim=(1, 2))


def _shuffle(
    draws: Bool[Tensor, "sample query key"], generator: torch.Generator
) -> Bool[Tensor, "sample query key"]:
    """Draw as many keys in every row, at random among the other positions."""
    n = draws.shape[1]
    own = torch.eye(n, dtype=torch.bool)
    noise = torch.rand(draws.shape, generator=generator, dtype=torch.float32).masked_fill(own, 2.0)
    counts = (draws & ~own).sum(dim=2, keepdim=True)
    # argsort twice gives ranks, of which the own position has the last
    return noise.argsort(dim=2).argsort(dim=2) < counts


def _share(happens: Tensor) -> float:
    return float(happens.double().mean())


def _construction(task: TokenTask) -> TokenTransformer:
    parameters = {key: value for key, value in task.parameters().items() if key != "seed"}
    model: Any = build_construction(task.name, **parameters)[0]
    return model


def _mechanisms(run: tokens.TokenRun) -> list[Row]:
    """Measure what the answer owes to each head of the trained model."""
    found = measure_mechanisms(
        run.model, run.x[:_N_MECHANISMS], held_out=False, read=(-1,), progress=False
    )
    own = found.ideals.index("own_position")
    return [
        {
            "kind": "head",
            "layer": layer,
            "mechanism": found.mechanisms()[layer][0],
            "own_position_kl": float(found.damage[layer][0, own]),
        }
        for layer in range(len(found.damage))
    ]


def _mean_maps(run: tokens.TokenRun) -> list[Row]:
    """Average patterns over the test sequences of each of the two examples that the paper draws."""
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(2)]
    device = next(run.model.parameters()).device
    rows: list[Row] = []
    for example, chosen in _examples(run.task, run.x).items():
        activations = call(run.model, run.x[chosen].to(device), names).activations
        for layer, name in enumerate(names):
            mean = activations[name][:, 0].double().mean(dim=0).cpu()  # of the one head
            rows += [
                {
                    "kind": "map",
                    "example": example,
                    "layer": layer,
                    "query": query,
                    "key": key,
                    "weight": float(mean[query, key]),
                }
                for query in range(len(mean))
                for key in range(len(mean))
            ]
    return rows


def _examples(task: TokenTask, x: Tensor) -> dict[str, Bool[Tensor, " sample"]]:
    """Return the first and the second pair asked about; templates aab and abb."""
    if isinstance(task, InContextQA):
        asked = (x[:, 0:-2:3] == x[:, -2:-1]).to(torch.int64).argmax(dim=1)
        context = " ".join(f"{chr(65 + i)} = {i + 1}" for i in range(task.n_pairs))
        return {f"{context} {chr(65 + i)} =": asked == i for i in range(2)}
    label, names = task.target(x), list(task.label_names)
    return {f"{' '.join(name.upper())} =": label == names.index(name) for name in ("aab", "abb")}


def _training(preset: str, task: str) -> dict[str, Any]:
    settings = {"preset": preset, **tokens.paper_training(task)}
    changes: Mapping[str, Mapping[str, Any]] = {
        "smoke": {"n_test": 200, "epochs": 2, "n_train": 512},
        "full": {"epochs": 10 * settings["epochs"], "n_train": 16384},
    }
    return {**settings, **changes.get(preset, {})}


def _select(kind: str, results: "pd.DataFrame", start: str = "") -> "pd.DataFrame":
    """Select the rows of a kind, from one start or from all."""
    return results[(results["kind"] == kind) & (results["start"].eq(start) | (not start))]


def _after_training(rows: "pd.DataFrame") -> "pd.DataFrame":
    return rows[rows["model"] == "trained"]


def _map(example: int, layer: int, results: "pd.DataFrame") -> "pd.DataFrame":
    """Return the cells of a layer's map of one of the examples, of the first run."""
    names = list(dict.fromkeys(results["example"]))
    here = (results["example"] == names[example]) & (results["layer"] == layer)
    return results[here & (results["run"] == results["run"].min())]


def _map_shown(cells: "pd.DataFrame") -> str:
    return f"{tokens.task_shown(cells)}, layer {int(cells['layer'].iloc[0]) + 1}"


def _solving(results: "pd.DataFrame") -> Numbers:
    """Count the models of each task that solve it."""
    return numbers_of(
        _select("operation", results, tokens.PAPER),
        ["task"],
        lambda rows: rows[rows["test_accuracy"] >= tokens.SOLVED]["run"].nunique(),
        lambda task: tokens.TASKS[task],
    )


def _shares(results: "pd.DataFrame") -> list[tuple[str, "pd.DataFrame"]]:
    """List by task and operation its share in each model that solves the task, before and after."""
    rows = _select("operation", results, tokens.PAPER)
    rows = rows[(rows["test_accuracy"] >= tokens.SOLVED) & rows["operation"].isin(_JUDGED)]
    return [
        (
            f"{tokens.TASKS[task]}, {operation}",
            of.pivot(index="run", columns="model", values="share"),
        )
        for (task, operation), of in groups(rows, ["task", "operation"])
    ]


def _gains(results: "pd.DataFrame") -> Numbers:
    """Return the least gain by training, of the models whose start does not do it already."""
    found = {}
    for name, shares in _shares(results):
        moved = shares[shares["initial"] < _OFTEN]
        if len(moved):
            found[name] = float((moved["trained"] - moved["initial"]).min())
    return found
