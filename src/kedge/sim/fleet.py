"""Several simulations in lock-step: lanes are (simulation, client).

Seeds of one method, or settings that differ in numbers, train as one stack, which on a GPU costs
little more than a single run, and on a CPU saves what every small step costs by itself. Each
simulation ends in the state that it would have had alone, up to rounding.
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
    """Simulations of one structure, round by round.

    One that is ahead of the others only keeps its lanes filled until they have caught up, so that
    a stopped run goes on bit for bit as one that was not. With ``strict=False`` a loss that is not
    finite stops its own simulation, which is then in ``failed``, instead of all of them.

    Where parts cannot work on fields that differ between lanes, simulations with equal fields
    train together, and the others after them; on the loop engine, all do one after the other.
    """

    def __init__(self, sims: Sequence[Simulation], strict: bool = True) -> None:
        self.sims, self.strict = list(sims), strict
        self.failed: dict[int, NotFinite] = {}
        self._groups: list[tuple[list[int], Fleet]] = []  # that train one after the other
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
        """The round that comes next: that of the simulation furthest behind."""
        going = [sim.round for i, sim in enumerate(self.sims) if i not in self.failed]
        return min(going or [sim.round for sim in self.sims])

    @property
    def lanes(self) -> list[int]:
        """Lanes of each stack that is trained in a round."""
        if self._groups:
            return [count for _, fleet in self._groups for count in fleet.lanes]
        return [sum(sim.per_round for sim in self.sims)]

    def run_round(self) -> list[Totals]:
        """One round of all simulations; totals are empty for one that is ahead or has failed."""
        round = self.round
        going = [
            i for i, sim in enumerate(self.sims) if sim.round == round and i not in self.failed
        ]
        found: list[Totals] = [{} for _ in self.sims]
        if not going:
            return found
        if self._groups:
            for places, fleet in self._groups:
                if set(places) & set(going):
                    for i, totals in zip(places, fleet.run_round(), strict=True):
                        found[i] = totals
                    self.failed |= {places[i]: error for i, error in fleet.failed.items()}
            return found
        before = [sim.server for sim in self.sims]
        try:
            done = self._train(round, going)
        except BaseException:
            self._restore(before)  # a round that failed can be run again
            raise
        if done is None:
            self._restore(before)
            return self.run_round()
        for i, (group, outcome, surveyed) in done.items():
            found[i] = self.sims[i].advance(group, outcome, surveyed)
        return found

    def _train(self, round: int, going: list[int]) -> dict[int, tuple[Group, Outcome, int]] | None:
        """What the clients of each simulation return; None if they cannot be trained together."""
        sims = self.sims
        clients = [sim.draw_cohort(round) for sim in sims]
        surveyed = {i: sims[i].surveys(clients[i]) for i in going}
        if len(sims) == 1:
            group, outcome = sims[0].train(clients[0])
            groups, outcomes = [group], [outcome]
        else:
            for i in {repr(sims[i].bound.method): i for i in going}.values():  # seeds share one
                sims[i].check_parts(clients[i][0])
            cohort = self._cohorts.form(clients, round)
            if not self._can_train_together(cohort, round):
                return None
            groups, outcomes = cohort.groups, sims[0].engine.train(cohort)
            self._cohorts.draw_ahead(round + 1)
        for i in going:
            try:
                sims[i].session.check_finite(outcomes[i].totals, clients[i])
            except NotFinite as error:
                if self.strict:
                    raise
                self.failed[i] = error
        return {i: (groups[i], outcomes[i], surveyed[i]) for i in going if i not in self.failed}

    def _can_train_together(self, cohort: Cohort, round: int) -> bool:
        """Try it once for every phase; where it cannot be done, split up."""
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
            own = tuple(v[i] for fields in differing.values() for v in fields.values())
            groups.setdefault(own, []).append(i)
        if len(groups) == 1:  # not for the fields: one by one
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
            (places, Fleet([self.sims[i] for i in places], self.strict)) for places in groups
        ]

    def _restore(self, servers: Sequence[Server]) -> None:
        for sim, server in zip(self.sims, servers, strict=True):
            sim.server = server
