"""BatchNorm of all clients at once in compiled steps.

Under ``vmap``, torch's BatchNorm has no backward pass in bfloat16 or channels-last, so that a step
converts every map to float32 and another memory format, and back. In a traced step a
:class:`BatchNorm` is plain arithmetic instead, with the backward pass in closed form. The compiler
fuses it with what follows (ReLU, sums of branches, casts), in the dtype and the memory format of
the convolutions. So it is for maps of one channel under ``vmap``, of which ``vmap`` makes a view
that cuDNN refuses. Elsewhere it is torch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kedge.engines.conv_results import to_front
from kedge.engines.torch_compiler import is_traced
from kedge.engines.torch_private import transforms_active


class BatchNorm(nn.modules.batchnorm._BatchNorm):
    """A BatchNorm that is plain arithmetic in a traced step of all clients, or on one channel."""

    def forward(self, x: Tensor) -> Tensor:
        plain = transforms_active() and (is_traced() or (x.ndim > 2 and x.shape[1] == 1))
        if self.momentum is None or not plain:
            return super().forward(native_input(x))
        self._check_input_dim(x)
        if not self.training and self.running_mean is not None and self.running_var is not None:
            shape = _channel_shape(x, 0)
            inverse = torch.rsqrt(self.running_var + self.eps)
            centred = x.to(inverse.dtype) - self.running_mean.reshape(shape)
            y = centred * inverse.reshape(shape)
            return _affine(y, self.weight, self.bias, shape).to(x.dtype)
        y, mean, var = _Normalised.apply(x, self.weight, self.bias, self.eps, 0)
        if self.training and self.track_running_stats:
            self._update(mean.detach().flatten(), var.detach().flatten(), x.numel() // x.shape[1])
        return y

    def _update(self, mean: Tensor, var: Tensor, count: int) -> None:
        """Update the running statistics by those of a batch."""
        factor = self.momentum
        assert factor is not None
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.running_mean is None or self.running_var is None:
            return
        unbiased = var * (count / max(count - 1, 1))
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.copy_(factor * value + (1 - factor) * running)


class BatchNorm1d(BatchNorm, nn.BatchNorm1d):
    pass


class BatchNorm2d(BatchNorm, nn.BatchNorm2d):
    pass


class BatchNorm3d(BatchNorm, nn.BatchNorm3d):
    pass


KINDS = {kind.__bases__[1]: kind for kind in (BatchNorm1d, BatchNorm2d, BatchNorm3d)}


def replace_layers(net: nn.Module) -> None:
    """Replace, in place, the BatchNorm layers of a network."""
    for layer in net.modules():
        if type(layer) in KINDS:
            layer.__class__ = KINDS[type(layer)]


class _Normalised(torch.autograd.Function):
    """``weight * (x - mean) / sqrt(var + eps) + bias``, the mean and the (biased) variance of the
    batch.

    ``lead`` axes of clients come before those of the batch and of the channels. Since mean and
    variance are results, the backward pass reads them, and it can itself be differentiated.
    """

    @staticmethod
    def forward(
        x: Tensor, w: Tensor | None, b: Tensor | None, eps: float, lead: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        full = x.to(torch.promote_types(x.dtype, torch.float32))
        var, mean = _moments(full, _batch_axes(x, lead), x.element_size() < 4)
        y = _affine((full - mean) * torch.rsqrt(var + eps), w, b, _channel_shape(x, lead))
        return y.to(x.dtype), mean, var

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, b, ctx.eps, ctx.lead = inputs
        ctx.has_bias = b is not None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w, *output[1:])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, by_mean: Tensor | None, by_var: Tensor | None) -> Any:
        x, w, mean, var = ctx.saved_tensors
        dims, shape = _batch_axes(x, ctx.lead), _channel_shape(x, ctx.lead)
        centred = x.to(mean.dtype) - mean
        count = centred.numel() // mean.numel()
        dx, dw, db = torch.zeros_like(centred), None, None
        if g is not None:
            g, inverse = g.to(mean.dtype), torch.rsqrt(var + ctx.eps)
            y = centred * inverse
            total, product = g.sum(dims, keepdim=True), (g * y).sum(dims, keepdim=True)
            scale = inverse if w is None else inverse * w.reshape(shape)
            dx = scale * (g - (total + y * product) / count)
            if w is not None:
                dw, db = (t.reshape(w.shape).to(w.dtype) for t in (product, total))
        if by_mean is not None:
            dx = dx + by_mean / count
        if by_var is not None:
            dx = dx + by_var * centred * (2 / count)
        return dx.to(x.dtype), dw, db if ctx.has_bias else None, None, None

    @staticmethod
    def vmap(
        info: Any, dims: Any, x: Tensor, w: Tensor | None, b: Tensor | None, eps: float, lead: int
    ) -> Any:
        def stacked(t: Tensor | None, dim: int | None) -> Tensor | None:
            if t is None:
                return None
            return t.expand(info.batch_size, *t.shape) if dim is None else to_front(t, dim)

        every = [stacked(t, d) for t, d in zip((x, w, b), dims[:3], strict=True)]
        return _Normalised.apply(*every, eps, lead + 1), (0, 0, 0)


def _moments(x: Tensor, dims: list[int], fast: bool) -> tuple[Tensor, Tensor]:
    """Biased variance and mean. ``fast``: by the mean of squares, which is one quick pass, and as
    precise as inputs of 16 bits are unless the mean is a hundred times the deviation."""
    if not fast:
        return torch.var_mean(x, dims, correction=0, keepdim=True)
    mean = x.mean(dims, keepdim=True)
    return ((x * x).mean(dims, keepdim=True) - mean * mean).clamp_min(0), mean


def _batch_axes(x: Tensor, lead: int) -> list[int]:
    return [lead, *range(lead + 2, x.ndim)]


def _channel_shape(x: Tensor, lead: int) -> list[int]:
    """The shape in which a vector of channels is broadcast over ``x``."""
    return [*x.shape[:lead], 1, x.shape[lead + 1], *[1] * (x.ndim - lead - 2)]


def _affine(y: Tensor, w: Tensor | None, b: Tensor | None, shape: list[int]) -> Tensor:
    y = y if w is None else y * w.reshape(shape)
    return y if b is None else y + b.reshape(shape)


def native_input(x: Tensor) -> Tensor:
    """The input of torch's BatchNorm: under ``vmap`` its backward pass supports neither bfloat16
    nor channels-last."""
    if not transforms_active():
        return x
    x = x.float() if x.dtype == torch.bfloat16 else x
    x = x.contiguous()
    if x.ndim == 4 and x.shape[-2:] == (1, 1):
        x = x.flatten(1).reshape(x.shape)  # contiguous() keeps the strides of either memory format
    return x
