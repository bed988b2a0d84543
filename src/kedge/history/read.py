"""A run from its folder.

What is missing or damaged beside the settings and records is left out, with a sentence in the
run's ``notes``. Folders of kedge 0.1 lack ``run.json`` and the states of seeds: their metric is
found by the names of columns, and the log says how seeds ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from kedge.errors import DataError, KedgeError
from kedge.files import open_file, parse_json, read_file, read_json, read_toml
from kedge.history.folder import (
    CLIENTS,
    CONFIG,
    DIAGNOSIS,
    ENVIRONMENT,
    FEDERATION,
    HEADER,
    LOG,
    METRICS,
    PARTITION,
    RESULT,
    SCORES,
    STATE,
    RunFolder,
    read_own_json,
    read_records,
)
from kedge.history.metric import COLUMNS, HEADLINES, KNOWN, PERSONAL_PARTS, MetricInfo, title_of
from kedge.history.run import Columns, Run, Seed, SeedClients
from kedge.history.sheet import read_sheet
from kedge.schema import read_fields
from kedge.settings import Config

if TYPE_CHECKING:
    from kedge.core.method import Method
    from kedge.core.task_base import Metric as TaskMetric

DEFAULTS: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(Config)}
HEAD = 2048  # bytes of a partition that hold its hash
FORMAT = 1  # of run.json and clients.json


# -- what a run is judged by ----------------------------------------------------------------------


@dataclass(frozen=True)
class PartInfo:
    """A part of a method in words, so that a page needs neither its file nor torch."""

    name: str
    doc: str
    uploads: str
    sends: str
    keeps: str
    sums_only: bool


def describe_parts(method: Method) -> tuple[PartInfo, ...]:
    """The parts of a method; of FedAvg, which has none, the method itself."""
    from kedge.core.method import FedAvg

    return tuple(
        PartInfo(
            part.name or "fedavg",
            inspect.getdoc(type(part)) or "",
            part.uploads,
            part.sends,
            part.keeps,
            not part.needs_clients,
        )
        for part in method.parts or [FedAvg()]
    )


@dataclass(frozen=True)
class Header:
    """``run.json``: what a run is judged by, from its start; unknown keys are ignored."""

    task: str
    headline: str  # the name of a metric
    personal: bool  # whether the clients' own models are what its method is for
    metrics: tuple[MetricInfo, ...]
    parts: tuple[PartInfo, ...] = ()

    def metric(self, name: str) -> MetricInfo | None:
        return next((metric for metric in self.metrics if metric.name == name), None)


def save_header(folder: RunFolder, header: Header) -> None:
    """Write what a run is judged by, unless the file says so already."""
    content = json.dumps({"format": FORMAT} | asdict(header), indent=1).encode()
    with contextlib.suppress(OSError):
        if read_file(folder.path / HEADER) == content:
            return
    folder.write(HEADER, content)


def header_of(found: Any) -> Header | None:
    """The header in the content of a file; None if it is damaged."""
    known = {field.name for field in dataclasses.fields(Header)}
    try:
        return read_fields(Header, {k: v for k, v in found.items() if k in known})
    except (AttributeError, KedgeError):
        return None


def read_header(path: Path) -> Header | None:
    """What the run in a folder is judged by; None without the file, or if it is damaged."""
    return header_of(read_object(path / HEADER))


# -- how seeds ended ------------------------------------------------------------------------------


class State(NamedTuple):
    """How the training of a seed stands, and why."""

    name: str
    reason: str = ""


def state_of(found: Any) -> State | None:
    """The state in the content of ``state.json``; None if it is damaged."""
    try:
        state = State(found["state"], found["reason"])
    except (LookupError, TypeError):
        return None
    return state if all(isinstance(text, str) for text in state) else None


def states_in_log(log: str, seeds: Sequence[int]) -> dict[int, State]:
    """How seeds ended, from the log of a run of kedge 0.1.

    >>> states_in_log("2026-01-01 00:00:00  failed: seed 3: the loss is not finite", [3])
    {3: State(name='diverged', reason='the loss is not finite')}
    """
    found: dict[int, State] = {}
    for line in log.splitlines():
        match = re.search(r"  (?:failed: )?seed (\d+): (.*)", line)
        if match and re.match(r"(started|resumed|stopped)", match[2]):
            found.pop(int(match[1]), None)
        elif match:
            found[int(match[1])] = State("diverged", match[2])
    end = re.search(r"  (interrupted|failed): ([^\n]*)\n?\Z", log)
    if end and not end[2].startswith("seed "):
        found = {seed: State(end[1], end[2]) for seed in seeds} | found
    return found


def read_states(path: Path, seeds: Sequence[int]) -> dict[int, State]:
    """How the seeds in the folder of a run stand."""
    found = {seed: state_of(read_object(path / f"seed-{seed}" / STATE)) for seed in seeds}
    states = {seed: state for seed, state in found.items() if state is not None}
    try:
        log = "" if states else read_file(path / LOG).decode(errors="replace")
    except OSError:
        log = ""
    return states or states_in_log(log, seeds)


# -- a run ----------------------------------------------------------------------------------------


def read_run(
    path: Path, name: str = "", yardstick: str = "", values: Mapping[str, Any] | None = None
) -> Run | None:
    """A run from its folder; None before its first test.

    Raises:
        KedgeError: there is no run, or its settings or records are damaged.
    """
    settings, notes, seeds = read_settings(path), list[str](), list[Seed]()
    states = read_states(path, settings["seeds"])
    for number in settings["seeds"]:
        folder, failed = path / f"seed-{number}", failure_of(states.get(number))
        columns = Columns(read_records(folder / METRICS))
        if not columns and not failed:
            continue
        try:
            clients = read_clients(folder)
        except DataError as error:
            notes.append(str(error))
            clients = None
        scores = read_object(folder / SCORES) or None
        seeds.append(Seed(number, columns, *read_partition(folder), clients, scores, failed))
    sheets = []
    for file in sorted((path / DIAGNOSIS).glob("*.json"), key=_place):
        try:
            sheets.append(read_sheet(file))
        except DataError as error:
            notes.append(str(error))
    run = make_run(
        path,
        settings,
        seeds,
        read_header(path),
        read_object(path / RESULT),
        read_object(path / ENVIRONMENT),
        is_remote=(path / FEDERATION).exists(),
    )
    if run.column not in {column for seed in seeds for column in seed.columns.named}:
        return None
    return dataclasses.replace(
        run, name=name or run.method, yardstick=yardstick, values=values or {},
        sheets=tuple(sheets), notes=tuple(notes),
    )  # fmt: skip


def make_run(
    path: Path,
    settings: Mapping[str, Any],
    seeds: Sequence[Seed],
    header: Header | None,
    result: Mapping[str, Any],
    environment: Mapping[str, Any],
    is_remote: bool = False,
) -> Run:
    """A run from what its files hold; its metric has no name where it is not known."""
    columns = list(dict.fromkeys(name for seed in seeds for name in seed.columns.named))
    metrics = {m.name: m for m in header.metrics} if header else {}
    name = _headline(settings, header, result, columns)
    measure = metrics.get(name) or _metric(name, result)
    seconds = result.get("seconds")
    if not isinstance(seconds, (int, float)):
        seconds = sum(seed.columns.total("seconds") for seed in seeds)
    return Run(
        name=str(result.get("yardstick") or settings["method"]),
        settings=settings,
        seeds=tuple(seeds),
        measure=measure,
        headline=_whose(settings, header, result, seeds),
        folder=path,
        environment=environment,
        yardstick=str(result.get("yardstick") or ""),
        seconds=float(seconds),
        metrics=KNOWN | metrics | {measure.name: measure},
        parts=header.parts if header else (),
        is_remote=is_remote,
    )


def measure_of(settings: Mapping[str, Any], columns: Sequence[str]) -> MetricInfo:
    """The metric that a run is judged by, from its settings and the columns of its records."""
    return _metric(_headline(settings, None, {}, columns), {})


def _headline(
    settings: Mapping[str, Any],
    header: Header | None,
    result: Mapping[str, Any],
    columns: Sequence[str],
) -> str:
    """The name of the metric that a run is judged by; empty if it is not known."""
    named = header.headline if header else result.get("metric")
    if not isinstance(named, str):
        named = str(settings.get("metric", "auto"))
    if named != "auto":
        return named
    return next(
        (
            name
            for name in (*HEADLINES, *(metrics[0].name for metrics in _own_tasks()))
            if name in columns
        ),
        "",
    )


def _metric(name: str, result: Mapping[str, Any]) -> MetricInfo:
    """A metric of a folder without a header: as its result says, else as it is known here."""
    metric = KNOWN.get(name) or _registered(name) or MetricInfo(name, title_of(name))
    higher = result.get("higher_is_better") if result.get("metric") == name else None
    return (
        dataclasses.replace(metric, higher_is_better=higher) if isinstance(higher, bool) else metric
    )


def _registered(name: str) -> MetricInfo | None:
    """A metric that a file of the user has registered: then its module has been imported."""
    custom = sys.modules.get("kedge.core.task_custom")
    own = custom.own_metrics if custom else {}
    known = [own[name]] if name in own else []
    known += [m for metrics in _own_tasks() for m in metrics if m.name == name]
    return MetricInfo.of(known[0]) if known else None


def _own_tasks() -> Iterable[Sequence[TaskMetric]]:
    """The metrics of tasks that are registered, where their module has been imported."""
    module = sys.modules.get("kedge.core.task")
    return [module.tasks[task].metrics for task in module.tasks] if module else []


def _whose(
    settings: Mapping[str, Any],
    header: Header | None,
    result: Mapping[str, Any],
    seeds: Sequence[Seed],
) -> str:
    """Of which models the headline is."""
    if str(result.get("headline")) in COLUMNS:
        return str(result["headline"])
    method = str(settings["method"]).lower()
    known = PERSONAL_PARTS & set(re.findall(r"\w+", method)) or "personal_head=true" in method
    is_personal = header.personal if header else bool(known)
    tested = [COLUMNS["personal"] in s.columns.named for s in seeds if s.columns]
    return "personal" if is_personal and tested and all(tested) else "global"


def failure_of(state: State | None) -> str:
    """Why a seed ended with a loss that is not finite; empty if it did not."""
    return state.reason or "diverged" if state is not None and state.name == "diverged" else ""


def why_untested(path: Path) -> str:
    """Why a run has no tested round: ``"has no tested round yet"``, or that it diverged."""
    states = read_states(path, read_settings(path)["seeds"]).values()
    reason = next(filter(None, map(failure_of, states)), "")
    return f"diverged before its first test: {reason}" if reason else "has no tested round yet"


def read_settings(path: Path) -> dict[str, Any]:
    """All settings of a run as plain data; those that are newer than its folder have their
    defaults.

    Raises:
        KedgeError: there is no run, or its settings are damaged.
    """
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
    return plain_settings(found)


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; empty if the file is missing or damaged."""
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_partition(folder: Path) -> tuple[str, str]:
    """Hash and name of a seed's partition, from the head of its file; empty if it is missing."""
    try:
        with open_file(folder / PARTITION) as file:
            return partition_head(file.read(HEAD))
    except OSError:
        return "", ""


