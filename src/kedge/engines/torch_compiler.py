"""The compiler of torch, by private interfaces; without them kedge does not compile."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kedge.engines.in_place import replace_in_place


def can_compile() -> bool:
    """Whether torch has what :func:`trace` and :func:`inductor` need."""
    return not os.environ.get("KEDGE_PUBLIC_TORCH") and _compiler() is not None


@cache
def _compiler() -> tuple[Any, Any, Any] | None:
    """(make_fx, fx_graph_cse, inductor), imported on first use, which takes a second."""
    try:
        from torch import _inductor
        from torch._functorch.compile_utils import fx_graph_cse
        from torch.fx.experimental.proxy_tensor import make_fx
    except ImportError:
        return None
    return make_fx, fx_graph_cse, _inductor


def trace(function: Callable[..., Any], *leaves: Tensor) -> torch.fx.GraphModule:
    """The graph of a function of tensors, with ``vmap`` and ``grad`` resolved."""
    compiler = _compiler()
    assert compiler is not None
    return compiler[0](function)(*leaves)


def eliminate_common_subexpressions(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A graph in which equal subexpressions are computed once.

    torch's pass never merges what stands before an operation in place with what stands after it,
    even if that writes to a temporary (as in the backward pass of a cosine). So those come first.
    """
    compiler = _compiler()
    assert compiler is not None
    replace_in_place(graph)
    return compiler[1](graph)


def inductor(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """Compile a graph to a function that returns a list of tensors."""
    compiler = _compiler()
    assert compiler is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about torch's own code
        try:
            return compiler[2].compile(graph, inputs)
        except Exception as error:
            # torch 2.11 asserts while it reorders the loops of some graphs with many branches
            if not (_reorders_loops() and "AssertionError" in f"{type(error).__name__}: {error}"):
                raise
        with compiler[2].config.patch(loop_ordering_after_fusion=False):
            return compiler[2].compile(graph, inputs)


def _reorders_loops() -> bool:
    compiler = _compiler()
    return bool(compiler and getattr(compiler[2].config, "loop_ordering_after_fusion", False))


def is_traced() -> bool:
    """Whether the caller is being traced by :func:`trace`."""
    module = sys.modules.get("torch.fx.experimental.proxy_tensor")  # loaded by the first trace
    return module is not None and module.get_proxy_mode() is not None
