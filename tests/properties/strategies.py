"""Random values of options, drawn from their type hints, and texts of the grammar."""

from __future__ import annotations

import math
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import torch
from hypothesis import strategies as st

from kedge.schema import Choice, Length, Range, Read, Schema
from kedge.schema.binding import REQUIRED, Option

#: Text of letters, signs that mean something somewhere, and characters that are hard to encode.
TEXT = st.text(
    "'\"\\()[]=+,:|%/.-_ \n\0\x7f\x85\u2028a0Zé²٣ßİ漢😀\ufeff\u0301\U0010ffff", max_size=6
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


# -- trees -------------------------------------------------------------------------------------

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip
#: Names of leaves: those of parameters, and any text.
KEYS = st.one_of(
    st.sampled_from(
        ["w", "fc.weight", "head.bias", "moon/a", "__metadata__", "Weights:params", "%"]
    ),
    TEXT.filter(bool),
)
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def tensors(
    draw: st.DrawFn, dtypes: list[torch.dtype] = DTYPES, elements: Any = None
) -> torch.Tensor:
    """A tensor of any dtype and a small shape, scalars and empty ones included. Without
    ``elements`` its bits are random: NaN, infinities and subnormal numbers occur."""
    dtype, shape = draw(st.sampled_from(dtypes)), draw(SHAPES)
    count = math.prod(shape)
    if elements is not None:
        numbers = draw(st.lists(elements, min_size=count, max_size=count))
        return torch.tensor(numbers, dtype=dtype).reshape(shape)
    size = count * dtype.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    if dtype is torch.bool:
        data = bytes(byte & 1 for byte in data)
    if not size:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def trees(
    leaf: st.SearchStrategy[Any], pair: type, keys: st.SearchStrategy[str] = KEYS
) -> st.SearchStrategy[Any]:
    """Nested dicts and named tuples of two fields; empty branches included."""
    branch = st.dictionaries(keys, leaf, max_size=3)

    def grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(st.dictionaries(keys, inner, max_size=3), st.builds(pair, branch, branch))

    return st.recursive(leaf, grown, max_leaves=5)


def bits(x: torch.Tensor) -> tuple[Any, ...]:
    """Everything about a tensor: NaNs by their bits, zeros by their signs."""
    return x.dtype, tuple(x.shape), x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same_bits(a: Any, b: Any) -> bool:
    """Whether two trees have the same structure and the same bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same_bits(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return all(same_bits(x, y) for x, y in zip(a, b, strict=True))
    return bits(a) == bits(b)
