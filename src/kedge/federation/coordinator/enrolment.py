"""Join: who is there, what do they have, and do they know the terms?"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kedge.core.task import tasks
from kedge.core.tree import Weights
from kedge.errors import TermsError, WireError
from kedge.federation.coordinator.agreement import Agreement, agree, other_release
from kedge.federation.coordinator.members import Roster
from kedge.federation.coordinator.requests import Exchange
from kedge.federation.coordinator.rules import Rules, Scaling
from kedge.federation.large_messages import Message, size_of
from kedge.federation.member.profile import MemberProfile, Question
from kedge.federation.member.run_state import agreement_text
from kedge.federation.messages import CODES, REPLY, Failure, MemberRequest, reply_header
from kedge.federation.names import look, plain
from kedge.session import wire

MAX_STATEMENT_BYTES = 5 << 20  # a text of 1 MB in JSON, in the JSON of the header
JOIN_WAIT_S = 1.0  # between two looks at who is there
MANY_SAMPLES = 20  # times the median is worth a line in the log
MAX_FAILURES = 5  # of a node to join
MAX_NOTED = 20  # classes in a line of the log
#: What a node may say now and not later.
PASSING = tuple(CODES[code] for code in ("BUSY", "FAILED", "LATE"))


@dataclass
class Enrolment:
    """Asks nodes to join, and members to agree.

    Attributes:
        exchange: carries the messages.
        run: id of the run.
        question: what members are asked.
        rules: how long to wait.
        log: told of every member, refusal and failure.
        strangers: nodes that were refused, with the reason; they are not asked again.
        failures: how often each node failed to answer; after ``MAX_FAILURES`` it is a stranger.
        reasons: why nodes have not joined, the last one of each.
    """

    exchange: Exchange
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
        exchange, found = self.exchange, dict[str, tuple[str, MemberProfile]]()
        end = time.time() + self.rules.join_s
        while True:
            stop()
            known = {node for node, _ in found.values()} | self.strangers.keys()
            fresh = [node for node in exchange.transport.members() if node not in known]
            names = {look(name): name for name in found}
            for node, profile in self.ask(fresh).items():
                name = profile.name
                if look(name) in names:
                    self.refuse(node, _taken(name, names[look(name)]))
                else:
                    found[name], names[look(name)] = (node, profile), name
                    self.log(f"{name} has joined: {_described(profile)}")
            is_late = time.time() >= end
            if is_late or (clients and len(found) >= clients):
                agreement = self._united(found, scaling)
                if agreement is not None and len(agreement.members) >= max(1, clients):
                    break
                if is_late:
                    raise TermsError(self._too_few(len(found), clients))
                end = min(end, time.time() + self.rules.wait_s)  # for others in their place
            exchange.transport.wait(min(JOIN_WAIT_S, self.rules.join_s))
        nodes = {name: node for name, (node, _) in found.items()}
        surplus = agreement.members[clients:] if clients else ()
        for profile in surplus:  # more came than the run has places
            self.refuse(nodes[profile.name], f"the run has {clients} members already")
            del self.reasons[nodes[profile.name]]
        if surplus:
            kept = [s for s in agreement.members if s not in surplus]
            agreement = agree(kept, scaling, self.rules)
        self._warn_of_sizes(agreement.members)
        for note in class_notes(agreement):
            self.log(note)
        return agreement, nodes

    def _united(
        self, found: dict[str, tuple[str, MemberProfile]], scaling: Scaling | None
    ) -> Agreement | None:
        """What those who were found share. Who does not fit is refused and removed from them."""
        profiles = [profile for _, profile in found.values()]
        refusals = {s.name: reason for s in profiles if (reason := other_release(s))}
        same = [s for s in profiles if s.name not in refusals]
        agreement = agree(same, scaling, self.rules) if same else None
        for name, reason in {**refusals, **(agreement.refusals if agreement else {})}.items():
            self.refuse(found.pop(name)[0], reason)
        return agreement

    def _too_few(self, count: int, clients: int) -> str:
        """Why a run cannot start, with the reason of each node that has not joined."""
        text = f"{count} of {clients} members can take part" if clients else "no member has joined"
        reasons = "; ".join(self.reasons.values())
        if not reasons:
            other = "no other node" if count else "no node"
            reasons = f"{other} is connected after {self.rules.join_s:g} s"
        fewer = f", or ask for fewer (clients = {count})" if count else ""
        return f"{text}: {reasons}. Start or mend what is missing, then run again{fewer}"

    def _warn_of_sizes(self, profiles: Sequence[MemberProfile]) -> None:
        """Log members that state far more samples than the others: nobody can check it, and with
        the weighting ``size`` the average is nearly theirs."""
        typical = statistics.median(s.train for s in profiles)
        for profile in profiles:
            if profile.train > MANY_SAMPLES * typical:
                self.log(
                    f"{profile.name} states {profile.train} samples, the median is "
                    f"{typical:g}; if that is wrong, use weighting = uniform"
                )

    def ask(self, nodes: list[str]) -> dict[str, MemberProfile]:
        """What nodes state of themselves; those that fail or talk nonsense are left out."""
        found: dict[str, MemberProfile] = {}
        seconds = min(self.rules.join_s, self.rules.deadline_s)
        request = MemberRequest("join", self.run, text=self.question.to_json())
        asked = dict.fromkeys(nodes, request)
        for node, _, answer in self.exchange.run(asked, seconds, self._stated):
            if isinstance(answer, MemberProfile):
                found[node] = answer
                self.reasons.pop(node, None)
                continue
            did = _told(answer)
            self.log(f"node {node} did not join: it {did}")
            self.failures[node] += 1
            self.reasons[node] = f"node {node} {did}"
            is_silent = isinstance(answer, Failure) and not answer.is_bad
            passing = is_silent or did in PASSING
            if not passing or self.failures[node] >= MAX_FAILURES:
                self.strangers[node] = self.reasons[node]
        return found

    def _stated(self, request: MemberRequest, message: Message) -> MemberProfile | Answer:
        """Open an answer to ``join``. What even a member alone cannot agree on is refused here."""
        answer = opened(request, message)
        if answer.code:
            return answer
        profile = MemberProfile.from_json(answer.text)
        agree([profile], None, self.rules)
        return profile

    def refuse(self, node: str, reason: str) -> None:
        """Tell a node why it cannot take part."""
        reason = plain(reason)
        self.strangers[node] = self.reasons[node] = reason
        self.log(f"refused: {reason}")
        request = MemberRequest("refuse", self.run, text=reason)
        for _ in self.exchange.run({node: request}, min(30.0, self.rules.deadline_s), unread):
            pass  # whether it listens is its own affair

    # -- a run with members -------------------------------------------------------------------

    def refresh(self, roster: Roster, initial: Callable[[], Weights]) -> None:
        """See who is connected, let members back in, and tell the terms to those that need them."""
        nodes = list(self.exchange.transport.members())
        self.strangers = {n: reason for n, reason in self.strangers.items() if n in nodes}
        self.failures = Counter({n: count for n, count in self.failures.items() if n in nodes})
        self.reasons = {n: reason for n, reason in self.reasons.items() if n in nodes}
        fresh = [node for node in roster.see(nodes) if node not in self.strangers]
        names = {participant.name for participant in roster.participants}
        for node, profile in self.ask(fresh).items():
            reason = roster.admit(node, profile)
            if reason:
                self.refuse(node, reason)
            else:
                self.log(f"{profile.name} is back")
            if profile.name not in names:
                del self.reasons[node]  # nobody waits for it
        self.tell(roster, initial)

    def tell(self, roster: Roster, initial: Callable[[], Weights]) -> None:
        """Send the terms to present members that do not know them."""
        members = [p for p in roster.participants if p.present and not p.agreed and not p.excluded]
        value, terms = {"initial": initial()} if members else {}, roster.terms
        hash, texts = terms.hash, {p.client: agreement_text(terms, p.token) for p in members}
        requests = {
            p.node: MemberRequest(
                "agree", self.run, client=p.client, terms=hash, text=texts[p.client], value=value
            )
            for p in members
        }
        for _, request, answer in self.exchange.run(requests, self.rules.deadline_s, opened):
            member = roster.participants[request.client]
            if isinstance(answer, Answer) and not answer.code:
                member.agreed = True
                self.reasons.pop(member.node, None)
                continue
            did = _told(answer)
            self.reasons[member.node] = f"{member.name} did not agree to the terms: it {did}"
            self.log(self.reasons[member.node])
            if isinstance(answer, Answer) and answer.code in ("TERMS", "POLICY"):
                member.excluded = did
            elif isinstance(answer, Failure) and answer.is_bad:
                member.strike(self.rules.strikes)
            if member.excluded:
                del self.reasons[member.node]  # told as that of the exclusion
                self.log(f"{member.name} is excluded: it {member.excluded}")


class Answer(NamedTuple):
    """What an answer without arrays holds: a code of a refusal, or else a text."""

    code: str
    text: str


def opened(request: MemberRequest, message: Message) -> Answer:
    """Open an answer without arrays."""
    if size_of(message) > MAX_STATEMENT_BYTES:
        raise WireError(f"{size_of(message)} bytes where a short answer belongs")
    header, notes = reply_header(message)
    wire.check(message, REPLY, {})
    if any(value != getattr(request, name) for name, value in vars(header).items()):
        raise WireError("it belongs to another request")
    return Answer(notes["code"], notes.get("text", ""))


def unread(request: MemberRequest, message: Message) -> None:
    """Open an answer that is of no interest."""


def _told(answer: Answer | Failure) -> str:
    """What a member did in place of a good answer."""
    if isinstance(answer, Answer):
        return CODES[answer.code]
    did = "sent an answer that cannot be read:" if answer.is_bad else "did not reply"
    return f"{did} {answer.reason}" if answer.is_bad else f"{did} ({answer.reason})"


def _taken(name: str, by: str) -> str:
    like = f", and {name!a} looks like it" if name != by else ""
    return f"there is a member {by} already{like}; give this one another name"


def _described(profile: MemberProfile) -> str:
    shape = "x".join(map(str, profile.schema.shape))
    return f"{profile.train} samples to train on, {profile.test} to test on, inputs {shape}"


def class_notes(agreement: Agreement) -> list[str]:
    """What people should know of the agreed classes and words: who lacks some, and words that may
    be meant as one."""
    found: list[str] = []
    is_one_class = tasks[agreement.schema.task].one_class
    classes = (agreement.schema.classes or ()) if is_one_class else ()
    for member in agreement.members:
        own = set(member.schema.classes or ())
        missing = [name for name in classes if name not in own]
        if missing:
            more = ", ..." if len(missing) > MAX_NOTED else ""
            found.append(f"{member.name} has no class {', '.join(missing[:MAX_NOTED])}{more}")
    if found:
        found.insert(0, f"the classes of all members are: {', '.join(classes[:MAX_NOTED])}")
    alike: dict[str, str] = {}
    pairs = [(alike.setdefault(look(name), name), name) for name in agreement.schema.columns or ()]
    twins = [(one, name) for one, name in pairs if one != name]
    return found + [
        f"the columns {one!a} and {name!a} are two; if one is meant, write it alike in "
        "all files and run again"
        for one, name in twins[:MAX_NOTED]
    ]
