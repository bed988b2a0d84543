"""The pace of runs, and the time that is left."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

RECENT_ROUNDS = 10  # of every seed; the pace is their mean


class Pace:
    """Estimates the seconds of a round and those that are left, from the times at which rounds end.

    Several seeds may train at once, so rounds end in bursts: times are compared over multiples of
    the number of seeds. A run counts by its own recent rounds; the first one, with its plan and
    compilation, does not count once there are others. Runs that have not begun count as the mean of
    all rounds so far. Rounds of a run that ended early, or were done before, are not waited for.

    Args:
        total: rounds of all runs and seeds.
        start: the time at the start, in seconds.
    """

    def __init__(self, total: int, start: float) -> None:
        self.total, self.start = total, start
        self._now, self._shown = start, 0  # time and number of the rounds that ended
        self._lengths: dict[Hashable, int] = {}  # rounds of all seeds, by run
        self._rounds: dict[tuple[Hashable, int], int] = {}  # by run and seed
        self._times: deque[float] = deque()
        self._seeds = 1
        self._run: Hashable = None
        self._spent: list[float] = []  # seconds of the rounds of this run, by themselves

    def ended(
        self,
        now: float,
        run: Hashable,
        seed: int,
        round: int,
        rounds: int,
        seeds: int,
        seconds: float = 0.0,
        eval_every: int = 1,
    ) -> None:
        """A round has ended.

        Args:
            now: the time in seconds.
            run: the run that it belongs to.
            seed: of the run.
            round: its number, from 1.
            rounds: of the run, per seed.
            seeds: number of seeds of the run, or of runs that train together.
            seconds: that the round took by itself, if this is known.
            eval_every: rounds between two tests, which take time, too.
        """
        if run != self._run:
            self._run, self._spent = run, []
            window = max(RECENT_ROUNDS, 2 * eval_every)
            self._times = deque(maxlen=window * seeds + 1)
        self._seeds = seeds
        self._lengths[run], self._rounds[run, seed] = rounds * seeds, round
        self._times.append(now)
        self._spent.append(seconds)
        self._now, self._shown = now, self._shown + 1

    def skip(self, run: Hashable, rounds: int) -> None:
        """A run was done before: its rounds are not waited for."""
        self._lengths.setdefault(run, rounds)

    @property
    def done(self) -> int:
        """Rounds that are done or not to come."""
        earlier = sum(length for run, length in self._lengths.items() if run != self._run)
        return earlier + self._own

    @property
    def _own(self) -> int:
        """Rounds of the current run that are done."""
        return sum(n for (run, _), n in self._rounds.items() if run == self._run)

    @property
    def seconds(self) -> float:
        """Seconds of a round of one seed; 0 if unknown."""
        bursts = (len(self._times) - 1) // self._seeds
        if bursts < 1:
            return sum(self._spent) / max(1, len(self._spent))
        count = bursts * self._seeds
        return (self._times[-1] - self._times[-1 - count]) / count

    @property
    def left(self) -> float | None:
        """Seconds that are left, from the last round that ended; None if unknown."""
        if not self._shown or not self.seconds:
            return None
        own = self._lengths[self._run] - self._own
        later = self.total - sum(self._lengths.values())
        mean = (self._now - self.start) / self._shown
        return own * self.seconds + max(0, later) * mean
