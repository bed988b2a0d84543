"""How many threads an execution has on a CPU: a rule by the size of the work.

Threads share the work of one operator, so what counts is the largest operator of a client's step.
"""

from __future__ import annotations

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

SOME_THREADS = 1e7  # floating-point operations of an operator from which a few threads pay
ALL_THREADS = 1e8  # the same for all of them
FEW_THREADS = 4


def threads_of(execution: Execution, operator: float, settings: Settings, sim: Simulation) -> int:
    """The number of threads of an execution; 0 leaves torch's number.

    Args:
        execution: without threads. Those of one with workers are for the rest of the round.
        operator: floating-point operations of the largest operator of one client's step.
        settings: of the run; what they set is not changed.
        sim: a simulation of the run.
    """
    if settings.threads or sim.federation.device.type != "cpu":
        return settings.threads
    size, most = operator * _clients_at_once(execution, settings, sim), torch.get_num_threads()
    if not SOME_THREADS <= size < math.inf:
        return 1
    return most if size >= ALL_THREADS else min(FEW_THREADS, most)


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
