"""Tables for the terminal: the paper's numbers and ours, and the list of recipes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kedge.core.task import tasks
from kedge.report import units
from kedge.report.tables import Column, Fitting
from kedge.reproduction.summary import Summary
from kedge.reproduction.table import Table
from kedge.runs.result import Stat

NAME = 24  # characters of a row's name that are not folded where a column can go instead
METRIC_NAMES = {
    "last": "the last round",
    "best": "the best tested round",
    "top5": "the five best tested rounds",
}


def comparison(table: Table, rows: Sequence[Summary], left_out: Sequence[str] = ()) -> Fitting:
    """The paper's numbers and ours, side by side; rows without a record stay empty."""
    has_paper = any(s.row.paper is not None for s in rows)
    columns: list[Column] = []
    like_paper = has_paper and table.scale == "full"  # a quick form has another network
    if like_paper:
        papers = [_paper(s.row.paper, s.row.paper_sd) for s in rows]
        columns.append(Column("paper", papers))
    columns.append(Column(f"ours\n({table.metric})", [_stat(s.ours) for s in rows]))
    columns.append(Column("n", [str(s.n) if s.n else "" for s in rows]))
    if like_paper:
        columns.append(Column("differ-\nence", [_signed(s.difference) for s in rows], 2))
    columns.append(Column(f"mean of\nlast {table.tail}", [_stat(s.tail) for s in rows]))
    columns.append(Column("gain", [_gain(s.gain) for s in rows]))
    columns.append(Column("95 % interval", [_interval(s.gain) for s in rows], 3))
    columns.append(Column("gain of\nmean", [_gain(s.tail_gain) for s in rows]))
    columns.append(Column("95 % interval", [_interval(s.tail_gain) for s in rows], 1))
    if any(s.beside for s in rows):
        columns.append(Column("common\ntest set", [_stat(s.beside) for s in rows], 1))
        columns.append(Column("gain\nthere", [_gain(s.beside_gain) for s in rows]))
        columns.append(Column("95 % interval", [_interval(s.beside_gain) for s in rows], 1))
    if has_paper:
        columns.append(Column("paper's\ngain", [_signed(s.paper_gain) for s in rows]))
    target = rows[0].row.config().target if rows else 0.0
    if target:
        columns.append(Column(f"to {target:g}", [_to_target(s) for s in rows], 4))
        sizes = ["" if s.mb_to_target is None else units.size(1e6 * s.mb_to_target) for s in rows]
        if any(sizes):
            columns.append(Column(f"traffic\nto {target:g}", sizes, 5))
    if any(s.worst for s in rows):
        columns.append(Column("worst\nclient", [_stat(s.worst) for s in rows], 6))
    if any(s.up_mb is not None for s in rows):
        traffic = [(s.up_mb or 0.0) + (s.down_mb or 0.0) for s in rows]
        sends = [bool(s.n) and not s.row.yardstick for s in rows]
        sizes = [units.size(1e6 * v) if x else "" for x, v in zip(sends, traffic, strict=True)]
        columns.append(Column("traffic\na round", sizes, 7))
    if any(s.chosen for s in rows):
        columns.append(Column("chosen", [s.chosen for s in rows], 5))
    columns.append(Column("rounds", [_rounds(s) for s in rows]))
    best = _leader(rows)
    styles = ["bold" if s is best else "" if s.n else "dim" for s in rows]
    names = Column("row", [s.row.name for s in rows])
    return Fitting([names], columns, styles, _note(table, rows, left_out), names=NAME)


def heading(table: Table) -> str:
    """The title of a table, with what it is of."""
    scale = "" if table.scale == "full" else f"  (scale {table.scale})"
    return f"{table.name}{scale}: {table.title}" + (f". {table.place}" if table.place else "")


def _leader(rows: Sequence[Summary]) -> Summary | None:
    known = [s for s in rows if s.tail is not None and not s.row.yardstick]
    finite = [s for s in known if s.tail is not None and not math.isnan(s.tail.mean)]
    if len(finite) < 2:
        return None
    return max(finite, key=lambda s: (1 if s.higher else -1) * s.tail.mean if s.tail else -math.inf)


def _note(table: Table, rows: Sequence[Summary], left_out: Sequence[str]) -> str:
    """What the numbers are of, and what they leave out."""
    lines = []
    done = [s for s in rows if s.n]
    if done:
        lines.append(
            f"ours: {_measure(done[0].metric)}, {METRIC_NAMES[table.metric]}, mean ± sd over n "
            f"seeds; mean of last {table.tail}: of the last tested rounds; gains over "
            f"{_bases(rows)}, paired by seed, in the rounds that both have."
        )
        if any(s.beside for s in rows):
            lines.append(
                "All but the common test set is of the mean over clients of the model's score on "
                "the samples that each holds out."
            )
        devices = dict.fromkeys(device for s in done for device in s.devices)
        lines.append("Device: " + ", ".join(devices) + ".")
    else:
        lines.append("There are no records yet.")
    short = [s for s in done if s.rounds < s.total and not s.diverged]
    for rounds, total in dict.fromkeys((s.rounds, s.total) for s in short):
        names = ", ".join(s.row.name for s in short if (s.rounds, s.total) == (rounds, total))
        lines.append(f"{names}: {rounds} of {total} rounds.")
    for s in done:
        if s.shorter:
            lines.append(f"{s.row.name}: not counted yet: {', '.join(s.shorter)}.")
        if s.gain is not None and s.gain_rounds < s.rounds:
            lines.append(f"{s.row.name}: its gain is that after {s.gain_rounds} rounds.")
        if s.diverged:
            lines.append(f"{s.row.name} diverged: {', '.join(s.diverged)}.")
    yardsticks = [s.row.name for s in rows if s.row.yardstick and not s.row.note]
    if yardsticks:
        lines.append(f"{', '.join(yardsticks)}: a yardstick, not a federated method.")
    lines += [f"{s.row.name}: {s.row.note}" for s in rows if s.row.note]
    lines += [table.note] if table.note else []
    return "\n".join([*lines, *left_out])


def _measure(metric: str) -> str:
    known = {m.name: m.unit for name in tasks for m in tasks[name].metrics}
    return f"{metric} in percent" if known.get(metric) == "%" else metric


def _bases(rows: Sequence[Summary]) -> str:
    return " or ".join(dict.fromkeys(s.row.base for s in rows if s.row.base)) or "no row"


def _paper(value: float | None, sd: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" + (f"±{sd:.2f}" if sd is not None else "")


def _stat(stat: Stat | None) -> str:
    if stat is None:
        return ""
    return "diverged" if math.isnan(stat.mean) else stat.written(2)


def _signed(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:+.2f}"


def _gain(stat: Stat | None) -> str:
    return "" if stat is None or math.isnan(stat.mean) else f"{stat.mean:+.2f}"


def _interval(stat: Stat | None) -> str:
    if stat is None or math.isnan(stat.mean):
        return ""
    interval = stat.interval()
    return "n = 1" if interval is None else f"{interval[0]:+.1f} … {interval[1]:+.1f}"


def _rounds(s: Summary) -> str:
    return "" if not s.n else str(s.rounds) if s.rounds >= s.total else f"{s.rounds}/{s.total}"


def _to_target(s: Summary) -> str:
    reached = [r for r in s.to_target if r is not None]
    if not s.n:
        return ""
    if not reached:
        return "never"
    mean = f"{sum(reached) / len(reached):.1f}".removesuffix(".0")
    return mean if len(reached) == len(s.to_target) else f"{mean} ({len(reached)}/{s.n})"
