"""Runs as a report reads them: settings and records as plain data.

Nothing here needs the data, the model or the code of a run: a folder from another machine, one
whose parts are not installed here, or one that was killed can be read. What is missing or damaged
beside the settings and records is left out, with a sentence in ``notes``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kedge.core.method import parse
from kedge.core.task import tasks
from kedge.core.task_custom import own_metrics
from kedge.data.partition import Partition
from kedge.diagnostics.sheet import Sheet, read_sheet
from kedge.errors import DataError, KedgeError
from kedge.files import read_file, read_toml
from kedge.runs.clients import KnownClients, read_clients
from kedge.runs.config import Config
from kedge.runs.environment import CONFIG, ENVIRONMENT
from kedge.runs.folder import METRICS, PARTITION, SCORES
from kedge.runs.grid import format_value
from kedge.runs.header import Header, MetricInfo, metric_info, read_header, title_of
from kedge.runs.numbers import Series
from kedge.runs.result import COLUMNS, Result
from kedge.runs.resuming import FEDERATION
from kedge.runs.saved import read_json, read_records
from kedge.runs.stopping import failures

DEFAULTS: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(Config)}
DIAGNOSIS = "diagnosis"
Record = dict[str, Any]


@dataclass(frozen=True)
class Seed:
    """One seed of a run: its records so far."""

    number: int
    records: list[Record]
    partition_hash: str = ""
    partition: str = ""  # what it was drawn from, such as dirichlet(0.1)
    clients: KnownClients | None = None
    scores: dict[str, Any] | None = None
    failed: str = ""  # the reason, if it ended before its last round

    @property
    def last(self) -> Record:
        return self.records[-1] if self.records else {}

    def until(self, round: int | None) -> Seed:
        """The same with its records up to a round; None keeps all."""
        if round is None:
            return self
        return dataclasses.replace(self, records=[r for r in self.records if r["round"] <= round])


@dataclass(frozen=True)
class Source:
    """A run to report on, with seeds that have a record or have failed."""

    name: str
    settings: Mapping[str, Any]
    seeds: list[Seed]
    metric: MetricInfo
    headline: str = "global"
    folder: Path | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    yardstick: str = ""
    values: dict[str, Any] = field(default_factory=dict)  # of a sweep
    sheets: list[Sheet] = field(default_factory=list)
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def method(self) -> str:
        return str(self.settings["method"])

    @property
    def is_remote(self) -> bool:
        """Whether its clients were members of a real federation."""
        return self.folder is not None and (self.folder / FEDERATION).exists()

    @property
    def rounds(self) -> int:
        return int(self.settings["rounds"])

    @property
    def column(self) -> str:
        """The key of the records that the headline is in."""
        return COLUMNS[self.headline] or self.metric.name

    def series(self, seed: Seed) -> Series:
        """The headline of a seed."""
        values = {r["round"]: float(r[self.column]) for r in seed.records if self.column in r}
        return Series(values, _is_done(seed.last, self.rounds), bool(seed.failed))

    @property
    def is_complete(self) -> bool:
        """Whether all seeds have their last round, or were stopped by validation data."""
        wanted = set(self.settings["seeds"])
        done = {s.number for s in self.seeds if _is_done(s.last, self.rounds)}
        return bool(wanted) and wanted <= done

    @property
    def has_diverged(self) -> bool:
        """Whether a seed ended with a loss that has exploded, or that is not a number."""
        return any(
            s.failed or "diverged" in s.last or math.isnan(s.last.get("train_loss", 0.0))
            for s in self.seeds
        )

    def has(self, name: str) -> bool:
        """Whether all tested rounds have a column."""
        tested = [r for s in self.seeds for r in s.records if self.metric.name in r]
        return bool(tested) and all(name in r for r in tested)


def _is_done(record: Record, rounds: int) -> bool:
    return bool(record) and (record["round"] >= rounds or bool(record.get("stopped")))


def read_run(path: Path, name: str = "", yardstick: str = "") -> Source | None:
    """A run from its folder; None before its first test.

    Raises:
        KedgeError: there is no run, or its settings or records are damaged.
    """
    settings = _settings(path)
    result, header = _optional(path / "result.json"), read_header(path)
    notes: list[str] = []
    log = _log(path)
    seeds = []
    for number in settings["seeds"]:
        folder = path / f"seed-{number}"
        records = read_records(folder / METRICS)
        if not records and number not in log:
            continue
        clients = None
        try:
            clients = read_clients(folder)
        except DataError as error:
            notes.append(str(error))
        scores = _optional(folder / SCORES)
        seeds.append(
            Seed(number, records, *_partition(folder), clients, scores or None, log.get(number, ""))
        )
    metric = _metric(settings, seeds, result, header)
    if metric is None:
        return None
    sheets = []
    for file in sorted((path / DIAGNOSIS).glob("*.json"), key=_place):
        try:
            sheets.append(read_sheet(file))
        except DataError as error:
            notes.append(str(error))
    seconds = result.get("seconds")
    return Source(
        name=name or settings["method"],
        settings=settings,
        seeds=seeds,
        metric=metric,
        headline=_headline(settings, seeds, result, header),
        folder=path,
        environment=_optional(path / ENVIRONMENT),
        yardstick=yardstick,
        sheets=sheets,
        seconds=float(seconds) if isinstance(seconds, (int, float)) else _seconds(seeds),
        notes=tuple(notes),
    )


def _place(file: Path) -> tuple[int, str]:
    """Diagnoses in the order in which one reads them."""
    order = {"data": 0, "training": 1, "privacy": 2}
    return order.get(file.stem, len(order)), file.name


def why_untested(path: Path) -> str:
    """Why a run has no tested round: ``"has no tested round yet"``, or that it diverged."""
    reasons = list(_log(path).values())
    return f"diverged before its first test: {reasons[0]}" if reasons else "has no tested round yet"


def of_result(result: Result) -> Source:
    """A run from its result; from its folder, if it has one."""
    if result.folder is not None and (result.folder / CONFIG).is_file():
        found = read_run(result.folder, result.title, result.yardstick)
        if found is not None:
            return found
    hashes = [*result.partition_hash, *[""] * len(result.records)]
    seeds = [
        Seed(number, records, partition)
        for number, records, partition in zip(
            result.config.seeds, result.records, hashes, strict=False
        )
    ]
    title, higher = title_of(result.metric), result.higher_is_better
    metric = MetricInfo(result.metric, title, result.unit, higher, result.decimals)
    return Source(
        name=result.title,
        settings=_plain(dataclasses.asdict(result.config)),
        seeds=seeds,
        metric=metric,
        headline=result.headline,
        environment={"device": result.device, "how": {"engine": result.engine}},
        yardstick=result.yardstick,
        seconds=result.seconds,
    )


def setting_name(values: Mapping[str, Any]) -> str:
    """The name of a setting of a sweep: ``lr=0.1, fedprox.mu=1``."""
    return ", ".join(f"{key}={format_value(value)}" for key, value in values.items())


def _settings(path: Path) -> dict[str, Any]:
    """All settings of a run; those that are newer than its folder have their defaults."""
    try:
        given, _ = read_toml(path / CONFIG)
    except FileNotFoundError:
        raise KedgeError(f"{path} holds no run: there is no {CONFIG} in it") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path / CONFIG} cannot be read: {error}") from None
    found = DEFAULTS | given
    for key, default in DEFAULTS.items():
        same = {float: (int, float), tuple: (list, tuple)}.get(type(default), type(default))
        if not isinstance(found[key], same):
            raise DataError(f"{path / CONFIG} is damaged: {key} is of another type")
    seeds = found["seeds"]
    if not all(isinstance(seed, int) for seed in seeds) or len(set(seeds)) < len(seeds):
        raise DataError(f"{path / CONFIG} is damaged: seeds are distinct whole numbers")
    return _plain(found)


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}


def _optional(path: Path) -> dict[str, Any]:
    """A JSON object; empty if the file is missing or damaged."""
    if not path.is_file():
        return {}
    try:
        found = read_json(path, "")
    except DataError:
        return {}
    return found if isinstance(found, dict) else {}


def _log(path: Path) -> dict[int, str]:
    """Why seeds ended before their last round, from the log."""
    try:
        return failures(read_file(path / "log.txt").decode(errors="replace"))
    except OSError:
        return {}


#: Hash and name of partitions, by the digest of their file.
_partitions: dict[str, tuple[str, str]] = {}


def _partition(folder: Path) -> tuple[str, str]:
    """Hash and name of a seed's partition; methods of a comparison share the file's content."""
    try:
        content = read_file(folder / PARTITION)
    except OSError:
        return "", ""
    digest = hashlib.sha256(content).hexdigest()
    if digest not in _partitions:
        try:
            found = Partition.load(folder / PARTITION)
            _partitions[digest] = found.hash, found.name
        except KedgeError:
            _partitions[digest] = "", ""
    return _partitions[digest]


def _metric(
    settings: Mapping[str, Any],
    seeds: Sequence[Seed],
    result: Mapping[str, Any],
    header: Header | None,
) -> MetricInfo | None:
    """The headline metric; None before the first test."""
    tested = {key: None for s in seeds for r in s.records for key in r}
    named = header.headline if header else str(result.get("metric") or settings["metric"])
    names = [tasks[task].metrics[0].name for task in tasks] if named == "auto" else [named]
    name = next((name for name in names if name in tested), None)
    known = {m.name: MetricInfo.of(m) for task in tasks for m in tasks[task].metrics}
    known |= {key: MetricInfo.of(own_metrics[key]) for key in own_metrics}
    return metric_info(name, header, result, known) if name is not None else None


def _headline(
    settings: Mapping[str, Any],
    seeds: Sequence[Seed],
    result: Mapping[str, Any],
    header: Header | None,
) -> str:
    if str(result.get("headline")) in COLUMNS:
        return str(result["headline"])
    tested = all(any("personal_mean" in r for r in s.records) for s in seeds if s.records)
    try:
        personal = header.personal if header else parse(settings["method"]).personal_model
    except KedgeError:
        personal = False
    return "personal" if tested and personal else "global"


def _seconds(seeds: Sequence[Seed]) -> float:
    return sum(float(r.get("seconds", 0.0)) for s in seeds for r in s.records)
