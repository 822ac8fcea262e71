"""The table with one row for each head, from the results of all parts."""

from infoflow_lens.foundation.lazy import pd
from infoflow_lens.hooks.mechanisms.sufficiency import SufficiencyResult
from infoflow_lens.hooks.mechanisms.top_k import TopKResult
from infoflow_lens.probing.findings import Findings

_HEAD = ["layer", "head"]


def per_head(result: Findings) -> "pd.DataFrame":
    """Return a row for each layer and head, with the columns of the parts that were measured.

    ``mechanism``, ``sufficient``, all ideals that suffice (with commas), and for every ideal
    ``damage_...``; ``replaced_by`` and ``replaced_as``, the ideal
    of the joint replacement and the head's place in it (1 is first); the columns of
    :meth:`~infoflow_lens.hooks.PositionsResult.summary`; ``fvu_1``, ..., the fraction of
    variance unexplained at each rank; ``layer_k``, the keys that the head's layer needs.
    """
    layers = [layer.n_heads or 0 for layer in result.capabilities.layers]
    table = pd.DataFrame([(i, h) for i, n in enumerate(layers) for h in range(n)], columns=_HEAD)

    # left joins on layer and head: heads that a part did not measure have NaN
    def add_columns(frame: "pd.DataFrame") -> None:
        nonlocal table
        table = table.merge(frame, on=_HEAD, how="left", validate="one_to_one")

    if result.mechanisms is not None:
        ideals = list(result.mechanisms.ideals)
        frame = result.mechanisms.to_frame()
        enough = frame[[f"sufficient_{ideal}" for ideal in ideals]].to_numpy()
        names = [", ".join(i for i, is_so in zip(ideals, row) if is_so) for row in enough]
        frame = frame.assign(sufficient=names)[[*_HEAD, "mechanism", "sufficient", *ideals]]
        add_columns(frame.rename(columns={name: f"damage_{name}" for name in ideals}))
    together = result.found.get("sufficiency")
    if isinstance(together, SufficiencyResult):
        frame = pd.DataFrame(together.heads.tolist(), columns=_HEAD)
        order = range(1, len(frame) + 1)
        add_columns(frame.assign(replaced_by=list(together.ideals), replaced_as=list(order)))
    if result.positions is not None:
        add_columns(result.positions.summary())
    if result.recovery is not None:
        frame = result.recovery.to_frame().pivot(index=_HEAD, columns="rank", values="fvu")
        add_columns(frame.rename(columns=lambda rank: f"fvu_{rank}").reset_index())
    needed = result.found.get("top_k")
    if isinstance(needed, TopKResult):
        least = dict(enumerate(needed.least()[:-1]))
        table = table.assign(layer_k=table["layer"].map(least))
    return table
