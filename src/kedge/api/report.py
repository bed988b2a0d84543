"""``write_report``: a page about runs, and files to take away; ``reproduce``: tables of papers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedge.errors import FieldError, KedgeError
from kedge.history.experiment import RESULTS, is_results
from kedge.history.find import find
from kedge.history.run import Run
from kedge.report.export import write_csv, write_json
from kedge.report.figures import write_figures
from kedge.report.page import What, facts_of, write_page

if TYPE_CHECKING:
    from kedge.reproduction.command import Reproduction


def reproduce(
    table: str,
    *,
    rows: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    scale: str = "full",
    results: str | Path = RESULTS,
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
    from kedge.reproduction import command

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


def write_report(
    what: What | Reproduction,
    path: str | Path = "report.html",
    *,
    csv: str | Path | None = None,
    json: str | Path | None = None,
    figures: str | Path | None = None,
    title: str = "",
) -> list[Path]:
    """Write a page about runs: one self-contained HTML file.

    Args:
        what: a result, the folder of a run, a comparison, a sweep or the results of ``reproduce``;
            or several of them. The first run is what others are compared with. Also what
            :func:`reproduce` returns; tables with recipes of your own are given so.
        path: the page.
        csv: also write all records, one row per number.
        json: also write everything that the page shows.
        figures: also write figures for a paper into this folder, as SVG and PDF.
        title: heading of the page; None is the methods and the data.

    Returns:
        The files that were written, the page first.

    Raises:
        KedgeError: there is no run, it has no tested round yet, or a file cannot be written.

    >>> import kedge, tempfile
    >>> results = kedge.compare(["fedavg", "scaffold"], rounds=2, seeds=[0, 1])
    >>> [page] = kedge.write_report(results, tempfile.mkdtemp() + "/report.html")
    >>> page.name
    'report.html'
    """
    is_one = isinstance(what, (str, Path, Run)) or _is_table(what)
    items: list[Any] = [what] if is_one else list(what)  # type: ignore[arg-type]
    tables = [i for i in items if _is_table(i) or (not isinstance(i, Run) and is_results(Path(i)))]
    if tables:
        if len(items) > 1 or csv:
            raise FieldError("the results of reproduce have a page of their own, without --csv")
        facts, runs = _facts_of_tables(tables[0], title), []
    else:
        found = find(items)
        facts, runs = facts_of(found, title), found.runs
    written = [write_page(facts, path)]
    if csv is not None:
        written.append(write_csv(runs, csv))
    if json is not None:
        written.append(write_json(facts, json))
    if figures is not None:
        written += write_figures(facts, figures)
    return written


def _is_table(one: Any) -> bool:
    """Whether something is what :func:`reproduce` returns; its module needs torch."""
    module = sys.modules.get("kedge.reproduction.command")
    return module is not None and isinstance(one, module.Reproduction)


def _facts_of_tables(one: Reproduction | str | Path, title: str) -> dict[str, Any]:
    from kedge.reproduction.page import facts_of as facts_of_tables
    from kedge.reproduction.page import reproduction_facts

    if isinstance(one, (str, Path)):
        return reproduction_facts(Path(one), title)
    if not one.records:
        raise KedgeError(f"{one.table.name} has no records yet")
    return facts_of_tables([one], title)
