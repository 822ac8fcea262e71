"""Whether a model shows of a sequence in a padded batch what it shows of it alone."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from infoflow_lens.foundation.modules import SeededRandom, eval_mode
from infoflow_lens.hooks.model.anatomy import Anatomy
from infoflow_lens.hooks.model.call import mark_own_call
from infoflow_lens.hooks.model.log import first_tensor
from infoflow_lens.hooks.model.sites import SiteRun

_IN_FULL = (torch.float32, torch.float64)


def takes_padding(model: nn.Module, anatomy: Anatomy, example: Mapping[str, Any]) -> bool:
    """Run a few tokens alone, and padded on the right beside longer ones with a mask.

    They show something else where attention mixes neighbours, or averages over positions, before it
    masks them, and where a model sees later positions and takes no mask.

    Args:
        model: the model.
        anatomy: of it.
        example: what its ``forward`` takes, as for ``find_anatomy``.

    Returns:
        Whether the last state is the same. True where that cannot be tried, for want of token ids.
    """
    ids = example.get("input_ids")
    # other examples cannot be cut and padded
    if len(example) > 1 or not isinstance(ids, Tensor) or ids.ndim != 2 or len(ids) < 2:
        return True
    n = ids.shape[1] // 2
    mask = torch.ones_like(ids)
    mask[1, n:] = 0
    parameters = inspect.signature(model.forward).parameters.values()
    has_mask = any(p.name == "attention_mask" or p.kind is p.VAR_KEYWORD for p in parameters)
    masked = {"attention_mask": mask} if has_mask else {}
    with mark_own_call(), SeededRandom(0), eval_mode(model):
        alone = _last_state(model, anatomy, {"input_ids": ids[1:, :n]})
        padded = _last_state(model, anatomy, {"input_ids": ids * mask, **masked})
    # a model of another layout: nothing that padding could be compared by
    if alone.ndim < 3 or alone.shape[1] != n or padded.shape[1] != ids.shape[1]:
        return True
    apart = (padded[1:, :n] - alone).float().abs().max()
    return bool(apart <= (1e-3 if alone.dtype in _IN_FULL else 0.1) * alone.float().abs().max())


def _last_state(model: nn.Module, anatomy: Anatomy, given: Mapping[str, Any]) -> Tensor:
    """Run the model, and return what leaves the last block, or the output where that is hidden."""
    seen: list[Tensor] = []

    def keep(name: str, tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    has_stream = anatomy.blocks[-1].axes is not None
    names = [f"blocks.{len(anatomy.blocks) - 1}.hook_resid_post"] if has_stream else []
    with SiteRun(model, anatomy, names, keep).watching():
        output = model(**given)
    found = first_tensor(seen or output)
    assert found is not None  # a model gives something
    return found
