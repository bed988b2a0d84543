"""What the panel of the board shows: curves of runs, their comparison, and commands.

The comparison is that of :mod:`kedge.history.compare`, as in a report.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kedge.board.watch import Entry, Reader, Tail, plain_stat
from kedge.history.compare import compare, why_not
from kedge.history.folder import ENVIRONMENT, FEDERATION
from kedge.history.run import Run, Stat, common_round, like_with_like

FIELDS = ("round", "mb", "seconds", "value")  # of a point
OWN_DATA = "own"  # of kedge.fit: no command has them
LOGGERS = ("csv", "tensorboard", "mlflow", "wandb")
#: Why a run cannot be compared with the first one.
REASONS = {
    "metric": "another metric",
    "data": "other data",
    "split": "other test data",
    "partition": "other partitions",
}


def curves(entry: Entry, column: str, after: Sequence[int], epoch: int) -> dict[str, Any]:
    """The points of each seed, those that the page has left out.

    Args:
        entry: the run, with its metrics read.
        column: what is drawn.
        after: for each seed, the number of points that the page has.
        epoch: the state of the files that these points are from; another one sends all points.
    """
    tails = [entry.tails.get(seed) for seed in entry.seeds]
    now = sum(tail.epoch for tail in tails if tail is not None)
    have = list(after) if epoch == now and len(after) == len(tails) else [0] * len(tails)
    seeds = []
    for seed, tail, start in zip(entry.seeds, tails, have, strict=True):
        fresh = _points(tail, column, start) if tail is not None else {n: [] for n in FIELDS}
        seeds.append({"seed": seed, "start": start, **fresh})
    return {"id": entry.id, "column": column, "epoch": now, "seeds": seeds}


def _points(tail: Tail, column: str, start: int) -> dict[str, list[float]]:
    """Round, megabytes and seconds so far, and the value, of every round that has one; without the
    first ``start`` of them."""
    columns = tail.columns
    at = {number: i for i, number in enumerate(columns.rounds)}
    tested = [(r, v) for r, v in columns.by_round(column).items() if math.isfinite(v)][start:]
    rows = [(r, columns.mb[at[r]], columns.seconds[at[r]], v) for r, v in tested]
    short = [(r, *(float(f"{number:.6g}") for number in rest)) for r, *rest in rows]
    return {name: [row[i] for row in short] for i, name in enumerate(FIELDS)}


def table(entries: Sequence[Entry], reader: Reader) -> dict[str, Any]:
    """Mean and spread of each run, and its gain over the first one, paired by seed.

    While one trains, all are taken after the last tested round that their seeds share. A row says
    why a run cannot be compared.
    """
    runs = like_with_like([entry.run(reader) for entry in entries])
    reasons = ["" if run is runs[0] else _unlike(run, runs[0]) for run in runs]
    alike = [run for run, why in zip(runs, reasons, strict=True) if not why]
    is_live = any(e.is_live for e, why in zip(entries, reasons, strict=True) if not why)
    at = common_round(alike) if is_live else None
    found = {id(row.run): row for row in compare(alike, at=at).rows}
    rows = []
    for entry, run, why in zip(entries, runs, reasons, strict=True):
        row: dict[str, Any] = {"id": entry.id, "why": why, "n": 0, "holm": None}
        if not why and (at is not None or not is_live):
            row |= plain_stat(run.last if at is None else Stat.of(run.at(at).values())) or {}
        gain = found[id(run)].gain if not why else None
        if gain is not None:
            mean = gain.mean if math.isfinite(gain.mean) else None
            row |= {"gain": mean, "low": gain.low, "high": gain.high, "p": gain.p}
            row["holm"] = found[id(run)].p
        rows.append(row)
    shared = [s for s in entries[0].seeds if all(s in {o.number for o in r.seeds} for r in alike)]
    return {
        "rows": rows,
        "round": at,
        "live": is_live,
        "higher": runs[0].measure.higher_is_better,
        "seeds": shared,
        "column": runs[0].column,
        "settings": settings(entries),
    }


def _unlike(run: Run, base: Run) -> str:
    if run.settings["data"] == base.settings["data"]:
        if not {s.number for s in run.seeds} & {s.number for s in base.seeds}:
            return "no seed in common"
        if why_not(run, base) == "data":
            return "the data have changed in between"
    return REASONS.get(why_not(run, base), "")


def settings(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """The settings in which runs differ, with the value of each run as text."""
    keys = dict.fromkeys(key for entry in entries for key in entry.config)
    rows = []
    for key in keys:
        values = [str(entry.config.get(key, "")) for entry in entries]
        if len(set(values)) > 1:
            rows.append({"key": key, "values": values})
    return rows


def commands(entry: Entry, title: str, reader: Reader) -> dict[str, str]:
    """``repeat`` and, where it is not finished, ``resume``.

    Args:
        entry: the run.
        title: the folder of the board, as it was typed.
        reader: reads the files that the run had loaded.
    """
    path = Path(title) / entry.relative
    loaded = _loaded(reader.json(entry.path / ENVIRONMENT).get("loaded"))
    if entry.config["data"] == OWN_DATA:
        again = f"kedge.fit(model, clients, out={str(path)!r}, resume=True)"
        return {"resume": again} if entry.state != "finished" else {}
    if entry.kind == "reproduce":
        command = _reproduce(entry, title)
        return {"repeat": command} if command else {}
    kind = "flower run" if FEDERATION in entry.names else entry.kind
    command = kind if kind == "flower run" else "run"
    found = {"repeat": f"kedge {command} {shlex.quote(str(path / 'config.toml'))}{loaded}"}
    if entry.state != "finished" and not entry.is_live:
        several = entry.kind in ("compare", "sweep")
        folder = shlex.quote(str(path.parent if several else path))
        log = ",".join(name for name in LOGGERS if f"log-{name}" in entry.names)
        again = f" --log {log}" if log else ""
        found["resume"] = f"kedge {kind} --out {folder} --resume{again}{loaded}"
    return found


def _loaded(files: Any) -> str:
    paths = [file.get("path") for file in files or () if isinstance(file, dict)]
    return "".join(f" --load {shlex.quote(p)}" for p in paths if isinstance(p, str))


def _reproduce(entry: Entry, title: str) -> str:
    """``RESULTS/.runs/PAPER/TABLE/ROW.seed0.full`` is made by one row of a table."""
    pattern = r"(?:(?P<results>.*)/)?\.runs/(?P<home>.+)/(?P<row>[^/]+)\.seed(\d+)\.(\w+)$"
    found = re.fullmatch(pattern, (Path(title).absolute() / entry.relative).as_posix())
    if found is None:
        return ""
    results, home, row, seed, scale = found.groups()
    words = ["kedge", "reproduce", home, "--rows", row, "--seeds", seed]
    words += [] if scale == "full" else ["--scale", scale]
    return shlex.join([*words, "--results", results or "."])
