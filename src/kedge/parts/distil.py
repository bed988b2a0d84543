"""What methods have in common that distil on the server, through samples of a generator.

``level`` says what the generator makes: ``input``, for the whole model, or ``feature``, for its
head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kedge.core import rng
from kedge.core.model import Mode
from kedge.core.round import Round
from kedge.core.tree import Params, Weights
from kedge.core.view import Spec
from kedge.parts.generators import Generator, feature_generator, image_generator


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
