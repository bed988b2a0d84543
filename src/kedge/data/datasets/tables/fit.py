"""Fit the encoding of tables on their training rows, from what each silo could send.

A silo sends a :class:`Profile` of each column, then what a mean, a median or the shares of words
need, and the set of its labels. No function here sees the values of two silos together. Values come
from training rows only. Cells that are wrong are reported where they are, at the silo.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from kedge.data.datasets.tables.cells import ColumnCells, as_number, has_comma
from kedge.data.datasets.tables.encoding import (
    BOOLEANS,
    COMMA,
    DATE_FORMATS,
    ColumnEncoding,
    Problems,
    date_formats,
    parse_days,
    typed,
)
from kedge.data.encoding import Array
from kedge.errors import DataError

BINS = 1000  # of the histogram of a median, and most distinct values that are counted one by one
SLASHED = DATE_FORMATS[2:]  # 03/04/2024 may be of both
Missing = Literal["error", "mean", "median", "indicator", "drop"]
MAX_CATEGORIES = 20  # distinct values of a one-hot column, or of a class column with fractions


class Profile(NamedTuple):
    """What a silo sends about a column."""

    cells: int  # without missing ones
    words: int  # cells that are words
    distinct: int  # different values
    values: frozenset[str]  # at most MAX_CATEGORIES + 1 of them
    formats: frozenset[str]  # formats that all values have, as dates


def profile(cells: ColumnCells) -> Profile:
    """The profile of a column of one silo."""
    values = cells.values()
    formats: Sequence[str] = DATE_FORMATS
    if cells.is_number.any():
        formats = ()
    elif values:
        formats = date_formats(tuple(values))
    return Profile(
        int((~cells.missing).sum()),
        int(cells.is_word.sum()),
        len(values),
        frozenset(sorted(values)[: MAX_CATEGORIES + 1]),
        frozenset(formats),
    )


def fit_column(silos: Sequence[ColumnCells], missing: str, problems: Problems) -> ColumnEncoding:
    """The encoding of a column of training rows.

    Args:
        silos: the cells of each silo.
        missing: what to do with missing values.
        problems: collects cells and columns that cannot be encoded.
    """
    name = silos[0].name
    unusable = ColumnEncoding(name, "words", fill=None if missing == "error" else ())
    if not any(bool(cells.is_word.any()) for cells in silos):
        return _filled(ColumnEncoding(name, "number"), silos, missing, problems)
    profiles = [profile(cells) for cells in silos]
    count, words = sum(p.cells for p in profiles), sum(p.words for p in profiles)
    values = frozenset().union(*(p.values for p in profiles))
    if values <= {*BOOLEANS, "0", "1"}:
        column = ColumnEncoding(name, "boolean")
    elif any(has_comma(word) for cells in silos for word in cells.words):
        _report_words(silos, problems, COMMA, only_commas=True)
        return unusable
    elif words < count / 2:
        _report_words(silos, problems, "is not a number, as most of this column are; correct it")
        return unusable
    elif all(p.formats for p in profiles):
        form = _date_format(silos, [p.formats for p in profiles], problems)
        column = ColumnEncoding(name, "date", format=form)
    else:
        distinct = max([len(values), *(p.distinct for p in profiles)])
        if distinct > MAX_CATEGORIES:
            least = "" if len(profiles) == 1 else "at least "
            what = (
                f"is not a number, and with {least}{distinct} different values the column is too "
                f"varied for one-hot (at most {MAX_CATEGORIES}); leave it out with "
                f"{typed('drop', name)}, or with {typed('id', name)} if it names the rows, or "
                f"replace its values by at most {MAX_CATEGORIES} groups"
            )
            first = next(cells for cells in silos if cells.is_word.any())
            if _mostly_dates(silos):
                mixed = [c for c, p in zip(silos, profiles, strict=True) if not p.formats]
                _report_no_dates(mixed, problems)
            else:
                problems.add(_first(first, first.is_word, what))
            return unusable
        column = ColumnEncoding(name, "words", words=tuple(sorted(values)))
        _warn_alike(silos, "words")
    return _filled(column, silos, missing, problems)


def _filled(
    column: ColumnEncoding, silos: Sequence[ColumnCells], missing: str, problems: Problems
) -> ColumnEncoding:
    """The encoding with what missing values become."""
    if all(bool(cells.missing.all()) for cells in silos):
        what = f"every value is missing; leave it out with {typed('drop', column.name)}"
        where = silos[0].table.where
        problems.add(DataError(f"{where}, column {column.name!r}: {what}"))
        return dataclasses.replace(column, fill=(0.0,))
    if missing not in ("mean", "median", "indicator"):
        return column
    fill = _fill(column, silos, missing)
    has_missing = any(bool(cells.missing.any()) for cells in silos)
    return dataclasses.replace(column, fill=fill, indicator=missing == "indicator" and has_missing)


def _fill(column: ColumnEncoding, silos: Sequence[ColumnCells], missing: str) -> tuple[float, ...]:
    """What a missing value becomes."""
    if column.kind == "words":
        known = [cells.positions(column.words) for cells in silos]
        shares = word_shares([codes[codes >= 0] for codes in known], len(column.words))
        if missing == "median":  # the most frequent word
            shares = (np.arange(len(shares)) == shares.argmax()).astype(np.float64)
        elif missing == "indicator":
            shares = np.zeros(len(shares))
        return tuple(float(v) for v in shares)
    values = [column.values(cells, lambda error: None) for cells in silos]
    present = [v[np.isfinite(v)] for v in values]
    if not any(map(len, present)):
        return (0.0,)
    statistic = median if missing == "median" else mean
    return (statistic(present),)


def _date_format(
    silos: Sequence[ColumnCells], formats: Sequence[frozenset[str]], problems: Problems
) -> str:
    """The format of the dates, or those of the silos if they differ.

    Dates with slashes have one order of day and month in all silos, or a problem.
    """
    pairs = [(c, f) for c, f in zip(silos, formats, strict=True) if c.is_word.any()]
    slashed = [(cells, own) for cells, own in pairs if own <= frozenset(SLASHED)]
    found = [f for f in DATE_FORMATS if f not in SLASHED and any(f in own for _, own in pairs)]
    if slashed:
        orders = [f for f in SLASHED if all(f in own for _, own in slashed)]
        if len(orders) != 1:
            what = "may have the day or the month first; write dates as 2024-03-31"
            if not orders:
                what = "has the month first, and other files the day; write dates as 2024-03-31"
            wrong = next((c for c, own in slashed if SLASHED[0] not in own), slashed[0][0])
            problems.add(_first(wrong, wrong.is_word, what))
        found.append((orders or SLASHED)[0])
    return "|".join(found)


def _mostly_dates(silos: Sequence[ColumnCells]) -> bool:
    """Whether most words are dates, of whatever format."""
    words = tuple(word for cells in silos for word in cells.words)
    known = np.any([~np.isnan(parse_days(words, f)) for f in DATE_FORMATS], axis=0)
    return bool(known.mean() > 0.5)


def _report_no_dates(silos: Sequence[ColumnCells], problems: Problems) -> None:
    """The cells of each file that do not have the format of most of its dates."""
    for cells in silos:
        wrong = min((np.isnan(parse_days(cells.words, f)) for f in DATE_FORMATS), key=np.sum)
        others = np.append(wrong, False)[cells.codes] | cells.is_number
        what = "is not a date like most of this column; write dates as 2024-03-31, or drop it: "
        problems.add(cells.error(others, what + typed("drop", cells.name)))


def _report_words(
    silos: Sequence[ColumnCells], problems: Problems, what: str, only_commas: bool = False
) -> None:
    for cells in silos:
        chosen = [has_comma(word) or not only_commas for word in cells.words]
        wrong = np.array([*chosen, False])[cells.codes]
        cells.check(wrong, what, problems.add)


def _warn_alike(silos: Sequence[ColumnCells], what: str) -> None:
    """Warn about values that differ in upper and lower case alone, and say where they are."""
    places: dict[str, dict[str, str]] = {}  # of each value in lower case: its spellings
    for cells in silos:
        for value in cells.values():
            places.setdefault(value.casefold(), {}).setdefault(value, str(cells.table.where))
    found = [
        " and ".join(f"{value!r} ({where})" for value, where in spellings.items())
        for _, spellings in sorted(places.items())
        if len(spellings) > 1
    ]
    if found:
        warnings.warn(
            f"column {silos[0].name!r}: {', '.join(found)} count as different {what}; if they mean "
            "the same, spell them alike in all files",
            stacklevel=2,
        )


def _first(cells: ColumnCells, wrong: Array, what: str) -> DataError:
    return cells.table.error(int(cells.rows[np.flatnonzero(wrong)[0]]), cells.name, what)


def fit_classes(silos: Sequence[ColumnCells], problems: Problems) -> tuple[str, ...]:
    """The sorted class names of the training rows. Each silo sends the set of its own."""
    names = frozenset().union(*(cells.values() for cells in silos))
    rows = sum(len(cells) for cells in silos)
    where = f"{silos[0].table.where}, column {silos[0].name!r}"
    values = {name: as_number(name) for name in names}
    numeric = {name: value for name, value in values.items() if value is not None}
    if len(numeric) == len(names):
        order = sorted(names, key=float)
        for cells in silos:
            huge = cells.is_number & ~(np.abs(cells.numbers) < 1e15)
            fraction = cells.is_number & (cells.numbers % 1 != 0)
            if huge.any():
                problems.add(cells.error(huge, "cannot be a class"))
            elif len(names) > MAX_CATEGORIES and fraction.any():
                what = f"is one of {len(names)} different numbers; to predict them, write "
                problems.add(_first(cells, fraction, what + "task=regression"))
    else:
        order = sorted(names)
        _warn_alike(silos, "classes")
    if len(order) > max(MAX_CATEGORIES, rows / 2):
        problems.add(
            DataError(
                f"{where}: {len(order)} different labels in {rows} rows cannot be classes; name "
                "another label column, or write task=regression if these are numbers to predict"
            )
        )
    return tuple(order)


# -- statistics over silos, each from messages that a silo could send ----------------------------


def mean(silos: Sequence[Array]) -> float:
    """The mean of all values.

    Each silo sends the number of its values and their sum.

    >>> mean([np.array([1.0, 2.0]), np.array([6.0])])
    3.0
    """
    messages = [(len(values), float(values.sum(dtype=np.float64))) for values in silos]
    count = sum(n for n, _ in messages)
    return sum(total for _, total in messages) / count


def median(silos: Sequence[Array]) -> float:
    """The median of all values.

    Each silo sends the lowest and the highest of its values and, if there are at most
    1,000 distinct ones, how often each occurs. If all silos could do so, the median is exact.
    Otherwise each silo sends a second message: a histogram of 1,000 equal bins from the lowest to
    the highest value of all silos. The median is then the middle of its bin, so that it is off by
    at most (highest - lowest) / 2,000.

    >>> median([np.array([1.0, 2.0]), np.array([6.0, 7.0])])
    4.0
    """
    counted = [np.unique(values, return_counts=True) for values in silos if len(values)]
    if all(len(distinct) <= BINS for distinct, _ in counted):
        values, place = np.unique(np.concatenate([v for v, _ in counted]), return_inverse=True)
        return _middle(values, np.bincount(place, np.concatenate([n for _, n in counted])))
    low, high = min(v[0] for v, _ in counted), max(v[-1] for v, _ in counted)
    edges = np.linspace(low, high, BINS + 1)
    counts = np.sum([np.histogram(values, edges)[0] for values in silos], axis=0)
    return _middle((edges[:-1] + edges[1:]) / 2, counts)


def word_shares(silos: Sequence[Array], words: int) -> Array:
    """The share of each word, ``[words]``.

    Args:
        silos: for each silo the index of every word, ``[n_k]``.
        words: number of words.

    Each silo sends how often each word occurs.

    >>> word_shares([np.array([0, 0]), np.array([1, 0])], 2).tolist()
    [0.75, 0.25]
    """
    counts = sum(np.bincount(codes, minlength=words) for codes in silos)
    return np.asarray(counts / max(1, np.sum(counts)))


def _middle(values: Array, counts: Array) -> float:
    """The mean of the two middle values of sorted ``values`` that occur ``counts`` times."""
    ends = np.cumsum(counts)
    n = int(ends[-1])
    below, above = np.searchsorted(ends, [(n - 1) // 2, n // 2], side="right")
    return float((values[below] + values[above]) / 2)
