"""The table of a comparison, once: for the terminal, as text, and for a page.

A cell has a text to read and a number to sort by. Page and terminal show the same columns; where
the terminal is narrow, those of the highest rank go first.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kedge.history.compare import Comparison, Row, compare
from kedge.history.metric import COMPANIONS
from kedge.history.run import Run, Stat, like_with_like
from kedge.report.text import count, duration, p_text, signed_text, size
from kedge.settings import format_value

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

TEXT_WIDTH = 120  # characters of a table as text
MIN_HEAD = 11  # characters of a head before it is folded
MIN_NAME = 10  # characters of a method or a value before its column is folded
COLOURS = {"gain": "green", "loss": "red", "dim": "dim"}  # styles of cells in a terminal


class Cell(NamedTuple):
    """A cell of a table; ``sort`` is None where there is no value."""

    text: str = ""
    sort: float | None = None
    more: str = ""  # a second, smaller text
    style: str = ""  # gain, loss, dim

    @property
    def plain(self) -> str:
        """Both texts: ``97.50±0.57``."""
        more = self.more.replace("± ", "±")
        return f"{self.text}{'' if more.startswith('±') else ' '}{more}".strip()


class Column(NamedTuple):
    """A column; ``rank`` says how early it goes where the terminal is narrow (0: never)."""

    key: str
    head: str
    title: str  # what it is, for a tooltip
    cells: list[Cell]
    rank: int = 0

    @property
    def lines(self) -> list[str]:
        """The head in a terminal: not wider than it must be."""
        texts = [*self.head.split(), *(cell.plain for cell in self.cells)]
        return textwrap.wrap(self.head, max(MIN_HEAD, *map(len, texts), 1)) or [""]

    @property
    def width(self) -> int:
        return max(len(text) for text in (*self.lines, *(cell.plain for cell in self.cells)))


@dataclass(frozen=True)
class Table:
    """Columns of numbers beside names, with a note below. ``print`` of rich draws it."""

    names: Sequence[Column]  # what the rows are
    columns: Sequence[Column]
    note: Sequence[str] = ()
    styles: Sequence[str] = field(default_factory=tuple)  # of rows: bold, dim
    name_width: int = MIN_NAME  # of a name, which columns of a rank make room for

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        from rich import table, text

        columns = list(self.columns)
        room = options.max_width - sum(1 + min(self.name_width, c.width) for c in self.names)
        while sum(1 + column.width for column in columns) > room:
            least = max(columns, key=lambda column: column.rank)
            if not least.rank:
                break
            columns.remove(least)
        drawn = table.Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
        for c in self.names:
            least_width = min(MIN_NAME, c.width)
            drawn.add_column(c.head, min_width=least_width, overflow="fold", vertical="bottom")
        for c in columns:
            drawn.add_column("\n".join(c.lines), justify="right", no_wrap=True, vertical="bottom")
        rows = zip(*(column.cells for column in (*self.names, *columns)), strict=True)
        styles = self.styles or [""] * len(self.names[0].cells)
        for cells, style in zip(rows, styles, strict=True):
            texts = [text.Text(cell.plain, COLOURS.get(cell.style, "")) for cell in cells]
            drawn.add_row(*texts, style=style)
        yield drawn
        if self.note:
            yield text.Text("\n".join(self.note), "dim")

    def __str__(self) -> str:
        """Plain text, without colours."""
        from rich.console import Console

        console = Console(file=io.StringIO(), width=TEXT_WIDTH)
        with console.capture() as capture:
            console.print(self, highlight=False)
        return "\n".join(line.rstrip() for line in capture.get().splitlines())


def words(key: str, texts: Sequence[str]) -> Column:
    """A column of names."""
    return Column(key, key, "", [Cell(text) for text in texts])


def results_table(runs: Sequence[Run]) -> Table:
    """The table of runs that were made together: methods, or settings of a sweep."""
    return comparison_table(compare(like_with_like(runs), against_best=bool(runs[0].values)))


def comparison_table(found: Comparison) -> Table:
    """The table of a comparison in a terminal: one row per method, or per setting of a sweep."""
    runs = [row.run for row in found.rows]
    keys = list(runs[0].values)
    names = [words(key, [format_value(run.values[key]) for run in runs]) for key in keys]
    columns = columns_of(found)
    if keys and len(runs) > 1:
        best = f"best ({found.chosen_on})"
        cells = [Cell(best if row is found.leader else "") for row in found.rows]
        columns.append(Column("mark", "", "", cells))
    bold = [row is found.leader and len(found.rows) > 1 for row in found.rows]
    return Table(
        names or [words("method", [run.name for run in runs])],
        columns,
        notes_of(found),
        ["bold" if one else "" for one in bold],
    )


def columns_of(found: Comparison) -> list[Column]:
    """The columns of a comparison, without those that would be empty."""
    first = found.first.run
    metric, several = first.measure, len(found.rows) > 1
    label = metric.label
    if any(row.run.headline != "global" for row in found.rows):
        label = f"{label} of clients"
    over = f"gain over {_short(first.name)}" if found.base == 0 else "against the best"

    def own(pick: Callable[[Run], Stat | None]) -> Callable[[Row], Cell]:
        return lambda row: stat_cell(pick(row.run), metric.decimals, spread=False)

    def beside(name: str) -> Callable[[Row], Cell]:
        decimals = first.metrics[name].decimals if name in first.metrics else metric.decimals
        return lambda row: stat_cell(row.run.beside().get(name), decimals, spread=False)

    makes: list[tuple[str, str, str, Callable[[Row], Cell], int]] = [
        ("last", label, "after the last round: mean over seeds ± standard deviation", _last, 0),
        ("n", "n", "seeds", lambda row: Cell(str(row.run.last.n), row.run.last.n), 6),
    ]
    if several:
        about = f"mean difference to {first.name}, paired by seed; positive is better"
        corrected = "paired t test, corrected for all comparisons of this table"
        makes += [
            ("gain", over, about, lambda row: gain_cell(row, metric.decimals), 0),
            ("interval", "95 % interval", "of the gain, by Student's t over seeds",
             lambda row: interval_cell(row, metric.decimals), 0),
            ("p", "p (Holm)", f"that the gain is 0: {corrected}", _p, 2),
        ]  # fmt: skip
    for name in COMPANIONS:
        head = first.metrics[name].label if name in first.metrics else name
        makes.append((name, head, "beside accuracy, since classes are imbalanced", beside(name), 0))
    makes += [
        ("global", "global model", "the global model on the test set, after the last round",
         own(lambda run: run.global_last if run.headline != "global" else None), 0),
        ("validation", "validation", "the best round on the validation data",
         own(lambda run: run.validation), 3),
        ("chosen", "chosen", "on the test data, in the best round on the validation data",
         lambda row: _chosen(row.run), 0),
        ("best", "best (test)", "the best round on the test data, as papers report it",
         own(lambda run: None if run.chosen else run.best), 3),
        ("unseen", "unseen clients", "on clients that never train", own(lambda run: run.unseen), 0),
        ("target", f"rounds to {float(first.settings.get('target') or 0):g}",
         "first round that reaches the target, mean over the seeds that do",
         lambda row: target_cell(row.run.to_target), 0),
        ("up", "up", "bytes that all clients send, whole run",
         lambda row: _size(row.run, row.run.mb_up), 5),
        ("down", "down", "bytes that all clients receive, whole run",
         lambda row: _size(row.run, row.run.mb_down), 5),
        ("seconds", "time", "of the whole run, all seeds",
         lambda row: Cell(duration(row.run.seconds), row.run.seconds), 4),
        ("status", "", "", lambda row: _status(row.run), 0),
    ]  # fmt: skip
    columns = [
        Column(key, head, title, [make(row) for row in found.rows], rank)
        for key, head, title, make, rank in makes
    ]
    return [column for column in columns if any(cell.text for cell in column.cells)]


def marks_of(found: Comparison) -> list[str]:
    """A word for each run beside its name: the baseline, the best one and on which data."""
    best = "best on validation data" if found.chosen_on == "validation" else "best"
    rows = []
    for row in found.rows:
        if row is found.leader and len(found.competing) > 1:
            rows.append(best)
        elif row.run.yardstick:
            rows.append("yardstick")
        else:
            rows.append("first" if row is found.first and len(found.rows) > 1 else "")
    return rows


def notes_of(found: Comparison) -> list[str]:
    """What the numbers are of, where that is not the global model on a balanced test set."""
    runs = [row.run for row in found.rows]
    first, lines = found.first.run, list[str]()
    of_clients = any(run.headline != "global" for run in runs)
    if of_clients:
        lines.append(
            "Of clients: the model that each client would use, its own or the global one, on its "
            "held-out samples, mean over clients."
        )
    if first.imbalanced is not None:
        lines.append(
            f"The largest class has {100 * first.imbalanced:.0f} % of the test samples: accuracy "
            "alone says little."
        )
    over = _over_clients(first) if len(runs) == 1 else []
    lines += over + (without_value(first) if over or of_clients else [])
    if len(runs) > 1:
        lines.append(
            f"Gains over {first.name} are paired by seed: both have the same partitions, cohorts "
            "and initial weights."
        )
    if any(run.last.n == 1 for run in runs) and len(runs) > 1:
        lines.append("One seed has no spread, no interval and no p-value.")
    if any(run.validation is not None for run in runs):
        lines.append("chosen: on the test data, in the best round on the validation data.")
    if any(run.stopped_early for run in runs):
        lines.append(
            f"Stopped early: after {first.settings['patience']} tests without a better validation "
            "metric (--patience); the values are those of each seed's last round."
        )
    bound = max(map(_bound, runs))
    if bound:
        unit = 10.0 ** math.floor(math.log10(bound))  # rounded up to one digit
        lines.append(
            f"{first.measure.title} in rounds is from histograms of scores, at most "
            f"{unit * math.ceil(bound / unit):.1g} off; scores.json and kedge evaluate have the "
            "exact value."
        )
    return lines


# -- cells ----------------------------------------------------------------------------------------


def stat_cell(stat: Stat | None, decimals: int, spread: bool = True) -> Cell:
    """A mean over seeds, with its standard deviation."""
    if stat is None or (math.isnan(stat.mean) and not spread):
        return Cell()
    if math.isnan(stat.mean):
        return Cell("diverged", None, style="loss")
    more = f"± {stat.sd:.{decimals}f}" if spread and stat.sd is not None else ""
    return Cell(f"{stat.mean:.{decimals}f}", stat.mean, more)


def signed_cell(value: float | None, decimals: int, style: str = "") -> Cell:
    if value is None or math.isnan(value):
        return Cell()
    return Cell(signed_text(value, decimals), value, style=style)


def gain_cell(row: Row, decimals: int) -> Cell:
    """A gain, coloured where it is clear after the correction."""
    if row.gain is None:
        return Cell()
    style = ("gain" if row.gain.mean > 0 else "loss") if row.is_clear else ""
    return signed_cell(row.gain.mean, decimals, style)


def interval_cell(row: Row, decimals: int) -> Cell:
    gain = row.gain
    if gain is None or math.isnan(gain.mean):
        return Cell()
    if gain.low is None or gain.high is None:
        return Cell("one seed", None, style="dim") if gain.n == 1 else Cell()
    low, high = (signed_text(v, decimals) for v in (gain.low, gain.high))
    return Cell(f"{low} to {high}", gain.low)


def target_cell(rounds: Sequence[int | None]) -> Cell:
    """The mean over the seeds that reach a target, and how many do."""
    reached = [r for r in rounds if r is not None]
    if not reached:
        return Cell("never", math.inf, style="dim") if rounds else Cell()
    mean = sum(reached) / len(reached)
    part = "" if len(reached) == len(rounds) else f"{len(reached)} of {len(rounds)}"
    return Cell(f"{mean:.1f}".removesuffix(".0"), mean, part)


def _last(row: Row) -> Cell:
    cell = stat_cell(row.run.last, row.run.measure.decimals)
    return cell._replace(text="no value") if cell.style and not row.run.diverged else cell


def _p(row: Row) -> Cell:
    text = p_text(row.p).removeprefix("p ").removeprefix("= ")
    return Cell() if row.p is None else Cell(text, row.p)


def _chosen(run: Run) -> Cell:
    cell, rounds = stat_cell(run.chosen, run.measure.decimals, spread=False), run.best_rounds
    return cell._replace(more=f"round {_span(rounds)}") if rounds else cell


def _size(run: Run, mb: float) -> Cell:
    return Cell() if run.yardstick else Cell(size(1e6 * mb), mb)


def _status(run: Run) -> Cell:
    if run.status == "unfinished":
        return Cell(f"unfinished, round {run.tested_round} of {run.total}", None, style="loss")
    if run.status == "diverged":
        end = run.diverged_in
        return Cell(f"diverged in round {end}" if end else "diverged", None, style="loss")
    if run.status == "stopped early":
        return Cell(f"stopped early, round {_span(run.last_rounds)}", None, style="dim")
    return Cell()


def _span(rounds: Sequence[int]) -> str:
    """``"12"``, or ``"3–12"`` where seeds differ."""
    return "–".join(map(str, sorted({min(rounds), max(rounds)})))


def _short(text: str) -> str:
    return text if len(text) <= 24 else text[:23] + "…"


# -- notes ----------------------------------------------------------------------------------------


def without_value(run: Run) -> list[str]:
    """How many clients the means over clients leave out: AUROC needs samples of two classes."""
    key = "per_personal" if run.headline == "personal" else "per_client"
    last = [seed.columns.last_list(key) for seed in run.counting]
    clients = max(map(len, last), default=0)
    without = [sum(value is None for value in values) for values in last]
    if not any(without) or all(len(v) == n for v, n in zip(last, without, strict=True)):
        return []
    low, high = min(without), max(without)
    number = str(high) if low == high else f"{low} to {high}"
    return [
        f"{number} of {count(clients, 'client')} have no {run.measure.title}"
        f"{'' if low == high else ', by seed'} (samples of one class only): left out of means over "
        "clients."
    ]


def _over_clients(run: Run) -> list[str]:
    """The worst client and the spread of a single run, mean over seeds."""
    kind = "client" if run.headline == "global" else run.headline
    names = [f"{kind}_{name}" for name in ("mean", "worst", "spread")]
    if not all(run.has(name) for name in names):
        return []
    mean, worst, spread = (f"{run.end(name).mean:.{run.measure.decimals}f}" for name in names)
    label = run.measure.label
    return [f"Over clients: {label} mean {mean}, worst {worst}, spread {spread} (one sd)."]


def _bound(run: Run) -> float:
    """The largest possible error of the headline after the last round; 0 if it is exact."""
    prefix = "" if run.headline == "global" else f"{run.headline}_"
    bounds = run.end(f"{prefix}{run.measure.name}_bound").values
    return max((bound for bound in bounds if not math.isnan(bound)), default=0.0)
