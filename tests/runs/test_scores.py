"""Final metrics: scikit-learn for all samples, plain numpy for clients, both the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn import metrics as sk

import kedge
from kedge.core.task import Classification, MultiLabel, Regression, Task
from kedge.runs.quick_scores import area_under_roc, average_precision, quick_scores
from kedge.runs.scores import score


def drawn(kind: str, n: int = 300) -> tuple[Task, Any, Any]:
    rng = np.random.default_rng(0)
    if kind == "regression":
        y = rng.normal(size=(n, 2)) + 50
        return Regression(2), y, y + 0.3 * rng.normal(size=y.shape)
    if kind == "multilabel":
        y = (rng.random((n, 3)) < 0.3).astype(int)
        return MultiLabel(3), y, 1 / (1 + np.exp(-(rng.normal(size=y.shape) + y - 0.5)))
    count = 2 if kind == "two" else 5
    y = np.minimum(rng.geometric(0.6, n) - 1, count - 1)
    logits = rng.normal(size=(n, count)) + 1.5 * np.eye(count)[y]
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return Classification(count), y, probs.round(2) / probs.round(2).sum(1, keepdims=True)  # ties


@pytest.mark.parametrize("kind", ["two", "five", "multilabel", "regression"])
def test_plain_numpy_gives_the_numbers_of_scikit_learn(kind: str) -> None:
    task, y, scores = drawn(kind)
    assert quick_scores(task, y, scores) == pytest.approx(score(task, None, y, scores)["global"])
    for rows in (slice(0, 12), slice(3, 5), slice(7, 8)):  # small clients, some with one class
        found = score(task, None, y[rows], scores[rows])["global"]
        assert quick_scores(task, y[rows], scores[rows]) == pytest.approx(found)


def test_ties_count_as_in_scikit_learn() -> None:
    rng = np.random.default_rng(1)
    y, scores = rng.integers(0, 2, 200), rng.integers(0, 6, 200)
    assert area_under_roc(y, scores) == pytest.approx(sk.roc_auc_score(y, scores))
    assert average_precision(y, scores) == pytest.approx(sk.average_precision_score(y, scores))


def test_metrics_by_class_and_client() -> None:
    task, y, probs = drawn("five")
    owner = np.arange(len(y)) % 3
    found = score(task, list("abcde"), y, probs, owner)
    predicted = probs.argmax(1)
    assert found["confusion"] == sk.confusion_matrix(y, predicted).tolist()
    recall = sk.recall_score(y, predicted, average=None)
    assert [c["accuracy"] for c in found["per_class"].values()] == pytest.approx(100 * recall)
    assert found["global"]["balanced_accuracy"] == pytest.approx(100 * recall.mean())
    assert list(found["clients"]) == ["0", "1", "2"]
    each = [sk.accuracy_score(y[owner == k], predicted[owner == k]) * 100 for k in range(3)]
    summary = found["over_clients"]["accuracy"]
    assert summary["mean"] == pytest.approx(np.mean(each))
    assert summary["worst"] == pytest.approx(min(each))
    assert summary["spread"] == pytest.approx(np.std(each))
    losses = [one["log_loss"] for one in found["clients"].values()]
    assert found["over_clients"]["log_loss"]["worst"] == max(losses)
    json.dumps(found, allow_nan=False)


def test_one_column_is_the_probability_of_class_one_of_two() -> None:
    task, y, probs = drawn("two")
    assert score(task, None, y, probs[:, 1])["global"] == pytest.approx(
        score(task, None, y, probs)["global"]
    )


def test_a_run_writes_the_scores_of_its_models(tmp_path: Path) -> None:
    result = kedge.run(
        "fedper", data="digits", clients=4, rounds=2, seeds=[0], engine="loop", out=tmp_path
    )
    scores = json.loads((tmp_path / "seed-0" / "scores.json").read_text())
    last = result.records[0][-1]
    assert scores["global"]["accuracy"] == pytest.approx(last["accuracy"])
    assert scores["global"]["auroc"] == pytest.approx(last["auroc"], abs=0.005)
    assert scores["global"]["log_loss"] == pytest.approx(last["loss"], rel=1e-5)
    assert scores["personal"]["over_clients"]["accuracy"]["mean"] == pytest.approx(
        last["personal_mean"]
    )
    assert scores["over_clients"]["accuracy"]["worst"] == pytest.approx(last["client_worst"])
    assert np.sum(scores["confusion"]) == scores["global"]["samples"]
    assert len(scores["per_class"]) == 10


def test_one_class_has_no_balanced_accuracy() -> None:
    """Hospitals without a sick patient would lift the mean of a constant answer above 50 %."""
    task, names = Classification(2), ("no", "yes")
    probs = np.tile([0.9, 0.1], (6, 1))
    y, client = np.array([0, 1, 0, 1, 0, 0]), ["a", "a", "b", "b", "c", "c"]
    found = score(task, names, y, probs, client)
    assert "balanced_accuracy" not in found["clients"]["c"]
    assert found["over_clients"]["balanced_accuracy"]["mean"] == 50.0
    assert found["over_clients"]["accuracy"]["mean"] == pytest.approx(200 / 3)
    assert quick_scores(task, y[4:], probs[4:]).get("balanced_accuracy") is None
