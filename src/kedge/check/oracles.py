"""Oracles: functions that yield expected and actual values of an identity from a paper.

An oracle is registered for a part's class (None: FedAvg) and receives the class under test, so that
it also runs on subclasses and on faulty copies::

    @oracle(FedProx)
    def gradient_of_the_proximal_term(cls):
        yield Claim("gradient at w = 1", expected=..., got=...)

``kedge check`` prints the function's name and the claim: "gradient of the proximal term: gradient
at w = 1".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kedge.check.problems import on_engine
from kedge.core.part import Part


@dataclass(frozen=True)
class Claim:
    """``got`` must equal ``expected`` within the absolute ``tolerance``; ``what`` names both."""

    what: str
    expected: float
    got: float
    tolerance: float = 1e-9

    @property
    def holds(self) -> bool:
        """Whether ``got`` is within the tolerance; False for nan."""
        return abs(self.got - self.expected) <= self.tolerance

    def detail(self) -> str:
        """Expected and actual value, in words."""
        return f"expected {self.expected:.6g}, got {self.got:.6g}"


Oracle = Callable[[Any], Iterable[Claim]]
_oracles: dict[type[Part] | None, list[Oracle]] = {}


def oracle(cls: type[Part] | None) -> Callable[[Oracle], Oracle]:
    """Decorator that registers an oracle for a part, or for FedAvg (None).

    An oracle is a function of the part's class that yields a :class:`Claim` for each number.

    >>> from kedge.check.problems import position, quadratics
    >>> class Own(kedge.core.part.parts["fedprox"]):
    ...     pass
    >>> @oracle(Own)
    ... def the_first_step_feels_no_pull(cls):
    ...     run = quadratics((10.0,), (1.0,), lr=0.05, steps=1).simulate(cls(mu=4.0))
    ...     run.run_round()
    ...     yield Claim("w after one step", expected=0.5, got=position(run))
    >>> [claim.holds for claim in the_first_step_feels_no_pull(Own)]
    [True]
    """

    def add(fn: Oracle) -> Oracle:
        _oracles.setdefault(cls, []).append(fn)
        return fn

    return add


def oracles_of(part: Part | None) -> Iterator[tuple[str, Callable[[], Iterable[Claim]]]]:
    """``(name, claims)`` of every oracle that applies to a part; ``claims()`` runs it."""
    owners = [None] if part is None else [c for c in type(part).__mro__ if c in _oracles]
    for owner in owners:
        for fn in _oracles.get(owner, []):
            yield fn.__name__.replace("_", " "), functools.partial(fn, type(part))


def claims_on_engines(claims: Callable[[], Iterable[Claim]]) -> list[Claim]:
    """Run an oracle on both engines; a claim is the one that fails, if one does.

    Raises:
        KedgeError: the oracle cannot be run.
    """
    found = []
    for engine in ("loop", "vector"):
        with on_engine(engine):
            found.append(list(claims()))
    return [other if one.holds else one for one, other in zip(*found, strict=True)]
