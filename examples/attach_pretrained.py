"""Probe a pretrained model by name, by default the one that comes with the package.

Run: python examples/attach_pretrained.py [MODEL]   (seconds for the shipped one, minutes for gpt2)
"""

import sys
import warnings

from infoflow_lens import (
    InfoFlowWarning,
    JacobianInfluence,
    PositionsProbe,
    RecoveryProbe,
    compare,
    inspect_model,
    load_any,
    propagate,
    run_probes,
)

warnings.simplefilter("ignore", InfoFlowWarning)  # few texts: the maps are under-determined

TEXTS = [
    "if not isinstance(name, str):\n    raise TypeError(name)\nif not isinstance(",
    "def area(width, height):\n    return width * height\n\ndef volume(width, height",
    "import os\nimport sys\nimport re\nimport os",
    "self.name = name\nself.value = value\nself.name",
    "for key, value in items:\n    print(key, value",
]

loaded = load_any(sys.argv[1] if len(sys.argv) > 1 else "stdlib-2l")
model = loaded.model
print(loaded.description)

# What can be asked of it is found out by running it.
found = inspect_model(model, model.to_tokens(TEXTS[0]))
print(found.to_frame().to_string(index=False))
print("\n".join(found.problems()) or "every probe can be used", "\n")

# Texts of different lengths: padding takes part in nothing.
positions, recovery = run_probes(
    model,
    TEXTS,
    [PositionsProbe((1, 2), spread=True), RecoveryProbe((1, 2), ridge="gcv", controls=("self",))],
    progress=False,
)
print(positions.summary(skip=1).head(8).to_string(index=False, float_format="{:.2f}".format))
best = recovery.to_frame().sort_values("fvu").head(3)
print("\nbest recovered (five texts say little; give a hundred):")
print(best[["layer", "head", "rank", "fvu", "fvu_self"]].to_string(index=False), "\n")

# What does the last token depend on, and is it what the heads' first choices allow?
text = TEXTS[0]
chosen, influence = run_probes(
    model,
    text,
    [PositionsProbe(), JacobianInfluence("resid_post", positions=(-1,), estimate=16)],
    progress=False,
)
agreement = compare(propagate(chosen.argmax), influence)
scores = influence.influence[-1, 0, 0]
order = scores.argsort(descending=True)[:5].tolist()
tokens = model.to_str_tokens(text)
print("most influence on the last state:", ", ".join(f"{tokens[i]!r} ({i})" for i in order))
print(f"share of squared influence inside the predicted set: {agreement.cls.influence_inside:.2f}")
