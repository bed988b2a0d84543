"""VGG networks; a stage ends where a pool halves the map.

Simonyan & Zisserman, Very Deep Convolutional Networks for Large-Scale Image Recognition, ICLR 2015.
"""

from __future__ import annotations

from torch import nn

from kedge.models import layers
from kedge.models.layers import (
    Dropout,
    Norm,
    Shape,
    fan_out_init,
    head,
    image_shape,
    named,
    norm_layer,
    stack,
)


def vgg9(
    shape: Shape, outputs: int, *, norm: Norm = "none", dropout: Dropout = True
) -> nn.Sequential:
    """VGG-9, the "moderate CNN": convolutions 32-64, 128-128, 256-256 and two layers of 512.

    3 491 530 parameters for (3, 32, 32) and ten classes. FedImpro's Table 9 (Tang et al., ICLR
    2024); its cut, the end of the convolutions, is ``stage3``. ``dropout=false`` leaves out the
    dropout: 1/20 of the maps after stage 2, 1/10 around the fully connected layers.
    """
    channels, height, width = image_shape("vgg9", shape, 8)
    convs = []
    for filters in ((32, 64), (128, 128), (256, 256)):
        convs.append(_stage(channels, filters, norm))
        channels = filters[-1]
    inputs = channels * (height // 8) * (width // 8)
    drop = nn.Dropout(0.1) if dropout else nn.Identity()
    first = named(flatten=nn.Flatten(), drop=drop, fc=nn.Linear(inputs, 512), relu=nn.ReLU())
    second = named(fc=nn.Linear(512, 512), relu=nn.ReLU())
    if dropout:
        convs[1].add_module("drop", layers.SliceDropout(0.05, dims=2))
        second.add_module("drop", nn.Dropout(0.1))
    return stack(*convs, first, second, head=head(512, outputs))


def vgg11(shape: Shape, outputs: int, *, norm: Norm = "none") -> nn.Sequential:
    """The convolutions of VGG-11, a global mean and a head; 512 features.

    9 225 610 parameters for 3 channels and ten classes. FedBR's net for CIFAR-10 and PACS (Guo et
    al., ICML 2023), initialised as in torchvision: with PyTorch's default initialisation and no
    norm, the signal vanishes. Also in FLBoost's Table 6.
    """
    channels = image_shape("vgg11", shape, 32)[0]
    stages = []
    for filters in ((64,), (128,), (256, 256), (512, 512), (512, 512)):
        stages.append(_stage(channels, filters, norm))
        channels = filters[-1]
    stages[-1].add_module("mean", nn.AdaptiveAvgPool2d(1))
    stages[-1].add_module("flatten", nn.Flatten())
    model = stack(*stages, head=head(channels, outputs))
    fan_out_init(model)
    return model


def _stage(channels: int, filters: tuple[int, ...], norm: str) -> nn.Sequential:
    """3x3 convolutions with padding, each with norm and ReLU, then a max-pool."""
    stage = nn.Sequential()
    for i, size in enumerate(filters, 1):
        stage.add_module(f"conv{i}", nn.Conv2d(channels, size, 3, padding=1))
        stage.add_module(f"norm{i}", norm_layer(norm, size))
        stage.add_module(f"relu{i}", nn.ReLU())
        channels = size
    stage.add_module("pool", nn.MaxPool2d(2))
    return stage
