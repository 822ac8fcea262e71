"""Who a model is: all that its numbers depend on beside the inputs."""

from typing import Any

from torch import nn

from infoflow_lens.foundation.modules import eval_mode
from infoflow_lens.foundation.record import (
    behaviour,
    code_digest,
    configuration_fingerprint,
    model_fingerprint,
)
from infoflow_lens.hooks.model.call import output_of, user_hooks
from infoflow_lens.hooks.model.inputs import Batches
from infoflow_lens.hooks.model.points import reads_vectors

_N_SEQUENCES, _N_TOKENS = 2, 128  # there is no room for the logits of many tokens
HOOKS = "hooks"


def model_identity(model: nn.Module, batches: Batches) -> dict[str, Any]:
    """Return what the numbers of a model depend on, as JSON-compatible values.

    What no weight and no config tells, such as an attribute, a buffer that is not saved or another
    ``forward``, shows in the outputs of the first sequences: they are compared bit by bit.

    Args:
        model: a TransformerLens model.
        batches: the sequences of a run.

    Returns:
        Digests of "model", its weights, and of its "configuration"; the user's "hooks" on it, by
        module and code; and its "outputs", see
        :func:`~infoflow_lens.foundation.record.behaviour`.
    """
    batch = next(batches.batches(_N_SEQUENCES))
    if not reads_vectors(model):
        batch = batch.cut(_N_TOKENS)
    with eval_mode(model):
        # twice, as bits count only where a model gives the same bits again
        outputs = behaviour(output_of(model, batch), output_of(model, batch))
    names = {module: name for name, module in model.named_modules()}
    return {
        "model": model_fingerprint(model),
        "configuration": configuration_fingerprint(model),
        HOOKS: [[names[module], code_digest(hook)] for module, hook in user_hooks(model)],
        "outputs": outputs,  # last: they follow from all others
    }
