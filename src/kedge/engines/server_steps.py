"""Steps on the server as CUDA graphs, compiled if the execution says so.

Graphs are kept with those of the clients' steps, so that both are freed when memory runs out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from kedge.core import ops, tree
from kedge.core.model import Model
from kedge.core.ops import Objective
from kedge.core.optim import Adam, Optimizer
from kedge.core.steps import REFERENCE, Function, ServerView, Step, Steps, count_rows
from kedge.core.tree import Params, Tree, Weights
from kedge.engines import convolutions
from kedge.engines.capture import (
    UNROLL,
    CapturedFunction,
    CapturedLoop,
    Captures,
    address_of,
    is_out_of_memory,
    shapes_of,
    static_copy,
)
from kedge.engines.compiled import compile_function
from kedge.engines.engine import Engine
from kedge.engines.layout import ServerLayout, as_read
from kedge.engines.torch_private import (
    foreach_add,
    foreach_mul,
    foreach_ratio,
    foreach_square,
)

T = TypeVar("T")


def server_steps(engine: Engine, device: torch.device) -> Steps:
    """How an engine takes steps on the server: as they are written, unless it captures or compiles
    the clients' steps."""
    compiles = engine.execution.compile and engine.fusible(device)
    if engine.captures is None or not (compiles or device.type == "cuda"):
        return REFERENCE
    return FastSteps(engine.captures, device, compiles)


