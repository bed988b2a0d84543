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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedge.core.method import parse
from kedge.core.task import tasks
from kedge.core.task_custom import own_metrics
from kedge.data.partition import Partition
from kedge.errors import DataError, KedgeError
from kedge.files import finite, make_folder, move_file, write_file
from kedge.history.experiment import RUNS
from kedge.history.folder import (
    CONFIG,
    ENVIRONMENT,
    METRICS,
    PARTITION,
    read_own_json,
    read_records,
    stored_config,
)
from kedge.history.metric import KNOWN, MetricInfo, title_of
from kedge.history.read import measure_of, read_header
from kedge.history.run import UNTESTED, Columns
from kedge.reproduction.recipes import FREE, PaperRow, PaperTable, settings_of
from kedge.runs.build import is_personal
from kedge.runs.environment import read_environment
from kedge.schema import read_fields
from kedge.settings import Config

FORMAT = 1
SUPERSEDED = "superseded"
BESIDE = "beside"  # the column of the tests on the common test set
#: A test: the round, the metric in percent, seconds so far. None where it is not known.
if TYPE_CHECKING:
    Point = tuple[int, float | None, float | None]
else:  # as it is read
    Point = tuple[float | None, ...]
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
    curve: tuple[Point, ...]
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
    beside: tuple[Point, ...] = ()
    higher_is_better: bool | None = None  # not in records of kedge 0.1

    @property
    def measure(self) -> MetricInfo:
        """The metric of the curve."""
        higher = self.higher_is_better
        return dataclasses.replace(
            KNOWN.get(self.metric) or MetricInfo(self.metric, title_of(self.metric)),
            higher_is_better=_directions()[self.metric] if higher is None else higher,
        )

    def columns(self, rounds: Collection[int] | None = None) -> Columns:
        """The tests, or those of some rounds, with seconds and megabytes up to each of them."""
        tests: dict[int, dict[str, Any]] = {}
        rate, before, start = (self.up_mb or 0.0) + (self.down_mb or 0.0), 0, 0.0
        for number, value, end in self.curve:
            if rounds is None or number in rounds:
                test = {self.metric: _number(value), "seconds": _number(end) - start}
                tests[number] = {"round": number, "mb_up": rate * (number - before)} | test
                before, start = number, _number(end)
        for number, value, _ in self.beside:
            if number in tests:
                tests[number][BESIDE] = _number(value)
        return Columns(tests.values())

    @property
    def is_complete(self) -> bool:
        return self.has(self.rounds)

    def has(self, rounds: int) -> bool:
        """Whether it has so many rounds, or diverged before."""
        return bool(self.diverged) or self.rounds_done >= rounds

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
    if not isinstance(found, dict):
        raise DataError(f"{path} is damaged: it is no record of a run; {advice}")
    known = {f.name for f in dataclasses.fields(Record)}
    try:
        record = read_fields(Record, {key: found[key] for key in found if key in known})
        curve, beside = _points(record.curve), _points(record.beside)
    except (KedgeError, TypeError, ValueError) as error:
        raise DataError(f"{path} is damaged: {error}; {advice}") from None
    record = dataclasses.replace(record, curve=curve, beside=beside)
    if not (record.curve or record.diverged):
        raise DataError(f"{path} is damaged: its curve is no list of tests; {advice}")
    if record.higher_is_better is None and record.metric not in _directions():
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


def _points(curve: Iterable[Point]) -> tuple[Point, ...]:
    return tuple((int(number), value, seconds) for number, value, seconds in curve)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def write_record(path: Path, record: Record, inside: Path | None = None) -> None:
    """Write a record atomically; no folder below ``inside`` may be a link.

    Raises:
        DataError: the folder or the file cannot be written.
    """
    write_results_file(path, record.to_json(), inside)


