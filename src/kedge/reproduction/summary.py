"""Statistics of records: the papers' metrics, the mean of the last tests, and paired gains."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kedge.history.compare import LEVEL, holm, paired
from kedge.history.run import Stat
from kedge.reproduction.records import Point, Record
from kedge.reproduction.table import PaperRow, PaperTable

Points = Sequence[Point]
TOP = 5
STATS = ("ours", "tail", "gain", "tail_gain", "beside", "beside_gain")


def value_of(metric: str, points: Points, higher: bool) -> float:
    """A curve as one number: ``last``, ``best`` or ``top5``, the mean of the five best; ``higher``
    says whether high values are better.

    A test without a number, after a loss that was not finite, counts for ``last`` only: NaN.

    >>> curve = [(i, float(v), 0.0) for i, v in enumerate([1, 5, 2, 3, 4, 2], 1)]
    >>> [value_of(name, curve, True) for name in ("last", "best", "top5")]
    [2.0, 5.0, 3.2]
    """
    if not points:
        return math.nan
    if metric == "last":
        last = points[-1][1]
        return math.nan if last is None else last
    values = sorted((v for _, v, _ in points if v is not None), reverse=higher)
    if not values:
        return math.nan
    return values[0] if metric == "best" else sum(values[:TOP]) / len(values[:TOP])


def tail_mean(points: Points, tail: int) -> float:
    """The mean of the last ``tail`` tests: what single rounds, which swing, do not tell."""
    values = [math.nan if v is None else v for _, v, _ in points[-tail:]]
    return sum(values) / len(values) if values else math.nan


@dataclass(frozen=True, eq=False)
class Summary:
    """One row of a table: the paper's number and ours."""

    row: PaperRow
    n: int = 0  # seeds
    rounds: int = 0  # that they have
    total: int = 0  # rounds of the recipe
    ours: Stat | None = None  # at the paper's metric
    tail: Stat | None = None  # mean of the last tests
    gain: Stat | None = None  # over the base, at the paper's metric
    tail_gain: Stat | None = None
    beside: Stat | None = None  # mean of the last tests on the common test set
    beside_gain: Stat | None = None
    paper_gain: float | None = None
    to_target: tuple[int | None, ...] = ()  # first round of each seed that reaches the target
    up_mb: float | None = None
    down_mb: float | None = None
    worst: Stat | None = None  # client, after the last test
    seconds_per_round: float | None = None
    devices: tuple[str, ...] = ()
    shorter: tuple[str, ...] = ()  # runs that are behind the others, so not counted yet
    diverged: tuple[str, ...] = ()
    gain_rounds: int = 0  # that both rows have
    higher: bool = True  # is better
    metric: str = ""
    chosen: str = ""
    p: float | None = None  # of the gain, after Holm's correction over the rows

    @property
    def is_clear(self) -> bool:
        """Whether the gain is clear after the correction."""
        return self.p is not None and self.p < LEVEL

    @property
    def mb_to_target(self) -> float | None:
        """Megabytes up and down until the target, mean over the seeds that reach it."""
        reached = [r for r in self.to_target if r is not None]
        if not reached or self.up_mb is None or self.down_mb is None:
            return None
        return (self.up_mb + self.down_mb) * sum(reached) / len(reached)

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's number."""
        if self.ours is None or self.row.paper is None:
            return None
        return self.ours.mean - self.row.paper

    def to_dict(self) -> dict[str, Any]:
        """The row as plain data, as ``--json`` prints it."""
        stats = {key: _plain(getattr(self, key)) for key in STATS}
        return {
            "row": self.row.name,
            "method": self.row.method,
            "base": self.row.base,
            "paper": self.row.paper,
            "paper_sd": self.row.paper_sd,
            "n": self.n,
            "rounds_done": self.rounds,
            "rounds": self.total,
            **stats,
            "difference": self.difference,
            "p_holm": self.p,
            "paper_gain": self.paper_gain,
            "gain_rounds": self.gain_rounds,
            "metric": self.metric,
            "rounds_to_target": list(self.to_target),
            "mb_to_target": self.mb_to_target,
            "up_mb": self.up_mb,
            "down_mb": self.down_mb,
            "worst_client": _plain(self.worst),
            "seconds_per_round": self.seconds_per_round,
            "devices": list(self.devices),
            "diverged": list(self.diverged),
            "chosen": self.chosen,
        }


def _plain(stat: Stat | None) -> dict[str, Any] | None:
    if stat is None:
        return None
    interval = stat.interval()
    return {
        "mean": stat.mean,
        "sd": stat.sd,
        "n": stat.n,
        "values": list(stat.values),
        "interval": list(interval) if interval else None,
    }


