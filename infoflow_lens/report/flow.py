"""The interactive picture as HTML: a page, or a fragment of one."""

import base64
import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import escape
from torch import Tensor

from infoflow_lens.foundation.documents import FLOW_PAGE
from infoflow_lens.report.assets import add_policy, asset, script, templates
from infoflow_lens.report.flow_view import (
    RULES,
    FlowView,
    Move,
    Replaced,
    ViewedInput,
    ViewedReasons,
)
from infoflow_lens.theory.information_sets import propagate

# in the order in which they need each other
_PARTS = (
    "data", "sets", "strengths", "picture", "controls", "drawing", "lines", "measured", "text",
    "heads", "words", "next", "why", "search", "link", "save", "pair", "mount",
)  # fmt: skip
_SCRIPTS = tuple(f"flow/{part}.js" for part in _PARTS)


def render_flow(view: FlowView, fragment: bool = False) -> str:
    """Return the interactive picture, with all that it needs in itself.

    Args:
        view: what it shows.
        fragment: True for HTML to put into a notebook or a bigger page; False for a whole page.
            Several fragments may stand in one page, also the same one twice.
    """
    picture = picture_data(view)
    body = picture_element(picture, fallback(view))
    if fragment:
        return f"{body}\n<script>{mounting_script([picture])}</script>"
    page = (
        templates()
        .get_template("flow.html.j2")
        .render(title=view.title, body=body, script=mounting_script([picture]))
    )
    return add_policy(page)


