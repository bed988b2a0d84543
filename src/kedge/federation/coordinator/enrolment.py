"""Join: who is there, what do they have, and do they know the terms?"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kedge.core.task import tasks
from kedge.core.tree import Tree, Weights
from kedge.errors import TermsError, WireError
from kedge.federation.coordinator.agreement import Agreement, agree, other_release
from kedge.federation.coordinator.exchange import Exchange
from kedge.federation.coordinator.members import Roster
from kedge.federation.coordinator.rules import Rules, Scaling
from kedge.federation.large_messages import Message, size_of
from kedge.federation.member.profile import Profile, Question
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
        exchange, found = self.exchange, dict[str, tuple[str, Profile]]()
        end = exchange.clock() + self.rules.join_s
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
            is_late = exchange.clock() >= end
            if is_late or (clients and len(found) >= clients):
                agreement = self._united(found, scaling)
                if agreement is not None and len(agreement.members) >= max(1, clients):
                    break
                if is_late:
                    raise TermsError(self._too_few(len(found), clients))
                end = min(end, exchange.clock() + self.rules.wait_s)  # for others in their place
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
        self, found: dict[str, tuple[str, Profile]], scaling: Scaling | None
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

    def _warn_of_sizes(self, profiles: Sequence[Profile]) -> None:
        """Log members that state far more samples than the others: nobody can check it, and with
        the weighting ``size`` the average is nearly theirs."""
        typical = statistics.median(s.train for s in profiles)
        for profile in profiles:
            if profile.train > MANY_SAMPLES * typical:
                self.log(
                    f"{profile.name} states {profile.train} samples, the median is "
                    f"{typical:g}; if that is wrong, use weighting = uniform"
                )

    def ask(self, nodes: list[str]) -> dict[str, Profile]:
        """What nodes state of themselves; those that fail or talk nonsense are left out."""

        def make(deadline: float) -> MemberRequest:
            return MemberRequest("join", self.run, deadline=deadline, text=self.question.to_json())

        found: dict[str, Profile] = {}
        seconds = min(self.rules.join_s, self.rules.deadline_s)
        wanted = dict.fromkeys(nodes, make)
        for node, _, answer in self.exchange.run(wanted, seconds, self._stated):
            if isinstance(answer, Profile):
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

    def _stated(self, request: MemberRequest, message: Message) -> Profile | Answer:
        """Open an answer to ``join``. What even a member alone cannot agree on is refused here."""
        answer = opened(request, message)
        if answer.code:
            return answer
        profile = Profile.from_json(answer.text)
        agree([profile], None, self.rules)
        return profile

    def refuse(self, node: str, reason: str) -> None:
        """Tell a node why it cannot take part."""
        reason = plain(reason)
        self.strangers[node] = self.reasons[node] = reason
        self.log(f"refused: {reason}")

        def make(deadline: float) -> MemberRequest:
            return MemberRequest("refuse", self.run, text=reason)

        for _ in self.exchange.run({node: make}, min(30.0, self.rules.deadline_s), unread):
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
        participants = [
            s for s in roster.participants if s.present and not s.agreed and not s.excluded
        ]
        value = {"initial": initial()} if participants else {}
        wanted: Mapping[str, Callable[[float], MemberRequest]] = {
            participant.node: _agreement(self.run, roster, participant.client, value)
            for participant in participants
        }
        del value
        for _, request, answer in self.exchange.run(wanted, self.rules.deadline_s, opened):
            participant = roster.participants[request.client]
            if not isinstance(answer, Failure) and not answer.code:
                participant.agreed = True
                self.reasons.pop(participant.node, None)
                continue
            did = _told(answer)
            self.reasons[participant.node] = (
                f"{participant.name} did not agree to the terms: it {did}"
            )
            self.log(self.reasons[participant.node])
            if isinstance(answer, Failure):
                if answer.is_bad:
                    participant.strike(self.rules.strikes)
            elif answer.code in ("TERMS", "POLICY"):
                participant.excluded = did
            if participant.excluded:
                del self.reasons[participant.node]  # told as that of the exclusion
                self.log(f"{participant.name} is excluded: it {participant.excluded}")


def _agreement(
    run: str, roster: Roster, client: int, value: Tree
) -> Callable[[float], MemberRequest]:
    def make(deadline: float) -> MemberRequest:
        terms, token = roster.terms, roster.participants[client].token
        text = agreement_text(terms, token)
        return MemberRequest("agree", run, client=client, terms=terms.hash, text=text, value=value)

    return make


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


def _described(profile: Profile) -> str:
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
