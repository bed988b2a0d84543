"""Print the sheets of a diagnosis: findings, then tables that fit the terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich import box
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from kedge.cli.screen import console, dim

if TYPE_CHECKING:
    from kedge.diagnostics.sheet import Cell, Sheet, SheetTable

MAX_ROWS = 24  # of a table; all are in --json
MAX_WORD = 24  # characters that are not broken
GAP = 2  # between columns


def print_sheet(sheet: Sheet) -> None:
    """Print what a diagnosis found, its tables and its cost."""
    console.print(Text(sheet.title, "bold"))
    for i, finding in enumerate(sheet.findings):
        if i == 0:
            console.print(Padding(Text(finding, "bold green"), (1, 0)))
        else:
            lines = Grid.grid(padding=(0, 1, 0, 0))
            lines.add_row("-", Text(finding))
            console.print(lines)
    console.print()
    for table in sheet.tables:
        _print(table)
    if sheet.cost:
        dim(f"cost: {sheet.cost}")


def _print(table: SheetTable) -> None:
    shown = table.rows if len(table.rows) <= MAX_ROWS else table.rows[: MAX_ROWS - 4]
    cells = [[_text(cell, table.decimals) for cell in row] for row in shown]
    numeric = [
        all(isinstance(row[i], (int, float, type(None))) for row in table.rows)
        for i in range(len(table.columns))
    ]
    widths = [
        _width(name, [row[i] for row in cells], whole=numeric[i] or i == 0)
        for i, name in enumerate(table.columns)
    ]
    console.print(Text(table.title, "bold"))
    for columns in _blocks(widths, console.width):
        grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="bold")
        for i in columns:
            grid.add_column(
                Text(table.columns[i]),
                justify="right" if numeric[i] else "left",
                overflow="fold",
                min_width=min(widths[i], console.width - GAP),
            )
        for row in cells:
            grid.add_row(*(Text(row[i]) for i in columns))
        console.print(grid)
    notes = [table.note] if table.note else []
    if len(shown) < len(table.rows):
        notes.append(f"{len(table.rows) - len(shown)} more rows with --json.")
    if notes:
        console.print(Text(" ".join(notes), "dim"))
    console.print()


def _width(name: str, cells: list[str], whole: bool) -> int:
    """The width that a column needs: words are not broken, and numbers and names are whole."""
    words = [*name.split(), *(cells if whole else [w for cell in cells for w in cell.split()])]
    return min(max(map(len, words), default=1), MAX_WORD)


def _blocks(widths: list[int], room: int) -> list[list[int]]:
    """Columns in blocks that fit a width; each begins with the first column.

    >>> _blocks([6, 4, 4, 4], 18), _blocks([6, 4, 4, 4], 40)
    ([[0, 1], [0, 2], [0, 3]], [[0, 1, 2, 3]])
    """
    edge = GAP + 1
    blocks: list[list[int]] = [[0]]
    for i in range(1, len(widths)):
        used = sum(widths[j] + edge for j in (*blocks[-1], i))
        if used > room and len(blocks[-1]) > 1:
            blocks.append([0])
        blocks[-1].append(i)
    return blocks


def _text(cell: Cell, decimals: int) -> str:
    if cell is None or (isinstance(cell, float) and not math.isfinite(cell)):
        return "-"
    if isinstance(cell, float):
        return f"{cell:.{decimals}f}" if abs(cell) < 1e5 else f"{cell:.4g}"
    return f"{cell:,}" if isinstance(cell, int) else cell
