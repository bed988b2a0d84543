"""Tables of results for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table

from kedge.runs.grid import Setting, written
from kedge.runs.result import Result, Stat, paired


def comparison(results: Sequence[Result]) -> Table:
    """One row per method: last and best value (mean ± sd over seeds), gain over the first method
    seed by seed, rounds to the target, megabytes of all clients up and down, seconds."""
    first = results[0]
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("method", min_width=10, overflow="fold")
    columns = [first.label, "best"]
    columns += ["gain", "95 % interval"] if len(results) > 1 else []
    columns += [f"to {first.config.target:g}"] if first.config.target else []
    for column in (*columns, "MB up", "down", "s"):
        table.add_column(column, justify="right", no_wrap=True)
    leader = best(results)
    for result in results:
        style = "bold" if result is leader and len(results) > 1 else ""
        row = [result.config.method, result.written(result.last), result.written(result.best.mean)]
        if len(results) > 1:
            row += ["", ""] if result is first else list(_difference(paired(result, first)))
        if first.config.target:
            row.append(_rounds(result.rounds_to(first.config.target)))
        row += [f"{v:.0f}" if v >= 100 else f"{v:.1f}" for v in (result.mb_up, result.mb_down)]
        row.append(f"{result.seconds:.1f}")
        table.add_row(*row, style=style)
    return table


def grid(settings: Sequence[Setting], results: Sequence[Result]) -> Table:
    """One row per setting: its values, last and best value (mean ± sd over seeds), seconds."""
    first, leader = results[0], best(results)
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for key in settings[0].values:
        table.add_column(key, overflow="fold")
    for column in (first.label, "best", "s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for setting, result in zip(settings, results, strict=True):
        row = [written(value) for value in setting.values.values()]
        ended = [r["round"] for run in result.records for r in run if math.isnan(r["train_loss"])]
        if ended:
            row += ["", "", f"{result.seconds:.1f}", f"diverged in round {min(ended)}"]
        else:
            marked = "best" if result is leader and len(results) > 1 else ""
            row += [
                result.written(result.last),
                result.written(result.best.mean),
                f"{result.seconds:.1f}",
                marked,
            ]
        table.add_row(*row, style="bold" if result is leader and len(results) > 1 else "")
    return table


def best(results: Sequence[Result]) -> Result:
    """The result with the best last value; one that is not a number is the last choice."""
    sign = 1.0 if results[0].higher_is_better else -1.0
    return max(results, key=lambda r: -math.inf if math.isnan(r.last.mean) else sign * r.last.mean)


def _difference(stat: Stat) -> tuple[str, str]:
    interval = stat.interval()
    if interval is None:
        return f"{stat.mean:+.2f}", "one seed"
    return f"{stat.mean:+.2f}", f"{interval[0]:+.1f} … {interval[1]:+.1f}"


def _rounds(values: Sequence[int | None]) -> str:
    """Mean over seeds, or how many never got there."""
    there = [v for v in values if v is not None]
    if not there:
        return "never"
    mean = f"{sum(there) / len(there):.1f}".removesuffix(".0")
    return mean if len(there) == len(values) else f"{mean} ({len(there)}/{len(values)})"
