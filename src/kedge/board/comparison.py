"""Curves of runs, and the table of paired differences where runs can be compared."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kedge.board import headline
from kedge.board.entry import ENVIRONMENT, Entry, statistics
from kedge.board.files import Reader
from kedge.board.tail import Tail
from kedge.runs.numbers import common_round, counted
from kedge.runs.significance import holm, paired

PARTITION = "partition.json"
CLIENT_MEAN = headline.COLUMNS["client"]
HEAD = 2048  # bytes of a partition that hold its hash
FIELDS = ("round", "mb", "seconds", "value")  # of a point


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
    values = tail.columns.get(column, ())
    tested = [i for i, value in enumerate(values) if value == value][start:]
    columns = (tail.so_far["mb"], tail.so_far["seconds"], values)
    short = {
        name: [float(f"{numbers[i]:.6g}") for i in tested]
        for name, numbers in zip(FIELDS[1:], columns, strict=True)
    }
    return {FIELDS[0]: [tail.columns["round"][i] for i in tested]} | short


def table(entries: Sequence[Entry], reader: Reader) -> dict[str, Any]:
    """Mean and spread of each run, and its difference to the first one, paired by seed.

    Runs that have ended have the numbers of :mod:`kedge.runs.numbers`, as in a report. While one
    trains, all are taken after the last tested round that their seeds share. Runs are paired if
    data, metric and partitions are the same; a row says why if not.
    """
    first = entries[0]
    columns = like_with_like(entries)
    reasons = [
        "" if entry is first else _unlike(entry, first, columns, reader) for entry in entries
    ]
    series = {
        entry.id: entry.series(columns[entry.id])
        for entry, why in zip(entries, reasons, strict=True)
        if not why
    }
    is_live = any(entry.is_live for entry in entries if entry.id in series)
    seeds = [seed for seed in first.seeds if all(seed in own for own in series.values())]
    at = None
    if is_live:
        at = common_round([own[seed] for own in series.values() for seed in seeds])
        numbers = {
            key: {seed: own[seed].at(at) for seed in seeds if at is not None}
            for key, own in series.items()
        }
    else:
        numbers = {key: counted(own)[0] for key, own in series.items()}
    higher = first.metric.higher_is_better if first.metric else None
    sign = 1.0 if higher else -1.0
    base, rows, p_values = numbers[first.id], list[dict[str, Any]](), list[float | None]()
    for entry, why in zip(entries, reasons, strict=True):
        own = numbers.get(entry.id, {})
        row: dict[str, Any] = {"id": entry.id, "why": why, "n": 0}
        row |= statistics(own.values()) or {}
        p_values.append(None)
        shared = [seed for seed in own if seed in base]
        is_final = is_live or (entry.has_ended and first.has_ended)
        if entry is not first and shared and is_final and higher is not None:
            found = paired([sign * (own[seed] - base[seed]) for seed in shared])
            gain = found.mean if math.isfinite(found.mean) else None
            row |= {"gain": gain, "low": found.low, "high": found.high, "p": found.p}
            p_values[-1] = None if entry.result.get("yardstick") else found.p
        rows.append(row)
    for row, p in zip(rows, holm(p_values), strict=True):
        row["holm"] = p
    return {
        "rows": rows,
        "round": at,
        "live": is_live,
        "higher": higher,
        "seeds": seeds,
        "column": columns[first.id],
        "settings": settings(entries),
    }


def like_with_like(entries: Sequence[Entry]) -> dict[str, str]:
    """The column that each run is judged by: if one is personal, all are means over clients."""
    columns = {entry.id: entry.column for entry in entries}
    if headline.COLUMNS["personal"] in columns.values():
        for entry in entries:
            is_global = columns[entry.id] not in headline.COLUMNS.values()
            if is_global and CLIENT_MEAN in entry.columns():
                columns[entry.id] = CLIENT_MEAN
    return columns


def settings(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """The settings in which runs differ, with the value of each run as text."""
    keys = dict.fromkeys(key for entry in entries for key in entry.config)
    rows = []
    for key in keys:
        values = [str(entry.config.get(key, "")) for entry in entries]
        if len(set(values)) > 1:
            rows.append({"key": key, "values": values})
    return rows


def _unlike(entry: Entry, first: Entry, columns: Mapping[str, str], reader: Reader) -> str:
    """Why a run cannot be compared with the first one; empty if it can."""
    if entry.config["data"] != first.config["data"]:
        return "other data"
    own, other = columns[entry.id], columns[first.id]
    if own != other and not {own, other} <= set(headline.COLUMNS.values()):
        return "another metric"
    seeds = [seed for seed in first.seeds if seed in entry.seeds]
    if not seeds:
        return "no seed in common"
    if _fingerprint(entry, reader) != _fingerprint(first, reader):
        return "the data have changed in between"
    if any(partition_hash(entry, s, reader) != partition_hash(first, s, reader) for s in seeds):
        return "other partitions"
    return ""


def _fingerprint(entry: Entry, reader: Reader) -> str:
    return str(reader.json(entry.path / ENVIRONMENT).get("data", ""))


def partition_hash(entry: Entry, seed: int, reader: Reader) -> str:
    """The hash of a partition, from the head of its file; empty if it is not there."""
    if seed not in entry.tails:
        return ""
    try:
        head = reader.read(entry.path / f"seed-{seed}" / PARTITION, 0, HEAD)
    except OSError:
        return ""
    found = re.search(rb'"hash":\s*"([0-9a-f]+)"', head)
    return found[1].decode() if found else ""
