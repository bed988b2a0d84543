"""The attack inverts what can be inverted; closed forms for linear layers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from kedge.core import rng
from kedge.diagnostics.privacy.inversion import (
    SMOOTH,
    fit_decoder,
    invert,
    psnr,
    squared_error,
    total_variation,
)

SHAPE = (1, 4, 4)
DOUBLE = torch.float64


def rotation() -> Tensor:
    """An orthogonal map of the 16 pixels."""
    return torch.linalg.qr(rng.normal(rng.key(3), (16, 16), DOUBLE)).Q


def pictures(count: int, seed: int = 4) -> Tensor:
    return 0.1 + 0.8 * rng.uniform(rng.key(seed), (count, *SHAPE), DOUBLE)


def linear(u: Tensor) -> Tensor:
    return u.flatten(1) @ rotation()


def test_raw_features_of_a_linear_layer_give_the_input_back() -> None:
    x = pictures(5)
    decoder = fit_decoder(linear(pictures(40, 5)), pictures(40, 5), ridge=1e-12)
    done = invert(linear, linear(x), SHAPE, decoder=decoder, steps=100)
    assert float(squared_error(done.inputs, x).max()) < 1e-7
    assert float(done.mismatch.max()) < 1e-7


def test_the_mean_of_linear_features_gives_the_mean_input() -> None:
    """So its error to the samples is their variance, which is that of the best guess."""
    x = pictures(6)
    decoder = fit_decoder(linear(pictures(40, 5)), pictures(40, 5), ridge=1e-12)
    done = invert(linear, linear(x).mean(0, keepdim=True), SHAPE, decoder=decoder, steps=100)
    variance = (x - x.mean(0)).square().mean()
    errors = squared_error(done.inputs.expand_as(x), x)
    assert torch.allclose(errors.mean(), variance, rtol=1e-6)


def test_from_noise_the_optimum_of_a_linear_layer_by_hand() -> None:
    """With |h(u) - h|^2 / |h|^2 + SMOOTH TV(u), a quadratic in u, the minimum solves a system."""
    x = pictures(1)
    done = invert(linear, linear(x), SHAPE, steps=500)
    scale, basis = float(linear(x).square().sum()), torch.eye(16, dtype=DOUBLE)
    hessian = torch.autograd.functional.hessian(
        lambda v: total_variation(v.reshape(1, *SHAPE))[0], x.flatten()
    )
    best = torch.linalg.solve(2 * basis / scale + SMOOTH * hessian, 2 * x.flatten() / scale)
    assert bool(((best > 0) & (best < 1)).all())  # no pixel is cut off
    assert torch.allclose(done.inputs.flatten(), best, atol=1e-4)


def test_targets_do_not_depend_on_each_other() -> None:
    x = pictures(3)
    together = invert(linear, linear(x), SHAPE, steps=20).inputs
    alone = torch.cat(
        [invert(linear, linear(x[i : i + 1]), SHAPE, steps=20).inputs for i in range(3)]
    )
    assert torch.allclose(together, alone, atol=1e-12)


def test_the_decoder_is_ridge_regression() -> None:
    """The dual solution equals the primal one, with more samples than features and with fewer."""
    for count in (40, 9):
        x = pictures(count)
        h = linear(x)[:, :10]
        decoder = fit_decoder(h, x, ridge=0.1)
        a, b = h - h.mean(0), x.flatten(1) - x.flatten(1).mean(0)
        shift = 0.1 * float(a.square().sum()) / 10
        w = torch.linalg.solve(a.T @ a + shift * torch.eye(10, dtype=DOUBLE), a.T @ b)
        expected = ((h[:3] - h.mean(0)) @ w + x.flatten(1).mean(0)).clamp(0, 1)
        assert torch.allclose(decoder(h[:3]).flatten(1), expected)


def test_inputs_stay_between_black_and_white() -> None:
    done = invert(linear, 5 * linear(pictures(2)), SHAPE, steps=30)
    assert float(done.inputs.min()) >= 0
    assert float(done.inputs.max()) <= 1


def test_total_variation_by_hand() -> None:
    steps = torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]], [[[0.0, 0.5], [1.0, 0.5]]]])
    # rows differ by 1 twice; by 1/2 and -1/2; columns by 0 twice; by 1 and 0
    assert total_variation(steps).tolist() == [1.0, 0.25 + 0.5]
    assert total_variation(torch.rand(3, 7)).tolist() == [0.0, 0.0, 0.0]


def test_errors_by_hand() -> None:
    a, b = torch.zeros(2, 1, 1, 2), torch.tensor([[[[0.0, 1.0]]], [[[0.5, 0.5]]]])
    assert squared_error(a, b).tolist() == [0.5, 0.25]
    assert psnr(0.01) == 20.0
    assert math.isinf(psnr(0.0))


@pytest.mark.parametrize("known", [True, False])
def test_a_convolutional_network_is_inverted_from_raw_features_alone(known: bool) -> None:
    """The sanity check of the attack: it inverts single images and not the mean of eight."""
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(digits.target)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1)
        )

    def features(u: Tensor) -> Tensor:
        return net(u).relu().flatten(1)

    groups = torch.stack([x[y == c][:8] for c in range(10)])  # [10, 8, 1, 8, 8]
    others = torch.cat([x[y == c][8:40] for c in range(10)])
    with torch.no_grad():
        h = features(groups.flatten(0, 1)).reshape(10, 8, -1)
        decoder = fit_decoder(features(others), others) if known else None
    single = invert(features, h[:, 0], (1, 8, 8), decoder=decoder, steps=150)
    mean = invert(features, h.mean(1), (1, 8, 8), decoder=decoder, steps=150)
    raw = float(squared_error(single.inputs, groups[:, 0]).mean())
    blurred = float(squared_error(mean.inputs, groups[:, 0]).mean())
    guess = float(squared_error(others.reshape(10, 32, 1, 8, 8).mean(1), groups[:, 0]).mean())
    assert raw < 0.1 * guess
    assert blurred > 0.6 * guess
