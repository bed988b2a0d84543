"""What a member says of itself when it joins: plain data, checked field by field."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import numpy as np
import torch

from kedge._version import __version__
from kedge.core.task import tasks
from kedge.data.datasets import Dataset
from kedge.data.encoding import encodings
from kedge.data.encodings import encoding_of
from kedge.errors import KedgeError, SeveralErrors, WireError
from kedge.federation.member.own_data import Moments, moments_of, schema_of, split_rows
from kedge.federation.names import look
from kedge.schema import Range, read_fields
from kedge.session import wire
from kedge.session.blob import read_json
from kedge.session.terms import DataSchema

MAX_NAME, MAX_NAMES, MAX_WORD = 100, 100_000, 1000
MAX_SAMPLES = 10**9  # more is implausible
MAX_INPUT, MAX_AXES = 10**8, 10  # numbers and axes of one input
MAX_NUMBER = float(np.finfo(np.float32).max)
TYPES = ("uint8", "float32", "int64")  # of inputs
Samples = Annotated[int, Range(0, MAX_SAMPLES)]
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
        return _read(cls, text, "question of a coordinator")


@dataclass(frozen=True)
class MemberProfile:
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
    train: Annotated[int, Range(1, MAX_SAMPLES)]
    test: Samples
    counts: tuple[Samples, ...] = ()
    token: str = ""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> MemberProfile:
        """Read what :meth:`to_json` writes; a WireError for anything else."""
        found = _read(cls, text, "profile of a member")
        found._check_plausible()
        schema = dataclasses.replace(found.schema, mean=(), std=())
        found = dataclasses.replace(found, schema=schema, encoding=_encoding(found.encoding))
        found._check()
        return found

    def _check_plausible(self) -> None:
        """Values that are too long, too many or unknown."""
        if not self.name.isprintable() or not look(self.name):
            raise WireError("the profile has no valid name")
        texts = (self.name, self.token, *self.versions, *self.versions.values())
        if max(map(len, texts)) > MAX_NAME:
            raise WireError("the profile has no short text where one belongs")
        shape = self.schema.shape
        if not shape or len(shape) > MAX_AXES or math.prod(shape) > MAX_INPUT:
            raise WireError("the inputs have an implausible shape")
        if self.schema.outputs > MAX_NAMES:
            raise WireError("the profile has an implausible number of outputs")
        if self.schema.task not in tasks or self.schema.dtype not in TYPES:
            raise WireError("the schema has an unknown task or type")

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


def state(dataset: Dataset, question: Question, name: str, least: int = 0) -> MemberProfile:
    """The profile of a member on its dataset; ``least`` is as in :func:`moments_of`."""
    rows = split_rows(dataset, question.split, question.seed, name)
    counts: tuple[int, ...] = ()
    if question.counts and tasks[dataset.task].one_class:
        found = np.bincount(rows.y[rows.train], minlength=dataset.outputs)
        counts = tuple(int(n) for n in found)
    encoding = encoding_of(dataset)
    return MemberProfile(
        name=name,
        schema=dataclasses.replace(schema_of(dataset), mean=(), std=()),
        encoding={"kind": encoding.kind} | json.loads(json.dumps(encoding.to_dict())),
        moments=moments_of(dataset.x_train, least),
        train=len(rows.train),
        test=len(rows.test),
        counts=counts,
        versions={
            "kedge": __version__,
            "wire": wire.VERSION,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    )


# -- reading what a stranger wrote ------------------------------------------------------------

T = TypeVar("T")


def _read(cls: type[T], text: str, what: str) -> T:
    """What a stranger wrote, as a dataclass; a WireError for anything else."""
    try:
        values = read_json(text)
        _check_sizes(values)
        return read_fields(cls, values, complete=True)
    except (KedgeError, ValueError, RecursionError) as error:
        first = error.errors[0] if isinstance(error, SeveralErrors) else error
        reason = first if isinstance(first, KedgeError) else "it cannot be read"
        raise WireError(f"this is no {what}: {reason}") from None


def _check_sizes(value: Any) -> None:
    """Raise a WireError for texts and lists that are too long, and for texts that are none."""
    if isinstance(value, str) and (len(value) > MAX_WORD or CONTROL.search(value)):
        raise WireError("it has no short text where one belongs")
    if isinstance(value, (list, dict)) and len(value) > MAX_NAMES:
        raise WireError("it has a list that is too long")
    parts = (*value, *value.values()) if isinstance(value, dict) else value
    for part in parts if isinstance(value, (list, dict)) else ():
        _check_sizes(part)


def _encoding(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A description of an encoding that can be read; nothing else passes."""
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in encodings:
        raise WireError("the encoding is unknown")
    try:
        again = encodings[kind].from_dict(_options(values)).to_dict()
    except (KeyError, TypeError, ValueError, AttributeError):
        raise WireError("the encoding cannot be read") from None
    return {"kind": kind, **json.loads(json.dumps(again))}


def _options(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != "kind"}
