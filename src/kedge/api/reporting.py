"""``write_report``: a page about runs, and files to take away."""

from __future__ import annotations

from pathlib import Path

from kedge.errors import FieldError
from kedge.report.page.facts import facts_of
from kedge.report.page.folders import read
from kedge.report.page.write import What, write_page
from kedge.report.take_away import write_csv, write_json
from kedge.report.take_away_figures import write_figures
from kedge.reproduction.page import is_results, reproduction_facts
from kedge.runs.result import Result


def write_report(
    what: What,
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
            or several of them. The first run is what others are compared with.
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
    items = [what] if isinstance(what, (str, Path, Result)) else list(what)
    folders = [Path(one) for one in items if isinstance(one, (str, Path))]
    if any(is_results(folder) for folder in folders):
        if len(items) > 1 or csv:
            raise FieldError("the results of reproduce have a page of their own, without --csv")
        facts, sources = reproduction_facts(folders[0], title), []
    else:
        found = read(items)
        facts, sources = facts_of(found, title), found.sources
    written = [write_page(facts, path)]
    if csv is not None:
        written.append(write_csv(sources, csv))
    if json is not None:
        written.append(write_json(facts, json))
    if figures is not None:
        written += write_figures(facts, figures)
    return written
