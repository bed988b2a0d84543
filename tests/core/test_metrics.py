"""Metrics from sums and score histograms, beside scikit-learn on all scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from kedge.core import tree
from kedge.core.metrics import (
    SCORE_BINS,
    auroc,
    auroc_bound,
    average_precision,
    average_precision_bound,
    histogram,
    log_odds,
    score_bins,
)
from kedge.core.task import Batch, Classification, MultiLabel, Regression, Task
from kedge.core.task_base import Sums
from kedge.saved.scores import calibration_error

DOUBLE = torch.float64


def all_sums(task: Task, logits: torch.Tensor, y: torch.Tensor) -> Sums:
    batch, ones = Batch(torch.zeros(len(y), 1), y), torch.ones(len(y), dtype=logits.dtype)
    return task.sums(logits, batch, ones) | task.details(logits, batch, ones)


def classes(count: int, n: int = 400, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    y = torch.multinomial(1.0 / torch.arange(1.0, count + 1), n, True, generator=draw)
    logits = torch.randn(n, count, generator=draw, dtype=DOUBLE)
    logits[torch.arange(n), y] += 1.0
    return 2 * logits, y


@pytest.mark.parametrize("count", [2, 7])
def test_metrics_of_classes_are_those_of_scikit_learn(count: int) -> None:
    logits, y = classes(count)
    task, probs = Classification(count), torch.softmax(logits, 1).numpy()
    pieces = [all_sums(task, logits[i::3], y[i::3]) for i in range(3)]  # three clients
    total = tree.add(tree.add(*pieces[:2]), pieces[2])
    report, said = task.report(total), logits.argmax(1).numpy()
    right = said == y.numpy()
    assert report["accuracy"] == pytest.approx(100 * sk.accuracy_score(y, said))
    assert report["balanced_accuracy"] == pytest.approx(100 * sk.balanced_accuracy_score(y, said))
    assert report["f1_macro"] == pytest.approx(100 * sk.f1_score(y, said, average="macro"))
    assert report["log_loss"] == pytest.approx(sk.log_loss(y, probs))
    assert report["ece"] == pytest.approx(calibration_error(probs.max(1), right))
    exact = sk.roc_auc_score(y, probs[:, 1] if count == 2 else probs, multi_class="ovr")
    bounds = [auroc_bound(row) for row in total["histogram"][1 if count == 2 else 0 :]]
    assert abs(report["auroc"] - exact) <= np.mean(bounds) + 1e-12
    assert np.mean(bounds) < 2e-3
    of_class = [
        sk.average_precision_score(y == c, probs[:, c])
        for c in ([1] if count == 2 else range(count))
    ]
    assert report["average_precision"] == pytest.approx(np.mean(of_class), abs=0.01)


def scores_of(kind: str, n: int = 500) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    y = (torch.rand(n, generator=draw) < 0.12).to(torch.int64)
    z = torch.randn(n, generator=draw, dtype=DOUBLE)
    if kind == "informative":
        z = z + 1.5 * y
    elif kind == "extreme":
        z = 30 * (z + y)
    elif kind == "one bin":  # all different, but all in one bin
        z = 5e-7 * (z.abs() + 1e-3)
    elif kind == "two clusters":  # the order within each bin is wrong throughout
        z = torch.where(z > 0, 3.0, -3.0) - 1e-9 * y - 1e-12 * z
    elif kind == "ties":
        z = (2 * z).round()
    elif kind == "infinite":
        z = torch.where(z > 1, float("inf"), torch.where(z < -1, float("-inf"), z))
    return z, y


@pytest.mark.parametrize(
    "kind", ["random", "informative", "extreme", "one bin", "two clusters", "ties", "infinite"]
)
def test_the_errors_of_histograms_stay_within_their_bounds(kind: str) -> None:
    z, y = scores_of(kind)
    [hist] = histogram(z[:, None], y[:, None], torch.ones(len(y), dtype=DOUBLE))
    ranks = torch.unique(z, return_inverse=True)[1].numpy()  # scikit-learn rejects infinity
    for value, bound, exact in (
        (auroc, auroc_bound, sk.roc_auc_score(y, ranks)),
        (average_precision, average_precision_bound, sk.average_precision_score(y, ranks)),
    ):
        found, most = value(hist), bound(hist)
        assert found is not None
        assert most is not None
        assert abs(found - exact) <= most + 1e-12
        if kind in ("random", "informative"):
            assert most < 0.02
    if kind == "one bin":
        assert auroc(hist) == auroc_bound(hist) == 0.5


def test_the_bound_of_auroc_is_reached_by_wrong_order_within_bins() -> None:
    z, y = torch.tensor([1e-9, 2e-9, -3.0]), torch.tensor([1, 0, 0])
    [hist] = histogram(z[:, None], y[:, None], torch.ones(3))
    assert hist.sum(1).tolist() == [2, 1]
    exact = sk.roc_auc_score(y, z)
    assert (auroc(hist), exact, auroc_bound(hist)) == (0.75, 0.5, 0.25)


def test_bins_keep_the_order_and_separate_confident_scores() -> None:
    z = torch.linspace(-40, 40, 4001, dtype=DOUBLE)
    bins = score_bins(z)
    assert bool((bins.diff() >= 0).all())
    assert (int(bins.min()), int(bins.max())) == (12, SCORE_BINS - 13)
    sure = torch.sigmoid(torch.tensor([9.0, 12.0, 20.0]))  # bins in p would merge these
    assert len(score_bins(torch.tensor([9.0, 12.0, 20.0])).unique()) == 3
    assert (sure > 1 - 1 / SCORE_BINS).all()


def test_log_odds_are_exact_in_float32_where_one_minus_p_is_not() -> None:
    logits = torch.tensor([[30.0, 0.0, 1.0], [0.2, 0.1, -0.3], [-50.0, 10.0, 0.0]])
    wide = logits.double()
    rest = torch.stack([wide[:, [1, 2]], wide[:, [0, 2]], wide[:, [0, 1]]], 1).logsumexp(-1)
    torch.testing.assert_close(log_odds(logits).double(), wide - rest, rtol=1e-5, atol=1e-5)


def test_metrics_without_a_meaning_are_left_out() -> None:
    task, logits = Classification(2), torch.randn(5, 2)
    report = task.report(all_sums(task, logits, torch.zeros(5, dtype=torch.int64)))
    assert "auroc" not in report
    assert "average_precision" not in report
    assert "balanced_accuracy" not in report  # a constant answer would have 100 %
    assert {"accuracy", "f1_macro", "log_loss", "ece"} <= report.keys()
    one = Regression(1)
    assert "r2" not in one.report(all_sums(one, torch.ones(1, 1), torch.ones(1, 1)))
    assert "r2" not in one.report(all_sums(one, torch.ones(9, 1), torch.full((9, 1), 0.1)))


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_metrics_of_targets_are_those_of_scikit_learn(offset: float) -> None:
    draw = torch.Generator().manual_seed(1)
    y = torch.randn(300, 2, generator=draw, dtype=DOUBLE) + offset
    predicted = y + 0.5 * torch.randn(300, 2, generator=draw, dtype=DOUBLE)
    task = Regression(2)
    total = tree.add(*(all_sums(task, predicted[i::2], y[i::2]) for i in range(2)))
    report = task.report(total)
    assert report["r2"] == pytest.approx(sk.r2_score(y, predicted), rel=1e-3)
    assert report["mae"] == pytest.approx(sk.mean_absolute_error(y, predicted))
    assert report["rmse"] == pytest.approx(sk.mean_squared_error(y, predicted) ** 0.5)


def test_metrics_of_labels_are_those_of_scikit_learn() -> None:
    draw = torch.Generator().manual_seed(2)
    y = (torch.rand(400, 3, generator=draw) < 0.3).to(DOUBLE)
    logits = torch.randn(400, 3, generator=draw, dtype=DOUBLE) + y
    task = MultiLabel(3)
    report = task.report(all_sums(task, logits, y))
    assert report["map"] == pytest.approx(sk.average_precision_score(y, logits), abs=3e-3)
    assert report["auroc"] == pytest.approx(sk.roc_auc_score(y, logits), abs=1e-3)
