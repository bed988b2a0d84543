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


# -- Operations in place on temporaries of a traced graph, replaced by ones with a new result ------


def replace_in_place(graph: torch.fx.Graph) -> None:
    """Replace, in a graph, operations in place on temporaries by those that return a new tensor.

    A temporary is the result of an operation that makes a new tensor, and of which no operation
    before has made a view. Detached tensors are replaced by the tensors themselves if no operation
    in place is left.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    fresh: set[Any] = set()
    for node in list(graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None:
            continue
        if not schema.is_mutable:
            if all(r.alias_info is None for r in schema.returns):
                fresh.add(node)
            continue
        value, pure = node.args[0] if node.args else None, _pure(node.target)
        if not isinstance(value, torch.fx.Node) or value not in fresh or pure is None:
            continue
        if not all(u in fresh for u in value.users if order[u] < order[node]):
            continue
        node.target = pure
        fresh.add(node)
        later = {u for u in value.users if order[u] > order[node]}
        value.replace_all_uses_with(node, delete_user_cb=later.__contains__)
    if any(is_mutable(node) for node in graph.nodes):
        return
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.detach.default:
            # results stay as they are: no result is an argument
            node.replace_all_uses_with(node.args[0], delete_user_cb=lambda u: u.op != "output")
            if not node.users:
                graph.erase_node(node)


def is_mutable(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def _pure(target: Any) -> Any:
    """The operation that returns a new tensor instead of writing in place to its first argument;
    None if there is none."""
    schema = target._schema
    name, written = schema.name.removeprefix("aten::"), [a for a in schema.arguments if a.is_write]
    if target.namespace != "aten" or not name.endswith("_") or written != schema.arguments[:1]:
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    return getattr(packet, target._overloadname, None)
