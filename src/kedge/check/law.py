"""What all laws share: the error of a law that does not hold, and the engines to test."""

from __future__ import annotations

from kedge.engines import engines

REFERENCE = "reference"  # the engine that all others must agree with


class LawViolation(Exception):
    """A law does not hold; the message gives the reason."""


def tested_engines() -> list[str]:
    """Names of all engines except the reference."""
    return [name for name in engines if name != REFERENCE]
