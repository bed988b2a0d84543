"""Records: one small JSON file per row, seed and scale, for people and for merging machines.

The curve is of the test metric that the run is judged by; all statistics come from it, but for
those of ``beside``: the same tests on the common test set, where a table is judged by its clients'
held-out samples. A record counts only if its settings are those of its recipe today. Records that
were replaced, since their recipe or their method has changed, are moved to the folder
``superseded`` beside them, which is not read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kedge.core.method import parse
from kedge.core.task import tasks
from kedge.core.task_custom import own_metrics
from kedge.data.partition import Partition
from kedge.errors import DataError, KedgeError
from kedge.files import finite, make_folder, move_file, write_file
from kedge.history.folder import (
    CONFIG,
    ENVIRONMENT,
    METRICS,
    PARTITION,
    read_own_json,
    read_records,
    stored_config,
)
from kedge.history.read import measure_of, read_header
from kedge.history.run import UNTESTED
from kedge.reproduction.table import FREE, PaperRow, PaperTable, settings_of
from kedge.runs.build import is_personal
from kedge.runs.environment import read_environment
from kedge.settings import Config

FORMAT = 1
SUPERSEDED = "superseded"
RUNS = ".runs"
_TYPES: dict[str, type | tuple[type, ...]] = {
    "recipe": str, "row": str, "scale": str, "seed": int, "method": str, "settings": dict,
    "rounds": int, "rounds_done": int, "metric": str, "curve": list, "partition_hash": str,
    "environment": dict,
}  # fmt: skip
#: A test: the round, the metric in percent, seconds so far. None where it is not known.
Point = tuple[int, float | None, float | None]
_ENVIRONMENT = ("kedge", "python", "torch", "device", "threads", "precision", "how", "data")


@dataclass(frozen=True)
class Record:
    """One run: a row and a seed of a table."""

    recipe: str
    row: str
    scale: str
    seed: int
    method: str
    settings: dict[str, Any]
    rounds: int
    rounds_done: int
    metric: str
    curve: list[Point]
    partition_hash: str
    final: dict[str, float | None] = field(default_factory=dict)
    up_mb: float | None = None
    down_mb: float | None = None
    seconds_per_round: float | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    date: str = ""
    command: str = ""
    diverged: str = ""  # the reason, if the run ended before its last round
    note: str = ""
    beside: list[Point] = field(default_factory=list)
    higher_is_better: bool | None = None  # not in records of kedge 0.1

    @property
    def higher(self) -> bool:
        """Whether high values of the metric are better."""
        known = _directions()
        return known[self.metric] if self.higher_is_better is None else self.higher_is_better

    @property
    def is_complete(self) -> bool:
        return bool(self.diverged) or self.rounds_done >= self.rounds

    @property
    def name(self) -> str:
        return file_name(self.row, self.seed, self.scale)

    @property
    def device(self) -> str:
        return str(self.environment.get("device", "unknown device"))

    def to_json(self) -> str:
        """JSON with one line per test of the curve's row of numbers."""
        values = {"format": FORMAT} | dataclasses.asdict(self)
        text = json.dumps(finite(values), indent=1, allow_nan=False)
        # short lists on one line
        return re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)


def file_name(row: str, seed: int, scale: str) -> str:
    """``fedavg.seed0.full.json``."""
    return f"{row}.seed{seed}.{scale}.json"


def record_path(results: Path, table: PaperTable, row: PaperRow, seed: int) -> Path:
    home, name = row.home
    return results / home / file_name(name, seed, table.scale)


def run_path(results: Path, table: PaperTable, row: PaperRow, seed: int) -> Path:
    """The folder of a run, which has its checkpoint."""
    home, name = row.home
    return results / RUNS / home / f"{name}.seed{seed}.{table.scale}"


