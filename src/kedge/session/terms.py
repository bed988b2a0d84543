"""The terms of a federation: the settings and the data schema that all members agree on.

Terms are text and numbers. Two members have the same terms if their hashes are equal. With equal
terms the server needs no data, and a client needs nothing from other clients.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from kedge.core import rng, tree
from kedge.core.bound import Bound
from kedge.core.method import parse
from kedge.core.model import Model
from kedge.core.optim import make_optimizer
from kedge.core.task import Task, make_task
from kedge.core.task_custom import with_class_weights, with_metric
from kedge.core.view import Data
from kedge.core.work import LocalWork
from kedge.errors import TermsError
from kedge.session.session import Session

FORMAT = 2
DTYPES = ("float32", "float64", "float16", "bfloat16")
MAX_WHOLE, MAX_NUMBER = 2**63, 1e38  # of any whole and of any other number in terms
MIN_STD = 2.0**-126  # the smallest normal float32
MAX_TEXT = 2000  # characters of any text in terms


@dataclass(frozen=True)
class DataSchema:
    """The meaning of inputs and labels, the same for all members.

    Args:
        shape: shape of one input, without the batch axis.
        task: name of the task, such as ``"classification"``.
        outputs: width of the model's last layer.
        classes: names of the outputs in order; None where they have no names.
        columns: names of a table's inputs in order; a one-hot column is ``name=word``.
        mean: subtracted from inputs, one number per channel or column; empty for the member's own.
        std: divides inputs, likewise.
        dtype: type of the inputs before scaling: ``"uint8"`` is divided by 255, ``"int64"`` are
            token ids, which are not scaled.
    """

    shape: tuple[int, ...]
    task: str
    outputs: int
    classes: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    dtype: str = "float32"

    @property
    def lengths(self) -> dict[str, int]:
        """How many there are of what is not left out."""
        channels = 1 if self.dtype == "int64" else (*self.shape, 0)[0]
        every = dict.fromkeys(("columns", "mean", "std"), channels)
        return every | {"classes": self.outputs}


@dataclass(frozen=True)
class Terms:
    """Settings of a federation, as in :class:`~kedge.sim.simulation.Simulation`, and its data
    schema.

    >>> schema = DataSchema((4,), "classification", 2, classes=("no", "yes"))
    >>> terms = Terms(schema, num_clients=3, examples=90, method="scaffold")
    >>> Terms.from_json(terms.to_json()) == terms
    True
    """

    data: DataSchema
    num_clients: int
    examples: int  # training samples of all clients together
    method: str = "fedavg"
    model: str = "own"  # a model string, or "own" for a module that every member supplies
    batchnorm: str = "average"
    optimizer: str = "sgd"
    batch: int = 32
    steps: int = 0  # 0: count epochs
    epochs: float = 1.0
    replacement: bool = False
    weighting: str = "size"
    per_round: int = 0  # 0: all
    rounds: int = 1
    seed: int = 0
    dtype: str = "float32"
    precision: str = "fp32"
    augment: str = "none"
    split: str = "auto"  # what a member tests on, see kedge.flower.own_data
    metric: str = "auto"
    class_weights: tuple[float, ...] = ()  # of the loss; empty: all 1

    @property
    def work(self) -> LocalWork:
        return LocalWork(self.batch, self.steps or None, self.epochs, self.replacement)

    @property
    def task(self) -> Task:
        task = make_task(self.data.task, self.data.outputs)
        if self.class_weights:
            task = with_class_weights(task, self.class_weights)
        return task if self.metric == "auto" else with_metric(task, self.metric)

    @property
    def hash(self) -> str:
        """Sixteen hexadecimal digits, equal for equal terms on every machine."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Terms:
        """Read what :meth:`to_json` writes; raises a TermsError for anything else."""
        try:
            values = json.loads(text)
            if values.pop("format", None) != FORMAT:
                raise TermsError("these terms have another format; use the same release of kedge")
            data = _fields(DataSchema, values.pop("data"))
            terms: Terms = _fields(cls, values | {"data": data})
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise TermsError(f"these are no terms of a federation: {error}") from None
        if terms.dtype not in DTYPES:
            raise TermsError(f"terms: dtype = {terms.dtype!r:.40} is not one of {DTYPES}")
        for name, count in terms.data.lengths.items():
            if len(getattr(terms.data, name) or ()) not in (0, count):
                raise TermsError(f"terms: the inputs or outputs do not have as many {name}")
        if min(terms.data.std, default=1.0) < MIN_STD:
            raise TermsError(
                f"terms: std has a number below {MIN_STD:g}, which inputs are divided by"
            )
        return terms

    def bind(self, model: Model, data: Data, device: torch.device | str = "cpu") -> Bound:
        """Bind the method of these terms to a model and data.

        All members start from the model's weights, which must be equal everywhere.

        Args:
            model: the model; its weights are converted to the dtype of the terms.
            data: the member's data.
            device: where weights and state are placed.
        """
        dtype = getattr(torch, self.dtype)

        def place(w: Tensor) -> Tensor:
            return w.to(device, dtype if w.is_floating_point() else None)

        return Bound(
            parse(self.method),
            model,
            self.task,
            make_optimizer(self.optimizer),
            data,
            num_clients=self.num_clients,
            batch=self.batch,
            input_shape=self.data.shape,
            initial=tree.map(place, model.own_weights()),
            key=rng.fold(rng.key(self.seed), "init").to(device),
        )

    def session(self, bound: Bound) -> Session:
        """The server's session under these terms."""
        return Session(
            bound,
            work=self.work,
            per_round=self.per_round or None,
            weighting=self.weighting,
            examples=self.examples,
            seed=self.seed,
        )


def _fields(cls: type[Any], values: Mapping[str, Any]) -> Any:
    """An instance from JSON values, in which tuples are lists."""
    names = {field.name for field in dataclasses.fields(cls)}
    if values.keys() != names:
        raise TermsError(f"unknown or missing: {', '.join(sorted(values.keys() ^ names))}")
    found = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    for name, kind in get_type_hints(cls).items():
        if not _is(found[name], kind):
            raise TermsError(f"terms: {name} = {found[name]!r:.40} is not possible")
    return cls(**found)


def _is(value: Any, kind: Any) -> bool:
    """Whether a value is of a type, and of a plausible size."""
    if isinstance(value, tuple) and get_origin(kind) is tuple:
        return all(_is(item, get_args(kind)[0]) for item in value)
    if get_origin(kind) is UnionType:
        return any(_is(value, one) for one in get_args(kind))
    if kind is float:
        return type(value) in (int, float) and abs(value) <= MAX_NUMBER
    if kind is int:
        return type(value) is int and 0 <= value < MAX_WHOLE
    return type(value) is kind and (kind is not str or len(value) <= MAX_TEXT)
