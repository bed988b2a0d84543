"""Read a configuration from a TOML file, ``key=value`` words and options."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

from kedge.errors import FieldError, UnknownName
from kedge.files import read_toml
from kedge.runs.config import FIELDS, Config, ConfigError


def load_config(
    path: str | Path | None = None,
    overrides: Iterable[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> Config:
    """Read a configuration. Later sources override earlier ones: file, overrides, flags.

    Args:
        path: a TOML file, or None.
        overrides: words of the form ``key=value``.
        flags: values by key, already in their types.

    Raises:
        FieldError: the file cannot be read, or a word has no ``=``.
        ConfigError: settings are unknown or wrong; the message lists all of them.

    >>> load_config(overrides=["rounds=5", "seeds=0,1"]).seeds
    (0, 1)
    """
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    problems: list[tuple[str, str, str]] = []
    if path is not None:
        table, text = _read_toml(Path(path))
        for key, value in table.items():
            places[key] = _line_of(text, key, Path(path))
            values[key] = value
    for word in overrides:
        key, equals, text = word.partition("=")
        if not equals:
            raise FieldError(f"expected key=value, found {word!r}, e.g. rounds=50")
        key = key.strip().replace("-", "_")
        values[key], places[key] = read_value(key, text.strip()), word
    for key, value in (flags or {}).items():
        values[key], places[key] = value, f"--{key.replace('_', '-')}"
    for key in list(values):
        if key not in FIELDS:
            problems.append((key, str(UnknownName("setting", key, FIELDS)), places[key]))
            del values[key]
        elif get_origin(FIELDS[key]) is tuple and not isinstance(values[key], (list, tuple)):
            values[key] = (values[key],)  # a single value
    try:
        config = Config(**values)
    except ConfigError as error:
        problems += [(k, text, places.get(k, "")) for k, text, _ in error.problems]
    if problems:
        raise ConfigError(problems)
    return config


def read_value(key: str, text: str) -> Any:
    """Convert the text of a setting to its type; text that does not convert is returned as it is.

    >>> read_value("seeds", "0,1"), read_value("lr", "0.1"), read_value("nesterov", "yes")
    ((0, 1), 0.1, True)
    """
    hint = FIELDS.get(key)
    if get_origin(hint) is tuple:
        inner = get_args(hint)[0]
        return tuple(
            _number(piece, inner) for piece in text.strip("[]").split(",") if piece.strip()
        )
    if hint is bool:
        return {"true": True, "yes": True, "false": False, "no": False}.get(text.lower(), text)
    return _number(text, hint) if hint in (int, float) else text.strip("\"'")


def _number(text: str, kind: type) -> Any:
    try:
        return int(text) if kind is int else float(text)
    except ValueError:
        return text.strip()


def _read_toml(path: Path) -> tuple[dict[str, Any], str]:
    try:
        return read_toml(path)
    except FileNotFoundError:
        raise FieldError(
            f"there is no file {str(path)!r}; name a TOML file, or leave it out"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise FieldError(f"{path} cannot be read: {error}") from None
    except ValueError as error:
        raise FieldError(f"{path} is not valid TOML: {error}. Strings need quotes") from None


def _line_of(text: str, key: str, path: Path) -> str:
    """The place of a key in a TOML file: ``exp.toml, line 4``."""
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(rf"\s*(\[+)?\s*[\"']?{re.escape(key)}[\"']?\s*(=|\]|\.)", line):
            return f"{path}, line {number}"
    return str(path)
