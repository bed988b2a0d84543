"""The record of a benchmark: hardware, versions and all times; and its table."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.speed.runners import Runner
from bench.speed.workloads import WORKLOADS, Workload
from kedge._version import __version__
from kedge.engines import Execution
from kedge.errors import KedgeError
from kedge.files import write_file
from kedge.tuning.plan import processor_name

DEFAULTS = dataclasses.asdict(Execution(engine=""))


def start(device: str, threads: int, command: str) -> dict[str, Any]:
    """A record without rows."""
    gpu = device.startswith("cuda")
    hardware = {
        "cpu": processor_name(), "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name(device) if gpu else None,
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }  # fmt: skip
    versions = {"kedge": __version__, "torch": torch.__version__}
    versions["python"] = platform.python_version()
    return {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command, "hardware": hardware, "device": device,
        "threads": threads, "versions": versions, "notes": [],
        "interrupted": False, "rows": [],
    }  # fmt: skip


def check_path(path: str | None) -> None:
    """Check the folder of a record before anything is timed.

    Raises:
        KedgeError: there is no such folder.
    """
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise KedgeError(f"--out {path}: there is no folder {Path(path).parent}; create it first")


def write(done: dict[str, Any], path: str) -> None:
    """Write the record as JSON, each list of numbers in one line."""
    text = json.dumps(done, indent=1) + "\n"
    text = re.sub(r"\[[-+\d.e,\s]+\]", lambda m: " ".join(m[0].split()), text)
    write_file(Path(path), text.encode())


def rows(work: Workload, runners: list[Runner]) -> list[dict[str, Any]]:
    """The rows of a workload. A ratio is the seconds of a rival divided by those of the runner, so
    that a runner with a ratio above 1 is faster."""
    rivals = {r.rival: r for r in runners if r.rival and r.seconds}
    timed = {(r.name, r.precision, r.method): r.seconds for r in runners}
    methods = {r.method for r in runners}
    found = []
    for runner in runners:
        seconds = runner.seconds
        row: dict[str, Any] = {
            "workload": work.name, "runner": runner.name, "method": runner.method,
            "precision": runner.precision, "rival": runner.rival or None, "seconds": seconds,
            "times": runner.times, "failed": runner.failed or None, "how": runner.execution,
        }  # fmt: skip
        if seconds is not None:
            row["fastest"], row["slowest"] = min(runner.times), max(runner.times)
            row["seconds_per_client"] = seconds / work.cohort
            row["client_steps_per_second"] = None if runner.idle else work.client_steps / seconds
            row["ratios"] = {
                name: other.seconds / seconds
                for name, other in rivals.items()
                if other is not runner and other.seconds
            }
            bases = {"of_fedavg": "fedavg", "of_base": base_of(runner.method, methods)}
            for name, base in bases.items():
                other = timed.get((runner.name, runner.precision, base))
                row[name] = seconds / other if other else None
            row["base"] = bases["of_base"]
        found.append(row)
    return found


def base_of(method: str, timed: Iterable[str]) -> str:
    """The timed method that a method extends by its last parts, or fedavg.

    >>> base_of("scaffold+flboost(steps=3)", ["fedavg", "scaffold"])
    'scaffold'
    """
    words = method.split("+")
    shorter = ("+".join(words[:n]) for n in range(len(words) - 1, 0, -1))
    return next((base for base in shorter if base in timed), "fedavg")


def tables(done: dict[str, Any]) -> Group:
    """One table per workload with the speed-up over each rival, and a caption with the hardware."""
    names = dict.fromkeys(row["workload"] for row in done["rows"])
    pieces: list[RenderableType] = []
    for name in names:
        rows = [row for row in done["rows"] if row["workload"] == name]
        pieces += [Text(f"{name}: {WORKLOADS[name].note}", "bold")]
        pieces += [_table(rows, WORKLOADS[name].idle), Text()]
    return Group(*pieces, *(Text(line, "dim") for line in _caption(done)))


def _table(rows: list[dict[str, Any]], calls: bool) -> Table:
    """``calls``: show the cost of a client instead of that of a step."""
    precision = {row["rival"]: row["precision"] for row in rows if row["rival"]}
    rivals = [name for name in precision if any(name in row.get("ratios", {}) for row in rows)]
    many = len({row["method"] for row in rows}) > 1
    nested = any(row.get("base", "fedavg") != "fedavg" for row in rows)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("runner", *(["method"] if many else []), "precision"):
        table.add_column(column, no_wrap=True)
    heads = ["ms/round\nmedian", "min", "max", "n", "ms/client" if calls else "client-\nsteps/s"]
    heads += [f"x {name.replace('(', chr(10) + '(')}\n{precision[name]}" for name in rivals]
    costs = ["of_fedavg"] * many + ["of_base"] * nested
    names = {"of_fedavg": "x fedavg\n(cost)", "of_base": "x its base\n(cost)"}
    for head in (*heads, *(names[cost] for cost in costs)):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        cells = [Text(row["runner"]), *([Text(row["method"])] if many else []), row["precision"]]
        if row["seconds"] is None and not row["failed"] and row["times"]:
            continue  # one round has no spread: the caption says so
        if row["seconds"] is None:
            table.add_row(*cells, Text("failed" if row["failed"] else "not timed", "red"))
        else:
            table.add_row(*cells, *_numbers(row, rivals, costs, calls))
    return table


def _caption(done: dict[str, Any]) -> list[str]:
    """Hardware, versions, the meaning of columns, and failures."""
    hardware, versions = done["hardware"], done["versions"]
    where = hardware["gpu"] or f"{hardware['cpu']}, {hardware['cores']} cores"
    with_ = ", ".join(f"{name} {number}" for name, number in versions.items())
    lines = [f"{where}; {done['threads']} threads; {with_}"]
    lines.append("x RIVAL: speed-up over that rival, which runs FedAvg (medians)")
    for row in done["rows"]:
        what = f"{row['runner']} {row['precision']} {row['method']} on {row['workload']}"
        if row["failed"]:
            lines.append(f"failed: {what}: {row['failed']}")
        elif len(row["times"]) == 1:
            lines.append(f"not shown: {what}: timed once, so without a spread")
        elif row["how"] and "auto" in row["runner"]:
            changed = {name: v for name, v in row["how"].items() if v != DEFAULTS[name]}
            lines.append(f"{what} is {changed}")
    return lines + (
        ["interrupted: these are the rounds timed so far"] if done["interrupted"] else []
    )


def _numbers(row: dict[str, Any], rivals: list[str], costs: list[str], calls: bool) -> list[str]:
    steps, ratios = row["client_steps_per_second"], row["ratios"]
    each = f"{1e3 * row['seconds_per_client']:.3g}" if calls else f"{steps:.0f}"
    spread = [f"{1e3 * row[name]:.2f}" for name in ("seconds", "fastest", "slowest")]
    cells = [*spread, str(len(row["times"])), each]
    cells += [_times(ratios[name]) if name in ratios else "" for name in rivals]
    return cells + ["" if row[cost] is None else f"{row[cost]:.2f}x" for cost in costs]


def _times(ratio: float) -> str:
    """A ratio with three digits.

    >>> _times(0.9144), _times(48.55), _times(1297.7)
    ('0.914x', '48.5x', '1298x')
    """
    return f"{ratio:.0f}x" if ratio >= 1000 else f"{ratio:.3g}x"
