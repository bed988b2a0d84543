"""Shared code of methods that distil on the server with a data-free generator.

``level`` selects what the generator produces: ``input``, samples for the whole model, or
``feature``, features for its head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kedge.core import rng, tree
from kedge.core.model import Mode
from kedge.core.optim import Adam
from kedge.core.part import Drawn, Part, Present, Stack
from kedge.core.round import Round
from kedge.core.steps import ServerView
from kedge.core.tree import Params, Tree, Weights
from kedge.core.view import Spec, View
from kedge.errors import IncompatibleError
from kedge.parts.generators import Generator, feature_generator, image_generator


class Fit(NamedTuple):
    """A generator in training, with Adam's moments."""

    generator: Weights
    moments: Tree


class Draws(NamedTuple):
    """Noise and labels of the samples of every step."""

    z: Tensor  # [steps, B, d]
    y: Tensor  # [steps, B]


class Teams(NamedTuple):
    """The clients that teach in each of several steps."""

    rows: Tensor  # positions in the cohort, [steps, clients]
    teachers: Weights  # all clients' models, leaves [K, ...]
    taken: Weights | None  # by step, leaves [steps, clients, ...]; None if the student joins them


class Taught(Part):
    """Learns from the clients' models on the server, and trains a generator there.

    Subclasses declare the annotated names below as fields.
    """

    level: str
    noise: int
    width: int  # 0: the default of the generator
    final_norm: bool

    counted = ("counts",)
    tells_labels = ("counts",)
    needs_clients = True
    needs_labels = True
    tasks = ("classification",)
    uploads = "C"

    def makes_inputs(self) -> bool:
        return self.level == "input"

    def reply(self, v: View, weights: Weights) -> tuple[Tree, Tree]:
        return {}, {"counts": Stack(v.label_counts)}  # n_k^y

    def describe_uploads(self, spec: Spec) -> str:
        sent = "; every client receives its generator" if self.has("send") else ""
        return (
            f"sends how many samples of each of the {spec.task.outputs} classes the client has, "
            f"and the server trains a generator against the clients' models{sent}"
        )

    def draw_samples(self, present: Present) -> Drawn:
        spec, is_input = present.spec, self.level == "input"
        key_z, key_y = rng.split(present.key.to(spec.device), 2)
        z = self._noise(key_z, present.count, spec)
        y = rng.integers(key_y, (present.count,), spec.task.outputs)
        weights = self._stored_generator(present.server)
        with torch.no_grad():
            x, _ = self._generator(spec)(weights, z, y, train=False)
        untrained = " (not trained yet)" if present.round <= getattr(self, "start", 0) else ""
        what = f"{'images' if is_input else 'features'} of its generator{untrained}"
        where = "the generator is on the server"
        where += ", which sends it to every client" if self.has("send") else ""
        return Drawn(x, y, what, where, is_input)

    def _generator(self, spec: Spec) -> Generator:
        """Of inputs for the model, or of features for its head."""
        shape = spec.shapes["features"] if self.level == "feature" else tuple(spec.input_shape)
        return self._build(shape, spec.task.outputs)

    def _build(self, shape: tuple[int, ...], classes: int) -> Generator:
        if self.level == "feature":
            return feature_generator(shape, classes, self.noise, self.width or 8)
        width = self.width or 128
        return image_generator(shape, classes, self.noise, width, self.final_norm, self.name)

    def _prepared_generator(self, s: ServerView) -> Generator:
        return self._generator(s.spec).prepared(s.prepare)

    def _stored_generator(self, server: Tree) -> Weights:
        return Weights(**server)

    def _noise(self, key: Tensor, rows: int, spec: Spec) -> Tensor:
        return rng.normal(key, (rows, self.noise), spec.dtype)

    def _teachers(self, r: Round) -> Weights:
        """The clients' models of this round, leaves ``[K, ...]``, as passes read them; only their
        heads for generated features."""
        if self.level == "feature":
            return Weights({n: r.clients.params[n] for n in r.model.head_names()}, {})
        return r.apply(self._as_read, r.clients, borrow=True) if r.converts else r.clients

    def _as_read(self, s: ServerView, weights: Weights) -> Weights:
        return s.as_read(weights)

    def _teams(self, r: Round, order: Tensor | None, joined: bool) -> Teams:
        """One step per client in an order ``[K]``, or one step of all clients for None."""
        teachers = self._teachers(r)
        if order is None:
            rows = torch.arange(r.cohort, device=r.key.device)[None]  # [1, K]
            taken = tree.map(lambda x: x.unsqueeze(0), teachers)
            return Teams(rows, teachers, None if joined else taken)
        rows = order[:, None]  # [K, 1]
        return Teams(rows, teachers, None if joined else tree.take(teachers, rows))

    def _joined(self, r: Round, teams: Teams, student: Weights) -> Weights | None:
        """The clients' models of every step and, last, the student: ``[steps, clients + 1, ...]``;
        None if the student does not join them."""
        if teams.taken is not None:
            return None
        given = {"teachers": teams.teachers, "student": student, "rows": teams.rows}
        return r.apply(self._join, given, borrow=True)

    def _join(self, s: ServerView, given: Tree) -> Weights:
        rows = given["rows"]

        def stack(clients: Tensor, own: Tensor) -> Tensor:
            return torch.cat([clients[rows], own.expand(len(rows), 1, *own.shape)], 1)

        models = tree.map(stack, given["teachers"], given["student"])
        return s.as_read(models) if self.level == "input" else models


