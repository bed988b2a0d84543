"""One run in numbers: what a table, a page, the board and Python show of it.

Nothing here needs the data, the model or the code of a run: a folder from another machine, one
whose parts are not installed here, or one that was killed can be read.
"""

from __future__ import annotations

import dataclasses
import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import stdev
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from kedge.history.metric import COLUMNS, COMPANIONS, MetricInfo

if TYPE_CHECKING:
    from kedge.history.read import PartInfo
    from kedge.history.sheet import Sheet

Record = dict[str, Any]
Array = np.ndarray[Any, Any]
#: Keys of every record; the others are tests.
UNTESTED = ("round", "train_loss", "divergence", "mb_up", "mb_down", "seconds")
TOP = 5  # tests in the mean of the best ones


@dataclass(frozen=True)
class Stat:
    """A number over seeds: mean and standard deviation (``None`` for a single seed).

    >>> stat = Stat.of([97.1, 97.9])
    >>> str(stat), stat.n
    ('97.50±0.57', 2)
    """

    mean: float
    sd: float | None
    n: int
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[Any]) -> Stat:
        """The statistics of some numbers, one per seed; NaN of none."""
        values = tuple(float(v) for v in values)
        if not values or not all(map(math.isfinite, values)):
            sd = math.nan if len(values) > 1 else None
            mean = sum(values) / len(values) if values else math.nan
            return cls(mean, sd, len(values), values)
        sd = stdev(values) if len(values) > 1 else None
        return cls(math.fsum(values) / len(values), sd, len(values), values)

    def interval(self) -> tuple[float, float] | None:
        """95 % confidence interval of the mean, by Student's t; None for a single value."""
        if self.sd is None:
            return None
        from scipy.special import stdtrit  # importing kedge must not import scipy

        half = float(stdtrit(self.n - 1, 0.975)) * self.sd / math.sqrt(self.n)
        return self.mean - half, self.mean + half

    def written(self, decimals: int) -> str:
        """Mean and standard deviation as text: ``"97.50±0.41"``."""
        spread = f"±{self.sd:.{decimals}f}" if self.sd is not None else ""
        return f"{self.mean:.{decimals}f}{spread}"

    def __str__(self) -> str:
        return self.written(2)


class SeedClients(NamedTuple):
    """The clients of a seed. ``counts`` is ``[clients][classes]``; None without classes."""

    names: list[str]
    sizes: list[int]
    classes: list[str] | None = None
    counts: list[list[int]] | None = None


class Series(NamedTuple):
    """A number of the records, by the rounds that have it."""

    rounds: array[int]
    values: array[float]


