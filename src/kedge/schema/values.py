"""Values of options: the notes that a type may carry, and the check of a value against its type.

Everything here works on type hints: ``Annotated[float, Range(0, 1)]``, ``Literal["a", "b"]``,
``tuple[int, ...]``, ``int | Literal["auto"]``, and ``Annotated`` inside of them.
"""

from __future__ import annotations

import math
import numbers
import types
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from kedge.errors import nearest


class Doc(NamedTuple):
    """Help of an option, shown by ``kedge show``."""

    text: str


class Range(NamedTuple):
    """Where a number may lie; the ends belong to it unless they are open. In a list: every item.

    >>> str(Range(0, 1, open_high=True))
    'at least 0 and below 1'
    """

    low: float = -math.inf
    high: float = math.inf
    open: bool = False  # the lower end does not belong to the range
    open_high: bool = False  # nor does the upper end

    def problem(self, value: float) -> str:
        """What is wrong with the value: ``below 0``, or nothing."""
        if value < self.low or (self.open and value == self.low):
            return f"{'not above' if self.open else 'below'} {self.low:g}"
        if value > self.high or (self.open_high and value == self.high):
            return f"{'not below' if self.open_high else 'above'} {self.high:g}"
        return ""

    def __str__(self) -> str:
        low = f"{'above' if self.open else 'at least'} {self.low:g}"
        high = f"{'below' if self.open_high else 'at most'} {self.high:g}"
        ends = ((low, self.low), (high, self.high))
        return " and ".join(words for words, end in ends if math.isfinite(end))


class Choice(NamedTuple):
    """Text out of names that are known only when asked for, such as those of a registry."""

    names: Callable[[], Iterable[str]]


class Length(NamedTuple):
    """How many items a list has at least."""

    low: int


class Read(NamedTuple):
    """Text that a function reads; what the function raises is what is wrong with it."""

    function: Callable[[Any], object]


Positive = Annotated[float, Range(0, open=True)]
NotNegative = Annotated[float, Range(0)]
Count = Annotated[int, Range(1)]
Size = Annotated[int, Range(0)]

_WORDS: dict[Any, tuple[str, str]] = {  # one, several
    int: ("a whole number", "whole numbers"),
    float: ("a finite number", "finite numbers"),
    bool: ("true or false", "values true or false"),
    str: ("text", "texts"),
}


class Wrong(ValueError):
    """What is wrong with a value, as the end of a sentence: ``is below 0``."""


class WrongType(Wrong):
    """The same where not even the type is right."""


def fit(value: Any, hint: Any) -> Any:
    """The value in the type that the hint asks for.

    >>> fit([1, 2], tuple[float, ...])
    (1.0, 2.0)
    >>> fit(0, Annotated[int, Range(1)] | Literal["all"])
    Traceback (most recent call last):
    kedge.schema.values.WrongType: is not a whole number at least 1 or 'all'
    """
    kind, notes = _unwrapped(hint)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _fit_union(value, kind, notes)
    if origin is Literal or any(isinstance(n, Choice) for n in notes):
        return _fit_choice(value, _choices(kind, notes))
    if kind is tuple or origin is tuple:
        return _fit_list(value, kind, notes)
    if kind in _WORDS:
        value = _fit_plain(value, kind, notes)
    for problem in (n.problem(value) for n in notes if isinstance(n, Range)):
        if problem:
            raise Wrong(f"is {problem}")
    return value


def _fit_plain(value: Any, kind: Any, notes: tuple[Any, ...]) -> Any:
    wanted = {int: numbers.Integral, float: numbers.Real}.get(kind, kind)
    fine = isinstance(value, wanted) and (kind is bool or not isinstance(value, bool))
    if not fine:
        raise WrongType(f"is not {_described(kind, notes)}")
    try:
        value = kind(value)
    except OverflowError:
        raise Wrong("is too large") from None
    if kind is float and not math.isfinite(value):
        raise WrongType(f"is not {_described(kind, notes)}")
    return value


def _fit_union(value: Any, kind: Any, notes: tuple[Any, ...]) -> Any:
    if value is None and types.NoneType in get_args(kind):
        return None
    members = _members(kind)
    for member in members:
        try:
            return fit(value, Annotated[(member, *notes)] if notes else member)
        except Wrong:
            listed = isinstance(value, (tuple, list))
            if len(members) == 1 or (listed and get_origin(_unwrapped(member)[0]) is tuple):
                raise  # it was meant for this member
    raise WrongType(f"is not {_described(kind, notes)}")


