"""Comparisons: which runs may be compared, who leads, by how much, and how sure that is.

Two methods that are compared have the same partitions, cohorts and initial weights for a seed, so
their differences are taken seed by seed. The test is Student's t on these differences. A table with
several comparisons finds a small p-value sooner or later, so p-values are corrected by Holm's step
down: the probability of one or more false claims in the table stays below the level.

A table, a page, the board and Python show a :class:`Comparison`: one number, one p-value.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kedge.history.run import Run, like_with_like
from kedge.settings import format_value

LEVEL = 0.05


class Paired(NamedTuple):
    """The mean difference of pairs; interval and p-value are None for a single pair."""

    mean: float
    sd: float | None
    n: int
    low: float | None  # of the 95 % interval
    high: float | None
    p: float | None  # two-sided, that the true mean is 0

    @property
    def is_clear(self) -> bool:
        """Whether the 95 % interval leaves out 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def paired(differences: Sequence[float]) -> Paired:
    """Student's t on the differences of pairs, one per seed.

    Where all differences are equal there is no spread to judge by: the interval is a point, and p
    is 1 if they are 0, otherwise 0.

    Raises:
        ValueError: there is no difference.

    >>> found = paired([1.0, 2.0, 3.0])
    >>> found.mean, found.n, round(found.low, 3), round(found.high, 3), round(found.p, 4)
    (2.0, 3, -0.484, 4.484, 0.0742)
    """
    values, n = [float(v) for v in differences], len(differences)
    if not n:
        raise ValueError("no differences")
    mean = math.fsum(values) / n
    if n == 1 or not all(map(math.isfinite, values)):
        return Paired(mean, None, n, None, None, None)
    from scipy.special import stdtr, stdtrit  # importing kedge must not import scipy

    sd = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    if sd <= 1e-12 * max(1.0, abs(mean)):
        return Paired(mean, 0.0, n, mean, mean, 1.0 if abs(mean) <= 1e-12 else 0.0)
    error = sd / math.sqrt(n)
    half = float(stdtrit(n - 1, 0.975)) * error
    p = 2.0 * float(stdtr(n - 1, -abs(mean) / error))
    return Paired(mean, sd, n, mean - half, mean + half, p)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's correction: adjusted p-values in the order given; None stays None and does not count.

    The i-th smallest of m (from 0) is multiplied by m - i, and none is below a smaller one's.

    >>> holm([0.01, 0.04, 0.03, None])
    [0.03, 0.06, 0.06, None]
    """
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, i) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        adjusted[i] = largest
    return adjusted


class Row(NamedTuple):
    """A run of a comparison, with its gain over the one that all are compared with."""

    run: Run
    gain: Paired | None = None
    p: float | None = None  # of the gain, after Holm's correction

    @property
    def is_clear(self) -> bool:
        """Whether the gain is clear after the correction: what tables colour and sentences say."""
        return self.p is not None and self.p < LEVEL

    @property
    def is_identical(self) -> bool:
        """Whether both runs have the same numbers."""
        return self.gain is not None and self.gain.n > 1 and self.gain.mean == self.gain.sd == 0.0


@dataclass(frozen=True, eq=False)
class Comparison:
    """Runs that may be compared, in their order.

    Attributes:
        rows: one per run.
        base: the index of the run that gains are over.
        best: the index of the best one; None where nobody can say.
        chosen_on: the data that it was chosen on, ``validation`` or ``test``.
    """

    rows: tuple[Row, ...]
    base: int = 0
    best: int | None = None
    chosen_on: str = "test"

    @property
    def first(self) -> Row:
        """The row that gains are over."""
        return self.rows[self.base]

    @property
    def leader(self) -> Row | None:
        return None if self.best is None else self.rows[self.best]

    @property
    def competing(self) -> list[Row]:
        """The rows of which one is best: final ones, without yardsticks."""
        return [row for row in self.rows if competes(row.run)]

    @property
    def ranked(self) -> list[Row]:
        """From best to worst; unfinished runs and yardsticks last."""
        inside = {id(row) for row in self.competing}
        on_validation = self.chosen_on == "validation"
        key = lambda row: (id(row) in inside, *_score(row.run, on_validation and id(row) in inside))  # noqa: E731
        return sorted(self.rows, key=key, reverse=True)


def compare(runs: Sequence[Run], against_best: bool = False, at: int | None = None) -> Comparison:
    """Compare runs with the first one, or with the best one.

    Gains are taken between final runs only. Holm's correction is over all of them, but for
    yardsticks, which do not compete.

    Args:
        runs: runs that may be compared, see :func:`grouped`.
        against_best: compare with the best one, as in a sweep.
        at: the round after which numbers are taken, also of runs that train; None: the last one.
    """
    best, chosen_on = lead(runs)
    base = best if against_best and best is not None else 0
    gains = [None if i == base else gain_over(run, runs[base], at) for i, run in enumerate(runs)]
    p_values = holm(
        [g.p if g and not run.yardstick else None for run, g in zip(runs, gains, strict=True)]
    )
    rows = tuple(map(Row, runs, gains, p_values))
    return Comparison(rows, base, best, chosen_on)


def gain_over(run: Run, base: Run, at: int | None = None) -> Paired | None:
    """The gain of one run over another, over the seeds that both have; positive is better."""
    if run.measure.higher_is_better is None or not (at or (run.is_final and base.is_final)):
        return None
    own, other = (one.at(at) if at else one.counted[0] for one in (run, base))
    shared = [seed for seed in own if seed in other]
    return paired([run.measure.gain(own[s], other[s]) for s in shared]) if shared else None


def competes(run: Run) -> bool:
    """Whether a run may be the best one: yardsticks and unfinished runs may not."""
    return run.is_final and not run.yardstick


def lead(runs: Sequence[Run]) -> tuple[int | None, str]:
    """The index of the best run, and the data that it is chosen on: ``validation`` where all have
    such data, else ``test``.

    Those that diverged come last. None leads where nobody knows whether high values are better.
    """
    indices = [i for i, run in enumerate(runs) if competes(run)]
    on_validation = bool(indices) and all(runs[i].validation is not None for i in indices)
    known = [i for i in indices if runs[i].measure.higher_is_better is not None]
    best = max(known, key=lambda i: _score(runs[i], on_validation), default=None)
    return best, "validation" if on_validation else "test"


def _score(run: Run, on_validation: bool) -> tuple[bool, float]:
    stat = run.validation if on_validation else run.last
    if stat is None or math.isnan(stat.mean):
        return False, -math.inf
    return not run.diverged, run.measure.gain(stat.mean, 0.0)


# -- what may be compared -------------------------------------------------------------------------

#: Settings that decide which samples a model is tested on.
TESTS = ("split", "unseen", "angles")
#: What runs may differ in so that they cannot be compared, and its name in a sentence.
REASONS = {"metric": "metric", "data": "data", "split": "test data", "partition": "partition"}


@dataclass
class ComparableRuns:
    """Runs that may be compared with each other, in their order; the first is the baseline."""

    runs: list[Run]
    hashes: dict[int, str] = field(default_factory=dict)  # of partitions, by seed

    @property
    def first(self) -> Run:
        return self.runs[0]


def grouped(runs: Sequence[Run]) -> list[ComparableRuns]:
    """The runs in groups; within a group, if one run is personal, all are means over clients."""
    groups: list[ComparableRuns] = []
    for run in runs:
        home = next((g for g in groups if not _misfit(run, g.first, g.hashes)), None)
        if home is None:
            home = ComparableRuns([])
            groups.append(home)
        home.runs.append(run)
        home.hashes |= _hashes(run)
    for group in groups:
        group.runs = like_with_like(group.runs)
        if len(groups) > 1:
            group.runs = _named(group.runs)
    return groups


def why_not(run: Run, base: Run) -> str:
    """Why a run cannot be compared with another one: a key of :data:`REASONS`; empty if it can."""
    return _misfit(run, base, _hashes(base))


def _misfit(run: Run, base: Run, hashes: dict[int, str]) -> str:
    one, other = run.measure, base.measure
    if (one.name, one.higher_is_better) != (other.name, other.higher_is_better):
        return "metric"
    if _data(run) != _data(base):
        return "data"
    # a yardstick was made for the comparison that it stands in
    if not (run.yardstick or base.yardstick) and _tests(run) != _tests(base):
        return "split"
    own = _hashes(run)
    shared = own.keys() & hashes.keys()
    if shared:
        return "" if all(own[seed] == hashes[seed] for seed in shared) else "partition"
    same = all(run.settings[key] == base.settings[key] for key in ("partition", "clients"))
    return "" if same else "partition"


def what_differs(groups: Sequence[ComparableRuns]) -> str:
    """In what the groups differ, in words: ``"data and partition"``."""
    first = groups[0].first
    found = {why_not(group.first, first) or "partition" for group in groups[1:]}
    names = [name for key, name in REASONS.items() if key in found]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _hashes(run: Run) -> dict[int, str]:
    return {s.number: s.partition_hash for s in run.seeds if s.partition_hash}


def _data(run: Run) -> str:
    """The fingerprint of the data, or their name where it was not kept."""
    return str(run.environment.get("data") or run.settings["data"])


def _tests(run: Run) -> tuple[Any, ...]:
    found = dict(run.settings)
    if found["split"] == "auto" and found["personal"]:
        found["split"] = "holdout(0.2)"
    return tuple(repr(found[key]) for key in TESTS)


def _named(runs: Sequence[Run]) -> list[Run]:
    """Settings of a sweep that are the same in a group stand in its heading, not in every name."""
    keys = list(runs[0].values)
    differ = [key for key in keys if len({repr(run.values.get(key)) for run in runs}) > 1]
    if not differ or len(differ) == len(keys):
        return list(runs)
    return [
        dataclasses.replace(run, name=setting_name({key: run.values.get(key) for key in differ}))
        for run in runs
    ]


def setting_name(values: Mapping[str, Any]) -> str:
    """The name of a setting of a sweep: ``lr=0.1, fedprox.mu=1``."""
    return ", ".join(f"{key}={format_value(value)}" for key, value in values.items())
