"""The models that the project hosts: real HookedTransformers over vector tokens."""

from infoflow_lens.models.architecture import Architecture

__all__ = ["Architecture"]