class FastSteps(Steps):
    """Captured on a GPU, and compiled.

    Args:
        captures: where graphs are kept.
        device: of the server's weights.
        compiles: whether to compile steps.
    """

    def __init__(self, captures: Captures, device: torch.device, compiles: bool) -> None:
        self._captures = captures
        self.unstacks_one = self.converts = self._on_gpu = device.type == "cuda"
        # in eager mode, BatchNorm of a stack is slow
        self.stacks_all = compiles and self._on_gpu
        self._compiles = compiles
        self._compiled: dict[Any, Callable[..., Any]] = {}
        # by id of the model and the arguments, with the model, so that the id stays its own
        self._models: dict[tuple[int, str, bool], tuple[Model, Model]] = {}
        # borrowed results by address: each stays there as long as its graph exists
        self._borrowed: WeakValueDictionary[int, Tensor] = WeakValueDictionary()

    def prepare(self, model: Model, precision: str, whole: bool = False) -> Model:
        """On a GPU: one model in channels-last, several as one batch."""
        if not self._on_gpu:
            return super().prepare(model, precision)
        key = id(model), precision, whole
        if key not in self._models:
            layout = ServerLayout(stacked=convolutions.available(), whole=whole)
            self._models[key] = model, model.at_precision(precision).prepared(layout)
        return self._models[key][1]

    def as_read(self, model: Model, weights: Weights) -> Weights:
        return as_read(model, weights) if self.converts else weights

    def gradient(self, objective: Objective, params: Params) -> tuple[Params, Tree]:
        # outside of torch.func, where tensors have no memory format
        by = ops.gradient if self._on_gpu else super().gradient
        return by(objective, params)

    def axpy(self, factor: Tensor | float, a: Params, b: Params) -> Params:
        if not self._on_gpu:
            return super().axpy(factor, a, b)
        first, second, alpha = [b[n] for n in a], list(a.values()), 1.0
        if isinstance(factor, Tensor):  # float() would synchronize
            second = list(foreach_mul(second, factor))
        else:
            alpha = factor
        return dict(zip(a, foreach_add(first, second, alpha), strict=True))

    def update(
        self, optimizer: Optimizer, params: Params, grads: Params, state: Tree, lr: Tensor
    ) -> tuple[Params, Tree]:
        if self._on_gpu and optimizer == Adam():
            return _adam(params, grads, state, lr)
        return super().update(optimizer, params, grads, state, lr)

    def keep(self, result: Tree) -> Tree:
        return static_copy(result) if self._on_gpu else result

    def apply(self, view: ServerView, function: Function, given: Tree, borrow: bool) -> Tree:
        def call(given: Tree) -> Tree:
            return function(view, given)

        def replay(captured: CapturedFunction) -> Tree:
            result = captured.run(given)
            if not borrow:
                return static_copy(result)
            self._borrowed.update({address_of(x): x for x in tree.leaves(result)})
            return result

        key = _key(function, given)
        return self._run(
            (*key, self._places(given)),
            lambda: CapturedFunction(call, given, self._fuse_for(key), self._stays),
            replay,
            lambda: self._eager(key, call, given)(given),
        )

    def iterate(
        self, view: ServerView, step: Step, carry: Tree, xs: Tree, given: Tree, borrow: bool
    ) -> Tree:
        def advance(given: Tree, carry: Tree, x: Tree) -> Tree:
            return step(view, given, carry, x)

        count = count_rows(xs)
        if not count:
            return carry
        first = tree.take(xs, 0)
        key = _key(step, {"given": given, "carry": carry, "x": first})

        def loop() -> Tree:
            fast, last = self._eager(key, advance, given, carry, first), carry
            for t in range(count):
                last = fast(given, last, tree.take(xs, t))
            return last

        def replay(captured: CapturedLoop) -> Tree:
            result = captured.run(given, carry, xs)
            return result if borrow else static_copy(result)

        return self._run(
            (*key, min(count, UNROLL), self._places({"given": given, "xs": xs})),
            lambda: CapturedLoop(advance, given, carry, xs, self._fuse_for(key), self._stays),
            replay,
            loop,
        )

    def _stays(self, x: Tensor) -> bool:
        """Whether a tensor is a borrowed result, which graphs can read where it is."""
        return address_of(x) in self._borrowed

    def _places(self, values: Tree) -> tuple[Any, ...]:
        """Where a graph reads borrowed results; one that reads others is another graph."""
        return tuple(
            (x.data_ptr(), x.stride()) if self._stays(x) else None for x in tree.leaves(values)
        )

    def _run(
        self,
        key: Any,
        make: Callable[[], T],
        replay: Callable[[T], Tree],
        eager: Callable[[], Tree],
    ) -> Tree:
        """Replay captured work, or run it eagerly if it cannot be captured."""
        if self._on_gpu and self._captures.enabled:
            try:
                captured = self._captures.get(key, make)
                if captured is not None:
                    return replay(captured)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    self._captures.clear()
                self._captures.give_up(key, error)
        # outside the handler, where the traceback would keep the tensors of the failed call alive
        return eager()

    def _eager(self, key: Any, function: Callable[..., T], *examples: Tree) -> Callable[..., T]:
        """The function, compiled on a CPU if the execution says so."""
        if not self._compiles or self._on_gpu:
            return function
        return self._compile(key, function, *examples)

    def _fuse_for(self, key: Any) -> Any:
        return partial(self._compile, key) if self._compiles else None

    def _compile(self, key: Any, function: Callable[..., T], *examples: Tree) -> Callable[..., T]:
        """Compile once, also if graphs are freed and captured again."""
        if key not in self._compiled:
            self._compiled[key] = compile_function(function, *examples)
        return self._compiled[key]


def _adam(params: Params, grads: Params, state: Tree, lr: Tensor) -> tuple[Params, Tree]:
    """A step of :class:`Adam` with its defaults, on lists of tensors: few kernels for all."""
    b1, b2, count = Adam.beta1, Adam.beta2, state["count"] + 1
    flat, old_m, old_v = ([values[n] for n in params] for values in (grads, state["m"], state["v"]))
    m = foreach_add(foreach_mul(old_m, b1), flat, 1 - b1)
    v = foreach_add(foreach_mul(old_v, b2), foreach_square(flat), 1 - b2)
    size, scale = lr / (1 - b1**count), torch.rsqrt(1 - b2**count)
    moves = foreach_mul(foreach_ratio(m, v, scale, Adam.eps), size)
    new = foreach_add(list(params.values()), moves, -1)
    after, moments, squares = (dict(zip(params, x, strict=True)) for x in (new, m, v))
    return after, {"m": moments, "v": squares, "count": count}


def _key(function: Any, arguments: Tree) -> tuple[Any, ...]:
    """What a captured function depends on besides the values of its arguments."""
    part, names = function.__self__, repr(tree.map(lambda _: 0, arguments))
    return "server", type(part), repr(part), function.__func__, names, shapes_of(arguments)
