"""Circuits whose weights were set by hand: routes lead where the answer comes from."""

import pytest
import torch

from infoflow_lens import baselines, run_probes
from infoflow_lens.studies.constructions import build_construction
from tests.conftest import make_token_model

ROUTES = (
    "attention weight",
    "attention rollout",
    "graded sets",
    "attention flow",
    "contribution routes",
    "contribution rollout",
    "power rollout, replacing a token",
    "power rollout, small changes",
)


def scored(model, x, state="resid_post"):
    """The scores of the last state of each sequence in the last layer, by name."""
    probes = baselines(model, state, positions=(-1,))
    results = run_probes(model, x, list(probes.values()), progress=False)
    return {name: found.full()[-1, :, -1] for name, found in zip(probes, results, strict=True)}


def test_cls_of_d_retrieval_reads_the_active_tokens():
    """One layer: each head of CLS attends to the token that its component needs."""
    model, task = build_construction("d_retrieval")
    x = task.sample(40, seed=0)[0]
    active = task.active_index_set(x)
    found = scored(model, x)
    for name in (*ROUTES, "gradient x input"):
        scores = found[name]
        least = scores.masked_fill(~active, torch.inf).amin(dim=1)
        most = scores.masked_fill(active, -torch.inf).amax(dim=1)
        assert (least > most).float().mean() > 0.95, name


@pytest.mark.parametrize("seed", [0, 1])
def test_the_answer_to_a_question_comes_by_the_pair_that_asks_the_same(seed):
    """Two layers: the query finds its pair, whose other words have come there one layer earlier.

    The attention of the last layer alone knows one position of the pair; what follows both layers
    finds all of it.
    """
    model, task = build_construction("in_context_qa_softmax", n_questions=9, n_answers=5, n_pairs=4)
    x = task.sample(20, seed=seed)[0]
    active = task.active_index_set(x)[:, : x.shape[1]]
    others = ~active.clone()
    others[:, -2:] = False  # the query itself
    pair = active.clone()
    pair[:, -2:] = False
    found = scored(model, x)
    for name in ("attention rollout", "graded sets", "attention flow", "contribution routes"):
        least = found[name].masked_fill(~pair, torch.inf).amin(dim=1)
        most = found[name].masked_fill(~others, -torch.inf).amax(dim=1)
        assert (least > most).float().mean() > 0.9, name
    weight = found["attention weight"].masked_fill(~pair, torch.inf).amin(dim=1)
    assert (weight < 0.01).all()


def test_cheap_baselines_leave_out_what_takes_long():
    shallow, deep = make_token_model(), make_token_model(n_layers=3)
    assert set(baselines(shallow, cheap=True)) == set(ROUTES)
    assert set(baselines(deep, cheap=True)) == {*ROUTES} - {"attention flow"}
    assert set(baselines(deep)) == {*ROUTES, "gradient x input"}
