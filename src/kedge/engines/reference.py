"""The reference engine: one client after the other, in plain PyTorch.

It calls the functions of the core on the model as the user gave it. It is slow and easy to read;
the laws compare every other engine with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from kedge.core import client, tree
from kedge.core.bound import Bound
from kedge.core.client import Trained
from kedge.core.model import Model
from kedge.core.part import Part
from kedge.core.task import Batch
from kedge.core.tree import Weights
from kedge.core.update import Totals, total
from kedge.core.work import take_jobs
from kedge.engines.cohort import Cohort, Outcome
from kedge.engines.engine import Engine, engines

EVALUATION_ROWS = 1024  # per forward pass


@engines.register("reference")
class Reference(Engine):
    """Plain PyTorch, as the standard of correctness."""

    name = "reference"
    is_candidate = False

    def prepare(self, model: Model, device: torch.device, dtype: torch.dtype) -> Model:
        return model.prepared(model.layout, device, dtype)

    def train(self, cohort: Cohort) -> list[Outcome]:
        done: Trained = tree.stack(list(self.updates(cohort)))
        [group] = cohort.groups
        totals = total(cohort.bound, done.update, cohort.jobs.anchor)
        states = [(list(range(cohort.size)), done.next_state)]
        return [Outcome(totals.of(group.clients, group.round), states)]

    def survey(self, cohort: Cohort, part: Part) -> Totals:
        updates = tree.stack([done.update for done in self.updates(cohort, part.name)])
        return total(cohort.bound, updates, cohort.jobs.anchor)

    def updates(self, cohort: Cohort, part: str = "") -> Iterator[Trained]:
        bound, jobs = cohort.bound, cohort.with_states().jobs
        for i in range(cohort.size):
            job = take_jobs(jobs, i)
            if part:
                yield Trained(client.survey(bound, job, bound.part(part)), job.client)
                continue
            carry = client.begin(bound, job)
            for index in cohort.batches[i, : cohort.steps[i]]:
                carry = client.step(bound, job, carry, index)
            yield client.end(bound, job, carry)

    def personal(self, cohort: Cohort) -> Weights:
        jobs = cohort.with_states().jobs
        each = (take_jobs(jobs, i) for i in range(cohort.size))
        return tree.stack([client.personal(cohort.bound, job) for job in each])

    def evaluate(
        self, bound: Bound, weights: Weights, rows: Sequence[Tensor], personal: bool
    ) -> list[dict[str, Tensor]]:
        each = (tree.take(weights, k) if personal else weights for k in range(len(rows)))
        return [sums_over(bound, w, indices) for w, indices in zip(each, rows, strict=True)]


def sums_over(bound: Bound, weights: Weights, rows: Tensor) -> dict[str, Tensor]:
    """The task's sums of one model over rows ``[n]`` of the data; ``{}`` for no rows."""
    pieces = torch.split(rows, EVALUATION_ROWS) if len(rows) else ()
    return metric_sums(bound, weights, map(bound.data.clean, pieces))


@torch.no_grad()
def metric_sums(bound: Bound, weights: Weights, batches: Iterable[Batch]) -> dict[str, Tensor]:
    """The task's sums of one model over batches; ``{}`` for no batch."""
    total: dict[str, Tensor] = {}
    for batch in batches:
        logits = bound.model.forward(weights, batch.x, "eval").logits
        ones = torch.ones(len(logits), dtype=logits.dtype, device=logits.device)
        sums = bound.sums(logits, batch, ones)
        total = tree.add(total, sums) if total else sums
    return total
