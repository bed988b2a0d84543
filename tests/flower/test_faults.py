"""Lost, late, repeated and stale replies; members that fail, restart, forget and come back.

In every case the final weights are those of a simulation with the same cohorts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from kedge.core import tree
from kedge.errors import Paused
from kedge.federation.coordinator.coordinator import Coordinator
from kedge.federation.coordinator.rules import Rules
from kedge.federation.member.member import Member
from kedge.federation.messages import Failure, MemberRequest, reply_header
from tests.flower.faulty import Fault, Faulty, training
from tests.flower.federations import QUICK, Members, assert_same, coordinator, net, replay, settings


def run_with(tmp_path: Path, fault: Fault, **options: Any) -> tuple[Coordinator, Members]:
    members = Members(tmp_path, model=net())
    config = settings("scaffold", rounds=4, per_round=0)
    run = coordinator(
        members, config, tmp_path / "run", transport=Faulty(members, fault), **options
    )
    run.run()
    assert_same(run, replay(run, members))
    return run, members


def log_of(run: Coordinator) -> str:
    return (run.folder.path / "log.txt").read_text()


def cohorts(run: Coordinator) -> list[list[int]]:
    return [record["cohort"] for record in run.recorder.records]


@pytest.mark.parametrize("arrives", [None, Failure("unreachable"), Failure("timeout")])
def test_a_reply_that_is_lost_leaves_no_trace(arrives: Any, tmp_path: Path) -> None:
    """The member has trained; its next request names the round before, from which it goes on."""

    def fault(name: str, request: MemberRequest, reply: bytes) -> Any:
        return arrives if name == "south" and training(request, 1) else reply

    run, _ = run_with(tmp_path, fault)
    assert cohorts(run) == [[0, 1, 2, 3], [0, 1, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert "round 2, train: south did not reply" in log_of(run)


def test_replies_that_come_twice_or_for_nobody_count_once(tmp_path: Path) -> None:
    def fault(name: str, request: MemberRequest, reply: bytes) -> Any:
        return [reply, reply, Failure("timeout")]

    run, _ = run_with(tmp_path, fault)
    assert cohorts(run) == [[0, 1, 2, 3]] * 4
    assert all(seat.strikes == 0 for seat in run.roster.participants)
    assert "nobody waits for" in log_of(run)


def test_a_reply_of_another_round_is_dropped(tmp_path: Path) -> None:
    """A late one under the id of a new request, and a replay."""
    kept: list[bytes] = []

    def fault(name: str, request: MemberRequest, reply: bytes) -> Any:
        if name != "south" or not training(request):
            return reply
        kept.append(reply)
        return kept[0] if request.round in (1, 2) else reply

    run, _ = run_with(tmp_path, fault)
    assert cohorts(run)[1:3] == [[0, 1, 3]] * 2
    assert run.roster.participants[2].strikes == 2
    assert "round 0 of another request, not 1" in log_of(run)


def test_members_that_restart_before_every_request(tmp_path: Path) -> None:
    members = Members(tmp_path, model=net())
    for name in members.names:
        members.handles[f"node of {name}"] = lambda m, name=name: Member(
            name, members.data[name], members.folder / name, model=members.model
        ).handle(m)
    run = coordinator(members, settings("scaffold"), tmp_path / "run")
    run.run()
    assert_same(run, replay(run, members))


def test_a_process_that_dies_after_it_saved_its_state(tmp_path: Path) -> None:
    members = Members(tmp_path, model=net())
    calls = {"south": 0}

    def dying(message: bytes) -> bytes:
        reply = members.members["south"].handle(message)
        calls["south"] += training(MemberRequest.unpack(message))
        if calls["south"] == 2:
            members.start("south")
            members.handles["node of south"] = dying
            raise OSError("killed")
        return reply

    members.handles["node of south"] = dying
    transport = Faulty(members, lambda name, request, reply: reply)
    config = settings("scaffold", rounds=4, per_round=0)
    run = coordinator(members, config, tmp_path / "run", transport=transport)
    run.run()
    assert cohorts(run)[1] == [0, 1, 3]
    assert_same(run, replay(run, members))


def test_a_member_that_raises_says_so_by_a_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = Members(tmp_path, model=net())
    seen: list[bytes] = []

    def fault(name: str, request: MemberRequest, reply: bytes) -> Any:
        if name == "south" and training(request):
            seen.append(reply)
        return reply

    def train(request: MemberRequest) -> bytes:
        raise ValueError("patient Smith, /home/smith/data.csv")

    monkeypatch.setattr(members.members["south"], "_on_train", train)
    config = settings("scaffold", per_round=0)
    transport = Faulty(members, fault)
    run = coordinator(members, config, tmp_path / "run", transport=transport)
    run.run()
    assert cohorts(run) == [[0, 1, 3]] * 3
    assert {reply_header(reply)[1]["code"] for reply in seen} == {"FAILED"}
    assert not any(b"Smith" in reply or b"smith" in reply or b"Error" in reply for reply in seen)
    assert "patient Smith" in members.log("south")
    assert "Smith" not in log_of(run)
    assert run.roster.participants[2].strikes == 0
    assert_same(run, replay(run, members))


def test_a_lost_state_excludes_the_member(tmp_path: Path) -> None:
    members = Members(tmp_path, model=net())

    def fault(name: str, request: MemberRequest, reply: bytes) -> Any:
        if name == "south" and training(request, 1):
            for state in (tmp_path / "south").glob("runs/*/state-*"):
                state.unlink()
            members.start("south")
        return reply

    config = settings("scaffold", rounds=4, per_round=0)
    transport = Faulty(members, fault)
    run = coordinator(members, config, tmp_path / "run", transport=transport)
    run.run()
    assert cohorts(run) == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 3], [0, 1, 3]]
    assert "south is excluded: it has lost its state of the accepted round" in log_of(run)
    assert "the state after round 1 is lost" in members.log("south")
    assert_same(run, replay(run, members))


def test_a_folder_that_is_gone_loses_nothing_of_a_method_without_state(tmp_path: Path) -> None:
    """The member hears the terms again, and goes on."""
    members = Members(tmp_path, model=net())

    def fault(name: str, request: MemberRequest, reply: bytes) -> Any:
        if name == "south" and training(request, 0):
            shutil.rmtree(tmp_path / "south")
            members.start("south")
        return reply

    config = settings("fedavg", rounds=4, per_round=0)
    transport = Faulty(members, fault)
    run = coordinator(members, config, tmp_path / "run", transport=transport)
    run.run()
    assert cohorts(run) == [[0, 1, 2, 3], [0, 1, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert_same(run, replay(run, members))


def test_a_node_that_comes_and_goes_under_new_ids(tmp_path: Path) -> None:
    members = Members(tmp_path, model=net())
    handle = members.handles["node of south"]

    def fault(name: str, request: MemberRequest, reply: bytes) -> Any:
        if name == "west" and training(request):  # the last one: south flaps between rounds
            for node in [n for n in members.handles if "south" in n]:
                del members.handles[node]
            if request.round != 1:
                members.handles[f"node {request.round} of south"] = handle
        return reply

    config = settings("scaffold", rounds=5, per_round=0)
    transport = Faulty(members, fault)
    run = coordinator(members, config, tmp_path / "run", transport=transport)
    run.run()
    assert [2 in cohort for cohort in cohorts(run)] == [True, True, False, True, True]
    assert "south is back" in log_of(run)
    assert_same(run, replay(run, members))


def test_an_impostor_does_not_get_the_place_of_a_member_that_is_away(tmp_path: Path) -> None:
    members = Members(tmp_path, model=net())
    twin = Members(tmp_path / "twin", model=net())

    def fault(name: str, request: MemberRequest, reply: bytes) -> Any:
        if training(request, 0):
            members.handles.pop("node of south", None)
            members.handles["node of an impostor"] = twin.members["south"].handle
        return reply

    config = settings("scaffold", rounds=3, per_round=0)
    transport = Faulty(members, fault)
    run = coordinator(members, config, tmp_path / "run", transport=transport)
    run.run()
    assert cohorts(run)[1:] == [[0, 1, 3]] * 2
    assert "does not show that it is south" in log_of(run)
    assert not any(r.kind == "train" for node, r in transport.requests if "impostor" in node)


def test_too_few_replies_are_asked_for_again(tmp_path: Path) -> None:
    """In the same round; the sum is in the order of clients, whoever was late."""
    failed: set[tuple[str, int]] = set()

    def fault(name: str, request: MemberRequest, reply: bytes) -> Any:
        key = name, request.round
        if training(request) and name != "south" and key not in failed:
            failed.add(key)
            return Failure("timeout")
        return reply

    run, _ = run_with(tmp_path, fault)
    assert cohorts(run) == [[0, 1, 2, 3]] * 4
    attempts = {r.attempt for _, r in run.transport.requests if r.kind == "train"}  # type: ignore[attr-defined]
    assert attempts == {0, 1}


def test_if_all_fail_the_run_pauses_and_goes_on_later(tmp_path: Path) -> None:
    members = Members(tmp_path, model=net())
    dead = True

    def fault(name: str, request: MemberRequest, reply: bytes) -> Any:
        return None if dead and training(request, 2) else reply

    config = settings("scaffold", rounds=4)
    transport = Faulty(members, fault)
    run = coordinator(members, config, tmp_path / "run", transport=transport)
    with pytest.raises(Paused, match="paused in round 3: 0 of 3.*saved after round 2. Resume with"):
        run.run()
    assert transport.waits == QUICK.attempts - 1
    assert "paused in round 3" in log_of(run)
    dead = False
    again = coordinator(members, config, tmp_path / "run", transport=transport, resume=True)
    again.run()
    undisturbed = Members(tmp_path / "other", model=net())
    other = coordinator(undisturbed, config, tmp_path / "other" / "run")
    other.run()
    assert tree.equal(again.session.server, other.session.server)
    assert_same(again, replay(again, members))


def test_below_the_minimum_nothing_is_averaged(tmp_path: Path) -> None:
    members = Members(tmp_path, model=net())

    def fault(name: str, request: MemberRequest, reply: bytes) -> Any:
        return None if training(request) and name in ("south", "west") else reply

    strict = Rules(wait_s=0.0, join_s=0.01, minimum=0.75)
    config = settings("fedavg", per_round=0)
    transport = Faulty(members, fault)
    run = coordinator(members, config, tmp_path / "run", transport=transport, rules=strict)
    with pytest.raises(Paused, match=r"2 of 4 members replied, 3 are needed.*south did not reply"):
        run.run()
    assert run.session.round == 0
    assert tree.equal(run.session.server.weights, run.bound.initial)


def test_requests_after_their_deadline_and_while_busy(tmp_path: Path) -> None:
    late = Member("late", Members(tmp_path).data["east"], tmp_path / "x", clock=lambda: 100.0)
    request = MemberRequest("train", "ab" * 8, deadline=99.0)
    assert reply_header(late.handle(request.pack()))[1]["code"] == "LATE"
    with late._busy:
        assert reply_header(late.handle(request.pack()))[1]["code"] == "BUSY"
    for nonsense in (b"", b"x" * 100, request.pack()[:-1], b"\x80\x04K\x01."):
        assert reply_header(late.handle(nonsense))[1]["code"] == "BAD_REQUEST"


def test_a_replayed_request_does_not_destroy_the_state(tmp_path: Path) -> None:
    members = Members(tmp_path, model=net())
    transport = Faulty(members, lambda name, request, reply: reply)
    sent: list[bytes] = []
    send = transport.send

    def keep(node: str, message: list[bytes], deadline: float) -> str:
        if "south" in node:
            sent.append(b"".join(message))
        return send(node, message, deadline)

    transport.send = keep  # type: ignore[method-assign]
    config = settings("scaffold", rounds=3, per_round=0)
    run = coordinator(members, config, tmp_path / "run", transport=transport)
    run.run()
    states = tmp_path / "south" / "runs" / run.roster.run
    before = {p.name: p.read_bytes() for p in states.iterdir()}
    member = members.start("south")
    replies = [
        reply_header(member.handle(m))[1]["code"] for m in sent if training(MemberRequest.unpack(m))
    ]
    assert replies == ["STALE", "STALE", ""]  # the last one is computed again
    assert {p.name: p.read_bytes() for p in states.iterdir()} == before


def test_requests_of_other_terms_or_clients_are_refused(tmp_path: Path) -> None:
    members = Members(tmp_path, model=net())
    run = coordinator(members, settings("scaffold"), tmp_path / "run")
    run.run()
    member, down = members.members["south"], {"down": run.session.request("").broadcast}
    good = {"round": 3, "client": 2, "terms": run.roster.terms.hash, "accepted": 1, "value": down}
    for change in ({"terms": "0" * 16}, {"client": 1}):
        request = MemberRequest("train", run.roster.run, **good | change)
        assert reply_header(member.handle(request.pack()))[1]["code"] == "TERMS"
    request = MemberRequest("train", "cd" * 8, **good)
    assert reply_header(member.handle(request.pack()))[1]["code"] == "TERMS"


def test_a_round_that_fails_after_its_survey_changes_nothing(tmp_path: Path) -> None:
    members = Members(tmp_path, model=net())

    def fault(name: str, request: MemberRequest, reply: bytes) -> Any:
        return None if training(request, 1) else reply

    method = "fedbr(rows=4, samples=3, width=5, out=3, refresh=round)"
    transport = Faulty(members, fault)
    run = coordinator(members, settings(method), tmp_path / "run", transport=transport)
    with pytest.raises(Paused):
        run.run()
    saved = run.folder.load(0)
    assert saved is not None
    assert tree.equal(run.session.state(), saved)


def test_an_excluded_member_is_back_after_its_state_was_restored(tmp_path: Path) -> None:
    members, kept = Members(tmp_path, model=net()), dict[Path, bytes]()

    def fault(name: str, request: MemberRequest, reply: bytes) -> Any:
        if name == "south" and training(request, 1):
            for state in (tmp_path / "south").glob("runs/*/state-*"):
                kept[state] = state.read_bytes()
                state.unlink()
            members.start("south")
        return reply

    config = settings("scaffold", rounds=3, per_round=0)
    transport = Faulty(members, fault)
    run = coordinator(members, config, tmp_path / "run", transport=transport)
    run.run()
    assert run.roster.participants[2].excluded
    for state, content in kept.items():
        state.write_bytes(content)
    members.start("south")
    config = settings("scaffold", rounds=5, per_round=0)
    again = coordinator(members, config, tmp_path / "run", resume=True)
    again.run()
    assert [2 in cohort for cohort in cohorts(again)] == [True, True, False, True, True]
    assert_same(again, replay(again, members))


def test_a_node_that_cannot_be_reached(tmp_path: Path) -> None:
    members = Members(tmp_path, model=net())
    transport = Faulty(members, lambda name, request, reply: reply)
    send = transport.send

    def refuse(node: str, message: list[bytes], deadline: float) -> str:
        if "south" in node and training(MemberRequest.unpack(b"".join(message))):
            raise ConnectionRefusedError
        return send(node, message, deadline)

    transport.send = refuse  # type: ignore[method-assign]
    config = settings("scaffold", per_round=0)
    run = coordinator(members, config, tmp_path / "run", transport=transport)
    run.run()
    assert cohorts(run) == [[0, 1, 3]] * 3
    assert_same(run, replay(run, members))
