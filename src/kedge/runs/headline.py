"""Which number stands in front: the metric, and of which models.

A personal method is judged by its clients' own models, each on its client's held-out samples. In a
comparison with such a method, the others are judged by the global model on the same samples, client
by client: the mean over clients of the model that each would use.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from kedge.core.method import parse
from kedge.core.task import Task, tasks
from kedge.core.task_base import Metric
from kedge.core.task_custom import (
    balanced_weights,
    own_metrics,
    read_class_weights,
    with_class_weights,
    with_metric,
)
from kedge.data.datasets import Dataset
from kedge.data.federation import Federation
from kedge.runs.config import Config
from kedge.runs.result import COLUMNS

HELD_OUT = "holdout(0.2)"
#: Shown beside the accuracy where classes are imbalanced.
COMPANIONS = ("balanced_accuracy", "auroc")
MIN_MINORITY = 0.3  # of two classes; below it they count as imbalanced


class Headed(Protocol):
    """A dataclass of a run's numbers, one of which stands in front: a result, or a saved run."""

    @property
    def headline(self) -> str:
        """``global``, ``personal`` or ``client``."""

    def has(self, name: str) -> bool:
        """Whether all tested rounds have a column."""


Run = TypeVar("Run", bound=Headed)


def is_personal(config: Config) -> bool:
    """Whether the clients' own models are what the method is for."""
    return parse(config.method).personal_model


def with_personal(configs: Sequence[Config]) -> list[Config]:
    """The configurations of runs that are compared, with ``personal`` set if one is personal."""
    if not any(is_personal(config) for config in configs):
        return list(configs)
    return [dataclasses.replace(config, personal=True) for config in configs]


def split_of(config: Config, dataset: Dataset) -> str:
    """The split of a run: with ``personal``, ``auto`` holds out a share of every client, unless the
    silos have test data of their own."""
    own_tests = dataset.x_test is not None and dataset.groups_test is not None
    return (
        HELD_OUT if config.split == "auto" and config.personal and not own_tests else config.split
    )


def task_of(config: Config, federation: Federation) -> Task:
    """The task of a federation with the class weights and the metric of a configuration.

    Balanced weights are those of scikit-learn, n / (C n_c), from the sum over clients of their
    counts of training samples.

    Raises:
        FieldError: the class weights do not fit the task.
        UnknownName: the task has no such metric.
    """
    task = federation.task
    names = federation.classes or [str(c) for c in range(task.outputs)]
    weights = read_class_weights(config.class_weights, names)
    if weights == "balanced":
        counts = federation.label_counts().sum(0).tolist() if task.one_class else []
        weights = tuple(balanced_weights(counts))
    if not isinstance(weights, str):
        task = with_class_weights(task, weights, federation.device)
    return task if config.metric == "auto" else with_metric(task, config.metric)


def headline_of(config: Config, records: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """``personal`` for a personal method whose clients' models were tested, else ``global``."""
    tested = all(any("personal_mean" in record for record in run) for run in records)
    return "personal" if tested and is_personal(config) else "global"


def like_with_like(runs: Sequence[Run]) -> list[Run]:
    """Runs that are compared: if one is personal, all are means over clients."""
    if all(run.headline == "global" for run in runs):
        return list(runs)
    return [
        dataclasses.replace(run, headline="client")  # type: ignore[type-var]
        if run.headline == "global" and run.has(COLUMNS["client"])
        else run
        for run in runs
    ]


def is_imbalanced(largest: float, classes: int) -> bool:
    """Whether the largest class has twice its even share, or one of two the minority's limit.

    >>> is_imbalanced(0.88, 2), is_imbalanced(0.6, 2), is_imbalanced(0.25, 10)
    (True, False, True)
    """
    return largest > (1 - MIN_MINORITY if classes == 2 else 2 / classes)


def metric_of(config: Config, record: Mapping[str, Any]) -> Metric | None:
    """The headline metric of a run, found in the record of a tested round."""
    if config.metric != "auto":
        named = [m for name in tasks for m in tasks[name].metrics if m.name == config.metric]
        named += [own_metrics[name] for name in own_metrics if name == config.metric]
        return next((m for m in named if m.name in record), None)
    heads = [tasks[name].metrics[0] for name in tasks]
    return next((m for m in heads if m.name in record), None)


def in_words(config: Config, record: Mapping[str, Any]) -> list[str]:
    """The headline of a tested round for the progress line; empty without a test.

    >>> in_words(Config(), {"accuracy": 87.5, "imbalanced": 0.875, "balanced_accuracy": 50.0})
    ['accuracy 87.50 %', 'balanced_accuracy 50.00 %']
    """
    metric = metric_of(config, record)
    if metric is None:
        return []
    personal = "personal_mean" in record and is_personal(config)
    prefix = "personal_" if personal else ""
    value = record["personal_mean"] if personal else record[metric.name]
    words = [f"{metric.name} {metric.write(value)}"]
    if "imbalanced" in record and metric.name == "accuracy":
        others = {m.name: m for m in tasks["classification"].metrics if m.name in COMPANIONS}
        found = {name: record.get(prefix + name, math.nan) for name in others}
        words += [f"{n} {others[n].write(v)}" for n, v in found.items() if not math.isnan(v)]
    if personal:
        words.append(f"global {metric.write(record[metric.name])}")
    elif "personal_mean" in record:
        words.append(f"clients {metric.write(record['client_mean'])}")
    return words
