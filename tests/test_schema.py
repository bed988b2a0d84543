"""Signatures as schemas: binding, types, ranges, names, all errors together, and writing back."""

from __future__ import annotations

import itertools
import json
import math
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pytest

from kedge.errors import (
    FieldError,
    GrammarError,
    KedgeError,
    SeveralErrors,
    UnknownName,
)
from kedge.grammar import Call, parse_call
from kedge.registry import Registry
from kedge.schema import (
    Choice,
    Count,
    Doc,
    ErrorCollector,
    Length,
    NotNegative,
    Option,
    Positive,
    Range,
    Read,
    bind_sum,
    read_fields,
    schema_of,
)


def _read_even(text: str) -> None:
    if len(text) % 2:
        raise GrammarError(f"{text!r} is odd")


@dataclass(frozen=True)
class Thing:
    number: Annotated[float, Doc("a number"), Range(0, 1)] = 0.5
    above: Positive = 1.0
    rate: Annotated[float, Range(0, 1, open_high=True)] = 0.0
    rows: Count = 2
    flag: bool = False
    cut: str = "stage2"
    kind: Literal["soft", "hard"] = "soft"
    sizes: Annotated[tuple[int, ...], Range(1), Length(1)] = (8,)
    betas: tuple[float, float] = (0.9, 0.999)
    least: Annotated[Count | Literal["classes"], Doc("fewest")] = 10
    label: str | tuple[str, ...] | None = None
    pace: Annotated[float | None, Doc("pace"), Range(0)] = None
    mode: Annotated[str, Choice(lambda: ("slow", "fast"))] = "slow"
    even: Annotated[str, Read(_read_even)] = ""

    presets: ClassVar[dict[str, dict[str, Any]]] = {"paper": {"rows": 7}, "plain": {"rows": 2}}


SCHEMA = schema_of(Thing, "thing", presets=True)


def read(text: str) -> dict[str, Any]:
    return SCHEMA.bind(parse_call(text))


def step(labels: Any, *, every: Count, gamma: Positive = 0.1, groups: Any = None) -> Any:
    return every, gamma


def plain(x: int, *, width=8) -> int:  # type: ignore[no-untyped-def]
    return width


# -- reading -----------------------------------------------------------------------------------


def test_a_dataclass_and_a_function_are_read_alike() -> None:
    assert list(SCHEMA.options) == [
        "number", "above", "rate", "rows", "flag", "cut", "kind", "sizes", "betas", "least",
        "label", "pace", "mode", "even",
    ]  # fmt: skip
    assert SCHEMA.noun == "field"
    schema = schema_of(step, "step", hidden=("groups",))
    assert list(schema.options) == ["every", "gamma"]
    assert schema.noun == "option"
    assert schema.signature() == "step(every, gamma=0.1)"
    assert schema_of(lambda: 0, "iid").signature() == "iid"
    assert "label=..., pace=none, mode=slow" in SCHEMA.signature()


def test_values_by_position_by_name_and_from_a_preset() -> None:
    assert read("thing(0.25, 3)")["number"] == 0.25
    assert read("thing(0.25, 3)")["above"] == 3.0
    assert read("thing(0.25, rows=4)")["rows"] == 4
    assert read("thing:paper")["rows"] == 7
    assert read("thing:paper(rows=9)")["rows"] == 9
    assert read("thing") == {key: getattr(Thing(), key) for key in SCHEMA.options}


def test_an_option_without_a_type_takes_anything() -> None:
    assert schema_of(plain, "plain").bind(parse_call("plain(width=[1, a])")) == {"width": (1, "a")}


def test_values_are_coerced_to_their_types() -> None:
    values = SCHEMA.check(
        {"number": 1, "rows": np.int64(3), "sizes": [4, 5], "betas": [0, 1], "above": np.float32(2)}
    )
    assert [type(values[k]) for k in ("number", "rows", "above")] == [float, int, float]
    assert values["sizes"] == (4, 5)
    assert values["betas"] == (0.0, 1.0)
    assert all(type(b) is float for b in values["betas"])
    assert SCHEMA.check({"label": ["a", "b"]})["label"] == ("a", "b")
    assert SCHEMA.check({"label": None})["label"] is None
    assert SCHEMA.check({"least": "classes"})["least"] == "classes"


