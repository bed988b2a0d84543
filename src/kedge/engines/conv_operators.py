"""Convolutions with a client axis as operators that compilers and traced graphs treat as opaque.

On a GPU they are the kernels of :mod:`kedge.engines.kernels`, elsewhere torch's, client by client.
The autograd functions of :mod:`kedge.engines.stacked` define their gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight

from kedge.engines.conv_results import empty, empty_target, is_dense


def _conv(x: Tensor, w: Tensor, stride: int, padding: list[int]) -> Tensor:
    if x.is_cuda:
        from kedge.engines import kernels

        return kernels.conv(x, w, stride, (padding[0], padding[1]))
    clients = zip(x, w.permute(0, 3, 4, 1, 2), strict=True)
    results = [F.conv2d(x, w, stride=stride, padding=padding) for x, w in clients]
    return empty_target(x, w, stride, padding).copy_(torch.stack(results))


def _conv_inputs(g: Tensor, w: Tensor, size: list[int], stride: int, padding: list[int]) -> Tensor:
    if g.is_cuda:
        from kedge.engines import kernels

        return kernels.conv_inputs(g, w, (size[0], size[1]), stride, (padding[0], padding[1]))
    shape = [g.shape[1], w.shape[3], *size]
    clients = zip(g, w.permute(0, 4, 3, 1, 2), strict=True)
    results = [conv2d_input(shape, w, g, stride, padding) for g, w in clients]
    return _empty_source(g, w, size).copy_(torch.stack(results))


def _conv_weights(g: Tensor, x: Tensor, size: list[int], stride: int, padding: list[int]) -> Tensor:
    if g.is_cuda:
        from kedge.engines import kernels

        return kernels.conv_weights(g, x, (size[0], size[1]), stride, (padding[0], padding[1]))
    shape = [g.shape[2], x.shape[2], *size]
    clients = zip(g, x, strict=True)
    results = [conv2d_weight(x, shape, g, stride, padding) for g, x in clients]
    return _empty_weights(g, x, size).copy_(torch.stack(results))


def _sums(g: Tensor) -> Tensor:
    if g.is_cuda and g.dtype != torch.float64 and is_dense(g) and g[0].numel() < 2**31:
        from kedge.engines.kernel_of_sums import sums

        return sums(g)
    return g.sum((1, 3, 4), dtype=accumulator(g))


def accumulator(x: Tensor) -> torch.dtype:
    """The dtype in which gradients of weights are summed."""
    return torch.promote_types(x.dtype, torch.float32)


def _empty_source(g: Tensor, w: Tensor, size: Any, *_: Any) -> Tensor:
    return empty(g.shape[0], g.shape[1], w.shape[3], size[0], size[1], like=g)


def _empty_sums(g: Tensor) -> Tensor:
    return g.new_empty((g.shape[0], g.shape[2]), dtype=accumulator(g))


def _empty_weights(g: Tensor, x: Tensor, size: Any, *_: Any) -> Tensor:
    shape = (x.shape[0], g.shape[2], *size, x.shape[2])
    return x.new_empty(shape, dtype=accumulator(x)).permute(0, 1, 4, 2, 3)


_OPERATIONS = torch.library.Library("kedge", "DEF")
for _schema, _work, _empty in (
    ("conv(Tensor x, Tensor w, int stride, int[] padding) -> Tensor", _conv, empty_target),
    (
        "conv_inputs(Tensor g, Tensor w, int[] size, int stride, int[] padding) -> Tensor",
        _conv_inputs,
        _empty_source,
    ),
    (
        "conv_weights(Tensor g, Tensor x, int[] size, int stride, int[] padding) -> Tensor",
        _conv_weights,
        _empty_weights,
    ),
    ("sums(Tensor g) -> Tensor", _sums, _empty_sums),
):
    _name = _schema.split("(")[0]
    _OPERATIONS.define(_schema)
    for _key in ("CPU", "CUDA"):
        _OPERATIONS.impl(_name, _work, _key)
    torch.library.register_fake(f"kedge::{_name}", _empty, lib=_OPERATIONS)
