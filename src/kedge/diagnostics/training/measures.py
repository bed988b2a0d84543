"""All measures of one probe, as plain numbers; the weights of the probe can then be freed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from kedge.core import tree
from kedge.core.task import Batch
from kedge.core.tree import Weights
from kedge.data.federation import Federation
from kedge.diagnostics.training.predictions import (
    Bias,
    Change,
    accuracy,
    change,
    class_cosine,
    classifier_bias,
    confusion,
    forgetting,
    linear_cka,
    pair_cosine,
    personal_accuracy,
    prediction_skew,
)
from kedge.diagnostics.training.probe import Probe, spread
from kedge.diagnostics.training.weights import (
    Layer,
    Variance,
    by_layer,
    cancelled,
    client_gradient,
    cosines,
    gradient_variance,
    leaves_above,
    weight_divergence,
)

#: Floating-point operations of one measure of all models, about; larger models are measured on
#: fewer samples, whatever the device.
MAX_OPERATIONS = 2e12
TEST_ROWS = 200, 1000  # common test samples that every model is measured on: least, most
GRADIENT_ROWS = 128, 512  # samples of a client
FEATURE_ROWS = 256  # samples for the similarity of features, and of one pass
MAX_CUTS = 6  # layers whose features are compared
HELD_OUT_ROWS = 200  # of each client
MAX_ACTIVATIONS = 1 << 18  # of one sample at a cut; larger ones are not compared


class Scores(NamedTuple):
    """A metric of the model before the round, of local models, and of the aggregate.

    With private leaves, each client has a model of its own before and after the round.
    """

    metric: str
    unit: str
    higher_is_better: bool
    before: list[float]  # one per client, also of one model for all
    local: list[float]
    afters: list[float]

    @property
    def mean_before(self) -> float:
        return sum(self.before) / len(self.before)

    @property
    def after(self) -> float:
        return sum(self.afters) / len(self.afters)

    @property
    def label(self) -> str:
        return f"{self.metric} {self.unit}".rstrip()

    @property
    def mean_local(self) -> float:
        return sum(self.local) / len(self.local)


class Confusions(NamedTuple):
    """Confusion matrices on the common test data, one per client, and its training samples."""

    names: list[str]
    counts: Tensor  # [K, C]
    before: list[Tensor]  # [C, C]
    local: list[Tensor]
    after: list[Tensor]

    @property
    def biases(self) -> list[Bias | None]:
        """Of the local models."""
        return [classifier_bias(*pair) for pair in zip(self.local, self.counts, strict=True)]

    @property
    def skews(self) -> list[float]:
        """Of the predictions of local models."""
        return [prediction_skew(matrix) for matrix in self.local]

    @property
    def changes(self) -> list[Change]:
        """Of per-class accuracy by local training."""
        both = zip(self.before, self.local, self.counts, strict=True)
        return [change(*matrices) for matrices in both]

    @property
    def forgotten(self) -> list[float]:
        """Points of accuracy that local training costs."""
        return [forgetting(*pair) for pair in zip(self.before, self.local, strict=True)]


class FeatureSimilarity(NamedTuple):
    """Similarity of features before and after local training."""

    cka: list[tuple[str, list[float]]]  # by layer: local against global, one value per client
    across_before: float  # mean cosine of samples of different classes; NaN without classes
    across_local: list[float]
    lacking_before: list[float]  # own against lacking classes, of clients that lack some
    lacking_local: list[float]


@dataclass(frozen=True)
class Measures:
    """What was measured after a number of rounds."""

    method: str
    round: int
    names: list[str]  # of the measured clients
    cohort: int
    lr: float
    layers: list[Layer]
    divergence: float
    update: float  # mean norm of the clients' updates
    cancelled: float
    cosines: Tensor  # [K, K]
    variance: Variance
    high: str  # where the high part of the variance is
    general: Scores
    personal: Scores | None
    personal_on: str
    classes: Confusions | None = None
    features: FeatureSimilarity | None = None
    left_out: list[str] = field(default_factory=list)
    tested_on: str = ""
    probe_seconds: float = 0.0
    seconds: float = 0.0


def measure(probe: Probe) -> Measures:
    """Measure everything that has a meaning for the task of a probe."""
    begin, fed, task = time.perf_counter(), probe.federation, probe.bound.task
    cost, count = operations(probe), len(probe.ends)
    sample, tested_on = common_samples(fed, affordable((count + 2) * cost, *TEST_ROWS))
    left_out = []
    if not task.one_class:
        left_out.append(
            "Classifier bias, forgetting and features across classes are left out: "
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


# -- the samples ----------------------------------------------------------------------------------


def common_samples(fed: Federation, limit: int) -> tuple[Batch, str]:
    """At most ``limit`` samples at even distances of the test data, and what they are in words.

    Without test data, training samples of all clients take their place.
    """
    if not fed.has_test:
        rows = fed.rows[even(len(fed.rows), limit)]
        return fed.clean(rows), f"{len(rows)} training samples of all clients (no test data)"
    index, first = even(fed.num_test, limit), 0
    pieces = []
    for batch in fed.test_batches(fed.angles[0]):
        inside = index[(index >= first) & (index < first + len(batch.x))] - first
        pieces.append(Batch(batch.x[inside], batch.y[inside]))
        first += len(batch.x)
    x, y = torch.cat([b.x for b in pieces]), torch.cat([b.y for b in pieces])
    part = f"the {len(x)}" if len(x) == fed.num_test else f"{len(x)} of {fed.num_test}"
    return Batch(x, y), f"{part} test samples"


@torch.no_grad()
def operations(probe: Probe) -> float:
    """Floating-point operations of a forward pass of one sample, about."""
    fed, weights = probe.federation, probe.starts[0]
    x = fed.clean(fed.rows[:2]).x
    with FlopCounterMode(display=False) as counter:
        probe.bound.model.forward(weights, x, "eval")
    # operators of engines are not counted; every weight is used at least once
    return max(counter.get_total_flops() / len(x), 2.0 * tree.numel(weights.params))


def affordable(per_row: float, least: int, most: int) -> int:
    """The number of rows with ``per_row`` operations each that a measure may take.

    >>> affordable(1e9, 16, 5000), affordable(1e12, 16, 5000), affordable(1.0, 16, 5000)
    (2000, 16, 5000)
    """
    return int(min(most, max(least, MAX_OPERATIONS // per_row)))


def even(count: int, limit: int) -> Tensor:
    """At most ``limit`` positions at even distances among ``count``."""
    return torch.tensor(spread(range(count), limit), dtype=torch.int64)


# -- what models give on them ---------------------------------------------------------------------


class Outputs:
    """Passes of all models of a probe over one sample."""

    def __init__(self, probe: Probe, sample: Batch) -> None:
        self.probe, self.sample, self.model = probe, sample, probe.bound.model
        shared = not probe.has_private_leaves  # then one model before the round serves all
        self.starts = [probe.starts[0]] if shared else probe.starts
        self.logits_before = self._spread([self._logits(w) for w in self.starts])
        self.logits_local = [self._logits(w) for w in probe.ends]
        self.logits_after = self._spread([self._logits(w) for w in probe.afters])

    def _spread(self, values: list[Tensor]) -> list[Tensor]:
        return values * len(self.probe.ends) if len(values) == 1 else values

    @torch.no_grad()
    def _logits(self, weights: Weights) -> Tensor:
        pieces = torch.split(self.sample.x, FEATURE_ROWS)
        return torch.cat([self.model.forward(weights, x, "eval").logits for x in pieces])

    def classes(self) -> Confusions:
        fed, count = self.probe.federation, self.probe.bound.task.outputs

        def matrix(logits: Tensor) -> Tensor:
            return confusion(logits.argmax(1), self.sample.y, count)

        names = fed.classes or tuple(str(c) for c in range(count))
        counts = fed.label_counts()[self.probe.clients].cpu()
        before = [matrix(logits) for logits in self.logits_before]
        local = [matrix(logits) for logits in self.logits_local]
        after = [matrix(logits) for logits in self.logits_after]
        return Confusions(list(names), counts, before, local, after)

    def scores(self, classes: Confusions | None) -> Scores:
        """The metric of all models on the sample: accuracy, or the task's own."""
        if classes is not None:
            each = (classes.before, classes.local, classes.after)
            return Scores("accuracy", "%", True, *([accuracy(m) for m in ms] for ms in each))
        each_logits = self.logits_before, self.logits_local, self.logits_after
        return _scores(self.probe, *each_logits, self.sample)

    @torch.no_grad()
    def features(self, classes: Confusions | None) -> FeatureSimilarity:
        x = self.sample.x[even(len(self.sample.x), FEATURE_ROWS)]
        cuts = self._cuts()

        def at(weights: Weights) -> dict[str, Tensor]:
            done = self.model.forward(weights, x, "eval", taps=tuple(cuts))
            assert done.features is not None
            return {cut: done.at[cut] for cut in cuts} | {"features": done.features}

        before = [at(weights) for weights in self.starts]
        local = (at(weights) for weights in self.probe.ends)
        cka: dict[str, list[float]] = {name: [] for name in before[0]}
        found = FeatureSimilarity([], float("nan"), [], [], [])
        y = self.sample.y[even(len(self.sample.x), FEATURE_ROWS)]
        for k, own in enumerate(local):
            start = before[k if len(before) > 1 else 0]
            for name, values in cka.items():
                values.append(linear_cka(own[name], start[name]))
            if classes is None:
                continue
            found.across_local.append(class_cosine(own["features"], y))
            lacks = classes.counts[k].to(y.device)[y] == 0
            if bool(lacks.any()) and not bool(lacks.all()):
                for side, f in ((found.lacking_local, own), (found.lacking_before, start)):
                    side.append(pair_cosine(f["features"][~lacks], f["features"][lacks]))
        across = float("nan")
        if classes is not None:
            values = [class_cosine(start["features"], y) for start in before]
            across = sum(values) / len(values)
        return found._replace(cka=list(cka.items()), across_before=across)

    def _cuts(self) -> list[str]:
        """Cuts to compare features at, in depth order, but for the one right before the head."""
        shapes = self.probe.bound.spec.shapes
        names = [c for c in self.model.cuts if c in shapes]
        features = shapes.get("features")
        if names and shapes[names[-1]] == features:
            names = names[:-1]
        small = [c for c in names if torch.Size(shapes[c]).numel() <= MAX_ACTIVATIONS]
        return [small[i] for i in spread(range(len(small)), MAX_CUTS)]


