"""Requests and replies of a federation as bytes, and the transport that carries them.

A reply is one message of :mod:`kedge.session.wire`: named arrays, and a header of short texts. A
request is one without arrays, followed by one that has the arrays and nothing else, if there are
any: that is the same for all members of a round, so it is packed once. A member that does not
answer says so by a code of a fixed list, never by text: an error message may contain data.

=============  ====================================================================================
``join``       who are you? answer: name, versions, data schema, summed moments, numbers of samples
``agree``      these are the terms, and your number; answer: their hash
``refuse``     you cannot take part, and why; answer: empty
``train``      train one round; may ask for a test of the model on the way
``survey``     answer a part's survey
``evaluate``   test the model
``finish``     the run is over; answer: empty
=============  ====================================================================================

A transport knows nodes by an id that it can vouch for (a connection, a key) and carries bytes. The
coordinator asks it for little: who is there, send this, give me what has come. Replies are matched
by the id of the message that they answer, so one that comes too late has no taker. They are handed
over one at a time, so that the memory does not grow with the number of members.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Protocol

from kedge.core import tree
from kedge.core.tree import Tree
from kedge.errors import WireError
from kedge.session import blob, wire
from kedge.session.blob import Message
from kedge.session.session import NEVER

KINDS = ("join", "agree", "refuse", "train", "survey", "evaluate", "finish")
REQUEST, CONTENT, REPLY = "request", "content", "reply"
PIECE = 1 << 25  # bytes of one piece of a message
#: What a member says in place of an answer, with its meaning for people at the server.
CODES = {
    "BAD_REQUEST": "did not understand the request; compare the releases of kedge",
    "BUSY": "was busy with another request",
    "FAILED": "failed; the reason is in its own log",
    "LATE": "got the request after its deadline; it is slow, or its clock is wrong",
    "NOT_FINITE": "got a number that is not finite; lower the learning rate, or set clip",
    "NO_STATE": "has lost its state of the accepted round",
    "POLICY": "may not answer; its release policy says why, in its own log",
    "STALE": "got a request that is older than one it has answered",
    "TERMS": "does not know these terms",
}
#: Whether a test is asked for on the way, and with how many details.
TESTS = ("", "plain", "detailed")
RUN_ID = re.compile(r"[0-9a-f]{8,64}")
MAX_TEXT = 1 << 20  # characters of a text in a header


class Refused(Exception):
    """A request that is not answered: the code that leaves, and the reason, which stays."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        assert code in CODES
        self.code = code


@dataclass(frozen=True)
class RequestHeader:
    """What identifies a request; the reply repeats it.

    Attributes:
        kind: one of ``KINDS``.
        run: id of the run, hexadecimal.
        round: number of the round, from 0.
        attempt: counts requests of one round to one client.
        client: number of the client; -1 before it has one.
        terms: hash of the terms; empty before there are any.
        part: the part whose survey is asked.
        test: one of ``TESTS``.
    """

    kind: str
    run: str
    round: int = 0
    attempt: int = 0
    client: int = -1
    terms: str = ""
    part: str = ""
    test: str = ""

    def notes(self) -> dict[str, str]:
        names = (field.name for field in fields(RequestHeader) if field.name != "kind")
        return {name: str(getattr(self, name)) for name in names}


@dataclass(frozen=True)
class MemberRequest(RequestHeader):
    """A request of the coordinator to one member.

    Attributes:
        accepted: the last round in which the server accepted this client's reply.
        deadline: when the server stops waiting, in seconds since 1970 UTC; 0: never. Clocks should
            agree to a few seconds.
        personal: whether the client's own model is tested, too.
        text: JSON of ``join`` and ``agree``, the sentence of ``refuse``.
        value: arrays.
    """

    accepted: int = NEVER
    deadline: float = 0.0
    personal: bool = False
    text: str = ""
    value: Tree = field(default_factory=dict)

    def pieces(self, content: list[bytes]) -> list[bytes]:
        """The message, of which ``content`` is what :func:`content_of` returned for ``value``."""
        notes = self.notes() | {
            "accepted": str(self.accepted),
            "deadline": repr(float(self.deadline)),
            "personal": str(int(self.personal)),
            "text": self.text,
            "ask": self.kind,
            "content": blob.checksum_of(content[0]) if content else "",
        }
        return [wire.pack(REQUEST, {}, **notes), *content]

    def pack(self) -> bytes:
        """The message in one piece."""
        return b"".join(self.pieces(content_of(self.value)))

    @classmethod
    def unpack(cls, message: Message) -> MemberRequest:
        """Read a request; a WireError for anything else."""
        file = blob.opened(message)
        header = blob.header_of(file)
        file.seek(0)
        head = file.read(header.start)
        wire.check(head, REQUEST, {})
        notes = header.notes
        value: Tree = {}
        if header.size:
            value = wire.unpack(file, CONTENT, at=header.start)
            if not isinstance(value, dict):
                raise WireError("the arrays of the request have no names")
        file.seek(header.start)
        if notes.get("content") != blob.checksum_of(file.read(blob.BLOCK)):
            raise WireError("the arrays are not those of the request")
        return cls(
            **_header(notes),
            accepted=_int(notes, "accepted", NEVER),
            deadline=_number(notes, "deadline"),
            personal=notes.get("personal") == "1",
            text=notes.get("text", ""),
            value=value,
        )


