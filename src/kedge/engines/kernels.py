"""Convolutions with a client axis as Triton kernels, for a GPU.

``vmap`` turns the convolutions of K clients into one convolution with K groups, for which cuDNN
runs one small kernel per group, or an inefficient one. Here each client is one implicit matrix
product: target pixels times target channels, summed over taps and source channels, with patches
read in place. The gradient with respect to the inputs is the same product with source and target
exchanged. The gradient with respect to the weights sums over pixels, in a fixed number of pieces
that are added in a fixed order.

Sums are in float32. Products are in the dtype of the inputs, for float32 in TF32 unless disabled.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from kedge.engines.conv_results import Pair, empty, empty_target, is_dense

NUM_PROCESSORS = 132  # of an H200


@triton.jit
def _product(
    x, w, y, pixels,
    x_k, x_b, x_c, x_h, x_w, w_k, w_tap, w_c, w_o, y_k, y_b, y_o, y_h, y_w,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    N: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, STRIDE: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, BACK: tl.constexpr,
    EXACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Target ``y[k, b, o, oh, ow]`` = sum over taps and c of source ``x`` times ``w``."""
    k = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    b, at = m // (OH * OW), m % (OH * OW)
    oh, ow = at // OW, at % OW
    x += k * x_k
    w += k * w_k
    row = b.to(tl.int64) * x_b
    mask_m, mask_n = m < pixels, n < N
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, R * S * C, BK):
        i = start + tl.arange(0, BK)
        tap, c = i // C, i % C
        r, s = tap // S, tap % S
        if BACK:
            h, v = oh[:, None] + PAD_H - r[None, :], ow[:, None] + PAD_W - s[None, :]
            mask = (h >= 0) & (v >= 0) & (h % STRIDE == 0) & (v % STRIDE == 0)
            h, v = h // STRIDE, v // STRIDE
        else:
            h = oh[:, None] * STRIDE - PAD_H + r[None, :]
            v = ow[:, None] * STRIDE - PAD_W + s[None, :]
            mask = (h >= 0) & (v >= 0)
        mask = mask & (h < H) & (v < W) & mask_m[:, None] & (i < R * S * C)[None, :]
        offsets = row[:, None] + h * x_h + v * x_w + c[None, :] * x_c
        a = tl.load(x + offsets, mask=mask, other=0.0)
        pointers = w + tap[:, None] * w_tap + c[:, None] * w_c + n[None, :] * w_o
        f = tl.load(pointers, mask=(i < R * S * C)[:, None] & mask_n[None, :], other=0.0)
        total = tl.dot(a, f, total, input_precision="ieee" if EXACT else "tf32")
    pointers = (
        y + k * y_k + (b.to(tl.int64) * y_b + oh * y_h + ow * y_w)[:, None] + n[None, :] * y_o
    )
    tl.store(pointers, total.to(y.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


@triton.jit
def _product_by_class(
    x, w, y, pixels,
    x_k, x_b, x_c, x_h, x_w, w_k, w_tap, w_c, w_o, y_k, y_b, y_o, y_h, y_w,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    N: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, STRIDE: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, BACK: tl.constexpr,
    EXACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """:func:`_product` for the input gradient of a strided convolution (BACK), where BK divides C.

    Target pixels are computed by classes, those of equal remainder by the stride: the pixels of a
    class meet the same taps, and no others. ``pixels`` counts those of one class.
    """
    ROWS: tl.constexpr = (OH + STRIDE - 1) // STRIDE
    COLUMNS: tl.constexpr = (OW + STRIDE - 1) // STRIDE
    k = (tl.program_id(2) // (STRIDE * STRIDE)).to(tl.int64)
    kind = tl.program_id(2) % (STRIDE * STRIDE)
    first_h, first_w = kind // STRIDE, kind % STRIDE
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    b, at = m // (ROWS * COLUMNS), m % (ROWS * COLUMNS)
    row, column = at // COLUMNS, at % COLUMNS
    oh, ow = row * STRIDE + first_h, column * STRIDE + first_w
    mask_m, mask_n = (m < pixels) & (oh < OH) & (ow < OW), n < N
    x += k * x_k
    w += k * w_k
    image = b.to(tl.int64) * x_b
    # the taps of a class: every STRIDE-th from r_0 on
    r_0, s_0 = (first_h + PAD_H) % STRIDE, (first_w + PAD_W) % STRIDE
    rows, columns = (R - r_0 + STRIDE - 1) // STRIDE, (S - s_0 + STRIDE - 1) // STRIDE
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, rows * columns * C, BK):
        i, c = start // C, tl.multiple_of(start % C, BK) + tl.arange(0, BK)
        r, s = r_0 + i // columns * STRIDE, s_0 + i % columns * STRIDE
        h = row + (first_h + PAD_H - r) // STRIDE  # a multiple
        v = column + (first_w + PAD_W - s) // STRIDE
        mask = (h >= 0) & (v >= 0) & (h < H) & (v < W) & mask_m
        pointers = x + (image + h * x_h + v * x_w)[:, None] + (c * x_c)[None, :]
        a = tl.load(pointers, mask=mask[:, None], other=0.0)
        pointers = w + (r * S + s) * w_tap + (c * w_c)[:, None] + (n * w_o)[None, :]
        f = tl.load(pointers, mask=mask_n[None, :], other=0.0)
        total = tl.dot(a, f, total, input_precision="ieee" if EXACT else "tf32")
    pointers = (
        y + k * y_k + (b.to(tl.int64) * y_b + oh * y_h + ow * y_w)[:, None] + n[None, :] * y_o
    )
    tl.store(pointers, total.to(y.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


@triton.jit
def _weights(
    x, g, w, pixels, piece,
    x_k, x_b, x_c, x_h, x_w, g_k, g_b, g_o, g_h, g_w, w_p, w_k,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    N: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, STRIDE: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, COLUMNS: tl.constexpr,
    EXACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """``w[p, k, o, tap, c]`` = sum over the pixels of piece p of ``g`` times ``x`` at the tap."""
    k, p = tl.program_id(1).to(tl.int64), tl.program_id(2)
    o = tl.program_id(0) // COLUMNS * BM + tl.arange(0, BM)
    i = tl.program_id(0) % COLUMNS * BN + tl.arange(0, BN)
    tap, c = i // C, i % C
    r, s = tap // S - PAD_H, tap % S - PAD_W
    mask_o, mask_i = o < N, i < R * S * C
    x += k * x_k
    g += k * g_k
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(p * piece, min(p * piece + piece, pixels), BK):
        m = start + tl.arange(0, BK)
        b, at = m // (OH * OW), m % (OH * OW)
        oh, ow = at // OW, at % OW
        mask_m = m < pixels
        h, v = oh[:, None] * STRIDE + r[None, :], ow[:, None] * STRIDE + s[None, :]
        mask = (h >= 0) & (v >= 0) & (h < H) & (v < W) & mask_m[:, None] & mask_i[None, :]
        offsets = (b.to(tl.int64) * x_b)[:, None] + h * x_h + v * x_w + c[None, :] * x_c
        a = tl.load(x + offsets, mask=mask, other=0.0)
        offsets = (b.to(tl.int64) * g_b + oh * g_h + ow * g_w)[None, :] + o[:, None] * g_o
        f = tl.load(g + offsets, mask=mask_m[None, :] & mask_o[:, None], other=0.0)
        total = tl.dot(f, a, total, input_precision="ieee" if EXACT else "tf32")
    pointers = w + p * w_p + k * w_k + o[:, None] * (R * S * C) + i[None, :]
    tl.store(pointers, total, mask=mask_o[:, None] & mask_i[None, :])


@triton.jit
def _weights_by_row(
    x, g, w, pixels, piece,
    x_k, x_b, x_c, x_h, x_w, g_k, g_b, g_o, g_h, g_w, w_p, w_k,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    N: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, STRIDE: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, COLUMNS: tl.constexpr,
    EXACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FLAT: tl.constexpr,
):  # fmt: skip
    """:func:`_weights` where filters have three columns (S = 3) and BN divides C.

    A block has the three taps of a row, which share what is read of ``g``, and one range of
    channels, so that places and masks are vectors. With FLAT, source and target pixels have the
    same places: maps of the same size without gaps in memory.
    """
    k, p = tl.program_id(1).to(tl.int64), tl.program_id(2)
    o = tl.program_id(0) // COLUMNS * BM + tl.arange(0, BM)
    column = tl.program_id(0) % COLUMNS
    tap_row, c = column // (C // BN), column % (C // BN) * BN + tl.arange(0, BN)
    mask_o = o < N
    x += k * x_k
    g += k * g_k
    total_0 = tl.zeros((BM, BN), dtype=tl.float32)
    total_1 = tl.zeros((BM, BN), dtype=tl.float32)
    total_2 = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(p * piece, min(p * piece + piece, pixels), BK):
        m = start + tl.arange(0, BK)
        at = m % (OH * OW)
        oh, ow = at // OW, at % OW
        mask_m = m < pixels
        h, v = oh * STRIDE + (tap_row - PAD_H), ow * STRIDE - PAD_W
        if FLAT:
            at_x, at_g = (m + (tap_row - PAD_H) * W - PAD_W) * x_w, m * g_w
        else:
            b = (m // (OH * OW)).to(tl.int64)
            at_x, at_g = b * x_b + h * x_h + v * x_w, b * g_b + oh * g_h + ow * g_w
        mask = mask_m & (h >= 0) & (h < H)
        pointers = x + at_x[:, None] + (c * x_c)[None, :]
        a_0 = tl.load(pointers, mask=(mask & (v >= 0) & (v < W))[:, None], other=0.0)
        a_1 = tl.load(pointers + x_w, mask=(mask & (v >= -1) & (v < W - 1))[:, None], other=0.0)
        a_2 = tl.load(pointers + 2 * x_w, mask=(mask & (v >= -2) & (v < W - 2))[:, None], other=0.0)
        pointers = g + at_g[None, :] + (o * g_o)[:, None]
        f = tl.load(pointers, mask=mask_m[None, :] & mask_o[:, None], other=0.0)
        total_0 = tl.dot(f, a_0, total_0, input_precision="ieee" if EXACT else "tf32")
        total_1 = tl.dot(f, a_1, total_1, input_precision="ieee" if EXACT else "tf32")
        total_2 = tl.dot(f, a_2, total_2, input_precision="ieee" if EXACT else "tf32")
    pointers = w + p * w_p + k * w_k + o[:, None] * (R * S * C) + (tap_row * S * C + c)[None, :]
    tl.store(pointers, total_0, mask=mask_o[:, None])
    tl.store(pointers + C, total_1, mask=mask_o[:, None])
    tl.store(pointers + 2 * C, total_2, mask=mask_o[:, None])


def _power(n: int, low: int, high: int) -> int:
    return min(high, max(low, triton.next_power_of_2(n)))


# Block sizes were tuned on an H200: bench/NOTES.md. Those of products in 16 bits are marked small.
Blocks: TypeAlias = tuple[int, int, int, int, int]


def _blocks(clients: int, pixels: int, out: int, channels: int, small: bool) -> Blocks:
    """Block sizes (pixels, target channels, terms of the sum), warps and stages."""
    bk = 64 if small and channels >= 64 else 32
    if small and bk == 64 and out >= 512 and pixels <= 128:
        return 64, 64, 64, 4, 4
    wide = triton.cdiv(pixels, 128) * (out // 256) * clients
    if small and bk == 64 and out % 256 == 0 and pixels >= 512 and (out >= 512 or wide >= 320):
        return 128, 256, 64, 8, 3
    bn = _power(out, 16, 128)
    enough = NUM_PROCESSORS * (3 if bn > 64 or not small else 1.5)
    bm = 64 if triton.cdiv(pixels, 128) * triton.cdiv(out, bn) * clients < enough else 128
    # with 4 warps, 128 x 64 blocks of 3 channels in bfloat16 and 7 x 7 taps are compiled wrongly
    return bm, bn, bk, 8 if bm * bn > 8192 or (bm == 128 and channels % 16) else 4, 3


def _weight_blocks(out: int, reduced: int, channels: int, small: bool) -> Blocks:
    """Block sizes (target channels, taps times source channels, pixels), warps and stages."""
    bm = _power(out, 16, 128)
    bn = _power(reduced, 16, 256 if bm == 16 else bm if bm >= 64 else 128)
    # larger blocks of 3 or 5 channels in bfloat16 and 7 x 7 taps are compiled wrongly
    if small and channels % 16 and min(bm, bn) >= 64:
        return 32, 64, 64, 4, 3
    if small and bm == bn == 128:
        return bm, bn, 32, 4, 4
    return bm, bn, 64, 8 if bm * bn > 8192 or bn == 256 else 4, 3


def _row_blocks(out: int, channels: int, pixels: int) -> Blocks | None:
    """Blocks of :func:`_weights_by_row`, of the channels of one tap; None: it does not fit."""
    if out < 64 or channels % 64:
        return None
    if out >= 512 and pixels >= 512 and channels % 128 == 0:
        return 128, 128, 64, 8, 3
    if out >= 128 and (out >= 512 or pixels <= 256 or min(out, channels) == 128 < pixels // 80):
        return 128, 64, 32, 8, 4
    return 64, 64, 64, 4, 3


def _exact() -> bool:
    return not torch.backends.cudnn.allow_tf32


def _run(x: Tensor, w: Tensor, y: Tensor, stride: int, padding: Pair, back: bool) -> Tensor:
    """Launch ``_product``; ``w`` is ``[K, R, S, target channels, source channels]``."""
    clients, batch, channels, height, width = x.shape
    out, (oh, ow), (rows, columns) = y.shape[2], y.shape[3:], w.shape[1:3]
    pixels, small = batch * oh * ow, x.element_size() == 2
    bm, bn, bk, warps, stages = _blocks(clients, pixels, out, channels, small)
    kernel, classes = _product, 1
    if back and stride > 1 and channels % bk == 0:
        kernel, classes = _product_by_class, stride * stride
        pixels = batch * triton.cdiv(oh, stride) * triton.cdiv(ow, stride)
    grid = (triton.cdiv(pixels, bm), triton.cdiv(out, bn), clients * classes)
    with torch.cuda.device_of(x):  # kernels run on the current device
        kernel[grid](
            x, w, y, pixels,
            *x.stride(), w.stride(0), w.stride(2), w.stride(4), w.stride(3), *y.stride(),
            C=channels, H=height, W=width, N=out, OH=oh, OW=ow, R=rows, S=columns,
            STRIDE=stride, PAD_H=padding[0], PAD_W=padding[1], BACK=back,
            EXACT=_exact(), BM=bm, BN=bn, BK=bk, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return y


def conv(x: Tensor, w: Tensor, stride: int, padding: Pair) -> Tensor:
    """Convolution of ``x`` ``[K, B, C, H, W]`` with ``w`` ``[K, R, S, O, C]``."""
    return _run(x, w, empty_target(x, w, stride, padding), stride, padding, back=False)


def conv_inputs(g: Tensor, w: Tensor, size: Pair, stride: int, padding: Pair) -> Tensor:
    """Gradient with respect to inputs of ``size`` (height, width); ``w`` is ``[K, R, S, C, O]``."""
    x = empty(g.shape[0], g.shape[1], w.shape[3], *size, like=g)
    return _run(g, w, x, stride, padding, back=True)


def conv_weights(g: Tensor, x: Tensor, size: Pair, stride: int, padding: Pair) -> Tensor:
    """Gradient, in float32, with respect to weights ``[K, O, C, R, S]`` with (R, S) = ``size``."""
    clients, batch, channels, height, width = x.shape
    out, oh, ow = g.shape[2:]
    pixels, reduced = batch * oh * ow, size[0] * size[1] * channels
    blocks = _row_blocks(out, channels, pixels) if _reads_rows(g, x, size) else None
    small = x.element_size() == 2
    bm, bn, bk, warps, stages = blocks or _weight_blocks(out, reduced, channels, small)
    if blocks:
        is_flat = stride == 1 and (oh, ow) == (height, width) and x[0].numel() < 2**31
        kernel, options = _weights_by_row, {"FLAT": is_flat and g[0].numel() < 2**31}
        columns = size[0] * channels // bn
    else:
        kernel, options, columns = _weights, {}, triton.cdiv(reduced, bn)
    rows = triton.cdiv(out, bm)
    wanted = max(1, 4 * NUM_PROCESSORS // (clients * rows * columns))
    pieces = max(1, min(wanted, pixels // (8 * bk)))
    piece = triton.cdiv(triton.cdiv(pixels, pieces), bk) * bk
    pieces = triton.cdiv(pixels, piece)
    w = x.new_empty(pieces, clients, out, *size, channels, dtype=torch.float32)
    with torch.cuda.device_of(x):
        kernel[(rows * columns, clients, pieces)](
            x, g, w, pixels, piece, *x.stride(), *g.stride(), w.stride(0), w.stride(1),
            C=channels, H=height, W=width, N=out, OH=oh, OW=ow, R=size[0], S=size[1],
            STRIDE=stride, PAD_H=padding[0], PAD_W=padding[1], COLUMNS=columns,
            EXACT=_exact(), BM=bm, BN=bn, BK=bk, num_warps=warps, num_stages=stages, **options,
        )  # fmt: skip
    total = w[0] if pieces == 1 else w.sum(0)
    return total.permute(0, 1, 4, 2, 3)


def _reads_rows(g: Tensor, x: Tensor, size: Pair) -> bool:
    """Whether maps are in channels-last and filters have three columns."""
    return size[1] == 3 and g.element_size() == 2 and is_dense(g) and is_dense(x)


# -- Sums of the maps of all clients over batch and pixels as a Triton kernel, for a GPU -----------


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
