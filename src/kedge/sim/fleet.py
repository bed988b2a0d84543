"""Train several simulations in lockstep: a lane is one client of one simulation.

Seeds of one method, or settings that differ only in numbers, train as one stack. On a GPU this
costs little more than a single run; on a CPU it saves the overhead of small steps. Each simulation
ends in the state of a separate run, up to rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kedge.core.update import Totals
from kedge.engines.cohort import Cohort
from kedge.engines.lane_bound import OPTIM
from kedge.errors import IncompatibleError, NotFinite
from kedge.session.session import Done, Request
from kedge.sim.clients import Together, unlike

if TYPE_CHECKING:
    from kedge.sim.simulation import Simulation


class Fleet:
    """Simulations of one structure that train together, round by round.

    A simulation that is ahead of the others trains without effect until they have caught up, so
    that a resumed run equals an uninterrupted one bit for bit. If a part does not support fields
    that differ between lanes, only simulations with equal fields train together. The loop engine
    trains all of them one after the other.

    Args:
        sims: simulations with the same batches, model, method structure and engine.
        strict: whether a loss that is not finite raises NotFinite; otherwise it stops its own
            simulation, and the error is in ``failed`` under the simulation's index.

    Raises:
        IncompatibleError: the simulations differ in more than numbers.

    Example::

        fleet = Fleet([Simulation(federation, module, "moon", seed=seed) for seed in range(3)])
        while fleet.round < 100:
            fleet.run_round()
    """

    def __init__(self, sims: Sequence[Simulation], strict: bool = True) -> None:
        self.sims, self.strict = list(sims), strict
        self.failed: dict[int, NotFinite] = {}
        self._ended: set[int] = set()
        self._groups: list[tuple[list[int], Fleet]] = []  # trained one after the other
        self._tried: set[tuple[tuple[str, str], ...]] = set()
        if len(self.sims) == 1:
            return
        if not self.sims[0].engine.batches_clients:
            self._split([[i] for i in range(len(self.sims))])
            return
        for sim in self.sims[1:]:
            reason = unlike(self.sims[0].clients, sim.clients)
            if reason:
                raise IncompatibleError(f"simulations cannot train side by side: {reason} differ")
        self._stack = Together([sim.clients for sim in self.sims])

    @property
    def round(self) -> int:
        """Number of the next round: that of the simulation furthest behind."""
        active = [sim.round for i, sim in enumerate(self.sims) if self._is_active(i)]
        return min(active or [sim.round for sim in self.sims])

    def end(self, index: int) -> None:
        """End one simulation before the others: from now on it trains without effect."""
        self._ended.add(index)
        for members, fleet in self._groups:
            if index in members:
                fleet.end(members.index(index))

    def _is_active(self, index: int) -> bool:
        return index not in self.failed and index not in self._ended

    @property
    def lanes(self) -> list[int]:
        """Lanes of each stack that is trained in a round."""
        if self._groups:
            return [count for _, fleet in self._groups for count in fleet.lanes]
        return [sum(sim.session.cohort_size for sim in self.sims)]

    def run_round(self) -> list[Done | None]:
        """Run one round; None for a simulation that is ahead, has failed or ended."""
        round = self.round
        active = [i for i, sim in enumerate(self.sims) if sim.round == round and self._is_active(i)]
        done: list[Done | None] = [None for _ in self.sims]
        if not active:
            return done
        if self._groups:
            for members, fleet in self._groups:
                if set(members) & set(active):
                    for i, one in zip(members, fleet.run_round(), strict=True):
                        done[i] = one
                    self.failed |= {members[i]: error for i, error in fleet.failed.items()}
            return done
        if not self._run(active, done):
            return self.run_round()
        for i, one in enumerate(done):  # all of them, or none
            if one is not None:
                self.sims[i].accept(one)
        return done

    def _run(self, active: list[int], done: list[Done | None]) -> bool:
        """The round of active simulations, in lockstep, before any is accepted; False if they
        cannot train together."""
        sims, round = self.sims, self.round
        rounds = {i: sims[i].session.rounds(steps=sims[i].steps) for i in active}
        asked: dict[int, Request] = {}

        def advance(i: int, totals: Totals | None) -> None:
            """Send a run the totals of its request, and note the next one."""
            try:
                asked[i] = next(rounds[i]) if totals is None else rounds[i].send(totals)
            except StopIteration as end:
                asked.pop(i, None)
                done[i] = end.value
            except NotFinite as error:
                if self.strict:
                    raise
                self.failed[i] = error

        for i in active:
            advance(i, None)
            while i in asked and asked[i].part:
                advance(i, sims[i].clients.answer(asked[i]))
        if len(sims) == 1:
            totals = {i: sims[i].answer(request) for i, request in asked.items()}
        else:
            for i in {repr(sims[i].bound.method): i for i in asked}.values():  # seeds share one
                sims[i].clients.check(asked[i])
            # the others train without effect, so that the stack keeps its size
            requests = [asked.get(i) or _idle(sim, round) for i, sim in enumerate(sims)]
            cohort = self._stack.cohort(requests)
            if not self._can_train_together(cohort, round):
                return False
            outcomes = sims[0].engine.train(cohort)
            self._stack.draw_ahead(round + 1, [sim.session.draw_clients(round + 1) for sim in sims])
            for i in asked:
                sims[i].clients.park(requests[i], outcomes[i].next_states)
            totals = {i: outcomes[i].totals for i in asked}
            del outcomes
        for i in list(totals):
            advance(i, totals.pop(i))
        return True

    def _can_train_together(self, cohort: Cohort, round: int) -> bool:
        """Test each combination of phases once; split the fleet if the engine cannot batch it."""
        phases = cohort.bound.phases
        if tuple(phases.items()) in self._tried:
            return True
        reason = "their phases differ"
        if all(sim.bound.at(round).phases == phases for sim in self.sims):
            reason = self.sims[0].engine.why_not_together(cohort)
        if not reason:
            self._tried.add(tuple(phases.items()))
            return True
        differing = self._stack.differing
        groups: dict[tuple[float, ...], list[int]] = {}
        for i in range(len(self.sims)):
            values = tuple(v[i] for fields in differing.values() for v in fields.values())
            groups.setdefault(values, []).append(i)
        if len(groups) == 1:  # the fields are not the reason: one by one
            groups = {(float(i),): [i] for i in range(len(self.sims))}
        names = ", ".join(
            name if owner == OPTIM else f"{owner}.{name}"
            for owner, fields in differing.items()
            for name in fields
        )
        what = f"settings that differ in {names}" if names else "these simulations"
        warnings.warn(f"{what} train one after the other: {reason}", stacklevel=2)
        self._split(list(groups.values()))
        return False

    def _split(self, groups: list[list[int]]) -> None:
        self._groups = [
            (members, Fleet([self.sims[i] for i in members], self.strict)) for members in groups
        ]
        for index in (*self.failed, *self._ended):
            self.end(index)


def _idle(sim: Simulation, round: int) -> Request:
    """A request to a simulation that is not asked for this round."""
    request = sim.session.request("", sim.session.draw_clients(round) or [0])
    return request._replace(round=round)
