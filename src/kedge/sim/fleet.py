"""Train several simulations in lockstep: a lane is one client of one simulation.

Seeds of one method, or settings that differ only in numbers, train as one stack. On a GPU this
costs little more than a single run; on a CPU it saves the overhead of small steps. Each simulation
ends in the state of a separate run, up to rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kedge.core.bound import Server
from kedge.core.server import Totals
from kedge.engines.cohort import Cohort, Group, Outcome
from kedge.engines.lane_bound import OPTIM
from kedge.errors import IncompatibleError, NotFinite
from kedge.sim.cohorts import Cohorts, unlike

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
            reason = unlike(self.sims[0], sim)
            if reason:
                raise IncompatibleError(f"simulations cannot train side by side: {reason} differ")
        self._cohorts = Cohorts(self.sims)

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
        return [sum(sim.per_round for sim in self.sims)]

    def run_round(self) -> list[Totals]:
        """Run one round; totals are empty for a simulation that is ahead, has failed or ended."""
        round = self.round
        active = [i for i, sim in enumerate(self.sims) if sim.round == round and self._is_active(i)]
        round_totals: list[Totals] = [{} for _ in self.sims]
        if not active:
            return round_totals
        if self._groups:
            for members, fleet in self._groups:
                if set(members) & set(active):
                    for i, totals in zip(members, fleet.run_round(), strict=True):
                        round_totals[i] = totals
                    self.failed |= {members[i]: error for i, error in fleet.failed.items()}
            return round_totals
        before = [sim.server for sim in self.sims]
        try:
            results = self._train(round, active)
        except BaseException:
            self._restore(before)  # a failed round can be repeated
            raise
        if results is None:
            self._restore(before)
            return self.run_round()
        for i, (group, outcome, surveyed) in results.items():
            round_totals[i] = self.sims[i].advance(group, outcome, surveyed)
        return round_totals

    def _train(self, round: int, active: list[int]) -> dict[int, tuple[Group, Outcome, int]] | None:
        """Outcomes and survey bytes of active simulations; None if they cannot train together."""
        sims = self.sims
        clients = [sim.draw_cohort(round) for sim in sims]
        surveyed = {i: sims[i].surveys(clients[i]) for i in active}
        if len(sims) == 1:
            group, outcome = sims[0].train(clients[0])
            groups, outcomes = [group], [outcome]
        else:
            for i in {repr(sims[i].bound.method): i for i in active}.values():  # seeds share one
                sims[i].check_parts(clients[i][0])
            cohort = self._cohorts.form(clients, round)
            if not self._can_train_together(cohort, round):
                return None
            groups, outcomes = cohort.groups, sims[0].engine.train(cohort)
            self._cohorts.draw_ahead(round + 1)
        for i in active:
            try:
                sims[i].session.check_finite(outcomes[i].totals, clients[i])
            except NotFinite as error:
                if self.strict:
                    raise
                self.failed[i] = error
        return {i: (groups[i], outcomes[i], surveyed[i]) for i in active if i not in self.failed}

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
        differing = self._cohorts.differing
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

    def _restore(self, servers: Sequence[Server]) -> None:
        for sim, server in zip(self.sims, servers, strict=True):
            sim.server = server