def write_results_file(path: Path, text: str, inside: Path | None = None) -> None:
    """Write the text of a record or a choice."""
    try:
        make_folder(path.parent, inside=inside)
        write_file(path, f"{text}\n".encode(), inside=inside)
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
    config, columns = stored_config(path), Columns(read_records(folder / METRICS))
    header, known = read_header(path), measure_of(vars(config), list(columns.named))
    metric = header.headline if header else known.name or "accuracy"
    column = _column(table, config, columns, metric)
    curve = _curve(columns, column)
    if not curve and not failed:
        return None
    last = {name: own.get(curve[-1][0]) if curve else None for name, own in _scalars(columns)}
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
        rounds_done=columns.last_round,
        metric=metric,
        curve=curve,
        beside=_curve(columns, metric) if column == "client_mean" else (),
        partition_hash=Partition.load(partition).hash if partition.is_file() else "",
        final={key: round(v, 4) for key, v in last.items() if v is not None and math.isfinite(v)},
        up_mb=_average(columns, "mb_up", statistics.mean),
        down_mb=_average(columns, "mb_down", statistics.mean),
        seconds_per_round=_average(columns, "seconds", statistics.median),
        environment=environment,
        date=day,
        command=f"kedge reproduce {home} --rows {name} --seeds {seed}{scale}",
        diverged=failed,
        higher_is_better=((header and header.metric(metric)) or known).higher_is_better,
    )


def _curve(columns: Columns, name: str) -> tuple[Point, ...]:
    seconds = dict(zip(columns.rounds, columns.seconds, strict=True))
    return tuple(
        (number, round(value, 3) if math.isfinite(value) else None, round(seconds[number], 1))
        for number, value in columns.by_round(name).items()
    )


def _column(table: PaperTable, config: Config, columns: Columns, metric: str) -> str:
    """What the run is judged by: for a personal method, the clients' own models."""
    if is_personal(config) and "personal_mean" in columns.named:
        return "personal_mean"
    return "client_mean" if table.judged == "clients" and "client_mean" in columns.named else metric


def _scalars(columns: Columns) -> Iterator[tuple[str, dict[int, float]]]:
    """The columns of tests, by round."""
    left_out = (*UNTESTED, "stopped")
    for name in columns.named:
        if name not in left_out and "." not in name:
            yield name, columns.by_round(name)


def _average(
    columns: Columns, name: str, average: Callable[[Iterable[float]], float]
) -> float | None:
    return round(average(columns.named[name].values), 4) if name in columns.named else None


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
    for row in table.rows:
        home, name = row.home
        for path in _files(results / home, f"{name}.seed*.{table.scale}.json"):
            try:
                record = read_record(path)
            except DataError as error:
                left_out.append(f"{error}. It is left out.")
                continue
            wrong = differences(record, row, table.free)
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


# -- choices on validation data --------------------------------------------------------------------


def choice_path(results: Path, table: PaperTable, row: PaperRow) -> Path:
    home, name = row.home
    return results / home / f"{name}.choice.{table.scale}.json"


def read_choice(results: Path, table: PaperTable, row: PaperRow) -> dict[str, Any] | None:
    """The setting that was chosen for a row, e.g. ``{"lr": 0.1}``; None if there is no choice yet,
    or if it was made among other values or for another method."""
    path, choose = choice_path(results, table, row), table.choose
    if choose is None or not path.is_file():
        return None
    try:
        found = read_own_json(path, "delete it")
    except DataError:
        return None
    wanted = [choose.key, list(choose.values), choose.rounds, choose.seed, row.method]
    if not isinstance(found, dict):
        return None
    if [found.get(key) for key in ("key", "values", "rounds", "seed", "method")] != wanted:
        return None
    return {choose.key: found["chosen"]} if found.get("chosen") in choose.values else None


def read_choices(results: Path, table: PaperTable) -> dict[str, dict[str, Any]]:
    """What was chosen for each row of a table; empty where nothing was."""
    return {row.name: read_choice(results, table, row) or {} for row in table.rows}
