"""The server's loop of a real federation: join, rounds, tests, checkpoints, the run folder.

The order of writes makes a crash harmless at any moment. Terms and members are on disk before a
member hears them; the checkpoint of a round, with the ledger of accepted replies, is on disk before
any request of the next round is sent. So what a resumed run asks of a member is what it asked
before, or the step after it, and the member has both states.

The run pauses, and says so, if too few members reply in all attempts: it never averages less than
the minimum, and never nothing.
"""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kedge.core import tree
from kedge.core.bound import Bound
from kedge.core.task import Task, tasks
from kedge.core.tree import Tree
from kedge.core.update import ZERO, Totals
from kedge.engines import Execution
from kedge.errors import FieldError, Interrupted, NotFinite, Paused
from kedge.federation.coordinator.enrolment import Enrolment, unread
from kedge.federation.coordinator.members import Roster
from kedge.federation.coordinator.requests import NO_TEST, Collected, Exchange, Requests, Test
from kedge.federation.coordinator.rules import PAUSED, Rules, Scaling
from kedge.federation.coordinator.settings import check_config, terms_of
from kedge.federation.member.policy import noise_of
from kedge.federation.member.profile import Question
from kedge.federation.member.run_state import Own, make_module
from kedge.federation.member.silo import bind, model_of
from kedge.federation.messages import MemberRequest, Transport
from kedge.federation.names import plain as one_line
from kedge.files import finite
from kedge.history.folder import (
    CONFIG,
    FEDERATION,
    RESULT,
    SCORES,
    SEATS,
    clear_stop,
    is_stop_requested,
)
from kedge.history.metric import COMPANIONS
from kedge.history.read import save_clients
from kedge.history.run import UNTESTED, SeedClients
from kedge.limits import is_out_of_memory
from kedge.runs.build import check_batchnorm, with_personal
from kedge.runs.checkpoint import TrainingFolder
from kedge.runs.environment import environment
from kedge.runs.measure import headline_of, is_imbalanced, over_clients
from kedge.runs.result import Result
from kedge.runs.rounds import train_record
from kedge.runs.train import advise, given_back, resume_hint
from kedge.saved.bundle import Inputs, save_bundle, save_weights
from kedge.saved.scores import of_clients
from kedge.session.sampler import make_sampler
from kedge.session.session import Done, Request, Rounds, Session, drive
from kedge.session.terms import NoData, Terms
from kedge.settings import Config


