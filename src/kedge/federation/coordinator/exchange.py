"""Requests and replies over a transport: matched by message, counted, each reply once.

All replies are opened here. Whatever an opener raises makes the reply a bad one, and goes no
further: no member ends the run of the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from kedge.core.tree import Tree
from kedge.engines.device import return_freed_memory
from kedge.errors import WireError
from kedge.federation.large_messages import Message, size_of, spooled
from kedge.federation.messages import Failure, MemberRequest, Transport, content_of
from kedge.federation.names import plain
from kedge.limits import is_out_of_memory

Opened = TypeVar("Opened")
Opener = Callable[[MemberRequest, Message], Opened]

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
    clock: Callable[[], float] = time.time
    sent: int = field(default=0, init=False)
    received: int = field(default=0, init=False)

    def run(
        self,
        requests: Mapping[str, Callable[[float], MemberRequest]],
        seconds: float,
        opener: Opener[Opened],
    ) -> Iterator[tuple[str, MemberRequest, Opened | Failure]]:
        """Send one request to each node, and yield the reply of each, once, as they come.

        Requests are made one at a time (with the deadline), since each may hold the whole model;
        arrays that follow each other in several requests are packed once. Large replies are written
        to disk. A node that does not reply in time gives a ``Failure``.

        Args:
            requests: by the id of the node, what makes its request.
            seconds: how long to wait for all of them.
            opener: reads and checks a reply. What it raises makes the reply a bad ``Failure``.
        """
        deadline = self.clock() + seconds
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
        self, request: MemberRequest, pieces: list[bytes], opener: Opener[Opened]
    ) -> Opened | Failure:
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
        self, requests: Mapping[str, Callable[[float], MemberRequest]], deadline: float
    ) -> dict[str, tuple[str, MemberRequest]]:
        """Send all requests; nodes and requests by the id of the message."""
        waiting: dict[str, tuple[str, MemberRequest]] = {}
        value: Tree = None
        content: list[bytes] = []
        for node, make in requests.items():
            request = make(deadline)
            if request.value is not value:
                content = []  # freed before the next one is made
                value, content = request.value, content_of(request.value)
            message = request.pieces(content)
            self.sent += sum(map(len, message))
            try:
                number = self.transport.send(node, message, deadline)
            except ConnectionError:
                number = f"not sent to {node}"
            waiting[number] = node, _without_arrays(request)
        return waiting


def _without_arrays(request: MemberRequest) -> MemberRequest:
    """What identifies a request, without the model in it."""
    values = {name: value for name, value in vars(request).items() if name != "value"}
    return MemberRequest(**values)
