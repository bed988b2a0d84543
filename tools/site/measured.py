"""Measurements of a method: rows of the papers' tables that were run, and times of rounds."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tools.results.facts import Facts
from tools.results.page import signed

from kedge.core.method import parse
from kedge.errors import KedgeError
from kedge.history.run import Stat
from kedge.reproduction import recipes

ROOT = Path(__file__).parents[2]
RESULTS, BENCH = ROOT / "docs" / "results", ROOT / "bench"


class Measured(NamedTuple):
    """A row of a table of a paper."""

    table: str
    place: str
    scale: str
    method: str
    paper: str
    ours: str
    gain: str
    verdict: str
    n: int
    rounds: str
    devices: str
    parts: tuple[str, ...]


class Timing(NamedTuple):
    """The time of a round, as a multiple of FedAvg's on the same machine."""

    method: str
    workload: str
    ratio: float
    n: int
    device: str
    source: str  # a file below bench


def results_of(name: str) -> list[Measured]:
    """The rows whose method has the part; of ``fedavg``, the rows of FedAvg alone."""
    wanted = () if name == "fedavg" else (name,)
    return [row for row in _all_results() if (row.parts == () if not wanted else name in row.parts)]


@cache
def _all_results() -> list[Measured]:
    found = []
    for table in recipes.all_names():
        for scale in ("full", "quick"):
            try:
                facts = Facts(table, RESULTS, scale)
            except KedgeError:  # a table without that scale
                continue
            found += _rows(facts, scale)
    return found


def _rows(of: Facts, scale: str) -> list[Measured]:
    rows = []
    for summary in of.summaries.values():
        shared = summary.row.home[0] != of.name  # a row of another table, which has it
        if not summary.n or summary.row.yardstick or shared:
            continue
        row = summary.row
        paper = "" if row.paper is None or scale != "full" else f"{row.paper:.1f}"
        rounds = f"{summary.rounds}" + (
            "" if summary.rounds == summary.total else f" of {summary.total}"
        )
        found = Measured(
            table=of.name,
            place=of.table.place,
            scale=scale,
            method=str(parse(row.method)),
            paper=paper,
            ours=summary.ours.written(1) if summary.ours else "",
            gain=_gain(summary.tail_gain),
            verdict=of.verdict(row.name) if summary.tail_gain else "",
            n=summary.n,
            rounds=rounds,
            devices=", ".join(summary.devices),
            parts=tuple(part.name for part in parse(row.method).parts),
        )
        rows.append(found)
    return rows


def _gain(stat: Stat | None) -> str:
    if stat is None:
        return ""
    interval = stat.interval()
    span = f" ({signed(interval[0])} to {signed(interval[1])})" if interval else ""
    return f"{signed(stat.mean)}{span}"


def timings_of(name: str) -> list[Timing]:
    """Times of methods that have the part, those with the fewest parts first."""
    rows = [row for row in _all_timings() if name in _parts(row.method)]
    return sorted(rows, key=lambda row: len(_parts(row.method)))


def _parts(method: str) -> tuple[str, ...]:
    try:
        return tuple(part.name for part in parse(method).parts)
    except KedgeError:  # a field that the part no longer has
        return ()


@cache
def _all_timings() -> list[Timing]:
    return [*_records(), *_notes()]


def _records() -> list[Timing]:
    """From records of bench that timed several methods, the latest of each workload."""
    found: dict[tuple[str, str], tuple[str, Timing]] = {}
    for path in sorted((BENCH / "results").glob("speed_*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if "versions" not in record:  # of an older script, which timed no methods
            continue
        device = record["hardware"]["gpu"] or record["hardware"]["cpu"]
        for row in record["rows"]:
            if row["method"] != "fedavg" and row.get("of_fedavg"):
                runner = row["runner"].removeprefix("kedge ")
                workload = f"{row['workload']}, {runner}, {row['precision']}"
                timing = Timing(
                    row["method"], workload, row["of_fedavg"], len(row["times"]), device,
                    f"results/{path.name}",
                )  # fmt: skip
                key = (row["method"], workload)
                found[key] = max(found.get(key, ("", timing)), (record["when"], timing))
    return [timing for _, timing in found.values()]


def _notes() -> list[Timing]:
    """From the table of methods in the notes, whose record has no methods' settings."""
    text = (BENCH / "NOTES.md").read_text(encoding="utf-8")
    section = re.search(r"### What a round of each method costs\n(.*?)\n#", text, re.S)
    if section is None:
        return []
    rows = re.findall(r"^\| `([^`]*)`[^|]*\| (\d+) \| ([\d.]+)x \|", section[1], re.M)
    where = "FedCOG CNN, 10 clients, vector, tf32"
    return [
        Timing(method, where, float(ratio), 3, "NVIDIA H200", "NOTES.md")
        for method, _, ratio in rows
        if method != "fedavg"
    ]
