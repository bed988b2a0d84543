"""Who the clients of a federation are: names, sizes, and samples of each class."""

from __future__ import annotations

import torch

from kedge.core.task import Classification, MultiLabel
from kedge.data.federation import Federation
from kedge.history.run import SeedClients

MAX_COUNTS = 2_000_000  # of clients times classes; beyond it only sizes are kept


def clients_of(federation: Federation) -> SeedClients:
    """The clients of a federation; counts where the task has classes or labels."""
    names, sizes = list(federation.client_names), [int(size) for size in federation.sizes]
    counts = _counts(federation)
    classes = None
    if counts is not None:
        classes = [str(name) for name in federation.classes or range(len(counts[0]))]
    return SeedClients(names, sizes, classes, counts)


def _counts(federation: Federation) -> list[list[int]] | None:
    """Training samples of each class on each client; none of a one-hot tensor is made."""
    task, sizes = federation.task, federation.sizes
    if not isinstance(task, (Classification, MultiLabel)):
        return None
    if task.outputs * len(sizes) > MAX_COUNTS:
        return None
    y = federation.y[federation.rows].cpu()
    owner = torch.repeat_interleave(torch.tensor(sizes))
    if isinstance(task, Classification):
        flat = torch.bincount(owner * task.outputs + y, minlength=len(sizes) * task.outputs)
        return flat.reshape(len(sizes), task.outputs).tolist()
    counts = torch.zeros(len(sizes), task.outputs, dtype=torch.int64)
    return counts.index_add(0, owner, (y > 0.5).long()).tolist()
