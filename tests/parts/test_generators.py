"""The generators of data-free methods."""

import re

import pytest
import torch
from torch import nn

from kedge.check.problems import DOUBLE
from kedge.core import rng, tree
from kedge.core.tree import Weights
from kedge.errors import ModelError
from kedge.parts.generators import Generator, feature_generator, image_generator


def made(net: Generator, noise: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    weights = net.init(rng.key(0), dtype, torch.device("cpu"))
    z, y = rng.normal(rng.key(1), (12, noise), dtype), torch.arange(12) % net.classes
    x, buffers = net(weights, z, y, train=True)
    again, same = net(Weights(weights.params, buffers), z, y, train=False)
    assert again.shape == x.shape
    assert tree.equal(same, buffers)  # evaluation leaves the statistics alone
    assert not tree.equal(buffers, weights.buffers)
    return x


@pytest.mark.parametrize(
    ("shape", "first"),
    [
        ((1, 28, 28), (7, 7)),
        ((3, 32, 32), (8, 8)),
        ((3, 64, 64), (16, 16)),
        ((3, 112, 112), (7, 7)),
        ((4, 128, 96), (8, 6)),
        ((1, 30, 45), (8, 12)),
        ((2, 65, 70), (9, 9)),
        ((1, 3, 1), (1, 1)),
    ],
)
def test_images_of_any_size(shape: tuple[int, ...], first: tuple[int, int]) -> None:
    net = image_generator(shape, 5, noise=6, width=4)
    x = made(net, 6)
    assert x.shape == (12, *shape)
    assert torch.allclose(x.mean((0, 2, 3)), torch.zeros(shape[0]), atol=1e-4)
    assert torch.allclose(x.var((0, 2, 3), correction=0), torch.ones(shape[0]), atol=0.05)
    embed = net.init(rng.key(0), torch.float32, torch.device("cpu")).params["embed.z.weight"]
    assert len(embed) == 2 * first[0] * first[1]


def test_without_the_last_norm_images_lie_between_minus_one_and_one() -> None:
    x = made(image_generator((3, 16, 16), 5, 6, 4, final_norm=False), 6)
    assert float(x.abs().max()) < 1


def test_sizes_of_the_papers_generators() -> None:
    def count(net: Generator) -> int:
        return tree.numel(net.init(rng.key(0), torch.float32, torch.device("cpu")).params)

    # 100-4096, 10-4096, BN 128, conv 128-128, BN 128, conv 128-64, BN 64, conv 64-3
    image = 101 * 4096 + 11 * 4096 + 256 + 9 * 128**2 + 256 + 9 * 128 * 64 + 128 + 9 * 64 * 3 + 3
    assert count(image_generator((3, 32, 32), 10)) == image == 682_307
    # at a sixteenth of the width: 100-256, 10-256, BN 512 (fixed), 512-512, BN 512, 512-512
    feature = 110 * 256 + 512**2 + 1024 + 513 * 512
    assert count(feature_generator((512,), 10, width=8)) == feature


def test_features_have_the_shape_that_goes_into_the_head() -> None:
    assert made(feature_generator((6,), 3, noise=4, width=2), 4).shape == (12, 6)


def test_builders_are_cached_and_the_first_weights_come_from_the_key() -> None:
    net = image_generator((1, 8, 8), 3, 4, 4)
    assert image_generator((1, 8, 8), 3, 4, 4) is net
    a, b, c = (net.init(rng.key(s), DOUBLE, torch.device("cpu")) for s in (1, 1, 2))
    assert tree.equal(a, b)
    assert tree.gap(a, c) > 0.1
    low = net.init(rng.key(1), torch.float32, torch.device("cpu"))
    assert tree.gap(a.params, low.params) < 1e-7  # the same draws in every precision
    bound = 4**-0.5
    assert float(a.params["embed.z.weight"].abs().max()) <= bound
    assert float(a.params["embed.z.bias"].abs().max()) <= bound
    assert float(a.params["conv.weight"].abs().max()) <= (9 * 2) ** -0.5
    # leaves of one shape are drawn apart: 4 inputs of z and 3 of y, by which the bound differs
    scaled = a.params["embed.z.bias"] / bound, a.params["embed.y.bias"] / 3**-0.5
    assert scaled[0].shape == scaled[1].shape
    assert float((scaled[0] - scaled[1]).abs().min()) > 1e-3


def test_first_statistics_are_those_of_batchnorm() -> None:
    """Mean 0, variance 1, no batch yet; a torch module of the same kind says so, too."""
    first = image_generator((1, 8, 8), 3, 4, 4).init(rng.key(0), DOUBLE, torch.device("cpu"))
    norm = nn.BatchNorm2d(4).to(DOUBLE)
    for leaf, expected in norm.named_buffers():
        assert torch.equal(first.buffers[f"norm.{leaf}"], expected)
        assert first.buffers[f"norm.{leaf}"].dtype == expected.dtype
    for leaf, weight in norm.named_parameters():
        assert torch.equal(first.params[f"norm.{leaf}"], weight.detach())


def test_noise_and_label_both_matter() -> None:
    net = image_generator((1, 8, 8), 3, 4, 4)
    weights = net.init(rng.key(0), DOUBLE, torch.device("cpu"))
    z, y = rng.normal(rng.key(1), (6, 4), DOUBLE), torch.arange(6) % 3
    x = net(weights, z, y, False)[0]
    assert tree.gap(x, net(weights, z, (y + 1) % 3, False)[0]) > 1e-3
    assert tree.gap(x, net(weights, -z, y, False)[0]) > 1e-3


@pytest.mark.parametrize("shape", [(0, 8, 8), (3, 8, 0), (8, 8), (1, 1, 8, 8)])
def test_images_have_channels_height_and_width(shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match=re.escape(f"(channels, height, width), not {shape}; ")):
        image_generator(shape, 3)