def read_record(path: Path) -> Record:
    """Read a record.

    Raises:
        DataError: the file is damaged, or has a format of a newer kedge.
    """
    advice = "delete it, or restore it from where it was copied"
    found = read_own_json(path, advice)
    if isinstance(found, dict) and found.get("format", FORMAT) != FORMAT:
        raise DataError(f"{path} has format {found['format']}, which this kedge cannot read")
    if not isinstance(found, dict) or not all(
        isinstance(found.get(key), kind) for key, kind in _TYPES.items()
    ):
        raise DataError(f"{path} is damaged: it is no record of a run; {advice}")
    curve, beside = found["curve"], found.get("beside", [])
    if not (curve or found.get("diverged")) or not all(
        isinstance(p, list) and len(p) == 3 and _test(p) for p in (*curve, *beside)
    ):
        raise DataError(f"{path} is damaged: its curve is no list of tests; {advice}")
    known = {f.name for f in dataclasses.fields(Record)}
    values = {key: value for key, value in found.items() if key in known}
    curves = {"curve": curve, "beside": beside}
    record = Record(**values | {k: [(p[0], p[1], p[2]) for p in v] for k, v in curves.items()})
    if not isinstance(record.higher_is_better, bool) and record.metric not in _directions():
        raise DataError(
            f"{path} does not say whether a high or a low {record.metric} is better; name the file "
            "that registers it: --load FILE.py"
        )
    if path.name != record.name:
        raise DataError(f"{path} is the record of {record.name}: it must have that name")
    return record


def _directions() -> dict[str, bool]:
    """Whether high values are better, of the metrics that are known here."""
    known = {m.name: m.higher_is_better for name in tasks for m in tasks[name].metrics}
    return known | {name: own_metrics[name].higher_is_better for name in own_metrics}


def _test(point: list[Any]) -> bool:
    number, value, seconds = point
    return (
        isinstance(number, int)
        and (value is None or isinstance(value, (int, float)))
        and (seconds is None or isinstance(seconds, (int, float)))
    )


def write_record(path: Path, record: Record, inside: Path | None = None) -> None:
    """Write a record atomically; no folder below ``inside`` may be a link.

    Raises:
        DataError: the folder or the file cannot be written.
    """
    try:
        make_folder(path.parent, inside=inside)
        write_file(path, f"{record.to_json()}\n".encode(), inside=inside)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error.strerror}; choose another --results"
        ) from None


def differences(record: Record, row: PaperRow, free: tuple[str, ...] = ()) -> list[str]:
    """In which settings a record differs from its recipe: ``lr 0.1 (recipe: 0.05)``.

    A setting that the record lacks, since it is newer, counts as its default. Rounds, tests and
    how the run was computed may differ, and those in ``free``.
    """
    config = row.config(record.seed)
    wanted, defaults = settings_of(config), settings_of(Config())
    found = []
    for key, value in wanted.items():
        if key in FREE or key in free:
            continue
        own = record.settings.get(key, defaults[key])
        own = tuple(own) if isinstance(own, list) else own
        if own != value:
            found.append(f"{key} {_written(own)} (recipe: {_written(value)})")
    if not _same_method(record.method, row.method):
        found.append(f"method {record.method} (recipe: {row.method})")
    return found


def _same_method(one: str, other: str) -> bool:
    try:
        return parse(one) == parse(other)
    except KedgeError:  # a part or a field that is gone
        return False


