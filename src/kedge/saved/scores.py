"""Final metrics from all scores of a model: global, per client and per class.

Rounds are recorded with metrics that are functions of sums (:mod:`kedge.core.metrics`). At the end
of a run, and in ``kedge evaluate``, all scores are at hand, so these metrics are exact: those of
scikit-learn, in plain numpy, which takes well under a millisecond for each of thousands of small
clients. Names and units are those of the records: percent for accuracy and F1, 0 to 1 for AUROC,
average precision and calibration error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kedge.core import tree
from kedge.core.metrics import ECE_BINS, LOWER_IS_BETTER
from kedge.core.task import Classification, MultiLabel, Regression, Task
from kedge.errors import NotFinite
from kedge.sim.simulation import Simulation, own_metric

Array = np.ndarray[Any, Any]
Values = dict[str, Any]


class Exact(NamedTuple):
    """The metrics of some samples; NaN has no meaning and is left out of what is written."""

    values: Values
    columns: dict[str, Array] = {}  # metrics by name, ``[classes]``
    confusion: Array | None = None  # true classes in rows, predicted ones in columns


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

    Raises:
        NotFinite: a score is NaN or infinite.

    >>> from kedge.core.task import Classification
    >>> found = score(Classification(2), ["well", "sick"], [0, 0, 1, 1], [0.1, 0.6, 0.4, 0.9])
    >>> found["global"]["auroc"], found["confusion"]
    (0.75, [[1, 1], [1, 1]])
    """
    y, scores = np.asarray(y), _columns(task, np.asarray(scores, dtype=float))
    exact = exact_metrics(task, y, scores)
    wrong = ~np.isfinite(scores).all(1)
    if len(exact.values) > 1 and wrong.any():
        raise NotFinite(f"the model gives NaN or infinity for {wrong.sum()} of {len(y)} samples")
    found: Values = {"global": _plain(exact.values)}
    if exact.columns:
        found["per_class"] = {
            str(name): _plain({key: column[c] for key, column in exact.columns.items()})
            for c, name in enumerate(classes or range(task.outputs))
        }
    if exact.confusion is not None:
        found["confusion"] = exact.confusion.tolist()
    if client is not None:
        owners = np.asarray(client)
        names = dict.fromkeys(owners.tolist())
        each = {str(k): _of_one(task, y[owners == k], scores[owners == k]) for k in names}
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
                values[name] = _of_one(task, y, scores) | _plain(own_metric(task, y, scores))
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


def _of_one(task: Task, y: Array, scores: Array) -> Values:
    """The metrics of one client by name."""
    return _plain(exact_metrics(task, y, scores).values)


def _plain(values: Mapping[str, Any]) -> Values:
    """Plain numbers; those that are not finite are left out."""
    plain = {n: int(v) if n == "samples" else float(v) for n, v in values.items()}
    return {name: value for name, value in plain.items() if math.isfinite(value)}


# -- metrics --------------------------------------------------------------------------------------


def exact_metrics(task: Task, y: Array, scores: Array) -> Exact:
    """The metrics of some samples, as :func:`score` takes them, with scores ``[n, outputs]``."""
    found = Exact({})
    with np.errstate(divide="ignore", invalid="ignore"):  # what has no meaning becomes NaN
        if len(y) and isinstance(task, Classification):
            found = _classification(y.reshape(-1).astype(int), scores)
        elif len(y) and isinstance(task, MultiLabel):
            y = y.reshape(len(y), -1).astype(int)
            found = _multilabel(y, scores.reshape(y.shape))
        elif len(y) and isinstance(task, Regression):
            y = y.reshape(len(y), -1).astype(float)
            found = _regression(y, scores.reshape(y.shape))
    return found._replace(values={"samples": len(y)} | found.values)


