"""Names to things: parts, models, partitions and tasks are all found through one of these.

A registry fills itself at its first look-up: it imports kedge's own module that registers the
built-in things, then the entry points of its group, through which other distributions add theirs::

    [project.entry-points."kedge.parts"]
    tether = "my_package.tether"         # a module that registers the part when it is imported

So nothing has to be imported for its side effect, and ``core`` imports nothing that lies above it.
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
    """A mapping from names to things that suggests the right name for a wrong one.

    ``kind`` is what an entry is called in messages and ``see`` the command that lists them all.
    ``module`` is imported, and the entry points of ``group`` are loaded, at the first look-up.

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
        """Register ``entry``; a name that is taken raises :class:`KedgeError`."""
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
        self._entries.pop(name, None)

    def match(self, pattern: str = "*") -> list[str]:
        """Names that contain the pattern, or match it where it has wildcards; sorted."""
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
            with self._lock:  # other threads wait; a look-up while it is being filled goes through
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
"""Every registry and name that was added, in order: what a file registers is the end of it."""


@functools.cache
def load_group(group: str) -> None:
    """Load the entry points of a group, once in a process. One that fails is left out with a
    warning that names its distribution."""
    for point in sorted(entry_points(group=group), key=lambda p: (p.name, p.value)):
        try:
            point.load()
        except (Exception, SystemExit) as error:  # noqa: BLE001  (it is not ours)
            owner = f"{point.dist.name} {point.dist.version}" if point.dist else "a distribution"
            warnings.warn(
                f"{owner}: its entry point {point.name} = {point.value} ({group}) failed and is "
                f"left out: {type(error).__name__}: {error}. Update or uninstall {owner}",
                stacklevel=2,
            )
