"""What InfoFlow says, without any model: sets of input positions and how layers update them."""

from infoflow_lens.theory.information_sets import InformationSets, propagate

__all__ = ["InformationSets", "propagate"]
