"""The page of reproduced tables: the paper's numbers beside ours, with the curves of our runs."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kedge.errors import KedgeError
from kedge.history.compare import LEVEL
from kedge.history.experiment import SCALES
from kedge.history.metric import MetricInfo
from kedge.report.charts import curves_of
from kedge.report.page import COLOURS, SHOWN, empty, parts_of_methods, write_page
from kedge.report.text import name
from kedge.report.verdict import Verdict
from kedge.reproduction import recipes
from kedge.reproduction.command import Reproduction, read_table
from kedge.reproduction.display import bases, columns_of, heading
from kedge.reproduction.records import Record
from kedge.reproduction.summary import Summary, run_of


def reproduction_facts(folder: Path, title: str = "") -> dict[str, Any]:
    """The facts of all tables that have a record in a folder.

    Raises:
        KedgeError: there is no record of a known table.
    """
    found = []
    for one in recipes.find(["all"], None):
        if not (folder / one).is_dir():
            continue
        recipe = recipes.read(one, None)
        scales = SCALES if recipe.has_quick else SCALES[:1]
        tables = [read_table(recipe.at(scale), folder) for scale in scales]
        found += [table for table in tables if table.records]
    if not found:
        raise KedgeError(
            f"{folder} holds no record of a table of kedge; kedge reproduce lists them. Tables of "
            "your own: kedge.write_report(kedge.reproduce(TABLE, recipes=..., results=..., "
            "show=True))"
        )
    return facts_of(found, title)


def write_reproduction(found: Sequence[Reproduction], path: str | Path) -> Path:
    """Write the page of some tables."""
    return write_page(facts_of(found), path)


def facts_of(found: Sequence[Reproduction], title: str = "") -> dict[str, Any]:
    """The facts of reproduced tables."""
    found = [one for one in found if one.records]
    names = [one.table.title for one in found]
    rows = {record.method: None for one in found for record in one.records}
    commands = dict.fromkeys(_command(one) for one in found)
    environments: dict[str, dict[str, Any]] = {}
    for record in (record for one in found for record in one.records):
        text = {k: str(v) for k, v in record.environment.items() if k not in ("how", "data")}
        own = environments.setdefault(repr(text), {"runs": [], "rows": text})["runs"]
        if record.row not in own:
            own.append(record.row)
    return empty() | {
        "kind": "reproduction",
        "title": title or (names[0] if len(set(names)) == 1 else f"{len(found)} tables of papers"),
        "date": time.strftime("%Y-%m-%d"),
        "paper": [_table(one) for one in found],
        "parts": parts_of_methods(rows),
        "environments": list(environments.values()),
        "commands": list(commands),
    }


def _command(one: Reproduction) -> str:
    scale = "" if one.table.scale == "full" else f" --scale {one.table.scale}"
    root = one.table.rows[0].file.parents[2]
    own = "" if root == recipes.RECIPES else f" --recipes {shlex.quote(str(root))}"
    return f"kedge reproduce {one.table.name}{scale}{own}"


def _table(one: Reproduction) -> dict[str, Any]:
    table, rows = one.table, one.rows
    return {
        "title": heading(table),
        "paper": table.paper,
        "verdict": _verdict(one),
        "names": [s.row.name for s in rows],
        "columns": columns_of(table, rows),
        "notes": _notes(one),
        "rows": [s.to_dict() for s in rows],
        "group": _group(one),
    }


def _verdict(one: Reproduction) -> Verdict:
    """Whether the paper's gains are found here, too."""
    done = [s for s in one.rows if s.n]
    claims = [s for s in done if s.gain is not None and s.paper_gain and s.paper_gain > 0]
    held = [s for s in claims if s.gain and s.gain.mean > 0]
    clear = [s for s in held if s.compared["gain"].is_clear]
    warnings = [
        f"{name(s.row.name)} has {s.rounds} of {s.total} rounds."
        for s in done
        if s.rounds < s.total and not s.diverged
    ]
    missing = [s.row.name for s in one.rows if not s.n]
    if missing:
        warnings.append(f"Not run: {', '.join(missing)}.")
    if one.table.scale != "full":
        warnings.append(
            "This is the quick form, with a smaller network and fewer rounds: only the direction "
            "of a gain can be compared with the paper."
        )
    warnings += one.left_out
    if len(claims) == 1:
        s = claims[0]
        lead = (
            f"The paper's gain of {name(s.row.name)} over {name(s.row.base)} "
            f"{_outcome(s)}: {_claim(s)}."
        )
        return Verdict(lead, (), tuple(warnings))
    if claims:
        sure = f"; {len(clear)} of them clearly (p below {LEVEL:g} after Holm's correction)"
        lead = f"Of {len(claims)} gains in the paper, {len(held)} point the same way here{sure}."
        lost = [f"{name(s.row.name)}: {_claim(s)}." for s in claims if s not in held]
        return Verdict(lead, tuple(lost[:4]), tuple(warnings))
    gains = [s for s in done if s.gain is not None]
    if gains:
        lead = "The paper has no gains to compare these rows with."
        own = [f"{name(s.row.name)} over {name(s.row.base)}: {_own(s)}." for s in gains]
        return Verdict(lead, tuple(own[:4]), tuple(warnings))
    lead = f"{len(done)} of {len(one.rows)} rows have records; none has a gain yet."
    return Verdict(lead, (), tuple(warnings))


