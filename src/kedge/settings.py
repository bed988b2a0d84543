"""The configuration of a run: the same keys in TOML, as options, as ``key=value`` and in Python.

All errors of a configuration are reported together, each with its place.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

from kedge.errors import FieldError, KedgeError, SeveralErrors, UnknownName
from kedge.files import read_toml
from kedge.grammar import write_value
from kedge.schema import (
    Choice,
    Count,
    Doc,
    Length,
    NotNegative,
    Positive,
    Range,
    Read,
    Schema,
    Size,
    schema_of,
)

if TYPE_CHECKING:  # importing torch takes seconds, and `kedge run --help` works without it
    from kedge.core.optim import Optimizer
    from kedge.core.work import LocalWork

#: Settings that are fields of the optimiser of the same name.
OPTIMIZER_SETTINGS = ("lr", "momentum", "nesterov", "weight_decay", "clip", "schedule")


# -- checks of values that other modules define; torch is imported when a value is checked -----


def choices(key: str) -> tuple[str, ...]:
    """The valid words of a setting."""
    from kedge.core.model import BATCHNORM, PRECISIONS
    from kedge.core.work import WEIGHTINGS
    from kedge.engines import engines
    from kedge.sim.store import PLACES

    known = {"batchnorm": BATCHNORM, "precision": PRECISIONS, "weighting": WEIGHTINGS}
    known |= {"engine": ("auto", *engines), "state": ("auto", *PLACES)}
    return known[key]


def read_method(text: str) -> None:
    from kedge.core.method import parse

    parse(text)


def read_partition(text: str) -> None:
    from kedge.data.partition.grammar import check_partition

    if text != "auto" and not text.endswith(".json"):
        check_partition(text)


def read_split(text: str) -> None:
    from kedge.data.splits import read_split

    read_split(text)


def read_augmentation(text: str) -> None:
    from kedge.data.augment import augmentation

    augmentation(text)


def read_model(text: str) -> None:
    from kedge.models import read

    if text != "auto":
        read(text)


def read_schedule(text: str) -> None:
    from kedge.core.schedules import schedule

    schedule(text)


def read_sampler(text: str) -> None:
    from kedge.session.sampler import make_sampler

    make_sampler(text)


def read_device(text: str) -> None:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?|mps", text):
        raise FieldError(
            f"device = {text!r} is not one of: auto, cpu, cuda, cuda:0, mps", field="device"
        )


@dataclass(frozen=True)
class Config:
    """All settings of a run. Wrong values raise a :class:`ConfigError` that lists all of them.

    >>> Config(method="fedprox(mu=0.1)", rounds=5).changed()
    {'method': 'fedprox(mu=0.1)', 'rounds': 5}
    """

    method: Annotated[
        str, Doc("sum of parts, e.g. scaffold+fedprox(mu=0.01)"), Read(read_method)
    ] = "fedavg"
    data: Annotated[
        str,
        Doc(
            "name or path of a dataset, see: kedge data; with options: tab.csv(drop=[chol,visit]), "
            "see: kedge show data:csv"
        ),
    ] = "digits"
    partition: Annotated[
        str, Doc("which client holds which samples, or a saved .json file"), Read(read_partition)
    ] = "auto"
    clients: Annotated[Size, Doc("number of clients; 0: one per silo, or 20 without silos")] = 0
    split: Annotated[
        str, Doc("test data: auto, given, holdout(0.2), pooled(0.4, 0.3)"), Read(read_split)
    ] = "auto"
    validation: Annotated[
        float,
        Doc("share of every client's training samples held out to choose by; 0: none"),
        Range(0, 1, open_high=True),
    ] = 0.0
    unseen: Annotated[
        float,
        Doc("share of the clients that never train, only test the model; 0: none"),
        Range(0, 1, open_high=True),
    ] = 0.0
    augment: Annotated[str, Doc("none, or a sum such as crop(4)+flip"), Read(read_augmentation)] = (
        "none"
    )
    angles: Annotated[
        tuple[float, ...], Doc("test on images rotated by these angles, in degrees"), Length(1)
    ] = (0.0,)
    model: Annotated[str, Doc("auto, or a model, see: kedge list models"), Read(read_model)] = (
        "auto"
    )
    batchnorm: Annotated[
        str, Doc("average, local, frozen or batch"), Choice(partial(choices, "batchnorm"))
    ] = "average"
    per_round: Annotated[Size, Doc("clients that take part in a round; 0: all")] = 0
    sampler: Annotated[
        str,
        Doc("who takes part: uniform, size, poisson or fixed([[0, 1], [2]])"),
        Read(read_sampler),
    ] = "uniform"
    rounds: Annotated[Count, Doc("number of rounds")] = 20
    steps: Annotated[Size, Doc("local steps per round; 0: count epochs instead")] = 0
    epochs: Annotated[Positive, Doc("local passes over a client's data per round")] = 1.0
    batch: Annotated[Count, Doc("samples per local step")] = 32
    replacement: Annotated[bool, Doc("draw batches with replacement")] = False
    optimizer: Annotated[str, Doc("optimiser of the clients: sgd, adam, adam(beta1=0.5), ...")] = (
        "sgd"
    )
    lr: Annotated[NotNegative, Doc("learning rate of the clients")] = 0.1
    momentum: Annotated[float, Doc("momentum of the clients"), Range(0, 1, open_high=True)] = 0.0
    nesterov: Annotated[bool, Doc("Nesterov's momentum")] = False
    weight_decay: Annotated[NotNegative, Doc("weight decay of the clients")] = 0.0
    clip: Annotated[NotNegative, Doc("bound on the norm of the gradient; 0: none")] = 0.0
    schedule: Annotated[
        str, Doc("learning rate over rounds, e.g. exponential(0.998)"), Read(read_schedule)
    ] = "constant"
    weighting: Annotated[
        str,
        Doc("how updates are averaged: size or uniform"),
        Choice(partial(choices, "weighting")),
    ] = "size"
    seeds: Annotated[tuple[int, ...], Doc("one run per seed"), Range(0), Length(1)] = (0, 1, 2)
    personal: Annotated[bool, Doc("also test each client's own model")] = False
    metric: Annotated[str, Doc("metric that runs are compared by; auto: that of the task")] = "auto"
    class_weights: Annotated[
        str, Doc("weights of classes in the loss: none, balanced, or numbers 1,5")
    ] = "none"
    patience: Annotated[
        Size, Doc("stop after this many tests without a better validation metric; 0: never")
    ] = 0
    target: Annotated[NotNegative, Doc("report the first round that reaches it; 0: none")] = 0.0
    eval_every: Annotated[Count, Doc("rounds from one test to the next")] = 1
    engine: Annotated[str, Doc("auto, loop or vector"), Choice(partial(choices, "engine"))] = "auto"
    device: Annotated[str, Doc("auto, cpu or cuda"), Read(read_device)] = "auto"
    precision: Annotated[
        str,
        Doc("precision of forward and backward passes: fp32, tf32 or bf16"),
        Choice(partial(choices, "precision")),
    ] = "fp32"
    workers: Annotated[
        Size, Doc("worker processes of engine loop on a CPU; 0: engine auto decides")
    ] = 0
    threads: Annotated[
        Size, Doc("threads of torch on a CPU; 0: as many as pay; worker processes have one each")
    ] = 0
    chunk: Annotated[Size, Doc("clients trained at once, at most; 0: as many as fit")] = 0
    compile: Annotated[
        str,
        Doc("compile the local steps: on, off or auto (if that is faster)"),
        Choice(lambda: ("auto", "on", "off")),
    ] = "auto"
    state: Annotated[
        str,
        Doc("where client state is stored: auto, device, host or file"),
        Choice(partial(choices, "state")),
    ] = "auto"

    def __post_init__(self) -> None:
        problems, values = [], {}
        for key, option in settings().options.items():
            values[key] = option.default  # a placeholder: the other settings are still checked
            try:
                values[key] = option.check(getattr(self, key))
            except KedgeError as error:
                problems += [(key, text, "") for text in _messages(key, error)]
        wrong = {key for key, *_ in problems}
        problems += [(k, text, "") for k, text in _conflicts(values) if k not in wrong]
        if problems:
            raise ConfigError(problems)
        for key, value in values.items():
            object.__setattr__(self, key, value)

    def optim(self) -> Optimizer:
        """The optimiser of the clients."""
        return _optimizer(dataclasses.asdict(self))

    def work(self) -> LocalWork:
        """The local work of a client in a round."""
        from kedge.core.work import LocalWork

        return LocalWork(self.batch, self.steps or None, self.epochs, self.replacement)

    def changed(self) -> dict[str, Any]:
        """The settings that differ from their defaults."""
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        return {k: v for k, v in dataclasses.asdict(self).items() if v != defaults[k]}

    def to_toml(self) -> str:
        """All settings as a TOML file, which :func:`load_config` reads."""
        return "".join(f"{k} = {_toml(v)}\n" for k, v in dataclasses.asdict(self).items())


def settings() -> Schema:
    """The types, ranges, defaults and help texts of all settings."""
    return schema_of(Config, "settings")


def _messages(key: str, error: KedgeError) -> list[str]:
    """One line per error of a setting."""
    errors = error.errors if isinstance(error, SeveralErrors) else [error]
    names_key = isinstance(error, FieldError) and error.field == key
    return [str(e) if names_key else f"{key}: {e}" for e in errors]


def _conflicts(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """``(key, message)`` for settings that contradict each other, though each is valid alone."""
    clients, per_round, seeds = (values[key] for key in ("clients", "per_round", "seeds"))
    if clients and per_round > clients:
        yield "per_round", f"per_round = {per_round} is more than the {clients} clients"
    if values["patience"] and not values["validation"]:
        yield (
            "patience",
            f"patience = {values['patience']} needs validation data to go by; "
            "add --validation 0.1 (validation = 0.1)",
        )
    if len(set(seeds)) != len(seeds):
        yield "seeds", f"seeds = {list(seeds)} must be different numbers"
    try:
        _optimizer(values)
    except KedgeError as error:
        for one in error.errors if isinstance(error, SeveralErrors) else [error]:
            field = one.field if isinstance(one, FieldError) else ""
            if field in _changed_optim(values):
                yield field, str(one)
            else:
                yield "optimizer", f"optimizer: {one}"


def _changed_optim(values: Mapping[str, Any]) -> list[str]:
    """Settings of the optimiser that differ from their defaults."""
    options = settings().options
    return [key for key in OPTIMIZER_SETTINGS if values[key] != options[key].default]


def _optimizer(values: Mapping[str, Any]) -> Optimizer:
    from kedge.core.optim import make_optimizer

    fields = {key: values[key] for key in OPTIMIZER_SETTINGS}
    return make_optimizer(values["optimizer"], fields, _changed_optim(values))


class ConfigError(FieldError):
    """All errors of a configuration; ``problems`` lists ``(key, message, place)``."""

    def __init__(self, problems: list[tuple[str, str, str]]) -> None:
        self.problems = problems
        lines = [text + (f" ({place})" if place else "") for _, text, place in problems]
        head = "" if len(lines) == 1 else f"{len(lines)} settings are wrong:\n  "
        super().__init__(head + "\n  ".join(lines))


HINTS = get_type_hints(Config, include_extras=True)
FIELDS: dict[str, Any] = {key: get_args(hint)[0] for key, hint in HINTS.items()}
HELP: dict[str, str] = {
    key: " ".join(note.text for note in get_args(hint) if isinstance(note, Doc))
    for key, hint in HINTS.items()
}
DEFAULTS: dict[str, str] = {
    f.name: ",".join(map(str, f.default)) if isinstance(f.default, tuple) else str(f.default)
    for f in dataclasses.fields(Config)
}


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return json.dumps(value) if isinstance(value, (bool, str)) else repr(value)


# -- reading -----------------------------------------------------------------------------------


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


def format_value(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, (tuple, list)):
        return ",".join(map(format_value, value))
    if isinstance(value, float):
        return f"{value:.12g}"
    return value if isinstance(value, str) else write_value(value)
