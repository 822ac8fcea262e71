"""Who a model is: what changes its numbers is another model, and the same model goes on."""

import types

import pytest
import torch

import infoflow_lens
from infoflow_lens import InfoFlowError, RecoveryProbe, load_any, run_probes
from infoflow_lens.foundation import record
from infoflow_lens.foundation.record import is_same
from infoflow_lens.hooks import Probe, measure_top_k, summed
from infoflow_lens.hooks.interventions import kept as kept_module
from infoflow_lens.hooks.model.inputs import Batches
from infoflow_lens.hooks.model.semantics import model_identity
from tests.reference import zoo


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return zoo.save("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def model(folder):
    return load_any(folder).model


X = zoo.tokens(6, 7)


def plain_layer(model, layer=0):
    return model.original_model.model.layers[layer]


def scale_a_buffer(model):
    """One that no state_dict holds."""
    model.original_model.model.rotary_emb.inv_freq.mul_(1.5)


def set_an_attribute(model):
    for layer in range(model.cfg.n_layers):
        plain_layer(model, layer).self_attn.scaling *= 2


def patch_a_forward(model):
    norm = plain_layer(model).post_attention_layernorm
    norm = getattr(norm, "original_component", norm)  # a bridge puts its own around it
    forward = norm.forward
    norm.forward = lambda x: 2 * forward(x)


def patch_the_forward(model):
    forward = type(model).forward
    model.forward = types.MethodType(lambda self, *a, **k: 2 * forward(self, *a, **k), model)


def add_a_hook(model):
    model.add_hook("blocks.0.hook_resid_pre", lambda activation, hook: 2 * activation)


def add_a_hook_of_torch(model):
    plain_layer(model).mlp.register_forward_hook(lambda module, inputs, output: 2 * output)


CHANGES = [
    scale_a_buffer,
    set_an_attribute,
    patch_a_forward,
    patch_the_forward,
    add_a_hook,
    add_a_hook_of_torch,
]


def top_k(model, **settings):
    return measure_top_k(model, X, ks=(1, 2), progress=False, **settings)


def probe(model, out):
    return infoflow_lens.probe(model, list(X), out, probes=["positions"], progress=False)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_changes_numbers_is_another_model(change, model, folder, tmp_path):
    """Neither weights nor config tell, and old numbers were taken in silence."""
    kept = []
    top_k(model, after=kept.append)
    probe(model, tmp_path / "out")
    change(model)
    with pytest.raises(InfoFlowError, match=r"resume is of another run: outputs|hooks of your own"):
        top_k(model, resume=kept[-1])
    with pytest.raises(InfoFlowError, match=r"(what the model gives|your own hooks).* changed"):
        probe(model, tmp_path / "out")


def test_the_same_model_goes_on(model, folder, tmp_path):
    """Loaded again, too, and with the same hooks."""
    kept = []
    for prepare in (lambda model: None, add_a_hook, add_a_hook_of_torch):
        out = tmp_path / getattr(prepare, "__name__", "plain")
        mine, again = load_any(folder).model, load_any(folder).model
        prepare(mine)
        prepare(again)
        expected, found = top_k(mine, after=kept.append), probe(mine, out)
        taken_up = top_k(again, resume=kept[-1], after=lambda losses: pytest.fail("measured anew"))
        assert taken_up.losses.equal(expected.losses)
        assert probe(again, out).positions.to_frame().equals(found.positions.to_frame())


def test_hooks_of_other_code_are_others(model):
    kept = []
    for factor in (1.0, 2.0):  # a hook that changes nothing, and one that does
        model.reset_hooks()
        model.add_hook("blocks.0.hook_resid_pre", lambda value, hook, f=factor: f * value)
        if not kept:
            top_k(model, after=kept.append)
    with pytest.raises(InfoFlowError, match="the model has hooks of your own"):
        top_k(model, resume=kept[-1])
    model.reset_hooks()
    with pytest.raises(InfoFlowError, match="resume is of another run: hooks = "):
        top_k(model, resume=kept[-1])


def test_other_versions_are_another_run(model, monkeypatch):
    kept = []
    top_k(model, after=kept.append)
    versions = {**kept_module.versions_identity(), "versions (torch)": "0.1"}
    monkeypatch.setattr(kept_module, "versions_identity", lambda: versions)
    with pytest.raises(InfoFlowError, match=r"resume is of another run: versions \(torch\) = "):
        top_k(model, resume=kept[-1])


def test_on_another_machine_numbers_are_compared(model, monkeypatch):
    """The last bits are its own."""
    batches = Batches(model, list(X))
    here = model_identity(model, batches)["outputs"]
    there = {**record.environment(), "processor": "another"}
    monkeypatch.setattr(record, "environment", lambda: there)
    elsewhere = model_identity(model, batches)["outputs"]
    for factor, same in ((1, True), (1 + 1e-6, True), (1.01, False)):
        numbers = [factor * number for number in elsewhere["numbers"]]
        assert is_same(here, {**elsewhere, "bits": "others", "numbers": numbers}) == same
        assert not is_same(here, {**here, "bits": "others", "numbers": numbers})
    for strange in (None, {}, {"bits": None}, {"numbers": "x"}, {"numbers": [1.0]}, []):
        assert not is_same(strange, elsewhere)


def test_a_model_that_never_gives_the_same_bits_goes_on(model):
    """As on some GPUs, where sums are made in any order."""
    forward = type(model).forward

    def jittered(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        return output + 1e-6 * torch.rand_like(output)

    model.forward = types.MethodType(jittered, model)
    batches = Batches(model, list(X))
    first, second = (model_identity(model, batches)["outputs"] for _ in range(2))
    assert first["bits"] is None
    assert is_same(first, second)


def test_vectors_have_an_identity_too(inputs):
    from tests.hooks.test_invariants import hosted, vectors

    model = hosted()
    batches = Batches(model, list(vectors(3)))
    before = model_identity(model, batches)
    assert model_identity(hosted(), batches) == before
    model.blocks[0].attn.attn_scale = 7.0
    assert not is_same(before["outputs"], model_identity(model, batches)["outputs"])


def own_probe(factor):
    class Own(Probe):
        """What a user writes."""

        reads = ("pattern",)
        dims = ("layer",)
        total = summed()

        def update(self, seen):
            return {"total": [factor * seen.pattern(i).sum() for i in range(seen.n_layers)]}

        def compute(self):
            return self.total

    return Own()


def test_the_state_of_a_probe_of_other_code_is_another(model, tmp_path):
    probes = [own_probe(1), own_probe(1), own_probe(2)]
    (first,) = run_probes(model, X, probes[:1], progress=False)
    assert first.record.config["code"]
    probes[1].load_state_dict(probes[0].state_dict())
    assert probes[1].result().to_frame().equals(first.to_frame())
    with pytest.raises(InfoFlowError, match="expected the same settings"):
        probes[2].load_state_dict(probes[0].state_dict())

    def run(probe):
        run = infoflow_lens.probe(model, list(X), tmp_path, probes=[probe], progress=False)
        return run.found["own"].to_frame()

    assert run(own_probe(1)).equals(run(own_probe(1)))
    with pytest.raises(InfoFlowError, match=r"the code of your own probes \(own\) changed"):
        run(own_probe(2))


def test_functions_that_are_settings_count_by_what_they_do(model):
    settings = []
    for table in (torch.ones(17, 3), torch.ones(17, 3), torch.zeros(17, 3)):
        settings.append(RecoveryProbe(target=lambda tokens, table=table: table[tokens]).config())
    assert settings[0] == settings[1] != settings[2]
    assert settings[0]["target"]["function"] == settings[2]["target"]["function"]
