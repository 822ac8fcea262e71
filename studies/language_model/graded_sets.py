"""Graded information sets, compared with rollout and other measures of what states depend on."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import torch
from torch import Tensor, nn

from infoflow_lens.foundation.lazy import pd
from infoflow_lens.foundation.modules import SeededRandom, derive_seed
from infoflow_lens.hooks import (
    GradedSetsProbe,
    JacobianInfluence,
    MechanismsResult,
    PositionsProbe,
    Probe,
    ResampleInfluence,
    baselines,
    measure_mechanisms,
    run_probes,
)
from infoflow_lens.hooks.model.points import layer_count
from infoflow_lens.hooks.routes.graded import Strength
from infoflow_lens.models.loading import load_any
from infoflow_lens.probing.store import spread_windows, token_stream
from infoflow_lens.ranking import RankingAgreement, compare_rankings
from infoflow_lens.studies.claims import Claim, Numbers
from infoflow_lens.studies.language_model.corpus import read_corpus
from infoflow_lens.studies.language_model.snapshots import Snapshot, load_snapshot
from infoflow_lens.studies.language_model.study import (
    LanguageModelStudy,
    final,
    last_layer,
    model_of,
    stack_rows,
)
from infoflow_lens.studies.plots import Axis, FigureSpec, Panel
from infoflow_lens.studies.study import Row, Settings, Statement
from infoflow_lens.studies.tables import Column, Part, TableSpec, groups, render
from infoflow_lens.theory import InformationSets, propagate
from infoflow_lens.theory.propagation import Path

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_RANDOM, _PILOT = "random 12 x 12", "stdlib-2l"
_SHAPE = {"n_layer": 12, "n_head": 12, "n_embd": 96, "vocab_size": 256}
_DONORS, _BATCH, _DIRECTIONS = 4, 8, 16
_OUTCOMES = ("ahead", "level", "behind")
_MOST_LAYERS = 4  # that a table shows
_MOST_EXACT = 2  # layers up to which the Jacobian is exact
_INFLUENCES = ("jacobian", "resample")
_JUDGED = ("spearman", "share")
_FIRST, _ROLLOUT = "first choices", "attention rollout"
_AS_FIRST, _QUARTER = "as many as first choices", "a quarter"  # sizes at which all are cut
_VARIANTS = {
    f"graded: {strength}, {path}": (strength, path)
    for strength in get_args(Strength)
    for path in get_args(Path)
}


class GradedSetsStudy(LanguageModelStudy):
    """Graded sets of every strength, sets of first choices, and all baselines."""

    name: ClassVar[str] = "graded_sets"
    title: ClassVar[str] = "Do graded sets say what states depend on, also where sets hold all?"
    statement: ClassVar[Statement] = Statement.read("graded_sets")
    presets: ClassVar[Mapping[str, int]] = {"smoke": 1, "quick": 1, "full": 1}
    windows: ClassVar[Mapping[str, int]] = {"smoke": 4, "quick": 12, "full": 96}
    steps: ClassVar[Mapping[str, int | None]] = {"smoke": 1, "quick": 1, "full": 1}
    lengths: ClassVar[Mapping[str, int]] = {"smoke": 16, "quick": 64, "full": 128}

    def cases(self, preset: str) -> Sequence[Settings]:
        """Return the last snapshots, and a model of GPT-2's depth with random weights."""
        deep = {
            "model": _RANDOM,
            "step": -1,
            "final": True,
            "weights": _RANDOM,
            "text": "random tokens",
            "n_windows": max(2, self.windows[preset] // 3),
            "n_context": self.lengths[preset],
            "n_states": 8,
        }
        return [*super().cases(preset), deep]

    def contexts(self, moment: Snapshot, preset: str) -> Sequence[Settings]:
        """Return windows of one length; states are taken at eight positions, evenly."""
        return [{"n_context": min(self.longest(moment), self.lengths[preset]), "n_states": 8}]

    def judges(self, settings: Settings) -> bool:
        """Say whether the rule is about a model: not the pilot's, nor the untrained one."""
        return settings["model"] not in (_PILOT, _RANDOM)

    def measure(self, settings: Settings, seed: int, device: str) -> list[Row]:
        """Return a row for each text, influence, layer, method and sequence."""
        length, n_states = settings["n_context"], settings["n_states"]
        places = tuple(length * (i + 1) // n_states - 1 for i in range(n_states))
        deep = settings["model"] == _RANDOM
        model = _random(length, seed) if deep else load_snapshot(self.source_of(settings), device)
        model = model.to(device)
        texts = self.texts_of(model, settings, seed)
        facts = {"mlp": _has_mlp(model)}
        mechanisms = None  # of a random model, whose output needs no head more than another
        if not deep:
            mechanisms = measure_mechanisms(
                model, texts["validation"][:_BATCH], metric="kl", batch_size=_BATCH, progress=False
            )
        rows: list[Row] = []
        for text, windows in texts.items():
            if deep and text == "validation":
                continue  # it chooses nothing
            # tokens that take the place of others come from windows that are not measured
            donors, measured = windows[:_DONORS], windows[_DONORS:]
            # exact Jacobians of deeper models would take most of the run
            estimate = _DIRECTIONS if layer_count(model) > _MOST_EXACT else None
            influences: dict[str, Probe[Any]] = {
                "jacobian": JacobianInfluence("resid_post", estimate=estimate, positions=places),
                "resample": ResampleInfluence(
                    donors, "median", state="resid_post", positions=places
                ),
            }
            scores = self._methods(model, mechanisms, places)
            chosen, *found = run_probes(
                model,
                measured,
                [PositionsProbe(), *influences.values(), *scores.values()],
                batch_size=_BATCH,
                progress=False,
            )
            first = propagate(chosen.argmax, length)
            sizes = {_AS_FIRST: first, _QUARTER: _quarters(first)}
            # the sets are ranked as scores, too: equal ones are cut by expectation
            ranked: dict[str, Any] = {_FIRST: first.members.float()}
            ranked |= dict(zip(scores, found[len(influences) :], strict=True))
            # the first results are those of the influences
            for name, influence in zip(influences, found, strict=False):
                agreement = compare_rankings(sizes, ranked, influence)
                rows += [{"on": text, "influence": name, **facts, **r} for r in _rows(agreement)]
        return rows

    def _methods(
        self, model: nn.Module, mechanisms: MechanismsResult | None, places: tuple[int, ...]
    ) -> dict[str, Probe[Any]]:
        """Return graded sets of every strength, and the baselines that are not among them.

        Without mechanisms there is no damage, and of the baselines there are the cheap ones.
        """
        found: dict[str, Probe[Any]] = {
            name: GradedSetsProbe(
                strength,
                path,
                damage=mechanisms if strength == "damage" else None,
                positions=places,
            )
            for name, (strength, path) in _VARIANTS.items()
            if strength != "damage" or mechanisms is not None
        }
        others = baselines(model, "resid_post", positions=places, cheap=mechanisms is None)
        return found | {name: probe for name, probe in others.items() if name != "graded sets"}

    def texts_of(self, model: nn.Module, settings: Settings, seed: int) -> dict[str, Tensor]:
        """Return windows to choose by and windows to measure, of texts that share nothing."""
        n, length = settings["n_windows"] + _DONORS, settings["n_context"]
        m = max(2, settings["n_windows"] // 2) + _DONORS  # to choose by
        if settings["model"] == _RANDOM:
            generator = torch.Generator().manual_seed(derive_seed("tokens", seed))
            ids = torch.randint(_SHAPE["vocab_size"], (n + m, length), generator=generator)
            return {"validation": ids[:m], "test": ids[m:]}
        if self.data is None:
            prefix, stream = token_stream(model, read_corpus().texts("validation"))
            other = spread_windows(prefix, stream, length, m, "the text")
            own = self.sequences(model, {**settings, "n_windows": n}, seed)
        else:
            both = self.sequences(model, {**settings, "n_windows": n + m}, seed)
            is_other = torch.arange(n + m) % 2 == 0
            # windows that choose alternate with judged ones: both come from all over the text
            is_other[2 * m :] = False
            other, own = both[is_other], both[~is_other]
        # donors come from all over the text
        generator = torch.Generator().manual_seed(seed)
        return {
            "validation": other[torch.randperm(m, generator=generator)],
            "test": own[torch.randperm(n, generator=generator)],
        }

    def table(self, results: "pd.DataFrame") -> str:
        """Show how the strength was chosen; then all methods, a table for each model."""
        # the strength is chosen on other text than the one that is judged on
        chosen = chosen_of(results)
        parts: list[Part] = [
            "Spearman's correlation with influence, and the share of influence inside the quarter "
            "of the tokens that a method ranks highest; means over sequences and half their 95% "
            f"interval. On other text, {chosen} was chosen.",
            "### The choice: Spearman in the last layer, on validation text",
            TableSpec(
                ("method",),
                (
                    Column("", _mean_over_cases, form=".3f", across="case"),
                    Column("mean", _mean_over_cases, form=".3f"),
                ),
                rows=_choosing,
            ),
            "### The last layer",
            *(
                TableSpec(
                    ("method",),
                    (Column("", _cell, across="model"),),
                    rows=partial(_compare, influence),
                    words={"method": lambda name: f"**{name}**" if name == chosen else name},
                    names={"method": influence},
                )
                for influence in _INFLUENCES
            ),
            f"(ahead): it is ahead of {chosen} by the rule's intervals; (behind): behind it.",
            f"On how many trained models {chosen} is ahead of, level with or behind the others:",
            TableSpec(
                ("method",),
                (Column("", _counts, across="influence"),),
                rows=tally,
                names={"method": "; ".join(_OUTCOMES)},
            ),
        ]
        of_model = TableSpec(("method",), (Column("", _format_interval, across="place"),))
        for (model,), rows in groups(_test(results), ("model",)):
            selected = _select_layers(rows)
            parts += [f"### {model}", of_model.render(selected), _sizes(selected)]
        return render(parts, results)

    def plots(self) -> FigureSpec:
        """Return Spearman and the share inside of every method in the last layer, by model."""
        panels = [
            Panel((partial(_draw_methods, metric),), Axis(f"{metric} (filled: jacobian)"),
                  title=model_of)
            for metric in _JUDGED
        ]  # fmt: skip
        return FigureSpec(panels, per="model", rows=_select_figure, share="y")

    def claims(self) -> Sequence[Claim]:
        """Judge the last layer of the judged models, on text that did not choose the strength."""
        lead = (
            "by the {} ends of the 95% intervals over sequences, in Spearman's correlation with "
            "influence and in the share of influence inside a quarter of the tokens, for both "
            "influences"
        )
        return (
            Claim(
                "in the last layer the lead of the graded sets that other text chose over "
                f"{_ROLLOUT} is {{bound}} in one of the two on every judged model, "
                f"{lead.format('upper')}",
                partial(_ends_of_lead, max, False), ">=", 0,
            ),
            Claim(
                "on every judged model with MLPs it is {bound} in both, by the lower ends",
                partial(_ends_of_lead, min, True), ">", 0, needed=False,
            ),
        )  # fmt: skip

    def remarks(self, results: "pd.DataFrame") -> Sequence[str]:
        """Say what was chosen, and its leads over rollout on all trained models."""
        chosen = chosen_of(results)
        rows = last_layer(_test(results))
        sentences = [f"chosen on other text: {chosen}"]
        for (model, influence), some in groups(
            rows[rows["weights"] != _RANDOM], ("model", "influence")
        ):
            leads = "; ".join(
                f"{metric} {_mean(some[some['method'] == chosen][metric])[0]:.3f} to "
                f"{_mean(some[some['method'] == _ROLLOUT][metric])[0]:.3f}, lead "
                f"{_interval(some, chosen, _ROLLOUT, metric)}"
                for metric in _JUDGED
            )
            kind = "with MLPs" if some["mlp"].iloc[0] else "without MLPs"
            kind += "" if self.judges({"model": model}) else "; of pilots, not judged"
            found = outcome(some, chosen, _ROLLOUT)
            sentences.append(f"{model} ({kind}), {influence}: {found} against rollout; {leads}")
        return sentences

    def control_results(self, results: "pd.DataFrame") -> "Mapping[str, pd.DataFrame]":
        """Return rows with the sets of first choices in place of the chosen graded sets."""
        chosen, test = chosen_of(results), results["on"] == "test"
        others = results[~(test & (results["method"] == chosen))]
        first = results[test & (results["method"] == _FIRST)].assign(method=chosen)
        return {"first choices": stack_rows(others, first)}


def _ends_of_lead(
    of_two: "Callable[[Sequence[float]], float]", mlp: bool, results: "pd.DataFrame"
) -> Numbers:
    """Return the ends of the chosen sets' lead over rollout:
    the least lower or the largest upper end.
    """
    chosen, sign = chosen_of(results), -1 if of_two is min else 1
    rows = last_layer(_test(results))
    rows = rows[~rows["model"].isin([_PILOT, _RANDOM]) & (rows["mlp"].astype(bool) | (not mlp))]
    found: dict[str, float] = {}
    for (model, influence), some in groups(rows, ("model", "influence")):
        leads = [_lead(some, chosen, _ROLLOUT, metric) for metric in _JUDGED]
        found[f"{model}, {influence}"] = of_two([mean + sign * half for mean, half in leads])
    return found


def _select_figure(results: "pd.DataFrame") -> "pd.DataFrame":
    """Select the last layer on the test text, with the method that was chosen."""
    return last_layer(_test(results)).assign(chosen=chosen_of(results))


def _draw_methods(metric: str, axes: "Axes", rows: "pd.DataFrame") -> None:
    """Draw a point with its interval for each method and influence."""
    methods = list(dict.fromkeys(rows["method"]))
    for (method, influence, chosen), some in groups(rows, ("method", "influence", "chosen")):
        mean, half = _mean(some[metric])
        axes.errorbar(
            mean, methods.index(method), xerr=half, markersize=4,
            marker="o" if influence == _INFLUENCES[0] else "s",
            mfc=None if influence == _INFLUENCES[0] else "white",
            color="#000000" if method == chosen else "C0",
        )  # fmt: skip
    axes.set_yticks(range(len(methods)), methods, fontsize="small")
    axes.set_ylim(len(methods) - 0.5, -0.5)


def chosen_of(results: "pd.DataFrame") -> str:
    """Return the graded sets of the highest mean correlation on the other text.

    The mean is over trained models and influences, in the last layer.
    """
    found = {
        method: _mean_over_cases(rows) for (method,), rows in _group_methods(_choosing(results))
    }
    return max(found, key=found.__getitem__)


def _group_methods(rows: "pd.DataFrame") -> "list[tuple[Any, pd.DataFrame]]":
    return groups(rows, ("method",))


def _choosing(results: "pd.DataFrame") -> "pd.DataFrame":
    """Return the rows that choose: graded sets of trained models' last layer, on the other text."""
    rows = last_layer(final(results))
    rows = rows[(rows["on"] == "validation") & rows["method"].isin(list(_VARIANTS))]
    # a run of the random model alone still has to choose by something
    if (rows["weights"] != _RANDOM).any():
        rows = rows[rows["weights"] != _RANDOM]
    return rows.assign(case=rows["model"] + ", " + rows["influence"])


def _mean_over_cases(rows: "pd.DataFrame") -> float:
    return float(rows.groupby("case")["spearman"].mean().mean())


def outcome(rows: "pd.DataFrame", method: str, other: str) -> str:
    """Compare two methods on the same sequences: the first is "ahead", "behind" or "level"."""
    return _outcome(_average_metrics(rows), method, other)


def _outcome(means: "pd.DataFrame", method: str, other: str) -> str:
    # differences within sequences: what makes all methods fail on one cancels
    ends = [_mean(means[name][method] - means[name][other]) for name in _JUDGED]
    if all(mean - half > 0 for mean, half in ends):
        return "ahead"
    return "behind" if all(mean + half < 0 for mean, half in ends) else "level"


def _lead(rows: "pd.DataFrame", method: str, other: str, metric: str) -> tuple[float, float]:
    """Return the mean of the paired difference, and half its 95% interval."""
    means = _average_metrics(rows)[metric]
    return _mean(means[method] - means[other])


def _average_metrics(rows: "pd.DataFrame") -> "pd.DataFrame":
    """Average what is judged, by method and sequence."""
    return rows.groupby(["method", "sequence"])[list(_JUDGED)].mean()


def _interval(rows: "pd.DataFrame", method: str, other: str, metric: str) -> str:
    mean, half = _lead(rows, method, other, metric)
    return f"{mean - half:+.3f} to {mean + half:+.3f}"


def _mean(values: "pd.Series[float]") -> tuple[float, float]:
    """Return the mean, and half of Student's 95% interval; NaN left out."""
    from scipy.special import stdtrit

    found = values.dropna()
    n = len(found)
    if n < 2:
        return float(found.mean()), 0.0
    return float(found.mean()), float(stdtrit(n - 1, 0.975) * found.std() / n**0.5)


def _compare(influence: str, results: "pd.DataFrame") -> "pd.DataFrame":
    """Select every model's last layer, and compare each method with the chosen graded sets."""
    chosen, rows = chosen_of(results), last_layer(_test(results))
    rows = rows[rows["influence"] == influence]
    found = {
        (model, method): _outcome(means, method, chosen)
        for (model,), some in groups(rows, ("model",))
        for means in [_average_metrics(some)]
        for method in dict.fromkeys(some["method"])
        if method not in (chosen, "measured") and chosen in set(some["method"])
    }
    keys = zip(rows["model"], rows["method"], strict=True)
    return rows.assign(outcome=[found.get(key, "level") for key in keys])


def _cell(rows: "pd.DataFrame") -> str:
    how = rows["outcome"].iloc[0]
    means = "; ".join(f"{_mean(rows[metric])[0]:.3f}" for metric in _JUDGED)
    return means if how == "level" else f"{means} ({how})"


def tally(results: "pd.DataFrame") -> "pd.DataFrame":
    """Say whether the chosen sets are ahead of each method, by trained model and influence."""
    chosen, rows = chosen_of(results), last_layer(_test(results))
    return pd.DataFrame(
        [
            {"model": model, "influence": influence, "method": method,
             "outcome": _outcome(means, chosen, method)}
            for (model, influence), some in groups(
                rows[rows["weights"] != _RANDOM], ("model", "influence")
            )
            for means in [_average_metrics(some)]
            for method in dict.fromkeys(some["method"])
            if method not in (chosen, "measured")
        ],
        columns=["model", "influence", "method", "outcome"],
    )  # fmt: skip


def _counts(rows: "pd.DataFrame") -> str:
    return "; ".join(str((rows["outcome"] == how).sum()) for how in _OUTCOMES)


def _select_layers(rows: "pd.DataFrame") -> "pd.DataFrame":
    """Select all layers of a model, four layers of a deep one, with their places."""
    layers = sorted(rows["layer"].unique())
    if len(layers) > _MOST_LAYERS:
        ends = range(_MOST_LAYERS)
        layers_shown = {layers[round(i * (len(layers) - 1) / (_MOST_LAYERS - 1))] for i in ends}
        rows = rows[rows["layer"].isin(layers_shown)]
    return rows.assign(place=rows["influence"] + ", layer " + rows["layer"].astype(str))


def _format_interval(rows: "pd.DataFrame") -> str:
    (rank, half), (share, _) = (_mean(rows[metric]) for metric in _JUDGED)
    # NaN where no set of first choices leaves a token out
    first, _ = _mean(rows["share_first"])
    return f"{rank:.3f} ± {half:.3f}; {share:.3f}" + (f" ({first:.3f})" if first == first else "")


def _sizes(rows: "pd.DataFrame") -> str:
    """Say how large the sets of first choices are."""
    sizes = rows[(rows["method"] == _FIRST) & (rows["influence"] == _INFLUENCES[0])]
    sizes_in_words = "; ".join(
        f"layer {layer}: {some['size'].mean():.1f} of {some['candidates'].mean():.1f}, all in "
        f"{some['whole'].mean():.0%} of the states"
        for (layer,), some in groups(sizes, ("layer",))
    )
    return (
        "In brackets the share inside as many tokens as the set of first choices holds, where it "
        f"leaves some out. It holds {sizes_in_words}."
    )


def _test(results: "pd.DataFrame") -> "pd.DataFrame":
    rows = final(results)
    return rows[rows["on"] == "test"]


def _rows(agreement: RankingAgreement) -> list[dict[str, Any]]:
    """Return a row for each layer, method and sequence, its mean over states; NaN as None."""
    n_layers, n_batch, _ = agreement.n_candidates.shape
    sizes, candidates = agreement.sizes[_AS_FIRST], agreement.n_candidates
    # states without a candidate have no numbers
    there = candidates > 0
    whole = (sizes == candidates).double().where(there, torch.nan)
    facts = {
        "size": sizes.where(there, torch.nan).nanmean(dim=2),
        "candidates": candidates.where(there, torch.nan).nanmean(dim=2),
        "whole": whole.nanmean(dim=2),
    }
    rows = []
    for method in (*agreement.scores, "random", "recency", "measured"):
        values, first = agreement.values[_QUARTER, method], agreement.values[_AS_FIRST, method]
        found = facts | {
            "spearman": values["spearman"].nanmean(dim=2),
            "share": values["share_inside"].nanmean(dim=2),
            "share_first": first["share_inside"].nanmean(dim=2),
        }
        for layer in range(n_layers):
            for sequence in range(n_batch):
                numbers = {name: float(part[layer, sequence]) for name, part in found.items()}
                kept = {n: round(v, 4) if v == v else None for n, v in numbers.items()}
                rows.append({"layer": layer, "method": method, "sequence": sequence, **kept})
    return rows


def _quarters(sets: InformationSets) -> InformationSets:
    """Give the nearest quarter of earlier tokens, rounded up: sets of a size for every state."""
    places = torch.arange(sets.n_sources)
    back = places[:, None] - places
    nearest = (back >= 0) & (back <= (places[:, None] + 3) // 4)
    return InformationSets(nearest.expand_as(sets.members).clone())


def _has_mlp(model: nn.Module) -> bool:
    """Say whether there are feed-forward networks; where they are frozen at 0 there are none."""
    weights = [p for name, p in model.named_parameters() if "mlp" in name and p.ndim > 1]
    return any(bool(weight.any()) for weight in weights)


def _random(length: int, seed: int) -> nn.Module:
    """Return a narrower model with GPT-2's depth and heads, whose weights keep lengths."""
    from transformers import GPT2Config, GPT2LMHeadModel

    width = _SHAPE["n_embd"]
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    settings: dict[str, Any] = {**_SHAPE, **ends, "n_positions": length}
    config = GPT2Config(**settings, initializer_range=width**-0.5)
    with SeededRandom(derive_seed("weights", seed)):
        made = GPT2LMHeadModel(config)
    return load_any(made.eval()).model
