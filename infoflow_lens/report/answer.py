"""The page of an answer."""

import json
import re
from dataclasses import dataclass
from typing import Any

from infoflow_lens.foundation.display import strip_word
from infoflow_lens.hooks.answer.result import ORDERS, AnswerNumbers
from infoflow_lens.report.assets import add_policy, templates
from infoflow_lens.report.charts import Table, render_chart
from infoflow_lens.report.strips import choose_lines, draw_strips

_HEADS = 40  # rows of heads and MLPs
_LARGEST = 8  # of these, beside the lines
_WORDS = 12  # rows of words beside the fold
_COLUMNS = {"effect": "change of score", "cost": "cost in the circuit"}
# as the page names what tables call by the terms of the field
_NAMES = {
    "effect": "change of score",
    "error": "standard error",
    "effect of the other token": "change of score by the other text's",
    "readout": "score",
    "estimate": "estimated change",
}
# in Hebrew, Arabic and their like, before a place; or the fields of a form
_TURNED = re.compile(
    "<textarea.*?</textarea>|<input[^>]*>|([\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufeff]+)(?=@\\d)",
    re.DOTALL,
)
# what is no running text; or a blank behind a quotation mark, with the word that it begins
_QUOTED = re.compile(
    r"<(textarea|pre|title|style|script|svg)\b.*?</\1>|<[^>]*>"
    r"|(?:(?<=[\s>])|(?<=\s\())(&#3[49]; (?:&[^;\s]{1,8};|[^\s<&]){1,40})",
    re.DOTALL,
)
_BAR = 60  # the width of the largest effect


@dataclass(frozen=True)
class Form:
    """What stands in the form by which one asks again; nothing is the default of ``ask``.

    Attributes:
        text, answer, against, instead, at: as for ``ask``.
        second, instead_second: the second texts, where pairs are asked.
        note: a sentence above the form.
        waits: whether this is being measured: the page is loaded again, and nothing is typed.
        cut: numbers of lines that are to be cut at once.
    """

    text: str
    answer: str = ""
    against: str = ""
    instead: str = ""
    at: str = ""
    second: str = ""
    instead_second: str = ""
    note: str = ""
    waits: bool = False
    cut: tuple[int, ...] = ()


def render_answer(
    answer: AnswerNumbers,
    form: Form | None = None,
    *,
    can_cut: bool = False,
    can_press: bool = False,
) -> str:
    """Render an answer as one HTML page that asks a network for nothing.

    Args:
        answer: to a question.
        form: by which one asks again, where somebody serves the page.
        can_cut: whether lines can be cut there.
        can_press: whether the model says tokens one behind the other, so that it can be asked there
            why one stands in the text, and what comes behind its guess.
    """
    lines, measured = answer.bundles(), {"effect": answer.path_effect, "cost": answer.path_cost}
    if bool(answer.path_cost.isnan().all()):  # as of circuits that are not pruned
        del measured["cost"]
    meanings = {
        "effect": "when they are cut one by one, summed",
        "cost": "share of the difference that the circuit loses without them, summed",
    }
    paths = _tabulate(answer, "paths").dropna(axis=1, how="all") if lines else None
    drawn = choose_lines(answer)

    def tabulate(numbers: list[int]) -> Table:
        rows = [
            [f"{n + 1}. {said}", len(group), *(float(c[group].sum()) for c in measured.values())]
            for n, (said, group) in ((n, lines[n]) for n in numbers)
        ]
        columns = {
            "what happens": "paths that begin and end at one place, together",
            "paths": "how many",
            **{_COLUMNS[name]: meanings[name] for name in measured},
        }
        return Table(columns, rows, anchors=[f"line-{n + 1}" for n in numbers])

    rest = [number for number in range(len(lines)) if number not in drawn]
    units = _tabulate(answer, "heads").drop(columns=["layer", "head"], errors="ignore")
    largest = units.head(_LARGEST).drop(columns="estimated change", errors="ignore").dropna()
    is_predicted = bool(answer.token_predicted[:2].isfinite().any())
    words = _tabulate(answer, "tokens")
    page = (
        templates()
        .get_template("answer.html.j2")
        .render(
            answer=answer,
            # answers may be line breaks and blanks, of which a browser shows one
            dots=lambda said: re.sub(" {2,}", lambda b: "·" * len(b[0]), said),
            signed=answer.write,
            plain=lambda score: answer.write(score, ""),
            form=form,
            can_cut=can_cut and form is not None and not form.waits,
            presses=can_press and form is not None and not form.waits and bool(answer.guess),
            chart=render_chart,
            bundles=tabulate(drawn) if lines else None,
            rest=tabulate(rest) if rest else None,
            n_lines=len(lines),
            n_drawn=len(drawn),
            paths=None if paths is None else Table.from_frame(paths),
            strips=draw_strips(answer) if len(answer.strips) else None,
            tokens=_tokens(answer),
            n_words=_WORDS,
            is_predicted=is_predicted,
            words=Table.from_frame(words if is_predicted else words.drop(columns=[*ORDERS[:2]])),
            replacements=Table.from_frame(_tabulate(answer, "replacements"), most=1000),
            heads=Table.from_frame(units.head(_HEADS)),
            largest=Table.from_frame(largest) if len(largest) else None,
            looks=_looks(answer),
            against=_against(answer),
            record=json.dumps(answer.record.to_dict(), indent=2),
        )
    )
    page = _join_quotes(_isolate_places(page))
    return add_policy(page, "'none'" if form is None else "'self'")


