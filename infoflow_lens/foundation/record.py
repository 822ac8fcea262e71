"""The record of a run: what was run, on what, with which versions.

Every result carries one, so that a number can be traced to the configuration that produced it. A
record holds no clock and no path: the same run gives the same record.
"""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from infoflow_lens.foundation.display import Displayed
from infoflow_lens.foundation.errors import InfoFlowError

_RECORDED_PACKAGES = ("infoflow-lens", "transformer-lens", "torch", "datasets", "numpy")


def own_version() -> str:
    """The version of this package; of a clone that is not installed, what it would be."""
    try:
        return version("infoflow-lens")
    except PackageNotFoundError:
        project = Path(__file__).parents[2] / "pyproject.toml"
        text = project.read_text(encoding="utf-8") if project.is_file() else ""
        found = re.search(r'^version = "(.+)"$', text, re.MULTILINE)
        return found[1] if found else "unknown"


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that numbers depend on."""
    versions = {"python": platform.python_version()}
    for package in _RECORDED_PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over the names, shapes, dtypes and bytes of tensors, as 16 hex digits."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        tensor = tensor.detach()
        flat = (tensor if tensor.layout is torch.strided else tensor.to_dense()).cpu()
        flat = flat.contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def model_fingerprint(model: nn.Module) -> str:
    """The :func:`fingerprint` of a model's state."""
    tensors = {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    empty = [name for name, tensor in tensors.items() if tensor.is_meta]
    if empty:
        raise InfoFlowError(
            f"{', '.join(empty[:3])} of the model lie on the device 'meta', without numbers: "
            "expected weights; load them first"
        )
    return fingerprint(tensors)


def weight_processing(model: nn.Module) -> dict[str, Any]:
    """How the weights of a TransformerLens model were processed, as far as its config tells.

    Folding a layer norm changes the basis of the residual stream: a map that was fitted in one
    basis means nothing in another.
    """
    cfg = getattr(model, "cfg", None)
    normalization = getattr(cfg, "normalization_type", None)
    return {
        "normalization_type": normalization,
        "layer_norm_folded": isinstance(normalization, str) and normalization.endswith("Pre"),
    }


@dataclass(frozen=True)
class RunRecord(Displayed):
    """What a result needs to be reproduced.

    Attributes:
        config: the settings of the run, as JSON-compatible values.
        seed: the seed of the run, or None where it draws nothing.
        versions: see :func:`package_versions`.
        model_fingerprint: see :func:`model_fingerprint`; None where no model took part.
        weight_processing: see :func:`weight_processing`.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    versions: Mapping[str, str] = field(default_factory=package_versions)
    model_fingerprint: str | None = None
    weight_processing: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_model(
        cls,
        model: nn.Module,
        config: Mapping[str, Any],
        seed: int | None = None,
        fingerprint_of_model: str | None = None,
    ) -> RunRecord:
        """The record of a run on `model`, whose fingerprint may be known already."""
        return cls(
            config=dict(config),
            seed=seed,
            model_fingerprint=fingerprint_of_model or model_fingerprint(model),
            weight_processing=weight_processing(model),
        )

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON-compatible values."""
        return asdict(self)