def _outcome(s: Summary) -> str:
    assert s.gain is not None
    if not s.gain.mean > 0:
        return "is not found here"
    if not s.compared["gain"].is_clear:
        return "points the same way here, but may be chance"
    return "is found here, too"


def _claim(s: Summary) -> str:
    assert s.paper_gain is not None
    return f"{_own(s)} against {s.paper_gain:+.2f} in the paper".replace("-", "−")


def _own(s: Summary) -> str:
    assert s.gain is not None
    interval = s.gain.interval()
    how = (
        "one seed"
        if interval is None
        else f"95 % interval {interval[0]:+.2f} to {interval[1]:+.2f}, {s.gain.n} seeds"
    )
    return f"{s.gain.mean:+.2f} ({how})".replace("-", "−")


def _notes(one: Reproduction) -> list[str]:
    lines = [f"Gains over {bases(one.rows)}, paired by seed, in the rounds that both have."]
    lines += [f"{s.row.name}: {s.row.note}" for s in one.rows if s.row.note]
    return lines + ([one.table.note] if one.table.note else [])


def _group(one: Reproduction) -> dict[str, Any]:
    """The curves of the rows, as the charts of a page read them."""
    by_row: dict[tuple[str, str], list[Record]] = {}
    for record in one.records:
        by_row.setdefault((record.recipe, record.row), []).append(record)
    shown = [s for s in one.rows if by_row.get(s.row.home)]
    runs = [run_of(s.row, sorted(by_row[s.row.home], key=lambda r: r.seed)) for s in shown]
    measure = next((run.measure for run in runs), MetricInfo("accuracy", "accuracy"))
    higher = all(run.measure.higher_is_better for run in runs)
    metric = {"unit": measure.unit, "decimals": 2, "higher": higher}
    name = measure.name.replace("_", " ")
    column = {"key": "headline", "label": name, "kind": "test"} | metric
    return {
        "metric": {"name": name} | metric,
        "runs": [
            {"name": run.name, "mark": "", "colour": i % COLOURS, "dash": i // COLOURS % 3,
             "on": i < SHOWN, "yardstick": bool(run.yardstick), "best": False,
             "status": "complete"}
            for i, run in enumerate(runs)
        ],
        "base": 0, "curves": curves_of(runs, [column], 1.0), "columns": [column], "target": 0.0,
        "standings": [],
    }  # fmt: skip
