"""All runs below a folder, read as they grow, and what changes as server-sent events.

Links are not followed, what is read is counted, and nothing is looked at while no page is open.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kedge.files import MAX_TOML_BYTES, open_file, parse_json, parse_toml
from kedge.history.experiment import EXPERIMENT, KINDS, RUNS, kind_of
from kedge.history.folder import (
    CONFIG,
    ENVIRONMENT,
    HEADER,
    LOG,
    METRICS,
    NOTES,
    PARTITION,
    RESULT,
    STATE,
    STOP,
    Notes,
    parse_notes,
)
from kedge.history.lock import is_locked
from kedge.history.read import (
    DEFAULTS,
    HEAD,
    Header,
    State,
    failure_of,
    header_of,
    make_run,
    partition_head,
    state_of,
    states_in_log,
)
from kedge.history.run import Columns, Run, Seed, Stat

MAX_BYTES = 64 * 2**20  # of one reading


class Stamp(NamedTuple):
    """What changes with a file."""

    inode: int
    size: int
    mtime_ns: int


class Reader:
    """Reads files, and counts: ``files`` opened and ``bytes`` read."""

    def __init__(self) -> None:
        self.files = self.bytes = 0

    def read(self, path: Path, start: int = 0, size: int = MAX_BYTES) -> bytes:
        """Bytes of a regular file from ``start``; from its end if that is negative.

        Raises:
            OSError: there is no such file, or it is a link, a pipe or a device.
        """
        with open_file(path, links=False) as file:
            self.files += 1
            if start:
                size = os.fstat(file.fileno()).st_size
                file.seek(start if start > 0 else max(0, size + start))
            content = file.read(size)
        self.bytes += len(content)
        return content

    def json(self, path: Path) -> dict[str, Any]:
        """An object in a JSON file; empty if there is none."""
        try:
            found = parse_json(self.read(path))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def toml(self, path: Path) -> dict[str, Any]:
        """The table in a TOML file; empty if there is none."""
        try:
            return parse_toml(self.read(path, size=MAX_TOML_BYTES).decode())
        except (OSError, ValueError):
            return {}


def stamp(path: Path) -> Stamp | None:
    """The stamp of a file; None if there is no such file, or if it is a link."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return Stamp(found.st_ino, found.st_size, found.st_mtime_ns)


# -- one run --------------------------------------------------------------------------------------

LOCK = ".lock"
#: A folder whose time is younger may change again without a new time.
SETTLED_S = 2.0
MAX_LOG = 65_536  # bytes of its end that are read
QUIET_S = 60.0  # without locks, a run whose files are older counts as ended
RECENT = 10  # rounds that the remaining time is estimated from
SPARK = 40  # points of a small curve
OVERLAP = 64  # bytes before the new ones, compared to see that the file is still the same
MAX_COLUMNS = 80
LIVE = ("starting", "training", "stopping")
UNLOCKED = None if os.name == "nt" else False  # without a file; Windows has no such locks