def _written(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def record_of(
    table: PaperTable, row: PaperRow, seed: int, path: Path, failed: str = ""
) -> Record | None:
    """The record of a run, from its folder; None before its first test.

    Raises:
        DataError: a file of the run is damaged.
    """
    folder = path / f"seed-{seed}"
    if not (path / CONFIG).is_file() or not (folder / METRICS).is_file():
        return None
    config, records = stored_config(path), read_records(folder / METRICS)
    header = read_header(path)
    columns = list(dict.fromkeys(key for record in records for key in record))
    known = measure_of(vars(config), columns)
    metric = header.headline if header else known.name or "accuracy"
    column = _column(table, config, records, metric)
    curve = _curve(records, column)
    if not curve and not failed:
        return None
    last: dict[str, Any] = next((r for r in reversed(records) if column in r), {})
    scalars = {k: v for k, v in last.items() if isinstance(v, float) and k not in UNTESTED}
    found = read_environment(path / ENVIRONMENT) if (path / ENVIRONMENT).is_file() else {}
    environment = {key: found[key] for key in _ENVIRONMENT if key in found}
    if "how" in environment:
        environment["how"] = {k: v for k, v in environment["how"].items() if k != "folder"}
    partition = folder / PARTITION
    day = time.strftime("%Y-%m-%d", time.localtime((folder / METRICS).stat().st_mtime))
    scale = "" if table.scale == "full" else f" --scale {table.scale}"
    home, name = row.home
    return Record(
        recipe=home,
        row=name,
        scale=table.scale,
        seed=seed,
        method=config.method,
        settings=settings_of(config),
        rounds=config.rounds,
        rounds_done=records[-1]["round"] if records else 0,
        metric=metric,
        curve=curve,
        beside=_curve(records, metric) if column == "client_mean" else [],
        partition_hash=Partition.load(partition).hash if partition.is_file() else "",
        final={key: round(value, 4) for key, value in scalars.items() if math.isfinite(value)},
        up_mb=_mean(records, "mb_up"),
        down_mb=_mean(records, "mb_down"),
        seconds_per_round=_median(records),
        environment=environment,
        date=day,
        command=f"kedge reproduce {home} --rows {name} --seeds {seed}{scale}",
        diverged=failed,
        higher_is_better=((header and header.metric(metric)) or known).higher_is_better,
    )


def _curve(records: list[dict[str, Any]], column: str) -> list[Point]:
    seconds, curve = 0.0, list[Point]()
    for one in records:
        seconds += one.get("seconds", 0.0)
        if column in one:
            value = one[column]
            value = None if value is None or not math.isfinite(value) else round(value, 3)
            curve.append((one["round"], value, round(seconds, 1)))
    return curve


def _column(table: PaperTable, config: Config, records: list[dict[str, Any]], metric: str) -> str:
    """What the run is judged by: for a personal method, the clients' own models."""
    if is_personal(config) and any("personal_mean" in r for r in records):
        return "personal_mean"
    clients = table.judged == "clients" and any("client_mean" in r for r in records)
    return "client_mean" if clients else metric


def _mean(records: list[dict[str, Any]], key: str) -> float | None:
    values = [r[key] for r in records if key in r]
    return round(statistics.mean(values), 4) if values else None


def _median(records: list[dict[str, Any]]) -> float | None:
    seconds = [r["seconds"] for r in records if "seconds" in r]
    return round(statistics.median(seconds), 4) if seconds else None


def keep(
    path: Path,
    record: Record,
    row: PaperRow,
    free: tuple[str, ...] = (),
    inside: Path | None = None,
) -> Record:
    """Write a record, unless the file has one with as many rounds and the same settings.

    One with other settings than the recipe's is moved to ``superseded``. Returns what the file has.
    """
    if path.is_file():
        with contextlib.suppress(DataError):
            before = read_record(path)
            if differences(before, row, free):
                supersede(path, before, inside)
            elif before.rounds_done >= record.rounds_done and not record.diverged:
                return before
    write_record(path, record, inside)
    return record


def supersede(path: Path, record: Record, inside: Path | None = None) -> Path:
    """Move a record to the folder of those that do not count any more."""
    target = path.parent / SUPERSEDED / f"{path.stem}.{record.date or 'undated'}.json"
    number = 1
    while target.exists():
        number += 1
        target = target.with_name(f"{path.stem}.{record.date or 'undated'}-{number}.json")
    try:
        make_folder(target.parent, inside=inside or path.parent)
        move_file(path, target, inside=inside or path.parent)
    except OSError as error:
        raise DataError(f"{path} cannot be moved to {target}: {error.strerror}") from None
    return target


def found_records(
    results: Path, table: PaperTable, choices: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[dict[str, dict[int, Record]], list[str]]:
    """The records of a table that count, by row and seed; and a sentence for each that does not.

    ``choices`` has what was chosen for a row, e.g. ``{"fedavg": {"lr": 0.1}}``.
    """
    found: dict[str, dict[int, Record]] = {row.name: {} for row in table.rows}
    left_out: list[str] = []
    free = (table.choose.key,) if table.choose else ()
    for row in table.rows:
        home, name = row.home
        for path in _files(results / home, f"{name}.seed*.{table.scale}.json"):
            try:
                record = read_record(path)
            except DataError as error:
                left_out.append(f"{error}. It is left out.")
                continue
            wrong = differences(record, row, free)
            for key, value in (choices or {}).get(row.name, {}).items():
                if record.settings.get(key) != value:
                    wrong.append(f"{key} {record.settings.get(key)} (chosen: {value})")
            if wrong:
                text = ", ".join(wrong)
                left_out.append(f"{path} was made with other settings: {text}. It is left out.")
            else:
                found[row.name][record.seed] = record
    known = {row.name for row in table.rows}
    for path in _files(results / table.name, "*.seed*.full.json") if table.scale == "full" else ():
        if path.name.split(".seed")[0] not in known:
            left_out.append(f"{path} is of a row that {table.name} does not have. It is left out.")
    return found, left_out


def _files(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern)) if folder.is_dir() else []
