"""Tables of results for the terminal."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kedge.core.metrics import SCORE_BINS
from kedge.report import units
from kedge.runs.grid import Setting, format_value
from kedge.runs.result import Result, Stat, paired_gain
from kedge.runs.validation import leader, on_validation

TEXT_WIDTH = 120  # characters of a table as text
MIN_NAME = 10  # characters of a method or a value before its column is folded
BESIDE = {"balanced_accuracy": ("balanced\naccuracy %", 2), "auroc": ("AUROC", 3)}


class Column(NamedTuple):
    """A column of numbers. Where the terminal is narrow, those of the highest ``rank`` go first."""

    head: str
    cells: list[str]
    rank: int = 0

    @property
    def width(self) -> int:
        return max(len(line) for text in (self.head, *self.cells) for line in text.split("\n"))


class Fitting:
    """A table with as many columns as the terminal is wide for."""

    def __init__(
        self,
        first: Sequence[Column],
        columns: Sequence[Column],
        styles: Sequence[str],
        note: str,
        names: int = MIN_NAME,  # characters of a name that columns of a rank make room for
    ) -> None:
        self.first, self.columns, self.styles, self.note = first, list(columns), styles, note
        self.names = names

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        columns = list(self.columns)
        room = options.max_width - sum(1 + min(self.names, column.width) for column in self.first)
        while sum(1 + column.width for column in columns) > room:
            least = max(columns, key=lambda column: column.rank)
            if not least.rank:
                break
            columns.remove(least)
        yield Group(self._table(columns), *([Text(self.note, "dim")] if self.note else []))

    def _table(self, columns: Sequence[Column]) -> Table:
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
        for column in self.first:
            table.add_column(
                column.head,
                min_width=min(MIN_NAME, column.width),
                overflow="fold",
                vertical="bottom",
            )
        for column in columns:
            table.add_column(column.head, justify="right", no_wrap=True, vertical="bottom")
        rows = zip(*(column.cells for column in (*self.first, *columns)), strict=True)
        for cells, style in zip(rows, self.styles, strict=True):
            table.add_row(*cells, style=style)
        return table


def as_text(table: RenderableType) -> str:
    """A table as plain text, without colours."""
    console = Console(file=io.StringIO(), width=TEXT_WIDTH)
    with console.capture() as capture:
        console.print(table, highlight=False)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def comparison(results: Sequence[Result]) -> Fitting:
    """Compare methods, one row each.

    The columns are the last value of the headline (mean ± sd over seeds) with what must stand
    beside it, the best one on the test data (with validation data: the best one on them, and
    ``chosen``, the headline in the same round), with clients that never trained the metric on their
    samples, the gain over the first method (paired by seed) with its confidence interval, the
    rounds to the target, the bytes that all clients sent and received, and the seconds.
    """
    first, several = results[0], len(results) > 1
    columns = [*_headline(results), *_chosen(results)]
    if several:
        gains = [("", "") if r is first else _gain(paired_gain(r, first), r) for r in results]
        columns.append(Column("gain", [gain for gain, _ in gains]))
        columns.append(Column("95 % interval", [interval for _, interval in gains]))
    if first.config.target:
        reached = [_rounds(r.rounds_to(first.config.target)) for r in results]
        columns.append(Column(f"to {first.config.target:g}", reached))
    for head, values in (
        ("up", [r.mb_up for r in results]),
        ("down", [r.mb_down for r in results]),
    ):
        pairs = zip(values, results, strict=True)
        columns.append(
            Column(head, ["" if r.yardstick else units.size(1e6 * v) for v, r in pairs], 3)
        )
    columns.append(Column("s", [f"{r.seconds:.1f}" for r in results], 1))
    if any(r.diverged for r in results):
        columns.append(Column("", ["diverged" if r.diverged else "" for r in results]))
    best = leader(results)
    styles = ["bold" if r is best and several else "" for r in results]
    methods = Column("method", [r.title for r in results])
    return Fitting([methods], columns, styles, _note(results))


def grid(settings: Sequence[Setting], results: Sequence[Result]) -> Fitting:
    """Compare the settings of a sweep: values, last and best headline (mean ± sd), seconds.

    The best setting is marked, with the data on which it was chosen.
    """
    best = leader(results)
    columns = [
        column._replace(
            cells=["" if _end(r) else c for c, r in zip(column.cells, results, strict=True)]
        )
        for column in (*_headline(results), *_chosen(results))
    ]
    columns.append(Column("s", [f"{r.seconds:.1f}" for r in results], 1))
    leads = [r is best and len(results) > 1 for r in results]
    mark = "best (validation)" if on_validation(results) else "best (test)"
    marks = [_end(r) or (mark if lead else "") for r, lead in zip(results, leads, strict=True)]
    columns.append(Column("", marks))
    keys = [
        Column(key, [format_value(setting.values[key]) for setting in settings])
        for key in settings[0].values
    ]
    return Fitting(keys, columns, ["bold" if lead else "" for lead in leads], _note(results))


def _chosen(results: Sequence[Result]) -> list[Column]:
    """What was chosen, and on which data; and the metric on clients that never trained."""
    if any(r.validation is not None for r in results):
        validation = [r.written(r.validation.mean) if r.validation else "" for r in results]
        chosen = [r.written(r.chosen) if r.chosen else "" for r in results]
        columns = [Column("validation", validation, 2), Column("chosen", chosen)]
    else:
        columns = [Column("best (test)", [r.written(r.best.mean) for r in results], 2)]
    if any(r.stopped_early for r in results):
        columns.append(Column("rounds", [_span(r.last_rounds) for r in results], 1))
    if any(r.unseen is not None for r in results):
        columns.append(Column("unseen", [r.written(r.unseen) if r.unseen else "" for r in results]))
    return columns


def _headline(results: Sequence[Result]) -> list[Column]:
    """The headline, the metrics that must stand beside it, and the global model's value."""
    first, personal = results[0], any(r.headline != "global" for r in results)
    label = f"{first.label}\nof clients" if personal else first.label
    columns = [Column(label, [r.written(r.last) for r in results])]
    beside = [r.beside() for r in results]
    for name, (head, decimals) in BESIDE.items():
        if any(name in found for found in beside):
            values = [found[name].mean if name in found else math.nan for found in beside]
            columns.append(Column(head, [_number(value, decimals) for value in values]))
    if personal:
        values = [r.global_last.mean for r in results]
        columns.append(Column("global\nmodel", [_number(v, first.decimals) for v in values]))
    return columns