def test_none_is_a_word_where_no_text_is_a_value() -> None:
    for text in ("thing", "thing(pace=none)", "thing(pace=None)", 'thing(pace="none")'):
        assert read(text)["pace"] is None
    assert SCHEMA.check({"pace": None})["pace"] is None
    assert read("thing(pace=0)")["pace"] == 0.0
    assert read("thing(label=none)")["label"] == "none"
    assert read("thing(cut=none)")["cut"] == "none"


# -- what is wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"number": -0.1}, "thing.number = -0.1 is below 0"),
        ({"number": 1.5}, "thing.number = 1.5 is above 1"),
        ({"number": math.nan}, "thing.number = nan is not a finite number at least 0 and at most"),
        ({"number": math.inf}, "thing.number = inf is not a finite number"),
        ({"number": 10**400}, "is too large"),
        ({"number": "half"}, "thing.number = 'half' is not a finite number"),
        ({"number": True}, "thing.number = True is not a finite number"),
        ({"number": None}, "thing.number = None is not a finite number"),
        ({"above": 0}, "thing.above = 0 is not above 0"),
        ({"rate": 1}, "thing.rate = 1 is not below 1"),
        ({"rows": 0}, "thing.rows = 0 is below 1"),
        ({"rows": 2.0}, "thing.rows = 2.0 is not a whole number at least 1"),
        ({"rows": True}, "thing.rows = True is not a whole number"),
        ({"flag": 1}, "thing.flag = 1 is not true or false"),
        ({"cut": 3}, "thing.cut = 3 is not text"),
        (
            {"kind": "harder"},
            "thing.kind = 'harder' is not one of: soft, hard. Did you mean 'hard'",
        ),
        ({"kind": 3}, "thing.kind = 3 is not one of: soft, hard"),
        ({"mode": "fst"}, "thing.mode = 'fst' is not one of: slow, fast. Did you mean 'fast'?"),
        ({"sizes": 3}, "thing.sizes = 3 is not a list of whole numbers"),
        ({"sizes": (1, "a")}, "thing.sizes = (1, 'a') is not a list of whole numbers"),
        ({"sizes": (1, 0)}, "thing.sizes = (1, 0) holds 0, which is below 1"),
        ({"sizes": ()}, "thing.sizes is empty; give at least 1"),
        ({"betas": (0.9,)}, "thing.betas = (0.9,) is not a list of 2 finite numbers"),
        ({"least": 0}, "thing.least = 0 is not a whole number at least 1 or 'classes'"),
        ({"least": 2.5}, "thing.least = 2.5 is not a whole number at least 1 or 'classes'"),
        ({"label": 3}, "thing.label = 3 is not text or a list of texts"),
        ({"pace": -1}, "thing.pace = -1 is below 0"),
        ({"pace": "slow"}, "thing.pace = 'slow' is not a finite number at least 0 or none"),
        ({"even": "abc"}, "'abc' is odd"),
    ],
)
def test_a_wrong_value_is_named_with_its_option(values: dict[str, Any], message: str) -> None:
    with pytest.raises(KedgeError) as caught:
        SCHEMA.check(values)
    assert message in str(caught.value)
    if isinstance(caught.value, FieldError):
        assert caught.value.field == next(iter(values))


def test_numpy_values_are_shown_as_numbers() -> None:
    with pytest.raises(FieldError, match=r"thing.rows = 0 is below 1"):
        SCHEMA.check({"rows": np.int64(0)})


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (
            "thing(nmber=1)",
            UnknownName,
            "no field of thing 'nmber'. Did you mean 'number'? See: ke",
        ),
        ("thing:papper", UnknownName, "no preset of thing 'papper'. Did you mean 'paper'?"),
        ("thing(0.1, number=0.2)", FieldError, "thing.number is given twice, by position and by n"),
    ],
)
def test_a_wrong_name_is_corrected(text: str, error: type[KedgeError], message: str) -> None:
    with pytest.raises(error) as caught:
        read(text)
    assert message in str(caught.value)


