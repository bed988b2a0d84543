"""Requests to members and their replies: carried, checked and collected.

*Carried*: an :class:`Exchange` matches replies by message, and opens each once. Whatever an opener
raises makes the reply a bad one, and goes no further: no member ends the run of the others.

*Checked*: :class:`ReplyChecks` go from cheap to costly, and the first that fails drops the reply:
its size; version and kind; the run, round, attempt, client and terms of the request that it
answers; names, types, shapes and lengths of all arrays, and a checksum, before an array is
allocated; then that all numbers are finite and of a plausible size, that the client weight is the
one that follows from the number of samples with which the member joined, and that a test was on as
many samples as it has. The numbers of several replies are compared by :func:`outliers`. A client's
number is known from its connection. Where a part uploads it (as ``client``), it is overwritten, so
nobody can speak for another.

*Collected*: replies are stored until all are there: they are averaged in the order of the clients,
so that the sum does not depend on who was faster. A client that does not reply, or replies with a
code, has failed; it may succeed in the next attempt or round. A bad reply is dropped and counted
against its sender, and so is one whose numbers are far larger than those of most, or whose numbers
make the sum not finite. A client whose state is lost is excluded: it cannot take part as itself any
more, and a fresh state in its place would not be that of the method.

A test of the model rides along with the first request of a round. Members without such a request
get one for the test alone, at the same time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median_low
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.bound import Bound
from kedge.core.part import Stack
from kedge.core.tree import Tree, Weights
from kedge.core.update import Totals, Update, total_of
from kedge.engines.device import return_freed_memory
from kedge.engines.engine import metric_sums
from kedge.engines.layout import layout_of
from kedge.engines.ops import FOREACH
from kedge.errors import WireError
from kedge.federation.coordinator.members import Participant, Roster
from kedge.federation.coordinator.rules import Rules
from kedge.federation.large_messages import Message, size_of, spooled
from kedge.federation.member.testing import counts_of
from kedge.federation.messages import (
    CODES,
    REPLY,
    Failure,
    MemberRequest,
    RequestHeader,
    Transport,
    content_of,
    reply_header,
)
from kedge.federation.names import plain
from kedge.limits import is_out_of_memory
from kedge.session import blob, wire
from kedge.session.session import Broadcast, Request, Session
from kedge.sim.clients import all_weights

# -- carried --------------------------------------------------------------------------------------

T = TypeVar("T")
Opener = Callable[[MemberRequest, Message], T]

MAX_REASON = 500  # characters


@dataclass
class Exchange:
    """Carries requests to nodes and brings back what they reply.

    Attributes:
        transport: what carries the bytes.
        log: told of replies that nobody waits for.
        folder: where large replies wait; the system's folder for temporary files if None.
        sent, received: bytes so far.
    """

    transport: Transport
    log: Callable[[str], None]
    folder: Path | None = None
    sent: int = field(default=0, init=False)
    received: int = field(default=0, init=False)

    def run(
        self, requests: Mapping[str, MemberRequest], seconds: float, opener: Opener[T]
    ) -> Iterator[tuple[str, MemberRequest, T | Failure]]:
        """Send one request to each node, and yield the reply of each, once, as they come.

        Arrays that follow each other in several requests are packed once. Large replies are written
        to disk. A node that does not reply in time gives a ``Failure``.

        Args:
            requests: by the id of the node; they get the deadline here.
            seconds: how long to wait for all of them.
            opener: reads and checks a reply. What it raises makes the reply a bad ``Failure``.
        """
        deadline = time.time() + seconds
        waiting = self._send(requests, deadline)
        sent = [number for number in waiting if not number.startswith("not sent")]
        for number, reply in self.transport.receive(sent, deadline):
            if number not in waiting:
                self.log("a reply that nobody waits for was ignored")
                continue
            node, request = waiting.pop(number)
            if isinstance(reply, Failure):
                yield node, request, reply._replace(reason=plain(reply.reason)[:MAX_REASON])
                continue
            pieces = [reply] if isinstance(reply, bytes) else reply
            del reply
            yield node, request, self._opened(request, pieces, opener)
        for node, request in waiting.values():
            yield node, request, Failure("timeout")

    def _opened(
        self, request: MemberRequest, pieces: list[bytes], opener: Opener[T]
    ) -> T | Failure:
        """What an opener makes of a reply."""
        try:
            message = spooled(pieces, self.folder)
            if not isinstance(message, bytes):
                return_freed_memory()
            self.received += size_of(message)
            return opener(request, message)
        except WireError as error:
            return Failure(plain(str(error))[:MAX_REASON], is_bad=True)
        except Exception as error:  # noqa: BLE001  whatever a stranger's bytes cause
            text = plain(f"{type(error).__name__}: {error}")[:MAX_REASON]
            if is_out_of_memory(error) or isinstance(error, OSError):
                return Failure(f"this machine could not keep or read it, {text}")
            return Failure(text, is_bad=True)

    def _send(
        self, requests: Mapping[str, MemberRequest], deadline: float
    ) -> dict[str, tuple[str, MemberRequest]]:
        """Send all requests; nodes and requests, without the model in them, by the id of the
        message."""
        waiting: dict[str, tuple[str, MemberRequest]] = {}
        value: Tree = None
        content: list[bytes] = []
        for node, request in requests.items():
            if request.value is not value:
                content = []  # freed before the next one is made
                value, content = request.value, content_of(request.value)
            message = replace(request, deadline=deadline).pieces(content)
            self.sent += sum(map(len, message))
            try:
                number = self.transport.send(node, message, deadline)
            except ConnectionError:
                number = f"not sent to {node}"
            waiting[number] = node, replace(request, value={})
        return waiting


# -- checked -------------------------------------------------------------------------------------

MAX_HEADER_BYTES = 1 << 20  # of a reply, beyond the names of its arrays
BLOCK = 1 << 20  # numbers of a leaf that are converted at a time
#: Sums of a test that cannot be negative.
COUNTS = (
    "count", "right", "predicted", "samples", "histogram", "hits", "said", "calibration",
    "sum_y2", "sum_abs", "sum_sq",
)  # fmt: skip
SHARED = ("contribution", "uploads")  # contents besides the weights
ROUNDING = 1e-3  # of a sum of a test


class Opened(NamedTuple):
    """A reply that has passed all checks."""

    code: str  # of a refusal, or empty
    value: Tree
    sizes: Mapping[str, float] = {}  # the largest number of each content, or its norm


class ReplyChecks:
    """The checks of replies in one session.

    Args:
        session: the server's session.
        rules: bounds.
        sizes: training and test samples of each client, as it stated when it joined.
    """

    def __init__(self, session: Session, rules: Rules, sizes: list[tuple[int, int]]) -> None:
        self.session, self.rules, self.sizes = session, rules, sizes
        self._templates: dict[tuple[str, str, int], Tree] = {}

    def open(self, message: Message, request: RequestHeader, broadcast: Broadcast) -> Opened:
        """Read a reply to a request with this broadcast.

        Raises:
            WireError: it is bad; the text says why, for the log of the coordinator.
        """
        (names, arrays), size = self._size(request, broadcast), size_of(message)
        if size > names + arrays:
            raise WireError(f"{size} bytes, of {names + arrays} at most")
        file = blob.opened(message)
        file.seek(0)
        if int.from_bytes(file.read(8), "little") > names:
            raise WireError("a header that is larger than that of the message may be")
        header, notes = reply_header(message)
        for name, value in vars(header).items():
            if value != getattr(request, name):
                expected = getattr(request, name)
                raise WireError(f"{name} {value!r:.40} of another request, not {expected!r:.40}")
        if notes["code"]:
            wire.check(message, REPLY, {})
            return Opened(notes["code"], {})
        tested = notes.get("tested", "0")
        if tested != "0" and (not request.test or tested != str(self.sizes[request.client][1])):
            raise WireError(f"a test on {tested!r:.20} samples, which the member does not have")
        template = self._template(request, tested != "0", broadcast)
        whole = {kind: template[kind] for kind in ("sums", "personal") if kind in template}
        if whole and "sums" in notes:
            template |= {kind: _told(sums, notes["sums"]) for kind, sums in whole.items()}
        value = wire.unpack(message, REPLY, template)
        sizes = self._check_numbers(value)
        if "update" in value:
            value["update"] = self._checked_update(value["update"], request, broadcast)
        for kind, sums in whole.items():
            one_class = self.session.bound.task.one_class
            check_sums(value[kind], int(tested), one_class, rounded="sums" in notes)
            value[kind] = {n: value[kind].get(n, _unknown(leaf)) for n, leaf in sums.items()}
        return Opened("", value, sizes)

    def _size(self, request: RequestHeader, broadcast: Broadcast) -> tuple[int, int]:
        """The largest sizes that the header and the arrays of a reply may have, in bytes."""
        template = self._template(request, bool(request.test), broadcast)
        sizes = [leaf.nbytes for leaf in wire.named(template).values()]
        return MAX_HEADER_BYTES + 1000 * len(sizes), sum(sizes)

    def _template(self, request: RequestHeader, tested: bool, broadcast: Broadcast) -> Tree:
        bound = self.session.bound.at(request.round)
        personal = getattr(request, "personal", False)
        found: dict[str, Tree] = {}
        if request.kind in ("train", "survey"):
            key = request.kind, request.part, id(bound)
            found["update"] = self._once(key, lambda: self._derive(request, bound, broadcast))
        if tested:
            detailed = request.test == "detailed"
            key = "sums", str(detailed), id(bound)
            found["sums"] = self._once(key, lambda: self._sums_template(bound, detailed))
            if personal:
                found["personal"] = found["sums"]
        return found

    def _once(self, key: tuple[str, str, int], derive: Callable[[], Tree]) -> Tree:
        """A template that takes a dry run, made once."""
        if key not in self._templates:
            self._templates[key] = derive()
        return self._templates[key]

    def _derive(self, request: RequestHeader, bound: Bound, broadcast: Broadcast) -> Tree:
        received = broadcast._replace(weights=all_weights(bound, broadcast.weights))
        batch = self.session.workload.work.batch
        return wire.update_template(bound, received, batch, request.part)

    def _sums_template(self, bound: Bound, detailed: bool) -> Tree:
        blank = wire.Blank(bound).clean(torch.zeros(2, dtype=torch.int64))
        chosen = bound.detailed() if detailed else bound
        return wire.template_of(metric_sums(chosen, self.session.server.weights, [blank]))

    def _check_numbers(self, value: Tree) -> dict[str, float]:
        """Check the size of all numbers; return the largest of each content, of ``SHARED`` ones
        the norm."""
        contents = dict(value)
        if "update" in value:
            contents |= (update := contents.pop("update"))._asdict()
            contents |= {"delta": update.delta.params, "statistics": update.delta.buffers}
        sizes = {name: largest(content) for name, content in contents.items()}
        size = max(sizes.values(), default=0.0)
        if size == math.inf:
            raise WireError("a number that is not finite")
        if size > self.rules.max_number:
            raise WireError(f"a number above {self.rules.max_number:g}")
        return {name: _norm(contents[name]) if name in SHARED else n for name, n in sizes.items()}

    def _checked_update(
        self, update: Update, request: RequestHeader, broadcast: Broadcast
    ) -> Update:
        workload, size = self.session.workload, self.sizes[request.client][0]
        self._check_weight(update.weight, workload.weight_of(size))
        self._check_weight(update.share, workload.share_of(size))
        if request.kind == "train":
            anchor = broadcast.weights
            _check_norm(update.delta.params, anchor.params, self.rules.max_norm, "an update")
            floats = {n: b for n, b in anchor.buffers.items() if b.is_floating_point()}
            changes = {n: update.delta.buffers[n] for n in floats}
            for name, buffer in floats.items():  # rounding is monotonic: an honest one is not below
                lowest = -buffer.clamp(min=0)
                if name.endswith("running_var") and bool((changes[name] < lowest).any()):
                    raise WireError("a variance below 0")
            _check_norm(changes, floats, self.rules.max_statistics, "statistics")
        return update._replace(uploads=with_client(update.uploads, request.client))

    def _check_weight(self, value: Tensor, expected: float) -> None:
        wanted = torch.tensor(expected, dtype=value.dtype)
        if not bool(value == wanted):
            raise WireError(
                f"the weight {float(value):g}; from its samples it is {float(wanted):g}"
            )


def _check_norm(change: Tree, of: Tree, factor: float, what: str) -> None:
    norm, size = _norm(change), _norm(of)
    bound = factor * max(1.0, size)
    if norm > bound:
        raise WireError(f"{what} of norm {norm:.3g}, above {bound:.3g} = {factor:g} x max(1, |w|)")


def _norm(values: Tree) -> float:
    """The norm of all leaves in float64, without a copy of a leaf."""
    blocks = (b for leaf in tree.leaves(values) for b in leaf.reshape(-1).split(BLOCK))
    return math.sqrt(math.fsum(float(block.double().square().sum()) for block in blocks))


def with_client(uploads: Tree, client: int) -> Tree:
    """Uploads in which every client number, a stacked whole number called ``client``, is the
    sender's.

    >>> with_client({"client": Stack(torch.tensor(7))}, 2)
    {'client': Stack(value=tensor(2))}
    """
    if not isinstance(uploads, dict):
        return uploads
    found = {}
    for name, value in uploads.items():
        found[name] = with_client(value, client)
        if name == "client" and isinstance(value, Stack) and _is_number(value.value):
            found[name] = Stack(torch.full_like(value.value, client))
    return found


def _is_number(value: Tree) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point() and value.numel() == 1


def largest(value: Tree) -> float:
    """The largest absolute number in a tree; infinite if one number is not finite."""
    found = [0.0]
    for leaf in tree.leaves(value):
        if leaf.numel():
            low, high = map(float, leaf.aminmax())  # NaN if one number is
            found += [-low, high]
    return math.inf if any(map(math.isnan, found)) else max(found)


def outliers(
    sizes: Mapping[int, Mapping[str, float]], rules: Rules, samples: Sequence[int]
) -> dict[int, str]:
    """Clients whose numbers are many times those of most, and than 1; and why. Sums and counts of
    who has more ``samples`` may be as many times larger. Updates have a bound of their own.

    >>> sizes = {0: {"uploads": 3.0}, 1: {"uploads": 5.0}, 2: {"uploads": 700.0}}
    >>> outliers(sizes, Rules(), [10, 10, 12])
    {2: 'uploads of size 700, those of most members are of 5 or less'}
    >>> outliers(sizes, Rules(), [10, 10, 20])
    {}
    """
    found: dict[int, str] = {}
    for kind in (*SHARED, "statistics"):
        ratio = rules.max_norm if kind in SHARED else rules.max_ratio
        known = {client: each[kind] for client, each in sizes.items() if kind in each}
        typical = median_low(known.values()) if known else 0.0
        usual = median_low(samples[client] for client in known) if known else 0
        for client, size in known.items():
            more = max(1.0, samples[client] / max(1, usual))
            if size > ratio * max(1.0, typical) * more:
                text = (
                    f"{kind} of size {size:.3g}, those of most members are of {typical:.3g} or less"
                )
                found.setdefault(client, text)
    return found


def check_sums(
    sums: dict[str, Tensor], samples: int, one_class: bool, rounded: bool = False
) -> None:
    """Raise a WireError for sums of a test that cannot be those of ``samples`` samples.

    A policy may have ``rounded`` numbers of answers, but not those of samples.
    """
    for name in COUNTS:
        if name in sums and bool((sums[name] < 0).any()):
            raise WireError("a negative number of samples in a test")
    answers = [] if rounded else ["predicted", "said", "histogram"]
    known = {name: sums[name] for name in ("count", *answers) if name in sums}
    every = [known[name].sum() for name in ("count", "predicted") if one_class and name in known]
    every += [sums["samples"]] if "samples" in sums else []
    every += known["histogram"].flatten(1).sum(1) if "histogram" in known else []
    every += [sums["calibration"][0].sum()] if "calibration" in sums else []
    if any(float(count) != samples for count in every):
        raise WireError("a test on other samples than the member has")
    if any(bool((known[name] > samples).any()) for name in ("count", "said") if name in known):
        raise WireError("a test on other samples than the member has")
    pairs = (("right", "count"), ("right", "predicted"), ("hits", "count"), ("hits", "said"))
    for part, whole in pairs:
        if part in sums and whole in sums and bool((sums[part] > sums[whole]).any()):
            raise WireError("a test with more right answers than samples")
    for first, second in (("sum_y", "sum_y2"), ("sum_abs", "sum_sq")):  # Cauchy and Schwarz
        if first in sums and second in sums:
            bound = (1 + ROUNDING) * samples * sums[second]
            if bool((sums[first] ** 2 > bound).any()):
                raise WireError("a test with sums of squares that are too small")


def _told(sums: dict[str, wire.Leaf], names: str) -> dict[str, wire.Leaf]:
    """The sums of a test that a member's policy lets leave; numbers of samples must be there."""
    found = {name: leaf for name, leaf in sums.items() if name in names.split(",")}
    if counts_of(sums) - found.keys():
        raise WireError("a test without its numbers of samples")
    return found


