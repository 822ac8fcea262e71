"""Every shape in a public signature is what flows there.

The whole path runs in a process of its own in which jaxtyping and beartype check all arguments and
results. (Elsewhere they are off: tests of bad input must meet the project's own errors.)
"""

import pytest

from tests.processes import printed_by

SCRIPT = """
import sys, tempfile
from jaxtyping import install_import_hook

with install_import_hook("infoflow_lens", "beartype.beartype"):
    import infoflow_lens.cli
    from infoflow_lens.agreement import *
    from infoflow_lens.hooks import *
    from infoflow_lens.models.host import *
    from infoflow_lens.ranking import *
    from infoflow_lens.tasks import *
    from infoflow_lens.theory import *
    from infoflow_lens.training import *
    from infoflow_lens import *
    from infoflow_lens.studies.demo import DemoConfig, run_demo
    from infoflow_lens.hooks.passes.ranking import rank_keys
    from infoflow_lens.studies.constructions import CONSTRUCTIONS
    from infoflow_lens.studies import *

import torch
run_demo(
    tempfile.mkdtemp(),
    DemoConfig(n_tokens=6, n_components=3, n_heads=(3, 1), d_model=12, d_mlp=16, half_epochs=1,
               epochs=2, n_train=64, n_validation=32, n_recovery=60, n_influence=10, n_shown=2),
    progress=False,
)
model = build_model(Architecture(n_heads=(2,), d_model=6, d_token=4, n_tokens=5, d_encoder=7))
model5 = model
task = load_task("d_retrieval", n_tokens=5, outer="identity", subsets=((0,), (1,), (2,), (3, 4)))
x, _ = task.sample(12, seed=0)
for result in run_probes(
    model, x, [PositionsProbe((1, 3)), RecoveryProbe((1, 2)), JacobianInfluence()], progress=False
):
    result.to_frame(), result.plot()
from infoflow_lens.studies.bounds import kth_largest_collision
from infoflow_lens.studies.comparison_trees import ComparisonTree
from infoflow_lens.theory.cost import DigitCode, TanhCode, exponents
for name in ("d_retrieval", "depth_separation", "intrinsic_dimension", "triangle_center"):
    task = load_task(name, n_tokens=6, d_token=4)
    for positions in ("none", "learned"):
        estimate(
            Architecture(n_heads=(2, 4), d_model=8, d_token=4, n_tokens=6,
                         positional_embedding=positions), task, verify=5)
    x, _ = task.sample(3, seed=0)
    task.active_index_set(x)
    ComparisonTree.over(6, task.components[0]).evaluate(x)
small = {
    "n_words": 4, "length": 3, "n_sequences": 5, "n_questions": 3, "n_answers": 4, "n_pairs": 2,
    "n_entities": 9, "hops": 2,
}
for name in list_tasks():
    task = load_task(name)
    sizes = {key: value for key, value in small.items() if key in task.parameters()}
    task = load_task(name, **sizes)
    x, _ = task.sample(6, seed=0)
    task.active_index_set(x), task.dataset("train", 5), dataset_card(task)
for name in list_constructions():
    task = load_task(CONSTRUCTIONS[name].task)
    sizes = {key: value for key, value in small.items() if key in task.parameters()}
    model, task = build_construction(name, **sizes)
    x, _ = task.sample(3, seed=0)
    model(x)
    for result in run_probes(model, x, [AttendedProbe()], progress=False):
        result.positions, result.to_frame()
x, _ = load_task("d_retrieval", n_tokens=5).sample(12, seed=0)
positions, attended, influence = run_probes(
    model5, x, [PositionsProbe((1, 2)), AttendedProbe(), ResampleInfluence(x[:3])], progress=False
)
coverage_curve(positions.positions, influence.influence).to_frame()
mechanisms = measure_mechanisms(model5, x, progress=False)
replace_greedily(model5, x, mechanisms, budget=1.0, progress=False)
exponents(propagate(mechanisms.rules(attended.positions, positions.argmax)), 4, 6)
mechanisms.plot()
inspect_model(model5, x).to_frame(), positions.summary()
from infoflow_lens.studies.constructions import certified_model
for name in ("memorization", "in_context_qa"):
    task = load_task(name, **({"n_sequences": 5} if name == "memorization" else {
        "n_questions": 2, "n_answers": 2, "n_pairs": 2}))
    x, y = task.all_sequences()
    certificate = one_layer_certificate((x, y))
    dependence(x)
    if certificate.feasible:
        certified_model(certificate)(x), certificate.model(x)
for code in (DigitCode(3, 2, 4), TanhCode(3, 2, 4, steepness=1e3)):
    code.decode(code.encode(torch.rand(7, 3)))
kth_largest_collision(lambda z: z, lambda z: z.unsqueeze(-1), 4, 2, 0.02)
try:
    rank_keys("no tensor", (1,))
except Exception as error:
    print("checked" if "rank_keys" in str(error) else error)
"""


@pytest.mark.slow
def test_annotated_shapes_hold_along_the_whole_path(tmp_path):
    path = tmp_path / "whole_path.py"
    path.write_text(SCRIPT)
    assert printed_by(path, folder=tmp_path).strip() == "checked"
