"""The numbers of the table: one standing per run, gains paired by seed over the first run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kedge.report.page.groups import Group
from kedge.report.page.source import Seed, Source
from kedge.runs.numbers import counted
from kedge.runs.result import Stat
from kedge.runs.significance import Paired, holm, paired

COMPANIONS = ("balanced_accuracy", "auroc")


@dataclass(frozen=True)
class Standing:
    """A run in numbers. ``seeds`` are those that count, see :mod:`kedge.runs.numbers`."""

    source: Source
    seeds: list[Seed]
    round: int  # the last tested one
    last: Stat  # the headline there
    best: Stat  # in any round, chosen on the test data
    status: str  # complete, unfinished, diverged, stopped early
    validation: Stat | None = None
    chosen: Stat | None = None  # the headline in the best round on validation data
    chosen_rounds: tuple[int, ...] = ()
    beside: dict[str, Stat] = field(default_factory=dict)
    globally: Stat | None = None  # the global model, where the headline is of clients
    unseen: Stat | None = None
    to_target: tuple[int | None, ...] = ()
    mb_up: float = 0.0
    mb_down: float = 0.0
    gain: Paired | None = None  # over the run that its group is compared with
    p: float | None = None  # of the gain, after Holm's correction

    @property
    def is_final(self) -> bool:
        """Whether its numbers may be compared with those of others."""
        return self.status != "unfinished"


def standings(group: Group, against_best: bool = False) -> tuple[list[Standing], int]:
    """One standing per run of a group, in its order, and the index of the run they are compared
    with: the first one, or the best one.

    Gains are taken between final runs only. Holm's correction is over all of them, but for
    yardsticks, which do not compete.
    """
    found = [_standing(source) for source in group.sources]
    best = leader(found) if against_best else None
    base = found[0] if best is None else best
    if len(found) < 2 or not base.is_final:
        return found, found.index(base)
    gains = [None if s is base else gain_over(s, base) for s in found]
    competing = [
        gain.p if gain is not None and not s.source.yardstick else None
        for s, gain in zip(found, gains, strict=True)
    ]
    compared = [
        Standing(**vars(s) | {"gain": gain, "p": p})
        for s, gain, p in zip(found, gains, holm(competing), strict=True)
    ]
    return compared, found.index(base)


def gain_over(one: Standing, other: Standing) -> Paired | None:
    """The gain of one run over another, over the seeds that both have; positive is better."""
    higher = one.source.metric.higher_is_better
    if higher is None or not (one.is_final and other.is_final):
        return None
    sign = 1.0 if higher else -1.0
    values, others = _by_seed(one), _by_seed(other)
    shared = [seed for seed in values if seed in others]
    if not shared:
        return None
    return paired([sign * (values[seed] - others[seed]) for seed in shared])


def _by_seed(standing: Standing) -> dict[int, float]:
    numbers = [seed.number for seed in standing.seeds]
    return dict(zip(numbers, standing.last.values, strict=True))


def leader(found: Sequence[Standing]) -> Standing | None:
    """The best of several runs: by validation data where all have them, else by the last test.

    Yardsticks and unfinished runs do not compete; those that diverged come last. None leads where
    nobody knows whether high or low values are better.
    """
    candidates = [
        s
        for s in found
        if s.is_final and not s.source.yardstick and s.source.metric.higher_is_better is not None
    ]
    return max(candidates, key=lambda s: _score(s, candidates), default=None)


def ranked(found: Sequence[Standing]) -> list[Standing]:
    """From best to worst; unfinished runs and yardsticks last."""
    competing = [s for s in found if s.is_final and not s.source.yardstick]
    rest = [s for s in found if s not in competing]
    return [
        *sorted(competing, key=lambda s: _score(s, competing), reverse=True),
        *sorted(rest, key=lambda s: _score(s, []), reverse=True),
    ]


def on_validation(found: Sequence[Standing]) -> bool:
    """Whether the leader is chosen on validation data."""
    competing = [s for s in found if s.is_final and not s.source.yardstick]
    return bool(competing) and all(s.validation is not None for s in competing)


def _score(standing: Standing, candidates: Sequence[Standing]) -> tuple[bool, float]:
    stat = standing.validation if on_validation(candidates) else standing.last
    sign = 1.0 if standing.source.metric.higher_is_better else -1.0
    if stat is None or math.isnan(stat.mean):
        return False, -math.inf
    return standing.status != "diverged", sign * stat.mean


def _standing(source: Source) -> Standing:
    column, name = source.column, source.metric.name
    numbers, at = counted({s.number: source.series(s) for s in source.seeds})
    seeds = [s.until(at) for s in source.seeds if s.number in numbers]
    tested = {s.number: [r for r in s.records if column in r] for s in seeds}
    early = [s for s in seeds if s.last.get("stopped")]
    best = [_best(source, [r[column] for r in tested[s.number]]) for s in seeds]
    chosen = _chosen(source, seeds)
    target = float(source.settings.get("target") or 0.0)
    return Standing(
        source=source,
        seeds=seeds,
        round=max((r["round"] for own in tested.values() for r in own[-1:]), default=0),
        last=Stat.of(numbers.values()),
        best=Stat.of(best),
        status=_status(source, early),
        validation=Stat.of([v for v, _ in chosen]) if chosen else None,
        chosen=Stat.of([r[column] for _, r in chosen]) if chosen else None,
        chosen_rounds=tuple(r["round"] for _, r in chosen),
        beside=_beside(source, seeds),
        globally=Stat.of([_end(s, column).get(name, math.nan) for s in seeds])
        if source.headline != "global"
        else None,
        unseen=_unseen(seeds, name),
        to_target=tuple(_reached(source, tested[s.number], target) for s in seeds)
        if target and source.metric.higher_is_better is not None
        else (),
        mb_up=_total(seeds, "mb_up"),
        mb_down=_total(seeds, "mb_down"),
    )


def _end(seed: Seed, column: str) -> dict[str, Any]:
    """The last record that has a column."""
    return next((r for r in reversed(seed.records) if column in r), {})


def _status(source: Source, early: Sequence[Seed]) -> str:
    if source.has_diverged:
        return "diverged"
    if not source.is_complete:
        return "unfinished"
    return "stopped early" if early else "complete"


def _best(source: Source, values: Sequence[float]) -> float:
    known = [float(v) for v in values if not math.isnan(v)]
    higher = source.metric.higher_is_better
    if not known or higher is None:
        return math.nan
    return max(known) if higher else min(known)


def _total(seeds: Sequence[Seed], key: str) -> float:
    return sum(float(r.get(key, 0.0)) for s in seeds for r in s.records) / len(seeds)


def _reached(source: Source, tested: Sequence[dict[str, Any]], target: float) -> int | None:
    higher = source.metric.higher_is_better
    for record in tested:
        value = record[source.column]
        if value >= target if higher else value <= target:
            return int(record["round"])
    return None


def _chosen(source: Source, seeds: Sequence[Seed]) -> list[tuple[float, dict[str, Any]]]:
    """The value on validation data and the record of each seed's best round; empty without."""
    name = source.metric.name
    key = "personal_validation" if source.headline == "personal" else "validation"
    if source.metric.higher_is_better is None:
        return []
    sign = 1.0 if source.metric.higher_is_better else -1.0
    found = []
    for seed in seeds:
        scored = [
            (sign * float(r[key][name]), -int(r["round"]), r)
            for r in seed.records
            if key in r and source.column in r and not math.isnan(r[key].get(name, math.nan))
        ]
        if not scored:
            return []
        value, _, record = max(scored, key=lambda one: one[:2])  # of equal ones, the first
        found.append((sign * value, record))
    return found


def _beside(source: Source, seeds: Sequence[Seed]) -> dict[str, Stat]:
    """Balanced accuracy and AUROC where classes are imbalanced."""
    ends = [_end(s, source.column) for s in seeds]
    if source.metric.name != "accuracy" or not all("imbalanced" in end for end in ends):
        return {}
    prefix = "" if source.headline == "global" else f"{source.headline}_"
    stats = {n: Stat.of([end.get(prefix + n, math.nan) for end in ends]) for n in COMPANIONS}
    return {name: stat for name, stat in stats.items() if not math.isnan(stat.mean)}


def _unseen(seeds: Sequence[Seed], name: str) -> Stat | None:
    last = [[r["unseen"] for r in s.records if "unseen" in r][-1:] for s in seeds]
    return Stat.of([one[0].get(name, math.nan) for one in last]) if all(last) else None
