"""Conditional generators of inputs or features, for data-free distillation.

A generator is a pure function of its weights, like a model: ``G.init(key, ...)`` draws initial
weights, ``G(weights, z, y, train)`` returns samples and the next buffers. Builders are cached and
allocate no weights, so equal arguments return the same generator.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from functools import cache, lru_cache

import torch
from torch import Tensor, nn

from kedge.core import rng
from kedge.core.model import Layout, Model
from kedge.core.tree import Params, Weights
from kedge.errors import ModelError

MAX_TWO_STAGE_SIDE = 64  # pixels; larger images get more stages to keep the first map near 8x8


class Generator:
    """A conditional generator: noise ``z [B, noise]`` and classes ``y [B]`` to samples."""

    def __init__(self, module: nn.Sequential, classes: int, shape: tuple[int, ...]) -> None:
        self.classes, self.shape = classes, shape  # of one sample
        self._layers = dict(module.named_modules())
        self._model = Model(module)

    def init(self, key: Tensor, dtype: torch.dtype, device: torch.device) -> Weights:
        """Initial weights, distributed as torch initialises these layers, but drawn from a key."""
        params: Params = {}
        buffers: Params = {}
        for name, layer in self._layers.items():
            for leaf, like in layer.named_parameters(recurse=False):
                path = f"{name}.{leaf}"
                if isinstance(layer, (nn.Linear, nn.Conv2d)):
                    bound = layer.weight[0].numel() ** -0.5
                    noise = rng.uniform(rng.fold(key, path), tuple(like.shape), dtype)
                    params[path] = bound * (2 * noise - 1)
                else:  # BatchNorm
                    value = 1.0 if leaf == "weight" else 0.0
                    params[path] = torch.full(like.shape, value, dtype=dtype, device=device)
            for leaf, like in layer.named_buffers(recurse=False):
                leaf_dtype = dtype if like.is_floating_point() else like.dtype
                value = 1 if leaf == "running_var" else 0
                buffers[f"{name}.{leaf}"] = torch.full(
                    like.shape, value, dtype=leaf_dtype, device=device
                )
        return Weights(params, buffers)

    def prepared(self, prepare: Callable[[Model], Model]) -> Generator:
        """The same generator, with a network in another precision or layout."""
        generator = copy.copy(self)
        generator._model = prepare(self._model)
        return generator

    def in_layout(self, layout: Layout) -> Generator:
        """The same generator in the layout of the clients' model."""
        return _in_layout(self, layout)

    def __call__(
        self, weights: Weights, z: Tensor, y: Tensor, train: bool
    ) -> tuple[Tensor, Params]:
        """``(samples [B, *shape], next buffers)``; ``train`` selects BatchNorm's mode."""
        # by comparison: F.one_hot reads values, which a captured graph and vmap cannot
        label = (y[:, None] == torch.arange(self.classes, device=y.device)).to(z.dtype)
        x = torch.cat([z, label], 1)
        out = self._model.forward(weights, x, "train" if train else "eval")
        return out.logits.reshape(-1, *self.shape), out.buffers


@lru_cache(maxsize=64)  # models without an engine have a layout of their own each
def _in_layout(generator: Generator, layout: Layout) -> Generator:
    return generator.prepared(lambda model: model.prepared(layout))


