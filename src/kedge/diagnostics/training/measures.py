"""All measures of one probe, as plain numbers; the weights of the probe can then be freed."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from kedge.core.tree import Weights
from kedge.diagnostics.training.divergence_by_layer import (
    by_layer,
    cancelled,
    cosines,
    weight_divergence,
)
from kedge.diagnostics.training.gradients import (
    Variance,
    client_gradient,
    gradient_variance,
    leaves_above,
)
from kedge.diagnostics.training.margin import HALVINGS, MAX_TARGETS, STEPS, worst_case_margins
from kedge.diagnostics.training.models import Outputs, personal_scores
from kedge.diagnostics.training.probe import Probe, spread
from kedge.diagnostics.training.results import Margins, Measures
from kedge.diagnostics.training.samples import affordable, common_samples, even, operations

TEST_ROWS = 200, 1000  # common test samples that every model is measured on: least, most
GRADIENT_ROWS = 128, 512  # samples of a client
MARGIN_ROWS = 16, 64
MARGIN_CLIENTS = 8


def measure(probe: Probe) -> Measures:
    """Measure everything that has a meaning for the task of a probe."""
    begin, fed, task = time.perf_counter(), probe.federation, probe.bound.task
    cost, count = operations(probe), len(probe.ends)
    sample, tested_on = common_samples(fed, affordable((count + 2) * cost, *TEST_ROWS))
    left_out = []
    if not task.one_class:
        left_out.append(
            "Classifier bias, forgetting, features across classes, t-SNE and margins are left out: "
            f"they need one class per sample, which {task.name} does not have."
        )
    outputs = Outputs(probe, sample)
    classes = outputs.classes() if task.one_class else None
    personal, personal_on = personal_scores(probe, classes)
    if personal is None:
        left_out.append(f"Personalisation is left out: {personal_on}.")
    if not probe.leaves:
        left_out.append("Weights, updates and gradients are not compared: no weight travels.")
    if not probe.bound.model.has_head:
        left_out.append("Similarity of features is left out: the head of the model is not known.")
    if task.one_class and fed.tokens:
        left_out.append("Margins are left out: inputs are whole numbers, which no gradient moves.")
    high_where, high = leaves_above(probe.bound.model, next(iter(probe.bound.cuts), None))
    params = [end.params for end in probe.ends]
    mean = {n: probe.mean[n] for n in probe.leaves}
    deltas, norms = probe.deltas, probe.moves
    return Measures(
        method=probe.method,
        round=probe.round,
        names=probe.names,
        cohort=len(probe.cohort),
        lr=probe.lr,
        layers=by_layer(params, mean, probe.leaves),
        divergence=weight_divergence(params, mean),
        update=sum(norms) / len(norms),
        cancelled=cancelled(deltas, probe.shares),
        cosines=cosines(deltas),
        variance=_variance(probe, high, affordable(3 * count * cost, *GRADIENT_ROWS)),
        high=high_where,
        general=outputs.scores(classes),
        personal=personal,
        personal_on=personal_on,
        classes=classes,
        features=outputs.features(classes) if probe.bound.model.has_head else None,
        margins=_margins(probe, cost) if task.one_class and not fed.tokens else None,
        map=outputs.map(classes) if classes and probe.bound.model.has_head else None,
        left_out=left_out,
        tested_on=tested_on,
        probe_seconds=probe.seconds,
        seconds=time.perf_counter() - begin,
    )


def _variance(probe: Probe, high: set[str], limit: int) -> Variance:
    """The variance of the kept clients' gradients at the global model, on ``limit`` samples of
    each at most."""
    fed = probe.federation

    def gradients() -> Iterator[dict[str, Tensor]]:
        for k, start in zip(probe.clients, probe.starts, strict=True):
            rows = fed.rows[fed.offsets[k] : fed.offsets[k] + fed.sizes[k]]
            batch = fed.clean(rows[even(len(rows), limit)])
            yield client_gradient(probe.bound, start, batch, probe.leaves)

    return gradient_variance(list(gradients()), probe.shares, high)


def _margins(probe: Probe, cost: float) -> Margins:
    """Margins of some clients' models on samples of the other clients, and of the model before.

    Every model is attacked on the same samples of all clients; those of the client itself do not
    count for it.
    """
    fed = probe.federation
    chosen = spread(range(len(probe.clients)), MARGIN_CLIENTS)
    passes = (len(chosen) + 1) * MAX_TARGETS * (3 * STEPS + HALVINGS)
    places = even(len(fed.rows), affordable(passes * cost, *MARGIN_ROWS))
    batch = fed.clean(fed.rows[places])
    places = places.cpu()

    def margins(weights: Weights) -> Tensor:
        def logits(x: Tensor) -> Tensor:
            return probe.bound.model.forward(weights, x, "eval").logits

        found = worst_case_margins(logits, batch.x, batch.y)
        return torch.where(found.isfinite(), found, torch.nan).double().cpu()

    shared = None if probe.has_private_leaves else margins(probe.starts[0])
    before, local = [], []
    for i in chosen:
        k = probe.clients[i]
        others = (places < fed.offsets[k]) | (places >= fed.offsets[k] + fed.sizes[k])
        if not bool(others.any()):
            others = torch.ones_like(others)  # one client holds nearly everything
        start = margins(probe.starts[i]) if shared is None else shared
        before.append(float(start[others].nanmean()))
        local.append(float(margins(probe.ends[i])[others].nanmean()))
    return Margins(chosen, before, local)
