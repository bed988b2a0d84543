"""Optimisation steps on the server, as pure functions that an engine can capture and compile.

A part that trains on the server (a generator, a student) writes one step as a method::

    def _student_step(self, s: ServerView, given: Tree, carry: Weights, x: Tree) -> Weights: ...

and runs it with ``r.iterate(self._student_step, weights, draws, given)``. The step sees only its
arguments, the part's fields, and the :class:`ServerView`, which is the same in all rounds. So an
engine may record it once and replay it in later rounds. What changes from round to round, such as a
learning rate, is a tensor in ``given``.

:class:`Steps` is the definition: a plain loop. Engines on a GPU have their own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kedge.core import ops, tree
from kedge.core.model import Mode, Model, Pass
from kedge.core.ops import Objective
from kedge.core.optim import Optimizer
from kedge.core.part import Part
from kedge.core.tree import Params, Tree, Weights
from kedge.core.view import Spec
from kedge.errors import HookError

Step = Callable[["ServerView", Tree, Tree, Tree], Tree]  # (view, given, carry, x) -> next carry
Function = Callable[["ServerView", Tree], Tree]  # (view, given) -> result


class Steps:
    """How steps on the server are run; this one runs them as they are written."""

    #: A stack of one model runs as that model: faster on a GPU, and rounded differently.
    unstacks_one = False
    #: Passes read weights in another dtype or memory format: see :meth:`as_read`.
    converts = False
    #: Models on the same inputs are better stacked, also one of the server and one of a client.
    stacks_all = False

    def prepare(self, model: Model, precision: str, whole: bool = False) -> Model:
        """The model as steps use it, with passes in a precision; ``whole``: only their results are
        read, not activations inside."""
        return model.at_precision(precision)

    def gradient(self, objective: Objective, params: Params) -> tuple[Params, Tree]:
        """Gradient of an objective, and its auxiliary results."""
        return torch.func.grad(objective, has_aux=True)(params)

    def axpy(self, factor: Tensor | float, a: Params, b: Params) -> Params:
        """``factor * a + b``, leaf by leaf."""
        return ops.axpy(factor, a, b)

    def update(
        self, optimizer: Optimizer, params: Params, grads: Params, state: Tree, lr: Tensor
    ) -> tuple[Params, Tree]:
        """One step of an optimiser: the next parameters and its next state."""
        return optimizer.update(params, grads, state, lr)

    def as_read(self, model: Model, weights: Weights) -> Weights:
        """Weights as passes of a prepared model read them."""
        return weights

    def keep(self, result: Tree) -> Tree:
        """A borrowed result in memory of its own."""
        return result

    def apply(self, view: ServerView, function: Function, given: Tree, borrow: bool) -> Tree:
        """``function(view, given)``; ``borrow``: the next call may overwrite the result."""
        return function(view, given)

    def iterate(
        self, view: ServerView, step: Step, carry: Tree, xs: Tree, given: Tree, borrow: bool
    ) -> Tree:
        """The last carry of ``carry = step(view, given, carry, x)`` over the rows x of xs."""
        for t in range(count_rows(xs)):
            carry = step(view, given, carry, tree.take(xs, t))
        return carry


REFERENCE = Steps()


class ServerView:
    """What is the same in every round of a run, as a part sees it on the server."""

    def __init__(self, part: Part, model: Model, spec: Spec, steps: Steps = REFERENCE) -> None:
        self._part, self._steps = part, steps
        self.model, self.spec, self.task = model, spec, spec.task
        self.unstacks_one, self.stacks_all = steps.unstacks_one, steps.stacks_all
        self.converts = steps.converts
        #: ``(gradient, auxiliary results)`` of ``objective(params)``, which returns a scalar and a
        #: tree.
        self.gradient = steps.gradient
        #: ``factor * a + b``, leaf by leaf.
        self.axpy = steps.axpy
        #: One step of an optimiser: the next parameters and its next state.
        self.update = steps.update

    def prepare(self, model: Model) -> Model:
        """A part's own model, such as a generator, in the precision and the layout of the run.

        Only results of its passes may be read.
        """
        return self._steps.prepare(model, self.model.precision, whole=True)

    def forward(
        self, weights: Weights, x: Tensor, mode: Mode = "eval", key: Tensor | None = None
    ) -> Pass:
        """A forward pass on the server; in mode ``train`` the result has the new buffers."""
        return self.model.forward(weights, x, mode, key=key, taps=self._part.cuts())

    def as_read(self, weights: Weights) -> Weights:
        """Weights of one model or a stack of them, as forward passes read them.

        They give the same results, but are converted once, not in every step. No gradient is to be
        taken with respect to them.
        """
        return self._steps.as_read(self.model, weights)


def count_rows(xs: Tree) -> int:
    return len(next(tree.leaves(xs)))


def check_method(name: str, function: Callable[..., Tree], arguments: Tree) -> None:
    """Raise a HookError unless a function is a part's method, and its arguments are tensors."""
    if not isinstance(getattr(function, "__self__", None), Part):
        raise HookError(
            f"{name} must pass one of its methods to r.iterate or r.apply, which depends on nothing"
            " but its arguments and the part's fields; other values belong into given"
        )
    for leaf in tree.leaves(arguments):
        if not isinstance(leaf, Tensor):
            raise HookError(
                f"{name} passes a {type(leaf).__name__} to {function.__name__}, which would keep "
                "its value in all rounds; write torch.full((), value, device=r.spec.device)"
            )