def test_presets_missing_values_and_values_too_many() -> None:
    schema = schema_of(step, "step", hidden=("groups",))
    with pytest.raises(FieldError, match=r"step.every has no default; write step\(every=...\)"):
        schema.bind(parse_call("step"))
    with pytest.raises(GrammarError, match=r"step has no presets; write step\(every=...\)"):
        schema.bind(parse_call("step:a(3)"))
    with pytest.raises(FieldError, match=r"step takes 2 options \(every, gamma\), but 3 values ar"):
        schema.bind(parse_call("step(1, 2, 3)"))
    with pytest.raises(UnknownName, match="no option of step 'groups'"):
        schema.bind(parse_call("step(3, groups=1)"))
    with pytest.raises(GrammarError, match=r"options are written by name, as in step\(every=...\)"):
        schema.bind(parse_call("step(3)"), by_name=True)
    none = schema_of(lambda: 0, "iid")
    with pytest.raises(FieldError, match=r"iid takes 0 options \(none\), but 1 value is given"):
        none.bind(parse_call("iid(3)"))


def test_all_errors_of_a_call_are_reported_together() -> None:
    with pytest.raises(SeveralErrors) as caught:
        read("thing(number=2, rows=0, colour=red)")
    text = str(caught.value)
    assert text.startswith("3 things are wrong:\n")
    for piece in ("no field of thing 'colour'", "number = 2 is above 1", "rows = 0 is below 1"):
        assert piece in text
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == text


def test_all_errors_of_several_calls_are_reported_together() -> None:
    registry: Registry[Any] = Registry("schedule")
    registry.add("step", step)
    with pytest.raises(SeveralErrors) as caught:
        bind_sum(registry, "step(0)+stp(3)+step(1, gamma=0)")
    assert [type(e).__name__ for e in caught.value.errors] == [
        "FieldError", "UnknownName", "FieldError",
    ]  # fmt: skip
    (bound,) = bind_sum(registry, "step(3)")
    assert bound(None) == (3, 0.1)


def test_a_single_collected_error_is_raised_as_it_is() -> None:
    errors = ErrorCollector()
    errors.raise_all()
    with errors.collect():
        raise GrammarError("odd")
    with pytest.raises(GrammarError, match="^odd$"):
        errors.raise_all()


# -- writing -----------------------------------------------------------------------------------

VALUES = {
    "number": (0.5, 0.25, 1),
    "rows": (2, 3),
    "flag": (False, True),
    "cut": ("stage2", "a b", "true"),
    "kind": ("soft", "hard"),
    "sizes": ((8,), (64, 32)),
    "betas": ((0.9, 0.999), (0, 0.5)),
    "least": (10, "classes"),
    "pace": (None, 0.5),
}


@pytest.mark.parametrize("first", [False, True])
def test_what_is_written_is_read_back(first: bool) -> None:
    for chosen in itertools.product(*VALUES.values()):
        values = SCHEMA.check(dict(zip(VALUES, chosen, strict=True)))
        text = SCHEMA.write(values, first)
        assert SCHEMA.bind(parse_call(text)) == values
        assert SCHEMA.write(SCHEMA.bind(parse_call(text)), first) == text


def test_only_what_differs_is_written() -> None:
    assert SCHEMA.write(SCHEMA.check({})) == "thing"
    assert SCHEMA.write(SCHEMA.check({}), first=True) == "thing(number=0.5)"
    assert SCHEMA.write(SCHEMA.check({"rows": 3, "flag": True})) == "thing(rows=3, flag=true)"


# -- help --------------------------------------------------------------------------------------


