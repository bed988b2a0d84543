"""What methods have in common that distil on the server, through samples of a generator.

``level`` says what the generator makes: ``input``, for the whole model, or ``feature``, for its
head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kedge.core import rng, tree
from kedge.core.model import Mode
from kedge.core.optim import Adam
from kedge.core.part import Part, Stack
from kedge.core.round import Round
from kedge.core.tree import Params, Tree, Weights
from kedge.core.view import Spec, View
from kedge.errors import IncompatibleError
from kedge.parts.generators import Generator, feature_generator, image_generator


class Distiller(Part):
    """A server that tunes the aggregated model on a generator's samples: what FLBoost and FedDF
    have in common. ``aim`` says in an error what there is nothing for; the fields are the part's.
    """

    aim: str
    weight_decay: float
    student_bn: str
    level: str
    noise: int
    width: int
    final_norm: bool

    side = "server"
    needs_clients = True
    needs_labels = True
    tasks = ("classification",)
    uploads = "C"
    compute = "generator and student on the server"

    def server_init(self, spec: Spec) -> Tree:
        if self.level == "feature":
            spec.model.require_head(self.name)
        if not self._tuned(spec):
            raise IncompatibleError(
                f"{self.name} has nothing to {self.aim}: what it would train stays on the clients. "
                "Write level=input"
            )
        return self._generator(spec).init(spec.key, spec.dtype, spec.device)._asdict()

    def reply(self, v: View, weights: Weights) -> tuple[Tree, Tree]:
        return {}, {"counts": Stack(v.label_counts)}  # n_k^y

    def _student_loss(
        self, own: Params, weights: Weights, r: Round, *rest: Any
    ) -> tuple[Tensor, Params]:
        """A loss of the leaves that learn, and the global model's next statistics."""
        raise NotImplementedError

    def _student_step(self, r: Round, weights: Weights, lr: Tensor, *rest: Any) -> Weights:
        """One step of SGD; ``rest`` goes to :meth:`_student_loss`."""
        own = {n: weights.params[n] for n in self._tuned(r.spec)}
        slope = torch.func.grad(self._student_loss, has_aux=True)
        grads, buffers = slope(own, weights, r, *rest)
        moved = tree.map(lambda w, g: w - lr * (g + self.weight_decay * w), own, grads)
        return Weights(weights.params | moved, buffers)

    def _student(
        self, own: Params, weights: Weights, r: Round, x: Tensor, key: Tensor | None
    ) -> tuple[Tensor, Params]:
        """``(logits, next buffers)`` of the global model with some leaves in place of its own."""
        now = weights._replace(params=weights.params | own)
        return say(r, self.level, now, x, "train" if self.student_bn == "train" else "eval", key)

    def _tuned(self, spec: Spec) -> list[str]:
        return tuned(spec, self.level)

    def _generator(self, spec: Spec) -> Generator:
        return make_generator(spec, self.level, self.noise, self.width, self.final_norm)


def generator_step(
    loss: Callable[..., tuple[Tensor, Params]],
    generator: Weights,
    moments: Tree,
    lr: Tensor,
    *rest: Any,
    weight_decay: float | None = None,
) -> tuple[Weights, Tree]:
    """One step of Adam on ``loss(params, buffers, *rest)``, which gives the next buffers, too;
    ``(generator, moments)`` after it."""
    slope = torch.func.grad(loss, has_aux=True)
    grads, buffers = slope(generator.params, generator.buffers, *rest)
    if weight_decay is not None:
        grads = tree.axpy(weight_decay, generator.params, grads)
    params, moments = Adam().update(generator.params, grads, moments, lr)
    return Weights(params, buffers), moments


def make_generator(spec: Spec, level: str, noise: int, width: int, final_norm: bool) -> Generator:
    """A generator of what the model, or its head, is given."""
    classes = spec.task.outputs
    if level == "feature":
        return feature_generator(spec.shapes["features"], classes, noise, width)
    return image_generator(tuple(spec.input_shape), classes, noise, width, final_norm)


def tuned(spec: Spec, level: str) -> list[str]:
    """The leaves that learn: the network's own (the head's, for features) that are shared."""
    own = spec.model.head_names() if level == "feature" else spec.model.names
    return [n for n in own if n in spec.params]


def say(
    r: Round, level: str, weights: Weights, x: Tensor, mode: Mode, key: Tensor | None = None
) -> tuple[Tensor, Params]:
    """``(logits, next buffers)`` of a model on what a generator made."""
    if level == "feature":
        return r.model.head(weights.params, x), weights.buffers
    done = r.forward(weights, x, mode, key)
    return done.logits, done.buffers


def teach(r: Round, level: str, teachers: Weights, x: Tensor) -> Tensor:
    """Logits of every client's model, ``[K, B, C]``."""
    return torch.func.vmap(lambda w: say(r, level, w, x, "eval")[0])(teachers)


def drawn(key: Tensor, parts: Tensor, number: int) -> Tensor:
    """Labels, drawn in proportion to whole numbers; a class with 0 is never drawn."""
    at = rng.integers(key, (number,), parts.sum())
    return torch.searchsorted(parts.cumsum(0), at, right=True)


def allotted(key: Tensor, parts: Tensor, number: int) -> Tensor:
    """Labels in proportion to whole numbers, shuffled; the largest remainders get what rounding
    down leaves over."""
    each, rest = number * parts // parts.sum(), number * parts % parts.sum()
    rank = torch.argsort(torch.argsort(rest, descending=True, stable=True))
    each = each + (rank < number - each.sum())
    return torch.searchsorted(each.cumsum(0), rng.permutation(key, number), right=True)


def faded(r: Round, first: float, decay: float) -> Tensor:
    """A step size in this round."""
    return torch.as_tensor(first * decay**r.round, dtype=r.spec.dtype, device=r.spec.device)
