"""The terms of a federation: the settings and the data schema that all members agree on.

Terms are text and numbers. Two members have the same terms if their hashes are equal. With equal
terms the server needs no data, and a client needs nothing from other clients. A member takes terms
whose numbers are bounded, as the annotations of the fields say: they come from others.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, TypeVar

import torch
from torch import Tensor

from kedge.core import rng, tree
from kedge.core.bound import Bound
from kedge.core.method import parse
from kedge.core.model import Model
from kedge.core.optim import make_optimizer
from kedge.core.part import Part
from kedge.core.schedules import schedule
from kedge.core.task import Batch, Task, make_task
from kedge.core.task_custom import with_class_weights, with_metric
from kedge.core.view import Data
from kedge.core.work import WEIGHTINGS, LocalWork, Workload
from kedge.errors import KedgeError, TermsError
from kedge.schema import Choice, Range, schema_of
from kedge.session.purity import watching
from kedge.session.sampler import Sampler, Uniform
from kedge.session.session import Session

FORMAT = 2
MAX = 10**6  # rounds, steps, rows of a batch, clients; and the learning rate of a round
MAX_TEXT = 2000  # characters of a text
T = TypeVar("T")
Weighting = Annotated[str, Choice(lambda: WEIGHTINGS)]
Dtype = Annotated[str, Choice(lambda: ("float32", "float64"))]


class NoData:
    """The data of a server: none. It knows only whether inputs are token ids."""

    is_random = False

    def __init__(self, tokens: bool) -> None:
        self.tokens = tokens

    def batch(self, index: Tensor, key: Tensor) -> Batch:
        raise KedgeError("the server of a federation has no data")

    def clean(self, index: Tensor) -> Batch:
        raise KedgeError("the server of a federation has no data")


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

    shape: Annotated[tuple[int, ...], Range(1)]
    task: str
    outputs: Annotated[int, Range(1)]
    classes: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    mean: tuple[float, ...] = ()
    std: Annotated[tuple[float, ...], Range(0, open=True)] = ()
    dtype: str = "float32"

    def check(self) -> None:
        """Raise a TermsError for names and scalings that are not as many as inputs or outputs."""
        channels = 1 if self.dtype == "int64" else (*self.shape, 0)[0]
        wanted = dict.fromkeys(("columns", "mean", "std"), channels) | {"classes": self.outputs}
        for name, count in wanted.items():
            found = len(getattr(self, name) or ())
            if found not in (0, count):
                raise TermsError(f"data.{name} has {found} entries, not {count}")


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
    num_clients: Annotated[int, Range(1, MAX)]
    examples: Annotated[int, Range(1)]  # training samples of all clients together
    method: str = "fedavg"
    model: str = "own"  # a model string, or "own" for a module that every member supplies
    batchnorm: str = "average"
    optimizer: str = "sgd"
    batch: Annotated[int, Range(1, MAX)] = 32
    steps: Annotated[int, Range(0, MAX)] = 0  # 0: count epochs
    epochs: Annotated[float, Range(0, MAX, open=True)] = 1.0
    replacement: bool = False
    weighting: Weighting = "size"
    per_round: Annotated[int, Range(0, MAX)] = 0  # 0: all
    rounds: Annotated[int, Range(1, MAX)] = 1
    seed: Annotated[int, Range(0)] = 0
    dtype: Dtype = "float32"
    precision: str = "fp32"
    augment: str = "none"
    split: str = "auto"  # what a member tests on, see kedge.federation.member.own_data
    metric: str = "auto"
    class_weights: Annotated[tuple[float, ...], Range(0)] = ()  # of the loss; empty: all 1

    @property
    def workload(self) -> Workload:
        """How much each client trains."""
        work = LocalWork(self.batch, self.steps or None, self.epochs, self.replacement)
        return Workload(self.num_clients, self.examples, work, self.weighting, self.seed)

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
        """Read what :meth:`to_json` writes; raises a TermsError for anything else, and for values
        that :meth:`check` refuses."""
        try:
            values = json.loads(text)
            if values.pop("format", None) != FORMAT:
                raise TermsError("these terms have another format; use the same release of kedge")
            data = _fields(DataSchema, values.pop("data"))
            terms = _fields(cls, values | {"data": data})
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise TermsError(f"these are no terms of a federation: {error}") from None
        terms.check()
        return terms

    def check(self) -> None:
        """Raise a TermsError for values of a wrong type, or out of all bounds."""
        try:
            for thing, name in ((self, "terms"), (self.data, "data")):
                for key, value in vars(thing).items():
                    if isinstance(value, str) and len(value) > MAX_TEXT:
                        raise TermsError(f"{name}.{key} has {len(value)} characters")
                schema_of(type(thing), name).check(vars(thing))
            self.data.check()
            optim = make_optimizer(self.optimizer)
            factor = schedule(optim.schedule)
            bounded = all(optim.lr * factor(t) <= MAX for t in range(self.rounds))
        except OverflowError:
            bounded = False
        except KedgeError as error:
            raise TermsError(f"these are no terms of a federation: {error}") from None
        if not bounded:
            raise TermsError(f"optimizer: a learning rate is above {MAX:g} in one of the rounds")

    def bind(
        self,
        model: Model,
        data: Data,
        device: torch.device | str = "cpu",
        releases: tuple[Part, ...] = (),
    ) -> Bound:
        """Bind the method of these terms to a model and data.

        All members start from the model's weights, which must be equal everywhere.

        Args:
            model: the model; its weights are converted to the dtype of the terms.
            data: the member's data.
            device: where weights and state are placed.
            releases: what the member adds to what leaves it, see :class:`~kedge.core.bound.Bound`.
        """
        dtype = getattr(torch, self.dtype)

        def place(w: Tensor) -> Tensor:
            return w.to(device, dtype if w.is_floating_point() else None)

        with watching():  # the hooks that run once
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
                releases=releases,
            )

    def session(self, bound: Bound, sampler: Sampler | None = None) -> Session:
        """The server's session under these terms, with another sampler than a uniform one."""
        return Session(bound, self.workload, sampler or Uniform(self.per_round))


def _fields(cls: type[T], values: Mapping[str, object]) -> T:
    """An instance from JSON values, in which tuples are lists."""
    names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if values.keys() != names:
        raise TermsError(f"unknown or missing: {', '.join(sorted(values.keys() ^ names))}")
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
