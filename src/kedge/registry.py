"""Names to things: parts, models, datasets and partitions are all found through one of these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Generic, TypeVar

from kedge.errors import KedgeError, UnknownName

T = TypeVar("T")


class Registry(Generic[T]):
    """A mapping from names to things that suggests the right name for a wrong one.

    >>> colours = Registry[str]("colour")
    >>> colours.add("red", "#f00")
    '#f00'
    >>> colours["rod"]
    Traceback (most recent call last):
    kedge.errors.UnknownName: no colour 'rod'. Did you mean 'red'?
    """

    def __init__(self, kind: str, see: str = "") -> None:
        self.kind, self.see = kind, see
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> T:
        if name in self._entries and self._entries[name] is not entry:
            raise KedgeError(f"{self.kind} {name!r} is registered twice; choose another name")
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
        return sorted(n for n in self._entries if fnmatchcase(n.lower(), pattern))

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            raise UnknownName(self.kind, name, sorted(self._entries), self.see)
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        return len(self._entries)
