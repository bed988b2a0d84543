"""Messages: they come back bit for bit, and a damaged one is refused with a reason."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.properties.strategies import TEXT, bits, same_bits, tensors, trees

from kedge.core import tree
from kedge.core.tree import Weights
from kedge.errors import WireError
from kedge.session import blob, wire

#: Messages with a number that is not finite are refused.
TREES = trees(tensors(), Weights).filter(tree.is_finite)
NOTES = st.dictionaries(st.sampled_from(["round", "part", "a b"]), TEXT, max_size=2)


def without_empty(value: Any) -> Any:
    """The tree without branches that hold no array; the fields of named tuples stay."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, tuple):
        inner = [without_empty(item) for item in value]
        return type(value)(*inner) if any(inner) else {}
    found = {key: without_empty(item) for key, item in value.items()}
    return {key: item for key, item in found.items() if isinstance(item, torch.Tensor) or item}


def ordered(value: Any) -> Any:
    """The tree with its keys in alphabetical order, in which arrays come out of a message."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, tuple):
        return type(value)(*(ordered(item) for item in value))
    return {key: ordered(value[key]) for key in sorted(value)}


@given(TREES, NOTES)
def test_a_message_comes_back_bit_for_bit(value: Any, notes: dict[str, str]) -> None:
    packed = wire.pack("reply", value, **notes)
    assert same_bits(wire.unpack(packed, "reply", wire.template_of(value)), value)
    assert same_bits(ordered(wire.unpack(packed, "reply")), ordered(without_empty(value)))
    assert wire.notes_of(packed) == {"version": wire.VERSION, "kind": "reply", **notes}
    assert wire.pack("reply", value, **dict(reversed(notes.items()))) == packed
    turned = {k: value[k] for k in reversed(value)} if isinstance(value, dict) else value
    assert wire.pack("reply", turned, **notes) == packed  # the order of keys does not matter


def refused(message: bytes, template: Any) -> str:
    """The reason why a message is refused, with and without a template."""
    reasons = []
    for expected in (template, None):
        try:
            wire.unpack(message, "reply", expected)
        except WireError as error:
            reasons.append(str(error))
    assert len(reasons) == 2, "it was accepted"
    assert all(len(reason) > 10 for reason in reasons)
    return reasons[0]


@given(TREES, st.data())
def test_a_message_cut_short_or_continued_is_refused(value: Any, data: st.DataObject) -> None:
    packed, template = wire.pack("reply", value), wire.template_of(value)
    refused(packed[: data.draw(st.integers(0, len(packed) - 1))], template)
    refused(packed + data.draw(st.binary(min_size=1, max_size=9)), template)


@given(TREES, st.data())
def test_a_changed_byte_is_noticed_anywhere(value: Any, data: st.DataObject) -> None:
    packed, template = bytearray(wire.pack("reply", value)), wire.template_of(value)
    for _ in range(8):
        at = data.draw(st.integers(0, len(packed) - 1))
        damaged = packed.copy()
        damaged[at] ^= data.draw(st.integers(1, 255))
        refused(bytes(damaged), template)


@given(TREES, st.data())
def test_a_changed_stretch_is_noticed(value: Any, data: st.DataObject) -> None:
    packed, template = wire.pack("reply", value), wire.template_of(value)
    start = data.draw(st.integers(0, len(packed) - 1))
    new = data.draw(st.binary(min_size=1, max_size=40))
    damaged = packed[:start] + new + packed[start + len(new) :]
    if damaged != packed:
        refused(damaged, template)


@given(st.binary(max_size=60))
def test_any_bytes_are_refused(data: bytes) -> None:
    refused(data, {"w": wire.Leaf(torch.float32, (2,))})
    refused(len(data).to_bytes(8, "little") + data, {"w": wire.Leaf(torch.float32, (2,))})


@given(TREES, TREES)
def test_a_message_of_another_structure_is_refused(value: Any, other: Any) -> None:
    packed, template = wire.pack("reply", value), wire.template_of(other)
    if wire.template_of(value) != template:
        try:
            found = wire.unpack(packed, "reply", template)
        except WireError as error:
            assert "reply" in str(error)
        else:  # they differ in empty branches and in the order of keys only
            assert same_bits(ordered(without_empty(found)), ordered(without_empty(value)))


@given(TREES, st.data())
def test_an_array_of_another_dtype_or_shape_is_refused(value: Any, data: st.DataObject) -> None:
    leaves = list(tree.leaves(value))
    if not leaves:
        return
    packed, at = wire.pack("reply", value), data.draw(st.integers(0, len(leaves) - 1))
    leaf = leaves[at]
    same_size = {8: (torch.float64, torch.int64), 4: (torch.float32, torch.int32)}
    same_size |= {2: (torch.float16, torch.bfloat16, torch.int16), 1: (torch.int8, torch.uint8)}
    others = [leaf[None]] + [leaf.view(d) for d in same_size[leaf.element_size()]]
    other = data.draw(st.sampled_from([o for o in others if bits(o)[:2] != bits(leaf)[:2]]))
    counter = itertools.count()
    changed = tree.map(lambda x: other if next(counter) == at else x, value)
    with pytest.raises(WireError, match="'s array .* expected"):
        wire.unpack(packed, "reply", wire.template_of(changed))


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-4, 2**70), st.floats(), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=4,
)


@given(st.data())
def test_a_forged_header_gives_arrays_or_a_reason(data: st.DataObject) -> None:
    """Well-formed JSON with a valid checksum, but with any contents in one place."""
    place = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "entry", "note", "own"]))
    entry: dict[str, Any] = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    note: Any = {"version": wire.VERSION, "kind": "reply"}
    own: dict[str, Any] = {}
    if place in entry:
        likely = {"dtype": st.sampled_from(["F8_E4M3", "C64"]), "shape": st.lists(st.integers())}
        entry[place] = data.draw(st.one_of(JSON, likely.get(place, st.lists(st.integers()))))
    header = {"w": data.draw(JSON) if place == "entry" else entry}
    if place == "note":
        note = data.draw(JSON)
    if place == "own":
        own = {"other": data.draw(JSON)}
    own["kedge"] = "0" * 8 + json.dumps(note)
    text = json.dumps({"__metadata__": own, **header}, separators=(",", ":")).encode()
    packed = blob.sealed(len(text).to_bytes(8, "little") + text + b"\1\0\1\0")
    for template in (None, {"w": wire.Leaf(torch.float32, (1,))}):
        try:
            wire.unpack(packed, "reply", template)
        except WireError as error:
            assert len(str(error)) > 10
