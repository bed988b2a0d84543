"""What a class of parts may override: hooks by their names, with their arguments.

A hook that is misspelt is never called, and the method silently equals FedAvg. So a name that is
close to a hook's is refused when the class is made, and so is a hook that kedge could not call.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator
from typing import Any

from kedge.errors import HookError

CLOSE = 0.75  # of difflib's ratio, from which on a name is taken for a misspelt one


def check_overrides(cls: type, base: type) -> None:
    """Raise a HookError where a class has a misspelt hook or one with other arguments than that of
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
            near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=CLOSE)
            if near:
                raise HookError(
                    f"{cls.__name__}.{name} is no hook and is never called. Did you mean "
                    f"{near[0]!r}? A helper must have another name: '_{name}'"
                )


def _methods(cls: type, base: type) -> Iterator[tuple[str, Any]]:
    """Public methods of a class and of those that it has besides ``base``."""
    for owner in cls.__mro__:
        if owner in base.__mro__:
            continue
        for name, value in vars(owner).items():
            if name[0] != "_" and (
                inspect.isfunction(value) or isinstance(value, (staticmethod, classmethod))
            ):
                yield name, value


def _check_arguments(cls: type, name: str, method: Any, wanted: Any) -> None:
    """Whether a method can be called as that of the base is."""
    names = list(inspect.signature(wanted).parameters)
    given = names[1:] if isinstance(method, staticmethod) else names
    function = method.__func__ if isinstance(method, (staticmethod, classmethod)) else method
    signature = inspect.signature(function)
    try:
        signature.bind(*given)
    except TypeError:
        bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        found = signature.replace(parameters=bare, return_annotation=signature.empty)
        raise HookError(
            f"{cls.__name__}.{name} takes {found}, but the hook {name} takes ({', '.join(names)})"
        ) from None
