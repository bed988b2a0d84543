"""Choose by validation data: the best round of a seed, early stopping, the best of several results.

Validation rows are held out at the clients (``--validation 0.1``); they are neither trained nor
tested on. A round, a setting or a method is chosen by the headline metric on them. Personal methods
are chosen by the clients' personal models, all validation samples of all clients together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kedge.core import tree
from kedge.core.method import parse
from kedge.history.compare import lead
from kedge.runs.result import Result
from kedge.settings import Config
from kedge.sim.simulation import Simulation, own_metric

Record = dict[str, Any]
ON_VALIDATION = "chosen on validation data"
ON_TEST = "best on the test set, as papers report it; choose with --validation 0.1"


def further_tests(sim: Simulation, config: Config) -> Record:
    """Metrics on validation rows, and of the global model on clients that never train."""
    fed, record = sim.federation, Record()
    missing = {sim.task.metric: math.nan}  # e.g. AUROC of samples of one class
    if fed.validation:
        rows = torch.cat(fed.validation)
        record["validation"] = missing | sim.evaluate_rows(sim.output, rows)
        if config.personal:
            own = _personal(sim) if sim.has_personal_models else record["validation"]
            record["personal_validation"] = missing | own
    if fed.unseen is not None:
        record["unseen"] = missing | sim.evaluate_rows(sim.output, fed.unseen)
    return record


def _personal(sim: Simulation) -> dict[str, float]:
    """Metrics of the clients' personal models, all their validation samples together."""
    fed, weights = sim.federation, sim.personal()
    bound = sim.bound.detailed() if sim.task.headline.needs else sim.bound
    total: dict[str, torch.Tensor] = {}
    for sums in sim.engine.evaluate(bound, weights, fed.validation, True):
        if sums:
            total = tree.add(total, sums) if total else sums
    report = sim.task.report(total)
    if sim.task.headline.function is not None:  # of labels and scores, not of sums
        clients = [k for k, rows in enumerate(fed.validation) if len(rows)]
        found = [sim.scores(tree.take(weights, k), [fed.clean(fed.validation[k])]) for k in clients]
        labels, scores = (np.concatenate(column) for column in zip(*found, strict=True))
        report |= own_metric(sim.task, labels, scores)
    return report


@dataclass
class RoundChoice:
    """The best round so far by validation data; of equal ones, the first.

    >>> choice = RoundChoice("validation", "accuracy", higher_is_better=True, patience=2)
    >>> for round, value in enumerate((80.0, 90.0, 90.0, 85.0), 1):
    ...     _ = choice.see({"round": round, "validation": {"accuracy": value}})
    >>> choice.round, choice.tests_since, choice.is_over
    (2, 2, True)
    """

    key: str
    metric: str
    higher_is_better: bool
    patience: int = 0  # 0: never over
    round: int = 0  # 0: none yet
    value: float = math.nan
    tests_since: int = 0

    def is_better(self, record: Record) -> bool:
        """Whether a tested round is better than the best one so far."""
        value = record[self.key][self.metric]
        if math.isnan(value):
            return False
        if math.isnan(self.value):
            return True
        return bool(value > self.value if self.higher_is_better else value < self.value)

    def would_end(self, record: Record) -> bool:
        """Whether the patience ends with this round; False for a round that was not tested."""
        if not self.patience or self.key not in record or self.is_better(record):
            return False
        return self.tests_since + 1 >= self.patience

    def see(self, record: Record) -> bool:
        """Take note of a round; returns whether it is the best one so far."""
        if self.key not in record:
            return False
        better = self.is_better(record)
        if better:
            self.round, self.value = record["round"], record[self.key][self.metric]
        self.tests_since = 0 if better else self.tests_since + 1
        return better

    @property
    def is_over(self) -> bool:
        """Whether there were ``patience`` tests without a better one."""
        return 0 < self.patience <= self.tests_since


def choice_of(config: Config, sim: Simulation) -> RoundChoice | None:
    """The choice of a seed before its first round; None without validation rows."""
    task = sim.task
    if not sim.federation.validation:
        return None
    return RoundChoice(chosen_by(config), task.metric, task.higher_is_better, config.patience)


def chosen_by(config: Config) -> str:
    """The key of the records that rounds and settings are chosen by."""
    personal = config.personal and parse(config.method).personal_model
    return "personal_validation" if personal else "validation"


def leader(results: Sequence[Result]) -> Result:
    """The best result: by validation data where all have them, otherwise by the last test.

    Yardsticks, such as training on pooled data, do not compete. NaN and runs that diverged count as
    worst.
    """
    best, _ = lead(results)
    return results[best or 0]


def data_of_choice(results: Sequence[Result]) -> str:
    """On which data the best of several results is chosen, for people."""
    return ON_VALIDATION if lead(results)[1] == "validation" else ON_TEST