class Distiller(Taught):
    """Fine-tune the aggregated model on generated samples. Base class of FLBoost and FedDF.

    Subclasses declare the annotated names below as fields. ``aim`` is a verb for error messages.
    """

    aim: str
    weight_decay: float
    student_bn: str

    side = "server"
    compute = "generator and student on the server"

    def server_init(self, spec: Spec) -> Tree:
        if self.level == "feature":
            spec.model.require_head(self.name)
        if not self._tuned_names(spec):
            raise IncompatibleError(
                f"{self.name} has nothing to {self.aim}: the parameters that it would train stay "
                "on the clients. Write level=input"
            )
        return self._generator(spec).init(spec.key, spec.dtype, spec.device)._asdict()

    def _student_loss(self, student: Weights, s: ServerView, *rest: Any) -> tuple[Tensor, Params]:
        """``(loss, next buffers)`` of the global model."""
        raise NotImplementedError

    def _descend(self, s: ServerView, weights: Weights, lr: Tensor, *rest: Any) -> Weights:
        """The global model after one SGD step on ``_student_loss(student, s, *rest)``."""
        own = {n: weights.params[n] for n in self._tuned_names(s.spec)}

        def loss(own: Params) -> tuple[Tensor, Params]:
            return self._student_loss(weights._replace(params=weights.params | own), s, *rest)

        grads, buffers = s.gradient(loss, own)
        params = s.axpy(-lr, s.axpy(self.weight_decay, own, grads), own)
        return Weights(weights.params | params, buffers)

    def _student_forward(
        self, student: Weights, s: ServerView, x: Tensor, key: Tensor | None
    ) -> tuple[Tensor, Params]:
        """``(logits, next buffers)`` of the global model."""
        mode: Mode = "train" if self.student_bn == "train" else "eval"
        return student_logits(s, self.level, student, x, mode, key)

    def _tuned_names(self, spec: Spec) -> list[str]:
        """Names of the shared parameters to fine-tune: all of the model's, or only the head's."""
        own = spec.model.head_names() if self.level == "feature" else spec.model.names
        return [n for n in own if n in spec.params]


Loss = Callable[[Weights], tuple[Tensor, Params]]  # of a generator: (loss, next buffers)


def generator_step(
    s: ServerView, loss: Loss, fit: Fit, lr: Tensor, weight_decay: float | None = None
) -> Fit:
    """Take one Adam step on the generator."""
    params, before = fit.generator
    grads, buffers = s.gradient(lambda p: loss(Weights(p, before)), params)
    if weight_decay is not None:
        grads = s.axpy(weight_decay, params, grads)
    params, moments = s.update(Adam(), params, grads, fit.moments, lr)
    return Fit(Weights(params, buffers), moments)


def student_logits(
    s: ServerView, level: str, weights: Weights, x: Tensor, mode: Mode, key: Tensor | None = None
) -> tuple[Tensor, Params]:
    """``(logits [B, C], next buffers)`` of one model on generated samples ``x``."""
    if level == "feature":
        return s.model.head(weights.params, x), weights.buffers
    out = s.forward(weights, x, mode, key)
    return out.logits, out.buffers


def teacher_logits(s: ServerView, level: str, teachers: Weights, x: Tensor) -> Tensor:
    """Logits ``[K, B, C]`` of K stacked client models on the same samples, in evaluation mode."""

    def logits_of(weights: Weights) -> Tensor:
        return student_logits(s, level, weights, x, "eval")[0]

    if s.unstacks_one and len(next(tree.leaves(teachers))) == 1:
        return logits_of(tree.take(teachers, 0)).unsqueeze(0)
    return torch.func.vmap(logits_of)(teachers)


def client_shares(weights: Tensor) -> Tensor:
    """Weights ``[K, C]`` that sum to 1 over the clients for every present class."""
    total = weights.sum(0)
    return weights / (total + (total <= 0))


def draw_labels(key: Tensor, counts: Tensor, number: int) -> Tensor:
    """Draw ``number`` labels independently, with probability proportional to integer ``counts``.

    A class with count 0 is never drawn.
    """
    index = rng.integers(key, (number,), counts.sum())
    return torch.searchsorted(counts.cumsum(0), index, right=True)


def allot_labels(key: Tensor, counts: Tensor, number: int) -> Tensor:
    """Shuffle ``number`` labels in exact proportion to integer ``counts``.

    Quotas are rounded by the largest-remainder method.
    """
    quota, remainder = number * counts // counts.sum(), number * counts % counts.sum()
    rank = torch.argsort(torch.argsort(remainder, descending=True, stable=True))
    quota = quota + (rank < number - quota.sum())
    return torch.searchsorted(quota.cumsum(0), rng.permutation(key, number), right=True)


def decayed_lr(r: Round, lr: float, decay: float) -> Tensor:
    """The learning rate of this round, ``lr * decay**round``."""
    return torch.full((), lr * decay**r.round, dtype=r.spec.dtype, device=r.spec.device)


def pass_key(s: ServerView, key: Tensor, step: Tensor) -> Tensor | None:
    """The key of the student's pass in a step; None for a model that draws nothing."""
    return rng.fold(key, step) if s.model.is_random else None


def client_order(counts: Tensor) -> Tensor:
    """Clients in descending order of their label counts, independent of their order in the cohort.

    Class 0 is compared first, class 1 breaks ties, and so on.
    """
    order = torch.arange(len(counts), device=counts.device)
    for c in reversed(range(counts.shape[1])):
        order = order[torch.argsort(counts[order, c], descending=True, stable=True)]
    return order
