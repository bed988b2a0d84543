"""The errors of kedge, as one tree. Each message says what is wrong, where, and what to do next.

::

    KedgeError
    ├── UnknownName         no part, preset, field, model, ... of that name; suggests near ones
    ├── FieldError          a field's value has the wrong type or is out of range
    │   └── SeveralErrors   several errors, listed together
    ├── GrammarError        a method, model or partition string cannot be parsed
    ├── IncompatibleError   parts, tasks and models that cannot be combined
    │   └── TwoAggregators  two parts define how updates are aggregated
    ├── ModelError          the model lacks a head or a cut that a part needs, or rejects its input
    ├── DataError           a file or array cannot be used as data
    │   └── SeveralDataErrors  several of these in one dataset, listed together
    ├── PartitionError      a partition cannot be drawn
    ├── LoadError           a user's Python file cannot be loaded, with file and line
    ├── HookError           a part's hook failed, with hook, round, client and step
    ├── NotFinite           a loss became NaN or infinite, with the value of every term
    ├── OutOfMemory         memory ran out, with what to lower
    ├── WireError           a message differs from what its receiver expects
    ├── TermsError          terms of a federation cannot be parsed, or differ between its members
    ├── Paused              too few members of a federation replied; the run is saved
    ├── CheckFailed         a part violates a law or an identity of its paper
    └── Interrupted         interrupt (Ctrl-C); the current round was finished and saved
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KedgeError(Exception):
    """Base class of all errors that kedge raises on purpose."""


class UnknownName(KedgeError):
    """A name that is not registered; the message suggests the nearest ones.

    Args:
        kind: what the name should be, such as ``"part"``.
        name: the unknown name.
        known: the names that exist.
        see: a command that lists them.

    >>> raise UnknownName("part", "scafold", ["scaffold", "fedprox"], see="kedge list")
    Traceback (most recent call last):
    kedge.errors.UnknownName: no part 'scafold'. Did you mean 'scaffold'? See: kedge list
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], see: str = "") -> None:
        known = list(known)
        near = nearest(name, known)
        if near:
            hint = " Did you mean " + " or ".join(repr(n) for n in near) + "?"
        else:
            hint = " There are: " + (", ".join(known) if known else "none") + "."
        super().__init__(f"no {kind} {name!r}.{hint}" + (f" See: {see}" if see else ""))
        self.kind, self.name = kind, name
        self._args = (kind, name, known, see)

    def __reduce__(self) -> tuple[type, tuple[str, str, list[str], str]]:
        return type(self), self._args


class FieldError(KedgeError):
    """A value of the wrong type or out of range; ``field`` is its name if known."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class SeveralErrors(FieldError):
    """Several errors, raised together."""

    def __init__(self, errors: Iterable[KedgeError]) -> None:
        self.errors = list(errors)
        lines = "\n  ".join(str(error) for error in self.errors)
        super().__init__(f"{len(self.errors)} things are wrong:\n  {lines}")

    def __reduce__(self) -> tuple[type, tuple[list[KedgeError]]]:
        return type(self), (self.errors,)


class GrammarError(KedgeError):
    """A string that cannot be parsed."""


class IncompatibleError(KedgeError):
    """Parts, tasks or models that cannot be combined."""


class TwoAggregators(IncompatibleError):
    """Two parts that both define how client updates are aggregated."""


class ModelError(KedgeError):
    """A model that lacks what a part needs, or that rejects its input shape."""


class DataError(KedgeError):
    """A file or array that cannot be used as data."""


class SeveralDataErrors(DataError):
    """Several errors in one dataset, raised together; the message lists the first 20.

    ``advice`` is what to do about them, as a last line.
    """

    SHOWN = 20

    def __init__(self, errors: Iterable[DataError], advice: str = "") -> None:
        self.errors, self.advice = list(errors), advice
        lines = [str(error) for error in self.errors[: self.SHOWN]]
        more = len(self.errors) - len(lines)
        lines += [f"and {more} more"] if more else []
        text = f"{len(self.errors)} problems in the data:\n  " + "\n  ".join(lines)
        super().__init__(f"{text}\n{advice}" if advice else text)

    def __reduce__(self) -> tuple[type, tuple[list[DataError], str]]:
        return type(self), (self.errors, self.advice)


class PartitionError(KedgeError):
    """A partition that cannot be drawn."""


class LoadError(KedgeError):
    """A user's Python file that cannot be loaded or registers nothing."""


class HookError(KedgeError):
    """A hook of a part that raised or returned the wrong thing."""


class NotFinite(KedgeError):
    """A loss that became NaN or infinite."""


class OutOfMemory(KedgeError):
    """Memory that ran out."""


class WireError(KedgeError):
    """A message that differs from what its receiver expects."""


class TermsError(KedgeError):
    """Terms of a federation that cannot be parsed, or data that violate them."""


class Paused(KedgeError):
    """Too few members of a federation replied. The run is saved and can be resumed."""


class CheckFailed(KedgeError):
    """A part that violates a law or an identity of its paper."""


class Interrupted(KedgeError):
    """Interrupt (Ctrl-C). The current round was finished and saved."""


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Up to two known names similar to ``name``, the most similar first."""
    lowered = {k.lower(): k for k in known}
    return [lowered[m] for m in difflib.get_close_matches(name.lower(), lowered, n=2, cutoff=0.6)]