def partition_head(head: bytes) -> tuple[str, str]:
    """Hash and name in the first bytes of a partition's file."""
    found = [re.search(rb'"%b":\s*("(?:[^"\\]|\\.)*")' % key, head) for key in (b"hash", b"name")]
    try:
        digest, name = (parse_json(match[1]) if match else "" for match in found)
    except ValueError:
        return "", ""
    return digest, name


def read_clients(folder: Path) -> SeedClients | None:
    """The clients in the folder of a seed; None if there is no such file.

    Raises:
        DataError: the file is damaged, or a newer kedge wrote it.
    """
    file = folder / CLIENTS
    if not file.is_file():
        return None
    advice = "delete it: reports then go without the picture of the partition"
    found: Any = read_own_json(file, advice)
    if not isinstance(found, dict) or found.get("format") != FORMAT or not _fits(found):
        raise DataError(f"{file} is damaged: it does not describe clients; {advice}")
    return SeedClients(*(found.get(key) for key in SeedClients._fields))  # type: ignore[arg-type]


def save_clients(folder: RunFolder, seed: int, clients: SeedClients) -> None:
    """Write the clients of a seed, of which perhaps only names and sizes are known."""
    folder.seed(seed)
    content = json.dumps({"format": FORMAT} | clients._asdict()).encode()
    folder.write(f"seed-{seed}/{CLIENTS}", content)


def _fits(found: dict[str, Any]) -> bool:
    names, sizes, classes, counts = (found.get(key) for key in SeedClients._fields)
    if not _are(names, str) or not _are(sizes, int) or len(names) != len(sizes):
        return False
    if counts is None:
        return classes is None or _are(classes, str)
    return (
        _are(classes, str)
        and isinstance(counts, list)
        and len(counts) == len(names)
        and all(_are(row, int) and len(row) == len(classes) for row in counts)
    )


def _are(values: Any, kind: type) -> TypeGuard[list[Any]]:
    return isinstance(values, list) and all(type(value) is kind for value in values)


def _place(file: Path) -> tuple[int, str]:
    """Diagnoses in the order in which one reads them."""
    order = {"data": 0, "training": 1, "privacy": 2}
    return order.get(file.stem, len(order)), file.name
