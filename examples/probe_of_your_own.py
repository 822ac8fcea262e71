"""A probe of your own, also in `infoflow-lens probe` by an entry point (see CONTRIBUTING.md)."""

from dataclasses import dataclass

import pandas as pd
import plotly.express as px
import torch

from infoflow_lens import build_construction, run_probes
from infoflow_lens.hooks import Needs, Probe, Result
from infoflow_lens.probing.part import Part


@dataclass(frozen=True, eq=False, kw_only=True)
class PreviousResult(Result):
    weight: torch.Tensor  # [layer, head], the mean attention to the previous position

    def to_frame(self):
        return pd.DataFrame(self.weight.numpy()).rename_axis("layer").reset_index()

    def plot(self):
        return px.imshow(self.weight.numpy())


class PreviousProbe(Probe[PreviousResult]):
    total = 0.0

    def config(self):
        return {}

    def needs(self, model):
        return Needs.of(model, pattern=True)

    def update(self, seen):
        rows = [seen.pattern(i).diagonal(-1, 2, 3).double() for i in range(seen.n_layers)]
        self.total += torch.stack([row.mean(dim=2).sum(dim=0) for row in rows])

    def add(self, other):
        self.total = self.total + other.total

    def snapshot(self):
        return {"total": self.total}

    def restore(self, measured):
        self.total = measured["total"]

    def compute(self):
        return PreviousResult(weight=self.total / self.n_sequences, record=self.run_record())


class PreviousPart(Part):
    title, text = "Attention to the previous position", "A mean over queries and sequences."

    def probes(self, setting):
        return {"previous": PreviousProbe()}


if __name__ == "__main__":
    model, task = build_construction("in_context_qa")
    print(run_probes(model, task.sample(200, seed=0)[0], [PreviousProbe()])[0].to_frame())
