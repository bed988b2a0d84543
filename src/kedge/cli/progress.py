"""Progress of a run on stderr: a live bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from kedge.history.metric import COMPANIONS, KNOWN
from kedge.history.read import measure_of
from kedge.report import text
from kedge.settings import Config

if TYPE_CHECKING:
    from kedge.runs.train import TrainingJob

BAR_WIDTH = 12
MAX_SILENCE_S = 60.0  # without a terminal, a line is printed at least so often
FIRST_SILENCE_S = 10.0  # and the first one, with the remaining time, after this
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


class Remaining(ProgressColumn):
    """The time that is left. It counts down between two rounds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self.clock = clock

    def render(self, task: Task) -> Text:
        end = task.fields["end"]
        return Text("" if end is None else f"ETA {text.clock(end - self.clock())}", "cyan")


class Watcher:
    """Shows round, metric, loss, speed and remaining time of one or several runs.

    Args:
        total: rounds of all runs and seeds together.
        console: to print to.
        names: of the runs of a comparison, in their order.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        total: int,
        console: Console | None = None,
        names: Sequence[str] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.console = console or Console(stderr=True)
        self.names, self.clock = list(names), clock
        self.pace = Pace(total, clock())
        self.live = self.console.is_terminal
        self._printed, self._silence = clock(), FIRST_SILENCE_S
        room = max(20, self.console.width - BAR_WIDTH - 28)  # beside speed and remaining time
        self.bar = Progress(
            BarColumn(bar_width=BAR_WIDTH),
            Remaining(clock),
            TextColumn("{task.fields[speed]}"),
            TextColumn("{task.description}", table_column=Column(no_wrap=True, max_width=room)),
            console=self.console,
            transient=True,
            disable=not self.live,
        )
        self.task = self.bar.add_task("building", total=total, speed="", end=None)

    def __enter__(self) -> Watcher:
        self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bar.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Without the bar, so that it does not run into what is printed to standard output."""
        if self.live:
            self.bar.stop()
        yield
        if self.live:
            self.bar.start()

    def report(self, line: str) -> None:
        """Print a line above the progress bar."""
        self.console.print(line, style="dim", highlight=False, soft_wrap=True)

    def watch(self, job: TrainingJob, seed: int, record: dict[str, Any]) -> None:
        """Show a round of a job: the callback of a training."""
        self.show(job.config, seed, record, job.name if job.values else "", job.name)

    def show(
        self,
        config: Config,
        seed: int,
        record: dict[str, Any],
        setting: str = "",
        name: str = "",
    ) -> None:
        """Show a round: the ``watch`` callback of a run, after its configuration; ``name`` is the
        name of the run if it is not the method.

        Without a terminal, five lines are printed per seed; for a setting of a sweep, one; one
        after ten seconds, and then after every minute of silence.
        """
        name = setting or name or config.method
        now, left = self._advance(config, seed, record, setting, name), self.pace.left
        title, number = self._title(name), f"{record['round']}/{config.rounds}"
        parts = in_words(config, record)
        parts.append(f"loss {record.get('loss', record['train_loss']):.3f}")
        speed = text.pace(self.pace.seconds)
        self.bar.update(
            self.task,
            completed=self.pace.done,
            description="  ".join([title, number, *parts]),
            speed=speed,
            end=None if left is None else now + left,
        )
        interval = config.rounds if setting else max(1, config.rounds // 5)
        is_due = record["round"] % interval == 0 or record["round"] == config.rounds
        if not self.live and (is_due or now - self._printed >= self._silence):
            self._printed, self._silence = now, MAX_SILENCE_S
            end = "" if left is None else f"ETA {text.clock(left)}"
            parts = [title, f"seed {seed}", f"round {number}", *parts, speed, end]
            line = "  ".join(part for part in parts if part)
            self.console.print(line, highlight=False, soft_wrap=True)

    def _advance(
        self, config: Config, seed: int, record: dict[str, Any], setting: str, name: str
    ) -> float:
        """Count a round; returns the time. Settings of a sweep train together: they are one run."""
        now, every = self.clock(), len(config.seeds)
        run = "" if setting else name
        if setting:
            every = max(1, self.pace.total // config.rounds)
            seed = hash((setting, seed))
        elif name in self.names:
            for earlier in self.names[: self.names.index(name)]:
                self.pace.skip(earlier, config.rounds * every)
        self.pace.ended(
            now, run, seed, record["round"], config.rounds, every,
            record.get("seconds", 0.0), config.eval_every,
        )  # fmt: skip
        return now

    def _title(self, name: str) -> str:
        """The run, and which of how many it is."""
        if len(self.names) > 1 and name in self.names:
            return f"{name} ({self.names.index(name) + 1} of {len(self.names)})"
        return name


def in_words(config: Config, record: Mapping[str, Any]) -> list[str]:
    """The headline of a tested round for the progress line; empty without a test.

    >>> in_words(Config(), {"accuracy": 87.5, "imbalanced": 0.875, "balanced_accuracy": 50.0})
    ['accuracy 87.50 %', 'balanced accuracy 50.00 %']
    """
    from kedge.runs.build import is_personal

    metric = measure_of(vars(config), list(record))
    if metric.name not in record:
        return []
    personal = "personal_mean" in record and is_personal(config)
    prefix = "personal_" if personal else ""
    value = record["personal_mean"] if personal else record[metric.name]
    words = [f"{metric.title} {metric.text(value)}"]
    if "imbalanced" in record and metric.name == "accuracy":
        found = {name: record.get(prefix + name, math.nan) for name in COMPANIONS}
        words += [f"{KNOWN[n].title} {KNOWN[n].text(v)}" for n, v in found.items() if v == v]
    if personal:
        words.append(f"global {metric.text(record[metric.name])}")
    elif "personal_mean" in record:
        words.append(f"clients {metric.text(record['client_mean'])}")
    return words
