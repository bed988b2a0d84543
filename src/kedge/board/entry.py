"""One run as the board shows it: settings, state, progress, headline, notes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kedge.board import headline
from kedge.board.files import Reader, Stamp, stamp
from kedge.board.tail import Tail
from kedge.runs.header import HEADER, Header, MetricInfo, header_of
from kedge.runs.lock import is_locked
from kedge.runs.notes import NOTES, Notes, parse_notes
from kedge.runs.numbers import Series, counted
from kedge.runs.stopping import FAILED, INTERRUPTED, STOP, failures

CONFIG, RESULT, LOG, LOCK = "config.toml", "result.json", "log.txt", ".lock"
ENVIRONMENT, METRICS, FEDERATION = "environment.json", "metrics.jsonl", "federation.json"
#: A folder whose time is younger may change again without a new time.
SETTLED_S = 2.0
MAX_LOG = 65_536  # bytes of its end that are read
QUIET_S = 60.0  # without locks, a run whose files are older counts as ended
RECENT = 10  # rounds that the remaining time is estimated from
SPARK = 40  # points of a small curve
LIVE = ("starting", "training", "stopping")
NONE: array[float] = array("d")
UNLOCKED = None if os.name == "nt" else False  # without a file; Windows has no such locks


class Entry:
    """A run in a folder. :meth:`refresh` reads what has changed, :meth:`row` says what is shown.

    Args:
        path: the folder.
        relative: its path below the folder of the board, with ``/``.
        kind: ``run``, ``compare``, ``sweep`` or ``reproduce``: the command that made it.
    """

    def __init__(self, path: Path, relative: str, kind: str = "run") -> None:
        self.path, self.relative, self.kind = path, relative, kind
        self.id = hashlib.blake2b(os.fsencode(relative), digest_size=8).hexdigest()
        self.config: dict[str, Any] = {}
        self.result: dict[str, Any] = {}
        self.header: Header | None = None
        self.notes = Notes()
        self.reason = ""
        self.failures: dict[int, str] = {}  # why seeds ended before their last round
        self.state = ""  # not known yet
        self.started = 0.0
        self.tails: dict[int, Tail] = {}
        self._mtime_ns: int | None = None
        self._stamps: dict[str, Stamp | None] = {}
        self.names: set[str] = set()  # of its files and folders

    # -- reading ------------------------------------------------------------------------------

    def refresh(self, reader: Reader) -> bool:
        """Look again; returns whether anything changed.

        A run that rests costs one look at its folder. One with a lock is asked who holds it, and
        one that trains has its metrics read on.

        Raises:
            OSError: the folder is gone.
        """
        found = os.lstat(self.path)
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(str(self.path))
        changed = False
        if found.st_mtime_ns != self._mtime_ns:
            changed = self._list(reader)
            settled = time.time() - found.st_mtime_ns / 1e9 > SETTLED_S
            self._mtime_ns = found.st_mtime_ns if settled else None
        before = self.state
        locked = is_locked(self.path) if LOCK in self.names else UNLOCKED
        is_new, has_result = before == "", bool(self.result)
        resumed = (changed and bool(self.tails)) or before in LIVE  # it may have gone on meanwhile
        if LOCK in self.names or resumed or (not has_result and (is_new or locked is None)):
            changed |= self._read_metrics(reader)
        if not has_result:
            changed |= self._read_log(reader)
        self.state = self._state(locked)
        return changed or self.state != before

    @property
    def is_run(self) -> bool:
        """Whether the folder has the settings of a run."""
        config = self.config
        return (
            isinstance(config.get("method"), str)
            and isinstance(config.get("data"), str)
            and type(config.get("rounds")) is int
            and bool(self.seeds)
        )

    @property
    def is_live(self) -> bool:
        return self.state in LIVE

    @property
    def name(self) -> str:
        """The relative path as text that can be encoded."""
        return os.fsencode(self.relative).decode(errors="replace")

    @property
    def seeds(self) -> list[int]:
        seeds = self.config.get("seeds")
        found = seeds if isinstance(seeds, list) else []
        return [seed for seed in found if type(seed) is int and seed >= 0]

    @property
    def rounds(self) -> int:
        return max(1, int(self.config["rounds"]))

    def _list(self, reader: Reader) -> bool:
        """Read the small files that are new or have changed."""
        with os.scandir(self.path) as listing:
            names = {entry.name for entry in listing}
        changed = names != self.names
        self.names = names
        for name in (CONFIG, HEADER, RESULT, NOTES, ENVIRONMENT):
            found = stamp(self.path / name) if name in names else None
            if name in self._stamps and self._stamps[name] == found:
                continue
            self._stamps[name] = found
            changed = True
            if name == CONFIG:
                self.config = reader.toml(self.path / CONFIG) if found else {}
            elif name == HEADER:
                self.header = header_of(reader.json(self.path / HEADER))
            elif name == RESULT:
                self.result = reader.json(self.path / RESULT) if found else {}
                self.state = self.state if found else ""  # look at everything again
            elif name == NOTES:
                self.notes = Notes()
                if found:
                    with contextlib.suppress(OSError):
                        self.notes = parse_notes(reader.read(self.path / NOTES))
            elif found:
                self.started = found.mtime_ns / 1e9
        return changed

    def open_metrics(self, reader: Reader) -> dict[int, Tail]:
        """The metrics of all seeds, read up to now."""
        self._read_metrics(reader)
        return self.tails

    def forget_metrics(self) -> None:
        """Free the memory of a run at rest."""
        if self.result and not self.is_live:
            self.tails = {}

    def _read_metrics(self, reader: Reader) -> bool:
        changed = False
        for seed in self.seeds:
            name = f"seed-{seed}"
            if name not in self.names:
                continue
            folder = self.path / name
            if seed not in self.tails:
                if folder.is_symlink():
                    continue
                self.tails[seed] = Tail(folder / METRICS)
            changed |= self.tails[seed].refresh(reader)
        return changed

    def _read_log(self, reader: Reader) -> bool:
        """Why the run or its seeds ended, if the log is new; returns whether it is."""
        found = stamp(self.path / LOG)
        if self._stamps.get(LOG) == found:
            return False
        self._stamps[LOG], log = found, ""
        with contextlib.suppress(OSError):
            log = reader.read(self.path / LOG, -MAX_LOG).decode(errors="replace")
        self.failures = failures(log)
        texts = [f"seed {seed}: {why}" for seed, why in self.failures.items()]
        texts += [line.partition("  ")[2] for line in log.splitlines()[-1:]]
        self.reason = texts[0] if texts else ""
        return True

    # -- state --------------------------------------------------------------------------------

    def _state(self, locked: bool | None) -> str:
        if locked is None:  # no locks here: the age of the files must do
            latest = max((tail.updated for tail in self.tails.values()), default=self.started)
            locked = not self.result and time.time() - latest < QUIET_S
        if locked:
            if STOP in self.names:
                return "stopping"
            return "training" if any(map(len, self.tails.values())) else "starting"
        if self._has_diverged:
            return "diverged"
        if self.result or self.is_complete:
            return "finished"
        if self.reason.startswith(FAILED):
            return "failed"
        if LOCK in self.names and not self.reason.startswith(INTERRUPTED):
            return "killed"
        return "interrupted"

    @property
    def is_complete(self) -> bool:
        """Whether all seeds have had their last round."""
        return all(self._is_done(self.tails.get(seed)) for seed in self.seeds)

    @property
    def has_ended(self) -> bool:
        """Whether its numbers may be compared with those of others."""
        return bool(self.result) or self.is_complete or self._has_diverged

    @property
    def _has_diverged(self) -> bool:
        if self.result:
            return bool(self.result.get("diverged"))
        return bool(self.failures) or any(
            len(tail) and (tail.ends_with("diverged") or not tail.ends_with("train_loss"))
            for tail in self.tails.values()
        )

    @property
    def done(self) -> list[int]:
        """The last round of each seed."""
        if self.tails or not self.result:
            last = [self.tails[s].last("round") if s in self.tails else 0 for s in self.seeds]
            return [int(value or 0) for value in last]
        found = self.result.get("last_round")
        ended = found if isinstance(found, list) and len(found) == len(self.seeds) else None
        return [int(n) for n in ended] if ended else [self.rounds] * len(self.seeds)

    # -- what is shown ------------------------------------------------------------------------

    def columns(self) -> list[str]:
        """Names of all numbers in the records."""
        return list(dict.fromkeys(name for tail in self.tails.values() for name in tail.columns))

    @property
    def column(self) -> str:
        """The column of the headline."""
        return headline.column_of(self.header, self.config, self.result, self.columns())

    @property
    def metric(self) -> MetricInfo | None:
        """What the run is judged by."""
        return headline.metric(self.header, self.config, self.result, self.columns())

    def row(self) -> dict[str, Any]:
        """The run as plain data for the page."""
        shown = self.metric or MetricInfo("", "")
        updated = max((tail.updated for tail in self.tails.values()), default=0.0)
        result = self._stamps.get(RESULT)
        return {
            "id": self.id,
            "name": self.name,
            "kind": self.kind,
            "method": str(self.result.get("yardstick") or self.config["method"]),
            "data": self.config["data"],
            "state": self.state,
            "reason": "" if self.is_live or self.result else self.reason,
            "seeds": self.seeds,
            "rounds": self.rounds,
            "done": self.done,
            "metric": shown.name,
            "column": self.column,
            "label": headline.label(shown.name, self.column),
            "unit": shown.unit,
            "decimals": shown.decimals,
            "higher": shown.higher_is_better,
            "last": self._last(),
            "spark": self.spark(),
            "eta": self._eta(),
            "started": self.started,
            "updated": max(updated, result.mtime_ns / 1e9 if result else 0.0) or self.started,
            "seconds": _number(self.result.get("seconds")),
            "tags": list(self.notes.tags),
            "note": self.notes.note,
        }

    def _last(self) -> dict[str, Any] | None:
        """Mean, standard deviation and number of seeds of the headline."""
        found = self.result.get("last")
        if isinstance(found, Mapping) and not self.is_live:
            mean, sd, n = (_number(found.get(key)) for key in ("mean", "sd", "n"))
            return {"mean": mean, "sd": sd, "n": int(n or 1)}
        numbers, _ = counted(self.series(self.column))
        return statistics(numbers.values())

    def series(self, column: str) -> dict[int, Series]:
        """A column of each seed."""
        found = {}
        for seed in self.seeds:
            tail = self.tails.get(seed)
            if tail is None and seed not in self.failures:
                continue
            values: dict[int, float] = {}
            if tail is not None:
                pairs = zip(tail.columns["round"], tail.columns.get(column, ()), strict=False)
                values = {int(r): v for r, v in pairs if v == v}
            found[seed] = Series(values, self._is_done(tail), seed in self.failures)
        return found

    def _is_done(self, tail: Tail | None) -> bool:
        return tail is not None and (
            (tail.last("round") or 0) >= self.rounds or tail.ends_with("stopped")
        )

    def spark(self) -> list[float] | None:
        """A few points of the headline over rounds, of the seed that is furthest; None if its
        metrics are not read yet."""
        tails = [tail for tail in self.tails.values() if len(tail)]
        if not tails:
            return None
        values = [v for v in max(tails, key=len).columns.get(self.column, ()) if v == v]
        step = max(1.0, (len(values) - 1) / (SPARK - 1))
        count = min(SPARK, len(values))
        return [_short(values[min(len(values) - 1, round(i * step))]) for i in range(count)]

    def _eta(self) -> float | None:
        """Seconds that are left after the last round; None if unknown or at rest.

        The seconds of a record are its share of the time, also where seeds train together.
        """
        if not self.is_live:
            return None
        tails = [tail for tail in self.tails.values() if len(tail)]
        begun = [tail for tail in tails if (tail.last("round") or 0) < self.rounds] or tails
        recent = [v for tail in begun for v in tail.columns.get("seconds", NONE)[-RECENT:]]
        seconds = [v for v in recent if v == v]
        left = sum(self.rounds - done for done in self.done)
        return sum(seconds) / len(seconds) * left if seconds else None


def statistics(values: Iterable[float]) -> dict[str, Any] | None:
    """Mean, standard deviation and number of some values; None of the first two if one is NaN."""
    known = list(values)
    if not known:
        return None
    mean = sum(known) / len(known)
    spread = sum((value - mean) ** 2 for value in known)
    sd = (spread / (len(known) - 1)) ** 0.5 if len(known) > 1 else None
    return {"mean": _number(mean), "sd": _number(sd), "n": len(known)}


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e300 else None


def _short(value: float) -> float:
    return float(f"{value:.5g}")
