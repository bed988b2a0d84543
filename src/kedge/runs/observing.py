"""Follow a run from its start to its end: what loggers are to a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from kedge.runs.config import Config
from kedge.runs.result import Result
from kedge.runs.rounds import Watch


class Observer(Protocol):
    """Is told of one run: its start, every round of every seed, its end."""

    def start(self, config: Config, folder: Path | None) -> None:
        """The run begins; its folder is None if it is not saved."""

    def log(self, seed: int, record: dict[str, Any]) -> None:
        """A round has ended."""

    def end(self, result: Result | None) -> None:
        """The run has ended; None if it was interrupted or failed."""


Observe = Callable[[], Observer]  # one observer per run


class Followed:
    """A run that is followed; its ``result`` is told to the observer at the end."""

    def __init__(self, observer: Observer | None, watch: Watch | None) -> None:
        self._observer, self._watch = observer, watch
        self.result: Result | None = None

    def watch(self, seed: int, record: dict[str, Any]) -> bool | None:
        """Tell both of a round; only ``watch`` may stop the training."""
        if self._observer is not None:
            self._observer.log(seed, record)
        return self._watch(seed, record) if self._watch is not None else None


@contextmanager
def followed(
    observe: Observe | None, config: Config, folder: Path | None, watch: Watch | None
) -> Iterator[Followed]:
    """Follow a run; its observer is told of the end, whatever happens."""
    observer = observe() if observe is not None else None
    run = Followed(observer, watch)
    if observer is not None:
        observer.start(config, folder)
    try:
        yield run
    finally:
        if observer is not None:
            observer.end(run.result)