class Columns:
    """The records of a seed by column; those of an inner object are ``outer.inner``.

    >>> columns = Columns([{"round": 1, "loss": 2.0}, {"round": 2, "unseen": {"loss": 1.5}}])
    >>> columns.by_round("loss"), columns.last("unseen.loss"), columns.at_end("loss")
    ({1: 2.0}, 1.5, None)
    """

    def __init__(
        self, records: Iterable[Record] = (), keep_lists: bool = True, most: int = 1000
    ) -> None:
        self._keep_lists, self._most = keep_lists, most  # columns
        self.rounds: array[int] = array("q")
        self.named: dict[str, Series] = {}
        #: Megabytes and seconds up to the end of each round.
        self.mb: array[float] = array("d")
        self.seconds: array[float] = array("d")
        #: Lists that are not empty, such as ``per_client``, by name and round.
        self.lists: dict[str, dict[int, list[Any]]] = {}
        for record in records:
            self.append(record)

    def __len__(self) -> int:
        return len(self.rounds)

    @property
    def last_round(self) -> int:
        """The number of the last round; 0 before the first one."""
        return self.rounds[-1] if self.rounds else 0

    def append(self, record: Record) -> None:
        """Add the record of a round."""
        self.rounds.append(record["round"])
        for name, value in _numbers(record):
            if name not in self.named:
                if len(self.named) >= self._most:
                    continue
                self.named[name] = Series(array("q"), array("d"))
            self.named[name].rounds.append(record["round"])
            self.named[name].values.append(value)
        for name, value in record.items():
            if self._keep_lists and isinstance(value, list) and value:
                self.lists.setdefault(name, {})[record["round"]] = value
        for total, names in ((self.mb, ("mb_up", "mb_down")), (self.seconds, ("seconds",))):
            added = math.fsum(self.at_end(name) or 0.0 for name in names)
            total.append((total[-1] if total else 0.0) + added)

    def by_round(self, name: str) -> dict[int, float]:
        """A column by the number of the round."""
        column = self.named.get(name)
        return dict(zip(*column, strict=True)) if column else {}

    def last(self, name: str) -> float | None:
        """The last number of a column; None without one."""
        return self.named[name].values[-1] if name in self.named else None

    def at_end(self, name: str) -> float | None:
        """The number of a column in the last round; None if it has none."""
        column = self.named.get(name)
        return column.values[-1] if column and column.rounds[-1] == self.last_round else None

    def last_list(self, name: str) -> list[Any]:
        """The last list of a name; empty without one."""
        return next(reversed(self.lists[name].values())) if name in self.lists else []

    def total(self, name: str) -> float:
        """The sum of a column."""
        return sum(self.named[name].values) if name in self.named else 0.0

    def until(self, round: int) -> Columns:
        """The columns up to a round."""
        found = Columns()
        for name, column in self.named.items():
            keep = bisect_right(column.rounds, round)
            if keep:
                found.named[name] = Series(column.rounds[:keep], column.values[:keep])
        keep = bisect_right(self.rounds, round)
        found.rounds = self.rounds[:keep]
        for name, own in self.lists.items():
            if lists := {number: value for number, value in own.items() if number <= round}:
                found.lists[name] = lists
        found.mb, found.seconds = self.mb[:keep], self.seconds[:keep]
        return found


def _numbers(record: Record) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        inner = value.items() if isinstance(value, dict) else ()
        for key, number in ((name, value), *((f"{name}.{k}", v) for k, v in inner)):
            if isinstance(number, (int, float)) and key != "round":
                try:
                    yield key, float(number)
                except OverflowError:  # a whole number of hundreds of digits
                    yield key, math.nan


@dataclass(frozen=True, eq=False)
class Seed:
    """One seed of a run: its records so far."""

    number: int
    columns: Columns
    partition_hash: str = ""
    partition: str = ""  # what it was drawn from, such as dirichlet(0.1)
    clients: SeedClients | None = None
    scores: dict[str, Any] | None = None
    failed: str = ""  # the reason, if it ended before its last round

    @property
    def diverged(self) -> bool:
        """Whether it ended with a loss that has exploded, or that is not a number."""
        loss = self.columns.at_end("train_loss")
        exploded = self.columns.at_end("diverged") is not None
        return bool(self.failed) or exploded or (loss is not None and math.isnan(loss))

    def has_ended(self, rounds: int) -> bool:
        """Whether it had its last round, or was stopped early by validation data."""
        columns = self.columns
        return bool(columns) and (
            columns.last_round >= rounds or columns.at_end("stopped") is not None
        )