def summarise(
    table: PaperTable,
    records: dict[str, dict[int, Record]],
    choices: dict[str, dict[str, Any]] | None = None,
) -> list[Summary]:
    """One summary per row of a table. ``records`` are by row and seed."""
    found = []
    every = (record.higher for by_seed in records.values() for record in by_seed.values())
    higher = next(every, True)  # before the first record only the paper's gain depends on it
    for row in table.rows:
        base = next((r for r in table.rows if r.name == row.base and r is not row), None)
        chosen = ", ".join(f"{k} {v:g}" for k, v in (choices or {}).get(row.name, {}).items())
        own = records.get(row.name, {})
        others = records.get(base.name, {}) if base else {}
        found.append(_summary(table, row, own, base, others, chosen, higher))
    tested = [s.gain is not None and s.gain.n > 1 and not s.row.yardstick for s in found]
    gains = [
        s.gain.values if s.gain and yes else None for s, yes in zip(found, tested, strict=True)
    ]
    p_values = holm([paired(values).p if values else None for values in gains])
    return [dataclasses.replace(s, p=p) for s, p in zip(found, p_values, strict=True)]


def _summary(
    table: PaperTable,
    row: PaperRow,
    own: dict[int, Record],
    base: PaperRow | None,
    others: dict[int, Record],
    chosen: str,
    higher: bool,
) -> Summary:
    total = row.config().rounds
    numbers = base is not None and row.paper is not None and base.paper is not None
    paper_gain = row.paper - base.paper if numbers else None  # type: ignore[union-attr,operator]
    paper_gain = -paper_gain if paper_gain and not higher else paper_gain
    if not own:
        return Summary(row, total=total, paper_gain=paper_gain, chosen=chosen)
    most = max(record.rounds_done for record in own.values())
    counted = {s: r for s, r in own.items() if r.rounds_done == most or r.diverged}
    shorter = [f"seed {s} ({r.rounds_done} rounds)" for s, r in own.items() if s not in counted]
    runs = list(counted.values())
    gain, tail_gain, beside_gain, rounds = _gains(table, own, others, higher)
    target = row.config().target
    return Summary(
        row,
        n=len(runs),
        rounds=most,
        total=total,
        ours=Stat.of([value_of(table.metric, r.curve, higher) for r in runs]),
        tail=Stat.of([tail_mean(r.curve, table.tail) for r in runs]),
        gain=gain,
        tail_gain=tail_gain,
        beside=_known([tail_mean(r.beside, table.tail) for r in runs]),
        beside_gain=beside_gain,
        paper_gain=paper_gain,
        to_target=tuple(_first(r.curve, target, higher) for r in runs) if target else (),
        up_mb=_mean([r.up_mb for r in runs]),
        down_mb=_mean([r.down_mb for r in runs]),
        worst=_worst(runs),
        seconds_per_round=_mean([r.seconds_per_round for r in runs]),
        devices=tuple(dict.fromkeys(r.device for r in runs)),
        shorter=tuple(shorter),
        diverged=tuple(f"seed {r.seed} after round {r.rounds_done}" for r in runs if r.diverged),
        gain_rounds=rounds,
        metric=runs[0].metric,
        higher=higher,
        chosen=chosen,
    )


def _gains(
    table: PaperTable, own: dict[int, Record], others: dict[int, Record], higher: bool
) -> tuple[Stat | None, Stat | None, Stat | None, int]:
    """Gains of a row over its base, paired by seed, over the tests that both runs have: at the
    paper's metric, in the last tests, and in the last tests on the common test set. Positive ones
    are better.

    Seeds with other partitions are left out, and those that are behind the other seeds.
    """
    sign = 1.0 if higher else -1.0
    pairs: dict[int, list[tuple[float, float, float]]] = {}
    for seed, record in own.items():
        other = others.get(seed)
        if other is None or other.partition_hash != record.partition_hash:
            continue
        common = {r for r, _, _ in record.curve} & {r for r, _, _ in other.curve}
        if not common:
            continue
        one, two = ([p for p in r.curve if p[0] in common] for r in (record, other))
        metric = value_of(table.metric, one, higher) - value_of(table.metric, two, higher)
        tail = tail_mean(one, table.tail) - tail_mean(two, table.tail)
        one, two = ([p for p in r.beside if p[0] in common] for r in (record, other))
        beside = tail_mean(one, table.tail) - tail_mean(two, table.tail)
        pairs.setdefault(max(common), []).append((sign * metric, sign * tail, sign * beside))
    if not pairs:
        return None, None, None, 0
    rounds = max(pairs)
    metric_gains, tail_gains, beside_gains = zip(*pairs[rounds], strict=True)
    return Stat.of(metric_gains), Stat.of(tail_gains), _known(beside_gains), rounds


def _first(points: Points, target: float, higher: bool) -> int | None:
    """The first round that reaches a target."""
    known = ((r, v) for r, v, _ in points if v is not None)
    return next((r for r, v in known if (v >= target if higher else v <= target)), None)


def _known(values: Sequence[float]) -> Stat | None:
    return None if any(map(math.isnan, values)) else Stat.of(values)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _worst(runs: Sequence[Record]) -> Stat | None:
    for key in ("personal_worst", "client_worst"):
        values = [r.final.get(key) for r in runs]
        if all(v is not None for v in values):
            return Stat.of(values)
    return None
