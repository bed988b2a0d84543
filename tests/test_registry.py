"""Registries and the errors that suggest a name."""

from __future__ import annotations

import pytest

import kedge.errors as errors
from kedge.errors import KedgeError, UnknownName, nearest
from kedge.registry import Registry


def colours(see: str = "") -> Registry[str]:
    registry: Registry[str] = Registry("colour", see=see)
    for name in ("red", "green", "Blue", "blue-green"):
        registry.add(name, name.upper())
    return registry


def test_names_lead_to_things() -> None:
    registry = colours()
    assert registry["red"] == "RED"
    assert "red" in registry
    assert "rod" not in registry
    assert len(registry) == 4
    assert list(registry) == ["Blue", "blue-green", "green", "red"]


def test_register_is_a_decorator_that_returns_what_it_got() -> None:
    registry: Registry[type] = Registry("thing")

    @registry.register("one")
    class One:
        pass

    assert registry["one"] is One


def test_a_name_is_given_once() -> None:
    registry = colours()
    with pytest.raises(KedgeError, match="colour 'red' is registered twice; choose another name"):
        registry.add("red", "other")
    assert registry["red"] == "RED"
    assert registry.add("green", registry["green"]) == "GREEN"  # the same thing again is no harm


def test_remove_forgets_and_does_not_mind_twice() -> None:
    registry = colours()
    registry.remove("red")
    registry.remove("red")
    assert "red" not in registry


def test_match_by_part_of_a_name_or_by_wildcards() -> None:
    registry = colours()
    assert registry.match() == ["Blue", "blue-green", "green", "red"]
    assert registry.match("green") == ["blue-green", "green"]
    assert registry.match("b*") == ["Blue", "blue-green"]
    assert registry.match("R?D") == ["red"]
    assert registry.match("[rg]*") == ["green", "red"]
    assert registry.match("purple") == []


def test_a_near_name_is_suggested_whatever_its_case() -> None:
    with pytest.raises(UnknownName) as caught:
        colours(see="kedge list")["BLEU"]
    assert str(caught.value) == "no colour 'BLEU'. Did you mean 'Blue'? See: kedge list"
    assert (caught.value.kind, caught.value.name) == ("colour", "BLEU")


def test_all_names_are_listed_where_none_is_near() -> None:
    with pytest.raises(UnknownName, match=r"There are: Blue, blue-green, green, red\.$"):
        colours()["xyzzy"]
    with pytest.raises(UnknownName, match=r"no colour 'red'\. There are: none\.$"):
        Registry[str]("colour")["red"]


def test_nearest_is_ordered_and_short() -> None:
    assert nearest("scafold", ["fedprox", "scaffold", "scaffnew"])[0] == "scaffold"
    assert len(nearest("fed", ["feda", "fedb", "fedc", "fedd"])) == 2
    assert nearest("zzz", ["scaffold"]) == []


def test_every_error_is_a_kedge_error_and_in_the_drawn_tree() -> None:
    kinds = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, Exception)
    ]
    assert len(kinds) > 5
    for kind in kinds:
        assert issubclass(kind, KedgeError)
        assert kind.__name__ in (errors.__doc__ or "")
        assert kind.__doc__
