"""The run folder of a real federation: the same files as those of a simulated run.

The record of a round is written with its training loss when the round is over, before the
checkpoint. Its test comes with the replies of the next round and is added then, still before that
round's checkpoint. So a checkpoint is never ahead of the records, as in a simulated run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from kedge.core import tree
from kedge.core.bound import Bound
from kedge.core.task import Task
from kedge.core.tree import Tree
from kedge.federation.coordinator.members import Roster
from kedge.files import finite
from kedge.history.folder import FEDERATION, SCORES, SEATS
from kedge.history.metric import COMPANIONS
from kedge.history.read import save_clients
from kedge.history.run import UNTESTED, Clients
from kedge.runs.bundle import PROBE_KEY, Inputs, probe, save_bundle
from kedge.runs.checkpoint import TrainingFolder
from kedge.runs.measure import headline_of, is_imbalanced, over_clients
from kedge.runs.result import Result
from kedge.runs.rounds import train_record
from kedge.runs.scores import of_clients
from kedge.session.session import Done, Session
from kedge.settings import Config

Sums = Mapping[int, Tree]  # of a test, by client


@dataclass
class Recorder:
    """Writes the folder of one run.

    Attributes:
        folder: the folder, claimed.
        config: the settings.
        roster: the members.
        task: loss and metrics.
        log: told how the run begins and ends.
        watch: called as ``watch(seed, record)`` after every round.
        records: of the rounds so far.
    """

    folder: TrainingFolder
    config: Config
    roster: Roster
    task: Task
    log: Callable[[str], None]
    watch: Callable[[int, dict[str, Any]], Any] | None = None
    records: list[dict[str, Any]] = field(default_factory=list)

    @property
    def seed(self) -> int:
        return self.config.seeds[0]

    def save_roster(self) -> None:
        self.folder.write(SEATS, self.roster.tokens_json().encode(), private=True)
        self.folder.write(FEDERATION, self.roster.to_json().encode())

    # -- rounds -------------------------------------------------------------------------------

    def start(self, session: Session) -> None:
        """Load the checkpoint into the session; write the first one if there is none."""
        state = self.folder.load(self.seed)
        self.folder.seed(self.seed)
        save_clients(self.folder, self.seed, self._clients())
        if state:
            session.load_state(state)
        self.records = self.folder.records(self.seed, session.round)
        if state:
            self.log(f"resumed after round {session.round}")
        else:
            self.folder.save(self.seed, session.state())
            self.log("started")

    def _clients(self) -> Clients:
        """Names and sizes; how many samples of each class a member has is its own affair."""
        participants = self.roster.participants
        return Clients(
            [participant.name for participant in participants],
            [participant.train for participant in participants],
        )

    def record_round(
        self, session: Session, done: Done, wire: tuple[int, int], seconds: float
    ) -> None:
        """Record a round without its test, then write the checkpoint.

        Args:
            session: after the round.
            done: what the round came to.
            wire: bytes that were received and sent, with repeated requests and tests.
            seconds: that the round took.
        """
        record = train_record(session.round, done)
        record |= {"wire_mb_up": wire[0] / 1e6, "wire_mb_down": wire[1] / 1e6}
        record |= {"cohort": list(done.totals.clients), "seconds": seconds}
        self.records.append(record)
        self.folder.record(self.seed, record)
        self.folder.save(self.seed, session.state())
        if not self.is_due(session.round) and self.watch is not None:
            self.watch(self.seed, record)

    def is_due(self, round: int) -> bool:
        """Whether the model after ``round`` rounds is tested."""
        return round % self.config.eval_every == 0 or round == self.config.rounds

    def lacks_test(self, session: Session) -> bool:
        """Whether the test after the last round is still to be made."""
        if not self.records or not self.is_due(session.round):
            return False
        return self.task.metric not in self.records[-1]

    def add_test(self, found: Sums, personal: Sums) -> None:
        """Add the sums of a test to the record of the last round."""
        record = self.records[-1] | {self.task.metric: math.nan}  # if nobody tested
        record |= tested_record(self.task, found, personal, len(self.roster.participants))
        self.records[-1] = record
        self.folder.rewrite_records(self.seed, self.records)
        if self.watch is not None:
            self.watch(self.seed, record)

    def forget_test(self) -> None:
        """Drop the test of the last round, which was that of a shorter run."""
        if self.records:
            kept = (*UNTESTED, "wire_mb_up", "wire_mb_down", "cohort")
            self.records[-1] = {k: v for k, v in self.records[-1].items() if k in kept}
            self.folder.rewrite_records(self.seed, self.records)

    # -- the end ------------------------------------------------------------------------------

    def save_bundle(self, bound: Bound) -> None:
        """Write what a prediction needs besides the weights."""
        data, encoding = self.roster.terms.data, self.roster.encoding
        moments = None
        if data.dtype != "int64":
            moments = torch.tensor(data.mean), torch.tensor(data.std)
        inputs = Inputs(data.shape, encoding, moments, data.classes)
        save_bundle(self.folder, self.config, inputs, self.task, bound.model)

    def save_model(self, module: nn.Module) -> None:
        """Write the weights of the global model, with its outputs on a probe."""
        data = self.roster.terms.data
        outputs = probe(module, data.shape, whole=data.dtype == "int64")
        metadata = {} if outputs is None else {PROBE_KEY: json.dumps(outputs)}
        self.folder.save_model(self.seed, module, metadata)

    def save_scores(self, found: Sums, personal: Sums) -> None:
        """Write the metrics of the last test, in all and per client."""
        scores: dict[str, Any] = {}
        if found:
            total = added(found)
            scores = {"global": {"samples": self._samples(found)} | self.task.report(total)}
            scores |= self._of_clients(found)
        if personal:
            scores["personal"] = self._of_clients(personal)
        self.folder.write(f"seed-{self.seed}/{SCORES}", json.dumps(finite(scores)).encode())

    def _of_clients(self, found: Sums) -> dict[str, Any]:
        participants = self.roster.participants
        each = {
            participants[k].name: {"samples": participants[k].test} | self.task.report(sums)
            for k, sums in sorted(found.items())
        }
        return of_clients(each, self.task)

    def _samples(self, found: Sums) -> int:
        return sum(self.roster.participants[k].test for k in found)

    def result(self, module: nn.Module | None, seconds: float) -> Result:
        """The result of the run; ``result.json`` is written with it."""
        task, records = self.task, [self.records]
        result = Result.of(
            self.config,
            records,
            task,
            headline_of(self.config, records),
            [self.roster.terms.hash],
            engine="flower",
            device="cpu",
            seconds=seconds,
            models=[] if module is None else [module],
            folder=self.folder.path,
        )
        self.folder.write("result.json", result.to_json().encode())
        self.log(f"complete: {task.metric} {result.written(result.last)}")
        return result


def added(found: Sums) -> Tree:
    """The sum over clients, in the order of their numbers."""
    total: Tree = None
    for client in sorted(found):
        total = found[client] if total is None else tree.add(total, found[client])
    return total


def tested_record(task: Task, found: Sums, personal: Sums, num_clients: int) -> dict[str, Any]:
    """What a test adds to the record of a round; the keys are those of a simulated run.

    ``tested`` is the number of clients that took part in it.
    """
    record: dict[str, Any] = {}
    names: tuple[str, ...] = (task.metric,)
    if found:
        total = added(found)
        record |= task.report(total) | {"per_class": task.per_class(total), "tested": len(found)}
        record.setdefault(task.metric, math.nan)
        if task.one_class and float(total["count"].sum()):
            share = float(total["count"].max() / total["count"].sum())
            if is_imbalanced(share, task.outputs):
                record["imbalanced"] = share
                names += COMPANIONS if task.metric == "accuracy" else ()
    for kind, sums in (("client", found), ("personal", personal)):
        if sums:
            every = (sums.get(k) for k in range(num_clients))
            reports = [task.report(one, names) if one else {} for one in every]
            record |= over_clients(kind, reports, task, names)
    return record
