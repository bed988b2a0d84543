"""The number that stands for a run, found without the library: names, units, and what is better.

The tables repeat what the tasks and parts of kedge declare; a test compares them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Metric(NamedTuple):
    """A metric as it is shown."""

    unit: str
    higher_is_better: bool
    decimals: int


PERCENT, SCORE, ERROR, FINE_ERROR = (
    Metric("%", True, 2),
    Metric("", True, 3),
    Metric("", False, 2),
    Metric("", False, 3),
)
METRICS = {
    "accuracy": PERCENT, "loss": ERROR, "balanced_accuracy": PERCENT, "f1_macro": PERCENT,
    "auroc": SCORE, "average_precision": SCORE, "log_loss": FINE_ERROR, "ece": FINE_ERROR,
    "f1": PERCENT, "map": SCORE, "rmse": ERROR, "mae": ERROR, "r2": SCORE,
}  # fmt: skip
#: The first metric of every task, which is its headline.
FIRST = ("accuracy", "f1", "rmse")
#: Parts whose clients' own models count.
PERSONAL = frozenset(("ditto", "fedbn", "fedper", "fedrep", "finetune", "local"))
COLUMNS = {"client": "client_mean", "personal": "personal_mean"}


def metric_name(config: Mapping[str, Any], result: Mapping[str, Any], known: Iterable[str]) -> str:
    """The metric of a run; ``known`` are the columns of its records. Empty if it is not known."""
    named = result.get("metric")
    if isinstance(named, str):
        return named
    chosen, columns = config.get("metric", "auto"), set(known)
    if chosen != "auto":
        return str(chosen)
    return next((name for name in FIRST if name in columns), "")


def column_of(config: Mapping[str, Any], result: Mapping[str, Any], known: Iterable[str]) -> str:
    """The column of the records that the headline is in; empty if it is not known."""
    columns = set(known)
    headline = result.get("headline")
    if headline is None and is_personal(config) and "personal_mean" in columns:
        headline = "personal"
    return COLUMNS.get(str(headline), "") or metric_name(config, result, columns)


def is_personal(config: Mapping[str, Any]) -> bool:
    """Whether a method is for the clients' own models."""
    words = set(re.findall(r"[a-z_0-9]+", str(config.get("method", "")).lower()))
    return bool(config.get("personal")) and bool(words & PERSONAL)


def label(name: str, column: str) -> str:
    """The headline in words: the metric, and of which models if not of the global one."""
    whose = {"client_mean": ", mean of clients", "personal_mean": ", own models"}
    return name + whose.get(column, "")


def metric(name: str, result: Mapping[str, Any]) -> Metric:
    """How a metric is shown; of an own one only the direction is known, from the result."""
    if name in METRICS:
        return METRICS[name]
    return Metric("", bool(result.get("higher_is_better", True)), 3)