@dataclass(frozen=True, eq=False)
class Run:
    """A run, with seeds that have a record or have failed.

    Which seeds count is one rule: those that ended, at their last test; one whose loss was not
    finite is NaN. Before a seed has ended, all that have a test count, at the last tested round
    that they share.

    Attributes:
        name: of the run in tables: its method, its yardstick or its setting.
        settings: all settings, as plain data.
        seeds: their records.
        measure: the metric that the run is judged by.
        headline: of which models: ``global``, the global model on the test set; ``personal``, each
            client's own model on its held-out samples, mean over clients; ``client``, the global
            model in the same way.
        values: of the settings that a sweep varies.
    """

    name: str
    settings: Mapping[str, Any]
    seeds: tuple[Seed, ...]
    measure: MetricInfo
    headline: str = "global"
    folder: Path | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    yardstick: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    sheets: tuple[Sheet, ...] = ()
    seconds: float = 0.0
    metrics: Mapping[str, MetricInfo] = field(default_factory=dict)  # all that are known
    parts: tuple[PartInfo, ...] = ()  # of its method, where the folder describes them
    is_remote: bool = False  # its clients were members of a real federation
    notes: tuple[str, ...] = ()

    @property
    def method(self) -> str:
        return str(self.settings["method"])

    @property
    def total(self) -> int:
        """The number of rounds that are wanted."""
        return int(self.settings["rounds"])

    @property
    def column(self) -> str:
        """The column of the records that the headline is in."""
        return COLUMNS[self.headline] or self.measure.name

    def has(self, name: str) -> bool:
        """Whether all tested rounds have a column."""
        rounds = [
            (s.columns.by_round(self.measure.name).keys(), s.columns.by_round(name).keys())
            for s in self.seeds
        ]
        return any(tested for tested, _ in rounds) and all(a <= b for a, b in rounds)

    # -- its state ----------------------------------------------------------------------------

    @cached_property
    def is_complete(self) -> bool:
        """Whether all seeds have their last round, or were stopped by validation data."""
        wanted = set(self.settings["seeds"])
        done = {s.number for s in self.seeds if s.has_ended(self.total)}
        return bool(wanted) and wanted <= done

    @cached_property
    def diverged(self) -> bool:
        """Whether a seed ended with a loss that has exploded, or that is not a number."""
        return any(seed.diverged for seed in self.seeds)

    @property
    def diverged_in(self) -> int:
        """The first round without a loss, or with one that has exploded; 0 if there is none."""
        rounds = []
        for seed in self.seeds:
            columns = seed.columns
            exploded = columns.named.get("diverged")
            if exploded and columns.at_end("diverged") is not None:
                rounds.append(exploded.rounds[0])
            losses = columns.by_round("train_loss").items()
            missing = next((number for number, loss in losses if math.isnan(loss)), None)
            if seed.failed or missing is not None:
                rounds.append(missing or columns.last_round + 1)
        return min(rounds, default=0)

    @property
    def stopped_early(self) -> bool:
        """Whether a seed was stopped by validation data before its last round."""
        return any(s.columns.at_end("stopped") is not None for s in self.seeds)

    @cached_property
    def status(self) -> str:
        """``complete``, ``unfinished``, ``diverged`` or ``stopped early``."""
        if self.diverged:
            return "diverged"
        if not self.is_complete:
            return "unfinished"
        return "stopped early" if self.stopped_early else "complete"

    @property
    def is_final(self) -> bool:
        """Whether its numbers may be compared with those of others."""
        return self.status != "unfinished"

    # -- its numbers --------------------------------------------------------------------------

    @cached_property
    def counted(self) -> tuple[dict[int, float], int | None]:
        """The numbers that count, by seed, and the round that they are of; None: after the last
        test of each."""
        values = {s.number: s.columns.by_round(self.column) for s in self.seeds}
        ended = [
            s for s in self.seeds if s.failed or (s.has_ended(self.total) and values[s.number])
        ]
        if ended:
            last = {s.number: [*values[s.number].values()][-1:] for s in ended}
            return {
                s.number: math.nan if s.failed or not last[s.number] else last[s.number][0]
                for s in ended
            }, None
        at = common_round([self])
        if at is None:
            return {}, None
        return {number: own[at] for number, own in values.items() if own}, at

    def at(self, round: int) -> dict[int, float]:
        """The headline by seed after a round; of a seed that ended before, after its last test."""
        found = {}
        for seed in self.seeds:
            values = seed.columns.by_round(self.column)
            if values or seed.failed:
                last = math.nan if seed.failed else values[max(values)]
                found[seed.number] = values.get(round, last)
        return found

    @cached_property
    def counting(self) -> tuple[Seed, ...]:
        """The seeds that count, with their records up to the round that counts."""
        numbers, at = self.counted
        seeds = [s for s in self.seeds if s.number in numbers]
        if at is None:
            return tuple(seeds)
        return tuple(dataclasses.replace(s, columns=s.columns.until(at)) for s in seeds)

    @cached_property
    def last(self) -> Stat:
        """The headline after the last round."""
        return Stat.of(self.counted[0].values())

    @property
    def tested_round(self) -> int:
        """The last round in which a seed that counts was tested."""
        rounds = [c.rounds[-1] for s in self.counting if (c := s.columns.named.get(self.column))]
        return max(rounds, default=0)

    def _sorted(self) -> list[list[float]]:
        """The finite tests of each seed, the best one first."""
        higher = self.measure.higher_is_better
        columns = [s.columns.by_round(self.column).values() for s in self.counting]
        if higher is None:
            return [[] for _ in columns]
        return [sorted((v for v in c if not math.isnan(v)), reverse=higher) for c in columns]

    @property
    def best(self) -> Stat:
        """The best value of the headline in any tested round: chosen on the test data."""
        return Stat.of(own[0] if own else math.nan for own in self._sorted())

    @property
    def top5_mean(self) -> Stat:
        """Mean of the five best tested rounds."""
        tops = [own[:TOP] for own in self._sorted()]
        return Stat.of(math.fsum(own) / len(own) if own else math.nan for own in tops)

    @property
    def chosen_by(self) -> str:
        """The key of the records that rounds are chosen by."""
        return "personal_validation" if self.headline == "personal" else "validation"

    @cached_property
    def best_rounds(self) -> list[int] | None:
        """The round of each seed that was best on validation data; None without such data."""
        key, rounds = f"{self.chosen_by}.{self.measure.name}", []
        if self.measure.higher_is_better is None:
            return None
        for seed in self.counting:
            tested = seed.columns.by_round(self.column)
            own = {r: v for r, v in seed.columns.by_round(key).items() if r in tested and v == v}
            if not own:
                return None
            best = (max if self.measure.higher_is_better else min)(own.values())
            rounds.append(next(r for r, v in own.items() if v == best))  # of equal ones, the first
        return rounds or None

    def _in_best_rounds(self, name: str) -> Stat | None:
        if self.best_rounds is None:
            return None
        pairs = zip(self.counting, self.best_rounds, strict=True)
        return Stat.of(seed.columns.by_round(name)[best] for seed, best in pairs)

    @cached_property
    def validation(self) -> Stat | None:
        """The metric on validation data in the best rounds; None without such data."""
        return self._in_best_rounds(f"{self.chosen_by}.{self.measure.name}")

    @cached_property
    def chosen(self) -> Stat | None:
        """The headline on test data in the rounds that were best on validation data."""
        return self._in_best_rounds(self.column)

    @property
    def unseen(self) -> Stat | None:
        """The last metric on clients that never trained; None without such clients."""
        last = [s.columns.last(f"unseen.{self.measure.name}") for s in self.counting]
        return None if not last or None in last else Stat.of(last)

    @property
    def global_last(self) -> Stat:
        """The metric of the global model on the test set after the last round."""
        return self.end(self.measure.name)

    def end(self, name: str) -> Stat:
        """A column after the last test of each seed; NaN where it has none."""
        found = []
        for seed in self.counting:
            tested = seed.columns.named.get(self.column)
            own = seed.columns.by_round(name)
            found.append(own.get(tested.rounds[-1], math.nan) if tested else math.nan)
        return Stat.of(found)

    @property
    def imbalanced(self) -> float | None:
        """The share of the largest class among the test samples, where classes are imbalanced and
        accuracy alone says little."""
        if self.measure.name != "accuracy":
            return None
        share = self.end("imbalanced")
        return None if math.isnan(share.mean) else share.values[0]

    def beside(self) -> dict[str, Stat]:
        """Metrics that must stand beside the accuracy, by name, after the last round: balanced
        accuracy and AUROC where classes are imbalanced."""
        if self.imbalanced is None:
            return {}
        prefix = "" if self.headline == "global" else f"{self.headline}_"
        found = {name: self.end(prefix + name) for name in COMPANIONS}
        return {name: stat for name, stat in found.items() if not math.isnan(stat.mean)}

    @property
    def last_rounds(self) -> list[int]:
        """The number of the last round of each seed."""
        return [s.columns.last_round for s in self.counting]

    def rounds_to(self, target: float) -> list[int | None]:
        """The first round of each seed that reaches the target; None if none does."""
        higher, found = self.measure.higher_is_better, list[int | None]()
        for seed in self.counting if higher is not None else ():
            values = seed.columns.by_round(self.column).items()
            reached = (r for r, v in values if (v >= target if higher else v <= target))
            found.append(next(reached, None))
        return found

    @property
    def to_target(self) -> list[int | None]:
        """The same for the target of the settings; empty without one."""
        target = float(self.settings.get("target") or 0.0)
        return self.rounds_to(target) if target else []

    @property
    def mb_up(self) -> float:
        """Megabytes that all clients sent in a run, mean over seeds."""
        return self._mean_total("mb_up")

    @property
    def mb_down(self) -> float:
        """Megabytes that all clients received in a run, mean over seeds."""
        return self._mean_total("mb_down")

    def _mean_total(self, name: str) -> float:
        return sum(s.columns.total(name) for s in self.counting) / max(1, len(self.counting))

    @property
    def unit(self) -> str:
        """The unit of the metric."""
        return self.measure.unit

    def written(self, value: Stat | float) -> str:
        """A value of the metric as text, with its decimals."""
        stat = value if isinstance(value, Stat) else Stat.of([value])
        return stat.written(self.measure.decimals)

    def array(self, name: str = "") -> Array:
        """A column of the records, ``[seeds, rounds]``; the headline in tested rounds by default. A
        seed that stopped early goes on with its last value, one that failed with NaN."""
        rows = [[*s.columns.by_round(name or self.column).values()] for s in self.seeds]
        longest = max([*map(len, rows), len(self.rounds) if self.diverged else 0])
        last = [
            math.nan if s.failed or not own else own[-1]
            for s, own in zip(self.seeds, rows, strict=True)
        ]
        pairs = zip(rows, last, strict=True)
        return np.array([own + [end] * (longest - len(own)) for own, end in pairs], dtype=float)

    @cached_property
    def rounds(self) -> Array:
        """The numbers of the tested rounds, from 1."""
        tested = [list(s.columns.by_round(self.measure.name)) for s in self.seeds]
        if any(seed.failed for seed in self.seeds):
            every = int(self.settings["eval_every"])
            tested.append([*range(every, self.total, every), self.total])
        return np.array(max(tested, key=len))

    @property
    def partition_hash(self) -> list[str]:
        """The hash of the partition of each seed."""
        return [seed.partition_hash for seed in self.seeds]


