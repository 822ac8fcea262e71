"""Pages of results: templates of the package, filled from the rows of the runs."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import jinja2
import numpy as np
from jinja2.sandbox import SandboxedEnvironment

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.studies.study import Statement

CARD = "card.md"  # the page of a language model, which stands beside the model
Form: TypeAlias = Callable[[float], str] | int  # how a number is written, or its digits
TEMPLATES = Path(__file__).parent / "templates"  # each named by its page, and ``.jinja``
_WORDS = (
    *("none", "one", "two", "three", "four", "five", "six", "seven"),
    *("eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen"),
)


def page_templates() -> tuple[str, ...]:
    """Return the pages of results that have a template, by their paths below the results."""
    found = sorted(TEMPLATES.rglob("*.md.jinja"))
    names = (path.relative_to(TEMPLATES).as_posix().removesuffix(".jinja") for path in found)
    return tuple(name for name in names if name != CARD)


def render_page(page: str, more: Mapping[str, Any]) -> str:
    """Render a page from its template, which is one of the package's.

    A folder of results holds rows, and no template: what it holds is data of the page. The
    sandbox keeps a template that a mistake brought in from names that Python keeps private.

    A template has, as functions and as filters, what :data:`FORMS` names, the filters ``n``,
    ``span``, ``listed``, ``in_words`` and ``number`` (the first one of a cell), and
    ``statement(name)``, what a study stated beforehand.

    Args:
        page: one of :func:`page_templates`, or :data:`CARD`.
        more: what else it can name, such as ``rows(run)``.

    Raises:
        InfoFlowError: if it cannot be filled, naming the template.
    """
    # templates of the package alone, and names that are not there are errors, not blanks
    environment = SandboxedEnvironment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        FORMS,
        n=short,
        span=span,
        listed=list_numbers,
        in_words=count_in_words,
        number=_first_number,
    )
    environment.globals.update(
        FORMS, statement=lambda name: Statement.read(name).text.rstrip(), **more
    )
    try:
        return environment.get_template(f"{page}.jinja").render()
    except (jinja2.TemplateError, KeyError, IndexError, TypeError, ValueError) as error:
        raise InfoFlowError(
            f"the template of {page!r} cannot be filled ({type(error).__name__}: {error}): "
            "expected the rows of all runs that it names; run these studies again"
        ) from error


def short(value: float, digits: int = 3, sign: bool = False) -> str:
    """Return a number as prose has it: without the zero before the point."""
    return without_zero(f"{value:{'+' if sign else ''}.{digits}f}")


def without_zero(text: str) -> str:
    """Return numbers below 1 without the zero before the point."""
    return re.sub(r"(?<!\d)0\.(?=\d)", ".", text)


def percent(share: float, digits: int = 0) -> str:
    """Return a share in percent."""
    return f"{share:.{digits}%}"


def commas(count: float) -> str:
    """Return a count, with commas between thousands."""
    return f"{count:,.0f}"


def span(values: Iterable[float], form: Form = 3) -> str:
    """Return the least and the most; or the one."""
    known = np.array(list(values), dtype=float)
    return " to ".join(dict.fromkeys(_format_all([np.nanmin(known), np.nanmax(known)], form)))


def list_numbers(values: Iterable[float], form: Form = 3) -> str:
    """List numbers in their order: "1, 2 and 3"."""
    *first, last = _format_all(values, form)
    return f"{', '.join(first)} and {last}" if first else last


def _format_all(values: Iterable[float], form: Form) -> list[str]:
    write = partial(short, digits=form) if isinstance(form, int) else form
    return [write(float(value)) for value in values]


def count_in_words(text: object) -> str:
    """Put small counts of a text in words: "2 of 3" is "two of three"; larger ones stay."""
    words = {str(count): word for count, word in enumerate(_WORDS)}
    return re.sub(r"\d+", lambda count: words.get(count[0], count[0]), str(text))


def two_digits(value: float) -> str:
    """Return a factor with two digits that count."""
    # rounded first: .0999999999 is .1, whose digits begin a place before
    size = abs(round(value, 9) or value)
    digits = max(0, 1 - math.floor(math.log10(size))) if value else 0
    return short(value, digits)


def _first_number(cell: str) -> str:
    return without_zero(cell.split(" ")[0].lstrip("+"))


FORMS: Mapping[str, Callable[..., str]] = {
    "commas": commas,
    "pct": percent,
    "two_digits": two_digits,
    "one_digit": partial(short, digits=1),
}


def cell_of(text: str, column: str, *first: str) -> str:
    """Return a cell of the tables of a text in Markdown.

    Args:
        text: with tables.
        column: the cell's.
        first: the first cells of its row.

    Raises:
        KeyError: if no table has it.
    """
    columns: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if not cells or not columns:  # a table begins with its columns
            columns = cells
        elif cells[: len(first)] == list(first) and column in columns[len(first) :]:
            return cells[columns.index(column)]
    raise KeyError(f"no table has a column {column!r} and a row {' | '.join(first)}")
