"""What a member says of itself when it joins: plain data, checked field by field."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kedge._version import __version__
from kedge.core.task import tasks
from kedge.data.datasets import Dataset
from kedge.data.datasets.tables.encoding import ColumnEncoding
from kedge.data.encoding import encodings
from kedge.data.encodings import encoding_of
from kedge.errors import WireError
from kedge.federation.member.own_data import Moments, moments_of, schema_of, split_rows
from kedge.federation.names import look
from kedge.session import wire
from kedge.session.blob import read_json
from kedge.session.terms import DataSchema

MAX_NAME, MAX_NAMES, MAX_WORD = 100, 100_000, 1000
MAX_SAMPLES = 10**9  # more is implausible
MAX_INPUT, MAX_AXES = 10**8, 10  # numbers and axes of one input
MAX_NUMBER = float(np.finfo(np.float32).max)
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")  # not in texts


@dataclass(frozen=True)
class Question:
    """What the coordinator asks when members join.

    Attributes:
        seed, split: how members hold out test samples.
        counts: whether to tell the number of training samples of each class, which balanced class
            weights need.
    """

    seed: int
    split: str
    counts: bool = False

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Question:
        values = _parsed(text)
        if values.keys() != {"seed", "split", "counts"} or type(values["counts"]) is not bool:
            raise WireError("this is no question of a coordinator")
        return cls(_whole(values["seed"]), _text(values["split"]), values["counts"])


@dataclass(frozen=True)
class Profile:
    """A member's answer to ``join``.

    Attributes:
        name: name of the member, unique in its federation.
        schema: of its data, with its own numbering of classes and columns; without mean and std.
        encoding: how raw inputs become arrays, see :mod:`kedge.data.encoding`.
        moments: sums over its training samples.
        train, test: numbers of samples.
        counts: training samples of each of its classes, if asked for.
        token: what it got when it joined this run before; empty if it has not.
        versions: of kedge, the wire, torch and Python.
    """

    name: str
    schema: DataSchema
    encoding: Mapping[str, Any]
    moments: Moments
    train: int
    test: int
    counts: tuple[int, ...] = ()
    token: str = ""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read what :meth:`to_json` writes; a WireError for anything else."""
        values = _parsed(text)
        if values.keys() != {field.name for field in dataclasses.fields(cls)}:
            raise WireError(
                "the profile has unknown or missing fields; compare the releases of kedge"
            )
        schema, moments = _object(values["schema"]), _object(values["moments"])
        name = _text(values["name"], MAX_NAME)
        if not name.isprintable() or not look(name):
            raise WireError("the profile has no valid name")
        found = cls(
            name=name,
            schema=_schema(schema),
            encoding=_encoding(_object(values["encoding"])),
            moments=_moments(moments),
            train=_count(values["train"], least=1),
            test=_count(values["test"]),
            counts=tuple(_count(n) for n in _list(values["counts"])),
            token=_text(values["token"], MAX_NAME),
            versions={
                _text(k, MAX_NAME): _text(v, MAX_NAME)
                for k, v in _object(values["versions"]).items()
            },
        )
        found._check()
        return found

    def _check(self) -> None:
        """Numbers that contradict each other."""
        schema, moments = self.schema, self.moments
        width = schema.shape[0] if schema.shape else 0
        wanted = {"uint8": (width, 0), "int64": (0, 0)}.get(schema.dtype, (0, width))
        if (len(moments.bytes), len(moments.mean)) != wanted:
            raise WireError("the moments do not have the number of channels of the inputs")
        if len(moments.squares) != len(moments.mean) or any(len(c) != 256 for c in moments.bytes):
            raise WireError("the moments are not complete")
        each = math.prod(schema.shape[1:])  # numbers of a channel or column in one sample
        counted = [*map(sum, moments.bytes)] + [moments.count] * (schema.dtype == "float32")
        if any(n % each or not self.train <= n // each <= self.train + self.test for n in counted):
            raise WireError("the moments are of other samples")
        if any(magnitude(moments, i) > MAX_NUMBER for i in range(len(moments.mean))):
            raise WireError("the moments are of numbers that do not fit into 32 bits")
        if self.counts and (len(self.counts) != schema.outputs or sum(self.counts) != self.train):
            raise WireError("the samples of all classes are not the samples")
        if self.encoding["kind"] == "table":
            if schema.columns != encodings["table"].from_dict(_options(self.encoding)).names:  # type: ignore[attr-defined]
                raise WireError("the columns are not those of the encoding")
        elif tuple(self.encoding.get("shape", ())) != schema.shape:
            raise WireError("the shape of the inputs is not that of the encoding")
        for names, count in ((schema.classes, schema.outputs), (schema.columns, width)):
            if names is not None and (len(names) != count or len(set(names)) != count):
                raise WireError("the names of classes or columns are not as many as these")
        classes = schema.classes or ()
        if len({look(name, case=True) for name in classes}) < len(classes):
            raise WireError("two classes look alike")


def magnitude(moments: Moments, i: int) -> float:
    """The root mean square of the inputs of a channel or column."""
    return math.hypot(moments.mean[i], math.sqrt(moments.squares[i] / moments.count))


def state(
    dataset: Dataset, question: Question, name: str, token: str = "", least: int = 0
) -> Profile:
    """The profile of a member on its dataset; ``least`` is as in :func:`moments_of`."""
    rows = split_rows(dataset, question.split, question.seed, name)
    counts: tuple[int, ...] = ()
    if question.counts and tasks[dataset.task].one_class:
        found = np.bincount(rows.y[rows.train], minlength=dataset.outputs)
        counts = tuple(int(n) for n in found)
    encoding = encoding_of(dataset)
    return Profile(
        name=name,
        schema=dataclasses.replace(schema_of(dataset), mean=(), std=()),
        encoding={"kind": encoding.kind} | json.loads(json.dumps(encoding.to_dict())),
        moments=moments_of(dataset.x_train, least),
        train=len(rows.train),
        test=len(rows.test),
        counts=counts,
        token=token,
        versions={
            "kedge": __version__,
            "wire": wire.VERSION,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    )


# -- reading what a stranger wrote ------------------------------------------------------------


def _schema(values: Mapping[str, Any]) -> DataSchema:
    if values.keys() != {field.name for field in dataclasses.fields(DataSchema)}:
        raise WireError("the schema has unknown or missing fields")
    classes, columns = (
        None if values[key] is None else tuple(_text(v) for v in _list(values[key]))
        for key in ("classes", "columns")
    )
    task, dtype = _text(values["task"]), _text(values["dtype"])
    if task not in tasks or dtype not in ("uint8", "float32", "int64"):
        raise WireError("the schema has an unknown task or type")
    shape = tuple(_count(n, least=1) for n in _list(values["shape"], MAX_AXES))
    outputs = _count(values["outputs"], least=1, most=MAX_NAMES)
    if not shape or math.prod(shape) > MAX_INPUT:
        raise WireError("the inputs have an implausible shape")
    return DataSchema(shape, task, outputs, classes, columns, dtype=dtype)


def _encoding(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A description of an encoding that can be read; nothing else passes."""
    kind = _text(values.get("kind"))
    if kind not in encodings:
        raise WireError("the encoding is unknown")
    for column in _list(values["columns"]) if kind == "table" and "columns" in values else ():
        _column(_object(column))
    try:
        again = encodings[kind].from_dict(_options(values)).to_dict()
    except (KeyError, TypeError, ValueError, AttributeError):
        raise WireError("the encoding cannot be read") from None
    return {"kind": kind, **json.loads(json.dumps(again))}


def _column(values: Mapping[str, Any]) -> None:
    """Check one column of a table."""
    if values.keys() != {field.name for field in dataclasses.fields(ColumnEncoding)}:
        raise WireError("a column has unknown or missing fields")
    for key in ("name", "kind", "format"):
        _text(values[key])
    for word in _list(values["words"]):
        _text(word)
    for number in _list(values["fill"]) if values["fill"] is not None else ():
        _real(number)
    if values["kind"] not in ("number", "boolean", "date", "words"):
        raise WireError("a column is of an unknown kind")
    if type(values["indicator"]) is not bool:
        raise WireError("a column has no valid mark of missing values")


def _options(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != "kind"}


def _moments(values: Mapping[str, Any]) -> Moments:
    if values.keys() != {"bytes", "count", "mean", "squares"}:
        raise WireError("the moments have unknown or missing fields")
    return Moments(
        tuple(tuple(_count(n, most=10**15) for n in _list(row)) for row in _list(values["bytes"])),
        _count(values["count"], most=10**15),
        tuple(_real(v) for v in _list(values["mean"])),
        tuple(_real(v, least=0.0) for v in _list(values["squares"])),
    )


def _parsed(text: str) -> Mapping[str, Any]:
    try:
        return _object(read_json(text))
    except (ValueError, RecursionError):
        raise WireError("this is no profile of a member") from None


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise WireError("the profile has no object where one belongs")
    return value


def _list(value: Any, most: int = MAX_NAMES) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise WireError("the profile has no list where one belongs, or a longer one")
    return value


def _text(value: Any, most: int = MAX_WORD) -> str:
    if not isinstance(value, str) or len(value) > most or CONTROL.search(value):
        raise WireError("the profile has no short text where one belongs")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise WireError("the profile has no whole number where one belongs")
    return int(value)


def _count(value: Any, least: int = 0, most: int = MAX_SAMPLES) -> int:
    if not least <= _whole(value) <= most:
        raise WireError(f"the profile has an implausible number: {value!s:.30}")
    return int(value)


def _real(value: Any, least: float = -math.inf) -> float:
    try:
        number = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:  # a whole number of hundreds of digits
        number = math.nan
    if not (math.isfinite(number) and number >= least):
        raise WireError("the profile has no finite number where one belongs")
    return number
