"""All baselines of a model that it can give, by name."""

from typing import Any

from torch import nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.hooks.influence.base import StateName
from infoflow_lens.hooks.model.points import layer_count, takes_model
from infoflow_lens.hooks.probe import Probe
from infoflow_lens.hooks.routes.attention import AttentionRollout, AttentionWeight
from infoflow_lens.hooks.routes.contributions import ContributionRoutes, find_additions
from infoflow_lens.hooks.routes.flow import AttentionFlow
from infoflow_lens.hooks.routes.graded import GradedSetsProbe
from infoflow_lens.hooks.routes.gradient import GradientTimesInput
from infoflow_lens.hooks.routes.powers import SETTINGS, PowerRollout
from infoflow_lens.hooks.scores import Asked


@takes_model
def baselines(
    model: nn.Module,
    state: StateName = "resid_post",
    *,
    positions: Asked | None = None,
    cheap: bool = False,
) -> dict[str, Probe[Any]]:
    """Return other measures of what a state depends on, as probes for one call of ``run_probes``.

    Args:
        model: a TransformerLens model; one whose states cannot be decomposed has no contribution
            routes.
        state: that of gradient x input, "resid_post" or "post_attention"; the others are the same.
        positions: whose states; default all.
        cheap: only what costs a few bare forward passes: no gradient x input, which takes a
            derivative a token, and no attention flow of more than two layers.

    Returns:
        By name: "attention weight", "attention rollout", "graded sets" (the best path, by the
        product of attention weights), "attention flow", "contribution routes" (the widest path),
        "contribution rollout" (ALTI: heads together, all paths), "power rollout, replacing a token"
        and "power rollout, small changes" (contributions to a power), and "gradient x input".
    """
    found: dict[str, Probe[Any]] = {
        "attention weight": AttentionWeight(positions=positions),
        "attention rollout": AttentionRollout(positions=positions),
        "graded sets": GradedSetsProbe(positions=positions),
    }
    if not cheap or layer_count(model) <= 2:
        found["attention flow"] = AttentionFlow(positions=positions)
    # without parts that add up, routes by contributions have no numbers here
    try:
        find_additions(model)
    except InfoFlowError:
        pass
    else:
        found["contribution routes"] = ContributionRoutes(positions=positions)
        found["contribution rollout"] = ContributionRoutes(
            "rollout", heads_apart=False, positions=positions
        )
        for question in SETTINGS:
            found[f"power rollout, {question}"] = PowerRollout(question, positions=positions)
    # it takes backward passes, and all else only what one forward pass shows
    if not cheap:
        found["gradient x input"] = GradientTimesInput(state, positions=positions)
    return found
