"""Class means of features that clients upload, and the samples behind each of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.part import Part
from kedge.core.tree import Weights
from kedge.diagnostics.privacy.inversion import Features
from kedge.diagnostics.privacy.pictures import Pixels
from kedge.diagnostics.privacy.shares import Shared
from kedge.parts.fedimpro import FedImpro
from kedge.sim.simulation import Simulation

FEATURES = "features"  # the input of the head, as a cut


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
    cut: str
    channels: bool  # one number per channel, not per activation
    means: Tensor  # of the client's samples, [C, D]
    received: Tensor | None  # the means that the client started from, [C, D]
    behind: list[Behind]  # by class
    weights: Weights  # of the network in which the attacker inverts them
    noise: float = 0.0  # standard deviation of what the client adds
    why: str = ""  # why so few samples are behind a mean


def statistics(sim: Simulation, shared: Shared) -> Statistics | None:
    """The class means that the first such part of the method makes a client upload."""
    for part in sim.bound.method.parts:
        if isinstance(part, FedImpro):
            return _of_fedimpro(sim, shared, part)
        found = _of_sums(sim, shared, part)
        if found is not None:
            return found
    return None


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


def _of_fedimpro(sim: Simulation, shared: Shared, part: FedImpro) -> Statistics:
    received = sim.bound.sent(sim.server)[part.name]["mean"]
    if part.count_weighted:
        count = shared.upload(part.name, "count")[:, None]
        means = received + shared.upload(part.name, "first") / count.clamp_min(1)
    else:
        means = shared.upload(part.name, "mean")
    cohort = sim.cohort([shared.client])
    batches = list(cohort.batches[0, : cohort.steps[0]])
    labels = [sim.federation.y[rows] for rows in batches]
    momentum = part._momentum(sim.bound.spec)
    behind = running_mean(batches, labels, sim.bound.task.outputs, momentum)
    # the received means that momentum mixed in are known to the server, which takes them out
    share = torch.stack([b.weights.sum() for b in behind]).to(means)[:, None]
    own = (means - (1 - share) * received) / share.clamp_min(torch.finfo(means.dtype).tiny)
    means = torch.where(share > 0, own, means)
    channels, weights = part.stat_axes == "channel", local_weights(sim, shared)
    told = part.name, part.cut, channels, means, received, behind, weights
    why = "" if momentum else "at beta_m = 0, a mean is that of the last batch with the class"
    return Statistics(*told, part.noise, why)


def running_mean(
    batches: list[Tensor], labels: list[Tensor], classes: int, momentum: float
) -> list[Behind]:
    """The samples behind FedImpro's running means (eq. 6), by class.

    Args:
        batches: the rows of each step's batch.
        labels: their labels.
        classes: number of classes.
        momentum: beta_m; at 0 only the last batch with a sample of the class counts.
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
        found.append(Behind(rows, _weights(list(weight.values()), rows)))
    return found


def _weights(values: list[float], rows: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=rows.device)


def _of_sums(sim: Simulation, shared: Shared, part: Part) -> Statistics | None:
    """Parts that upload sums of features and counts of samples per class."""
    names = {"fedproto": ("sum", "weight"), "fedtr": ("sum", "count"), "ccvr": ("sum", "count")}
    if part.name not in names:
        return None
    if part.name in shared.surveys:  # features of the global model
        sums, counts = (shared.surveys[part.name][n] for n in names[part.name])
        weights = sim.weights
    else:
        sums, counts = (shared.upload(part.name, n) for n in names[part.name])
        weights = local_weights(sim, shared)
    rows = client_rows(sim, shared.client)
    y, behind = sim.federation.y[rows], []
    for c in range(sim.bound.task.outputs):
        own = rows[y == c]
        behind.append(Behind(own, _weights([1 / max(1, len(own))] * len(own), own)))
    means = sums / counts.clamp_min(torch.finfo(sums.dtype).tiny)[:, None]
    return Statistics(part.name, FEATURES, False, means, None, behind, weights)


def classes_told(stats: Statistics) -> tuple[int, int]:
    """Classes whose presence the upload tells, and all classes.

    A running mean without a sample is returned as it was received, so a server that sees single
    uploads knows that the client had none in this round.
    """
    count = len(stats.behind)
    if stats.received is None:
        return count, count  # counts are uploaded
    guess = (stats.means != stats.received).any(1)
    truth = torch.tensor([len(b.rows) > 0 for b in stats.behind], device=guess.device)
    return int((guess == truth).sum()), count
