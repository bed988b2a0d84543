"""Convolutions with a client axis equal the ordinary ones, in value and in gradient."""

import copy
import importlib.util

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from kedge.check.problems import images
from kedge.core import tree
from kedge.engines import convolutions, torch_compiler
from kedge.engines import layout as norms
from kedge.engines.layout import EngineLayout
from kedge.sim.simulation import Simulation

LAYERS = {
    "plain": lambda: nn.Conv2d(3, 6, 5),
    "padded": lambda: nn.Conv2d(16, 32, 3, padding=1, bias=False),
    "strided": lambda: nn.Conv2d(16, 32, 3, stride=2, padding=1),
    "pointwise": lambda: nn.Conv2d(4, 5, 1, stride=2),
    "oblong": lambda: nn.Conv2d(2, 3, (1, 3), padding=(0, 1)),
}


def both(name: str) -> tuple[nn.Module, nn.Module]:
    """A layer with its pool, as it is and stacked."""
    torch.manual_seed(0)
    net = nn.Sequential(LAYERS[name](), nn.ReLU(), nn.AdaptiveAvgPool2d(1)).double()
    other = copy.deepcopy(net)
    convolutions.replace_layers(other)
    assert isinstance(other[0], convolutions.Conv2d)
    assert isinstance(other[2], convolutions.GlobalPool)
    other[0].stacked = True
    return net, other


def problem(net: nn.Module, clients: int = 3) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    torch.manual_seed(1)
    weights = {n: torch.randn(clients, *p.shape).double() for n, p in net.named_parameters()}
    return weights, torch.randn(clients, 2, net[0].in_channels, 9, 8).double()


def loss(net: nn.Module):
    def run(weights, x):
        return (functional_call(net, weights, (x,)) ** 2).sum()

    return run


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("mapped", [(0, 0), (0, None), (None, 0)])
def test_gradients_equal_those_of_the_ordinary_layer(name: str, mapped) -> None:
    results = []
    for net in both(name):
        weights, x = problem(net)
        if mapped[0] is None:
            weights = {n: w[0] for n, w in weights.items()}
        x = x[0] if mapped[1] is None else x
        results.append(vmap(grad(loss(net), argnums=(0, 1)), in_dims=mapped)(weights, x))
    (by_weights, by_inputs), (found_weights, found_inputs) = results
    torch.testing.assert_close(found_inputs, by_inputs, rtol=1e-12, atol=1e-12)
    for n, value in by_weights.items():
        torch.testing.assert_close(found_weights[n], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["padded", "strided"])
def test_gradients_through_the_stack_from_outside(name: str) -> None:
    """A sum over clients differentiated outside ``vmap``, as a server does with its teachers."""
    results = []
    for net in both(name):
        weights, x = problem(net)
        leaves = {n: w.requires_grad_() for n, w in weights.items()}
        vmap(loss(net))(leaves, x.requires_grad_()).sum().backward()
        results.append([x.grad, *(w.grad for w in leaves.values())])
    for found, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["padded", "strided"])
def test_gradients_through_the_stack_by_torch_func(name: str) -> None:
    """The same by ``grad`` around ``vmap``, as distillation on the server does it."""
    results = []
    for net in both(name):
        weights, x = problem(net)
        total = lambda w, x, net=net: vmap(loss(net))(w, x).sum()  # noqa: E731
        results.append(grad(total, argnums=(0, 1))(weights, x))
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)


def test_second_derivatives() -> None:
    """The gradient's squared norm has the gradient that double backward gives."""
    results = []
    for net in both("strided"):
        weights, x = problem(net, clients=1)
        own = {n: w[0] for n, w in weights.items()}

        def norm(w, net=net, x=x):
            return sum((g**2).sum() for g in grad(loss(net))(w, x[0]).values())

        results.append(grad(norm)(own))
    for n, value in results[0].items():
        torch.testing.assert_close(results[1][n], value, rtol=1e-11, atol=1e-11)


SMALL = [(3, 1, 1), (3, 2, 1), (5, 1, 2), (7, 2, 3), (3, 1, 0), (1, 2, 0), (5, 3, 2)]


@pytest.mark.parametrize("side", [1, 2, 3, 4])
@pytest.mark.parametrize(("kernel", "stride", "padding"), SMALL)
def test_taps_that_meet_only_padding_are_left_out(
    side: int, kernel: int, stride: int, padding: int
) -> None:
    """In small maps; the result and the gradients of all weights are those of the whole filter."""
    if side + 2 * padding < kernel:
        pytest.skip("the map is smaller than the filter")
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 5, kernel, stride, padding).double()
    other = copy.deepcopy(layer)
    other.__class__, other.stacked = convolutions.Conv2d, True
    weights = {n: torch.randn(2, *p.shape).double() for n, p in layer.named_parameters()}
    x = torch.randn(2, 3, 4, side, side).double()
    found, wanted = (vmap(grad(loss(net), argnums=(0, 1)))(weights, x) for net in (other, layer))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_map_of_one_pixel_meets_one_tap() -> None:
    assert convolutions.used_taps(1, 3, 1, 1) == (1, 2, 0)
    assert convolutions.used_taps(2, 3, 2, 1) == (1, 3, 0)
    assert convolutions.used_taps(2, 3, 1, 1) == (0, 3, 1)
    assert convolutions.used_taps(32, 7, 2, 3) == (0, 7, 3)


