"""The table of a group: cells with a text to read and a number to sort by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from kedge.report import units
from kedge.report.page.standings import Standing, leader, on_validation
from kedge.report.page.wording import p_text, signed_text
from kedge.runs.significance import LEVEL

Make = Callable[[Standing], "Cell"]


class Cell(NamedTuple):
    """A cell of the table; ``sort`` is None where there is no value."""

    text: str = ""
    sort: float | None = None
    more: str = ""  # a second, smaller text
    style: str = ""  # gain, loss, dim


class Column(NamedTuple):
    key: str
    head: str
    title: str  # what it is, for a tooltip
    cells: list[Cell]


def table(found: Sequence[Standing], base: int = 0) -> list[Column]:
    """The columns of a group's table, without those that would be empty; gains are over the run
    with the index ``base``."""
    first = found[base]
    metric = first.source.metric
    number = f".{metric.decimals}f"
    several = len(found) > 1
    personal = any(s.source.headline != "global" for s in found)
    label = f"{metric.title} {metric.unit}".rstrip()

    def stat(s: Standing) -> Cell:
        if math.isnan(s.last.mean):
            return Cell("diverged" if s.status == "diverged" else "no value", None, style="loss")
        more = "" if s.last.sd is None else f"± {s.last.sd:{number}}"
        return Cell(f"{s.last.mean:{number}}", s.last.mean, more)

    makes: list[tuple[str, str, str, Make]] = [
        (
            "last",
            f"{label} of clients" if personal else label,
            "after the last round: mean over seeds ± standard deviation",
            stat,
        ),
        ("n", "n", "seeds", lambda s: Cell(str(s.last.n), s.last.n)),
    ]
    if several:
        makes += [
            (
                "gain",
                f"gain over {_short(first.source.name)}" if base == 0 else "against the best",
                f"mean difference to {first.source.name}, paired by seed; positive is better",
                lambda s: _gain(s, number, first),
            ),
            (
                "interval",
                "95 % interval",
                "of the gain, by Student's t over seeds",
                lambda s: _interval(s, number),
            ),
            (
                "p",
                "p (Holm)",
                "that the gain is 0: paired t test, corrected for all comparisons of this table",
                _p,
            ),
        ]
    for key, head, decimals in (
        ("balanced_accuracy", "balanced accuracy %", 2),
        ("auroc", "AUROC", 3),
    ):
        about = "beside accuracy, since classes are imbalanced"
        makes.append((key, head, about, partial(_beside, key=key, number=f".{decimals}f")))
    makes += [
        (
            "global",
            "global model",
            "the global model on the test set, after the last round",
            lambda s: _mean(s.globally, number),
        ),
        (
            "validation",
            "validation",
            "the best round on the validation data",
            lambda s: _mean(s.validation, number),
        ),
        (
            "chosen",
            "chosen",
            "on the test data, in the best round on the validation data",
            lambda s: _chosen(s, number),
        ),
        (
            "best",
            "best (test)",
            "the best round on the test data, as papers report it",
            lambda s: Cell() if s.chosen else _mean(s.best, number),
        ),
        (
            "unseen",
            "unseen clients",
            "on clients that never train",
            lambda s: _mean(s.unseen, number),
        ),
        (
            "target",
            f"rounds to {float(first.source.settings.get('target') or 0):g}",
            "first round that reaches the target, mean over the seeds that do",
            _target,
        ),
        ("up", "up", "bytes that all clients send, whole run", lambda s: _size(s, s.mb_up)),
        (
            "down",
            "down",
            "bytes that all clients receive, whole run",
            lambda s: _size(s, s.mb_down),
        ),
        (
            "seconds",
            "time",
            "of the whole run, all seeds",
            lambda s: Cell(units.duration(s.source.seconds), s.source.seconds),
        ),
        ("status", "", "", _status),
    ]
    columns = [
        Column(key, head, title, [make(s) for s in found]) for key, head, title, make in makes
    ]
    return [column for column in columns if any(cell.text for cell in column.cells)]


def marks(found: Sequence[Standing], base: int = 0) -> list[str]:
    """A word for each run beside its name: the baseline, the best one and on which data."""
    best = leader(found)
    competing = [s for s in found if s.is_final and not s.source.yardstick]
    words = []
    for s in found:
        word = ""
        if s is best and len(competing) > 1:
            word = "best on validation data" if on_validation(found) else "best"
        elif s.source.yardstick:
            word = "yardstick"
        elif s is found[base] and len(found) > 1:
            word = "first"
        words.append(word)
    return words


def _mean(stat: Any, number: str) -> Cell:
    if stat is None or math.isnan(stat.mean):
        return Cell()
    return Cell(f"{stat.mean:{number}}", stat.mean)


def _beside(s: Standing, key: str, number: str) -> Cell:
    return _mean(s.beside.get(key), number)


def _gain(s: Standing, number: str, first: Standing) -> Cell:
    if s is first or s.gain is None or math.isnan(s.gain.mean):
        return Cell()
    clear = s.p is not None and s.p < LEVEL
    style = ("gain" if s.gain.mean > 0 else "loss") if clear else ""
    return Cell(_signed(s.gain.mean, number), s.gain.mean, style=style)


def _interval(s: Standing, number: str) -> Cell:
    if s.gain is None or math.isnan(s.gain.mean):
        return Cell()
    if s.gain.low is None or s.gain.high is None:
        return Cell("one seed", None, style="dim") if s.gain.n == 1 else Cell()
    low, high = (_signed(v, number) for v in (s.gain.low, s.gain.high))
    return Cell(f"{low} to {high}", s.gain.low)


def _p(s: Standing) -> Cell:
    if s.p is None:
        return Cell()
    return Cell(p_text(s.p).removeprefix("p ").removeprefix("= "), s.p)


def _chosen(s: Standing, number: str) -> Cell:
    if s.chosen is None:
        return Cell()
    rounds = sorted({min(s.chosen_rounds), max(s.chosen_rounds)})
    return Cell(f"{s.chosen.mean:{number}}", s.chosen.mean, f"round {'–'.join(map(str, rounds))}")


def _target(s: Standing) -> Cell:
    if not s.to_target:
        return Cell()
    reached = [r for r in s.to_target if r is not None]
    if not reached:
        return Cell("never", math.inf, style="dim")
    mean = sum(reached) / len(reached)
    part = "" if len(reached) == len(s.to_target) else f"{len(reached)} of {len(s.to_target)}"
    return Cell(f"{mean:.1f}".removesuffix(".0"), mean, part)


def _size(s: Standing, mb: float) -> Cell:
    return Cell() if s.source.yardstick else Cell(units.size(1e6 * mb), mb)


def _status(s: Standing) -> Cell:
    if s.status == "unfinished":
        return Cell(f"unfinished, round {s.round} of {s.source.rounds}", None, style="loss")
    if s.status == "diverged":
        return Cell("diverged", None, style="loss")
    if s.status == "stopped early":
        ends = sorted({seed.last["round"] for seed in s.seeds})
        text = f"{ends[0]}–{ends[-1]}" if len(ends) > 1 else str(ends[0])
        return Cell(f"stopped early, round {text}", None, style="dim")
    return Cell()


def _signed(value: float, number: str) -> str:
    return signed_text(value, int(number.strip(".f")))


def _short(text: str) -> str:
    return text if len(text) <= 24 else text[:23] + "…"
