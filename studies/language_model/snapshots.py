"""Language models at several moments of their training, by what a user types."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import temporary_folder
from infoflow_lens.foundation.modules import SeededRandom
from infoflow_lens.foundation.naming import find_model
from infoflow_lens.models.loading import load_any
from infoflow_lens.models.pretrained import Stored, check_config, find_class
from infoflow_lens.models.shipped import find_package_folder

_CHECKPOINTS, _STEP = "checkpoints", re.compile(r"step-?(\d+)$")
_EARLY = 64  # steps before this are all alike


@dataclass(frozen=True)
class Snapshot:
    """A model at one moment.

    Attributes:
        model: its name; of a folder, the folder's own.
        step: of the training; -1 where nothing tells it.
        final: whether it is the last one of its model.
        source: what :func:`~infoflow_lens.models.loading.load_any` reads.
        weights: what tells these weights from others: a digest of the files, or the name.
    """

    model: str
    step: int
    final: bool
    source: str
    weights: str

    def settings(self) -> dict[str, Any]:
        """Return what settings and rows tell of it: all but where it lies."""
        names = ("model", "step", "final", "weights")
        return {name: getattr(self, name) for name in names}


def snapshots(model: str, most: int | None = None) -> list[Snapshot]:
    """Find the snapshots of a model, in the order of training.

    Args:
        model: a folder of Hugging Face, with ``checkpoints/step-...`` in it where it has some;
            a name; or owner/name@revision,revision,... of the hub.
        most: so many at most: the first, and others spread evenly over the list from step 64 on, to
            the last, so that there are more where checkpoints are dense; None for all. Revisions
            that are named are all taken.

    Raises:
        InfoFlowError: for an empty name, or a number below 1.
    """
    if not model.strip() or (most is not None and most < 1):
        raise InfoFlowError(
            f"model is {model!r}, most is {most}: expected a folder or a name, and at least 1"
        )
    # a model that comes with the package, a folder of checkpoints, revisions of the hub, or one
    # model
    folder = find_model(model).path
    if shipped := find_package_folder(model):
        found = [(-1, str(shipped), _digest(shipped))]
    elif folder.is_dir():
        found = _list_checkpoints(folder)
    elif "@" in model:
        name, _, revisions = model.partition("@")
        found = [
            (_step_of(revision), f"{name}@{revision}", f"{name}@{revision}")
            for revision in revisions.split(",")
            if revision
        ]
        if not found:
            raise InfoFlowError(f"model is {model!r}: expected a revision behind the @")
        model, most = name, None
    else:
        found = [(-1, model, model)]
    name = folder.resolve().name if folder.is_dir() and not shipped else model
    # spread over training, the first and the last among them
    chosen = [found[i] for i in _spread([step for step, _, _ in found], most)]
    last = len(chosen) - 1
    return [
        Snapshot(name, step, index == last, source, weights)
        for index, (step, source, weights) in enumerate(chosen)
    ]


def _list_checkpoints(folder: Path) -> list[tuple[int, str, str]]:
    parts = [part for part in (folder / _CHECKPOINTS).glob("step-*") if _STEP.search(part.name)]
    parts = sorted(parts, key=lambda part: _step_of(part.name))
    return [(_step_of(p.name), str(p), _digest(p)) for p in parts or [folder]]


def _step_of(name: str) -> int:
    found = _STEP.search(name)
    return int(found[1]) if found else -1


def _digest(folder: Path) -> str:
    """Digest the config and the weights, as 12 hex digits.

    Raises:
        InfoFlowError: if the folder holds no weights.
    """
    files = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
    if not files:
        raise InfoFlowError(
            f"the folder {folder.name!r} holds no weights: expected what save_pretrained writes"
        )
    digest = hashlib.sha256()
    for path in sorted([*files, *folder.glob("config.json")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _spread(steps: Sequence[int], most: int | None) -> list[int]:
    """Return the indices of at most `most` steps, spread evenly over the list from step 64 on."""
    n = len(steps)
    if most is None or n <= most:
        return list(range(n))
    if most == 1:
        return [n - 1]
    late = [i for i, step in enumerate(steps) if step >= _EARLY]
    if len(late) < most - 1:
        late = list(range(n))
    # the first snapshot is always among them
    among = [0, *(i for i in late if i)]
    return sorted({among[round(i * (len(among) - 1) / (most - 1))] for i in range(most)})


@contextmanager
def reset_weights(source: str, seed: int) -> Iterator[str]:
    """Yield a folder with a model of the same configuration and vocabulary, its weights drawn anew.

    Args:
        source: a folder, or a name of the hub.
        seed: of the weights; the global random state is left alone.
    """
    from transformers import AutoConfig, AutoTokenizer

    name, _, revision = source.partition("@")
    if Path(source).is_dir():
        name, revision = source, ""
        check_config(Path(source), Stored.read_folder(Path(source)))
    config: Any = AutoConfig.from_pretrained(
        name, revision=revision or None, trust_remote_code=False
    )
    kind = find_class(config)
    tokenizer = AutoTokenizer.from_pretrained(
        name, revision=revision or None, trust_remote_code=False
    )
    with temporary_folder() as scratch:
        with SeededRandom(seed):
            plain = kind.__name__ == "AutoModelForCausalLM"
            # AutoModelForCausalLM builds by a method, a class of one architecture by its call
            made = kind.from_config(config) if plain else kind(config)
        made.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        yield str(scratch)


def load_snapshot(source: str, device: str) -> nn.Module:
    """Load the model of a snapshot.

    Args:
        source: of the snapshot.
        device: where it is put, as PyTorch names it.

    Raises:
        InfoFlowError: if it cannot be loaded, or has no tokenizer.
    """
    found = load_any(source, device=device)
    if found.tokenizer is None:
        raise InfoFlowError(
            f"{Path(source).name!r} has no tokenizer: expected one, to read texts; save it with "
            "the model"
        )
    return found.model