def content_of(value: Tree) -> list[bytes]:
    """The arrays of a request as they travel; empty if there are none."""
    has_arrays = any(True for _ in tree.leaves(value))
    return wire.pieces(CONTENT, value, PIECE) if has_arrays else []


def pack_reply(request: RequestHeader, value: Tree, **notes: str) -> bytes:
    """The answer to a request."""
    return wire.pack_finite(REPLY, value, **request.notes(), ask=request.kind, code="", **notes)


def pack_refusal(request: RequestHeader | None, code: str) -> bytes:
    """A code in place of an answer; ``request`` is None if it could not be read."""
    assert code in CODES
    header = request or RequestHeader("join", "00000000")
    return wire.pack(REPLY, {}, **header.notes(), ask=header.kind, code=code)


def reply_header(message: Message) -> tuple[RequestHeader, dict[str, str]]:
    """What a reply says it answers, and all of its notes; a WireError for anything else."""
    notes = wire.notes_of(message)
    if notes.get("version") != wire.VERSION:
        raise WireError(f"version {notes.get('version')!r:.20} of the wire, not {wire.VERSION!r}")
    if notes.get("kind") != REPLY:
        raise WireError(f"a message of kind {notes.get('kind')!r:.40}, not a reply")
    if notes.get("code") not in ("", *CODES):
        raise WireError("an unknown code, or none")
    return RequestHeader(**_header(notes)), notes


def _header(notes: dict[str, str]) -> dict[str, Any]:
    kind, texts = notes.get("ask"), {k: notes.get(k, "") for k in ("run", "terms", "part", "test")}
    if kind not in KINDS or texts["test"] not in TESTS or not RUN_ID.fullmatch(texts["run"]):
        raise WireError("the header names no known request, run or test")
    if any(len(value) > MAX_TEXT for value in notes.values()):
        raise WireError("a text in the header is too long")
    least = {"round": 0, "attempt": 0, "client": -1}
    return {"kind": kind} | texts | {k: _int(notes, k, low) for k, low in least.items()}


def _int(notes: dict[str, str], name: str, least: int) -> int:
    text = notes.get(name, "")
    if not re.fullmatch(r"-?[0-9]{1,9}", text) or int(text) < least:
        raise WireError(f"the header has no valid {name}")
    return int(text)


def _number(notes: dict[str, str], name: str) -> float:
    try:
        value = float(notes.get(name, ""))
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise WireError(f"the header has no valid {name}")
    return value


class Failure(NamedTuple):
    """No reply will come: ``unreachable``, ``timeout``, or a short word of the transport.

    ``is_bad`` says that something came that cannot be a reply; it counts against its sender.
    """

    reason: str
    is_bad: bool = False


class Transport(Protocol):
    """Nodes, and messages to and from them."""

    def members(self) -> Collection[str]:
        """Ids of the nodes that are connected now."""
        ...

    def send(self, node: str, message: Sequence[bytes], deadline: float) -> str:
        """Send a message to a node, and return the id of the message.

        Args:
            node: id of the node.
            message: its pieces, of which several messages may share some.
            deadline: when no reply is wanted any more, in seconds since 1970.

        Raises:
            ConnectionError: the node cannot be reached.
        """
        ...

    def receive(
        self, ids: Collection[str], deadline: float
    ) -> Iterator[tuple[str, bytes | list[bytes] | Failure]]:
        """Replies to messages, in one piece or several, one at a time as they come, until all are
        there or the deadline has passed. What is missing then is not yielded."""
        ...

    def wait(self, seconds: float) -> None:
        """Let some time pass, in which nodes may come back."""
        ...


class Direct:
    """Members in this process: a request is answered when its reply is received.

    Args:
        nodes: what answers, by the id of the node; ``Member.handle``, for instance. The mapping may
            change: nodes come and go.
    """

    def __init__(self, nodes: Mapping[str, Callable[[bytes], bytes]]) -> None:
        self.nodes = nodes
        self._numbers = itertools.count()
        self._sent: dict[str, tuple[str, bytes]] = {}

    def members(self) -> Collection[str]:
        return list(self.nodes)

    def send(self, node: str, message: Sequence[bytes], deadline: float) -> str:
        number = str(next(self._numbers))
        self._sent[number] = node, b"".join(message)
        return number

    def receive(
        self, ids: Collection[str], deadline: float
    ) -> Iterator[tuple[str, bytes | list[bytes] | Failure]]:
        for number in ids:
            node, message = self._sent.pop(number)
            handle = self.nodes.get(node)
            yield number, Failure("unreachable") if handle is None else handle(message)

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)
