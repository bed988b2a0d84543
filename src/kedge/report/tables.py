"""Tables of results for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table

from kedge.report import units
from kedge.runs.grid import Setting, format_value
from kedge.runs.result import Result, Stat, paired_gain


def comparison(results: Sequence[Result]) -> Table:
    """Compare methods, one row each.

    The columns are the last value of the metric (mean ± sd over seeds), the best one, the gain
    over the first method (paired by seed) with its confidence interval, the rounds to the target,
    the bytes that all clients sent and received, and the seconds.
    """
    first = results[0]
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("method", min_width=10, overflow="fold")
    columns = [first.label, "best"]
    columns += ["gain", "95 % interval"] if len(results) > 1 else []
    columns += [f"to {first.config.target:g}"] if first.config.target else []
    for column in (*columns, "up", "down", "s"):
        table.add_column(column, justify="right", no_wrap=True)
    leader = best(results)
    for result in results:
        style = "bold" if result is leader and len(results) > 1 else ""
        row = [result.config.method, result.written(result.last), result.written(result.best.mean)]
        if len(results) > 1:
            row += ["", ""] if result is first else list(_gain(paired_gain(result, first)))
        if first.config.target:
            row.append(_rounds(result.rounds_to(first.config.target)))
        row += [units.size(1e6 * megabytes) for megabytes in (result.mb_up, result.mb_down)]
        row.append(f"{result.seconds:.1f}")
        table.add_row(*row, style=style)
    return table


def grid(settings: Sequence[Setting], results: Sequence[Result]) -> Table:
    """Compare the settings of a sweep: values, last and best metric (mean ± sd), seconds."""
    first, leader = results[0], best(results)
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for key in settings[0].values:
        table.add_column(key, overflow="fold")
    for column in (first.label, "best", "s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for setting, result in zip(settings, results, strict=True):
        row = [format_value(value) for value in setting.values.values()]
        missing = [r["round"] for run in result.records for r in run if math.isnan(r["train_loss"])]
        if missing:
            row += ["", "", f"{result.seconds:.1f}", f"diverged in round {min(missing)}"]
        else:
            mark = "best" if result is leader and len(results) > 1 else ""
            row += [
                result.written(result.last),
                result.written(result.best.mean),
                f"{result.seconds:.1f}",
                mark,
            ]
        table.add_row(*row, style="bold" if result is leader and len(results) > 1 else "")
    return table


def best(results: Sequence[Result]) -> Result:
    """The result with the best last value; NaN counts as worst."""
    sign = 1.0 if results[0].higher_is_better else -1.0
    return max(results, key=lambda r: -math.inf if math.isnan(r.last.mean) else sign * r.last.mean)


def _gain(stat: Stat) -> tuple[str, str]:
    interval = stat.interval()
    if interval is None:
        return f"{stat.mean:+.2f}", "one seed"
    return f"{stat.mean:+.2f}", f"{interval[0]:+.1f} … {interval[1]:+.1f}"


def _rounds(values: Sequence[int | None]) -> str:
    """Mean over the seeds that reach the target, and how many do."""
    reached = [v for v in values if v is not None]
    if not reached:
        return "never"
    mean = f"{sum(reached) / len(reached):.1f}".removesuffix(".0")
    return mean if len(reached) == len(values) else f"{mean} ({len(reached)}/{len(values)})"
