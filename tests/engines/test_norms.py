"""BatchNorm of traced steps of all clients is torch's, in value, gradient and statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from kedge.core import tree
from kedge.engines import layout as norms
from kedge.engines.torch_compiler import is_traced, trace

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "maps": lambda: nn.BatchNorm2d(6),
    "series": lambda: nn.BatchNorm1d(6),
    "flat": lambda: nn.BatchNorm1d(6),
    "volumes": lambda: nn.BatchNorm3d(6),
    "plain": lambda: nn.BatchNorm2d(6, affine=False),
    "stateless": lambda: nn.BatchNorm2d(6, track_running_stats=False),
    "loose": lambda: nn.BatchNorm2d(6, eps=0.5, momentum=0.7),
    "one channel": lambda: nn.BatchNorm2d(1),
}
SHAPES = {"series": (5,), "flat": (), "volumes": (2, 3, 2)}
CLIENTS, ROWS = 3, 4


def problem(name: str, dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    """A layer, and weights, buffers and inputs of three clients."""
    torch.manual_seed(0)
    layer: Any = LAYERS[name]().to(dtype)
    params = {n: torch.randn(CLIENTS, *p.shape, dtype=dtype) for n, p in layer.named_parameters()}
    buffers = {
        n: torch.rand(CLIENTS, *b.shape, dtype=dtype) + 0.5
        if b.is_floating_point()
        else torch.full((CLIENTS,), 3)
        for n, b in layer.named_buffers()
    }
    shape = (CLIENTS, ROWS, layer.num_features, *SHAPES.get(name, (3, 2)))
    x = 2 * torch.randn(*shape, dtype=dtype) + 1
    return layer, params, buffers, x


def fused(layer: nn.Module) -> nn.Module:
    net = nn.Sequential(copy.deepcopy(layer))
    norms.replace_norms(net)
    assert isinstance(net[0], norms.BatchNorm)
    assert isinstance(net[0], type(layer))
    return net[0]


def results(layer: nn.Module, *args: Any) -> dict[str, Any]:
    """Per client: outputs, gradients of a loss, and the buffers after it."""

    def one(params: Any, buffers: Any, x: Tensor) -> Any:
        def loss(params: Any, x: Tensor) -> Any:
            own = {n: b.clone() for n, b in buffers.items()}
            y = functional_call(layer, params | own, (x,))
            slope = torch.linspace(0, 1, y.numel(), dtype=y.dtype).view_as(y)
            return (y**3 + y * slope).sum(), (y, own)

        by, (y, own) = grad(loss, argnums=(0, 1), has_aux=True)(params, x)
        return {"y": y, "by_params": by[0], "by_x": by[1], "buffers": own}

    return vmap(one)(*args)


def traced(layer: nn.Module, *args: Any) -> Any:
    """The results by a graph of the step, and the graph."""
    given = dict(enumerate(args))
    leaves = list(tree.leaves(given))
    structure: list[Any] = []

    def flat(*values: Tensor) -> list[Tensor]:
        remaining = iter(values)
        found = results(layer, *tree.map(lambda _: next(remaining), given).values())
        structure[:] = [found]
        return list(tree.leaves(found))

    graph = trace(flat, *leaves)
    values = iter(graph(*leaves))
    return tree.map(lambda _: next(values), structure[0]), graph


@pytest.mark.parametrize("mode", ["train", "eval", "probe"])
@pytest.mark.parametrize("name", LAYERS)
def test_it_is_torchs_in_value_gradient_and_statistics(name: str, mode: str) -> None:
    layer, *args = problem(name)
    layer.train(mode != "eval")
    if mode == "probe":
        layer.track_running_stats = False
    wanted = results(layer, *args)
    found, graph = traced(fused(layer), *args)
    assert not any("batch_norm" in str(node.target) for node in graph.graph.nodes)
    assert tree.gap(found, wanted) < 1e-12
    assert mode == "train" or all(torch.equal(found["buffers"][n], b) for n, b in args[1].items())


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("kind", ["gradient of one client", "passes of all", "shared weights"])
def test_other_transforms(kind: str, mode: str) -> None:
    """As steps of a server have them: a gradient alone, a map alone, weights that are shared."""
    layer, params, buffers, x = problem("maps")
    layer.train(mode == "train")

    def loss(net: nn.Module, params: Any, x: Tensor, buffers: Any) -> Tensor:
        own = {n: b.clone() for n, b in buffers.items()}
        return (functional_call(net, params | own, (x,)) ** 3).sum()

    def compute(net: nn.Module) -> Callable[..., list[Tensor]]:
        def run(weight: Tensor, bias: Tensor, x: Tensor) -> list[Tensor]:
            every = {"weight": weight, "bias": bias}
            one = {n: p[0] for n, p in every.items()}
            if kind == "passes of all":
                return [vmap(lambda p, x, b: loss(net, p, x, b))(every, x, buffers)]
            first = {n: b[0] for n, b in buffers.items()}
            if kind == "shared weights":
                total = lambda p, x: vmap(lambda x, b: loss(net, p, x, b))(x, buffers).sum()  # noqa: E731
            else:
                total, x = (lambda p, x: loss(net, p, x, first)), x[0]
            by_params, by_x = grad(total, argnums=(0, 1))(one, x)
            return [*by_params.values(), by_x]

        return run

    leaves = [*params.values(), x]
    graph = trace(compute(fused(layer)), *leaves)
    assert not any("batch_norm" in str(node.target) for node in graph.graph.nodes)
    for found, wanted in zip(graph(*leaves), compute(layer)(*leaves), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


def test_it_is_torchs_outside_of_a_trace() -> None:
    layer, *args = problem("maps")
    assert not is_traced()
    assert tree.gap(results(fused(layer), *args), results(layer, *args)) == 0
    assert torch.equal(layer(args[2][0]), fused(layer)(args[2][0]))


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_one_channel_is_arithmetic_outside_of_a_trace_too(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vmap joins clients with one channel without a copy: a view that cuDNN refuses."""
    layer, *args = problem("one channel")
    layer.train(mode == "train")
    wanted = results(layer, *args)
    monkeypatch.delattr(nn.functional, "batch_norm")
    assert tree.gap(results(fused(layer), *args), wanted) < 1e-12
    with pytest.raises(AttributeError, match="batch_norm"):
        fused(layer)(args[2][0])


