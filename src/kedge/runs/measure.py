"""The tests of a round: metrics of the global model, and of each client's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kedge.core.metrics import SCORE_BINS
from kedge.core.task import Task
from kedge.history.metric import COMPANIONS
from kedge.runs.build import is_personal
from kedge.settings import Config
from kedge.sim.simulation import Simulation

MIN_MINORITY = 0.3  # of two classes; below it they count as imbalanced
MAX_HISTOGRAM_NUMBERS = 50_000_000  # of all clients together, for AUROC beside the accuracy


def measure(sim: Simulation, config: Config, final: bool) -> dict[str, Any]:
    """What a test adds to the record of a round.

    Every test has the metrics that come from small sums. Those from score histograms are there if
    one of them is the headline, and in the last round (``final``). Where classes are imbalanced,
    ``imbalanced`` is the share of the largest one.

    With held-out samples, ``client_mean``, ``client_worst``, ``client_spread`` (standard deviation)
    and ``per_client`` are of the headline metric of the global model on each client's; those of
    ``personal`` are of the clients' own models.
    """
    task, record = sim.task, dict[str, Any]()
    detailed = final or bool(task.headline.needs)
    report, record["per_class"] = sim.evaluate_all(detailed=detailed)
    record |= report
    record.setdefault(task.metric, math.nan)  # e.g. AUROC of a test set with one class
    names: tuple[str, ...] = (task.metric,)
    share = sim.largest_class
    if share is not None and is_imbalanced(share, task.outputs):
        record["imbalanced"] = share
        names += COMPANIONS if task.metric == "accuracy" else ()
    if not sim.federation.held_out:
        return record
    numbers = 2 * SCORE_BINS * task.outputs * sim.federation.num_clients
    wanted = final and len(names) > 1 and numbers <= MAX_HISTOGRAM_NUMBERS
    detailed = wanted or bool(task.headline.needs)
    reports = sim.evaluate_clients(False, detailed, names)
    record |= over_clients("client", reports, task, names)
    if config.personal:
        if sim.has_personal_models:
            reports = sim.evaluate_clients(True, detailed, names)
        record |= over_clients("personal", reports, task, names)
    return record


def over_clients(
    kind: str, reports: Sequence[dict[str, float]], task: Task, names: Sequence[str]
) -> dict[str, Any]:
    """Mean, worst and spread of a metric over clients, for the record of a round.

    Args:
        kind: the prefix of the keys, ``client`` or ``personal``.
        reports: metrics of each client; empty for one without a test.
        task: whose headline metric is taken.
        names: that metric, then others of which the mean is recorded, too.
    """
    values = [report.get(task.metric) for report in reports]
    known = [value for value in values if value is not None] or [math.nan]
    mean = sum(known) / len(known)
    found: dict[str, Any] = {
        f"per_{kind}": values,
        f"{kind}_mean": mean,
        f"{kind}_worst": min(known) if task.higher_is_better else max(known),
        f"{kind}_spread": math.sqrt(sum((v - mean) ** 2 for v in known) / len(known)),
    }
    for name in (*names[1:], f"{task.metric}_bound"):
        others = [report[name] for report in reports if name in report]
        if others:
            found[f"{kind}_{name}"] = sum(others) / len(others)
    return found


def is_imbalanced(largest: float, classes: int) -> bool:
    """Whether the largest class has twice its even share, or one of two the minority's limit.

    >>> is_imbalanced(0.88, 2), is_imbalanced(0.6, 2), is_imbalanced(0.25, 10)
    (True, False, True)
    """
    return largest > (1 - MIN_MINORITY if classes == 2 else 2 / classes)


def headline_of(config: Config, records: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """``personal`` for a personal method whose clients' models were tested, else ``global``."""
    tested = all(any("personal_mean" in record for record in run) for run in records)
    return "personal" if tested and is_personal(config) else "global"
