"""Local optimisers as pure functions, equal to ``torch.optim`` step by step.

The order of one step is: gradient, corrections of the parts, clip, weight decay, momentum, step.
Optimiser state lives for one round: every client starts a round with a fresh optimiser.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeVar

import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.ops import REFERENCE, Ops
from kedge.core.schedules import schedule
from kedge.core.tree import Params, Tree
from kedge.errors import FieldError
from kedge.grammar import parse_call
from kedge.registry import Registry
from kedge.schema import Configured, Doc, ErrorCollector, Range, Read

Own = TypeVar("Own", bound="Optimizer")


class Optimizer(Configured):
    """Base class of local optimisers: a frozen dataclass of settings with pure functions.

    A new optimiser is one such class with ``@register`` above it; its fields, with types, ranges
    and help, are its options in ``--optimizer "name(field=value)"``. It needs the fields ``lr``
    and ``schedule``, which :class:`kedge.core.bound.Bound` reads.
    """

    #: The sum of its steps is a weighted sum of gradients, so parts may divide by it.
    is_linear: ClassVar[bool] = False

    lr: float
    schedule: str

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check()

    def check(self) -> None:
        """Raise a FieldError if fields do not go together."""

    @property
    def is_plain(self) -> bool:
        """Whether a step depends on its own gradient alone: no momentum."""
        return False

    @property
    def tells_pull(self) -> bool:
        """Whether :meth:`pulled_steps` is known."""
        return type(self).pulled_steps is not Optimizer.pulled_steps

    def init(self, params: Params) -> Tree:
        """The state at the start of a round."""
        raise NotImplementedError

    def update(
        self, params: Params, grads: Params, state: Tree, lr: Tensor, ops: Ops = REFERENCE
    ) -> tuple[Params, Tree]:
        """One step with an engine's arithmetic; returns new parameters and new state."""
        raise NotImplementedError

    def effective_steps(self, steps: Tensor) -> Tensor:
        """Sum of the coefficients with which gradients enter the update, over ``-lr``."""
        return steps

    def pulled_steps(self, steps: Tensor, pull: float) -> Tensor:
        """Effective steps where the gradient has a pull towards the start of the round.

        Args:
            steps: numbers of steps, ``[K]``.
            pull: ``lr * mu`` for the gradient ``g + mu (w - start)``.

        Returns:
            The update of the constant gradient g = 1, over ``-lr``, ``[K]``.
        """
        raise NotImplementedError


optimizers = Registry[type[Optimizer]]("optimizer", see="kedge list optimizers")


def register(cls: type[Own]) -> type[Own]:
    """Class decorator: make an optimiser known under its class name in lower case."""
    optimizers.add(cls.name, cls)
    return cls


LearningRate = Annotated[float, Doc("learning rate; the schedule scales it"), Range(0)]
WeightDecay = Annotated[float, Doc("what is added to the gradient, times the weights"), Range(0)]
Clip = Annotated[float, Doc("bound on the norm of the whole gradient; 0: none"), Range(0)]
ScheduleText = Annotated[str, Doc("learning rate over rounds"), Read(schedule)]
Decay = Annotated[float, Range(0, 1, open_high=True)]


@register
@dataclass(frozen=True)
class SGD(Optimizer):
    r"""Stochastic gradient descent: :math:`w \leftarrow w - \eta (g + \lambda w)`.

    With momentum :math:`\rho` the step is :math:`u \leftarrow \rho u + g`, with Nesterov's variant
    :math:`g + \rho u`. Equal to ``torch.optim.SGD`` step by step.
    """

    lr: LearningRate = 0.1
    momentum: Annotated[Decay, Doc("share of the last step that is kept")] = 0.0
    nesterov: Annotated[bool, Doc("Nesterov's momentum; needs momentum > 0")] = False
    weight_decay: WeightDecay = 0.0
    clip: Clip = 0.0
    schedule: ScheduleText = "constant"

    is_linear: ClassVar[bool] = True

    def check(self) -> None:
        if self.nesterov and not self.momentum > 0:
            raise FieldError(
                "sgd.nesterov needs momentum > 0; write momentum=0.9, nesterov=true", "nesterov"
            )

    @property
    def is_plain(self) -> bool:
        return not self.momentum

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

    def pulled_steps(self, steps: Tensor, pull: float) -> Tensor:
        r"""The update of a constant gradient 1 with a pull, over ``-lr``.

        Plain SGD: :math:`[1 - (1 - \eta\mu)^\tau]/(\eta\mu)` (FedNova, section 3), here as the
        recurrence that momentum changes, too. Weight decay is part of the objective, not a pull.
        """
        done, velocity, after = 0.0, 0.0, [0.0]  # the update, over -lr, after every step
        for _ in range(int(steps.max())):
            gradient = 1 - pull * done
            velocity = self.momentum * velocity + gradient
            done += gradient + self.momentum * velocity if self.nesterov else velocity
            after.append(done)
        return torch.tensor(after, dtype=torch.float64)[steps.long()].to(steps.dtype)


