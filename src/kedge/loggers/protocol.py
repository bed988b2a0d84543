"""What a logger is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from kedge.files import check_links, make_folder
from kedge.runs.result import Result
from kedge.settings import Config


@runtime_checkable
class Logger(Protocol):
    """Writes the rounds of one run somewhere. It may fail: the training goes on without it.

    A logger that keeps what it wrote before, when a run is resumed, has a fourth method
    ``logged(seed) -> int``: the last round that it has. Rounds up to it are not sent again, and
    later ones that the run had before are sent first, so that none is doubled or lost.
    """

    def start(self, config: Config, folder: Path | None) -> None:
        """Called before the first round; ``folder`` is the run's, None if it is not saved."""

    def log(self, seed: int, record: dict[str, Any]) -> None:
        """Called after every round with its metrics; ``record["round"]`` counts from 1."""

    def end(self, result: Result | None) -> None:
        """Called at the end, with None if the run was interrupted or failed."""


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record but for its round, those of an inner object as ``outer/inner``.

    >>> numbers({"round": 1, "accuracy": 50.0, "per_class": [1.0], "unseen": {"accuracy": 40.0}})
    {'accuracy': 50.0, 'unseen/accuracy': 40.0}
    """
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            inner = {k: v for k, v in value.items() if isinstance(v, (int, float))}
            found |= {f"{name}/{k}": float(v) for k, v in inner.items()}
        elif isinstance(value, (int, float)) and name != "round":
            found[name] = float(value)
    return found


def summary(result: Result) -> dict[str, float]:
    """The headline of a result, for trackers that have a place for it."""
    found = {f"{result.metric}_mean": result.last.mean}
    if result.last.sd is not None:
        found[f"{result.metric}_sd"] = result.last.sd
    return {name: value for name, value in found.items() if math.isfinite(value)}


def own_folder(folder: Path | None, name: str) -> Path:
    """Where a logger writes: ``RUN/log-NAME``; it is created if needed.

    Raises:
        ValueError: the run is not saved.
        KedgeError: it has links, through which a tracker would write elsewhere.
    """
    if folder is None:
        raise ValueError("the run has no folder; give it one with out=")
    path = folder / f"log-{name}"
    make_folder(path, inside=folder)
    check_links(path)
    return path