def _note(results: Sequence[Result]) -> str:
    """What the numbers are of, where that is not the global model on a balanced test set."""
    lines = []
    if any(r.headline != "global" for r in results):
        lines.append(
            f"{results[0].metric} of clients: the model that each client would use, its own or the "
            "global one, on its held-out samples, mean over clients."
        )
    shares = [r.records[0][-1]["imbalanced"] for r in results if r.beside()]
    if shares:
        lines.append(
            f"The largest class has {100 * shares[0]:.0f} % of the test samples: accuracy alone "
            "says little."
        )
    over = _over_clients(results[0]) if len(results) == 1 else []
    lines += over
    if over or any(r.headline != "global" for r in results):
        lines += _left_out(results[0])
    if any(r.validation is not None for r in results):
        lines.append("chosen: on the test data, in the best round on the validation data.")
    if any(r.stopped_early for r in results):
        lines.append(
            f"rounds: stopped early, after {results[0].config.patience} tests without a better "
            "validation metric (--patience); the values are those of each seed's last round."
        )
    bound = max(map(_bound, results))
    if bound:
        unit = 10.0 ** math.floor(math.log10(bound))  # rounded up to one digit
        lines.append(
            f"{results[0].metric} in rounds is from {SCORE_BINS:,} bins of scores, at most "
            f"{unit * math.ceil(bound / unit):.1g} off; scores.json and kedge evaluate have the "
            "exact value."
        )
    return "\n".join(lines)


def _bound(result: Result) -> float:
    """The largest possible error of the headline after the last round; 0 if it is exact."""
    prefix = "" if result.headline == "global" else f"{result.headline}_"
    return max(run[-1].get(f"{prefix}{result.metric}_bound") or 0.0 for run in result.records)


def _left_out(result: Result) -> list[str]:
    """How many clients the means over clients leave out: AUROC needs samples of two classes."""
    kind = "personal" if result.headline == "personal" else "client"
    values = result.records[0][-1].get(f"per_{kind}") or []
    without = sum(value is None for value in values)
    if not without or without == len(values):
        return []
    return [
        f"{without} of {len(values)} clients have no {result.metric} (samples of one class only): "
        "left out of means over clients."
    ]


def _over_clients(result: Result) -> list[str]:
    """The worst client and the spread of a single run, mean over seeds."""
    kind = "client" if result.headline == "global" else result.headline
    names = [f"{kind}_{name}" for name in ("mean", "worst", "spread")]
    if not all(result.has(name) for name in names):
        return []
    mean, worst, spread = (result.written(float(result.array(n)[:, -1].mean())) for n in names)
    return [f"Over clients: {result.label} mean {mean}, worst {worst}, spread {spread} (one sd)."]


def _span(rounds: Sequence[int]) -> str:
    """``"12"``, or ``"3-12"`` where seeds differ."""
    return "-".join(map(str, sorted({min(rounds), max(rounds)})))


def _end(result: Result) -> str:
    """Where a run diverged: the first round without a loss, or of those with an exploded one."""
    rounds = []
    for run in result.records:
        missing = [r["round"] for r in run if math.isnan(r["train_loss"])]
        exploded = [r["round"] for r in run if "diverged" in r] if "diverged" in run[-1] else []
        rounds += missing[:1] + exploded[:1]
    return f"diverged in round {min(rounds)}" if rounds else ""


def _gain(stat: Stat, result: Result) -> tuple[str, str]:
    interval, decimals = stat.interval(), result.decimals
    if interval is None:
        return f"{stat.mean:+.{decimals}f}", "one seed"
    fewer = decimals if decimals > 2 else max(1, decimals - 1)  # of 0 to 1: all of them
    return (
        f"{stat.mean:+.{decimals}f}",
        f"{interval[0]:+.{fewer}f} … {interval[1]:+.{fewer}f}",
    )


def _number(value: float, decimals: int) -> str:
    return "" if math.isnan(value) else f"{value:.{decimals}f}"


def _rounds(values: Sequence[int | None]) -> str:
    """Mean over the seeds that reach the target, and how many do."""
    reached = [v for v in values if v is not None]
    if not reached:
        return "never"
    mean = f"{sum(reached) / len(reached):.1f}".removesuffix(".0")
    return mean if len(reached) == len(values) else f"{mean} ({len(reached)}/{len(values)})"
