"""How an embedding model makes one vector of its last states: what sentence-transformers wrote."""

from pathlib import Path

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import read_json
from infoflow_lens.hooks.readouts import Pooling

# names of sentence-transformers; the mean over the root of the length has the mean's direction
_MODES: dict[str, Pooling] = {
    "mean": "mean",
    "mean_tokens": "mean",
    "mean_sqrt_len_tokens": "mean",
    "max": "max",
    "max_tokens": "max",
    "cls": "first",
    "cls_token": "first",
    "lasttoken": "last",
}


def find_pooling(folder: Path) -> Pooling | None:
    """Read what the embedding is of the last states, where a folder says so.

    Raises:
        InfoFlowError: for several at once, for one of another kind, and for a layer behind it.
    """
    path = next(iter(sorted(folder.glob("*_Pooling/config.json"))), None)
    if path is None:
        return None
    found = read_json(path, "pooling of an embedding model", "save or download the model again")
    given = found.get("pooling_mode")
    modes = [given] if isinstance(given, str) else list(given or ())
    modes += [name.removeprefix("pooling_mode_") for name, on in found.items()
              if name.startswith("pooling_mode_") and on is True]  # fmt: skip
    behind = [f"the layer {each.name} behind it" for each in sorted(folder.glob("*_Dense"))]
    if len(modes) != 1 or modes[0] not in _MODES or behind:
        what = ", ".join([*map(repr, modes), *behind]) or "no mode"
        raise InfoFlowError(
            f"the embedding of the model in {str(folder)!r} is made with {what}: expected one of "
            f"{', '.join(_MODES)}; give EmbeddingCosine a pooling of its own, or ask with "
            "FunctionOfOutput"
        )
    return _MODES[modes[0]]
