"""Tables of studies as data, their rendering in Markdown, and the format of numbers."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal, TypeAlias

import numpy as np

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.lazy import pd

Take: TypeAlias = Literal["spread", "mean", "least", "most", "median", "first"]
Words: TypeAlias = Mapping[Any, object] | Callable[[Any], object]

# What columns of rows are called at the top of a table; others by their own names.
_HEADERS: Mapping[str, str] = {
    "n_tokens": "T",
    "d_token": "d",
    "d_model": "E",
    "size": "|I|",
    "nmse": "NMSE",
}


@dataclass(frozen=True)
class Column:
    """A column of a table: a number of the rows behind each line, and how it is written.

    Attributes:
        name: at the top; of a column `across`, what all its columns have in common, or nothing.
        value: a column of the rows, or what is made of the rows of a line: a number, a text, a
            bool (yes, no), or None (``-``).
        take: of a column of the rows over a line: the mean with the least and the largest, one of
            these, the median, or that of the first row.
        form: of a number.
        across: a column of the rows; there is a column of the table for each of its values.
    """

    name: str
    value: "str | Callable[[pd.DataFrame], object]"
    take: Take = "spread"
    form: str = ".3g"
    across: str = ""

    def cell(self, rows: "pd.DataFrame") -> str | None:
        """Return the text of a cell from the rows of its line; None without rows."""
        if rows.empty:
            return None
        if callable(self.value):
            return _format(self.value(rows), self.form)
        values = rows[self.value]
        if self.take == "spread":
            return spread(values, self.form)
        if self.take == "first":
            return _format(values.iloc[0], self.form)
        taken = {"mean": "mean", "least": "min", "most": "max", "median": "median"}[self.take]
        return _format(values.agg(taken), self.form)


@dataclass(frozen=True)
class TableSpec:
    """A table of a study: a line for each group of its rows.

    Attributes:
        by: columns of the rows; a line for each of their values together, in the order of the rows.
        columns: behind these; the name of a column of the rows stands for its spread.
        rows: which rows, or what is made of them first.
        words: for a column, what stands in the place of its values.
        names: for a column of `by`, what it is called at the top.
        sort: whether lines stand by the values of `by`.
    """

    by: Sequence[str]
    columns: Sequence[Column | str]
    rows: "Callable[[pd.DataFrame], pd.DataFrame]" = lambda results: results
    words: Mapping[str, Words] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    sort: bool = False

    def render(self, results: "pd.DataFrame") -> str:
        """Return the table in Markdown."""
        rows = self.rows(results)
        cells = [
            (name, column, value)
            for column in self.columns
            for name, column, value in self._expand(column, rows)
        ]
        lines = []
        for key, some in groups(rows, self.by, sort=self.sort):
            said: list[object] = [
                self._say(name, value) for name, value in zip(self.by, key, strict=True)
            ]
            for _, column, value in cells:
                # a column that stands for one value of `across` looks at its rows alone
                here = some if value is None else some[some[column.across] == value]
                said.append(column.cell(here))
            lines.append(said)
        names = [self.names.get(name, _header(name)) for name in self.by]
        return markdown_table([*names, *(name for name, *_ in cells)], lines)

    def _expand(
        self, column: Column | str, rows: "pd.DataFrame"
    ) -> list[tuple[str, Column, object]]:
        """List the columns that a column stands for: name, column, value of `across` or None."""
        if isinstance(column, str):
            column = Column(_header(column), column)
        if not column.across:
            return [(column.name, column, None)]
        return [
            (f"{column.name} {self._say(column.across, value)}".strip(), column, value)
            for value in dict.fromkeys(rows[column.across])
        ]

    def _say(self, name: str, value: object) -> str:
        words = self.words.get(name)
        if words is None:
            return _format(value, "g") or "-"
        return str(words(value) if callable(words) else words[value])


def _header(column: str) -> str:
    return _HEADERS.get(column, column.replace("_", " "))


Part: TypeAlias = "TableSpec | str | Callable[[pd.DataFrame], str]"


def render(parts: Sequence[Part], results: "pd.DataFrame") -> str:
    """Return tables and the text between them, a paragraph each.

    Args:
        parts: tables, texts, and what makes a text of the rows.
        results: the rows.
    """
    return "\n\n".join(
        part.render(results)
        if isinstance(part, TableSpec)
        else part
        if isinstance(part, str)
        else part(results)
        for part in parts
    )


def groups(
    rows: "pd.DataFrame", by: Sequence[str], *, sort: bool = False
) -> "list[tuple[tuple[Any, ...], pd.DataFrame]]":
    """Return rows by the values of some columns, with these values.

    Args:
        rows: of a study.
        by: columns; without any, all rows are one group.
        sort: whether groups stand by these values, and not in the order of the rows.
    """
    if not by:
        return [((), rows)]
    return list(rows.groupby(list(by), sort=sort, dropna=False))


def markdown_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: bool = False
) -> str:
    """Return a table in Markdown.

    Args:
        columns: the names at the top; ``|`` inside a name or cell is escaped.
        rows: cells, as many in each row as there are columns; None is shown as ``-``.
        numbers: whether all columns but the first stand on the right.

    Raises:
        InfoFlowError: for a row of another length.
    """
    others = "---:|" if numbers else "---|"
    lines = [_line(columns), "|---|" + others * (len(columns) - 1)]
    for row in rows:
        if len(row) != len(columns):
            raise InfoFlowError(
                f"a row has {len(row)} cells: expected {len(columns)}, one for each of "
                f"{', '.join(columns)}"
            )
        lines.append(_line(row))
    return "\n".join(lines)


def _line(cells: Sequence[object]) -> str:
    texts = ("-" if cell is None else str(cell) for cell in cells)
    # chr(92) is the backslash, which f-strings do not take before Python 3.12
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in texts)} |"


def spread(values: "pd.Series[float]", form: str = ".3g") -> str:
    """Return a mean and the range over seeds; one number alone, and ``-`` for none.

    Numbers that are NaN, as those of runs that have none, are left out.
    """
    known = values.dropna()
    if not len(known):
        return "-"
    if len(known) == 1:
        return f"{known.iloc[0]:{form}}"
    return f"{known.mean():{form}} ({known.min():{form}} to {known.max():{form}})"


def _format(value: Any, form: str) -> str | None:
    """Return the text of a value in a cell; None for NaN and None."""
    if value is None or isinstance(value, str):
        return value
    # before integers, of which a bool is one
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if isinstance(value, Integral):
        return str(value)
    return None if math.isnan(value) else f"{value:{form}}"
