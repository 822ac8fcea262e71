"""What of TransformerLens is installed, for tests that are about one of its versions."""

import pytest

from infoflow_lens.models.hooked import HAS_HOOKED_TRANSFORMER

needs_hooked_transformer = pytest.mark.skipif(
    not HAS_HOOKED_TRANSFORMER, reason="HookedTransformer is of TransformerLens 3"
)
needs_version_4 = pytest.mark.skipif(
    HAS_HOOKED_TRANSFORMER, reason="it is about TransformerLens without HookedTransformer"
)
