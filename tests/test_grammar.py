"""The grammar: what it reads, what it writes back, and where it says a mistake is."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from kedge.errors import GrammarError
from kedge.grammar import Call, parse_call, parse_calls, write_value


def value_of(text: str) -> Any:
    return parse_call(f"f(x={text})").kwargs["x"]


# -- calls -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("fedavg", Call("fedavg", None, (), {})),
        ("fedavg()", Call("fedavg", None, (), {})),
        ("moon:fedcog", Call("moon", "fedcog", (), {})),
        ("moon:fedcog(mu=1)", Call("moon", "fedcog", (), {"mu": 1})),
        ("dirichlet(0.1, 20)", Call("dirichlet", None, (0.1, 20), {})),
        ("dirichlet(0.1, clients=20)", Call("dirichlet", None, (0.1,), {"clients": 20})),
        ("f(a=1,)", Call("f", None, (), {"a": 1})),
        ("  f  :  p  (  1  ,  a  =  2  )  ", Call("f", "p", (1,), {"a": 2})),
        ("f(\n  a=1,\n  b=2,\n)", Call("f", None, (), {"a": 1, "b": 2})),
        ("resnet-18.v2", Call("resnet-18.v2", None, (), {})),
        ("org/set", Call("org/set", None, (), {})),
    ],
)
def test_one_call(text: str, call: Call) -> None:
    assert parse_call(text) == call
    assert parse_calls(text) == [call]


def test_a_sum_keeps_the_order_of_its_calls() -> None:
    calls = parse_calls("b(2) + a:x + c(k=[1])")
    assert [c.name for c in calls] == ["b", "a", "c"]
    assert calls == [
        Call("b", None, (2,), {}),
        Call("a", "x", (), {}),
        Call("c", None, (), {"k": (1,)}),
    ]


def test_one_name_is_expected_where_only_one_makes_sense() -> None:
    with pytest.raises(GrammarError, match=r"'a\+b': expected one name, found 2 joined by '\+'"):
        parse_call("a+b")


# -- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("-3", -3),
        ("+3", 3),
        ("007", 7),
        ("0.5", 0.5),
        (".5", 0.5),
        ("5.", 5.0),
        ("-1.5", -1.5),
        ("1e-4", 1e-4),
        ("1E+4", 1e4),
        ("-2.5e-3", -2.5e-3),
        ("1e3", 1000.0),
        ("inf", math.inf),
        ("true", True),
        ("True", True),
        ("false", False),
        ("False", False),
        ("stage2", "stage2"),
        ("layer1.0.conv", "layer1.0.conv"),
        ("a-b", "a-b"),
        ("data/train", "data/train"),
        ("'a b'", "a b"),
        ('"a b"', "a b"),
        ('"it\'s"', "it's"),
        ("'true'", "true"),
        ('"3"', "3"),
        ('""', ""),
        ('"a+b(c=1)"', "a+b(c=1)"),
        ("[]", ()),
        ("[1]", (1,)),
        ("[1, 2.0, x, 'y z', true]", (1, 2.0, "x", "y z", True)),
        ("[1, 2,]", (1, 2)),
        ("[[1, 2], [], [[3]]]", ((1, 2), (), ((3,),))),
    ],
)
def test_a_value_and_its_type(text: str, value: Any) -> None:
    found = value_of(text)
    assert found == value
    assert type(found) is type(value)


def test_nan_is_read() -> None:
    assert math.isnan(value_of("nan"))


def test_a_word_that_means_a_value_may_still_name_a_field() -> None:
    assert parse_call("f(true=1, nan=2)").kwargs == {"true": 1, "nan": 2}
    assert parse_call("f(true, inf)").args == (True, math.inf)


def random_value(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.randrange(6 if depth < 3 else 5)
    if kind == 0:
        return draw.randrange(-(10**12), 10**12)
    if kind == 1:
        return draw.choice([0.0, -0.0, 0.1, 1e-300, 1.7e308, 1e16, 5e-324, draw.gauss(0, 1)])
    if kind == 2:
        return draw.choice([True, False])
    if kind == 3:
        return draw.choice(["stage2", "true", "inf", "nan", "", "a b", "3", "-1e5", "x=1", "[1]"])
    if kind == 4:
        letters = "abcXYZ_09.-/ +()[],=:'\\éß"
        return "".join(draw.choice(letters) for _ in range(draw.randrange(8)))
    return tuple(random_value(draw, depth + 1) for _ in range(draw.randrange(4)))


@pytest.mark.parametrize("seed", range(5))
def test_what_is_written_is_read_back(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(200):
        value = random_value(draw)
        back = value_of(write_value(value))
        assert back == value, write_value(value)
        assert repr(back) == repr(value)  # types as well: 1 is not 1.0 and not True


def test_lists_are_read_back_as_tuples() -> None:
    assert value_of(write_value([1, [2, "a"]])) == (1, (2, "a"))


def test_written_values_are_short_where_they_can_be() -> None:
    written = [write_value(v) for v in ("stage2", "a b", True, 0.1, 3, (1, "x"))]
    assert written == ["stage2", '"a b"', "true", "0.1", "3", "[1, x]"]


def test_minus_infinity_is_read_back() -> None:
    assert value_of(write_value(-math.inf)) == -math.inf


def test_a_string_with_a_double_quote_is_read_back() -> None:
    assert value_of(write_value('say "hi"')) == 'say "hi"'


def test_numbers_from_numpy_are_written_as_numbers() -> None:
    assert write_value(np.float64(0.1)) == "0.1"


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "what", "position"),
    [
        ("", "expected a name, found the end", 1),
        ("+", "expected a name, found '+'", 1),
        ("a+", "expected a name, found the end", 3),
        ("a++b", "expected a name, found '+'", 3),
        ("(1)", "expected a name, found '('", 1),
        ("3", "expected a name, found '3'", 1),
        ("a b", "expected '+' or the end, found 'b'", 3),
        ("a)", "expected '+' or the end, found ')'", 2),
        ("a(1)(2)", "expected '+' or the end, found '('", 5),
        ("a+1", "expected '+' or the end, found '+1'", 2),
        ("a:", "expected a preset, found the end", 3),
        ("a:3", "expected a preset, found '3'", 3),
        ("a(", "expected a value, found", 3),
        ("a(,)", "expected a value, found ','", 3),
        ("a(b=)", "expected a value, found ')'", 5),
        ("a(b==1)", "expected a value, found '='", 5),
        ("a(1 2)", "expected ',' or ')', found '2'", 5),
        ("a(1", "expected ',' or ')', found", 4),
        ("a('b'=1)", "expected ',' or ')', found '='", 6),
        ("a([1 2])", "expected ',' or ']', found '2'", 6),
        ("a([1", "expected ',' or ']', found", 5),
        ("a(@)", "unexpected '@'", 3),
        ("a(   @)", "unexpected '@'", 6),
        ('a("b)', "unexpected '\"'", 3),
        ("a(1.2.3)", "unexpected '1'", 3),
        ("a(12x)", "unexpected '1'", 3),
    ],
)
def test_a_mistake_is_named_with_its_position(text: str, what: str, position: int) -> None:
    with pytest.raises(GrammarError) as caught:
        parse_calls(text)
    message = str(caught.value)
    assert message.startswith(what)
    assert f"at position {position} of {text!r}" in message
    assert message.endswith("Write for example: scaffold+fedprox(mu=0.1)")


def test_a_field_given_twice_and_a_value_after_a_field() -> None:
    with pytest.raises(GrammarError, match="'a' is given twice"):
        parse_calls("f(a=1, a=2)")
    with pytest.raises(GrammarError, match="2 has no name but follows a named value"):
        parse_calls("f(a=1, 2)")


@pytest.mark.parametrize(("text", "position"), [("f(a=1, a=2)", 8), ("f(a=1, 2)", 8)])
def test_the_position_is_that_of_the_mistake(text: str, position: int) -> None:
    with pytest.raises(GrammarError, match=f"at position {position} of"):
        parse_calls(text)


@pytest.mark.parametrize("text", ["a(", "a(1", "a([1"])
def test_the_end_is_not_quoted_as_if_it_were_typed(text: str) -> None:
    with pytest.raises(GrammarError, match="found the end at position"):
        parse_calls(text)


@pytest.mark.parametrize("text", [None, 3, ["scaffold"], b"scaffold"])
def test_only_strings_are_read(text: Any) -> None:
    with pytest.raises(GrammarError, match="expected a string such as 'scaffold"):
        parse_calls(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a'b\"c", "'a''b\"c'"),
        ('say "hi"', "'say \"hi\"'"),
        ("it's", '"it\'s"'),
        ("''", "\"''\""),
    ],
)
def test_a_text_with_quotes_is_read_back(value: str, text: str) -> None:
    assert write_value(value) == text
    assert value_of(text) == value


def test_a_number_too_long_and_lists_too_deep_are_refused() -> None:
    with pytest.raises(GrammarError, match="a number of 5000 digits is too long at position 5 of"):
        parse_calls(f"f(x={'9' * 5000})")
    with pytest.raises(GrammarError, match="more than 100 nested lists at position 106 of"):
        parse_calls("f(x=" + "[" * 5000)
