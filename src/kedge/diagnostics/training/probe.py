"""A probe: one more round of some clients, from which the simulation stays untouched.

The measures of :mod:`kedge.diagnostics.training` need the weights of single clients after local
training, which a run does not keep. A probe trains the clients of the present round again and keeps
them. It uses the functions of :mod:`kedge.core.client`, so it works for every method and on a
simulation of any engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kedge.core import client, tree
from kedge.core.bound import PRIVATE, Bound
from kedge.core.tree import Params, Weights
from kedge.core.update import Totals, Update, total_of
from kedge.core.work import take_jobs
from kedge.data.federation import Federation
from kedge.engines.cohort import Cohort
from kedge.engines.loop import run_steps
from kedge.errors import FieldError
from kedge.session.session import Request, drive
from kedge.sim.simulation import Simulation

MAX_CLIENTS = 20  # whose weights a probe keeps
MAX_BYTES = 1 << 30  # of all weights that it keeps


@dataclass(frozen=True)
class Probe:
    """Weights before, within and after a round, and the data to measure them on.

    ``starts`` and ``ends`` have one entry for every kept client: the weights from which its local
    training starts (the global model, with its private leaves) and those at which it ends.
    """

    method: str
    round: int  # rounds that are done
    clients: list[int]  # whose weights are kept, a part of the cohort
    cohort: list[int]
    names: list[str]  # of the kept clients
    shares: Tensor  # client weights p_k of the kept clients, [K], with the sum 1
    anchor: Weights  # the global model that the cohort receives
    starts: list[Weights]
    ends: list[Weights]
    mean: Params  # weighted mean of the whole cohort's local weights; leaves that travel only
    aggregate: Weights  # the next global model
    bound: Bound = field(repr=False)
    federation: Federation = field(repr=False)
    lr: float = 0.0
    seconds: float = 0.0

    @property
    def deltas(self) -> list[Params]:
        """The updates of the kept clients: the leaves of the model that travel."""
        return [
            {n: end.params[n] - start.params[n] for n in self.leaves}
            for start, end in zip(self.starts, self.ends, strict=True)
        ]

    @property
    def moves(self) -> list[float]:
        """The norm of each kept client's update, private leaves included."""
        found = []
        for start, end in zip(self.starts, self.ends, strict=True):
            pairs = ((end.params[n], start.params[n]) for n in self.bound.model.names)
            found.append(sum(float((a - b).double().square().sum()) for a, b in pairs) ** 0.5)
        return found

    @property
    def leaves(self) -> list[str]:
        """Names of the model's parameters that travel, in the order of the model."""
        return [n for n in self.bound.model.names if n in self.mean]

    @property
    def afters(self) -> list[Weights]:
        """The aggregate as each kept client would use it: with its private leaves, if there are
        any, else one for all."""
        if not self.has_private_leaves:
            return [self.aggregate]
        found = []
        for end in self.ends:
            own = self.bound.only_private(end)
            params, buffers = (self.aggregate.params, self.aggregate.buffers)
            found.append(Weights(params | own["params"], buffers | own["buffers"]))
        return found

    @property
    def has_private_leaves(self) -> bool:
        return bool(self.bound.private_params or self.bound.private_buffers)


def probe(
    sim: Simulation, clients: Sequence[int] | None = None, max_clients: int = MAX_CLIENTS
) -> Probe:
    """Train the clients of the present round from the present state, which does not change.

    The whole cohort is trained, one client after the other, so that the aggregate is that of the
    round. The weights of at most ``max_clients`` clients are kept, and of fewer where they would
    take more than 1 GiB: those that :func:`spread` takes from the cohort in ascending order.

    Args:
        sim: the simulation, after any number of rounds.
        clients: the cohort; that of the present round for None.
        max_clients: the number of clients whose weights are kept.

    Raises:
        FieldError: a client does not exist, or ``max_clients`` is below 1.
        NotFinite: the loss of a client is not finite.

    Example::

        found = probe(sim)
        weight_divergence(found.ends, found.mean)
    """
    begin, session = time.perf_counter(), sim.session
    cohort_ids = sorted(set(session.draw_clients(sim.round) if clients is None else clients))
    if not cohort_ids or not 0 <= cohort_ids[0] <= cohort_ids[-1] < sim.federation.num_clients:
        raise FieldError(f"clients {cohort_ids} are not in 0..{sim.federation.num_clients - 1}")
    if max_clients < 1:
        raise FieldError(f"max_clients = {max_clients} is below 1")
    fitting = max(2, MAX_BYTES // max(1, tree.nbytes(sim.weights)))
    kept = spread(cohort_ids, min(max_clients, fitting))
    trained: dict[int, tuple[Weights, Weights]] = {}
    cohort = sim.cohort(cohort_ids)

    def answer(request: Request) -> Totals:
        nonlocal cohort
        if request.part:
            return sim.clients.answer(request)
        cohort = sim.clients.cohort(request)
        anchor = cohort.jobs.anchor
        return total_of(cohort.bound, _updates(cohort, set(kept), trained), request.round, anchor)

    done = drive(session.rounds(cohort_ids, steps=sim.steps), answer)
    summed, anchor = done.totals.summed, cohort.jobs.anchor
    places = [cohort_ids.index(k) for k in kept]
    weights = cohort.jobs.info.weight[places]
    mean = tree.map(lambda d, w: w + d / summed.weight, summed.delta.params, anchor.params)
    return Probe(
        method=str(sim.bound.method),
        round=sim.round,
        clients=kept,
        cohort=cohort_ids,
        names=[sim.federation.client_names[k] for k in kept],
        shares=weights / weights.sum(),
        anchor=anchor,
        starts=[trained[k][0] for k in kept],
        ends=[trained[k][1] for k in kept],
        mean=mean,
        aggregate=done.server.weights,
        bound=cohort.bound,
        federation=sim.federation,
        lr=sim.bound.lr(sim.round),
        seconds=time.perf_counter() - begin,
    )


def spread(items: Sequence[int], count: int) -> list[int]:
    """At most ``count`` items at even distances, the first and the last among them.

    >>> spread(range(10), 4)
    [0, 3, 6, 9]
    """
    if len(items) <= count:
        return list(items)
    if count == 1:
        return [items[0]]
    return [items[i * (len(items) - 1) // (count - 1)] for i in range(count)]


def _updates(
    cohort: Cohort, kept: set[int], trained: dict[int, tuple[Weights, Weights]]
) -> Iterator[tuple[int, Update]]:
    """Train one client after the other; note the weights of those that are kept."""
    for i, number in enumerate(cohort.clients):
        job = take_jobs(cohort.jobs, i)
        carry = run_steps(cohort.bound, job, cohort.batches[i, : cohort.steps[i]], number)
        if number in kept:
            start = job.anchor
            if PRIVATE in job.client:
                start = client.client_context(cohort.bound, job, {}).anchor
            trained[number] = start, carry.weights
        yield number, client.end(cohort.bound, job, carry).update
