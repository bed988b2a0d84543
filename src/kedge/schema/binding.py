"""Schemas: the options in a signature, and the binding of calls to them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import (
    Any,
    ClassVar,
    NamedTuple,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from kedge.errors import FieldError, GrammarError, KedgeError, SeveralErrors, UnknownName
from kedge.grammar import Call, parse_calls, write_value
from kedge.schema.values import (
    Doc,
    InvalidValue,
    Read,
    coerce,
    notes_of,
    ranges_of,
    takes_none,
    type_name,
)

REQUIRED: Any = inspect.Parameter.empty


class OptionRow(NamedTuple):
    """One line of a help page."""

    name: str
    type: str
    default: str  # as typed; empty for a required option, - for a None that cannot be typed
    range: str
    doc: str


@dataclass(frozen=True)
class Option:
    """One option: name, annotated type, and default (``REQUIRED`` if there is none)."""

    name: str
    hint: Any
    default: Any = REQUIRED

    def check(self, value: Any, owner: str = "") -> Any:
        """Convert a value to the option's type.

        Args:
            value: the value as parsed or given in Python.
            owner: what the option belongs to; it starts the error message.

        Raises:
            FieldError: the type is wrong or the value is out of range.
            KedgeError: the text cannot be parsed (options with a ``Read``).

        >>> Option("mu", float).check(1, "fedprox")
        1.0
        """
        where = f"{owner}.{self.name}" if owner else self.name
        try:
            coerced = coerce(value, self.hint)
        except InvalidValue as error:
            empty = isinstance(value, (tuple, list)) and not value
            what = where if empty else f"{where} = {_repr(value)}"
            raise FieldError(f"{what} {error}", field=self.name) from None
        for note in notes_of(self.hint):
            if isinstance(note, Read):
                note.function(coerced)
        return coerced

    def row(self) -> OptionRow:
        """The option as a row of help."""
        notes = notes_of(self.hint)
        default = "" if self.default is REQUIRED else _as_typed(self.default)
        if self.default is None and takes_none(self.hint):
            default = "none"
        ranges = dict.fromkeys(map(str, ranges_of(self.hint)))
        text = " ".join(n.text for n in notes if isinstance(n, Doc))
        return OptionRow(self.name, type_name(self.hint), default, ", ".join(ranges), text)


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
        except KedgeError as error:
            self.add(error)

    def add(self, error: KedgeError) -> None:
        """Store an error."""
        self.errors += error.errors if isinstance(error, SeveralErrors) else [error]

    def raise_all(self) -> None:
        """Raise the collected errors: a single one unchanged, several as SeveralErrors."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise SeveralErrors(self.errors)


@dataclass(frozen=True)
class Schema:
    """The options of one registered name: to bind, check, write and describe."""

    name: str
    options: Mapping[str, Option]
    noun: str = "option"
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def bind(self, call: Call, by_name: bool = False) -> dict[str, Any]:
        """Bind a call to the options.

        Args:
            call: a parsed call; positional values fill the options in order.
            by_name: whether to reject positional values.

        Returns:
            The value of every option; those not given have their defaults.

        Raises:
            UnknownName: there is no option or preset of that name.
            FieldError: a value is wrong, missing, given twice or one too many.
            GrammarError: a preset is given where there are none, or a rejected positional value.
            SeveralErrors: several of these at once.

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
                f"not {_as_typed(call.args[0])}"
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
        """Check some values and fill in the defaults; all errors are raised together.

        Args:
            values: option name to value.
            partial: whether required options may be missing.
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
        """Write a call with the options that differ from their defaults.

        Args:
            values: the value of every option.
            first: whether to write the first option even at its default.
        """
        shown = [
            f"{key}={write_value(values[key])}"
            for i, (key, option) in enumerate(self.options.items())
            if (first and not i) or values[key] != option.default
        ]
        return f"{self.name}({', '.join(shown)})" if shown else self.name

    def rows(self) -> list[OptionRow]:
        """One row of help for each option."""
        return [option.row() for option in self.options.values()]

    def signature(self) -> str:
        """The call with all defaults, ``name(option=default, ...)``; required options come bare.

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
    """Build the schema of a dataclass or a function.

    Args:
        thing: a dataclass (its fields are the options) or a function (its keyword-only parameters).
        name: its name in the grammar.
        presets: whether ``thing.presets`` holds named settings.
        hidden: parameters that are not options because the caller sets them.

    Raises:
        FieldError: an annotation cannot be evaluated.
    """
    return _read_signature(thing, name, presets, hidden)


@functools.cache
def _read_signature(thing: Any, name: str, presets: bool, hidden: tuple[str, ...]) -> Schema:
    try:
        return _read(thing, name, presets, hidden)
    except (NameError, TypeError, AttributeError, SyntaxError) as error:
        raise FieldError(
            f"an annotation of {name} cannot be evaluated: {type(error).__name__}: {error}"
        ) from error


def _read(thing: Any, name: str, presets: bool, hidden: tuple[str, ...]) -> Schema:
    if dataclasses.is_dataclass(thing):
        hints = get_type_hints(thing, include_extras=True)
        options = [Option(f.name, hints[f.name], default_of(f)) for f in dataclasses.fields(thing)]
        noun = getattr(thing, "noun", "field")
    else:
        parameters = inspect.signature(thing, eval_str=True).parameters.values()
        keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in hidden]
        hints = {p.name: Any if p.annotation is p.empty else p.annotation for p in keywords}
        options = [Option(p.name, hints[p.name], p.default) for p in keywords]
        noun = "option"
    named = getattr(thing, "presets", {}) if presets else {}
    return Schema(name, {option.name: option for option in options}, noun, named)


class Configured:
    """Base of frozen dataclasses whose fields are options: ``name(field=value)``."""

    #: Its name in the grammar; the class name in lower case if it is not set.
    name: ClassVar[str] = ""
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]  # subclasses are dataclasses

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.name = cls.__dict__.get("name") or cls.__name__.lower()

    def __post_init__(self) -> None:
        for key, value in self.schema().check(self._given()).items():
            object.__setattr__(self, key, value)

    @classmethod
    def schema(cls) -> Schema:
        """The fields: types, ranges, defaults, help and presets."""
        return schema_of(cls, cls.name or cls.__name__, presets=True)

    def _given(self) -> dict[str, Any]:
        """The value of every field."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def __str__(self) -> str:
        """The call in the grammar, with the fields that differ from their defaults."""
        return self.schema().write(self._given())


