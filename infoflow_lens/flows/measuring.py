"""How influence is measured on a few inputs, and what that costs."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from infoflow_lens.flows.settings import InfluenceKind
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.progress import progress_bar
from infoflow_lens.hooks import (
    JacobianInfluence,
    PowerRollout,
    PowerRolloutResult,
    ResampleInfluence,
    run_probes,
)
from infoflow_lens.hooks.influence.base import StateInfluence
from infoflow_lens.hooks.influence.resample import donors_from
from infoflow_lens.hooks.model.inputs import Batches
from infoflow_lens.hooks.model.points import config_value, layer_count, reads_vectors
from infoflow_lens.hooks.routes.powers import Question
from infoflow_lens.hooks.scores import Asked

_FEW_SECONDS = 2e11  # multiplications of all passes, up to which influence is exact [chosen]
_TWO_SECONDS = 6e10  # the same for positions that were not asked for [chosen]
_DIRECTIONS_ELSEWHERE = 16  # of an estimate on positions that were not asked for [chosen]
_MOST_DONORS = 8


def influence_probe(
    model: nn.Module,
    influence: InfluenceKind | None,
    layers: tuple[int, ...],
    positions: tuple[int, ...] | None,
    rows: Sequence[Tensor],
    reference: Batches | None,
    n_directions: int,
    seed: int,
) -> StateInfluence | None:
    """The probe for the kind of influence that is asked for; with "auto" one that takes seconds.

    Args:
        model: the model.
        influence: the kind; None for no probe.
        layers, positions: of the states; positions None for all.
        rows: the inputs, each token ids [pos] or vectors [pos, d_token].
        reference: inputs whose tokens replace others with "resample"; None for the inputs' own.
        n_directions: random directions of an estimate, for each state.
        seed: of the random directions.

    Raises:
        InfoFlowError: if "resample" has no other token for some position.
    """
    if influence is None:
        return None
    if influence == "resample":
        donors = _donors(rows, reference)
        return ResampleInfluence(
            donors, "median", state="resid_post", layers=layers, positions=positions
        )
    exact = JacobianInfluence("resid_post", layers=layers, positions=positions)
    if influence == "exact":
        return exact
    estimate = JacobianInfluence(
        "resid_post", layers=layers, positions=positions, estimate=n_directions, seed=seed
    )
    # exact where that takes seconds, and where the user asks for it
    return (
        exact if influence == "auto" and _is_cheap(model, exact, rows, _FEW_SECONDS) else estimate
    )


def _is_cheap(model: nn.Module, probe: StateInfluence, rows: Sequence[Tensor], most: float) -> bool:
    """Say whether the influence takes at most so many multiplications."""
    anatomy = getattr(model, "anatomy", None)
    blocks: Any = model.blocks if anatomy is None else [block.module for block in anatomy.blocks]
    weights = sum(parameter.numel() for block in blocks for parameter in block.parameters())
    # a token of a pass takes about one multiplication with each weight
    work = weights * sum(_passes(model, probe, len(row)) * len(row) for row in rows)
    # 0 stands for sizes that are not known, whose work may be anything
    return 0 < work <= most


def probe_elsewhere(
    model: nn.Module, probe: StateInfluence | None, rows: Sequence[Tensor], seed: int
) -> StateInfluence | None:
    """A probe of the same influence on all positions, or of an estimate; None if both take long."""
    if probe is None:
        return None
    if isinstance(probe, ResampleInfluence):
        choices: list[StateInfluence] = [
            ResampleInfluence(probe.donors, "median", state="resid_post", layers=probe.layers)
        ]
    else:
        assert isinstance(probe, JacobianInfluence)
        asked = (None, _DIRECTIONS_ELSEWHERE) if probe.estimate is None else (probe.estimate,)
        choices = [
            JacobianInfluence("resid_post", layers=probe.layers, estimate=n, seed=seed)
            for n in asked
        ]
    # the most exact of the choices that takes seconds
    return next((each for each in choices if _is_cheap(model, each, rows, _TWO_SECONDS)), None)


def _passes(model: nn.Module, probe: StateInfluence, n_source: int) -> float:
    """About how many forward passes of a sequence the influence on its asked states costs."""
    if isinstance(probe, ResampleInfluence):
        return n_source * len(probe.donors)
    assert isinstance(probe, JacobianInfluence)
    layers, width = probe.layers or (), int(config_value(model, "d_model") or 0)
    n_asked = n_source if probe.positions is None else len(probe.positions)
    directions = width if probe.estimate is None else min(probe.estimate, width)
    # backwards from each asked layer, through it and the layers below
    reverse = directions * n_asked * sum(layer + 1 for layer in layers) / layer_count(model)
    if probe.estimate is not None:
        return reverse
    architecture: Any = getattr(model, "architecture", None)
    d_source = architecture.d_token if reads_vectors(model) else width
    # or forwards from each number of each source, for all states at once
    return min(reverse, 2.0 * n_source * d_source)


def _donors(rows: Sequence[Tensor], reference: Batches | None) -> Tensor:
    """Return tokens that replace the tokens of the inputs, [donor, pos] or [donor, pos, d_token].

    They are those of the reference, or other tokens of the inputs.

    Raises:
        InfoFlowError: if some position has no other token.
    """
    longest = max(map(len, rows))
    if reference is None:
        return _others_of(rows, longest)
    donors = donors_from(reference, 0, longest)
    if all(_stays(donors, row).all() for row in rows):
        raise InfoFlowError(
            "influence is 'resample' and the reference inputs have the same tokens as the text "
            "everywhere: expected other tokens to put in their place; give another reference"
        )
    return donors


def _others_of(rows: Sequence[Tensor], longest: int) -> Tensor:
    """Find for each position other, different tokens of the inputs, the nearest before it first.

    A token that an input has in that place is none: put there again, it would move nothing.
    """
    # tokens of all inputs in one row, so that those of the text itself come first
    pool = [token for row in rows for token in row]
    keys = [tuple(token.flatten().tolist()) for token in pool]
    found = []
    for position in range(longest):
        here = {tuple(row[position].flatten().tolist()) for row in rows if len(row) > position}
        others: dict[tuple[float, ...], Tensor] = {}
        for step in range(1, len(pool)):
            if len(others) == _MOST_DONORS:
                break
            # nearest before first; below 0 the index goes on from the end of all inputs
            if keys[position - step] not in here:
                others.setdefault(keys[position - step], pool[position - step])
        if len(others) < 2:
            raise InfoFlowError(
                f"influence is 'resample' and for position {position} the text has {len(others)} "
                "other tokens, that is, other than what stands there: expected at least 2 to put "
                "in its place; give reference=[...], or choose influence 'estimate'"
            )
        found.append(list(others.values()))
    # as many donors at every position, as they make sequences
    n_donors = min(map(len, found))
    return torch.stack([torch.stack(others[:n_donors]) for others in found], dim=1)


def _stays(donors: Tensor, row: Tensor) -> Bool[Tensor, " pos"]:
    """Return the positions at which every donor has the same token as the input."""
    same = donors[:, : len(row)] == row.to(donors.device)
    return same.flatten(2).all(dim=2).all(dim=0) if same.ndim > 2 else same.all(dim=0)


def note_same_tokens(probe: StateInfluence | None, rows: Sequence[Tensor]) -> Iterator[str]:
    """Note the tokens for which all donors have the same token, so that nothing is replaced."""
    if not isinstance(probe, ResampleInfluence):
        return
    for index, row in enumerate(rows):
        places = _stays(probe.donors, row).nonzero().flatten().tolist()
        if places:
            of = f" of input {index}" if len(rows) > 1 else ""
            yield (
                f"all reference inputs have the text's own token at position "
                f"{', '.join(map(str, places[:8]))}{', ...' if len(places) > 8 else ''}{of}: "
                "replaced by itself, it moves nothing, so that its influence is 0 whatever the "
                "model does"
            )


def run_with_bar(
    model: nn.Module, inputs: Batches, probes: Sequence[Any], progress: bool
) -> tuple[Any, ...]:
    """Run probes input by input, with a bar over the passes that influence takes.

    Args:
        model: the model.
        inputs: its inputs.
        probes: the bar is for the last one, if that measures influence.
        progress: whether to show the bar.

    Returns:
        The results, in the order of the probes.
    """
    measure = probes[-1]
    if not isinstance(measure, StateInfluence):
        return run_probes(model, inputs, probes, batch_size=1, progress=False)
    # passes differ in length from text to text, so the bar counts work
    costs = [_passes(model, measure, len(row)) for row in inputs.rows]
    total, seen, advanced = max(1, round(sum(costs))), 0.0, 0
    with progress_bar("passes for influence", total, progress) as advance:

        def show(done: float) -> None:
            nonlocal advanced
            steps = min(total, round(done)) - advanced
            if steps > 0:
                advanced += steps
                advance(steps)

        def watch(share: float) -> None:
            show(seen + share * costs[measure.n_sequences])

        def after(n: int) -> None:
            nonlocal seen
            seen = sum(costs[: measure.n_sequences])
            show(seen)

        measure.watch = watch
        return run_probes(model, inputs, probes, batch_size=1, after_batch=after, progress=False)


def measure_contributions(
    model: nn.Module, inputs: Batches, measure: StateInfluence | None, positions: Asked | None
) -> PowerRolloutResult | None:
    """Contributions to a power, set for the kind of influence that is measured.

    None for models whose states cannot be decomposed, or not while hooks of the user's edit them.
    """
    is_small = isinstance(measure, JacobianInfluence)
    question: Question = "small changes" if is_small else "replacing a token"
    probe = PowerRollout(question, positions=positions)
    try:
        (found,) = run_probes(model, inputs, [probe], batch_size=1, progress=False)
    except InfoFlowError:
        return None
    return found
