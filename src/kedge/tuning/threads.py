"""How many threads the candidates of a plan have on a CPU: decided by the size of the work.

Threads share the work of one operator, so what counts is the largest operator of a client's step.
If it is small, one thread is best, without a measurement; otherwise one is timed against several.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kedge.core import client
from kedge.core.work import take_jobs
from kedge.engines.engine import engines
from kedge.engines.execution import Execution
from kedge.engines.torch_private import watching_operators
from kedge.sim.simulation import Simulation
from kedge.tuning.placement import Settings, seeds_at_once
from kedge.tuning.trial import form_cohort, isolated, one_step, start_trial

SMALL_OPERATOR = 1e6  # floating-point operations, some 30 us: threads cannot pay
LARGE_OPERATOR = 1e8  # several threads pay, even if they were not measured
FEW_THREADS = 4  # tried beside one and all


def thread_counts(settings: Settings, device: torch.device) -> list[int]:
    """The numbers of threads to compare, the smallest first; [0] leaves torch's number."""
    if settings.threads:
        return [settings.threads]
    if device.type != "cpu":
        return [0]
    most = torch.get_num_threads()
    return sorted({1, most, FEW_THREADS if most > FEW_THREADS else most})


def with_threads(
    executions: Sequence[Execution],
    counts: Sequence[int],
    operator: float,
    settings: Settings,
    sim: Simulation,
) -> list[Execution]:
    """The executions with their threads, the simplest first: those with one thread.

    Args:
        executions: without threads.
        counts: of threads, see :func:`thread_counts`.
        operator: floating-point operations of the largest operator of one client's step.
        settings: of the run.
        sim: a simulation of the run.
    """
    found = []
    for execution in executions:
        some = [unmeasured(counts, operator)] if execution.workers else list(counts)
        if operator * _clients_at_once(execution, settings, sim) < SMALL_OPERATOR:
            some = some[:1]
        found += [dataclasses.replace(execution, threads=count) for count in some]
    return sorted(found, key=lambda x: (x.compile, x.threads > 1 and not x.workers))


def unmeasured(counts: Sequence[int], operator: float) -> int:
    """The number of threads of a run that is not measured, and of one that leaves its training to
    worker processes, which have one thread each."""
    return counts[-1] if LARGE_OPERATOR <= operator < math.inf else counts[0]


def _clients_at_once(execution: Execution, settings: Settings, sim: Simulation) -> int:
    """Clients that share an operator."""
    if not engines[execution.engine].batches_clients:
        return 1
    every = sim.session.cohort_size * seeds_at_once(
        execution, sim.session.cohort_size, settings.seeds
    )
    return min(execution.chunk or every, every)


def largest_operator(sim: Simulation, rounds: int) -> float:
    """Floating-point operations of the largest operator of a client's step, or of what comes before
    its first step. Infinite if this is not known."""
    largest = _Largest()
    with isolated(sim.federation.device):
        try:
            trial = start_trial(sim, Execution("loop"), rounds)
            cohort = form_cohort(
                trial, one_step(trial, [trial.session.draw_clients(trial.round)[0]])
            )
            bound, job, rows = cohort.bound, take_jobs(cohort.jobs, 0), cohort.batches[0, 0]
            with watching_operators(largest.watch) as watched:
                client.step(bound, job, client.begin(bound, job), rows)
        except Exception:  # noqa: BLE001  (the run itself raises the error)
            return math.inf
    return largest.flops if watched else math.inf


class _Largest:
    """The largest of the operators that were watched."""

    def __init__(self) -> None:
        self.flops = 0.0

    def watch(self, name: str, inputs: Any, outputs: Any) -> None:
        self.flops = max(self.flops, flops_of(name, inputs[0], outputs))


def flops_of(name: str, inputs: Sequence[Any], outputs: Any) -> float:
    """Floating-point operations of an operator; one per element for those that are no products.

    >>> flops_of("aten::mm", (torch.ones(2, 3), torch.ones(3, 5)), torch.ones(2, 5))
    60.0
    """
    kind = name.removeprefix("aten::").split(".")[0]
    every = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    out = next((x for x in every if isinstance(x, Tensor)), None)
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    if kind in ("mm", "bmm", "addmm", "baddbmm") and out is not None:
        return 2.0 * out.numel() * tensors[-1].shape[-2]
    if kind in ("convolution", "convolution_backward"):
        # forward: input, weight -> output; backward: gradient, input, weight -> two gradients
        grad = tensors[0] if kind == "convolution_backward" else out
        weight = tensors[2] if kind == "convolution_backward" else tensors[1]
        assert grad is not None
        return 2.0 * grad.numel() * weight[0].numel()
    return float(out.numel()) if out is not None else 0.0
