"""Uploads of clients: each declares the reduction that the server sees; and what one can read from
them, for the diagnosis of privacy."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kedge.core.tree import Tree

FEATURES = "features"  # the input of the head, as a cut


class Sum(NamedTuple):
    """An upload of which the server sees the sum over the cohort.

    ``return next_client, Sum(change)`` in ``reply``, and ``r.uploads`` is the sum of the changes.
    """

    value: Tree


class Mean(NamedTuple):
    """An upload of which the server sees the mean over the cohort, weighted as the model is."""

    value: Tree


class Stack(NamedTuple):
    """An upload that the server sees client by client; needs ``needs_clients = True``."""

    value: Tree


class ClassMeans(NamedTuple):
    """Means of features by class, as they can be read from the uploads of one client.

    Behind a mean are all samples of its class that the client has, each with the same weight. With
    ``momentum``, those of the round's batches are: of each batch with the class, the mean enters
    with the weight 1 - momentum.
    """

    means: Tensor  # [C, D]
    cut: str = FEATURES  # where in the model
    channels: bool = False  # one number per channel, not per activation
    received: Tensor | None = None  # what a running mean starts from, [C, D]
    momentum: float | None = None  # of a running mean
    noise: float = 0.0  # standard deviation of what the client adds
    why: str = ""  # why so few samples are behind a mean, if there are few

    @classmethod
    def of_sums(cls, sums: Tensor, counts: Tensor) -> ClassMeans:
        """From sums of features before the head ``[C, F]`` and numbers of samples ``[C]``."""
        return cls(sums / counts.clamp_min(torch.finfo(sums.dtype).tiny)[:, None])


class Drawn(NamedTuple):
    """Samples that a part generates, mixes or averages, for the diagnosis of privacy."""

    x: Tensor  # [n, ...]: inputs of the model, or features before its head
    labels: Tensor | None  # [n]
    what: str  # in words, such as "virtual samples"
    where: str  # who has them, as a sentence about "they"
    is_input: bool = True
