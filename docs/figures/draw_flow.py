"""Draw the README's picture: the flow to the last token of a line of code, in the shipped model.

Run: python docs/figures/draw_flow.py   (seconds)
"""

from pathlib import Path

from infoflow_lens import flow

TEXT = "if not isinstance(name, str):\n    raise TypeError(name)\nif not isinstance("

picture = flow("stdlib-2l", TEXT, progress=False).plot()
picture.set_size_inches(9, 4)
picture.savefig(Path(__file__).with_name("flow.png"), dpi=110, bbox_inches="tight", metadata={})
