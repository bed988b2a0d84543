"""A dataclass from the values of a JSON or TOML file, strictly."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from kedge.errors import FieldError, UnknownName
from kedge.schema.binding import REQUIRED, ErrorCollector, Option, default_of

T = TypeVar("T")


def read_fields(cls: type[T], values: Any, where: str = "", complete: bool = False) -> T:
    """An instance of a dataclass from plain values.

    Fields may be of all types that options have, and dataclasses, tuples and mappings of these.

    Args:
        cls: the dataclass.
        values: a mapping from the names of fields to values. Lists become tuples, and mappings
            become the dataclasses that stand in their place.
        where: its place, which starts every message.
        complete: whether fields with a default must be there, too, as in files that kedge writes.

    Raises:
        KedgeError: a key is unknown or missing, or a value has the wrong type or is out of range;
            all of these together.

    >>> Node = dataclasses.make_dataclass("Node", [("ports", tuple[int, ...]), ("name", str, "")])
    >>> read_fields(Node, {"ports": [1, 2]})
    Node(ports=(1, 2), name='')
    >>> read_fields(Node, {"ports": [1, 2.5]}, "node")
    Traceback (most recent call last):
    kedge.errors.FieldError: node.ports[1] = 2.5 is not a whole number
    """
    _check_mapping(values, where or "the content")
    hints = get_type_hints(cls, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    errors, found = ErrorCollector(), {}
    for key in (key for key in values if key not in fields):
        errors.add(UnknownName(f"key of {where}" if where else "key", str(key), fields))
    for name, field in fields.items():
        place = f"{where}.{name}" if where else name
        with errors.collect():
            if name in values:
                found[name] = _read(values[name], hints[name], place, complete)
            elif complete or default_of(field) is REQUIRED:
                raise FieldError(f"{place} is missing", name)
    errors.raise_all()
    return cls(**found)


def _read(value: Any, hint: Any, place: str, complete: bool) -> Any:
    """A value in the type of a hint."""
    origin, inner = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return read_fields(hint, value, place, complete)  # type: ignore[arg-type]
    if origin in (Union, types.UnionType) and types.NoneType in inner:
        members = tuple(member for member in inner if member is not types.NoneType)
        return None if value is None else _read(value, Union[members], place, complete)  # noqa: UP007
    if isinstance(origin, type) and issubclass(origin, Mapping):
        _check_mapping(value, place)
        return {k: _read(v, inner[1], f"{place}.{k}", complete) for k, v in value.items()}
    if origin is tuple and inner[-1] is Ellipsis and isinstance(value, (list, tuple)):
        return tuple(_read(v, inner[0], f"{place}[{i}]", complete) for i, v in enumerate(value))
    return Option(place, hint).check(value)


def _check_mapping(value: Any, place: str) -> None:
    if not isinstance(value, Mapping):
        raise FieldError(f"{place} is {value!r:.40}, which is no table of names and values")
