"""A study of your own: configurations, seeds, a table, a figure and a verdict.

Run: python examples/study_of_your_own.py   (ten seconds)
"""

import tempfile

from infoflow_lens import Architecture, build_model, load_task, train
from infoflow_lens.studies.checking import check_study
from infoflow_lens.studies.claims import Claim
from infoflow_lens.studies.study import Study
from infoflow_lens.studies.sweep import run_study
from infoflow_lens.training import TrainingConfig

TASK = {"n_tokens": 8, "d_token": 1, "n_components": 2, "extremum": ("max", "min")}


def ratio(results):
    means = results.groupby("heads")["nmse"].mean()
    return {"": means[2] / means[1]}


class Span(Study):
    """The largest number minus the smallest: two tokens are retrieved, so two heads should do."""

    name, title = "span", "Does the span of T numbers need two heads?"
    presets = {"smoke": 1, "quick": 2}  # noqa: RUF012  (how many seeds)

    def cases(self, preset):
        return [{"heads": n, "epochs": 1 if preset == "smoke" else 12} for n in (1, 2)]

    def measure(self, settings, seed, device):
        sizes = {"n_heads": (settings["heads"],), "d_model": 16, "d_mlp": 16}
        architecture = Architecture(n_tokens=8, d_token=1, **sizes)
        model = build_model(architecture, seed=seed, device=device)
        config = TrainingConfig(epochs=settings["epochs"], batch_size=128, lr=8e-3, seed=seed)
        task = load_task("d_retrieval", **TASK)
        return [{"nmse": train(model, task, config, n_train=4000, progress=False).nmse}]

    def claims(self):
        return [Claim("the mean error of two heads is {bound} of that of one", ratio, "<", 0.2)]


if __name__ == "__main__":
    check_study(Span(), "smoke")  # refuses what would fail late or depends on more than the seed
    with tempfile.TemporaryDirectory() as folder:
        # jobs=2 runs them in two processes; resume=True goes on with what a folder holds
        found = run_study(Span(), folder + "/span", progress=False)
        print((found.out / "table.md").read_text())
