"""Seeds that are trained together have the numbers of seeds that are trained one by one."""

import math
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from infoflow_lens import Architecture, InfoFlowError, build_model, train
from infoflow_lens.studies.together import train_together
from infoflow_lens.tasks import load_task
from infoflow_lens.training import TrainingConfig, TrainingDivergedError, evaluate
from tests.conftest import some_of

ARCHITECTURES = {
    "two layers": Architecture(
        n_heads=(2, 1), d_head=(3, 4), d_model=8, d_token=3, n_tokens=5, d_mlp=8, d_encoder=6
    ),
    "one layer, layer norm, positions": Architecture(
        n_heads=(2,), d_model=8, d_token=3, n_tokens=5, d_mlp=0, normalization="LN",
        positional_embedding="learned", cls_is_key=True, act_fn="tanh",
    ),
    "hard maximum": Architecture(
        n_heads=(1, 2), d_model=8, d_token=3, n_tokens=5, d_mlp=8, attention="hardmax",
        attn_scale=2.0, init_mode="xavier_normal",
    ),
}  # fmt: skip
SEEDS = (4, 0, 7)
TASK = load_task("d_retrieval", n_tokens=5, d_token=3, n_components=2, seed=1)


def data(seed, n=70):
    """Sequences of a seed's own, in float64, where rounding stays rounding over many steps."""
    pairs = TASK.sample(n, seed=seed), TASK.sample(40, seed=seed + 100)
    return tuple((x.double(), y.double()) for x, y in pairs)


def models(architecture):
    return [build_model(architecture, seed=seed).to(torch.float64) for seed in SEEDS]


def one_by_one(architecture, config, data=data):
    found = models(architecture)
    results = [
        train(model, *data(seed), replace(config, seed=seed), progress=False)
        for seed, model in zip(SEEDS, found, strict=True)
    ]
    return found, results


def assert_same(together, singles, rel=1e-7):
    for ours, model, theirs in zip(together, *singles, strict=True):
        assert (ours.result.stopped, ours.result.best_epoch) == (theirs.stopped, theirs.best_epoch)
        assert len(ours.result.history) == len(theirs.history)
        for row, expected in zip(ours.result.history, theirs.history, strict=True):
            assert row == pytest.approx(expected, rel=rel)
        for state in ("initial_state", "best_state"):
            own, expected = getattr(ours.result, state), getattr(theirs, state)
            assert list(own) == list(expected)
            for name, value in expected.items():
                assert_close(own[name].cpu(), value, rtol=10 * rel, atol=rel / 10)
        for name, value in model.state_dict().items():
            found = ours.model.state_dict()[name].cpu()
            assert_close(found, value, rtol=10 * rel, atol=rel / 10)
        assert ours.result.record.model_fingerprint == theirs.record.model_fingerprint
        assert ours.result.record.config == theirs.record.config


CONFIGS = {
    "adamw, clipped": TrainingConfig(
        epochs=3, batch_size=32, lr=1e-2, grad_clip=0.05, warmup_steps=4, weight_decay=0.1,
        betas=(0.8, 0.95), lr_end=1e-3,
    ),
    "sgd": TrainingConfig(epochs=2, batch_size=32, lr=1e-2, optimizer="sgd", momentum=0.9),
}  # fmt: skip
TRAINED = [(name, kind) for name in ARCHITECTURES for kind in CONFIGS]


@pytest.mark.parametrize(
    ("name", "kind"),
    some_of(TRAINED, ("two layers", "sgd"), ("hard maximum", "adamw, clipped")),
)
def test_every_seed_has_the_numbers_of_train(name, kind):
    """Clipping bites at every step of the first settings, and the last batch is a short one."""
    config = CONFIGS[kind]
    together = train_together(models(ARCHITECTURES[name]), data, SEEDS, config, progress=False)
    assert_same(together, one_by_one(ARCHITECTURES[name], config))


def test_seeds_end_at_epochs_of_their_own():
    config = TrainingConfig(epochs=12, batch_size=35, lr=3e-2, patience=1, improvement=0.05)
    singles = one_by_one(ARCHITECTURES["two layers"], config)
    assert len({result.epochs_run for result in singles[1]}) > 1
    together = train_together(
        models(ARCHITECTURES["two layers"]), data, SEEDS, config, progress=False
    )
    assert_same(together, singles)
    assert {trained.result.stopped for trained in together} <= {"early", "finished"}


def test_every_epoch_may_have_data_of_its_own():
    """Fresh for each seed and epoch, or the same for all seeds."""

    def fresh(seed):
        def draw(epoch):
            x, y = TASK.sample(64, seed=1000 * seed + epoch)
            return x.double(), y.double()

        return draw, data(seed)[1]

    config = TrainingConfig(epochs=2, batch_size=32)
    architecture = ARCHITECTURES["two layers"]
    together = train_together(models(architecture), fresh, SEEDS, config, progress=False)
    assert_same(together, one_by_one(architecture, config, fresh))
    some = lambda seed: fresh(seed) if seed == 0 else data(seed, n=64)  # noqa: E731
    mixed = train_together(models(architecture), some, SEEDS, config, progress=False)
    assert_same(mixed, one_by_one(architecture, config, some))
    shared = train_together(models(architecture), data(1), SEEDS, config, progress=False)
    assert_same(shared, one_by_one(architecture, config, lambda seed: data(1)))


