"""The samples on which all models of a probe are measured."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from kedge.core import tree
from kedge.core.task import Batch
from kedge.data.federation import Federation
from kedge.diagnostics.training.probe import Probe, spread

#: Floating-point operations of one measure of all models, about; larger models are measured on
#: fewer samples, whatever the device.
MAX_OPERATIONS = 2e12


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
