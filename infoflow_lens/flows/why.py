"""Why does this head look there? Of a model by name or in memory, and a text."""

import os
from typing import Any

import torch
from torch import nn

from infoflow_lens.flows.run import load_and_read
from infoflow_lens.foundation.modules import outside_user_modes
from infoflow_lens.foundation.settings import Count, checked
from infoflow_lens.hooks.model.inputs import Inputs, holds_pairs
from infoflow_lens.hooks.why import STRONGEST, Why, WhyAll, measure_why, measure_why_all
from infoflow_lens.models.loading import LoadedModel


@outside_user_modes()
@checked
def why(
    model: str | os.PathLike[str] | nn.Module | LoadedModel,
    text: Inputs,
    layer: int,
    head: int,
    query: int = -1,
    keys: tuple[int, int] | None = None,
    *,
    max_length: Count | None = None,
    tokenizer: Any | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    backend: str = "auto",
    progress: bool = True,
) -> Why:
    """Say why a head prefers one key to another, split exactly over what wrote their states.

    The margin is the difference of two attention scores of a query, before the softmax. A score is
    a product of the query's state and the key's, each behind norms. While the statistics by which
    norms divide are held, it is linear in either state, and each state is the sum of the token's
    embedding, the positional embedding, what each earlier head and MLP (and, in Gemma 4, a third
    sublayer) wrote, and what biases make (Elhage et al. 2021, "QK circuits"). So the margin is a
    sum over pairs: of one part of the query and one part of the keys, at the first key minus at the
    second.

    `by_key()` of the result says why this key, `by_query()` what the head looks for. `distance`
    says how far the pieces are from the margin: rounding, unless scores are no sums of products (a
    soft cap). It costs three passes up to the layer, and derivatives for each width of a head.

    That the scale is held means: the pieces say what the parts add as the state stands. Without a
    part the norm would divide by another number, and all other pieces would change with it.

    Args:
        model: a name, a folder, a model of TransformerLens, of this package or of transformers, or
            what `load_any` gave.
        text: one text, a pair of them as a tuple, token ids, or vectors for models over vectors.
        layer: of the head, from 0, or from -1 backwards.
        head: from 0, or from -1 backwards.
        query: its position, from 0, or from -1 backwards.
        keys: positions of two keys; default, those of the largest score and of the next one that is
            no sink.
        max_length: a longer text is cut to so many tokens.
        tokenizer, device, dtype, backend: as for `load_any`.
        progress: whether libraries show bars while they load a model.

    Raises:
        InfoFlowError: for a model, text, head or position that do not fit, a query that sees fewer
            than two keys, and a model that does not show the queries and keys of its scores.

    Example:
        >>> import infoflow_lens as il
        >>> w = il.why("gpt2", "one two three one two", layer=5, head=1)
        >>> w.table()
    """
    given: Inputs = [text] if holds_pairs([text]) else text
    loaded, inputs = load_and_read(
        model, given, max_length, progress,
        tokenizer=tokenizer, device=device, dtype=dtype, backend=backend,
    )  # fmt: skip
    return measure_why(loaded.model, inputs, layer, head, query, keys)


@outside_user_modes()
@checked
def why_all(
    model: str | os.PathLike[str] | nn.Module | LoadedModel,
    text: Inputs,
    *,
    strongest: Count = STRONGEST,
    max_length: Count | None = None,
    tokenizer: Any | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    backend: str = "auto",
    progress: bool = True,
) -> WhyAll:
    """Find for every head and query of a few texts the strongest reasons for its first key.

    As :func:`why`, for the keys of the largest score of each query and of the next one that is
    no sink, with the strongest parts of the keys and the sum of the others. Each text is run three
    times.

    Args:
        model, text: as for :func:`why`; several texts, too.
        strongest: how many parts of the keys each line has by name.
        max_length: longer texts are cut to so many tokens.
        tokenizer, device, dtype, backend: as for `load_any`.
        progress: whether libraries show bars while they load a model.

    Raises:
        InfoFlowError: as for :func:`why`.
    """
    loaded, inputs = load_and_read(
        model, text, max_length, progress,
        tokenizer=tokenizer, device=device, dtype=dtype, backend=backend,
    )  # fmt: skip
    return measure_why_all(loaded.model, inputs, strongest)
