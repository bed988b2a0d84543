"""Why a run cannot start reaches the operator, and nothing of it stays behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kedge.errors import Paused, TermsError
from kedge.federation.coordinator.coordinator import Coordinator
from kedge.federation.member import profile as profile
from kedge.federation.member.member import Member
from kedge.federation.member.policy import Policy
from kedge.federation.messages import Direct, Failure, MemberRequest, pack_refusal
from tests.flower.faulty import Faulty, training
from tests.flower.federations import QUICK, Members, coordinator, datasets, net, settings

Change = Callable[[Members], None]
CASES: dict[str, tuple[Change, str]] = {}


def case(sentence: str) -> Callable[[Change], Change]:
    def add(change: Change) -> Change:
        CASES[change.__name__] = change, sentence
        return change

    return add


@case("3 of 4 members can take part: no other node is connected after 0.01 s. Start")
def a_node_is_missing(members: Members) -> None:
    del members.handles["node of south"]


@case("node of south did not reply \\(its resident node does not run\\)")
def a_resident_node_is_down(members: Members) -> None:
    answer: Any = Failure("its resident node does not run")
    members.handles["node of south"] = lambda message: answer


@case("south has kedge 0.0.1, the server .*; install the same release")
def another_release(members: Members) -> None:
    handle = members.handles["node of south"]

    def old(message: bytes) -> bytes:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(profile, "__version__", "0.0.1")
            return handle(message)

    members.handles["node of south"] = old


@case("south has inputs of shape \\[1, 3, 3\\], east of .*; make them alike")
def another_shape(members: Members) -> None:
    data = members.data["south"]
    members.data["south"] = dataclasses.replace(data, x_train=data.x_train[:, :, :3, :3])
    members.start("south")


@case("node of south may not answer; its release policy says why, in its own log")
def a_policy(members: Members) -> None:
    members.policies["south"] = Policy(min_samples=1000)
    members.start("south")


@case("node of south failed; the reason is in its own log")
def a_failure(members: Members) -> None:
    def fail(message: bytes) -> bytes:
        return pack_refusal(MemberRequest.unpack(message), "FAILED")

    members.handles["node of south"] = fail


@case("node of south sent an answer that cannot be read: this is not a message")
def nonsense(members: Members) -> None:
    members.handles["node of south"] = lambda message: b"hello"


@case("there is a member east already; give this one another name")
def the_same_name(members: Members) -> None:
    twin = Member("east", members.data["south"], members.folder / "twin", model=members.model)
    members.handles["node of south"] = twin.handle


@pytest.mark.parametrize("name", CASES)
def test_who_could_not_join_and_why(name: str, tmp_path: Path) -> None:
    """In the message, in what is reported (for `flwr log`); the folder of the run is given back."""
    change, sentence = CASES[name]
    members, said = Members(tmp_path, model=net()), list[str]()
    change(members)
    run = coordinator(members, settings(), tmp_path / "run", report=said.append)
    with pytest.raises(TermsError, match=sentence) as error:
        run.run()
    assert str(error.value).startswith("3 of 4 members can take part: ")
    if name != "a_node_is_missing":
        assert any("south" in line or "already" in line for line in said)
    assert not (tmp_path / "run").exists()


def test_several_reasons_are_all_told(tmp_path: Path) -> None:
    members = Members(tmp_path, model=net())
    a_resident_node_is_down(members)
    members.handles["node of west"] = lambda message: b""
    text = "2 of 4 .*node of south did not reply.*; node node of west sent.*, or ask for fewer"
    with pytest.raises(TermsError, match=text):
        coordinator(members, settings(), tmp_path / "run").run()


def test_all_have_another_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = Members(tmp_path, model=net())
    monkeypatch.setattr(profile, "__version__", "0.0.1")
    text = "0 of 4 members can take part: east has kedge 0.0.1.*; west has kedge 0.0.1"
    with pytest.raises(TermsError, match=text):
        coordinator(members, settings(), tmp_path / "run").run()
    assert "the coordinator refused this member: 'west has kedge 0.0.1" in members.log("west")


def test_nobody_comes(tmp_path: Path) -> None:
    members = Members(tmp_path, model=net())
    members.handles.clear()
    with pytest.raises(TermsError, match=f"no node is connected after {QUICK.join_s:g} s"):
        coordinator(members, settings(), tmp_path / "run").run()
    with pytest.raises(TermsError, match="^no member has joined: no node is connected"):
        coordinator(members, settings(clients=0), tmp_path / "run").run()


def test_other_files_in_the_folder_of_a_run_stay(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("kept")
    with pytest.raises(TermsError):
        coordinator(Members(tmp_path, datasets()[:3]), settings(), tmp_path / "run").run()
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["mine.txt"]


def test_members_that_fail_to_agree_are_named_when_the_run_pauses(tmp_path: Path) -> None:
    members = Members(tmp_path, model=net())

    def fault(name: str, request: MemberRequest, reply: bytes) -> Any:
        return Failure("timeout") if request.kind == "agree" else reply

    run = coordinator(members, settings(), tmp_path / "run", transport=Faulty(members, fault))
    text = "east has not agreed to the terms.*; east did not agree to the terms: it did not reply"
    with pytest.raises(Paused, match=text):
        run.run()


def test_a_member_that_cannot_come_back_is_named_when_the_run_pauses(tmp_path: Path) -> None:
    """Its node is new, and has not its folder."""
    members = Members(tmp_path, model=net())
    twin = Members(tmp_path / "twin", model=net())

    def fault(name: str, request: MemberRequest, reply: bytes) -> Any:
        if training(request, 0):
            for node in [n for n in members.handles if "new" not in n]:
                members.handles[f"new {node}"] = twin.handles[node]
                members.handles.pop(node, None)
        return reply

    run = coordinator(members, settings(), tmp_path / "run", transport=Faulty(members, fault))
    with pytest.raises(Paused, match="is not connected.*this node does not show that it is east"):
        run.run()


def test_a_run_that_was_killed_before_its_first_round_is_resumed(tmp_path: Path) -> None:
    """Its folder stays, since nobody was there to give it back; the log says why."""

    class Broken(Direct):
        def members(self) -> list[str]:
            raise OSError("the SuperLink is gone")

    members = Members(tmp_path, model=net())
    with pytest.raises(OSError, match="is gone"):
        Coordinator(settings(), Broken({}), tmp_path / "run", rules=QUICK, model=net()).run()
    assert "failed: the SuperLink is gone" in (tmp_path / "run" / "log.txt").read_text()
    result = coordinator(members, settings(), tmp_path / "run", resume=True).run()
    assert np.isfinite(result.last.mean)
