"""Options of partitions and shifts: read by the signature of the function, and written back."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np

from kedge.errors import FieldError, GrammarError, UnknownName
from kedge.grammar import Call, write_value


@dataclass(frozen=True)
class Least:
    """The smallest legal value, or with ``above`` the largest illegal one."""

    value: float
    above: bool = False

    def holds(self, value: float) -> bool:
        return value > self.value if self.above else value >= self.value

    def __str__(self) -> str:
        return f"above {self.value:g}" if self.above else f"at least {self.value:g}"


Positive = Annotated[float, Least(0, above=True)]
NotNegative = Annotated[float, Least(0)]
Count = Annotated[int, Least(1)]


def bind(name: str, function: Callable[..., Any], call: Call) -> dict[str, Any]:
    """All options of the function, from the call and its defaults, checked."""
    if call.preset is not None:
        raise GrammarError(f"{name}:{call.preset}: partitions have no presets; write {name}(...)")
    known = _options(function)
    if len(call.args) > len(known):
        raise FieldError(
            f"{name} takes {len(known)} options ({', '.join(known) or 'none'}), "
            f"but {len(call.args)} values are given"
        )
    given = dict(zip(known, call.args, strict=False))
    for key, value in call.kwargs.items():
        if key not in known:
            raise UnknownName(f"option of {name}", key, list(known))
        if key in given:
            raise FieldError(f"{name}.{key} is given twice: {given[key]!r} and {value!r}")
        given[key] = value
    for key, option in known.items():
        if key not in given and option.default is option.empty:
            raise FieldError(f"{name}.{key} has no default; write {name}({key}=...)")
    bound = {key: given.get(key, option.default) for key, option in known.items()}
    return {k: _coerce(f"{name}.{k}", v, known[k].annotation) for k, v in bound.items()}


def write(name: str, function: Callable[..., Any], options: dict[str, Any]) -> str:
    """The canonical string: the first option always, the others where they are not the default."""
    known = _options(function)
    shown = [k for i, k in enumerate(known) if i == 0 or options[k] != known[k].default]
    inside = ", ".join(f"{k}={write_value(options[k])}" for k in shown)
    return f"{name}({inside})" if inside else name


def whole(name: str, value: Any) -> int:
    """A whole number, Python's or numpy's, as an int."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise FieldError(f"{name} = {value!r} is not a whole number")
    return int(value)


def _options(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "groups"}


def _coerce(where: str, value: Any, annotation: Any) -> Any:
    expected = _describe(annotation)
    for kind in _members(annotation):
        rules = [r for r in getattr(kind, "__metadata__", ()) if isinstance(r, Least)]
        base = get_args(kind)[0] if get_origin(kind) is Annotated else kind
        if get_origin(base) is Literal:
            if value in get_args(base) and isinstance(value, str):
                return value
        elif base in (int, float):
            number = isinstance(value, base | int) and not isinstance(value, bool)
            if number and math.isfinite(value) and all(rule.holds(value) for rule in rules):
                return base(value)
        else:
            return value
    raise FieldError(f"{where} = {write_value(value)} is not {expected}")


def _members(annotation: Any) -> tuple[Any, ...]:
    union = get_origin(annotation) in (Union, types.UnionType)
    return get_args(annotation) if union else (annotation,)


def _describe(annotation: Any) -> str:
    words = []
    for kind in _members(annotation):
        base = get_args(kind)[0] if get_origin(kind) is Annotated else kind
        if get_origin(base) is Literal:
            words.append(" or ".join(write_value(v) for v in get_args(base)))
        else:
            name = {int: "a whole number", float: "a finite number"}.get(base, str(base))
            words.append(" ".join([name, *map(str, getattr(kind, "__metadata__", ()))]))
    return " or ".join(words)
