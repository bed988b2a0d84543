"""Answers are counted: an equal request gets the equal answer, any other one is bounded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kedge.core import tree
from kedge.errors import Paused
from kedge.federation.member.policy import OPEN, Policy
from kedge.federation.member.releases import KINDS, Release, Releases, fingerprint
from kedge.federation.messages import Failure, MemberRequest, reply_header
from kedge.session import wire
from kedge.session.session import NEVER
from tests.flower.faulty import Faulty, training
from tests.flower.federations import Members, coordinator, net, settings

FEDBR = "fedbr(rows=4, samples=3, width=5, out=3, refresh=round)"


def honest(name: str, request: MemberRequest, reply: bytes) -> Any:
    return reply


def run_with(tmp_path: Path, policy: Policy, method: str = "fedavg", **changes: Any) -> Any:
    """A run in which south has a policy; its transport has kept all requests."""
    members = Members(tmp_path, model=net("gn"), policies={"south": policy})
    transport = Faulty(members, changes.pop("fault", honest))
    config = settings(method, per_round=0, **changes)
    run = coordinator(members, config, tmp_path / "run", transport=transport)
    run.run()
    return run, members


def asked(run: Any, kind: str, round: int) -> MemberRequest:
    """A request that south has answered."""
    return next(
        r for node, r in run.transport.requests
        if "south" in node and (r.kind, r.round) == (kind, round)
    )  # fmt: skip


def nudged(request: MemberRequest, by: float, **changes: Any) -> bytes:
    """The request of a server that repeats a round with slightly different weights."""
    value = tree.map(lambda w: w + by if w.is_floating_point() else w, request.value)
    return MemberRequest(**vars(request) | {"value": value} | changes).pack()


def again(request: MemberRequest, **changes: Any) -> bytes:
    return MemberRequest(**vars(request) | changes).pack()


def code(reply: bytes) -> str:
    return reply_header(reply)[1]["code"]


def counts(members: Members, name: str = "south") -> dict[str, int]:
    releases = Releases(members.folder / name / "released.txt")
    return {kind: releases.count(kind) for kind in ("update", "survey", "test")}


def delta(reply: bytes) -> Any:
    return wire.unpack(reply, "reply")["update"].delta.params


def test_noise_cannot_be_averaged_away(tmp_path: Path) -> None:
    """A server that repeats a round with other weights gets as many answers as the policy says."""
    policy = replace(OPEN, clip=0.01, noise=2.0, max_updates=5)
    run, members = run_with(tmp_path, policy)
    assert counts(members)["update"] == 3
    last = asked(run, "train", 2)
    member = members.start("south")
    answers = [member.handle(nudged(last, 1e-7 * (1 + i), attempt=i)) for i in range(40)]
    assert [code(a) for a in answers] == [""] * 2 + ["POLICY"] * 38
    assert not tree.equal(delta(answers[0]), delta(answers[1]))  # noise of its own for each
    assert counts(members)["update"] == 5
    assert code(member.handle(again(last, attempt=9))) == ""  # what has left may leave again
    assert "max_updates=5, and as many have left already" in members.log("south")


def test_an_equal_request_gets_the_equal_answer(tmp_path: Path) -> None:
    """Whatever its attempt and deadline, from the same process or from a new one."""
    run, members = run_with(
        tmp_path, replace(OPEN, clip=0.01, noise=2.0, max_updates=3, max_tests=3)
    )
    before, last = counts(members), asked(run, "train", 2)
    replies = [members.members["south"].handle(again(last))]
    member = members.start("south")
    replies += [member.handle(again(last, attempt=7, deadline=1e12)), member.handle(again(last))]
    assert [code(reply) for reply in replies] == ["", "", ""]
    values = [wire.unpack(reply, "reply") for reply in replies]
    assert tree.equal(values[0], values[1])
    assert tree.equal(values[0], values[2])
    assert counts(members) == before == {"update": 3, "survey": 0, "test": 3}


def test_every_difference_counts(tmp_path: Path) -> None:
    run, members = run_with(tmp_path, OPEN)
    first, member = asked(run, "train", 1), members.start("south")
    known = counts(members)["update"]
    down = first.value["down"]
    [name] = list(down.weights.params)[:1]
    signed = down.weights.params | {name: down.weights.params[name] * 1.0}
    signed[name].view(-1)[0] = -0.0
    weights = down.weights._replace(params=signed)
    for number, change in enumerate(
        (
            {"round": 2},
            {"value": {"down": down._replace(weights=weights)}},
            {"accepted": NEVER},
        ),
        start=1,
    ):
        assert code(member.handle(again(first, **change))) == ""
        assert counts(members)["update"] == known + number


def test_tests_are_bounded_and_training_goes_on_without_them(tmp_path: Path) -> None:
    run, members = run_with(tmp_path, replace(OPEN, max_tests=2))
    assert counts(members) == {"update": 3, "survey": 0, "test": 2}
    assert [record["tested"] for record in run.recorder.records] == [4, 4, 3]
    last, member = asked(run, "evaluate", 3), members.start("south")
    for i in range(5):
        reply = member.handle(nudged(last, 1e-7 * (1 + i)))
        assert wire.unpack(reply, "reply") == {}
    assert counts(members)["test"] == 2
    assert "no test: max_tests=2, and as many have left already" in members.log("south")


def test_a_test_counts_once_however_it_is_asked_for(tmp_path: Path) -> None:
    """It rides along with a request to train, or is asked for alone; with and without a round."""
    run, members = run_with(tmp_path, OPEN)
    rode, member = asked(run, "train", 2), members.start("south")
    weights = rode.value["down"].weights
    before = counts(members)["test"]
    alone = again(rode, kind="evaluate", round=3, value={"output": weights})
    assert "sums" in wire.unpack(member.handle(alone), "reply")
    assert counts(members)["test"] == before
    more = again(rode, kind="evaluate", test="detailed", value={"output": weights})
    assert "sums" in wire.unpack(member.handle(more), "reply")
    assert counts(members)["test"] == before + 1


def test_surveys_are_bounded(tmp_path: Path) -> None:
    run, members = run_with(tmp_path, replace(OPEN, max_surveys=4), FEDBR)
    assert counts(members)["survey"] == 3
    last, member = asked(run, "survey", 2), members.start("south")
    codes = [code(member.handle(nudged(last, 1e-3 * (1 + i)))) for i in range(3)]
    assert codes == ["", "POLICY", "POLICY"]
    assert code(member.handle(again(last, attempt=3))) == ""
    run, members = run_with(tmp_path / "few", replace(OPEN, max_surveys=2), FEDBR)
    assert run.roster.participants[2].excluded
    assert "3 surveys are more than max_surveys=2" in members.log("south")


# -- an honest server does not burn the budget ----------------------------------------------------

EXACT = replace(OPEN, max_updates=3, max_surveys=3, max_tests=3)


@pytest.mark.parametrize("method", ["scaffold", FEDBR])
def test_a_lost_reply_is_asked_for_again(method: str, tmp_path: Path) -> None:
    """Every member loses its first reply of every round and kind."""
    lost: set[Any] = set()

    def fault(name: str, request: MemberRequest, reply: bytes) -> Any:
        key = name, request.kind, request.round
        if request.kind in ("train", "survey") and key not in lost:
            lost.add(key)
            return Failure("timeout")
        return reply

    run, members = run_with(tmp_path, EXACT, method, fault=fault)
    assert [r["cohort"] for r in run.recorder.records] == [[0, 1, 2, 3]] * 3
    assert [r["tested"] for r in run.recorder.records] == [4, 4, 4]
    assert counts(members) == {"update": 3, "survey": 3 * (method == FEDBR), "test": 3}


@pytest.mark.parametrize("method", ["scaffold", FEDBR])
def test_a_server_that_pauses_in_every_round_and_is_resumed(method: str, tmp_path: Path) -> None:
    """All train, all replies are lost in all attempts; the run is resumed, with new processes."""
    members = Members(tmp_path, model=net("gn"), policies=dict.fromkeys(("north", "south"), EXACT))
    config, dead = settings(method, per_round=0), {0, 1, 2}

    def fault(name: str, request: MemberRequest, reply: bytes) -> Any:
        return None if training(request) and request.round in dead else reply

    for resumed in range(4):
        for name in members.names:
            members.start(name)
        run = coordinator(
            members, config, tmp_path / "run", transport=Faulty(members, fault), resume=resumed > 0
        )
        if resumed < 3:
            with pytest.raises(Paused, match=f"paused in round {resumed + 1}"):
                run.run()
            dead.remove(resumed)
        else:
            run.run()
    assert [r["cohort"] for r in run.recorder.records] == [[0, 1, 2, 3]] * 3
    for name in ("north", "south"):
        assert counts(members, name) == {"update": 3, "survey": 3 * (method == FEDBR), "test": 3}


def test_a_complete_run_that_is_resumed_asks_for_nothing_new(tmp_path: Path) -> None:
    run, members = run_with(tmp_path, EXACT)
    before = (tmp_path / "south" / "released.txt").read_text()
    coordinator(members, run.config, tmp_path / "run", resume=True).run()
    assert (tmp_path / "south" / "released.txt").read_text() == before


def test_initial_weights_that_come_again_are_not_taken(tmp_path: Path) -> None:
    """Under the same run a server cannot make private leaves and first states anew."""
    run, members = run_with(tmp_path, replace(OPEN, max_updates=3), "fedper")
    agree = next(r for n, r in run.transport.requests if "south" in n and r.kind == "agree")
    last, member = asked(run, "train", 2), members.start("south")
    expected = wire.unpack(member.handle(again(last)), "reply")
    assert code(member.handle(nudged(agree, 0.1))) == ""
    assert tree.equal(wire.unpack(member.handle(again(last)), "reply"), expected)
    assert counts(members)["update"] == 3


# -- the file --------------------------------------------------------------------------------------


def release(number: int, kind: str = "update") -> Release:
    return Release(kind, f"{number:064x}", "ab" * 8, number)


def test_the_file_survives_a_process_that_was_killed_while_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "released.txt"
    Releases(path).note(release(1), release(1, "test"), release(2))
    whole = path.read_text()
    for cut in range(len(whole)):
        path.write_text(whole[:cut])
        found = Releases(path)
        assert sum(map(found.count, KINDS)) == whole[:cut].count("\n")
        found.note(release(3))
        again = Releases(path)
        assert sum(map(again.count, KINDS)) == whole[:cut].count("\n") + 1
        assert path.read_text().endswith("\n")


def test_bounds_count_each_kind_apart(tmp_path: Path) -> None:
    found = Releases(tmp_path / "released.txt")
    found.note(release(1), release(2, "test"), release(3, "test"))
    assert not found.note(release(4), most=1)
    assert found.note(release(1), most=1)
    assert not found.note(release(4, "test"), most=2)
    assert found.note(release(4, "survey"), most=1)
    assert [found.count(kind) for kind in KINDS] == [0, 1, 1, 2]
    assert found.note(release(4), most=2)
    assert found.note(release(5))
    assert found.count("update") == 3


def test_a_fingerprint_has_names_types_and_shapes() -> None:
    x = torch.arange(6.0)
    found = [{"a": x}, {"b": x}, {"a": x.double()}, {"a": x.view(2, 3)}, {"a": x, "b": x[:0]}]
    found += [{"a": x.view(torch.int32)}, {"a": x.bool()}, {"a": x.bfloat16()}, {}]
    assert len({fingerprint(value) for value in found}) == len(found)
    assert fingerprint({"a": x, "b": x}) == fingerprint({"b": x.clone(), "a": x})
    assert fingerprint({"a": x.view(2, 3)}) == fingerprint({"a": x.view(2, 3).t().clone().t()})
