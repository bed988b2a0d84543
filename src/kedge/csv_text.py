"""CSV text that a spreadsheet takes as data, not as formulas.

Names of classes, clients and columns come from strangers. A spreadsheet computes a cell that begins
with ``=``, ``+``, ``-`` or ``@``, and such a formula can start programs. In front of these goes an
apostrophe; also after signs that separate cells in other countries. Numbers stay as they are.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator
from typing import Any

_BLANK = r"[^\S\t\r\n]|[\x00\u200b-\u200f\u2060\ufeff]"
_START, _LATER = rf"'*(?:{_BLANK})*[=+\-@\uff0b\uff0d\uff1d\uff20]", r"(?<=[;\t\r\n])"
_QUOTED_BEFORE = re.compile(rf"(?:^|{_LATER})(?={_START})|^(?='*[\t\r\n])")
_QUOTES = re.compile(rf"(?:^|{_LATER})'(?={_START})|^'(?='*[\t\r\n])")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?|inf|nan)", re.A | re.I)


def quoted(cell: Any) -> Any:
    """A cell without a formula.

    >>> [quoted(cell) for cell in ("=1+1", "@A1", "-x", "-1.5", -1.5, "a-b", "'=", "a;=b")]
    ["'=1+1", "'@A1", "'-x", '-1.5', -1.5, 'a-b', "''=", "a;'=b"]
    """
    if not isinstance(cell, str) or _NUMBER.fullmatch(cell):
        return cell
    return _QUOTED_BEFORE.sub("'", cell)


def unquoted(text: str) -> str:
    """The text that :func:`quoted` was given."""
    return _QUOTES.sub("", text)


def csv_lines(rows: Iterable[Iterable[Any]]) -> Iterator[str]:
    """Rows as lines of CSV, with cells :func:`quoted`."""
    for row in rows:
        line = io.StringIO(newline="")
        csv.writer(line, lineterminator="\n").writerow(map(quoted, row))
        yield line.getvalue()
