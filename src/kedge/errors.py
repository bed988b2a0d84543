"""Everything a user can get wrong, as one tree. Each message says what, where and what to do next.

::

    KedgeError
    ├── UnknownName         no part, preset, field, model, ... of that name (with the nearest ones)
    ├── FieldError          a field's value has the wrong type or is out of range
    │   └── SeveralErrors   several things are wrong at once, all of them listed
    ├── GrammarError        a method, model or partition string cannot be read
    ├── IncompatibleError   parts, tasks and models that cannot go together
    │   └── TwoAggregators  two parts both define how updates are combined
    ├── ModelError          the model lacks what a part needs (a head, a cut)
    ├── DataError           a file or array cannot be used as data
    ├── PartitionError      a partition that cannot be drawn
    ├── LoadError           a file of one's own that cannot be loaded, with file and line
    ├── HookError           a part's hook failed, with hook, round, client and step
    ├── NotFinite           a loss became NaN or infinite, with the value of every term
    ├── CheckFailed         a part broke a law or an identity of its paper
    └── Interrupted         Ctrl-C: the round was finished and saved
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KedgeError(Exception):
    """Base of all errors that kedge raises on purpose."""


class UnknownName(KedgeError):
    """A name that is not registered.

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
        self._made_from = (kind, name, known, see)

    def __reduce__(self) -> tuple[type, tuple[str, str, list[str], str]]:
        return type(self), self._made_from


class FieldError(KedgeError):
    """A value of the wrong type or out of range; ``field`` is its name where that is known."""

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
    """A string that cannot be read."""


class IncompatibleError(KedgeError):
    """Things that cannot go together."""


class TwoAggregators(IncompatibleError):
    """Two parts that both define how client updates are combined."""


class ModelError(KedgeError):
    """A model that lacks what is asked of it."""


class DataError(KedgeError):
    """A file or array that cannot be used as data."""


class PartitionError(KedgeError):
    """A partition that cannot be drawn."""


class LoadError(KedgeError):
    """A file of one's own that cannot be loaded or registers nothing."""


class HookError(KedgeError):
    """A hook of a part that raised."""


class NotFinite(KedgeError):
    """A loss that became NaN or infinite."""


class CheckFailed(KedgeError):
    """A part that broke a law or an identity."""


class Interrupted(KedgeError):
    """Ctrl-C: the round was finished and saved."""


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """The names a user may have meant, best first."""
    lowered = {k.lower(): k for k in known}
    return [lowered[m] for m in difflib.get_close_matches(name.lower(), lowered, n=2, cutoff=0.6)]
