"""Local optimisers as pure functions, equal to ``torch.optim`` step by step.

The order of one step is: gradient, corrections of the parts, clip, weight decay, momentum, step.
Optimiser state lives for one round: every client starts a round with a fresh optimiser.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.ops import REFERENCE, Ops
from kedge.core.tree import Params, Tree
from kedge.errors import FieldError, UnknownName
from kedge.grammar import parse_calls


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent, with momentum, Nesterov's variant, weight decay and clipping.

    ``clip`` bounds the norm of the whole gradient (0: no bound). ``schedule`` scales the learning
    rate from round to round, see :func:`schedule`.
    """

    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    clip: float = 0.0
    schedule: str = "constant"

    name: ClassVar[str] = "sgd"
    is_linear: ClassVar[bool] = True  # the sum of its steps is a weighted sum of gradients

    def __post_init__(self) -> None:
        _check(self)

    def init(self, params: Params) -> Tree:
        return {"velocity": tree.zeros_like(params)} if self.momentum else {}

    def update(
        self, params: Params, grads: Params, state: Tree, lr: Tensor, ops: Ops = REFERENCE
    ) -> tuple[Params, Tree]:
        grads = _prepared(grads, params, self.clip, self.weight_decay, ops)
        if self.momentum:
            # torch starts the velocity at the first gradient, which is what 0 * momentum + g gives
            velocity = ops.axpy(self.momentum, state["velocity"], grads)
            state = {"velocity": velocity}
            grads = ops.axpy(self.momentum, velocity, grads) if self.nesterov else velocity
        return ops.move(-lr, grads, params), state

    def effective_steps(self, steps: Tensor) -> Tensor:
        r"""Sum of the coefficients with which gradients enter ``params - anchor``, over ``-lr``.

        Plain SGD: :math:`\tau`. With momentum :math:`\rho`:
        :math:`[\tau - \rho(1 - \rho^\tau)/(1 - \rho)]/(1 - \rho)` (FedNova, section 3). Nesterov
        adds :math:`\rho` times the momentum of every step on top of its own gradient.
        """
        if not self.momentum:
            return steps
        dtype = steps.dtype
        rho, steps = self.momentum, steps.double()  # the difference below cancels in float32
        heavy_ball = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        return (rho * heavy_ball + steps if self.nesterov else heavy_ball).to(dtype)


