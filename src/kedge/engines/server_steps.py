"""Steps on the server as CUDA graphs, compiled if the execution says so.

Graphs are kept with those of the clients' steps, so that both are freed when memory runs out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from kedge.core import ops, tree
from kedge.core.model import Model
from kedge.core.ops import Objective
from kedge.core.steps import REFERENCE, Function, Setting, Step, Steps, count_rows
from kedge.core.tree import Params, Tree
from kedge.engines import stacked
from kedge.engines.capture import UNROLL, CapturedFunction, CapturedLoop, Captures, shapes_of
from kedge.engines.compiled import compile_function
from kedge.engines.engine import Engine
from kedge.engines.layout import EngineLayout
from kedge.engines.oom import is_out_of_memory
from kedge.engines.torch_private import foreach_add, foreach_mul

T = TypeVar("T")


def server_steps(engine: Engine, device: torch.device) -> Steps:
    """How an engine takes steps on the server: as they are written, unless it captures or compiles
    the clients' steps."""
    captures = getattr(engine, "_captures", None)
    compiles = engine.execution.compile and engine.fusible(device)
    if not isinstance(captures, Captures) or not (compiles or device.type == "cuda"):
        return REFERENCE
    return FastSteps(captures, device, compiles)


class FastSteps(Steps):
    """Captured on a GPU, and compiled.

    Args:
        captures: where graphs are kept.
        device: of the server's weights.
        compiles: whether to compile steps.
    """

    def __init__(self, captures: Captures, device: torch.device, compiles: bool) -> None:
        self._captures = captures
        self.unstacks_one = self._on_gpu = device.type == "cuda"
        self._fuse = self._compile if compiles else None
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._models: dict[int, tuple[Model, Model]] = {}  # by id of the engine's model

    def prepare(self, model: Model) -> Model:
        """On a GPU: one model in channels-last, several as one batch."""
        if not self._on_gpu:
            return model
        if id(model) not in self._models:
            layout = EngineLayout(channels_last=True, stacked=stacked.available())
            self._models[id(model)] = model, model.prepared(layout)
        return self._models[id(model)][1]

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

    def apply(self, setting: Setting, function: Function, given: Tree) -> Tree:
        def call(given: Tree) -> Tree:
            return function(setting, given)

        key = _key(function, given)
        return self._run(
            key,
            lambda: CapturedFunction(call, given, self._fuse_for(key)),
            lambda captured: captured.run(given),
            lambda: self._eager(key, call, given)(given),
        )

    def iterate(self, setting: Setting, step: Step, carry: Tree, xs: Tree, given: Tree) -> Tree:
        def advance(given: Tree, carry: Tree, x: Tree) -> Tree:
            return step(setting, given, carry, x)

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

        return self._run(
            (*key, min(count, UNROLL)),
            lambda: CapturedLoop(advance, given, carry, xs, self._fuse_for(key)),
            lambda captured: captured.run(given, carry, xs),
            loop,
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
        if self._fuse is None or self._on_gpu:
            return function
        return self._compile(key, function, *examples)

    def _fuse_for(self, key: Any) -> Any:
        fuse = self._fuse
        return None if fuse is None else lambda f, *examples: fuse(key, f, *examples)

    def _compile(self, key: Any, function: Callable[..., T], *examples: Tree) -> Callable[..., T]:
        """Compile once, also if graphs are freed and captured again."""
        if key not in self._compiled:
            self._compiled[key] = compile_function(function, *examples)
        return self._compiled[key]


def _key(function: Any, arguments: Tree) -> tuple[Any, ...]:
    """What a captured function depends on besides the values of its arguments."""
    part, names = function.__self__, repr(tree.map(lambda _: 0, arguments))
    return "server", type(part), repr(part), function.__func__, names, shapes_of(arguments)
