"""Short displays of objects: one line in a terminal, a small table in a notebook."""

from __future__ import annotations

import html
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any

_TURNS = "\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # of the direction
_JOINERS = "\u200c\u200d"
_ESCAPED_JOINER = re.compile(r"(?<!\\)((?:\\\\)*)\\u(200[cd])")  # no backslash of the text's own
_LONGEST = 80  # characters of a value
_LONGEST_LINE = 400
_ROWS = 12
MISSING = "\u2013"  # of a number


class Displayed:
    """A base with a short display, for dataclasses whose values may be large."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__repr__" not in vars(cls):  # a dataclass would write one with all values
            cls.__repr__ = cls.__repr__  # type: ignore[method-assign]

    def _facts(self) -> Mapping[str, Any]:
        """Return the values to show, by name: the fields of the dataclass, but its notes."""
        if not is_dataclass(self):
            return {}
        return {
            item.name: getattr(self, item.name)
            for item in fields(self)
            if item.repr and not item.name.startswith("_") and item.name != "notes"
        }

    def _say(self) -> str:
        """Say in words what it is about; empty where names and values do."""
        return ""

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}={brief(value)}" for name, value in self._facts().items())
        line = printable(self._say()) or facts
        return f"{type(self).__name__}({cut(line, _LONGEST_LINE)})"

    def _repr_html_(self) -> str:
        notes = tuple(getattr(self, "notes", ()))
        return panel(type(self).__name__, self._facts(), notes, _what_to_do(self))


def plain_label(text: Any) -> str:
    """Return a text for matplotlib, which takes what stands between dollars for mathematics."""
    return str(text).replace("$", r"\$")


def printable(text: str) -> str:
    """Return a text in which what a terminal takes for a command is shown as ``\\x1b``.

    Line breaks and tabs stay. Names of files, models and tokens may hold anything, so whatever is
    printed goes through here.
    """
    if text.isprintable():
        return text
    return "".join(
        mark
        if mark in "\n\t" or not (unicodedata.category(mark) in ("Cc", "Cs") or mark in _TURNS)
        else ascii(mark)[1:-1]
        for mark in text
    )


def strip_word(word: str) -> str:
    """Return a word without the blanks around it; one that is all blanks stays."""
    return word.strip() or word


def quote_readable(word: str) -> str:
    """Return ``repr(word)`` of a word in which line breaks and the like are written out already."""
    return repr(word).replace("\\\\", "\\")


def count(n: int, noun: str) -> str:
    """Return a number with its noun, which has an s in the plural: 1 layer, 2 layers."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def begin_sentence(text: str) -> str:
    """Return a text with a capital at its beginning; all other letters stay."""
    return text[:1].upper() + text[1:]


def quote(text: str) -> str:
    """Return ``repr(text)``, in which joiners of words stay.

    Persian, Hindi and emoji have them inside of words; a text of joiners alone would look empty.
    """
    # joiners alone would look like nothing
    if not "".join(text.split()).strip(_JOINERS):
        return repr(text)
    return _ESCAPED_JOINER.sub(lambda found: found[1] + chr(int(found[2], 16)), repr(text))


def brief(value: Any) -> str:
    """Return a value in a few words: of tensors and tables their shapes, of sequences how many."""
    # tensors, arrays and tables say their shape and not their numbers
    shape = getattr(value, "shape", None)
    if shape is not None and not callable(shape):
        kind = str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")
        return f"{kind} {list(shape)}" if len(shape) else str(value)
    if value is None or isinstance(value, (bool, int)):
        return cut(repr(value), _LONGEST)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str):
        return quote(cut(value, _LONGEST))
    if isinstance(value, Mapping):
        return f"{len(value)} of {_names(value)}" if len(value) else "{}"
    if isinstance(value, (tuple, list, set, frozenset)):
        return _sequence(value)
    return cut(repr(value), _LONGEST) if isinstance(value, Displayed) else _other(value)


def _other(value: Any) -> str:
    """Show other values: by their repr if it is short, else by the name of their class."""
    if callable(value):  # a model's words are many, and take their time
        return getattr(value, "__name__", type(value).__name__)
    try:
        words = repr(value)
    except Exception:
        return type(value).__name__
    return words if len(words) <= _LONGEST and "\n" not in words else type(value).__name__


def _sequence(values: Any) -> str:
    items = list(values)
    if items and hasattr(items[0], "shape"):
        shapes = {brief(item) for item in items[:64]}
        return f"{len(items)} of {' or '.join(sorted(shapes))[:_LONGEST]}"
    if len(items) <= 8:
        line = ", ".join(map(brief, items))
        if len(line) <= _LONGEST:
            return f"({line})"
    return f"{len(items)} of {type(items[0]).__name__}"


def _names(names: Iterable[Any]) -> str:
    return cut(", ".join(map(str, islice(names, _ROWS))), _LONGEST)


def cut(text: str, longest: int) -> str:
    """Cut a text that is longer, with a sign at its end."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _what_to_do(value: Any) -> str:
    calls = [
        f".{name}()"
        for name in ("to_frame", "summary", "plot", "report", "save")
        if callable(getattr(value, name, None))
    ]
    return f"more: {', '.join(calls)}" if calls else ""


def panel(
    title: str,
    facts: Mapping[str, Any],
    notes: Sequence[str] = (),
    more: str = "",
    head: Any | None = None,
) -> str:
    """Return a small table for a notebook; every string is escaped.

    Args:
        title: what is shown.
        facts: values by name; see :func:`brief`.
        notes: sentences above the table.
        more: a line below it.
        head: a small data frame, of which the first rows are shown.
    """
    esc = html.escape
    rows = "".join(
        f"<tr><th style='text-align:left'>{esc(str(name))}</th><td style='text-align:left'>"
        f"{esc(cut(value, 400) if isinstance(value, str) else brief(value))}</td></tr>"
        for name, value in list(facts.items())[:40]
    )
    said = "".join(f"<li>{esc(cut(str(note), 400))}</li>" for note in list(notes)[:_ROWS])
    parts = [
        f"<b>{esc(title)}</b>",
        f"<ul>{said}</ul>" if said else "",
        f"<table>{rows}</table>" if rows else "",
        "" if head is None else table(head),
        f"<small>{esc(more)}</small>" if more else "",
    ]
    return f"<div>{''.join(parts)}</div>"


def table(frame: Any) -> str:
    """Return the first rows of a data frame as HTML, its strings escaped and cut."""
    first = frame.head(_ROWS)
    esc = html.escape
    head = "".join(f"<th>{esc(cut(str(name), 40))}</th>" for name in list(first.columns)[:20])
    rows = "".join(
        "<tr>" + "".join(f"<td>{esc(cut(number(value), 60))}</td>" for value in row[:20]) + "</tr>"
        for row in first.itertuples(index=False, name=None)
    )
    left = len(frame) - len(first)
    more = f"<small>{left} more rows</small>" if left else ""
    return f"<table><tr>{head}</tr>{rows}</table>{more}"


def number(value: Any) -> str:
    """Return a number with three digits, a dash for what is missing, other things as they are."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return MISSING
    return f"{value:.3g}" if isinstance(value, float) else str(value)
