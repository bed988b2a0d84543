"""Check the hooks of a part class: their names and arguments.

A misspelt hook is never called, and the method silently equals FedAvg. So a class with a method
whose name is close to a hook's, or with a hook that has other arguments, is rejected when it is
defined.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator
from typing import Any

from kedge.errors import HookError

MIN_SIMILARITY = 0.75  # difflib's ratio from which a name counts as misspelt


def check_overrides(cls: type, base: type) -> None:
    """Raise a HookError if a class has a misspelt hook, or one whose arguments differ from those in
    ``base``.

    >>> class Base:
    ...     def term(self, v): ...
    >>> check_overrides(type("Ridge", (Base,), {"terms": lambda self, v: 0}), Base)
    Traceback (most recent call last):
    kedge.errors.HookError: Ridge.terms is no hook and is never called. Did you mean 'term'? ...
    """
    known = {n: f for n, f in vars(base).items() if inspect.isfunction(f) and n[0] != "_"}
    for name, method in _methods(cls, base):
        if name in known:
            _check_arguments(cls, name, method, known[name])
        elif not hasattr(base, name):
            near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=MIN_SIMILARITY)
            if near:
                raise HookError(
                    f"{cls.__name__}.{name} is no hook and is never called. Did you mean "
                    f"{near[0]!r}? A helper must have another name: '_{name}'"
                )


def _methods(cls: type, base: type) -> Iterator[tuple[str, Any]]:
    """Public methods of a class and of its bases other than ``base``."""
    for owner in cls.__mro__:
        if owner in base.__mro__:
            continue
        for name, value in vars(owner).items():
            if name[0] != "_" and (
                inspect.isfunction(value) or isinstance(value, (staticmethod, classmethod))
            ):
                yield name, value


def _check_arguments(cls: type, name: str, method: Any, wanted: Any) -> None:
    """Raise a HookError if a method does not accept the arguments of the base's method."""
    names = list(inspect.signature(wanted).parameters)
    given = names[1:] if isinstance(method, staticmethod) else names
    function = method.__func__ if isinstance(method, (staticmethod, classmethod)) else method
    signature = inspect.signature(function)
    try:
        signature.bind(*given)
    except TypeError:
        bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        actual = signature.replace(parameters=bare, return_annotation=signature.empty)
        raise HookError(
            f"{cls.__name__}.{name} takes {actual}, but the hook {name} takes ({', '.join(names)})"
        ) from None
