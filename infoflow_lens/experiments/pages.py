"""Pages of results: templates that stand beside them, filled from the rows of the runs."""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from infoflow_lens.experiments.study import Statement
from infoflow_lens.foundation.errors import InfoFlowError

if TYPE_CHECKING:
    import pandas as pd

TEMPLATE = ".jinja"  # behind the name of the page


def render_page(template: Path, more: Mapping[str, Callable[..., Any]]) -> str:
    """A page from its template, in Jinja.

    A template has the filters ``n``, ``pct``, ``commas`` and ``span``, and ``statement(name)``,
    what a study stated beforehand.

    Args:
        template: the file.
        more: what it can call beside these, such as ``rows(name)``.

    Raises:
        InfoFlowError: if it cannot be filled, naming the file.
    """
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"n": short, "pct": percent, "commas": commas, "span": span}
    environment.globals |= {"statement": lambda name: Statement.of(name).text.rstrip(), **more}
    try:
        return environment.from_string(template.read_text(encoding="utf-8")).render()
    except (jinja2.TemplateError, KeyError, IndexError, TypeError, ValueError) as error:
        raise InfoFlowError(
            f"{str(template)!r} cannot be filled ({type(error).__name__}: {error}): expected a "
            "template for the rows beside it; mend it, or run the study again"
        ) from error


def short(value: float, digits: int = 3, sign: bool = False) -> str:
    """A number as prose has it: without the zero before the point."""
    return re.sub(r"(?<!\d)0\.", ".", f"{value:{'+' if sign else ''}.{digits}f}")


def percent(share: float, digits: int = 0) -> str:
    """A share in percent."""
    return f"{share:.{digits}%}"


def commas(count: float) -> str:
    """A count, with commas between thousands."""
    return f"{count:,.0f}"


def span(values: "pd.Series[float]", form: Callable[[float], str] = short) -> str:
    """The least and the most; or the one."""
    ends = [form(float(end)) for end in (values.min(), values.max())]
    return " to ".join(dict.fromkeys(ends))


def two_digits(value: float) -> str:
    """A factor with two digits that count."""
    digits = max(0, 1 - math.floor(math.log10(abs(round(value, 9))))) if value else 0
    return short(value, digits)