def test_half_precision_stays_as_it_is_and_sums_are_in_float32() -> None:
    layer, params, buffers, x = problem("maps", torch.float32)
    wanted = results(layer, params, buffers, x.bfloat16().float())
    found, _ = traced(fused(layer), params, buffers, x.bfloat16())
    after = found["buffers"]
    assert found["y"].dtype == found["by_x"].dtype == torch.bfloat16
    assert found["by_params"]["weight"].dtype == after["running_var"].dtype == torch.float32
    assert tree.gap(found["y"].float(), wanted["y"]) < 2e-2
    assert tree.gap(after, wanted["buffers"]) < 1e-6


def test_second_derivatives() -> None:
    """The gradient of the gradient's squared norm."""
    layer, params, buffers, x = problem("maps")

    def norms_gradient(layer: nn.Module) -> Any:
        def one(params: Any, buffers: Any, x: Tensor) -> Any:
            def loss(params: Any) -> Tensor:
                own = {n: b.clone() for n, b in buffers.items()}
                return (
                    functional_call(layer, params | own, (x * params["weight"].sum(),)) ** 3
                ).sum()

            return grad(lambda p: sum((g**2).sum() for g in grad(loss)(p).values()))(params)

        return lambda *leaves: list(
            vmap(one)(dict(zip(params, leaves[:2], strict=True)), buffers, leaves[2]).values()
        )

    leaves = [*params.values(), x]
    wanted = norms_gradient(layer)(*leaves)
    found = trace(norms_gradient(fused(layer)), *leaves)(*leaves)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_statistics_are_computed_once() -> None:
    """The backward pass and the running statistics share those of the forward pass."""
    layer, *args = problem("maps")
    _, graph = traced(fused(layer), *args)
    assert sum("var_mean" in str(node.target) for node in graph.graph.nodes) == 1