class Lookup(Protocol):
    """A mapping from names to functions, such as a registry."""

    def __getitem__(self, name: str) -> Callable[..., Any]: ...


class BoundCall(NamedTuple):
    """A function and the values of all its options."""

    name: str
    function: Callable[..., Any]
    options: dict[str, Any]

    def __call__(self, *args: Any) -> Any:
        return self.function(*args, **self.options)


def bind_sum(registry: Lookup, text: str) -> list[BoundCall]:
    """Bind every call of ``name(option=value)+name``.

    Raises:
        KedgeError: what :meth:`Schema.bind` raises; the errors of all calls together.
    """
    errors, bound = ErrorCollector(), []
    for call in parse_calls(text):
        with errors.collect():
            function = registry[call.name]
            options = schema_of(function, call.name).bind(call)
            bound.append(BoundCall(call.name, function, options))
    errors.raise_all()
    return bound


def default_of(f: dataclasses.Field[Any]) -> Any:
    """The default of a dataclass's field; ``REQUIRED`` if there is none."""
    if f.default is not dataclasses.MISSING:
        return f.default
    factory = f.default_factory
    return REQUIRED if factory is dataclasses.MISSING else factory()


def _repr(value: Any) -> str:
    return repr(value.item() if hasattr(value, "item") and not hasattr(value, "__len__") else value)


def _as_typed(value: Any) -> str:
    return "-" if value is None else write_value(value)


# -- A dataclass from the values of a JSON or TOML file, strictly ----------------------------------


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
    for name, own in fields.items():
        place = f"{where}.{name}" if where else name
        with errors.collect():
            if name in values:
                found[name] = _read_value(values[name], hints[name], place, complete)
            elif complete or default_of(own) is REQUIRED:
                raise FieldError(f"{place} is missing", name)
    errors.raise_all()
    return cls(**found)


def _read_value(value: Any, hint: Any, place: str, complete: bool) -> Any:
    """A value in the type of a hint."""
    origin, inner = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return read_fields(hint, value, place, complete)  # type: ignore[arg-type]
    if origin in (Union, types.UnionType) and types.NoneType in inner:
        members = tuple(member for member in inner if member is not types.NoneType)
        return None if value is None else _read_value(value, Union[members], place, complete)  # noqa: UP007
    if isinstance(origin, type) and issubclass(origin, Mapping):
        _check_mapping(value, place)
        return {k: _read_value(v, inner[1], f"{place}.{k}", complete) for k, v in value.items()}
    if origin is tuple and inner[-1] is Ellipsis and isinstance(value, (list, tuple)):
        return tuple(
            _read_value(v, inner[0], f"{place}[{i}]", complete) for i, v in enumerate(value)
        )
    return Option(place, hint).check(value)


def _check_mapping(value: Any, place: str) -> None:
    if not isinstance(value, Mapping):
        raise FieldError(f"{place} is {value!r:.40}, which is no table of names and values")
