"""Copy records of another machine or another day into a folder of results."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from kedge.errors import DataError, KedgeError
from kedge.files import make_folder, read_file, write_file
from kedge.reproduction.choice import choice_path
from kedge.reproduction.records import Record, differences, keep, read_record
from kedge.reproduction.table import PaperRow, PaperTable


class Merged(NamedTuple):
    """What was copied, what was there already, and sentences about what cannot be read."""

    copied: list[str]
    known: list[str]
    left_out: list[str]


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
    free = (table.choose.key,) if table.choose else ()
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
        problem, is_new = _compare(table, row, record, mine, free)
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
        keep(path, record, row, free, results)  # one of ours with other settings is moved away
        merged.copied.append(path.name)
    _merge_choices(table, results, folder)
    return merged


def _compare(
    table: PaperTable, row: PaperRow | None, record: Record, mine: Path, free: tuple[str, ...]
) -> tuple[str, bool]:
    """What is wrong with a record, and whether it is to be copied."""
    if record.recipe != table.name:
        return f"it is a record of {record.recipe}", False
    if row is None:
        return f"{table.name} has no row {record.row!r}", False
    changed = differences(record, row, free)
    if changed:
        return "other settings than the recipe: " + ", ".join(changed), False
    if not mine.is_file():
        return "", True
    try:
        own = read_record(mine)
    except DataError:  # ours is damaged: replace it
        return "", True
    if differences(own, row, free):
        return "", True
    if own.partition_hash != record.partition_hash:
        return f"another partition than {mine} (the data differ)", False
    if any(own.settings.get(key) != record.settings.get(key) for key in free):
        return f"another {free[0]} was chosen than in {mine}", False
    return "", record.rounds_done > own.rounds_done


def _merge_choices(table: PaperTable, results: Path, folder: Path) -> None:
    """Copy the choices that are not here yet."""
    for row in table.rows if table.choose else ():
        mine = choice_path(results, table, row)
        theirs = folder / mine.name
        if theirs.is_file() and not mine.exists():
            make_folder(mine.parent, inside=results)
            write_file(mine, read_file(theirs), inside=results)
