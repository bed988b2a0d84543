"""Tables of papers for the terminal and the page: the paper's numbers beside ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.report import text
from kedge.report.tables import (
    Cell,
    Column,
    Table,
    gain_cell,
    interval_cell,
    signed_cell,
    stat_cell,
    target_cell,
    words,
)
from kedge.reproduction.recipes import GPU, PaperTable, Recipe
from kedge.reproduction.records import Record, found_records, read_choices
from kedge.reproduction.summary import Summary

NAME = 24  # characters of a row's name that are not folded where a column can go instead
METRIC_NAMES = {
    "last": "the last round",
    "best": "the best tested round",
    "top5": "the five best tested rounds",
}


def comparison_with_paper(
    table: PaperTable, rows: Sequence[Summary], left_out: Sequence[str] = ()
) -> Table:
    """The paper's numbers and ours, side by side; rows without a record stay empty."""
    best = _leader(rows)
    styles = ["bold" if s is best else "" if s.n else "dim" for s in rows]
    names = [words("row", [s.row.name for s in rows])]
    return Table(names, columns_of(table, rows), _note(table, rows, left_out), styles, NAME)


def columns_of(table: PaperTable, rows: Sequence[Summary]) -> list[Column]:
    """The columns of a table, without those that would be empty."""
    target = rows[0].row.config().target if rows else 0.0
    last = f"mean of last {table.tail}"
    makes: list[tuple[str, str, str, Callable[[Summary], Cell], int]] = [
        ("ours", f"ours ({table.metric})", f"{METRIC_NAMES[table.metric]}, mean ± sd over seeds",
         lambda s: stat_cell(s.ours, 2), 0),
        ("n", "n", "seeds", lambda s: Cell(str(s.n), s.n) if s.n else Cell(), 0),
        ("gain", "gain", "over its base, paired by seed", _gain("gain"), 0),
        ("interval", "95 % interval", "of the gain", _interval("gain"), 3),
        ("paper_gain", "paper's gain", "in the paper, over the same base",
         lambda s: signed_cell(s.paper_gain, 2), 0),
        ("tail", last, "tested rounds, which swings less than one round",
         lambda s: stat_cell(s.tail, 2), 0),
        ("tail_gain", "gain of mean", f"of the {last}", _gain("tail_gain"), 0),
        ("tail_interval", "95 % interval", f"of the gain of the {last}",
         _interval("tail_gain"), 1),
        ("beside", "common test set",
         f"{last} tests; the other columns are of clients' held-out samples",
         lambda s: stat_cell(s.beside, 2), 1),
        ("beside_gain", "gain there", "over its base", _gain("beside_gain"), 0),
        ("beside_interval", "95 % interval", "of the gain there",
         _interval("beside_gain"), 1),
        ("target", f"to {target:g}", "first round that reaches the target",
         lambda s: target_cell(s.to_target) if s.n else Cell(), 4),
        ("target_mb", f"traffic to {target:g}", "of all clients until the target",
         lambda s: _size(s.mb_to_target), 5),
        ("worst", "worst client", "after the last test", lambda s: stat_cell(s.worst, 2), 6),
        ("traffic", "traffic a round", "of all clients, both ways", _traffic, 7),
        ("chosen", "chosen", "on validation data", lambda s: Cell(s.chosen), 5),
        ("rounds", "rounds", "done, of those of the recipe", _rounds, 0),
    ]  # fmt: skip
    if table.scale == "full":  # a quick form has another network
        paper = ("paper", "paper", "the number in the paper", _paper, 0)
        differ = ("difference", "difference", "ours minus the paper's number",
                  lambda s: signed_cell(s.difference, 2), 2)  # fmt: skip
        makes = [paper, *makes[:2], differ, *makes[2:]]
    columns = [
        Column(key, head, title, [make(s) for s in rows], rank)
        for key, head, title, make, rank in makes
    ]
    return [column for column in columns if any(cell.text for cell in column.cells)]


def _paper(s: Summary) -> Cell:
    if s.row.paper is None:
        return Cell()
    sd = f"± {s.row.paper_sd:.2f}" if s.row.paper_sd is not None else ""
    return Cell(f"{s.row.paper:.2f}", s.row.paper, sd)


def _gain(key: str) -> Callable[[Summary], Cell]:
    return lambda s: gain_cell(s.compared[key], 2)


def _interval(key: str) -> Callable[[Summary], Cell]:
    return lambda s: interval_cell(s.compared[key], 2)


def _size(mb: float | None) -> Cell:
    return Cell() if mb is None else Cell(text.size(1e6 * mb), mb)


def _traffic(s: Summary) -> Cell:
    is_known = s.n and not s.row.yardstick and s.up_mb is not None
    return _size((s.up_mb or 0.0) + (s.down_mb or 0.0)) if is_known else Cell()


def _rounds(s: Summary) -> Cell:
    if not s.n:
        return Cell("not run", None, style="dim")
    return Cell(str(s.rounds) if s.rounds >= s.total else f"{s.rounds} of {s.total}", s.rounds)