def _unknown(leaf: wire.Leaf) -> Tensor:
    return torch.full(leaf.shape, math.nan, dtype=leaf.dtype)


# -- collected -----------------------------------------------------------------------------------

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


#: None.
NO_TEST = Test("", None, False, ())


class Reply(NamedTuple):
    """A reply that has passed all checks: what it answers, and the message in which its arrays
    wait."""

    request: MemberRequest
    message: Message
    sizes: Mapping[str, float]


@dataclass
class Collected:
    """What the clients of a request replied; ``kind`` is train, survey or evaluate, and a test may
    ride along."""

    request: Request
    kind: str
    test: Test = NO_TEST
    drawn: int = 0  # clients that the request would have had without exclusions
    replies: dict[int, Reply] = field(default_factory=dict)
    sums: dict[int, Tree] = field(default_factory=dict)
    personal: dict[int, Tree] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)  # to what was asked, not the test alone
    #: What is sent, with the broadcast or not, and with other weights to test or not: the contents
    #: of several clients are the same, so they are packed once.
    contents: dict[tuple[bool, bool], Tree] = field(default_factory=dict)


@dataclass
class Requests:
    """Asks clients, with attempts and a deadline.

    Attributes:
        session: the server's session.
        roster: the members.
        exchange: carries the messages.
        rules: patience and distrust.
        log: told of every failure.
        refresh: lets members back in, and tells the terms to those that must hear them.
        changed: called when strikes or exclusions have changed.
        stop: called before a round is asked for again; it raises an exception to give up.
    """

    session: Session
    roster: Roster
    exchange: Exchange
    rules: Rules
    log: Callable[[str], None]
    refresh: Callable[[], None]
    changed: Callable[[], None]
    stop: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        sizes = [(member.train, member.test) for member in self.roster.participants]
        self.checks = ReplyChecks(self.session, self.rules, sizes)

    def ask(
        self, request: Request, needed: int, test: Test = NO_TEST, only_test: bool = False
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
        found, clients = Collected(request, kind, test), request.clients
        if kind == "survey" and self.session.bound.part(request.part).surveys() != "every":
            needed = len(clients)
        for attempt in range(self.rules.attempts):
            if attempt:
                self.stop()
                self.exchange.transport.wait(self.rules.wait_s)
            self.refresh()
            also = [] if attempt else [k for k in test.clients if k not in clients]
            self._attempt(found, also, attempt)
            samples = [train for train, _ in self.checks.sizes]
            sizes = {client: reply.sizes for client, reply in found.replies.items()}
            for client, reason in outliers(sizes, self.rules, samples).items():
                self._drop(client, reason, found)
            if len(found.answered) >= needed or not self._missing(found):
                break
        found.test, found.contents = NO_TEST, {}  # nothing keeps their weights in memory
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
                asked, message, _ = found.replies[client]
                opened = [self.checks.open(message, asked, broadcast)]
                yield client, place(opened.pop().value["update"])  # nothing keeps it in memory

    def suspects(self, found: Collected) -> Iterator[list[int]]:
        """Who may have made a round fail: nobody, if it does not fail again; each alone, from the
        largest numbers down; those with the largest numbers, while they are fewer than half."""
        yield []
        by_size = sorted(
            found.replies, key=lambda k: -max(found.replies[k].sizes.values(), default=0.0)
        )
        if len(by_size) > 1:
            yield from ([k] for k in by_size)
            yield from (by_size[:n] for n in range(2, (len(by_size) + 1) // 2))

    def blame(self, found: Collected, clients: Collection[int], why: object) -> None:
        """Drop the replies of clients without which the round does not fail."""
        for client in clients:
            self._drop(client, f"with it, the sum fails or is not finite ({why})", found)

    def _attempt(self, found: Collected, also: Collection[int], attempt: int) -> None:
        """Ask the clients that are missing once, and others for the test alone."""
        requests, clients = dict[str, MemberRequest](), self._missing(found)
        for client in (*clients, *also):
            member = self._participant(client)
            if member.present and member.agreed and not member.excluded:
                kind = found.kind if client in clients else "evaluate"
                requests[member.node] = self._request(found, kind, client, attempt)
            elif client in clients:
                why = "has not agreed to the terms" if member.present else "is not connected"
                found.failures[client] = member.excluded or why
        opener = partial(self._open, found)
        for _, request, reply in self.exchange.run(requests, self.rules.deadline_s, opener):
            self._receive(request, reply, found)
        for client in clients:
            if client in found.failures:
                self._say(client, found)

    def _request(self, found: Collected, kind: str, client: int, attempt: int) -> MemberRequest:
        request, test = found.request, found.test if client in found.test.clients else NO_TEST
        has_down = kind != "evaluate" or test.personal
        has_output = test is not NO_TEST and (test.output is not None or kind == "evaluate")
        if (has_down, has_output) not in found.contents:
            down, output = request.broadcast, test.output
            tested = {"output": down.weights if output is None else output} if has_output else {}
            found.contents[has_down, has_output] = ({"down": down} if has_down else {}) | tested
        return MemberRequest(
            kind, self.roster.run, request.round, attempt, client, self.roster.terms.hash,
            request.part if kind == "survey" else "", test.detail,
            accepted=self.session.ledger[client], personal=test.personal,
            value=found.contents[has_down, has_output],
        )  # fmt: skip

    def _open(
        self, found: Collected, request: MemberRequest, message: Message
    ) -> tuple[Message, Opened]:
        """A reply that was checked; its update is not kept, it waits in the message."""
        opened = self.checks.open(message, request, found.request.broadcast)
        opened.value.pop("update", None)
        return message, opened

    def _receive(
        self, request: MemberRequest, reply: tuple[Message, Opened] | Failure, found: Collected
    ) -> None:
        client, participant = request.client, self._participant(request.client)
        if isinstance(reply, Failure):
            found.failures[client] = f"did not reply ({reply.reason})"
            if reply.is_bad:
                self._strike(participant, reply.reason, found)
            return
        message, (code, value, sizes) = reply
        if code:
            self._refused(participant, code, request.kind, found)
            return
        found.failures.pop(client, None)
        if request.kind == found.kind:
            found.answered.add(client)
        if request.kind != "evaluate":
            found.replies[client] = Reply(request, message, sizes)
        if "sums" in value:
            found.sums[client] = value["sums"]
        if "personal" in value:
            found.personal[client] = value["personal"]

    def _drop(self, client: int, reason: str, found: Collected) -> None:
        """Drop a reply that was stored; its test stays, which was checked by itself."""
        del found.replies[client]
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
            f"(strike {participant.strikes} of {self.rules.strikes})"
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
