"""Probe a model before and after training: which tokens does it retrieve, and is that predicted?

Run: python examples/probe_trained_model.py   (ten seconds)
"""

from infoflow_lens import (
    Architecture,
    JacobianInfluence,
    PositionsProbe,
    RecoveryProbe,
    build_model,
    compare,
    load_task,
    propagate,
    run_probes,
    train,
)
from infoflow_lens.training import TrainingConfig, restored

# A sequence has 16 tokens of dimension 4; the target needs 4 of them, one along each direction.
task = load_task(
    "d_retrieval", n_tokens=16, d_token=4, n_components=4, directions="orthonormal", seed=0
)
model = build_model(
    Architecture(n_heads=(4, 1), d_model=32, d_token=4, n_tokens=16, d_mlp=64, act_fn="relu"),
    seed=0,
)
training = train(
    model,
    task.dataset("train", 4000),
    task.dataset("validation", 2000),
    TrainingConfig(epochs=20, batch_size=64, lr=8e-3, weight_decay=0.0),
)
print(f"validation NMSE {training.nmse:.1e} after {training.epochs_run} epochs")

inputs, _ = task.sample(1000, seed=1)
few = inputs[:200]
for name, state in (("initial", training.initial_state), ("trained", training.best_state)):
    probed = restored(model, state)
    (recovery,) = run_probes(probed, inputs, [RecoveryProbe((1, 2))], progress=False)
    positions, influence = run_probes(
        probed, few, [PositionsProbe(), JacobianInfluence()], progress=False
    )
    predicted = propagate(positions.argmax, n_sources=task.n_tokens)
    agreement = compare(predicted, influence, active=task.active_index_set(few))

    first_layer = recovery.to_frame().query("layer == 0")
    errors = first_layer.groupby("rank")["second_moment"].mean()
    print(f"\n{name}")
    print(f"  recovery error of the argmax token {errors[1]:.3f}, of the second {errors[2]:.3f}")
    print(f"  influence on CLS ranks the predicted tokens with AUROC {agreement.cls.auroc:.3f}")
    print(f"  active tokens inside the predicted CLS set: {agreement.coverage:.1%}")
    print(f"  predicted set of CLS for input 0: {sorted(predicted.of(1, 0, task.n_tokens))}")