def test_a_graph_has_no_permutations_that_change_nothing() -> None:
    """The compiler would convert their operands to contiguous maps and back."""
    net = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
    convolutions.replace_layers(net)
    norms.replace_norms(net)
    net[0].stacked = True
    weights = {n: torch.randn(2, *p.shape) for n, p in net.named_parameters()}
    state = {n: b.expand(2, *b.shape).clone() for n, b in net.named_buffers()}

    def step(*leaves: torch.Tensor) -> list[torch.Tensor]:
        def run(own, buffers, x):
            copies = {n: b.clone() for n, b in buffers.items()}
            return (functional_call(net, own | copies, (x,)) ** 2).sum()

        own = dict(zip(weights, leaves[1:], strict=True))
        return list(vmap(grad(run))(own, state, leaves[0]).values())

    x = torch.randn(2, 3, 16, 8, 8)
    graph = torch_compiler.trace(step, x, *weights.values())
    permutations = [n.args[1] for n in graph.graph.nodes if "permute" in str(n.target)]
    assert permutations
    assert all(list(order) != sorted(order) for order in permutations)


def test_layers_of_other_kinds_stay_as_they_are() -> None:
    kinds = [
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 4, 3, dilation=2),
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(4, 4, 3, stride=(1, 2)),
        nn.AdaptiveAvgPool2d(2),
    ]
    net = nn.Sequential(*kinds)
    convolutions.replace_layers(net)
    assert [type(layer) for layer in net] == [nn.Conv2d] * 5 + [nn.AdaptiveAvgPool2d]


KERNELS = """
import torch, torch.nn.functional as F
from kedge.engines import kernels
from kedge.engines.kernels import sums
torch.backends.cudnn.allow_tf32 = False
torch.manual_seed(0)
last = lambda x: x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
by_row = kernels._reads_rows
launches = []
for name in ("_product", "_product_by_class", "_weights", "_weights_by_row"):
    kernel = getattr(kernels, name)
    class Counted:
        def __getitem__(self, grid, kernel=kernel, name=name):
            launches.append(name)
            return kernel[grid]
    setattr(kernels, name, Counted())
cases = [
    (3, 6, 5, 1, 0, 9, 9), (6, 16, 5, 1, 0, 9, 9), (32, 48, 3, 2, 1, 9, 9), (32, 32, 1, 2, 0, 9, 9),
    (64, 64, 3, 1, 1, 4, 5), (64, 96, 3, 2, 1, 5, 4), (64, 64, 2, 2, 0, 2, 2),
    (64, 64, 3, 1, 0, 5, 6), (64, 64, 3, 1, 2, 3, 4),
]
for C, O, R, s, p, H, W in cases:
    x, w = torch.randn(2, 2, C, H, W), torch.randn(2, O, C, R, R)
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = torch.stack([F.conv2d(a, b, stride=s, padding=p) for a, b in zip(*leaves)])
    g = torch.randn_like(y)
    y.backward(g)
    laid, back = w.permute(0, 3, 4, 1, 2).contiguous(), w.permute(0, 3, 4, 2, 1).contiguous()
    x, g = last(x), last(g)
    found = [
        (kernels.conv(x, laid, s, (p, p)), y),
        (kernels.conv_inputs(g, back, (H, W), s, (p, p)), leaves[0].grad),
        (kernels.conv_inputs(g, laid.transpose(3, 4), (H, W), s, (p, p)), leaves[0].grad),
        (kernels.conv_weights(g, x, (R, R), s, (p, p)), leaves[1].grad),
    ]
    kernels._reads_rows = lambda g, x, size: size[1] == 3  # also in float32
    found.append((kernels.conv_weights(g, x, (R, R), s, (p, p)), leaves[1].grad))
    kernels._reads_rows = by_row
    found.append((sums(g), g.sum((1, 3, 4))))
    for one, other in found:
        torch.testing.assert_close(one, other.detach(), rtol=1e-4, atol=1e-4)
print("equal", *sorted(set(launches)))
"""


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is not installed here")
def test_kernels_in_tritons_interpreter() -> None:
    import os
    import subprocess
    import sys

    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", KERNELS], env=env, capture_output=True, text=True)
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this Triton's interpreter does not work with so new a numpy")
    names = "_product _product_by_class _weights _weights_by_row"
    assert done.stdout.strip() == f"equal {names}", done.stderr


@pytest.mark.parametrize("norm", ["bn", "gn"])
def test_whole_rounds_by_stacked_convolutions(norm: str) -> None:
    """As on a GPU: mapped steps with their gradients, here by torch's own convolutions."""
    sims = [images(norm=norm).simulate("scaffold+fedprox(mu=0.1)", "vector") for _ in range(2)]
    sims[1].bound.model = sims[1].bound.model.prepared(EngineLayout(stacked=True))
    for sim in sims:
        for _ in range(2):
            sim.run_round()
    found, wanted = (sim.state() for sim in sims[::-1])
    assert any(isinstance(m, convolutions.Conv2d) and m.stacked for m in _layers(sims[1]))
    assert tree.gap(found, wanted) < 1e-5


def _layers(sim: Simulation) -> list[nn.Module]:
    return [layer for net in sim.bound.model._nets.values() for layer in net.module.modules()]
