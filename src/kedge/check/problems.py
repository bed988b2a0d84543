"""Small problems in float64 on which laws and identities are checked."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kedge.core import rng
from kedge.core.client import Carry, begin, client_context, step
from kedge.core.method import Method
from kedge.core.model import Model
from kedge.core.optim import SGD, Optimizer
from kedge.core.part import Part
from kedge.core.task import Batch, Task, make_task
from kedge.core.view import View
from kedge.core.work import LocalWork, take_jobs
from kedge.data.federation import Federation
from kedge.sim.simulation import Simulation

DOUBLE = torch.float64
_engine = ContextVar("engine", default="loop")


@contextmanager
def on_engine(name: str) -> Iterator[None]:
    """Set the default engine of :meth:`Problem.simulate` inside a ``with`` block."""
    token = _engine.set(name)
    try:
        yield
    finally:
        _engine.reset(token)


@dataclass(frozen=True)
class Problem:
    """Data, model, optimizer and local work of a small federation."""

    federation: Federation
    module: nn.Module
    work: LocalWork
    optim: Optimizer = field(default_factory=lambda: SGD(lr=0.05))
    batchnorm: str = "average"

    @cached_property
    def model(self) -> Model:
        """The module as a model, which all simulations share: models are immutable."""
        return Model(self.module, batchnorm=self.batchnorm)

    def simulate(
        self, method: str | Method | Part, engine: str | None = None, **options: Any
    ) -> Simulation:
        """A simulation of ``method`` on this problem; ``options`` go to :class:`Simulation`."""
        settings: dict[str, Any] = {"optim": self.optim, "work": self.work}
        settings["engine"] = engine or _engine.get()
        return Simulation(self.federation, self.model, method, **settings | options)

    def trained(
        self,
        method: str | Method | Part,
        engine: str | None = None,
        rounds: int = 1,
        clients: Sequence[int] | None = None,
        **options: Any,
    ) -> Simulation:
        """A simulation after ``rounds`` rounds of these clients (None: as sampled)."""
        run = self.simulate(method, engine, **options)
        for _ in range(rounds):
            run.run_round(clients)
        return run


def quadratics(
    curvatures: tuple[float, ...] = (1.0, 10.0),
    optima: tuple[float, ...] = (0.0, 1.0),
    lr: float = 0.05,
    steps: int | None = 10,
    copies: tuple[int, ...] | None = None,
    optim: Optimizer | None = None,
) -> Problem:
    r"""Clients :math:`f_k(w) = h_k (w - a_k)^2 / 2`, as linear regression on one sample each.

    With the input :math:`\sqrt{h/2}` and the target :math:`a\sqrt{h/2}` the squared error of
    :math:`w x` is :math:`f_k`. The model starts at w = 0. ``copies`` repeats a client's sample,
    which changes its client weight and, with ``steps=None``, its number of steps, but not
    :math:`f_k`.
    """
    copies = copies or (1,) * len(curvatures)
    owner = torch.repeat_interleave(torch.tensor(copies))
    h, a = torch.tensor(curvatures, dtype=DOUBLE)[owner], torch.tensor(optima, dtype=DOUBLE)[owner]
    x = (h / 2).sqrt()[:, None]
    head = torch.zeros(1, 1)
    return linear(x, x[:, 0] * a, copies, head, task="regression", steps=steps, lr=lr, optim=optim)


def position(run: Simulation) -> float:
    """The scalar w of the global model of :func:`quadratics`."""
    return float(run.weights.params["head.weight"])


def minimum(
    h: Sequence[float], a: Sequence[float], weights: Sequence[float] | None = None
) -> float:
    """The minimum of sum_k p_k h_k (w - a_k)^2; equal weights by default."""
    return float(np.average(a, weights=np.multiply(1 if weights is None else weights, h)))


def fedavg_point(
    h: Sequence[float],
    a: Sequence[float],
    lr: float,
    steps: int | Sequence[int],
    weights: Sequence[float] | None = None,
) -> float:
    """FedAvg's fixed point on quadratics with full participation: client k moves by 1 - (1 - lr
    h_k)^steps of its distance to a_k.

    >>> round(fedavg_point((1, 10), (0, 1), lr=0.08, steps=5), 6)
    0.745697
    """
    return minimum(1 - (1 - lr * np.asarray(h)) ** np.asarray(steps), a, weights)


def choices(
    labels: tuple[int, ...] = (0, 1), classes: int = 2, lr: float = 1.0, steps: int | None = 1
) -> Problem:
    r"""Clients with one sample each, of the class :math:`c_k`, and logits z that are the weights.

    The input is 1. So the loss is :math:`-\log \mathrm{softmax}(z)_{c_k}`, and its gradient is
    softmax(z) - one-hot(:math:`c_k`). The model starts at z = 0.
    """
    x, sizes = torch.ones(len(labels), 1), [1] * len(labels)
    return linear(x, torch.tensor(labels), sizes, torch.zeros(classes, 1), steps=steps, lr=lr)


def logits(run: Simulation) -> list[float]:
    """The logits z of the global model of :func:`choices`."""
    return run.weights.params["head.weight"].flatten().tolist()


def linear(
    x: Tensor,
    y: Tensor,
    sizes: Sequence[int],
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    task: str = "classification",
    batch: int = 1,
    steps: int | None = 1,
    lr: float = 0.05,
    optim: Optimizer | None = None,
) -> Problem:
    """A linear model that starts at ``weight`` [outputs, inputs] and ``bias`` (None: it has none).

    The clients have the samples in order, as many as ``sizes`` says.
    """
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=DOUBLE)
    with torch.no_grad():
        head.weight.copy_(weight)
        if bias is not None:
            head.bias.copy_(bias)
    data = federation_of(x, y, sizes, task, len(weight))
    stages = {"stage1": nn.Flatten()} if x.ndim > 2 else {}
    module = nn.Sequential(OrderedDict(**stages, head=head))
    return Problem(data, module, LocalWork(batch=batch, steps=steps), optim or SGD(lr=lr))


def federation_of(
    x: Tensor, y: Tensor, sizes: Sequence[int], task: str = "classification", outputs: int = 3
) -> Federation:
    """Clients that have the samples in order, as many as ``sizes`` says."""
    clients = list(torch.split(torch.arange(len(y)), list(sizes)))
    return Federation(x.to(DOUBLE), y, clients, make_task(task, outputs), dtype=DOUBLE)


def images(
    task: str = "classification",
    norm: str = "none",
    sizes: tuple[int, ...] = (5, 9, 14),
    batch: int = 5,
    optim: Optimizer | None = None,
    batchnorm: str = "average",
    steps: int | None = None,
    dropout: float = 0.0,
) -> Problem:
    """Clients of unequal size with 8x8 images of three classes, and a small convolutional network.

    ``task`` is classification, multilabel or regression; ``norm`` is none, bn or gn.
    """
    total, outputs = sum(sizes), 3 if task != "regression" else 1
    keys = rng.split(rng.key(7), 4)
    y = rng.integers(keys[0], (total,), 3)
    pattern = rng.normal(keys[1], (3, 1, 8, 8), DOUBLE)
    x = 0.7 * rng.normal(keys[2], (total, 1, 8, 8), DOUBLE) + pattern[y]
    order = torch.argsort(y + rng.uniform(keys[3], (total,), DOUBLE))  # by class: label skew
    labels: Tensor = y
    if task == "multilabel":
        labels = torch.stack([y == 0, y != 1, y == 2], 1).to(DOUBLE)
    elif task == "regression":
        labels = y.to(DOUBLE) - 1.0
    clients = list(torch.split(order, list(sizes)))
    task_object: Task = make_task(task, outputs)
    federation = Federation(x, labels, clients, task_object, test=(x, labels), dtype=DOUBLE)
    work = LocalWork(batch=batch, steps=steps)
    optim = optim or SGD(lr=0.05, momentum=0.0)
    return Problem(federation, small_net(norm, outputs, dropout), work, optim, batchnorm)


def small_net(norm: str, outputs: int, dropout: float = 0.0) -> nn.Sequential:
    """A network for 8x8 images with one channel: convolution and pooling, hidden layer, head."""
    layer = {"bn": nn.BatchNorm2d(4), "gn": nn.GroupNorm(2, 4), "none": nn.Identity()}[norm]
    net = nn.Sequential(
        OrderedDict(
            stage1=nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), layer, nn.Tanh(), nn.AvgPool2d(4)),
            stage2=nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Dropout(dropout)),
            head=nn.Linear(6, outputs),
        )
    )
    key = rng.key(11)
    with torch.no_grad():
        for i, weight in enumerate(net.parameters()):
            noise = rng.normal(rng.fold(key, i), tuple(weight.shape), DOUBLE)
            weight.copy_(noise / weight[0].numel() ** 0.5 if weight.ndim > 1 else 1 + 0.1 * noise)
    return net.to(DOUBLE)


def step_view(run: Simulation, client: int, part: Part, hook: str = "term") -> tuple[View, Batch]:
    """``(view, batch)`` that a hook of a part receives in a client's first local step."""
    cohort = run.cohort([client])
    job, first = take_jobs(cohort.jobs, 0), torch.zeros((), dtype=torch.int32)
    context = client_context(run.bound.at(run.round), job, {}, first)
    return View(context, part, hook), run.federation.clean(cohort.batches[0, 0])


class LocalSteps:
    """The local work of a client in the current round, one step at a time.

    Attributes:
        carry: what the client knows after the last step.
        batches: its rows of every step.
    """

    def __init__(self, run: Simulation, client: int) -> None:
        cohort = run.cohort([client])
        self.bound, self.job = run.bound.at(run.round), take_jobs(cohort.jobs, 0)
        self.batches = cohort.batches[0, : cohort.steps[0]]
        self.carry = begin(self.bound, self.job)

    def step(self, t: int) -> Carry:
        """Take step ``t``."""
        self.carry = step(self.bound, self.job, self.carry, self.batches[t])
        return self.carry

    def view(self, part: Part, hook: str = "term", t: int = 0) -> View:
        """What a hook of a part receives in step ``t``."""
        context = client_context(self.bound, self.job, self.carry.local, torch.tensor(t))
        return View(context, part, hook)
