"""The list of tables: what there is, what it costs, and what is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.report import units
from kedge.report.tables import Column, Fitting
from kedge.reproduction.choice import read_choice
from kedge.reproduction.recipes import Recipe
from kedge.reproduction.records import Record, found_records
from kedge.reproduction.table import Table

MEASURED_ON = "H200"


@dataclass(frozen=True)
class Entry:
    """One table in the list."""

    name: str
    title: str
    rows: int
    runs: int  # rows times seeds
    seeds: tuple[int, ...]
    cost_s: float  # of all runs on an H200
    is_measured: bool  # all of it; otherwise some is an estimate
    has_quick: bool
    done: int  # complete runs in the results folder
    started: int  # runs there that are not complete

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"seeds": list(self.seeds)}


def entry(recipe: Recipe, results: Path) -> Entry:
    """The line of a table in the list."""
    table = recipe.at("full")
    choices = {row.name: read_choice(results, table, row) or {} for row in table.rows}
    records, _ = found_records(results, table, choices)
    cost, measured, done, started = 0.0, True, 0, 0
    for row in table.rows:
        known = records[row.name]
        seconds, is_measured = cost_of(row.cost_s, row.cost_from, row.config().rounds, known)
        cost += seconds * len(row.seeds)
        measured = measured and is_measured
        for record in known.values():
            complete = bool(record.diverged) or record.rounds_done >= row.config().rounds
            done, started = done + complete, started + (not complete)
    seeds = tuple(sorted({seed for row in table.rows for seed in row.seeds}))
    runs = sum(len(row.seeds) for row in table.rows)
    return Entry(
        recipe.name, f"{table.title}: {table.place}" if table.place else table.title,
        len(table.rows), runs, seeds, cost, measured, recipe.has_quick, done, started,
    )  # fmt: skip


def cost_of(
    cost_s: float | None, cost_from: str, rounds: int, records: dict[int, Record]
) -> tuple[float, bool]:
    """Seconds of one seed on an H200, and whether they were measured."""
    measured = [
        r.seconds_per_round for r in records.values()
        if MEASURED_ON in r.device and r.seconds_per_round
    ]  # fmt: skip
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
        Column(f"on an {MEASURED_ON}", [_cost(e) for e in entries]),
        Column("quick", ["yes" if e.has_quick else "" for e in entries]),
        Column("done", done),
    ]
    example = next((e for e in entries if e.has_quick), entries[0])
    quick = " [--scale quick]" if example.has_quick else ""
    note = (
        f"Cost of all rows and seeds; ~: estimated, at least in part. done: complete runs in "
        f"{results}.\nRun one: kedge reproduce {example.name} [--rows A,B] [--seeds 0,1]"
        f"{quick}; stop at any time, the same command goes on."
    )
    return Fitting([names, titles], columns, [""] * len(entries), note)


def _cost(e: Entry) -> str:
    return "?" if not e.cost_s else ("" if e.is_measured else "~") + units.duration(e.cost_s)


def _done(e: Entry) -> str:
    text = f"{e.done} of {e.runs}"
    return f"{text}, {e.started} begun" if e.started else text


def expected(table: Table) -> str:
    """What a quick form shows, in words."""
    return f"expected: a gain of {', '.join(table.expect)}" if table.expect else ""
