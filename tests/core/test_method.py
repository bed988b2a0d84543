"""Methods: sums of parts, the string that is the method, and the errors on the way to one."""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest

import kedge.parts  # registers the built-in parts
from kedge.core.method import Method, parse
from kedge.core.part import Doc, Part, Range, make_part, parts, register
from kedge.errors import (
    FieldError,
    GrammarError,
    IncompatibleError,
    KedgeError,
    SeveralErrors,
    TwoAggregators,
    UnknownName,
)
from kedge.parts import MOON, SCAFFOLD, FedAvgM, FedNova, FedProx

NAMES = list(parts)


@dataclass(frozen=True)
class Fields(Part):
    """One field of each kind; not registered, so that no other test sees it."""

    number: Annotated[float, Doc("a number"), Range(0, 1)] = 0.5
    above: Annotated[float, Range(0, open=True)] = 1.0
    rows: Annotated[int, Doc("a count"), Range(1)] = 3
    flag: bool = False
    cut: str = "stage2"
    kind: Literal["soft", "hard"] = "soft"
    sizes: tuple[int, ...] = ()

    name = "fields"


@dataclass(frozen=True)
class Middle(Part):
    """A second aggregator; not registered."""

    name = "middle"

    def combine(self, r: Any) -> Any:
        return r.mean_delta


# -- the string is the method ------------------------------------------------------------------


def random_field(draw: random.Random, kind: Any, notes: tuple[Any, ...]) -> Any:
    span = next((n for n in notes if isinstance(n, Range)), Range())
    low, high = max(span.low, -1e6), min(span.high, 1e6)
    if get_origin(kind) in (Union, UnionType):
        kind = draw.choice(get_args(kind))
    if kind is NoneType:
        return None
    if get_origin(kind) is Literal:
        return draw.choice(get_args(kind))
    if kind is bool:
        return draw.choice([True, False])
    if kind is int:
        return draw.randint(math.ceil(low) + span.open, int(min(high, low + 1000)))
    if kind is float:
        ends = [high] if span.open else [low, high]
        inside = low + (high - low) * draw.choice([draw.random(), draw.random() ** 20 + 1e-9])
        return draw.choice([*ends, inside])
    if kind is str:
        return draw.choice(["stage2", "0", "layer1.0", "a b", "true", "it's", ""])
    if get_origin(kind) is tuple:
        fixed = get_args(kind)[-1] is not Ellipsis
        count = len(get_args(kind)) if fixed else draw.randrange(4)
        return tuple(draw.randint(0, 9) for _ in range(count))
    raise AssertionError(f"no random values for {kind}")


def random_part(draw: random.Random, cls: type[Part]) -> Part:
    hints = get_type_hints(cls, include_extras=True)
    values = {}
    for field in dataclasses.fields(cls):
        if draw.random() < 0.7:
            hint = hints[field.name]
            split = get_args(hint) if get_origin(hint) is Annotated else (hint,)
            values[field.name] = random_field(draw, split[0], split[1:])
    return cls(**values)


@pytest.mark.parametrize("name", NAMES)
def test_a_part_with_random_settings_is_read_back(name: str) -> None:
    draw, seen = random.Random(name), set()
    for _ in range(50):
        try:
            part = random_part(draw, parts[name])
        except FieldError:  # fields that do not go together
            continue
        method = Method((part,))
        assert parse(repr(method)) == method
        assert repr(parse(repr(method))) == repr(method) == str(method) == str(part)
        seen.add(repr(method))
    assert len(seen) > (10 if dataclasses.fields(parts[name]) else 0)


@pytest.mark.parametrize("seed", range(20))
def test_a_random_method_is_read_back(seed: int) -> None:
    draw = random.Random(seed)
    names = draw.sample(NAMES, draw.randrange(1, 5))
    owners = [n for n in names if parts[n]().has("combine")]
    chosen = [random_part(draw, parts[n]) for n in names if n not in owners[1:]]
    method = Method(tuple(chosen))
    assert parse(repr(method)) == method
    assert hash(parse(repr(method))) == hash(method)


