"""Statistics of records: the paper's numbers beside ours, and gains that are paired by seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kedge.history.compare import Row, holm, paired
from kedge.history.metric import MetricInfo
from kedge.history.run import Run, Seed, Stat
from kedge.reproduction.recipes import PaperRow, PaperTable
from kedge.reproduction.records import BESIDE, Record

STATS = ("ours", "tail", "gain", "tail_gain", "beside", "beside_gain")
GAINS = ("gain", "tail_gain", "beside_gain")


def run_of(row: PaperRow, records: Sequence[Record], rounds: Collection[int] | None = None) -> Run:
    """The tests of some seeds of a row as a run, or those of some rounds only.

    All tests count, also of a seed that diverged; one without a number is NaN.
    """
    seeds = []
    for record in records:
        columns = record.columns(rounds)
        failed = "" if columns else record.diverged or "no test"
        seeds.append(Seed(record.seed, columns, record.partition_hash, failed=failed))
    least = min((len(s.columns) and s.columns.last_round for s in seeds), default=0)
    numbers = [seed.number for seed in seeds]
    target = row.settings.get("target", 0.0)
    settings = {"method": row.method, "seeds": numbers, "rounds": least, "target": target}
    measure = records[0].measure if records else MetricInfo("", "", higher_is_better=True)
    return Run(row.name, settings, tuple(seeds), measure, yardstick=row.yardstick)


def values_of(metric: str, run: Run) -> tuple[float, ...]:
    """Each seed's curve as one number: ``last``, ``best`` or ``top5``, the mean of the five best.

    A test without a number, after a loss that was not finite, counts for ``last`` only: NaN.
    """
    return {"last": run.last, "best": run.best, "top5": run.top5_mean}[metric].values


def tail_means(run: Run, tail: int, column: str = "") -> list[float]:
    """Each seed's mean of the last ``tail`` tests: what single rounds, which swing, do not tell."""
    columns = [seed.columns.named.get(column or run.column) for seed in run.seeds]
    tails = [one.values[-tail:] if one else () for one in columns]
    return [sum(values) / len(values) if values else math.nan for values in tails]


@dataclass(frozen=True, eq=False)
class Summary:
    """One row of a table: the paper's number and ours."""

    row: PaperRow
    run: Run  # the seeds that count
    rounds: int = 0  # that they have
    total: int = 0  # rounds of the recipe
    ours: Stat | None = None  # at the paper's metric
    tail: Stat | None = None  # mean of the last tests
    gain: Stat | None = None  # over the base, at the paper's metric
    tail_gain: Stat | None = None
    beside: Stat | None = None  # mean of the last tests on the common test set
    beside_gain: Stat | None = None
    paper_gain: float | None = None
    up_mb: float | None = None
    down_mb: float | None = None
    worst: Stat | None = None  # client, after the last test
    seconds_per_round: float | None = None
    devices: tuple[str, ...] = ()
    shorter: tuple[str, ...] = ()  # runs that are behind the others, so not counted yet
    diverged: tuple[str, ...] = ()
    gain_rounds: int = 0  # that both rows have
    chosen: str = ""
    #: Each gain with its p-value, after Holm's correction over the rows of the table.
    compared: dict[str, Row] = field(default_factory=dict)

    @property
    def n(self) -> int:
        """The number of seeds."""
        return len(self.run.seeds)

    @property
    def to_target(self) -> tuple[int | None, ...]:
        """The first round of each seed that reaches the target; empty without one."""
        return tuple(self.run.to_target)

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
            "p_holm": self.compared["gain"].p,
            "paper_gain": self.paper_gain,
            "gain_rounds": self.gain_rounds,
            "metric": self.run.measure.name,
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
    values = {"mean": stat.mean, "sd": stat.sd, "n": stat.n, "values": list(stat.values)}
    return values | {"interval": list(interval) if interval else None}


