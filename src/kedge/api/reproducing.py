"""``reproduce``: the tables of papers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kedge.errors import FieldError
from kedge.reproduction import command
from kedge.reproduction.command import Reproduction


def reproduce(
    table: str,
    *,
    rows: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    scale: str = "full",
    results: str | Path = command.RESULTS,
    recipes: str | Path | None = None,
    minutes: float | None = None,
    rounds: int | None = None,
    show: bool = False,
    **execution: Any,
) -> Reproduction:
    """Run a table of a paper as far as it is not recorded, and compare it with the paper.

    Args:
        table: the name of a table, e.g. ``"fedimpro/table1"``; see ``kedge reproduce``.
        rows: the rows to run; None takes all.
        seeds: the seeds to run; None takes those of the recipe.
        scale: ``"full"``, or ``"quick"``: a form that takes minutes on a CPU.
        results: folder for records and run folders.
        recipes: a folder with tables of your own.
        minutes: stop after so many minutes; all is saved.
        rounds: stop each run after this round; all is saved.
        show: run nothing, only read the records.
        **execution: how to compute: ``device``, ``engine``, ``compile``, ``threads``, ``workers``.

    Returns:
        The table: ``rows`` with the paper's numbers and ours, ``records``, ``frame()``.

    Raises:
        KedgeError: there is no such table, row or scale, data are missing, or ``results`` cannot be
            written.
        Interrupted: the user pressed Ctrl-C; the same call goes on from there.
    """
    if isinstance(rows, str):
        raise FieldError(f"rows: give a list of names, not {rows!r}")
    chosen = command.selected([table], rows, scale, Path(recipes) if recipes else None)
    if len(chosen) != 1:
        names = ", ".join(one.name for one, _ in chosen)
        raise FieldError(f"{table!r} are several tables; name one of them: {names}")
    if show:
        return command.read_table(chosen[0][0], Path(results))
    found = command.reproduce_tables(chosen, seeds, results, minutes, rounds, execution)
    return next(found)
