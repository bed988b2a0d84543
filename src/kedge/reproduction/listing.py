"""The list of tables: what there is, what it costs, and what is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.report import units
from kedge.report.tables import Column, Fitting
from kedge.reproduction.choice import read_choices
from kedge.reproduction.recipes import Recipe
from kedge.reproduction.records import Record, found_records
from kedge.reproduction.table import GPU, Table


@dataclass(frozen=True)
class Entry:
    """One table in the list."""

    name: str
    title: str
    rows: int
    runs: int  # rows times seeds
    seeds: tuple[int, ...]
    cost_s: float  # of all runs
    cost_on: str  # the device that the cost is of
    is_measured: bool  # all of it; otherwise some is an estimate
    has_quick: bool
    done: int  # complete runs in the results folder
    started: int  # runs there that are not complete

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"seeds": list(self.seeds)}


def entry(recipe: Recipe, results: Path) -> Entry:
    """The line of a table in the list."""
    table = recipe.at("full")
    records, _ = found_records(results, table, read_choices(results, table))
    cost, measured, done, started = 0.0, True, 0, 0
    for row in table.rows:
        known = records[row.name]
        on = [r for r in known.values() if table.cost_on.lower() in r.device.lower()]
        seconds, is_measured = cost_of(row.cost_s, row.cost_from, row.config().rounds, on)
        cost += seconds * len(row.seeds)
        measured = measured and is_measured
        for record in known.values():
            complete = bool(record.diverged) or record.rounds_done >= row.config().rounds
            done, started = done + complete, started + (not complete)
    seeds = tuple(sorted({seed for row in table.rows for seed in row.seeds}))
    runs = sum(len(row.seeds) for row in table.rows)
    return Entry(
        recipe.name, f"{table.title}: {table.place}" if table.place else table.title,
        len(table.rows), runs, seeds, cost, table.cost_on, measured, recipe.has_quick, done,
        started,
    )  # fmt: skip


def cost_of(
    cost_s: float | None, cost_from: str, rounds: int, records: Sequence[Record]
) -> tuple[float, bool]:
    """Seconds of one seed, and whether they were measured."""
    measured = [r.seconds_per_round for r in records if r.seconds_per_round]
    if cost_s is not None and cost_from:
        return cost_s, True
    if measured:
        return rounds * sum(measured) / len(measured), True
    return cost_s or 0.0, False


def listed(entries: Sequence[Entry], results: Path) -> Fitting:
    """The list for the terminal."""
    names = Column("table", [e.name for e in entries])
    titles = Column("what it is", [e.title for e in entries])
    done = [_done(e) for e in entries]
    columns = [
        Column("rows", [str(e.rows) for e in entries]),
        Column("seeds", [str(len(e.seeds)) for e in entries]),
        Column("cost", [_cost(e) for e in entries]),
        Column("quick", ["yes" if e.has_quick else "" for e in entries]),
        Column("done", done),
    ]
    example = next((e for e in entries if e.has_quick), entries[0])
    quick = " [--scale quick]" if example.has_quick else ""
    note = (
        f"Cost of all rows and seeds on an {GPU}, if nothing else is said; ~: estimated, at least "
        f"in part. done: complete runs in {results}.\nRun one: kedge reproduce {example.name} "
        f"[--rows A,B] [--seeds 0,1]{quick}; stop at any time, the same command goes on."
    )
    return Fitting([names, titles], columns, [""] * len(entries), note)


def _cost(e: Entry) -> str:
    on = "" if e.cost_on == GPU else f", {e.cost_on}"
    about = "" if e.is_measured else "~"
    return f"{about}{units.duration(e.cost_s)}{on}" if e.cost_s else "?"


def _done(e: Entry) -> str:
    text = f"{e.done} of {e.runs}"
    return f"{text}, {e.started} begun" if e.started else text


def expected(table: Table) -> str:
    """What a quick form shows, in words."""
    return f"expected: a gain of {', '.join(table.expect)}" if table.expect else ""