def summarise(
    table: PaperTable,
    records: Mapping[str, Mapping[int, Record]],
    choices: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Summary]:
    """One summary per row of a table. ``records`` are by row and seed."""
    found = [_summary(table, row, records, (choices or {}).get(row.name, {})) for row in table.rows]
    for key in GAINS:
        stats: list[Stat | None] = [getattr(s, key) for s in found]
        gains = [paired(stat.values) if stat else None for stat in stats]
        tested = [
            g.p if g and not s.row.yardstick else None for g, s in zip(gains, found, strict=True)
        ]
        for s, gain, p in zip(found, gains, holm(tested), strict=True):
            s.compared[key] = Row(s.run, gain, p)
    return found


def _summary(
    table: PaperTable,
    row: PaperRow,
    records: Mapping[str, Mapping[int, Record]],
    chosen: Mapping[str, Any],
) -> Summary:
    own = records.get(row.name, {})
    base = next((r for r in table.rows if r.name == row.base and r is not row), None)
    paper_gain, total = None, row.config().rounds
    if base is not None and row.paper is not None and base.paper is not None:
        every = (r.measure for by_seed in records.values() for r in by_seed.values())
        measure = next(every, MetricInfo("", "", higher_is_better=True))
        paper_gain = measure.gain(row.paper, base.paper)
    words = ", ".join(f"{key} {value:g}" for key, value in chosen.items())
    if not own:
        return Summary(row, run_of(row, []), total=total, paper_gain=paper_gain, chosen=words)
    most = max(record.rounds_done for record in own.values())
    runs = [r for r in own.values() if r.rounds_done == most or r.diverged]
    run = run_of(row, runs)
    rounds, gains = _gains(table, row, own, records.get(base.name, {}) if base else {})
    return Summary(
        row,
        run,
        rounds=most,
        total=total,
        ours=Stat.of(values_of(table.metric, run)),
        tail=Stat.of(tail_means(run, table.tail)),
        beside=_known(tail_means(run, table.tail, BESIDE)),
        gain=gains.get("gain"),
        tail_gain=gains.get("tail_gain"),
        beside_gain=gains.get("beside_gain"),
        paper_gain=paper_gain,
        up_mb=_mean([r.up_mb for r in runs]),
        down_mb=_mean([r.down_mb for r in runs]),
        worst=_worst(runs),
        seconds_per_round=_mean([r.seconds_per_round for r in runs]),
        devices=tuple(dict.fromkeys(r.device for r in runs)),
        shorter=tuple(
            f"seed {s} ({r.rounds_done} rounds)" for s, r in own.items() if r not in runs
        ),
        diverged=tuple(f"seed {r.seed} after round {r.rounds_done}" for r in runs if r.diverged),
        gain_rounds=rounds,
        chosen=words,
    )


def _gains(
    table: PaperTable, row: PaperRow, own: Mapping[int, Record], others: Mapping[int, Record]
) -> tuple[int, dict[str, Stat | None]]:
    """Gains of a row over its base, paired by seed, over the tests that both runs have: at the
    paper's metric, in the last tests, and in the last tests on the common test set. Positive ones
    are better. Before them the round that they are of.

    Seeds with other partitions are left out, and those that are behind the other seeds.
    """
    pairs: dict[int, list[tuple[Run, Run]]] = {}
    for seed, record in own.items():
        other = others.get(seed)
        if other is not None and other.partition_hash == record.partition_hash:
            common = {point[0] for point in record.curve} & {point[0] for point in other.curve}
            if common:
                two = run_of(row, [record], common), run_of(row, [other], common)
                pairs.setdefault(max(common), []).append(two)
    if not pairs:
        return 0, {}
    last = max(pairs)

    def gains(numbers: Callable[[Run], Sequence[float]]) -> list[float]:
        return [a.measure.gain(numbers(a)[0], numbers(b)[0]) for a, b in pairs[last]]

    return last, {
        "gain": Stat.of(gains(lambda run: values_of(table.metric, run))),
        "tail_gain": Stat.of(gains(lambda run: tail_means(run, table.tail))),
        "beside_gain": _known(gains(lambda run: tail_means(run, table.tail, BESIDE))),
    }


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
