"""Final metrics from all scores of a model, by scikit-learn: global, per client and per class.

Rounds are recorded with metrics that are functions of sums (:mod:`kedge.core.metrics`). At the end
of a run, and in ``kedge evaluate``, all scores are at hand, so these metrics are exact. Names and
units are those of the records: percent for accuracy and F1, 0 to 1 for AUROC, average precision and
calibration error.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kedge.core import tree
from kedge.core.metrics import LOWER_IS_BETTER
from kedge.core.task import Classification, MultiLabel, Regression, Task
from kedge.runs.quick_scores import calibration_error, log_loss, mean_known, quick_scores
from kedge.sim.evaluation import own_metric
from kedge.sim.simulation import Simulation

Array = np.ndarray[Any, Any]
Values = dict[str, Any]


def score(
    task: Task,
    classes: Sequence[str] | None,
    y: Any,
    scores: Any,
    client: Sequence[Any] | None = None,
) -> Values:
    """All metrics of predictions.

    Args:
        task: the task. A task of one's own has no metrics here but its number of samples.
        classes: names of classes, labels or targets; None names them by number.
        y: labels, ``[n]`` or ``[n, outputs]``.
        scores: probabilities ``[n, C]`` (or ``[n]`` of class 1 of two), probabilities of labels
            ``[n, L]``, or predicted values ``[n]`` or ``[n, outputs]``.
        client: the client of each sample, ``[n]``, for metrics per client.

    Returns:
        ``global`` (metrics by name), ``per_class`` (metrics by class name) and, for classes,
        ``confusion`` (rows: true, columns: predicted, in samples). With ``client`` also
        ``clients`` (metrics by client) and ``over_clients`` (mean, worst and spread of each
        metric). A metric without a meaning, e.g. AUROC of one class only, is left out.

    >>> from kedge.core.task import Classification
    >>> found = score(Classification(2), ["well", "sick"], [0, 0, 1, 1], [0.1, 0.6, 0.4, 0.9])
    >>> found["global"]["auroc"], found["confusion"]
    (0.75, [[1, 1], [1, 1]])
    """
    y, scores = np.asarray(y), _columns(task, np.asarray(scores, dtype=float))
    found = _score(task, classes, y, scores)
    if client is not None:
        owners = np.asarray(client)
        names = dict.fromkeys(owners.tolist())
        each = {str(k): quick_scores(task, y[owners == k], scores[owners == k]) for k in names}
        found |= of_clients(each, task)
    return found


def final_scores(sim: Simulation, personal: bool = False) -> Values:
    """All metrics of a simulation's models, as :func:`score` gives them.

    ``global`` is the global model on the test set (at all test angles together), ``clients`` the
    same model on each client's held-out samples. With ``personal``, ``personal`` holds ``clients``
    and ``over_clients`` of the clients' own models.
    """
    fed, task, weights = sim.federation, sim.task, sim.output
    found: Values = {}
    if fed.has_test:
        pieces = [sim.scores(weights, fed.test_batches(angle)) for angle in fed.angles]
        y, scores = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
        found = score(task, fed.classes, y, scores)
        found["global"] |= _plain(own_metric(task, y, scores))
    if not fed.held_out:
        return found
    names = getattr(fed, "client_names", None) or [str(k) for k in range(fed.num_clients)]

    def every(weights_of: Callable[[int], Any]) -> Values:
        values = {}
        for k, name in enumerate(names):
            if len(fed.held_out[k]):
                y, scores = sim.scores(weights_of(k), fed.held_out_batches(k))
                values[name] = quick_scores(task, y, scores) | _plain(own_metric(task, y, scores))
        return of_clients(values, task)

    found |= every(lambda k: weights)
    if personal:
        stacked = sim.personal()
        found["personal"] = every(lambda k: tree.take(stacked, k))
    return found


def _columns(task: Task, scores: Array) -> Array:
    """Scores as ``[n, outputs]``."""
    scores = scores.reshape(len(scores), -1)
    if isinstance(task, Classification) and scores.shape[1] == 1:
        return np.concatenate([1 - scores, scores], 1)
    return scores


def of_clients(clients: Mapping[str, Values], task: Task) -> Values:
    """``clients`` with their metrics, and ``over_clients``: mean, worst and spread of each metric.

    The spread is the standard deviation over the clients that have the metric.
    """
    names = dict.fromkeys(name for one in clients.values() for name in one if name != "samples")
    higher = {metric.name: metric.higher_is_better for metric in task.metrics}
    summary = {}
    for name in names:
        values = [one[name] for one in clients.values() if name in one]
        worst = min(values) if higher.get(name, name not in LOWER_IS_BETTER) else max(values)
        summary[name] = {
            "mean": float(np.mean(values)),
            "worst": float(worst),
            "spread": float(np.std(values)),
            "clients": len(values),
        }
    return {"clients": dict(clients), "over_clients": summary}


def _score(task: Task, classes: Sequence[str] | None, y: Array, scores: Array) -> Values:
    names = [str(name) for name in classes or range(task.outputs)]
    if not len(y):
        return {"global": {"samples": 0}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn warns of classes without samples
        if isinstance(task, Classification):
            return _classification(names, y.reshape(-1).astype(int), scores)
        if isinstance(task, MultiLabel):
            return _multilabel(names, y.reshape(len(y), -1).astype(int), scores)
        if isinstance(task, Regression):
            return _regression(names, y, scores)
    return {"global": {"samples": len(y)}}


def _classification(names: Sequence[str], y: Array, probs: Array) -> Values:
    from sklearn import metrics as sk

    every = np.arange(len(names))
    predicted, confidence = probs.argmax(1), probs.max(1)
    confusion = sk.confusion_matrix(y, predicted, labels=every)
    one_hot = y[:, None] == every
    auroc = [_ranking(sk.roc_auc_score, one_hot[:, c], probs[:, c]) for c in every]
    precision = [_ranking(sk.average_precision_score, one_hot[:, c], probs[:, c]) for c in every]
    f1 = sk.f1_score(y, predicted, labels=every, average=None, zero_division=0)
    counts, said = confusion.sum(1), confusion.sum(0)
    right = np.diag(confusion)
    values = {
        "samples": len(y),
        "accuracy": 100.0 * sk.accuracy_score(y, predicted),
        "balanced_accuracy": (
            100.0 * sk.balanced_accuracy_score(y, predicted) if (counts > 0).sum() > 1 else None
        ),
        "f1_macro": 100.0 * sk.f1_score(y, predicted, average="macro", zero_division=0),
        "auroc": auroc[1] if len(names) == 2 else mean_known(auroc),
        "average_precision": precision[1] if len(names) == 2 else mean_known(precision),
        "log_loss": log_loss(probs[np.arange(len(y)), y]),
        "ece": calibration_error(confidence, predicted == y),
    }
    per_class = {
        name: _plain(
            {
                "samples": int(counts[c]),
                "accuracy": 100.0 * right[c] / counts[c] if counts[c] else None,
                "precision": 100.0 * right[c] / said[c] if said[c] else None,
                "f1": 100.0 * f1[c] if counts[c] + said[c] else None,
                "auroc": auroc[c],
                "average_precision": precision[c],
            }
        )
        for c, name in enumerate(names)
    }
    return {"global": _plain(values), "per_class": per_class, "confusion": confusion.tolist()}


def _multilabel(names: Sequence[str], y: Array, probs: Array) -> Values:
    from sklearn import metrics as sk

    probs = probs.reshape(y.shape)
    predicted, labels = (probs > 0.5).astype(int), range(y.shape[1])
    auroc = [_ranking(sk.roc_auc_score, y[:, c], probs[:, c]) for c in labels]
    precision = [_ranking(sk.average_precision_score, y[:, c], probs[:, c]) for c in labels]
    f1 = sk.f1_score(y, predicted, average=None, zero_division=0)
    values = {
        "samples": len(y),
        "f1": 100.0 * sk.f1_score(y, predicted, average="micro", zero_division=0),
        "f1_macro": 100.0 * float(np.mean(f1)),
        "map": mean_known(precision),
        "auroc": mean_known(auroc),
        "log_loss": log_loss(np.where(y == 1, probs, 1 - probs)),
    }
    per_class = {
        name: _plain(
            {
                "samples": int(y[:, c].sum()),
                "f1": 100.0 * f1[c] if y[:, c].any() or predicted[:, c].any() else None,
                "auroc": auroc[c],
                "average_precision": precision[c],
            }
        )
        for c, name in enumerate(names)
    }
    return {"global": _plain(values), "per_class": per_class}


def _regression(names: Sequence[str], y: Array, predicted: Array) -> Values:
    from sklearn import metrics as sk

    y = y.reshape(len(y), -1).astype(float)
    predicted = predicted.reshape(y.shape)

    def values(y: Array, predicted: Array) -> Values:
        varies = len(y) > 1 and bool((y != y[:1]).any(0).all())
        return _plain(
            {
                "samples": len(y),
                "r2": sk.r2_score(y, predicted) if varies else None,
                "mae": sk.mean_absolute_error(y, predicted),
                "rmse": math.sqrt(sk.mean_squared_error(y, predicted)),
            }
        )

    per_class = {name: values(y[:, c], predicted[:, c]) for c, name in enumerate(names)}
    found: Values = {"global": values(y, predicted)}
    return found | ({"per_class": per_class} if y.shape[1] > 1 else {})


def _ranking(metric: Callable[[Array, Array], float], y: Array, scores: Array) -> float | None:
    """A metric of a ranking; None where all samples are of one kind."""
    return float(metric(y, scores)) if 0 < y.sum() < len(y) else None


def _plain(values: Mapping[str, Any]) -> Values:
    """Plain numbers; those that are missing or not finite are left out."""
    known = {name: value for name, value in values.items() if value is not None}
    plain = {n: v if isinstance(v, int) else float(v) for n, v in known.items()}
    return {name: value for name, value in plain.items() if math.isfinite(value)}
