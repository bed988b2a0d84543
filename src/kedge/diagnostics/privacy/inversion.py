"""Model inversion: reconstruct inputs from features, or from means of features.

The attacker knows the network. It looks for inputs whose features match the ones it was given
(Mahendran and Vedaldi, Understanding Deep Image Representations by Inverting Them, CVPR 2015,
arXiv:1412.0035), smooth ones if it knows nothing else. An attacker that has other samples of the
same kind first fits a linear decoder from features to inputs on them and starts from its answer
(after Dosovitskiy and Brox, Inverting Visual Representations with Convolutional Networks, CVPR
2016, arXiv:1506.02753, with a linear map in place of their network).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kedge.core import rng
from kedge.core.optim import Adam

Features = Callable[[Tensor], Tensor]  # values from 0 to 1 [B, ...] to features [B, D]
RIDGE = 1e-2  # of the decoder, in mean squares of a feature
SMOOTH = 0.1  # weight of the total variation, without a decoder
STAY = 0.1  # weight of the squared distance from the decoder's answer
RATE, RATE_NEAR = 0.1, 0.02  # first learning rates, from noise and from a decoder's answer
NOISE = 0.02  # standard deviation of the noise in the start


@dataclass(frozen=True)
class Decoder:
    """A linear map from features to inputs, fitted to the attacker's own samples."""

    feature_mean: Tensor  # [D]
    input_mean: Tensor  # [X]
    dual: Tensor  # [n, X]
    centred: Tensor  # [n, D]
    shape: tuple[int, ...]

    def __call__(self, features: Tensor) -> Tensor:
        """Inputs ``[B, ...]`` from 0 to 1 for features ``[B, D]``."""
        flat = (features - self.feature_mean) @ self.centred.T @ self.dual + self.input_mean
        return flat.clamp(0, 1).reshape(-1, *self.shape)


def fit_decoder(features: Tensor, inputs: Tensor, ridge: float = RIDGE) -> Decoder:
    """Ridge regression of inputs ``[n, ...]`` on features ``[n, D]``.

    It is solved in its dual form, since features are often more than samples.
    """
    h, x = features.double(), inputs.flatten(1).double()
    feature_mean, input_mean = h.mean(0), x.mean(0)
    h = h - feature_mean
    gram = h @ h.T
    shift = ridge * gram.diagonal().sum() / h.shape[1] + torch.finfo(gram.dtype).tiny
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    dual = torch.linalg.solve(gram + shift * eye, x - input_mean)
    to = features.dtype
    tensors = (feature_mean.to(to), input_mean.to(to), dual.to(to), h.to(to))
    return Decoder(*tensors, tuple(inputs.shape[1:]))


class Inversion(NamedTuple):
    """Reconstructed inputs ``[B, ...]`` from 0 to 1, and the relative error of their features."""

    inputs: Tensor
    mismatch: Tensor  # ||h(x) - h||^2 / ||h||^2, [B]


def invert(
    features: Features,
    targets: Tensor,
    shape: tuple[int, ...],
    *,
    decoder: Decoder | None = None,
    start: Tensor | float = 0.5,
    steps: int = 200,
    key: Tensor | None = None,
) -> Inversion:
    """Look for inputs whose features equal the targets.

    Every target is attacked by itself: neither the loss nor Adam mixes rows, so the answer does not
    depend on the other targets.

    Args:
        features: the lower layers, from inputs between 0 and 1 to features; in evaluation mode.
        targets: features ``[B, D]``.
        shape: shape of one input.
        decoder: the answer to start from and to stay near; None: prefer smooth inputs.
        start: the input to start from, with some noise, without a decoder.
        steps: steps of Adam; the learning rate falls to 0 by a cosine.
        key: randomness of the start, without a decoder.
    """
    lr = RATE if decoder is None else RATE_NEAR
    if decoder is None:
        key = rng.key(0, targets.device) if key is None else key
        noise = rng.normal(key, shape, targets.dtype)  # the same for all targets
        first = (start + NOISE * noise).clamp(0, 1).expand(len(targets), *shape)
    else:
        first = decoder(targets)
    scale = targets.square().sum(1).clamp_min(torch.finfo(targets.dtype).tiny)  # [B]

    def mismatch(u: Tensor) -> Tensor:
        return (features(u) - targets).square().sum(1) / scale

    def loss(u: Tensor) -> Tensor:
        if decoder is None:
            return (mismatch(u) + SMOOTH * total_variation(u)).sum()
        return (mismatch(u) + STAY * (u - first).square().flatten(1).mean(1)).sum()

    adam, point = Adam(), {"u": first.detach().clone()}
    state = adam.init(point)
    for step in range(steps):
        u = point["u"].requires_grad_()
        [grad] = torch.autograd.grad(loss(u), [u])
        rate = lr * 0.5 * (1 + math.cos(math.pi * step / steps))
        with torch.no_grad():
            point, state = adam.update(point, {"u": grad}, state, torch.as_tensor(rate).to(grad))
            point = {"u": point["u"].clamp(0, 1)}
    with torch.no_grad():
        return Inversion(point["u"].detach(), mismatch(point["u"]))


def total_variation(u: Tensor) -> Tensor:
    """Mean squared difference of neighbours along the axes of space, ``[B]``; 0 for tables.

    >>> total_variation(torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]])).tolist()
    [1.0]
    """
    total = u.new_zeros(len(u))
    for axis in range(2, u.ndim):
        if u.shape[axis] > 1:
            total = total + u.diff(dim=axis).square().flatten(1).mean(1)
    return total


def squared_error(a: Tensor, b: Tensor) -> Tensor:
    """Mean squared difference of samples, ``[...]`` for ``[..., C, H, W]`` flattened to rows."""
    return (a.flatten(1) - b.flatten(1)).square().mean(1)


def psnr(mse: float) -> float:
    """Peak signal-to-noise ratio in dB of values between 0 and 1.

    >>> psnr(0.01)
    20.0
    """
    return math.inf if mse <= 0 else -10 * math.log10(mse)
