"""The command ``diagnose``: sheets of findings, in the terminal or as JSON.

In the terminal, tables are cut into blocks that fit its width.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kedge.cli.options import JSON, LOAD, load_files
from kedge.cli.screen import console, dim, next_steps
from kedge.errors import FieldError

if TYPE_CHECKING:
    from kedge.history.sheet import Cell, Sheet, SheetTable

MAX_ROWS = 24  # of a table; all are in --json
MAX_WORD = 24  # characters that are not broken
GAP = 2  # between columns


def diagnose(
    subject: Annotated[
        str, typer.Argument(metavar="DATA|RUN", help="data as for run --data, or a run's folder")
    ],
    *,
    what: Annotated[
        str | None,
        typer.Option(
            help="data, training, privacy, or several: data,training. Of data: data; of a run: "
            "data,training"
        ),
    ] = None,
    partition: Annotated[
        str | None, typer.Option(help="of data: a partition, see: kedge list partitions")
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option(help="of data: number of clients; one per silo, or 20, if left out"),
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="of data: where test data come from, as for run")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="seed of the partition, or one of the run's seeds")
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(help="of data: samples whose features are compared, at most (20000)"),
    ] = None,
    rounds: Annotated[
        str | None,
        typer.Option(help="of a run: rounds to diagnose, such as 1,10; others are replayed"),
    ] = None,
    client: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="of a run: the client whose privacy is diagnosed, else the largest"
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out", "-o", metavar="FILE.html", help="write a page with tables and charts"
        ),
    ] = None,
    as_json: JSON = False,
    load: LOAD = None,
) -> None:
    """Measure how unlike clients are, or what training made of it, with a verdict in words.

    kedge diagnose digits --partition "dirichlet(0.1)" --clients 10
    kedge diagnose "hospitals(label=sick)"                    a folder with a file per client
    kedge diagnose runs/digits-1 --what training --rounds 1,10 -o digits.html
    """
    from kedge.api.diagnose import diagnose as measure
    from kedge.files import check_target
    from kedge.report.page import write_sheets

    load_files(load)
    target = check_target(out, True, ".html") if out else None
    sheets = measure(
        subject,
        what,
        partition=partition,
        clients=clients,
        split=split,
        seed=seed,
        samples=samples,
        rounds=_numbers(rounds),
        client=client,
        report=None if as_json else dim,
    )
    if as_json:
        typer.echo(json.dumps({"sheets": [sheet.to_dict() for sheet in sheets]}))
        if target is not None:
            write_sheets(sheets, target, _title(subject, sheets))
        return
    for i, sheet in enumerate(sheets):
        if i:
            console.print()
        print_sheet(sheet)
    if target is not None:  # last, so that a full disk does not keep the findings from being read
        write_sheets(sheets, target, _title(subject, sheets))
        dim(f"wrote {target}")
    _next(subject, sheets)


def _title(subject: str, sheets: list[Sheet]) -> str:
    return sheets[0].title if len(sheets) == 1 else f"Diagnosis of {subject}"


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(piece) for piece in text.split(",")]
    except ValueError:
        raise FieldError(f"--rounds {text} is not a list of numbers, such as 1,10,50") from None


def _next(subject: str, sheets: list[Sheet]) -> None:
    """What to type next: of data the methods to compare, of a run its report."""
    from kedge.api.diagnose import is_run

    if is_run(subject):
        names = ", ".join(dict.fromkeys(sheet.name for sheet in sheets))
        single = (Path(subject) / "config.toml").is_file()
        if not os.access(subject, os.W_OK):
            return
        dim(f"kept in {Path(subject) / ('' if single else '*') / 'diagnosis'}: {names}")
        next_steps([f"kedge report {shlex.quote(subject)}"])
        return
    [sheet] = sheets
    options = sheet.command.removeprefix("kedge diagnose ")
    next_steps([f"kedge compare {' '.join(sheet.values['methods'])} --data {options}"])


# -- sheets in the terminal ------------------------------------------------------------------------


def print_sheet(sheet: Sheet) -> None:
    """Print what a diagnosis found, its tables and its cost."""
    console.print(Text(sheet.title, "bold"))
    for i, finding in enumerate(sheet.findings):
        if i == 0:
            console.print(Padding(Text(finding, "bold green"), (1, 0)))
        else:
            lines = Table.grid(padding=(0, 1, 0, 0))
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
        grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="bold")
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
