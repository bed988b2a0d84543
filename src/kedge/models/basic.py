"""Logistic regression, the multilayer perceptron, and the plain convolutional networks of papers.

Of a convolutional network, each convolution with its pooling is a stage, and so is each fully
connected layer before the head; of a VGG network, a stage ends where a pool halves the map. Maps
are flattened at the start of the first fully connected stage.

VGG: Simonyan & Zisserman, Very Deep Convolutional Networks for Large-Scale Image Recognition, ICLR
2015.
"""

from __future__ import annotations

from typing import Annotated

from torch import nn

from kedge.models.layers import (
    Dropout,
    Norm,
    Shape,
    SliceDropout,
    fan_out_init,
    flat_size,
    head,
    image_shape,
    named,
    norm_layer,
    series_shape,
    stack,
)
from kedge.schema import Count, Doc, Length


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
    norm: Norm = "none",
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


def lenet5(shape: Shape, outputs: int, *, norm: Norm = "bn") -> nn.Sequential:
    """LeNet-5 with ReLU, max-pooling and a norm after each convolution.

    44 555 parameters for (1, 28, 28) and 11 classes: FedTR's net for OrganMNIST (Chen et al.,
    Making Local Models Learn Autonomously). After LeCun et al., Gradient-Based Learning Applied
    to Document Recognition, Proc. IEEE 1998, with the BatchNorm that PersonalizedFL gives it.
    GroupNorm has 3 and 8 groups.
    """
    return _lenet("lenet5", shape, outputs, norm, convs=(6, 16), hidden=(120, 84))


def fedcog_cnn(shape: Shape, outputs: int, *, norm: Norm = "none") -> nn.Sequential:
    """The simple CNN of MOON and FedCOG: 5x5 convolutions 6 and 16, layers 120 and 84.

    62 006 parameters for (3, 32, 32) and 44 426 for (1, 28, 28), ten classes. Li et al.,
    Model-Contrastive Federated Learning, CVPR 2021 (arXiv 2103.16257); Ye et al., Fake It Till
    Make It: Federated Learning with Consensus-Oriented Generation. *Deviation*: pools after both
    convolutions, as the authors' code does; the text of FedCOG names one pool.
    """
    return _lenet("fedcog_cnn", shape, outputs, norm, convs=(6, 16), hidden=(120, 84))


def feddc_lenet(shape: Shape, outputs: int, *, norm: Norm = "none") -> nn.Sequential:
    """The wide LeNet of FedDC and FedDyn: 5x5 convolutions 64 and 64, layers 384 and 192.

    797 962 parameters for (3, 32, 32) and ten classes. Gao et al., FedDC, CVPR 2022 (arXiv
    2203.11751); probably the CIFAR-10 net of FedTR, which does not describe its own.
    """
    return _lenet("feddc_lenet", shape, outputs, norm, convs=(64, 64), hidden=(384, 192))


def fedcog_cnn100(shape: Shape, outputs: int, *, norm: Norm = "none") -> nn.Sequential:
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


def mnist_cnn(shape: Shape, outputs: int, *, norm: Norm = "gn") -> nn.Sequential:
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
    shape: Shape, outputs: int, *, norm: Norm = "none", dropout: Dropout = True
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


def pamap2_cnn(shape: Shape, outputs: int, *, norm: Norm = "bn") -> nn.Sequential:
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


def vgg11(shape: Shape, outputs: int, *, norm: Norm = "none") -> nn.Sequential:
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
