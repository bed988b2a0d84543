"""Requests and replies over a transport: matched by message, counted, each reply once."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO

from kedge.flower.messages import Request
from kedge.flower.transport import Failure, Transport

MAX_IN_MEMORY = 64 << 20  # bytes of one stored reply; larger ones are in a temporary file


@dataclass
class Courier:
    """Carries requests to nodes and brings back what they reply.

    Attributes:
        transport: what carries the bytes.
        log: told of replies that nobody waits for.
        sent, received: bytes so far.
    """

    transport: Transport
    log: Callable[[str], None]
    clock: Callable[[], float] = time.time
    sent: int = field(default=0, init=False)
    received: int = field(default=0, init=False)

    def exchange(
        self, requests: Mapping[str, Callable[[float], Request]], seconds: float
    ) -> Iterator[tuple[str, Request, bytes | Failure]]:
        """Send one request to each node, and yield the reply of each, once, as they come.

        Requests are made one at a time (with the deadline), since each may hold the whole model. A
        node that does not reply in time gives a ``Failure``.

        Args:
            requests: by the id of the node, what makes its request.
            seconds: how long to wait for all of them.
        """
        deadline = self.clock() + seconds
        waiting: dict[str, tuple[str, Request]] = {}
        for node, make in requests.items():
            request = make(deadline)
            message = request.pack()
            self.sent += len(message)
            try:
                number = self.transport.send(node, message, deadline)
            except ConnectionError:
                number = f"not sent to {node}"
            waiting[number] = node, _without_arrays(request)
        sent = [number for number in waiting if not number.startswith("not sent")]
        for number, reply in self.transport.receive(sent, deadline):
            if number not in waiting:
                self.log("a reply that nobody waits for was ignored")
                continue
            node, request = waiting.pop(number)
            if not isinstance(reply, Failure):
                self.received += len(reply)
            yield node, request, reply
        for node, request in waiting.values():
            yield node, request, Failure("timeout")


def _without_arrays(request: Request) -> Request:
    """What identifies a request, without the model in it."""
    values = {name: value for name, value in vars(request).items() if name != "value"}
    return Request(**values)


class Stored:
    """A reply that waits for its turn to be averaged, in memory or in a temporary file."""

    def __init__(self, message: bytes) -> None:
        self._file: IO[bytes] = tempfile.SpooledTemporaryFile(MAX_IN_MEMORY)  # noqa: SIM115
        self._file.write(message)

    def take(self) -> bytes:
        """The message; it can be taken once."""
        self._file.seek(0)
        message = self._file.read()
        self._file.close()
        return message

    def __del__(self) -> None:
        self._file.close()
