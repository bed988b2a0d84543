"""Tests of the models of a simulation: metrics from sums, and all scores."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.bound import Bound
from kedge.core.task import Batch, Task
from kedge.core.task_base import Sums
from kedge.core.tree import Weights
from kedge.data.federation import Federation
from kedge.engines.engine import EVALUATION_ROWS, Engine, metric_sums
from kedge.errors import FieldError, KedgeError

Array = np.ndarray[Any, Any]


class Evaluation:
    """What a :class:`~kedge.sim.simulation.Simulation` measures; ``detailed`` adds the metrics that
    are too costly for every test, such as AUROC."""

    federation: Federation
    bound: Bound
    engine: Engine

    @property
    def output(self) -> Weights:
        raise NotImplementedError

    def personal(self, clients: Sequence[int] | None = None) -> Weights:
        raise NotImplementedError

    # -- metrics from sums --------------------------------------------------------------------

    def evaluate(self, weights: Weights | None = None, detailed: bool = False) -> dict[str, float]:
        """Metrics on the test set (of the global model for None), as means over test angles."""
        return self.evaluate_all(weights, detailed)[0]

    def evaluate_all(
        self, weights: Weights | None = None, detailed: bool = False
    ) -> tuple[dict[str, float], list[float | None]]:
        """Metrics as in :meth:`evaluate`, and the headline metric by class (None: no samples)."""
        fed, weights = self.federation, weights or self.output
        angle_sums = [self.sums(weights, fed.test_batches(a), detailed) for a in fed.angles]
        reports = [fed.task.report(sums) for sums in angle_sums]
        for angle, report in zip(fed.angles, reports, strict=True):
            report |= self._of_scores(weights, partial(fed.test_batches, angle), strict=True)
        mean = {name: sum(r[name] for r in reports) / len(reports) for name in reports[0]}
        total = angle_sums[0]
        for sums in angle_sums[1:]:
            total = tree.add(total, sums)
        return mean, fed.task.per_class(total)

    def evaluate_rows(
        self, weights: Weights, rows: Tensor, detailed: bool | None = None
    ) -> dict[str, float]:
        """Metrics of one model on rows ``[n]`` of the data, e.g. those for validation.

        ``detailed`` None takes them if the headline metric needs them.
        """
        detailed = bool(self.task.headline.needs) if detailed is None else detailed

        def batches() -> Iterable[Batch]:
            return map(self.federation.clean, torch.split(rows, EVALUATION_ROWS))

        report = self.task.report(self.sums(weights, batches(), detailed)) if len(rows) else {}
        return report | (self._of_scores(weights, batches) if len(rows) else {})

    def evaluate_clients(
        self,
        personal: bool = False,
        detailed: bool = False,
        names: Collection[str] | None = None,
    ) -> list[dict[str, float]]:
        """Metrics (all for ``names`` None) on each client's held-out rows, empty without any, of
        the global or of its personal weights. Raises a FieldError without held-out rows."""
        weights = self.personal() if personal else self.output
        client_sums = self.client_sums(weights, personal, detailed)
        reports = [self.task.report(sums, names) if sums else {} for sums in client_sums]
        if self.task.headline.function is not None:
            batches = self.federation.held_out_batches
            for k, report in enumerate(reports):
                own = tree.take(weights, k) if personal else weights
                if client_sums[k]:
                    report |= self._of_scores(own, partial(batches, k))
        return reports

    def client_sums(
        self, weights: Weights, personal: bool = False, detailed: bool = False
    ) -> list[Sums]:
        """The sums on each client's held-out rows; ``weights`` are stacked for ``personal``."""
        if not self.federation.held_out:
            raise FieldError("no client holds anything out for testing; set holdout, e.g. 0.2")
        bound = self.bound.detailed() if detailed else self.bound
        return self.engine.evaluate(bound, weights, self.federation.held_out, personal)

    def sums(
        self, weights: Weights, batches: Iterable[Batch], detailed: bool = False
    ) -> dict[str, Tensor]:
        """The task's metric sums of one model over batches."""
        return metric_sums(self.bound.detailed() if detailed else self.bound, weights, batches)

    # -- all scores ---------------------------------------------------------------------------

    @torch.no_grad()
    def scores(self, weights: Weights, batches: Iterable[Batch]) -> tuple[Array, Array]:
        """Labels, and probabilities or predicted values ``[n, outputs]`` in float64."""
        labels, scores = [], []
        for batch in batches:
            logits = self.bound.model.forward(weights, batch.x, "eval").logits
            labels.append(batch.y.cpu())
            scores.append(self.task.probs(logits.double().reshape(len(logits), -1)).cpu())
        return torch.cat(labels).numpy(), torch.cat(scores).numpy()

    def _of_scores(self, weights: Weights, batches: Any, strict: bool = False) -> dict[str, float]:
        """The headline metric if it is a function of labels and scores."""
        metric = self.task.headline
        if metric.function is None:
            return {}
        return own_metric(self.task, *self.scores(weights, batches()), strict=strict)

    # -- facts --------------------------------------------------------------------------------

    @property
    def task(self) -> Task:
        return self.federation.task

    @property
    def has_personal_models(self) -> bool:
        """Whether a client's personal weights may differ from the global model."""
        private = self.bound.private_params or self.bound.private_buffers
        hooks = self.bound.parts_with("personal") or self.bound.parts_with("output")
        return bool(private or hooks)

    @cached_property
    def largest_class(self) -> float | None:
        """Share of the most frequent class in the test data; None if there are no classes."""
        if not self.task.one_class or not self.federation.has_test:
            return None
        labels = torch.cat([batch.y for batch in self.federation.test_batches()])
        return float(torch.bincount(labels).max() / len(labels))


def own_metric(task: Task, y: Array, scores: Array, *, strict: bool = False) -> dict[str, float]:
    """The headline metric if it is a function of labels and scores.

    It is left out where the function raises a ValueError, as scikit-learn's do for samples of one
    class, unless ``strict``. Raises a KedgeError for any other error.
    """
    metric = task.headline
    if metric.function is None:
        return {}
    try:
        return {metric.name: float(metric.function(y, for_sklearn(task, scores)))}
    except Exception as error:
        if isinstance(error, ValueError) and not strict:
            return {}
        raise KedgeError(
            f"the metric {metric.name} failed: {type(error).__name__}: {error}. It is called as "
            f"{metric.name}(y_true, y_score) with arrays of shape {y.shape} and "
            f"{for_sklearn(task, scores).shape}"
        ) from error


def for_sklearn(task: Task, scores: Array) -> Array:
    """Scores as scikit-learn's metrics take them: ``[n]`` for two classes (the probability of class
    1) and for a single output, otherwise ``[n, outputs]``."""
    if task.one_class and scores.shape[1] == 2:
        return scores[:, 1]
    return scores[:, 0] if scores.shape[1] == 1 else scores
