"""A target of your own: the distance of the closest pair plus the largest first coordinate.

Run: python examples/target_of_your_own.py   (half a minute)

The command line takes it, too:

    infoflow-lens estimate examples/target_of_your_own.py:target --heads 1,2
"""

from infoflow_lens import Architecture, build_model, estimate, train
from infoflow_lens.tasks import Target
from infoflow_lens.theory import Component


def distance(x):  # of two tokens [..., 2, d_token]
    return (x[..., 0, :] - x[..., 1, :]).norm(dim=-1)


def first_coordinate(x):  # of one token [..., 1, d_token]
    return x[..., 0, 0]


closest = Component(2, distance, symmetric=True, extremum="min", distinct=True)
target = Target(components=(closest, Component(1, first_coordinate)), n_tokens=8, d_token=2)

if __name__ == "__main__":
    x, y = target.sample(3, seed=0)
    print("values", y[:, 0], "active tokens", *target.active_index_set(x))
    print(*[estimate(target, heads).why for heads in ((1,), (1, 2))], sep="\n")
    model = build_model(Architecture(n_heads=(2, 2), d_model=32, d_token=2, n_tokens=8, d_mlp=64))
    print(train(model, target, n_train=2000, progress=False))
