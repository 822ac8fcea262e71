"""What tests of models share."""

import pytest
import torch


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of huggingface_hub with nothing in it, and no network."""
    import huggingface_hub.constants as constants

    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.utils.hub.is_offline_mode", lambda: True)
    return folder


@pytest.fixture
def sizes_made(monkeypatch):
    """How many numbers each parameter has that a module was given; 0 where they take no memory."""
    made, register = [], torch.nn.Module.register_parameter

    def watched(module, name, parameter):
        made.append(0 if parameter is None or parameter.is_meta else parameter.numel())
        register(module, name, parameter)

    monkeypatch.setattr(torch.nn.Module, "register_parameter", watched)
    return made
