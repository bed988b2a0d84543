"""Sums of the maps of all clients over batch and pixels as a Triton kernel, for a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCKS = 4 * 132  # of an H200, four for each processor


@triton.jit
def _sums(
    g, y, rows, piece, g_k, y_p, y_k, C: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """``y[p, k, c]`` = sum of ``g[k, row, c]`` over the rows of piece p."""
    k, p = tl.program_id(1).to(tl.int64), tl.program_id(2)
    c = tl.program_id(0) * BN + tl.arange(0, BN)
    g += k * g_k
    total = tl.zeros((BK, BN), dtype=tl.float32)
    for start in range(p * piece, min(p * piece + piece, rows), BK):
        row = start + tl.arange(0, BK)
        mask = (row < rows)[:, None] & (c < C)[None, :]
        total += tl.load(g + (row * C)[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(y + p * y_p + k * y_k + c, tl.sum(total, 0), mask=c < C)


def sums(g: Tensor) -> Tensor:
    """Sums ``[K, C]`` in float32 of maps ``[K, B, C, H, W]`` in channels-last without gaps."""
    clients, batch, channels, height, width = g.shape
    rows = batch * height * width
    bn = min(128, triton.next_power_of_2(channels))
    bk = 4096 // bn
    columns = triton.cdiv(channels, bn)
    pieces = max(1, min(triton.cdiv(BLOCKS, clients * columns), rows // (2 * bk)))
    piece = triton.cdiv(triton.cdiv(rows, pieces), bk) * bk
    pieces = triton.cdiv(rows, piece)
    y = g.new_empty(pieces, clients, channels, dtype=torch.float32)
    with torch.cuda.device_of(g):
        _sums[(columns, clients, pieces)](
            g, y, rows, piece, g.stride(0), y.stride(0), y.stride(1), C=channels, BN=bn, BK=bk,
        )  # fmt: skip
    return y[0] if pieces == 1 else y.sum(0)