@cache
def image_generator(
    shape: tuple[int, ...],
    classes: int,
    noise: int = 100,
    width: int = 128,
    final_norm: bool = True,
    owner: str = "fedgen",
) -> Generator:
    """FLBoost's image generator (Table 5a), after DFAD (Fang et al. 2019, arXiv:1912.11006).

    Noise and one-hot label each fill half the channels of a small map, which is upsampled twice:
    682 307 parameters for (3, 32, 32) and ten classes. ``final_norm`` appends a BatchNorm without
    affine parameters, so that samples have the scale of normalised inputs. A side that is not
    divisible by the upsampling factor is generated larger and cropped; sides above 64 get more
    stages. Convolutions before a BatchNorm have no bias, which it would cancel.

    Raises :class:`ModelError`, in the name of the part ``owner``, if ``shape`` is not (channels,
    height, width).
    """
    if len(shape) != 3 or min(shape) < 1:
        raise ModelError(
            f"{owner} generates images here, (channels, height, width), not {shape}; let it "
            f"generate features instead: {owner}(level=feature)"
        )
    channels, height, breadth = shape
    side = max(height, breadth)
    stages = 2 if side <= MAX_TWO_STAGE_SIDE else round(math.log2(side / 8))
    first = (math.ceil(height / 2**stages), math.ceil(breadth / 2**stages))
    with torch.device("meta"):
        layers: dict[str, nn.Module] = {
            "embed": _Embed(noise, classes, width, math.prod(first)),
            "shape": nn.Unflatten(1, (width, *first)),
            "norm": nn.BatchNorm2d(width),
        }
        for i in range(1, stages + 1):
            before = width
            after = max(1, width // 2) if i == stages else width
            layers[f"stage{i}"] = nn.Sequential(
                OrderedDict(
                    up=nn.Upsample(scale_factor=2),
                    conv=nn.Conv2d(before, after, 3, padding=1, bias=False),
                    norm=nn.BatchNorm2d(after),
                    relu=nn.LeakyReLU(0.2),
                )
            )
        layers["conv"] = nn.Conv2d(max(1, width // 2), channels, 3, padding=1)
        layers["crop"] = _Crop(height, breadth)
        layers["tanh"] = nn.Tanh()
        if final_norm:
            layers["last"] = nn.BatchNorm2d(channels, affine=False)
        return Generator(nn.Sequential(OrderedDict(layers)), classes, shape)


@cache
def feature_generator(
    shape: tuple[int, ...], classes: int, noise: int = 100, width: int = 128
) -> Generator:
    """FedGen's feature generator in FLBoost's form (Table 5b): two layers of 64 ``width`` units.

    Zhu et al., Data-Free Knowledge Distillation for Heterogeneous Federated Learning, ICML 2021,
    arXiv:2105.10056. Biases and affine parameters that the next BatchNorm would cancel are omitted.
    """
    hidden = 64 * width
    with torch.device("meta"):
        layers: dict[str, nn.Module] = {
            "embed": _Embed(noise, classes, width, 64, bias=False),
            "norm1": nn.BatchNorm1d(hidden, affine=False),
            "hidden": nn.Linear(hidden, hidden, bias=False),
            "norm2": nn.BatchNorm1d(hidden),
            "relu": nn.LeakyReLU(0.2),
            "out": nn.Linear(hidden, math.prod(shape)),
        }
        return Generator(nn.Sequential(OrderedDict(layers)), classes, shape)


def diversity(z: Tensor, x: Tensor) -> Tensor:
    r"""Diversity loss of samples ``x [B, ...]`` made from noise ``z [B, d]``; a scalar to minimise.

    :math:`\exp(-\frac{1}{B^2}\sum_{i,j} d(z_i, z_j)\,d'(x_i, x_j))` with d the mean squared and d'
    the mean absolute difference of the components (FedGen, ``L_div``; FLBoost, ``L_r``).
    """
    x = x.flatten(1)
    noise_dist = (z[:, None] - z[None]).square().mean(-1)  # [B, B]
    sample_dist = (x[:, None] - x[None]).abs().mean(-1)
    return torch.exp(-(noise_dist.detach() * sample_dist).mean())


class _Embed(nn.Module):
    """Linear embeddings of noise and label, each into half of the ``width`` channels."""

    def __init__(self, noise: int, classes: int, width: int, area: int, bias: bool = True) -> None:
        super().__init__()
        self.sizes = [noise, classes]
        self.z = nn.Linear(noise, (width - width // 2) * area, bias=bias)
        self.y = nn.Linear(classes, (width // 2) * area, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        z, y = torch.split(x, self.sizes, 1)
        return torch.cat([self.z(z), self.y(y)], 1)


class _Crop(nn.Module):
    """Crop the centre of a feature map."""

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self.height, self.width = height, width

    def forward(self, x: Tensor) -> Tensor:
        top, left = (x.shape[-2] - self.height) // 2, (x.shape[-1] - self.width) // 2
        return x[..., top : top + self.height, left : left + self.width]