def _join_quotes(page: str) -> str:
    """Let no line end between a quotation mark and a word that begins with a blank, as ' Mary'."""
    return _QUOTED.sub(
        lambda at: at[0] if at[2] is None else f'<span class="whole">{at[2]}</span>', page
    )


def _isolate_places(page: str) -> str:
    """Isolate words that are written from right to left, so that @3 and numbers stay behind them.

    What somebody has typed into the form stays as it is.
    """
    return _TURNED.sub(lambda at: at[0] if at[1] is None else f"&#x2068;{at[1]}&#x2069;", page)


def _tabulate(answer: AnswerNumbers, what: str) -> Any:
    return answer.to_frame(what).rename(columns=_NAMES)


def _tokens(answer: AnswerNumbers) -> list[dict[str, Any]]:
    """List words: those that the other text has otherwise first, then as they move the score.

    Each is a row of the table of words: what becomes of the score by others in its place.
    """
    mean, swap = answer.token_mean, answer.token_other
    sizes = mean.abs().nan_to_num(0).tolist()
    otherwise = [a != b for a, b in zip(answer.span_words, answer.other_span_words, strict=True)]
    rows = []
    for i in sorted(range(len(sizes)), key=lambda i: (not otherwise[i], -sizes[i])):
        effects = answer.replacement_effects[i].tolist()
        others = [
            (strip_word(word), answer.value + effect)
            for word, effect in zip(answer.replacements[i], effects)  # NaN behind the last
        ]
        if not others:
            continue
        word, other = answer.span_words[i], answer.other_span_words[i]
        rows.append(
            {
                "word": strip_word(word),
                "place": int(answer.spans[i, 0]),
                "others": others,  # the likeliest first
                # NaN where others in the mean were not asked
                "score": answer.value + float(mean[i]),
                "error": float(answer.token_error[i]),
                "change": float(mean[i]),
                "n": answer.n_replacements[i],
                "is_open": not answer.find_direction(i),
                "bar": _BAR * sizes[i] / max(*sizes, 1e-12),
                "other": other.strip() if other != word else "",
                "other_score": answer.value + float(swap[i]),
            }
        )
    return rows


def _against(answer: AnswerNumbers) -> list[str]:
    """Say which heads and MLPs, words and lines work against the answer."""
    said = []
    if units := answer.describe_opposition():
        said.append(
            f"Heads and MLPs: {units}. The score rises by so much when one of them gives what it "
            "gives in the other text."
        )
    if words := answer.describe_opposed_words():
        said.append(f"Words: {words}. Other words in their place raise the score on average.")
    elif bool(answer.token_mean.isfinite().any()):
        said.append("Words: there is none whose replacement raises the score beyond doubt.")
    opposed = [
        (number, float(answer.path_effect[group].sum()))
        for number, (_, group) in enumerate(answer.bundles(), 1)
        if float(answer.path_effect[group].sum()) > 0
    ]
    if opposed:
        lines = ", ".join(f"{number} ({answer.write(effect)})" for number, effect in opposed)
        said.append(f"Lines among those that decide: {lines}.")
    return said


def _looks(answer: AnswerNumbers) -> Table | None:
    """Tabulate where each head looks most in both texts, and what it writes from there."""
    effects = answer.effects()
    rows: list[list[Any]] = []
    for number in answer.order_looks():
        layer, head = answer.looked[number].tolist()
        effect = effects[layer, head]
        works = "against" if effect > 0 else "for"
        row: list[Any] = [f"{layer}.{head}", works, effect]
        for text in range(2):
            row += answer.first_look(number, text)
        rows.append(row)
    columns = {
        "head": "layer and number",
        "works": f"for {answer.side} or against it",
        "change of score": "with the other text's output, at all positions",
        "looks at": "the key with the largest weight",
        "writes": f"a part of the score, from that key, directly: plus for {answer.side}",
        "other text: looks at": "the key with the largest weight there",
        "other text: writes": "a part of the score there, from that key, directly",
    }
    return Table(columns, rows) if rows else None
