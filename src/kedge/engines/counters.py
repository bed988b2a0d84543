"""Counters of BatchNorm layers in a traced graph, increased by one operation."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from kedge.engines.in_place import is_mutable


def group_counters(graph: fx.Graph) -> None:
    """Replace the additions of one to integers by one operation on a list, which is one kernel.

    A network has a number ``num_batches_tracked`` for every BatchNorm layer, which a compiler would
    increase in a kernel each.
    """
    nodes = list(graph.nodes)
    if any(map(is_mutable, nodes)):
        return
    order = {node: i for i, node in enumerate(nodes)}
    found = [node for node in nodes if _counts(node)]
    found = [node for node in found if order[node.args[0]] < order[found[0]]]
    if len(found) < 2:
        return
    with graph.inserting_before(found[0]):
        sums = graph.call_function(
            torch.ops.aten._foreach_add.Scalar, ([node.args[0] for node in found], 1)
        )
        items = [graph.call_function(operator.getitem, (sums, i)) for i in range(len(found))]
    for node, item in zip(found, items, strict=True):
        item.meta = dict(node.meta)
        node.replace_all_uses_with(item)
        graph.erase_node(node)


def _counts(node: Any) -> bool:
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    value, one = node.args
    is_one = isinstance(one, int) and one == 1
    return is_one and isinstance(value, fx.Node) and node.meta["val"].dtype == torch.int64
