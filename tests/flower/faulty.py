"""A transport with faults, between real members and a real coordinator."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from kedge.federation.messages import Direct, Failure, MemberRequest
from tests.flower.federations import Members

#: (name of the member, request, reply) -> what arrives in place of the reply.
Fault = Callable[[str, MemberRequest, bytes], Any]


class Faulty(Direct):
    """Members in this process, whose replies a fault may replace.

    A fault returns the reply, other bytes, a Failure, None (nothing arrives), or a list of these.
    """

    def __init__(self, members: Members, fault: Fault) -> None:
        super().__init__(members.handles)
        self.members_, self.fault = members, fault
        self.requests: list[tuple[str, MemberRequest]] = []
        self.waits = 0

    def receive(
        self, ids: Collection[str], deadline: float
    ) -> Iterator[tuple[str, bytes | Failure]]:
        for number in ids:
            node, message = self._sent.pop(number)
            handle = self.nodes.get(node)
            if handle is None:
                yield number, Failure("unreachable")
                continue
            request = MemberRequest.unpack(message)
            self.requests.append((node, request))
            try:
                reply: Any = handle(message)
            except Exception:  # noqa: BLE001  the process of the member has died
                reply = Failure("died")
            if isinstance(reply, bytes):
                reply = self.fault(node.removeprefix("node of "), request, reply)
            for one in reply if isinstance(reply, list) else [reply]:
                if one is not None:
                    yield number, one

    def wait(self, seconds: float) -> None:
        self.waits += 1


def training(request: MemberRequest, round: int | None = None) -> bool:
    return request.kind == "train" and round in (None, request.round)
