"""The induction study on the shipped model, against transformers alone; and its rule."""

import pandas as pd
import pytest
import torch
from transformers import GPT2LMHeadModel

from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.hooks import IDEALS
from infoflow_lens.models.shipped import find_package_folder
from infoflow_lens.studies.language_model.batches import repeat_random
from infoflow_lens.studies.language_model.induction import Induction
from infoflow_lens.studies.pages import cell_of
from tests.studies.studies_for_tests import smoke_rows

HALF, N = 50, 4


@pytest.fixture(scope="module")
def study():
    return Induction(["stdlib-2l"])


@pytest.fixture(scope="module")
def results(study):
    return smoke_rows(study, half=HALF, n=N)


@pytest.fixture(scope="module")
def plain():
    return GPT2LMHeadModel.from_pretrained(find_package_folder("stdlib-2l"), dtype=torch.float32)


def loss_of(model, ids):
    with torch.no_grad():
        logits = model(ids).logits
    known = slice(HALF + 1, 2 * HALF)
    target = ids[:, HALF + 2 : 2 * HALF + 1]
    return float(torch.nn.functional.cross_entropy(logits[:, known].transpose(1, 2), target))


def test_a_zero_ablation_is_the_model_with_that_part_of_its_output_matrix_zero(results, plain):
    ids = repeat_random(1024, N, HALF, derive_seed("induction", 0))
    heads = results.set_index(["layer", "head"])
    assert heads["loss"].iloc[0] == pytest.approx(loss_of(plain, ids), rel=1e-4)
    for layer, head in ((0, 6), (0, 2), (1, 0), (1, 5)):
        weight = plain.transformer.h[layer].attn.c_proj.weight
        kept = weight.detach().clone()
        with torch.no_grad():
            weight[16 * head : 16 * (head + 1)] = 0
            found = loss_of(plain, ids)
            weight.copy_(kept)
        assert heads.loc[(layer, head), "zero_ablated"] == pytest.approx(found, rel=1e-3)


def test_scores_are_those_of_the_card(results):
    heads = results.set_index(["layer", "head"])
    assert heads["previous_token"].idxmax() == (0, 6)
    above = heads[heads["prefix_matching"] > 0.5]
    assert sorted(above.index) == [(1, 0), (1, 1), (1, 5)]


def test_mechanisms_are_told_apart_where_stretches_differ_in_length(results):
    heads = results.set_index(["layer", "head"])
    assert heads.loc[(0, 6), "mechanism"] == "specific_position"
    assert heads.loc[(1, 0), "mechanism"] == "max_position"
    assert heads["induction_max_position"].iloc[0] < 0.1
    assert heads["induction_specific_position"].iloc[0] > 1


def test_no_map_can_do_better_than_the_principal_components(results):
    assert (results["fvu_bound"] > 0).all()
    # one head carries what it attends to, in 16 of 128 dimensions
    alone = results[(results["layer"] == 0) & (results["head"] == 6)]
    assert (alone["fvu"] > alone["fvu_bound"]).all()


WAYS = ("mechanism", "recovery", "ablation")


def circuit(**changes):
    """Rows of a model in which everything holds; `changes` by layer, head and column."""
    rows = []
    for layer in (0, 1):
        for head in (0, 1):
            own = head == 0
            rows.append(
                {
                    "model": "m", "step": 1, "final": True, "layer": layer, "head": head,
                    "prefix_matching": 0.9 if own and layer else 0.1,
                    "previous_token": 0.8 if own and not layer else 0.1,
                    "mechanism": "own_position" if not own else
                    ("specific_position", "max_position")[layer],
                    "fvu": 0.7 if own else 0.99, "fvu_bound": 0.6, "fvu_random": 1.0,
                    "fvu_shuffled": 0.99, "loss": 0.1, "mean_ablated": 5.0 if own else 0.2,
                    "zero_ablated": 5.0 if own else 0.2, "induction_ablated": 6.0,
                    **{f"damage_{ideal}": 0.1 for ideal in IDEALS},
                    **{f"induction_{ideal}": 0.1 for ideal in IDEALS},
                }
            )  # fmt: skip
    frame = pd.DataFrame(rows).set_index(["layer", "head"], drop=False)
    for (layer, head, column), value in changes.get("cells", {}).items():
        frame.loc[(layer, head), column] = value
    return frame.reset_index(drop=True)


def test_the_rule_passes_where_everything_holds(study):
    assert study.verdict(circuit()).passed
    assert study.table(circuit()).count("confirms") == 3


@pytest.mark.parametrize(
    ("cells", "against"),
    [
        ({(0, 0, "mechanism"): "max_position"}, "mechanism"),
        ({(1, 0, "mechanism"): "soft"}, "mechanism"),
        ({(0, 0, "fvu"): 0.81}, "recovery"),
        ({(1, 0, "fvu_shuffled"): 0.9}, "recovery"),
        ({(0, 0, "fvu_random"): 0.9}, "recovery"),
        ({(0, 0, "mean_ablated"): 1.0}, "ablation"),
        ({(0, 1, "mean_ablated"): 5.5}, "ablation"),
        ({(1, 1, "mean_ablated"): 5.5}, "ablation"),
        ({(i, j, "induction_ablated"): 0.9 for i in (0, 1) for j in (0, 1)}, "ablation"),
    ],
)
def test_each_way_can_disagree(study, cells, against):
    rows = circuit(cells=cells)
    assert not study.verdict(rows).passed
    table = study.table(rows)
    ways = {way: cell_of(table, way, "m") for way in WAYS}
    assert ways == {way: "disagrees" if way == against else "confirms" for way in WAYS}


def test_without_an_induction_head_nothing_is_seen(study):
    verdict = study.verdict(circuit(cells={(1, 0, "prefix_matching"): 0.4}))
    assert not verdict.passed
    assert verdict.remarks == ("m: no induction head (largest prefix matching 0.40)",)


def test_table_and_figure_show_the_circuit(study, results):
    table = study.table(results)
    for head in ("0.6 | previous token", "1.0 | induction", "1.5 | induction"):
        assert head in table
    study.figure(results)
