"""Splitting what is read of a model over all that wrote the residual stream."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from infoflow_lens.foundation.display import panel
from infoflow_lens.foundation.lazy import pd
from infoflow_lens.foundation.modules import eval_mode
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.foundation.settings import checked
from infoflow_lens.hooks.model.call import call
from infoflow_lens.hooks.model.inputs import Inputs, read_one
from infoflow_lens.hooks.model.points import check_one_device, hook_points, takes_model
from infoflow_lens.hooks.model.texts import readable_tokens
from infoflow_lens.hooks.readouts import Readout, bind_readout
from infoflow_lens.hooks.result import LabelledArray, Result
from infoflow_lens.hooks.shares.writers import HeldNorms, Writers

_SMALL = 1e-3  # of the size of all shares, below which what is left over is not said [chosen]
_SHOWN = 12  # rows in a notebook


@dataclass(frozen=True, eq=False, kw_only=True)
class Shares(Result):
    """Who wrote what is read of a model, in one input.

    While the statistics of norms are held, what is read is a sum over all that wrote the residual
    stream: its derivative by what was written, times that. These are direct shares: a head's share
    is of what it writes itself, not of what later heads and MLPs make of it.

    Attributes:
        values: float64 [writer, pos], the share of what each writer wrote at each position.
        by_key: float64 [head, key], the shares of heads by the position from which they took it:
            weight times value; those of a head add up to its share where z is the weighted values.
        constants: what biases make.
        value: what is read.
        writers: their names: "token embedding", "positional embedding", "head 0.3", "MLP 0".
        heads: the names of the heads.
        readout: what is asked, in words.
        is_linear: whether it is linear in the stream while norms are held; if not, shares are those
            of its linear part and need not add up.
        tokens: of the input, as one reads them.
    """

    small: ClassVar[bool] = True

    values: Float[Tensor, "writer pos"]
    by_key: Float[Tensor, "head key"]
    constants: float
    value: float
    writers: tuple[str, ...]
    heads: tuple[str, ...]
    readout: str
    is_linear: bool
    tokens: tuple[str, ...]

    @property
    def distance(self) -> float:
        """The readout minus the sum of all shares and constants.

        It is 0 up to rounding where only sums and norms follow what the layers write. Otherwise it
        is the effect of a soft cap, of an activation before the logits, or of a part that the model
        does not show.
        """
        return self.value - self.constants - float(self.values.sum())

    def by_writer(self) -> LabelledArray:
        """Sum the shares of each writer over all positions, [writer]."""
        return LabelledArray("share", self.values.sum(-1), ("writer",), {"writer": self.writers})

    def table(self) -> "pd.DataFrame":
        """Return a row for each writer, the largest first, and what it takes most from (heads)."""
        shares = self.values.sum(-1)
        order = shares.abs().argsort(descending=True, stable=True).tolist()
        places = {name: place for place, name in enumerate(self.heads)}
        rows = []
        for i in order:
            name = self.writers[i]
            row = {"writer": name, "share": float(shares[i]), "from": "", "of it": torch.nan}
            of_keys = self.by_key[places[name]] if name in places else None
            # of heads whose values are not shown, no key is known
            if of_keys is not None and not of_keys.isnan().any():
                key = int(of_keys.abs().argmax())
                row |= {"from": f"{self.tokens[key]} ({key})", "of it": float(of_keys[key])}
            rows.append(row)
        return pd.DataFrame(rows)

    def summary(self) -> str:
        """Say in a sentence who wrote most of it, and whether the shares add up."""
        rows = self.table()
        said = [f"{row.writer} {row.share:+.3g}" for row in rows.head(4).itertuples()]
        sentence = f"{self.readout} is {self.value:.4g}: {', '.join(said)}"
        if not self.is_linear:
            return f"{sentence}; it is not linear, so these shares of its linear part do not add up"
        if abs(self.distance) > _SMALL * float(self.values.abs().sum()):
            sentence += (
                f"; {self.distance:+.3g} is left over, as half precision rounds so much or the "
                "model does more than sums and norms with what is written: a soft cap, an "
                "activation before the logits, or a part that is not shown"
            )
        return sentence

    def _repr_html_(self) -> str:
        facts = {"": self.summary(), "value": self.value, "constants": self.constants}
        more = "more: .table(), .to_frame(), .plot(), .save(path)"
        return panel(type(self).__name__, facts, self.notes, more, self.table().head(_SHOWN))

    def _coords(self) -> dict[str, tuple[str, ...]]:
        return {"writer": self.writers, "head": self.heads}


@takes_model
@checked
def measure_shares(model: nn.Module, inputs: Inputs, readout: Readout) -> Shares:
    """Split what is read off a model over embeddings, heads and MLPs, exactly: who wrote it?

    Two passes and one derivative: a pass whose writers are leaves, and one in which nothing is
    written, which shows what biases make. No weight is read, and no family is known.

    Args:
        model: any Transformer.
        inputs: one sequence: a text, token ids [1, pos], or vectors [1, pos, d_token].
        readout: what is asked, such as ``LogitDifference(" Mary", " John")``.

    Raises:
        InfoFlowError: for several sequences, what is no readout, an answer that is no token, and
            models that do not show what their heads write.
    """
    check_one_device(model)
    batches = read_one(model, inputs)
    rows = list(batches.rows)
    asked, batch = bind_readout(readout, model), batches.whole()
    with eval_mode(model):
        writers, held = Writers(model), HeldNorms()
        points = [name for name in _attention_points(writers) if name in hook_points(model)]
        # norms are held at their scale of this pass, so that the map from writers to readout is
        # linear
        with torch.enable_grad(), held:
            caught = call(
                model, batch, points, edit=list(writers.cut(held)), output=True, keep_graph=True
            )
            value = asked.read(caught.output)
            values = writers.shares(value, torch.ones_like(value)[None])[0]
            by_key = _split_by_key(
                writers, value, {n: a.detach() for n, a in caught.activations.items()}
            )
        # the same norms, and writers that write nothing: what is left are constants
        with HeldNorms(held.statistics):
            silent = call(model, batch, edit=list(writers.silence()), output=True)
        constants = float(asked.read(silent.output)) if asked.is_linear else 0.0
    return Shares(
        values=values.cpu(),
        by_key=by_key.cpu(),
        constants=constants,
        value=float(value.detach()),
        writers=writers.names(),
        heads=tuple(name for name in writers.names() if "head" in name),
        readout=str(readout),
        is_linear=asked.is_linear,
        tokens=readable_tokens(model, rows)[0],
        record=RunRecord.from_model(model, {"probe": "shares", "readout": str(readout)}),
    )


def _attention_points(writers: Writers) -> list[str]:
    """Hook points of patterns and values, of each attention whose heads write."""
    attentions = [name.removesuffix("hook_z") for name in writers.points if name.endswith("hook_z")]
    return [f"{name}hook_{what}" for name in attentions for what in ("pattern", "v")]


def _split_by_key(
    writers: Writers, value: Tensor, activations: dict[str, Tensor]
) -> Float[Tensor, "head key"]:
    """Split the shares of heads over the keys from which they took them; NaN where not shown."""
    rows = [torch.zeros(0, 0, dtype=torch.float64)]
    for name, z, gradient in writers.gradients_of_heads(value):
        place = name.removesuffix("hook_z")
        pattern, v = activations.get(f"{place}hook_pattern"), activations.get(f"{place}hook_v")
        n_heads = z.shape[2]
        if pattern is None or v is None:
            rows.append(torch.full((n_heads, z.shape[1]), torch.nan, dtype=torch.float64))
            continue
        # bridges show values of all heads in one axis; grouped ones serve several heads
        v = v.unflatten(-1, (-1, z.shape[-1])) if v.ndim == 3 else v
        v = v.repeat_interleave(n_heads // v.shape[2], dim=2)
        brought = torch.einsum("qhd,khd->hqk", gradient[0].double(), v[0].double())
        rows.append((pattern[0].double() * brought).sum(dim=1))
    longest = max(row.shape[1] for row in rows)
    return torch.cat([torch.nn.functional.pad(row, (0, longest - row.shape[1])) for row in rows])
