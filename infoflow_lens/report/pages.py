"""Pages: the interactive picture, whole or a fragment, and the dashboard of a probe run."""

import base64
import hashlib
import json
import math
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup, escape
from torch import Tensor

from infoflow_lens.agreement import Agreement, SetAgreement
from infoflow_lens.foundation.display import MISSING
from infoflow_lens.foundation.documents import FLOW_PAGE
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.report.assets import add_policy, asset, script, templates
from infoflow_lens.report.charts import Table, render_chart
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


TERMS = {
    "information set": "the input positions that a state can still hold",
    "max-position rule": "each head passes on the token of its largest score",
    "top-k rule": "each head passes on the tokens of its k largest scores",
    "mechanisms rule": "each head passes on what describes it",
    "own token": "the token at the state's own position; the residual stream keeps it",
    "influence": "how much a state moves when an input token does",
    "influence inside": "share of the influence of other tokens that lies in the predicted set",
    "AUROC": "does influence rank predicted tokens above the others? .5 is chance",
    "label": "which ideal pattern describes a head: fixed, the largest key, several keys",
    "worth": "what the output loses when a head writes its mean alone",
    "recovery": "can a linear map read the attended token off the state?",
    "control": "the same map for a token that the head does not attend to",
    "entropy": "how spread the attention rows are, in nats",
    "layer": "layers count from 0, the first block",
}


def term(name: str, words: str | None = None) -> Markup:
    """Return a word with its meaning on hover and focus."""
    return Markup('<span class="term" tabindex="0">{}<span role="tooltip">{}</span></span>').format(
        words or name, TERMS[name]
    )


METRICS = {
    "auroc": ("AUROC", "does influence rank predicted tokens above the others? .5 is chance"),
    "average_precision": ("avg. precision", "the same, as area under precision and recall"),
    "precision": ("precision", "share of the predicted set that is measured"),
    "recall": ("recall", "share of the measured set that is predicted"),
    "jaccard": ("Jaccard", "intersection over union of the two sets"),
    "exact_match": ("exact", "share of states whose two sets are equal"),
    "influence_inside": ("inside (squared)", "share of squared influence in the predicted set"),
    "predicted_size": ("predicted", "mean size of the predicted set"),
    "measured_size": ("measured", "mean size of the measured set"),
}


def agreement_rows(agreement: Mapping[str, Agreement], last: str) -> list[dict[str, Any]]:
    """Return rows of the table of agreement: by place, then by what the agreements are called."""
    rows = []
    n_layers = max((len(each.layers) for each in agreement.values()), default=0)
    for index in range(n_layers + 1):
        place = f"tokens, layer {index}" if index < n_layers else f"{last}, last layer"
        for name, each in agreement.items():
            values: SetAgreement = each.layers[index] if index < n_layers else each.cls
            if not values.n_states:
                continue
            numbers = [getattr(values, metric) for metric in METRICS]
            said = [MISSING if math.isnan(number) else f"{number:.3f}" for number in numbers]
            rows.append({"place": place, "stage": name, "values": said})
    return rows


PICTURE_BYTES = 900_000


@dataclass(frozen=True)
class Section:
    """What one probe found.

    Attributes:
        title: of the section, which is also its name in the list at the top.
        text: under it, a line for each paragraph.
        figures: what it shows: charts of `infoflow_lens.report.charts` (HeatMap, NameMap, Lines,
            Table), or figures of matplotlib.
    """

    title: str
    text: str
    figures: Sequence[Any]


@dataclass(frozen=True)
class ProbingReport:
    """What a report on a probe run shows; what is None or empty was not asked for.

    Attributes:
        title, headline: of the page.
        facts: short statements, as (label, value).
        problems: what the model cannot be asked.
        capabilities: the model's layers.
        maps: the section that shows all heads at a glance, which leads.
        sections: one for each other probe.
        agreement: by the rule that predicted.
        explained: how far sets explain influence, with chance.
        heads: a row for each head, the first two columns of which are layer and head.
        examples: for "layer.head", (sequence of `flow`, query, key, weight).
        places: charts over layers and positions.
        flow: the picture.
        record: of the run.
    """

    title: str
    headline: str
    facts: Sequence[tuple[str, str]]
    problems: Sequence[str]
    capabilities: Table
    maps: Section | None
    sections: Sequence[Section]
    agreement: Mapping[str, Agreement]
    explained: Table | None
    heads: Table | None
    examples: Mapping[str, Sequence[Sequence[float]]]
    places: Sequence[Any]
    flow: FlowView | None
    record: RunRecord


def render_probing(report: ProbingReport) -> str:
    """Return the report as one HTML page without references to anything that it would fetch."""
    # a picture that is too large for a page is left out, and the page says so
    flow = None if report.flow is None else fit_into_page(report.flow, PICTURE_BYTES)
    data = None if flow is None else picture_data(flow)
    script = "" if data is None else mounting_script([data])
    page = (
        templates()
        .get_template("probing.html.j2")
        .render(
            report=report,
            term=term,
            chart=render_chart,
            anchor=_anchor,
            picture="" if flow is None or data is None else picture_element(data, fallback(flow)),
            script=script,
            dashboard=asset("dashboard.js"),
            heads_data=htmlsafe_json_dumps(
                {name: rows for name, rows in report.examples.items() if rows}
            ),
            metrics=METRICS,
            rows=agreement_rows(report.agreement, "last position"),
            record=json.dumps(report.record.to_dict(), indent=2),
        )
    )
    return add_policy(page)


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "section"
