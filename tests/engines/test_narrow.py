"""Convolutions with few channels on a CPU: two columns at once give torch's own results."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kedge.core.model import Model
from kedge.core.optim import SGD
from kedge.core.task import Classification
from kedge.core.work import LocalWork
from kedge.data.federation import Federation
from kedge.engines.layout import LoopLayout, NarrowConv2d, layout_of
from kedge.models import build
from kedge.sim.simulation import Simulation

DOUBLE = torch.float64


def pair(*layers: nn.Module) -> tuple[nn.Module, nn.Module]:
    """A network, and the same in the layout of the loop on a CPU."""
    net = nn.Sequential(nn.Sequential(*layers)).to(DOUBLE)
    other = copy.deepcopy(net)
    LoopLayout(channels_last=True).replace_layers(other)
    return net, other


def images(channels: int, size: int) -> Tensor:
    x = torch.randn(4, channels, size, size, dtype=DOUBLE, generator=torch.manual_seed(1))
    return x.contiguous(memory_format=torch.channels_last)


CASES = {
    "few out, pooled": (3, 12, [nn.Conv2d(3, 6, 5), nn.Identity(), nn.ReLU(), nn.MaxPool2d(2)]),
    "odd width": (3, 13, [nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2)]),
    "few in": (6, 14, [nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]),
    "no pool, no bias": (2, 8, [nn.Conv2d(2, 4, 3, padding=1, bias=False)]),
    "a pool that overlaps": (9, 10, [nn.Conv2d(9, 8, 3, padding=1), nn.MaxPool2d(3, 2, 1)]),
    "even filter": (1, 9, [nn.Conv2d(1, 3, (3, 4), padding=(0, 2)), nn.MaxPool2d((2, 1))]),
    "padding up to the filter": (1, 6, [nn.Conv2d(1, 2, 3, padding=2)]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("differentiated", [False, True])
def test_values_and_gradients_are_torchs(name: str, differentiated: bool) -> None:
    torch.manual_seed(0)
    channels, size, layers = CASES[name]
    results: list[Any] = []
    for net in pair(*layers):
        x = images(channels, size)
        if not differentiated:
            x[0] = 0.3  # the maxima of a pool are tied; any of them gives the filters' gradient
        x.requires_grad_(differentiated)
        inputs = [*net.parameters(), *([x] if differentiated else [])]
        y = net(x)
        weights = torch.randn(y.shape, dtype=DOUBLE, generator=torch.manual_seed(2))
        grads = torch.autograd.grad((y * weights).sum(), inputs, create_graph=True)
        second = sum((g**2).sum() for g in grads)
        again = torch.autograd.grad(second, inputs, allow_unused=True, materialize_grads=True)
        results.append([y, *grads, *again])
    for wanted, found in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


def test_which_layers_are_replaced() -> None:
    conv, narrow = nn.Conv2d, NarrowConv2d
    layers = [conv(3, 6, 5), conv(9, 9, 5), conv(3, 16, 5), conv(3, 6, 5, stride=2), conv(3, 6, 1)]
    _, net = pair(*layers, conv(4, 4, 3, groups=2), conv(3, 6, 3, padding=3))
    assert [type(layer) is narrow for layer in net.get_submodule("0")] == [
        True, False, True, False, False, False, False,
    ]  # fmt: skip


def test_a_cut_of_the_model_stays_where_it_is() -> None:
    outer = nn.Sequential(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2))
    LoopLayout(channels_last=True).replace_layers(outer)
    assert [type(layer) for layer in outer] == [NarrowConv2d, nn.ReLU, nn.MaxPool2d]


@pytest.mark.parametrize("method", ["fedavg", "fedcog(samples=8, steps=2, start=0)"])
def test_rounds_of_a_narrow_network_are_those_of_the_reference(method: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(24, 1, 16, 16, generator=generator)
    y = torch.randint(0, 3, (24,), generator=generator)
    federation = Federation(x, y, torch.arange(24).split(8), Classification(3))
    torch.manual_seed(0)
    net = Model(build("fedcog_cnn", (1, 16, 16), 3))
    runs = []
    for engine in ("reference", "loop"):
        work = LocalWork(batch=4, steps=3)
        runs.append(Simulation(federation, net, method, optim=SGD(0.05), work=work, engine=engine))
        runs[-1].run_round()
    assert layout_of(runs[1].bound.model) == LoopLayout(channels_last=True)
    for name, wanted in runs[0].weights.params.items():
        torch.testing.assert_close(runs[1].weights.params[name], wanted, rtol=1e-4, atol=1e-6)
