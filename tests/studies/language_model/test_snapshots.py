"""Which moments of a model's training there are."""

import pytest
import torch
from safetensors.torch import load_file

from infoflow_lens import InfoFlowError
from infoflow_lens.studies.language_model.snapshots import load_snapshot, reset_weights, snapshots
from tests.reference import zoo

STEPS = (0, 1, 64, 128, 256, 512, 1024)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "small"
    zoo.save("gpt2", path)
    for step in STEPS:
        part = path / "checkpoints" / f"step-{step:06d}"
        part.mkdir(parents=True)
        for file in ("config.json", "model.safetensors"):
            (part / file).write_bytes((path / file).read_bytes() + b" " * (step % 5))
    return path


def test_a_folder_has_its_checkpoints_in_the_order_of_steps(folder):
    found = snapshots(str(folder))
    assert [part.step for part in found] == list(STEPS)
    assert {part.model for part in found} == {"small"}
    assert [part.final for part in found] == [False] * 6 + [True]


def test_few_of_many_keep_both_ends_and_leave_out_the_first_steps(folder):
    for most, steps in ((1, [1024]), (2, [0, 1024]), (3, [0, 128, 1024]), (6, None)):
        found = [part.step for part in snapshots(str(folder), most)]
        assert len(found) <= most
        assert found[-1] == 1024
        assert 1 not in found
        assert steps is None or found == steps


def test_a_folder_without_checkpoints_is_one_moment(folder):
    (part,) = snapshots(str(folder / "checkpoints" / "step-000064"))
    assert (part.model, part.step, part.final) == ("step-000064", 64, True) or part.step == -1


def test_other_files_are_other_weights(folder):
    found = snapshots(str(folder))
    assert found[0].weights != found[1].weights
    assert "/" not in found[0].weights


def test_revisions_of_the_hub():
    found = snapshots("EleutherAI/pythia-70m@step0,step512,step143000", most=1)  # all are named
    assert [part.step for part in found] == [0, 512, 143000]
    assert found[1].source == "EleutherAI/pythia-70m@step512"
    assert {part.model for part in found} == {"EleutherAI/pythia-70m"}
    assert [part.final for part in found] == [False, False, True]


@pytest.mark.parametrize(("model", "most"), [("", None), (" ", 2), ("gpt2@", None), ("gpt2", 0)])
def test_what_names_nothing_is_refused(model, most):
    with pytest.raises(InfoFlowError, match="expected"):
        snapshots(model, most)


def test_a_folder_with_a_sign_of_revisions_in_its_name_is_a_folder(tmp_path):
    (found,) = snapshots(str(zoo.save("gpt2", tmp_path / "me@home")))
    whole, ids = load_snapshot(found.source, "cpu"), zoo.tokens(2, 7)
    with torch.no_grad():
        expected = zoo.build("gpt2")(ids).logits
        torch.testing.assert_close(whole(ids), expected, rtol=1e-4, atol=1e-4)
        with reset_weights(found.source, 3) as drawn:
            assert not torch.allclose(load_snapshot(drawn, "cpu")(ids), expected, atol=0.1)


def test_an_untrained_model_has_the_shape_but_not_the_weights(folder):
    before = torch.random.get_rng_state()
    trained = load_file(folder / "model.safetensors")
    with reset_weights(str(folder), 3) as one, reset_weights(str(folder), 3) as same:
        drawn = load_file(f"{one}/model.safetensors")
        again = load_file(f"{same}/model.safetensors")
    name = "transformer.h.0.attn.c_attn.weight"
    assert drawn[name].shape == trained[name].shape
    assert not drawn[name].equal(trained[name])
    assert drawn[name].equal(again[name])
    assert torch.random.get_rng_state().equal(before)