def test_every_kind_of_field_is_written_in_the_grammar() -> None:
    part = Fields(0.25, 2, 7, True, "a b", "hard", (1, 2))  # type: ignore[arg-type]
    assert str(part) == (
        'fields(number=0.25, above=2.0, rows=7, flag=true, cut="a b", kind=hard, sizes=[1, 2])'
    )
    assert str(Fields()) == "fields"
    assert str(Fields(flag=True)) == "fields(flag=true)"


def test_fedavg_is_the_empty_sum() -> None:
    assert repr(Method()) == "fedavg"
    assert parse("fedavg") == parse("fedavg()") == Method()
    assert parse("fedavg+fedprox(mu=0.5)") == Method((FedProx(mu=0.5),))
    for text in ("fedavg(1)", "fedavg(mu=1)", "fedavg:fedcog"):
        with pytest.raises(FieldError, match="fedavg has no fields and no presets"):
            parse(text)


def test_a_method_and_a_part_are_taken_as_they_are() -> None:
    method = Method((FedProx(),))
    assert parse(method) is method
    assert parse(FedProx()) == method


def test_fields_by_position_by_name_and_by_preset() -> None:
    assert parse("fedprox(0.5)") == parse("fedprox(mu=0.5)") == Method((FedProx(mu=0.5),))
    assert parse("moon:fedcog") == Method((MOON(**MOON.presets["fedcog"]),))
    assert parse("moon:fedcog(tau=0.7)") == Method(
        (MOON(**(MOON.presets["fedcog"] | {"tau": 0.7})),)
    )
    assert parse("moon:fedcog(1.5)").parts[0].mu == 1.5  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_neutral_and_tiny_setting_is_valid(name: str) -> None:
    cls = parts[name]
    for preset in cls.presets:
        method = parse(f"{name}:{preset}")
        assert method == Method((cls(**cls.presets[preset]),))
        assert parse(repr(method)) == method
    for values in (cls.neutral or {}, cls.tiny):
        part = cls(**values)
        assert all(getattr(part, f) == v for f, v in values.items())


def test_integers_and_lists_become_what_the_field_is() -> None:
    part = Fields(number=1, sizes=[1, 2])  # type: ignore[arg-type]
    assert type(part.number) is float
    assert part.sizes == (1, 2)
    assert hash(part) == hash(Fields(number=1.0, sizes=(1, 2)))
    assert parse("fedprox(mu=1)") == parse("fedprox(mu=1.0)")


def test_a_number_from_numpy_becomes_a_plain_one() -> None:
    method = Method((FedProx(mu=np.float64(0.3)),))
    assert repr(method) == "fedprox(mu=0.3)"
    assert parse(repr(method)) == method


# -- sums --------------------------------------------------------------------------------------


def test_plus_joins_parts_and_methods_in_order() -> None:
    a, b, c = SCAFFOLD(), FedProx(mu=0.1), MOON()
    assert a + b == Method((a, b)) == parse("scaffold+fedprox(mu=0.1)")
    assert (a + b) + c == a + (b + c) == Method((a, b, c))
    assert Method() + a == a + Method() == Method((a,))
    assert a + b != b + a
    assert repr(b + a) == "fedprox(mu=0.1)+scaffold"


def test_a_part_appears_once() -> None:
    with pytest.raises(IncompatibleError, match="fedprox is in the method twice"):
        FedProx(mu=0.1) + FedProx(mu=0.2)
    with pytest.raises(IncompatibleError, match="fedprox is in the method twice"):
        parse("fedprox+scaffold+fedprox")


def test_one_part_combines() -> None:
    with pytest.raises(TwoAggregators, match="fednova and middle both define how updates are comb"):
        FedNova() + FedProx() + Middle()
    assert (FedNova() + FedAvgM()).parts[0].has("combine")
    assert "middle" not in parts  # this test's part is not known to others


