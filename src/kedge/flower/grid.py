"""Flower's Grid as a transport: own push and pull, one message at a time.

Replies are matched by the id of the message that they answer: errors of dead nodes come from the
SuperLink, not from the node. They are pulled one message at a time, so the memory does not grow
with the number of members. A piece that messages share becomes one array: Flower hashes it once,
and sends it to the SuperLink once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import httpx
from flwr.app import Array, Message, MessageType
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError

from kedge.federation.messages import Failure
from kedge.flower.arrays import MARGIN_S, NoParcel, as_array, unwrap, wrap

POLL_S = 0.2  # between two looks for replies
#: What Flower raises for a reply whose objects a hostile node has written by hand.
BAD_CONTENT = (
    ValueError, LookupError, TypeError, AttributeError, RecursionError, MemoryError, DecodeError,
)  # fmt: skip
#: What Flower's error codes mean here. The reason is not read: a client app may write anything.
REASONS = {
    1: "the client app cannot be loaded",
    2: "the client app failed",
    3: "unreachable",
    4: "unreachable",
    5: "unreachable",
    7: "the node rejects the app",
    8: "the client process died",
    101: "its resident node does not run",
}


class GridTransport:
    """Nodes of a SuperLink, by their ids.

    Args:
        grid: what Flower gives to a ServerApp.
        poll_s: seconds between two looks for replies.
    """

    def __init__(self, grid: Grid, poll_s: float = POLL_S) -> None:
        self.grid, self.poll_s = grid, poll_s
        self._arrays: dict[int, Array] = {}  # by the id of the piece, which the array keeps alive

    def members(self) -> Collection[str]:
        return [str(node) for node in sorted(_patiently(self.grid.get_node_ids))]

    def send(self, node: str, message: Sequence[bytes], deadline: float) -> str:
        ttl = max(1.0, deadline - time.time()) + MARGIN_S
        self._arrays = {id(p): self._arrays.get(id(p)) or as_array(p) for p in message}
        content = wrap([self._arrays[id(piece)] for piece in message])
        envelope = Message(content, int(node), MessageType.TRAIN, ttl=ttl)
        found = list(_patiently(lambda: self.grid.push_messages([envelope])))
        if not found or not found[0]:
            raise ConnectionError("the SuperLink refused the message")
        return str(found[0])

    def receive(
        self, ids: Collection[str], deadline: float
    ) -> Iterator[tuple[str, bytes | list[bytes] | Failure]]:
        self._arrays = {}  # all are sent
        waiting = dict.fromkeys(ids)
        while waiting:
            for number in list(waiting):
                found = self._pull(number)
                if found:
                    del waiting[number]
                    yield number, found.pop()  # nothing here keeps it in memory
            if not waiting or time.time() >= deadline:
                return
            time.sleep(self.poll_s)

    def _pull(self, number: str) -> list[list[bytes] | Failure]:
        """The reply to a message, once it is there."""
        try:
            found = _patiently(lambda: self.grid.pull_messages([number]))
        except BAD_CONTENT:  # Flower has dropped it by now
            return [Failure("content that Flower cannot put together", is_bad=True)]
        return [_content(m) for m in found if m.metadata.reply_to_message_id == number][:1]

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)


def _content(message: Message) -> list[bytes] | Failure:
    if message.has_error():
        code = message.error.code
        return Failure(REASONS.get(code, f"error {code} of Flower"))
    try:
        return unwrap(message)
    except NoParcel as error:
        return Failure(f"what is no message of kedge: {error}", is_bad=True)


def _patiently(call: Callable[[], Any], attempts: int = 5) -> Any:
    """Repeat a request that the SuperLink could not answer for a moment."""
    for attempt in range(attempts):
        try:
            return call()
        except (httpx.TransportError, httpx.HTTPStatusError) as error:
            status = getattr(getattr(error, "response", None), "status_code", 503)
            if status < 500 or attempt == attempts - 1:
                raise
            time.sleep(2.0**attempt / 2)
    raise AssertionError
