"""What the models of a probe give on common samples: scores, confusion matrices, features."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kedge.core.task import Batch
from kedge.core.tree import Weights
from kedge.diagnostics.training.bias import confusion
from kedge.diagnostics.training.embedding import MAX_POINTS
from kedge.diagnostics.training.forgetting import accuracy, personal_accuracy
from kedge.diagnostics.training.probe import Probe, spread
from kedge.diagnostics.training.results import Classes, Features, Map, Scores
from kedge.diagnostics.training.samples import even
from kedge.diagnostics.training.similarity import class_cosine, linear_cka, pair_cosine

FEATURE_ROWS = 256  # samples for the similarity of features, and of one pass
MAX_CUTS = 6  # layers whose features are compared
HELD_OUT_ROWS = 200  # of each client
MAX_ACTIVATIONS = 1 << 18  # of one sample at a cut; larger ones are not compared


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

    def classes(self) -> Classes:
        fed, count = self.probe.federation, self.probe.bound.task.outputs

        def matrix(logits: Tensor) -> Tensor:
            return confusion(logits.argmax(1), self.sample.y, count)

        names = fed.classes or tuple(str(c) for c in range(count))
        counts = fed.label_counts()[self.probe.clients].cpu()
        before = [matrix(logits) for logits in self.logits_before]
        local = [matrix(logits) for logits in self.logits_local]
        after = [matrix(logits) for logits in self.logits_after]
        return Classes(list(names), counts, before, local, after)

    def scores(self, classes: Classes | None) -> Scores:
        """The metric of all models on the sample: accuracy, or the task's own."""
        if classes is not None:
            each = (classes.before, classes.local, classes.after)
            return Scores("accuracy", "%", True, *([accuracy(m) for m in ms] for ms in each))
        each_logits = self.logits_before, self.logits_local, self.logits_after
        return _scores(self.probe, *each_logits, self.sample)

    @torch.no_grad()
    def features(self, classes: Classes | None) -> Features:
        x = self.sample.x[even(len(self.sample.x), FEATURE_ROWS)]
        cuts = self._cuts()

        def at(weights: Weights) -> dict[str, Tensor]:
            done = self.model.forward(weights, x, "eval", taps=tuple(cuts))
            assert done.features is not None
            return {cut: done.at[cut] for cut in cuts} | {"features": done.features}

        before = [at(weights) for weights in self.starts]
        local = (at(weights) for weights in self.probe.ends)
        cka: dict[str, list[float]] = {name: [] for name in before[0]}
        found = Features([], float("nan"), [], [], [])
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

    @torch.no_grad()
    def map(self, classes: Classes) -> Map:
        """Global and local features for the client with the fewest classes, by its counts."""
        shares = classes.counts / classes.counts.sum(1, keepdim=True)
        k = int(shares.square().sum(1).argmax())  # least effective number of classes; first of ties
        index = even(len(self.sample.x), MAX_POINTS // 2)
        x, y = self.sample.x[index], self.sample.y[index].cpu()
        both = []
        for weights in (self.probe.starts[k], self.probe.ends[k]):
            features = self.model.forward(weights, x, "eval").features
            assert features is not None
            both.append(features.reshape(len(x), -1).cpu())
        lacking = (classes.counts[k][y] == 0).tolist()
        names = [classes.names[int(c)] for c in y]
        return Map(self.probe.names[k], torch.cat(both), names, lacking)


def personal_scores(probe: Probe, classes: Classes | None) -> tuple[Scores | None, str]:
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