def write_flow(view: FlowView, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write the picture as a page of its own.

    Args:
        view: what it shows.
        path: of the page.
        overwrite: whether a file that is no such page may be replaced, too.

    Raises:
        InfoFlowError: if the file cannot be written, or another one stands in its place.
    """
    FLOW_PAGE.check(path, overwrite=overwrite)  # before the page is made
    return FLOW_PAGE.write(path, render_flow(view), overwrite=overwrite)


class Pictured:
    """What shows itself as the interactive picture: in a notebook, and as a page."""

    @property
    def view(self) -> FlowView:
        """The numbers that the picture shows."""
        raise NotImplementedError

    def to_html(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the interactive picture as a page of its own, which needs no network.

        Args:
            path: of the page.
            overwrite: whether a file that is no such page may be replaced, too.

        Returns:
            The file.

        Raises:
            InfoFlowError: if the file cannot be written, or another one stands in its place.
        """
        return write_flow(self.view, path, overwrite=overwrite)

    def _repr_html_(self) -> str:
        return render_flow(self.view, fragment=True)


def picture_data(view: FlowView) -> str:
    """Return the JSON that the page's script reads, safe inside a script element."""
    groups, first, notes = [], 0, list(view.notes)
    for name, count in view.groups:
        groups.append({"name": name, "first": first, "count": count})
        first += count
    if any(each.influence is not None for each in view.inputs):
        notes.append(f"Measured influence: {view.influence_name}.")
    opened = view.inputs[view.first]
    n_layers, n_pos = len(opened.ranked), opened.n_queries
    # opens at the last state of the last layer
    layer, position = view.selected or (n_layers - 1, n_pos - 1)
    return str(
        htmlsafe_json_dumps(
            {
                "title": view.title,
                "rules": view.rules,
                "record": view.record,
                "notes": notes,
                "unmeasured": view.unmeasured,
                "marked_name": view.marked_name,
                "selected": [layer, position],
                "k": view.k,
                "first": view.first,
                "groups": groups,
                "aligned": view.aligned and [list(pair) for pair in view.aligned],
                "inputs": [_pack(each) for each in view.inputs],
            },
            dumps=_dumps,
        )
    )


def fit_into_page(view: FlowView, most: int) -> FlowView:
    """Keep as many of the first inputs of a view as fit into a page, at least one.

    A note of the view counts the inputs that are left out.

    Args:
        view: a view without groups.
        most: bytes of the page's data.
    """
    size, kept = 0, 0
    for each in view.inputs:
        size += len(_dumps(_pack(each)))
        if kept and size > most:
            break
        kept += 1
    if kept == len(view.inputs):
        return view
    left = len(view.inputs) - kept
    note = f"{left} more sequences do not fit into this page; flow() shows any of them."
    first = view.first if view.first < kept else 0
    return replace(view, inputs=view.inputs[:kept], notes=[*view.notes, note], first=first)


def _dumps(value: Any, **kwargs: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False, **kwargs)


def picture_element(data: str, inside: str = "") -> str:
    """Return the element that a picture is mounted on; `inside` is shown where no script runs."""
    return (
        f'<div data-infoflow="{identity(data)}">{inside}'
        f'<script type="application/json">{data}</script></div>'
    )


def identity(data: str) -> str:
    """Return a name for a picture: pictures of the same content share it."""
    return hashlib.sha256(data.encode()).hexdigest()[:16]


def mounting_script(pictures: Sequence[str]) -> str:
    """Return the script that mounts pictures.

    Args:
        pictures: as :func:`picture_data` gives them.
    """
    style = json.dumps(asset("flow/style.css"))
    calls = "".join(
        f'infoflow.mount("{identity(data)}", {style});' for data in dict.fromkeys(pictures)
    )
    return f"{script(*_SCRIPTS)}\n{calls}\n}})();"


def fallback(view: FlowView) -> str:
    """Write the text for readers without scripts: the first input, and its shown state's set."""
    first = view.inputs[view.first]
    layer, position = view.selected or (len(first.ranked) - 1, first.n_queries - 1)
    rule = next(iter(view.rules))
    if rule == "mechanisms" and first.mechanisms is None:
        rule = "max_position"
    sets = propagate(first.layers_of(rule), len(first.tokens))
    held = [f"{s} \u201c{first.tokens[s]}\u201d" for s in sorted(sets.of(layer, 0, position))]
    return (
        f"<p><b>{escape(view.title)}</b></p><p>{escape(' '.join(first.tokens))}</p>"
        f"<p>The state after layer {layer} at position {position} can hold: "
        f"{escape(', '.join(held) or 'nothing')}. The interactive picture needs scripts.</p>"
    )


class _Blob:
    """Arrays one behind the other, each aligned."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0
        self._known: dict[tuple[str, bytes], list[Any]] = {}

    def add(self, kind: str, values: npt.NDArray[np.generic]) -> list[Any]:
        data = np.ascontiguousarray(values).tobytes()
        # the same array is stored once
        if (kind, data) not in self._known:
            self._known[kind, data] = [kind, self.size, int(values.size)]
            padding = -len(data) % 4
            self.parts.append(data + bytes(padding))
            self.size += len(data) + padding
        return self._known[kind, data]

    def keys(self, keys: Tensor) -> list[Any]:
        small = keys.numel() == 0 or int(keys.max()) < 255
        # the page's numbers have no sign: 0 is "no key"
        values = keys.numpy().astype(np.int64) + 1
        if small:
            return self.add("key8", values.astype("u1"))
        return self.add("key16", values.astype("<u2"))

    def half(self, values: Tensor) -> list[Any]:
        # what half precision cannot hold, such as infinity, becomes its largest number
        limit = torch.finfo(torch.float16).max
        return self.add("half", values.float().clamp(-limit, limit).numpy().astype("<f2"))

    def float(self, values: Tensor) -> list[Any]:
        return self.add("float", values.float().numpy().astype("<f4"))

    def share8(self, values: Tensor) -> list[Any]:
        # the square root spends the 256 steps on small weights
        steps = (values.float().clamp(0, 1).sqrt() * 255).round()
        return self.add("share8", steps.numpy().astype("u1"))


def _pack(view: ViewedInput) -> dict[str, Any]:
    """Pack an input as text for the page: arrays in one compressed blob."""
    # half precision and shares of 8 bits are finer than a screen shows
    blob = _Blob()
    arrays: dict[str, Any] = {"ranked": [blob.keys(keys.cpu()) for keys in view.ranked]}
    for name in ("weights", "scores"):
        layers = getattr(view, name)
        arrays[name] = None if layers is None else [blob.half(v.detach().cpu()) for v in layers]
    arrays["patterns"] = (
        None if view.patterns is None else [blob.share8(v.detach().cpu()) for v in view.patterns]
    )
    arrays["edges"] = (
        None if view.edges is None else [blob.half(_shares(e.detach().cpu())) for e in view.edges]
    )
    arrays["mechanisms"] = (
        None
        if view.mechanisms is None
        else [[head.name for head in layer] for layer in view.mechanisms]
    )
    rules = [rule for rule in RULES if rule != "mechanisms" or view.mechanisms is not None]
    arrays["moves"] = {rule: _moves(blob, view.describe(rule)) for rule in rules}
    arrays["reasons"] = None if view.reasons is None else _reasons(blob, view.reasons)
    arrays["replaced"] = None if view.replaced is None else _pack_next_tokens(blob, view.replaced)
    arrays["possible"] = None if view.possible is None else blob.keys(view.possible.cpu())
    arrays["influence"] = arrays["largest"] = None
    if view.influence is not None:
        # by the largest of each state, which half precision could not hold as it is
        influence = view.influence.detach().cpu().float()
        largest = influence.nan_to_num(0).amax(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
        arrays["influence"] = blob.half(influence / largest[..., None])
        arrays["largest"] = blob.float(largest)
    compressed = zlib.compress(b"".join(blob.parts), 9)
    return {
        "name": view.name,
        "tokens": list(view.tokens),
        "n_queries": view.n_queries,
        "heads": [keys.shape[0] for keys in view.ranked],
        "depths": [keys.shape[2] for keys in view.ranked],
        "causal": view.causal,
        "next": None
        if view.next_tokens is None
        else [
            [(token, float(f"{chance:.3g}")) for token, chance in row] for row in view.next_tokens
        ],
        "marked": [int(source) for source in view.marked],
        "left_out": [int(source) for source in view.left_out],
        "arrays": arrays,
        "blob": base64.b64encode(compressed).decode(),
    }


def _reasons(blob: _Blob, reasons: ViewedReasons) -> dict[str, Any]:
    """Return reasons as the page reads them."""
    packed: dict[str, Any] = {"names": list(reasons.part_names)}
    for name in ("keys", "parts"):
        packed[name] = [blob.keys(layer.cpu()) for layer in getattr(reasons, name)]
    for name in ("margins", "values", "rest"):
        packed[name] = [blob.half(layer.detach().cpu()) for layer in getattr(reasons, name)]
    return packed


def _pack_next_tokens(blob: _Blob, replaced: Replaced) -> dict[str, Any]:
    """Pack next tokens with each token replaced as the page reads them: words, and their places."""
    pairs = [pair for of in replaced.next_tokens for row in of for pair in row]
    words = list(dict.fromkeys(token for token, _ in pairs))
    places = {word: place for place, word in enumerate(words)}
    return {
        "by": list(replaced.by),
        "words": words,
        "width": max((len(row) for of in replaced.next_tokens for row in of), default=0),
        "tokens": blob.keys(torch.tensor([places[token] for token, _ in pairs])),
        "chances": blob.half(torch.tensor([chance for _, chance in pairs])),
    }


def _shares(edges: Tensor) -> Tensor:
    """Divide edges by the largest in each row, which is all that the page draws."""
    largest = edges.float().amax(dim=-1, keepdim=True)
    return edges.float() / largest.clamp(min=1e-30)


def _moves(blob: _Blob, moves: Move | list[list[Move]]) -> Any:
    """Return moves as the page reads them."""
    if isinstance(moves, list):
        return [[_moves(blob, move) for move in layer] for layer in moves]
    if moves.keys is None:
        return {"most": moves.most}
    return {"width": moves.keys.shape[1], "keys": blob.keys(moves.keys.cpu())}
