"""What the studies of language models share: which models, which text, which windows."""

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.lazy import pd
from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.models.configs import read_shape
from infoflow_lens.probing.data import read_texts
from infoflow_lens.probing.store import spread_windows, token_stream
from infoflow_lens.studies.claims import Numbers
from infoflow_lens.studies.language_model.corpus import read_corpus
from infoflow_lens.studies.language_model.snapshots import (
    Snapshot,
    load_snapshot,
    reset_weights,
    snapshots,
)
from infoflow_lens.studies.study import Row, Settings, Study
from infoflow_lens.studies.tables import groups

MODEL = ("model", "step")
TRAINED, UNTRAINED = "trained", "untrained"
IS_INDUCTION = 0.5  # prefix matching above it
_MOST = 512  # tokens of the longest context that is looked at


class LanguageModelStudy(Study):
    """A study of trained language models on held-out text.

    Unlike the other studies it trains nothing: its configurations are snapshots of models that a
    user names. Settings tell weights and text by digests, never by paths.

    Args:
        models: folders or names, as :func:`~infoflow_lens.studies.language_model.snapshots`
            reads them.
        data: a file of held-out texts; default, the test part of this Python's standard library,
            which the models of the package have not seen.

    Attributes:
        windows: for each preset, how many windows of text.
        steps: for each preset, how many moments of training at most; None for all.
    """

    source: ClassVar[str] = "The question that InfoFlow 2026 leaves open, on language models"
    presets: ClassVar[Mapping[str, int]] = {"smoke": 1, "quick": 1, "full": 3}
    windows: ClassVar[Mapping[str, int]] = {"smoke": 10, "quick": 64, "full": 256}
    steps: ClassVar[Mapping[str, int | None]] = {"smoke": 1, "quick": 6, "full": None}

    def __init__(self, models: Sequence[str] = (), data: str | None = None) -> None:
        self.models, self.data = tuple(models), data

    def moments(self, preset: str) -> list[Snapshot]:
        """Return the snapshots of all models.

        Raises:
            InfoFlowError: without models, or for two of one name.
        """
        if not self.models:
            raise InfoFlowError("no model is named: expected at least one; give --model")
        found = [part for model in self.models for part in snapshots(model, self.steps[preset])]
        # rows name models by their folders, never by paths: two of one name could not be told apart
        keys = [(part.model, part.step) for part in found]
        if twice := sorted({key for key in keys if keys.count(key) > 1}):
            raise InfoFlowError(
                f"two models are called {twice[0][0]!r}: expected different names of folders, by "
                "which results tell them apart; rename one"
            )
        self._sources = {(part.model, part.step): part.source for part in found}
        return found

    def cases(self, preset: str) -> Sequence[Settings]:
        """Return a configuration for each snapshot, or several."""
        # results say which text was read without holding it or its path
        text = hashlib.sha256("\0".join(self._texts).encode()).hexdigest()[:12]
        shared = {"text": text, "n_windows": self.windows[preset]}
        return [
            {**moment.settings(), **shared, **more}
            for moment in self.moments(preset)
            for more in self.contexts(moment, preset)
        ]

    def contexts(self, moment: Snapshot, preset: str) -> Sequence[Settings]:
        """Vary what is varied on one snapshot; by default its longest context alone."""
        return [{"n_context": self.longest(moment)}]

    def longest(self, moment: Snapshot) -> int:
        """Return the tokens of the longest window: the model's context, at most 512."""
        return min(_MOST, read_shape(moment.source.partition("@")[0]).n_tokens)

    @cached_property
    def _texts(self) -> list[str]:
        if self.data is None:
            return read_corpus().texts("test")
        texts = read_texts(self.data)
        if texts is None:
            raise InfoFlowError(
                f"{self.data!r} gives no texts: expected a text file, or rows with a column of "
                "texts"
            )
        return texts

    def source_of(self, settings: Settings) -> str:
        """Return what the snapshot of these settings is loaded from."""
        # a worker gets settings alone, and finds the folders of snapshots anew
        if not hasattr(self, "_sources"):
            self.moments("full")
        return self._sources[settings["model"], settings["step"]]

    def sequences(self, model: nn.Module, settings: Settings, seed: int) -> Int[Tensor, "n pos"]:
        """Return windows of the text, spread evenly over it; other seeds begin at other tokens."""
        length = settings["n_context"]
        prefix, stream = self._stream(model)
        # the prefix stands before the text that is left, wherever that begins
        stream = stream[len(prefix) :]
        # seeds begin a third of a window apart, so that their windows share no beginning
        shift = seed * (length // 3) % max(1, len(stream) // 2)
        whole = torch.cat([prefix, stream[shift:]])
        return spread_windows(prefix, whole, length, settings["n_windows"], "the text")

    def shuffle(
        self, model: nn.Module, settings: Settings, n: int, seed: int
    ) -> Int[Tensor, "n pos"]:
        """Return `n` windows in a random order: neighbours in the text go to different parts."""
        spread = self.sequences(model, {**settings, "n_windows": n}, seed)
        return spread[torch.randperm(n, generator=torch.Generator().manual_seed(seed))]

    def _stream(self, model: nn.Module) -> tuple[Int[Tensor, " prefix"], Int[Tensor, " pos"]]:
        return token_stream(model, self._texts)

    def _prefix(self, model: nn.Module) -> Int[Tensor, " prefix"]:
        """Return what the tokenizer puts before a text, such as BOS."""
        return token_stream(model, [self._texts[0][:100]])[0]


class OnRepeats(LanguageModelStudy):
    """A study of random tokens that repeat, ``n`` sequences of twice ``half`` tokens."""

    def cases(self, preset: str) -> Sequence[Settings]:
        """Return a configuration for each snapshot; no text is needed."""
        return [
            {
                **moment.settings(),
                # two halves fit the context behind the token that begins it
                "half": min(50, (self.longest(moment) - 1) // 2),
                "n": self.windows[preset],
            }
            for moment in self.moments(preset)
        ]

    def remarks(self, results: "pd.DataFrame") -> Sequence[str]:
        """Return models without an induction head."""
        most = final(results).groupby("model", sort=False)["prefix_matching"].max()
        return [
            f"{model}: no induction head (largest prefix matching {score:.2f})"
            for model, score in most.items()
            if score <= IS_INDUCTION
        ]


class BesideUntrained(LanguageModelStudy):
    """A study that looks at the last snapshot of a model with random weights, too."""

    def measure(self, settings: Settings, seed: int, device: str) -> list[Row]:
        """Return the rows of the snapshot; for the last one, also those of the untrained model."""
        source = self.source_of(settings)
        rows = self.measure_model(load_snapshot(source, device), settings, seed, TRAINED)
        if settings["final"]:
            # the same architecture with drawn weights: what it shows, training has not made
            with reset_weights(source, derive_seed("untrained", seed)) as folder:
                rows += self.measure_model(load_snapshot(folder, device), settings, seed, UNTRAINED)
        return rows

    @abstractmethod
    def measure_model(
        self, model: nn.Module, settings: Settings, seed: int, kind: str
    ) -> list[Row]:
        """Measure one model, whose ``kind`` is "trained" or "untrained", as rows."""


def format_steps(results: "pd.DataFrame") -> "pd.DataFrame":
    """Return rows with their steps of training as tables show them; ``-`` where there is none."""
    # -1 is the step of a model of which none is known
    known = results["step"] >= 0
    if "kind" in results:
        known &= results["kind"] != UNTRAINED
    return results.assign(step=results["step"].astype(int).astype(str).where(known, "-"))


def model_of(results: "pd.DataFrame") -> str:
    """Return the model of some rows, above a panel."""
    return str(results["model"].iloc[0])


def average_heads(
    results: "pd.DataFrame", columns: Sequence[str], extra_keys: Sequence[str] = ()
) -> "pd.DataFrame":
    """Average over seeds for each model, layer and head, with the head's name.

    Args:
        results: rows of a study.
        columns: the columns to average.
        extra_keys: other columns that tell groups apart.
    """
    keys = ["model", *extra_keys, "layer", "head"]
    rows = results.groupby(keys, sort=False)[list(columns)].mean().reset_index()
    return add_names(rows)


def add_names(rows: "pd.DataFrame") -> "pd.DataFrame":
    """Add the names of heads to their rows, such as 0.6."""
    heads = zip(rows["layer"], rows["head"], strict=True)
    return rows.assign(name=[f"{layer:.0f}.{head:.0f}" for layer, head in heads])


def final(results: "pd.DataFrame") -> "pd.DataFrame":
    """Return the rows of each model's last snapshot."""
    return results[results["final"].astype(bool)]


def measure_models(results: "pd.DataFrame", number: "Callable[[pd.DataFrame], float]") -> Numbers:
    """Compute a number of the rows of each model's last snapshot."""
    return {model: number(rows) for (model,), rows in groups(final(results), ("model",))}


def stack_rows(*results: "pd.DataFrame") -> "pd.DataFrame":
    """Stack frames below each other."""
    return pd.concat(results, ignore_index=True)


def select_rows(column: str, value: object, results: "pd.DataFrame") -> "pd.DataFrame":
    """Return the rows with this value in this column."""
    return results[results[column] == value]


def last_layer(results: "pd.DataFrame") -> "pd.DataFrame":
    """Return the rows of each model's last layer."""
    return results[results["layer"] == results.groupby("model")["layer"].transform("max")]


def least_within(curve: "pd.DataFrame", by: str, tolerance: float) -> int | None:
    """Return the least value of a column from which on the mean rise of the loss is tolerated.

    None if there is no such value.

    Args:
        curve: rows with the column and ``rise``.
        by: the column, of integers.
        tolerance: the largest rise.
    """
    means = curve.groupby(by)["rise"].mean().sort_index()
    # a rise may fall within by chance and leave again: the last one beyond decides
    beyond = means.index[means > tolerance]
    within = means.index[means.index > beyond.max()] if len(beyond) else means.index
    return int(within[0]) if len(within) else None
