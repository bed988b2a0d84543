"""Operations in place on temporaries of a traced graph, replaced by ones with a new result."""

from __future__ import annotations

from typing import Any

import torch


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
