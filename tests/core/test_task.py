"""Tasks: losses and divergences against torch's, metrics against counting by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import f1_score
from torch import Tensor
from torch.func import vmap

from kedge.core import rng, tree
from kedge.core.task import (
    Batch,
    Classification,
    MultiLabel,
    Regression,
    Task,
    guess_task,
    make_task,
    tasks,
)
from kedge.errors import FieldError

DOUBLE = torch.float64
B, C = 12, 5
KEYS = rng.split(rng.key(0), 6)
LOGITS = 2 * rng.normal(KEYS[0], (B, C), DOUBLE)
OTHER = 2 * rng.normal(KEYS[1], (B, C), DOUBLE)
CLASSES = rng.integers(KEYS[2], (B,), C)
LABELS = rng.integers(KEYS[3], (B, C), 2).to(DOUBLE)
REALS = rng.normal(KEYS[4], (B, C), DOUBLE)
X = torch.zeros(B, 1, dtype=DOUBLE)
ONES = torch.ones(B, dtype=DOUBLE)

CASES: dict[str, tuple[Task, Batch]] = {
    "classification": (Classification(C), Batch(X, CLASSES)),
    "multilabel": (MultiLabel(C), Batch(X, LABELS)),
    "regression": (Regression(C), Batch(X, REALS)),
}


def rows(batch: Batch, index: slice | Tensor) -> Batch:
    return Batch(batch.x[index], batch.y[index])


# -- losses ------------------------------------------------------------------------------------


def test_cross_entropy_sample_by_sample() -> None:
    found = Classification(C).loss(LOGITS, Batch(X, CLASSES))
    assert found.shape == (B,)
    torch.testing.assert_close(found, F.cross_entropy(LOGITS, CLASSES, reduction="none"))


def test_binary_cross_entropy_is_a_mean_over_labels() -> None:
    found = MultiLabel(C).loss(LOGITS, Batch(X, LABELS))
    assert found.shape == (B,)
    expected = F.binary_cross_entropy(torch.sigmoid(LOGITS), LABELS, reduction="none").mean(1)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(MultiLabel(C).loss(LOGITS, Batch(X, LABELS.long())), expected)


def test_squared_error_is_a_mean_over_outputs() -> None:
    found = Regression(C).loss(LOGITS, Batch(X, REALS))
    assert found.shape == (B,)
    torch.testing.assert_close(found, F.mse_loss(LOGITS, REALS, reduction="none").mean(1))


@pytest.mark.parametrize("shape", [(B,), (B, 1)])
def test_regression_takes_targets_with_and_without_a_last_axis(shape: tuple[int, ...]) -> None:
    task, out, y = Regression(), LOGITS[:, :1], REALS[:, 0]
    batch = Batch(X, y.reshape(shape))
    expected = (LOGITS[:, 0] - y) ** 2
    torch.testing.assert_close(task.loss(out, batch), expected)
    assert task.soft(batch.y, DOUBLE).shape == (B, 1)
    sums = task.sums(out, batch, ONES)
    assert float(sums["loss"]) == pytest.approx(float(expected.sum()))


def test_regression_takes_outputs_without_a_last_axis() -> None:
    found = Regression().loss(LOGITS[:, 0], Batch(X, REALS[:, 0]))
    assert found.shape == (B,)


@pytest.mark.parametrize("name", CASES)
def test_a_loss_can_be_mapped_over_clients_and_differentiated(name: str) -> None:
    task, batch = CASES[name]
    logits = LOGITS.clone().requires_grad_()
    (grad,) = torch.autograd.grad(task.loss(logits, batch).sum(), logits)
    assert float(grad.abs().max()) > 0
    split = (2, B // 2)
    mapped = vmap(lambda z, y: task.loss(z, Batch(X[: B // 2], y)))(
        LOGITS.reshape(*split, C), batch.y.reshape(*split, *batch.y.shape[1:])
    )
    torch.testing.assert_close(mapped.flatten(), task.loss(LOGITS, batch))


@pytest.mark.parametrize("name", CASES)
def test_the_mean_loss_is_the_mean_of_the_losses(name: str) -> None:
    task, batch = CASES[name]
    soft = batch._replace(target=task.soft(batch.y, LOGITS.dtype))
    for own in (batch, soft):
        torch.testing.assert_close(task.mean_loss(LOGITS, own), task.loss(LOGITS, own).mean())


def test_a_task_with_a_loss_of_its_own_has_its_own_mean() -> None:
    class Twice(Classification):
        def loss(self, logits: Tensor, batch: Batch) -> Tensor:
            return 2 * super().loss(logits, batch)

    batch = Batch(X, CLASSES)
    twice, once = Twice(C).mean_loss(LOGITS, batch), Classification(C).mean_loss(LOGITS, batch)
    torch.testing.assert_close(twice, 2 * once)


# -- soft targets ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_the_soft_form_of_the_labels_gives_the_same_loss(name: str) -> None:
    task, batch = CASES[name]
    soft = task.soft(batch.y, DOUBLE)
    assert soft.shape == (B, C)
    assert soft.dtype == DOUBLE
    torch.testing.assert_close(
        task.loss(LOGITS, batch._replace(target=soft)), task.loss(LOGITS, batch)
    )


def test_a_mixed_target_is_cross_entropy_with_probabilities() -> None:
    task = Classification(C)
    target = 0.3 * task.soft(CLASSES, DOUBLE) + 0.7 * task.soft(CLASSES.flip(0), DOUBLE)
    found = task.loss(LOGITS, Batch(X, CLASSES, target))
    torch.testing.assert_close(found, F.cross_entropy(LOGITS, target, reduction="none"))
    parts = [
        F.cross_entropy(LOGITS, CLASSES, reduction="none"),
        F.cross_entropy(LOGITS, CLASSES.flip(0), reduction="none"),
    ]
    torch.testing.assert_close(found, 0.3 * parts[0] + 0.7 * parts[1])


def test_a_target_takes_the_place_of_the_labels() -> None:
    for task, batch in CASES.values():
        target = task.soft(batch.y.flip(0), DOUBLE)
        swapped = task.loss(LOGITS, batch._replace(target=target))
        expected = task.loss(LOGITS, Batch(X, batch.y.flip(0)))
        torch.testing.assert_close(swapped, expected)


# -- probabilities and divergences -------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.5, 4.0])
def test_probabilities(temperature: float) -> None:
    torch.testing.assert_close(
        Classification(C).probs(LOGITS, temperature), F.softmax(LOGITS / temperature, 1)
    )
    torch.testing.assert_close(
        MultiLabel(C).probs(LOGITS, temperature), torch.sigmoid(LOGITS / temperature)
    )
    torch.testing.assert_close(Regression(C).probs(LOGITS, temperature), LOGITS / temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 4.0])
def test_divergence_of_classes_is_torchs_kl_div(temperature: float) -> None:
    found = Classification(C).divergence(LOGITS, OTHER, temperature)
    log_p, log_q = (F.log_softmax(z / temperature, 1) for z in (LOGITS, OTHER))
    expected = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(1)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 4.0])
def test_divergence_of_labels_is_a_sum_of_bernoulli_divergences(temperature: float) -> None:
    found = MultiLabel(C).divergence(LOGITS, OTHER, temperature)
    p, q = torch.sigmoid(LOGITS / temperature), torch.sigmoid(OTHER / temperature)
    both = torch.distributions.kl_divergence(
        torch.distributions.Bernoulli(p), torch.distributions.Bernoulli(q)
    )
    torch.testing.assert_close(found, both.sum(1))


@pytest.mark.parametrize("temperature", [1.0, 0.5, 4.0])
def test_divergence_of_reals_is_that_of_unit_normals(temperature: float) -> None:
    found = Regression(C).divergence(LOGITS * temperature, OTHER * temperature, temperature)
    both = torch.distributions.kl_divergence(
        torch.distributions.Normal(LOGITS, 1.0), torch.distributions.Normal(OTHER, 1.0)
    )
    torch.testing.assert_close(found, both.sum(1))


@pytest.mark.parametrize("name", CASES)
def test_a_divergence_is_zero_at_equality_and_positive_elsewhere(name: str) -> None:
    task = CASES[name][0]
    assert float(task.divergence(LOGITS, LOGITS).abs().max()) < 1e-15
    assert float(task.divergence(LOGITS, OTHER).min()) > 0
    p = LOGITS.clone().requires_grad_()
    (grad,) = torch.autograd.grad(task.divergence(p, LOGITS).sum(), p)
    assert float(grad.abs().max()) < 1e-12


@pytest.mark.parametrize("name", CASES)
def test_extreme_logits_give_exact_values(name: str) -> None:
    """One class against another, two labels turned over, and two means 20000 apart."""
    task, batch = CASES[name]
    extreme = torch.tensor([[1e4, -1e4, 0, 0, 0]], dtype=DOUBLE)
    divergence = {"classification": 2e4, "multilabel": 2e4, "regression": 4e8}[name]
    assert float(task.divergence(extreme, -extreme)) == pytest.approx(divergence, rel=1e-14)
    y, z = batch.y[0].tolist(), extreme[0].tolist()
    loss = {
        "classification": lambda: 1e4 - z[y],
        "multilabel": lambda: sum(max(s, 0) - s * t + math.log1p(math.exp(-abs(s)))
                                  for s, t in zip(z, y, strict=True)) / C,
        "regression": lambda: sum((s - t) ** 2 for s, t in zip(z, y, strict=True)) / C,
    }[name]()  # fmt: skip
    assert float(task.loss(extreme, rows(batch, slice(1)))) == pytest.approx(loss, rel=1e-14)


# -- metrics -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_sums_add_up_over_batches(name: str) -> None:
    task, batch = CASES[name]
    whole = task.sums(LOGITS, batch, ONES)
    parts = [
        task.sums(LOGITS[i], rows(batch, i), ONES[i])
        for i in (slice(0, 5), slice(5, 6), slice(6, B))
    ]
    total = tree.add(tree.add(parts[0], parts[1]), parts[2])
    assert total.keys() == whole.keys()
    assert tree.gap(total, whole) < 1e-14
    assert task.report(total) == pytest.approx(task.report(whole))


@pytest.mark.parametrize("name", CASES)
def test_masked_rows_do_not_count(name: str) -> None:
    task, batch = CASES[name]
    mask = (torch.arange(B) % 3 != 1).to(DOUBLE)
    kept = mask.bool()
    masked = task.sums(LOGITS, batch, mask)
    plain = task.sums(LOGITS[kept], rows(batch, kept), ONES[kept])
    assert tree.gap(masked, plain) < 1e-14


@pytest.mark.parametrize("name", CASES)
def test_sums_are_in_the_precision_of_the_logits(name: str) -> None:
    task, batch = CASES[name]
    sums = task.sums(LOGITS.float(), batch, ONES.float())  # labels are in double precision
    moments = {"sum_y", "sum_y2", "sum_abs", "sum_sq"}  # a difference of squares needs float64
    assert {s.dtype for n, s in sums.items() if n not in moments} == {torch.float32}
    assert {s.dtype for n, s in sums.items() if n in moments} <= {torch.float64}


def test_accuracy_by_hand() -> None:
    logits = torch.tensor([[2.0, 1, 0], [0, 3, 1], [0, 1, 2], [5, 0, 0]], dtype=DOUBLE)
    batch = Batch(torch.zeros(4, 1), torch.tensor([0, 1, 1, 0]))
    task = Classification(3)
    sums = task.sums(logits, batch, torch.ones(4, dtype=DOUBLE))
    assert sums["count"].tolist() == [2, 2, 0]
    assert sums["right"].tolist() == [2, 1, 0]
    assert task.per_class(sums) == [100.0, 50.0, None]
    report = task.report(sums)
    assert report["accuracy"] == 75.0
    assert report["loss"] == pytest.approx(float(F.cross_entropy(logits, batch.y)))


def test_f1_by_hand() -> None:
    # label 0: said twice, true twice, hit once. Label 1: said once, hit. Label 2: never, never.
    said = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=DOUBLE)
    true = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0]], dtype=DOUBLE)
    task = MultiLabel(3)
    sums = task.sums(2 * said - 1, Batch(torch.zeros(3, 1), true), torch.ones(3, dtype=DOUBLE))
    report = task.report(sums)
    assert report["f1"] == pytest.approx(100 * 2 * 2 / (3 + 3))
    assert report["f1_macro"] == pytest.approx(100 * (2 / 4 + 2 / 2 + 0) / 3)
    assert task.per_class(sums) == [50.0, 100.0, None]


def test_f1_is_scikit_learns() -> None:
    report = MultiLabel(C).report(MultiLabel(C).sums(LOGITS, Batch(X, LABELS), ONES))
    true, said = LABELS.numpy(), (LOGITS > 0).numpy().astype(float)
    assert report["f1"] == pytest.approx(100 * f1_score(true, said, average="micro"))
    assert report["f1_macro"] == pytest.approx(100 * f1_score(true, said, average="macro"))
    expected = F.binary_cross_entropy_with_logits(LOGITS, LABELS)
    assert report["loss"] == pytest.approx(float(expected))


def test_f1_without_any_label_is_zero() -> None:
    nothing = torch.zeros(2, C, dtype=DOUBLE)
    sums = MultiLabel(C).sums(nothing - 1, Batch(X[:2], nothing), ONES[:2])
    report = MultiLabel(C).report(sums)
    assert report["f1"] == report["f1_macro"] == 0.0


def test_root_mean_squared_error() -> None:
    report = Regression(C).report(Regression(C).sums(LOGITS, Batch(X, REALS), ONES))
    mse = float(F.mse_loss(LOGITS, REALS))
    assert report["rmse"] == pytest.approx(math.sqrt(mse))
    assert report["loss"] == pytest.approx(mse)


@pytest.mark.parametrize("name", CASES)
def test_a_task_reports_its_own_metric_and_is_found_by_name(name: str) -> None:
    task, batch = CASES[name]
    assert task.name == name
    assert make_task(name, C) == task
    assert {task.metric, "loss"} <= task.report(task.sums(LOGITS, batch, ONES)).keys()


def test_which_tasks_have_classes_and_which_way_is_up() -> None:
    assert [t.has_classes for t, _ in CASES.values()] == [True, True, False]
    assert [t.higher_is_better for t, _ in CASES.values()] == [True, True, False]


def test_an_unknown_task_is_refused() -> None:
    message = "task = 'ranking' is not one of: classification, multilabel, regression"
    with pytest.raises(FieldError, match=message):
        make_task("ranking", 3)


@pytest.mark.parametrize(
    ("y", "name"),
    [
        ([0, 1, 2], "classification"),
        ([True, False], "classification"),
        ([[0], [1]], "classification"),
        ([[0, 1], [1, 1]], "multilabel"),
        ([[0.0, 1.0], [1.0, 1.0]], "multilabel"),
        ([[0.0, 1.0], [1.0, 0.5]], "regression"),
        ([[0.0], [1.0]], "regression"),
        ([0.0, 1.0], "regression"),
    ],
)
def test_the_task_is_guessed_from_the_labels(y: list[Any], name: str) -> None:
    assert guess_task(np.array(y)) == name


def test_metrics_tell_what_is_better_and_tasks_are_tried_in_order() -> None:
    kinds = ("classification", "multilabel", "regression")
    better = {k: [m.name for m in tasks[k].metrics if m.higher_is_better] for k in kinds}
    ranking = ["auroc", "average_precision"]
    assert better["classification"] == ["accuracy", "balanced_accuracy", "f1_macro", *ranking]
    assert better["multilabel"] == ["f1", "f1_macro", "map", "auroc"]
    assert better["regression"] == ["r2"]
    assert {k: tasks[k].auto_order for k in kinds} == dict(zip(kinds, (2.0, 1.0, 3.0), strict=True))
