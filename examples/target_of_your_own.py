"""A target of your own, from its definition to estimate, training, probes and agreement.

The target is the distance of the closest pair plus the largest first coordinate.

Run: python examples/target_of_your_own.py   (about a minute)

The command line takes it, too:

    infoflow-lens estimate examples/target_of_your_own.py:target --heads 1,2
"""

from infoflow_lens import (
    Architecture,
    JacobianInfluence,
    PositionsProbe,
    TrainingConfig,
    build_model,
    compare,
    estimate,
    propagate,
    run_probes,
    train,
)
from infoflow_lens.tasks import Target
from infoflow_lens.theory import Component


def distance(x):
    """Of two tokens [..., 2, d_token]."""
    return (x[..., 0, :] - x[..., 1, :]).norm(dim=-1)


def first_coordinate(x):
    """Of one token [..., 1, d_token]."""
    return x[..., 0, 0]


target = Target(
    name="closest_and_largest",
    components=(
        Component(2, distance, symmetric=True, extremum="min", distinct=True),
        Component(1, first_coordinate, symmetric=True),
    ),
    outer="sum",
    tokens="uniform",
    n_tokens=8,
    d_token=2,
)


def main():
    """From the definition to agreement."""
    # What follows from the definition: samples, active tokens, counts
    x, y = target.sample(3, seed=0)
    print("values", y[:, 0].tolist())
    print("active tokens", [row.nonzero()[:, 0].tolist() for row in target.active_index_set(x)])
    counts = target.comparison
    print(f"dimension {counts.dimension}, order {counts.order}, trees {counts.n_trees}")
    print(f"comparisons at T = 8: at most {counts.number(8, 'unordered')}")

    # Before training: one layer cannot, two can
    sizes = {"d_model": 32, "d_token": 2, "n_tokens": 8, "d_mlp": 64, "d_encoder": 64}
    for heads in ((1,), (1, 2)):
        found = estimate(Architecture(n_heads=heads, **sizes), target)
        print(f"heads {heads}: {found.verdict}, {found.why}")

    # Training, probes, agreement
    model = build_model(Architecture(n_heads=(2, 2), **sizes), seed=0)
    config = TrainingConfig(epochs=8, batch_size=128, lr=4e-3)
    data = target.sample(4000, seed=2), target.sample(1000, seed=3)
    trained = train(model, *data, config, progress=False)
    print(f"validation NMSE {trained.nmse:.3f} (the mean scores 1)")
    x, _ = target.sample(100, seed=1)
    positions, influence = run_probes(
        model, x, [PositionsProbe((1, 2)), JacobianInfluence()], progress=False
    )
    predicted = propagate([layer[..., :1] for layer in positions.positions], n_sources=8)
    agreement = compare(predicted, influence)
    print(f"AUROC of influence at CLS against predicted sets: {agreement.cls.auroc:.3f}")
    held = influence.full()[-1, :, -1]
    active = target.active_index_set(x)
    share = (held * active).sum(dim=1) / held.sum(dim=1)
    print(f"share of the influence on CLS that lies on active tokens: {float(share.mean()):.2f}")


if __name__ == "__main__":
    main()
