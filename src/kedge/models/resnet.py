"""Residual networks: a stem, four stages of residual blocks (the last ends in a mean), a head.

He et al., Deep Residual Learning for Image Recognition, CVPR 2016 (arXiv 1512.03385).
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from kedge.models.layers import Shape, fan_out_init, head, image_shape, named, norm_layer, stack
from kedge.schema import Count, Doc

Norm = Annotated[
    Literal["bn", "gn"], Doc("BatchNorm or GroupNorm")
]  # without one, activations grow
Stem = Annotated[
    Literal["cifar", "imagenet"], Doc("a 3x3 convolution, or 7x7 of stride 2 and a max-pool")
]
Groups = Annotated[Count, Doc("maximum groups of a GroupNorm")]
Width = Annotated[Count, Doc("channels of the first stage; each next one has twice as many")]


def resnet18(
    shape: Shape,
    outputs: int,
    *,
    norm: Norm = "bn",
    stem: Stem = "cifar",
    groups: Groups = 32,
    width: Width = 64,
) -> nn.Sequential:
    """ResNet-18, blocks 2-2-2-2; 512 features, or eight times ``width``.

    ``stem=cifar`` is a 3x3 convolution: 11 173 962 parameters for 3 channels and ten classes, the
    net of FedImpro (Tang et al., ICLR 2024), whose default cut is ``stage2``. ``stem=imagenet`` is
    torchvision's net, initial weights included: a 7x7 convolution of stride 2 and a max-pool,
    11 181 642 parameters, the net of FLBoost. ``norm=gn`` has at most ``groups`` groups.
    """
    return _resnet("resnet18", BasicBlock, (2, 2, 2, 2), shape, outputs, norm, stem, groups, width)


def resnet34(
    shape: Shape, outputs: int, *, norm: Norm = "bn", stem: Stem = "cifar", groups: Groups = 32
) -> nn.Sequential:
    """ResNet-34, blocks 3-4-6-3; 512 features; options as for resnet18.

    21 282 122 parameters for 3 channels and ten classes; 21 289 802 with ``stem=imagenet``, the
    net of FLBoost's Table 6.
    """
    return _resnet("resnet34", BasicBlock, (3, 4, 6, 3), shape, outputs, norm, stem, groups)


def resnet50(
    shape: Shape, outputs: int, *, norm: Norm = "bn", stem: Stem = "cifar", groups: Groups = 32
) -> nn.Sequential:
    """ResNet-50, bottlenecks 3-4-6-3; 2048 features; options as for resnet18.

    23 705 252 parameters for 3 channels and 100 classes: FedImpro's net for CIFAR-100 (Tang et
    al., ICLR 2024); 23 712 932 with ``stem=imagenet``.
    """
    return _resnet("resnet50", Bottleneck, (3, 4, 6, 3), shape, outputs, norm, stem, groups)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, norm: str, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.norm1 = norm_layer(norm, width, groups=groups)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = norm_layer(norm, width, groups=groups)
        self.shortcut = _shortcut(inputs, width, stride, norm, groups)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut; the stride is in the 3x3 convolution."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, norm: str, groups: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm1 = norm_layer(norm, width, groups=groups)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = norm_layer(norm, width, groups=groups)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm3 = norm_layer(norm, outputs, groups=groups)
        self.shortcut = _shortcut(inputs, outputs, stride, norm, groups)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        return F.relu(y + self.shortcut(x))


def _shortcut(inputs: int, outputs: int, stride: int, norm: str, groups: int) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
    return named(conv=conv, norm=norm_layer(norm, outputs, groups=groups))


def _resnet(
    model: str,
    block: type[BasicBlock] | type[Bottleneck],
    blocks: tuple[int, ...],
    shape: Shape,
    outputs: int,
    norm: str,
    stem: str,
    groups: int,
    width: int = 64,
) -> nn.Sequential:
    channels = image_shape(model, shape)[0]
    size, stride = (3, 1) if stem == "cifar" else (7, 2)
    first = named(
        conv=nn.Conv2d(channels, width, size, stride, padding=size // 2, bias=False),
        norm=norm_layer(norm, width, groups=groups),
        relu=nn.ReLU(),
    )
    if stem == "imagenet":
        first.add_module("pool", nn.MaxPool2d(3, 2, padding=1))
    stages, inputs = [], width
    for i, count in enumerate(blocks):
        stage, filters = nn.Sequential(), width * 2**i
        for j in range(count):
            stride = 2 if i and not j else 1
            stage.add_module(f"block{j + 1}", block(inputs, filters, stride, norm, groups))
            inputs = filters * block.expansion
        stages.append(stage)
    stages[-1].add_module("mean", nn.AdaptiveAvgPool2d(1))
    stages[-1].add_module("flatten", nn.Flatten())
    net = stack(*stages, stem=first, head=head(inputs, outputs))
    if stem == "imagenet":
        fan_out_init(net)
    return net