class Coordinator:
    """Runs a federation over a transport, and writes a run folder.

    Args:
        config: the settings, as for a simulated run, with one seed. ``clients`` is the number of
            members to wait for; 0 takes those that come within ``rules.join_s``.
        transport: what carries messages.
        out: the folder of the run.
        resume: continue the run in ``out``, if there is one. ``config`` may have more rounds than
            before. Members that were excluded may try again, but for those that sent bad replies.
        model: a module of one's own (then every member has it, too), or a function that makes it.
        rules: patience and distrust.
        scaling: mean and standard deviation of inputs, in place of those of the members' data.
        watch: called as ``watch(seed, record)`` after every round.
        report: called with each line of the log.
        hint: what to type to resume; derived from ``out`` if empty.
        stop: whether someone asks for a stop, besides the file in the folder.

    Raises:
        KedgeError: the settings are not for a real federation, or the folder cannot be used.

    Example::

        result = Coordinator(config, transport, "runs/hospitals").run()
    """

    def __init__(
        self,
        config: Config,
        transport: Transport,
        out: str | Path,
        *,
        resume: bool = False,
        model: Own = None,
        rules: Rules | None = None,
        scaling: Scaling | None = None,
        watch: Callable[[int, dict[str, Any]], Any] | None = None,
        report: Callable[[str], None] | None = None,
        hint: str = "",
        stop: Callable[[], bool] | None = None,
    ) -> None:
        [config] = with_personal([config])
        check_config(config)
        path = Path(out) / CONFIG
        if resume and path.exists() and not path.stat().st_size:
            path.unlink()  # killed before the settings were written
        if resume and path.exists():
            self.folder, self.config = TrainingFolder.resume(out, config, remote=True)
        else:
            self.folder, self.config = TrainingFolder.create(out, config), config
        self.transport, self.rules, self.scaling = transport, rules or Rules(), scaling
        self.model, self.watch, self.report = model, watch, report
        self.hint = hint or resume_hint(out)
        self.stop = stop or (lambda: False)
        self.exchange = Exchange(transport, self.log, Path(out))

    def log(self, text: str) -> None:
        """Note something in the log of the run, in one line that a terminal shows as it is."""
        text = one_line(text)
        self.folder.log(text)
        if self.report is not None:
            self.report(text)

    def run(self) -> Result:
        """Run all rounds that are left.

        Raises:
            Paused: too few members replied; the run is saved, and the message says how to resume.
            Interrupted: someone asked for a stop; all is saved.
            TermsError: members did not join, or do not fit each other.
        """
        start = time.perf_counter()
        advise([self.config])
        with given_back([self.folder]):
            self.folder.claim()
            clear_stop(self.folder.path)
            self._save_environment()
            self._join()
            try:
                while self.session.round < self.config.rounds:
                    self._stop_if_asked()
                    self._round()
                return self._finish(start)
            except Paused as pause:
                self.log(str(pause))
                raise

    def _stop_if_asked(self) -> None:
        if self._is_stop_requested():
            round = self.session.round
            when = f"after round {round}" if round else "before the first round"
            raise Interrupted(f"stopped {when} of seed {self.recorder.seed}. {self.hint}")

    def _is_stop_requested(self) -> bool:
        return self.stop() or is_stop_requested(self.folder.path)

    def _stop_joining(self) -> None:
        if self._is_stop_requested():
            raise Interrupted("stopped before all members had joined; nothing is saved")

    def _save_environment(self) -> None:
        if not self.folder.has_environment:
            found = environment(Execution("loop"), torch.device("cpu"), self.config.precision)
            self.folder.save_environment(found)

    # -- joining ------------------------------------------------------------------------------

    def _join(self) -> None:
        roster = Roster.load(self.folder.path)
        counts = self.config.class_weights == "balanced"
        question = Question(self.config.seeds[0], self.config.split, counts)
        run = secrets.token_hex(8) if roster is None else roster.run
        enrolment = Enrolment(self.exchange, run, question, self.rules, self.log)
        self.enrolment = enrolment
        is_new = roster is None
        if roster is None:
            clients = self.config.clients
            agreement, nodes = enrolment.gather(clients, self.scaling, self._stop_joining)
            terms = terms_of(self.config, agreement, own=self.model is not None)
            roster = Roster.of(run, terms, agreement, nodes)
        roster.forgive(self.rules.strikes)
        extended = roster.terms.rounds < self.config.rounds
        if extended:
            roster.terms = dataclasses.replace(roster.terms, rounds=self.config.rounds)
        self.roster, terms = roster, roster.terms
        self.bound = server_bound(terms, make_module(terms, self.model))
        sizes = [participant.train for participant in roster.participants]
        sampler = make_sampler(self.config.sampler, self.config.per_round, sizes)
        self.session: Session = terms.session(self.bound, sampler)
        self.recorder = Recorder(self.folder, self.config, roster, terms.task, self.log, self.watch)
        if is_new or extended:
            self.recorder.save_roster()
        self.recorder.start(self.session)
        if extended:
            self.recorder.forget_test()
        self.recorder.save_bundle(self.bound)
        initial = self.bound.model.own_weights
        self.requests = Requests(
            self.session, roster, self.exchange, self.rules, self.log,
            partial(enrolment.refresh, roster, initial), self.recorder.save_roster,
            self._stop_if_asked,
        )  # fmt: skip
        if is_new:
            enrolment.tell(roster, initial)
            every = len(roster.participants)
            agreed = sum(member.agreed for member in roster.participants)
            count = f"{every}" if agreed == every else f"{agreed} of {every}"
            self.log(f"{count} members agree on the terms {terms.hash}")

    # -- rounds -------------------------------------------------------------------------------

    def _round(self) -> None:
        """One round; the session changes only if it succeeds."""
        start, session = time.perf_counter(), self.session
        sent, received = self.exchange.sent, self.exchange.received
        done = self._run_requests(
            lambda: session.rounds(check="state"),
            self._test() if self.recorder.lacks_test(session) else NO_TEST,
        )
        drawn = len(session.draw_clients(session.round))
        session.accept(done)
        wire = self.exchange.received - received, self.exchange.sent - sent
        seconds = time.perf_counter() - start
        self.recorder.record_round(session, done, wire, seconds)
        loss, replied = self.recorder.records[-1]["train_loss"], len(done.totals.clients)
        self.log(
            f"round {session.round} of {self.config.rounds}: {replied} of "
            f"{drawn} replied, loss {loss:.4g}, {seconds:.1f} s"
        )

    def _run_requests(self, begin: Callable[[], Rounds], test: Test = NO_TEST) -> Done:
        """A round of the session that is not yet accepted.

        Clients are asked once. If the round fails, or its outcome is not finite, it is computed
        again; who alone makes the last request fail is named and dropped.

        Raises:
            Paused: too few replied.
            NotFinite: the outcome is not finite, and no few are to blame.
        """
        known: dict[str, Totals] = {}  # by part, of requests that did not fail
        found: Collected | None = None  # the replies to the last request
        totals, first = ZERO, None
        without, suspects = list[int](), iter(list[list[int]]())

        def settle() -> None:
            """Keep the totals of the last request, and drop the replies that are not in them."""
            nonlocal found
            if found is not None:
                done, found = found, None
                known[done.request.part] = totals
                self.requests.blame(done, without, first)
                self._check_enough(done)

        def answer(request: Request) -> Totals:
            nonlocal found, totals, first, without, suspects, test
            if request.part in known:
                return known[request.part]
            if found is None or found.request.part != request.part:
                settle()
                found = self._collect(request, test)
                suspects = self.requests.suspects(found)
                test, first, without = NO_TEST, None, []
            totals = self.requests.total(found, without)
            return totals

        while True:
            try:
                done = drive(begin(), answer)
                settle()
                return done
            except Exception as error:
                if found is None or is_out_of_memory(error) or isinstance(error, OSError):
                    raise
                first = first or error
                chosen = next(suspects, None)
                if chosen is None and isinstance(first, NotFinite):
                    advice = "lower the learning rate. The run is saved before it"
                    text = f"{first}, though all replies were; {advice}. {self.hint}"
                    raise NotFinite(text) from None
                if chosen is None:
                    raise first from None
                without = chosen

    def _collect(self, request: Request, test: Test) -> Collected:
        """What clients reply, but for excluded ones; Paused if it is too little."""
        drawn = len(request.clients)
        request = request._replace(clients=self._left(request.clients))
        found = self.requests.ask(request, self.rules.needed(drawn), test)
        found.drawn = drawn
        self._check_enough(found)
        if test is not NO_TEST:
            self.recorder.add_test(found.sums, found.personal)
        return found

    def _left(self, clients: list[int]) -> list[int]:
        """Clients that are not excluded."""
        return [k for k in clients if not self.roster.participants[k].excluded]

    def _test(self, detail: str = "plain") -> Test:
        output = None
        if self.bound.parts_with("output"):
            output = self.bound.only_public(self.session.output())
        everybody = self._left(list(range(self.session.workload.num_clients)))
        testers = [k for k in everybody if self.roster.participants[k].test]
        if self.bound.task.headline.needs:
            detail = "detailed"
        return Test(detail, output, self.config.personal, testers)

    def _check_enough(self, found: Collected) -> None:
        """Raise Paused, with a reason for each member that failed, if too few have replied."""
        needed, names = self.rules.needed(found.drawn), self.roster.participants
        if len(found.replies) >= needed:
            return
        excluded = [f"{s.name} is excluded: it {s.excluded}" for s in names if s.excluded]
        failed = [
            f"{names[k].name} {reason}"
            for k, reason in sorted(found.failures.items())
            if not names[k].excluded or not reason.startswith(names[k].excluded)
        ]
        strangers = self.enrolment.reasons.values()
        reasons = "; ".join([*failed, *excluded, *strangers])
        raise Paused(
            f"{PAUSED} {found.request.round + 1}: {len(found.replies)} of {found.drawn} members "
            f"replied, {needed} are needed. {reasons or 'Nobody is left'}. The run is saved after "
            f"round {self.session.round}. {self.hint}"
        )

    # -- the end ------------------------------------------------------------------------------

    def _finish(self, start: float) -> Result:
        """Surveys after the last round, the test of the model, and the files of a complete run."""
        session, recording = self.session, self.recorder
        session.accept(self._run_requests(lambda: session.last_surveys(check="state")))
        recording.save_model(self.bound.model.module(session.output()))
        test = self._test("detailed")
        request = session.request("", list(test.clients))
        tested = Collected(request, "evaluate")
        if test.clients:
            tested = self.requests.ask(request, len(test.clients), test, only_test=True)
            if not tested.sums and not tested.personal:
                self.log("no member tested the model; its metrics are unknown")
        recording.add_test(tested.sums, tested.personal)
        recording.save_scores(tested.sums, tested.personal)
        module = self.bound.model.module(session.output())
        result = recording.result(module, time.perf_counter() - start)
        self._tell_finish()
        return result

    def _tell_finish(self) -> None:
        run, terms = self.roster.run, self.roster.terms.hash
        requests = {
            member.node: MemberRequest("finish", run, client=member.client, terms=terms)
            for member in self.roster.participants
            if member.present and member.agreed
        }
        for _ in self.exchange.run(requests, min(60.0, self.rules.deadline_s), unread):
            pass  # the run is complete, whoever hears of it


