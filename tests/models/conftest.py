"""What tests of models share."""

import pytest


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