@dataclass(frozen=True)
class Adam:
    """Adam with bias correction and coupled weight decay, as ``torch.optim.Adam``."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 0.0
    schedule: str = "constant"

    name: ClassVar[str] = "adam"
    is_linear: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check(self)

    def init(self, params: Params) -> Tree:
        like = next(tree.leaves(params))
        zero = tree.zeros_like(params)
        # made on the device: a copy from the host could not be recorded in a CUDA graph
        count = torch.zeros((), dtype=like.dtype, device=like.device)
        return {"m": zero, "v": zero, "count": count}

    def update(
        self, params: Params, grads: Params, state: Tree, lr: Tensor, ops: Ops = REFERENCE
    ) -> tuple[Params, Tree]:
        grads = _prepared(grads, params, self.clip, self.weight_decay, ops)
        b1, b2, count = self.beta1, self.beta2, state["count"] + 1
        m = tree.map(lambda m, g: b1 * m + (1 - b1) * g, state["m"], grads)
        v = tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state["v"], grads)
        size, root = lr / (1 - b1**count), torch.sqrt(1 - b2**count)
        params = tree.map(
            lambda w, m, v: w - size * m / (torch.sqrt(v) / root + self.eps), params, m, v
        )
        return params, {"m": m, "v": v, "count": count}

    def effective_steps(self, steps: Tensor) -> Tensor:
        return steps


Optimizer = SGD | Adam


def _prepared(grads: Params, params: Params, clip: float, weight_decay: float, ops: Ops) -> Params:
    if clip:
        norm = torch.sqrt(tree.sq_norm(grads))
        grads = tree.scale(grads, torch.clamp(clip / (norm + 1e-6), max=1.0))
    return ops.axpy(weight_decay, params, grads) if weight_decay else grads


# Each schedule is a function of the round that multiplies the learning rate.


def _constant() -> Callable[[int], float]:
    return lambda t: 1.0


def _exponential(gamma: float) -> Callable[[int], float]:
    _need(_is_number(gamma) and gamma > 0, f"gamma = {gamma!r} is not a number above 0")
    return lambda t: gamma**t


def _step(every: int, gamma: float = 0.1) -> Callable[[int], float]:
    _need(isinstance(every, int) and every >= 1, f"every = {every!r} is not a number of rounds")
    _need(_is_number(gamma) and gamma > 0, f"gamma = {gamma!r} is not a number above 0")
    return lambda t: gamma ** (t // every)


def _cosine(rounds: int, floor: float = 0.0) -> Callable[[int], float]:
    _need(isinstance(rounds, int) and rounds >= 1, f"rounds = {rounds!r} is not a number of rounds")
    _need(_is_number(floor) and 0 <= floor <= 1, f"floor = {floor!r} is not in [0, 1]")

    def factor(t: int) -> float:
        done = min(1.0, t / max(1, rounds))
        return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * done))

    return factor


def _warmup(rounds: int) -> Callable[[int], float]:
    _need(isinstance(rounds, int) and rounds >= 1, f"rounds = {rounds!r} is not a number of rounds")
    return lambda t: min(1.0, (t + 1) / rounds)


SCHEDULES: dict[str, Callable[..., Callable[[int], float]]] = {
    "constant": _constant,
    "exponential": _exponential,
    "step": _step,
    "cosine": _cosine,
    "warmup": _warmup,
}


def schedule(text: str) -> Callable[[int], float]:
    """The learning-rate factor of every round.

    ``constant``, ``exponential(0.998)``, ``step(every=100, gamma=0.1)``, ``cosine(rounds=1000)``,
    ``warmup(rounds=5)``, or several joined by ``+``, whose factors multiply.

    >>> schedule("warmup(4)+exponential(0.5)")(1)
    0.25
    """
    factors: list[Callable[[int], float]] = []
    for call in parse_calls(text):
        if call.name not in SCHEDULES:
            raise UnknownName("schedule", call.name, SCHEDULES)
        _need(call.preset is None, f"{text!r}: schedules have no presets")
        try:
            factors.append(SCHEDULES[call.name](*call.args, **call.kwargs))
        except TypeError as error:
            what = str(error).split("() ")[-1]
            raise FieldError(
                f"schedule {text!r}: {what}. Write for example: exponential(0.998)"
            ) from None
    return lambda t: math.prod(f(t) for f in factors)


def _check(optim: SGD | Adam) -> None:
    for field in ("lr", "weight_decay", "clip"):
        value = getattr(optim, field)
        fine = _is_number(value) and 0 <= value < math.inf
        _need(fine, f"{optim.name}.{field} = {value!r} is not a number from 0 up")
    for field in ("momentum",) if isinstance(optim, SGD) else ("beta1", "beta2"):
        value = getattr(optim, field)
        fine = _is_number(value) and 0 <= value < 1
        _need(fine, f"{optim.name}.{field} = {value!r} is not in [0, 1)")
    if isinstance(optim, SGD):
        nesterov = optim.nesterov
        _need(isinstance(nesterov, bool), f"sgd.nesterov = {nesterov!r} is not true or false")
        both = not nesterov or optim.momentum > 0
        _need(both, "sgd.nesterov needs momentum > 0; write momentum=0.9, nesterov=true")
    else:
        eps = optim.eps
        _need(_is_number(eps) and eps > 0, f"adam.eps = {eps!r} is not a number above 0")
    schedule(optim.schedule)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _need(fine: bool, message: str) -> None:
    if not fine:
        raise FieldError(message)
