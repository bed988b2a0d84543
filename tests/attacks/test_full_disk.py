"""A disk that is full: nothing leaves a member uncounted, and it answers again later."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from kedge.federation.member.member import Member
from kedge.federation.member.releases import Release, Releases
from kedge.federation.messages import MemberRequest
from tests.attacks.liars import LIAR
from tests.flower.faulty import Faulty
from tests.flower.federations import Members, coordinator, datasets, settings


def release(number: int, kind: str = "update") -> Release:
    return Release(kind, f"{number:064x}", "ab" * 8, number)


def full_at(path: Path, spare: int) -> tuple[int, int]:
    """Let no file grow beyond this one and some bytes: the system cuts a line in the middle."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + spare, limits[1]))
    return limits


@pytest.mark.parametrize("spare", [0, 1, 40, 90, 110, 150])
def test_after_a_full_disk_the_count_of_releases_goes_on(spare: int, tmp_path: Path) -> None:
    path = tmp_path / "released.txt"
    releases = Releases(path)
    for number in range(3):
        releases.note(release(number))
    limits = full_at(path, spare)
    try:
        with pytest.raises(OSError, match="File too large|No space left"):
            releases.note(release(3), release(4, "test"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert releases.count("update") == 3  # nothing has left
    releases.note(release(5))
    for again in (releases, Releases(path)):
        assert (again.count("update"), again.count("test")) == (4, 0)
        assert not again.note(release(6), most=4)
        assert again.note(release(5), most=4)
    assert len(path.read_text().splitlines()) == 4


def test_a_line_that_was_cut_short_does_not_swallow_the_next(tmp_path: Path) -> None:
    """Whoever wrote it: another process, an older kedge, a crash."""
    path = tmp_path / "released.txt"
    releases = Releases(path)
    releases.note(release(0))
    with path.open("a") as file:
        file.write("update 00ab")
    releases.note(release(1))
    assert Releases(path).count("update") == 2
    whole = path.read_text().splitlines()
    path.write_text(f"{whole[0]}\nupdate 00ab{whole[1]}\n")  # as older releases of kedge left it
    assert Releases(path).count("update") == 2
    path.write_text(f"{whole[0]}\n{whole[0][:-5]}{whole[1]}\n")
    assert Releases(path).count("update") == 2


def test_a_member_on_a_full_disk_answers_with_a_code_and_goes_on_later(tmp_path: Path) -> None:
    """Nothing leaves uncounted; when there is space again, the same request is answered."""
    members = Members(tmp_path)
    transport = Faulty(members, lambda name, request, reply: reply)
    sent: list[bytes] = []
    send = transport.send

    def keep(node: str, message: Any, deadline: float) -> str:
        sent.extend([b"".join(message)] if LIAR in node else [])
        return send(node, message, deadline)

    transport.send = keep  # type: ignore[method-assign]
    config = settings(per_round=0, rounds=2, model="linear")
    coordinator(members, config, tmp_path / "run", transport=transport).run()
    last = [m for m in sent if MemberRequest.unpack(m).kind == "train"][-1]
    ledger = tmp_path / LIAR / "released.txt"
    kept = ledger.read_bytes()
    ledger.write_bytes(b"".join(kept.splitlines(keepends=True)[:2]))  # a join and an update
    member = members.start(LIAR)
    limits = full_at(ledger, 20)
    try:
        reply = member.handle(last)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(reply, bytes)
    assert b"FAILED" in reply
    assert len(reply) < 1000
    assert Releases(ledger).count("update") == 1
    assert b"FAILED" not in member.handle(last)[:1000]
    assert Releases(ledger).count("update") == 2


def test_the_log_of_a_member_has_no_line_of_the_server(tmp_path: Path) -> None:
    member = Member("north", datasets()[0], tmp_path / "north")
    forged = "bad\n2026-01-01 00:00:00  run is over\r\x1b[2J\ud800"
    for request in (
        MemberRequest("refuse", "ab" * 8, text=forged),
        MemberRequest(
            "agree", "ab" * 8, text=json.dumps({"terms": json.dumps({forged: 1}), "token": ""})
        ),
        MemberRequest("survey", "ab" * 8, part=forged, text=forged),
    ):
        assert isinstance(member.handle(request.pack()), bytes)
    member.folder.log(f"x\n{forged}")
    lines = (tmp_path / "north" / "log.txt").read_bytes().decode().split("\n")
    assert all(line.isprintable() for line in lines)
    assert not any(line.startswith("2026-01-01 00:00:00") for line in lines)
