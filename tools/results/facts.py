"""Numbers of the page: what the template may ask of the records of one table."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from kedge.history.run import Stat
from kedge.reproduction import recipes
from kedge.reproduction.records import Record, found_records, read_choices
from kedge.reproduction.summary import Summary, run_of, summarise

LEVEL = 0.9  # share of tests in which a method of one seed must be ahead to be called ahead


def signed(value: float) -> str:
    """One decimal with a sign; zero is ``+0.0``."""
    return f"{round(value, 1) + 0.0:+.1f}"


class Facts:
    """The records of one table, with the functions that the template calls."""

    def __init__(self, name: str, results: Path, scale: str = "full") -> None:
        self.name, self.results = name, results
        self.table = recipes.read(name).at(scale)
        choices = read_choices(results, self.table)
        self.records, self.left_out = found_records(results, self.table, choices)
        self.summaries: dict[str, Summary] = {
            s.row.name: s for s in summarise(self.table, self.records, choices)
        }

    @property
    def has_runs(self) -> bool:
        return any(self.records.values())

    @cached_property
    def runs(self) -> list[Record]:
        return [record for of_row in self.records.values() for record in of_row.values()]

    def counted(self, row: str) -> dict[int, Record]:
        """The runs of a row that its numbers are of: a seed that is behind the others is not."""
        return {s.number: self.records[row][s.number] for s in self.summaries[row].run.seeds}

    def stat(self, row: str, what: str = "ours") -> str:
        """``ours``, ``tail``, ``beside`` or the gain of one of them, of a row, as text."""
        stat: Stat | None = getattr(self.summaries[row], what)
        if stat is None:
            return "not run"
        if not what.endswith("gain"):
            return stat.written(1)
        mean, *span = map(signed, (stat.mean, *(stat.interval() or ())))
        return f"{mean} ({' to '.join(span)})" if span else mean

    def value(self, row: str, what: str = "ours") -> float:
        """The mean of a statistic as a number, to compute with."""
        stat: Stat | None = getattr(self.summaries[row], what)
        if stat is None:
            raise ValueError(f"{self.name} has no run of {row}")
        return stat.mean

    def mean(self, row: str, first: int, last: int) -> float:
        """The mean over seeds and tests from round ``first`` to ``last``."""
        values = [
            v
            for record in self.records[row].values()
            for r, v, _ in record.curve
            if first <= r <= last and v is not None
        ]
        if not values:
            raise ValueError(f"{self.name} {row} has no test from round {first} to {last}")
        return sum(values) / len(values)

    def top5(self, row: str, seeds: Iterable[int]) -> float:
        """The mean over seeds of the mean of the five best tests."""
        run = run_of(self.table.row(row), [self.records[row][seed] for seed in seeds])
        return run.top5_mean.mean

    def ahead(self, row: str) -> tuple[int, int]:
        """In how many tests a row is ahead of its base, and of how many.

        A method that starts late is its base until then: tests count from the first difference on.
        """
        base = self.records.get(self.table.row(row).base, {})
        pairs = []
        for seed, record in self.counted(row).items():
            if seed in base and base[seed].partition_hash == record.partition_hash:
                other = {r: v for r, v, _ in base[seed].curve}
                own = [(v, other[r]) for r, v, _ in record.curve if r in other]
                pairs += list(itertools.dropwhile(lambda pair: pair[0] == pair[1], own))
        return sum(a is not None and (b is None or a > b) for a, b in pairs), len(pairs)

    def paper_gain(self, row: str) -> str:
        gain = self.summaries[row].paper_gain
        return "" if gain is None else f"{gain:+.1f}"

    def verdict(self, row: str) -> str:
        """Whether a row is ahead of its base in the mean of the last tests, in a few words."""
        summary = self.summaries[row]
        gain = summary.tail_gain
        if summary.diverged:
            return f"diverges in {len(summary.diverged)} of {summary.n} seeds"
        if gain is None:
            return "not run"
        if gain.n == 1:
            ahead, tests = self.ahead(row)
            if gain.mean > 0 and ahead >= LEVEL * tests:
                return "ahead in one seed"
            behind = gain.mean < 0 and ahead <= (1 - LEVEL) * tests
            return "behind in one seed" if behind else "level in one seed"
        if summary.compared["tail_gain"].is_clear:
            return "holds" if gain.mean > 0 else "behind its base"
        if min(gain.values) > 0:
            return "ahead in every seed"
        return "behind in every seed" if max(gain.values) < 0 else "level"

    def target(self, row: str) -> str:
        """The mean of the first rounds that reach the target."""
        rounds = self.summaries[row].to_target
        if not rounds or None in rounds:
            return "never in some seed" if rounds else ""
        return f"{sum(r for r in rounds if r) / len(rounds):.0f}"
