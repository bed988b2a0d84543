"""``rules.toml``: patience and distrust of a coordinator, and agreed constants of the scaling.

::

    deadline_s = 600.0      # any field of kedge.flower.rules.Rules
    minimum = 0.5

    [scaling]               # in place of mean and standard deviation of the members' data
    mean = [0.1307]
    std = [0.3081]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kedge.errors import FieldError, UnknownName
from kedge.files import MAX_BYTES, read_toml
from kedge.flower.rules import Rules
from kedge.flower.scaling import Scaling


def read_rules(path: Path) -> tuple[Rules, Scaling | None]:
    """Read the file; defaults where there is none.

    Raises:
        FieldError: it cannot be read, or a value is wrong.
        UnknownName: there is no such rule.
    """
    try:
        values = read_toml(path, MAX_BYTES)[0]  # lists of the moments of all columns
    except FileNotFoundError:
        return Rules(), None
    except (OSError, ValueError) as error:
        raise FieldError(f"{path} cannot be read: {error}") from None
    scaling = _scaling(values.pop("scaling", None))
    return make_rules(values), scaling


def make_rules(values: Mapping[str, Any]) -> Rules:
    """Rules from values by name."""
    types = {f.name: type(f.default) for f in dataclasses.fields(Rules)}
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name not in types:
            raise UnknownName("rule", name, types)
        if type(value) is int and types[name] is float:
            value = float(value)
        if type(value) is not types[name]:
            raise FieldError(f"{name} = {value!r} is no {types[name].__name__}", name)
        found[name] = value
    return Rules(**found)


def write_rules(rules: Rules, scaling: Scaling | None) -> str:
    """The content of the file."""
    lines = [f"{name} = {value!r}" for name, value in dataclasses.asdict(rules).items()]
    if scaling is not None:
        mean, std = ([float(v) for v in values] for values in scaling)
        lines += ["", "[scaling]", f"mean = {mean}", f"std = {std}"]
    return "\n".join(lines) + "\n"


def _scaling(values: Any) -> Scaling | None:
    if values is None:
        return None
    try:
        mean, std = (tuple(float(v) for v in values[key]) for key in ("mean", "std"))
    except (TypeError, KeyError, ValueError):
        raise FieldError("scaling needs mean = [...] and std = [...]", "scaling") from None
    if len(mean) != len(std):
        raise FieldError("mean and std of the scaling must be as many numbers", "scaling")
    return mean, std
