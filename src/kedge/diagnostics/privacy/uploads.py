"""Class means of features that clients upload, and the samples behind each of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.part import ClassMeans
from kedge.core.tree import Weights
from kedge.core.uploads import FEATURES
from kedge.diagnostics.privacy.pictures import Features, Pixels
from kedge.diagnostics.privacy.shares import Shared
from kedge.sim.simulation import Simulation


class Behind(NamedTuple):
    """The training samples behind one uploaded mean, with their weights in it."""

    rows: Tensor  # of the federation, [m]; each once
    weights: Tensor  # [m], with a sum of 1 or, where the received mean is mixed in, less

    @property
    def effective(self) -> float:
        """The number of equally weighted samples that a mean of these weights is worth.

        >>> Behind(torch.arange(2), torch.tensor([0.5, 0.5])).effective
        2.0
        """
        square = float(self.weights.square().sum())
        return float(self.weights.sum()) ** 2 / square if square > 0 else 0.0


class Statistics(NamedTuple):
    """The class means of features in one client's upload."""

    part: str
    told: ClassMeans  # as the part reads them from the upload
    means: Tensor  # of the client's samples, [C, D]
    behind: list[Behind]  # by class
    weights: Weights  # of the network in which the attacker inverts them


def statistics(sim: Simulation, shared: Shared) -> Statistics | None:
    """The class means that the first such part of the method makes a client upload."""
    sent, spec = sim.bound.sent(sim.server), sim.bound.spec
    for part in sim.bound.method.parts:
        uploads = shared.uploads(part.name)
        told = part.class_means(spec, uploads, sent.get(part.name, {})) if uploads else None
        if told is not None:
            surveyed = part.name in shared.surveys  # features of the global model
            weights = sim.weights if surveyed else local_weights(sim, shared)
            return _statistics(sim, shared.client, part.name, told, weights)
    return None


def _statistics(
    sim: Simulation, client: int, part: str, told: ClassMeans, weights: Weights
) -> Statistics:
    classes, means = sim.bound.task.outputs, told.means
    if told.momentum is None:
        rows = client_rows(sim, client)
        behind = running_mean([rows], [sim.federation.y[rows]], classes, 0.0)
        return Statistics(part, told, means, behind, weights)
    cohort = sim.cohort([client])
    batches = list(cohort.batches[0, : cohort.steps[0]])
    labels = [sim.federation.y[rows] for rows in batches]
    behind = running_mean(batches, labels, classes, told.momentum)
    if told.received is not None:
        # what momentum mixed in of them is known to the server, which takes it out
        share = torch.stack([b.weights.sum() for b in behind]).to(means)[:, None]
        own = (means - (1 - share) * told.received) / share.clamp_min(torch.finfo(means.dtype).tiny)
        means = torch.where(share > 0, own, means)
    return Statistics(part, told, means, behind, weights)


def local_weights(sim: Simulation, shared: Shared) -> Weights:
    """The client's model after its round, as its update tells; private leaves are the server's."""
    delta, total = shared.totals.summed.delta, shared.totals.summed.weight
    anchor = sim.weights
    params = tree.map(lambda d, w: w + d / total.to(d.dtype), delta.params, anchor.params)
    buffers = {
        n: anchor.buffers[n] + d / total.to(d.dtype)
        for n, d in delta.buffers.items()
        if anchor.buffers[n].is_floating_point()
    }
    return Weights(anchor.params | params, anchor.buffers | buffers)


def feature_map(
    sim: Simulation, pixels: Pixels, weights: Weights, cut: str, channels: bool = False
) -> Features:
    """The lower layers in evaluation mode: inputs from 0 to 1 to flat features ``[B, D]``."""

    def features(u: Tensor) -> Tensor:
        taps = () if cut == FEATURES else (cut,)
        done = sim.bound.model.forward(weights, pixels.from_unit(u), "eval", taps=taps)
        h = done.features if cut == FEATURES else done.at[cut]
        assert h is not None
        return h.reshape(len(h), h.shape[1], -1).mean(-1) if channels else h.flatten(1)

    return features


def client_rows(sim: Simulation, client: int) -> Tensor:
    """The rows of a client's training samples."""
    start = sim.federation.offsets[client]
    return sim.federation.rows[start : start + sim.federation.sizes[client]]


def running_mean(
    batches: list[Tensor], labels: list[Tensor], classes: int, momentum: float
) -> list[Behind]:
    """The samples behind running means of batches, by class.

    Args:
        batches: the rows of each step's batch.
        labels: their labels.
        classes: number of classes.
        momentum: of the running mean; at 0 only the last batch with a sample of the class counts.
    """
    found = []
    for c in range(classes):
        weight: dict[int, float] = {}
        for rows, y in zip(batches, labels, strict=True):
            own = rows[y == c].tolist()
            if own:
                weight = {row: momentum * w for row, w in weight.items() if momentum}
                for row in own:
                    weight[row] = weight.get(row, 0.0) + (1 - momentum) / len(own)
        rows = torch.tensor(list(weight), dtype=torch.int64, device=batches[0].device)
        values = torch.tensor(list(weight.values()), dtype=torch.float64, device=rows.device)
        found.append(Behind(rows, values))
    return found


def classes_told(stats: Statistics) -> tuple[int, int]:
    """Classes whose presence the upload tells, and all classes.

    A running mean without a sample is returned as it was received, so a server that sees single
    uploads knows that the client had none in this round.
    """
    count = len(stats.behind)
    if stats.told.received is None:
        return count, count  # counts are uploaded
    guess = (stats.means != stats.told.received).any(1)
    truth = torch.tensor([len(b.rows) > 0 for b in stats.behind], device=guess.device)
    return int((guess == truth).sum()), count
