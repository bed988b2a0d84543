"""Reproduce tables: run what is missing, read the records, compare them with the paper, merge the
records of other machines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kedge.errors import DataError, FieldError, KedgeError
from kedge.files import make_folder, read_file, write_file
from kedge.history.experiment import RESULTS
from kedge.reproduction import recipes
from kedge.reproduction.display import comparison_with_paper, heading
from kedge.reproduction.recipes import PaperRow, PaperTable
from kedge.reproduction.records import (
    Record,
    choice_path,
    differences,
    found_records,
    keep,
    read_choices,
    read_record,
)
from kedge.reproduction.running import (
    Context,
    Limits,
    OutOfTime,
    Show,
    collect,
    is_writable,
    run_table,
)
from kedge.reproduction.summary import STATS, Summary, summarise

SHOWN = ("scale", "title", "paper", "place", "metric", "tail")  # of a table, as plain data


@dataclass(frozen=True)
class Reproduction:
    """A table with our numbers beside the paper's: ``rows``, and the records they come from."""

    table: PaperTable
    rows: list[Summary]
    records: list[Record] = field(repr=False, default_factory=list)
    left_out: tuple[str, ...] = ()  # records that do not count, and why
    is_stopped: bool = False  # by a limit of time

    @property
    def missed(self) -> list[str]:
        """Rows of a quick form whose gain is known and not positive, though it should be."""
        return [
            s.row.name
            for s in self.rows
            if s.row.name in self.table.expect
            and s.tail_gain is not None
            and not s.tail_gain.mean > 0
        ]

    def only(self, rows: Sequence[PaperRow]) -> Reproduction:
        """The same with some of the rows; their gains stay those over their bases."""
        names = {row.name for row in rows}
        return dataclasses.replace(self, rows=[s for s in self.rows if s.row.name in names])

    def __str__(self) -> str:
        """The table that ``kedge reproduce`` prints."""
        table = comparison_with_paper(self.table, self.rows, self.left_out)
        return f"{heading(self.table)}\n{table}"

    def frame(self) -> Any:
        """The rows as a pandas DataFrame."""
        import pandas

        rows = []
        for one in self.to_dict()["rows"]:
            for key in (*STATS, "worst_client"):
                stat = one.pop(key) or {}
                one |= {key: stat.get("mean"), f"{key}_sd": stat.get("sd")}
            rows.append(one)
        return pandas.DataFrame(rows)

    def to_dict(self) -> dict[str, Any]:
        """The table as plain data, as ``--json`` prints it."""
        table = self.table
        return {
            "table": table.name,
            **{key: getattr(table, key) for key in SHOWN},
            "rows": [summary.to_dict() for summary in self.rows],
            "left_out": list(self.left_out),
            "expect": list(table.expect),
            "missed": self.missed,
            "stopped": self.is_stopped,
        }


def selected(
    names: Sequence[str],
    rows: Sequence[str] | None = None,
    scale: str = "full",
    root: Path | None = None,
    skip_without_quick: bool = False,
) -> list[tuple[PaperTable, list[PaperRow]]]:
    """Tables and their rows by name. Of several tables, each has those of the rows that it has.

    Raises:
        UnknownName: there is no such table or row.
        FieldError: there is no such scale, or a table has no quick form.
    """
    found = [recipes.read(name, root) for name in recipes.find(names, root)]
    if scale == "quick" and (skip_without_quick or len(found) > 1):
        found = [recipe for recipe in found if recipe.has_quick] or found[:1]
    tables = [recipe.at(scale) for recipe in found]
    if not rows:
        return [(table, list(table.rows)) for table in tables]
    if len(tables) == 1:
        return [(tables[0], tables[0].select(rows))]
    known = {row.name for table in tables for row in table.rows}
    for name in rows:
        if name not in known:
            tables[0].select([name])  # raises
    return [
        (table, some) for table in tables if (some := [r for r in table.rows if r.name in rows])
    ]


def read_table(table: PaperTable, results: Path, is_stopped: bool = False) -> Reproduction:
    """A table with all records of it in a folder of results, which may be read-only."""
    if is_writable(results):
        for row in table.rows:
            collect(table, row, results)
    choices = read_choices(results, table)
    records, left_out = found_records(results, table, choices)
    rows = summarise(table, records, choices)
    flat = [record for by_seed in records.values() for record in by_seed.values()]
    return Reproduction(table, rows, flat, tuple(left_out), is_stopped)


def reproduce_tables(
    tables: Sequence[tuple[PaperTable, list[PaperRow]]],
    seeds: Sequence[int] | None = None,
    results: str | Path = RESULTS,
    minutes: float | None = None,
    rounds: int | None = None,
    execution: Mapping[str, Any] | None = None,
    show: Show | None = None,
    report: Callable[[str], None] | None = None,
) -> Iterator[Reproduction]:
    """Run what is missing of some tables, one after the other; yields each with its numbers.

    A limit of time ends the last one early; tables after it are not started, and not yielded.
    """
    if minutes is not None and not minutes > 0:
        raise FieldError(f"minutes = {minutes:g} must be above 0")
    if rounds is not None and rounds < 1:
        raise FieldError(f"rounds = {rounds} must be at least 1")
    if seeds is not None and (not seeds or min(seeds) < 0 or len(set(seeds)) != len(seeds)):
        raise FieldError(f"seeds = {list(seeds)} must be different numbers from 0")
    context = Context(Path(results), Limits.of(minutes, rounds), execution or {}, show, report)
    for table, rows in tables:
        stopped = False
        try:
            run_table(table, rows, seeds, context)
        except OutOfTime:
            stopped = True
        yield read_table(table, context.results, stopped)
        if stopped:
            return


