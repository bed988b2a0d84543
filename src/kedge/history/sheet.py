"""A sheet: what a diagnosis found, in words, tables and charts, as plain data.

Every diagnosis returns one. The terminal prints its findings and tables; the report draws its
charts, too. A sheet knows nothing of either: it is written to ``diagnosis/NAME.json`` in the folder
of a run, and read back from there.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kedge.errors import DataError
from kedge.files import read_json

FORMAT = 1
KINDS = ("lines", "bars", "heatmap", "points", "images")
Cell = str | int | float | None


@dataclass(frozen=True)
class SheetTable:
    """A table: numbers stay numbers, so that readers can sort them.

    ``decimals`` applies to floats. Rows have as many cells as there are columns.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    decimals: int = 3


@dataclass(frozen=True)
class Chart:
    """A chart of plain rows.

    ``lines``, ``bars`` and ``points`` have rows with the keys ``x``, ``y`` and, for several
    series, ``series``; points may have a ``label``. A ``heatmap`` has ``x``, ``y`` and ``value``.
    ``images`` have ``image`` (a PNG as a data URI, see :func:`png_uri`), a ``caption``, and the
    place in a grid: ``row`` and ``column``, texts.
    """

    title: str
    kind: str
    rows: Sequence[dict[str, Any]]
    x: str = ""  # label of an axis
    y: str = ""
    value: str = ""  # label of a heatmap's colours
    note: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a chart cannot be {self.kind!r}; the kinds are {', '.join(KINDS)}")


@dataclass(frozen=True)
class Sheet:
    """The result of a diagnosis.

    ``values`` are the bare numbers by name, for programs. ``cost`` says in words what it took.
    """

    name: str  # data, training, privacy
    title: str
    findings: Sequence[str] = ()  # sentences, the verdict first
    tables: Sequence[SheetTable] = ()
    charts: Sequence[Chart] = ()
    values: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    cost: str = ""
    command: str = ""
    date: str = ""

    def __str__(self) -> str:
        """The title and the findings."""
        return "\n".join([self.title, *self.findings])

    def to_dict(self) -> dict[str, Any]:
        """The sheet as plain data; numbers that are not finite are null."""
        return {"format": FORMAT} | _plain(asdict(self))

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Sheet:
        """The sheet that :meth:`to_dict` wrote.

        Raises:
            DataError: it is not a sheet, or a newer kedge wrote it.
        """
        if found.get("format") != FORMAT:
            raise DataError(f"a diagnosis has format {found.get('format')}; kedge reads {FORMAT}")
        try:
            rest = {k: v for k, v in found.items() if k not in ("format", "tables", "charts")}
            tables = [SheetTable(**table) for table in found["tables"]]
            charts = [Chart(**chart) for chart in found["charts"]]
            sheet = cls(**rest, tables=tables, charts=charts)
            sheet._check()
            return sheet
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"a diagnosis is damaged: {error}") from None

    def _check(self) -> None:
        """Raise a ValueError or a TypeError if a value is none of its type."""
        texts = [self.name, self.title, self.cost, self.command, self.date, *self.findings]
        lists: list[Any] = [self.findings]
        for table in self.tables:
            texts += [table.title, table.note, *table.columns]
            lists += [table.columns, table.rows, *table.rows]
            cells = [cell for row in table.rows for cell in row]
            if (
                table.decimals not in range(20)
                or any(len(row) != len(table.columns) for row in table.rows)
                or not all(cell is None or isinstance(cell, (str, int, float)) for cell in cells)
            ):
                raise ValueError("a table has other cells")
        for chart in self.charts:
            texts += [chart.title, chart.x, chart.y, chart.value, chart.note]
            lists.append(chart.rows)
            cells = [cell for row in chart.rows for cell in row.values()]
            texts += [cell for cell in cells if not isinstance(cell, (int, float, type(None)))]
        if (
            not all(isinstance(text, str) for text in texts)
            or not all(isinstance(found, list) for found in lists)
            or not isinstance(self.seconds, (int, float))
        ):
            raise ValueError("a value is of another type")


def read_sheet(path: str | Path) -> Sheet:
    """Read a sheet from a file; a DataError names the file that cannot be read."""
    try:
        return Sheet.from_dict(read_json(Path(path)))
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def table_of(
    title: str,
    columns: Mapping[str, Sequence[Cell] | None],
    note: str = "",
    decimals: int = 3,
) -> SheetTable:
    """A table from its columns by name; a column of None is left out.

    >>> table_of("Sizes", {"client": ["a", "b"], "samples": [3, 4], "labels": None}).rows
    [['a', 3], ['b', 4]]
    """
    known = {name: cells for name, cells in columns.items() if cells is not None}
    rows = [list(row) for row in zip(*known.values(), strict=True)]
    return SheetTable(title, list(known), rows, note, decimals)


def series_of(
    title: str,
    kind: str,
    x: Sequence[Cell],
    series: Mapping[str, Sequence[float] | None],
    x_label: str = "",
    y_label: str = "",
    note: str = "",
) -> Chart:
    """Lines or bars of series over the same ``x``; one without a name is alone.

    >>> series_of("Sizes", "bars", ["a", "b"], {"": [3, 4]}, "client", "samples").rows
    [{'x': 'a', 'y': 3}, {'x': 'b', 'y': 4}]
    """
    rows: list[dict[str, Any]] = []
    for i, place in enumerate(x):
        for name, values in series.items():
            if values is not None:
                rows.append({"x": place, "y": values[i]} | ({"series": name} if name else {}))
    return Chart(title, kind, rows, x_label, y_label, note=note)


def heatmap_of(
    title: str,
    x: Sequence[str],
    y: Sequence[str],
    values: Any,
    x_label: str = "",
    y_label: str = "",
    value: str = "",
    note: str = "",
) -> Chart:
    """A heatmap of ``values[i][j]`` at ``x[i]`` and ``y[j]``.

    >>> heatmap_of("Samples", ["client"], ["cat", "dog"], [[3, 4]], "client", "class").rows[1]
    {'x': 'client', 'y': 'dog', 'value': 4}
    """
    places = [(i, j) for i in range(len(x)) for j in range(len(y))]
    rows = [{"x": x[i], "y": y[j], "value": values[i][j]} for i, j in places]
    return Chart(title, "heatmap", rows, x_label, y_label, value, note)


def png_uri(content: bytes) -> str:
    """A PNG file as a data URI, for a chart of images."""
    return "data:image/png;base64," + base64.b64encode(content).decode("ascii")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy and torch
        return _plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