def personal_scores(probe: Probe, classes: Confusions | None) -> tuple[Scores | None, str]:
    """Scores on data like each client's own, and on which; None and the reason without such."""
    fed = probe.federation
    if fed.held_out and all(len(fed.held_out[k]) for k in probe.clients):
        return _on_held_out(probe), "the held-out samples of each client"
    if classes is None:
        return None, "no client holds samples out; set holdout, e.g. --split 'holdout(0.2)'"
    tested = classes.after[0].sum(1) > 0
    if any(not bool((counts[tested] > 0).any()) for counts in classes.counts):
        return None, "a client has only classes without test samples"

    def each(matrices: Sequence[Tensor]) -> list[float]:
        pairs = zip(matrices, classes.counts, strict=True)
        return [personal_accuracy(matrix, counts) for matrix, counts in pairs]

    values = each(classes.before), each(classes.local), each(classes.after)
    where = "test samples in the class proportions of each client"
    return Scores("accuracy", "%", True, *values), where


@torch.no_grad()
def _on_held_out(probe: Probe) -> Scores:
    """Scores of every client's models on its held-out samples."""
    found: list[Scores] = []
    afters = probe.afters * (1 if probe.has_private_leaves else len(probe.ends))
    for k, *models in zip(probe.clients, probe.starts, probe.ends, afters, strict=True):
        rows = probe.federation.held_out[k]
        batch = probe.federation.clean(rows[even(len(rows), HELD_OUT_ROWS)])
        one, two, three = ([probe.bound.model.forward(w, batch.x, "eval").logits] for w in models)
        found.append(_scores(probe, one, two, three, batch))
    values = ([getattr(s, name)[0] for s in found] for name in ("before", "local", "afters"))
    return Scores(*found[0][:3], *values)


def _scores(
    probe: Probe, before: list[Tensor], local: list[Tensor], after: list[Tensor], batch: Batch
) -> Scores:
    """The task's headline metric, or its first one that sums of a test give."""
    task = probe.bound.task
    ones = torch.ones(len(batch.x), dtype=after[0].dtype, device=after[0].device)

    def report(logits: Tensor) -> dict[str, float]:
        loss = float(task.loss(logits, batch).mean())
        return {"loss": loss} | task.report(task.sums(logits, batch, ones))

    known = report(after[0])
    metric = next((m for m in task.metrics if m.name in known), None)
    name = metric.name if metric else "loss"

    def values(many: Sequence[Tensor]) -> list[float]:
        return [report(logits).get(name, float("nan")) for logits in many]

    unit, better = (metric.unit, metric.higher_is_better) if metric else ("", False)
    return Scores(name, unit, better, values(before), values(local), values(after))