def rounds_left(
    tables: Sequence[tuple[PaperTable, list[PaperRow]]],
    seeds: Sequence[int] | None = None,
    results: str | Path = RESULTS,
    rounds: int | None = None,
) -> int:
    """Rounds of all runs that are not complete yet, from their first round on."""
    total = 0
    for table, rows in tables:
        records, _ = found_records(Path(results), table)
        for row in rows:
            wanted = row.config().rounds
            wanted = min(wanted, rounds or wanted)
            for seed in seeds or row.seeds:
                record = records[row.name].get(seed)
                total += 0 if record is not None and record.has(wanted) else wanted
    return total


# -- records of another machine --------------------------------------------------------------------


class Merged(NamedTuple):
    """What was copied, what was there already, and sentences about what cannot be read."""

    copied: list[str]
    known: list[str]
    left_out: list[str]


def merge_tables(
    tables: Sequence[tuple[PaperTable, list[PaperRow]]], results: str | Path, other: str | Path
) -> list[Merged]:
    """Merge the records of another folder into tables.

    Raises:
        KedgeError: as :func:`merge`; of several tables, those without
            records there are skipped, unless all are.
    """
    source = Path(other)
    if not source.is_dir():
        raise KedgeError(f"there is no folder {str(other)!r} to merge from")
    chosen = [table for table, _ in tables]
    if len(chosen) > 1:
        chosen = [table for table in chosen if (source / table.name).is_dir()] or chosen[:1]
    return [merge(table, Path(results), source) for table in chosen]


def merge(table: PaperTable, results: Path, other: Path) -> Merged:
    """Copy the records of a table; of two for one row and seed, the one with more rounds stays.

    Nothing is copied if a record does not fit.

    Args:
        table: the table, at the scale of the records.
        results: where records are copied to.
        other: a folder of results, or the folder of the table in it.

    Raises:
        KedgeError: ``other`` has no records of the table, or some have other settings than the
            recipe, or another partition than ours. The message lists all of them.
    """
    folder = other / table.name if (other / table.name).is_dir() else other
    paths = sorted(folder.glob(f"*.seed*.{table.scale}.json")) if folder.is_dir() else []
    if not paths:
        raise KedgeError(
            f"{other} has no records of {table.name} at scale {table.scale}; name the folder that "
            "was --results there"
        )
    wrong: list[str] = []
    merged = Merged([], [], [])
    new: list[tuple[Path, Record, PaperRow]] = []
    for path in paths:
        try:
            record = read_record(path)
        except DataError as error:
            merged.left_out.append(f"{error}. It is left out.")
            continue
        mine = results / table.name / path.name
        row = next((row for row in table.rows if row.home == (table.name, record.row)), None)
        problem, is_new = _compare(table, row, record, mine)
        if problem:
            wrong.append(f"{path}: {problem}")
        elif is_new and row is not None:
            new.append((mine, record, row))
        else:
            merged.known.append(path.name)
    if wrong:
        raise KedgeError(
            "nothing was merged, since these records do not fit:\n  "
            + "\n  ".join(wrong)
            + "\nMove them away, or merge them with the recipe they were made with"
        )
    for path, record, row in new:
        # one of ours with other settings is moved away
        keep(path, record, row, table.free, results)
        merged.copied.append(path.name)
    _merge_choices(table, results, folder)
    return merged


def _compare(
    table: PaperTable, row: PaperRow | None, record: Record, mine: Path
) -> tuple[str, bool]:
    """What is wrong with a record, and whether it is to be copied."""
    if record.recipe != table.name:
        return f"it is a record of {record.recipe}", False
    if row is None:
        return f"{table.name} has no row {record.row!r}", False
    changed = differences(record, row, table.free)
    if changed:
        return "other settings than the recipe: " + ", ".join(changed), False
    if not mine.is_file():
        return "", True
    try:
        own = read_record(mine)
    except DataError:  # ours is damaged: replace it
        return "", True
    if differences(own, row, table.free):
        return "", True
    if own.partition_hash != record.partition_hash:
        return f"another partition than {mine} (the data differ)", False
    if any(own.settings.get(key) != record.settings.get(key) for key in table.free):
        return f"another {table.free[0]} was chosen than in {mine}", False
    return "", record.rounds_done > own.rounds_done


def _merge_choices(table: PaperTable, results: Path, folder: Path) -> None:
    """Copy the choices that are not here yet."""
    for row in table.rows if table.choose else ():
        mine = choice_path(results, table, row)
        theirs = folder / mine.name
        if theirs.is_file() and not mine.exists():
            make_folder(mine.parent, inside=results)
            write_file(mine, read_file(theirs), inside=results)
