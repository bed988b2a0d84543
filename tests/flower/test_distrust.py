"""Hostile and malformed replies: each is dropped, logged and counted, and none is averaged."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kedge.core import tree
from kedge.core.part import Stack
from kedge.core.tree import Weights
from kedge.errors import Paused
from kedge.federation.coordinator.requests import check_sums, with_client
from kedge.federation.messages import REPLY, Failure, MemberRequest
from kedge.session import blob, wire
from tests.flower.faulty import Faulty, training
from tests.flower.federations import QUICK, Members, assert_same, coordinator, net, replay, settings

Forgery = Callable[[MemberRequest, bytes], bytes]
FORGERIES: dict[str, tuple[Forgery, str]] = {}


def forgery(reason: str) -> Callable[[Forgery], Forgery]:
    def add(function: Forgery) -> Forgery:
        FORGERIES[function.__name__] = function, reason
        return function

    return add


def again(message: bytes, change: Callable[[Any], Any] | None = None, **notes: str) -> bytes:
    """An honest reply with another value or other notes, packed and sealed as a member does."""
    value, found = wire.unpack(message, REPLY), wire.notes_of(message)
    kind = notes.pop("kind", found.pop("kind"))
    found.pop("version")
    return wire.pack(kind, change(value) if change else value, **found | notes)


def with_delta(function: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """Change the first parameter of the update."""

    def change(value: Any) -> Any:
        reply = value["update"]
        name = next(iter(reply.delta.params))
        params = reply.delta.params | {name: function(reply.delta.params[name])}
        return value | {"update": reply._replace(delta=Weights(params, reply.delta.buffers))}

    return change


def fill(number: float) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.full_like(x, number)


def header(message: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """A message with another header of safetensors."""
    size = int.from_bytes(message[:8], "little")
    values = json.loads(message[8 : 8 + size])
    change(values)
    text = json.dumps(values, separators=(",", ":")).encode()  # as safetensors writes it
    return blob.sealed(len(text).to_bytes(8, "little") + text + message[8 + size :])


def replaced(**fields: Any) -> Callable[[Any], Any]:
    return lambda value: value | {"update": value["update"]._replace(**fields)}


@forgery("header")
def nothing(request: MemberRequest, reply: bytes) -> bytes:
    return b""


@forgery("header")
def not_safetensors(request: MemberRequest, reply: bytes) -> bytes:
    return b"\x00" * 500


@forgery("header")
def pickled(request: MemberRequest, reply: bytes) -> bytes:
    return pickle.dumps({"update": [1.0] * 100})


@forgery("header that is larger")
def oversized_header(request: MemberRequest, reply: bytes) -> bytes:
    return (1 << 62).to_bytes(8, "little") + reply[8:]


@forgery("bytes, of")
def oversized(request: MemberRequest, reply: bytes) -> bytes:
    return reply + b"\x00" * (8 << 20)


@forgery("header cannot be read")
def deep_json(request: MemberRequest, reply: bytes) -> bytes:
    return (50_000).to_bytes(8, "little") + b"[" * 50_000 + b"\x00" * 100


@forgery("does not have the length|header says")
def cut_short(request: MemberRequest, reply: bytes) -> bytes:
    return reply[:-8]


@forgery("checksum")
def damaged(request: MemberRequest, reply: bytes) -> bytes:
    return reply[:-5] + bytes([reply[-5] ^ 1]) + reply[-4:]


@forgery("version '9'")
def another_version(request: MemberRequest, reply: bytes) -> bytes:
    plain = again(reply)
    return blob.sealed(plain.replace(b'\\"version\\": \\"2\\"', b'\\"version\\": \\"9\\"'))


@forgery("kind 'down'")
def another_kind(request: MemberRequest, reply: bytes) -> bytes:
    return again(reply, kind="down")


@forgery("unknown array")
def another_name(request: MemberRequest, reply: bytes) -> bytes:
    return again(reply, lambda value: value | {"more": torch.zeros(3)})


@forgery("lacks")
def a_missing_array(request: MemberRequest, reply: bytes) -> bytes:
    return again(reply, lambda value: {"update": value["update"]._replace(losses={})})


@forgery("expected")
def another_shape(request: MemberRequest, reply: bytes) -> bytes:
    return again(reply, with_delta(lambda x: torch.cat([x, x])))


@forgery("expected")
def another_dtype(request: MemberRequest, reply: bytes) -> bytes:
    return again(reply, with_delta(Tensor.double))


@forgery("expected|length")
def a_header_that_lies(request: MemberRequest, reply: bytes) -> bytes:
    def change(values: dict[str, Any]) -> None:
        first = next(name for name in values if name != "__metadata__" and values[name]["shape"])
        values[first]["shape"] = [10**12]

    return header(reply, change)


@forgery("expected|length")
def arrays_that_overlap(request: MemberRequest, reply: bytes) -> bytes:
    def change(values: dict[str, Any]) -> None:
        names = [n for n in values if n != "__metadata__"]
        for name in names[1:]:
            values[name]["data_offsets"] = values[names[0]]["data_offsets"]

    return header(reply, change)


@forgery("not finite")
def nan(request: MemberRequest, reply: bytes) -> bytes:
    return again(reply, with_delta(fill(float("nan"))))


@forgery("not finite")
def infinite(request: MemberRequest, reply: bytes) -> bytes:
    return again(reply, with_delta(fill(float("inf"))))


@forgery("above")
def huge(request: MemberRequest, reply: bytes) -> bytes:
    return again(reply, with_delta(fill(1e30)))


@forgery("update of norm")
def large(request: MemberRequest, reply: bytes) -> bytes:
    return again(reply, with_delta(fill(1e4)))


@forgery("not finite")
def a_loss_that_is_nan(request: MemberRequest, reply: bytes) -> bytes:
    return again(reply, replaced(losses={"task": torch.tensor(float("nan"))}))


@forgery("the weight -5")
def a_negative_weight(request: MemberRequest, reply: bytes) -> bytes:
    return again(reply, replaced(weight=torch.tensor(-5.0)))


@forgery("the weight 1e\\+09")
def a_billion_samples(request: MemberRequest, reply: bytes) -> bytes:
    return again(reply, replaced(weight=torch.tensor(1e9)))


@forgery("the weight 3;")
def a_larger_share(request: MemberRequest, reply: bytes) -> bytes:
    return again(reply, replaced(share=torch.tensor(3.0)))


@forgery("client 1 of another request")
def the_number_of_another(request: MemberRequest, reply: bytes) -> bytes:
    return again(reply, client="1")


@forgery("round 0 of another request")
def an_old_round(request: MemberRequest, reply: bytes) -> bytes:
    return again(reply, round="0")


@forgery("attempt 7 of another")
def another_attempt(request: MemberRequest, reply: bytes) -> bytes:
    return again(reply, attempt="7")


@forgery("run 'abababababababab' of another")
def another_run(request: MemberRequest, reply: bytes) -> bytes:
    return again(reply, run="ab" * 8)


@forgery("terms '0000000000000000' of another")
def other_terms(request: MemberRequest, reply: bytes) -> bytes:
    return again(reply, terms="0" * 16)


@forgery("no valid round")
def a_round_that_is_no_number(request: MemberRequest, reply: bytes) -> bytes:
    return again(reply, round="1e9")


@forgery("unknown code")
def another_code(request: MemberRequest, reply: bytes) -> bytes:
    return again(reply, code="<script>")


@forgery("unknown code, or none")
def no_code(request: MemberRequest, reply: bytes) -> bytes:
    value, notes = wire.unpack(reply, REPLY), wire.notes_of(reply)
    del notes["code"], notes["version"]
    return wire.pack(notes.pop("kind"), value, **notes)


@forgery("a test on '9999'")
def more_test_samples(request: MemberRequest, reply: bytes) -> bytes:
    return again(reply, tested="9999")


@forgery("more right answers")
def better_than_perfect(request: MemberRequest, reply: bytes) -> bytes:
    def change(value: Any) -> Any:
        return value | {"sums": value["sums"] | {"right": value["sums"]["count"] + 1}}

    return again(reply, change)


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_is_dropped_and_counted(name: str, tmp_path: Path) -> None:
    forge, reason = FORGERIES[name]
    members = Members(tmp_path)

    def fault(who: str, request: MemberRequest, reply: bytes) -> Any:
        return forge(request, reply) if who == "south" and training(request, 1) else reply

    config = settings("fedavg", rounds=2, per_round=0, model="mlp(hidden=[4])")
    said: list[str] = []
    transport = Faulty(members, fault)
    run = coordinator(members, config, tmp_path / "run", transport=transport, report=said.append)
    run.run()
    assert [r["cohort"] for r in run.recorder.records] == [[0, 1, 2, 3], [0, 1, 3]]
    assert [seat.strikes for seat in run.roster.participants] == [0, 0, 1, 0]
    [line] = [line for line in said if "dropped" in line]
    assert line.startswith("round 2, train: south sent a bad reply, which was dropped: ")
    assert re.search(reason, line), line
    members.model = run.bound.model.template
    assert_same(run, replay(run, members))


def test_there_are_many_kinds() -> None:
    assert len(FORGERIES) >= 30


def test_a_member_that_keeps_lying_is_excluded(tmp_path: Path) -> None:
    members = Members(tmp_path)

    def fault(who: str, request: MemberRequest, reply: bytes) -> Any:
        return nan(request, reply) if who == "south" and training(request) else reply

    config = settings("fedavg", rounds=5, per_round=0, model="linear")
    transport = Faulty(members, fault)
    run = coordinator(members, config, tmp_path / "run", transport=transport)
    run.run()
    assert run.roster.participants[2].excluded == "sent 3 bad replies"
    asked = [r.round for node, r in transport.requests if "south" in node and r.kind == "train"]
    assert asked == [0, 1, 2]
    stored = json.loads((tmp_path / "run" / "federation.json").read_text())
    assert stored["members"][2]["excluded"] == "sent 3 bad replies"


def test_what_is_no_message_at_all_counts_against_its_sender(tmp_path: Path) -> None:
    members = Members(tmp_path, model=net())

    def fault(name: str, request: MemberRequest, reply: bytes) -> Any:
        bad = name == "north" and request.kind == "train"
        return Failure("what is no message of kedge", is_bad=True) if bad else reply

    run = coordinator(
        members, settings("scaffold", per_round=4), tmp_path / "run",
        transport=Faulty(members, fault), rules=replace(QUICK, strikes=2),
    )  # fmt: skip
    run.run()
    seat = run.roster.participants[1]
    assert (seat.name, seat.strikes) == ("north", 2)
    assert seat.excluded == "sent 2 bad replies"
    assert all(1 not in record["cohort"] for record in run.recorder.records)
    assert_same(run, replay(run, members))


def test_if_all_lie_nothing_is_averaged(tmp_path: Path) -> None:
    members = Members(tmp_path)

    def fault(who: str, request: MemberRequest, reply: bytes) -> Any:
        return huge(request, reply) if training(request) else reply

    config = settings("fedavg", rounds=5, per_round=0, model="linear")
    transport = Faulty(members, fault)
    run = coordinator(members, config, tmp_path / "run", transport=transport)
    with pytest.raises(Paused, match="0 of 4 members replied, 2 are needed"):
        run.run()
    assert tree.equal(run.session.server.weights, run.bound.initial)


def test_nobody_speaks_for_another_in_the_uploads_of_a_part(tmp_path: Path) -> None:
    """Krum sorts by the client's number, which clients upload; a false one changes nothing."""

    def fault(who: str, request: MemberRequest, reply: bytes) -> Any:
        if who != "south" or not training(request):
            return reply

        def change(value: Any) -> Any:
            uploads = {"krum": {"client": Stack(torch.tensor(0))}}
            return value | {"update": value["update"]._replace(uploads=uploads)}

        return again(reply, change)

    members = Members(tmp_path)
    config = settings("krum(byzantine=0)", per_round=0, model="linear")
    transport = Faulty(members, fault)
    run = coordinator(members, config, tmp_path / "run", transport=transport)
    run.run()
    assert all(seat.strikes == 0 for seat in run.roster.participants)
    members.model = run.bound.model.template
    assert_same(run, replay(run, members))
    nested = {"a": {"client": Stack(torch.tensor(5)), "x": Stack(torch.tensor(5))}}
    assert with_client(nested, 1)["a"] == {
        "client": Stack(torch.tensor(1)), "x": Stack(torch.tensor(5))
    }  # fmt: skip


def test_sums_of_a_test_must_be_those_of_as_many_samples() -> None:
    good = {"count": torch.tensor([2.0, 3.0]), "right": torch.tensor([1.0, 3.0])}
    check_sums(good, 5, True)
    for bad in (
        good | {"count": torch.tensor([-1.0, 6.0])},
        good | {"count": torch.tensor([2.0, 4.0])},
        good | {"right": torch.tensor([3.0, 3.0])},
        {"samples": torch.tensor(4.0)},
    ):
        with pytest.raises(Exception, match="test|samples"):
            check_sums(bad, 5, True)


def test_the_members_of_a_join_are_distrusted_too(tmp_path: Path) -> None:
    """A node that answers nonsense does not keep the others from starting."""
    members = Members(tmp_path, model=net())
    members.handles["node of nobody"] = lambda message: b"\x80\x04}."
    said: list[str] = []
    run = coordinator(members, settings(), tmp_path / "run", report=said.append, rules=QUICK)
    run.run()
    assert any("node of nobody did not join" in line for line in said)
