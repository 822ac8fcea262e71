"""What of TransformerLens is installed, for tests that are about one of its versions."""

import pytest

from infoflow_lens.models.hooked import HAS_HOOKED_TRANSFORMER

needs_hooked_transformer = pytest.mark.skipif(
    not HAS_HOOKED_TRANSFORMER, reason="HookedTransformer is of TransformerLens 3"
)
needs_version_4 = pytest.mark.skipif(
    HAS_HOOKED_TRANSFORMER, reason="it is about TransformerLens without HookedTransformer"
)

# settings of HookedTransformer that a native bridge refuses, or leaves out in silence
_BEYOND_NATIVE = ("use_local_attn", "use_attention_sinks", "parallel_attn_mlp", "use_attn_scale")


def is_native(changes):
    """Whether a native bridge of version 4 can have these settings of HookedTransformer."""
    positions = changes.get("positional_embedding_type", "standard")
    return positions in ("standard", "rotary") and not set(_BEYOND_NATIVE) & set(changes)


def for_each(kinds):
    """Parameters of a test: (settings, ...) each, of which some are for HookedTransformer alone."""
    return [
        pytest.param(*kind, marks=() if is_native(kind[0]) else needs_hooked_transformer)
        for kind in kinds
    ]


def same_release(recorded, running):
    """Whether a recorded version is the running one; some wheels leave the build behind "+" out."""
    return recorded in (running, running.partition("+")[0])