@register
@dataclass(frozen=True)
class Adam(Optimizer):
    r"""Adam: :math:`w \leftarrow w - \eta \hat m / (\sqrt{\hat v} + \epsilon)`, moments corrected.

    Kingma & Ba, Adam: A Method for Stochastic Optimization, ICLR 2015, arXiv:1412.6980. Weight
    decay is coupled, as in ``torch.optim.Adam``, to which it is equal step by step.
    """

    lr: LearningRate = 1e-3
    beta1: Annotated[Decay, Doc("share of the mean gradient that is kept")] = 0.9
    beta2: Annotated[Decay, Doc("share of the mean squared gradient that is kept")] = 0.999
    eps: Annotated[float, Doc("added to the root, against division by 0"), Range(0, open=True)] = (
        1e-8
    )
    weight_decay: WeightDecay = 0.0
    clip: Clip = 0.0
    schedule: ScheduleText = "constant"

    def init(self, params: Params) -> Tree:
        like = next(tree.leaves(params))
        zero = tree.zeros_like(params)
        # created on the device: a copy from the host cannot be captured in a CUDA graph
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


def _prepared(grads: Params, params: Params, clip: float, weight_decay: float, ops: Ops) -> Params:
    if clip:
        norm = torch.sqrt(tree.sq_norm(grads))
        grads = tree.scale(grads, torch.clamp(clip / (norm + 1e-6), max=1.0))
    return ops.axpy(weight_decay, params, grads) if weight_decay else grads


def make_optimizer(
    text: str, settings: Mapping[str, object] | None = None, chosen: Collection[str] = ()
) -> Optimizer:
    """Make the optimiser that a string describes.

    Args:
        text: ``sgd``, ``adam(beta1=0.5)``, ...
        settings: values for the fields of these names, unless the text gives them.
        chosen: names of the settings that the user gave; the others are defaults. A given setting
            that the optimiser lacks, or that is also in the text, is an error.

    Raises:
        UnknownName: there is no such optimiser or field.
        FieldError: a value is wrong, given twice, or belongs to another optimiser.

    >>> make_optimizer("adam(beta1=0.5)", {"lr": 0.01}).beta1
    0.5
    """
    call = parse_call(text)
    schema = optimizers[call.name].schema()
    named = dict(zip(schema.options, call.args, strict=False)) | call.kwargs
    errors, filled = ErrorCollector(), {}
    for key, value in (settings or {}).items():
        with errors.collect():
            if key in schema.options and key not in named:
                filled[key] = value
            elif key in chosen:
                _refuse(text, call.name, key, value, named)
    with errors.collect():
        values = schema.bind(call._replace(kwargs=filled | call.kwargs))
    errors.raise_all()
    return optimizers[call.name](**values)


def _refuse(text: str, name: str, key: str, value: object, named: Mapping[str, object]) -> None:
    """Raise if a setting is given twice, or belongs to other optimisers."""
    if key not in named:
        owners = [n for n in optimizers if key in optimizers[n].schema().options]
        raise FieldError(f"{key} belongs to {', '.join(owners)}; leave it out with {name}", key)
    if named[key] != value:
        raise FieldError(
            f"{key} is given twice: {key} = {value!r} and optimizer = {text}; leave one out", key
        )
