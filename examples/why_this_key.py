"""Why does this head look there? The margin between two keys, by what wrote their states.

Run: python examples/why_this_key.py [MODEL]   (seconds)
"""

import sys

from infoflow_lens import load_any, why, why_all

TEXT = "import os\nimport sys\nimport re\nimport os"

loaded = load_any(sys.argv[1] if len(sys.argv) > 1 else "stdlib-2l")
last = len(loaded.model.blocks) - 1

# All heads and queries in one pass: at the last token, the two strongest parts of each choice
every = why_all(loaded, TEXT)
n_heads, n_queries = every.margins[last].shape[1:]
for head in range(n_heads):
    line = every.of(last, head, n_queries - 1)
    parts = ", ".join(f"{name} {value:+.2f}" for name, value in line["parts"][:2])
    first, second = line["keys"]
    print(f"{last}.{head}: key {first} before {second} by {line['margin']:.2f}: {parts}")

# One head in full: why this key, and what the head looks for. In stdlib-2l this is an induction
# head, and head 0.6 attends to the token before.
found = why(loaded, TEXT, last, 5)
print(f"\n{found.summary()}")
for by in ("key", "query"):
    print(f"\nparts of the {by}")
    print(found.table(by).head(4).to_string(index=False, float_format="{:+.2f}".format))

# Pairs of parts: what the head makes of one part of the query and one of the keys.
pieces = found.to_frame()
strongest = pieces.reindex(pieces["pieces"].abs().sort_values(ascending=False).index).head(4)
print(f"\n{strongest.to_string(index=False, float_format='{:+.2f}'.format)}")

# Against another key: (first, second) are positions.
other = why(loaded, TEXT, last, 5, keys=(found.keys[0], 0))
print(f"\n{other.summary()}")
