"""Join: who is there, what do they have, and do they know the terms?"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kedge.core.task import tasks
from kedge.core.tree import Tree, Weights
from kedge.errors import TermsError, WireError
from kedge.flower.courier import Courier
from kedge.flower.joining import Agreement, Scaling, agree, other_release
from kedge.flower.messages import CODES, REPLY, Request, reply_header
from kedge.flower.roster import Roster
from kedge.flower.rules import Rules
from kedge.flower.seat import agreement_text
from kedge.flower.spool import Message, size_of
from kedge.flower.statement import Question, Statement
from kedge.flower.transport import Failure
from kedge.session import wire

MAX_STATEMENT_BYTES = 16 << 20
JOIN_WAIT_S = 1.0  # between two looks at who is there
MANY_SAMPLES = 20  # times the median is worth a line in the log
MAX_FAILURES = 5  # of a node to join
MAX_NOTED = 20  # classes in a line of the log
#: What a node may say now and not later.
PASSING = tuple(CODES[code] for code in ("BUSY", "FAILED", "LATE"))


@dataclass
class Gathering:
    """Asks nodes to join, and members to agree.

    Attributes:
        courier: carries the messages.
        run: id of the run.
        question: what members are asked.
        rules: how long to wait.
        log: told of every member, refusal and failure.
        strangers: nodes that were refused, with the reason; they are not asked again.
        failures: how often each node failed to answer; after ``MAX_FAILURES`` it is a stranger.
        reasons: why nodes have not joined, the last one of each.
    """

    courier: Courier
    run: str
    question: Question
    rules: Rules
    log: Callable[[str], None]
    strangers: dict[str, str] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)

    # -- a new run ----------------------------------------------------------------------------

    def gather(
        self, clients: int, scaling: Scaling | None, stop: Callable[[], None] = lambda: None
    ) -> tuple[Agreement, dict[str, str]]:
        """Wait for members, and unite what they have.

        Args:
            clients: how many members the run needs; 0 takes all that come within ``join_s``.
            scaling: mean and standard deviation to use in place of the members' own.
            stop: called again and again; it raises an exception to give up.

        Returns:
            The agreement, and the node of each member by name.

        Raises:
            TermsError: too few members came, or they do not fit each other; the message has a
                sentence for each that was refused.
        """
        courier, found = self.courier, dict[str, tuple[str, Statement]]()
        end = courier.clock() + self.rules.join_s
        while True:
            stop()
            known = {node for node, _ in found.values()} | self.strangers.keys()
            fresh = [node for node in courier.transport.members() if node not in known]
            for node, statement in self.ask(fresh).items():
                if statement.name in found:
                    self.refuse(node, _taken(statement.name))
                else:
                    found[statement.name] = node, statement
                    self.log(f"{statement.name} has joined: {_described(statement)}")
            if (clients and len(found) >= clients) or courier.clock() >= end:
                break
            courier.transport.wait(min(JOIN_WAIT_S, self.rules.join_s))
        nodes = {name: node for name, (node, _) in found.items()}
        statements = self._of_this_release([statement for _, statement in found.values()], nodes)
        if not statements:
            raise TermsError(self._too_few(0, clients))
        self._warn_of_sizes(statements)
        agreement = agree(statements, scaling)
        for name, reason in agreement.refusals.items():
            self.refuse(nodes[name], reason)
        surplus = agreement.members[clients:] if clients else ()
        for statement in surplus:  # more came than the run has places
            self.refuse(nodes[statement.name], f"the run has {clients} members already")
            del self.reasons[nodes[statement.name]]
        if surplus:
            kept = [s for s in agreement.members if s not in surplus]
            agreement = agree(kept, scaling)
        if len(agreement.members) < max(1, clients):
            raise TermsError(self._too_few(len(agreement.members), clients))
        for note in class_notes(agreement):
            self.log(note)
        return agreement, nodes

    def _of_this_release(
        self, statements: list[Statement], nodes: Mapping[str, str]
    ) -> list[Statement]:
        """Members with the release of the server; the others are told so."""
        reasons = {s.name: other_release(s) for s in statements}
        for name in (name for name, reason in reasons.items() if reason):
            self.refuse(nodes[name], reasons[name])
        return [s for s in statements if not reasons[s.name]]

    def _too_few(self, count: int, clients: int) -> str:
        """Why a run cannot start, with the reason of each node that has not joined."""
        text = f"{count} of {clients} members can take part" if clients else "no member has joined"
        reasons = "; ".join(self.reasons.values())
        if not reasons:
            other = "no other node" if count else "no node"
            reasons = f"{other} is connected after {self.rules.join_s:g} s"
        fewer = f", or ask for fewer (clients = {count})" if count else ""
        return f"{text}: {reasons}. Start or mend what is missing, then run again{fewer}"

    def _warn_of_sizes(self, statements: list[Statement]) -> None:
        """Log members that state far more samples than the others: nobody can check it, and with
        the weighting ``size`` the average is nearly theirs."""
        typical = statistics.median(s.train for s in statements)
        for statement in statements:
            if statement.train > MANY_SAMPLES * typical:
                self.log(
                    f"{statement.name} states {statement.train} samples, the median is "
                    f"{typical:g}; if that is wrong, use weighting = uniform"
                )

    def ask(self, nodes: list[str]) -> dict[str, Statement]:
        """What nodes state of themselves; those that fail or talk nonsense are left out."""

        def make(deadline: float) -> Request:
            return Request("join", self.run, deadline=deadline, text=self.question.to_json())

        found: dict[str, Statement] = {}
        seconds = min(self.rules.join_s, self.rules.deadline_s)
        for node, request, reply in self.courier.exchange(dict.fromkeys(nodes, make), seconds):
            try:
                found[node] = _statement(_text(request, reply))
            except WireError as error:
                self.log(f"node {node} did not join: it {error}")
                self.failures[node] += 1
                self.reasons[node] = f"node {node} {error}"
                is_silent = isinstance(reply, Failure) and not reply.is_bad
                passing = is_silent or str(error) in PASSING
                if not passing or self.failures[node] >= MAX_FAILURES:
                    self.strangers[node] = self.reasons[node]
            else:
                self.reasons.pop(node, None)
        return found

    def refuse(self, node: str, reason: str) -> None:
        """Tell a node why it cannot take part."""
        self.strangers[node] = self.reasons[node] = reason
        self.log(f"refused: {reason}")

        def make(deadline: float) -> Request:
            return Request("refuse", self.run, text=reason)

        for _ in self.courier.exchange({node: make}, min(30.0, self.rules.deadline_s)):
            pass  # whether it listens is its own affair

    # -- a run with members -------------------------------------------------------------------

    def refresh(self, roster: Roster, initial: Callable[[], Weights]) -> None:
        """See who is connected, let members back in, and tell the terms to those that need them."""
        nodes = list(self.courier.transport.members())
        self.strangers = {n: reason for n, reason in self.strangers.items() if n in nodes}
        self.failures = Counter({n: count for n, count in self.failures.items() if n in nodes})
        self.reasons = {n: reason for n, reason in self.reasons.items() if n in nodes}
        fresh = [node for node in roster.see(nodes) if node not in self.strangers]
        names = {seat.name for seat in roster.seats}
        for node, statement in self.ask(fresh).items():
            reason = roster.admit(node, statement)
            if reason:
                self.refuse(node, reason)
            else:
                self.log(f"{statement.name} is back")
            if statement.name not in names:
                del self.reasons[node]  # nobody waits for it
        self.tell(roster, initial)

    def tell(self, roster: Roster, initial: Callable[[], Weights]) -> None:
        """Send the terms to present members that do not know them."""
        seats = [s for s in roster.seats if s.present and not s.agreed and not s.excluded]
        value = {"initial": initial()} if seats else {}
        wanted: Mapping[str, Callable[[float], Request]] = {
            seat.node: _agreement(self.run, roster, seat.client, value) for seat in seats
        }
        del value
        for _, request, reply in self.courier.exchange(wanted, self.rules.deadline_s):
            seat = roster.seats[request.client]
            try:
                _text(request, reply)
                seat.agreed = True
                self.reasons.pop(seat.node, None)
            except WireError as error:
                self.reasons[seat.node] = f"{seat.name} did not agree to the terms: it {error}"
                self.log(self.reasons[seat.node])
                if str(error) in (CODES["TERMS"], CODES["POLICY"]):
                    seat.excluded = str(error)
                    del self.reasons[seat.node]  # told as that of the exclusion
                    self.log(f"{seat.name} is excluded: it {seat.excluded}")


def _agreement(run: str, roster: Roster, client: int, value: Tree) -> Callable[[float], Request]:
    def make(deadline: float) -> Request:
        terms, token = roster.terms, roster.seats[client].token
        text = agreement_text(terms, token)
        return Request("agree", run, client=client, terms=terms.hash, text=text, value=value)

    return make


def _text(request: Request, reply: Message | Failure) -> str:
    """The text of an answer without arrays; a WireError with the reason if it is none."""
    if isinstance(reply, Failure):
        did = "sent a bad answer" if reply.is_bad else "did not reply"
        raise WireError(f"{did} ({reply.reason})")
    if size_of(reply) > MAX_STATEMENT_BYTES:
        raise WireError(f"sent {size_of(reply)} bytes where a short answer belongs")
    try:
        header, notes = reply_header(reply)
        wire.check(reply, REPLY, {})
    except WireError as error:
        raise WireError(f"sent an answer that cannot be read: {error}") from None
    if any(value != getattr(request, name) for name, value in vars(header).items()):
        raise WireError("answered another request")
    if notes["code"]:
        raise WireError(CODES[notes["code"]])
    return notes.get("text", "")


def _statement(text: str) -> Statement:
    try:
        return Statement.from_json(text)
    except WireError as error:
        raise WireError(f"cannot be understood: {error}; compare the releases of kedge") from None


def _taken(name: str) -> str:
    return f"there is a member {name} already; give this one another name"


def _described(statement: Statement) -> str:
    shape = "x".join(map(str, statement.schema.shape))
    return f"{statement.train} samples to train on, {statement.test} to test on, inputs {shape}"


def class_notes(agreement: Agreement) -> list[str]:
    """What people should know of the agreed classes: who lacks some, and names that may be meant
    as one. Classes are united by name, so ``no`` and ``No`` are two of them."""
    classes, found = agreement.schema.classes, list[str]()
    if classes is None or not tasks[agreement.schema.task].one_class:
        return found
    for member in agreement.members:
        missing = [c for c in classes if c not in (member.schema.classes or ())]
        if missing:
            more = ", ..." if len(missing) > MAX_NOTED else ""
            found.append(f"{member.name} has no class {', '.join(missing[:MAX_NOTED])}{more}")
    if found:
        found.insert(0, f"the classes of all members are: {', '.join(classes[:MAX_NOTED])}")
    alike: dict[str, str] = {}
    for name in classes:
        other = alike.setdefault(" ".join(name.split()).casefold(), name)
        if other != name:
            found.append(
                f"the classes {other!r} and {name!r} are two; if one is meant, write it alike in "
                "all files and run again"
            )
    return found