def frame_of(seeds: Sequence[int], records: Sequence[Sequence[Record]]) -> Any:
    """Records as a pandas DataFrame, one row per seed and round."""
    try:
        import pandas
    except ImportError:
        raise ImportError("frame() needs pandas: pip install pandas") from None
    pairs = zip(seeds, records, strict=True)
    return pandas.DataFrame([{"seed": seed} | record for seed, own in pairs for record in own])


SomeRun = TypeVar("SomeRun", bound=Run)


def like_with_like(runs: Sequence[SomeRun]) -> list[SomeRun]:
    """Runs that are compared: if one is personal, all are means over clients."""
    if all(run.headline == "global" for run in runs):
        return list(runs)
    return [
        dataclasses.replace(run, headline="client")
        if run.headline == "global" and run.has(COLUMNS["client"])
        else run
        for run in runs
    ]


def common_round(runs: Sequence[Run]) -> int | None:
    """The last tested round that all seeds of some runs have, but for those that failed; None
    without one. A seed that has ended counts for the rounds after it."""
    seeds = [(run, seed) for run in runs for seed in run.seeds if not seed.failed]
    tested = [(run, seed, set(seed.columns.by_round(run.column))) for run, seed in seeds]
    tested = [one for one in tested if one[2]]
    shared = {number for *_, rounds in tested for number in rounds}
    for run, seed, rounds in tested:
        last = max(rounds)
        shared = {n for n in shared if n in rounds or (seed.has_ended(run.total) and n > last)}
    return max(shared, default=None)
