"""Ask the clients of a round, and collect what they reply.

Replies are checked as they come, and stored until all are there: they are averaged in the order of
the clients, so that the sum does not depend on who was faster. A client that does not reply, or
replies with a code, has failed; it may succeed in the next attempt or round. A bad reply is dropped
and counted against its sender, and so is one whose numbers are far larger than those of most, or
whose numbers make the sum not finite. A client whose state is lost is excluded: it cannot take part
as itself any more, and a fresh state in its place would not be that of the method.

A test of the model rides along with the first request of a round. Members without such a request
get one for the test alone, at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kedge.core.tree import Tree, Weights
from kedge.core.update import Totals, Update, total_of
from kedge.engines.layout import layout_of
from kedge.engines.ops import FOREACH
from kedge.federation.coordinator.enrolment import Enrolment
from kedge.federation.coordinator.exchange import Exchange
from kedge.federation.coordinator.members import Participant, Roster
from kedge.federation.coordinator.reply_checks import ReplyChecks, outliers
from kedge.federation.coordinator.rules import Rules
from kedge.federation.large_messages import Message
from kedge.federation.messages import CODES, Failure, MemberRequest
from kedge.federation.names import plain
from kedge.session.session import Request, Session
from kedge.sim.clients import all_weights

#: Codes that say that a member can never answer in this run.
FINAL_CODES = ("NO_STATE", "POLICY", "STALE")


@dataclass(frozen=True)
class Test:
    """A test that rides along.

    Attributes:
        detail: ``plain`` or ``detailed``.
        output: the weights to test; None if they are those that clients start from.
        personal: whether to test the clients' own models, too.
        clients: whom to ask.
    """

    __test__ = False  # for pytest: this is no test

    detail: str
    output: Weights | None
    personal: bool
    clients: Collection[int]


class Arrived(NamedTuple):
    """A reply that has passed all checks, without the arrays that wait in its message."""

    message: Message
    code: str
    sizes: Mapping[str, float]
    sums: Tree
    personal: Tree


@dataclass
class Collected:
    """What the clients of a request replied; ``kind`` is train, survey or evaluate."""

    request: Request
    kind: str
    drawn: int = 0  # clients that the request would have had without exclusions
    replies: dict[int, Message] = field(default_factory=dict)
    sizes: dict[int, Mapping[str, float]] = field(default_factory=dict)  # of those replies
    sums: dict[int, Tree] = field(default_factory=dict)
    personal: dict[int, Tree] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)  # to what was asked, not the test alone
    asked: dict[int, MemberRequest] = field(default_factory=dict)  # of those replies


@dataclass
class Requests:
    """Asks clients, with attempts and a deadline.

    Attributes:
        session: the server's session.
        roster: the members.
        exchange: carries the messages.
        enrolment: lets members back in.
        rules: patience and distrust.
        log: told of every failure.
        initial: makes the initial weights, for members that must hear the terms again.
        changed: called when strikes or exclusions have changed.
        stop: called before a round is asked for again; it raises an exception to give up.
    """

    session: Session
    roster: Roster
    exchange: Exchange
    enrolment: Enrolment
    rules: Rules
    log: Callable[[str], None]
    initial: Callable[[], Weights]
    changed: Callable[[], None]
    stop: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.checks = ReplyChecks(self.session, self.rules, self.roster.sizes)

    def ask(
        self, request: Request, needed: int, test: Test | None = None, only_test: bool = False
    ) -> Collected:
        """Ask clients until enough have replied, or all attempts are spent. For surveys that are
        made once, *all* are enough.

        Args:
            request: its clients may be fewer than were drawn, without excluded ones.
            needed: replies that are enough.
            test: a test that rides along.
            only_test: whether the test is all that is asked for.

        Returns:
            What was collected, perhaps fewer replies than needed.
        """
        kind = "evaluate" if only_test else "survey" if request.part else "train"
        found, clients = Collected(request, kind), request.clients
        if kind == "survey" and self.session.bound.part(request.part).surveys() != "every":
            needed = len(clients)
        for attempt in range(self.rules.attempts):
            if attempt:
                self.stop()
                self.exchange.transport.wait(self.rules.wait_s)
            self.enrolment.refresh(self.roster, self.initial)
            also = [k for k in test.clients if k not in clients] if test and not attempt else []
            self._attempt(found, self._missing(found), also, attempt, test)
            samples = [train for train, _ in self.checks.sizes]
            for client, reason in outliers(found.sizes, self.rules, samples).items():
                self._drop(client, reason, found)
            if len(found.answered) >= needed or not self._missing(found):
                break
        return found

    def _missing(self, found: Collected) -> list[int]:
        clients = found.request.clients
        return [k for k in clients if k not in found.answered and not self._participant(k).excluded]

    def total(self, found: Collected, without: Collection[int] = ()) -> Totals:
        """The totals of what was collected, in the order of the clients, without some of them."""
        request = found.request
        bound = self.session.bound.at(request.round)
        anchor = all_weights(bound, request.broadcast.weights)
        updates = self._updates(found, without)
        return total_of(bound, updates, request.round, anchor, FOREACH)

    def _updates(self, found: Collected, without: Collection[int]) -> Iterator[tuple[int, Update]]:
        place = layout_of(self.session.bound.model).place
        broadcast = found.request.broadcast
        for client in found.request.clients:
            if client in found.replies and client not in without:
                reply, asked = found.replies[client], found.asked[client]
                opened = [self.checks.open(reply, asked, broadcast)]
                yield client, place(opened.pop().value["update"])  # nothing keeps it in memory

    def suspects(self, found: Collected) -> Iterator[list[int]]:
        """Who may have made a round fail: nobody, if it does not fail again; each alone, from the
        largest numbers down; those with the largest numbers, while they are fewer than half."""
        yield []
        by_size = sorted(found.replies, key=lambda k: -max(found.sizes[k].values(), default=0.0))
        if len(by_size) > 1:
            yield from ([k] for k in by_size)
            yield from (by_size[:n] for n in range(2, (len(by_size) + 1) // 2))

    def blame(self, found: Collected, clients: Collection[int], why: object) -> None:
        """Drop the replies of clients without which the round does not fail."""
        for client in clients:
            self._drop(client, f"with it, the sum fails or is not finite ({why})", found)

    # -- one attempt --------------------------------------------------------------------------

    def _attempt(
        self,
        found: Collected,
        clients: Collection[int],
        also: Collection[int],
        attempt: int,
        test: Test | None,
    ) -> None:
        requests: dict[str, Callable[[float], MemberRequest]] = {}
        values: dict[tuple[bool, bool], Tree] = {}  # those of several clients are packed once
        for client in (*clients, *also):
            participant = self._participant(client)
            if not participant.present or not participant.agreed or participant.excluded:
                if client not in also:
                    why = (
                        "has not agreed to the terms" if participant.present else "is not connected"
                    )
                    found.failures[client] = participant.excluded or why
                continue
            kind = found.kind if client in clients else "evaluate"
            requests[participant.node] = self._request(found, kind, client, attempt, test, values)
        deadline_s, opener = self.rules.deadline_s, partial(self._arrived, found)
        for _, request, reply in self.exchange.run(requests, deadline_s, opener):
            self._receive(request, reply, found)
        for client in clients:
            if client in found.failures:
                self._say(client, found)

    def _request(
        self,
        found: Collected,
        kind: str,
        client: int,
        attempt: int,
        test: Test | None,
        values: dict[tuple[bool, bool], Tree],
    ) -> Callable[[float], MemberRequest]:
        asked, request = test is not None and client in test.clients, found.request

        def make(deadline: float) -> MemberRequest:
            output = test.output if test is not None else None
            personal = asked and test is not None and test.personal
            has_down = kind != "evaluate" or personal
            has_output = asked and (output is not None or kind == "evaluate")
            if (has_down, has_output) not in values:
                value, down = dict[str, Tree](), request.broadcast
                if has_down:
                    value["down"] = down
                if has_output:
                    value["output"] = down.weights if output is None else output
                values[has_down, has_output] = value
            value = values[has_down, has_output]
            return MemberRequest(
                kind, self.roster.run, request.round, attempt, client, self.roster.terms.hash,
                request.part if kind == "survey" else "", test.detail if asked and test else "",
                accepted=self.session.ledger[client], deadline=deadline, personal=personal,
                value=value,
            )  # fmt: skip

        return make

    def _arrived(self, found: Collected, request: MemberRequest, message: Message) -> Arrived:
        code, value, sizes = self.checks.open(message, request, found.request.broadcast)
        return Arrived(message, code, sizes, value.get("sums"), value.get("personal"))

    def _receive(self, request: MemberRequest, reply: Arrived | Failure, found: Collected) -> None:
        client, participant = request.client, self._participant(request.client)
        if isinstance(reply, Failure):
            found.failures[client] = f"did not reply ({reply.reason})"
            if reply.is_bad:
                self._strike(participant, reply.reason, found)
            return
        if reply.code:
            self._refused(participant, reply.code, request.kind, found)
            return
        found.failures.pop(client, None)
        if request.kind == found.kind:
            found.answered.add(client)
        if request.kind != "evaluate":
            found.replies[client], found.sizes[client] = reply.message, reply.sizes
            found.asked[client] = request
        if reply.sums:
            found.sums[client] = reply.sums
        if reply.personal:
            found.personal[client] = reply.personal

    def _drop(self, client: int, reason: str, found: Collected) -> None:
        """Drop a reply that was stored; its test stays, which was checked by itself."""
        del found.replies[client], found.sizes[client]
        found.answered.discard(client)
        self._strike(self._participant(client), reason, found)
        self._say(client, found)

    def _refused(self, participant: Participant, code: str, kind: str, found: Collected) -> None:
        found.failures[participant.client] = f"{CODES[code]} ({code})"
        if code == "TERMS":
            participant.agreed = False  # it hears them again before the next request
        elif code in FINAL_CODES and kind != "evaluate":  # it may train without testing
            self._exclude(participant, CODES[code])

    def _strike(self, participant: Participant, reason: str, found: Collected) -> None:
        participant.strike(self.rules.strikes)
        found.failures[participant.client] = (
            f"sent a bad reply, which was dropped: {plain(reason)} "
            f"(strike {participant.strikes} of "
            f"{self.rules.strikes})"
        )
        self._exclude(participant, participant.excluded)

    def _exclude(self, participant: Participant, reason: str) -> None:
        participant.excluded = reason
        if reason:
            self.log(f"{participant.name} is excluded: it {reason}")
        self.changed()

    def _participant(self, client: int) -> Participant:
        return self.roster.participants[client]

    def _say(self, client: int, found: Collected) -> None:
        request = found.request
        what = f"survey of {request.part}" if found.kind == "survey" else found.kind
        name, did = self._participant(client).name, found.failures[client]
        self.log(f"round {request.round + 1}, {what}: {name} {did}")
