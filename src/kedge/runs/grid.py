"""A grid of settings, and the configuration of every combination.

A key is a setting of a run (``lr``, ``partition``, ``method``, ...) or a field of a part in its
method (``fedprox.mu``). On the command line values are separated by commas, those inside brackets
or quotes aside: ``lr=0.01,0.1 partition=iid,dirichlet(0.1) fedprox.mu=0.01,0.1``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_origin

from kedge.core.method import Method, parse
from kedge.core.part import parts
from kedge.errors import FieldError, GrammarError, UnknownName
from kedge.grammar import parse_call, write_value
from kedge.runs.config import FIELDS, Config, load_config, read_value

Grid = Mapping[str, Sequence[Any]]


class Setting(NamedTuple):
    """One combination: the values of the grid's keys, and the whole configuration."""

    values: dict[str, Any]
    config: Config

    @property
    def name(self) -> str:
        """``lr=0.1 fedprox.mu=0.01``."""
        return " ".join(f"{key}={written(value)}" for key, value in self.values.items())


def read_words(words: Iterable[str]) -> dict[str, list[Any]]:
    """A grid as it is typed, one word per key."""
    grid: dict[str, list[Any]] = {}
    for word in words:
        key, equals, text = (piece.strip() for piece in word.partition("="))
        if not equals:
            raise FieldError(f"expected key=value,value, found {word!r}, e.g. lr=0.01,0.1")
        key = key.replace("-", "_")
        if key in grid:
            raise FieldError(f"{key} is named twice; write all its values in one word")
        _check_key(key)
        if "." in key:
            grid[key] = _field_values(key, text)
        elif get_origin(FIELDS[key]) is tuple:  # a list by itself, as seeds are
            grid[key] = [read_value(key, text)] if text else []
        else:
            grid[key] = [read_value(key, piece) for piece in _split(text)]
    return grid


def combine(
    grid: Grid, path: str | Path | None = None, flags: Mapping[str, Any] | None = None
) -> list[Setting]:
    """Every combination, in the order in which the keys are named."""
    grid = {key: _values(key, values) for key, values in grid.items()}
    if not grid:
        raise FieldError("there is nothing to sweep; name a setting and its values: lr=0.01,0.1")
    shown = [key for key, values in grid.items() if len(values) > 1] or list(grid)
    found = []
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        plain = {key: value for key, value in chosen.items() if "." not in key}
        config = load_config(path, flags=dict(flags or {}) | plain)
        fields = {key: value for key, value in chosen.items() if "." in key}
        if fields:
            method = _with_fields(parse(config.method), fields)
            config = dataclasses.replace(config, method=repr(method))
        found.append(Setting({key: chosen[key] for key in shown}, config))
    return found


def written(value: Any) -> str:
    """A value as it is typed."""
    if isinstance(value, (tuple, list)):
        return ",".join(map(written, value))
    if isinstance(value, float):
        return f"{value:.12g}"
    return value if isinstance(value, str) else write_value(value)


def _check_key(key: str) -> None:
    part, dot, field = key.partition(".")
    if not dot and key not in FIELDS:
        raise UnknownName("setting", key, FIELDS, see="kedge run --help, or PART.FIELD")
    if dot:
        if part not in parts:
            raise UnknownName("part", part, parts, see="kedge list")
        names = [f.name for f in dataclasses.fields(parts[part])]
        if field not in names:
            raise UnknownName(f"field of {part}", field, names, see=f"kedge show {part}")


def _values(key: str, values: Any) -> list[Any]:
    """The values of a key, checked as far as they can be before they meet the others."""
    _check_key(key)
    if isinstance(values, (str, Mapping)) or not isinstance(values, Iterable):
        raise FieldError(f"{key}: give a list of values, not {values!r}")
    values = list(values)
    if get_origin(FIELDS.get(key)) is tuple and not all(
        isinstance(v, (list, tuple)) for v in values
    ):
        values = [tuple(values)]  # one list of seeds, not a list of lists
    if not values:
        raise FieldError(f"{key} has no value; write for example {key}={_example(key)}")
    for i, value in enumerate(values):
        if value in values[:i]:
            raise FieldError(f"{key} has the value {written(value)} twice")
    return values


def _example(key: str) -> str:
    part, dot, field = key.partition(".")
    if dot:
        return written({f.name: f.default for f in dataclasses.fields(parts[part])}[field])
    return written(getattr(Config(), key))


def _field_values(key: str, text: str) -> list[Any]:
    try:
        call = parse_call(f"values({text})")
    except GrammarError:
        raise FieldError(f"{key}={text} cannot be read; write values with commas between") from None
    if call.kwargs:
        raise FieldError(f"{key}={text} cannot be read; write values with commas between")
    return list(call.args)


def _with_fields(method: Method, fields: Mapping[str, Any]) -> Method:
    new = {part.name: part for part in method.parts}
    for key, value in fields.items():
        part, _, field = key.partition(".")
        if part not in new:
            wanted = f"{method}+{part}" if method.parts else part
            raise FieldError(
                f"{key}: {part} is not in the method {method}; write --method {wanted}"
            )
        new[part] = dataclasses.replace(new[part], **{field: value})
    return Method(tuple(new.values()))


def _split(text: str) -> list[str]:
    """Pieces between the commas that are outside of brackets and quotes.

    >>> _split('iid,dirichlet(0.1, min_size=2),"a,b"')
    ['iid', 'dirichlet(0.1, min_size=2)', '"a,b"']
    """
    pieces, depth, quote = [""], 0, ""
    for sign in text:
        if quote or sign in "\"'":
            quote = "" if sign == quote else quote or sign
        elif sign in "([":
            depth += 1
        elif sign in ")]":
            depth -= 1
        if sign == "," and not depth and not quote:
            pieces.append("")
        else:
            pieces[-1] += sign
    return [piece.strip() for piece in pieces if piece.strip()]
