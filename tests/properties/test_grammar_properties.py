"""The grammar and the options: what is written is read back, and a mistake is an error of kedge."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tests.properties.strategies import TEXT, settings_of, values

from kedge.core.optim import optimizers
from kedge.core.part import Method, Part, parse, parts
from kedge.core.schedules import schedules
from kedge.data.augment import augmentations
from kedge.data.partition import partitions, shifts
from kedge.data.partition.grammar import check_partition
from kedge.data.splits import splits
from kedge.errors import GrammarError, IncompatibleError, KedgeError
from kedge.grammar import Call, parse_call, parse_calls, write_value
from kedge.models import models
from kedge.schema import Length, Option, Range, Schema, schema_of

REGISTRIES = [parts, models, optimizers, schedules, augmentations, splits, partitions, shifts]
SCHEMAS = [
    schema_of(registry[name], name, presets=registry is parts, hidden=("groups",))
    for registry in REGISTRIES
    for name in registry
]
SCALARS = st.one_of(
    st.booleans(), st.integers(), st.floats(allow_nan=False), TEXT, st.sampled_from(["inf", "nan"])
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)
SPACE = st.text(" \t\n\r", max_size=2)
# The pieces of the grammar in any order: far more often nearly right than any text is.
PIECES = st.sampled_from(
    [*"()[]=:+,", "fedprox", "moon", "fedcog", "mu", "rows", "0.1", "-3", "1e999", "true", "nan",
     "inf", '"a b"', "'", '"', "iid", "dirichlet", "rotation", "step", " ", "stage2", "é", "."]
)  # fmt: skip
SCRIBBLES = st.one_of(TEXT, st.lists(PIECES, max_size=12).map("".join))


@st.composite
def random_parts(draw: st.DrawFn, names: st.SearchStrategy[str]) -> Part:
    """A part with random legal fields, on top of a preset or none."""
    cls = parts[draw(names)]
    preset = draw(st.sampled_from([None, *cls.presets]))
    base = cls.presets[preset] if preset else {}
    return cls(**{**base, **draw(settings_of(cls.schema()))})


# -- values ------------------------------------------------------------------------------------


@given(VALUES)
def test_a_value_is_read_back(value: Any) -> None:
    found = parse_call(f"f(x={write_value(value)})").kwargs["x"]
    assert found == value
    assert str(found) == str(value)  # the types as well: 1 is not 1.0 and not true


@given(st.sampled_from(SCHEMAS).filter(lambda s: s.options), st.data())
def test_the_options_of_every_registered_name_are_read_back(
    schema: Schema, data: st.DataObject
) -> None:
    checked = schema.check(data.draw(settings_of(schema)))
    for first in (False, True):
        text = schema.write(checked, first)
        assert schema.bind(parse_call(text)) == checked
        assert schema.write(schema.bind(parse_call(text)), first) == text
    # the order of named values does not matter; by position it is that of the signature
    turned = dict(reversed(checked.items()))
    assert schema.bind(Call(schema.name, None, (), turned)) == checked
    assert schema.bind(Call(schema.name, None, tuple(checked.values()), {})) == checked


# -- methods -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", parts)
@given(data=st.data())
def test_every_part_is_read_back(name: str, data: st.DataObject) -> None:
    part = data.draw(random_parts(st.just(name)))
    assert parse(str(part)).parts == (part,)
    assert dataclasses.replace(part) == part


PRESETS = [(name, preset) for name in parts for preset in parts[name].presets]


@given(st.sampled_from(PRESETS), st.data())
def test_a_preset_with_fields_is_read(chosen: tuple[str, str], data: st.DataObject) -> None:
    name, preset = chosen
    cls = parts[name]
    fields = data.draw(settings_of(cls.schema()))
    inside = ", ".join(f"{key}={write_value(value)}" for key, value in fields.items())
    expected = cls(**{**cls.presets[preset], **fields})
    assert parse(f"{name}:{preset}({inside})").parts == (expected,)
    if fields:  # a field given twice is refused, even with the same value
        key = data.draw(st.sampled_from(sorted(fields)))
        with pytest.raises(GrammarError, match=f"'{key}' is given twice"):
            parse(f"{name}:{preset}({inside}, {key}={write_value(fields[key])})")


@given(st.lists(random_parts(st.sampled_from(list(parts))), max_size=4))
def test_every_sum_of_parts_is_read_back(summands: list[Part]) -> None:
    try:
        method = Method(tuple(summands))
    except IncompatibleError:
        assume(False)
    assert parse(repr(method)) == method
    assert repr(parse(repr(method))) == repr(method)
    half = len(summands) // 2
    assert Method(method.parts[:half]) + Method(method.parts[half:]) == method


@given(st.data())
def test_whitespace_between_tokens_means_nothing(data: st.DataObject) -> None:
    calls = data.draw(
        st.lists(
            st.builds(
                Call,
                st.sampled_from(["a", "f.2", "org/set"]),
                st.sampled_from([None, "p"]),
                st.lists(VALUES, max_size=2).map(tuple),
                st.dictionaries(st.sampled_from(["x", "true", "nan"]), VALUES, max_size=3),
            ),
            min_size=1,
            max_size=3,
        )
    )
    texts = []
    for gap in (st.just(""), SPACE):
        tokens: list[str] = []
        for i, call in enumerate(calls):
            tokens += ["+"] * (i > 0) + [call.name]
            tokens += [":", call.preset] if call.preset else []
            inside = [write_value(v) for v in call.args]
            named = [(k, "=", write_value(v)) for k, v in call.kwargs.items()]
            tokens.append("(")
            for item in [*((v,) for v in inside), *named]:
                tokens += [*item, ","]
            tokens.append(")")
        texts.append("".join(data.draw(gap) + token for token in tokens) + data.draw(gap))
    assert parse_calls(texts[0]) == parse_calls(texts[1]) == calls


# -- mistakes ----------------------------------------------------------------------------------


def fails_only_as_kedge_does(read: Any, given: Any) -> None:
    try:
        read(given)
    except KedgeError as error:
        assert len(str(error)) > 10
        assert "Traceback" not in str(error)
        str(error).encode()  # it can be printed


@example("f(x=" + "[" * 5000)
@example("f(x=" + "9" * 5000 + ")")
@example("fedprox(mu=" + "9" * 5000 + ")")
@given(SCRIBBLES)
def test_any_text_is_a_method_or_an_error_of_kedge(text: str) -> None:
    fails_only_as_kedge_does(parse, text)
    fails_only_as_kedge_does(check_partition, text)


@given(SCRIBBLES)
def test_what_can_be_parsed_can_be_written(text: str) -> None:
    try:
        calls = parse_calls(text)
    except GrammarError as error:
        assert "position" in str(error)
        return
    for call in calls:
        inside = [write_value(v) for v in call.args]
        inside += [f"{key}={write_value(v)}" for key, v in call.kwargs.items()]
        preset = f":{call.preset}" if call.preset else ""
        again = parse_call(f"{call.name}{preset}({', '.join(inside)})")
        assert repr(again) == repr(call)  # by text, since nan is not nan


@given(random_parts(st.sampled_from(list(parts))), st.data())
def test_a_method_with_one_changed_character_is_a_method_or_an_error(
    part: Part, data: st.DataObject
) -> None:
    text = str(part)
    at = data.draw(st.integers(0, len(text)))
    new = data.draw(st.sampled_from([*"()[]=:+,'\"-0a. ", ""]))
    fails_only_as_kedge_does(parse, text[:at] + new + text[at + 1 :])


ANYTHING = st.one_of(
    VALUES, st.none(), st.floats(), st.lists(SCALARS, max_size=3), st.binary(max_size=3),
    st.dictionaries(TEXT, SCALARS, max_size=2), st.integers(10**300, 10**310), st.complex_numbers(),
)  # fmt: skip


@given(st.sampled_from(SCHEMAS).filter(lambda s: s.options), st.data())
def test_any_value_of_an_option_is_accepted_or_named(schema: Schema, data: st.DataObject) -> None:
    option = data.draw(st.sampled_from(list(schema.options.values())))
    value = data.draw(ANYTHING)
    try:
        found = option.check(value, schema.name)
    except KedgeError as error:
        assert len(str(error)) > 10
        return
    assert option.check(found, schema.name) == found  # what is accepted is accepted again
    bounds = [note for note in getattr(option.hint, "__metadata__", ()) if isinstance(note, Range)]
    for bound in bounds:
        assert not bound.problem(found)


@example(-math.inf, math.inf, False, False, math.inf)
@example(-math.inf, math.inf, False, False, math.nan)
@given(st.floats(allow_nan=False), st.floats(allow_nan=False), st.booleans(), st.booleans(),
       st.one_of(st.integers(-5, 5), st.floats()))  # fmt: skip
def test_a_range_admits_what_lies_within_it(
    a: float, b: float, is_open: bool, open_high: bool, value: float
) -> None:
    low, high = min(a, b), max(a, b)
    option = Option("x", Annotated[float, Range(low, high, is_open, open_high)])
    inside = low <= value <= high and math.isfinite(value)
    inside &= not (is_open and value == low) and not (open_high and value == high)
    try:
        found = option.check(value)
    except KedgeError as error:
        assert not inside
        assert str(error).startswith("x = ")
    else:
        assert inside
        assert type(found) is float
        assert found == value


@given(st.lists(st.integers(-3, 9), max_size=4), st.integers(0, 3))
def test_a_list_admits_what_is_long_enough_and_within_its_range(
    items: list[int], shortest: int
) -> None:
    option = Option("x", Annotated[tuple[int, ...], Range(1), Length(shortest)])
    try:
        found = option.check(items)
    except KedgeError as error:
        assert len(items) < shortest or min(items) < 1
        assert str(error).startswith("x ")
    else:
        assert found == tuple(items)
        assert len(items) >= shortest
        assert all(n >= 1 for n in items)


@given(st.sampled_from(SCHEMAS).filter(lambda s: s.options), st.data())
def test_random_values_are_legal(schema: Schema, data: st.DataObject) -> None:
    """The values that these tests draw are those that the options admit."""
    for option in schema.options.values():
        value = data.draw(values(option))
        assert option.check(value, schema.name) == value
