"""Metrics of the built-in tasks as functions of sums, which add up over batches and clients.

Accuracy, balanced accuracy, F1, R², MAE, RMSE, log loss and calibration error are exact. AUROC and
average precision come from histograms of scores with ``SCORE_BINS`` bins: samples of one bin count
as tied. A histogram is a sum, too, so it adds up over clients without any score leaving them.

Error bounds. Two samples in different bins are ordered as in the data. A positive and a negative in
one bin count 1/2 where the exact value counts 0, 1/2 or 1, so with p_b positives and n_b negatives
in bin b, P and N in all, the error of AUROC is at most 1/2 sum_b p_b n_b / (P N) (``auroc_bound``).
For average precision the precision at each positive of a bin lies between that after all of the
bin's negatives and that before them (``average_precision_bound``).

The bins are of equal width in the softsign of the log-odds z, (1 + z/(1+|z|))/2. It keeps the
order of scores, needs no range, and separates the confident scores that bins of equal width in the
probability would merge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.core.task_base import Metric, Sums

SCORE_BINS = 1000  # of the histograms for AUROC and average precision
ECE_BINS = 15  # of the calibration error, of equal width in the confidence


# -- sums -----------------------------------------------------------------------------------------


def log_odds(logits: Tensor) -> Tensor:
    """log p_c - log(1 - p_c) of every class, ``[B, C]``, without cancellation for p_c near 1."""
    top = logits.argmax(-1, keepdim=True)
    is_top = top == torch.arange(logits.shape[-1], device=logits.device)
    log_p = F.log_softmax(logits, -1)
    rest = torch.where(is_top, float("-inf"), logits).logsumexp(-1, keepdim=True)
    of_top = logits.gather(-1, top) - rest  # [B, 1]
    p = torch.where(is_top, 0.0, log_p.exp())
    return torch.where(is_top, of_top, log_p - torch.log1p(-p))


def score_bins(z: Tensor) -> Tensor:
    """The bin of every log-odds, int64; larger log-odds are in the same or a later bin."""
    unit = 0.5 * (1 + z / (1 + z.abs()))
    unit = torch.where(z.abs() == float("inf"), (z > 0).to(z.dtype), unit)
    return (unit.nan_to_num() * SCORE_BINS).to(torch.int64).clamp(0, SCORE_BINS - 1)


def histogram(z: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Samples by score, ``[C, 2, bins]``: negatives, then positives, of each class.

    Args:
        z: log-odds, ``[B, C]``.
        labels: 1 where the sample is of the class, ``[B, C]``.
        mask: 1 for samples that count, ``[B]``.
    """
    classes = torch.arange(z.shape[-1], device=z.device)
    at = (2 * classes + (labels > 0.5).to(torch.int64)) * SCORE_BINS + score_bins(z)  # [B, C]
    ones = mask[:, None].expand(at.shape).reshape(-1)
    empty = torch.zeros(2 * z.shape[-1] * SCORE_BINS, dtype=mask.dtype, device=z.device)
    return empty.scatter_add(0, at.reshape(-1), ones).reshape(-1, 2, SCORE_BINS)


def calibration_sums(probs: Tensor, right: Tensor, mask: Tensor) -> Tensor:
    """Samples, confidence and right answers of each bin of the calibration error, ``[3, bins]``."""
    confidence = probs.max(-1).values  # [B]
    at = ((confidence * ECE_BINS).ceil().to(torch.int64) - 1).clamp(0, ECE_BINS - 1)
    bins = torch.arange(ECE_BINS, device=probs.device)
    one_hot = (at[:, None] == bins).to(probs.dtype) * mask[:, None]  # [B, bins]
    return torch.stack([torch.ones_like(confidence), confidence, right]) @ one_hot


def residual_sums(predicted: Tensor, y: Tensor, mask: Tensor) -> Sums:
    """Sums over samples of y, y², |error| and error², each ``[outputs]``, in float64."""
    y, weight = y.double(), mask.double()[:, None]
    error = predicted.double() - y
    return {
        "sum_y": (y * weight).sum(0),
        "sum_y2": (y**2 * weight).sum(0),
        "sum_abs": (error.abs() * weight).sum(0),
        "sum_sq": (error**2 * weight).sum(0),
    }


# -- functions of sums ----------------------------------------------------------------------------


