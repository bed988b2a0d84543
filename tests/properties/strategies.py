"""Random values of options, drawn from their type hints, and texts of the grammar."""

from __future__ import annotations

import math
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from hypothesis import strategies as st

from kedge.schema import Choice, Length, Range, Read, Schema
from kedge.schema.binding import REQUIRED, Option

#: Any text but half characters, which no file can hold; often one of signs that mean something.
TEXT = st.one_of(
    st.text("'\"\\()[]=+,:|%/.- \n_a0", max_size=6),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
)


def values(option: Option) -> st.SearchStrategy[Any]:
    """Legal values of an option. A text that is parsed further keeps its default."""
    if any(isinstance(note, Read) for note in get_args(option.hint)[1:]):
        return st.just(option.default)
    return _of_hint(option.hint, ())


@st.composite
def settings_of(draw: st.DrawFn, schema: Schema) -> dict[str, Any]:
    """Legal values of some options; those without a default are always among them."""
    return {
        name: draw(values(option))
        for name, option in schema.options.items()
        if option.default is REQUIRED or draw(st.booleans())
    }


def _of_hint(hint: Any, outer: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    kind, notes = hint, outer
    if get_origin(hint) is Annotated:
        kind, notes = get_args(hint)[0], (*outer, *get_args(hint)[1:])
    if get_origin(kind) in (Union, types.UnionType):
        members = [m for m in get_args(kind) if m is not types.NoneType]
        return st.one_of([_of_hint(member, notes) for member in members])
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    for note in notes:
        if isinstance(note, Choice):
            return st.sampled_from(sorted(note.names()))
    if get_origin(kind) is tuple:
        return _lists(kind, notes)
    bounds = [note for note in notes if isinstance(note, Range)]
    low = max((b.low for b in bounds), default=-math.inf)
    high = min((b.high for b in bounds), default=math.inf)
    if kind is int:
        whole = [None if math.isinf(end) else int(end) for end in (low, high)]
        return st.integers(*whole)
    if kind is float:
        return st.floats(
            None if math.isinf(low) else low,
            None if math.isinf(high) else high,
            allow_nan=False,
            allow_infinity=False,
            exclude_min=any(b.open and b.low == low for b in bounds) and not math.isinf(low),
            exclude_max=any(b.open_high and b.high == high for b in bounds)
            and not math.isinf(high),
        )
    return {bool: st.booleans(), str: TEXT}[kind]


def _lists(kind: Any, notes: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    ranges = tuple(note for note in notes if isinstance(note, Range))
    args = get_args(kind)
    if args[-1] is not Ellipsis:
        return st.tuples(*(_of_hint(arg, ranges) for arg in args))
    shortest = max((note.low for note in notes if isinstance(note, Length)), default=0)
    return st.lists(_of_hint(args[0], ranges), min_size=shortest, max_size=4).map(tuple)
