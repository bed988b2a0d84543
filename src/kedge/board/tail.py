"""The metrics of a seed, read as they are appended."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kedge.board.files import Reader, Stamp, stamp

NAN = math.nan
OVERLAP = 64  # bytes before the new ones, compared to see that the file is still the same
MAX_COLUMNS = 80


class Tail:
    """Numbers of ``metrics.jsonl`` by column, one value per round; NaN where there is none.

    A file that was rewritten, as on resume, is read again from its start: ``epoch`` then grows.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.epoch = path, 0
        self._clear()

    def _clear(self) -> None:
        self.columns: dict[str, array[float]] = {"round": array("d")}
        #: Megabytes and seconds up to the end of each round.
        self.so_far: dict[str, array[float]] = {"mb": array("d"), "seconds": array("d")}
        self._offset, self._end = 0, b""
        self._stamp: Stamp | None = None

    def __len__(self) -> int:
        return len(self.columns["round"])

    @property
    def updated(self) -> float:
        """When the file was last written, in seconds; 0 without a file."""
        return self._stamp.mtime_ns / 1e9 if self._stamp else 0.0

    def refresh(self, reader: Reader) -> bool:
        """Read what is new; returns whether anything is."""
        found = stamp(self.path)
        if found == self._stamp:
            return False
        if found is None or (self._stamp and found.inode != self._stamp.inode):
            self._start_again()
        if found is None:
            return True
        start = max(0, self._offset - OVERLAP)
        try:
            content = reader.read(self.path, start)
        except OSError:
            return False
        if content[: self._offset - start] != self._end:
            self._start_again()
            content = reader.read(self.path)
            start = 0
        fresh = content[self._offset - start :]
        complete = fresh[: fresh.rfind(b"\n") + 1]
        for record in records_of(complete):
            self._append(record)
        self._offset += len(complete)
        consumed = content[: self._offset - start]
        self._end, self._stamp = consumed[-OVERLAP:], found
        return True

    def _start_again(self) -> None:
        self._clear()
        self.epoch += 1

    def _append(self, record: dict[str, Any]) -> None:
        have = len(self)
        row = dict(numbers_of(record))
        for name in row.keys() - self.columns.keys():
            if len(self.columns) < MAX_COLUMNS:
                self.columns[name] = array("d", [NAN] * have)
        for name, column in self.columns.items():
            column.append(row.get(name, NAN))
        for name, parts in (("mb", ("mb_up", "mb_down")), ("seconds", ("seconds",))):
            total = self.so_far[name]
            added = math.fsum(value for part in parts if (value := row.get(part, 0.0)) == value)
            total.append((total[-1] if total else 0.0) + added)

    def last(self, name: str) -> float | None:
        """The last number of a column; None without one."""
        return next((v for v in reversed(self.columns.get(name, ())) if v == v), None)

    def ends_with(self, name: str) -> bool:
        """Whether the last round has a number in a column."""
        column = self.columns.get(name)
        return column is not None and bool(column) and column[-1] == column[-1]


def records_of(content: bytes) -> Iterator[dict[str, Any]]:
    """The records in complete lines; damaged lines are left out."""
    for line in content.split(b"\n"):
        if not line:
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        number = record.get("round") if isinstance(record, dict) else None
        if isinstance(number, int) and not isinstance(number, bool) and 0 < number < 2**53:
            yield record


def numbers_of(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a record, those of an inner object by ``outer.inner``; NaN if not finite."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", _finite(v)) for inner, v in value.items() if _is(v))
        elif _is(value):
            yield name, _finite(value)


def _is(value: Any) -> bool:
    return isinstance(value, (int, float))


def _finite(value: float) -> float:
    try:
        return float(value) if math.isfinite(value) else NAN
    except OverflowError:
        return NAN
