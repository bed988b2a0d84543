"""Print the sheets of a diagnosis: findings, then tables."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich import box
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from kedge.cli.screen import console, dim

if TYPE_CHECKING:
    from kedge.diagnostics.sheet import Cell, Sheet, Table

MAX_ROWS = 24  # of a table; all are in --json


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


def _print(table: Table) -> None:
    numeric = [
        all(isinstance(row[i], (int, float, type(None))) for row in table.rows)
        for i in range(len(table.columns))
    ]
    grid = Grid(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=Text(table.title, "bold"),
        title_justify="left",
        header_style="bold",
    )
    for name, right in zip(table.columns, numeric, strict=True):
        grid.add_column(
            Text(name), justify="right" if right else "left", overflow="fold", vertical="bottom"
        )
    shown = table.rows if len(table.rows) <= MAX_ROWS else table.rows[: MAX_ROWS - 4]
    for row in shown:
        grid.add_row(*(Text(_text(cell, table.decimals)) for cell in row))
    console.print(grid)
    notes = [table.note] if table.note else []
    if len(shown) < len(table.rows):
        notes.append(f"{len(table.rows) - len(shown)} more rows with --json.")
    if notes:
        console.print(Text(" ".join(notes), "dim"))
    console.print()


def _text(cell: Cell, decimals: int) -> str:
    if cell is None or (isinstance(cell, float) and not math.isfinite(cell)):
        return "-"
    if isinstance(cell, float):
        return f"{cell:.{decimals}f}" if abs(cell) < 1e5 else f"{cell:.4g}"
    return f"{cell:,}" if isinstance(cell, int) else cell