def test_labels_are_learned_too():
    def labelled(seed):
        (x, y), (validation_x, validation_y) = data(seed)
        return (x, (y[:, 0] > 1).long()), (validation_x, (validation_y[:, 0] > 1).long())

    config = TrainingConfig(epochs=2, batch_size=32)
    architecture = replace(ARCHITECTURES["two layers"], d_output=2)
    together = train_together(models(architecture), labelled, SEEDS, config, progress=False)
    assert_same(together, one_by_one(architecture, config, labelled))


def test_a_seed_that_diverges_leaves_the_others_alone():
    def spoiled(seed):
        (x, y), validation = data(seed)
        return (x, y * 1e200 if seed == SEEDS[1] else y), validation

    config = TrainingConfig(epochs=2, batch_size=32, grad_clip=None)
    architecture = ARCHITECTURES["two layers"]
    together = train_together(models(architecture), spoiled, SEEDS, config, progress=False)
    assert [trained.result.stopped for trained in together] == ["finished", "diverged", "finished"]
    with pytest.raises(TrainingDivergedError) as alone:
        train(
            models(architecture)[1], *spoiled(SEEDS[1]), replace(config, seed=SEEDS[1]),
            progress=False,
        )  # fmt: skip
    assert alone.value.result.epochs_run == together[1].result.epochs_run
    assert math.isfinite(together[1].lr)
    singles = one_by_one(architecture, config)
    for index in (0, 2):
        assert_same([together[index]], [[part[index]] for part in singles])


def test_an_architecture_is_built_with_each_seed():
    """In float32, as models are built; the best weights are in the models."""
    x, y = TASK.sample(64, seed=0)
    config = TrainingConfig(epochs=1, batch_size=32)
    architecture = ARCHITECTURES["two layers"]
    for seed, trained in zip(
        SEEDS, train_together(architecture, ((x, y), (x, y)), SEEDS, config, progress=False),
        strict=True,
    ):  # fmt: skip
        model = build_model(architecture, seed=seed)
        result = train(model, (x, y), (x, y), replace(config, seed=seed), progress=False)
        assert trained.result.nmse == pytest.approx(result.nmse, rel=1e-4)
        assert evaluate(trained.model, (x, y)) == pytest.approx(trained.result.nmse, rel=1e-5)


@pytest.mark.acceptance
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_compiled_step_has_the_same_numbers():
    """Of few shapes, for compiling takes half a minute."""
    config = TrainingConfig(epochs=1, batch_size=35)
    architecture = ARCHITECTURES["two layers"]
    ours = train_together(models(architecture), data, SEEDS, config, compiled=True, progress=False)
    assert_same(ours, one_by_one(architecture, config))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("patience", [None, 1])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_graphs_of_a_gpu_have_the_numbers_of_a_cpu(optimizer, patience):
    """Of both sizes of batch, with a falling rate (which is a float32 there), and of those left."""
    config = TrainingConfig(
        epochs=16, batch_size=32, lr=1e-2, optimizer=optimizer, patience=patience, improvement=0.05
    )
    architecture = ARCHITECTURES["two layers"]
    on_gpu = [model.to("cuda") for model in models(architecture)]
    together = train_together(on_gpu, data, SEEDS, config, progress=False)
    assert_same(together, one_by_one(architecture, config), rel=1e-5)


def with_hook():
    model = build_model(ARCHITECTURES["two layers"])
    model.add_hook("hook_embed", lambda activation, hook: activation)
    return model


def with_fixed():
    model = build_model(ARCHITECTURES["two layers"])
    model.unembed.b_U.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (with_hook, r"models\[1\] has hooks on hook_embed"),
        (with_fixed, r"models\[1\] has fixed parameters \(unembed.b_U\)"),
        (lambda: torch.nn.Linear(3, 1), r"models\[1\] is a Linear"),
        (lambda: build_model(ARCHITECTURES["hard maximum"]), r"models\[1\] has another arch"),
        (lambda: build_model(ARCHITECTURES["two layers"]).double(), "another precision"),
    ],
)
def test_what_cannot_be_trained_together_is_refused_by_name(second, message):
    pair = TASK.sample(64, seed=0)
    with pytest.raises(InfoFlowError, match=message):
        train_together([build_model(ARCHITECTURES["two layers"]), second()], (pair, pair), (0, 1))


def test_seeds_and_data_must_fit():
    architecture = ARCHITECTURES["two layers"]
    pair = TASK.sample(64, seed=0)
    with pytest.raises(InfoFlowError, match="expected different seeds"):
        train_together(architecture, (pair, pair), (1, 1))
    with pytest.raises(InfoFlowError, match="1 models are given for 2 seeds"):
        train_together([build_model(architecture)], (pair, pair), (1, 2))
    one = build_model(architecture)
    with pytest.raises(InfoFlowError, match="a model is given for two seeds"):
        train_together([one, one], (pair, pair), (1, 2))
    with pytest.raises(InfoFlowError, match=r"training sequences \(seed 1: 41, seed 2: 42\)"):
        train_together(architecture, lambda seed: (TASK.sample(40 + seed, seed=0), pair), (1, 2))
