"""Counters of BatchNorm in a traced graph are increased by one operation."""

import torch
from torch import Tensor, nn

from kedge.core import tree
from kedge.core.model import Model
from kedge.core.tree import Weights
from kedge.engines import torch_compiler
from kedge.engines.compiled import group_counters

aten = torch.ops.aten


def counts(graph: torch.fx.Graph) -> tuple[int, int]:
    """The number of additions, and of those of lists."""
    targets = [node.target for node in graph.nodes]
    return targets.count(aten.add.Tensor), targets.count(aten._foreach_add.Scalar)


def traced(function, *args: Tensor) -> torch.fx.GraphModule:
    module = torch_compiler.trace(function, *args)
    module.graph = torch_compiler.eliminate_common_subexpressions(module.graph)
    return module


def test_the_counters_of_a_network() -> None:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(3)))
    model = Model(nn.Sequential(net, nn.Linear(3, 2)))
    weights = model.weights()
    names = [n for n in weights.buffers if "num" in n]

    def step(x: Tensor, *leaves: Tensor) -> list[Tensor]:
        params = dict(zip(weights.params, leaves, strict=False))
        buffers = dict(zip(weights.buffers, leaves[len(params) :], strict=True))
        out = model.forward(Weights(params, buffers), x, "train")
        return [out.logits, *(out.buffers[n] for n in names)]

    for name, value in zip(names, (5, 0, 7), strict=True):
        weights.buffers[name] = torch.tensor(value)
    args = torch.randn(4, 3, generator=torch.manual_seed(0)), *tree.leaves(weights)
    expected = step(*args)
    module = traced(step, *args)
    before = counts(module.graph)
    group_counters(module.graph)
    module.graph.lint()
    module.recompile()
    assert before == (3, 0)
    assert counts(module.graph) == (0, 1)
    found = module(*args)
    assert [int(n) for n in found[1:]] == [6, 1, 8]
    assert torch.equal(found[0], expected[0])


def test_what_is_not_a_counter_stays() -> None:
    def step(a: Tensor, b: Tensor, x: Tensor) -> list[Tensor]:
        first = a + 1
        later = (a * b) + 1  # its value is not known when the first is increased
        return [first, b + 1, b + 2, x + 1, later]

    args = torch.tensor(1), torch.tensor(2), torch.ones(())
    module = traced(step, *args)
    group_counters(module.graph)
    module.recompile()
    assert [float(x) for x in module(*args)] == [2, 3, 4, 2, 3]
    one = traced(lambda a: [a + 1], torch.tensor(1))
    group_counters(one.graph)
    assert counts(one.graph) == (1, 0)


def test_a_graph_with_operations_in_place_stays() -> None:
    def step(a: Tensor, b: Tensor) -> list[Tensor]:
        first = a + 1
        b.view(1).mul_(10)
        return [first, b + 1]

    module = traced(step, torch.tensor(1), torch.tensor(2))
    group_counters(module.graph)
    module.recompile()
    assert [int(x) for x in module(torch.tensor(1), torch.tensor(2))] == [2, 21]
