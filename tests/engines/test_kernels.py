"""Kernels of convolutions with a client axis, against torch's in float64.

Compilers have been seen to get single block sizes wrong: bfloat16, three channels, 7 x 7 taps. So
shapes, memory formats and dtypes are many, and what lies around the operands is NaN.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight

CLIENTS, BATCH = 10, 50
FIRST = [
    (channels, 28, out, taps, stride, taps // 2)
    for channels in (1, 3)
    for out, taps, stride in (
        (6, 5, 1), (32, 5, 1), (32, 7, 2), (64, 3, 1), (64, 3, 2), (64, 7, 2), (128, 7, 2),
    )
]  # fmt: skip
LATER = [
    (5, 12, 64, 5, 1, 0), (5, 28, 64, 7, 2, 3), (6, 14, 16, 5, 1, 0), (10, 12, 20, 5, 1, 0),
    (48, 8, 96, 7, 2, 3),
    (64, 8, 64, 3, 1, 1), (64, 8, 128, 3, 2, 1), (64, 8, 128, 1, 2, 0), (128, 4, 128, 3, 1, 1),
    (256, 2, 512, 3, 2, 1), (512, 1, 512, 3, 1, 1), (512, 2, 512, 3, 1, 1),
]  # fmt: skip


def surrounded(x: Tensor) -> Tensor:
    """The same values and strides in the middle of a buffer of NaN."""
    size, margin = x.untyped_storage().nbytes() // x.element_size(), 4096
    buffer = torch.full((size + 2 * margin,), torch.nan, device=x.device, dtype=x.dtype)
    return buffer[margin : margin + size].as_strided(x.size(), x.stride()).copy_(x)


def maps(*shape: int, dtype: torch.dtype, last: bool) -> Tensor:
    """Random maps ``[K, B, C, H, W]``, in channels-last or contiguous."""
    order = (0, 1, 3, 4, 2) if last else (0, 1, 2, 3, 4)
    made = torch.randn([shape[i] for i in order], device="cuda").to(dtype)
    return surrounded(made.permute(0, 1, 4, 2, 3) if last else made)


def gap(found: Tensor, clients: list[Tensor]) -> float:
    expected = torch.stack(clients)
    return float(((found.double() - expected).abs().max() / expected.abs().max()).nan_to_num(1e9))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels-last"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("shape", FIRST + LATER, ids=str)
def test_equals_torch(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    last: bool,
    shared: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kedge.engines import kernels

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    channels, side, out, taps, stride, pad = shape
    torch.manual_seed(0)
    x = maps(1 if shared else CLIENTS, BATCH, channels, side, side, dtype=dtype, last=last)
    x = x.expand(CLIENTS, -1, -1, -1, -1)
    filters = torch.randn(CLIENTS, taps, taps, out, channels, device="cuda").to(dtype)
    w = surrounded(filters)
    pairs = [(a.double(), b.permute(2, 3, 0, 1).double()) for a, b in zip(x, w, strict=True)]
    y = kernels.conv(x, w, stride, (pad, pad))
    forward = [F.conv2d(a, b, stride=stride, padding=pad) for a, b in pairs]
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    assert gap(y, forward) < tolerance

    g = maps(CLIENTS, BATCH, *forward[0].shape[1:], dtype=dtype, last=last)
    turned = surrounded(filters.transpose(3, 4).contiguous())
    found = kernels.conv_inputs(g, turned, (side, side), stride, (pad, pad))
    by_inputs = [
        conv2d_input(a.shape, b, c.double(), stride, pad)
        for (a, b), c in zip(pairs, g, strict=True)
    ]
    assert gap(found, by_inputs) < tolerance

    by_weights = [
        conv2d_weight(a, b.shape, c.double(), stride, pad)
        for (a, b), c in zip(pairs, g, strict=True)
    ]
    # in networks, maps of three channels are contiguous and those of 64 in channels-last
    other = surrounded(g.contiguous() if last else g.movedim(2, 4).contiguous().movedim(4, 2))
    for gradient in (g, other):
        found = kernels.conv_weights(gradient, x, (taps, taps), stride, (pad, pad))
        assert gap(found, by_weights) < 1e-4  # summed in float32
