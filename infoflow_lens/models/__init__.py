"""The models that the project hosts, on TransformerLens 3 and 4."""

from infoflow_lens.models.architecture import Architecture

__all__ = ["Architecture"]