def test_methods_are_values() -> None:
    method = SCAFFOLD() + FedProx()
    assert method == SCAFFOLD() + FedProx()
    assert len({method, SCAFFOLD() + FedProx(), SCAFFOLD() + FedProx(mu=0.3)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.parts = ()  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.parts[1].mu = 3.0  # type: ignore[attr-defined]


def test_a_string_is_read_when_it_is_added_and_anything_else_refused() -> None:
    assert FedProx() + "scaffold" == parse("fedprox+scaffold")
    with pytest.raises(KedgeError, match="expected a string such as"):
        FedProx() + 3  # type: ignore[operator]


# -- errors ------------------------------------------------------------------------------------


def test_an_unknown_part_preset_or_field_is_corrected() -> None:
    with pytest.raises(
        UnknownName, match=r"no part 'scafold'. Did you mean 'scaffold'.*See: kedge"
    ):
        parse("fedprox+scafold")
    with pytest.raises(UnknownName, match="no part 'SCAFFOLD'. Did you mean 'scaffold'"):
        parse("SCAFFOLD")
    with pytest.raises(UnknownName, match="no part 'fedavgg'. Did you mean 'fedavg'"):
        parse("fedavgg")
    with pytest.raises(UnknownName, match=r"a part of your own needs --load FILE\.py$"):
        parse("xyzzy")
    with pytest.raises(UnknownName, match=r"no preset of moon 'fedcogg'. Did you mean 'fedcog'"):
        parse("moon:fedcogg")
    with pytest.raises(GrammarError, match=r"scaffold:best: scaffold has no presets; write scaff"):
        parse("scaffold:best")
    with pytest.raises(
        UnknownName, match=r"no field of moon 'projecton'. Did you mean 'projection"
    ):
        parse("moon(projecton=3)")
    with pytest.raises(UnknownName, match=r"See: kedge show moon"):
        parse("moon(xyzzy=3)")


def test_what_is_wrong_with_several_parts_is_reported_together() -> None:
    with pytest.raises(SeveralErrors) as caught:
        parse("fedprox(mu=-1)+scafold+moon(tua=1)")
    for piece in ("fedprox.mu = -1 is below 0", "no part 'scafold'", "no field of moon 'tua'"):
        assert piece in str(caught.value)


def test_too_many_values_and_values_given_twice() -> None:
    with pytest.raises(FieldError, match=r"fedprox takes 1 field \(mu\), but 2 values are given"):
        parse("fedprox(0.1, 0.2)")
    with pytest.raises(FieldError, match=r"fedprox\.mu is given twice, by position and by name"):
        parse("fedprox(0.1, mu=0.2)")
    with pytest.raises(GrammarError, match="'mu' is given twice"):
        parse("fedprox(mu=0.1, mu=0.2)")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"number": -0.1}, r"fields\.number = -0\.1 is below 0"),
        ({"number": 1.5}, r"fields\.number = 1\.5 is above 1"),
        ({"above": 0}, r"fields\.above = 0(\.0)? is not above 0"),
        ({"above": -1.0}, r"fields\.above = -1\.0 is not above 0"),
        ({"number": math.nan}, r"fields\.number = nan is not a finite number"),
        ({"number": "half"}, r"fields\.number = 'half' is not a finite number"),
        ({"number": True}, r"fields\.number = True is not a finite number"),
        ({"rows": 0}, r"fields\.rows = 0 is below 1"),
        ({"rows": 2.0}, r"fields\.rows = 2\.0 is not a whole number"),
        ({"rows": True}, r"fields\.rows = True is not a whole number"),
        ({"flag": 1}, r"fields\.flag = 1 is not true or false"),
        ({"flag": "true"}, r"fields\.flag = 'true' is not true or false"),
        ({"cut": 3}, r"fields\.cut = 3 is not text"),
        ({"kind": "harder"}, r"fields\.kind = 'harder' is not one of: soft, hard"),
        ({"sizes": 3}, r"fields\.sizes = 3 is not a list of whole numbers"),
        ({"number": None}, r"fields\.number = None is not a finite number"),
    ],
)
def test_a_wrong_value_is_named_with_its_field(values: dict[str, Any], message: str) -> None:
    with pytest.raises(FieldError, match=message):
        Fields(**values)


def test_the_ends_of_a_range_belong_to_it_unless_it_is_open() -> None:
    assert Fields(number=0).number == 0
    assert Fields(number=1).number == 1
    assert Fields(rows=1).rows == 1
    assert Fields(above=1e-300).above == 1e-300


