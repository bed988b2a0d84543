"""Identities from papers, as small programs that yield what is expected and what was found.

An oracle is registered for a part's class (None: for FedAvg) and gets that class, so that it also
runs on a subclass or on a broken copy::

    @oracle(FedProx)
    def pulls_to_the_anchor(cls):
        yield Claim("gradient of the term", expected=..., got=...)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kedge.core.part import Part


@dataclass(frozen=True)
class Claim:
    """``got`` must equal ``expected`` within ``tolerance`` (absolute)."""

    what: str
    expected: float
    got: float
    tolerance: float = 1e-9

    @property
    def holds(self) -> bool:
        return abs(self.got - self.expected) <= self.tolerance

    def detail(self) -> str:
        return f"expected {self.expected:.6g}, got {self.got:.6g}"


Oracle = Callable[[Any], Iterable[Claim]]
_oracles: dict[type[Part] | None, list[Oracle]] = {}


def oracle(cls: type[Part] | None) -> Callable[[Oracle], Oracle]:
    """Register an oracle for a part (or for plain FedAvg)."""

    def add(fn: Oracle) -> Oracle:
        _oracles.setdefault(cls, []).append(fn)
        return fn

    return add


def oracles_of(part: Part | None) -> Iterator[tuple[str, Callable[[], Iterable[Claim]]]]:
    """``(name, claims)`` of every oracle that applies to a part."""
    owners = [None] if part is None else [c for c in type(part).__mro__ if c in _oracles]
    for owner in owners:
        for fn in _oracles.get(owner, []):
            yield fn.__name__.replace("_", " "), functools.partial(fn, type(part))
