"""Progress of a run on stderr: a live bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from kedge.report import units
from kedge.report.pace import Pace
from kedge.runs.config import Config
from kedge.runs.headline import in_words

BAR_WIDTH = 12
MAX_SILENCE_S = 60.0  # without a terminal, a line is printed at least so often
FIRST_SILENCE_S = 10.0  # and the first one, with the remaining time, after this


class Remaining(ProgressColumn):
    """The time that is left. It counts down between two rounds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self.clock = clock

    def render(self, task: Task) -> Text:
        end = task.fields["end"]
        return Text("" if end is None else f"ETA {units.clock(end - self.clock())}", "cyan")


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
        speed = units.pace(self.pace.seconds)
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
            end = "" if left is None else f"ETA {units.clock(left)}"
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
