"""Progress of a run on stderr: a live bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from kedge.runs.config import Config
from kedge.runs.headline import in_words


class Watcher:
    """Shows round, metric, loss, speed and remaining time of one or several runs.

    ``total`` is the number of rounds of all runs and seeds together.
    """

    def __init__(self, total: int, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.total, self.done, self.start = total, 0, time.perf_counter()
        self.live = self.console.is_terminal
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.live,
        )
        self.task = self.bar.add_task("building", total=total, speed="")

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

    def report(self, line: str) -> None:
        """Print a line above the progress bar."""
        self.console.print(line, style="dim", highlight=False, soft_wrap=True)

    def show(self, config: Config, seed: int, record: dict[str, Any], setting: str = "") -> None:
        """Show a round: the ``watch`` callback of a run, after its configuration.

        Without a terminal, five lines are printed per seed; for a setting of a sweep, one.
        """
        self.done += 1
        elapsed = time.perf_counter() - self.start
        parts = [
            f"{setting or config.method}  seed {seed}  round {record['round']}/{config.rounds}"
        ]
        parts += in_words(config, record)
        parts.append(f"loss {record.get('loss', record['train_loss']):.3f}")
        speed = f"{self.done / elapsed:.1f} rounds/s"
        self.bar.update(self.task, completed=self.done, description="  ".join(parts), speed=speed)
        interval = config.rounds if setting else max(1, config.rounds // 5)
        if not self.live and (record["round"] % interval == 0 or record["round"] == config.rounds):
            self.console.print("  ".join(parts) + f"  {speed}", highlight=False, soft_wrap=True)