def _fit_choice(value: Any, known: tuple[Any, ...]) -> Any:
    for choice in known:
        if type(choice) is type(value) and choice == value:
            return choice
    near = (
        nearest(value, [c for c in known if isinstance(c, str)]) if isinstance(value, str) else []
    )
    hint = f". Did you mean {near[0]!r}?" if near else ""
    raise Wrong(f"is not one of: {', '.join(map(str, known))}{hint}")


def _fit_list(value: Any, kind: Any, notes: tuple[Any, ...]) -> tuple[Any, ...]:
    inner, count = _items(kind)
    fine = isinstance(value, (tuple, list)) and count in (None, len(value))
    if not fine:
        raise WrongType(f"is not {_described(kind, notes)}")
    least = max((n.low for n in notes if isinstance(n, Length)), default=0)
    if len(value) < least:
        raise Wrong(f"is {'too short' if value else 'empty'}; give at least {least}")
    ranges = tuple(n for n in notes if isinstance(n, Range))
    fitting = []
    for item in value:
        try:
            fitting.append(fit(item, Annotated[(inner, *ranges)] if ranges else inner))
        except WrongType:
            raise WrongType(f"is not {_described(kind, notes)}") from None
        except Wrong as wrong:
            raise Wrong(f"holds {item!r}, which {wrong}") from None
    return tuple(fitting)


def notes_of(hint: Any) -> tuple[Any, ...]:
    """The notes of the outermost ``Annotated``."""
    return _unwrapped(hint)[1]


def ranges_of(hint: Any) -> list[Range]:
    """Every range in a hint, also of a union's members and of a list's items."""
    kind, notes = _unwrapped(hint)
    inner = [r for member in get_args(kind) for r in ranges_of(member)] if get_origin(kind) else []
    return [*(n for n in notes if isinstance(n, Range)), *inner]


def type_name(hint: Any) -> str:
    """The type as help pages show it: ``float``, ``soft | hard``, ``list of int``."""
    kind, notes = _unwrapped(hint)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return " | ".join(type_name(m) for m in _members(kind))
    if origin is Literal or any(isinstance(n, Choice) for n in notes):
        return " | ".join(map(str, _choices(kind, notes)))
    if origin is tuple:
        inner, count = _items(kind)
        return f"list of {'' if count is None else f'{count} '}{type_name(inner)}"
    return "any" if kind is Any else getattr(kind, "__name__", str(kind))


def _described(kind: Any, notes: tuple[Any, ...]) -> str:
    """What is wanted, in words: ``a whole number at least 1``."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(_described(*_unwrapped(m)) for m in _members(kind))
    if origin is Literal or any(isinstance(n, Choice) for n in notes):
        return " or ".join(map(repr, _choices(kind, notes)))
    if kind is tuple or origin is tuple:
        inner, count = _items(kind)
        base, more = _unwrapped(inner)
        several = _WORDS.get(base, ("", "values"))[1]
        number = "" if count is None else f"{count} "
        return _with_ranges(f"a list of {number}{several}", (*more, *notes))
    return _with_ranges(_WORDS.get(kind, (str(kind), ""))[0], notes)


def _with_ranges(words: str, notes: tuple[Any, ...]) -> str:
    return " ".join([words, *(str(n) for n in notes if isinstance(n, Range))])


def _unwrapped(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """The type, and its notes."""
    return (get_args(hint)[0], get_args(hint)[1:]) if get_origin(hint) is Annotated else (hint, ())


def _members(union: Any) -> list[Any]:
    return [m for m in get_args(union) if m is not types.NoneType]


def _choices(kind: Any, notes: tuple[Any, ...]) -> tuple[Any, ...]:
    asked = [n for n in notes if isinstance(n, Choice)]
    return tuple(asked[0].names()) if asked else get_args(kind)


def _items(kind: Any) -> tuple[Any, int | None]:
    """The type of a list's items, and how many there must be."""
    args = get_args(kind)
    if not args:
        return Any, None
    return (args[0], None) if args[-1] is Ellipsis else (args[0], len(args))
