"""Final metrics, beside scikit-learn: for all samples, for clients and for classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn import metrics as sk

import kedge
from kedge.core.task import Classification, MultiLabel, Regression, Task
from kedge.errors import NotFinite
from kedge.saved.scores import exact_metrics, rankings, score


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


def oracle(task: Task, y: Any, scores: Any) -> dict[str, Any]:
    """The metrics of some samples by scikit-learn; those without a meaning are left out."""
    if isinstance(task, Regression):
        found = {
            "mae": sk.mean_absolute_error(y, scores),
            "rmse": sk.root_mean_squared_error(y.ravel(), scores.ravel()),
        }
        return found | ({"r2": sk.r2_score(y, scores)} if len(y) > 1 else {})
    one_class = isinstance(task, Classification)
    truth = np.eye(task.outputs, dtype=int)[y] if one_class else y
    columns = [c for c in range(task.outputs) if 0 < truth[:, c].sum() < len(y)]
    ranked = {
        "auroc": [sk.roc_auc_score(truth[:, c], scores[:, c]) for c in columns],
        "average_precision": [
            sk.average_precision_score(truth[:, c], scores[:, c]) for c in columns
        ],
    }
    if one_class and task.outputs == 2:
        ranked = {name: values[1:] for name, values in ranked.items()}
    found = {name: np.mean(values) for name, values in ranked.items() if values}
    if not one_class:
        predicted = scores > 0.5
        if "average_precision" in found:
            found["map"] = found.pop("average_precision")
        losses = [sk.log_loss(t, s, labels=[0, 1]) for t, s in zip(truth.T, scores.T, strict=True)]
        f1, macro = (
            sk.f1_score(truth, predicted, average=kind, zero_division=0)
            for kind in ("micro", "macro")
        )
        return found | {"f1": 100 * f1, "f1_macro": 100 * macro, "log_loss": np.mean(losses)}
    predicted = scores.argmax(1)
    if len(set(y)) > 1:
        recalls = sk.recall_score(y, predicted, labels=sorted(set(y)), average="macro")
        found["balanced_accuracy"] = 100 * recalls
    return found | {
        "accuracy": 100 * sk.accuracy_score(y, predicted),
        "f1_macro": 100 * sk.f1_score(y, predicted, average="macro", zero_division=0),
        "log_loss": sk.log_loss(y, scores, labels=range(task.outputs)),
    }


@pytest.mark.parametrize("kind", ["two", "five", "multilabel", "regression"])
def test_the_metrics_are_those_of_scikit_learn(kind: str) -> None:
    task, y, scores = drawn(kind)
    for rows in (slice(None), slice(0, 12), slice(3, 5), slice(7, 8)):  # some with one class
        found = score(task, None, y[rows], scores[rows], [0] * len(y[rows]))
        assert found["clients"]["0"] == found["global"]
        own = {n: v for n, v in found["global"].items() if n not in ("samples", "ece")}
        assert own == pytest.approx(oracle(task, y[rows], scores[rows]), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("kind", ["two", "five", "multilabel", "regression"])
def test_the_metrics_of_classes_are_those_of_scikit_learn(kind: str) -> None:
    task, y, scores = drawn(kind)
    found = score(task, None, y, scores)["per_class"]
    for c in range(task.outputs):
        own, column = found[str(c)], scores[:, c]
        if kind == "regression":
            truth = y[:, c]
            expected = {"r2": sk.r2_score(truth, column)}
            expected |= {"mae": sk.mean_absolute_error(truth, column)}
            expected |= {"rmse": sk.root_mean_squared_error(truth, column), "samples": len(y)}
        else:
            many = kind == "multilabel"
            truth = y[:, c] if many else y == c
            predicted = column > 0.5 if many else scores.argmax(1) == c
            expected = {"auroc": sk.roc_auc_score(truth, column), "samples": truth.sum()}
            expected |= {"average_precision": sk.average_precision_score(truth, column)}
            expected |= {"f1": 100 * sk.f1_score(truth, predicted)}
            if not many:
                expected |= {"accuracy": 100 * sk.recall_score(truth, predicted)}
                expected |= {"precision": 100 * sk.precision_score(truth, predicted)}
        assert own == pytest.approx(expected, rel=1e-12)


def test_a_metric_of_a_class_without_a_meaning_is_left_out() -> None:
    probs = np.array([[0.9, 0.1, 0.0], [0.2, 0.8, 0.0]])
    found = score(Classification(3), ["a", "b", "c"], [0, 1], probs)["per_class"]
    assert found["c"] == {"samples": 0}
    wrong = score(Classification(2), ["a", "b"], [0, 0], [[0.1, 0.9], [0.1, 0.9]])["per_class"]
    assert wrong["a"] == {"samples": 2, "accuracy": 0.0, "f1": 0.0}
    assert wrong["b"] == {"samples": 0, "precision": 0.0, "f1": 0.0}
    labels = score(MultiLabel(2), ["a", "b"], [[1, 0], [0, 0]], [[0.9, 0.1], [0.2, 0.3]])
    assert labels["per_class"]["b"] == {"samples": 0}


def test_scores_that_are_not_finite_are_refused() -> None:
    with pytest.raises(NotFinite, match="NaN or infinity for 1 of 2 samples"):
        score(Classification(2), None, [0, 1], [0.1, np.nan])
    with pytest.raises(NotFinite, match="NaN or infinity"):
        score(Regression(1), None, [0.0, 1.0], [np.inf, 1.0])


def test_ties_count_as_in_scikit_learn() -> None:
    rng = np.random.default_rng(1)
    y, scores = rng.integers(0, 2, 200), rng.integers(0, 6, 200)
    expected = sk.roc_auc_score(y, scores), sk.average_precision_score(y, scores)
    assert rankings(y, scores) == pytest.approx(expected)


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
    assert np.isnan(exact_metrics(task, y[4:], probs[4:]).values["balanced_accuracy"])
