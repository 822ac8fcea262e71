"""The page of an answer."""

import json
from dataclasses import dataclass
from typing import Any

from infoflow_lens.hooks.answer.result import AnswerNumbers
from infoflow_lens.report.assets import add_policy
from infoflow_lens.report.charts import Table, render_chart
from infoflow_lens.report.strips import draw_strips
from infoflow_lens.report.templating import templates

_HEADS = 40  # rows of heads and MLPs


@dataclass(frozen=True)
class Form:
    """What stands in the form by which one asks again; nothing is the default of ``ask``.

    Attributes:
        text, answer, against, instead, at: as for ``ask``.
        note: a sentence above the form.
        waits: whether this is being measured: the page is loaded again, and nothing is typed.
        cut: numbers of lines that are to be cut at once.
    """

    text: str
    answer: str = ""
    against: str = ""
    instead: str = ""
    at: str = ""
    note: str = ""
    waits: bool = False
    cut: tuple[int, ...] = ()


def render_answer(answer: AnswerNumbers, form: Form | None = None, *, can_cut: bool = False) -> str:
    """Render an answer as one HTML page that asks a network for nothing.

    Args:
        answer: to a question.
        form: by which one asks again, where somebody serves the page.
        can_cut: whether lines can be cut there.
    """
    lines, measured = answer.bundles(), {"effect": answer.path_effect, "cost": answer.path_cost}
    if bool(answer.path_cost.isnan().all()):  # as of circuits that are not pruned
        del measured["cost"]
    meanings = {
        "effect": "on the readout, when they are cut one by one, summed",
        "cost": "share of the difference that the circuit loses without them, summed",
    }
    paths = answer.to_frame("paths").dropna(axis=1, how="all") if lines else None
    bundles = Table(
        {
            "what happens": "paths that begin and end at one place, together",
            "paths": "how many",
            **{name: meanings[name] for name in measured},
        },
        [
            [f"{number}. {said}", len(group), *(float(c[group].sum()) for c in measured.values())]
            for number, (said, group) in enumerate(lines, 1)
        ],
        anchors=[f"line-{number}" for number in range(1, len(lines) + 1)],
    )
    units = answer.to_frame("heads").head(_HEADS)  # MLPs have no head
    # a guess that is a class cannot stand in the text
    says_token = bool(answer.guess) and not answer.guess.startswith("class ")
    page = (
        templates()
        .get_template("answer.html.j2")
        .render(
            answer=answer,
            form=form,
            can_cut=can_cut and form is not None and not form.waits,
            presses=form is not None and not form.waits and says_token,
            chart=render_chart,
            bundles=bundles if lines else None,
            paths=None if paths is None else Table.from_frame(paths),
            strips=draw_strips(answer) if len(answer.strips) else None,
            words=Table.from_frame(answer.to_frame("tokens")),
            heads=Table.from_frame(units.drop(columns=["layer", "head"], errors="ignore")),
            looks=_looks(answer),
            record=json.dumps(answer.record.to_dict(), indent=2),
        )
    )
    return add_policy(page, "'none'" if form is None else "'self'")


def _looks(answer: AnswerNumbers) -> Table | None:
    """Tabulate where each head looks most in both texts, and what it writes from there."""
    effects = dict(zip(map(tuple, answer.units.tolist()), answer.unit_effect.tolist(), strict=True))
    rows: list[list[Any]] = []
    for number, (layer, head) in enumerate(answer.looked.tolist()):
        row: list[Any] = [f"{layer}.{head}", effects[layer, head]]
        for text in range(2):
            row += answer.first_look(number, text)
        rows.append(row)
    columns = {
        "head": "layer and number",
        "effect": "with the other text's output",
        "looks at": "the key with the largest weight",
        "writes": "towards the readout from that key, directly",
        "other text: looks at": "the key with the largest weight there",
        "other text: writes": "towards the readout from that key, directly",
    }
    return Table(columns, rows) if rows else None
