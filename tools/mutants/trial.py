"""One mutant: which tests it faces, and whether one of them fails."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.mutants import child
from tools.mutants.cover import Map
from tools.mutants.mutate import Mutant

FIRST_S = 2.0  # tests of the first stage, in seconds: most mutants end there
IMPORT_S = 120.0  # limit for imports and collection


@dataclass
class Trials:
    """Runs mutants against the tests that touch them."""

    root: Path
    map: Map
    cap: float  # seconds of test time per mutant
    limit: float  # seconds that any test may take; ten times its own time if that is more
    trusted: set[str] = field(default_factory=set)  # tests that were run without a mutant,
    unreliable: set[str] = field(default_factory=set)  # and those that failed
    killers: dict[str, Counter[str]] = field(default_factory=dict)  # per file: test functions

    def chosen(self, mutant: Mutant) -> tuple[list[str], list[str], int]:
        """Tests of the first and second stage, in order, and how many touch the line at all.

        First those that have noticed other mutants of this file, then the quickest case of each
        test function, then the second quickest, and so on.
        """
        times = self.map.times
        found = [t for t in self.map.tests(mutant.file, mutant.scope) if t not in self.unreliable]
        known, rank, order = self.killers.get(mutant.file, Counter()), Counter[str](), {}
        for test in sorted(found, key=lambda t: times[t]):
            function = test.partition("[")[0]
            nth = rank[function]
            rank[function] += 1
            order[test] = (-known[function] if nth < 2 else 0, nth, times[test])
        first: list[str] = []
        second: list[str] = []
        spent = 0.0
        for test in sorted(found, key=order.__getitem__):
            if first and spent + times[test] > self.cap:
                continue
            (first if spent < min(FIRST_S, self.cap) else second).append(test)
            spent += times[test]
        return first, second, len(found)

    def learn(self, mutant: Mutant, test: str) -> None:
        self.killers.setdefault(mutant.file, Counter())[test.partition("[")[0]] += 1

    def run(self, mutant: Mutant) -> child.Answer:
        """In a fork: ``killed`` by a test, or ``survived``."""
        first, second, touching = self.chosen(mutant)
        if not first:
            return {"survived": "no test runs this line"}
        change = child.Changed(self.root / mutant.file, mutant.source)
        child.install(change)
        for stage in (first, second):
            if stage:
                self._alarm(IMPORT_S)
                plugin = Stop(self, stage)
                if child.run_tests(plugin.files, plugin) not in (0, 1, 5):
                    child.reply({"killed": "tests cannot be imported"})
        if not change.used:
            return {"error": f"{mutant.file} was never imported"}
        return {"survived": f"{len(first) + len(second)} of {touching} tests"}

    def clean(self, task: tuple[str, str, list[str]]) -> child.Answer:
        """In a fork: the tests that fail with the source as it is."""
        file, source, tests = task
        child.install(child.Changed(self.root / file, source))
        plugin = Keep(self, tests)
        code = child.run_tests(plugin.files, plugin)
        return {"failed": plugin.failed, "code": code}

    def _alarm(self, seconds: float) -> None:
        """The default action of these signals ends the process, wherever it is: after so much time
        of the processor, or after ten times as much by the clock, if it waits for something."""
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, 10 * seconds)


class Stop:
    """Pytest plugin: runs these tests in this order; the first that fails ends the process."""

    def __init__(self, trials: Trials, tests: Iterable[str]) -> None:
        self.trials, self.tests = trials, list(tests)
        self.files = list(dict.fromkeys(t.partition("::")[0] for t in self.tests))

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        known = {item.nodeid: item for item in items}
        chosen: dict[str, Any] = {}
        for test in self.tests:
            # a mutant may rename the cases of a test: then all of them are run
            same = [known[test]] if test in known else [
                i for i in items if i.nodeid.partition("[")[0] == test.partition("[")[0]
            ]  # fmt: skip
            chosen |= {item.nodeid: item for item in same}
        items[:] = chosen.values()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        expected = self.trials.map.times.get(nodeid, 0.0)
        self.trials._alarm(max(self.trials.limit, 10 * expected))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.fail(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.fail(f"{report.nodeid} (import)")

    def fail(self, test: str) -> None:
        child.reply({"killed": test})


class Keep(Stop):
    """Runs all of its tests and keeps the names of those that fail."""

    def __init__(self, trials: Trials, tests: Iterable[str]) -> None:
        super().__init__(trials, tests)
        self.failed: list[str] = []

    def fail(self, test: str) -> None:
        self.failed.append(test)
