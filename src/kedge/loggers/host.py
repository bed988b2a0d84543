"""Run loggers beside a training that they cannot disturb."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from kedge.errors import DataError, FieldError, KedgeError, UnknownName
from kedge.history.folder import read_records
from kedge.loggers.protocol import Logger
from kedge.runs.result import Result
from kedge.runs.train import Observe
from kedge.settings import Config

Given = str | Logger | Callable[[], Logger]


#: The module and the class of each logger of kedge. All but the first need the package that is
#: called as they are.
KNOWN = {
    "csv": ("kedge.loggers.csv_file", "CSV"),
    "tensorboard": ("kedge.loggers.tensor_board", "TensorBoard"),
    "mlflow": ("kedge.loggers.mlflow_runs", "MLflow"),
    "wandb": ("kedge.loggers.wandb_runs", "WandB"),
}


def observer(
    log: str | Iterable[Given] | None, saved: bool, several: bool = False
) -> Observe | None:
    """What makes the loggers of each run; None without loggers.

    Args:
        log: names, in one text with commas or in a list; in a list also classes, functions that
            make a logger, and loggers.
        saved: whether the runs have folders, which the loggers of kedge write to.
        several: whether runs train at the same time, so that each needs a logger of its own.

    Raises:
        UnknownName: there is no logger of that name.
        KedgeError: a package is missing, or the run is not saved.
        FieldError: something is no logger, or one logger would get several runs at once.
    """
    items: list[Given] = [*log.split(",")] if isinstance(log, str) else list(log or ())
    items = [item.strip() if isinstance(item, str) else item for item in items]
    makers = [_maker(item, saved, several) for item in items if item != ""]
    return (lambda: Host([(name, make()) for name, make in makers])) if makers else None


def _maker(item: Given, saved: bool, several: bool) -> tuple[str, Callable[[], Logger]]:
    if isinstance(item, str):
        if item not in KNOWN:
            raise UnknownName("logger", item, KNOWN)
        if item != "csv" and importlib.util.find_spec(item) is None:
            raise KedgeError(f"the logger {item} needs {item}: pip install 'kedge[{item}]'")
        if not saved:
            raise KedgeError(f"the logger {item} writes to the folder of the run; give one: out=")
        module, name = KNOWN[item]
        return item, lambda: getattr(importlib.import_module(module), name)()
    if isinstance(item, type) or not isinstance(item, Logger):
        if not callable(item):
            raise FieldError(f"{item!r} is no logger: it lacks start, log or end", "log")
        return getattr(item, "__name__", "logger"), item
    if several:
        raise FieldError("the runs of a sweep train together: give the class of a logger", "log")
    return type(item).__name__, lambda: item


class Host:
    """Tells some loggers of a run. They are started with the first round.

    A logger that raises is left out from there on, with a warning.
    """

    def __init__(self, loggers: Sequence[tuple[str, Logger]]) -> None:
        self.loggers = list(loggers)
        self.config: Config | None = None
        self.folder: Path | None = None
        self._is_started = False
        self._logged: dict[tuple[int, int], int] = {}  # (logger, seed) -> its last round

    def start(self, config: Config, folder: Path | None) -> None:
        """Remember what is followed."""
        self.config, self.folder = config, folder

    def log(self, seed: int, record: dict[str, Any]) -> None:
        """Pass a round on."""
        self._start()
        for name, logger in list(self.loggers):
            with self._guarded(name, logger):
                self._send(logger, seed, record)

    def end(self, result: Result | None) -> None:
        """Close the loggers. Of a run that was complete before they get what they lack."""
        if result is not None:
            self._start()
        if not self._is_started:
            return
        for name, logger in list(self.loggers):
            with self._guarded(name, logger):
                if result is not None and hasattr(logger, "logged"):
                    for seed, records in zip(result.config.seeds, result.records, strict=True):
                        if records and (id(logger), seed) not in self._logged:
                            self._send(logger, seed, records[-1])
                logger.end(result)
        self.loggers = []

    def _start(self) -> None:
        if self._is_started or self.config is None:
            return
        self._is_started = True
        for name, logger in list(self.loggers):
            with self._guarded(name, logger):
                logger.start(self.config, self.folder)

    def _send(self, logger: Logger, seed: int, record: dict[str, Any]) -> None:
        key = id(logger), seed
        if key not in self._logged:
            self._logged[key] = self._catch_up(logger, seed, record["round"])
        if record["round"] > self._logged[key]:
            logger.log(seed, record)
            self._logged[key] = record["round"]

    def _catch_up(self, logger: Logger, seed: int, number: int) -> int:
        """Send the rounds before this one that a logger lacks; returns its last round."""
        ask = getattr(logger, "logged", None)
        if ask is None:
            return number - 1
        last = int(ask(seed))
        earlier: list[dict[str, Any]] = []
        if self.folder is not None and last < number - 1:
            with contextlib.suppress(DataError):
                earlier = read_records(self.folder / f"seed-{seed}" / "metrics.jsonl")
        for record in earlier:
            if last < record["round"] < number:
                logger.log(seed, record)
        return last

    @contextlib.contextmanager
    def _guarded(self, name: str, logger: Logger) -> Any:
        try:
            yield
        except Exception as error:  # noqa: BLE001  (whatever a tracker raises)
            self.loggers = [one for one in self.loggers if one[1] is not logger]
            with contextlib.suppress(Exception):
                logger.end(None)
            first = (str(error).strip().splitlines() or [""])[0][:200]
            warnings.warn(
                f"the logger {name} has failed ({type(error).__name__}: {first}); the run goes on "
                "without it",
                stacklevel=2,
            )
