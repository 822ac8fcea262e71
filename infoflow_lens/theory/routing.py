"""Routed heads: one head that retrieves by several scores, each for the queries it is good for.

Beyond both papers. Rule (1) lets a head's score depend on the query's token, so a first-layer head
can look up the partner under A_1 for some queries and under A_2 for others. The paper's count of
heads is then a count of heads times roles.

* [derived] A linear query has one role: ``x^T B y`` equals ``x^T A_r y`` up to a factor for all y,
  on an open set of x, only if B is a multiple of A_r. A query from a network with a hidden layer is
  not bound by this: it can follow any continuous choice of roles, and is wrong only near the
  boundaries between them.
* [measured] How often a routed head holds the best pair, and the error that is left, depend on the
  matrices: :func:`measure_routing` measures both for given ones.
* [measured] The choice of roles here takes, for every query, the one in which fewest tokens could
  reach a higher score. What it leaves bounds the best routed head from above only, and other scores
  are far better where it fails: :mod:`infoflow_lens.studies.best_heads` seeks them.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor

from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.foundation.settings import Count, Seed, checked
from infoflow_lens.theory.comparison import best_inside, best_tuples
from infoflow_lens.theory.jobs import Job, Max, Routed, roles_of
from infoflow_lens.theory.schedule import LayerSchedule, Schedule, reference_tokens, run_schedule

_RESAMPLES = 400


@dataclass(frozen=True)
class RoutedError:
    """What first-layer heads leave that share components by routing, by Monte Carlo [measured].

    Attributes:
        n_heads: h_1.
        roles: components times sides that each head chooses from.
        nmse: mean squared error over the variance of the target, by the best affine function of
            the value that is reached; an error that routed heads can reach, so no bound for others
            from below.
        low, high: interval of 95%, by resampling sequences.
        held: share of sequences in which CLS holds the best pair of every component.
        n: sequences.
    """

    n_heads: int
    roles: int
    nmse: float
    low: float
    high: float
    held: float
    n: int


@checked
def measure_routing(
    task: Any,
    n_heads: Count,
    n: Annotated[int, Ge(2)] = 400,
    seed: Seed = 0,
    *,
    one_role: bool = False,
) -> RoutedError:
    """Measure the error that `n_heads` routed heads of the first of two layers leave on pairs.

    Every token retrieves by its `n_heads` best roles; CLS then takes for each component the largest
    score of a pair that some token holds, and the target's outer function is applied to these.
    With `one_role` every head has a component of its own, the first ones of the target, as heads
    behind a linear encoder have; then components without a head are found by luck.

    Args:
        task: a target whose components are pairs, such as ``intrinsic_dimension``.
        n_heads: h_1.
        n: sequences.
        seed: of the sequences.
        one_role: whether heads may not choose.

    Raises:
        InfoFlowError: for components that are not pairs, no head, or fewer than 2 sequences.
    """
    components = tuple(task.components)
    indices = tuple(range(len(components)))
    roles = roles_of(components, indices)
    # there are no more choices than roles, and so no use for more heads
    n_heads = min(n_heads, len(indices) if one_role else len(roles))
    jobs: tuple[Job, ...] = (
        tuple(Max(index) for index in indices[:n_heads])
        if one_role
        else tuple(Routed(indices, choice) for choice in range(n_heads))
    )
    schedule = Schedule((LayerSchedule(token=jobs),))
    reference = reference_tokens(task, seed)
    x, y = task.sample(n, seed)
    reached, held = [], []
    for part in x.split(64):
        # what tokens hold after the layer, without CLS
        sets = run_schedule(schedule, components, part, reference=reference).members[-1, :, :-1]
        values, whole = [], torch.ones(len(part), dtype=torch.bool)
        for component in components:
            best = best_inside(part, sets, component).amax(dim=1)
            true = best_tuples(part, component)[1]
            # within rounding, some token holds the best pair itself
            whole &= best >= true - 1e-6 * true.abs()
            values.append(best if component.extremum == "max" else -best)
        reached.append(task.outer_function(torch.stack(values, dim=1)))
        held.append(whole)
    values_reached, y = torch.cat(reached).double(), y.double()
    low, high = interval(values_reached, y, seed)
    return RoutedError(
        n_heads=n_heads,
        roles=1 if one_role else len(roles),
        nmse=float(nmse_of(values_reached, y)),
        low=low,
        high=high,
        held=float(torch.cat(held).double().mean()),
        n=n,
    )


def nmse_of(reached: Tensor, y: Tensor) -> Tensor:
    """Return the error over the variance of y of the best affine function of what is reached."""
    # [.., sequence, output]: without means, an affine fit has a slope alone
    reached = reached - reached.mean(dim=-2, keepdim=True)
    y = y - y.mean(dim=-2, keepdim=True)
    slope = (reached * y).sum(dim=-2) / reached.square().sum(dim=-2).clamp(min=1e-300)
    error = y - slope.unsqueeze(-2) * reached
    return error.square().mean(dim=(-2, -1)) / y.square().mean(dim=(-2, -1))


def interval(reached: Tensor, y: Tensor, seed: int) -> tuple[float, float]:
    """Bound 95% of the NMSE of sequences that are drawn again, with replacement."""
    generator = torch.Generator().manual_seed(derive_seed("routed error", seed))
    rows = torch.randint(len(y), (_RESAMPLES, len(y)), generator=generator)
    # [resample], from [resample, sequence, output] of sequences that are drawn again
    values = nmse_of(reached[rows], y[rows]).sort().values
    return float(values[int(0.025 * _RESAMPLES)]), float(values[int(0.975 * _RESAMPLES) - 1])
