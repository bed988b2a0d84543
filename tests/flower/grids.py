"""A grid of Flower's own message types over members in this process."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flwr.app import Message
from flwr.supercore.task_identity import TaskIdentity

from kedge.flower.arrays import unwrap, wrap
from tests.flower.federations import Members


class MemberGrid:
    """What a ServerApp gets from Flower: members answer when their reply is pulled."""

    def __init__(self, members: Members) -> None:
        for name in ("_run_id", "_node_id", "_task_id"):
            setattr(TaskIdentity, name, 1)
        self.handles = list(members.handles.values())
        self.run = SimpleNamespace(run_id=1)
        self._messages: dict[str, Message] = {}
        self._count = 0

    def get_node_ids(self) -> Iterable[int]:
        return list(range(len(self.handles)))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str | None]:
        found = []
        for message in messages:
            self._count += 1
            number = message.metadata.__dict__["_message_id"] = f"m{self._count}"
            self._messages[number] = message
            found.append(number)
        return found

    def pull_messages(self, ids: Iterable[str]) -> Iterable[Message]:
        found = []
        for number in ids:
            message = self._messages.pop(number)
            handle = self.handles[message.metadata.dst_node_id]
            found.append(Message(wrap([handle(b"".join(unwrap(message)))]), reply_to=message))
        return found


def app_folder(folder: Path, **settings: Any) -> Path:
    """The package of an app that `kedge flower init` writes, with small settings."""
    from kedge.flower.project import PACKAGE, write_app
    from tests.flower.federations import QUICK
    from tests.flower.federations import settings as settings_of

    config = settings_of(**{"model": "mlp(hidden=[4])"} | settings)
    return write_app(folder, config, QUICK) / PACKAGE