def auroc(hist: Tensor) -> float | None:
    """Area under the ROC curve from a histogram ``[2, bins]``; None without both kinds."""
    negatives, positives = hist.double()
    pairs = positives.sum() * negatives.sum()
    below = negatives.cumsum(0) - negatives  # negatives with a lower score
    won = (positives * (below + 0.5 * negatives)).sum()
    return float(won / pairs) if pairs > 0 else None


def auroc_bound(hist: Tensor) -> float | None:
    """Largest possible error of :func:`auroc`: 1/2 sum_b p_b n_b / (P N)."""
    negatives, positives = hist.double()
    pairs = positives.sum() * negatives.sum()
    return float(0.5 * (positives * negatives).sum() / pairs) if pairs > 0 else None


def average_precision(hist: Tensor) -> float | None:
    """Mean over positives of the precision at their score, from a histogram ``[2, bins]``."""
    positives, above, total = _ranked(hist)
    if not 0 < positives.sum() < total[-1]:
        return None
    return float((positives * (above + positives) / total.clamp_min(1)).sum() / positives.sum())


def average_precision_bound(hist: Tensor) -> float | None:
    """Largest possible error of :func:`average_precision`.

    Let A positives and B negatives have a score above a bin with p positives and n negatives. The
    estimate takes (A+p)/(A+p+B+n) for each of the p. The exact precisions are at most
    (A+p)/(A+p+B), with all negatives last, and the i-th is at least (A+i)/(A+i+B+n), with all
    negatives first.
    """
    positives, above, total = _ranked(hist)
    if not 0 < positives.sum() < total[-1]:
        return None
    reach, negatives = above + positives, total - above - positives  # negatives: B + n
    before = torch.cat([negatives.new_zeros(1), negatives[:-1]])  # B
    has = positives > 0
    estimate = torch.where(has, positives * reach / total.clamp_min(1), 0.0)
    most = torch.where(has, positives * reach / (reach + before).clamp_min(1), 0.0)
    # sum over i of (A+i)/(A+i+B+n) = p - (B+n) (psi(A+p+B+n+1) - psi(A+B+n+1))
    spread = torch.digamma(reach + negatives + 1) - torch.digamma(above + negatives + 1)
    least = torch.where(has, positives - negatives * spread, 0.0)
    return float(torch.maximum((most - estimate).sum(), (estimate - least).sum()) / positives.sum())


