"""The samples behind uploaded class means, and the means themselves, by hand and by replay."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kedge.check.problems import images
from kedge.core.optim import SGD
from kedge.diagnostics.privacy.pictures import Pixels
from kedge.diagnostics.privacy.shares import share_round
from kedge.diagnostics.privacy.uploads import (
    Behind,
    Statistics,
    classes_told,
    client_rows,
    feature_map,
    running_mean,
    statistics,
)
from kedge.sim.simulation import Simulation

STILL = SGD(lr=1e-300)  # features do not move


def found(method: str, client: int = 2, **options: Any) -> tuple[Simulation, Statistics]:
    run = images(**options).simulate(method)
    stats = statistics(run, share_round(run, client))
    assert stats is not None
    return run, stats


def test_without_momentum_the_last_batch_of_a_class_counts() -> None:
    batches = [torch.tensor([4, 5, 6]), torch.tensor([7, 4, 8])]
    labels = [torch.tensor([0, 1, 1]), torch.tensor([0, 0, 2])]
    zero, one, two, three = running_mean(batches, labels, 4, momentum=0.0)
    assert sorted(zero.rows.tolist()) == [4, 7]
    assert one.rows.tolist() == [5, 6]
    assert two.rows.tolist() == [8]
    assert (zero.effective, two.effective, three.effective) == (2.0, 1.0, 0.0)


def test_momentum_by_hand() -> None:
    """beta = 1/2: the first batch ends with weight 1/4, the second with 1/2, the start with 1/4."""
    batches = [torch.tensor([1, 2]), torch.tensor([3, 9])]
    [behind] = running_mean(batches, [torch.zeros(2), torch.zeros(2)], 1, momentum=0.5)
    assert behind.rows.tolist() == [1, 2, 3, 9]
    assert behind.weights.tolist() == [0.125, 0.125, 0.25, 0.25]
    assert math.isclose(behind.effective, 0.75**2 / (2 * 0.125**2 + 2 * 0.25**2))
    [twice] = running_mean([torch.tensor([1]), torch.tensor([1])], [torch.zeros(1)] * 2, 1, 0.5)
    assert (twice.rows.tolist(), twice.weights.tolist()) == ([1], [0.75])
    assert twice.effective == 1.0


def test_effective_numbers() -> None:
    assert Behind(torch.arange(4), torch.full((4,), 0.25)).effective == 4.0


@pytest.mark.parametrize(
    "fields",
    ["", "beta_m=0.5", "stat_axes=channel", "count_weighted=true", "beta_m=0.9, spread=variance"],
)
def test_uploads_of_fedimpro_are_means_over_the_samples_behind_them(fields: str) -> None:
    run, stats = found(f"fedimpro(cut=stage1, {fields})".replace(", )", ")"), optim=STILL)
    pixels = Pixels(run.federation)
    features = feature_map(run, pixels, stats.weights, "stage1", stats.told.channels)
    present = 0
    for mean, behind in zip(stats.means, stats.behind, strict=True):
        if len(behind.rows):
            u = pixels.to_unit(run.federation.clean(behind.rows).x)
            h = features(u)
            expected = (behind.weights / behind.weights.sum()) @ h
            assert torch.allclose(mean, expected, rtol=1e-10)
            present += 1
    assert present


@pytest.mark.parametrize("method", ["fedproto", "fedproto(pool=clients)", "fedtr", "ccvr(steps=1)"])
def test_other_class_means_are_those_of_the_clients_samples(method: str) -> None:
    """In the client's trained model with its running statistics (CCVR: in the global one)."""
    run, stats = found(method, norm="bn")
    pixels = Pixels(run.federation)
    features, rows = feature_map(run, pixels, stats.weights, stats.told.cut), client_rows(run, 2)
    y = run.federation.y[rows]
    for c, behind in enumerate(stats.behind):
        assert torch.equal(behind.rows, rows[y == c])
        if len(behind.rows):
            expected = features(pixels.to_unit(run.federation.clean(behind.rows).x)).mean(0)
            assert torch.allclose(stats.means[c], expected, rtol=1e-9)


def test_unchanged_statistics_tell_the_classes() -> None:
    _, stats = found("fedimpro(cut=stage1)", client=0)
    assert [len(b.rows) > 0 for b in stats.behind] != [True] * 3  # the client lacks a class
    assert classes_told(stats) == (3, 3)
    _, noisy = found("fedimpro(cut=stage1, noise=0.1)", client=0)
    assert classes_told(noisy)[0] < 3
    assert noisy.told.noise == 0.1


def test_methods_without_class_means() -> None:
    run = images().simulate("scaffold")
    assert statistics(run, share_round(run, 0)) is None
