"""A run is one frozen configuration: the same keys in TOML, as flags, as ``key=value``, in Python.

Everything that is wrong with a configuration is reported at once, with the place it comes from.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import torch

from kedge.core.method import parse
from kedge.core.model import BATCHNORM, PRECISIONS
from kedge.core.optim import SGD, Adam, Optimizer
from kedge.core.part import Doc
from kedge.core.schedules import schedule
from kedge.data.augment import augmentation
from kedge.data.federation import LocalWork
from kedge.data.partition.draw import check_partition
from kedge.errors import FieldError, KedgeError, UnknownName, nearest
from kedge.grammar import parse_call
from kedge.models import models
from kedge.sim.simulation import WEIGHTINGS
from kedge.sim.store import PLACES

ENGINES = ("auto", "loop", "vector")
CHOICES = {
    "optimizer": ("sgd", "adam"),
    "weighting": WEIGHTINGS,
    "engine": ENGINES,
    "batchnorm": BATCHNORM,
    "precision": PRECISIONS,
    "compile": ("auto", "on", "off"),
    "state": ("auto", *PLACES),
}


@dataclass(frozen=True)
class Config:
    """All settings of a run."""

    method: Annotated[str, Doc("sum of parts, e.g. scaffold+fedprox(mu=0.01)")] = "fedavg"
    data: Annotated[str, Doc("name or path of a dataset, see: kedge data")] = "digits"
    partition: Annotated[str, Doc("who holds what, or a saved .json file")] = "auto"
    clients: Annotated[int, Doc("number of clients; 0: as many as there are silos, else 20")] = 0
    split: Annotated[str, Doc("test data: auto, given, holdout(0.2), pooled(0.4, 0.3)")] = "auto"
    augment: Annotated[str, Doc("none, or a sum such as crop(4)+flip")] = "none"
    angles: Annotated[tuple[float, ...], Doc("test on images turned by these angles")] = (0.0,)
    model: Annotated[str, Doc("auto, or a model, see: kedge list models")] = "auto"
    batchnorm: Annotated[str, Doc("average, local, frozen or batch")] = "average"
    per_round: Annotated[int, Doc("clients that take part in a round; 0: all")] = 0
    rounds: Annotated[int, Doc("number of rounds")] = 20
    steps: Annotated[int, Doc("local steps per round; 0: count epochs instead")] = 0
    epochs: Annotated[float, Doc("local passes over a client's data per round")] = 1.0
    batch: Annotated[int, Doc("samples per local step")] = 32
    replacement: Annotated[bool, Doc("draw batches with replacement")] = False
    optimizer: Annotated[str, Doc("sgd or adam")] = "sgd"
    lr: Annotated[float, Doc("learning rate of the clients")] = 0.1
    momentum: Annotated[float, Doc("momentum of the clients")] = 0.0
    nesterov: Annotated[bool, Doc("Nesterov's momentum")] = False
    weight_decay: Annotated[float, Doc("weight decay of the clients")] = 0.0
    clip: Annotated[float, Doc("bound on the norm of the gradient; 0: none")] = 0.0
    schedule: Annotated[str, Doc("learning rate over rounds, e.g. exponential(0.998)")] = "constant"
    weighting: Annotated[str, Doc("how updates are averaged: size or uniform")] = "size"
    seeds: Annotated[tuple[int, ...], Doc("one run per seed")] = (0, 1, 2)
    personal: Annotated[bool, Doc("also test each client's own model")] = False
    target: Annotated[float, Doc("report the first round that reaches it; 0: none")] = 0.0
    eval_every: Annotated[int, Doc("test every so many rounds")] = 1
    engine: Annotated[str, Doc("auto, loop or vector")] = "auto"
    device: Annotated[str, Doc("auto, cpu or cuda")] = "auto"
    precision: Annotated[str, Doc("of the passes: fp32, tf32 or bf16")] = "fp32"
    workers: Annotated[int, Doc("processes of a loop on a CPU; 0: as engine auto decides")] = 0
    chunk: Annotated[int, Doc("clients trained at once, at most; 0: as many as fit")] = 0
    compile: Annotated[str, Doc("fuse the steps: on, off, auto (if that is faster)")] = "auto"
    state: Annotated[str, Doc("where clients' own state lies: auto, device, host, file")] = "auto"

    def __post_init__(self) -> None:
        problems = dict(self._problems())
        if problems:
            raise ConfigError([(key, text, "") for key, text in problems.items()])

    def optim(self) -> Optimizer:
        shared = {"lr": self.lr, "weight_decay": self.weight_decay, "clip": self.clip}
        if self.optimizer == "adam":
            return Adam(**shared, schedule=self.schedule)
        return SGD(**shared, momentum=self.momentum, nesterov=self.nesterov, schedule=self.schedule)

    def work(self) -> LocalWork:
        return LocalWork(self.batch, self.steps or None, self.epochs, self.replacement)

    def changed(self) -> dict[str, Any]:
        """What differs from the defaults."""
        plain = {f.name: f.default for f in dataclasses.fields(self)}
        return {k: v for k, v in dataclasses.asdict(self).items() if v != plain[k]}

    def to_toml(self) -> str:
        return "".join(f"{k} = {_toml(v)}\n" for k, v in dataclasses.asdict(self).items())

    def _problems(self) -> Iterator[tuple[str, str]]:
        """``(key, what is wrong)`` of every field."""
        values = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            values[field.name] = value
            if not _fits(value, FIELDS[field.name]):
                kind = _kind(FIELDS[field.name])
                yield field.name, f"{field.name} = {value!r} is not {kind}"
                values[field.name] = field.default  # so that the others can be checked, too
        yield from _wrong_values(SimpleNamespace(**values))


def _wrong_values(c: Any) -> Iterator[tuple[str, str]]:
    """What is wrong with values that have the right types."""
    lowest = {"rounds": 1, "batch": 1, "eval_every": 1, "steps": 0, "clients": 0, "per_round": 0}
    lowest |= {"workers": 0, "chunk": 0}
    lowest |= {"lr": 0, "clip": 0, "weight_decay": 0, "target": 0}
    for key, low in lowest.items():
        if getattr(c, key) < low:
            yield key, f"{key} = {getattr(c, key)} is below {low}"
    if c.clients and c.per_round > c.clients:
        yield "per_round", f"per_round = {c.per_round} is more than the {c.clients} clients"
    if not c.epochs > 0:
        yield "epochs", f"epochs = {c.epochs} is not above 0"
    if not 0 <= c.momentum < 1:
        yield "momentum", f"momentum = {c.momentum} is not in [0, 1)"
    if c.nesterov and not c.momentum:
        yield "nesterov", "nesterov needs momentum > 0, e.g. momentum = 0.9"
    if c.optimizer == "adam" and (c.momentum or c.nesterov):
        yield "momentum", "momentum belongs to sgd; leave it out with adam"
    if not c.seeds:
        yield "seeds", "seeds is empty; give at least one, e.g. seeds = [0]"
    if len(set(c.seeds)) != len(c.seeds) or any(s < 0 for s in c.seeds):
        yield "seeds", f"seeds = {list(c.seeds)} must be different numbers from 0 up"
    if not c.angles:
        yield "angles", "angles is empty; for upright images write angles = [0]"
    for key, known in CHOICES.items():
        value = getattr(c, key)
        if value not in known:
            near = nearest(value, known)
            hint = f"Did you mean {near[0]!r}?" if near else f"It is one of: {', '.join(known)}"
            yield key, f"{key} = {value!r} is not known. {hint}"
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?|mps", c.device):
        yield "device", f"device = {c.device!r} is not known. It is one of: auto, cpu, cuda"
    for key, read in READERS.items():
        try:
            read(getattr(c, key))
        except KedgeError as error:
            yield key, f"{key}: {error}"


class ConfigError(FieldError):
    """Everything that is wrong with a configuration: ``(key, text, place)`` each."""

    def __init__(self, problems: list[tuple[str, str, str]]) -> None:
        self.problems = problems
        lines = [text + (f" ({place})" if place else "") for _, text, place in problems]
        head = "" if len(lines) == 1 else f"{len(lines)} settings are wrong:\n  "
        super().__init__(head + "\n  ".join(lines))


def _read_model(text: str) -> None:
    if text != "auto":
        models[parse_call(text).name]


def _read_partition(text: str) -> None:
    if text != "auto" and not text.endswith(".json"):
        check_partition(text)


READERS: dict[str, Callable[[str], Any]] = {
    "method": parse,
    "model": _read_model,
    "partition": _read_partition,
    "augment": augmentation,
    "schedule": schedule,
}
HINTS = get_type_hints(Config, include_extras=True)
FIELDS: dict[str, Any] = {f.name: get_args(HINTS[f.name])[0] for f in dataclasses.fields(Config)}
HELP: dict[str, str] = {key: get_args(HINTS[key])[1].text for key in FIELDS}
DEFAULTS: dict[str, str] = {
    f.name: ",".join(map(str, f.default)) if isinstance(f.default, tuple) else str(f.default)
    for f in dataclasses.fields(Config)
}


def load_config(
    path: str | Path | None = None,
    overrides: Iterable[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> Config:
    """Settings from a TOML file, then ``key=value`` words, then flags; the last one wins."""
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    problems: list[tuple[str, str, str]] = []
    if path is not None:
        text, found = _read_toml(Path(path))
        for key, value in found.items():
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
        else:
            values[key] = _coerced(values[key], FIELDS[key])
    try:
        config = Config(**values)
    except ConfigError as error:
        problems += [(k, text, places.get(k, "")) for k, text, _ in error.problems]
    if problems:
        raise ConfigError(problems)
    return config


def read_value(key: str, text: str) -> Any:
    """A setting typed as text, in the type it should have."""
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


def _read_toml(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
        return text, tomllib.loads(text)
    except FileNotFoundError:
        raise FieldError(f"there is no file {str(path)!r}; give a TOML file, or no file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise FieldError(f"{path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise FieldError(f"{path} is not valid TOML: {error}. Strings need quotes") from None


def _line_of(text: str, key: str, path: Path) -> str:
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(rf"\s*(\[+)?\s*[\"']?{re.escape(key)}[\"']?\s*(=|\]|\.)", line):
            return f"{path}, line {number}"
    return str(path)


def _coerced(value: Any, hint: Any) -> Any:
    """Lists become tuples, whole numbers become floats where floats are meant."""
    if get_origin(hint) is tuple:
        inner = get_args(hint)[0]
        items = value if isinstance(value, (list, tuple)) else [value]
        return tuple(_coerced(v, inner) for v in items)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) is tuple:
        inner = get_args(hint)[0]
        return isinstance(value, tuple) and all(_fits(v, inner) for v in value)
    if hint is float:
        is_float = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_float and math.isfinite(value)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def _kind(hint: Any) -> str:
    if isinstance(hint, types.GenericAlias) or get_origin(hint) is tuple:
        return f"a list of {'whole numbers' if get_args(hint)[0] is int else 'numbers'}"
    return {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}[
        hint
    ]


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return json.dumps(value) if isinstance(value, (bool, str)) else repr(value)


def resolve_device(name: str) -> torch.device:
    """The device that a name means here; never a silent fallback."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise FieldError(f"device = {name!r}, but torch sees no GPU here; use device = cpu")
    if name == "mps" and not torch.backends.mps.is_available():
        raise FieldError("device = 'mps' is not there; use device = cpu")
    return torch.device(name)
