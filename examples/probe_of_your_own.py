"""A probe of your own, in `run_probes`, in `attach`, and by an entry point in the commands."""

from infoflow_lens import load_any, run_probes
from infoflow_lens.hooks import Probe, check_probe, summed


class PreviousToken(Probe):
    """Attention to the previous position, a mean over queries and texts."""

    reads = ("pattern",)  # of a pass
    dims = ("layer", "head")  # of the result
    weight = summed()  # what it keeps, and how two of it become one

    def update(self, seen):
        rows = [seen.pattern(i).diagonal(-1, 2, 3) for i in range(seen.n_layers)]
        return {"weight": [seen.mean_over_queries(row, first=1).sum(dim=0) for row in rows]}

    def compute(self):
        return [weight / self.n_sequences for weight in self.weight]


if __name__ == "__main__":
    model, texts = load_any("stdlib-2l").model, ["def f(name):", "import os\nfor name in names:"]
    check_probe(PreviousToken(), model, texts)  # refuses what padding or merging would change
    print(run_probes(model, texts, [PreviousToken()], progress=False)[0].to_frame())
