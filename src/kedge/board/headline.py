"""The number that stands for a run: its metric, and of which models.

The tables are for folders without a header. They repeat what the tasks and parts of kedge declare,
so that the board need not import them; a test compares them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from kedge.runs.header import Header, MetricInfo, metric_info, title_of

PERCENT, SCORE, ERROR, FINE_ERROR = ("%", True, 2), ("", True, 3), ("", False, 2), ("", False, 3)
KINDS = {
    "accuracy": PERCENT, "loss": ERROR, "balanced_accuracy": PERCENT, "f1_macro": PERCENT,
    "auroc": SCORE, "average_precision": SCORE, "log_loss": FINE_ERROR, "ece": FINE_ERROR,
    "f1": PERCENT, "map": SCORE, "rmse": ERROR, "mae": ERROR, "r2": SCORE,
}  # fmt: skip
METRICS = {name: MetricInfo(name, title_of(name), *kind) for name, kind in KINDS.items()}
#: The first metric of every task, which is its headline.
FIRST = ("accuracy", "f1", "rmse")
#: Parts whose clients' own models count.
PERSONAL = frozenset(("ditto", "fedbn", "fedper", "fedrep", "finetune", "local"))
COLUMNS = {"client": "client_mean", "personal": "personal_mean"}


def metric(
    header: Header | None,
    config: Mapping[str, Any],
    result: Mapping[str, Any],
    columns: Iterable[str],
) -> MetricInfo | None:
    """The metric of a run; ``columns`` are those of its records. None if it is not known."""
    chosen, known = config.get("metric", "auto"), set(columns)
    named = header.headline if header is not None else result.get("metric")
    if not isinstance(named, str):
        named = chosen if isinstance(chosen, str) and chosen != "auto" else ""
        named = named or next((name for name in FIRST if name in known), "")
    return metric_info(named, header, result, METRICS) if named else None


def column_of(
    header: Header | None,
    config: Mapping[str, Any],
    result: Mapping[str, Any],
    columns: Iterable[str],
) -> str:
    """The column of the records that the headline is in; empty if it is not known."""
    known, headline = set(columns), result.get("headline")
    if headline is None and "personal_mean" in known:
        personal = header.personal if header is not None else _is_personal(config)
        headline = "personal" if personal else None
    shown = metric(header, config, result, known)
    return COLUMNS.get(str(headline), "") or (shown.name if shown else "")


def _is_personal(config: Mapping[str, Any]) -> bool:
    """Whether a method is for the clients' own models, where the folder does not say so."""
    words = set(re.findall(r"[a-z_0-9]+", str(config.get("method", "")).lower()))
    return bool(config.get("personal")) and bool(words & PERSONAL)


def label(name: str, column: str) -> str:
    """The headline in words: the metric, and of which models if not of the global one."""
    whose = {"client_mean": ", mean of clients", "personal_mean": ", own models"}
    return name + whose.get(column, "")