class Tail:
    """The columns of ``metrics.jsonl``, read as it is appended to.

    A file that was rewritten, as on resume, is read again from its start: ``epoch`` then grows.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.epoch = path, 0
        self._clear()

    def _clear(self) -> None:
        self.columns = Columns(keep_lists=False, most=MAX_COLUMNS)
        self._offset, self._end = 0, b""
        self._stamp: Stamp | None = None

    @property
    def updated(self) -> float:
        """When the file was last written, in seconds; 0 without a file."""
        return self._stamp.mtime_ns / 1e9 if self._stamp else 0.0

    def refresh(self, reader: Reader) -> bool:
        """Read what is new; returns whether anything is."""
        found = stamp(self.path)
        if found == self._stamp:
            return False
        if found is None or (self._stamp and found.inode != self._stamp.inode):
            self._start_again()
        if found is None:
            return True
        start = max(0, self._offset - OVERLAP)
        try:
            content = reader.read(self.path, start)
        except OSError:
            return False
        if content[: self._offset - start] != self._end:
            self._start_again()
            content = reader.read(self.path)
            start = 0
        fresh = content[self._offset - start :]
        complete = fresh[: fresh.rfind(b"\n") + 1]
        for record in records_of(complete):
            self.columns.append(record)
        self._offset += len(complete)
        consumed = content[: self._offset - start]
        self._end, self._stamp = consumed[-OVERLAP:], found
        return True

    def _start_again(self) -> None:
        self._clear()
        self.epoch += 1


def records_of(content: bytes) -> Iterator[dict[str, Any]]:
    """The records in complete lines; damaged lines are left out."""
    for line in content.split(b"\n"):
        if not line:
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        number = record.get("round") if isinstance(record, dict) else None
        if isinstance(number, int) and not isinstance(number, bool) and 0 < number < 2**53:
            yield record


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
        self.states: dict[int, State] = {}  # how seeds ended
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
            changed |= self._read_states(reader)
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

    def _read_states(self, reader: Reader) -> bool:
        """How the seeds ended, if that is new; returns whether it is."""
        own = [f"seed-{seed}/{STATE}" for seed in self.seeds if f"seed-{seed}" in self.names]
        found = {name: stamp(self.path / name) for name in (LOG, *own)}
        if all(self._stamps.get(name) == one for name, one in found.items()):
            return False
        self._stamps |= found
        folders = {seed: self.path / f"seed-{seed}" for seed in self.seeds}
        states = {
            seed: state_of(reader.json(folder / STATE))
            for seed, folder in folders.items()
            if not folder.is_symlink()
        }
        self.states = {seed: state for seed, state in states.items() if state is not None}
        if not self.states:  # a folder of kedge 0.1
            with contextlib.suppress(OSError):
                log = reader.read(self.path / LOG, -MAX_LOG).decode(errors="replace")
                self.states = states_in_log(log, self.seeds)
        return True

    # -- state --------------------------------------------------------------------------------

    def run(self, reader: Reader | None = None) -> Run:
        """The run with what is read of it; a reader also reads the hashes of its partitions, and
        the fingerprint of its data."""
        seeds = []
        for number in self.seeds:
            failed = failure_of(self.states.get(number))
            tail = self.tails.get(number)
            if tail is None and not failed:
                continue
            digest = self._partition_hash(number, reader) if reader is not None else ""
            columns = tail.columns if tail is not None else Columns()
            seeds.append(Seed(number, columns, digest, failed=failed))
        found = reader.json(self.path / ENVIRONMENT) if reader is not None else {}
        settings = DEFAULTS | self.config | {"seeds": self.seeds, "rounds": self.rounds}
        return make_run(self.path, settings, seeds, self.header, self.result, found)

    def _partition_hash(self, seed: int, reader: Reader) -> str:
        if seed not in self.tails:
            return ""
        try:
            return partition_head(reader.read(self.path / f"seed-{seed}" / PARTITION, 0, HEAD))[0]
        except OSError:
            return ""

    @property
    def reason(self) -> str:
        """Why the run ended before its last round; empty if it did not."""
        for seed, state in self.states.items():
            if state.name == "diverged":
                return f"seed {seed}: {state.reason}"
        ended = (s for s in self.states.values() if s.name in ("failed", "interrupted"))
        return next((f"{state.name}: {state.reason}" for state in ended), "")

    def _state(self, locked: bool | None) -> str:
        run = self.run() if self.is_run else None
        if locked is None:  # no locks here: the age of the files must do
            latest = max((tail.updated for tail in self.tails.values()), default=self.started)
            locked = not self.result and time.time() - latest < QUIET_S
        if locked:
            if STOP in self.names:
                return "stopping"
            return "training" if any(len(t.columns) for t in self.tails.values()) else "starting"
        if self.result.get("diverged") if self.result else run and run.diverged:
            return "diverged"
        if self.result or (run and run.is_complete):
            return "finished"
        names = {state.name for state in self.states.values()}
        if "failed" in names:
            return "failed"
        return "killed" if LOCK in self.names and "interrupted" not in names else "interrupted"

    @property
    def done(self) -> list[int]:
        """The last round of each seed."""
        if self.tails or not self.result:
            tails = [self.tails.get(seed) for seed in self.seeds]
            return [tail.columns.last_round if tail else 0 for tail in tails]
        found = self.result.get("last_round")
        ended = found if isinstance(found, list) and len(found) == len(self.seeds) else None
        return [int(n) for n in ended] if ended else [self.rounds] * len(self.seeds)

    # -- what is shown ------------------------------------------------------------------------

    def columns(self) -> list[str]:
        """Names of all numbers in the records."""
        tails = self.tails.values()
        return list(dict.fromkeys(n for tail in tails for n in ("round", *tail.columns.named)))

    def row(self) -> dict[str, Any]:
        """The run as plain data for the page."""
        run, result = self.run(), self._stamps.get(RESULT)
        updated = max((tail.updated for tail in self.tails.values()), default=0.0)
        return {
            "id": self.id,
            "name": self.name,
            "kind": self.kind,
            "method": run.name,
            "data": self.config["data"],
            "state": self.state,
            "reason": "" if self.is_live or self.result else self.reason,
            "seeds": self.seeds,
            "rounds": self.rounds,
            "done": self.done,
            "metric": run.measure.name,
            "column": run.column,
            "label": run.measure.name + WHOSE.get(run.headline, ""),
            "unit": run.measure.unit,
            "decimals": run.measure.decimals,
            "higher": run.measure.higher_is_better,
            "last": self._last(run),
            "spark": self.spark(),
            "eta": self._eta(),
            "started": self.started,
            "updated": max(updated, result.mtime_ns / 1e9 if result else 0.0) or self.started,
            "seconds": _number(self.result.get("seconds")),
            "tags": list(self.notes.tags),
            "note": self.notes.note,
        }

    def _last(self, run: Run) -> dict[str, Any] | None:
        """Mean, standard deviation and number of seeds of the headline; of a run at rest as its
        result says, since its metrics are not read."""
        found = self.result.get("last")
        if isinstance(found, Mapping) and not self.is_live:
            mean, sd, n = (_number(found.get(key)) for key in ("mean", "sd", "n"))
            return {"mean": mean, "sd": sd, "n": int(n or 1)}
        return plain_stat(run.last)

    def spark(self) -> list[float] | None:
        """A few points of the headline over rounds, of the seed that is furthest; None if its
        metrics are not read yet."""
        tails = [tail.columns for tail in self.tails.values() if len(tail.columns)]
        if not tails:
            return None
        found = max(tails, key=len).by_round(self.run().column).values()
        values = [v for v in found if math.isfinite(v)]
        step = max(1.0, (len(values) - 1) / (SPARK - 1))
        count = min(SPARK, len(values))
        return [_short(values[min(len(values) - 1, round(i * step))]) for i in range(count)]

    def _eta(self) -> float | None:
        """Seconds that are left after the last round; None if unknown or at rest.

        The seconds of a record are its share of the time, also where seeds train together.
        """
        if not self.is_live:
            return None
        tails = [tail.columns for tail in self.tails.values() if len(tail.columns)]
        begun = [tail for tail in tails if tail.last_round < self.rounds] or tails
        recent = [v for tail in begun for v in [*tail.by_round("seconds").values()][-RECENT:]]
        seconds = [v for v in recent if math.isfinite(v)]
        left = sum(self.rounds - done for done in self.done)
        return sum(seconds) / len(seconds) * left if seconds else None


def plain_stat(stat: Stat) -> dict[str, Any] | None:
    """Mean, standard deviation and number of some values; None of the first two if one is NaN."""
    if not stat.n:
        return None
    return {"mean": _number(stat.mean), "sd": _number(stat.sd), "n": stat.n}


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e300 else None


def _short(value: float) -> float:
    return float(f"{value:.5g}")


WHOSE = {"client": ", mean of clients", "personal": ", own models"}


# -- all runs ------------------------------------------------------------------------------------

MAX_DEPTH, MAX_FOLDERS = 8, 20_000
MAX_OPEN = 200  # runs at rest whose metrics stay in memory
LISTINGS = {EXPERIMENT, *(f"{kind}.json" for kind in KINDS)}


@dataclass
class _Folder:
    """A folder that is no run: its subfolders, and the command that made it."""

    mtime_ns: int | None = None
    subfolders: list[str] = field(default_factory=list)
    has_config: bool = False
    kind: str = ""


class Catalogue:
    """Runs below ``root``, by an identifier that says nothing about their place.

    Folders are walked without following links, so nothing outside is found, and a request can only
    name what was found. Methods may be called from several threads.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve(strict=True)
        self.title = str(root)
        self.reader = Reader()
        self.entries: dict[str, Entry] = {}
        self.is_cut = False  # whether there are more folders than are searched
        self._folders: dict[str, _Folder] = {}
        self._opened: OrderedDict[str, None] = OrderedDict()
        self._guard = threading.RLock()

    def refresh(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Look again: the rows that are new or have changed, and identifiers that are gone."""
        with self._guard:
            seen: dict[str, Entry] = {}
            changed: list[Entry] = []
            before, self._folders = self._folders, {}
            self._walk("", 0, "", seen, changed, before)
            gone = [name for name in self.entries if name not in seen]
            self.entries = seen
            return [entry.row() for entry in changed], gone

    def rows(self) -> list[dict[str, Any]]:
        """All runs as they were found at the last look."""
        with self._guard:
            return [entry.row() for entry in self.entries.values()]

    def get(self, identifier: str) -> Entry | None:
        """A run by its identifier; None if there is none, or no longer in its place."""
        with self._guard:
            entry = self.entries.get(identifier)
        if entry is None or os.path.realpath(entry.path) != str(entry.path):
            return None
        return entry

    def opened(self, identifier: str) -> Entry | None:
        """A run with its metrics read up to now."""
        entry = self.get(identifier)
        if entry is None:
            return None
        with self._guard:
            entry.open_metrics(self.reader)
            self._opened[entry.id] = None
            self._opened.move_to_end(entry.id)
            while len(self._opened) > MAX_OPEN:
                old = self.entries.get(self._opened.popitem(last=False)[0])
                if old is not None:
                    old.forget_metrics()
        return entry

    def _walk(
        self,
        relative: str,
        depth: int,
        kind: str,
        seen: dict[str, Entry],
        changed: list[Entry],
        before: dict[str, _Folder],
    ) -> None:
        path = self.root / relative if relative else self.root
        folder = before.get(relative) or _Folder()
        try:
            found = os.lstat(path)
            if not stat.S_ISDIR(found.st_mode):
                raise NotADirectoryError(str(path))
            if found.st_mtime_ns != folder.mtime_ns:
                self._list(path, folder)
                settled = time.time() - found.st_mtime_ns / 1e9 > SETTLED_S
                folder.mtime_ns = found.st_mtime_ns if settled else None
        except OSError:
            return
        self._folders[relative] = folder
        if folder.has_config and self._is_run(path, relative, kind, seen, changed):
            return
        self.is_cut = len(self._folders) >= MAX_FOLDERS
        if depth == MAX_DEPTH or self.is_cut:
            return
        for name in folder.subfolders:
            inner = f"{relative}/{name}" if relative else name
            own = "reproduce" if name == RUNS or kind == "reproduce" else folder.kind
            self._walk(inner, depth + 1, own, seen, changed, before)

    def _is_run(
        self, path: Path, relative: str, kind: str, seen: dict[str, Entry], changed: list[Entry]
    ) -> bool:
        """Whether a folder holds a run; it is then looked at."""
        entry = Entry(path, relative or ".", kind or "run")
        entry = self.entries.get(entry.id, entry)
        try:
            is_changed = entry.refresh(self.reader)
        except OSError:
            return False
        if not entry.is_run:
            return False
        seen[entry.id] = entry
        if is_changed or entry.id not in self.entries:
            changed.append(entry)
        return True

    def _list(self, path: Path, folder: _Folder) -> None:
        folder.subfolders, folder.has_config, folder.kind = [], False, ""
        with os.scandir(path) as listing:
            for one in listing:
                if one.name == CONFIG:
                    folder.has_config = True
                elif one.name in LISTINGS:
                    folder.kind = kind_of(path)
                elif one.name.startswith(".") and one.name != RUNS:
                    continue
                elif one.is_dir(follow_symlinks=False):
                    folder.subfolders.append(one.name)
        folder.subfolders.sort()


# -- pages that are open ---------------------------------------------------------------------------

PERIOD_S = 1.0  # between two looks
MAX_SHARE = 0.2  # of the time, spent on looking
PING_S = 15.0  # of silence, after which a comment is sent: a page that is gone is noticed


def dumped(value: Any) -> bytes:
    """Plain data as JSON in ASCII, whatever the names of runs are."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


class Live:
    """Looks at the runs once for all pages that are open, and tells each of them what changed."""

    def __init__(self, catalogue: Catalogue, period: float = PERIOD_S) -> None:
        self.catalogue, self.period = catalogue, period
        self.looks = 0
        self._pages: set[asyncio.Queue[bytes | None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def stream(self) -> AsyncIterator[bytes]:
        """All runs, then what changes, until the page or the board closes."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        await self._look()
        self._pages.add(queue)
        try:
            rows = await asyncio.to_thread(self.catalogue.rows)
            head = {"title": self.catalogue.title, "cut": self.catalogue.is_cut}
            yield _event("all", head | {"rows": rows, "now": time.time()})
            if self._task is None:
                self._task = asyncio.create_task(self._watch())
            while not self._closed:
                try:
                    message = await asyncio.wait_for(queue.get(), PING_S)
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                if message is None:
                    return
                yield message
        finally:
            self._pages.discard(queue)
            if not self._pages and self._task is not None:
                self._task.cancel()
                self._task = None

    async def look(self) -> None:
        """Look now, and tell all pages."""
        await self._look()

    def close(self) -> None:
        """End all streams."""
        self._closed = True
        for queue in self._pages:
            queue.put_nowait(None)

    async def _watch(self) -> None:
        spent = 0.0
        while True:
            await asyncio.sleep(max(self.period, spent * (1 / MAX_SHARE - 1)))
            begin = time.perf_counter()
            await self._look()
            spent = time.perf_counter() - begin

    async def _look(self) -> None:
        rows, gone = await asyncio.to_thread(self.catalogue.refresh)
        self.looks += 1
        if rows or gone:
            message = _event("change", {"rows": rows, "gone": gone, "now": time.time()})
            for queue in self._pages:
                queue.put_nowait(message)


def _event(name: str, data: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), dumped(data))
