"""Load a model and read a text: the first step of every question about a flow."""

from contextlib import nullcontext
from typing import Any

from infoflow_lens.flows.settings import as_list, check_text
from infoflow_lens.foundation.progress import hide_library_bars
from infoflow_lens.hooks.model.inputs import Batches, read_inputs
from infoflow_lens.models.loading import LoadedModel, load_any


def load_and_read(
    model: Any, text: Any, max_length: int | None, progress: bool, **options: Any
) -> tuple[LoadedModel, Batches]:
    """Return the model and what it reads.

    Args:
        model, options: as for `load_any`.
        text: a text or several, token ids, or vectors.
        max_length: longer texts are cut to so many tokens.
        progress: whether libraries show bars while they load a model.

    Raises:
        InfoFlowError: for no text, before the model is loaded; and as for `load_any` and
            `run_probes`.
    """
    check_text(text)
    with nullcontext() if progress else hide_library_bars():
        loaded = load_any(model, **options)
    given = as_list(loaded.model, text)
    return loaded, read_inputs(loaded.model, given, max_length=max_length, name="text")
