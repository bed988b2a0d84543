"""Signatures read into schemas, and calls bound to them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, get_type_hints

from kedge.errors import FieldError, GrammarError, KedgeError, SeveralErrors, UnknownName
from kedge.grammar import Call, parse_calls, write_value
from kedge.schema.values import Doc, Read, Wrong, fit, notes_of, ranges_of, type_name

REQUIRED: Any = inspect.Parameter.empty


class Row(NamedTuple):
    """One line of a help page."""

    name: str
    type: str
    default: str  # as it is typed; empty where the option must be given, - where it may be left out
    range: str
    doc: str


@dataclass(frozen=True)
class Option:
    """One option: its name, its type with notes, and its default (``REQUIRED`` if it has none)."""

    name: str
    hint: Any
    default: Any = REQUIRED

    def check(self, value: Any, owner: str = "") -> Any:
        """The value in the option's type.

        Raises:
            FieldError: the type is wrong or the value out of range.
            KedgeError: the text cannot be read (options with a ``Read``).

        >>> Option("mu", float).check(1, "fedprox")
        1.0
        """
        where = f"{owner}.{self.name}" if owner else self.name
        try:
            fitting = fit(value, self.hint)
        except Wrong as wrong:
            empty = isinstance(value, (tuple, list)) and not value
            what = where if empty else f"{where} = {_shown(value)}"
            raise FieldError(f"{what} {wrong}", field=self.name) from None
        for note in notes_of(self.hint):
            if isinstance(note, Read):
                note.function(fitting)
        return fitting

    def row(self) -> Row:
        notes = notes_of(self.hint)
        default = "" if self.default is REQUIRED else _typed(self.default)
        ranges = dict.fromkeys(map(str, ranges_of(self.hint)))
        text = " ".join(n.text for n in notes if isinstance(n, Doc))
        return Row(self.name, type_name(self.hint), default, ", ".join(ranges), text)


class ErrorCollector:
    """Collects errors, so that the user sees all of them at once.

    >>> collector = ErrorCollector()
    >>> for mu in ("x", 1):
    ...     with collector.collect():
    ...         _ = Option("mu", float).check(mu)
    >>> [str(error) for error in collector.errors]
    ["mu = 'x' is not a finite number"]
    """

    def __init__(self) -> None:
        self.errors: list[KedgeError] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Catch and store a KedgeError of the block."""
        try:
            yield
        except SeveralErrors as several:
            self.errors += several.errors
        except KedgeError as error:
            self.errors.append(error)

    def raise_all(self) -> None:
        """Raise the collected errors: a single one unchanged, several as SeveralErrors."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise SeveralErrors(self.errors)


@dataclass(frozen=True)
class Schema:
    """The options of one named thing, and what can be done with them."""

    name: str
    options: Mapping[str, Option]
    noun: str = "option"
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def bind(self, call: Call, by_name: bool = False) -> dict[str, Any]:
        """All options, from a call and the defaults, checked.

        Args:
            call: what was typed; values without a name fill the options in their order.
            by_name: whether values without a name are refused.

        Raises:
            UnknownName: an option or a preset of that name does not exist.
            FieldError: a value is wrong, missing, given twice or one too many.
            GrammarError: a preset where there are none, or a value without a name.
            SeveralErrors: more than one of these.

        >>> def noise(*, sigma: float = 0.1, steps: int = 1): ...
        >>> schema_of(noise, "noise").bind(Call("noise", None, (0.5,), {}))
        {'sigma': 0.5, 'steps': 1}
        """
        names, see = list(self.options), f"kedge show {self.name}"
        example = f"{self.name}({names[0]}=...)" if names else self.name
        if call.preset is not None and not self.presets:
            raise GrammarError(
                f"{self.name}:{call.preset}: {self.name} has no presets; write {example}"
            )
        if call.preset is not None and call.preset not in self.presets:
            raise UnknownName(f"preset of {self.name}", call.preset, sorted(self.presets), see)
        if call.args and by_name:
            raise GrammarError(
                f"{self.name}: {self.noun}s are written by name, as in {example}, "
                f"not {_typed(call.args[0])}"
            )
        if len(call.args) > len(names):
            takes = f"{len(names)} {self.noun}{'' if len(names) == 1 else 's'}"
            raise FieldError(
                f"{self.name} takes {takes} ({', '.join(names) or 'none'}), "
                f"but {len(call.args)} {'value is' if len(call.args) == 1 else 'values are'} given"
            )
        given = dict(zip(names, call.args, strict=False))
        errors = ErrorCollector()
        for key, value in call.kwargs.items():
            with errors.collect():
                if key not in self.options:
                    raise UnknownName(f"{self.noun} of {self.name}", key, names, see)
                if key in given:
                    both = f"{given[key]!r} and {value!r}"
                    raise FieldError(
                        f"{self.name}.{key} is given twice, by position and by name: {both}"
                    )
                given[key] = value
        preset = self.presets[call.preset] if call.preset else {}
        with errors.collect():
            values = self.check({**preset, **given}, partial=bool(errors.errors))
        errors.raise_all()
        return values

    def check(self, values: Mapping[str, Any], partial: bool = False) -> dict[str, Any]:
        """All options, from some values and the defaults; every wrong one is reported.

        ``partial`` does not ask for the options that have no default.
        """
        errors, checked = ErrorCollector(), {}
        for key, option in self.options.items():
            with errors.collect():
                if key in values:
                    checked[key] = option.check(values[key], self.name)
                elif option.default is not REQUIRED:
                    checked[key] = option.default
                elif not partial:
                    where = f"{self.name}.{key}"
                    raise FieldError(f"{where} has no default; write {self.name}({key}=...)", key)
        errors.raise_all()
        return checked

    def write(self, values: Mapping[str, Any], first: bool = False) -> str:
        """The call in the grammar, with the options that differ from their defaults.

        ``first`` writes the first option always.
        """
        shown = [
            f"{key}={write_value(values[key])}"
            for i, (key, option) in enumerate(self.options.items())
            if (first and not i) or values[key] != option.default
        ]
        return f"{self.name}({', '.join(shown)})" if shown else self.name

    def rows(self) -> list[Row]:
        """One row of help for each option."""
        return [option.row() for option in self.options.values()]

    def signature(self) -> str:
        """``name(option=default, ...)`` as it could be typed; an option without default as it is.

        >>> def step(*, every: int, gamma: float = 0.1): ...
        >>> schema_of(step, "step").signature()
        'step(every, gamma=0.1)'
        """
        values = {"": "", "-": "=..."}
        inside = [row.name + values.get(row.default, f"={row.default}") for row in self.rows()]
        return f"{self.name}({', '.join(inside)})" if inside else self.name

    def is_default(self, values: Mapping[str, Any]) -> bool:
        """Whether these values are the defaults."""
        return all(values[key] == self.options[key].default for key in values)


def schema_of(thing: Any, name: str, presets: bool = False, hidden: tuple[str, ...] = ()) -> Schema:
    """Read the signature of a dataclass or a function.

    Args:
        thing: a dataclass (its fields are the options) or a function (its keyword-only parameters).
        name: what it is called in the grammar.
        presets: whether ``thing.presets`` holds named settings.
        hidden: parameters that are no options, since the caller supplies them.
    """
    return _read_signature(thing, name, presets, hidden)


@functools.cache
def _read_signature(thing: Any, name: str, presets: bool, hidden: tuple[str, ...]) -> Schema:
    if dataclasses.is_dataclass(thing):
        hints = get_type_hints(thing, include_extras=True)
        options = [Option(f.name, hints[f.name], _default(f)) for f in dataclasses.fields(thing)]
        noun = "field"
    else:
        parameters = inspect.signature(thing, eval_str=True).parameters.values()
        own = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in hidden]
        hints = {p.name: Any if p.annotation is p.empty else p.annotation for p in own}
        options = [Option(p.name, hints[p.name], p.default) for p in own]
        noun = "option"
    named = getattr(thing, "presets", {}) if presets else {}
    return Schema(name, {option.name: option for option in options}, noun, named)


class Lookup(Protocol):
    """What finds things by name: a registry."""

    def __getitem__(self, name: str) -> Callable[..., Any]: ...


class BoundCall(NamedTuple):
    """A function with all of its options."""

    name: str
    function: Callable[..., Any]
    options: dict[str, Any]

    def __call__(self, *args: Any) -> Any:
        return self.function(*args, **self.options)


def bind_sum(registry: Lookup, text: str) -> list[BoundCall]:
    """Bind every call of ``name(option=value)+name``; what is wrong in any is reported together."""
    errors, found = ErrorCollector(), []
    for call in parse_calls(text):
        with errors.collect():
            function = registry[call.name]
            options = schema_of(function, call.name).bind(call)
            found.append(BoundCall(call.name, function, options))
    errors.raise_all()
    return found


def _default(f: dataclasses.Field[Any]) -> Any:
    if f.default is not dataclasses.MISSING:
        return f.default
    made = f.default_factory
    return REQUIRED if made is dataclasses.MISSING else made()


def _shown(value: Any) -> str:
    return repr(value.item() if hasattr(value, "item") and not hasattr(value, "__len__") else value)


def _typed(value: Any) -> str:
    return "-" if value is None else write_value(value)