def test_rows_of_help() -> None:
    rows = {row.name: row[1:] for row in SCHEMA.rows()}
    assert rows["number"] == ("float", "0.5", "at least 0 and at most 1", "a number")
    assert rows["kind"] == ("soft | hard", "soft", "", "")
    assert rows["mode"] == ("slow | fast", "slow", "", "")
    assert rows["sizes"] == ("list of int", "[8]", "at least 1", "")
    assert rows["betas"][0] == "list of 2 float"
    assert rows["least"] == ("int | classes", "10", "at least 1", "fewest")
    assert rows["label"][:2] == ("str | list of str", "-")
    assert rows["pace"] == ("float | none", "none", "at least 0", "pace")
    assert schema_of(step, "step").rows()[0].default == ""
    assert Option("n", NotNegative).row().range == "at least 0"


def test_presets_equal_to_the_defaults_are_known_as_such() -> None:
    assert SCHEMA.is_default(Thing.presets["plain"])
    assert not SCHEMA.is_default(Thing.presets["paper"])


def test_a_call_may_be_bound_without_text() -> None:
    assert SCHEMA.bind(Call("thing", None, (), {"rows": 5}))["rows"] == 5


# --- dataclasses from the values of files --------------------------------------------------------


@dataclass(frozen=True)
class Node:
    name: str
    port: Annotated[int, Range(1)]
    scale: float = 1.0


@dataclass(frozen=True)
class Network:
    nodes: tuple[Node, ...]
    rows: tuple[tuple[float, ...], ...] = ()
    fill: tuple[float, ...] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    kind: Literal["a", "b"] = "a"


def test_a_dataclass_is_read_from_what_json_made_of_it() -> None:
    network = Network(
        (Node("n", 1), Node("m", 2, 0.5)), ((1.0, 2.0), ()), (3.0,), {"torch": "2"}, "b"
    )
    values = json.loads(json.dumps(asdict(network)))
    assert read_fields(Network, values, complete=True) == network
    assert read_fields(Network, {"nodes": [], "fill": None}) == Network(())


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([], r"net is \[\], which is no table of names and values"),
        ({}, "^net.nodes is missing$"),
        ({"nodes": {}}, "net.nodes = {} is not a list"),
        ({"nodes": [3]}, r"^net.nodes\[0\] is 3, which is no table"),
        ({"nodes": [], "nods": 1}, "no key of net 'nods'. Did you mean 'nodes'"),
        ({"nodes": [{"name": "n", "port": 1, "x": 0}]}, r"no key of net.nodes\[0\] 'x'"),
        ({"nodes": [{"name": "n", "port": 0}]}, r"net.nodes\[0\].port = 0 is below 1"),
        ({"nodes": [{"name": "n", "port": True}]}, r"net.nodes\[0\].port = True is not a whole"),
        ({"nodes": [{"name": 1, "port": 2}]}, r"net.nodes\[0\].name = 1 is not text"),
        ({"nodes": [], "rows": [[1, "2"]]}, r"net.rows\[0\]\[1\] = '2' is not a finite number"),
        ({"nodes": [], "rows": "12"}, "net.rows = '12' is not a list"),
        ({"nodes": [], "fill": "none"}, "net.fill = 'none' is not a list"),
        ({"nodes": [], "versions": ["a"]}, r"net.versions is \['a'\], which is no table"),
        ({"nodes": [], "versions": {"a": 1}}, "net.versions.a = 1 is not text"),
        ({"nodes": [], "kind": "c"}, "net.kind = 'c' is not one of: a, b"),
    ],
)
def test_a_wrong_file_is_told_what_and_where(values: Any, says: str) -> None:
    with pytest.raises(KedgeError, match=says):
        read_fields(Network, values, "net")


def test_all_that_is_wrong_in_a_file_is_told_at_once() -> None:
    with pytest.raises(SeveralErrors) as caught:
        read_fields(Network, {"nodes": [{}], "kind": 1, "b": 2}, "net")
    assert len(caught.value.errors) == 4
    with pytest.raises(SeveralErrors, match=r"net.rows is missing\n  net.fill is missing"):
        read_fields(Network, {"nodes": []}, "net", complete=True)
