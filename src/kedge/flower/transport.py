"""What carries messages between a coordinator and its members.

A transport knows nodes by an id that it can vouch for (a connection, a key) and carries bytes. The
coordinator asks it for little: who is there, send this, give me what has come. Replies are matched
by the id of the message that they answer, so one that comes too late has no taker. They are handed
over one at a time, so that the memory does not grow with the number of members.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol


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