def _leader(rows: Sequence[Summary]) -> Summary | None:
    """The row with the best last tests; None if fewer than two rows have any."""
    known = [s for s in rows if s.tail and s.tail.mean == s.tail.mean and not s.row.yardstick]
    if len(known) < 2:
        return None
    return max(known, key=lambda s: s.run.measure.gain(s.tail.mean, 0.0) if s.tail else 0.0)


def heading(table: PaperTable) -> str:
    """The title of a table, with what it is of."""
    scale = "" if table.scale == "full" else f"  (scale {table.scale})"
    return f"{table.name}{scale}: {table.title}" + (f". {table.place}" if table.place else "")


def _note(table: PaperTable, rows: Sequence[Summary], left_out: Sequence[str]) -> list[str]:
    """What the numbers are of, and what they leave out."""
    lines = []
    done = [s for s in rows if s.n]
    if done:
        measure = done[0].run.measure
        percent = " in percent" if measure.unit == "%" else ""
        lines.append(
            f"ours: {measure.name}{percent}, {METRIC_NAMES[table.metric]}, mean ± sd over n "
            f"seeds; mean of last {table.tail}: of the last tested rounds; gains over "
            f"{bases(rows)}, paired by seed, in the rounds that both have."
        )
        if any(s.beside for s in rows):
            lines.append(
                "All but the common test set is of the mean over clients of the model's score on "
                "the samples that each holds out."
            )
        devices = dict.fromkeys(device for s in done for device in s.devices)
        lines.append("Device: " + ", ".join(devices) + ".")
    else:
        lines.append("There are no records yet.")
    short = [s for s in done if s.rounds < s.total and not s.diverged]
    for rounds, total in dict.fromkeys((s.rounds, s.total) for s in short):
        names = ", ".join(s.row.name for s in short if (s.rounds, s.total) == (rounds, total))
        lines.append(f"{names}: {rounds} of {total} rounds.")
    for s in done:
        if s.shorter:
            lines.append(f"{s.row.name}: not counted yet: {', '.join(s.shorter)}.")
        if s.gain is not None and s.gain_rounds < s.rounds:
            lines.append(f"{s.row.name}: its gain is that after {s.gain_rounds} rounds.")
        if s.diverged:
            lines.append(f"{s.row.name} diverged: {', '.join(s.diverged)}.")
    yardsticks = [s.row.name for s in rows if s.row.yardstick and not s.row.note]
    if yardsticks:
        lines.append(f"{', '.join(yardsticks)}: a yardstick, not a federated method.")
    lines += [f"{s.row.name}: {s.row.note}" for s in rows if s.row.note]
    lines += [table.note] if table.note else []
    return [*lines, *left_out]


def bases(rows: Sequence[Summary]) -> str:
    return " or ".join(dict.fromkeys(s.row.base for s in rows if s.row.base)) or "no row"


# -- the list of tables ----------------------------------------------------------------------------


@dataclass(frozen=True)
class TableEntry:
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


def entry(recipe: Recipe, results: Path) -> TableEntry:
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
        complete = sum(record.has(row.config().rounds) for record in known.values())
        done, started = done + complete, started + len(known) - complete
    seeds = tuple(sorted({seed for row in table.rows for seed in row.seeds}))
    runs = sum(len(row.seeds) for row in table.rows)
    return TableEntry(
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


def listed(entries: Sequence[TableEntry], results: Path) -> Table:
    """The list for the terminal."""
    columns = [
        words("rows", [str(e.rows) for e in entries]),
        words("seeds", [str(len(e.seeds)) for e in entries]),
        words("cost", [_cost(e) for e in entries]),
        words("quick", ["yes" if e.has_quick else "" for e in entries]),
        words("done", [_done(e) for e in entries]),
    ]
    example = next((e for e in entries if e.has_quick), entries[0])
    quick = " [--scale quick]" if example.has_quick else ""
    note = [
        f"Cost of all rows and seeds on an {GPU}, if nothing else is said; ~: estimated, at least "
        f"in part. done: complete runs in {results}.\nRun one: kedge reproduce {example.name} "
        f"[--rows A,B] [--seeds 0,1]{quick}; stop at any time, the same command goes on."
    ]
    names = [words("table", [e.name for e in entries])]
    names.append(words("what it is", [e.title for e in entries]))
    return Table(names, columns, note)


def _cost(e: TableEntry) -> str:
    on = "" if e.cost_on == GPU else f", {e.cost_on}"
    about = "" if e.is_measured else "~"
    return f"{about}{text.duration(e.cost_s)}{on}" if e.cost_s else "?"


def _done(e: TableEntry) -> str:
    text = f"{e.done} of {e.runs}"
    return f"{text}, {e.started} begun" if e.started else text


def expected(table: PaperTable) -> str:
    """What a quick form shows, in words."""
    return f"expected: a gain of {', '.join(table.expect)}" if table.expect else ""
