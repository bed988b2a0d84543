"""Curves over rounds, megabytes and seconds, with few enough points for a page.

Rounds are thinned by largest triangles (LTTB, Steinarsson 2013) on the mean over seeds, which keeps
peaks and dips; all seeds of a run keep the same rounds, so that mean and spread stay exact there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kedge.core.task import tasks
from kedge.report.page.source import Seed, Source
from kedge.runs.header import TITLES, MetricInfo

BUDGET = 120_000  # numbers of all curves of a page
MAX_POINTS, MIN_POINTS = 240, 24  # of one curve
#: Columns of tested rounds beside the headline, in the order of the switch.
TESTED = (
    "balanced_accuracy", "auroc", "f1_macro", "client_mean", "client_worst", "client_spread",
    "personal_mean", "personal_worst", "loss",
)  # fmt: skip
TRAINED = ("train_loss", "divergence")  # of every round
NAMES = {
    "loss": "test loss",
    "train_loss": "training loss",
    "divergence": "divergence of clients",
    "balanced_accuracy": "balanced accuracy",
    "client_mean": "global model, mean over clients",
    "client_worst": "global model, worst client",
    "client_spread": "global model, spread over clients",
    "personal_mean": "personal models, mean over clients",
    "personal_worst": "personal models, worst client",
}


def lttb(x: Sequence[float], y: Sequence[float], keep: int) -> list[int]:
    """Indices of ``keep`` points of a curve: its ends, and those of the largest triangles.

    >>> lttb(range(9), [0, 0, 0, 0, 9, 0, 0, 0, 0], 4)
    [0, 3, 4, 8]
    """
    n = len(x)
    if keep >= n or keep < 3:
        return list(range(n)) if keep >= n else [0, n - 1][: min(n, 2)]
    values = [v if math.isfinite(v) else 0.0 for v in y]
    width = (n - 2) / (keep - 2)
    found, at = [0], 0
    for i in range(keep - 2):
        start, end = math.floor(i * width) + 1, math.floor((i + 1) * width) + 1
        after = range(end, min(math.floor((i + 2) * width) + 1, n))
        next_x = sum(x[j] for j in after) / len(after)
        next_y = sum(values[j] for j in after) / len(after)
        areas = [
            abs(
                (x[at] - next_x) * (values[j] - values[at]) - (x[at] - x[j]) * (next_y - values[at])
            )
            for j in range(start, end)
        ]
        at = start + max(range(len(areas)), key=areas.__getitem__)
        found.append(at)
    return [*found, n - 1]


def columns_of(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """The columns that every run has, the headline first, for the switch of the curves."""
    first = sources[0]
    metrics = {m.name: MetricInfo.of(m) for name in tasks for m in tasks[name].metrics}
    keys = [first.column if len({s.column for s in sources}) == 1 else "headline"]
    for key in (first.metric.name, *TESTED):
        if key not in keys and all(source.has(key) for source in sources):
            keys.append(key)
    found = []
    for key in keys:
        own = key not in metrics and key not in ("loss",)  # of the headline metric
        metric = first.metric if own or key == first.metric.name else metrics.get(key)
        found.append(
            {
                "key": key,
                "label": _label(key, sources, is_first=key == keys[0]),
                "unit": metric.unit if metric else "",
                "decimals": metric.decimals if metric else 3,
                "higher": (metric.higher_is_better if metric else False) and key != "client_spread",
                "kind": "test",
            }
        )
    for key in TRAINED:
        found.append(
            {"key": key, "label": NAMES[key], "unit": "", "decimals": 3, "higher": False,
             "kind": "train"}
        )  # fmt: skip
    return found


def _label(key: str, sources: Sequence[Source], is_first: bool) -> str:
    name = sources[0].metric.title
    if is_first and any(source.headline != "global" for source in sources):
        return f"{name} of clients"
    if key.startswith(("client_", "personal_")):
        return f"{name}, {NAMES[key]}" if key in NAMES else key
    return TITLES.get(key) or NAMES.get(key, name if is_first else key.replace("_", " "))


def curves_of(sources: Sequence[Source], columns: Sequence[dict[str, Any]], share: float) -> Any:
    """The curves of some runs; ``share`` is their part of the page's numbers."""
    total = sum(len(source.seeds) for source in sources) or 1
    points = int(BUDGET * share / (total * (len(columns) + 3)))
    points = max(MIN_POINTS, min(MAX_POINTS, points))
    tested = [c["key"] for c in columns if c["kind"] == "test"]
    return [
        {
            "seeds": [s.number for s in source.seeds],
            "test": _block(source, tested, points, source.column),
            "train": _block(source, list(TRAINED), points, "train_loss"),
        }
        for source in sources
    ]


def _block(source: Source, keys: Sequence[str], points: int, main: str) -> dict[str, Any]:
    """Columns at thinned rounds: ``y[key][seed][i]``, with ``mb`` and ``s`` up to each round."""
    columns = {key: source.column if key == "headline" else key for key in keys}
    rows = [_by_round(s, main) for s in source.seeds]
    rounds = sorted({r for own in rows for r in own})
    means = [_mean([own[r][0].get(main) for own in rows if r in own]) for r in rounds]
    kept = [rounds[i] for i in lttb(rounds, means, points)]
    return {
        "rounds": kept,
        "mb": [[short(own[r][1]) if r in own else None for r in kept] for own in rows],
        "s": [[short(own[r][2]) if r in own else None for r in kept] for own in rows],
        "y": {
            key: [[short(own[r][0].get(name)) if r in own else None for r in kept] for own in rows]
            for key, name in columns.items()
        },
    }


def _by_round(seed: Seed, main: str) -> dict[int, tuple[dict[str, Any], float, float]]:
    """Records that have a column, by round, with megabytes and seconds so far."""
    found, mb, seconds = {}, 0.0, 0.0
    for record in seed.records:
        mb += float(record.get("mb_up", 0.0)) + float(record.get("mb_down", 0.0))
        seconds += float(record.get("seconds", 0.0))
        if main in record:
            found[int(record["round"])] = (record, mb, seconds)
    return found


def _mean(values: Sequence[Any]) -> float:
    known = [float(v) for v in values if v is not None and math.isfinite(v)]
    return sum(known) / len(known) if known else math.nan


def short(value: Any, digits: int = 5) -> float | int | None:
    """A number with few digits, for the page; None where there is none.

    >>> short(87.123456), short(12.0), short(float("nan"))
    (87.123, 12, None)
    """
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e15 else rounded
