"""A probe of your own, in `run_probes`, in `attach`, and by an entry point in the commands."""

from infoflow_lens import hooks, load_any


class PreviousToken(hooks.Probe):
    """Attention to the previous position, a mean over queries."""

    reads = ("pattern",)  # of a pass
    dims = ("layer", "head")  # of the result
    # what it keeps; of two probes it is added up
    weight, n_queries = hooks.summed(), hooks.summed()

    def update(self, seen):
        rows = [seen.pattern(i).diagonal(-1, 2, 3) for i in range(seen.n_layers)]
        sums = [seen.sum_over_queries(row, first=1).sum(dim=0) for row in rows]
        return {"weight": sums, "n_queries": seen.count_queries(rows[0], first=1).sum()}

    def compute(self):
        return [weight / self.n_queries for weight in self.weight]


if __name__ == "__main__":
    model, texts = load_any("stdlib-2l").model, ["def f(name):", "import os\nfor name in names:"]
    hooks.check_probe(PreviousToken(), model, texts)  # refuses what padding would change
    print(hooks.run_probes(model, texts, [PreviousToken()], progress=False)[0].to_frame())
