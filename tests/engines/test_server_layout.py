"""Models in the server's steps on a GPU, here on a CPU: the same passes in another layout."""

import pytest
import torch
from torch import Tensor, nn

from kedge.core import rng, tree
from kedge.core.model import Model
from kedge.core.tree import Weights
from kedge.engines import convolutions
from kedge.engines.layout import CHANNELS, ServerLayout, UpsampledConv2d, as_read
from kedge.parts.generators import Generator, image_generator

BATCH, COUNT = 4, 3


def network() -> nn.Module:
    """Its last maps have one pixel."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 5, 3, padding=1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(5, 4),
        )


def prepared(precision: str) -> Model:
    return Model(network(), precision=precision).prepared(ServerLayout(stacked=True))


def one(model: Model, dtype: torch.dtype) -> Weights:
    noise = rng.split(rng.key(1), 40)
    weights = tree.map(lambda x: x.to(dtype) if x.is_floating_point() else x, model.weights())
    params = {
        n: w + 0.1 * rng.normal(noise[i], tuple(w.shape), dtype)
        for i, (n, w) in enumerate(weights.params.items())
    }
    return weights._replace(params=params)


def several(model: Model, dtype: torch.dtype) -> Weights:
    weights = one(model, dtype)
    return tree.stack([tree.map(lambda x, i=i: x + i * 0.1 * x, weights) for i in range(COUNT)])


def inputs(dtype: torch.dtype) -> Tensor:
    return rng.normal(rng.key(2), (BATCH, 3, 4, 4), dtype)


def logits_and_gradient(model: Model, weights: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    """Of one model or a stack of them, with the gradient of a function of the logits by x."""
    x = x.clone().requires_grad_()

    def logits(weights: Weights) -> Tensor:
        return model.forward(weights, x, "eval").logits

    is_stack = next(tree.leaves(weights)).ndim > 4
    y = torch.func.vmap(logits)(weights) if is_stack else logits(weights)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    return y.detach(), gradient


@pytest.mark.parametrize("make", [one, several])
def test_the_layout_changes_no_result(make) -> None:
    plain, model = Model(network()), prepared("fp32")
    weights, x = make(plain, torch.float64), inputs(torch.float64)
    expected = logits_and_gradient(plain, weights, x)
    found = logits_and_gradient(model, as_read(model, weights), x)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [one, several])
def test_converted_weights_give_the_same_bits(make) -> None:
    model = prepared("bf16")
    weights, x = make(model, torch.float32), inputs(torch.float32)
    read = as_read(model, weights)
    expected = logits_and_gradient(model, weights, x)
    found = logits_and_gradient(model, read, x)
    assert found[0].dtype == found[1].dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    dtypes = {n: w.dtype for n, w in read.params.items()}
    assert dtypes["0.weight"] == dtypes["8.weight"] == torch.bfloat16
    assert dtypes["1.weight"] == dtypes["3.bias"] == torch.float32  # as passes compute with them


def test_the_kernels_read_converted_filters_where_they_are() -> None:
    model = prepared("bf16")
    weights = several(model, torch.float32)
    for steps in (weights, tree.map(lambda x: x[None].expand(2, *x.shape), weights)):
        filters = as_read(model, steps).params["3.weight"]
        filters = filters if filters.ndim == 5 else filters[1]
        read = convolutions._permute_weights(filters, torch.bfloat16, (0, 3, 4, 1, 2))
        assert read.data_ptr() == filters.data_ptr()
        assert torch.equal(read.permute(0, 3, 4, 1, 2), weights.params["3.weight"].bfloat16())


# -- generators ----------------------------------------------------------------------------------


def samples_and_gradient(net: Generator, dtype: torch.dtype) -> tuple[Tensor, tree.Tree]:
    weights = net.init(rng.key(3), dtype, torch.device("cpu"))
    z, y = rng.normal(rng.key(4), (6, 3), dtype), torch.arange(6) % 4
    leaves = {n: w.requires_grad_() for n, w in weights.params.items()}
    x, buffers = net(Weights(leaves, weights.buffers), z, y, train=True)
    target = rng.normal(rng.key(5), tuple(x.shape), dtype)
    grads = torch.autograd.grad((x - target).square().sum(), list(leaves.values()))
    return x.detach(), {"grads": dict(zip(leaves, grads, strict=True)), "buffers": buffers}


def generators(precision: str) -> tuple[Generator, Generator]:
    """As it is written, and in the server's layout."""
    plain = image_generator((3, 8, 8), 4, 3, 16).prepared(lambda m: m.at_precision(precision))
    return plain, plain.prepared(lambda m: m.prepared(ServerLayout(stacked=True, whole=True)))


def test_a_generator_is_the_same_in_the_layout() -> None:
    expected, found = (samples_and_gradient(net, torch.float64) for net in generators("fp32"))
    kinds = [type(layer) for layer in generators("fp32")[1]._model._nets["train"].module.modules()]
    assert kinds.count(UpsampledConv2d) == 2
    assert nn.Upsample not in kinds
    assert torch.allclose(found[0], expected[0], rtol=0, atol=1e-12)
    assert tree.gap(found[1], expected[1]) < 1e-12


def test_only_upsampling_by_two_before_a_3x3_convolution_is_joined() -> None:
    net = nn.Sequential(
        nn.Sequential(nn.Upsample(scale_factor=3), nn.Conv2d(2, 2, 3, padding=1)),
        nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(2, 2, 3, padding=1)),
        nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(2, 2, 3)),
        nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(2, 2, 3, padding=1, stride=2)),
        nn.Sequential(nn.Upsample(scale_factor=2), nn.ReLU(), nn.Conv2d(2, 2, 3, padding=1)),
    )
    ServerLayout(whole=True).replace_layers(net)
    assert not any(isinstance(layer, UpsampledConv2d) for layer in net.modules())
    joined = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(2, 3, 3, padding=1)).double()
    x = rng.normal(rng.key(1), (2, 2, 3, 5), torch.float64)
    expected = joined(x)
    ServerLayout().replace_layers(joined)
    assert type(joined[0]) is nn.Upsample  # a cut may be there
    ServerLayout(whole=True).replace_layers(joined)
    assert type(joined[1]) is UpsampledConv2d
    assert torch.allclose(joined(x), expected, rtol=0, atol=1e-12)


def test_few_channels_in_16_bits() -> None:
    """Filters of zeros are added to three, and their results left out."""
    exact = samples_and_gradient(generators("fp32")[0], torch.float32)
    plain, found = (samples_and_gradient(net, torch.float32) for net in generators("bf16"))
    assert found[0].shape == exact[0].shape
    error, usual = ((x[0] - exact[0]).abs().mean() for x in (found, plain))
    assert 0 < error < 1.5 * usual < 0.1
    weight = [x[1]["grads"]["conv.weight"] for x in (found, plain, exact)]
    assert weight[0].shape == (3, 8, 3, 3)
    error, usual = ((w - weight[2]).abs().mean() for w in weight[:2])
    assert error < 2 * usual < 0.2 * weight[2].abs().mean()


def test_filters_are_padded_only_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []
    conv = torch.nn.functional.conv2d

    def watched(x: Tensor, w: Tensor, *rest) -> Tensor:
        widths.append(len(w))
        return conv(x, w, *rest)

    monkeypatch.setattr(torch.nn.functional, "conv2d", watched)
    for precision, last in (("fp32", 3), ("bf16", CHANNELS)):
        widths.clear()
        samples_and_gradient(generators(precision)[1], torch.float32)
        assert widths[-1] == last
