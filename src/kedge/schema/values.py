"""Values of options: annotations of a type, and the conversion of a value to its type.

All functions take type hints: ``Annotated[float, Range(0, 1)]``, ``Literal["a", "b"]``,
``tuple[int, ...]``, ``int | Literal["auto"]``, and ``Annotated`` nested in them.
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
    """The interval of a number, closed unless an end is open. In a list it bounds every item.

    >>> str(Range(0, 1, open_high=True))
    'at least 0 and below 1'
    """

    low: float = -math.inf
    high: float = math.inf
    open: bool = False  # exclude the lower end
    open_high: bool = False  # exclude the upper end
    infinite: bool = False  # allow infinity

    def problem(self, value: float) -> str:
        """The violation, such as ``below 0``, or an empty string."""
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
    """A string out of names that are computed on demand, such as those of a registry."""

    names: Callable[[], Iterable[str]]


class Length(NamedTuple):
    """The minimum number of items of a list."""

    low: int


class Read(NamedTuple):
    """A string that ``function`` parses; the function raises a KedgeError if it cannot."""

    function: Callable[[Any], object]


Positive = Annotated[float, Range(0, open=True)]
NotNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
Count = Annotated[int, Range(1)]
Size = Annotated[int, Range(0)]

_TYPE_WORDS: dict[Any, tuple[str, str]] = {  # singular, plural
    int: ("a whole number", "whole numbers"),
    float: ("a finite number", "finite numbers"),
    bool: ("true or false", "values true or false"),
    str: ("text", "texts"),
}


class InvalidValue(ValueError):
    """An invalid value. The message completes a sentence about it: ``is below 0``."""


class InvalidType(InvalidValue):
    """A value of the wrong type."""


def coerce(value: Any, hint: Any) -> Any:
    """Convert a value to the type of a hint.

    Args:
        value: the value as parsed or given in Python.
        hint: a type hint; its ``Range``, ``Choice`` and ``Length`` are checked.

    Returns:
        The value in that type; lists become tuples.

    Raises:
        InvalidType: the value has another type.
        InvalidValue: the value is out of range, not among the choices, or a list too short.

    >>> coerce([1, 2], tuple[float, ...])
    (1.0, 2.0)
    >>> coerce(0, Annotated[int, Range(1)] | Literal["all"])
    Traceback (most recent call last):
    kedge.schema.values.InvalidType: is not a whole number at least 1 or 'all'
    """
    kind, notes = _unwrapped(hint)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _coerce_union(value, kind, notes)
    if origin is Literal or any(isinstance(n, Choice) for n in notes):
        return _coerce_choice(value, _choices(kind, notes))
    if kind is tuple or origin is tuple:
        return _coerce_tuple(value, kind, notes)
    if kind in _TYPE_WORDS:
        value = _coerce_scalar(value, kind, notes)
    for problem in (n.problem(value) for n in notes if isinstance(n, Range)):
        if problem:
            raise InvalidValue(f"is {problem}")
    return value


def _coerce_scalar(value: Any, kind: Any, notes: tuple[Any, ...]) -> Any:
    accepted = {int: numbers.Integral, float: numbers.Real}.get(kind, kind)
    is_valid = isinstance(value, accepted) and (kind is bool or not isinstance(value, bool))
    if not is_valid:
        raise InvalidType(f"is not {_described(kind, notes)}")
    try:
        value = kind(value)
    except OverflowError:
        raise InvalidValue("is too large") from None
    infinite = value == math.inf and any(n.infinite for n in notes if isinstance(n, Range))
    if kind is float and not math.isfinite(value) and not infinite:
        raise InvalidType(f"is not {_described(kind, notes)}")
    return value


def _coerce_union(value: Any, kind: Any, notes: tuple[Any, ...]) -> Any:
    if value is None and types.NoneType in get_args(kind):
        return None
    if takes_none(kind) and isinstance(value, str) and value in ("none", "None"):
        return None
    members = _members(kind)
    for member in members:
        try:
            return coerce(value, Annotated[(member, *notes)] if notes else member)
        except InvalidValue as error:
            if len(members) == 1 and isinstance(error, InvalidType):
                break
            is_list = isinstance(value, (tuple, list))
            if len(members) == 1 or (is_list and get_origin(_unwrapped(member)[0]) is tuple):
                raise  # no other member can match
    raise InvalidType(f"is not {_described(kind, notes)}")


def _coerce_choice(value: Any, known: tuple[Any, ...]) -> Any:
    for choice in known:
        if type(choice) is type(value) and choice == value:
            return choice
    near = (
        nearest(value, [c for c in known if isinstance(c, str)]) if isinstance(value, str) else []
    )
    hint = f". Did you mean {near[0]!r}?" if near else ""
    raise InvalidValue(f"is not one of: {', '.join(map(str, known))}{hint}")


def _coerce_tuple(value: Any, kind: Any, notes: tuple[Any, ...]) -> tuple[Any, ...]:
    inner, count = _items(kind)
    is_valid = isinstance(value, (tuple, list)) and count in (None, len(value))
    if not is_valid:
        raise InvalidType(f"is not {_described(kind, notes)}")
    shortest = max((n.low for n in notes if isinstance(n, Length)), default=0)
    if len(value) < shortest:
        raise InvalidValue(f"is {'too short' if value else 'empty'}; give at least {shortest}")
    ranges = tuple(n for n in notes if isinstance(n, Range))
    items = []
    for item in value:
        try:
            items.append(coerce(item, Annotated[(inner, *ranges)] if ranges else inner))
        except InvalidType:
            raise InvalidType(f"is not {_described(kind, notes)}") from None
        except InvalidValue as error:
            raise InvalidValue(f"holds {item!r}, which {error}") from None
    return tuple(items)


def notes_of(hint: Any) -> tuple[Any, ...]:
    """The metadata of the outermost ``Annotated``."""
    return _unwrapped(hint)[1]


def ranges_of(hint: Any) -> list[Range]:
    """All ranges in a hint, including those of union members and list items."""
    kind, notes = _unwrapped(hint)
    inner = [r for member in get_args(kind) for r in ranges_of(member)] if get_origin(kind) else []
    return [*(n for n in notes if isinstance(n, Range)), *inner]


def takes_none(hint: Any) -> bool:
    """Whether the word ``none`` is read as None; where any text is a value, it is text.

    >>> takes_none(float | None), takes_none(str | None)
    (True, False)
    """
    kind, _ = _unwrapped(hint)
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else ()
    return types.NoneType in members and all(_unwrapped(m)[0] is not str for m in members)


def type_name(hint: Any) -> str:
    """The type as shown on help pages: ``float | none``, ``soft | hard``, ``list of int``."""
    kind, notes = _unwrapped(hint)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        names = [type_name(m) for m in _members(kind)]
        return " | ".join([*names, "none"] if takes_none(kind) else names)
    if origin is Literal or any(isinstance(n, Choice) for n in notes):
        return " | ".join(map(str, _choices(kind, notes)))
    if origin is tuple:
        inner, count = _items(kind)
        return f"list of {'' if count is None else f'{count} '}{type_name(inner)}"
    return "any" if kind is Any else getattr(kind, "__name__", str(kind))


def _described(kind: Any, notes: tuple[Any, ...]) -> str:
    """The expected value in words: ``a whole number at least 1``."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        pairs = (_unwrapped(m) for m in _members(kind))
        words = [_described(base, (*inner, *notes)) for base, inner in pairs]
        return " or ".join([*words, "none"] if takes_none(kind) else words)
    if origin is Literal or any(isinstance(n, Choice) for n in notes):
        return " or ".join(map(repr, _choices(kind, notes)))
    if kind is tuple or origin is tuple:
        inner, count = _items(kind)
        base, inner_notes = _unwrapped(inner)
        plural = _TYPE_WORDS.get(base, ("", "values"))[1]
        number = "" if count is None else f"{count} "
        return _with_ranges(f"a list of {number}{plural}", (*inner_notes, *notes))
    return _with_ranges(_TYPE_WORDS.get(kind, (str(kind), ""))[0], notes)


def _with_ranges(words: str, notes: tuple[Any, ...]) -> str:
    return " ".join([words, *(str(n) for n in notes if isinstance(n, Range))])


def _unwrapped(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """The type and its metadata."""
    return (get_args(hint)[0], get_args(hint)[1:]) if get_origin(hint) is Annotated else (hint, ())


def _members(union: Any) -> list[Any]:
    return [m for m in get_args(union) if m is not types.NoneType]


def _choices(kind: Any, notes: tuple[Any, ...]) -> tuple[Any, ...]:
    choices = [n for n in notes if isinstance(n, Choice)]
    return tuple(choices[0].names()) if choices else get_args(kind)


def _items(kind: Any) -> tuple[Any, int | None]:
    """The type of a tuple's items, and their number if it is fixed."""
    args = get_args(kind)
    if not args:
        return Any, None
    return (args[0], None) if args[-1] is Ellipsis else (args[0], len(args))
