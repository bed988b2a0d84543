"""All runs below a folder. Folders that have not changed are not listed again."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kedge.board.entry import CONFIG, SETTLED_S, Entry
from kedge.board.files import Reader

MAX_DEPTH, MAX_FOLDERS = 8, 20_000
MAX_OPEN = 200  # runs at rest whose metrics stay in memory
REPRODUCTION = ".runs"  # the one hidden folder that holds runs
LISTINGS = {"compare.json": "compare", "sweep.json": "sweep"}


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
            own = "reproduce" if name == REPRODUCTION or kind == "reproduce" else folder.kind
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
                    folder.kind = LISTINGS[one.name]
                elif one.name.startswith(".") and one.name != REPRODUCTION:
                    continue
                elif one.is_dir(follow_symlinks=False):
                    folder.subfolders.append(one.name)
        folder.subfolders.sort()