def test_infinity_is_not_a_setting() -> None:
    with pytest.raises(FieldError):
        FedProx(mu=math.inf)


def test_what_a_tuple_holds_is_checked() -> None:
    with pytest.raises(FieldError, match=r"fields\.sizes"):
        Fields(sizes=("a", 2.5))  # type: ignore[arg-type]


# -- parts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_registered_part_is_well_formed(name: str) -> None:
    cls = parts[name]
    part = cls()
    assert part.name == name == cls.__name__.lower()
    assert part.hooks()
    assert str(part) == name
    assert (cls.__doc__ or "").strip()
    rows = cls.schema().rows()
    assert [row[0] for row in rows] == [f.name for f in dataclasses.fields(cls)]
    assert all(row.doc for row in rows), "every field has its help"


def test_the_schema_tells_type_default_range_and_text() -> None:
    rows = {row[0]: row[1:] for row in Fields.schema().rows()}
    assert rows["number"] == ("float", "0.5", "at least 0 and at most 1", "a number")
    assert rows["kind"] == ("soft | hard", "soft", "", "")
    assert rows["flag"] == ("bool", "false", "", "")


def test_only_overridden_hooks_count() -> None:
    assert FedProx().hooks() == ["term"]
    assert Middle().hooks() == ["combine"]
    assert FedProx().has("term")
    assert not FedProx().has("reply")


def test_formulas_of_what_is_sent() -> None:
    part = Fields(rows=4, flag=True)
    symbols = {"P": 100, "H": 10}
    assert part.count("2 * P + rows", symbols) == 204
    assert part.count("-H", symbols) == -10
    assert part.count("P / 2 if flag else 0", symbols) == 50
    assert part.count("P / 3", symbols) == 33  # whole numbers
    assert type(part.count("P / 2", symbols)) is int
    assert part.count("0", symbols) == 0
    for wrong in ("__import__('os')", "P ** 2", "[P]"):
        with pytest.raises((ValueError, KeyError)):
            part.count(wrong, symbols)


def test_make_part_builds_what_a_string_would() -> None:
    assert make_part("fedprox", None, (), {"mu": 0.2}) == FedProx(mu=0.2)
    assert make_part("fedprox", "fedbr", (), {}) == FedProx(mu=0.1)


def test_a_new_part_is_registered_under_its_class_name_and_can_be_read() -> None:
    @register
    @dataclass(frozen=True)
    class TestMethodPart(Part):
        beta: float = 1.0

    try:
        assert TestMethodPart.name == "testmethodpart"
        assert parse("testmethodpart(beta=2)+fedprox") == TestMethodPart(beta=2) + FedProx()
    finally:
        parts.remove("testmethodpart")
    with pytest.raises(UnknownName):
        parse("testmethodpart")


def test_a_part_made_from_another_part_has_its_own_name() -> None:
    known = set(parts)

    @dataclass(frozen=True)
    class TestMethodChild(FedProx):
        pass

    try:
        register(TestMethodChild)
        assert TestMethodChild.name == "testmethodchild"
    finally:
        for name in set(parts) - known:
            parts.remove(name)


def test_a_part_that_is_not_registered_still_has_a_name() -> None:
    @dataclass(frozen=True)
    class One(Part):
        pass

    @dataclass(frozen=True)
    class Two(Part):
        pass

    assert repr(One() + Two()) == "one+two"


@pytest.mark.parametrize("field", ["count", "private", "tasks"])
def test_a_field_may_not_hide_a_hook_or_a_method_of_parts(field: str) -> None:
    known = set(parts)
    made = dataclasses.make_dataclass(
        "TestMethodHiding", [(field, float, 1.0)], bases=(Part,), frozen=True
    )
    try:
        with pytest.raises(KedgeError, match=field):
            register(made)
    finally:
        for name in set(parts) - known:
            parts.remove(name)


def test_the_package_has_every_part_by_its_class_name() -> None:
    assert len(NAMES) >= 9
    for name in NAMES:
        assert getattr(kedge.parts, parts[name].__name__) is parts[name]
    with pytest.raises(AttributeError):
        _ = kedge.parts.NoSuchPart
