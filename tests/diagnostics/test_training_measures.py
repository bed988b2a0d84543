"""Measures of training equal values worked out by hand, or closed forms."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from kedge.core.model import Model
from kedge.diagnostics.training.predictions import (
    accuracy,
    change,
    class_cosine,
    classifier_bias,
    confusion,
    forgetting,
    linear_cka,
    pair_cosine,
    per_class_accuracy,
    personal_accuracy,
    predicted_on_lacking,
    prediction_skew,
)
from kedge.diagnostics.training.weights import (
    Variance,
    by_layer,
    cancelled,
    cosines,
    gradient_variance,
    leaves_above,
    mean_cosine,
    shared_factor,
    weight_divergence,
)

T = torch.tensor


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- weights ----------------------------------------------------------------------------------


def test_divergence_by_layer_by_hand() -> None:
    """Distances 5 and 0 in layer a (weights and bias together), 1 and 1 in b."""
    ends = [
        {"a.weight": T([3.0]), "a.bias": T([4.0]), "b.weight": T([11.0])},
        {"a.weight": T([0.0]), "a.bias": T([0.0]), "b.weight": T([9.0])},
    ]
    mean = {"a.weight": T([0.0]), "a.bias": T([0.0]), "b.weight": T([10.0])}
    a, b = by_layer(ends, mean, list(mean))
    assert (a.name, a.parameters, a.divergence, a.size) == ("a", 2, 2.5, 0.0)
    assert (b.name, b.parameters, b.divergence, b.relative) == ("b", 1, 1.0, 0.1)
    assert a.relative == math.inf  # weights of 0
    assert weight_divergence(ends, mean) == pytest.approx((26**0.5 + 1) / 2)


def test_cosines_of_updates() -> None:
    deltas = [{"w": T([1.0, 0.0])}, {"w": T([0.0, 2.0])}, {"w": T([-3.0, 0.0])}]
    expected = T([[1.0, 0.0, -1.0], [0.0, 1.0, 0.0], [-1.0, 0.0, 1.0]]).double()
    assert torch.equal(cosines(deltas), expected)
    assert mean_cosine(expected) == pytest.approx(-1 / 3)
    assert math.isnan(mean_cosine(expected[:1, :1]))
    assert float(cosines([{"w": T([0.0])}, {"w": T([1.0])}])[0].abs().sum()) == 0.0  # no update


def test_cancelled_movement() -> None:
    """0 for equal updates, 1 - 1/K for orthogonal ones, 1 for opposite ones."""
    same = [{"w": T([2.0, 0.0])}] * 3
    orthogonal = [{"w": row} for row in torch.eye(4)]
    opposite = [{"w": T([1.0])}, {"w": T([-1.0])}]
    assert cancelled(same, torch.full((3,), 1 / 3).double()) == pytest.approx(0.0)
    assert cancelled(orthogonal, torch.full((4,), 0.25)) == pytest.approx(0.75)
    assert cancelled(opposite, T([0.5, 0.5])) == 1.0
    assert cancelled(opposite, T([0.75, 0.25])) == pytest.approx(1 - 0.25)  # mean 1/2


# -- gradients --------------------------------------------------------------------------------


def test_gradient_variance_by_hand() -> None:
    """Clients (1, 0) and (-1, 4) with weights 3/4 and 1/4: means 1/2 and 1."""
    gradients = [{"low": T([1.0]), "high": T([0.0])}, {"low": T([-1.0]), "high": T([4.0])}]
    found = gradient_variance(gradients, T([0.75, 0.25]), {"high"})
    assert found.low == pytest.approx(0.75 * 0.25 + 0.25 * 2.25)
    assert found.high == pytest.approx(0.75 * 1 + 0.25 * 9)
    assert found.squared_mean == pytest.approx(0.25 + 1)
    assert found.with_shared_features(1.0) == pytest.approx(found.low + found.high / 4)


@pytest.mark.parametrize("per_sample", [0.5, 1.0, 3.0])
def test_the_factor_of_theorem_4_2(per_sample: float) -> None:
    """Shared features, as many for each sample on every client, leave N²/(N + N')² of the variance.

    The gradients of the head are taken by autograd on the clients' features alone, and on these
    together with features of one common set.
    """
    head = nn.Linear(5, 3).double()
    draw = generator()
    shared = torch.randn(12, 5, generator=draw).double(), torch.randint(3, (12,), generator=draw)

    def gradient(x: torch.Tensor, y: torch.Tensor, extra: float) -> dict[str, torch.Tensor]:
        loss = nn.functional.cross_entropy(head(x), y, reduction="sum")
        common = nn.functional.cross_entropy(head(shared[0]), shared[1])  # of one drawn feature
        total = (loss + extra * len(x) * common) / (len(x) * (1 + extra))
        found = torch.autograd.grad(total, list(head.parameters()))
        return dict(zip(("weight", "bias"), found, strict=True))

    sizes = (4, 9, 17)
    data = [
        (torch.randn(n, 5, generator=draw).double() + i, torch.randint(3, (n,), generator=draw))
        for i, n in enumerate(sizes)
    ]
    shares = T(sizes).double() / sum(sizes)
    plain = gradient_variance([gradient(x, y, 0.0) for x, y in data], shares, {"weight", "bias"})
    mixed = gradient_variance(
        [gradient(x, y, per_sample) for x, y in data], shares, {"weight", "bias"}
    )
    assert plain.high > 0.01
    assert mixed.high == pytest.approx(shared_factor(per_sample) * plain.high, rel=1e-12)
    assert shared_factor(per_sample) == 1 / (1 + per_sample) ** 2


def test_leaves_above_a_cut() -> None:
    net = nn.Sequential()
    net.add_module("stage1", nn.Linear(2, 2))
    net.add_module("pool", nn.ReLU())
    net.add_module("stage2", nn.Linear(2, 2))
    net.add_module("head", nn.Linear(2, 2))
    model, head = Model(net), {"head.weight", "head.bias"}
    assert leaves_above(model, None) == ("in the head", head)
    assert leaves_above(model, "stage2") == ("after stage2", head)
    assert leaves_above(model, "pool")[1] == head | {"stage2.weight", "stage2.bias"}
    assert Variance(1.0, 3.0, 1.0).high_share == 0.75


# -- predictions ------------------------------------------------------------------------------

#: True classes 0, 1, 2 with 10, 20, 10 samples.
MATRIX = T([[9.0, 1.0, 0.0], [0.0, 20.0, 0.0], [2.0, 6.0, 2.0]]).double()


def test_confusion() -> None:
    found = confusion(T([0, 0, 2, 1]), T([0, 1, 1, 1]), 3)
    assert found.tolist() == [[1, 0, 0], [1, 1, 1], [0, 0, 0]]


def test_classifier_bias_by_hand() -> None:
    """The client lacks class 2: 2 of its 10 samples are recognised, 8 assigned to own classes."""
    found = classifier_bias(MATRIX, T([5, 7, 0]))
    assert found is not None
    assert found == (1, 10, 0.2, 0.8)
    assert classifier_bias(MATRIX, T([1, 1, 1])) is None
    assert predicted_on_lacking(MATRIX, T([5, 7, 0])).tolist() == pytest.approx([0.2, 0.6, 0.2])
    assert prediction_skew(MATRIX) == pytest.approx(0.5 * (1 + 7 + 8) / 40)
    assert prediction_skew(torch.diag(T([3.0, 4.0]).double())) == 0.0


def test_accuracies_by_hand() -> None:
    assert per_class_accuracy(MATRIX).tolist() == pytest.approx([90.0, 100.0, 20.0])
    assert accuracy(MATRIX) == pytest.approx(100 * 31 / 40)
    assert personal_accuracy(MATRIX, T([1, 0, 3])) == pytest.approx((90 + 3 * 20) / 4)
    empty = MATRIX.clone()
    empty[1] = 0.0
    assert math.isnan(float(per_class_accuracy(empty)[1]))
    assert personal_accuracy(empty, T([1, 5, 1])) == pytest.approx(55.0)  # class 1 is not tested


def test_forgetting_by_hand() -> None:
    """90, 100, 20 % before, 100, 50, 0 % after: +10, -50, -20 points."""
    after = T([[10.0, 0.0, 0.0], [10.0, 10.0, 0.0], [9.0, 1.0, 0.0]]).double()
    assert change(MATRIX, after, T([3, 1, 0])) == pytest.approx((-20.0, -20.0))
    assert change(MATRIX, after, T([3, 0, 0])) == pytest.approx((10.0, -35.0))
    assert forgetting(MATRIX, after) == pytest.approx((0 + 50 + 20) / 3)
    assert math.isnan(change(MATRIX, after, T([1, 1, 1])).lacking)


# -- features ---------------------------------------------------------------------------------


def test_linear_cka_is_invariant() -> None:
    """To shifts, scaling and rotation; not to other linear maps."""
    draw = generator()
    x = torch.randn(40, 6, generator=draw).double()
    rotation = torch.linalg.qr(torch.randn(6, 6, generator=draw).double()).Q
    assert linear_cka(x, x) == pytest.approx(1.0)
    assert linear_cka(x, 3 * x @ rotation + 7) == pytest.approx(1.0)
    y = torch.randn(40, 4, generator=draw).double()
    assert linear_cka(x, y) == pytest.approx(linear_cka(y @ torch.eye(4).double() - 2, 5 * x))
    stretched = x * T([10.0, 1, 1, 1, 1, 1])
    assert linear_cka(x, stretched) < 0.9


def test_linear_cka_closed_forms() -> None:
    """Orthogonal centred features have 0; with one column it is the squared correlation."""
    a, b = T([1.0, -1, 1, -1]), T([1.0, 1, -1, -1])
    assert linear_cka(a[:, None], b[:, None]) == 0.0
    x, y = T([1.0, 2, 3, 5]), T([2.0, 1, 4, 4])
    correlation = np.corrcoef(x.numpy(), y.numpy())[0, 1]
    assert linear_cka(x[:, None], y[:, None]) == pytest.approx(correlation**2)
    both = torch.stack([a, b], 1)
    assert linear_cka(both, a[:, None]) == pytest.approx(1 / 2**0.5)
    assert math.isnan(linear_cka(torch.ones(4, 2), both))


def test_cosines_across_classes() -> None:
    features = T([[1.0, 0], [2.0, 0], [0.0, 3], [1.0, 1]])
    labels = T([0, 0, 1, 2])
    half = 0.5**0.5
    # pairs of different classes: (0, 1) twice 0, (0, 2) twice sqrt(1/2), (1, 2) once sqrt(1/2)
    assert class_cosine(features, labels) == pytest.approx(3 * half / 5)
    assert math.isnan(class_cosine(features, T([1, 1, 1, 1])))
    assert pair_cosine(features[:2], features[2:]) == pytest.approx((0 + half) / 2)
