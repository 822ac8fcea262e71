"""The script of the picture moves sets as `propagate` does: its code alone, without a browser."""

import json
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch

from infoflow_lens.report.assets import asset
from infoflow_lens.report.flow_view import FlowView, ViewedInput, ViewedMechanism
from infoflow_lens.report.pages import picture_data
from infoflow_lens.theory import propagate

NODE = shutil.which("node")
PROGRAM = """
const d3 = { format: () => String };
%s
const data = JSON.parse(require("fs").readFileSync(0, "utf8"));
(async () => {
  const said = [], strengths = [];
  for (const packed of data.inputs) {
    const input = await infoflow.unpack(packed);
    for (const rule of Object.keys(input.moves)) {
      const off = input.heads.map(() => new Set());
      const { sets, words } = infoflow.propagate(input, rule, 2, off);
      said.push(sets.slice(1).map((layer) => Array.from({ length: input.n_queries }, (_, t) =>
        input.tokens.map((_, s) => s).filter((s) => infoflow.has(layer, words, t, s)))));
      if (!input.weights) continue;
      strengths.push(input.heads.map((_, layer) => Array.from({ length: input.n_queries },
        (_, position) => Array.from(infoflow.paths(
          input, rule, 2, off, { sets, words }, { layer, position }).best[0])
          .slice(0, input.tokens.length))));
    }
  }
  console.log(JSON.stringify([said, strengths]));
})();
"""


def viewed(seed, causal, extra):
    """An input with heads of every mechanism."""
    generator = torch.Generator().manual_seed(seed)
    n_tokens = 5 + 30 * seed
    n = n_tokens + extra
    ranked = [torch.randint(-1, n_tokens, (h, n, 3), generator=generator) for h in (4, 2)]
    listed = torch.randint(-1, n_tokens, (n, 2), generator=generator)
    every = torch.arange(n_tokens).expand(n, -1)
    heads = [
        ViewedMechanism("several", every.where(every <= torch.arange(n)[:, None], -1)),
        ViewedMechanism("max", ranked[0][1, :, :1]),
        ViewedMechanism("own", listed[:, :0]),
        ViewedMechanism("fixed", listed),
    ]
    return ViewedInput(
        tokens=[f"t{i}" for i in range(n_tokens)], n_queries=n, ranked=ranked,
        mechanisms=[heads, heads[2:]], causal=causal,
    )  # fmt: skip


def said_of(inputs):
    """Sets and strengths by input and rule, of all states."""
    parts = ("data", "sets", "strengths")
    script = PROGRAM % "\n".join(asset(f"flow/{part}.js") for part in parts)
    data = json.dumps(json.loads(picture_data(FlowView("Inputs", inputs))))
    done = subprocess.run(
        [str(NODE), "-e", script], input=data, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_the_script_moves_sets_as_propagate_does():
    kinds = ((True, 0), (False, 1))
    inputs = [viewed(seed, causal, extra) for seed in (0, 1) for causal, extra in kinds]
    expected = []
    for view in inputs:
        for rule in ("max_position", "top_k", "mechanisms"):
            members = propagate(view.layers_of(rule, 2), len(view.tokens)).members[:, 0]
            expected.append(
                [[row.nonzero().flatten().tolist() for row in layer] for layer in members]
            )
    assert said_of(inputs)[0] == expected


@pytest.mark.skipif(NODE is None, reason="needs node")
@pytest.mark.parametrize("extra", [0, 1])
def test_its_strengths_are_those_of_graded_sets(extra):
    view = viewed(1, False, extra)
    generator = torch.Generator().manual_seed(2)
    weights = [torch.rand(keys.shape, generator=generator) for keys in view.ranked]
    weights = [each.half().float() for each in weights]  # which is what the page keeps
    view = replace(view, weights=weights, mechanisms=None)
    _, strengths = said_of([view])
    for k, found in zip((1, 2), strengths, strict=True):
        expected = propagate(
            [keys[None, ..., :k] for keys in view.ranked],
            len(view.tokens),
            strength=[each[None, ..., :k] for each in weights],
        ).strengths[:, 0]
        there = torch.tensor(found).clamp(min=0)  # -1 stands for no path
        torch.testing.assert_close(there, expected, rtol=1e-5, atol=1e-7)