def _classification(y: Array, probs: Array) -> Exact:
    classes, predicted = probs.shape[1], probs.argmax(1)
    confusion = np.bincount(classes * y + predicted, minlength=classes**2)
    confusion = confusion.reshape(classes, classes)
    count, said, right = confusion.sum(1), confusion.sum(0), np.diag(confusion)
    ranked = [rankings(y == c, probs[:, c]) if count[c] else _UNRANKED for c in range(classes)]
    auroc, precision = np.array(ranked).T
    recall, f1 = 100.0 * right / count, 200.0 * right / (count + said)
    values = {
        "accuracy": 100.0 * right.sum() / len(y),
        "balanced_accuracy": _mean(recall) if (count > 0).sum() > 1 else math.nan,
        "f1_macro": _mean(f1),
        "auroc": auroc[1] if classes == 2 else _mean(auroc),
        "average_precision": precision[1] if classes == 2 else _mean(precision),
        "log_loss": log_loss(probs[np.arange(len(y)), y]),
        "ece": calibration_error(probs.max(1), predicted == y),
    }
    columns = {
        "samples": count,
        "accuracy": recall,
        "precision": 100.0 * right / said,
        "f1": f1,
        "auroc": auroc,
        "average_precision": precision,
    }
    return Exact(values, columns, confusion)


def _multilabel(y: Array, probs: Array) -> Exact:
    predicted = probs > 0.5
    hits, either = (predicted & (y == 1)).sum(0), predicted.sum(0) + y.sum(0)
    auroc, precision = np.array([rankings(*pair) for pair in zip(y.T, probs.T, strict=True)]).T
    f1 = 200.0 * hits / either
    values = {
        "f1": 200.0 * hits.sum() / max(1, either.sum()),
        "f1_macro": np.nan_to_num(f1).mean(),  # 0 for a label that neither occurs nor is predicted
        "map": _mean(precision),
        "auroc": _mean(auroc),
        "log_loss": log_loss(np.where(y == 1, probs, 1 - probs)),
    }
    columns = {"samples": y.sum(0), "f1": f1, "auroc": auroc, "average_precision": precision}
    return Exact(values, columns)


def _regression(y: Array, predicted: Array) -> Exact:
    error = predicted - y
    varies = (y != y[:1]).any(0)
    r2 = np.where(varies, 1 - (error**2).sum(0) / ((y - y.mean(0)) ** 2).sum(0), math.nan)
    mae, mse = np.abs(error).mean(0), (error**2).mean(0)
    values = {"r2": r2.mean(), "mae": mae.mean(), "rmse": math.sqrt(mse.mean())}
    if y.shape[1] == 1:
        return Exact(values)
    samples = np.full(y.shape[1], len(y))
    return Exact(values, {"samples": samples, "r2": r2, "mae": mae, "rmse": np.sqrt(mse)})


_UNRANKED = (math.nan, math.nan)


def rankings(y: Array, scores: Array) -> tuple[float, float]:
    """AUROC and average precision of one class; NaN where all samples are of one kind.

    AUROC is the share of pairs of a positive and a negative that are in order; ties count 1/2.
    Average precision is the mean over positives of the precision among the samples that score at
    least as high.

    >>> rankings(np.array([0, 0, 1, 1]), np.array([0.1, 0.6, 0.4, 0.9]))
    (0.75, 0.8333333333333333)
    """
    _, at = np.unique(scores, return_inverse=True)
    positives = np.bincount(at, y)  # at each different score, from the lowest
    negatives = np.bincount(at) - positives
    pairs = positives.sum() * negatives.sum()
    if not pairs:
        return _UNRANKED
    below = negatives.cumsum() - negatives
    auroc = (positives * (below + 0.5 * negatives)).sum() / pairs
    hits, misses = positives[::-1].cumsum(), negatives[::-1].cumsum()
    precision = (positives[::-1] * hits / (hits + misses)).sum() / positives.sum()
    return float(auroc), float(precision)


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


def _mean(values: Array) -> float:
    """The mean over classes that have the metric; NaN where none has."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan
