"""The networks of papers: linear, convolutional and residual ones, and a transformer.

Of a convolutional network, each convolution with its pooling is a stage, and so is each fully
connected layer before the head; of a VGG network, a stage ends where a pool halves the map. Maps
are flattened at the start of the first fully connected stage.

VGG: Simonyan & Zisserman, Very Deep Convolutional Networks for Large-Scale Image Recognition, ICLR
2015. Residual networks: He et al., Deep Residual Learning for Image Recognition, CVPR 2016 (arXiv
1512.03385). The compact convolutional transformer: Hassani et al., Escaping the Big Data Paradigm
with Compact Transformers, 2021 (arXiv 2104.05704).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge.errors import ModelError
from kedge.schema import Count, Doc, Length, Option, Range

# -- Named layers, normalisation, dropout, and checks of input shapes ------------------------------


Shape = tuple[int, ...]

AnyNorm = Annotated[Literal["bn", "gn", "none"], Doc("BatchNorm, GroupNorm or none")]
Dropout = Annotated[bool, Doc("the dropout of the paper")]
Rate = Annotated[float, Range(0, 1, open_high=True)]


def named(**layers: nn.Module) -> nn.Sequential:
    """A sequential module with named layers."""
    return nn.Sequential(OrderedDict(layers))


def stack(*stages: nn.Module, head: nn.Linear, stem: nn.Module | None = None) -> nn.Sequential:
    """Chain a model: ``stem`` if any, ``stage1``, ``stage2``, ..., ``head``."""
    children = {} if stem is None else {"stem": stem}
    children |= {f"stage{i}": stage for i, stage in enumerate(stages, 1)}
    return named(**children, head=head)


def head(features: int, outputs: int) -> nn.Linear:
    """The last layer: a linear map from features to outputs."""
    if not is_int(outputs) or outputs < 1:
        raise ModelError(f"a model has one output or more, not {outputs!r}: give the classes")
    return nn.Linear(features, outputs)


def norm_layer(norm: str, channels: int, *, dims: int = 2, groups: int = 32) -> nn.Module:
    """BatchNorm (``bn``), GroupNorm (``gn``) or nothing (``none``) for maps of ``dims`` dimensions.

    GroupNorm has the largest number of groups that divides the channels, is at most ``groups``
    (32 as in Wu & He, Group Normalization, ECCV 2018) and leaves at least two channels per group:
    one channel per group would be InstanceNorm. Flat features (``dims=0``) form one group, since
    a small group would keep little more than the signs of its values.
    """
    Option("norm", AnyNorm).check(norm)
    if norm == "none":
        return nn.Identity()
    if norm == "bn":
        return nn.BatchNorm2d(channels) if dims == 2 else nn.BatchNorm1d(channels)
    max_groups = min(groups, channels // 2) if dims else 1
    return nn.GroupNorm(
        max((g for g in range(1, max_groups + 1) if channels % g == 0), default=1), channels
    )


def dropout_layer(p: float) -> nn.Module:
    """Dropout of single values; the identity for p = 0."""
    return nn.Dropout(p) if p else nn.Identity()


class SliceDropout(nn.Module):
    """Dropout of whole slices: ``x[i]`` (stochastic depth) for ``dims=1``, maps ``x[i, j]`` for 2.

    The mask is a :class:`torch.nn.Dropout` of ones, so that code which replaces that class to
    control randomness also controls this one.
    """

    def __init__(self, p: float, dims: int) -> None:
        super().__init__()
        self.dims, self.drop = dims, nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        index = (slice(None),) * self.dims + (slice(1),) * (x.dim() - self.dims)
        mask: Tensor = self.drop(torch.ones_like(x[index]))
        return x * mask


def fan_out_init(model: nn.Module) -> None:
    """He initialisation of convolutions by fan-out, with zero biases, as in torchvision."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def image_shape(model: str, shape: Shape, min_size: int = 1) -> Shape:
    """Check an image shape ``(C, H, W)``; raise a ModelError if a side is below ``min_size``."""
    what = "images (channels, height, width)"
    what += f" of at least {min_size}x{min_size}" if min_size > 1 else ""
    return _check_shape(model, shape, what, (1, min_size, min_size))


def series_shape(model: str, shape: Shape, min_size: int = 1) -> Shape:
    """Check a series shape ``(C, L)``; raise a ModelError if it is shorter than ``min_size``."""
    what = f"series (channels, length) of length {min_size} or more"
    return _check_shape(model, shape, what, (1, min_size))


def flat_size(model: str, shape: Shape) -> int:
    """The number of values of an input of any shape; raise a ModelError if a size is below 1."""
    return math.prod(_check_shape(model, shape, "inputs of any shape with sizes above 0", None))


def _check_shape(model: str, shape: Shape, what: str, min_sizes: Shape | None) -> Shape:
    sizes = (1,) * len(shape) if min_sizes is None else min_sizes
    is_valid = len(shape) == len(sizes) > 0 and all(map(is_int, shape))
    if not is_valid or any(size < low for size, low in zip(shape, sizes, strict=True)):
        other = "" if min_sizes is None else " Choose another model: mlp and linear take any shape."
        raise ModelError(f"{model} takes {what}, not inputs of shape {tuple(shape)}.{other}")
    return tuple(shape)


def is_int(value: Any) -> bool:
    """Whether a value is an integer and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


# -- Logistic regression, the multilayer perceptron, and plain convolutional networks --------------


def linear(shape: Shape, outputs: int) -> nn.Sequential:
    """Logistic regression: the flattened input and a head, F·C + C parameters for F inputs.

    The convex model of federated benchmarks (McMahan et al., AISTATS 2017 and after); 7 850
    parameters for (1, 28, 28) and ten classes. Its features are the inputs.
    """
    return named(flatten=nn.Flatten(), head=head(flat_size("linear", shape), outputs))


def mlp(
    shape: Shape,
    outputs: int,
    *,
    hidden: Annotated[Count | tuple[Count, ...], Doc("sizes of the layers"), Length(1)] = (64,),
    norm: AnyNorm = "none",
) -> nn.Sequential:
    """Fully connected layers with ReLU; each of the ``hidden`` sizes is a stage.

    ``mlp(hidden=[200, 200])`` is the 2NN of FedAvg (McMahan et al., AISTATS 2017): 199 210
    parameters for (1, 28, 28) and ten classes; 50 890 with the default ``hidden=[64]``. A norm
    goes between layer and ReLU; GroupNorm has one group.
    """
    sizes = hidden if isinstance(hidden, tuple) else (hidden,)
    inputs = flat_size("mlp", shape)
    stages = []
    for i, size in enumerate(sizes):
        layer = named(
            fc=nn.Linear(inputs, size), norm=norm_layer(norm, size, dims=0), relu=nn.ReLU()
        )
        stages.append(layer if i else named(flatten=nn.Flatten(), **dict(layer.named_children())))
        inputs = size
    return stack(*stages, head=head(inputs, outputs))


def lenet5(shape: Shape, outputs: int, *, norm: AnyNorm = "bn") -> nn.Sequential:
    """LeNet-5 with ReLU, max-pooling and a norm after each convolution.

    44 555 parameters for (1, 28, 28) and 11 classes: FedTR's net for OrganMNIST (Chen et al.,
    Making Local Models Learn Autonomously). After LeCun et al., Gradient-Based Learning Applied
    to Document Recognition, Proc. IEEE 1998, with the BatchNorm that PersonalizedFL gives it.
    GroupNorm has 3 and 8 groups.
    """
    return _lenet("lenet5", shape, outputs, norm, convs=(6, 16), hidden=(120, 84))


def fedcog_cnn(shape: Shape, outputs: int, *, norm: AnyNorm = "none") -> nn.Sequential:
    """The simple CNN of MOON and FedCOG: 5x5 convolutions 6 and 16, layers 120 and 84.

    62 006 parameters for (3, 32, 32) and 44 426 for (1, 28, 28), ten classes. Li et al.,
    Model-Contrastive Federated Learning, CVPR 2021 (arXiv 2103.16257); Ye et al., Fake It Till
    Make It: Federated Learning with Consensus-Oriented Generation. *Deviation*: pools after both
    convolutions, as the authors' code does; the text of FedCOG names one pool.
    """
    return _lenet("fedcog_cnn", shape, outputs, norm, convs=(6, 16), hidden=(120, 84))


def feddc_lenet(shape: Shape, outputs: int, *, norm: AnyNorm = "none") -> nn.Sequential:
    """The wide LeNet of FedDC and FedDyn: 5x5 convolutions 64 and 64, layers 384 and 192.

    797 962 parameters for (3, 32, 32) and ten classes. Gao et al., FedDC, CVPR 2022 (arXiv
    2203.11751); probably the CIFAR-10 net of FedTR, which does not describe its own.
    """
    return _lenet("feddc_lenet", shape, outputs, norm, convs=(64, 64), hidden=(384, 192))


def fedcog_cnn100(shape: Shape, outputs: int, *, norm: AnyNorm = "none") -> nn.Sequential:
    """FedCOG's CNN for CIFAR-100: 3x3 convolutions 16, 32 and 64, a layer of 128.

    69 380 parameters for (3, 32, 32) and 100 classes, the number the paper quotes. Ye et al.,
    Fake It Till Make It: Federated Learning with Consensus-Oriented Generation. *Deviation*: pools
    after all three convolutions, as the authors' code does; the text names two pools.
    """
    channels, height, width = image_shape("fedcog_cnn100", shape, 22)
    stages: list[nn.Module] = []
    for filters in (16, 32, 64):
        stages.append(_conv(channels, filters, 3, norm))
        channels, height, width = filters, (height - 2) // 2, (width - 2) // 2
    return stack(*stages, _flat(channels * height * width, 128), head=head(128, outputs))


def mnist_cnn(shape: Shape, outputs: int, *, norm: AnyNorm = "gn") -> nn.Sequential:
    """DomainBed's four-convolution MNIST net, with the norm after ReLU and a global mean.

    FedBR's net for RotatedMNIST: 371 850 parameters for (1, 28, 28) and ten classes, 128
    features. GroupNorm has 8 groups. Gulrajani & Lopez-Paz, In Search of Lost Domain
    Generalization, ICLR 2021 (arXiv 2007.01434); Guo et al., FedBR, ICML 2023.
    """
    channels = image_shape("mnist_cnn", shape)[0]
    stages = []
    for filters, stride in ((64, 1), (128, 2), (128, 1), (128, 1)):
        conv = nn.Conv2d(channels, filters, 3, stride, padding=1)
        stages.append(named(conv=conv, relu=nn.ReLU(), norm=norm_layer(norm, filters, groups=8)))
        channels = filters
    stages[-1].add_module("pool", nn.AdaptiveAvgPool2d(1))
    stages[-1].add_module("flatten", nn.Flatten())
    return stack(*stages, head=head(channels, outputs))


def pfl_cnn(
    shape: Shape, outputs: int, *, norm: AnyNorm = "none", dropout: Dropout = True
) -> nn.Sequential:
    """The CIFAR-10 benchmark net of pfl: 3x3 convolutions 32 and 64, a layer of 128, dropout.

    1 626 442 parameters for (3, 32, 32) and ten classes, with Glorot uniform initialisation.
    Granqvist et al., pfl-research, NeurIPS 2024 (arXiv 2404.06430).
    ``dropout=false`` leaves out the dropout of 1/4 after the pool and 1/2 before the head.
    """
    channels, height, width = image_shape("pfl_cnn", shape, 6)
    first = _conv(channels, 32, 3, norm, pool=False)
    second = _conv(32, 64, 3, norm)
    third = _flat(64 * ((height - 4) // 2) * ((width - 4) // 2), 128)
    if dropout:
        second.add_module("drop", nn.Dropout(0.25))
        third.add_module("drop", nn.Dropout(0.5))
    model = stack(first, second, third, head=head(128, outputs))
    for layer in model.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.xavier_uniform_(layer.weight)
    return model


def pamap2_cnn(shape: Shape, outputs: int, *, norm: AnyNorm = "bn") -> nn.Sequential:
    """PAMAP2-Net for windows of sensor series: two convolutions of width 9, a layer of 64.

    99 466 parameters for the (27, 200) windows and ten classes of PersonalizedFL (Lu et al.,
    arXiv 2112.00734), used by FedTR. GroupNorm has 8 and 16 groups.
    """
    channels, length = series_shape("pamap2_cnn", shape, 28)
    stages: list[nn.Module] = []
    for filters in (16, 32):
        conv, pool = nn.Conv1d(channels, filters, 9), nn.MaxPool1d(2)
        scale = norm_layer(norm, filters, dims=1)
        stages.append(named(conv=conv, norm=scale, relu=nn.ReLU(), pool=pool))
        channels, length = filters, (length - 8) // 2
    return stack(*stages, _flat(channels * length, 64), head=head(64, outputs))


def vgg9(
    shape: Shape, outputs: int, *, norm: AnyNorm = "none", dropout: Dropout = True
) -> nn.Sequential:
    """VGG-9, the "moderate CNN": convolutions 32-64, 128-128, 256-256 and two layers of 512.

    3 491 530 parameters for (3, 32, 32) and ten classes. FedImpro's Table 9 (Tang et al., ICLR
    2024); its cut, the end of the convolutions, is ``stage3``. ``dropout=false`` leaves out the
    dropout: 1/20 of the maps after stage 2, 1/10 around the fully connected layers.
    """
    channels, height, width = image_shape("vgg9", shape, 8)
    convs = []
    for filters in ((32, 64), (128, 128), (256, 256)):
        convs.append(_vgg_stage(channels, filters, norm))
        channels = filters[-1]
    inputs = channels * (height // 8) * (width // 8)
    drop = nn.Dropout(0.1) if dropout else nn.Identity()
    first = named(flatten=nn.Flatten(), drop=drop, fc=nn.Linear(inputs, 512), relu=nn.ReLU())
    second = named(fc=nn.Linear(512, 512), relu=nn.ReLU())
    if dropout:
        convs[1].add_module("drop", SliceDropout(0.05, dims=2))
        second.add_module("drop", nn.Dropout(0.1))
    return stack(*convs, first, second, head=head(512, outputs))


def vgg11(shape: Shape, outputs: int, *, norm: AnyNorm = "none") -> nn.Sequential:
    """The convolutions of VGG-11, a global mean and a head; 512 features.

    9 225 610 parameters for 3 channels and ten classes. FedBR's net for CIFAR-10 and PACS (Guo et
    al., ICML 2023), initialised as in torchvision: with PyTorch's default initialisation and no
    norm, the signal vanishes. Also in FLBoost's Table 6.
    """
    channels = image_shape("vgg11", shape, 32)[0]
    stages = []
    for filters in ((64,), (128,), (256, 256), (512, 512), (512, 512)):
        stages.append(_vgg_stage(channels, filters, norm))
        channels = filters[-1]
    stages[-1].add_module("mean", nn.AdaptiveAvgPool2d(1))
    stages[-1].add_module("flatten", nn.Flatten())
    model = stack(*stages, head=head(channels, outputs))
    fan_out_init(model)
    return model


def _lenet(
    model: str,
    shape: Shape,
    outputs: int,
    norm: str,
    convs: tuple[int, int],
    hidden: tuple[int, int],
) -> nn.Sequential:
    channels, height, width = image_shape(model, shape, 16)
    height, width = (((side - 4) // 2 - 4) // 2 for side in (height, width))
    return stack(
        _conv(channels, convs[0], 5, norm),
        _conv(convs[0], convs[1], 5, norm),
        _flat(convs[1] * height * width, hidden[0]),
        named(fc=nn.Linear(*hidden), relu=nn.ReLU()),
        head=head(hidden[1], outputs),
    )


def _conv(channels: int, filters: int, kernel: int, norm: str, pool: bool = True) -> nn.Sequential:
    """A convolution without padding, norm, ReLU and a 2x2 max-pool."""
    layers = {"conv": nn.Conv2d(channels, filters, kernel), "norm": norm_layer(norm, filters)}
    layers |= {"relu": nn.ReLU(), "pool": nn.MaxPool2d(2)} if pool else {"relu": nn.ReLU()}
    return named(**layers)


def _flat(inputs: int, size: int) -> nn.Sequential:
    """Flatten, a fully connected layer and ReLU."""
    return named(flatten=nn.Flatten(), fc=nn.Linear(inputs, size), relu=nn.ReLU())


def _vgg_stage(channels: int, filters: tuple[int, ...], norm: str) -> nn.Sequential:
    """3x3 convolutions with padding, each with norm and ReLU, then a max-pool."""
    stage = nn.Sequential()
    for i, size in enumerate(filters, 1):
        stage.add_module(f"conv{i}", nn.Conv2d(channels, size, 3, padding=1))
        stage.add_module(f"norm{i}", norm_layer(norm, size))
        stage.add_module(f"relu{i}", nn.ReLU())
        channels = size
    stage.add_module("pool", nn.MaxPool2d(2))
    return stage


# -- Residual networks: a stem, four stages of residual blocks (the last ends in a mean), a head ---


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


# -- The compact convolutional transformer ---------------------------------------------------------


def cct7(
    shape: Shape,
    outputs: int,
    *,
    dropout: Annotated[Rate, Doc("share of dropped values after tokens and layers")] = 0.0,
    attention_dropout: Annotated[Rate, Doc("share of dropped attention weights")] = 0.0,
    stochastic_depth: Annotated[Rate, Doc("how often the last layer is skipped")] = 0.0,
) -> nn.Sequential:
    """CCT-7/3x1: width 256, 4 heads, 7 layers, each a stage; 256 features.

    3 783 269 parameters for (3, 32, 32) and 100 classes, FedBR's net for CIFAR-100 (Guo et al.,
    ICML 2023); 3 760 139 for ten. Initial weights as the authors of CCT draw them.
    *Deviation*: no dropout by default; CCT's authors train with
    ``cct7(attention_dropout=0.1, stochastic_depth=0.1)``.
    """
    channels, height, width = image_shape("cct7", shape)
    dim, depth = 256, 7
    stages: list[nn.Module] = []
    for i in range(depth):
        skip = stochastic_depth * i / (depth - 1)  # grows linearly with depth
        stages.append(Encoder(dim, 4, 2 * dim, dropout, attention_dropout, skip))
    stages[-1] = named(encoder=stages[-1], norm=nn.LayerNorm(dim), pool=SequencePool(dim))
    tokens = Tokens(channels, dim, ((height + 1) // 2) * ((width + 1) // 2), dropout)
    model = stack(*stages, stem=tokens, head=head(dim, outputs))
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return model


class Tokens(nn.Module):
    """Convolution, ReLU and pool. Each position of the map is a token with a learned embedding."""

    def __init__(self, channels: int, dim: int, length: int, dropout: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, dim, 3, padding=1, bias=False)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        self.position = nn.Parameter(torch.empty(length, dim))
        self.drop = dropout_layer(dropout)
        nn.init.kaiming_normal_(self.conv.weight)
        nn.init.trunc_normal_(self.position, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv(x))).flatten(2).transpose(1, 2)  # [B, T, D]
        x = self.drop(x + self.position)
        return x


class SelfAttention(nn.Module):
    """Multi-head self-attention, in plain matrix products so that it works under ``vmap``."""

    def __init__(self, dim: int, heads: int, dropout: float, attention_dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.attention_drop = dropout_layer(attention_dropout)
        self.project = nn.Linear(dim, dim)
        self.drop = dropout_layer(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        weights = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)  # [B, H, T, T]
        x = (self.attention_drop(weights) @ v).transpose(1, 2).flatten(2)  # [B, T, D]
        x = self.drop(self.project(x))
        return x


class Encoder(nn.Module):
    """Attention and a two-layer perceptron; the second residual starts from the norm's output."""

    def __init__(
        self,
        dim: int,
        heads: int,
        hidden: int,
        dropout: float,
        attention_dropout: float,
        skip: float,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = SelfAttention(dim, heads, dropout, attention_dropout)
        self.skip1 = SliceDropout(skip, dims=1) if skip else nn.Identity()
        self.norm2 = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, hidden)
        self.drop1 = dropout_layer(dropout)
        self.fc2 = nn.Linear(hidden, dim)
        self.drop2 = dropout_layer(dropout)
        self.skip2 = SliceDropout(skip, dims=1) if skip else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm2(x + self.skip1(self.attention(self.norm1(x))))
        y: Tensor = self.fc2(self.drop1(F.gelu(self.fc1(x))))
        y = self.skip2(self.drop2(y))
        return x + y


class SequencePool(nn.Module):
    """A weighted mean over the tokens with learned weights: ``[B, T, D]`` to ``[B, D]``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weigh = nn.Linear(dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights: Tensor = self.weigh(x).softmax(1)  # [B, T, 1]
        return (weights * x).sum(1)
