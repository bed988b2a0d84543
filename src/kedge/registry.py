"""Registries: parts, models, partitions and tasks by name.

A registry is filled at its first look-up. It imports the module of kedge that registers the
built-in entries, then loads the entry points of its group, where other distributions add theirs::

    [project.entry-points."kedge.parts"]
    tether = "my_package.tether"         # importing this module registers the part

No module has to be imported for its side effect, and ``core`` imports no outer package.
"""

from __future__ import annotations

import functools
import importlib
import threading
import warnings
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from kedge.errors import KedgeError, UnknownName

T = TypeVar("T")


class Registry(Generic[T]):
    """A mapping from names to entries that suggests near names for an unknown one.

    Args:
        kind: what an entry is called in messages.
        see: the command that lists all entries.
        module: imported at the first look-up.
        group: entry points loaded at the first look-up.

    >>> colours = Registry[str]("colour")
    >>> colours.add("red", "#f00")
    '#f00'
    >>> colours["rod"]
    Traceback (most recent call last):
    kedge.errors.UnknownName: no colour 'rod'. Did you mean 'red'?
    """

    def __init__(self, kind: str, see: str = "", *, module: str = "", group: str = "") -> None:
        self.kind, self.see = kind, see
        self._module, self._group = module, group
        self._entries: dict[str, T] = {}
        self._lock, self._filled = threading.RLock(), not (module or group)

    def add(self, name: str, entry: T) -> T:
        """Register ``entry`` and return it. A name already taken raises :class:`KedgeError`."""
        if name in self._entries and self._entries[name] is not entry:
            raise KedgeError(f"{self.kind} {name!r} is registered twice; choose another name")
        if name not in self._entries:
            additions.append((self, name))
        self._entries[name] = entry
        return entry

    def register(self, name: str) -> Callable[[T], T]:
        """``@registry.register("name")`` on a function or class."""
        return lambda entry: self.add(name, entry)

    def remove(self, name: str) -> None:
        """Remove a name; an unknown one is ignored."""
        self._entries.pop(name, None)

    def match(self, pattern: str = "*") -> list[str]:
        """The sorted names that contain ``pattern``, or match it if it has wildcards."""
        pattern = pattern.lower()
        pattern = pattern if any(c in pattern for c in "*?[") else f"*{pattern}*"
        return sorted(n for n in self._known() if fnmatchcase(n.lower(), pattern))

    def __getitem__(self, name: str) -> T:
        known = self._known()
        if name not in known:
            raise UnknownName(self.kind, name, sorted(known), self.see)
        return known[name]

    def __contains__(self, name: object) -> bool:
        return name in self._known()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._known()))

    def __len__(self) -> int:
        return len(self._known())

    def _known(self) -> dict[str, T]:
        """All entries; the first call fills the registry."""
        if not self._filled:
            with self._lock:  # other threads wait; re-entrant look-ups do not
                if not self._filling:
                    self._filling = True
                    try:
                        if self._module:
                            importlib.import_module(self._module)
                        if self._group:
                            load_group(self._group)
                        self._filled = True
                    finally:
                        self._filling = False
        return self._entries

    _filling = False


additions: list[tuple[Registry[Any], str]] = []
"""All registrations of this process in order: (registry, name)."""


@functools.cache
def load_group(group: str) -> None:
    """Load the entry points of a group, once per process.

    An entry point that fails is skipped with a warning that names its distribution.
    """
    for point in sorted(entry_points(group=group), key=lambda p: (p.name, p.value)):
        try:
            point.load()
        except (Exception, SystemExit) as error:  # noqa: BLE001  (third-party code)
            owner = f"{point.dist.name} {point.dist.version}" if point.dist else "a distribution"
            warnings.warn(
                f"{owner}: its entry point {point.name} = {point.value} ({group}) failed and is "
                f"left out: {type(error).__name__}: {error}. Update or uninstall {owner}",
                stacklevel=2,
            )
