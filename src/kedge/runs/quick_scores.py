"""The exact metrics of :mod:`kedge.runs.scores` in plain numpy, for thousands of small clients.

scikit-learn takes milliseconds per call to check its inputs; here a client takes well under one.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kedge.core.metrics import ECE_BINS
from kedge.core.task import Classification, MultiLabel, Regression, Task

Array = np.ndarray[Any, Any]


def quick_scores(task: Task, y: Array, scores: Array) -> dict[str, Any]:
    """The metrics of one client by name; those without a meaning are left out.

    Args:
        task: the task.
        y: labels, ``[n]`` or ``[n, outputs]``.
        scores: probabilities or predicted values, ``[n, outputs]``.
    """
    values: dict[str, float | None] = {}
    if len(y) and isinstance(task, Classification):
        values = _classification(y.reshape(-1).astype(int), scores)
    elif len(y) and isinstance(task, MultiLabel):
        values = _multilabel(y.reshape(len(y), -1).astype(int), scores)
    elif len(y) and isinstance(task, Regression):
        values = _regression(y.reshape(len(y), -1).astype(float), scores)
    known = {name: float(value) for name, value in values.items() if value is not None}
    return {"samples": len(y)} | {n: v for n, v in known.items() if math.isfinite(v)}


def area_under_roc(y: Array, scores: Array) -> float | None:
    """Share of pairs of a positive and a negative that are in order; ties count 1/2.

    >>> area_under_roc(np.array([0, 0, 1, 1]), np.array([0.1, 0.6, 0.4, 0.9]))
    0.75
    """
    positives, negatives = _by_score(y, scores)
    pairs = positives.sum() * negatives.sum()
    below = negatives.cumsum() - negatives
    return float((positives * (below + 0.5 * negatives)).sum() / pairs) if pairs else None


def average_precision(y: Array, scores: Array) -> float | None:
    """Mean over positives of the precision among the samples that score at least as high.

    >>> average_precision(np.array([0, 1, 1]), np.array([0.8, 0.9, 0.1]))
    0.8333333333333333
    """
    positives, negatives = (counts[::-1] for counts in _by_score(y, scores))
    if not positives.sum() or not negatives.sum():
        return None
    hits = positives.cumsum()
    return float((positives * hits / (hits + negatives.cumsum())).sum() / positives.sum())


def calibration_error(confidence: Any, right: Any, bins: int = ECE_BINS) -> float:
    """Expected calibration error: the mean over samples of |accuracy - confidence| of their bin.

    Args:
        confidence: probability of the predicted class, ``[n]``.
        right: whether the prediction is right, ``[n]``.
        bins: number of bins of equal width in 0 to 1, each open below and closed above.

    >>> round(calibration_error([0.9, 0.9, 0.9, 0.9], [1, 1, 1, 0]), 6)  # 90 % sure, 75 % right
    0.15
    """
    confidence, right = np.asarray(confidence, float), np.asarray(right, float)
    at = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    gaps = np.bincount(at, right - confidence, bins)
    return float(np.abs(gaps).sum() / len(confidence))


def log_loss(p: Array) -> float:
    """Mean of -log of the probabilities of what is true; 0 counts as the smallest number."""
    return float(-np.log(np.clip(p, np.finfo(float).tiny, 1)).mean())


def mean_known(values: list[float | None]) -> float | None:
    """The mean over classes that have the metric; None where none has."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _by_score(y: Array, scores: Array) -> tuple[Array, Array]:
    """Positives and negatives at each different score, from the lowest."""
    _, at = np.unique(scores, return_inverse=True)
    positives = np.bincount(at, y).astype(float)
    return positives, np.bincount(at) - positives


def _classification(y: Array, probs: Array) -> dict[str, float | None]:
    classes, predicted = probs.shape[1], probs.argmax(1)
    count, said = np.bincount(y, minlength=classes), np.bincount(predicted, minlength=classes)
    right = np.bincount(y[predicted == y], minlength=classes)
    either = count + said
    asked = [1] if classes == 2 else [c for c in range(classes) if 0 < count[c] < len(y)]
    return {
        "accuracy": 100.0 * right.sum() / len(y),
        "balanced_accuracy": (
            100.0 * float((right[count > 0] / count[count > 0]).mean())
            if (count > 0).sum() > 1
            else None
        ),
        "f1_macro": 100.0 * float((2 * right[either > 0] / either[either > 0]).mean()),
        "auroc": mean_known([area_under_roc(y == c, probs[:, c]) for c in asked]),
        "average_precision": mean_known([average_precision(y == c, probs[:, c]) for c in asked]),
        "log_loss": log_loss(probs[np.arange(len(y)), y]),
        "ece": calibration_error(probs.max(1), predicted == y),
    }


def _multilabel(y: Array, probs: Array) -> dict[str, float | None]:
    predicted = probs > 0.5
    hits, either = (predicted & (y == 1)).sum(0), predicted.sum(0) + y.sum(0)
    columns = range(y.shape[1])
    return {
        "f1": 200.0 * hits.sum() / max(1, either.sum()),
        "f1_macro": 100.0 * float((2 * hits / np.maximum(1, either)).mean()),
        "map": mean_known([average_precision(y[:, c], probs[:, c]) for c in columns]),
        "auroc": mean_known([area_under_roc(y[:, c], probs[:, c]) for c in columns]),
        "log_loss": log_loss(np.where(y == 1, probs, 1 - probs)),
    }


def _regression(y: Array, predicted: Array) -> dict[str, float | None]:
    error = predicted.reshape(y.shape) - y
    varies = len(y) > 1 and bool((y != y[:1]).any(0).all())
    total = ((y - y.mean(0)) ** 2).sum(0)
    return {
        "r2": float((1 - (error**2).sum(0) / total).mean()) if varies else None,
        "mae": float(np.abs(error).mean()),
        "rmse": math.sqrt((error**2).mean()),
    }
