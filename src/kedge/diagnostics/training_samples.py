"""The samples on which all models of a probe are measured."""

from __future__ import annotations

import torch
from torch import Tensor

from kedge.core.task import Batch
from kedge.data.federation import Federation
from kedge.diagnostics.probe import spread

TEST_ROWS = 1000  # common test samples that every model is measured on, at most


def common_samples(fed: Federation, limit: int = TEST_ROWS) -> tuple[Batch, str]:
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


def even(count: int, limit: int) -> Tensor:
    """At most ``limit`` positions at even distances among ``count``."""
    return torch.tensor(spread(range(count), limit), dtype=torch.int64)
