"""Networks whose last maps have few pixels, one in particular: a tensor ``[N, C, 1, 1]`` is
contiguous and channels-last at once, and torch tells its layout by strides that place nothing."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kedge
from kedge.core import tree
from kedge.core.model import Model
from kedge.core.tree import Params
from kedge.core.work import LocalWork
from kedge.data.federation import Federation
from kedge.engines import Execution
from kedge.engines import compiled as module
from kedge.engines.compiled import compile_function
from kedge.engines.layout import EngineLayout, to_channels_last
from kedge.models.networks import BasicBlock
from kedge.sim.simulation import Simulation

PIXELS = pytest.mark.parametrize("side", [1, 2, 4])
COMPILER = pytest.mark.skipif(
    not shutil.which("g++"), reason="torch's compiler needs a C++ compiler"
)


def resnet(norm: str) -> nn.Module:
    """The end of a ResNet: its maps have a quarter of the input's sides."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.MaxPool2d(3, 2, padding=1),
        BasicBlock(16, 32, 2, norm, 8),
        BasicBlock(32, 32, 1, norm, 8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def simulate(
    side: int, how: str | Execution, dtype: torch.dtype, precision: str = "fp32", norm: str = "bn"
) -> Simulation:
    torch.manual_seed(0)
    x, y = torch.randn(16, 3, 4 * side, 4 * side).to(dtype), torch.randint(0, 10, (16,))
    clients = torch.arange(16).split(8)
    federation = Federation(x, y, clients, kedge.Classification(10), dtype=dtype)
    model = Model(resnet(norm).to(dtype), precision=precision)
    return Simulation(
        federation, model, "scaffold", work=LocalWork(batch=4, steps=2), engine=how,
        optim=kedge.SGD(lr=0.01),
    )  # fmt: skip


def stack(sim: Simulation) -> None:
    """Compute convolutions with a client axis, as on a GPU."""
    sim.bound.model = sim.bound.model.prepared(EngineLayout(stacked=True))


@PIXELS
@pytest.mark.parametrize("norm", ["bn", "gn"])
def test_engines_agree(side: int, norm: str) -> None:
    """One by one, all at once, and all at once by convolutions with a client axis, as on a GPU."""
    sims = [simulate(side, how, torch.float64, norm=norm) for how in ("loop", "vector", "vector")]
    stack(sims[2])
    for sim in sims:
        sim.run_round()
        sim.run_round()
    assert tree.gap(sims[1].state(), sims[0].state()) < 1e-11
    assert tree.gap(sims[2].state(), sims[0].state()) < 1e-11


@PIXELS
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_batchnorm_gets_maps_in_the_usual_layout(
    side: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their strides: for maps in the other one it has no mapped backward pass on a GPU."""
    batch_norm, seen = F.batch_norm, set()

    def noted(x: Tensor, *args: Any, **options: Any) -> Tensor:
        seen.add((x.shape, x.stride()))
        return batch_norm(x, *args, **options)

    sim = simulate(side, "vector", torch.float32, precision)
    stack(sim)
    monkeypatch.setattr(F, "batch_norm", noted)
    sim.run_round()
    assert {shape for shape, _ in seen} == {(4, 32, side, side)}
    assert all(strides == torch.empty(shape).stride() for shape, strides in seen)


# -- compiled steps ---------------------------------------------------------------------------


@pytest.fixture
def like_cudnn() -> Iterator[None]:
    """Gradients of convolutions in the layouts in which cuDNN gives them: that of the weight by
    input and output gradient, that of the input by output gradient and weight."""
    kernel = torch.library.get_kernel("aten::convolution_backward", "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def backward(grad: Tensor, x: Tensor, w: Tensor, *rest: Any) -> Any:
        by_input, by_weight, by_bias = kernel.call_boxed(keys, grad, x, w, *rest)
        return _laid(by_input, grad, w), _laid(by_weight, x, grad), by_bias

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one already
        library.impl("convolution_backward", backward, "CPU")
    try:
        yield
    finally:
        library._destroy()


def _laid(found: Tensor | None, *operands: Tensor) -> Tensor | None:
    formats = [torch._prims_common.suggest_memory_format(x) for x in operands]
    last = torch.channels_last in formats
    wanted = torch.channels_last if last else torch.contiguous_format
    return None if found is None else torch.empty_like(found, memory_format=wanted).copy_(found)


@COMPILER
@pytest.mark.skipif(not hasattr(torch.library, "get_kernel"), reason="too old a torch for that")
@pytest.mark.usefixtures("like_cudnn")
def test_a_compiled_gradient_takes_the_layouts_of_cudnn() -> None:
    """In channels-last, as the loop takes it on a GPU. With one pixel the compiler's check of
    strides failed: expected size 3==3, stride 1==32 at dim=3."""
    torch.manual_seed(0)
    sides = (1, 2, 4)
    kernels = {"same": (3, 1, 1), "halved": (3, 2, 1), "shortcut": (1, 2, 0)}  # size, stride, pad
    weights = {name: torch.randn(32, 16, k[0], k[0]).double() for name, k in kernels.items()}
    inputs = {f"{s}": torch.randn(4, 16, s, s).double() for s in sides}

    def gradients(values: Params) -> Params:
        leaves = {n: v.detach().requires_grad_() for n, v in values.items()}
        with torch.enable_grad():
            total = sum(
                (0.1 * F.conv2d(leaves[x], leaves[w], None, *kernels[w][1:]).square()).sum()
                for x, w in [("1", "same"), ("2", "same"), ("2", "shortcut"), ("4", "halved")]
            )
            found = torch.autograd.grad(total, list(leaves.values()))
        return {n: v - 0.01 * g for (n, v), g in zip(values.items(), found, strict=True)}

    values = to_channels_last(weights | inputs)
    fast = compile_function(gradients, values)
    assert tree.gap(fast(values), gradients(values)) < 1e-12
    twice = gradients(gradients(values))  # what it gives need not be laid out as what it takes
    assert tree.gap(fast(fast(values)), twice) < 1e-12


@COMPILER
@pytest.mark.long
def test_compiled_rounds_of_all_clients() -> None:
    """Two steps of two clients, by convolutions with a client axis."""
    sims = [simulate(1, Execution("vector", compile=c), torch.float64) for c in (True, False)]
    for sim in sims:
        stack(sim)
        sim.run_round()
    assert tree.gap(sims[0].state(), sims[1].state()) < 1e-11


def test_strides_along_sizes_of_one_are_no_reason_to_copy() -> None:
    x = torch.arange(12.0).reshape(3, 4, 1, 1)
    again = module._with_strides(x, (4, 1, 4, 4))
    assert again.stride() == (4, 1, 4, 4)
    assert again.data_ptr() == x.data_ptr()
    assert torch.equal(again, x)
    turned = module._with_strides(x, (1, 3, 1, 1))
    assert turned.stride() == (1, 3, 1, 1)
    assert turned.data_ptr() != x.data_ptr()
    assert torch.equal(turned, x)
