"""The order of tokens that is predicted without replacing any, beside the measured one."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.hooks.answer.result import ORDERS
from infoflow_lens.hooks.model.inputs import Batches
from infoflow_lens.hooks.passes.run import run_probes
from infoflow_lens.hooks.routes.graded import GradedSetsProbe
from infoflow_lens.hooks.routes.powers import PowerRollout


def predict_tokens(
    model: nn.Module, text: Batches, position: int
) -> tuple[Float[Tensor, "order pos"], list[str]]:
    """Predict how strongly the last state of a position holds each token, by :data:`ORDERS`.

    NaN where it cannot be said: of tokens that the state does not see, and of models whose states
    cannot be decomposed.

    Args:
        model: what ``open_model`` gives.
        text: of which each token is scored.
        position: that is read.

    Returns:
        The scores, and what a reader must know.
    """
    n_pos = text.longest or 0
    last = position % n_pos
    scores = torch.full((len(ORDERS), n_pos), torch.nan, dtype=torch.float64)
    notes: list[str] = []
    probes = PowerRollout(positions=(last,)), GradedSetsProbe(positions=(last,))
    for row, probe in enumerate(probes):
        try:
            (found,) = run_probes(model, text, [probe], progress=False)
        except InfoFlowError as error:
            notes.append(f"the order of tokens by {ORDERS[row]} is not predicted: {error}")
            continue
        scores[row] = found.values[-1, 0, 0].double().cpu()
        notes += [note for note in found.notes if note not in notes]
    scores[2] = -(last - torch.arange(n_pos)).abs()
    # nearness alone says nothing of what a state sees, so the two others decide
    sees = scores[:2].nan_to_num(0).amax(dim=0) > 0
    return scores.masked_fill(~sees, torch.nan), notes