def _ranked(hist: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From the highest bin: positives, positives above, and all samples up to the bin."""
    negatives, positives = hist.double().flip(-1)
    return positives, positives.cumsum(0) - positives, (positives + negatives).cumsum(0)


def _over_classes(
    metric: Callable[[Tensor], float | None], hist: Tensor, two: bool = True
) -> float | None:
    """Of class 1 if there are two (``two``), else the mean over classes that have the metric."""
    rows = [hist[1]] if two and len(hist) == 2 else list(hist)
    values = [metric(row) for row in rows]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _samples(sums: Sums) -> float:
    return max(1.0, float(sums["count"].sum()))


def mean_loss(sums: Sums) -> float:
    return float(sums["loss"] / sums["samples"])


def _balanced_accuracy(sums: Sums) -> float | None:
    """None for samples of one class, which cannot balance anything: a constant answer is right."""
    present = sums["count"] > 0
    recalls = (sums["right"][present] / sums["count"][present]).double()
    return 100.0 * float(recalls.mean()) if len(recalls) > 1 else None


def _f1_present(sums: Sums) -> float | None:
    """Macro-F1 over the classes that occur or are predicted, as scikit-learn's."""
    either = (sums["predicted"] + sums["count"]).double()
    present = either > 0
    f1 = 2 * sums["right"].double()[present] / either[present]
    return 100.0 * float(f1.mean()) if len(f1) else None


def _ece(sums: Sums) -> float | None:
    samples, confidence, right = sums["calibration"].double()
    total = float(samples.sum())
    return float((right - confidence).abs().sum()) / total if total else None


def _f1(sums: Sums) -> float:
    hits, predicted, count = sums["hits"], sums["said"], sums["count"]
    return 100.0 * float(2 * hits.sum() / (predicted.sum() + count.sum()).clamp_min(1))


def _f1_macro(sums: Sums) -> float:
    hits, predicted, count = sums["hits"], sums["said"], sums["count"]
    return 100.0 * float((2 * hits / (predicted + count).clamp_min(1)).mean())


def _r2(sums: Sums) -> float | None:
    n = float(sums["samples"])
    total = sums["sum_y2"] - sums["sum_y"] ** 2 / max(n, 1.0)  # [outputs]
    if n < 2 or bool((total <= 1e-12 * sums["sum_y2"]).any()):
        return None  # targets that do not vary
    return float((1 - sums["sum_sq"] / total).mean())


# -- the metrics of each task ----------------------------------------------------------------------

HISTOGRAM, CALIBRATION, LIKELIHOOD = ("histogram",), ("calibration",), ("nll",)

CLASSIFICATION = (
    Metric(
        "accuracy", lambda sums: 100.0 * float(sums["right"].sum()) / _samples(sums),
        unit="%", higher_is_better=True, doc="Share of samples whose class is predicted.",
    ),
    Metric(
        "loss", lambda sums: float(sums["loss"]) / _samples(sums),
        doc="The loss that is trained, mean over samples; class weights and an own loss count.",
    ),
    Metric(
        "balanced_accuracy", _balanced_accuracy, unit="%", higher_is_better=True,
        doc="Mean over classes of the share of their samples that is right; 100/C % by chance.",
    ),
    Metric(
        "f1_macro", _f1_present, unit="%", higher_is_better=True,
        doc="Mean over classes of F1, the harmonic mean of precision and recall.",
    ),
    Metric(
        "auroc", lambda sums: _over_classes(auroc, sums["histogram"]),
        higher_is_better=True, decimals=3, needs=HISTOGRAM,
        bound=lambda sums: _over_classes(auroc_bound, sums["histogram"]),
        doc="Probability that a positive scores above a negative; several classes: one against "
        "the rest, mean over classes.",
    ),
    Metric(
        "average_precision", lambda sums: _over_classes(average_precision, sums["histogram"]),
        higher_is_better=True, decimals=3, needs=HISTOGRAM,
        bound=lambda sums: _over_classes(average_precision_bound, sums["histogram"]),
        doc="Area under precision over recall; several classes: one against the rest, mean.",
    ),
    Metric(
        "log_loss", lambda sums: float(sums["nll"]) / _samples(sums), decimals=3, needs=LIKELIHOOD,
        doc="Cross-entropy of the predicted probabilities, without class weights.",
    ),
    Metric(
        "ece", _ece, decimals=3, needs=CALIBRATION,
        doc=f"Calibration error: mean of |accuracy - confidence| over {ECE_BINS} bins of equal "
        "width in the confidence.",
    ),
)  # fmt: skip

MULTILABEL = (
    Metric(
        "f1", _f1, unit="%", higher_is_better=True, doc="F1 over all decisions (micro average)."
    ),
    Metric(
        "f1_macro", _f1_macro, unit="%", higher_is_better=True, doc="Mean over labels of F1."
    ),
    Metric("loss", mean_loss, doc="The loss that is trained, mean over samples."),
    Metric(
        "map", lambda sums: _over_classes(average_precision, sums["histogram"], two=False),
        higher_is_better=True, decimals=3, needs=HISTOGRAM,
        bound=lambda sums: _over_classes(average_precision_bound, sums["histogram"], two=False),
        doc="Mean over labels of the average precision.",
    ),
    Metric(
        "auroc", lambda sums: _over_classes(auroc, sums["histogram"], two=False),
        higher_is_better=True, decimals=3, needs=HISTOGRAM,
        bound=lambda sums: _over_classes(auroc_bound, sums["histogram"], two=False),
        doc="Mean over labels of the area under the ROC curve.",
    ),
)  # fmt: skip

REGRESSION = (
    Metric(
        "rmse", lambda sums: float((sums["sum_sq"].mean() / sums["samples"]) ** 0.5),
        doc="Root of the mean squared error.",
    ),
    Metric("loss", mean_loss, doc="The loss that is trained, mean over samples."),
    Metric(
        "mae", lambda sums: float(sums["sum_abs"].mean() / sums["samples"]),
        doc="Mean absolute error.",
    ),
    Metric(
        "r2", _r2, higher_is_better=True, decimals=3,
        doc="1 - squared error / variance of the targets; 0 for their mean as prediction.",
    ),
)  # fmt: skip

BUILT_IN: dict[str, Sequence[Metric]] = {
    "classification": CLASSIFICATION,
    "multilabel": MULTILABEL,
    "regression": REGRESSION,
}
LOWER_IS_BETTER = {
    metric.name for group in BUILT_IN.values() for metric in group if not metric.higher_is_better
}
