"""A grid of settings, and the configuration of every combination.

A key is a setting of a run (``lr``, ``partition``, ``method``, ...) or a field of a part in its
method (``fedprox.mu``). On the command line, commas separate the values, unless they are inside
brackets or quotes: ``lr=0.01,0.1 partition=iid,dirichlet(0.1) fedprox.mu=0.01,0.1``.
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
from kedge.grammar import parse_call
from kedge.settings import FIELDS, Config, format_value, load_config, read_value

Grid = Mapping[str, Sequence[Any]]


class Setting(NamedTuple):
    """One combination of a grid: the values of its keys, and the complete configuration."""

    values: dict[str, Any]
    config: Config

    @property
    def name(self) -> str:
        """The values as text: ``lr=0.1 fedprox.mu=0.01``."""
        return " ".join(f"{key}={format_value(value)}" for key, value in self.values.items())


def read_words(words: Iterable[str]) -> dict[str, list[Any]]:
    """Read a grid from the command line, one word per key.

    Raises:
        FieldError: a word has no ``=``, or a key occurs twice.
        UnknownName: a key is no setting and no field of a part.

    >>> read_words(["lr=0.01,0.1", "fedprox.mu=1"])
    {'lr': [0.01, 0.1], 'fedprox.mu': [1]}
    """
    grid: dict[str, list[Any]] = {}
    for word in words:
        key, equals, text = (piece.strip() for piece in word.partition("="))
        if not equals:
            raise FieldError(f"expected key=value,value, found {word!r}, e.g. lr=0.01,0.1")
        key = key.replace("-", "_")
        if key in grid:
            raise FieldError(f"{key} is given twice; write all its values in one word: {key}=A,B")
        _check_key(key)
        if "." in key:
            grid[key] = _field_values(key, text)
        elif get_origin(FIELDS[key]) is tuple:  # the setting is a list itself, e.g. seeds
            grid[key] = [read_value(key, text)] if text else []
        else:
            grid[key] = [read_value(key, piece) for piece in _split(text)]
    return grid


def combine(
    grid: Grid, path: str | Path | None = None, flags: Mapping[str, Any] | None = None
) -> list[Setting]:
    """All combinations of a grid; the last key changes fastest.

    Args:
        grid: the values of each key.
        path: a TOML file with the other settings, or None.
        flags: other settings; they override the file.

    Raises:
        FieldError: the grid is empty, a key has no value or the same value twice, or a field
            belongs to a part that the method does not have.
        UnknownName: a key is no setting and no field of a part.
        ConfigError: a combination is not a valid configuration.

    >>> [setting.name for setting in combine({"lr": [0.01, 0.1], "rounds": [5]})]
    ['lr=0.01', 'lr=0.1']
    """
    grid = {key: _values(key, values) for key, values in grid.items()}
    if not grid:
        raise FieldError("there is nothing to sweep; name a setting and its values: lr=0.01,0.1")
    varied = [key for key, values in grid.items() if len(values) > 1] or list(grid)
    settings = []
    for values in itertools.product(*grid.values()):
        combination = dict(zip(grid, values, strict=True))
        keys = {key: value for key, value in combination.items() if "." not in key}
        config = load_config(path, flags=dict(flags or {}) | keys)
        fields = {key: value for key, value in combination.items() if "." in key}
        if fields:
            method = _with_fields(parse(config.method), fields)
            config = dataclasses.replace(config, method=repr(method))
        settings.append(Setting({key: combination[key] for key in varied}, config))
    return settings


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
    """Check the values of one key, as far as that does not depend on the other keys."""
    _check_key(key)
    if isinstance(values, (str, Mapping)) or not isinstance(values, Iterable):
        raise FieldError(f"{key}: give a list of values, not {values!r}")
    values = list(values)
    if get_origin(FIELDS.get(key)) is tuple and not all(
        isinstance(v, (list, tuple)) for v in values
    ):
        values = [tuple(values)]  # a single list of seeds
    if not values:
        raise FieldError(f"{key} has no value; write for example {key}={_example(key)}")
    for i, value in enumerate(values):
        if value in values[:i]:
            raise FieldError(f"{key} has the value {format_value(value)} twice")
    return values


def _example(key: str) -> str:
    part, dot, field = key.partition(".")
    if dot:
        return format_value({f.name: f.default for f in dataclasses.fields(parts[part])}[field])
    return format_value(getattr(Config(), key))


def _field_values(key: str, text: str) -> list[Any]:
    try:
        call = parse_call(f"values({text})")
    except GrammarError:
        raise FieldError(f"{key}={text} cannot be read; write values with commas between") from None
    if call.kwargs:
        raise FieldError(f"{key}={text} cannot be read; write values with commas between")
    return list(call.args)


def _with_fields(method: Method, fields: Mapping[str, Any]) -> Method:
    by_name = {part.name: part for part in method.parts}
    for key, value in fields.items():
        part, _, field = key.partition(".")
        if part not in by_name:
            wanted = f"{method}+{part}" if method.parts else part
            raise FieldError(
                f"{key}: {part} is not in the method {method}; write --method {wanted}"
            )
        by_name[part] = dataclasses.replace(by_name[part], **{field: value})
    return Method(tuple(by_name.values()))


def _split(text: str) -> list[str]:
    """Split at the commas outside of brackets and quotes.

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
