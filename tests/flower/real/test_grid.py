"""Parcels and the grid with Flower's own types, without processes."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra: pip install 'kedge[flower]'")

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from kedge.federation.messages import Failure
from kedge.flower import apps
from kedge.flower.arrays import KEY, MAX_PIECES, STYPE, NoParcel, unwrap, wrap
from kedge.flower.grid import GridTransport

pytestmark = pytest.mark.flower


@pytest.fixture(autouse=True)
def _in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def message(content: RecordDict) -> Message:
    return Message(content, 7, "train")


@pytest.mark.parametrize(
    "pieces", [[b""], [b"abc"], [bytes(range(256)) * 30_000], [b"head", b"", b"tail"]]
)
def test_pieces_come_back(pieces: list[bytes]) -> None:
    assert unwrap(message(wrap(pieces))) == pieces


FIRST = "000"  # the name of the first piece


def array(**changes: Any) -> Array:
    values = {"dtype": "uint8", "shape": (3,), "stype": STYPE, "data": b"abc"} | changes
    return Array(**values)


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({KEY: ConfigRecord({"a": 1})}),
        RecordDict({"other": ArrayRecord({FIRST: array()})}),
        RecordDict({KEY: ArrayRecord({FIRST: array()}), "more": ArrayRecord({FIRST: array()})}),
        RecordDict({KEY: ArrayRecord({FIRST: array(), "more": array()})}),
        RecordDict({KEY: ArrayRecord({"001": array()})}),
        RecordDict({KEY: ArrayRecord({f"{n:03d}": array() for n in range(MAX_PIECES + 1)})}),
        RecordDict({KEY: ArrayRecord({FIRST: array(shape=(4,))})}),
        RecordDict({KEY: ArrayRecord({FIRST: array(shape=(3, 1))})}),
        RecordDict({KEY: ArrayRecord({FIRST: array(shape=(1 << 50,))})}),
        RecordDict({KEY: ArrayRecord({FIRST: array(dtype="float64")})}),
        RecordDict({KEY: ArrayRecord({FIRST: array(dtype="object")})}),
        RecordDict({KEY: ArrayRecord({FIRST: array(stype="numpy.ndarray")})}),
        RecordDict({KEY: ArrayRecord({FIRST: Array(np.zeros(3))})}),
    ],
)
def test_anything_else_is_refused_before_it_is_read(content: RecordDict) -> None:
    with pytest.raises(NoParcel):
        unwrap(message(content))


class FakeGrid:
    """What the transport asks of a grid; replies are set by the test."""

    def __init__(self) -> None:
        self.pushed: list[Message] = []
        self.replies: dict[str, Message] = {}
        self.pulls: list[list[str]] = []
        self.lost = False

    def get_node_ids(self) -> Iterable[int]:
        return [30, 4]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str | None]:
        found = []
        for one in messages:
            number = f"m{len(self.pushed)}"
            one.metadata.__dict__["_message_id"] = number
            self.pushed.append(one)
            found.append(None if self.lost else number)
        return found

    def pull_messages(self, ids: Iterable[str]) -> Iterable[Message]:
        self.pulls.append(list(ids))
        return [self.replies.pop(i) for i in self.pulls[-1] if i in self.replies]

    def reply(self, index: int, content: RecordDict | Error) -> None:
        sent = self.pushed[index]
        self.replies[f"m{index}"] = Message(content, reply_to=sent)


def transport() -> tuple[Any, GridTransport]:
    grid: Any = FakeGrid()
    return grid, GridTransport(grid, poll_s=0.01)


def test_replies_are_matched_by_message_and_pulled_one_at_a_time() -> None:
    grid, carrier = transport()
    assert carrier.members() == ["4", "30"]
    soon = time.time() + 0.3
    ids = [carrier.send(node, [b"ask"], soon) for node in ("4", "30", "4", "30")]
    assert [unwrap(sent) for sent in grid.pushed] == [[b"ask"]] * 4
    grid.reply(1, wrap([b"one"]))
    grid.reply(0, Error(5, "a reason that a node may have written"))
    grid.reply(2, RecordDict())
    found = dict(carrier.receive(ids, soon))
    assert found["m1"] == [b"one"]
    assert found["m0"] == Failure("unreachable")
    assert isinstance(found["m2"], Failure)
    assert "no message of kedge" in found["m2"].reason
    assert [found[m].is_bad for m in ("m0", "m2")] == [False, True]
    assert "m3" not in found  # it has not come
    assert time.time() >= soon
    assert all(len(pull) == 1 for pull in grid.pulls)


def test_a_reply_to_another_message_has_no_taker() -> None:
    grid, carrier = transport()
    soon = time.time() + 0.1
    first, second = (carrier.send("4", [b"ask"], soon) for _ in range(2))
    grid.replies[second] = Message(wrap([b"stale"]), reply_to=grid.pushed[0])
    assert dict(carrier.receive([second], soon)) == {}
    assert first != second


def forged(kind: str, body: bytes, children: str = "") -> bytes:
    return f"{kind} {children} {len(body)}".encode() + b"\0" + body


FORGED = {
    "an array without a type": forged("Array", b'{"arraychunk_ids": []}'),
    "a chunk that is not there": forged("Array", b'{"arraychunk_ids": [7]}'),
    "a list in place of an array": forged("Array", b"[]"),
    "a list in place of names": forged("ArrayRecord", b"[]"),
    "a number in place of records": forged("RecordDict", b"7"),
    "settings that are no protobuf": forged("ConfigRecord", b"\xff\xff\xff"),
    "no JSON": forged("Array", b"\xff"),
    "an unknown kind": forged("Pickle", b""),
}


@pytest.mark.parametrize("name", FORGED)
def test_objects_that_flower_cannot_read_count_against_their_sender(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower raises many kinds of errors for them; none may end the run."""
    grid, carrier = transport()
    number = carrier.send("4", [b"ask"], time.time() + 60)
    content = {"object": FORGED[name]}
    monkeypatch.setattr(
        grid, "pull_messages", lambda ids: [inflate_object_from_contents("object", content)]
    )
    [(found, failure)] = carrier.receive([number], time.time() + 60)
    assert found == number
    assert failure == Failure("content that Flower cannot put together", is_bad=True)


def test_a_message_that_the_superlink_refuses_has_failed() -> None:
    grid, carrier = transport()
    grid.lost = True
    with pytest.raises(ConnectionError):
        carrier.send("4", [b"ask"], time.time() + 1)


def test_no_text_of_an_exception_leaves_a_client(tmp_path: Path) -> None:
    asked = message(wrap([b"ask"]))
    asked.metadata.__dict__["_message_id"] = "m"
    secret = str(tmp_path / "patients.csv")
    member = {"member": "north", "data": secret, "folder": f"{secret}/state"}
    for config in ({}, member | {"policy": f"{secret}.toml"}, {"socket": secret}):
        asked.metadata.ttl = 0.1
        reply = apps.answer(asked, config, tmp_path)
        assert reply.has_error()
        assert reply.error.reason in ("FAILED", "NODE_DOWN")


def test_a_client_is_the_member_itself_without_a_socket(tmp_path: Path) -> None:
    asked = message(wrap([b"no request"]))
    asked.metadata.__dict__["_message_id"] = "m"
    config = {"member": "north", "data": "digits", "folder": str(tmp_path / "state")}
    assert b"BAD_REQUEST" in b"".join(unwrap(apps.answer(asked, config, tmp_path)))