def server_bound(terms: Terms, module: nn.Module) -> Bound:
    """Bind the method of the terms on the server, which has no data."""
    model = model_of(terms, module)
    check_batchnorm(terms.method, model)
    bound = bind(terms, model, NoData(terms.data.dtype == "int64"))
    bound = bound.with_noise(noise_of(secrets.token_bytes(32)))  # members know the seed
    if terms.task.headline.function is not None:
        raise FieldError(
            f"metric = {terms.metric!r} is a function of all labels and scores, which stay with "
            f"the members; use one of: {', '.join(m.name for m in tasks[terms.data.task].metrics)}",
            "metric",
        )
    return bound


# -- the run folder ------------------------------------------------------------------------------

Sums = Mapping[int, Tree]  # of a test, by client


@dataclass
class Recorder:
    """Writes the folder of one run: the same files as those of a simulated run.

    The record of a round is written with its training loss when the round is over, before the
    checkpoint. Its test comes with the replies of the next round and is added then, still before
    that round's checkpoint. So a checkpoint is never ahead of the records, as in a simulated run.

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
        members = self.roster.participants  # how many samples of a class one has is its own affair
        known = SeedClients([m.name for m in members], [m.train for m in members])
        save_clients(self.folder, self.seed, known)
        if state:
            session.load_state(state)
        self.records = self.folder.records(self.seed, session.round)
        if state:
            self.log(f"resumed after round {session.round}")
        else:
            self.folder.save(self.seed, session.state())
            self.log("started")
        self.folder.save_state(self.seed, "training")

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
        save_bundle(self.folder, self.config, self._inputs(), self.task, bound.model)

    def save_model(self, module: nn.Module) -> None:
        """Write the weights of the global model, with its outputs on a probe."""
        save_weights(self.folder, self.seed, module, self._inputs())

    def _inputs(self) -> Inputs:
        data, encoding = self.roster.terms.data, self.roster.encoding
        whole = data.dtype == "int64"
        moments = None if whole else (torch.tensor(data.mean), torch.tensor(data.std))
        return Inputs(data.shape, encoding, moments, data.classes, whole)

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
        self.folder.write(RESULT, result.to_json().encode())
        self.folder.save_state(self.seed, "complete")
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
