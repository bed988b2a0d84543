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
from typing import Any, NamedTuple

from kedge.core.bound import Server
from kedge.core.server import Totals
from kedge.core.tree import Tree, Weights
from kedge.engines.layout import layout_of
from kedge.engines.ops import FOREACH
from kedge.errors import NotFinite
from kedge.flower.checks import Checks, finite, outliers
from kedge.flower.courier import Courier
from kedge.flower.gathering import Gathering
from kedge.flower.messages import CODES, Request
from kedge.flower.names import plain
from kedge.flower.roster import Roster, Seat
from kedge.flower.rules import Rules
from kedge.flower.spool import Message
from kedge.flower.transport import Failure
from kedge.limits import is_out_of_memory
from kedge.session.session import Ask, Session

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
    """What the clients of an ask replied."""

    replies: dict[int, Message] = field(default_factory=dict)
    sizes: dict[int, Mapping[str, float]] = field(default_factory=dict)  # of those replies
    sums: dict[int, Tree] = field(default_factory=dict)
    personal: dict[int, Tree] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)  # to what was asked, not the test alone
    _requests: dict[int, Request] = field(default_factory=dict)


@dataclass
class Asking:
    """Asks clients, with attempts and a deadline.

    Attributes:
        session: the server's session.
        roster: the members.
        courier: carries the messages.
        gathering: lets members back in.
        rules: patience and distrust.
        log: told of every failure.
        initial: makes the initial weights, for members that must hear the terms again.
        changed: called when strikes or exclusions have changed.
        stop: called before a round is asked for again; it raises an exception to give up.
    """

    session: Session
    roster: Roster
    courier: Courier
    gathering: Gathering
    rules: Rules
    log: Callable[[str], None]
    initial: Callable[[], Weights]
    changed: Callable[[], None]
    stop: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.checks = Checks(self.session, self.rules, self.roster.sizes)

    def ask(
        self, ask: Ask, needed: int, test: Test | None = None, patient: bool = False
    ) -> Collected:
        """Ask clients until enough have replied, or all attempts are spent.

        Args:
            ask: the ask; its clients may be fewer than were drawn, without excluded ones.
            needed: replies that are enough.
            test: a test that rides along.
            patient: whether to repeat until *all* have replied, as for surveys that are made once.

        Returns:
            What was collected, perhaps fewer replies than needed.
        """
        found = Collected()
        for attempt in range(self.rules.attempts):
            if attempt:
                self.stop()
                self.courier.transport.wait(self.rules.wait_s)
            self.gathering.refresh(self.roster, self.initial)
            missing = self._missing(ask, found)
            also = [k for k in test.clients if k not in ask.clients] if test and not attempt else []
            self._attempt(ask, missing, also, attempt, test, found)
            samples = [train for train, _ in self.checks.sizes]
            for client, reason in outliers(found.sizes, self.rules, samples).items():
                self._drop(ask, client, reason, found)
            enough = len(ask.clients) if patient else needed
            if len(found.answered) >= enough or not self._missing(ask, found):
                break
        return found

    def _missing(self, ask: Ask, found: Collected) -> list[int]:
        return [k for k in ask.clients if k not in found.answered and not self._seat(k).excluded]

    def replies(self, ask: Ask, found: Collected) -> Iterator[Any]:
        """The checked replies of an ask in the order of its clients, one at a time."""
        place = layout_of(self.session.bound.model).place
        kind = "answer" if ask.kind == "survey" else "reply"
        for client in ask.clients:
            if client in found.replies:
                message, request = found.replies[client], found._requests[client]
                opened = [self.checks.open(message, request).value[kind]]
                yield place(opened.pop())  # nothing here keeps it in memory

    def reduce(self, ask: Ask, found: Collected) -> tuple[Ask, Totals, Server]:
        """Let the server take the replies of an ask; the session does not change.

        Who alone makes the outcome fail or not finite is named and dropped: the first, from the
        largest numbers down, without whom it is finite, or else those with the largest numbers.

        Returns:
            The ask with the clients whose replies were taken, the totals, and the server after it.

        Raises:
            NotFinite: the outcome is not finite, and no few are to blame.
        """
        clients = [k for k in ask.clients if k in found.replies]
        by_size = sorted(clients, key=lambda k: -max(found.sizes[k].values(), default=0.0))
        few = range(2, (len(clients) + 1) // 2)
        suspects = [[], *([k] for k in by_size), *(by_size[:n] for n in few)]
        first: Exception | None = None
        for dropped in suspects if len(clients) > 1 else [[]]:
            asked = ask._replace(clients=[k for k in clients if k not in dropped])
            try:
                totals, after = self._after(asked, found)
            except Exception as error:
                if is_out_of_memory(error) or isinstance(error, OSError):
                    raise
                first = first or error
                continue
            for client in dropped:
                self._drop(ask, client, f"with it, the sum fails or is not finite ({first})", found)
            return asked, totals, after
        assert first is not None
        raise first

    def _after(self, ask: Ask, found: Collected) -> tuple[Totals, Server]:
        """The totals of an ask, and the server after it; NotFinite if one has such a number."""
        session, replies = self.session, self.replies(ask, found)
        if ask.kind == "survey":
            totals = session.reduce_survey(ask, replies, FOREACH)
            after = session.absorbed(ask, totals)
        else:
            totals = session.reduce(replies, FOREACH)
            session.check_finite(totals, ask.clients)
            after = session.aggregate(totals)
        sent = session.bound.sent(after)
        for what, value, before in (
            ("weights are", after.weights, None),
            ("state of the method is", after.slots, session.server.slots),
            ("broadcast is", sent, None),
        ):
            if not finite(value) and (before is None or finite(before)):
                raise NotFinite(f"the global {what} not finite after round {ask.round + 1}")
        return totals, after

    # -- one attempt --------------------------------------------------------------------------

    def _attempt(
        self,
        ask: Ask,
        clients: Collection[int],
        also: Collection[int],
        attempt: int,
        test: Test | None,
        found: Collected,
    ) -> None:
        requests: dict[str, Callable[[float], Request]] = {}
        values: dict[tuple[bool, bool], Tree] = {}  # those of several clients are packed once
        for client in (*clients, *also):
            seat = self._seat(client)
            if not seat.present or not seat.agreed or seat.excluded:
                if client not in also:
                    why = "has not agreed to the terms" if seat.present else "is not connected"
                    found.failures[client] = seat.excluded or why
                continue
            chosen = ask if client in clients else ask._replace(kind="evaluate", part="")
            requests[seat.node] = self._request(chosen, client, attempt, test, values)
        deadline_s, opener = self.rules.deadline_s, self._arrived
        for _, request, reply in self.courier.exchange(requests, deadline_s, opener):
            self._receive(ask, request, reply, found)
        for client in clients:
            if client in found.failures:
                self._say(ask, client, found)

    def _request(
        self,
        ask: Ask,
        client: int,
        attempt: int,
        test: Test | None,
        values: dict[tuple[bool, bool], Tree],
    ) -> Callable[[float], Request]:
        asked = test is not None and client in test.clients

        def make(deadline: float) -> Request:
            output = test.output if test is not None else None
            personal = asked and test is not None and test.personal
            has_down = ask.kind != "evaluate" or personal
            has_output = asked and (output is not None or ask.kind == "evaluate")
            if (has_down, has_output) not in values:
                value, down = dict[str, Tree](), self.session.down()
                if has_down:
                    value["down"] = down
                if has_output:
                    value["output"] = down.weights if output is None else output
                values[has_down, has_output] = value
            value = values[has_down, has_output]
            return Request(
                ask.kind, self.roster.run, ask.round, attempt, client, self.roster.terms.hash,
                ask.part, test.detail if asked and test else "",
                accepted=self.session.ledger[client], deadline=deadline, personal=personal,
                value=value,
            )  # fmt: skip

        return make

    def _arrived(self, request: Request, message: Message) -> Arrived:
        code, value, sizes = self.checks.open(message, request)
        return Arrived(message, code, sizes, value.get("sums"), value.get("personal"))

    def _receive(
        self, ask: Ask, request: Request, reply: Arrived | Failure, found: Collected
    ) -> None:
        client, seat = request.client, self._seat(request.client)
        if isinstance(reply, Failure):
            found.failures[client] = f"did not reply ({reply.reason})"
            if reply.is_bad:
                self._strike(seat, reply.reason, found)
            return
        if reply.code:
            self._refused(seat, reply.code, request.kind, found)
            return
        found.failures.pop(client, None)
        if request.kind == ask.kind:
            found.answered.add(client)
        if request.kind != "evaluate":
            found.replies[client], found.sizes[client] = reply.message, reply.sizes
            found._requests[client] = request
        if reply.sums:
            found.sums[client] = reply.sums
        if reply.personal:
            found.personal[client] = reply.personal

    def _drop(self, ask: Ask, client: int, reason: str, found: Collected) -> None:
        """Drop a reply that was stored; its test stays, which was checked by itself."""
        del found.replies[client], found.sizes[client]
        found.answered.discard(client)
        self._strike(self._seat(client), reason, found)
        self._say(ask, client, found)

    def _refused(self, seat: Seat, code: str, kind: str, found: Collected) -> None:
        found.failures[seat.client] = f"{CODES[code]} ({code})"
        if code == "TERMS":
            seat.agreed = False  # it hears them again before the next request
        elif code in FINAL_CODES and kind != "evaluate":  # it may train without testing
            self._exclude(seat, CODES[code])

    def _strike(self, seat: Seat, reason: str, found: Collected) -> None:
        seat.strike(self.rules.strikes)
        found.failures[seat.client] = (
            f"sent a bad reply, which was dropped: {plain(reason)} (strike {seat.strikes} of "
            f"{self.rules.strikes})"
        )
        self._exclude(seat, seat.excluded)

    def _exclude(self, seat: Seat, reason: str) -> None:
        seat.excluded = reason
        if reason:
            self.log(f"{seat.name} is excluded: it {reason}")
        self.changed()

    def _seat(self, client: int) -> Seat:
        return self.roster.seats[client]

    def _say(self, ask: Ask, client: int, found: Collected) -> None:
        what = f"survey of {ask.part}" if ask.kind == "survey" else ask.kind
        name, did = self._seat(client).name, found.failures[client]
        self.log(f"round {ask.round + 1}, {what}: {name} {did}")
