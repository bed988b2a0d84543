"""Tables of results for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table

from kedge.runs.grid import Setting, format_value
from kedge.runs.result import Result, Stat, paired_gain
from kedge.runs.validation import leader, on_validation


def comparison(results: Sequence[Result]) -> Table:
    """Compare methods, one row each.

    The columns are the last value of the metric (mean ± sd over seeds), the best one on the test
    data (with validation data: the best one on them, and ``chosen``, the test metric in the same
    round), with clients that never trained the one on their samples, the gain over the first
    method (paired by seed) with its confidence interval, the rounds to the target, the megabytes
    that all clients sent and received, and the seconds.
    """
    first = results[0]
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("method", min_width=10, overflow="fold")
    columns = [first.label, *(extra := _extra_columns(results))]
    columns += ["gain", "95 % interval"] if len(results) > 1 else []
    columns += [f"to {first.config.target:g}"] if first.config.target else []
    for column in (*columns, "MB up", "down", "s"):
        table.add_column(column, justify="right", no_wrap=True)
    best = leader(results)
    for result in results:
        style = "bold" if result is best and len(results) > 1 else ""
        row = [result.title, result.written(result.last), *_extra_cells(result, extra)]
        if len(results) > 1:
            row += ["", ""] if result is first else list(_gain(paired_gain(result, first)))
        if first.config.target:
            row.append(_rounds(result.rounds_to(first.config.target)))
        traffic = () if result.yardstick else (result.mb_up, result.mb_down)
        row += [f"{v:.0f}" if v >= 100 else f"{v:.1f}" for v in traffic] or ["", ""]
        row.append(f"{result.seconds:.1f}")
        table.add_row(*row, style=style)
    return table


def grid(settings: Sequence[Setting], results: Sequence[Result]) -> Table:
    """Compare the settings of a sweep: values, last and best metric (mean ± sd), seconds.

    The best setting is marked, with the data on which it was chosen.
    """
    first, best = results[0], leader(results)
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for key in settings[0].values:
        table.add_column(key, overflow="fold")
    extra = _extra_columns(results)
    for column in (first.label, *extra, "s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    data = "validation" if on_validation(results) else "test"
    for setting, result in zip(settings, results, strict=True):
        row = [format_value(value) for value in setting.values.values()]
        missing = [r["round"] for run in result.records for r in run if math.isnan(r["train_loss"])]
        is_best = result is best and len(results) > 1
        if missing:
            blank = [""] * (1 + len(extra))
            row += [*blank, f"{result.seconds:.1f}", f"diverged in round {min(missing)}"]
        else:
            row += [result.written(result.last), *_extra_cells(result, extra)]
            row += [f"{result.seconds:.1f}", f"best ({data})" if is_best else ""]
        table.add_row(*row, style="bold" if is_best else "")
    return table


def _extra_columns(results: Sequence[Result]) -> list[str]:
    """Columns beside the last value: what was chosen, and on which data."""
    columns = ["best (test)"]
    if any(result.validation is not None for result in results):
        columns = ["validation", "chosen"]
    if any(result.unseen is not None for result in results):
        columns.append("unseen")
    return columns


def _extra_cells(result: Result, columns: Sequence[str]) -> list[str]:
    values: dict[str, Stat | float | None] = {
        "best (test)": result.best.mean,
        "validation": result.validation.mean if result.validation else None,
        "chosen": result.chosen,
        "unseen": result.unseen,
    }
    cells = [values[column] for column in columns]
    return ["" if cell is None else result.written(cell) for cell in cells]


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
