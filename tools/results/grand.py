"""The table of all methods: accuracy, gain, worst client, rounds and traffic to a target."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tools.results.facts import Facts

from kedge.history.run import Stat
from kedge.report import text
from kedge.reproduction.summary import Summary

NO_BREAK = "\u00a0"
SHOWN = 6  # curves in its figure, beside those of the base and of the yardstick
HEADS = [
    "row", "rate", "mean of the last tests", "gain", "verdict", "worst client",
    "rounds to target", "traffic to target", "s a round",
]  # fmt: skip


def grand_table(of: Facts) -> str:
    """One row per method, the largest gain first; the base and the yardstick on top."""
    cells = [_cells(of, s) for s in ordered(of)]
    shown = [i for i in range(len(HEADS)) if any(row[i] for row in cells)]
    target = f"{of.table.rows[0].config(0).target:g} %"
    lines = [[HEADS[i].replace("target", target) for i in shown], ["---"] * len(shown)]
    lines += [[row[i] for i in shown] for row in cells]
    missing = [f"`{s.row.name}`" for s in of.summaries.values() if not s.n]
    more = ["", f"Not run yet: {', '.join(missing)}."] if missing else []
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), *more])


def ordered(of: Facts) -> list[Summary]:
    """The rows that have runs: base, yardstick, then methods by their gain in the last tests."""
    shown = [s for s in of.summaries.values() if s.n]
    first = [s for s in shown if not _is_method(s)]
    return first + sorted((s for s in shown if s not in first), key=_gain, reverse=True)


def leading(of: Facts) -> list[str]:
    """The rows of the figure: base, yardstick, and the methods that gain most."""
    rows = ordered(of)
    first = [s.row.name for s in rows if not _is_method(s)]
    return first + [s.row.name for s in rows if _is_method(s)][:SHOWN]


def with_verdict(of: Facts, verdict: str) -> str:
    """The methods of a verdict with their gains, the largest first: ```fedtr` (+6.6), ...``."""
    names = [s.row.name for s in ordered(of) if _is_method(s)]
    found = [
        f"`{name}` ({of.value(name, 'tail_gain'):+.1f})"
        for name in names if of.verdict(name) == verdict
    ]  # fmt: skip
    return ", ".join(found) or "none"


def hold_in_all(tables: Sequence[Facts], verdicts: Sequence[str] = ("holds",)) -> str:
    """The methods whose gain holds in every table, or has one of these verdicts there."""
    first, *others = tables
    names = [s.row.name for s in ordered(first) if _is_method(s)]
    found = [n for n in names if all(of.verdict(n) in verdicts for of in (first, *others))]
    return ", ".join(f"`{name}`" for name in found) or "none"


def _is_method(s: Summary) -> bool:
    return s.row.base not in ("", s.row.name) and not s.row.yardstick


def _gain(s: Summary) -> float:
    gain = s.tail_gain.mean if s.tail_gain else math.nan
    return -math.inf if math.isnan(gain) or s.diverged else gain


def _cells(of: Facts, s: Summary) -> list[str]:
    reached = of.target(s.row.name)
    to_target = s.mb_to_target if reached.isdigit() and not s.row.yardstick else None
    return [
        f"`{s.row.name}`",
        s.chosen.removeprefix("lr "),
        _stat(s.tail),
        _on_one_line(of.stat(s.row.name, "tail_gain")) if s.tail_gain else "",
        of.verdict(s.row.name) if _is_method(s) else "",
        "" if s.worst is None or math.isnan(s.worst.mean) else f"{s.worst.mean:.1f}",
        reached,
        "" if to_target is None else _on_one_line(text.size(1e6 * to_target)),
        f"{s.seconds_per_round:.2f}" if s.seconds_per_round else "",
    ]


def _on_one_line(text: str) -> str:
    """With spaces that do not break, so that forty rows are forty lines."""
    return text.replace(" ", NO_BREAK)


def _stat(stat: Stat | None) -> str:
    return "" if stat is None or math.isnan(stat.mean) else stat.written(1)
